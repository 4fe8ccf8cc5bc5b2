"""One JSON line a case, the same form for every `ffs bench` (docs/guides/bench.md). Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from ffs.cli.text import table


@dataclass(frozen=True, slots=True)
class Result:
    """One case. `goal` is for `ratio`, or for `ffs` itself where `goal_of` says so.

    `floor` is what ffs is measured against (with checksums where ffs has them); what else is worth
    saying stands in `more`: the plain floor, CPU time an operation, quartiles.
    """

    name: str
    ffs: float
    floor: float
    ratio: float
    unit: str
    runs: int
    goal: float | None
    goal_of: str = "ratio"
    noisy: bool = False
    at_most: bool = False  # the goal is a limit: for times
    more_ok: bool = True  # goals that stand in `more`
    more: dict[str, object] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        if self.goal is None or not self.more_ok:
            return self.more_ok
        figure = self.ratio if self.goal_of == "ratio" else self.ffs
        return figure <= self.goal if self.at_most else figure >= self.goal


def json_line(result: Result) -> str:
    fields: dict[str, object] = {
        "name": result.name,
        "ffs": round(result.ffs, 4),
        "floor": round(result.floor, 4),
        "ratio": round(result.ratio, 4),
        "unit": result.unit,
        "runs": result.runs,
        "goal": result.goal,
        "goal_of": result.goal_of,
        "ok": result.ok,
        "noisy": result.noisy,
    }
    if result.at_most:
        fields["at_most"] = True
    return json.dumps({**fields, **result.more}, separators=(",", ":"))


def people_table(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        goal = (
            "-"
            if result.goal is None
            else ("at most " if result.at_most else "")
            + f"{result.goal:g}"
            + ("" if result.goal_of == "ratio" else f" {result.unit}")
        )
        verdict = ("ok" if result.ok else "BELOW") + (" (noisy)" if result.noisy else "")
        rows.append(
            (
                result.name,
                f"{result.ffs:,.3g}" if result.ffs < 1000 else f"{result.ffs:,.0f}",
                f"{result.floor:,.3g}" if result.floor < 1000 else f"{result.floor:,.0f}",
                result.unit,
                f"{result.ratio:.3f}",
                goal,
                verdict,
                _cost(result),
            )
        )
    head = ("case", "ffs", "floor", "unit", "ratio", "goal", "", "CPU us/op client+server")
    return table(head, rows, right=(1, 2, 4, 5))


def _cost(result: Result) -> str:
    client, server = result.more.get("client_us"), result.more.get("server_us")
    return f"{client} + {server}" if client is not None else ""

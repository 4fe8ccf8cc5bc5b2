"""The bench's arithmetic: pairing, medians, goals, the form of its lines."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ffs.cli.benchmark import ckpt_cases, engine_cases, fuse, io_matrix, recovery, suite
from ffs.cli.benchmark.cost import cpu_ns, meter
from ffs.cli.benchmark.protocol import Round, Slice, alternate, is_noisy, summarise
from ffs.cli.benchmark.report import Result, json_line, people_table


def test_contestants_alternate_and_change_who_goes_first() -> None:
    order: list[str] = []

    def contestant(name: str, rate: float):  # type: ignore[no-untyped-def]
        def run(seconds: float) -> Slice:
            order.append(name)
            return Slice(rate * seconds, seconds)

        return run

    rounds = alternate(contestant("a", 10), [contestant("b", 20), contestant("c", 40)], slices=3)
    assert "".join(order) == "abc" + "abc" + "cba" + "abc"
    assert len(rounds) == 3
    assert summarise(rounds).ratio == 0.5
    assert summarise(rounds, only=[1]).ratio == 0.25
    assert summarise(rounds, share=1 / 3, only=[0]).ratio == pytest.approx(1.5)


def test_the_figure_is_the_median_of_paired_ratios() -> None:
    """A machine that slows down by the half mid-way leaves the ratio where it was; hiccups too."""
    rounds = [Round(Slice(90, 1), (Slice(100, 1),)) for _ in range(6)]
    rounds += [Round(Slice(45, 1), (Slice(50, 1),)) for _ in range(6)]
    rounds += [Round(Slice(1, 1), (Slice(100, 1),))]
    assert summarise(rounds).ratio == pytest.approx(0.9)


def test_a_floor_that_did_nothing_is_no_infinite_ratio() -> None:
    assert summarise([Round(Slice(1, 1), (Slice(0, 1),))]).ratio == 0


@pytest.mark.parametrize(("ratio", "noisy"), [(1.0, False), (1.049, False), (0.94, True), (1.06, True)])
def test_noise(ratio: float, noisy: bool) -> None:
    assert is_noisy(ratio) is noisy


def test_the_line_has_the_agreed_fields() -> None:
    result = Result("read", 1.9, 2.0, 0.95, "GB/s", 31, 0.85, more={"client_us": 1.0})
    fields = json.loads(json_line(result))
    assert {"name", "ffs", "floor", "ratio", "unit", "runs", "goal", "ok"} <= set(fields)
    assert fields["ok"] is True
    assert "\n" not in json_line(result)


@pytest.mark.parametrize(
    ("result", "ok"),
    [
        (Result("a", 1, 2, 0.5, "GB/s", 31, 0.6), False),
        (Result("a", 1, 2, 0.6, "GB/s", 31, 0.6), True),
        (Result("a", 5999, 2, 9.9, "op/s", 31, 6000, "ffs"), False),
        (Result("a", 6000, 2, 0.1, "op/s", 31, 6000, "ffs"), True),
        (Result("noise", 1, 1, 0.5, "GB/s", 31, None), True),
    ],
)
def test_goals(result: Result, ok: bool) -> None:
    assert result.ok is ok
    assert ("BELOW" in people_table([result])) is not ok


def test_cpu_time_is_counted() -> None:
    mine = meter([])
    before = mine.read()
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    mine.add(before, 10)
    assert mine.client_ns >= 40_000_000
    assert mine.as_fields()["server_us"] == 0
    assert cpu_ns(2**22 + 1) == 0


def test_the_guide_has_a_row_for_every_case() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/bench.md").read_text()
    rows = "\n".join(line.split("|")[1] for line in guide.splitlines() if line.startswith("| `"))
    engine = {case.name for case in (*engine_cases.CASES, engine_cases.BESIDE_COMPACTION)}
    for name in (
        *fuse.NAMES,
        *io_matrix.GOALS,
        *suite.META_NAMES,
        *recovery.NAMES,
        *ckpt_cases.NAMES,
        *engine,
        *engine_cases.START_UP,
    ):
        assert f"`{name}`" in rows, name
    for place in engine_cases.PLACES:
        assert f"`{engine_cases.CASES[0].full_name(place)}`" in guide

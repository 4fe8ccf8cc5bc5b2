"""Histories of operations on objects, and how they are written down.

An Operation is what one client did on one object: when it was called and when it returned (ns of one
monotonic clock), what was asked and what was answered. `returned` None: ambiguous - the client never
learned whether it took effect (a timeout, a killed client); it may take effect at any time after its
call, or never.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Operation:
    key: str  # the object (a chunk); operations of different keys don't concern each other
    client: str
    kind: str  # the model's
    argument: Any
    answer: Any  # the model's; None when ambiguous
    called_ns: int
    returned_ns: int | None

    def __str__(self) -> str:
        until = "?" if self.returned_ns is None else f"{self.returned_ns / 1e6:.3f}"
        return (
            f"[{self.called_ns / 1e6:.3f} .. {until}] {self.client}: {self.kind}({self.argument}) "
            f"= {self.answer}"
        )


def by_key(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    found: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        found[operation.key].append(operation)
    return dict(found)


def save(path: Path, operations: Iterable[Operation]) -> None:
    """One JSON object a line."""
    with path.open("w") as out:
        for operation in operations:
            out.write(json.dumps(asdict(operation)) + "\n")


def load(path: Path) -> list[Operation]:
    """What `save` wrote. Lists come back as tuples, as the models have them."""

    def tupled(value: Any) -> Any:
        return tuple(map(tupled, value)) if isinstance(value, list) else value

    with path.open() as lines:
        return [Operation(**{k: tupled(v) for k, v in json.loads(line).items()}) for line in lines]

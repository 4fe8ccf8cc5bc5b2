"""What one chunk is, sequentially: slots that are written together or apart, or no chunk.

`Slots(n)`: a chunk of n slots. Its state is a tuple of n values, None where nothing was written (zeros),
or () when there is no chunk. Kinds:

    write     argument ((slot, value), ...)             answer "ok"
    read      argument (slot, ...)                      answer the values, None for zeros
    create    argument value of all slots               answer "created", or "existed" (perhaps by
                                                        this very operation: the client tries again)
    remove    argument ()                               answer "ok"
    get       argument ()                               answer the values, or "absent"

Values that are written must be distinct over the whole history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lin_history import Operation

State = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Slots:
    count: int

    def initial(self) -> State:
        return ()

    def step(self, state: State, operation: Operation) -> State | None:
        sure = operation.returned_ns is not None
        values = list(state) if state else [None] * self.count
        match operation.kind:
            case "write":
                for slot, value in operation.argument:
                    values[slot] = value
                return tuple(values)
            case "read":
                right = tuple(values[slot] for slot in operation.argument) == operation.answer
                return state if right or not sure else None
            case "create":
                if state:
                    return state if operation.answer == "existed" or not sure else None
                return (operation.argument,) * self.count
            case "remove":
                return ()
            case "get":
                return state if not sure or (state or "absent") == operation.answer else None
        raise ValueError(operation.kind)

    def observed(self, operations: Sequence[Operation]) -> set[Operation]:
        read: set[Any] = set()
        weighty = False  # somebody saw that there was no chunk, or that there was one
        for op in operations:
            if op.returned_ns is None:
                continue
            if op.kind in ("read", "get") and isinstance(op.answer, tuple):
                read.update(op.answer)
            weighty |= op.kind in ("create", "get")
        found = set()
        for op in operations:
            if op.returned_ns is not None or op.kind in ("read", "get"):
                continue
            if op.kind == "write" and not weighty:
                if any(value in read for _, value in op.argument):
                    found.add(op)
            else:
                found.add(op)
        return found

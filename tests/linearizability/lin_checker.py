"""Is there an order of a history's operations, each between its call and its return, that a model
explains? The search of Wing and Gong with Lowe's memory of configurations, as porcupine has it.

One object at a time (linearizability is local). Ambiguous operations stay open to the end: they may
be ordered anywhere after their call, or behind everything, where they explain nothing and harm
nothing. Exponential in the worst case; histories whose written values are distinct are quick.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lin_history import Operation


class Model(Protocol):
    """A sequential object."""

    def initial(self) -> Hashable: ...

    def step(self, state: Any, operation: Operation) -> Hashable | None:
        """The state after the operation, or None if its answer isn't possible in `state`. An ambiguous
        operation (returned_ns None) has no answer: any will do."""
        ...

    def observed(self, operations: Sequence[Operation]) -> set[Operation]:
        """The ambiguous operations whose effect somebody may have seen. The others are left out: an
        effect that nobody saw is explained by its absence as well."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    linearizable: bool
    # When it isn't: the longest order that could be explained, and the operations none of which
    # could come next.
    explained: tuple[Operation, ...] = ()
    stuck: tuple[Operation, ...] = ()

    def __str__(self) -> str:
        if self.linearizable:
            return "linearizable"
        lines = ["not linearizable. The longest order that can be explained ends with:"]
        lines += [f"    {operation}" for operation in self.explained[-8:]]
        lines += ["and none of these can be next:"]
        lines += [f"    {operation}" for operation in self.stuck[:8]]
        return "\n".join(lines)


class _Entry:
    """A call or a return, in a doubly linked list ordered by time."""

    __slots__ = ("match", "next", "number", "previous")

    def __init__(self, number: int) -> None:
        self.number = number
        self.match: _Entry | None = None  # of a call: its return; of a return: None
        self.previous: _Entry | None = None
        self.next: _Entry | None = None


def check(operations: Sequence[Operation], model: Model) -> Verdict:
    """Whether the history of one object is linearizable. Blocks for as long as the search takes."""
    seen = model.observed(operations)
    history = [op for op in operations if op.returned_ns is not None or op in seen]
    return _search(history, model)


def _search(history: Sequence[Operation], model: Model) -> Verdict:
    head = _linked(history)
    state: Any = model.initial()
    done = 0  # bit set of operations in the order
    certain = sum(1 << n for n, op in enumerate(history) if op.returned_ns is not None)
    memory: set[tuple[int, Hashable]] = set()
    order: list[tuple[_Entry, Any]] = []  # (call, state before it)
    longest: list[int] = []
    stuck: list[int] = []
    entry = head.next
    while done & certain != certain:
        assert entry is not None
        if entry.match is not None:
            after = model.step(state, history[entry.number])
            if after is not None:
                mark = done | 1 << entry.number
                if (mark, after) not in memory:
                    memory.add((mark, after))
                    order.append((entry, state))
                    state, done = after, mark
                    _lift(entry)
                    entry = head.next
                    continue
            entry = entry.next
            continue
        # A return whose operation isn't in the order: whatever comes next must come before it.
        if len(order) >= len(longest):
            longest = [call.number for call, _ in order]
            stuck = _open_calls(head, entry)
        if not order:
            explained = tuple(history[n] for n in longest)
            return Verdict(False, explained, tuple(history[n] for n in stuck))
        call, state = order.pop()
        done &= ~(1 << call.number)
        _put_back(call)
        entry = call.next
    return Verdict(True)


def _linked(history: Sequence[Operation]) -> _Entry:
    """Calls before returns where times are equal: touching operations are concurrent."""
    end = max((op.returned_ns or op.called_ns for op in history), default=0) + 1
    events: list[tuple[int, int, int]] = []  # time, 0 call or 1 return, number
    for number, op in enumerate(history):
        returned = end if op.returned_ns is None else op.returned_ns
        assert returned >= op.called_ns, op
        events += [(op.called_ns, 0, number), (returned, 1, number)]
    events.sort()
    head = _Entry(-1)
    calls: dict[int, _Entry] = {}
    last = head
    for _, is_return, number in events:
        entry = _Entry(number)
        if is_return:
            calls[number].match = entry
        else:
            calls[number] = entry
        last.next, entry.previous = entry, last
        last = entry
    return head


def _lift(call: _Entry) -> None:
    for entry in (call, call.match):
        assert entry is not None
        assert entry.previous is not None
        entry.previous.next = entry.next
        if entry.next is not None:
            entry.next.previous = entry.previous


def _put_back(call: _Entry) -> None:
    for entry in (call.match, call):
        assert entry is not None
        assert entry.previous is not None
        entry.previous.next = entry
        if entry.next is not None:
            entry.next.previous = entry


def _open_calls(head: _Entry, until: _Entry) -> list[int]:
    found = []
    entry = head.next
    while entry is not None and entry is not until:
        if entry.match is not None:
            found.append(entry.number)
        entry = entry.next
    return found

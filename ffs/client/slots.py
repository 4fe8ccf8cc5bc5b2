"""Slots: what makes a request that was sent twice take effect once. docs/client.md, Retries.

A session has some thousand slots. A mutation takes one for its duration and sends its number and
the next sequence; a retry repeats both. No I/O; thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Slot:
    """One slot, held by one request at a time."""

    __slots__ = ("number", "sequence")

    def __init__(self, number: int) -> None:
        self.number = number
        self.sequence = 0


class SlotTable:
    """The slots of one session. The latest used is given first, so few are ever used."""

    def __init__(self, count: int) -> None:
        self._free = [Slot(number) for number in reversed(range(count))]
        self._given_back = threading.Condition()

    @contextmanager
    def hold(self) -> Iterator[Slot]:
        """A slot with a new sequence. Blocks while all are held."""
        slot = self.take()
        try:
            yield slot
        finally:
            self.give(slot)

    def take(self) -> Slot:
        """A slot whose `sequence` is new; give it back with `give`. Blocks while all are held."""
        while True:
            try:
                slot = self._free.pop()  # atomic under the interpreter's lock
                break
            except IndexError:
                with self._given_back:
                    if not self._free:
                        self._given_back.wait(0.1)
        slot.sequence += 1
        return slot

    def give(self, slot: Slot) -> None:
        """Take back a slot; also after a request of unknown outcome (its sequence is used up)."""
        self._free.append(slot)
        if len(self._free) == 1:
            with self._given_back:
                self._given_back.notify()

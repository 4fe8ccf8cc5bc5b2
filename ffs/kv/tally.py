"""One way to count under ffs.kv: a dataclass of numbers, added to by name, and read as a copy."""

from __future__ import annotations

import copy
import threading
from typing import Generic, TypeVar

C = TypeVar("C")


def copied(counts: C) -> C:
    """As it is now, counts within it too. Whoever adds to it meanwhile must be kept out."""
    return copy.deepcopy(counts)


class Tally(Generic[C]):
    """Counts that any number of threads add to; nothing blocks for long. `counts`: this object's from now
    on."""

    def __init__(self, counts: C) -> None:
        self._counts = counts
        self._lock = threading.Lock()

    def add(self, **more: int) -> None:
        """By the names of its fields, all at once for who reads. AttributeError: there is no such field."""
        counts = self._counts
        with self._lock:
            for name, number in more.items():
                setattr(counts, name, getattr(counts, name) + number)

    def now(self) -> C:
        """A copy."""
        with self._lock:
            return copied(self._counts)

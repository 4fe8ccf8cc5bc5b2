"""Pins that can't leak (K18): counted, and owned by a lease, which is what a request holds. Pure but
for one queue that garbage collection may write to.

A block is pinned while any lease has it. A lease gives all its pins back at once: by `release`, at the end of
its `with`, when its last reference goes, or at its deadline. So whatever becomes of a request - finished,
aborted in whatever state, forgotten - its pins go with it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from ffs.errors import BadHandle


class Lease:
    """A request's pins. Made by Pins.lease. Not thread-safe by itself: see Pins."""

    __slots__ = ("__weakref__", "_end", "_number", "_pins", "deadline")

    def __init__(self, pins: Pins, number: int, deadline: float | None) -> None:
        self._pins = pins
        self._number = number
        self.deadline = deadline
        # What garbage collection runs takes no lock and calls nothing of ours: it may strike anywhere.
        self._end = weakref.finalize(self, pins.lost.append, number)
        self._end.atexit = False

    @property
    def live(self) -> bool:
        return self._number in self._pins.leases

    def pin(self, keys: Iterable[bytes]) -> None:
        """Each key once, however often it is given. BadHandle: it was released, or its deadline passed."""
        self._pins.pin(self._number, keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Those that it has; others are passed over."""
        self._pins.unpin(self._number, keys)

    def release(self) -> None:
        """All of them. Repeatable."""
        self._end.detach()
        self._pins.release(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Watcher:
    """What Pins tells: a key's first pin, and the end of its last. Residency is one."""

    def pinned(self, key: bytes) -> None: ...

    def unpinned(self, key: bytes) -> None: ...


class Pins:
    """Counts by key. Its owner serialises all calls, those of leases too (the tier manager's lock)."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._numbers = itertools.count(1)
        self._counts: dict[bytes, int] = {}
        self._deadlines: dict[int, float] = {}
        self.leases: dict[int, set[bytes]] = {}
        self.lost: deque[int] = deque()
        """Numbers of leases that garbage collection took; `sweep` releases them."""

    def lease(self, deadline: float | None = None) -> Lease:
        """`deadline`: on the clock that `sweep` is given; None: none."""
        number = next(self._numbers)
        self.leases[number] = set()
        if deadline is not None:
            self._deadlines[number] = deadline
        return Lease(self, number, deadline)

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        """Keys that are pinned."""
        return len(self._counts)

    def pin(self, number: int, keys: Iterable[bytes]) -> None:
        owned = self.leases.get(number)
        if owned is None:
            raise BadHandle("this lease is over (released, or past its deadline): take a new one")
        for key in keys:
            if key in owned:
                continue
            owned.add(key)
            count = self._counts.get(key, 0)
            self._counts[key] = count + 1
            if count == 0:
                self._watcher.pinned(key)

    def unpin(self, number: int, keys: Iterable[bytes]) -> None:
        owned = self.leases.get(number)
        if owned is None:
            return
        for key in keys:
            if key in owned:
                owned.remove(key)
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        count = self._counts[key] - 1
        if count:
            self._counts[key] = count
            return
        del self._counts[key]
        self._watcher.unpinned(key)

    def release(self, number: int) -> None:
        owned = self.leases.pop(number, None)
        self._deadlines.pop(number, None)
        for key in owned or ():
            self._drop(key)

    def sweep(self, now: float) -> int:
        """Releases leases that were lost or are past their deadline; how many there were."""
        ended = 0
        while self.lost:
            number = self.lost.popleft()
            ended += number in self.leases
            self.release(number)
        late = [number for number, deadline in self._deadlines.items() if deadline <= now]
        for number in late:
            self.release(number)
        return ended + len(late)

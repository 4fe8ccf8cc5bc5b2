"""The limit on what a Manager's threads persist: it sees the steps, and lets bytes through at the rate that
pace.py finds (docs/guides/checkpoint.md, Bandwidth).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Literal

from ffs.checkpoint.pace import Bucket, Pace, Step, floor_of
from ffs.errors import InvalidArgument

Bandwidth = Literal["adaptive"] | float | None
"""Bytes a second of one rank; "adaptive": as many as don't slow the steps down; None: no limit."""

_LONGEST_WAIT_S: Final = 0.05  # then the limit may be another one


class Limiter:
    """Of one Manager. Any thread. A fixed limit holds always; an adaptive one only while steps follow each
    other and nobody waits for a save."""

    def __init__(self, bandwidth: Bandwidth = None, clock: Callable[[], float] = time.monotonic) -> None:
        """InvalidArgument."""
        self._fixed: float | None = None
        self._pace = Pace() if bandwidth == "adaptive" else None
        if isinstance(bandwidth, (int, float)) and not isinstance(bandwidth, bool) and bandwidth > 0:
            self._fixed = float(bandwidth)
        elif self._pace is None and bandwidth is not None:
            raise InvalidArgument(
                f'bandwidth is {bandwidth!r}: give bytes a second above 0, "adaptive", or None for no limit'
            )
        self._clock = clock
        self._mutex = threading.Lock()
        self._waiting = 0  # threads that wait for a save
        self._stepped_s: float | None = None
        self._disturbed = False
        self._sizes: list[int] = []  # bytes of what is on its way
        self._busy_since_s: float | None = None
        self._busy_s = 0.0  # since the last step, and until busy_since_s
        self._gates: list[Gate] = []
        self._saved_s: float | None = None
        self._between_s: float | None = None
        self._lowest: float | None = None

    # what happens

    def stepped(self) -> None:
        """The training has made an update."""
        if self._pace is None:
            return
        with self._mutex:
            now = self._clock()
            busy = self._busy_s + (now - self._busy_since_s if self._busy_since_s is not None else 0.0)
            if self._stepped_s is not None and not self._disturbed:
                moved = max((gate.moved for gate in self._gates), default=0)
                step = Step(now - self._stepped_s, busy, moved)
                self._pace.stepped(step, floor_of(sum(self._sizes), self._between_s))
                self._note(self._pace.limit)
            self._stepped_s, self._disturbed = now, False
            self._busy_s = 0.0
            for gate in self._gates:
                gate.moved = 0
            if self._busy_since_s is not None:
                self._busy_since_s = now

    def disturb(self) -> None:
        """The step that goes on takes longer for other reasons: a save copies its state, or keeps it
        waiting."""
        self._disturbed = True

    def saves(self) -> None:
        """A save begins: as much time as since the one before may pass until the next."""
        with self._mutex:
            now = self._clock()
            if self._saved_s is not None:
                self._between_s = now - self._saved_s
            self._saved_s = now

    def begin(self, nbytes: int) -> None:
        """So many are to be persisted from now on; until `end` with the same."""
        with self._mutex:
            self._sizes.append(nbytes)
            if len(self._sizes) == 1:
                self._busy_since_s = self._clock()
                self._lowest = None
                if self._pace is not None:
                    self._note(self._pace.limit)

    def end(self, nbytes: int) -> None:
        with self._mutex:
            self._sizes.remove(nbytes)
            if not self._sizes and self._busy_since_s is not None:
                self._busy_s += self._clock() - self._busy_since_s
                self._busy_since_s = None

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """Somebody waits for a save: what is adaptive doesn't limit it meanwhile."""
        with self._mutex:
            self._waiting += 1
        try:
            yield
        finally:
            with self._mutex:
                self._waiting -= 1

    # what follows

    def limit(self) -> float | None:
        """Bytes a second, now."""
        with self._mutex:
            return self._limit(self._clock())

    def lowest(self) -> float | None:
        """The least that what is on its way was limited to; None: it wasn't."""
        with self._mutex:
            return self._fixed if self._fixed is not None else self._lowest

    def _limit(self, now: float) -> float | None:
        if self._fixed is not None:
            return self._fixed
        if self._pace is None or self._stepped_s is None or self._waiting:
            return None
        if now - self._stepped_s > self._pace.idle_after_s():
            return None
        return self._pace.limit

    def _note(self, limit: float | None) -> None:
        if limit is not None and self._sizes:
            self._lowest = limit if self._lowest is None else min(self._lowest, limit)

    def gate(self) -> Gate:
        """For one thread."""
        with self._mutex:
            self._gates.append(Gate(self))
            return self._gates[-1]


class Gate:
    """One thread's way through the limit: each stage of a save has its own, all with the same rate. `moved`:
    bytes since the last step."""

    def __init__(self, limiter: Limiter) -> None:
        self.moved = 0
        self._limiter = limiter
        self._bucket = Bucket()

    def wait_s(self, nbytes: int) -> float:
        """0.0: they may go, and are counted. Else seconds until to ask again."""
        limiter = self._limiter
        with limiter._mutex:
            now = limiter._clock()
            wait = self._bucket.wait_s(nbytes, limiter._limit(now), now)
            if not wait:
                self.moved += nbytes
        return min(wait, _LONGEST_WAIT_S)

    def wait(self, nbytes: int) -> None:
        """Until they may go. Blocking."""
        while pause := self.wait_s(nbytes):
            time.sleep(pause)

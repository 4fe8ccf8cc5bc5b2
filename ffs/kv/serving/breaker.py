"""A circuit breaker: whether it is worth asking a cluster that didn't answer (docs/kv.md, When ffs is down).

Closed: everything is asked. After some failures in a row, open: nothing is, for a pause that doubles with
each failed try. Then one caller at a time tries; the first that gets an answer closes it.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable

from ffs.errors import InvalidArgument


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    TRYING = "trying"


class Breaker:
    """Any thread; nothing blocks. `failures`: in a row until it opens. Pauses in seconds."""

    def __init__(
        self,
        failures: int = 3,
        pause_s: float = 0.5,
        longest_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if failures < 1 or not 0 < pause_s <= longest_s:
            raise InvalidArgument(
                f"a breaker of {failures} failures, {pause_s} to {longest_s} s: give at least one failure,"
                " and pauses above 0, the longest last"
            )
        self._limit = failures
        self._first_s = pause_s
        self._longest_s = longest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = pause_s
        self._until = 0.0
        self._trying = 0  # by this thread; 0: nobody
        self._open = False
        self.opened = 0
        """How often it has opened."""

    @property
    def state(self) -> State:
        with self._lock:
            if not self._open:
                return State.CLOSED
            return State.TRYING if self._trying else State.OPEN

    def allow(self) -> bool:
        """Whether to ask now. Who gets True tells what became of it, in the same thread: `succeeded` or
        `failed`."""
        with self._lock:
            if not self._open:
                return True
            if self._trying or self._clock() < self._until:
                return False
            self._trying = threading.get_ident()
            return True

    def succeeded(self) -> None:
        """There was an answer."""
        with self._lock:
            self._failures = 0
            self._open, self._trying = False, 0
            self._pause_s = self._first_s

    def failed(self) -> None:
        """There was none."""
        with self._lock:
            self._failures += 1
            if self._open:
                if self._trying != threading.get_ident():
                    return  # asked before it opened
                self._trying = 0
                self._pause_s = min(2 * self._pause_s, self._longest_s)
            elif self._failures < self._limit:
                return
            else:
                self._open = True
                self.opened += 1
            self._until = self._clock() + self._pause_s

"""Manager time: milliseconds that never go back, over restarts and changes of the primary.

The store keeps a limit above every time that was handed out. The primary counts on from the limit
that it found, by its monotonic clock, and raises the limit ahead of itself with each renewal of its
lease; it never hands out a time above it. So a change of primary makes time jump forward by a few
seconds at most, and a step of the wall clock does nothing. It begins at the wall clock's time when
the cluster is made, for people; nothing depends on that. docs/control_plane.md, Manager time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from metadata.cluster.schema import MANAGER_TIME, pack_u64, unpack_u64
from metadata.kv.contract import Transaction

AHEAD_MS: Final = 6000


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def monotonic_s() -> float:
    """The clock of leases and silence: never steps, and counts on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _monotonic_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class ManagerClock:
    """One event loop. `now_ms` may be called in any process; in one that isn't the primary it is what
    the store's limit says, which is ahead of the primary's by at most AHEAD_MS."""

    def __init__(
        self, monotonic_ms: Callable[[], int] = _monotonic_ms, wall_ms: Callable[[], int] = _wall_ms
    ) -> None:
        self._monotonic_ms = monotonic_ms
        self._wall_ms = wall_ms
        self._leading = False
        self._base_ms = 0  # manager time at _base_at_ms
        self._base_at_ms = 0
        self._limit_ms = 0  # as last known to be in the store
        self._asked_ms = 0  # the limit that a transaction is about to store
        self._last_ms = 0

    def now_ms(self) -> int:
        now = self._limit_ms
        if self._leading:
            now = min(self._base_ms + self._monotonic_ms() - self._base_at_ms, self._limit_ms)
        self._last_ms = max(self._last_ms, now)
        return self._last_ms

    async def take(self, txn: Transaction) -> None:
        """In the transaction that acquires the lease."""
        value = await txn.get(MANAGER_TIME)
        self._base_ms = self._wall_ms() if value is None else max(unpack_u64(value), self._last_ms)
        self._base_at_ms = self._monotonic_ms()
        self._asked_ms = self._base_ms + AHEAD_MS
        txn.set(MANAGER_TIME, pack_u64(self._asked_ms))

    def stored(self) -> None:
        """After a transaction of `take` or `extend` committed."""
        self._limit_ms = max(self._limit_ms, self._asked_ms)
        self._leading = True

    async def extend(self, txn: Transaction) -> None:
        """In each transaction that renews the lease. Time that nobody extended - this process was stopped -
        didn't pass: else sessions would end whose clients had nobody to renew them with."""
        now_ms = self._monotonic_ms()
        if self._base_ms + now_ms - self._base_at_ms > self._limit_ms:
            self._base_ms, self._base_at_ms = self._limit_ms, now_ms
        self._asked_ms = self._base_ms + now_ms - self._base_at_ms + AHEAD_MS
        txn.set(MANAGER_TIME, pack_u64(self._asked_ms))

    def follow(self) -> None:
        """The lease is lost."""
        self._leading = False

    def heard(self, stored: bytes | None) -> None:
        """In processes that aren't the primary: the limit as the store says it now."""
        if not self._leading:
            self._limit_ms = max(self._limit_ms, unpack_u64(stored))

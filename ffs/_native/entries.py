"""A ring of files' part that is in C: requests become entries, and completions the caller's userdata, in one
call each, since a call of numpy costs half a microsecond and more, and a batch would need three dozen.
docs/ring.md, Building.
"""

from __future__ import annotations

import math
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ffs._native.file_entries import FileEntries
from ffs._native.lib import check, ffi, lib
from ffs._native.ring import SQE_DTYPE, STEP_MS, WAIT_TIMEOUT, NativeClient, Ring
from ffs.errors import InvalidArgument

Ints = NDArray[np.int64]

NO_END: Final = (1 << 63) - 1


class Flights:
    """The memory of ffs_py_table: what a ring of `count` requests at most remembers of each by its number,
    and of owners, of which there are twice as many. One thread at a time."""

    def __init__(self, count: int, *, writes: bool) -> None:
        self.count = count
        self.owners = 2 * count
        self.free = np.arange(count - 1, -1, -1, dtype=np.int64)  # a stack, used from its end
        self.live = np.zeros(count, dtype=np.uint8)
        self.userdata = np.zeros(count, dtype=np.uint64)
        self.end = np.zeros(count, dtype=np.int64)
        self.owner = np.zeros(count, dtype=np.uint32)
        self.flying = np.zeros(self.owners, dtype=np.uint32)
        self.reached = np.full(self.owners, -1, dtype=np.int64)
        self.failed = np.zeros(self.owners, dtype=np.uint8)
        self._listed = np.zeros(self.owners, dtype=np.uint8)
        self._news = np.zeros(self.owners, dtype=np.uint32)
        raw = self.raw = ffi.new("ffs_py_table*")
        self._memory = [raw]  # cdata that keep the arrays where they are
        raw.free = self._of("int64_t[]", self.free)
        raw.live = self._of("uint8_t[]", self.live)
        raw.userdata = self._of("uint64_t[]", self.userdata)
        raw.end = self._of("int64_t[]", self.end)
        raw.owner = self._of("uint32_t[]", self.owner)
        raw.flying = self._of("uint32_t[]", self.flying)
        raw.reached = self._of("int64_t[]", self.reached)
        raw.failed = self._of("uint8_t[]", self.failed)
        raw.listed = self._of("uint8_t[]", self._listed)
        raw.news = self._of("uint32_t[]", self._news)
        raw.free_count = count
        raw.writes = writes

    def _of(self, kind: str, array: NDArray[Any]) -> Any:
        memory = ffi.from_buffer(kind, array, require_writable=True)
        self._memory.append(memory)
        return memory

    @property
    def news(self) -> list[int]:
        """Owners none of whose requests is in flight any more, or whose writes are over: `reached` and
        `failed` say what became of those. They stand there until `told`."""
        return ffi.unpack(self.raw.news, self.raw.news_count) if self.raw.news_count else []

    def told(self) -> None:
        """The owners in `news` have been seen to."""
        lib.ffs_py_told(self.raw)


class Requests:
    """Where requests are in a file and in an Iov, and how long: arrays of one length, int64, contiguous."""

    __slots__ = ("at", "count", "size", "to")

    def __init__(self, at: Ints, to: Ints, size: Ints) -> None:
        self.at: Any = ffi.from_buffer("int64_t[]", at)
        self.to: Any = ffi.from_buffer("int64_t[]", to)
        self.size: Any = ffi.from_buffer("int64_t[]", size)
        self.count = len(at)

    def first_bad(self, room: int) -> int | None:
        """The first that is empty, before the file's begin or outside of an Iov of `room` bytes."""
        found: int = lib.ffs_py_bad(self.at, self.to, self.size, self.count, room)
        return None if found < 0 else found


class FileRing(Ring):
    """A ring whose requests stand in `flights`: their numbers are their userdata in native, and are taken
    with them in one step, and freed with their completions, as a signal may raise between any two."""

    def __init__(self, client: NativeClient, flights: Flights, inflight: int = 0) -> None:
        super().__init__(client, flights.count, inflight)
        self.flights = flights
        self.entries_raw = ffi.new("ffs_sqe[]", flights.count)
        self._taken = ffi.new("int64_t*")
        self._userdata = np.zeros(flights.count, dtype=np.uint64)
        self._result = np.zeros(flights.count, dtype=np.int64)
        self._columns = (
            ffi.from_buffer("uint64_t[]", self._userdata, require_writable=True),
            ffi.from_buffer("int64_t[]", self._result, require_writable=True),
        )
        self._over = ffi.new("ffs_py_over*")
        self._over.userdata, self._over.result = self._columns

    def prepare_noted(self, sqes: NDArray[Any]) -> int:
        """As `prepare`, of requests whose userdata are the numbers that are taken next, and of which
        `flights` knows the rest."""
        if sqes.dtype != SQE_DTYPE:
            raise InvalidArgument("requests have the dtype ffs._native.ring.SQE_DTYPE")
        if len(sqes) == 0:
            return 0
        entries = ffi.from_buffer("ffs_sqe[]", sqes)
        return check(lib.ffs_py_take(self.raw, entries, len(sqes), self.flights.raw))

    def prepare_inside(
        self, file: FileEntries, known: int, iov: int, room: int, requests: Requests, user: Ints, owner: int
    ) -> int | None:
        """Requests of one file that each lie in one chunk; how many were taken. None: they don't, or one
        can't be, or has nothing to read; nothing was taken.

        known: where reads are cut; iov: its handle, of `room` bytes; user: the caller's userdata."""
        plain = lib.ffs_py_prepare_inside(
            self.raw,
            file.raw,
            iov,
            room,
            known,
            requests.at,
            requests.to,
            requests.size,
            ffi.from_buffer("int64_t[]", user),
            requests.count,
            self.entries_raw,
            self.flights.raw,
            owner,
            self._taken,
        )
        return check(self._taken[0]) if plain else None

    def prepare_one_inside(
        self,
        file: FileEntries,
        known: int,
        iov: int,
        room: int,
        at: int,
        to: int,
        size: int,
        user: int,
        owner: int,
    ) -> int | None:
        """As prepare_inside, of one request."""
        plain = lib.ffs_py_prepare_one(
            self.raw,
            file.raw,
            iov,
            room,
            known,
            at,
            to,
            size,
            user,
            self.entries_raw,
            self.flights.raw,
            owner,
            self._taken,
        )
        return check(self._taken[0]) if plain else None

    def settle(self, least: int, timeout: float | None = None) -> int:
        """Submits, then waits until `least` completions are here that the caller wasn't given, at most
        `timeout` seconds (None: no limit); how many are. They stay, and add up, until `kept` says that the
        caller has them: a signal may raise at the end of any call. Fewer than `least` if that many aren't in
        flight, or if `needs` says so. Blocking, without the GIL; signals are handled."""
        kept = self._kept
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left_ms = STEP_MS if until is None else math.ceil((until - time.monotonic()) * 1000)
            step_ms = max(0, min(left_ms, STEP_MS))
            check(
                lib.ffs_py_settle(
                    self.raw,
                    self._cqes_raw,
                    self.entries,
                    least,
                    step_ms,
                    kept,
                    self.flights.raw,
                    self._over,
                )
            )
            if kept.events == WAIT_TIMEOUT and (until is None or left_ms > STEP_MS):
                continue
            count: int = kept.have
            return count

    @property
    def needs(self) -> int:
        """Of WAIT_NEEDS_ROUTING and WAIT_NEEDS_CAPABILITY what isn't `seen_to`."""
        events: int = self._kept.events
        return events & ~WAIT_TIMEOUT

    def seen_to(self) -> None:
        self._kept.events = 0

    def columns(self, count: int) -> tuple[NDArray[Any], Ints]:
        """(userdata, result) of the first `count` completions that are here, as arrays of their own."""
        return self._userdata[:count].copy(), self._result[:count].copy()

    def rows(self, count: int) -> list[tuple[int, int]]:
        """The same, one by one."""
        if count == 1:
            return [(self._over.userdata[0], self._over.result[0])]
        return list(zip(self._userdata[:count].tolist(), self._result[:count].tolist(), strict=True))

    def completions(self, count: int) -> NDArray[Any]:
        """The same in full, CQE_DTYPE, until the next wait."""
        return self._cqes[:count]

    @property
    def kept(self) -> Any:
        """`kept.have = 0`, without a call after it, says that the caller has them."""
        return self._kept

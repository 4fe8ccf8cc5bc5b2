"""The memory that a save is copied into: allocated once, given out in turn, waited for when it is used up
(docs/guides/checkpoint.md, Memory).

A region is taken for each file and given back when the file is written. Who wants one that isn't free waits:
a save never overwrites what an earlier one still writes (FAULTS C4), and nothing is allocated after the
beginning (C7).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ffs import Iov
from ffs.checkpoint.streams import pin, unpin
from ffs.errors import InvalidArgument

log = logging.getLogger("ffs.checkpoint")

PAGE: Final = 4096


@dataclass(slots=True, eq=False)
class Region:
    """Bytes [begin, begin + nbytes) of the pool's Iov, whole pages. Each of `holders` releases it once."""

    pool: Pool
    begin: int
    nbytes: int
    free: bool = False
    holders: int = 1

    def memory(self) -> memoryview:
        return self.pool.iov[self.begin : self.begin + self.nbytes].view

    def release(self) -> None:
        self.pool._release(self)


class Pool:
    """`host_bytes` of shared memory, touched at once. Any thread."""

    def __init__(self, host_bytes: int) -> None:
        """Raises InvalidArgument; FfsError with ENOMEM. Blocking: the kernel clears all pages."""
        if host_bytes < 2 * PAGE:
            raise InvalidArgument(f"host_bytes is {host_bytes}: give the bytes of memory that saves may use")
        self.nbytes = host_bytes // PAGE * PAGE
        self.iov = Iov(self.nbytes)
        self.iov.numpy()[::PAGE] = 0
        self._changed = threading.Condition()
        self._used: list[Region] = []  # in the order of the ring, oldest first
        self._closed = False
        self._pinned = False
        self._tried = False

    def pin(self) -> None:
        """Registers it with CUDA, once, so that copies from a GPU run by themselves. Where that is refused it
        stays as it is, and they are slower. Blocking."""
        if self._tried:
            return
        self._tried = True
        self._pinned = pin(self._address, self.nbytes)
        if not self._pinned:
            log.warning(
                "CUDA can't register %d bytes of memory for saves: copies go through its own", self.nbytes
            )

    @property
    def _address(self) -> int:
        return int(self.iov.numpy().__array_interface__["data"][0])

    def take(self, nbytes: int, failed: Callable[[], BaseException | None] = lambda: None) -> Region:
        """A region, in turn; waits for earlier ones to be given back. `failed`: asked while waiting; what it
        returns is raised. InvalidArgument: larger than the pool."""
        size = self._size(nbytes)
        with self._changed:
            while True:
                region = self._try(size)
                if region is not None:
                    return region
                error = failed()
                if error is not None:
                    raise error
                self._changed.wait(0.2)

    def try_take(self, nbytes: int) -> Region | None:
        """As `take`; None: it would have to wait."""
        size = self._size(nbytes)
        with self._changed:
            return self._try(size)

    def _size(self, nbytes: int) -> int:
        size = max(PAGE, -(-nbytes // PAGE) * PAGE)
        if size > self.nbytes:
            raise InvalidArgument(f"{size} bytes at once need host_bytes of as much, not {self.nbytes}")
        return size

    def _try(self, size: int) -> Region | None:
        if self._closed:
            raise InvalidArgument("the memory for saves is closed")
        begin = self._place(size)
        if begin is None:
            return None
        region = Region(self, begin, size)
        self._used.append(region)
        return region

    def wake(self) -> None:
        """Whoever waits asks `failed` again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def used(self) -> int:
        """Bytes that are given out."""
        with self._changed:
            return sum(region.nbytes for region in self._used if not region.free)

    def close(self) -> None:
        """The memory goes when the last view of it goes. Nothing may be given out."""
        with self._changed:
            self._closed = True
            if self._pinned:
                self._pinned = False
                unpin(self._address)
            self._changed.notify_all()

    def _place(self, size: int) -> int | None:
        """Where a region fits behind the newest one, or at the start before the oldest one."""
        if not self._used:
            return 0
        oldest, newest = self._used[0].begin, self._used[-1].begin + self._used[-1].nbytes
        if self._used[-1].begin >= oldest:  # not wrapped
            if newest + size <= self.nbytes:
                return newest
            return 0 if size <= oldest else None
        return newest if newest + size <= oldest else None

    def _release(self, region: Region) -> None:
        with self._changed:
            assert region.holders > 0, region
            region.holders -= 1
            if region.holders:
                return
            region.free = True
            while self._used and self._used[0].free:
                self._used.pop(0)
            self._changed.notify_all()


def host_bytes_for(staged_bytes: int) -> int:
    """Two saves of such a state, but at most a quarter of the memory that is free."""
    with open("/proc/meminfo", encoding="ascii") as file:
        rows = dict(line.split(":", 1) for line in file)
    free = int(rows["MemAvailable"].split()[0]) * 1024
    return max(1 << 20, min(2 * staged_bytes + (1 << 20), max(64 << 20, free // 4)))

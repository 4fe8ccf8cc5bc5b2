"""The rings of an open space: one for each call that runs at the same time, kept for the next
(docs/guides/kv.md, Memory)."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ffs.errors import FfsError
from ffs.kv.batch import KvRing

if TYPE_CHECKING:
    from ffs._native.ring import NativeClient, RingStats


class Rings:
    """Those of one generation of the handle: they belong to one session of one process. Any thread."""

    def __init__(self, native: NativeClient, generation: int) -> None:
        self.generation = generation
        self._native = native
        self._idle: deque[KvRing] = deque()
        self._all: list[KvRing] = []
        self._closed = False

    @contextlib.contextmanager
    def take(self) -> Iterator[KvRing]:
        """A ring of one's own."""
        kv_ring = self.borrow()
        try:
            yield kv_ring
        except BaseException:
            self.drop(kv_ring)
            raise
        self.give(kv_ring)

    def borrow(self) -> KvRing:
        """For `give`, or `drop` if anything went wrong."""
        try:
            return self._idle.pop()
        except IndexError:
            kv_ring = KvRing.make(self._native)
            self._all.append(kv_ring)
            return kv_ring

    def give(self, kv_ring: KvRing) -> None:
        """Nothing is in flight on it."""
        if self._closed:
            kv_ring.close()
        else:
            self._idle.append(kv_ring)

    def drop(self, kv_ring: KvRing) -> None:
        """Something may be in flight still: the next call must find a quiet ring. Blocks until no server can
        touch the memory of its requests."""
        self._all.remove(kv_ring)
        kv_ring.close()

    def stats(self) -> list[RingStats]:
        """One a ring."""
        return [kv_ring.ring.stats() for kv_ring in list(self._all)]

    def close(self) -> None:
        """Closes what is idle; what is taken is closed when its call ends."""
        self._closed = True
        while self._idle:
            with contextlib.suppress(FfsError):
                self._idle.pop().close()

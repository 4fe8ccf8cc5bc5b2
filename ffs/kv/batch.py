"""One call's requests on one ring: keep it full, collect what comes back (docs/guides/kv.md).

No Python runs for a block between prepare and completion where blocks lie in Iovs: requests go in and
completions come out as arrays.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ffs._native.iov import Iov
from ffs._native.ring import (
    CQE_DTYPE,
    WAIT_NEEDS_CAPABILITY,
    WAIT_NEEDS_ROUTING,
    NativeClient,
    Ring,
)
from ffs.errors import FfsError
from ffs.kv.blocks import PrivateBlocks

ENTRIES = 512
_PART = 64
_STAGING_BYTES = 64 << 20
_PAGE = 4096

Completions = npt.NDArray[np.void]


class Upkeep(Protocol):
    """What a batch asks for while requests wait: handle.py has it."""

    def want_routing(self) -> None: ...

    def renew(self) -> None: ...


class BackgroundUpkeep:
    """Renews in a thread, so that a stopped metadata service holds up only those requests that need it,
    and these until their deadline. One thread at a time."""

    def __init__(self, upkeep: Upkeep) -> None:
        self._upkeep = upkeep
        self._thread: threading.Thread | None = None

    def react(self, events: int) -> None:
        if events & WAIT_NEEDS_ROUTING:
            self._upkeep.want_routing()
        if not events & WAIT_NEEDS_CAPABILITY or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._work, name="ffs-kv-upkeep", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        # A failure isn't lost: the requests that wait for it end at their deadline and tell.
        with contextlib.suppress(FfsError):
            self._upkeep.renew()


@dataclass(slots=True)
class KvRing:
    """A ring and its staging memory, made when first needed. One thread at a time."""

    ring: Ring
    staging: Iov | None = None

    @classmethod
    def make(cls, native: NativeClient) -> KvRing:
        return cls(Ring(native, ENTRIES))

    def reserve(self, nbytes: int) -> Iov:
        """Staging of at least `nbytes`. No request may be in flight."""
        if self.staging is None or len(self.staging) < nbytes:
            self.staging = Iov(max(nbytes, _PAGE))
        return self.staging

    def close(self) -> None:
        """Blocks until no server can touch the staging any more."""
        self.ring.close()
        self.staging = None  # goes with the last view of it


def _bytes_of(rows: Completions) -> npt.NDArray[np.uint8]:
    return rows.view(np.uint8).reshape(len(rows), CQE_DTYPE.itemsize)


def _end_of(entries: npt.NDArray[np.void]) -> float:
    """When the call is to be over: a request's time counts from when it is sent, and not all fit at once."""
    return time.monotonic() + (int(entries["timeout_ms"][0]) / 1000 if len(entries) else 0)


def _shorten(entries: npt.NDArray[np.void], until_s: float) -> None:
    entries["timeout_ms"] = max(1, int((until_s - time.monotonic()) * 1000))


class Batch:
    """Sends entries whose `userdata` is their position, and hands out completions by position. All of a call
    have the same `timeout_ms`, which is that of the call."""

    def __init__(self, kv_ring: KvRing, upkeep: BackgroundUpkeep) -> None:
        self._kv = kv_ring
        self._upkeep = upkeep

    @contextlib.contextmanager
    def memory(self, nbytes: int) -> Iterator[tuple[Iov, npt.NDArray[np.uint8]]]:
        """Staging of at least `nbytes`, and a view of it."""
        staging = self._kv.reserve(nbytes)
        view = np.frombuffer(staging.buffer(), dtype=np.uint8)
        try:
            yield staging, view
        finally:
            del view  # an exported view would keep the Iov from being closed

    def run(self, entries: npt.NDArray[np.void]) -> Completions:
        """All of them; the completion of each at its position."""
        count = len(entries)
        if count == 1:
            return self._run_one(entries)
        out = np.zeros(count, dtype=CQE_DTYPE)
        until_s = _end_of(entries)
        sent = done = 0
        while done < count:
            if sent < count:
                if sent:
                    _shorten(entries[sent:], until_s)
                sent += self._kv.ring.prepare(entries[sent:])
            # With more to send, it goes on as soon as a part of the ring is free.
            done += len(self._positions(out, _PART if sent < count else count - done))
        return out

    def run_groups(self, entries: npt.NDArray[np.void], groups: int) -> Completions:
        """The same for so many groups, for which the ring has room; the completion of each at its
        position."""
        out = np.zeros(groups, dtype=CQE_DTYPE)
        self._prepare_all(entries)
        done = 0
        while done < groups:
            done += len(self._positions(out, groups - done))
        return out

    def _run_one(self, entries: npt.NDArray[np.void]) -> Completions:
        self._prepare_all(entries)
        while True:
            completions, events = self._kv.ring.wait(1)
            if events:
                self._upkeep.react(events)
            if len(completions):
                return completions

    def run_staged(
        self, entries: npt.NDArray[np.void], blocks: PrivateBlocks, *, writing: bool
    ) -> Completions:
        """The same with the blocks copied through staging memory, as many in flight as fit there."""
        most = int(blocks.lengths.max()) if len(blocks.lengths) else 0
        stride = max(1, -(-most // _PAGE)) * _PAGE
        places = max(1, min(len(entries), ENTRIES, _STAGING_BYTES // stride))
        staging = self._kv.reserve(places * stride)
        memory = np.frombuffer(staging.buffer(), dtype=np.uint8)
        out = np.zeros(len(entries), dtype=CQE_DTYPE)
        place_of = np.zeros(len(entries), dtype=np.int64)
        until_s = _end_of(entries)
        free = list(range(places))
        sent = done = 0
        try:
            while done < len(entries):
                begin = sent
                while free and sent < len(entries):
                    place = free.pop()
                    place_of[sent] = place
                    if writing:
                        view = blocks.views[sent]
                        memory[place * stride : place * stride + len(view)] = np.frombuffer(
                            view, dtype=np.uint8
                        )
                    sent += 1
                if sent > begin:
                    if begin:
                        _shorten(entries[begin:sent], until_s)
                    entries["iov"][begin:sent] = staging.handle
                    entries["iov_offset"][begin:sent] = place_of[begin:sent] * stride
                    self._prepare_all(entries[begin:sent])
                for position in self._positions(out, 1):
                    done += 1
                    place = int(place_of[position])
                    moved = int(out["result"][position])
                    if not writing and moved > 0:
                        target = np.frombuffer(blocks.views[position], dtype=np.uint8)
                        target[:moved] = memory[place * stride : place * stride + moved]
                    free.append(place)
        finally:
            del memory  # an exported view would keep the Iov from being closed
        return out

    def _prepare_all(self, entries: npt.NDArray[np.void]) -> None:
        taken = self._kv.ring.prepare(entries)
        if taken != len(entries):
            raise AssertionError(
                f"a ring of {ENTRIES} entries took {taken} of {len(entries)} while it had room"
            )

    def _positions(self, out: Completions, least: int) -> list[int]:
        """Waits for `least` completions, or something to look after; stores them, and returns their
        positions."""
        completions, events = self._kv.ring.wait(least)
        self._upkeep.react(events)
        positions = completions["userdata"].astype(np.int64)
        # As bytes: numpy copies a structure field by field, thirty times as slowly.
        _bytes_of(out)[positions] = _bytes_of(completions)
        result: list[int] = positions.tolist()
        return result

"""Memory that an engine has made, as Iovs: blocks go to and from it without a copy here (docs/kv.md,
Memory)."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ffs._native.iov import Iov
from ffs.errors import InvalidArgument
from ffs.kv.blocks import SharedBlocks

Numbers = Sequence[int] | npt.NDArray[np.integer]


class Regions:
    """Iovs over the engine's memory by address. Any thread. The engine keeps the memory until `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begins: list[int] = []
        self._iovs: list[Iov] = []
        self._ends: list[int] = []

    def add(self, address: int, size: int) -> None:
        """Makes [address, address + size) known; what is known already stays. InvalidArgument: it overlaps
        something known otherwise."""
        with self._lock:
            at = bisect.bisect_right(self._begins, address) - 1
            if at >= 0 and self._ends[at] >= address + size:
                return
            if (at >= 0 and self._ends[at] > address) or (
                at + 1 < len(self._begins) and self._begins[at + 1] < address + size
            ):
                raise InvalidArgument(
                    f"{size} bytes at {address:#x} overlap memory that was registered with other bounds"
                )
            iov = Iov.at(address, size)
            # Replaced, not changed: readers hold no lock.
            self._begins = [*self._begins[: at + 1], address, *self._begins[at + 1 :]]
            self._iovs = [*self._iovs[: at + 1], iov, *self._iovs[at + 1 :]]
            self._ends = [*self._ends[: at + 1], address + size, *self._ends[at + 1 :]]

    def add_tensor(self, tensor: Any) -> None:
        """All of the storage under a CPU tensor."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.add(storage.data_ptr(), storage.nbytes())

    def blocks(
        self,
        addresses: Sequence[int] | npt.NDArray[np.integer],
        sizes: Sequence[int] | npt.NDArray[np.integer],
    ) -> SharedBlocks:
        """Where blocks of these sizes lie. InvalidArgument: one isn't inside of known memory."""
        begins = np.asarray(addresses, dtype=np.int64)
        lengths = np.asarray(sizes, dtype=np.int64)
        with self._lock:
            known, ends, iovs = self._begins, self._ends, self._iovs
        if len(known) == 1 and len(begins):  # of most engines
            first, end, iov = known[0], ends[0], iovs[0]
            if int(begins.min()) >= first and int((begins + lengths).max()) <= end:
                return SharedBlocks(
                    handles=np.full(len(begins), iov.handle, dtype=np.uint64),
                    offsets=(begins - first).view(np.uint64),
                    lengths=lengths,
                    keep=iovs,
                    foreign=True,
                )
        at = np.searchsorted(np.asarray(known, dtype=np.int64), begins, side="right") - 1
        inside = at >= 0
        if len(known):
            inside &= begins + lengths <= np.asarray(ends, dtype=np.int64)[at]
        if not inside.all():
            first = int(np.flatnonzero(~inside)[0])
            raise InvalidArgument(
                f"{lengths[first]} bytes at {begins[first]:#x} aren't in memory that was registered"
            )
        handles = np.array([iov.handle for iov in iovs], dtype=np.uint64)
        starts = np.asarray(known, dtype=np.int64)
        return SharedBlocks(
            handles=handles[at] if len(handles) else np.zeros(0, dtype=np.uint64),
            offsets=(begins - starts[at]).astype(np.uint64) if len(known) else np.zeros(0, dtype=np.uint64),
            lengths=lengths,
            keep=tuple(iovs),
            foreign=True,
        )

    def close(self) -> None:
        """No request may be in flight. Repeatable."""
        with self._lock:
            iovs, self._iovs, self._begins, self._ends = self._iovs, [], [], []
        for iov in iovs:
            iov.close()

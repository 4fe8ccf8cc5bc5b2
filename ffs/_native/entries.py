"""Requests of a file as ring entries, and the numbers that they go by, in C: a call of numpy costs half a
microsecond and more, and requests would need two dozen. docs/ring.md, Building.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ffs._native.lib import ffi, lib
from ffs._native.ring import SQE_DTYPE

Ints = NDArray[np.int64]

_SQE_BYTES: Final = SQE_DTYPE.itemsize
NO_END: Final = (1 << 63) - 1


class Numbers:
    """The numbers 0 to count - 1, each free or in use. Ring.prepare takes those of the requests that it
    takes, in one step with them. One thread at a time.

    raw.free_count: how many are free. `live` says of each whether it is in use."""

    def __init__(self, count: int) -> None:
        self.free = np.arange(count - 1, -1, -1, dtype=np.int64)  # a stack, used from its end
        self.live = np.zeros(count, dtype=np.bool_)
        self.raw = ffi.new("ffs_py_numbers*")
        self._memory = (
            ffi.from_buffer("int64_t[]", self.free, require_writable=True),
            ffi.from_buffer("uint8_t[]", self.live, require_writable=True),
        )
        self.raw.free, self.raw.live = self._memory
        self.raw.free_count = count


class Requests:
    """Where requests are in a file and in an Iov, and how long: arrays of one length, int64, contiguous."""

    __slots__ = ("_at", "_size", "_to", "count")

    def __init__(self, at: Ints, to: Ints, size: Ints) -> None:
        self._at: Any = ffi.from_buffer("int64_t[]", at)
        self._to: Any = ffi.from_buffer("int64_t[]", to)
        self._size: Any = ffi.from_buffer("int64_t[]", size)
        self.count = len(at)

    def first_bad(self, room: int) -> int | None:
        """The first that is empty, before the file's begin or outside of an Iov of `room` bytes."""
        found: int = lib.ffs_py_bad(self._at, self._to, self._size, self.count, room)
        return None if found < 0 else found

    def cut_inside(
        self,
        op: int,
        flags: int,
        *,
        inode: int,
        capability: int,
        epoch: int,
        chunk_size: int,
        chains: NDArray[np.uint32],
        iov: int,
        known: int = NO_END,
        priority: int = 0,
    ) -> NDArray[Any] | None:
        """One entry (SQE_DTYPE) a request, without userdata. None: one is empty or crosses a chunk's end.

        chains: of a chunk index, modulo their number; iov: its handle; known: where reads are cut."""
        file = ffi.new("ffs_py_file*")
        like = file.like
        like.op, like.flags, like.group, like.priority = op, flags, 1, priority
        like.capability, like.space_epoch = capability, epoch
        like.iov = ffi.cast("ffs_iov*", iov)
        order = ffi.from_buffer("uint32_t[]", chains)
        file.inode, file.known = inode, known
        file.chunk_shift = chunk_size.bit_length() - 1
        file.chains, file.chain_count = order, len(chains)
        memory = np.empty(self.count * _SQE_BYTES, dtype=np.uint8)
        out = ffi.from_buffer("ffs_sqe[]", memory, require_writable=True)
        plain = lib.ffs_py_cut(file, self._at, self._to, self._size, self.count, out)
        return memory.view(SQE_DTYPE) if plain else None

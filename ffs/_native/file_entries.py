"""What the ring entries of one file's requests have in common, as C takes it. docs/ring.md, Building."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ffs._native.lib import ffi


class FileEntries:
    """What the entries of one file's requests have in common. Immutable.

    chains: of a chunk index, modulo their number."""

    __slots__ = ("_order", "raw")

    def __init__(
        self,
        op: int = 0,
        flags: int = 0,
        *,
        inode: int,
        capability: int,
        epoch: int,
        chunk_size: int,
        chains: NDArray[np.uint32],
        priority: int = 0,
    ) -> None:
        raw = self.raw = ffi.new("ffs_py_file*")
        like = raw.like
        like.op, like.flags, like.group, like.priority = op, flags, 1, priority
        like.capability, like.space_epoch = capability, epoch
        self._order = ffi.from_buffer("uint32_t[]", chains)
        raw.inode = inode
        raw.chunk_shift = chunk_size.bit_length() - 1
        raw.chains, raw.chain_count = self._order, len(chains)

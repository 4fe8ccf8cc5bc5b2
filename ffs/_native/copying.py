"""Many copies as one, without the GIL: what a checkpoint takes from tensors, and gives back to them
(docs/guides/checkpoint.md, Memory).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ffs._native.lib import check, ffi, lib

Pieces = NDArray[np.uint64]


def copy_many(pieces: Pieces, threads: int = 1) -> None:
    """Rows of (to, from, bytes): addresses of memory that stays where it is meanwhile, nothing overlapping.
    By up to so many threads, the caller's among them. Blocking, without the GIL. InvalidArgument: no
    address."""
    rows = np.ascontiguousarray(pieces, dtype=np.uint64)
    assert rows.ndim == 2
    assert rows.shape[1] == 3
    check(lib.ffs_copy_many(ffi.cast("ffs_copy_piece*", rows.ctypes.data), len(rows), threads))

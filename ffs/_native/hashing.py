"""XXH3 of many pieces in one call, without the GIL: the hashes of a checkpoint's tensors
(docs/guides/checkpoint.md, Hashes).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ffs._native.lib import check, ffi, lib

XXH3_BYTES: Final = 16

Pieces = NDArray[np.uint64]


def xxh3_many(pieces: Pieces) -> bytes:
    """XXH3 with 128 bits of each row (from, bytes): an address of memory that stays where it is meanwhile.
    XXH3_BYTES each, the high half first. Any thread; blocking. InvalidArgument: no address."""
    rows = np.ascontiguousarray(pieces, dtype=np.uint64)
    assert rows.ndim == 2
    assert rows.shape[1] == 2
    digests = bytearray(XXH3_BYTES * len(rows))
    check(
        lib.ffs_xxh3_many(
            ffi.cast("ffs_hash_piece*", rows.ctypes.data), len(rows), ffi.from_buffer("uint8_t[]", digests)
        )
    )
    return bytes(digests)

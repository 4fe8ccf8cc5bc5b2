"""Requests of files as ring entries, one a chunk. Pure, no I/O. docs/ring.md, Ior.

Two ways to the same entries: `cut` for anything, `cut_inside` for requests of one file that each lie in one
chunk, as most small ones do; it costs a few microseconds a call. They are tested against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ffs._native.ring import SQE_DTYPE
from ffs.layout import chunk_slices_array, file_chunk_keys

if TYPE_CHECKING:
    from ffs.client.file import File

# ffs_sqe with its key as (space, zeros, chunk index): the key of a file's chunk (ffs/layout.py).
_FIELDS: Final = SQE_DTYPE.fields
assert _FIELDS is not None
_KEY_AT: Final = _FIELDS["key"][1]
_FILE_DTYPE: Final = np.dtype(
    {
        "names": [*(name for name in SQE_DTYPE.names or () if name != "key"), "space", "index"],
        "formats": [
            *(_FIELDS[name][0] for name in SQE_DTYPE.names or () if name != "key"),
            np.dtype(">u8"),
            np.dtype(">u8"),
        ],
        "offsets": [
            *(_FIELDS[name][1] for name in SQE_DTYPE.names or () if name != "key"),
            _KEY_AT,
            _KEY_AT + 16,
        ],
        "itemsize": SQE_DTYPE.itemsize,
    }
)

Ints = NDArray[np.int64]


def cut_inside(
    file: File, op: int, flags: int, at: Ints, iov_handle: int, to: Ints, size: Ints
) -> NDArray[Any] | None:
    """One entry a request, or None if a request is empty or crosses a chunk's end."""
    placement = file.placement
    chunk_size = placement.layout.chunk_size
    shift = chunk_size.bit_length() - 1
    index = at >> shift
    inside = at & (chunk_size - 1)
    if size.min() < 1 or (inside + size).max() > chunk_size:
        return None
    sqes = np.zeros(len(at), dtype=_FILE_DTYPE)
    sqes["op"] = op
    sqes["flags"] = flags
    sqes["chain"] = placement.chains_of_indexes(index)
    sqes["capability"] = file.capability
    sqes["group"] = 1
    sqes["space"] = file.inode
    sqes["index"] = index
    sqes["offset"] = inside
    sqes["length"] = size
    sqes["iov"] = iov_handle
    sqes["iov_offset"] = to
    sqes["space_epoch"] = file.epoch
    return sqes.view(SQE_DTYPE)


def cut(
    files: Sequence[File], which: Ints, op: int, flags: int, at: Ints, iov_handle: int, to: Ints, size: Ints
) -> tuple[NDArray[Any], Ints, Ints]:
    """The entries of all requests in order, each request's first entry, and how many it has.

    Request i is of files[which[i]]; one of no bytes has no entries."""
    chunk_size = np.array([file.placement.layout.chunk_size for file in files], dtype=np.int64)[which]
    counts = np.where(size > 0, (at + size - 1) // chunk_size - at // chunk_size + 1, 0)
    first = np.cumsum(counts) - counts
    sqes = np.zeros(int(counts.sum()), dtype=SQE_DTYPE)
    sqes["op"] = op
    sqes["flags"] = flags
    sqes["iov"] = iov_handle
    for number, file in enumerate(files):
        mine = np.flatnonzero(which == number) if len(files) > 1 else np.arange(len(at))
        pieces = chunk_slices_array(file.placement.layout.chunk_size, at[mine], size[mine])
        request = mine[pieces.request]
        begins = np.cumsum(counts[mine]) - counts[mine]
        rows = first[request] + np.arange(len(request)) - begins[pieces.request]
        keys = np.empty((len(request), 24), dtype=np.uint8)
        keys[:, :8] = np.frombuffer(file.inode.to_bytes(8, "big"), dtype=np.uint8)
        keys[:, 8:] = file_chunk_keys(pieces.chunk)
        sqes["key"][rows] = keys
        sqes["chain"][rows] = file.placement.chains_of_indexes(pieces.chunk)
        sqes["capability"][rows] = file.capability
        sqes["space_epoch"][rows] = file.epoch
        sqes["offset"][rows] = pieces.offset
        sqes["length"][rows] = pieces.length
        sqes["iov_offset"][rows] = to[request] + pieces.position
    sqes["group"][first[counts > 0]] = counts[counts > 0]
    return sqes, first, counts

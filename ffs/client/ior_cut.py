"""Requests of files as ring entries, one a chunk. Pure, no I/O. docs/ring.md, Ior.

Two ways to the same entries: `cut` for anything, `cut_inside` for requests of one file that each lie in one
chunk, as most small ones do; it costs a few microseconds a call (C: ffs/_native/entries.py). They are tested
against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ffs._native.entries import NO_END, Requests
from ffs._native.ring import SQE_DTYPE
from ffs.layout import chunk_slices_array, file_chunk_keys

if TYPE_CHECKING:
    from ffs.client.file import File

Ints = NDArray[np.int64]


def cut_inside(
    file: File,
    requests: Requests,
    op: int,
    flags: int,
    iov_handle: int,
    known: int = NO_END,
    priority: int = 0,
) -> NDArray[Any] | None:
    """One entry a request, or None if a request is empty or crosses a chunk's end. Reads end at `known`."""
    placement = file.placement
    return requests.cut_inside(
        op,
        flags,
        inode=file.inode,
        capability=file.capability,
        epoch=file.epoch,
        chunk_size=placement.layout.chunk_size,
        chains=placement.order,
        iov=iov_handle,
        known=known,
        priority=priority,
    )


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

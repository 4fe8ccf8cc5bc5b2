"""Requests of files as ring entries, one a chunk. Pure, no I/O. docs/ring.md, Ior.

Two ways to the same entries: `cut` for anything, and in C (FileRing.prepare_inside, with what Cutter gives)
for requests of one file that each lie in one chunk, as most small ones do. Tests compare the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffs._native.file_entries import FileEntries
from ffs._native.ring import SQE_DTYPE
from ffs.layout import chunk_slices_array, file_chunk_keys

if TYPE_CHECKING:
    from ffs.client.file import File
    from ffs.layout import Placement

Ints = NDArray[np.int64]


class Cutter:
    """Gives what the entries of a file's requests have in common, and remembers it of the last file."""

    def __init__(self, op: int, flags: int, priority: int) -> None:
        self._op, self._flags, self._priority = op, flags, priority
        self._last: _Cut | None = None

    def entries(self, file: File) -> FileEntries:
        """May block, as File.capability and File.placement."""
        capability, placement, epoch = file.capability, file.placement, file.epoch
        last = self._last
        if (
            last is not None
            and last.file() is file
            and last.placement is placement
            and (last.capability, last.epoch) == (capability, epoch)
        ):
            return last.entries
        entries = FileEntries(
            self._op,
            self._flags,
            inode=file.inode,
            capability=capability,
            epoch=epoch,
            chunk_size=placement.layout.chunk_size,
            chains=placement.order,
            priority=self._priority,
        )
        self._last = _Cut(weakref.ref(file), placement, capability, epoch, entries)
        return entries


class _Cut(NamedTuple):
    file: weakref.ref[File]
    placement: Placement
    capability: int
    epoch: int
    entries: FileEntries


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

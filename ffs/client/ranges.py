"""Many byte ranges of many files at once: one request to metadata, one submission of a ring.

docs/guides/fsspec.md, Ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ffs import errors
from ffs._native.iov import Iov
from ffs.client.ior import Ior

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

Wanted = tuple[str, int | None, int | None]
"""(path, start, end), as of a slice: None is the file's end or beginning, negative counts from the end."""

_BATCH_BYTES: Final = 256 << 20
_BATCH_PIECES: Final = 16384


class _Range(NamedTuple):
    place: int  # in the answer
    file: File
    offset: int
    length: int
    pieces: int


def read_ranges(client: Client, wanted: Sequence[Wanted]) -> list[bytes | errors.FfsError]:
    """The bytes of each range, or the error of its file or of its read. Blocking.

    What lies beyond a file's end is left out, as of a slice. A file is opened once for all its ranges.
    """
    found: list[bytes | errors.FfsError] = [b""] * len(wanted)
    names = list(dict.fromkeys(path for path, _, _ in wanted))
    files = dict(zip(names, client.open_many(names), strict=True))
    try:
        ranges = []
        for index, (path, start, end) in enumerate(wanted):
            file = files[path]
            if isinstance(file, errors.FfsError):
                found[index] = file
                continue
            begin, stop, _ = slice(start, end).indices(file.size)
            if begin < stop:
                chunk = file.placement.layout.chunk_size
                pieces = (stop - 1) // chunk - begin // chunk + 1
                ranges.append(_Range(index, file, begin, stop - begin, pieces))
        for batch in _batches(ranges):
            _read_batch(client, batch, found)
    finally:
        for file in files.values():
            if not isinstance(file, errors.FfsError):
                file.close()
    return found


def _batches(ranges: Sequence[_Range]) -> Iterator[list[_Range]]:
    """Ranges together, up to what one ring takes; one that is larger than that alone."""
    batch: list[_Range] = []
    size = pieces = 0
    for one in ranges:
        if batch and (size + one.length > _BATCH_BYTES or pieces + one.pieces > _BATCH_PIECES):
            yield batch
            batch, size, pieces = [], 0, 0
        batch.append(one)
        size += one.length
        pieces += one.pieces
    if batch:
        yield batch


def _read_batch(client: Client, batch: Sequence[_Range], found: list[bytes | errors.FfsError]) -> None:
    if len(batch) == 1:
        # The file's own ring has its memory already.
        [one] = batch
        try:
            found[one.place] = one.file.pread(one.length, one.offset)
        except errors.FfsError as error:
            found[one.place] = error
        return
    lengths = np.array([one.length for one in batch], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)[:-1]])
    iov = Iov(int(lengths.sum()))
    entries = 1 << (sum(one.pieces for one in batch) - 1).bit_length()
    with Ior(client, entries, kind="read") as ring:
        taken = ring.prepare_many(
            [one.file for one in batch], [one.offset for one in batch], iov, starts, lengths
        )
        if taken != len(batch):
            raise AssertionError(f"a ring of {entries} entries took {taken} of {len(batch)} requests")
        ring.submit()
        memory = iov.numpy()
        for completion in ring.wait(len(batch)):
            one, begin = batch[completion.userdata], int(starts[completion.userdata])
            if completion.error is not None:
                found[one.place] = completion.error
            else:
                found[one.place] = memory[begin : begin + completion.result].tobytes()

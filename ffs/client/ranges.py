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


NEIGHBOUR_BYTES: Final = 16 << 10
"""Ranges of one chunk with at most so much between them are read together: it costs less than a request."""

TOGETHER_BYTES: Final = 1 << 20
"""And no more than so much at once."""


class _Range(NamedTuple):
    place: int  # in the answer
    file: File
    offset: int
    length: int
    pieces: int


class Span(NamedTuple):
    """What one request reads, and which of the ranges lie in it."""

    offset: int
    length: int
    members: tuple[int, ...]


def coalesce(ranges: Sequence[tuple[int, int]], chunk_size: int) -> list[Span]:
    """Spans that cover these ranges (offset, length) of one file, neighbours together. Pure.

    None crosses a chunk's border but for a range that does itself, so that ranges fail together only where
    the same chain failed."""
    spans: list[Span] = []
    for index in sorted(range(len(ranges)), key=lambda index: ranges[index]):
        offset, length = ranges[index]
        end = offset + length
        if spans:
            last = spans[-1]
            last_end = last.offset + last.length
            if (
                offset - last_end <= NEIGHBOUR_BYTES
                and max(end, last_end) - last.offset <= TOGETHER_BYTES
                and last.offset // chunk_size == (max(end, last_end) - 1) // chunk_size
            ):
                joined = max(end, last_end) - last.offset
                spans[-1] = Span(last.offset, joined, (*last.members, index))
                continue
        spans.append(Span(offset, length, (index,)))
    return spans


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
    spans = [
        (mine[0].file, span, [mine[member] for member in span.members])
        for mine in _by_file(batch)
        for span in coalesce(
            [(one.offset, one.length) for one in mine], mine[0].file.placement.layout.chunk_size
        )
    ]
    lengths = np.array([span.length for _, span, _ in spans], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)[:-1]])
    iov = Iov(int(lengths.sum()))
    entries = 1 << (sum(one.pieces for one in batch) - 1).bit_length()
    with Ior(client, entries, kind="read") as ring:
        taken = ring.prepare_many(
            [file for file, _, _ in spans], [span.offset for _, span, _ in spans], iov, starts, lengths
        )
        if taken != len(spans):
            raise AssertionError(f"a ring of {entries} entries took {taken} of {len(spans)} requests")
        ring.submit()
        memory = iov.numpy()
        for completion in ring.wait(len(spans)):
            _, span, members = spans[completion.userdata]
            begin = int(starts[completion.userdata])
            for one in members:
                low = one.offset - span.offset
                high = min(low + one.length, completion.result)
                found[one.place] = (
                    completion.error
                    if completion.error is not None
                    else memory[begin + low : begin + max(low, high)].tobytes()
                )


def _by_file(batch: Sequence[_Range]) -> list[list[_Range]]:
    files: dict[int, list[_Range]] = {}
    for one in batch:
        files.setdefault(id(one.file), []).append(one)
    return list(files.values())

"""Moving a shard through a ring: large requests in file order, many in flight (FAULTS C16).

A piece is at most one chunk of the file. Everything here blocks its thread; nothing is in flight when
a function returns or raises, and the first failure of any piece is raised (FAULTS C3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ffs import Iov
from ffs.client.ior import Ior
from ffs.errors import ProtocolError

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

STAGING_BYTES = 64 << 20
MAX_PIECE_BYTES = 4 << 20
_PAGE = 4096

Range = tuple[int, int]
"""(offset in the file, length)"""


def piece_bytes(file: File) -> int:
    """The size of pieces for this file: whole chunks for writing, at most 4 MiB of one for reading."""
    chunk: int = file.placement.layout.chunk_size
    return chunk if file.writable() else min(chunk, MAX_PIECE_BYTES)


def write_through(
    client: Client, file: File, ranges: Sequence[Range], fill: Callable[[int, memoryview], None]
) -> None:
    """Writes the ranges; `fill(i, memory)` puts range i's bytes into the memory that is sent."""
    _staged(client, file, "write", ranges, fill, _nothing)


def read_through(
    client: Client, file: File, ranges: Sequence[Range], take: Callable[[int, memoryview], None]
) -> None:
    """Reads the ranges; `take(i, memory)` gets range i's bytes, in order of completion. The memory is
    used again when it returns."""
    _staged(client, file, "read", ranges, _nothing, take)


def read_into(
    client: Client, file: File, ranges: Sequence[Range], iov: Iov, base: int, done: Callable[[int], None]
) -> None:
    """Reads the ranges straight into `iov`, where byte `base` of the file lies at its start.
    `done(i)` is told of each, in order of completion."""
    entries = _power_of_two(len(ranges), 256)
    with Ior(client, entries, kind="read") as ring:
        sent = finished = 0
        while finished < len(ranges):
            while sent < len(ranges) and sent - finished < entries:
                offset, length = ranges[sent]
                ring.prepare(file, offset, iov[offset - base : offset - base + length], sent)
                sent += 1
            for index, moved in _completions(ring):
                _check(file, ranges[index], moved)
                done(index)
                finished += 1


def _staged(
    client: Client,
    file: File,
    kind: str,
    ranges: Sequence[Range],
    before: Callable[[int, memoryview], None],
    after: Callable[[int, memoryview], None],
) -> None:
    if not ranges:
        return
    stride = -(-max(length for _, length in ranges) // _PAGE) * _PAGE
    places = max(2, min(len(ranges), STAGING_BYTES // stride))
    iov = Iov(places * stride)  # goes with the last view of it
    with Ior(client, _power_of_two(places, 256), kind=kind) as ring:
        _run_staged(ring, file, ranges, iov, stride, places, before, after)


def _run_staged(
    ring: Ior,
    file: File,
    ranges: Sequence[Range],
    iov: Iov,
    stride: int,
    places: int,
    before: Callable[[int, memoryview], None],
    after: Callable[[int, memoryview], None],
) -> None:
    memory = iov.buffer()
    free = list(range(places))
    place_of: dict[int, int] = {}
    sent = finished = 0
    while finished < len(ranges):
        while free and sent < len(ranges):
            place = place_of[sent] = free.pop()
            offset, length = ranges[sent]
            begin = place * stride
            before(sent, memory[begin : begin + length])
            ring.prepare(file, offset, iov[begin : begin + length], sent)
            ring.submit()
            sent += 1
        for index, moved in _completions(ring):
            _check(file, ranges[index], moved)
            place = place_of.pop(index)
            after(index, memory[place * stride : place * stride + ranges[index][1]])
            free.append(place)
            finished += 1


def _completions(ring: Ior) -> list[tuple[int, int]]:
    """At least one: (number, bytes moved). Raises the failure of a request."""
    out = []
    for completion in ring.wait(1):
        if completion.error is not None:
            raise completion.error
        out.append((completion.userdata, completion.result))
    return out


def _check(file: File, wanted: Range, moved: int) -> None:
    if moved != wanted[1]:
        raise ProtocolError(
            f"{moved} of {wanted[1]} bytes at {wanted[0]} were moved: the file is shorter than it should be",
            file.name,
        )


def _power_of_two(count: int, most: int) -> int:
    return min(most, 1 << max(0, count - 1).bit_length())


def _nothing(index: int, memory: memoryview) -> None:
    return None

"""Moving a shard through a ring: large requests in file order, many in flight (FAULTS C16).

A piece is at most one chunk of the file. Everything here blocks its thread; nothing is in flight when
a function returns or raises, and the first failure of any piece is raised (FAULTS C3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffs import Iov
from ffs.client.ior import Ior
from ffs.errors import FfsError, ProtocolError

if TYPE_CHECKING:
    from ffs.client.file import File

MAX_PIECE_BYTES = 4 << 20

Range = tuple[int, int]
"""(offset in the file, length)"""


def piece_bytes(file: File) -> int:
    """The size of pieces for this file: whole chunks for writing, at most 4 MiB of one for reading."""
    chunk: int = file.placement.layout.chunk_size
    return chunk if file.writable() else min(chunk, MAX_PIECE_BYTES)


def write_from(ring: Ior, file: File, ranges: Sequence[Range], iov: Iov, base: int) -> None:
    """Writes the ranges from `iov`, where byte 0 of the file lies at `base`. After a failure it waits for
    what is in flight, so that the memory and the ring may be used again."""
    sent = finished = 0
    failure: BaseException | None = None
    while finished < (len(ranges) if failure is None else sent):
        while failure is None and sent < len(ranges) and sent - finished < ring.entries:
            offset, length = ranges[sent]
            ring.prepare(file, offset, iov[base + offset : base + offset + length], sent)
            sent += 1
        for completion in ring.wait(1):
            finished += 1
            try:
                if completion.error is not None:
                    raise completion.error
                _check(file, ranges[completion.userdata], completion.result)
            except FfsError as error:
                failure = failure or error
    if failure is not None:
        raise failure


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

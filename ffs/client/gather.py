"""How writes are gathered into chunks. Pure, no I/O. docs/client.md, Writing behind."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """What is gathered: the bytes [low, high) of a chunk."""

    chunk: int
    low: int
    high: int


class Step(NamedTuple):
    """leave: send what is gathered first, since this doesn't continue it. part: what is gathered after `take`
    bytes were added. full: it reaches the chunk's end, so it goes too."""

    leave: bool
    part: Part
    take: int
    full: bool


def pour(part: Part | None, offset: int, size: int, chunk_size: int) -> Step:
    """The next step in taking `size` > 0 bytes at byte `offset` of the file, beside what is gathered."""
    chunk, inside = divmod(offset, chunk_size)
    take = min(size, chunk_size - inside)
    goes_on = part is not None and (part.chunk, part.high) == (chunk, inside)
    low = part.low if part is not None and goes_on else inside
    return Step(
        part is not None and not goes_on, Part(chunk, low, inside + take), take, inside + take == chunk_size
    )

"""How a block lies in chunks: one chunk, or `parts` equal ones (docs/guides/kv.md, Large blocks). Pure.

A chunk holds at most 16 MiB. A space of larger blocks says into how many parts each is cut: groups of layers,
one after the other in the block. A part is a block of its own, with a key of its own (docs/kv_keys.md,
Parts), so the parts of a block lie on different chains; a block is there when all of its parts are.

Requests of a call are in the order of block, then part: `pieces` of them for each block, the same number for
all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ffs.errors import InvalidArgument
from ffs.kv.keys import KEY_BYTES, part_keys
from ffs.kv.results import Status

MAX_PART_BYTES: Final = 16 << 20
MAX_BLOCK_BYTES: Final = 1 << 30


class Piece(NamedTuple):
    """Of each block of a call: bytes of one part."""

    part: int
    offset: int  # in the part
    length: int
    at: int  # in the memory of the block


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of a space. InvalidArgument says what doesn't fit, and what does."""

    block_bytes: int
    parts: int = 1

    def __post_init__(self) -> None:
        for name, value in (("block_bytes", self.block_bytes), ("parts", self.parts)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is an int, not {type(value).__name__}")
        size, parts = self.block_bytes, self.parts
        if not 1 <= size <= MAX_BLOCK_BYTES:
            raise InvalidArgument(f"block_bytes is {size}: give 1 to {MAX_BLOCK_BYTES} (1 GiB)")
        if not 1 <= parts <= size or size % parts:
            raise InvalidArgument(f"{parts} parts don't divide a block of {size} bytes")
        if size // parts > MAX_PART_BYTES:
            least = next(n for n in range(1, size + 1) if size % n == 0 and size // n <= MAX_PART_BYTES)
            raise InvalidArgument(
                f"a block of {size} bytes in {parts} part{'s' * (parts != 1)} has more than 16 MiB"
                f" in each: give parts={least} or more, a divisor of its number of layers"
            )

    @property
    def part_bytes(self) -> int:
        return self.block_bytes // self.parts

    def pieces(self, offset: int = 0, length: int | None = None) -> list[Piece]:
        """What bytes [offset, offset + length) of a block are; None: to its end."""
        size = self.block_bytes
        if not 0 <= offset < size:
            raise InvalidArgument(f"offset {offset} isn't within a block of {size} bytes")
        end = size if length is None else offset + length
        if not offset < end <= size:
            raise InvalidArgument(f"{length} bytes from {offset} on aren't within a block of {size} bytes")
        part_bytes = self.part_bytes
        return [
            Piece(
                part,
                max(offset - part * part_bytes, 0),
                min(end, (part + 1) * part_bytes) - max(offset, part * part_bytes),
                max(offset, part * part_bytes) - offset,
            )
            for part in range(offset // part_bytes, (end - 1) // part_bytes + 1)
        ]

    def chunk_hashes(self, hashes: npt.NDArray[np.uint8], pieces: list[Piece]) -> npt.NDArray[np.uint8]:
        """The keys under which the pieces of blocks lie: uint8 (blocks x pieces, 32)."""
        if self.parts == 1:
            return hashes
        return part_keys(hashes, [piece.part for piece in pieces])


def whole_blocks(status: npt.NDArray[np.uint8], pieces: int) -> npt.NDArray[np.uint8]:
    """What became of blocks, from what became of their pieces: an error if one of them is; else a miss if one
    is missing; else, of a put, stored if one was new."""
    if pieces == 1:
        return status
    rows = status.reshape(-1, pieces)
    most: npt.NDArray[np.uint8] = rows.max(axis=1) if len(rows) else np.zeros(0, dtype=np.uint8)
    missing = (rows == Status.MISS).any(axis=1)
    return np.where(missing & (most != Status.ERROR), np.uint8(Status.MISS), most)


assert KEY_BYTES == 32  # of the arrays above
assert max(Status) == Status.ERROR  # whole_blocks counts on their order

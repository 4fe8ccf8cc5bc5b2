"""Which bytes of a stored part a reader needs, and where they go. Pure. docs/guides/checkpoint.md, Loading.

A part and a destination are boxes of one tensor, both in C order. What they share is a box of both, in runs
of bytes of the part; neighbouring runs are read as one range while at least half of it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ffs.checkpoint.plan import Box, volume
from ffs.checkpoint.tensors import Bytes

GAP_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [offset, offset + length) of a part. Of them a box of `extent` elements is needed, with these
    byte strides from `offset` on; it goes to `to`, in elements of the destination's box."""

    offset: int
    length: int
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    to: tuple[int, ...]
    item_bytes: int

    @property
    def needed(self) -> int:
        return volume(self.extent) * self.item_bytes

    @property
    def solid(self) -> bool:
        """Whether every byte of it is needed."""
        return self.needed == self.length


def ranges(part: Box, goal: Box, shared: Box, item_bytes: int) -> Iterator[Range]:
    """In rising order. `shared`: what `part` and `goal` have both."""
    extent = shared[1]
    strides = strides_of(part[1], item_bytes)
    first = tuple(s - p for s, p in zip(shared[0], part[0], strict=True))
    to = tuple(s - g for s, g in zip(shared[0], goal[0], strict=True))
    outer = len(extent)
    length = needed = item_bytes
    for d in reversed(range(len(extent))):
        if extent[d] > 1:
            together = (extent[d] - 1) * strides[d] + length
            gap = strides[d] - length
            if gap > GAP_BYTES and together > 2 * needed * extent[d]:
                break
            length = together
        needed *= extent[d]
        outer = d
    inside = (*(1 for _ in range(outer)), *extent[outer:])
    for index in itertools.product(*(range(n) for n in extent[:outer])):
        steps = (*index, *(0 for _ in extent[outer:]))
        offset = sum((f + i) * s for f, i, s in zip(first, steps, strides, strict=True))
        place = tuple(t + i for t, i in zip(to, steps, strict=True))
        yield Range(offset, length, inside, strides, place, item_bytes)


def strides_of(extent: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Of C order, in bytes."""
    strides = []
    step = item_bytes
    for each in reversed(extent):
        strides.append(step)
        step *= each
    return tuple(reversed(strides))


def place_in(goal_extent: tuple[int, ...], part: Range) -> tuple[int, int] | None:
    """(first byte, bytes) of the destination if the range is solid and lands in one run there; else None."""
    if not part.solid:
        return None
    strides = strides_of(goal_extent, part.item_bytes)
    begin = sum(t * s for t, s in zip(part.to, strides, strict=True))
    span = sum((e - 1) * s for e, s in zip(part.extent, strides, strict=True)) + part.item_bytes
    return (begin, span) if span == part.needed else None


def scatter(data: Bytes, part: Range, goal: Bytes, goal_extent: tuple[int, ...]) -> None:
    """The needed bytes of a range that was read, `data`, into the flat bytes of the destination."""
    shape = (*part.extent, part.item_bytes)
    source = np.lib.stride_tricks.as_strided(data, shape, (*part.strides, 1), writeable=False)
    whole = goal.reshape((*goal_extent, part.item_bytes))
    window = tuple(slice(t, t + e) for t, e in zip(part.to, part.extent, strict=True))
    whole[window] = source

"""Cutting a shard into pieces, and what of which tensor lies in each. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [begin, end) of item `index`, which lie at `at` in the piece."""

    index: int
    begin: int
    end: int
    at: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + length) of the file, and the parts of items in it."""

    offset: int
    length: int
    parts: tuple[Part, ...]


def cut(begin: int, end: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of pieces that end at multiples of `piece_bytes`, so that each lies in one chunk."""
    while begin < end:
        stop = min(end, (begin // piece_bytes + 1) * piece_bytes)
        yield begin, stop - begin
        begin = stop


def pieces_of(items: Sequence[tuple[int, int]], piece_bytes: int) -> list[Piece]:
    """Pieces that cover the items, which are [begin, end) in rising order without overlap. Bytes
    between items that no item needs are read along only where they lie within one piece."""
    starts = [begin for begin, _ in items]
    pieces: list[Piece] = []
    for begin, end in _runs(items, piece_bytes):
        for offset, length in cut(begin, end, piece_bytes):
            pieces.append(Piece(offset, length, tuple(_parts(items, starts, offset, offset + length))))
    return pieces


def _runs(items: Sequence[tuple[int, int]], join_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges to be moved: items with less than `join_bytes` between them go together."""
    run: tuple[int, int] | None = None
    for begin, end in items:
        if begin == end:
            continue
        if run is not None and begin - run[1] < join_bytes:
            run = (run[0], end)
            continue
        if run is not None:
            yield run
        run = (begin, end)
    if run is not None:
        yield run


def _parts(items: Sequence[tuple[int, int]], starts: Sequence[int], begin: int, end: int) -> Iterator[Part]:
    index = max(0, bisect_right(starts, begin) - 1)
    # Empty items share their start with the one that follows: go back to the first of them.
    while index > 0 and items[index - 1][1] > begin:
        index -= 1
    while index < len(items) and items[index][0] < end:
        low, high = max(items[index][0], begin), min(items[index][1], end)
        if low < high:
            yield Part(index, low - items[index][0], high - items[index][0], low - begin)
        index += 1

"""Cutting a range of a file into pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterator


def cut(begin: int, end: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of pieces that end at multiples of `piece_bytes`, so that each lies in one chunk."""
    while begin < end:
        stop = min(end, (begin // piece_bytes + 1) * piece_bytes)
        yield begin, stop - begin
        begin = stop

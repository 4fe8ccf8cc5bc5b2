"""Who of several ranks reads what they all want, and who hands it to whom. Pure.
docs/guides/checkpoint.md, Shared loads.

What each rank wants are spans of files. Bytes that one alone wants are its own affair. All others are cut
into pieces, each of which is read by one of those that want it, so that all ranks read about the same number
of bytes, and handed by that one to the others, in rounds of a bounded size.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ffs.checkpoint.spans import cut

PIECE_BYTES: Final = 4 << 20
ROUND_BYTES: Final = 64 << 20  # that one rank receives in a round, but for one piece of each other

Span = tuple[int, int]
"""Bytes [begin, end) of a file."""

Demands = Mapping[int, Sequence[Span]]
"""What a rank wants, by the file's number: rising, disjoint spans."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of a file: `reader` reads them, and hands them to `takers`, the others that want
    them."""

    file: int
    begin: int
    end: int
    reader: int
    takers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def merged(spans: Iterable[Span]) -> list[Span]:
    """Rising and disjoint; neighbours together, empty ones left out."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def share(demands: Sequence[Demands], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """What two ranks or more want, in file order; the same on every rank. `demands` by rank."""
    load = [0] * len(demands)
    wanted: list[tuple[int, int, int, tuple[int, ...]]] = []
    for file in sorted({file for demand in demands for file in demand}):
        for begin, end, ranks in _segments([demand.get(file, ()) for demand in demands]):
            if len(ranks) == 1:
                load[ranks[0]] += end - begin
            else:
                wanted += [(file, at, at + size, ranks) for at, size in cut(begin, end, piece_bytes)]
    found = []
    for file, begin, end, ranks in sorted(wanted, key=lambda each: (each[1] - each[2], *each[:2])):
        reader = min(ranks, key=lambda rank: (load[rank], rank))
        load[reader] += end - begin
        takers = tuple(rank for rank in ranks if rank != reader)
        found.append(Piece(file, begin, end, reader, takers))
    return sorted(found, key=lambda piece: (piece.file, piece.begin))


def _segments(spans: Sequence[Sequence[Span]]) -> Iterable[tuple[int, int, tuple[int, ...]]]:
    """(begin, end, the ranks that want all of it) of one file, rising; what nobody wants is left out."""
    events = sorted(
        [(begin, rank) for rank, each in enumerate(spans) for begin, _ in each]
        + [(end, ~rank) for rank, each in enumerate(spans) for _, end in each]
    )
    active: set[int] = set()
    before = 0
    for at, rank in events:
        if active and at > before:
            yield before, at, tuple(sorted(active))
        before = at
        if rank < 0:
            active.discard(~rank)
        else:
            active.add(rank)


def rounds(pieces: Sequence[Piece], world: int, round_bytes: int = ROUND_BYTES) -> list[list[list[Piece]]]:
    """By round, then by reader: what it reads and hands on then."""
    most = round_bytes // world
    batches: list[list[list[Piece]]] = [[] for _ in range(world)]
    for reader in range(world):
        size = 0
        for piece in pieces:
            if piece.reader != reader:
                continue
            if not batches[reader] or size + piece.nbytes > most:
                batches[reader].append([])
                size = 0
            batches[reader][-1].append(piece)
            size += piece.nbytes
    count = max((len(each) for each in batches), default=0)
    return [[each[at] if at < len(each) else [] for each in batches] for at in range(count)]


def outside(begin: int, end: int, taken: Sequence[Span]) -> list[Span]:
    """What of [begin, end) lies in none of `taken`, which are rising and disjoint."""
    left = []
    at = max(0, bisect.bisect_right(taken, (begin,)) - 1)
    for first, stop in taken[at:]:
        if first >= end:
            break
        if first > begin:
            left.append((begin, first))
        begin = max(begin, stop)
    if begin < end:
        left.append((begin, end))
    return left

"""Pieces of a shard against a plain byte-by-byte model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ffs.checkpoint.spans import cut, pieces_of


@given(st.integers(0, 100), st.integers(0, 100), st.sampled_from([1, 4, 16]))
def test_cut_covers_and_stays_within_chunks(begin: int, length: int, size: int) -> None:
    at = begin
    for offset, count in cut(begin, begin + length, size):
        assert offset == at
        assert 0 < count <= size
        assert offset // size == (offset + count - 1) // size
        at += count
    assert at == begin + length


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=12), st.sampled_from([1, 4, 16, 64])
)
def test_every_byte_of_every_item_comes_once(gaps_and_sizes: list[tuple[int, int]], size: int) -> None:
    items = []
    at = 0
    for gap, length in gaps_and_sizes:
        items.append((at + gap, at + gap + length))
        at += gap + length
    got = [bytearray(end - begin) for begin, end in items]
    seen: set[int] = set()
    for piece in pieces_of(items, size):
        assert piece.parts, "a piece that nobody needs"
        assert seen.isdisjoint(range(piece.offset, piece.offset + piece.length))
        seen.update(range(piece.offset, piece.offset + piece.length))
        for part in piece.parts:
            assert piece.offset + part.at == items[part.index][0] + part.begin
            assert part.at + part.end - part.begin <= piece.length
            for position in range(part.begin, part.end):
                got[part.index][position] += 1
    assert all(set(item) <= {1} for item in got)

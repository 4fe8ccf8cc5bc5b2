"""Pieces of a range of a file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ffs.checkpoint.spans import cut


@given(st.integers(0, 100), st.integers(0, 100), st.sampled_from([1, 4, 16]))
def test_cut_covers_and_stays_within_chunks(begin: int, length: int, size: int) -> None:
    at = begin
    for offset, count in cut(begin, begin + length, size):
        assert offset == at
        assert 0 < count <= size
        assert offset // size == (offset + count - 1) // size
        at += count
    assert at == begin + length

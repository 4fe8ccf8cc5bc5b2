"""How a transfer is cut into pieces. Transfers on real rings are in tests/integration."""

from __future__ import annotations

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native part isn't built")

from hypothesis import given
from hypothesis import strategies as st

from ffs.client.transfer import PAGE_BYTES, _cut, _Piece, _widen

powers = st.sampled_from([4096, 8192, 65536, 1 << 20, 16 << 20])


@given(powers, st.integers(0, 1 << 26), st.integers(0, 1 << 24), powers)
def test_pieces_cover_the_range_once_and_cross_no_border(
    chunk_size: int, offset: int, length: int, most: int
) -> None:
    position = 0
    for piece in _cut(chunk_size, offset, length, most):
        assert piece.position == position
        assert piece.chunk * chunk_size + piece.offset == offset + position
        assert 0 < piece.length <= min(chunk_size, most)
        assert piece.offset + piece.length <= chunk_size
        position += piece.length
    assert position == length


@given(powers, st.integers(0, 1 << 26), st.integers(1, 1 << 22), powers)
def test_widened_pieces_stay_in_their_chunk_and_place(
    chunk_size: int, offset: int, length: int, most: int
) -> None:
    place_bytes = min(chunk_size, most, length + 2 * PAGE_BYTES)
    place_bytes += -place_bytes % PAGE_BYTES
    for piece in _cut(chunk_size, offset, length, most):
        low, size = _widen(piece)
        assert low % PAGE_BYTES == size % PAGE_BYTES == 0
        assert low <= piece.offset
        assert piece.offset + piece.length <= low + size <= chunk_size
        assert size <= place_bytes


def test_the_last_byte_of_a_page() -> None:
    assert _widen(_Piece(0, 4095, 1, 0)) == (0, 4096)
    assert _widen(_Piece(0, 4095, 2, 0)) == (0, 8192)
    assert _widen(_Piece(0, 4096, 4096, 0)) == (4096, 4096)

"""Blocks in parts: which bytes of which chunk, and what a block's outcome is when parts differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ffs
from ffs.errors import InvalidArgument
from ffs.kv.blocks import Places, SharedBlocks, cut, look_at
from ffs.kv.geometry import MAX_BLOCK_BYTES, Geometry, whole_blocks
from ffs.kv.keys import part_key, part_keys
from ffs.kv.results import Status

MISS, HIT, STORED, ERROR = (np.uint8(s) for s in (Status.MISS, Status.HIT, Status.STORED, Status.ERROR))


@settings(deadline=None)
@given(st.data())
def test_pieces_are_the_range_and_nothing_else(data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, 7))
    geometry = Geometry(parts * data.draw(st.integers(1, 50)), parts)
    begin = data.draw(st.integers(0, geometry.block_bytes - 1))
    length = data.draw(st.one_of(st.none(), st.integers(1, geometry.block_bytes - begin)))
    block = np.arange(geometry.block_bytes)
    wanted = block[begin:] if length is None else block[begin : begin + length]
    rows = block.reshape(parts, geometry.part_bytes)
    out = np.full(len(wanted), -1)
    for piece in geometry.pieces(begin, length):
        assert piece.length > 0
        place = slice(piece.at, piece.at + piece.length)
        assert (out[place] == -1).all()
        out[place] = rows[piece.part, piece.offset : piece.offset + piece.length]
    assert (out == wanted).all()


@pytest.mark.parametrize(
    ("size", "parts", "why"),
    [
        (0, 1, "1 GiB"),
        (MAX_BLOCK_BYTES + 1, 64, "1 GiB"),
        (10, 3, "divide"),
        (10, 0, "divide"),
        (40 << 20, 2, "parts=4"),
        ((16 << 20) + 1, 1, "parts="),
    ],
)
def test_geometries_that_can_not_be(size: int, parts: int, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        Geometry(size, parts)


@pytest.mark.parametrize(("offset", "length"), [(-1, None), (100, None), (0, 0), (0, 101), (99, 2), (5, -1)])
def test_ranges_outside_a_block(offset: int, length: int | None) -> None:
    with pytest.raises(InvalidArgument, match="of 100 bytes"):
        Geometry(100).pieces(offset, length)


def test_a_missing_part_is_a_miss_and_no_answer_an_error() -> None:
    """K6: all of a block or nothing of it."""
    rows = [
        ([HIT, HIT], HIT),
        ([HIT, MISS], MISS),
        ([MISS, MISS], MISS),
        ([STORED, HIT], STORED),
        ([STORED, STORED], STORED),
        ([ERROR, HIT], ERROR),
        ([MISS, ERROR], ERROR),
    ]
    status = np.array([part for row, _ in rows for part in row], dtype=np.uint8)
    assert whole_blocks(status, 2).tolist() == [int(block) for _, block in rows]
    assert whole_blocks(status, 1) is status
    assert whole_blocks(status[:0], 2).tolist() == []


def test_parts_have_keys_of_their_own() -> None:
    geometry = Geometry(12, 3)
    hashes = np.frombuffer(bytes(range(64)), dtype=np.uint8).reshape(2, 32)
    keys = geometry.chunk_hashes(hashes, geometry.pieces())
    assert keys.shape == (6, 32)
    assert [key.tobytes() for key in keys] == [
        part_key(hashes[block].tobytes(), part) for block in range(2) for part in range(3)
    ]
    assert len({key.tobytes() for key in keys}) == 6
    middle = geometry.chunk_hashes(hashes, geometry.pieces(5, 2))
    assert (middle == keys[1::3]).all()
    whole = Geometry(12)
    assert (whole.chunk_hashes(hashes, whole.pieces()) == hashes).all()
    assert part_keys(hashes[:0], [0, 1]).shape == (0, 32)


def test_places_are_checked_as_a_whole() -> None:
    iov = ffs.Iov(8192)
    good = look_at(Places(iov, np.array([0, 4096]), np.array([100, 4096])), 2, 4096, writable=False)
    assert isinstance(good, SharedBlocks)
    assert (good.offsets.tolist(), good.lengths.tolist()) == ([0, 4096], [100, 4096])
    pieces = Geometry(4096, 2).pieces()
    parts = cut(look_at(Places(iov, np.array([0, 4096])), 2, 4096, writable=True), pieces)
    assert isinstance(parts, SharedBlocks)
    assert parts.offsets.tolist() == [0, 2048, 4096, 6144]
    assert parts.lengths.tolist() == [2048] * 4
    for places, writable, why in (
        (Places(iov, np.array([0, 4097])), True, "place 1"),
        (Places(iov, np.array([-1, 0])), True, "place 0"),
        (Places(iov, np.array([0, 0]), 4095), True, "destination 0"),
        (Places(iov, np.array([0, 0]), np.array([1, 0])), False, "block 1"),
        (Places(iov, np.array([0])), True, "one for each of 2 keys"),
        (Places(iov, np.array([0.0, 1.0])), True, "integers"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            look_at(places, 2, 4096, writable=writable)

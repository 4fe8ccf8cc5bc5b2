"""int8 values of KV blocks (docs/kv.md): keys untouched, the bound, what can't be coded, the bench's rows."""

from __future__ import annotations

import errno
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffs.errors import FfsError, InvalidArgument
from ffs.kv import int8
from ffs.kv.int8 import BlockShape

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def block_of(shape: BlockShape, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    inner = (shape.tokens, shape.heads) if shape.order == "tokens" else (shape.heads, shape.tokens)
    numbers = torch.randn((2, shape.layers, *inner, shape.head_size), generator=generator) * scale
    return numbers.to(DTYPES[shape.dtype])


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        BlockShape,
        layers=st.integers(1, 3),
        tokens=st.integers(1, 20),
        heads=st.integers(1, 3),
        head_size=st.integers(1, 70),
        dtype=st.sampled_from(sorted(DTYPES)),
        order=st.sampled_from(["tokens", "heads"]),
    ),
    st.sampled_from([1e-7, 1e-3, 1.0, 1e4]),
    st.integers(0, 1000),
)
def test_keys_are_kept_and_values_are_within_the_bound(shape: BlockShape, scale: float, seed: int) -> None:
    block = block_of(shape, scale, seed)
    coded = np.empty(shape.coded_bytes, dtype=np.uint8)
    back = torch.empty_like(block)
    int8.encode(shape, block, coded)
    int8.decode(shape, coded, back)
    assert torch.equal(back[0].view(torch.int16), block[0].view(torch.int16))
    # The bound by torch's own arithmetic, head by head.
    axis = (1, 3) if shape.order == "tokens" else (2, 3)
    was, now = block[1].double(), back[1].double()
    low, high = was.amin(axis, keepdim=True), was.amax(axis, keepdim=True)
    bound = low.clone()
    for at in np.ndindex(*bound.shape):
        bound[at] = int8.error_bound(shape.dtype, float(low[at]), float(high[at]))
    assert ((was - now).abs() <= bound).all()


def test_the_bound_is_not_loose() -> None:
    shape = BlockShape(layers=2, tokens=64, heads=4, head_size=128, dtype="float16")
    block = block_of(shape)
    coded, back = np.empty(shape.coded_bytes, dtype=np.uint8), torch.empty_like(block)
    int8.encode(shape, block, coded)
    int8.decode(shape, coded, back)
    assert 0.5 < int8.worst_of_bound(shape, block, back) <= 1


def test_sizes() -> None:
    shape = BlockShape(layers=32, tokens=16, heads=8, head_size=128)
    assert shape.plain_bytes == 2 * 32 * 16 * 8 * 128 * 2
    assert shape.ratio == pytest.approx(4 / 3, rel=0.003)
    assert shape.coded_bytes % 4096 == 0  # what servers read straight into an Iov


def test_coded_blocks_of_before_are_read() -> None:
    """They weren't filled up to whole pages."""
    shape = BlockShape(layers=2, tokens=16, heads=4, head_size=64, dtype="float16")
    block = block_of(shape)
    coded, back = np.full(shape.coded_bytes, 7, dtype=np.uint8), torch.empty_like(block)
    int8.encode(shape, block, coded)
    used = 3 * shape.values + 8 * shape.layers * shape.heads
    filling = coded[used:-28]
    assert len(filling) > 0
    assert not filling.any()
    int8.decode(shape, np.concatenate([coded[:used], coded[-28:]]), back)
    assert 0 < int8.worst_of_bound(shape, block, back) <= 1
    for wrong in (coded[:-1], coded[:-28], np.concatenate([coded, coded[:4096]])):
        with pytest.raises(InvalidArgument, match="has 28672 bytes"):
            int8.decode(shape, wrong, back)


@pytest.mark.parametrize(
    "fields",
    [
        # Coded to 144 bytes, as many as it has plain: nobody could tell one from the other.
        {"layers": 1, "tokens": 1, "heads": 1, "head_size": 36},
        {"layers": 1, "tokens": 16, "heads": 1, "head_size": 64},  # 4096, and a page when it is coded
    ],
)
def test_what_does_not_become_smaller_has_no_space(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="use a plain space"):
        BlockShape(**fields).geometry()


def test_heads_do_not_widen_each_other() -> None:
    shape = BlockShape(layers=1, tokens=4, heads=2, head_size=8, dtype="float16")
    block = block_of(shape)
    block[1, 0, :, 0] *= 1000
    coded, back = np.empty(shape.coded_bytes, dtype=np.uint8), torch.empty_like(block)
    int8.encode(shape, block, coded)
    int8.decode(shape, coded, back)
    assert (block[1, 0, :, 1] - back[1, 0, :, 1]).abs().max() < 0.02


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_what_is_not_finite_is_refused_in_values_and_kept_in_keys(dtype: str, bad: float) -> None:
    shape = BlockShape(layers=1, tokens=3, heads=1, head_size=11, dtype=dtype)
    block = block_of(shape)
    coded, back = np.empty(shape.coded_bytes, dtype=np.uint8), torch.empty_like(block)
    block[0, 0, 2, 0, 10] = bad
    int8.encode(shape, block, coded)
    int8.decode(shape, coded, back)
    assert torch.equal(back[0].view(torch.int16), block[0].view(torch.int16))
    block[1, 0, 2, 0, 10] = bad
    with pytest.raises(FfsError) as caught:
        int8.encode(shape, block, coded)
    assert caught.value.errno == errno.ERANGE


def test_memory_that_does_not_fit_is_named() -> None:
    shape = BlockShape(layers=1, tokens=2, heads=1, head_size=4)
    block, coded = block_of(shape), np.empty(shape.coded_bytes, dtype=np.uint8)
    with pytest.raises(InvalidArgument, match="has 32 bytes, not 31"):
        int8.encode(shape, bytes(31), coded)
    with pytest.raises(InvalidArgument, match="can be written"):
        int8.decode(shape, coded, bytes(32))
    with pytest.raises(InvalidArgument, match="contiguous"):
        int8.encode(shape, block.transpose(0, 2), coded)
    for wrong in ({"dtype": "float32"}, {"heads": 0}):
        with pytest.raises(InvalidArgument):
            BlockShape(**{"layers": 1, "tokens": 2, "heads": 1, "head_size": 4, **wrong})  # type: ignore[arg-type]


def test_the_rows_of_the_bench() -> None:
    rows = list(int8.bench_rows(BlockShape(layers=2, tokens=8, heads=2, head_size=32), seconds=0.01))
    assert [row.dtype for row in rows] == ["float16", "bfloat16"]
    for row in rows:
        assert 0 < row.worst_of_bound <= 1
        assert row.values_ratio > 1.8
        assert row.encode_gb_s > 0
        assert row.decode_gb_s > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("order", ["tokens", "heads"])
def test_a_space_keeps_the_shape(dtype: str, order: Literal["tokens", "heads"]) -> None:
    shape = BlockShape(layers=3, tokens=16, heads=5, head_size=64, dtype=dtype, order=order)
    assert len(shape.stored) <= 64
    assert BlockShape.of_stored(shape.stored) == shape
    assert BlockShape.of_stored(b"") is None
    assert BlockShape.of_stored(b"the hash of somebody's layout") is None
    newer = bytearray(shape.stored)
    newer[4] = 2
    for unknown in (bytes(newer), shape.stored[:-1]):
        with pytest.raises(InvalidArgument, match="newer version"):
            BlockShape.of_stored(unknown)

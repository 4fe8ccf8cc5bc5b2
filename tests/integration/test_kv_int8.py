"""Spaces with int8 values on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from kv_blocks import keys_of, statuses

from ffs import errors
from ffs.cli import main
from ffs.client.client import Client
from ffs.kv import Space, Status, int8
from ffs.kv.int8 import BlockShape, Int8Space

SHAPE = BlockShape(layers=2, tokens=16, heads=4, head_size=64, dtype="bfloat16")


@pytest.fixture
def space(client: Client, home: str) -> Iterator[Int8Space]:
    with Int8Space.create(client, f"{home}/kv", SHAPE) as made:
        yield made


def blocks_of(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    size = (2, SHAPE.layers, SHAPE.tokens, SHAPE.heads, SHAPE.head_size)
    return [torch.randn(size, generator=generator).to(torch.bfloat16) for _ in range(count)]


def test_blocks_come_back_smaller_stored_and_within_the_bound(
    client: Client, home: str, space: Int8Space
) -> None:
    keys, blocks = keys_of(5), blocks_of(5)
    blocks[3][1, 0, 0, 0, 0] = float("inf")  # can't be coded
    assert statuses(space.put_many(keys[:4], blocks[:4])) == [Status.STORED] * 4
    lengths = space.space.exists_many(keys).lengths.tolist()
    assert lengths == [SHAPE.coded_bytes] * 3 + [SHAPE.plain_bytes, 0]
    with Int8Space.open(client, f"{home}/kv") as again:  # the space says its shape
        assert again.shape == SHAPE
        into = [torch.zeros_like(block) for block in blocks]
        got = again.get_many(keys, into)
    assert statuses(got) == [Status.HIT] * 4 + [Status.MISS]
    assert got.lengths.tolist() == [SHAPE.plain_bytes] * 4 + [0]
    for was, now in zip(blocks[:3], into[:3], strict=True):
        assert torch.equal(was[0], now[0])
        assert 0 < int8.worst_of_bound(SHAPE, was, now) <= 1
    assert torch.equal(blocks[3], into[3])


def test_a_block_of_another_shape_is_a_miss(client: Client, home: str, space: Int8Space) -> None:
    keys, blocks = keys_of(2), blocks_of(1)
    assert statuses(space.put_many(keys[:1], blocks)) == [Status.STORED]
    space.space.put_many(keys[1:], [np.zeros(SHAPE.coded_bytes - 1, dtype=np.uint8)])
    into = [torch.zeros_like(blocks[0]) for _ in keys]
    assert statuses(space.get_many(keys, into)) == [Status.HIT, Status.MISS]
    # As many bytes, otherwise arranged.
    for other in ({"dtype": "float16"}, {"order": "heads"}, {"tokens": 64, "head_size": 16}):
        shape = msgspec.structs.replace(SHAPE, **other)
        with pytest.raises(errors.InvalidArgument, match="blocks of another shape"):
            Int8Space.open(client, f"{home}/kv", shape)
        with pytest.raises(errors.Exists, match="identity"):
            Int8Space.create(client, f"{home}/kv", shape, exist_ok=True)
        space.space.identity = b""  # as in a space that was made before it kept its shape
        assert statuses(Int8Space(space.space, shape).get_many(keys[:1], into[:1])) == [Status.MISS]
        space.space.identity = SHAPE.stored


def test_a_space_without_a_shape_asks_for_one(client: Client, home: str) -> None:
    Space.create(client, f"{home}/plain", block_bytes=SHAPE.plain_bytes).close()
    with pytest.raises(errors.InvalidArgument, match="keeps no shape"):
        Int8Space.open(client, f"{home}/plain")
    with Int8Space.open(client, f"{home}/plain", SHAPE) as space:
        assert space.shape == SHAPE


def test_the_command_makes_the_same_space(
    client: Client, address: str, home: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["kv", "create", f"{home}/cli", "--values", "int8", "--shape", "2,16,4,64", "--quota", "64M"]
    assert main([*line, "--cluster", address]) == 0
    assert "int8 values" in capsys.readouterr().out
    with Int8Space.open(client, f"{home}/cli") as space:
        assert space.shape == SHAPE
    with Int8Space.create(client, f"{home}/cli", SHAPE, exist_ok=True, quota_bytes=64 << 20) as space:
        keys, blocks = keys_of(1), blocks_of(1)
        assert statuses(space.put_many(keys, blocks)) == [Status.STORED]
        assert space.space.exists_many(keys).lengths.tolist() == [SHAPE.coded_bytes]
    with pytest.raises(errors.InvalidArgument, match="aren't cut"):
        Int8Space.create(client, f"{home}/parts", SHAPE, parts=2)
    large = msgspec.structs.replace(SHAPE, layers=2000)
    with pytest.raises(errors.InvalidArgument, match="16 MiB"):
        Int8Space.create(client, f"{home}/large", large)
    assert not client.exists(f"{home}/parts")
    Space.create(client, f"{home}/cut", block_bytes=SHAPE.plain_bytes, parts=2).close()
    with pytest.raises(errors.InvalidArgument, match="aren't cut"):
        Int8Space.open(client, f"{home}/cut", SHAPE)


def test_blocks_that_do_not_fit_the_space_are_refused(client: Client, home: str) -> None:
    Space.create(client, f"{home}/small", block_bytes=4096).close()
    with pytest.raises(errors.InvalidArgument, match="the space takes 4096"):
        Int8Space.open(client, f"{home}/small", SHAPE)

"""Placement and slicing: scalar against array form, properties, and the golden vectors that pin placement."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffs import errors
from ffs.layout import (
    MAX_FILE_BYTES,
    Layout,
    Placement,
    chunk_slices,
    chunk_slices_array,
    file_chunk_key,
    file_chunk_keys,
    mix64,
    splitmix64,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "placement.json"
chunk_sizes = st.integers(12, 24).map(lambda n: 1 << n)


def near_powers(limit: int) -> st.SearchStrategy[int]:
    """Numbers around powers of two, where arithmetic goes wrong (S14)."""
    power = st.integers(0, limit).map(lambda n: 1 << n)
    return st.builds(lambda p, d: max(0, p + d), power, st.integers(-2, 2)) | st.integers(0, 1 << limit)


@given(chunk_sizes, st.lists(st.tuples(near_powers(40), near_powers(25)), max_size=6))
def test_slices_scalar_equals_array(size: int, requests: list[tuple[int, int]]) -> None:
    requests = [(offset, length % (size * 40)) for offset, length in requests]
    offsets = np.array([r[0] for r in requests], dtype=np.int64)
    lengths = np.array([r[1] for r in requests], dtype=np.int64)
    arrays = chunk_slices_array(size, offsets, lengths)
    got = list(
        zip(
            arrays.request.tolist(),
            arrays.chunk.tolist(),
            arrays.offset.tolist(),
            arrays.length.tolist(),
            arrays.position.tolist(),
            strict=True,
        )
    )
    want = [(i, *piece) for i, r in enumerate(requests) for piece in chunk_slices(size, *r)]
    assert got == want


@given(chunk_sizes, near_powers(61), st.integers(0, 1 << 24))
def test_slices_cover_the_request(size: int, offset: int, length: int) -> None:
    length %= size * 40
    offset = min(offset, MAX_FILE_BYTES - length)
    position = 0
    for piece in chunk_slices(size, offset, length):
        assert piece.position == position
        assert piece.length > 0
        assert piece.offset + piece.length <= size
        assert piece.chunk * size + piece.offset == offset + position
        position += piece.length
    assert position == length


def test_slices_refuse() -> None:
    for bad in [(-1, 1), (1, -1)]:
        with pytest.raises(errors.InvalidArgument):
            chunk_slices(4096, *bad)
        with pytest.raises(errors.InvalidArgument):
            chunk_slices_array(4096, np.array(bad[:1]), np.array(bad[1:]))
    with pytest.raises(errors.TooLarge):
        chunk_slices(4096, MAX_FILE_BYTES, 1)
    with pytest.raises(errors.TooLarge):
        chunk_slices_array(4096, np.array([MAX_FILE_BYTES]), np.array([1]))
    with pytest.raises(errors.InvalidArgument):
        chunk_slices_array(4096, np.array([0, 1]), np.array([1]))


def layout(seed: int, stripe: int = 0, size: int = 1 << 20) -> Layout:
    return Layout(1, 1, seed, size, stripe)


@given(st.integers(0, 2**64 - 1), st.integers(1, 300), st.data())
def test_a_stripe_is_distinct_chains_in_turn(seed: int, chains: int, data: st.DataObject) -> None:
    stripe = data.draw(st.integers(0, chains))
    placement = Placement(layout(seed, stripe), range(1000, 1000 + chains))
    used = stripe or chains
    order = [placement.chain_of_index(i) for i in range(used)]
    assert sorted(set(order)) == sorted(order) == sorted(placement.chains)
    assert [placement.chain_of_index(used + i) for i in range(used)] == order


@given(
    st.integers(0, 2**64 - 1), st.integers(1, 50), st.lists(st.binary(min_size=16, max_size=16), max_size=20)
)
def test_chains_scalar_equals_array(seed: int, chains: int, keys: list[bytes]) -> None:
    placement = Placement(layout(seed), range(chains))
    array = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)
    assert placement.chains_of(array).tolist() == [placement.chain_of(key) for key in keys]


@given(st.lists(near_powers(50), max_size=10), st.integers(0, 2**64 - 1))
def test_file_keys(indexes: list[int], seed: int) -> None:
    placement = Placement(layout(seed, 5), range(9))
    array = np.array(indexes, dtype=np.int64)
    keys = [file_chunk_key(i) for i in indexes]
    assert all(
        key[:8] == bytes(8) and int.from_bytes(key[8:], "big") == i
        for key, i in zip(keys, indexes, strict=True)
    )
    assert file_chunk_keys(array).tobytes() == b"".join(keys)
    by_key = [placement.chain_of(key) for key in keys]
    assert by_key == [placement.chain_of_index(i) for i in indexes]
    assert by_key == placement.chains_of_indexes(array).tolist()
    assert by_key == placement.chains_of(file_chunk_keys(array)).tolist()


def test_hashed_keys_spread() -> None:
    """Hash keys of a KV space fall evenly: no chain has 20 % more or less than its share."""
    placement = Placement(layout(7), range(32))
    keys = np.frombuffer(
        b"".join(hashlib.sha256(b"%d" % i).digest()[:16] for i in range(64_000)), dtype=np.uint8
    )
    counts = np.bincount(placement.chains_of(keys.reshape(-1, 16)), minlength=32)
    assert counts.min() > 1600
    assert counts.max() < 2400


def test_first_chunks_spread() -> None:
    """Small files (one chunk each, seeds in sequence) fall evenly over the table."""
    counts = np.zeros(32, dtype=int)
    for seed in range(6400):
        counts[Placement(layout(seed), range(32)).chain_of_index(0)] += 1
    assert counts.min() > 140
    assert counts.max() < 260


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (layout(1, size=4095), "power of two"),
        (layout(1, size=2048), "power of two"),
        (layout(1, size=1 << 25), "power of two"),
        (layout(1, stripe=4), "has 3 chains"),
        (layout(1, stripe=-1), "has 3 chains"),
        (layout(-1), "u64"),
    ],
)
def test_bad_layouts(bad: Layout, match: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=match):
        Placement(bad, [1, 2, 3])
    with pytest.raises(errors.InvalidArgument, match="no chains"):
        Placement(layout(1), [])


def test_mixing_constants() -> None:
    """splitmix64 as published: the first outputs from seed 1234567."""
    assert [splitmix64(1234567, n) for n in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    assert mix64(0) == 0


def test_golden_placement() -> None:
    """No release may place a key elsewhere."""
    golden = json.loads(GOLDEN.read_text())
    assert golden["version"] == 1
    for case in golden["cases"]:
        fields = msgpack.unpackb(bytes.fromhex(case["layout"]))
        record = msgspec.msgpack.decode(bytes.fromhex(case["layout"]), type=Layout)
        assert fields == [record.table, record.table_version, record.seed, record.chunk_size, record.stripe]
        placement = Placement(record, case["chains"])
        assert placement.chains == case["order"]
        assert [placement.chain_of_index(i) for i in case["indexes"]] == case["index_chains"]
        assert [placement.chain_of(bytes.fromhex(key)) for key in case["keys"]] == case["key_chains"]


def make_golden() -> None:
    """Writes the file; only for new cases, never to change one."""
    cases = []
    for seed, count, stripe in [
        (0, 1, 0),
        (1, 3, 0),
        (17409, 32, 0),
        (2**64 - 1, 32, 8),
        (99, 97, 5),
        (5, 96, 96),
    ]:
        record = layout(seed, stripe)
        chains = list(range(100, 100 + count))
        placement = Placement(record, chains)
        indexes = [0, 1, 2, 7, 31, 32, 1000, 2**32, 2**40 + 3]
        keys = [hashlib.sha256(b"%d/%d" % (seed, i)).digest()[:16] for i in range(8)] + [b"\xff" * 16]
        cases.append(
            {
                "layout": msgspec.msgpack.encode(record).hex(),
                "chains": chains,
                "order": placement.chains,
                "indexes": indexes,
                "index_chains": [placement.chain_of_index(i) for i in indexes],
                "keys": [key.hex() for key in keys],
                "key_chains": [placement.chain_of(key) for key in keys],
            }
        )
    GOLDEN.write_text(json.dumps({"version": 1, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    make_golden()

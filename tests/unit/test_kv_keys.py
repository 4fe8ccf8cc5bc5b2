"""Keys of KV blocks: golden vectors, chaining, fields that can't be mistaken for another (K8-K11)."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffs.errors import InvalidArgument
from ffs.kv.keys import Identity, block_hash, hash_tokens, key_array, part_key, root_hash

GOLDEN = Path(__file__).parents[1] / "golden" / "kv_keys.json"


def test_golden_vectors() -> None:
    for entry in json.loads(GOLDEN.read_text()):
        identity = Identity(**entry["identity"])
        assert root_hash(identity).hex() == entry["root"]
        assert [key.hex() for key in hash_tokens(identity, entry["tokens"])] == entry["keys"]


def test_golden_by_hand_without_our_encoder() -> None:
    """The bytes that docs/kv_keys.md describes, put together here once more."""
    import blake3

    entry = json.loads(GOLDEN.read_text())[0]
    data = b""
    for name, value in entry["identity"].items():
        raw = value.encode() if isinstance(value, str) else value.to_bytes(8, "little")
        data += len(name).to_bytes(2, "little") + name.encode() + len(raw).to_bytes(8, "little") + raw
    root = blake3.blake3(data, derive_key_context="ffs 2026 kv block chain: root").digest()
    assert root.hex() == entry["root"]
    tokens = b"".join(t.to_bytes(4, "little") for t in entry["tokens"][: entry["identity"]["block_tokens"]])
    block = b"\x06\x00parent" + (32).to_bytes(8, "little") + root
    block += b"\x06\x00tokens" + len(tokens).to_bytes(8, "little") + tokens
    first = blake3.blake3(block, derive_key_context="ffs 2026 kv block chain: block").hexdigest()
    assert first == entry["keys"][0]


def _field(name: str, value: bytes) -> bytes:
    """As docs/kv_keys.md says it, once more."""
    return len(name).to_bytes(2, "little") + name.encode() + len(value).to_bytes(8, "little") + value


def test_golden_extras_and_parts_by_hand() -> None:
    import blake3

    rows = json.loads((GOLDEN.parent / "kv_block_keys.json").read_text())
    for row in rows["extra"]:
        extra = {name: bytes.fromhex(value) for name, value in row["extra"].items()}
        assert block_hash(bytes.fromhex(row["parent"]), row["tokens"], extra).hex() == row["key"]
        data = _field("parent", bytes.fromhex(row["parent"]))
        data += b"".join(_field("extra." + name, extra[name]) for name in sorted(extra))
        data += _field("tokens", b"".join(token.to_bytes(4, "little") for token in row["tokens"]))
        context = "ffs 2026 kv block chain: block"
        assert blake3.blake3(data, derive_key_context=context).hexdigest() == row["key"]
    for row in rows["parts"]:
        assert part_key(bytes.fromhex(row["key"]), row["part"]).hex() == row["chunk"]
        data = _field("block", bytes.fromhex(row["key"])) + _field("part", row["part"].to_bytes(8, "little"))
        context = "ffs 2026 kv block chain: part"
        assert blake3.blake3(data, derive_key_context=context).hexdigest() == row["chunk"]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_k10_same_in_every_process(seed: str) -> None:
    """K10: no builtin hash() in it."""
    code = "from ffs.kv.keys import *; print(hash_tokens(Identity('m', salt='s'), range(64))[-1].hex())"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == hash_tokens(Identity("m", salt="s"), range(64))[-1].hex()


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Identity)])
def test_k4_k8_every_field_counts(field: str) -> None:
    """Another layout, dtype, rank or model is another key."""
    base = Identity("m")
    value = getattr(base, field)
    changed = dataclasses.replace(base, **{field: value + ("x" if isinstance(value, str) else 1)})
    assert root_hash(base) != root_hash(changed)


texts = st.text(alphabet="ab\x00\u00e9", max_size=3)
identities = st.builds(
    Identity,
    texts,
    texts,
    texts,
    texts,
    adapter=texts,
    salt=texts,
    tp_rank=st.integers(0, 2),
    tp_size=st.integers(0, 2),
)


@settings(deadline=None)
@given(identities, identities)
def test_k9_other_identities_have_other_roots(one: Identity, other: Identity) -> None:
    """Whatever stands in the fields, few letters and empty ones, so that they would run into each other."""
    assert (root_hash(one) == root_hash(other)) is (one == other)


def test_k9_adapter_equal_to_a_salt_is_another_key() -> None:
    """A name that stands in another field never collides."""
    assert root_hash(Identity("m", adapter="a")) != root_hash(Identity("m", salt="a"))
    assert root_hash(Identity("ma", revision="b")) != root_hash(Identity("m", revision="ab"))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 40))
def test_k11_boundaries(block: int, count: int) -> None:
    """A key for each whole block, none for a part, and a longer sequence keeps its prefix's keys."""
    identity = Identity("m", block_tokens=block)
    keys = hash_tokens(identity, range(count))
    assert len(keys) == count // block
    assert len(set(keys)) == len(keys)
    assert hash_tokens(identity, range(count + 1))[: len(keys)] == keys


def test_an_earlier_token_changes_all_later_keys() -> None:
    identity = Identity("m", block_tokens=4)
    one = hash_tokens(identity, range(16))
    other = hash_tokens(identity, [0, 1, 2, 3, 99, *range(5, 16)])
    assert one[0] == other[0]
    assert all(a != b for a, b in zip(one[1:], other[1:], strict=True))


def test_extra_is_a_field_and_in_no_order() -> None:
    parent = root_hash(Identity("m"))
    plain = block_hash(parent, [1, 2])
    assert block_hash(parent, [1, 2], {"image": b"x"}) != plain
    assert block_hash(parent, [1], {"a": b"1", "b": b"2"}) == block_hash(parent, [1], {"b": b"2", "a": b"1"})
    assert block_hash(parent, [1], {"a": b"12"}) != block_hash(parent, [1], {"a1": b"2"})


@pytest.mark.parametrize(
    "call",
    [
        lambda: block_hash(b"short", [1]),
        lambda: block_hash(bytes(32), []),
        lambda: block_hash(bytes(32), [-1]),
        lambda: block_hash(bytes(32), [1 << 32]),
        lambda: block_hash(bytes(32), [1.5]),  # type: ignore[list-item]
        lambda: root_hash(Identity("m", block_tokens=0)),
        lambda: root_hash(Identity("m", tp_rank=-1)),
        lambda: part_key(bytes(31), 0),
        lambda: part_key(bytes(32), -1),
        lambda: key_array([bytes(32), bytes(31)]),
        lambda: key_array(["a" * 32]),  # type: ignore[list-item]
        lambda: key_array(np.zeros((2, 31), np.uint8)),
    ],
)
def test_bad_input_is_named(call: object) -> None:
    with pytest.raises(InvalidArgument):
        call()  # type: ignore[operator]


def test_key_array_takes_both_forms() -> None:
    keys = [bytes([i]) * 32 for i in range(5)]
    array = key_array(keys)
    assert array.shape == (5, 32)
    assert (key_array(array) == array).all()
    assert key_array([]).shape == (0, 32)

"""manifest.json: round trip, and refusal of whatever contradicts itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ffs.checkpoint.manifest import (
    Manifest,
    Part,
    Shard,
    Tensor,
    _in_slices,
    _wrong_tensor,
    decode,
    encode,
)
from ffs.errors import Damaged, VersionMismatch

GOOD = Manifest(
    shards=(Shard("model.safetensors", 4104),),
    tensors={"a": Tensor("F32", (2,), (Part(0, 4096, 8, "0" * 64),))},
    tied={"b": "a"},
)


def test_round_trip() -> None:
    assert decode(encode(GOOD), "m") == GOOD
    plain = json.loads(encode(GOOD))
    assert plain["format"] == "ffs-checkpoint"
    assert plain["tensors"]["a"]["shape"] == [2]


def _with(path: list[object], value: object) -> bytes:
    tree = json.loads(encode(GOOD))
    at = tree
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["format"], "other"),
        (["hash"], "md5"),
        (["shards", 0, "file"], "../x"),
        (["shards", 0, "file"], ""),
        (["shards", 0, "bytes"], 4103),
        (["shards", 0, "bytes"], -1),
        (["tensors", "a", "parts", 0, "shard"], 1),
        (["tensors", "a", "parts", 0, "shard"], -1),
        (["tensors", "a", "dtype"], "F31"),
        (["tensors", "a", "shape"], [3]),
        (["tensors", "a", "shape"], [-1, -2]),
        (["tensors", "a", "parts", 0, "offset"], -8),
        (["tensors", "a", "parts", 0, "bytes"], 9),
        (["tensors", "a", "parts", 0, "hash"], "00"),
        (["tensors", "a", "framework"], "jax"),
        (["tied", "b"], "c"),
        (["tied", "a"], "a"),
        (["tensors", "a", "parts"], []),
        (["tensors", "a", "parts", 0, "begin"], [0]),
        (["tensors"], 3),
    ],
)
def test_contradictions_are_refused(path: list[object], value: object) -> None:
    with pytest.raises(Damaged, match="some/manifest"):
        decode(_with(path, value), "some/manifest")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}"])
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(Damaged):
        decode(data, "m")


def test_a_newer_version_says_so() -> None:
    with pytest.raises(VersionMismatch, match="update ffs"):
        decode(_with(["version"], 3), "m")


@st.composite
def sliced(draw: st.DrawFn) -> tuple[tuple[Shard, ...], Tensor]:
    """A tensor in slices of the first dimension, each in a shard of its own."""
    rows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    rest = draw(st.lists(st.integers(0, 4), max_size=2))
    row = 4
    for extent in rest:
        row *= extent
    parts, at = [], 0
    for number, count in enumerate(rows):
        place = (at, *(0 for _ in rest)), (count, *rest)
        parts.append(Part(number, 8, count * row, "0" * 32, *place))
        at += count
    shards = tuple(Shard(f"s{n}", 8 + count * row) for n, count in enumerate(rows))
    return shards, Tensor("F32", (at, *rest), tuple(parts))


@given(sliced(), st.data())
def test_what_is_seen_at_once_is_seen_in_full_too(
    whole: tuple[tuple[Shard, ...], Tensor], data: st.DataObject
) -> None:
    """The short way takes nothing that the other refuses, and all that ranks write."""
    shards, tensor = whole
    sizes = [shard.bytes for shard in shards]
    assert _in_slices(sizes, tensor, 32)
    assert _wrong_tensor(shards, tensor, 32) == ""
    number = data.draw(st.integers(0, len(tensor.parts) - 1))
    part = tensor.parts[number]
    assert part.begin is not None
    assert part.extent is not None
    dimension = data.draw(st.integers(0, len(tensor.shape) - 1))
    by = data.draw(st.sampled_from((-1, 1)))

    def moved(box: tuple[int, ...]) -> tuple[int, ...]:
        return (*box[:dimension], box[dimension] + by, *box[dimension + 1 :])

    changes: list[dict[str, Any]] = [
        {"begin": moved(part.begin)},
        {"extent": moved(part.extent)},
        {"begin": None},
        {"begin": None, "extent": None},
        {"begin": part.begin[1:], "extent": part.extent[1:]},
        {"bytes": part.bytes + by},
        {"offset": data.draw(st.sampled_from((-8, 9)))},
        {"shard": data.draw(st.sampled_from((-1, len(shards))))},
        {"hash": "0" * 31},
    ]
    other = replace(part, **data.draw(st.sampled_from(changes)))
    parts = [*tensor.parts[:number], other, *tensor.parts[number + 1 :]]
    if data.draw(st.booleans()):
        parts.reverse()
    changed = replace(tensor, parts=tuple(parts))
    assert not _in_slices(sizes, changed, 32) or _wrong_tensor(shards, changed, 32) == ""

"""manifest.json: round trip, and refusal of whatever contradicts itself."""

from __future__ import annotations

import json

import pytest

from ffs.checkpoint.manifest import Manifest, Part, Shard, Tensor, decode, encode
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
        decode(_with(["version"], 2), "m")

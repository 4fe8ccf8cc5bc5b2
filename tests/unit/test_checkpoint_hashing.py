"""Hashes of checkpoints: the same as other implementations have, named by the manifest, and those of older
checkpoints stay verifiable."""

from __future__ import annotations

import json
from pathlib import Path

import blake3
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ffs.checkpoint.hashing import DEFAULT, check_algorithm, hash_all, hash_one, hash_spans
from ffs.checkpoint.manifest import Manifest, Part, Shard, Tensor, decode, encode
from ffs.checkpoint.persist import Before, known_files
from ffs.checkpoint.report import RankReport, merge
from ffs.errors import Damaged, InvalidArgument

GOLDEN = Path(__file__).parent.parent / "golden" / "checkpoint"
PEERS = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
}
# Of which xxh3 changes its way, and with them what lies around.
SIZES = (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, 1025, 70000)


@pytest.mark.parametrize("algorithm", PEERS)
def test_what_other_implementations_have(algorithm: str) -> None:
    data = np.random.default_rng(1).integers(0, 256, 80000, np.uint8)
    spans = [(begin, begin + size) for size in SIZES for begin in (0, 1, 63)]
    wanted = [PEERS[algorithm](data[begin:end].tobytes()) for begin, end in spans]
    assert hash_spans(algorithm, data, spans) == wanted
    assert hash_all(algorithm, (data[begin:end] for begin, end in spans)) == wanted
    assert hash_one(algorithm, data.tobytes()) == PEERS[algorithm](data.tobytes())
    assert hash_all(algorithm, []) == []


@given(st.binary(max_size=3000), st.integers(0, 7), st.integers(0, 255))
def test_a_byte_that_changes_changes_the_hash(data: bytes, bit: int, at: int) -> None:
    if not data:
        return
    other = bytearray(data)
    other[at % len(data)] ^= 1 << bit
    assert hash_one("xxh3-128", data) != hash_one("xxh3-128", bytes(other))


def test_an_unknown_algorithm_is_said() -> None:
    check_algorithm(DEFAULT)
    with pytest.raises(InvalidArgument, match="give 'xxh3-128' or 'blake3'"):
        check_algorithm("md5")


@pytest.mark.parametrize(("version", "algorithm"), [(1, "blake3"), (2, "xxh3-128")])
def test_manifests_of_releases_stay_readable(version: int, algorithm: str) -> None:
    """Its hashes are of these bytes, and this program writes the same text again."""
    data = bytes(range(250)) + bytes(6)
    text = (GOLDEN / f"manifest_v{version}.json").read_bytes()
    manifest = decode(text, "golden")
    assert (manifest.version, manifest.hash) == (version, algorithm)
    first, second = manifest.tensors["model.w"].parts
    (bias,) = manifest.tensors["model.b"].parts
    assert [first.hash, second.hash, bias.hash] == [
        hash_one(algorithm, piece) for piece in (data[:128], data[128:], data[:12])
    ]
    assert encode(manifest) == text


def test_hashes_are_as_long_as_the_algorithm_says() -> None:
    tree = json.loads((GOLDEN / "manifest_v2.json").read_bytes())
    tree["hash"] = "blake3"
    with pytest.raises(Damaged, match="hash of another length"):
        decode(json.dumps(tree).encode(), "m")
    # A program that knows version 1 alone would take its hashes for BLAKE3.
    tree |= {"hash": "xxh3-128", "version": 1}
    with pytest.raises(Damaged, match="its version has no hash 'xxh3-128'"):
        decode(json.dumps(tree).encode(), "m")


def report(rank: int, algorithm: str) -> RankReport:
    digest = hash_one(algorithm, bytes(8))
    tensors = {f"t{rank}": Tensor("F32", (2,), (Part(0, 4096, 8, digest),))}
    declared: dict[str, tuple[str, tuple[int, ...]]] = {"t0": ("F32", (2,)), "t1": ("F32", (2,))}
    return RankReport(rank, 2, (Shard(f"f{rank}", 4104),), tensors, {}, None, declared, algorithm)


def test_ranks_agree_on_the_algorithm() -> None:
    for algorithm, version in (("xxh3-128", 2), ("blake3", 1)):
        manifest = merge([report(0, algorithm), report(1, algorithm)], 1, "c")
        assert (manifest.hash, manifest.version) == (algorithm, version)
        assert decode(encode(manifest), "c") == manifest
    with pytest.raises(InvalidArgument, match="rank 1 hashes with blake3, rank 0 with xxh3-128"):
        merge([report(0, "xxh3-128"), report(1, "blake3")], 1, "c")


def test_files_of_another_algorithm_are_not_taken_for_the_same() -> None:
    def of(algorithm: str) -> Manifest:
        return merge([report(0, algorithm), report(1, algorithm)], 1, "c")

    old, new = of("blake3"), of("xxh3-128")
    before = Before("/c", old.shards, old.tensors, lambda: old)
    for key, file in known_files(new.shards, new.tensors).items():
        assert before.file_of(key, file) is None
        assert before.file_of(key, "named otherwise") is None
    for key, file in known_files(old.shards, old.tensors).items():
        assert before.file_of(key, file) == file
    assert before.unchanged(new.tensors) == frozenset()

"""The calls of KV spaces on a real cluster: what goes in comes out, block by block. Faults:
test_kv_faults.py."""

from __future__ import annotations

import itertools
import json
import os
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_blocks import BLOCK, keys_of, payload, statuses

import ffs
import ffs.kv.space as space_module
from ffs import errors, kv
from ffs._native.ring import OP_REMOVE
from ffs.client.client import Client
from ffs.kv import Space, Status, ranges
from ffs.kv.serving.memory import Regions

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def space(client: Client, home: str) -> Iterator[Space]:
    with Space.create(client, f"{home}/kv", block_bytes=BLOCK) as made:
        yield made


# --- put, get, exists -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 600])
def test_round_trip_through_private_memory(space: Space, count: int) -> None:
    keys = keys_of(count)
    assert statuses(space.exists(keys)) == [Status.MISS] * count
    assert statuses(space.put(keys, [payload(key) for key in keys])) == [Status.STORED] * count
    into = [bytearray(BLOCK) for _ in keys]
    got = space.get(keys, into)
    assert statuses(got) == [Status.HIT] * count
    assert got.lengths.tolist() == [BLOCK] * count
    assert [bytes(block) for block in into] == [payload(key) for key in keys]
    assert statuses(space.exists(keys)) == [Status.HIT] * count


def test_round_trip_through_iovs(space: Space) -> None:
    keys = keys_of(32)
    source, target = ffs.Iov(32 * BLOCK), ffs.Iov(32 * BLOCK)
    source.numpy()[:] = np.frombuffer(b"".join(map(payload, keys)), dtype=np.uint8)
    assert space.put(keys, source).leading_hits() == 32
    assert space.get(keys[::-1], target).leading_hits() == 32
    assert bytes(target.buffer()) == b"".join(payload(key) for key in keys[::-1])
    slices = [target[i * BLOCK : (i + 1) * BLOCK] for i in (5, 3)]
    assert space.get(keys[:2], slices).leading_hits() == 2
    assert bytes(slices[0].view) == payload(keys[0])


@pytest.mark.parametrize("torn", [False, True])
def test_round_trip_through_memory_of_an_engine(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    """A few large blocks are read in ranges, and at once if they were put anew meanwhile (`torn`)."""
    lengths = [5 << 20, 3 << 20, (1 << 20) + 4096, (2 << 20) + 777, 5000]
    keys = keys_of(len(lengths))
    if torn:
        monkeypatch.setattr(ranges, "of_two_contents", lambda done: np.arange(len(done)) % 2 == 0)
    memory = np.zeros((3, 5 << 20), dtype=np.uint8)
    regions = Regions()
    regions.add(memory.ctypes.data, memory.nbytes)
    with Space.create(client, f"{home}/large", block_bytes=5 << 20) as space:
        space.put(keys, [payload(key, length) for key, length in zip(keys, lengths, strict=True)])
        for begin in (0, 2):
            some, sizes = keys[begin : begin + 3], lengths[begin : begin + 3]
            memory[:] = 0
            into = regions.blocks(memory.ctypes.data + np.arange(3) * (5 << 20), np.full(3, 5 << 20))
            got = space.get_many(some, into, offset=0, length=5 << 20)
            assert got.errors == {}
            assert got.lengths.tolist() == sizes
            for row, key, size in zip(memory, some, sizes, strict=True):
                assert row[:size].tobytes() == payload(key, size)
        other = space.get_many([bytes(32), keys[0]], regions.blocks([memory.ctypes.data] * 2, [5 << 20] * 2))
        assert statuses(other) == [Status.MISS, Status.HIT]
    regions.close()


def test_a_mixture_is_told_block_by_block(space: Space) -> None:
    keys = keys_of(9)
    space.put(keys[::2], [payload(key) for key in keys[::2]])
    got = space.get(keys, [bytearray(BLOCK) for _ in keys])
    assert statuses(got) == [Status.HIT if i % 2 == 0 else Status.MISS for i in range(9)]
    assert got.leading_hits() == 1
    assert space.exists(keys).hits.tolist() == [i % 2 == 0 for i in range(9)]
    assert got.errors == {}


def test_blocks_have_the_length_that_was_put(space: Space) -> None:
    keys = keys_of(5)
    lengths = [1, 511, 4096, 4097, BLOCK]
    space.put(keys, [payload(key, length) for key, length in zip(keys, lengths, strict=True)])
    into = [bytearray(BLOCK) for _ in keys]
    got = space.get(keys, into)
    assert got.lengths.tolist() == lengths
    assert space.exists(keys).lengths.tolist() == lengths
    for key, block, length in zip(keys, into, lengths, strict=True):
        assert bytes(block[:length]) == payload(key, length)


def test_the_first_put_wins_and_a_second_moves_nothing(space: Space) -> None:
    keys = keys_of(8)
    space.put(keys, [payload(key) for key in keys])
    again = space.put(keys, [bytes(BLOCK) for _ in keys])
    assert statuses(again) == [Status.HIT] * 8
    into = [bytearray(BLOCK) for _ in keys]
    space.get(keys, into)
    assert [bytes(block) for block in into] == [payload(key) for key in keys]


def test_the_second_half_of_the_key_is_compared(space: Space) -> None:
    key = keys_of(1)[0]
    other = key[:16] + bytes(16)
    space.put([key], [payload(key)])
    assert statuses(space.get([other], [bytearray(BLOCK)])) == [Status.MISS]
    assert statuses(space.exists([other])) == [Status.MISS]
    refused = space.put([other], [payload(other)])
    assert statuses(refused) == [Status.ERROR]
    assert isinstance(refused.errors[0], errors.TagMismatch)
    assert statuses(space.get([key], [bytearray(BLOCK)])) == [Status.HIT]


def test_spaces_are_apart(client: Client, home: str, space: Space) -> None:
    keys = keys_of(4)
    space.put(keys, [payload(key) for key in keys])
    with Space.create(client, f"{home}/other", block_bytes=BLOCK, table="single") as other:
        assert statuses(other.exists(keys)) == [Status.MISS] * 4
        other.put(keys, [bytes(BLOCK)] * 4)
        into = bytearray(BLOCK)
        other.get(keys[:1], [into])
        assert bytes(into) == bytes(BLOCK)


def test_another_process_sees_it_at_once(space: Space, address: str) -> None:
    keys = keys_of(3)
    space.put(keys, [payload(key) for key in keys])
    child = os.fork()
    if child == 0:
        # The inherited space opens again by itself here.
        ok = space.exists(keys).leading_hits() == 3
        into = [bytearray(BLOCK) for _ in keys]
        ok = ok and space.get(keys, into).leading_hits() == 3 and bytes(into[2]) == payload(keys[2])
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with ffs.connect(address) as second, Space.open(second, space.path) as opened:
        assert opened.block_bytes == BLOCK
        assert opened.exists(keys).leading_hits() == 3


def test_a_range_of_each_block(space: Space) -> None:
    """One layer: bytes of every block, from and to any place."""
    keys = keys_of(5)
    space.put_many(keys, [payload(key, BLOCK - 3) for key in keys]).raise_errors()
    for offset, length in ((0, 1), (4096, 8192), (4097, 5000), (BLOCK - 100, 100), (100, None), (0, BLOCK)):
        size = BLOCK - offset if length is None else length
        iov = ffs.Iov(5 * size)
        got = space.get_many(keys, iov, offset=offset, length=length)
        assert statuses(got) == [Status.HIT] * 5
        for position, key in enumerate(keys):
            wanted = payload(key, BLOCK - 3)[offset : offset + size]
            assert got.lengths[position] == len(wanted)
            assert bytes(iov.buffer()[position * size :][: len(wanted)]) == wanted
    into = [bytearray(77) for _ in keys]
    assert space.get_many(keys, into, offset=9, length=77).leading_hits() == 5
    assert [bytes(part) for part in into] == [payload(key)[9 : 9 + 77] for key in keys]
    with pytest.raises(errors.InvalidArgument, match="within a block"):
        space.get_many(keys, into, offset=BLOCK, length=1)
    with pytest.raises(errors.InvalidArgument, match="destination 0"):
        space.get_many(keys, into, offset=9, length=78)


def test_arrays_of_keys_and_places(space: Space) -> None:
    """K26: no object for a block, from the call to the ring."""
    keys = keys_of(40)
    array = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 32)
    iov = ffs.Iov(40 * BLOCK)
    lengths = np.arange(40) * 100 + 1
    offsets = np.arange(40)[::-1] * BLOCK
    for key, offset, length in zip(keys, offsets.tolist(), lengths.tolist(), strict=True):
        iov.buffer()[offset : offset + length] = payload(key, length)
    assert space.put_many(array, kv.Places(iov, offsets, lengths)).leading_hits() == 40
    target = ffs.Iov(40 * BLOCK)
    got = space.get_many(array, kv.Places(target, offsets))
    assert got.lengths.tolist() == lengths.tolist()
    for key, offset, length in zip(keys, offsets.tolist(), lengths.tolist(), strict=True):
        assert bytes(target.buffer()[offset : offset + length]) == payload(key, length)


def test_a_block_in_parts_is_there_when_all_of_them_are(client: Client, home: str) -> None:
    """K6; and a part is a chunk with a key of its own."""
    with Space.create(client, f"{home}/kv", block_bytes=3 * BLOCK, parts=3, replicas=1) as space:
        keys = keys_of(6)
        blocks = [payload(key, 3 * BLOCK)[::-1] for key in keys]
        assert statuses(space.put_many(keys, blocks)) == [Status.STORED] * 6
        assert statuses(space.put_many(keys, blocks)) == [Status.HIT] * 6
        with Space.open(client, space.path) as again:
            assert (again.block_bytes, again.parts) == (3 * BLOCK, 3)
            found = again.exists_many(keys)
            assert (statuses(found), found.lengths.tolist()) == ([Status.HIT] * 6, [3 * BLOCK] * 6)
            iov = ffs.Iov(6 * 3 * BLOCK)
            assert again.get_many(keys, iov).lengths.tolist() == [3 * BLOCK] * 6
            assert bytes(iov.buffer()) == b"".join(blocks)
            part = [bytearray(2000) for _ in keys]
            assert again.get_many(keys, part, offset=2 * BLOCK - 1000, length=2000).leading_hits() == 6
            assert [bytes(piece) for piece in part] == [b[2 * BLOCK - 1000 :][:2000] for b in blocks]
        # The middle part of one goes, as by an eviction: what is left of the block is no block.
        entries = space._entries(OP_REMOVE, kv.keys.part_keys(kv.keys.key_array(keys[2:3]), [1]), None)
        with space._ring() as kv_ring:
            assert space._batch(kv_ring, entries).run(entries)["result"].tolist() == [0]
        expected = [Status.MISS if position == 2 else Status.HIT for position in range(6)]
        assert statuses(space.exists_many(keys)) == expected
        got = space.get_many(keys, [bytearray(3 * BLOCK) for _ in keys])
        assert (statuses(got), int(got.lengths[2])) == (expected, 0)
        assert statuses(space.put_many(keys[2:3], blocks[2:3])) == [Status.STORED]
        assert statuses(space.delete(keys[:3])) == [Status.MISS] * 3
        assert space.exists_many(keys).hits.tolist() == [False] * 3 + [True] * 3
        with pytest.raises(errors.InvalidArgument, match="3 parts has all"):
            space.put_many(keys[:1], [bytes(BLOCK)])


def test_deleted_blocks_are_gone_and_may_come_again(space: Space) -> None:
    keys = keys_of(10)
    space.put_many(keys, [payload(key) for key in keys]).raise_errors()
    assert statuses(space.delete(keys[::2])) == [Status.MISS] * 5
    assert space.exists_many(keys).hits.tolist() == [False, True] * 5
    assert statuses(space.delete(keys[::2])) == [Status.MISS] * 5
    again = space.put_many(keys, [payload(key) for key in keys])
    assert statuses(again) == [Status.STORED, Status.HIT] * 5
    counts = space.stats().counts
    assert (counts.put_stored, counts.put_hits, counts.deleted) == (15, 5, 10)
    assert counts.put_bytes == 15 * BLOCK


def test_a_pin_of_many_blocks_has_one_time(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are pinned a batch after another."""
    keys = keys_of(8)
    space.put(keys, [payload(key) for key in keys]).raise_errors()
    monkeypatch.setattr(space_module, "_PIN_BYTES", 2 * BLOCK)
    seconds = itertools.count()  # one goes by whenever somebody looks
    monkeypatch.setattr(space_module, "time", types.SimpleNamespace(monotonic=lambda: float(next(seconds))))
    asked: list[float | None] = []
    entries = space._entries

    def noted(operation: int, hashes: Any, timeout_s: float | None) -> Any:
        asked.append(timeout_s)
        return entries(operation, hashes, timeout_s)

    monkeypatch.setattr(space, "_entries", noted)
    assert statuses(space.pin(keys, timeout_s=60)) == [Status.HIT] * 8
    assert asked == [59, 58, 57, 56, 55, 54, 53, 52]  # a read and a write for each two


def test_a_purge_empties_one_space(client: Client, home: str, space: Space) -> None:
    keys = keys_of(1500)
    small = [payload(key, 100) for key in keys]
    space.put_many(keys, small).raise_errors()
    with Space.create(client, f"{home}/tenant", block_bytes=BLOCK, replicas=1) as other:
        other.put_many(keys[:50], small[:50]).raise_errors()
        assert space.purge() == 1500
        assert not space.exists_many(keys).hits.any()
        assert space.purge() == 0
        assert other.exists_many(keys[:50]).leading_hits() == 50
    assert space.put_many(keys[:3], small[:3]).leading_hits() == 3


def test_pinned_blocks_outlive_others(client: Client, home: str) -> None:
    """Pinned at the put, later, and where they were there already; and let go of again."""
    with Space.create(
        client, f"{home}/kv", block_bytes=BLOCK, replicas=1, stripe=1, quota_bytes=12 * BLOCK
    ) as space:
        keys = keys_of(6)
        blocks = [payload(key, 9000) for key in keys]
        assert statuses(space.put_many(keys[:1], blocks[:1], pin=True)) == [Status.STORED]
        space.put_many(keys[1:3], blocks[1:3]).raise_errors()
        assert statuses(space.pin([keys[1], keys[5]])) == [Status.HIT, Status.MISS]
        assert statuses(space.put_many(keys[2:4], blocks[2:4], pin=True)) == [Status.HIT, Status.STORED]
        numbers = iter(range(1_000_000))

        def scan(gone: bytes) -> None:
            """Others come and are used again, until that one is gone.

            Uses within two seconds are one (docs/craq.md, Eviction). What was used twice goes after all that
            wasn't; on a slow machine `gone` may have been: then the others have to be, too.
            """
            deadline = time.monotonic() + 60
            while space.exists_many([gone]).hits.any():
                assert time.monotonic() < deadline
                number = next(numbers)
                others = keys_of(8, f"other {number}")
                space.put_many(others, [bytes(BLOCK)] * 8).raise_errors()
                if number >= 4:
                    time.sleep(2.5)
                space.touch(others)

        space.put_many(keys[4:5], blocks[4:5]).raise_errors()
        scan(gone=keys[4])
        into = [bytearray(BLOCK) for _ in range(4)]
        assert space.get_many(keys[:4], into).lengths.tolist() == [9000] * 4
        assert [bytes(block[:9000]) for block in into] == blocks[:4]
        assert statuses(space.unpin(keys[:1])) == [Status.HIT]
        scan(gone=keys[0])
        assert space.exists_many(keys[1:4]).leading_hits() == 3
        assert statuses(space.delete(keys[1:2])) == [Status.MISS]
        assert statuses(space.exists_many(keys[1:2])) == [Status.MISS]


def test_the_command_line_pins_and_purges(client: Client, home: str, run: Run, tmp_path: Path) -> None:
    path = f"{home}/tenant/kv"
    create = ("kv", "create", path, "--block-size", "64KiB", "--replicas", "1", "--ttl", "1h")
    assert run(*create) == (0, f"{path}: no quota, ttl 1h, evictable\n", "")
    assert json.loads(run("kv", "ls", home, "--json")[1])["table"] == "single"
    keys = keys_of(3)
    with Space.open(client, path) as space:
        space.put_many(keys[:2], [payload(key, 5000) for key in keys[:2]]).raise_errors()
    (tmp_path / "keys").write_text("".join(f"{key.hex()}\n" for key in keys[1:]))
    status, out, _ = run("kv", "pin", path, keys[0].hex(), "--keys", str(tmp_path / "keys"))
    assert (status, out) == (1, f"{path}: 2 blocks pinned, 1 block not there\n")
    assert run("kv", "pin", path, keys[0].hex(), "--undo") == (0, f"{path}: 1 block unpinned\n", "")
    with Space.open(client, path) as space:
        into = [bytearray(BLOCK) for _ in keys]
        got = space.get_many(keys, into)
        assert got.lengths.tolist() == [5000, 5000, 0]
        assert bytes(into[1][:5000]) == payload(keys[1], 5000)
    deadline = time.monotonic() + 60
    while json.loads(run("kv", "stats", home, "--json")[1])["blocks"] != 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    status, out, _ = run("kv", "stats", path, "--every", "0.1", "--count", "2", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [("hits_per_s" in line, line["path"]) for line in lines] == [(False, path), (True, path)]
    assert run("kv", "stats", path)[1].splitlines()[1].split()[-1] == path
    assert run("kv", "purge", f"{home}/tenant") == (0, f"{path}: 2 blocks removed\n", "")
    status, _, err = run("kv", "purge", home + "/tenant/none")
    assert status == 1
    client.mkdir(f"{home}/empty")
    status, _, err = run("kv", "purge", f"{home}/empty")
    assert status == 1
    assert "no KV space" in err


# --- bad input --------------------------------------------------------------------------------------------


def test_bad_arguments_raise_before_anything_is_sent(space: Space) -> None:
    key = keys_of(1)[0]
    with pytest.raises(errors.InvalidArgument, match="key 0"):
        space.get([key[:-1]], [bytearray(BLOCK)])
    with pytest.raises(errors.InvalidArgument, match="one for each key"):
        space.put([key], [])
    with pytest.raises(errors.InvalidArgument, match="1 to"):
        space.put([key], [bytes(BLOCK + 1)])
    with pytest.raises(errors.InvalidArgument, match="1 to"):
        space.put([key], [b""])
    with pytest.raises(errors.InvalidArgument, match="destination 0"):
        space.get([key], [bytearray(BLOCK - 1)])
    with pytest.raises(TypeError, match="read-only"):
        space.get([key], [bytes(BLOCK)])
    with pytest.raises(TypeError, match="contiguous"):
        space.put([key], [np.zeros(2 * BLOCK, np.uint8)[::2]])
    with pytest.raises(errors.InvalidArgument, match="Iov slice"):
        space.put([key, key], ffs.Iov(BLOCK))
    with pytest.raises(errors.InvalidArgument, match="timeout_s"):
        space.exists([key], timeout_s=0)
    assert statuses(space.exists([key])) == [Status.MISS]


def test_making_and_opening(client: Client, home: str, space: Space) -> None:
    with pytest.raises(errors.Exists):
        Space.create(client, space.path, block_bytes=BLOCK)
    Space.create(client, space.path, block_bytes=BLOCK, exist_ok=True).close()
    Space.create(client, space.path, block_bytes=BLOCK, quota_bytes=0, evictable=True, exist_ok=True).close()
    for asked, why in (
        ({"quota_bytes": 1 << 40}, f"quota of 0 bytes, not {1 << 40}"),
        ({"ttl_s": 30}, "ttl of 0 s, not 30"),
        ({"evictable": False}, "evictable yes, not no"),
        ({"stripe": 1}, "a stripe of .* chains, not 1"),
    ):
        with pytest.raises(errors.Exists, match=why):
            Space.create(client, space.path, block_bytes=BLOCK, exist_ok=True, **asked)  # type: ignore[arg-type]
    with pytest.raises(errors.FfsError):
        Space.create(client, space.path, block_bytes=2 * BLOCK, exist_ok=True)
    for size, parts, why in (
        (0, 1, "1 GiB"),
        (-1, 1, "1 GiB"),
        ((16 << 20) + 1, 1, "16 MiB"),
        (9, 2, "divide"),
    ):
        with pytest.raises(errors.InvalidArgument, match=why):
            Space.create(client, f"{home}/bad", block_bytes=size, parts=parts)
    with pytest.raises(errors.NotFound, match=r"2 replicas.*default \(3\), single \(1\)"):
        Space.create(client, f"{home}/bad", block_bytes=BLOCK, replicas=2)
    with pytest.raises(errors.InvalidArgument, match="not both"):
        Space.create(client, f"{home}/bad", block_bytes=BLOCK, replicas=1, table="single")
    with pytest.raises(errors.NotFound, match="single"):
        Space.create(client, f"{home}/bad", block_bytes=BLOCK, table="none")
    with pytest.raises(errors.NotFound):
        Space.open(client, f"{home}/bad")
    with client.open(f"{home}/file", "w") as file:
        file.write("x")
    with pytest.raises(errors.FfsError, match="KV space"):
        Space.open(client, f"{home}/file")
    assert sorted(client.listdir(home)) == ["file", "kv"]


def test_a_closed_space_says_so(client: Client, home: str) -> None:
    space = Space.create(client, f"{home}/kv", block_bytes=BLOCK)
    space.close()
    space.close()
    with pytest.raises(errors.BadHandle, match="closed"):
        space.exists(keys_of(1))


def test_a_removed_space_gives_no_hits(client: Client, home: str, space: Space) -> None:
    keys = keys_of(4)
    space.put(keys, [payload(key) for key in keys])
    client.remove(space.path)
    deadline = time.monotonic() + 60
    while space.exists(keys).hits.any():
        assert time.monotonic() < deadline, "the blocks of a removed space are still there"
        time.sleep(0.1)
    assert not space.get(keys, [bytearray(BLOCK) for _ in keys]).hits.any()

"""Faults that users of KV caches reported (docs/faults.md), on a real cluster, named after them. The others:
docs/faults.md says where."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kv_blocks import BLOCK, keys_of, payload, statuses, stopped

import ffs
from ffs import errors, kv
from ffs.cli.devcluster.supervisor import Supervisor
from ffs.client.client import Client
from ffs.kv import Results, Space, Status


@pytest.fixture
def space(client: Client, home: str) -> Iterator[Space]:
    with Space.create(client, f"{home}/kv", block_bytes=BLOCK) as made:
        yield made


# --- many at once -------------------------------------------------------------------------------------------


def test_k2_threads_never_get_each_others_blocks(space: Space) -> None:
    """K2: many sessions, every byte checked."""
    failures: list[str] = []

    def one(number: int) -> None:
        keys = keys_of(40, salt=str(number % 4))
        for _ in range(3):
            put = space.put(keys, [payload(key) for key in keys])
            into = [bytearray(BLOCK) for _ in keys]
            got = space.get(keys, into)
            if put.errors or got.errors or not got.hits.all():
                failures.append(f"{put} {got} {put.errors} {got.errors}")
            failures.extend(
                "foreign bytes" for key, block in zip(keys, into, strict=True) if bytes(block) != payload(key)
            )

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_k3_reading_while_it_is_written_gives_all_or_nothing(space: Space) -> None:
    """K3."""
    keys = keys_of(64)
    done = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not done.is_set():
            into = [bytearray(BLOCK) for _ in keys]
            got = space.get(keys, into)
            wrong.extend(
                f"block {position}"
                for position, key in enumerate(keys)
                if got[position] == Status.HIT and bytes(into[position]) != payload(key)
            )
            wrong.extend(str(error) for error in got.errors.values())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for key in keys:
            assert space.put([key], [payload(key)]).leading_hits() == 1
    finally:
        done.set()
        reader.join()
    assert wrong == []


def test_k25_many_requests_are_in_flight(space: Space) -> None:
    """K25, K26: depth from the ring's own counters; one request a block and not more."""
    keys = keys_of(256)
    source = ffs.Iov(256 * BLOCK)
    space.put(keys, source).raise_errors()
    space.get(keys, source).raise_errors()
    stats = space.stats().rings
    assert len(stats) == 1
    assert stats[0].submitted == 512
    assert stats[0].retries == 0
    assert stats[0].max_inflight >= 32
    space.exists(keys).raise_errors()
    assert space.stats().rings[0].submitted - 512 < 128  # by chain, not by key


# --- faults -------------------------------------------------------------------------------------------------


def test_k15_puts_and_gets_go_on_without_metadata(cluster: Supervisor, client: Client, home: str) -> None:
    """K15, and the promise of one round trip to a storage server and none to metadata."""
    with Space.create(client, f"{home}/kv", block_bytes=BLOCK) as space:
        keys = keys_of(200)
        with stopped(cluster, "meta"):
            assert space.put(keys, [payload(key) for key in keys]).leading_hits() == 200
            into = [bytearray(BLOCK) for _ in keys]
            assert space.get(keys, into).leading_hits() == 200
            assert space.exists(keys).leading_hits() == 200
        assert [bytes(block) for block in into] == [payload(key) for key in keys]
        assert sum(stats.retries for stats in space.stats().rings) == 0


def test_k14_other_replicas_answer_for_one_that_is_stopped(cluster: Supervisor, space: Space) -> None:
    """K14."""
    keys = keys_of(60)
    space.put(keys, [payload(key) for key in keys]).raise_errors()
    into = [bytearray(BLOCK) for _ in keys]
    with stopped(cluster, "node1"):
        got = space.get(keys, into)
    got.raise_errors()
    assert got.leading_hits() == 60
    assert [bytes(block) for block in into] == [payload(key) for key in keys]


def test_k5_no_answer_is_an_error_and_no_miss(cluster: Supervisor, space: Space) -> None:
    """K5: with every storage server stopped a get says ERROR, within its deadline."""
    keys = keys_of(3)
    space.put(keys, [payload(key) for key in keys]).raise_errors()
    with stopped(cluster, "node0", "node1", "node2"):
        got = space.get(keys, [bytearray(BLOCK) for _ in keys], timeout_s=1.0)
        put = space.put(keys_of(1, "new"), [bytes(BLOCK)], timeout_s=1.0)
    assert statuses(got) == [Status.ERROR] * 3
    assert statuses(put) == [Status.ERROR]
    assert set(got.errors) == {0, 1, 2}
    # And it works again afterwards, with the same space.
    deadline = time.monotonic() + 60
    while space.get(keys, [bytearray(BLOCK) for _ in keys]).leading_hits() != 3:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_k7_a_block_that_rotted_is_never_a_hit(cluster: Supervisor, client: Client, home: str) -> None:
    """K7: a bit flipped on the only device that has it."""
    with Space.create(client, f"{home}/kv", block_bytes=BLOCK, table="single") as space:
        key = keys_of(1, "rot")[0]
        space.put([key], [payload(key)]).raise_errors()
        flipped = 0
        for node in cluster.status().nodes:
            for device in node.devices:
                flipped += _flip(Path(device.path), payload(key))
        assert flipped == 1
        got = space.get([key], [bytearray(BLOCK)])
        assert statuses(got) == [Status.ERROR]
        assert isinstance(got.errors[0], errors.ChecksumMismatch)


def test_k19_memory_and_descriptors_stay_flat(space: Space) -> None:
    """K19; error paths too. 24,000 blocks; a million operations in a soak."""
    keys = keys_of(100)
    into = [bytearray(BLOCK) for _ in keys]

    def turn() -> None:
        space.put(keys, into)
        space.get(keys, into)
        space.get(keys_of(100, "absent"), into)
        space.exists(keys)
        with pytest.raises(errors.InvalidArgument):
            space.get(keys, into[1:])

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for _ in range(5):
        turn()
    memory, files = resident(), len(os.listdir("/proc/self/fd"))
    for _ in range(2500 if "FFS_SOAK_SECONDS" in os.environ else 60):
        turn()
    assert len(os.listdir("/proc/self/fd")) == files
    assert resident() <= memory + (16 << 20)


def test_k1_a_put_that_failed_is_a_miss_or_whole(cluster: Supervisor, client: Client, home: str) -> None:
    """What a put was refused for isn't there; what it got no answer for is there whole, or not at all."""
    with Space.create(
        client, f"{home}/small", block_bytes=BLOCK, stripe=1, quota_bytes=4 * BLOCK, evictable=False
    ) as small:
        keys = keys_of(12)
        deadline = time.monotonic() + 60
        while not (put := small.put_many(keys, [payload(key) for key in keys])).errors:
            assert time.monotonic() < deadline, "the servers never heard of the quota"
            small.purge()
            time.sleep(0.2)
        assert {type(error) for error in put.errors.values()} == {errors.QuotaExceeded}
        assert (small.exists_many(keys).hits == put.hits).all()
    with Space.create(client, f"{home}/kv", block_bytes=BLOCK) as space:
        keys = keys_of(30, "cut off")
        with stopped(cluster, "node1", "node2"):
            cut_off = space.put_many(keys, [payload(key) for key in keys], timeout_s=0.5)
        into = [bytearray(BLOCK) for _ in keys]
        got = space.get_many(keys, into)
        got.raise_errors()
        for position, key in enumerate(keys):
            assert got[position] == Status.HIT or cut_off[position] == Status.ERROR
            assert got[position] == Status.MISS or bytes(into[position]) == payload(key)
        assert space.put_many(keys, [payload(key) for key in keys]).leading_hits() == 30


def test_k13_nobody_waits_for_a_put_beyond_his_deadline(cluster: Supervisor, space: Space) -> None:
    """A block is being written, and its chain hangs: others get an answer, an error if need be, while it
    hangs."""
    keys = keys_of(8)
    outcome: list[Results] = []

    def put() -> None:
        outcome.append(space.put_many(keys, [payload(key) for key in keys]))

    writer = threading.Thread(target=put)
    into = [bytearray(BLOCK) for _ in keys]
    with stopped(cluster, "node0", "node1", "node2"):
        writer.start()
        got = space.get_many(keys, into, timeout_s=0.3)
        found = space.exists_many(keys, timeout_s=0.3)
        assert statuses(got) == statuses(found) == [Status.ERROR] * 8
        assert outcome == []
    writer.join()
    outcome[0].raise_errors()
    assert space.get_many(keys, into).leading_hits() == 8


def test_k24_gets_have_their_answers_beside_puts_that_fill_everything(client: Client, home: str) -> None:
    with Space.create(client, f"{home}/kv", block_bytes=1 << 20, quota_bytes=1 << 30) as space:
        hot = keys_of(16, "hot")
        space.put_many(hot, [payload(key, 4096) for key in hot]).raise_errors()
        done = threading.Event()
        wrong: list[str] = []

        def fill(number: int) -> None:
            source = ffs.Iov(16 << 20)
            turn = 0
            while not done.is_set():
                turn += 1
                put = space.put_many(keys_of(16, f"cold {number} {turn}"), source)
                wrong.extend(map(str, put.errors.values()))

        fillers = [threading.Thread(target=fill, args=(number,)) for number in range(3)]
        for filler in fillers:
            filler.start()
        try:
            for _ in range(10):
                into = [bytearray(4096) for _ in hot]
                got = space.get_many(hot, into, length=4096)
                wrong.extend(map(str, got.errors.values()))
                assert got.leading_hits() == 16
                assert [bytes(block) for block in into] == [payload(key, 4096) for key in hot]
        finally:
            done.set()
            for filler in fillers:
                filler.join()
        assert wrong == []


def test_k26_no_python_call_for_a_block(space: Space) -> None:
    """As many calls of Python functions for 400 blocks as for 4, give or take a wait that came back early."""
    iov = ffs.Iov(400 * 4096)
    keys = np.frombuffer(b"".join(keys_of(400)), dtype=np.uint8).reshape(-1, 32)

    def calls(count: int) -> int:
        seen = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        places = kv.Places(iov, np.arange(count) * 4096, 4096)
        sys.setprofile(profile)
        try:
            results = [
                space.put_many(keys[:count], places),
                space.get_many(keys[:count], places, length=4096),
                space.exists_many(keys[:count]),
            ]
        finally:
            sys.setprofile(None)
        assert all(result.leading_hits() == count for result in results)
        return seen

    calls(400)
    few, many = calls(4), calls(400)
    # exists asks once a chain, which there are more of for more blocks.
    assert many - few < 200 + 8 * len(set(space._handle.placement.chains))


def test_k27_what_was_put_is_read_by_whoever_comes_later(space: Space, address: str) -> None:
    """Full reuse by a client that has nothing of its own."""
    keys = keys_of(100)
    space.put_many(keys, [payload(key) for key in keys]).raise_errors()
    space.close()
    with ffs.connect(address) as other, Space.open(other, space.path) as opened:
        into = [bytearray(BLOCK) for _ in keys]
        assert opened.exists_many(keys).leading_hits() == 100
        assert opened.get_many(keys, into).leading_hits() == 100
        assert [bytes(block) for block in into] == [payload(key) for key in keys]


def _flip(path: Path, content: bytes) -> int:
    """Flips one bit of `content` wherever it stands on the device at a multiple of 4096."""
    found = 0
    with open(path, "r+b", buffering=0) as file:
        at = 0
        while True:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                return found
            hole = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            while at < hole:
                piece = os.pread(file.fileno(), 8 << 20, at)
                for inside in range(0, len(piece), 4096):
                    if piece[inside : inside + len(content)] == content:
                        os.pwrite(file.fileno(), bytes([content[100] ^ 1]), at + inside + 100)
                        found += 1
                at += len(piece) - (0 if at + len(piece) >= hole else BLOCK)

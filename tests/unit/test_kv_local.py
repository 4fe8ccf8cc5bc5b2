"""The local tier's store in Python: places, restarts, damage found, a full device (K7, K23, K25)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import ffs
from ffs import errors
from ffs.kv.blocks import Places
from ffs.kv.keys import Identity, hash_tokens
from ffs.kv.results import Status
from ffs.kv.tiers import Outcome, Settings, Tier, TierManager
from ffs.kv.tiers.local import LocalBlocks

KEYS = hash_tokens(Identity("local", block_tokens=1), range(1200))
BLOCK = 256 << 10
SIZE = 256 << 20


def payload(key: bytes, nbytes: int = BLOCK) -> bytes:
    return (key * (nbytes // len(key) + 1))[:nbytes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def store(path: Path) -> Iterator[LocalBlocks]:
    with LocalBlocks(path, size_bytes=SIZE, block_bytes=BLOCK, sparse=True) as made:
        yield made


def put(store: LocalBlocks, keys: Sequence[bytes]) -> list[Status]:
    with ffs.Iov(len(keys) * BLOCK) as iov:
        iov.numpy()[:] = np.frombuffer(b"".join(map(payload, keys)), dtype=np.uint8)
        results = store.put_many(keys, Places(iov, np.arange(len(keys)) * BLOCK))
        return [results[at] for at in range(len(keys))]


def get(store: LocalBlocks, keys: Sequence[bytes]) -> list[Status]:
    """HITs are compared byte by byte."""
    iov = ffs.Iov(len(keys) * BLOCK)
    results = store.get_many(keys, Places(iov, np.arange(len(keys)) * BLOCK))
    for at, key in enumerate(keys):
        if results[at] is Status.HIT:
            assert bytes(iov[at * BLOCK : at * BLOCK + int(results.lengths[at])].view) == payload(key)
    return [results[at] for at in range(len(keys))]


def test_blocks_come_back_also_after_a_restart(store: LocalBlocks, path: Path) -> None:
    assert put(store, KEYS[:40]) == [Status.STORED] * 40
    assert get(store, KEYS[:42]) == [Status.HIT] * 40 + [Status.MISS] * 2
    assert store.delete(KEYS[:3]).leading_hits() == 0
    other = KEYS[5][:16] + KEYS[6][16:]
    assert get(store, [other]) == [Status.MISS]  # the second half of the key is compared
    assert store.exists_many([KEYS[5], other]).hits.tolist() == [True, False]
    store.close()
    with pytest.raises(errors.BadHandle, match="closed"):
        store.exists_many(KEYS[:1])
    with LocalBlocks(path, size_bytes=SIZE, block_bytes=BLOCK) as again:
        assert {key for key, _ in again.blocks()} == set(KEYS[3:40])
        assert {length for _, length in again.blocks()} == {BLOCK}
        assert get(again, KEYS[:40]) == [Status.MISS] * 3 + [Status.HIT] * 37
        with pytest.raises(errors.Busy):
            LocalBlocks(path, size_bytes=SIZE, block_bytes=BLOCK)
    with LocalBlocks(path, size_bytes=SIZE, block_bytes=BLOCK, fresh=True) as fresh:
        assert list(fresh.blocks()) == []


def test_a_flipped_bit_is_found_and_the_block_isnt_given_out(store: LocalBlocks, path: Path) -> None:
    """K7: right length, wrong bytes."""
    put(store, KEYS[:8])
    store.close()
    data = path.read_bytes()
    at = data.index(payload(KEYS[3], 4096))
    with open(path, "r+b") as file:
        file.seek(at + 1000)
        file.write(bytes([data[at + 1000] ^ 4]))
    with LocalBlocks(path, size_bytes=SIZE, block_bytes=BLOCK) as again:
        found = get(again, KEYS[:8])
        assert found == [Status.HIT] * 3 + [Status.ERROR] + [Status.HIT] * 4
        settings = Settings(block_bytes=BLOCK, host_bytes=8 * BLOCK, local_bytes=64 * BLOCK)
        with TierManager(settings, local=again) as tiers:
            with tiers.prefetch(KEYS[2:5]) as stream:  # what a store had before isn't known to a new manager
                assert [block.outcome for block in stream] == [Outcome.MISS] * 3
            assert tiers.adopt() == 8
            with tiers.prefetch(KEYS[2:5]) as stream:
                outcomes = [block.outcome for block in stream]
            assert outcomes == [Outcome.HIT, Outcome.FAILED, Outcome.HIT]
            tiers.flush()
        assert get(again, [KEYS[3]]) == [Status.MISS]  # and it is taken away


def test_a_full_device_refuses_and_the_manager_goes_on(path: Path) -> None:
    """K23: the tier is told that it may hold more than its device does."""
    with LocalBlocks(path, size_bytes=240 << 20, block_bytes=BLOCK, sparse=True) as store:
        settings = Settings(block_bytes=BLOCK, host_bytes=16 * BLOCK, local_bytes=1 << 40)
        with TierManager(settings, local=store) as tiers:
            for key in KEYS:
                while not tiers.put(key, payload(key)):
                    tiers.flush()
            tiers.flush()
            stats = tiers.stats()
            assert stats.counts.local.store_errors > 0
            assert stats.worker_failures == 0
            there = [key for key in KEYS if tiers.where(key) is Tier.LOCAL]
            assert len(there) > 50
            with tiers.prefetch(there[:50]) as stream:
                assert all(block.outcome is Outcome.HIT for block in stream)
        assert store.figures().poisoned == 0


def test_many_reads_are_in_flight_at_the_device(path: Path) -> None:
    """K25: not by the manager's word, by the engine's."""
    with LocalBlocks(path, size_bytes=SIZE, block_bytes=BLOCK, sparse=True) as store:
        put(store, KEYS[:100])
    with LocalBlocks(path, size_bytes=SIZE, block_bytes=BLOCK) as store:
        settings = Settings(block_bytes=BLOCK, host_bytes=128 * BLOCK, local_bytes=SIZE)
        with TierManager(settings, local=store) as tiers:
            assert tiers.adopt() == 100
            with tiers.prefetch(KEYS[:100], ahead=100) as stream:
                for block in stream:
                    assert block.memory is not None
                    assert bytes(block.memory.view) == payload(block.key)
        assert store.figures().most_in_flight >= 16


def test_threads_share_a_store_and_close_waits_for_them(store: LocalBlocks) -> None:
    failures: list[BaseException] = []

    def work(begin: int) -> None:
        try:
            for _ in range(4):
                assert put(store, KEYS[begin : begin + 12]) == [Status.STORED] * 12
                assert get(store, KEYS[begin : begin + 12]) == [Status.HIT] * 12
        except errors.BadHandle:
            pass  # closed meanwhile
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(begin,)) for begin in (0, 100, 200)]
    for thread in threads:
        thread.start()
    threads[0].join()
    store.close()
    for thread in threads:
        thread.join()
    assert failures == []


def test_places_outside_the_memory_are_refused(store: LocalBlocks) -> None:
    with ffs.Iov(2 * BLOCK) as iov:
        for offsets, lengths in ([[BLOCK + 1], None], [[-1], 10], [[0], 0], [[0, 1], 10], [[0], 3 * BLOCK]):
            with pytest.raises(errors.InvalidArgument):
                store.put_many(KEYS[:1], Places(iov, np.array(offsets), lengths))
        with pytest.raises(errors.InvalidArgument, match="Places"):
            store.put_many(KEYS[:1], [b"x"])
    with pytest.raises(errors.InvalidArgument, match="1 to 16777216"):
        LocalBlocks("x", size_bytes=SIZE, block_bytes=17 << 20)

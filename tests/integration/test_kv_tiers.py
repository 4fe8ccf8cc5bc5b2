"""The tier manager over a real space (K25, K27): many requests in flight, and all of it found again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from ffs import kv
from ffs.client.client import Client
from ffs.kv import Space
from ffs.kv.tiers import Outcome, Settings, TierManager

BLOCK = 64 << 10


@pytest.fixture
def space(client: Client, home: str) -> Iterator[Space]:
    with Space.create(client, f"{home}/kv", block_bytes=BLOCK) as made:
        yield made


def keys_of(count: int) -> list[bytes]:
    return kv.hash_tokens(kv.Identity("tiers", block_tokens=1), range(count))


def payload(key: bytes, length: int = BLOCK) -> bytes:
    return (key * (length // len(key) + 1))[:length]


def config(slots: int) -> Settings:
    return Settings(block_bytes=BLOCK, host_bytes=slots * BLOCK)


def store_all(manager: TierManager, keys: Sequence[bytes]) -> None:
    for key in keys:
        while not manager.put(key, payload(key)):
            time.sleep(0.001)
    manager.flush()


def test_written_by_one_engine_and_read_in_full_by_another_with_many_in_flight(
    client: Client, space: Space
) -> None:
    keys = keys_of(300)
    with TierManager(config(100), space=space) as first:
        store_all(first, keys)
        assert first.stats().counts.space.stores == 300
        assert first.stats().counts.dropped == 0
    with Space.open(client, space.path) as other, TierManager(config(128), space=other) as second:
        assert second.lookup([*keys, bytes(32)]) == 300
        with second.prefetch(keys) as stream:
            for block in stream:
                assert block.outcome is Outcome.HIT
                assert block.memory is not None
                assert bytes(block.memory.view) == payload(block.key)
        stats = second.stats()
        assert stats.counts.space.loads == 300
        assert stats.counts.space.most_loads_in_flight >= 32
        # Not by the manager's word alone: the rings that read had so many requests in flight.
        depths = sorted((ring.max_inflight for ring in other.stats().rings), reverse=True)
        assert depths[0] >= 16
        assert sum(depths[:2]) >= 24
        assert stats.pinned_blocks == 0
        assert stats.worker_failures == 0


def test_a_block_that_was_taken_away_is_a_miss_and_the_rest_arrives(space: Space) -> None:
    """K12: deleted after the lookup."""
    keys = keys_of(20)
    space.put(keys, [payload(key) for key in keys])
    with TierManager(config(64), space=space) as manager:
        assert manager.lookup(keys) == 20
        space.delete(keys[5:7])
        with manager.fetch(keys) as stream:
            outcomes = [block.outcome for block in stream.wait_all()]
        assert [at for at, one in enumerate(outcomes) if one is Outcome.MISS] == [5, 6]
        assert stream.missed == [5, 6]
        assert stream.failed == []

"""The tier manager over a real space: many requests in flight, all found again, compressed, and pinned
(K12, K25, K27)."""

from __future__ import annotations

import runpy
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from ffs import errors, kv
from ffs.client.client import Client
from ffs.kv import Space
from ffs.kv.session import (
    create_session_space,
    list_key,
    pin_session,
    restore_session,
    session_keys,
    unpin_session,
)
from ffs.kv.tiers import Outcome, Settings, TierManager
from ffs.kv.tiers.compressed import CompressedSpace

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
    manager.flush(300)  # the machine may be busy


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
        # Not by the manager's word alone: the ring that read had so many requests in flight.
        assert max(ring.max_inflight for ring in other.stats().rings) >= 32
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


# --- compression ----------------------------------------------------------------------------------------


def numbers(key: bytes) -> bytes:
    """A block that compresses, as long as one may be."""
    return np.repeat(np.frombuffer(key, dtype=np.uint8), BLOCK // len(key)).tobytes()


def test_a_compressed_space_takes_less_and_gives_the_same(client: Client, home: str) -> None:
    path = f"{home}/packed"
    packed = CompressedSpace.create(client, path, block_bytes=BLOCK)
    keys = keys_of(80)
    noise = np.random.default_rng(5).bytes(BLOCK)
    with TierManager(config(100), space=packed) as tiers:
        for key in keys[:-1]:
            assert tiers.put(key, numbers(key))
        assert tiers.put(keys[-1], noise)  # doesn't compress, and fits all the same
        tiers.flush()
        assert tiers.stats().counts.space.stores == 80
    stored = packed.exists_many(keys).lengths
    assert stored[:-1].max() < BLOCK // 8
    assert BLOCK < stored[-1] <= packed.space.block_bytes
    packed.close()
    again = CompressedSpace.open(client, path)
    assert again.block_bytes == BLOCK
    with TierManager(config(100), space=again) as tiers, tiers.prefetch(keys) as stream:
        for block in stream:
            assert block.memory is not None
            assert bytes(block.memory.view) == (noise if block.key == keys[-1] else numbers(block.key))
    again.close()


def test_a_frame_that_isnt_one_is_an_error_and_not_a_block(client: Client, home: str, space: Space) -> None:
    path = f"{home}/broken"
    packed = CompressedSpace.create(client, path, block_bytes=BLOCK)
    keys = keys_of(5)
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(numbers(keys[2]))
    bad = [b"no frame", whole[:-3], whole[:-4] + b"\0\0\0\0", whole + b"more", whole]
    packed.space.put(keys, bad)
    with TierManager(config(40), space=packed) as tiers, tiers.prefetch(keys) as stream:
        outcomes = [block.outcome for block in stream]
    assert outcomes == [Outcome.FAILED] * 4 + [Outcome.HIT]
    packed.close()
    with pytest.raises(errors.InvalidArgument, match=r"kv\.Space"):
        CompressedSpace.open(client, space.path)


# --- sessions -------------------------------------------------------------------------------------------


def test_a_pinned_session_comes_back_after_every_tier_was_lost(
    client: Client, home: str, space: Space
) -> None:
    """K27: the shared space is purged, the engine's memory is new; all of the session is there again."""
    keys = keys_of(90)
    with create_session_space(client, f"{home}/kept", block_bytes=BLOCK) as kept:
        assert kept.bounds.evictable is False
        with TierManager(config(32), space=space, timeout_s=60) as tiers:
            store_all(tiers, keys)
            pinned = pin_session(tiers, "alice/7", keys, kept)
            assert (pinned.copied, pinned.there, pinned.kept) == (90, 0, None)
            again = pin_session(tiers, "alice/7", [*keys, bytes(32)], kept)
            assert (again.copied, again.there, again.kept) == (0, 90, 90)
            assert pin_session(tiers, "alice/7", keys, kept).kept is None
        space.purge()
        with TierManager(config(100), space=space, timeout_s=60) as tiers:
            assert tiers.lookup(keys) == 0
            assert restore_session(tiers, "alice/7", kept) == (keys, 90)
            with tiers.prefetch(keys) as stream:
                for block in stream:
                    assert block.memory is not None
                    assert bytes(block.memory.view) == payload(block.key)
            tiers.flush(300)
            assert space.exists(keys).leading_hits() == 90  # and shared again
        with pytest.raises(errors.NotFound, match="'bob'"):
            session_keys("bob", kept)
        assert unpin_session("alice/7", kept, keep=keys[:10]) == 80
        assert kept.exists(keys).leading_hits() == 10
        with pytest.raises(errors.NotFound):
            session_keys("alice/7", kept)


def test_the_list_of_a_long_session_has_many_pages(client: Client, home: str) -> None:
    path = f"{home}/small"
    small = Settings(block_bytes=4096, host_bytes=64 * 4096)
    keys = keys_of(400)
    with create_session_space(client, path, block_bytes=4096) as kept, TierManager(small) as tiers:
        kept.put(keys, [key * 8 for key in keys])
        assert pin_session(tiers, "long", keys, kept).there == 400
        assert session_keys("long", kept) == keys
        pages = [list_key("long", page) for page in range(4)]
        assert kept.exists(pages).leading_hits() == 4
        pin_session(tiers, "long", keys[:3], kept)  # shorter: nothing of the list before is left
        assert session_keys("long", kept) == keys[:3]
        assert kept.exists(pages).hits.tolist() == [True, False, False, False]
        pin_session(tiers, "long", keys, kept)
        kept.delete([list_key("long", 2)])
        with pytest.raises(errors.NotFound):
            session_keys("long", kept)


class Dying:
    """A space whose user dies at its n-th change: `left` of them are carried out."""

    def __init__(self, space: Space, left: int) -> None:
        self._space, self._left = space, left

    def __getattr__(self, name: str) -> Any:
        if name in ("put_many", "replace_many", "delete"):
            if not self._left:
                raise KeyboardInterrupt(name)
            self._left -= 1
        return getattr(self._space, name)


def test_a_session_that_is_pinned_anew_has_one_list_at_any_time(client: Client, home: str) -> None:
    small = Settings(block_bytes=4096, host_bytes=64 * 4096)
    old, new = keys_of(400), keys_of(700)[100:]
    everything = keys_of(700)
    pages = [list_key("s", page, turn) for turn in (0, 1) for page in range(8)]
    with create_session_space(client, f"{home}/anew", block_bytes=4096) as kept, TierManager(small) as tiers:
        kept.put(everything, [key * 8 for key in everything])
        seen, steps = set(), 0
        pin_session(tiers, "s", old, kept)
        while True:  # whoever pins it dies one change later each time
            try:
                pin_session(tiers, "s", new, Dying(kept, steps))  # type: ignore[arg-type]
                break
            except KeyboardInterrupt:
                steps += 1
            there = session_keys("s", kept)
            assert there in (old, new)
            seen.add(len(there))
            if there == new:
                pin_session(tiers, "s", old, kept)
        assert seen == {len(old), len(new)}
        assert session_keys("s", kept) == new
        # While it is read, too.
        over = threading.Event()

        def pin_again() -> None:
            for turn in range(10):
                pin_session(tiers, "s", new if turn % 2 else old, kept)
            over.set()

        pinning = threading.Thread(target=pin_again)
        pinning.start()
        while not over.is_set():
            assert session_keys("s", kept) in (old, new)
        pinning.join()
        # Nothing is left of any of it.
        unpin_session("s", kept)
        assert not kept.exists(pages).hits.any()
        with pytest.raises(errors.NotFound):
            session_keys("s", kept)


def test_a_space_that_may_drop_or_cuts_blocks_keeps_no_session(
    client: Client, home: str, space: Space
) -> None:
    with TierManager(config(8)) as tiers:
        with pytest.raises(errors.InvalidArgument, match="create_session_space"):
            pin_session(tiers, "x", keys_of(1), space)
        with (
            create_session_space(client, f"{home}/cut", block_bytes=BLOCK, parts=2) as cut,
            pytest.raises(errors.InvalidArgument, match="in one part"),
        ):
            pin_session(tiers, "x", [], cut)


def test_the_example_of_a_long_context_runs(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/long_context.py"))
    line = ["--tokens", "1600", "--layers", "1", "--repeat", "1", "--host-memory", str(4 << 20)]
    monkeypatch.setattr(sys, "argv", ["long_context.py", "--cluster", address, *line])
    assert example["main"]() == 0
    said = capsys.readouterr().out.splitlines()
    assert [text.split("  ")[0] for text in said[1:]] == [
        "paged",
        "paged by block",
        "prefetch",
        "prefetch + int8",
    ]

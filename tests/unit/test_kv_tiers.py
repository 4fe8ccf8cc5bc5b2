"""The tier manager with its threads, over stores in memory that fail as they are told (K2, K5, K18, K20)."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ffs import errors
from ffs.kv.blocks import Places
from ffs.kv.cost import Choice, CostModel
from ffs.kv.keys import Identity, hash_tokens
from ffs.kv.results import Results, Status
from ffs.kv.tiers import Outcome, Settings, Share, Tier, TierManager
from ffs.kv.tiers.workers import Workers

KEYS = hash_tokens(Identity("tiers", block_tokens=1), range(200))
BLOCK = 8192


def payload(key: bytes, nbytes: int = BLOCK) -> bytes:
    """Bytes that say whose they are, everywhere."""
    return (key * (nbytes // len(key) + 1))[:nbytes]


class MemoryStore:
    """A dict. `fault(what, keys)` may raise, or return positions that fail."""

    def __init__(self, block_bytes: int = BLOCK) -> None:
        self.block_bytes = block_bytes
        self.blocks: dict[bytes, bytes] = {}
        self.fault: Callable[[str, Sequence[bytes]], set[int] | None] = lambda what, keys: None
        self.calls: list[tuple[str, int]] = []
        self._lock = threading.Lock()

    def _begin(self, what: str, keys: Sequence[bytes]) -> set[int]:
        with self._lock:
            self.calls.append((what, len(keys)))
        return self.fault(what, keys) or set()

    def _end(self, status: list[Status], lengths: list[int]) -> Results:
        bad = [at for at, one in enumerate(status) if one is Status.ERROR]
        return Results(
            np.array(status, dtype=np.uint8),
            np.array(lengths, dtype=np.int64),
            {at: errors.Unreachable("as the test wants it") for at in bad},
        )

    def put_many(self, keys: Sequence[bytes], values: Any, *, timeout_s: float | None = None) -> Results:
        assert isinstance(values, Places)
        bad = self._begin("put", keys)
        status, memory = [], values.iov.buffer()
        lengths = np.broadcast_to(np.asarray(values.lengths), len(keys)).tolist()
        for at, (key, offset) in enumerate(zip(keys, values.offsets.tolist(), strict=True)):
            content = bytes(memory[offset : offset + lengths[at]])
            if at in bad:
                self.blocks[key] = content[: len(content) // 2]  # it got half way
                status.append(Status.ERROR)
            else:
                self.blocks[key] = content
                status.append(Status.STORED)
        return self._end(status, lengths)

    def get_many(self, keys: Sequence[bytes], into: Any, *, timeout_s: float | None = None) -> Results:
        bad = self._begin("get", keys)
        status, lengths, memory = [], [], into.iov.buffer()
        for at, (key, offset) in enumerate(zip(keys, into.offsets.tolist(), strict=True)):
            content = self.blocks.get(key)
            if at in bad or content is None:
                memory[offset : offset + 64] = bytes(64)  # anything may be left there
                status.append(Status.ERROR if at in bad else Status.MISS)
                lengths.append(0)
                continue
            memory[offset : offset + len(content)] = content
            status.append(Status.HIT)
            lengths.append(len(content))
        return self._end(status, lengths)

    def exists_many(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        bad = self._begin("exists", keys)
        status = [
            Status.ERROR if at in bad else Status.HIT if key in self.blocks else Status.MISS
            for at, key in enumerate(keys)
        ]
        return self._end(status, [0] * len(keys))

    def delete(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        bad = self._begin("delete", keys)
        for at, key in enumerate(keys):
            if at not in bad:
                self.blocks.pop(key, None)
        return self._end(
            [Status.ERROR if at in bad else Status.MISS for at in range(len(keys))], [0] * len(keys)
        )


def config(slots: int = 32, **options: Any) -> Settings:
    given = {"local_bytes": 64 * BLOCK, "least_in_flight": 8, "most_in_flight": 32, **options}
    return Settings(block_bytes=BLOCK, host_bytes=slots * BLOCK, **given)


@pytest.fixture
def space() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def local() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def manager(space: MemoryStore, local: MemoryStore) -> Iterator[TierManager]:
    with TierManager(config(), space=space, local=local, timeout_s=5) as made:
        yield made
        assert made.stats().worker_failures == 0


def read(manager: TierManager, keys: Sequence[bytes], **options: Any) -> list[Outcome]:
    found = []
    with manager.prefetch(keys, **options) as stream:
        for block in stream:
            if block.outcome is Outcome.HIT:
                assert block.memory is not None
                assert bytes(block.memory.view) == payload(block.key, len(block.memory))
            else:
                assert block.memory is None
            found.append(block.outcome)
    return found


# --- moving ---------------------------------------------------------------------------------------------


def test_blocks_go_down_all_tiers_and_come_back(
    manager: TierManager, space: MemoryStore, local: MemoryStore
) -> None:
    for key in KEYS[:100]:
        while not manager.put(key, payload(key)):
            manager.flush()
    manager.flush()
    stats = manager.stats()
    assert stats.host_used_bytes <= 32 * BLOCK
    assert stats.local_used_bytes <= 64 * BLOCK
    assert len(local.blocks) <= 64
    assert set(space.blocks) | set(local.blocks) == set(KEYS[:100])
    assert len(space.blocks) >= 36
    assert manager.lookup(KEYS[:150]) == 100
    assert read(manager, KEYS[:101]) == [Outcome.HIT] * 100 + [Outcome.MISS]
    counts = manager.stats().counts
    assert counts.local.loads > 0
    assert counts.space.loads > 0
    assert manager.stats().pinned_blocks == 0


def test_everything_is_found_again_after_the_tiers_above_were_lost(space: MemoryStore) -> None:
    """K27: written, and read back in full by another engine."""
    with TierManager(config(), space=space) as first:
        for key in KEYS[:60]:
            while not first.put(key, payload(key)):
                first.flush()
        first.flush()
    with TierManager(config(), space=space) as second:
        assert second.lookup(KEYS[:60]) == 60
        assert read(second, KEYS[:60]) == [Outcome.HIT] * 60
        assert second.stats().counts.space.loads == 60


def test_blocks_of_any_length(manager: TierManager) -> None:
    for at, key in enumerate(KEYS[:20]):
        with manager.fill(key, 1 + at * 400) as slot:
            assert slot is not None
            slot.view[:] = payload(key, 1 + at * 400)
    manager.flush()
    with manager.fetch(KEYS[:16]) as stream:
        lengths = [len(block.memory) for block in stream.wait_all() if block.memory is not None]
    assert lengths == [1 + at * 400 for at in range(16)]
    with pytest.raises(errors.InvalidArgument, match="takes 1 to 8192"):
        manager.put(KEYS[30], bytes(BLOCK + 1))


def test_a_fill_that_raises_leaves_nothing(manager: TierManager, space: MemoryStore) -> None:
    def half() -> None:
        with manager.fill(KEYS[0], BLOCK) as slot:
            assert slot is not None
            raise RuntimeError("the engine's")

    with pytest.raises(RuntimeError):
        half()
    manager.flush()
    assert manager.where(KEYS[0]) is None
    assert read(manager, KEYS[:1]) == [Outcome.MISS]
    assert space.blocks == {}


def test_never_another_requests_block(space: MemoryStore, local: MemoryStore) -> None:
    """K2: sessions at once, with memory for a few of them; every block is checked by `read`."""
    with TierManager(config(slots=24, local_bytes=20 * BLOCK), space=space, local=local) as manager:
        failures: list[BaseException] = []

        def session(seed: int) -> None:
            draw = random.Random(seed)
            try:
                for _ in range(12):
                    begin = draw.randrange(150)
                    for key in KEYS[begin : begin + 8]:
                        manager.put(key, payload(key))
                    begin = draw.randrange(150)
                    outcomes = read(manager, KEYS[begin : begin + 20], ahead=4)
                    assert Outcome.FAILED not in outcomes
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=session, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        stats = manager.stats()
        assert (stats.worker_failures, stats.pinned_blocks, stats.leases) == (0, 0, 0)


# --- what goes wrong ------------------------------------------------------------------------------------


def test_failed_loads_are_reported_by_block(manager: TierManager, space: MemoryStore) -> None:
    """K5: and the others of the batch are delivered."""
    space.blocks = {key: payload(key) for key in KEYS[:10]}
    broken = {KEYS[3], KEYS[7]}
    space.fault = lambda what, keys: {at for at, key in enumerate(keys) if what == "get" and key in broken}
    with manager.prefetch(KEYS[:12]) as stream:
        outcomes = [block.outcome for block in stream]
    assert stream.failed == [3, 7]
    assert stream.missed == [10, 11]
    assert outcomes.count(Outcome.HIT) == 8
    assert manager.stats().counts.space.retries == 2


@pytest.mark.parametrize("kind", [RuntimeError, errors.Unreachable, MemoryError, SystemExit])
def test_workers_outlive_whatever_a_store_raises(
    manager: TierManager, space: MemoryStore, local: MemoryStore, kind: type[BaseException]
) -> None:
    """K20: the eviction thread dies at its first exception, and nothing is ever stored again."""
    workers = manager.stats().workers

    def broken(what: str, keys: Sequence[bytes]) -> None:
        raise kind("as the test wants it")

    space.fault = local.fault = broken
    assert read(manager, KEYS[:4]) == [Outcome.FAILED] * 4
    for key in KEYS[50:110]:
        while not manager.put(key, payload(key)):
            manager.flush()
    manager.flush()
    assert manager.stats().workers == workers
    space.fault = local.fault = lambda what, keys: None
    for breaker in manager._machine.breakers.values():
        breaker.well()
    assert manager.put(KEYS[120], payload(KEYS[120]))
    manager.flush()
    assert KEYS[120] in space.blocks
    space.blocks[KEYS[0]] = payload(KEYS[0])
    assert read(manager, KEYS[:1]) == [Outcome.HIT]


def test_a_step_that_raises_is_counted_and_the_thread_goes_on() -> None:
    workers, steps = Workers(), threading.Semaphore(0)

    def step() -> bool:
        steps.release()
        raise SystemExit("even this")

    workers.start("test", step)
    for _ in range(3):
        assert steps.acquire(timeout=60)
    assert workers.alive() == 1
    workers.stop()
    workers.join()
    assert workers.failures >= 2
    assert isinstance(workers.last_failure, SystemExit)


def test_removals_that_fail_are_tried_again(space: MemoryStore, local: MemoryStore) -> None:
    fails = iter([True, True])
    local.fault = lambda what, keys: {0} if what == "delete" and next(fails, False) else None
    with TierManager(config(slots=8, local_bytes=8 * BLOCK), space=space, local=local) as manager:
        for key in KEYS[:60]:
            while not manager.put(key, payload(key)):
                manager.flush()
        manager.flush()
        assert len(local.blocks) <= 8
        listed = manager._machine.local
        assert listed is not None
        assert set(local.blocks) == {key for key in KEYS if listed.has(key)}


@pytest.mark.parametrize("how", ["break", "raise", "forgotten", "never read"])
def test_a_stream_that_isnt_read_to_its_end_leaves_no_pin(
    manager: TierManager, space: MemoryStore, how: str
) -> None:
    """K18."""
    space.blocks = {key: payload(key) for key in KEYS[:40]}
    if how == "raise":
        with pytest.raises(ZeroDivisionError), manager.prefetch(KEYS[:40]) as stream:
            print(1 / 0, stream)
    elif how == "break":
        with manager.prefetch(KEYS[:40]) as stream:
            for _ in stream:
                break
    else:
        stream = manager.prefetch(KEYS[:40])
        if how == "forgotten":
            next(iter(stream))
        del stream
        gc.collect()
    manager.flush()
    manager._machine.sweep(0.0)
    assert manager.stats().pinned_blocks == 0
    assert manager.stats().leases == 0
    assert read(manager, KEYS[:40]) == [Outcome.HIT] * 40


@pytest.mark.parametrize("ahead", [1, 5, 16])
def test_blocks_as_far_ahead_as_may_be_come_whatever_was_released(
    manager: TierManager, space: MemoryStore, ahead: int
) -> None:
    """Releases are gathered, but nobody waits for a block that wasn't asked for because of it."""
    space.blocks = {key: payload(key) for key in KEYS[:60]}
    with manager.prefetch(KEYS[:60], ahead=ahead, timeout_s=60) as stream:
        for position in range(60):
            block = stream.block(min(59, position + ahead - 1))
            assert block.memory is not None
            assert bytes(block.memory.view) == payload(block.key)
            assert manager.stats().pinned_blocks <= ahead
            stream.release()
        assert manager.stats().pinned_blocks == 0
        with pytest.raises(errors.InvalidArgument, match="all 60 blocks"):
            stream.release()
    assert stream.failed == []


def test_what_a_lease_held_isnt_given_out_after_its_end(space: MemoryStore) -> None:
    """Not even what had come, and was to be read next."""
    space.blocks = {key: payload(key) for key in KEYS[:8]}
    with TierManager(config(), space=space) as manager, manager.prefetch(KEYS[:8], lease_s=3600) as stream:
        manager.flush()
        assert stream.block(0).memory is not None
        manager._machine.sweep(float("inf"))
        with pytest.raises(errors.BadHandle, match="memory may be others'"):
            stream.block(1)


def test_a_store_that_answers_too_few_blocks_fails_them_all(manager: TierManager, space: MemoryStore) -> None:
    space.get_many = lambda keys, into, timeout_s=None: Results(  # type: ignore[method-assign]
        np.array([Status.HIT], dtype=np.uint8), np.array([BLOCK]), {}
    )
    with manager.prefetch(KEYS[:3]) as stream:
        blocks = list(stream)
    assert [block.outcome for block in blocks] == [Outcome.FAILED] * 3
    assert "answered 1 of 3 blocks" in str(blocks[0].error)


def test_a_block_that_doesnt_come_in_time_is_failed(space: MemoryStore) -> None:
    """K13: the request goes on."""
    release = threading.Event()
    space.fault = lambda what, keys: set() if release.wait(60) else {0}
    with TierManager(config(), space=space) as manager:
        with manager.prefetch(KEYS[:2], timeout_s=0.05) as stream:
            assert [block.outcome for block in stream] == [Outcome.FAILED] * 2
        assert stream.failed == [0, 1]
        release.set()


def test_a_closed_manager_answers_who_waits(space: MemoryStore) -> None:
    release = threading.Event()
    space.fault = lambda what, keys: set() if release.wait(60) else {0}
    manager = TierManager(config(), space=space)
    stream = manager.prefetch(KEYS[:1])
    said: list[BaseException] = []

    def wait() -> None:
        try:
            next(iter(stream))
        except errors.BadHandle as error:
            said.append(error)

    reader = threading.Thread(target=wait)
    reader.start()
    closer = threading.Thread(target=manager.close)
    closer.start()
    reader.join(60)
    assert said
    release.set()
    closer.join(60)
    assert not closer.is_alive()
    with pytest.raises(errors.BadHandle, match="closed"):
        manager.put(KEYS[0], payload(KEYS[0]))


def test_what_cant_be_is_refused(space: MemoryStore) -> None:
    with pytest.raises(errors.InvalidArgument, match="give block_bytes=16384"):
        TierManager(config(), space=MemoryStore(16384))
    with pytest.raises(errors.InvalidArgument, match="local_bytes"):
        TierManager(config(local_bytes=0), local=MemoryStore())
    with TierManager(config(slots=4), space=space) as manager:
        with pytest.raises(errors.InvalidArgument, match="read them as a stream"):
            manager.fetch(KEYS[:5])
        with pytest.raises(errors.InvalidArgument, match="cost=CostModel"):
            manager.decide(KEYS[:1], 512)


# --- sharing --------------------------------------------------------------------------------------------


def test_what_isnt_used_again_isnt_shared(space: MemoryStore) -> None:
    with TierManager(config(share_uses=2), space=space) as manager:
        for key in KEYS[:6]:
            manager.put(key, payload(key))
        manager.flush()
        assert space.blocks == {}
        assert read(manager, KEYS[:2]) == [Outcome.HIT] * 2
        manager.flush()
        assert set(space.blocks) == set(KEYS[:2])


def test_nothing_is_shared_where_a_tier_keeps_to_itself(space: MemoryStore) -> None:
    with TierManager(config(share=Share.NEVER), space=space) as manager:
        for key in KEYS[:60]:
            while not manager.put(key, payload(key)):
                manager.flush()
        manager.flush()
        assert space.blocks == {}
        assert manager.where(KEYS[59]) is Tier.HOST


# --- load or recompute ----------------------------------------------------------------------------------


def test_the_cheaper_way_is_chosen_and_judged() -> None:
    model = CostModel(prefill_tokens_per_s=10_000)
    model.source("space").observe(100 << 20, 0.1)
    small = model.decide({"space": 8 << 20}, {}, 512)
    assert small.choice is Choice.LOAD
    assert small.recompute_s == pytest.approx(0.0512)
    behind = model.decide({"space": 8 << 20}, {"space": 400 << 20}, 512)
    assert behind.choice is Choice.RECOMPUTE
    assert behind.load_s > small.load_s
    assert model.judge(small, 0.01)
    assert not model.judge(small, 0.2)
    assert model.judge(behind, 0.05)
    counts = model.counts
    assert (counts.loads, counts.recomputes, counts.judged, counts.right) == (1, 1, 3, 2)
    assert counts.regret_s == pytest.approx(0.2 - 0.0512)
    assert counts.error > 0


def test_measurements_replace_what_was_assumed_and_then_fade() -> None:
    model = CostModel(prefill_tokens_per_s=1000)
    speed = model.source("space", bandwidth=1e12)
    speed.observe(10 << 20, 0.1)
    first = speed.bandwidth
    assert first < 2e8
    for _ in range(60):
        speed.observe(10 << 20, 1.0)
    assert speed.bandwidth == pytest.approx((10 << 20) / 0.999, rel=0.02)
    model.observe_prefill(100, 1.0)
    assert model.prefill_tokens_per_s == 100
    with pytest.raises(errors.InvalidArgument, match="never ends"):
        CostModel(0)


def test_a_source_that_was_slow_is_looked_at_again() -> None:
    """Else one bad hour would decide for ever."""
    model = CostModel(prefill_tokens_per_s=1000)
    model.source("space").observe(1 << 20, 1.5)
    choices = [model.decide({"space": 1 << 20}, {}, 1000) for _ in range(64)]
    assert [one.choice for one in choices[:-1]] == [Choice.RECOMPUTE] * 63
    assert choices[-1].look
    hopeless = [model.decide({"space": 1 << 30}, {}, 1000) for _ in range(200)]
    assert all(one.choice is Choice.RECOMPUTE for one in hopeless)


def test_the_manager_decides_by_where_blocks_are(space: MemoryStore) -> None:
    space.blocks = {key: payload(key) for key in KEYS[:20]}
    with TierManager(config(), space=space, cost=CostModel(1e9)) as manager:
        assert manager.decide(KEYS[:8], 8).choice is Choice.RECOMPUTE
        assert read(manager, KEYS[:8]) == [Outcome.HIT] * 8
        here = manager.decide(KEYS[:8], 8)
        assert here.choice is Choice.LOAD
        assert here.load_s == 0
        assert manager.judge(here, 0.0)
        counts = manager.stats().cost
        assert counts is not None
        assert (counts.loads, counts.recomputes, counts.right) == (1, 1, 1)

"""ffs as a tier of vLLM: its own tiering machinery, on the CPU, over a real cluster."""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import ffs
from ffs import kv
from ffs.kv.vllm_tier import FfsTier, _parts, fields_of

GROUPS = (OffloadingGroupConfig(tokens_per_block=16, layer_names=("l0", "l1"), group_id=0),)
BLOCK = 96 << 10  # of one worker
CHUNKS = 24


def config_of(tier: dict[str, Any], **changes: Any) -> OffloadingConfig:
    return OffloadingConfig(
        groups=changes.pop("groups", GROUPS),
        worker_kv_bytes_per_block=changes.pop("block", BLOCK),
        enable_kv_cache_events=True,
        extra_config={
            "cpu_bytes_to_use": changes.pop("cpu_bytes", CHUNKS * BLOCK * 2),
            "secondary_tiers": [{"type": "FfsTier", "module_path": "ffs.kv.vllm_tier", **tier}],
        },
        engine_id=uuid.uuid4().hex,
        model=replace(OffloadingModelConfig(name="m", dtype="bfloat16"), **changes.pop("model", {})),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=replace(
            OffloadingParallelConfig(
                rank=0, world_size=2, tp_size=2, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
                data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
            ),
            **changes.pop("parallel", {}),
        ),
        **changes,
    )  # fmt: skip


def key_of(number: int, salt: str = "") -> Any:
    return make_offload_key(hashlib.sha256(f"{salt}{number}".encode()).digest(), 0)


def payload(key: bytes, size: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(key).digest(size), dtype=np.uint8)


class Engine:
    """What the scheduler does with its offloading manager, step by step."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.manager: Any = TieringOffloadingSpec(config).get_manager()
        self.tier: FfsTier = self.manager.secondary_tiers[0]
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.row = self.view.shape[1]

    def rows(self) -> np.ndarray:
        return np.asarray(self.view).view(np.uint8)

    def request(self) -> ReqContext:
        context = ReqContext(req_id=uuid.uuid4().hex)
        with self.manager.lock:
            self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        with self.manager.lock:
            self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self, deadline_s: float = 60) -> None:
        until = time.monotonic() + deadline_s
        while self.manager.has_pending_work():
            assert time.monotonic() < until
            self.step()
            time.sleep(0.002)

    def store(self, keys: list[Any]) -> None:
        """As if a GPU had written them, then down to all tiers."""
        context = self.request()
        with self.manager.lock:
            output = self.manager.prepare_store(keys, context)
            for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
                self.rows()[chunk] = payload(key, self.row)
            self.manager.complete_store(output.keys_to_store, context, True)
            self.manager.on_request_finished(context)
        self.settle()

    def prefix(self, keys: list[Any], context: ReqContext | None = None, deadline_s: float = 60) -> int:
        """How long a prefix a request gets, looking until nothing is pending; checks every byte of it."""
        context = context or self.request()
        until = time.monotonic() + deadline_s
        while True:
            with self.manager.lock:
                found = [self.manager.lookup(key, context) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                break
            assert time.monotonic() < until
            self.step()
            time.sleep(0.002)
        hits = [result is LookupResult.HIT for result in found]
        length = hits.index(False) if False in hits else len(hits)
        with self.manager.lock:
            if length:
                spec = self.manager.prepare_load(keys[:length], context)
                for key, chunk in zip(keys, spec.chunk_ids, strict=False):
                    assert (self.rows()[chunk] == payload(key, self.row)).all()
                self.manager.complete_load(keys[:length], context)
            self.manager.on_request_finished(context)
        return length

    def close(self) -> None:
        self.view = None
        region = self.manager.primary_tier._mmap_region
        self.manager.shutdown()
        assert region.mmap_obj is None  # nothing of ours keeps the engine's memory


@contextmanager
def engine_of(tier: dict[str, Any], **changes: Any) -> Iterator[Engine]:
    engine = Engine(config_of(tier, **changes))
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def tier(address: str, space_path: str) -> dict[str, Any]:
    return {"cluster": address, "space": space_path}


def test_another_engine_reads_what_one_has_stored(tier: dict[str, Any]) -> None:
    keys = [key_of(n) for n in range(CHUNKS - 4)]
    with engine_of({**tier, "enable_kv_events": True, "locality": "REMOTE"}) as first:
        first.store(keys)
        assert first.tier.figures()["stored"] == len(keys)
        events = [event for event in first.manager.take_events() if event.locality is not None]
        assert sorted(key for event in events for key in event.keys) == sorted(keys)
        stats = first.manager.get_stats()
        assert stats.reduce()["vllm:kv_offload_ffs_stored"] == len(keys)
    with engine_of(tier) as second:
        assert second.prefix(keys) == len(keys)
        assert second.tier.figures()["loaded"] == len(keys)
        second.store([key_of(n, "new") for n in range(8)])  # makes room in the CPU tier


# K11: the whole prompt, one block less, one more.
@pytest.mark.parametrize("stored", [0, 1, 7, 8])
@pytest.mark.parametrize("asked", [1, 7, 8, 9])
def test_k11_prefixes_around_every_boundary(tier: dict[str, Any], stored: int, asked: int) -> None:
    keys = [key_of(n, f"{stored}-{asked}") for n in range(9)]
    with engine_of(tier) as first:
        if stored:
            first.store(keys[:stored])
    with engine_of(tier) as second:
        assert second.prefix(keys[:asked]) == min(stored, asked)


# K4, K8, K9: whatever an engine differs in, it shares nothing.
@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"revision": "2"}, {}), ({"salt": "x"}, {}), ({"layout": "y"}, {}),
        ({}, {"model": {"name": "other"}}), ({}, {"model": {"dtype": "float16"}}),
        ({}, {"block": BLOCK // 2, "parallel": {"world_size": 4, "tp_size": 4}}),
        ({}, {"parallel": {"world_size": 2, "tp_size": 1, "pp_size": 2}}),
        ({}, {"parallel": {"dcp_size": 2}}), ({}, {"kv_cache_layout": "HND"}),
        ({}, {"groups": (OffloadingGroupConfig(16, ("l1", "l0"), 0),)}),
    ],
)  # fmt: skip
def test_k4_k8_engines_that_differ_share_nothing(
    tier: dict[str, Any], settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    keys = [key_of(n) for n in range(3)]
    with engine_of(tier) as first:
        first.store(keys)
        plain = fields_of(first.tier._offloading_spec, first.row)
    with engine_of({**tier, **settings}, **changes) as second:
        assert second.prefix(keys) == 0
    with engine_of(tier) as third:
        assert third.prefix(keys) == 3
    # Everything that shared/KV names, and what a layout is.
    assert {
        "model", "dtype", "tokens_per_hash", "blocks_per_chunk", "tp", "pp", "dcp", "rank", "groups",
        "adapter_layout", "engine_layout", "row_bytes",
    } <= set(plain)  # fmt: skip


def test_bytes_that_are_the_same_under_any_parallelism_are_shared(tier: dict[str, Any]) -> None:
    keys = [key_of(n, "portable") for n in range(3)]
    agnostic = {"is_parallelism_agnostic": True}
    # A row of the same bytes: one worker with all of it, or two with half each.
    with engine_of(tier, parallel=agnostic) as first:
        fields = fields_of(first.tier._offloading_spec, first.row)
        first.store(keys)
    assert not {"tp", "pp", "world_size", "rank"} & set(fields)


def test_k6_rows_of_several_chunks_are_whole_or_missing(tier: dict[str, Any], address: str) -> None:
    block = 10 << 20  # two workers: a row of 20 MiB, in two parts
    sizes = {"block": block, "cpu_bytes": 6 * 2 * block}
    keys = [key_of(n, "large") for n in range(3)]
    with engine_of(tier, **sizes) as first:
        first.store(keys)
        parts = first.tier._keys([bytes(key) for key in keys])
        assert len(parts) == 6
    with ffs.connect(address) as client, kv.Space.open(client, tier["space"]) as space:
        space.delete(parts[3:4])  # the second part of the second block
    with engine_of(tier, **sizes) as second:
        assert second.prefix(keys) == 1


@pytest.mark.parametrize("row", [4096, 16 << 20, (16 << 20) + 4096, 100 << 20, (33 << 20) + 8192])
def test_parts_cover_a_row(row: int) -> None:
    parts = _parts(row)
    assert parts.sum() == row
    assert parts.max() <= 16 << 20
    assert parts.min() > 0
    assert not (parts[:-1] % 4096).any()


# K5, K12: found, then gone before it is read.
def test_k5_k12_failed_loads_are_told_by_block_and_tried_once(tier: dict[str, Any], address: str) -> None:
    keys = [key_of(n, "gone") for n in range(6)]
    with engine_of(tier) as first:
        first.store(keys)
        stored = first.tier._keys([bytes(key) for key in keys])
    with (
        ffs.connect(address) as client,
        kv.Space.open(client, tier["space"]) as space,
        engine_of(tier) as second,
    ):
        loads = count_calls(second.tier, "submit_load")
        looked = second.tier._store.look

        def look_then_lose(wanted: Any) -> Any:
            found = looked(wanted)
            space.delete(stored[2:4])
            return found

        second.tier._store.look = look_then_lose  # type: ignore[method-assign]
        assert second.prefix(keys) == 2
        assert sum(len(job.keys) for job in loads) == 6  # each block once, though the request asked on
        assert second.tier.figures()["loaded"] == 4
        second.tier._store.look = looked  # type: ignore[method-assign]
        # The next request starts from the CPU tier and looks the others up anew: a miss now.
        assert second.prefix(keys) == 2
        assert sum(len(job.keys) for job in loads) == 6


def count_calls(tier: FfsTier, name: str) -> list[Any]:
    seen: list[Any] = []
    method = getattr(tier, name)

    def counted(job: Any) -> None:
        seen.append(job)
        method(job)

    setattr(tier, name, counted)
    return seen


# K17: nothing is there; K13: something is, and says nothing.
def test_k17_an_engine_starts_and_serves_without_a_cluster(nowhere: str, space_path: str) -> None:
    keys = [key_of(n) for n in range(4)]
    tier = {"cluster": nowhere, "space": space_path, "failures": 1, "connect_timeout_s": 0.5}
    with engine_of(tier) as engine:
        assert engine.prefix(keys) == 0
        engine.store(keys)
        assert not engine.tier.healthy
        assert engine.prefix(keys) == 4  # of the CPU tier
        assert engine.tier.figures()["refused"] > 0
        gauge = engine.manager.get_stats().reduce()["vllm:kv_offload_ffs_healthy"]
        assert gauge == 0


def test_k13_stopped_servers_hold_up_no_request(tier: dict[str, Any], stopped: Any) -> None:
    keys = [key_of(n, "stop") for n in range(4)]
    with engine_of(tier) as first:
        first.store(keys)
    hasty = {"lookup_timeout_s": 0.3, "load_timeout_s": 0.5, "store_timeout_s": 0.5, "longest_pause_s": 0.5}
    with engine_of({**tier, **hasty}) as second:
        assert second.prefix([key_of(99)]) == 0  # connected
        with stopped():
            assert second.prefix(keys) == 0
            second.store([key_of(n, "while stopped") for n in range(2)])
        until = time.monotonic() + 60
        while second.prefix(keys) != 4:  # by itself, once they go on
            assert time.monotonic() < until
            time.sleep(0.1)
        assert second.tier.healthy


# K18: whatever happens to a request, nothing stays pinned.
def test_k18_no_pins_and_no_verdicts_are_left(tier: dict[str, Any]) -> None:
    keys = [key_of(n, "pins") for n in range(8)]
    with engine_of(tier) as first:
        first.store(keys)
    with engine_of(tier) as second:
        for steps in range(6):
            context = second.request()
            for _ in range(steps):  # given up after so many steps, a lookup or a load under way
                with second.manager.lock:
                    for key in keys:
                        second.manager.lookup(key, context)
                second.step()
            with second.manager.lock:
                second.manager.on_request_finished(context)
            second.settle()
        assert len(second.tier._verdicts) == 0
        policy = second.manager.primary_tier._policy
        free = second.manager.primary_tier._get_num_free_chunks()
        assert all(policy.get(key) is None or policy.get(key).ref_cnt == 0 for key in keys)
        assert free >= second.manager.primary_tier._num_chunks - len(keys)


def test_nothing_blocks_the_scheduler(tier: dict[str, Any]) -> None:
    """Counted, not timed: no call of the scheduler's thread reaches a ring, a socket or a space."""
    here = threading.get_ident()
    reached: list[str] = []
    keys = [key_of(n, "threads") for n in range(8)]
    watched = ("look", "load", "store", "_call", "_open", "_connect")
    with engine_of(tier) as engine:
        store = engine.tier._store
        for name in watched:
            method = getattr(store, name)

            def watch(
                *args: Any, _method: Callable[..., Any] = method, _name: str = name, **named: Any
            ) -> Any:
                reached.append(f"{_name}{' by the scheduler' if threading.get_ident() == here else ''}")
                return _method(*args, **named)

            setattr(store, name, watch)
        engine.store(keys)
        assert engine.prefix([key_of(n, "not there") for n in range(4)]) == 0
    with engine_of(tier) as engine:
        assert engine.prefix(keys) == 8
    assert {"store", "look", "_open", "_connect"} <= set(reached)
    assert not [what for what in reached if "scheduler" in what]


def test_a_full_line_of_stores_ends_new_ones_at_once(tier: dict[str, Any]) -> None:
    gate = threading.Event()
    with engine_of({**tier, "store_queue": 0.2}) as engine:  # of 24 chunks: 4
        store = engine.tier._store.store
        engine.tier._store.store = lambda *a: (gate.wait(), store(*a))[1]  # type: ignore[method-assign]
        contexts = [engine.request() for _ in range(3)]
        for number, context in enumerate(contexts):
            keys = [key_of(n, f"line {number}") for n in range(3)]
            with engine.manager.lock:
                output = engine.manager.prepare_store(keys, context)
                engine.manager.complete_store(output.keys_to_store, context, True)
                engine.manager.on_request_finished(context)
        engine.step()
        assert engine.tier.figures()["dropped"] == 6
        gate.set()
        engine.settle()
        assert engine.tier.figures()["stored"] == 3


# K26: no Python for a block between the engine's call and the ring.
def test_k26_no_python_call_for_each_block(tier: dict[str, Any]) -> None:
    import sys

    with engine_of(tier) as engine:
        engine.store([key_of(n, "k26") for n in range(CHUNKS // 2)])
        calls = {}
        for count in (2, CHUNKS // 2):
            keys = engine.tier._keys([bytes(key_of(n, "k26")) for n in range(count)])
            blocks = engine.tier._blocks(np.arange(count))
            engine.tier._store.load(keys, blocks)  # rings and routes are there
            seen = [0]

            def profile(frame: Any, event: str, _: Any, seen: list[int] = seen) -> None:
                seen[0] += event == "call"

            sys.setprofile(profile)
            try:
                keys = engine.tier._keys([bytes(key_of(n, "k26")) for n in range(count)])
                assert engine.tier._store.load(keys, engine.tier._blocks(np.arange(count))).all()
            finally:
                sys.setprofile(None)
            calls[count] = seen[0] - count * 2  # key_of and make_offload_key are the test's own
        waits = calls[CHUNKS // 2] - calls[2]
        assert waits < CHUNKS // 2, calls


def test_the_engines_memory_is_the_iov(tier: dict[str, Any]) -> None:
    """No copy: the ring's requests point into the engine's own pages."""
    with engine_of(tier) as engine:
        blocks = engine.tier._blocks(np.array([3, 0]))
        view = engine.rows()
        iov = blocks.keep[0]
        whole = np.frombuffer(iov.buffer(), dtype=np.uint8)
        assert whole.ctypes.data == view.ctypes.data
        assert blocks.offsets.tolist() == [3 * engine.row, 0]
        del whole, view
        engine.store([key_of(1, "copy")])
        assert engine.prefix([key_of(1, "copy")]) == 1
        space = engine.tier._store._space
        assert space is not None
        stats = space.stats().rings
        assert sum(ring.bytes_written for ring in stats) == engine.row


def test_a_reset_waits_for_what_is_under_way(tier: dict[str, Any]) -> None:
    keys = [key_of(n, "reset") for n in range(6)]
    with engine_of(tier) as first:
        first.store(keys)
    with engine_of(tier) as second:
        context = second.request()
        for _ in range(3):
            with second.manager.lock:
                for key in keys:
                    second.manager.lookup(key, context)
            second.step()
        with second.manager.lock:
            second.manager.reset_cache()
            second.manager.on_reset_flushed()
            second.manager.on_request_finished(context)
        assert second.prefix(keys) == 6

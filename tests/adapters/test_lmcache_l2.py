"""ffs as an L2 adapter of LMCache, both ways, by LMCache's own factory, bridge and benchmark."""

from __future__ import annotations

import hashlib
import json
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import (
    NativePluginL2AdapterConfig,
    _create_native_plugin_l2_adapter,
)
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig, _create_plugin_adapter
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

SIZE = 80_000  # no multiple of anything


def plugin(params: dict[str, Any], memory: L1MemoryDesc | None) -> Any:
    config = PluginL2AdapterConfig.from_dict(
        {"module_path": "ffs.kv.lmcache_l2", "class_name": "FfsL2Adapter", "adapter_params": params}
    )
    return _create_plugin_adapter(config, memory)


def native(params: dict[str, Any], memory: L1MemoryDesc | None) -> Any:
    config = NativePluginL2AdapterConfig.from_dict(
        {"module_path": "ffs.kv.lmcache_l2", "class_name": "FfsConnector", "adapter_params": params}
    )
    return _create_native_plugin_l2_adapter(config, memory)


Make = Callable[[dict[str, Any], L1MemoryDesc | None], Any]


def key_of(number: int, **changes: Any) -> ObjectKey:
    fields = {"chunk_hash": hashlib.sha256(str(number).encode()).digest(), "model_name": "m", "kv_rank": 1}
    return ObjectKey(**{**fields, **changes})


def payload(number: int, size: int = SIZE) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(str(number).encode()).digest(size), dtype=np.uint8)


class Arena:
    """LMCache's memory: objects of one size, side by side."""

    def __init__(self, count: int, size: int = SIZE) -> None:
        self.tensor = torch.zeros(count * size, dtype=torch.uint8)
        self.desc = L1MemoryDesc(ptr=self.tensor.data_ptr(), size=len(self.tensor), align_bytes=1)
        self.objects = [
            TensorMemoryObj(
                self.tensor[at * size : (at + 1) * size],
                MemoryObjMetadata(
                    shape=torch.Size([size]),
                    dtype=torch.uint8,
                    address=at * size,
                    phy_size=size,
                    ref_count=1,
                    pin_count=0,
                    fmt=MemoryFormat.UNDEFINED,
                ),
                parent_allocator=None,
            )
            for at in range(count)
        ]

    def array(self, at: int) -> np.ndarray:
        return self.objects[at].tensor.numpy()


@contextmanager
def adapter_of(make: Make, params: dict[str, Any], memory: L1MemoryDesc | None = None) -> Iterator[Any]:
    adapter = make(params, memory)
    try:
        yield adapter
    finally:
        adapter.close()


def wait(fd: int, ask: Callable[[], Any], deadline_s: float = 60) -> Any:
    """By the descriptor, as LMCache's controllers do it."""
    until = time.monotonic() + deadline_s
    while True:
        answer = ask()
        if answer is not None and answer != {}:
            return answer
        assert time.monotonic() < until
        select.select([fd], [], [], 0.2)


def store(adapter: Any, keys: list[ObjectKey], objects: list[Any]) -> Any:
    task = adapter.submit_store_task(keys, objects)
    return wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task]


def lookup(adapter: Any, keys: list[ObjectKey]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {})
    bits = wait(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
    assert adapter.query_lookup_and_lock_result(task) is None  # once
    return [bits.test(at) for at in range(len(keys))]


def load(adapter: Any, keys: list[ObjectKey], objects: list[Any]) -> list[bool]:
    task = adapter.submit_load_task(keys, objects)
    bits = wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    return [bits.test(at) for at in range(len(keys))]


@pytest.fixture
def params(address: str, space_path: str) -> dict[str, Any]:
    return {"cluster": address, "space": space_path}


both = pytest.mark.parametrize("make", [plugin, native])


@both
@pytest.mark.parametrize("known", [True, False])
def test_what_one_stores_another_loads(make: Make, known: bool, params: dict[str, Any]) -> None:
    arena = Arena(8)
    keys = [key_of(n) for n in range(8)]
    for at in range(8):
        arena.array(at)[:] = payload(at)
    with adapter_of(make, params, arena.desc if known else None) as first:
        assert (
            len({first.get_store_event_fd(), first.get_lookup_and_lock_event_fd(), first.get_load_event_fd()})
            == 3
        )
        assert lookup(first, keys) == [False] * 8
        done = store(first, keys[:6], arena.objects[:6])
        assert done.is_successful()
        assert done.bytes_transferred() == 6 * SIZE
        assert first.get_usage().total_bytes_used == 6 * SIZE
    arena.tensor.zero_()
    with adapter_of(make, params, arena.desc if known else None) as second:
        assert lookup(second, keys) == [True] * 6 + [False] * 2
        assert load(second, keys, arena.objects) == [True] * 6 + [False] * 2
        assert all((arena.array(at) == payload(at)).all() for at in range(6))
        second.submit_unlock(keys)
        second.submit_unlock([key_of(99)])  # always succeeds
        second.delete(keys[:1])
        assert lookup(second, keys[:2]) == [False, True]


@both
def test_k4_k9_keys_that_differ_in_any_field_are_apart(make: Make, params: dict[str, Any]) -> None:
    arena = Arena(1)
    arena.array(0)[:] = payload(0)
    others = [
        key_of(0, model_name="n"),
        key_of(0, kv_rank=2),
        key_of(0, object_group_id=1),
        key_of(0, cache_salt="s"),
        key_of(0, chunk_hash=b"x" * 31),
        key_of(1),
    ]
    with adapter_of(make, params, arena.desc) as adapter:
        assert store(adapter, [key_of(0)], arena.objects).is_successful()
        assert lookup(adapter, others) == [False] * len(others)
        assert lookup(adapter, [key_of(0)]) == [True]
    for name in ("revision", "salt", "layout", "dtype"):
        with adapter_of(make, {**params, name: "other"}) as adapter:
            assert lookup(adapter, [key_of(0)]) == [False]


@both
def test_k8_a_block_of_another_size_is_a_miss(make: Make, params: dict[str, Any]) -> None:
    arena, smaller, larger = Arena(1), Arena(1, SIZE // 2), Arena(1, 2 * SIZE)
    with adapter_of(make, params) as adapter:
        assert store(adapter, [key_of(0)], arena.objects).is_successful()
        assert load(adapter, [key_of(0)], smaller.objects) == [False]
        assert load(adapter, [key_of(0)], larger.objects) == [False]
        assert load(adapter, [key_of(0)], arena.objects) == [True]


@both
def test_k6_large_blocks_are_whole_or_missing(make: Make, params: dict[str, Any]) -> None:
    size = (16 << 20) + 12345
    arena = Arena(2, size)
    for at in range(2):
        arena.array(at)[:] = payload(at, size)
    keys = [key_of(n) for n in range(2)]
    with adapter_of(make, params, arena.desc) as adapter:
        assert store(adapter, keys, arena.objects).is_successful()
        arena.tensor.zero_()
        assert load(adapter, keys, arena.objects) == [True, True]
        assert all((arena.array(at) == payload(at, size)).all() for at in range(2))
        blocks = adapter._blocks if make is plugin else adapter._client._blocks
        from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string

        from ffs.kv.lmcache_l2 import _names, _texts

        names = _names(keys) if make is plugin else _texts([_object_key_to_string(key) for key in keys])
        assert blocks.store.delete(blocks._keys(names[:1], 1)).all()  # a second part
        assert load(adapter, keys, arena.objects) == [False, True]


@both
def test_a_large_block_is_deleted_with_all_its_parts(make: Make, params: dict[str, Any]) -> None:
    from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string

    from ffs.kv.lmcache_l2 import _names, _texts

    size = (32 << 20) + 12345
    arena = Arena(2, size)
    keys = [key_of(n) for n in range(2)]
    with adapter_of(make, params, arena.desc) as adapter:
        assert store(adapter, keys, arena.objects).is_successful()
        blocks = adapter._blocks if make is plugin else adapter._client._blocks
        names = _names(keys) if make is plugin else _texts([_object_key_to_string(key) for key in keys])
        parts = [blocks._keys(names, part) for part in range(4)]
        assert [blocks.store.look(part).tolist() for part in parts] == [[True, True]] * 3 + [[False, False]]
        assert blocks.delete([names[0], b"never stored"]).all()
        assert [blocks.store.look(part).tolist() for part in parts[:3]] == [[False, True]] * 3
        assert load(adapter, keys, arena.objects) == [False, True]


@both
def test_k17_a_server_starts_and_serves_without_a_cluster(make: Make, nowhere: str) -> None:
    arena = Arena(2)
    keys = [key_of(n) for n in range(2)]
    params = {"cluster": nowhere, "failures": 1, "connect_timeout_s": 0.5}
    with adapter_of(make, params, arena.desc) as adapter:
        assert lookup(adapter, keys) == [False, False]
        assert not store(adapter, keys, arena.objects).is_successful()
        assert load(adapter, keys, arena.objects) == [False, False]
        if make is plugin:
            assert adapter.report_status()["is_healthy"] is False
        else:
            assert not adapter._client.store.healthy
        adapter.submit_unlock(keys)


# Of what must not be answered; a busy machine may take longer over what is.
HASTY = {"lookup_timeout_s": 0.3, "load_timeout_s": 0.5, "longest_pause_s": 0.5}


@both
def test_k13_stopped_servers_answer_nothing_and_hold_up_nobody(
    make: Make, params: dict[str, Any], stopped: Any
) -> None:
    arena = Arena(2)
    keys = [key_of(n) for n in range(2)]
    with adapter_of(make, params, arena.desc) as patient:
        assert lookup(patient, keys) == [False, False]
        assert store(patient, keys, arena.objects).is_successful()
    with adapter_of(make, {**params, **HASTY}, arena.desc) as adapter:
        assert not lookup(adapter, [key_of(99)])[0]  # connected
        with stopped():
            assert lookup(adapter, keys) == [False, False]
            assert load(adapter, keys, arena.objects) == [False, False]
        until = time.monotonic() + 60
        while load(adapter, keys, arena.objects) != [True, True]:
            assert time.monotonic() < until
            time.sleep(0.1)


def test_k18_locks_are_back_at_zero_whatever_becomes_of_a_hit(params: dict[str, Any]) -> None:
    arena = Arena(4)
    keys = [key_of(n) for n in range(4)]
    with adapter_of(plugin, params, arena.desc) as adapter:
        assert store(adapter, keys[:3], arena.objects[:3]).is_successful()
        for _ in range(3):
            assert lookup(adapter, keys) == [True] * 3 + [False]
        assert adapter.locked == 3
        assert load(adapter, keys[:1], arena.objects[:1]) == [True]
        for _ in range(3):
            adapter.submit_unlock(keys)  # one of them was loaded, one never, one never found
        assert adapter.locked == 0


def test_submits_return_before_anything_is_done(params: dict[str, Any]) -> None:
    """Counted, not timed: with the threads' work held back, every submit has returned."""
    import threading

    arena = Arena(2)
    keys = [key_of(n) for n in range(2)]
    gate = threading.Event()
    with adapter_of(plugin, params, arena.desc) as adapter:
        call = adapter._blocks.store._call
        adapter._blocks.store._call = lambda *a: (gate.wait(), call(*a))[1]
        stored = adapter.submit_store_task(keys, arena.objects)
        looked = adapter.submit_lookup_and_lock_task(keys, {})
        loaded = adapter.submit_load_task(keys, arena.objects)
        assert adapter.pop_completed_store_tasks() == {}
        assert adapter.query_lookup_and_lock_result(looked) is None
        assert adapter.query_load_result(loaded) is None
        gate.set()
        assert wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[stored].is_successful()


@pytest.mark.parametrize(("kind", "name"), [("plugin", "FfsL2Adapter"), ("native_plugin", "FfsConnector")])
def test_lmcaches_benchmark_says_that_all_went_well(kind: str, name: str, params: dict[str, Any]) -> None:
    spec = {"type": kind, "module_path": "ffs.kv.lmcache_l2", "class_name": name, "adapter_params": params}
    command = [
        sys.executable,
        "-m",
        "lmcache.cli.main",
        "bench",
        "l2",
        "--l2-adapter",
        json.dumps(spec),
        "--num-keys",
        "8",
        "--data-size-kb",
        "256",
        "--rounds",
        "2",
        "--in-flight",
        "2",
        "--no-skip-verify",
        "--lookup-max-hit-rate",
        "0.5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    # It prints speeds for failed stores too: all of 32 are stored and loaded, half of them are looked for.
    assert re.findall(r"Total success: +(\d+)", said) == ["32", "16", "32"], said
    assert "All 16 keys data verified OK" in said

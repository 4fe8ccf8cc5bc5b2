"""ffs as a storage backend of SGLang's HiCache: its factory, host pools, controller's paths, and faults."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import pytest
import torch

import ffs
from ffs import kv
from ffs.errors import InvalidArgument

LAYERS, HEADS, DIM, PAGE = 3, 2, 64, 16
TOKENS = 32 * PAGE


def host_pool(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, layers: int = LAYERS) -> Any:
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    def buffers() -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros((PAGE, HEADS, DIM), dtype=dtype) for _ in range(layers))

    k, v = buffers(), buffers()
    pointers = [torch.tensor([t.data_ptr() for t in side], dtype=torch.uint64) for side in (k, v)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=TOKENS - PAGE,
        start_layer=0,
        end_layer=layers,
    )


def config_of(extra: dict[str, Any], **changes: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 2,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "m",
    }
    extra = {
        "backend_name": "ffs",
        "module_path": "ffs.kv.sglang_storage",
        "class_name": "FfsHiCache",
        "interface_v1": 1,
        **extra,
    }
    return HiCacheStorageConfig(**{**fields, **changes}, extra_config=extra)


@contextmanager
def backend_of(extra: dict[str, Any], pool: Any, **changes: Any) -> Iterator[Any]:
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    backend = StorageBackendFactory.create_backend("dynamic", config_of(extra, **changes), pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    try:
        yield backend
    finally:
        backend.close()


@pytest.fixture
def extra(address: str, space_path: str) -> dict[str, Any]:
    return {"cluster": address, "space": space_path}


def hashes_of(count: int, salt: str = "") -> list[str]:
    return [hashlib.sha256(f"{salt}{n}".encode()).hexdigest() for n in range(count)]


def indices(pages: range) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def fill(pool: Any, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = pool.kv_buffer.view(torch.int16).reshape(-1)
    raw.copy_(torch.randint(-(1 << 14), 1 << 14, raw.shape, generator=generator, dtype=torch.int16))
    return pool.kv_buffer.clone()


def page_of(pool: Any, buffer: torch.Tensor, page: int) -> bytes:
    """The bytes of a page, by the pool's own account of where they lie."""
    pointers, sizes = pool.get_page_buffer_meta(indices(range(page, page + 1)))
    flat = buffer.contiguous().view(torch.uint8).reshape(-1).numpy()
    base = pool.kv_buffer.data_ptr()
    return b"".join(
        flat[at - base : at - base + size].tobytes() for at, size in zip(pointers, sizes, strict=True)
    )


LAYOUTS = ["page_first", "page_first_direct", "layer_first"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_move_in_place(extra: dict[str, Any], layout: str) -> None:
    pool = host_pool(layout)
    before = fill(pool)
    hashes = hashes_of(8)
    with backend_of(extra, pool) as backend:
        assert backend.batch_exists(hashes) == 0
        assert backend.batch_set_v1(hashes[:6], indices(range(6))) == [True] * 6
        assert backend.batch_exists(hashes) == 6
        assert backend.batch_set_v1(hashes[:6], indices(range(6))) == [True] * 6  # there already
        assert backend.figures()["stored"] == backend.figures()["there"]
    pool.kv_buffer.zero_()
    with backend_of(extra, pool) as backend:
        # To other places of the pool, in another order.
        got = backend.batch_get_v1(hashes, indices(range(10, 18)))
        assert got == [True] * 6 + [False] * 2
        for page in range(6):
            assert page_of(pool, pool.kv_buffer, 10 + page) == page_of(pool, before, page)
        assert not pool.kv_buffer.reshape(-1).view(torch.uint8)[: PAGE * HEADS * DIM].any()


# K11: one page less, all, one more.
@pytest.mark.parametrize("stored", [0, 1, 4])
@pytest.mark.parametrize("asked", [1, 3, 4, 5])
def test_k11_leading_pages(extra: dict[str, Any], stored: int, asked: int) -> None:
    pool = host_pool()
    hashes = hashes_of(5, f"{stored} {asked}")
    with backend_of(extra, pool) as backend:
        assert backend.batch_set_v1(
            hashes[:stored], indices(range(stored)) if stored else torch.empty(0)
        ) == ([True] * stored)
        assert backend.batch_exists(hashes[:asked]) == min(stored, asked)
        assert backend.batch_set_v1(hashes[4:], indices(range(4, 5))) == [True]  # behind a hole
        assert backend.batch_exists(hashes[:asked]) == (
            5 if stored == 4 and asked == 5 else min(stored, asked)
        )


@pytest.mark.parametrize(
    ("settings", "changes", "pool"),
    [
        ({"revision": "2"}, {}, {}),
        ({"salt": "x"}, {}, {}),
        ({"layout": "y"}, {}, {}),
        ({}, {"model_name": "n"}, {}),
        ({}, {"tp_rank": 1}, {}),
        ({}, {"tp_size": 4}, {}),
        ({}, {"pp_size": 2}, {}),
        ({}, {"attn_cp_size": 2}, {}),
        ({}, {}, {"layout": "page_first_direct"}),
        ({}, {}, {"dtype": torch.float16}),
        ({}, {}, {"layers": 2}),
    ],
)
def test_k4_k8_engines_that_differ_share_nothing(
    extra: dict[str, Any], settings: dict[str, Any], changes: dict[str, Any], pool: dict[str, Any]
) -> None:
    hashes = hashes_of(2)
    plain = host_pool()
    with backend_of(extra, plain) as backend:
        assert backend.batch_set_v1(hashes, indices(range(2))) == [True, True]
    with backend_of({**extra, **settings}, host_pool(**pool), **changes) as backend:
        assert backend.batch_exists(hashes) == 0
    with backend_of(extra, plain) as backend:
        assert backend.batch_exists(hashes) == 2


def test_ranks_of_a_replicated_cache_share(extra: dict[str, Any]) -> None:
    hashes = hashes_of(2)
    pool = host_pool()
    with backend_of(extra, pool, is_mla_model=True) as backend:
        assert backend.batch_set_v1(hashes, indices(range(2))) == [True, True]
    with backend_of(extra, pool, is_mla_model=True, tp_rank=1) as backend:
        assert backend.batch_exists(hashes) == 2


def test_k6_a_page_without_one_of_its_buffers_is_missing(extra: dict[str, Any], address: str) -> None:
    pool = host_pool()
    hashes = hashes_of(4)
    with backend_of(extra, pool) as backend:
        assert backend.batch_set_v1(hashes, indices(range(4))) == [True] * 4
        keys = backend._pools["kv"].keys(hashes)
        assert len(keys) == 8  # keys and values
        with ffs.connect(address) as client, kv.Space.open(client, extra["space"]) as space:
            space.delete(keys[5:6])  # the values of the third page
        assert backend.batch_exists(hashes) == 2
        assert backend.batch_get_v1(hashes, indices(range(4))) == [True, True, False, True]


def test_k6_several_pools_are_clamped_to_what_all_have(extra: dict[str, Any]) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    pool, sidecar, states = host_pool(), host_pool(layers=1), host_pool(layers=2)
    before = [fill(p, n) for n, p in enumerate((sidecar, states))]
    hashes = hashes_of(6)
    with backend_of(extra, pool) as backend:
        backend.register_mem_host_pool_v2(sidecar, PoolName.INDEXER)
        backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
        assert backend.batch_set_v1(hashes[:5], indices(range(5))) == [True] * 5
        done = backend.batch_set_v2(
            [
                PoolTransfer(name=PoolName.INDEXER, keys=hashes[:4], host_indices=indices(range(4))),
                PoolTransfer(
                    name=PoolName.MAMBA, keys=[hashes[1], hashes[4]], host_indices=indices(range(2))
                ),
            ]
        )
        assert done == {PoolName.INDEXER: [True] * 4, PoolName.MAMBA: [True] * 2}
        every = PoolTransfer(name=PoolName.INDEXER)
        last = PoolTransfer(name=PoolName.MAMBA, keys=[hashes[0]], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = backend.batch_exists_v2(hashes, [every])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 2, 3, 4])
        found = backend.batch_exists_v2(hashes, [last])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [2, 5])
        found = backend.batch_exists_v2(hashes, [every, last])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [2])
        assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.INDEXER: 4, PoolName.MAMBA: 5}
        nobody = PoolTransfer(name=PoolName.SWA)
        assert backend.batch_exists_v2(hashes, [nobody]).kv_hit_pages == 0
        sidecar.kv_buffer.zero_()
        got = backend.batch_get_v2(
            [
                PoolTransfer(name=PoolName.INDEXER, keys=hashes, host_indices=indices(range(8, 14))),
                PoolTransfer(name=PoolName.MAMBA, keys=hashes[:1], host_indices=None),
                PoolTransfer(name=PoolName.SWA, keys=hashes[:1], host_indices=indices(range(1))),
            ]
        )
        assert got == {
            PoolName.INDEXER: [True] * 4 + [False] * 2,
            PoolName.MAMBA: [False],
            PoolName.SWA: [False],
        }
        assert page_of(sidecar, sidecar.kv_buffer, 9) == page_of(sidecar, before[0], 1)
        assert before[1] is not None


def test_without_interface_v1_tensors_are_copied(extra: dict[str, Any]) -> None:
    pool = host_pool()
    hashes = hashes_of(3)
    with backend_of({**extra, "interface_v1": 0}, pool) as backend:
        pages = [torch.full((100,), n, dtype=torch.bfloat16) for n in range(3)]
        assert backend.batch_set(hashes[:2], pages[:2])
        assert backend.set(hashes[2], pages[2])
        assert backend.exists(hashes[2])
        assert backend.batch_exists(hashes) == 3
        into = [torch.zeros(100, dtype=torch.bfloat16) for _ in range(3)]
        got = backend.batch_get(hashes, into)
        assert all((one == other).all() for one, other in zip(got, pages, strict=True))
        assert backend.get(hashes[0], torch.zeros(99, dtype=torch.bfloat16)) is None  # another size
        backend.clear()  # others share it
        assert backend.batch_exists(hashes) == 3


def test_settings_and_pools_that_cannot_be_are_named(extra: dict[str, Any]) -> None:
    with (
        pytest.raises(InvalidArgument, match="clustr: no such setting"),
        backend_of({"clustr": 1}, host_pool()),
    ):
        pass


# --- the controller's own paths, without a GPU ---------------------------------------------------------


class Controller:
    """SGLang's controller over the backend: its methods that look, load and back up, as its threads call
    them. What it has of devices and process groups isn't made."""

    def __init__(self, backend: Any, pool: Any) -> None:
        from sglang.srt.managers.cache_controller import HiCacheController

        made: Any = HiCacheController.__new__(HiCacheController)
        made.storage_backend, made.storage_host_pool, made.mem_pool_host = backend, pool, pool
        made.page_size = PAGE
        made.prefetch_sync_queue = Queue()
        made.page_get_func, made.page_set_func = made._page_get_zero_copy, made._page_set_zero_copy
        self.inner = made

    def backup(self, tokens: list[int], pages: range) -> int:
        from sglang.srt.managers.cache_controller import StorageOperation
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        operation = StorageOperation(
            indices(pages), tokens, hash_value=get_storage_hash_str(tokens, None, page_size=PAGE)
        )
        self.inner._page_backup_or_log(operation)
        return operation.completed_tokens // PAGE

    def prefetch(self, tokens: list[int], pages: range) -> tuple[int, int]:
        """Pages that were found, and that were loaded."""
        from sglang.srt.managers.cache_controller import PrefetchOperation

        operation = PrefetchOperation("r", tokens, None, None)
        operation.hash_value, found = self.inner._storage_hit_query(operation)
        operation.host_indices = indices(pages)[: len(operation.hash_value) * PAGE]
        return found // PAGE, self.inner._page_transfer(operation)


TEXT = list(range(1000, 1000 + 20 * PAGE))


def test_the_controller_backs_up_and_prefetches(extra: dict[str, Any]) -> None:
    pool = host_pool()
    before = fill(pool)
    with backend_of(extra, pool) as backend:
        controller = Controller(backend, pool)
        assert controller.backup(TEXT[: 8 * PAGE], range(8)) == 8
        pool.kv_buffer.zero_()
        assert controller.prefetch(TEXT, range(10, 30)) == (8, 8)
        for page in range(8):
            assert page_of(pool, pool.kv_buffer, 10 + page) == page_of(pool, before, page)


def test_k5_k12_a_page_lost_between_looking_and_loading(extra: dict[str, Any]) -> None:
    pool = host_pool()
    with backend_of(extra, pool) as backend:
        controller = Controller(backend, pool)
        assert controller.backup(TEXT[: 8 * PAGE], range(8)) == 8
        look = backend.batch_exists

        def look_then_lose(keys: list[str], extra_info: Any = None) -> int:
            found: int = look(keys, extra_info)
            assert backend._store.delete(backend._pools["kv"].keys(keys[3:4])).all()
            return found

        backend.batch_exists = look_then_lose
        assert controller.prefetch(TEXT[: 8 * PAGE], range(10, 18)) == (8, 3)  # the pages before it
        backend.batch_exists = look
        assert controller.prefetch(TEXT[: 8 * PAGE], range(10, 18)) == (3, 3)


def test_k17_a_server_starts_and_serves_without_a_cluster(nowhere: str) -> None:
    pool = host_pool()
    with backend_of({"cluster": nowhere, "failures": 1, "connect_timeout_s": 0.5}, pool) as backend:
        controller = Controller(backend, pool)
        assert controller.backup(TEXT, range(20)) == 0
        assert controller.prefetch(TEXT, range(20)) == (0, 0)
        assert not backend.healthy


def test_k13_stopped_servers_cost_a_deadline(extra: dict[str, Any], stopped: Any) -> None:
    pool = host_pool()
    with backend_of(extra, pool) as patient:
        assert Controller(patient, pool).backup(TEXT[: 4 * PAGE], range(4)) == 4
    # Of what must not be answered; a busy machine may take longer over what is.
    hasty = {"lookup_timeout_s": 0.3, "load_timeout_s": 0.5, "longest_pause_s": 0.5}
    with backend_of({**extra, **hasty}, pool) as backend:
        controller = Controller(backend, pool)
        assert controller.prefetch(TEXT[4 * PAGE :], range(10, 14))[1] == 0  # connected
        with stopped():
            assert controller.prefetch(TEXT[: 4 * PAGE], range(10, 14)) == (0, 0)
        until = time.monotonic() + 60
        while controller.prefetch(TEXT[: 4 * PAGE], range(10, 14)) != (4, 4):
            assert time.monotonic() < until
            time.sleep(0.1)


def test_sglangs_own_faults(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its injector fails half of the calls: what is told to be loaded is right all the same."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    pool = host_pool()
    before = fill(pool)
    outcomes = set()
    with backend_of(extra, pool) as backend:
        assert type(backend).__name__ == "HiCacheStorageFailureInjector"
        controller = Controller(backend, pool)
        for _ in range(40):
            stored = controller.backup(TEXT[: 4 * PAGE], range(4))
            pool.kv_buffer[:, 10 * PAGE :].zero_()
            found, loaded = controller.prefetch(TEXT[: 4 * PAGE], range(10, 14))
            outcomes.add((stored, found, loaded))
            for page in range(loaded):
                assert page_of(pool, pool.kv_buffer, 10 + page) == page_of(pool, before, page)
    assert {0, 4} == {stored for stored, _, _ in outcomes}
    assert {0, 4} == {loaded for _, _, loaded in outcomes}

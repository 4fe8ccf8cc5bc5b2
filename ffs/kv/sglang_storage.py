"""SGLang: ffs as a storage backend of HiCache (docs/kv.md, SGLang).

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "ffs", "module_path": "ffs.kv.sglang_storage", "class_name": "FfsHiCache",
      "interface_v1": 1, "cluster": "host:port"}'

SGLang calls it from threads of its own, where waiting is right: calls block until their deadline at most.
Pages move between SGLang's host pools and the storage servers without a copy here: each buffer of a page
(keys and values, or a layer's) is a block, and a page is there when all of its buffers are. Without SGLang
the module can be imported, and the class has no base.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ffs.errors import InvalidArgument
from ffs.kv.serving.memory import Regions
from ffs.kv.serving.names import Value, block_keys, namespace
from ffs.kv.serving.store import BLOCK_BYTES, BlockStore, Flags, Settings

try:
    _storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    _Base: Any = _storage.HiCacheStorage
except ImportError:
    _storage, _Base = None, object

LAYOUT: Final = 1
KV: Final = "kv"
_KNOWN: Final = ("backend_name", "module_path", "class_name", "interface_v1", "revision", "salt", "layout")
# What SGLang itself reads from the same dictionary.
_OF_SGLANG: Final = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "prefetch_timeout_per_page",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)
# What says how a page lies in a pool; pools of different kinds have different ones of them.
_OF_POOL: Final = (
    "layout", "dtype", "store_dtype", "page_size", "layer_num", "head_num", "head_dim", "v_head_dim",
    "kv_lora_rank", "qk_rope_head_dim", "start_layer", "end_layer",
)  # fmt: skip
_log = logging.getLogger("ffs.kv")


class _Pool:
    """A host pool: the names of its pages, and where they lie."""

    def __init__(self, name: str, pool: Any, fields: Mapping[str, Value], regions: Regions) -> None:
        import torch

        self.pool = pool
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        self._regions = regions
        for tensor in _tensors(pool):
            regions.add_tensor(tensor)
        _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size, dtype=torch.int64))
        self.sizes = np.array([int(size) for size in sizes], dtype=np.int64)
        if self.sizes.max() > BLOCK_BYTES:
            raise InvalidArgument(
                f"a buffer of a page of pool {name} has {self.sizes.max()} bytes, more than 16 MiB:"
                " give smaller pages (--page-size), or the layout layer_first"
            )
        self._root = namespace("sglang", {**fields, **_fields_of_pool(name, pool)})

    @property
    def parts(self) -> int:
        return len(self.sizes)

    def keys(self, pages: Sequence[str]) -> npt.NDArray[np.uint8]:
        return block_keys(self._root, [page.encode() for page in pages], self.sizes)

    def blocks(self, host_indices: Any) -> Any:
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        return self._regions.blocks(addresses, sizes)

    def whole(self, done: Flags) -> Flags:
        pages: Flags = np.asarray(done.reshape(-1, self.parts).all(axis=1))
        return pages


class FfsHiCache(_Base):  # type: ignore[misc]
    """The backend. Settings of ffs.kv.serving.Settings, and revision, salt, layout as for vLLM, in the extra
    configuration."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Connects to nothing yet. InvalidArgument names a setting that is wrong."""
        if _storage is None:
            raise ImportError("FfsHiCache is a backend of SGLang, which can't be imported here")
        del kwargs
        given = dict(storage_config.extra_config or {})
        kept = {name: given.pop(name) for name in _KNOWN if name in given}
        for name in _OF_SGLANG:
            given.pop(name, None)
        self._store = BlockStore(Settings.of(given))
        self._fields = fields_of(storage_config, kept)
        self._flat = namespace("sglang", {**self._fields, "pool": "flat"})
        self._zero_copy = bool(kept.get("interface_v1"))
        self._regions = Regions()
        self._pools: dict[str, _Pool] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the pages themselves."""
        super().register_mem_pool_host(mem_pool_host)
        if self._zero_copy and _tensors(mem_pool_host):
            self._pools[KV] = _Pool(KV, mem_pool_host, self._fields, self._regions)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool beside it, of a hybrid model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools[str(host_pool_name)] = _Pool(str(host_pool_name), host_pool, self._fields, self._regions)

    # --- v1: pages in place ---------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages from the first on are there."""
        pool = self._pools.get(KV)
        if pool is None:
            return _leading(self._store.look(self._flat_keys(keys)))
        return _leading(pool.whole(self._store.look(pool.keys(keys))))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Reads pages into the pool: those that are whole. What isn't may have left anything there."""
        return self._move(KV, keys, host_indices, storing=False)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Stores pages: those that are durable."""
        return self._move(KV, keys, host_indices, storing=True)

    def _move(self, name: str, keys: list[str], host_indices: Any, *, storing: bool) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or host_indices is None or len(host_indices) != len(keys) * pool.page_size:
            _log.error(
                "pool %s: %d pages with %s places: nothing is moved",
                name,
                len(keys),
                "no" if host_indices is None or pool is None else len(host_indices),
            )
            return [False] * len(keys)
        if not keys:
            return []
        call = self._store.store if storing else self._store.load
        done: list[bool] = pool.whole(call(pool.keys(keys), pool.blocks(host_indices))).tolist()
        return done

    # --- v2: several pools ----------------------------------------------------------------------

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Which prefixes can be restored from all pools."""
        pages = self.batch_exists(keys, extra_info) if KV in self._pools else len(keys)
        hits: dict[Any, int] = {KV: pages} if pages else {}
        stops = set(range(1, pages + 1))
        for transfer in pool_transfers or []:
            pool = self._pools.get(str(transfer.name))
            if pool is None:
                there = np.zeros(pages, dtype=np.bool_)
            else:
                there = pool.whole(self._store.look(pool.keys(keys[:pages])))
            policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
            if policy == "block_groups":
                continue  # reports on itself alone and holds up nobody: nothing of it is found here
            window = max(1, len(transfer.keys or ())) if policy == "trailing_pages" else None
            own = restorable(there, window)
            if own:
                hits[transfer.name] = max(own)
            stops &= own
        return _storage.PoolTransferResult(max(stops, default=0), hits, sorted(stops))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """As batch_get_v1, by pool."""
        return {
            t.name: self._move(str(t.name), list(t.keys or []), t.host_indices, storing=False)
            for t in transfers
        }

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """As batch_set_v1, by pool."""
        return {
            t.name: self._move(str(t.name), list(t.keys or []), t.host_indices, storing=True)
            for t in transfers
        }

    # --- single tensors: what SGLang uses without interface_v1 -----------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The tensor `target_location`, filled; None: not there."""
        found = self.batch_get([key], [target_location])
        return found[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Each tensor filled, or None."""
        if target_locations is None or any(target is None for target in target_locations):
            raise InvalidArgument("give a tensor to read each page into")
        done = self._flat_move(keys, target_locations, storing=False)
        return [target if good else None for target, good in zip(target_locations, done, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores a tensor."""
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores tensors; whether all of them are there."""
        return bool(
            self._flat_move(keys, values if values is not None else target_locations, storing=True).all()
        )

    def exists(self, key: str) -> bool:
        """Whether one page is there."""
        return self.batch_exists([key]) == 1

    def _flat_keys(self, keys: Sequence[str]) -> npt.NDArray[np.uint8]:
        return block_keys(self._flat, [key.encode() for key in keys], [0])

    def _flat_move(self, keys: Sequence[str], tensors: Sequence[Any], *, storing: bool) -> Flags:
        if not all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors):
            raise InvalidArgument("pages are contiguous tensors in host memory")
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        memory = Regions()
        try:
            for tensor in tensors:
                memory.add_tensor(tensor)
            blocks = memory.blocks([tensor.data_ptr() for tensor in tensors], sizes)
            if storing:
                return self._store.store(self._flat_keys(keys), blocks)
            return self._store.load(self._flat_keys(keys), blocks, unsure=True)
        finally:
            memory.close()

    # --- the rest -------------------------------------------------------------------------------

    def clear(self) -> None:
        """Other engines share the space, so nothing is removed: `ffs kv purge` does that."""
        _log.warning(
            "HiCache asked to clear ffs: other engines share it (ffs kv purge %s)", self._store.settings.space
        )

    @property
    def healthy(self) -> bool:
        """Whether the cluster answers, as far as is known."""
        return self._store.healthy

    def figures(self) -> dict[str, int | str]:
        """Counts of blocks, and the state of the breaker."""
        return self._store.figures()

    def close(self) -> None:
        """No call may be under way. Repeatable."""
        self._store.close()
        self._regions.close()


def restorable(there: Flags, window: int | None) -> set[int]:
    """Lengths of prefix (in pages, above 0) that a pool can restore: every page of it, or the last `window`
    of it. Pure."""
    if window is None:
        return set(range(1, _leading(there) + 1))
    missing = np.cumsum(np.concatenate([[0], ~there]))
    lengths = np.arange(1, len(there) + 1)
    complete = missing[lengths] == missing[np.maximum(0, lengths - window)]
    return set(lengths[complete].tolist())


def fields_of(config: Any, kept: Mapping[str, Any]) -> dict[str, Value]:
    """All that the bytes of a page depend on beside its hash and its pool. Pure."""
    version = str(kept.get("layout") or importlib.import_module("sglang").__version__)
    fields: dict[str, Value] = {
        "adapter_layout": LAYOUT,
        "engine_layout": version,
        "model": config.model_name or "",
        "revision": str(kept.get("revision", "")),
        "salt": str(kept.get("salt", "")),
        "pp_rank": config.pp_rank,
        "pp_size": config.pp_size,
        "attn_cp_rank": config.attn_cp_rank,
        "attn_cp_size": config.attn_cp_size,
        "dcp_rank": config.dcp_rank,
        "dcp_size": config.dcp_size,
        "mla": bool(config.is_mla_model),
        "logical_page_size": config.logical_page_size or 0,
    }
    # The latent cache of such a model is the same on every rank: one of them writes it for all.
    if not config.is_mla_model:
        fields |= {"tp_rank": config.tp_rank, "tp_size": config.tp_size}
    return fields


def _fields_of_pool(name: str, pool: Any) -> dict[str, Value]:
    fields: dict[str, Value] = {"pool": name, "kind": type(pool).__name__}
    for attribute in _OF_POOL:
        value = getattr(pool, attribute, None)
        fields[attribute] = (
            value if isinstance(value, int) and value >= 0 else "" if value is None else str(value)
        )
    return fields


def _tensors(pool: Any) -> list[Any]:
    """The tensors in host memory that a pool has, in lists too."""
    import torch

    found: list[Any] = []
    for value in vars(pool).values():
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel() > 0:
                found.append(tensor)
    return sorted(found, key=lambda tensor: -tensor.untyped_storage().nbytes())


def _leading(there: Flags) -> int:
    holes = np.flatnonzero(~there)
    return int(holes[0]) if len(holes) else len(there)

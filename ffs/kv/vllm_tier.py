"""vLLM: ffs as a secondary tier of its KV offloading (docs/kv.md, vLLM).

Named in the engine's configuration, nothing of vLLM is changed:

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368,
       "secondary_tiers": [{"type": "FfsTier", "module_path": "ffs.kv.vllm_tier", "cluster": "host:port"}]}}

It lives in the scheduler's process. Every call but `drain_jobs` and `shutdown` returns at once: work is put
in lines for threads (ffs.kv.serving). Blocks move between the engine's shared file and the storage servers
without a copy here. Without vLLM the module can be imported, and the class has no base.
"""

from __future__ import annotations

import importlib
import json
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ffs.errors import InvalidArgument
from ffs.kv.serving.lanes import Lanes
from ffs.kv.serving.memory import Regions
from ffs.kv.serving.names import Value, block_keys, namespace
from ffs.kv.serving.store import BLOCK_BYTES, BlockStore, Settings
from ffs.kv.serving.verdicts import Verdicts

if TYPE_CHECKING:
    from ffs.kv.blocks import SharedBlocks

try:
    _Base: Any = importlib.import_module("vllm.v1.kv_offload.tiering.base").SecondaryTierManager
    _base: Any = importlib.import_module("vllm.v1.kv_offload.base")
    _tiering: Any = importlib.import_module("vllm.v1.kv_offload.tiering.base")
except ImportError:  # of vLLM, or of something that it needs: vLLM itself would say so
    _Base, _base, _tiering = object, None, None

LAYOUT: Final = 1
"""Grows when what this module stores for the same bytes of an engine changes."""

_PAGE = 4096
_METRICS: Final = ("loaded", "missed", "stored", "there", "failed", "refused", "dropped")


class FfsTier(_Base):  # type: ignore[misc]
    """A secondary tier. Beside the settings of ffs.kv.serving.Settings:

    revision: of the weights. salt: engines with different ones share nothing. layout: instead of vLLM's
    version in the names of blocks; two versions share blocks only if the same is given to both. load_threads,
    store_threads. store_queue: the share of the CPU tier that may wait to be stored; more isn't stored.
    enable_kv_events: tell vLLM's KV events what was stored. locality: "LOCAL" or "REMOTE".
    """

    medium = None if _base is None else _base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        revision: str = "",
        salt: str = "",
        layout: str | None = None,
        load_threads: int = 2,
        store_threads: int = 1,
        store_queue: float = 0.25,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        """Connects to nothing yet. InvalidArgument names a setting that is wrong."""
        if _base is None:
            raise ImportError("FfsTier is a tier of vLLM, which can't be imported here")
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if load_threads < 1 or store_threads < 1 or not 0 < store_queue <= 1:
            raise InvalidArgument("load_threads and store_threads are at least 1, store_queue from 0 to 1")
        self.locality = None if locality is None else _base.Locality(locality)
        self._events: list[Any] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        self._settings = Settings.of(settings)
        self._store = BlockStore(self._settings)
        chunks, row_bytes = primary_kv_view.shape or (0, 0)
        self._row_bytes = int(row_bytes)
        self._parts = _parts(self._row_bytes)
        self._root = namespace(
            "vllm", fields_of(offloading_spec, self._row_bytes, revision=revision, salt=salt, layout=layout)
        )
        # By address: an exported buffer would keep the engine from releasing its view.
        self._address = int(np.asarray(primary_kv_view).ctypes.data)
        self._regions = Regions()
        if chunks:
            self._regions.add(self._address, int(chunks) * self._row_bytes)
        self._verdicts = Verdicts(2 * self._settings.lookup_timeout_s + self._settings.connect_timeout_s)
        self._finished: queue.SimpleQueue[tuple[Any, bool, npt.NDArray[np.bool_], float]]
        self._finished = queue.SimpleQueue()
        self._store_limit = max(1, int(chunks * store_queue))
        self._lock = threading.Lock()
        self._to_store = 0
        self._dropped = 0
        self._told: dict[str, int] = dict.fromkeys(_METRICS, 0)
        self._lanes = Lanes("ffs-kv-vllm", {"look": 1, "load": load_threads, "store": store_threads})

    # --- lookups --------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY until the step's lookup has an answer. Returns at once."""
        found = self._verdicts.ask(bytes(key), req_context.req_id)
        results = _base.LookupResult
        if found is None:
            return results.RETRY
        return results.HIT if found else results.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Sends the step's lookups, all in one. Returns at once."""
        wanted = self._verdicts.take()
        if wanted:
            self._lanes.submit("look", lambda: self._look(wanted))

    def on_new_request(self, req_context: Any) -> Any:
        """Blocks are stored as they come, not a whole request at a time."""
        return _base.RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forgets what the request has asked for."""
        self._verdicts.forget(req_context.req_id)

    def _look(self, wanted: list[bytes]) -> None:
        found = self._whole(self._store.look(self._keys(wanted)))
        self._verdicts.answer(wanted, found.tolist())

    # --- transfers ------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        """Puts the job in line, or ends it as failed if too much waits. Returns at once."""
        count = len(job_metadata.keys)
        with self._lock:
            full = self._to_store > 0 and self._to_store + count > self._store_limit
            if full:
                self._dropped += count
            else:
                self._to_store += count
        if full:
            self._finish(job_metadata, np.zeros(count, dtype=np.bool_), time.monotonic())
        else:
            self._lanes.submit("store", lambda: self._run(job_metadata, storing=True))

    def submit_load(self, job_metadata: Any) -> None:
        """Puts the job in line. Returns at once."""
        self._lanes.submit("load", lambda: self._run(job_metadata, storing=False))

    def _run(self, job: Any, *, storing: bool) -> None:
        began = time.monotonic()
        done = np.zeros(len(job.keys), dtype=np.bool_)
        try:
            keys = self._keys([bytes(key) for key in job.keys])
            move = self._store.store if storing else self._store.load
            done = self._whole(move(keys, self._blocks(job.chunk_ids)))
        finally:
            if storing:
                with self._lock:
                    self._to_store -= len(job.keys)
            self._finish(job, done, began)

    def _finish(self, job: Any, done: npt.NDArray[np.bool_], began: float) -> None:
        self._finished.put((job, bool(done.all()), done, time.monotonic() - began))

    def get_finished_jobs(self) -> Iterable[Any]:
        """What has ended since the last call, blocks of a load apart. Returns at once."""
        ended: list[Any] = []
        while True:
            try:
                job, whole, done, seconds = self._finished.get_nowait()
            except queue.Empty:
                return ended
            keys = list(job.keys)
            good = [key for key, loaded in zip(keys, done.tolist(), strict=True) if loaded]
            if job.is_promotion and not whole:
                self._verdicts.missing(
                    bytes(key) for key, loaded in zip(keys, done.tolist(), strict=True) if not loaded
                )
            if self._events is not None and not job.is_promotion and good:
                self._events.append(
                    _base.OffloadingEvent(
                        keys=good, medium=self.medium, removed=False, locality=self.locality
                    )
                )
            ended.append(
                _tiering.JobResult(
                    job_id=job.job_id,
                    success=whole,
                    successful_keys=tuple(good) if job.is_promotion and not whole and good else None,
                    transfer_time=seconds,
                    transfer_bytes=len(good) * self._row_bytes,
                )
            )

    def drain_jobs(self) -> None:
        """Blocks until every job has ended, which deadlines see to."""
        self._lanes.drain()

    def take_events(self) -> Iterable[Any]:
        """Blocks that this tier has stored."""
        events = self._events or []
        if self._events is not None:
            self._events = []
        return events

    def shutdown(self) -> None:
        """Ends threads and connections, after what is under way. Blocking. Repeatable."""
        self._lanes.close()
        self._store.close()
        self._regions.close()

    # --- figures --------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether the cluster answers, as far as is known."""
        return self._store.healthy

    def figures(self) -> dict[str, int | str]:
        """Counts of blocks, and the state of the breaker."""
        return {**self._store.figures(), "dropped": self._dropped, "late": self._verdicts.late}

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """Prometheus counters of this tier, and whether it is healthy."""
        if _base is None:
            return {}
        return {
            **{
                _metric(name): _base.OffloadingCounterMetadata(
                    documentation=f"Blocks {name} by the ffs tier."
                )
                for name in _METRICS
            },
            _metric("healthy"): _base.OffloadingGaugeMetadata(
                documentation="1 while the ffs cluster answers, 0 while it is left alone."
            ),
        }

    def get_stats(self) -> Any:
        """What came since the last call."""
        metrics = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics")
        stats = metrics.OffloadingConnectorStats()
        figures = self.figures()
        for name in _METRICS:
            total = int(figures[name])
            if total > self._told[name]:
                stats.increase_counter(_metric(name), total - self._told[name])
                self._told[name] = total
        stats.set_gauge(_metric("healthy"), float(self.healthy))
        return stats

    # --- inside ---------------------------------------------------------------------------------

    def _keys(self, names: list[bytes]) -> npt.NDArray[np.uint8]:
        return block_keys(self._root, names, self._parts)

    def _blocks(self, chunk_ids: npt.NDArray[np.integer]) -> SharedBlocks:
        rows = self._address + np.asarray(chunk_ids, dtype=np.int64) * self._row_bytes
        begins = np.cumsum([0, *self._parts[:-1]])
        addresses = (rows[:, None] + begins[None, :]).reshape(-1)
        return self._regions.blocks(addresses, np.tile(self._parts, len(rows)))

    def _whole(self, done: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """A block is there if all of its parts are."""
        whole: npt.NDArray[np.bool_] = np.asarray(done.reshape(-1, len(self._parts)).all(axis=1))
        return whole


def _metric(name: str) -> str:
    return f"vllm:kv_offload_ffs_{name}"


def _parts(row_bytes: int) -> npt.NDArray[np.int64]:
    """A row in equal parts of whole pages, none larger than a chunk; the last may be smaller."""
    count = max(1, -(-row_bytes // BLOCK_BYTES))
    size = -(-row_bytes // count // _PAGE) * _PAGE
    begins = np.arange(0, max(row_bytes, 1), max(size, 1), dtype=np.int64)
    return np.minimum(size, row_bytes - begins)


def fields_of(
    spec: Any, row_bytes: int, *, revision: str = "", salt: str = "", layout: str | None = None
) -> dict[str, Value]:
    """All that the bytes of a block depend on beside its own hash: engines that differ in any share nothing.
    Pure."""
    config = spec.config
    parallel = config.parallel
    portable = bool(parallel.is_parallelism_agnostic)
    groups = [
        [group.tokens_per_block, list(group.layer_names), group.group_id, group.sliding_window_size_in_chunks]
        for group in config.groups
    ]
    fields: dict[str, Value] = {
        "adapter_layout": LAYOUT,
        "engine_layout": importlib.import_module("vllm").__version__ if layout is None else layout,
        "model": config.model.name,
        "revision": revision,
        "salt": salt,
        "dtype": config.model.dtype,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": json.dumps(groups),
        "row_bytes": row_bytes,
        "worker_bytes": config.worker_kv_bytes_per_block,
        "replicated": bool(spec.replicated_layout),
        "canonical": bool(config.canonical_layout),
        "kv_cache_layout": config.kv_cache_layout or "",
        "portable": portable,
    }
    # Bytes that are the same under any parallelism are shared between engines of different sizes.
    if not portable:
        fields |= {
            "world_size": parallel.world_size,
            "tp": parallel.tp_size,
            "pp": parallel.pp_size,
            "pcp": parallel.pcp_size,
            "dcp": parallel.dcp_size,
            "rank": parallel.rank,
        }
    return fields

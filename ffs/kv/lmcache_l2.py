"""LMCache: ffs as an L2 adapter of its multi-process mode (docs/kv.md, LMCache).

Two ways, by the configuration of LMCache:

    {"type": "plugin", "module_path": "ffs.kv.lmcache_l2", "class_name": "FfsL2Adapter",
     "adapter_params": {"cluster": "host:port"}}
    {"type": "native_plugin", "module_path": "ffs.kv.lmcache_l2", "class_name": "FfsConnector",
     "adapter_params": {"cluster": "host:port"}}

The first knows the fields of LMCache's keys; the second gets keys as text from LMCache's own bridge. Blocks
of one aren't those of the other. Every submit returns at once; threads wait (ffs.kv.serving). Without
LMCache the module can be imported, and FfsL2Adapter has no base.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ffs._native.iov import Iov
from ffs.errors import InvalidArgument
from ffs.kv.blocks import SharedBlocks
from ffs.kv.serving.jobs import Finished
from ffs.kv.serving.lanes import Lanes
from ffs.kv.serving.memory import Regions
from ffs.kv.serving.names import block_keys, namespace
from ffs.kv.serving.store import BLOCK_BYTES, BlockStore, Flags, Settings

try:
    _Base: Any = importlib.import_module("lmcache.v1.distributed.l2_adapters.base").L2AdapterInterface
except ImportError:
    _Base = object

LAYOUT: Final = 1
_LANES: Final = {"look": 1, "load": 2, "store": 1}


class _Blocks:
    """Blocks by the engine's name and size, whole or not at all. Calls block; threads of the lanes make them.

    What LMCache looks up has no size in the call, so keys here don't cover it: a load compares it first."""

    def __init__(self, fields: Mapping[str, str], settings: Settings) -> None:
        self.store = BlockStore(settings)
        self._root = namespace("lmcache", {"adapter_layout": LAYOUT, **fields})
        self._regions = Regions()

    def register(self, address: int, size: int) -> None:
        """LMCache's arena, which all its blocks lie in."""
        self._regions.add(address, size)

    def look(self, names: list[bytes]) -> Flags:
        return self.store.look(self._keys(names, 0))

    def move(self, names: list[bytes], places: Sequence[tuple[int, int]], *, storing: bool) -> Flags:
        """`places`: address and bytes of each block. The first part is stored last: it is what is looked
        up."""
        done = np.zeros(len(names), dtype=np.bool_)
        sizes = np.array([size for _, size in places], dtype=np.int64)
        counts = np.maximum(1, -(-sizes // BLOCK_BYTES))
        positions = np.flatnonzero(sizes > 0)
        done[positions] = True
        most = int(counts[positions].max()) if positions.size else 0
        order = reversed(range(most)) if storing else iter(range(most))
        for part in order:
            here = positions[(counts[positions] > part) & done[positions]]
            if not here.size:
                continue
            begins = [places[at][0] + part * BLOCK_BYTES for at in here.tolist()]
            lengths = np.minimum(sizes[here] - part * BLOCK_BYTES, BLOCK_BYTES)
            keys = self._keys([names[at] for at in here.tolist()], part)
            memory = self._places(begins, lengths)
            done[here] = (
                self.store.store(keys, memory) if storing else self.store.load(keys, memory, unsure=True)
            )
        return done

    def delete(self, names: list[bytes]) -> Flags:
        """All parts, the first of each block before the others: that is what is looked up. How many there are
        nobody says here, so they are looked for, one part further of all blocks at a time."""
        gone = self.store.delete(self._keys(names, 0))
        left = np.flatnonzero(gone)
        for part in itertools.count(1):
            left = left[self.store.look(self._keys([names[at] for at in left.tolist()], part))]
            if not left.size:
                return gone
            gone[left] = self.store.delete(self._keys([names[at] for at in left.tolist()], part))
        raise AssertionError("a count ended")

    def close(self) -> None:
        self.store.close()
        self._regions.close()

    def _keys(self, names: list[bytes], part: int) -> npt.NDArray[np.uint8]:
        return block_keys(self._root, [part.to_bytes(4, "little") + name for name in names], [0])

    def _places(self, begins: list[int], lengths: npt.NDArray[np.int64]) -> SharedBlocks:
        try:
            return self._regions.blocks(begins, lengths)
        except InvalidArgument:
            # Not in the arena (a buffer of its own): an Iov for each, for this call.
            iovs = [Iov.at(begin, size) for begin, size in zip(begins, lengths.tolist(), strict=True)]
            return SharedBlocks(
                np.array([iov.handle for iov in iovs], dtype=np.uint64),
                np.zeros(len(iovs), dtype=np.uint64),
                lengths,
                tuple(iovs),
            )


def _split(params: Mapping[str, Any]) -> tuple[dict[str, str], Settings]:
    """What names blocks, and the rest."""
    rest = dict(params)
    fields = {name: str(rest.pop(name, "")) for name in ("revision", "salt", "layout", "dtype")}
    return fields, Settings.of(rest)


class FfsL2Adapter(_Base):  # type: ignore[misc]
    """The plugin. `config`: settings of ffs.kv.serving.Settings, and revision, salt, layout, dtype: what
    else the bytes of blocks depend on, beside the fields of LMCache's keys."""

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """Connects to nothing yet. InvalidArgument names a setting that is wrong."""
        if _Base is object:
            raise ImportError("FfsL2Adapter is an adapter of LMCache, which can't be imported here")
        super().__init__()
        self._bitmap = importlib.import_module("lmcache.lmcache_native").Bitmap
        self._store_result = importlib.import_module("lmcache.v1.distributed.internal_api").L2StoreResult
        fields, settings = _split(config)
        self._blocks = _Blocks(fields, settings)
        if l1_memory_desc is not None and l1_memory_desc.size:
            self._blocks.register(int(l1_memory_desc.ptr), int(l1_memory_desc.size))
        self._numbers = itertools.count(1)
        self._stores: Finished[Any] = Finished()
        self._lookups: Finished[Any] = Finished()
        self._loads: Finished[Any] = Finished()
        self._lock = threading.Lock()
        self._locked: Counter[Any] = Counter()
        self._lanes = Lanes("ffs-kv-lmcache", _LANES)

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Returns at once. The task succeeds if every block is stored or was there."""
        task = next(self._numbers)
        self._lanes.submit("store", lambda: self._run_store(task, keys, objects))
        return task

    def _run_store(self, task: int, keys: list[Any], objects: list[Any]) -> None:
        result = self._store_result(False, 0)
        try:
            sizes = [int(entry.get_size()) for entry in objects]
            done = self._blocks.move(_names(keys), _addresses(objects, sizes), storing=True)
            if done.all():
                result = self._store_result(True, sum(sizes))
                self._notify_keys_stored(keys, sizes)
        finally:
            self._stores.put(task, result)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any = None) -> int:
        """Returns at once. Locks are counted here: a block that is dropped before its load is a miss then."""
        task = next(self._numbers)
        self._lanes.submit("look", lambda: self._run_look(task, keys))
        return task

    def _run_look(self, task: int, keys: list[Any]) -> None:
        found = np.zeros(len(keys), dtype=np.bool_)
        try:
            found = self._blocks.look(_names(keys))
            with self._lock:
                self._locked.update(key for key, there in zip(keys, found.tolist(), strict=True) if there)
        finally:
            self._lookups.put(task, self._bits(found))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Always succeeds, at once."""
        with self._lock:
            for key in keys:
                if self._locked[key] > 1:
                    self._locked[key] -= 1
                else:
                    del self._locked[key]

    @property
    def locked(self) -> int:
        """Blocks that are locked now."""
        return len(self._locked)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Returns at once."""
        task = next(self._numbers)
        self._lanes.submit("load", lambda: self._run_load(task, keys, objects))
        return task

    def _run_load(self, task: int, keys: list[Any], objects: list[Any]) -> None:
        done = np.zeros(len(keys), dtype=np.bool_)
        try:
            sizes = [int(entry.get_size()) for entry in objects]
            done = self._blocks.move(_names(keys), _addresses(objects, sizes), storing=False)
            self._notify_keys_accessed([key for key, good in zip(keys, done.tolist(), strict=True) if good])
        finally:
            self._loads.put(task, self._bits(done))

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.pop(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Takes blocks away. Blocking until the deadline of a store at most."""
        if keys:
            self._blocks.delete(_names(keys))

    def report_status(self) -> dict[str, Any]:
        """Health and counts."""
        return {"is_healthy": self._blocks.store.healthy, "type": "ffs", **self._blocks.store.figures()}

    def close(self) -> None:
        """Ends what is under way. Blocking. Repeatable."""
        self._lanes.close()
        self._blocks.close()
        for finished in (self._stores, self._lookups, self._loads):
            finished.close()

    def _bits(self, flags: Flags) -> Any:
        bitmap = self._bitmap(len(flags))
        for position in np.flatnonzero(flags).tolist():
            bitmap.set(position)
        return bitmap


class FfsConnector:
    """The object behind `native_plugin`: keys as text, memory as memoryviews, one descriptor for all."""

    def __init__(self, **params: Any) -> None:
        """Connects to nothing yet. InvalidArgument names a setting that is wrong."""
        fields, settings = _split(params)
        self._blocks = _Blocks({"bridge": "native", **fields}, settings)
        self._numbers = itertools.count(1)
        self._finished: Finished[tuple[bool, str, list[bool]]] = Finished()
        self._lanes = Lanes("ffs-kv-lmcache-native", _LANES)

    def event_fd(self) -> int:
        """Readable when drain_completions has something."""
        return self._finished.fileno()

    def submit_batch_get(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        return self._submit("load", lambda: self._move(keys, memoryviews, storing=False))

    def submit_batch_set(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        return self._submit("store", lambda: self._move(keys, memoryviews, storing=True))

    def submit_batch_exists(self, keys: list[str]) -> int:
        return self._submit("look", lambda: self._blocks.look(_texts(keys)))

    def submit_batch_delete(self, keys: list[str]) -> int:
        return self._submit("store", lambda: self._blocks.delete(_texts(keys)))

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool]]]:
        """(number of the call, whether all of its blocks are well, why not, each of them). Returns at
        once."""
        self._finished.quiet()
        return [(job, *result) for job, result in self._finished.pop_all().items()]

    def close(self) -> None:
        """Ends what is under way. Blocking. Repeatable."""
        self._lanes.close()
        self._blocks.close()
        self._finished.close()

    @property
    def store(self) -> BlockStore:
        """For its health and counts."""
        return self._blocks.store

    def _submit(self, lane: str, work: Any) -> int:
        job = next(self._numbers)

        def run() -> None:
            result: tuple[bool, str, list[bool]] = (False, "the call failed: see the log", [])
            try:
                flags = work()
                # A lookup that finds nothing is well; blocks that weren't moved aren't.
                well = lane == "look" or bool(flags.all())
                result = (well, "" if well else "not every block was moved", flags.tolist())
            finally:
                self._finished.put(job, result)

        self._lanes.submit(lane, run)
        return job

    def _move(self, keys: list[str], views: list[memoryview], *, storing: bool) -> Flags:
        arrays = [np.frombuffer(view, dtype=np.uint8) for view in views]
        places = [(int(array.ctypes.data), len(array)) for array in arrays]
        return self._blocks.move(_texts(keys), places, storing=storing)


def _texts(keys: list[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _names(keys: list[Any]) -> list[bytes]:
    """All fields of an ObjectKey, each with its length."""
    return [
        b"".join(
            len(field).to_bytes(4, "little") + field
            for field in (
                key.model_name.encode(),
                key.kv_rank.to_bytes(8, "little"),
                key.object_group_id.to_bytes(8, "little"),
                key.cache_salt.encode(),
                bytes(key.chunk_hash),
            )
        )
        for key in keys
    ]


def _addresses(objects: list[Any], sizes: list[int]) -> list[tuple[int, int]]:
    return [(int(entry.data_ptr), size) for entry, size in zip(objects, sizes, strict=True)]

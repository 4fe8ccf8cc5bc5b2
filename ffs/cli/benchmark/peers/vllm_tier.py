"""One of vLLM's secondary tiers, a job at a time. Runs in the environment of `make test-adapters`, which has
vLLM and ffs: `vllm_tier.py fs DIRECTORY` (vLLM's own) or `vllm_tier.py ffs ADDRESS`. Asked as
process.py says.

A call is what the scheduler does with a job: submit, then ask for finished jobs until it is among them. Keys,
content, comparing and removing what was stored happen outside of the time that counts.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNKS = 128
HASH_BYTES = 32


@dataclass(slots=True)
class Request:
    """What a tier looks at of a request."""

    req_id: str
    kv_transfer_params: None = None


def make_tier(kind: str, place: str, block_bytes: int) -> tuple[Any, Any]:
    """The tier as vLLM's own machinery makes it, and the CPU tier's memory: (manager, rows)."""
    config = importlib.import_module("vllm.v1.kv_offload.config")
    spec = importlib.import_module("vllm.v1.kv_offload.tiering.spec")
    settings = {
        "fs": {"type": "fs", "root_dir": place},
        "ffs": {
            "type": "FfsTier",
            "module_path": "ffs.kv.vllm_tier",
            "cluster": place,
            "space": f"/kv/bench-{block_bytes}",
        },
    }[kind]
    parallel = config.OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    manager = spec.TieringOffloadingSpec(
        config.OffloadingConfig(
            groups=(config.OffloadingGroupConfig(tokens_per_block=16, layer_names=("l",), group_id=0),),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": CHUNKS * block_bytes, "secondary_tiers": [settings]},
            engine_id=uuid.uuid4().hex,
            model=config.OffloadingModelConfig(name="bench", dtype="bfloat16"),
            cache=config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=parallel,
        )
    ).get_manager()
    rows = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
    return manager, rows


class Loop:
    """The jobs of one case."""

    def __init__(self, kind: str, place: str, op: str, size: int, batch: int, set_bytes: int) -> None:
        self._base = importlib.import_module("vllm.v1.kv_offload.tiering.base")
        self._key_of = importlib.import_module("vllm.v1.kv_offload.base").make_offload_key
        self._manager, self._rows = make_tier(kind, place, size)
        self._tier = self._manager.secondary_tiers[0]
        self._remove = self._remover(kind, place, size)
        self._op, self._size, self._batch = op, size, batch
        self._jobs = itertools.count(1)
        self._random = random.Random(f"{op} {size} {batch}")
        self._noise = np.random.default_rng(5).integers(0, 256, size + 65536, dtype=np.uint8)
        self._next = 0
        self._rows[:] = self._noise[:size]
        self._keys = self._new_keys(max(batch, set_bytes // size) // batch * batch) if op == "load" else []
        for begin in range(0, len(self._keys), batch):
            part = self._keys[begin : begin + batch]
            for position, key in enumerate(part):
                self._rows[position] = self._content(key)
            if not self._job(part, loading=False):
                raise SystemExit(f"{kind}: a block couldn't be stored")

    def _remover(self, kind: str, place: str, size: int) -> Callable[[list[bytes]], None]:
        if kind == "fs":

            def unlink(keys: list[bytes]) -> None:
                for key in keys:
                    Path(self._tier.file_mapper.get_file_name(key)).unlink()

            return unlink
        from ffs.client.client import connect
        from ffs.kv.space import Space

        def purge(keys: list[bytes]) -> None:
            with connect(place) as client, Space.open(client, f"/kv/bench-{size}") as space:
                space.purge()

        return purge

    def _new_keys(self, count: int) -> list[bytes]:
        return [self._key_of(self._random.randbytes(HASH_BYTES), 0) for _ in range(count)]

    def _content(self, key: bytes) -> npt.NDArray[np.uint8]:
        start = int.from_bytes(key[:2], "little") % (len(self._noise) - self._size + 1)
        content = self._noise[start : start + self._size].copy()
        content[:HASH_BYTES] = np.frombuffer(key[:HASH_BYTES], dtype=np.uint8)
        return content

    def _job(self, keys: list[bytes], *, loading: bool) -> bool:
        """Submits it and waits for its end; whether all of it went well."""
        job = self._base.TransferJob(
            job_id=next(self._jobs),
            keys=keys,
            chunk_ids=np.arange(len(keys), dtype=np.int64),
            is_promotion=loading,
            req_context=Request("bench"),
        )
        (self._tier.submit_load if loading else self._tier.submit_store)(job)
        while True:
            for result in self._tier.get_finished_jobs():
                if result.job_id == job.job_id:
                    return bool(result.success)
            time.sleep(2e-5)

    def run(self, seconds: float) -> dict[str, object]:
        loading, batch = self._op == "load", self._batch
        calls_ns: list[int] = []
        stored: list[bytes] = []
        errors = spent = 0
        part: list[bytes] = []
        while not calls_ns or spent < seconds * 1e9:
            if loading:
                part = self._keys[self._next : self._next + batch]
                self._next = (self._next + batch) % len(self._keys)
            else:
                if len(stored) >= 1024:
                    break
                part = self._new_keys(batch)
                stored += part
            begun = time.perf_counter_ns()
            good = self._job(part, loading=loading)
            calls_ns.append(time.perf_counter_ns() - begun)
            spent += calls_ns[-1]
            errors += 0 if good else batch
        if not loading:
            self._rows[:batch] = 0
            if not self._job(part, loading=True):
                raise SystemExit("a block that was stored can't be loaded")
        self._verify(part)
        if stored:
            self._remove(stored)
            self._rows[:batch] = self._noise[: self._size]
        return {
            "calls_ns": calls_ns,
            "blocks": len(calls_ns) * batch,
            "errors": errors,
            "verified_bytes": batch * self._size,
        }

    def _verify(self, keys: list[bytes]) -> None:
        for position, key in enumerate(keys):
            expected = self._content(key) if self._op == "load" else self._noise[: self._size]
            if not np.array_equal(self._rows[position], expected):
                raise SystemExit("a block came with other bytes than were stored")

    def close(self) -> None:
        if self._keys:
            self._remove(self._keys)
        del self._rows
        self._manager.shutdown()


def main() -> None:
    kind, place = sys.argv[1:]
    answer: dict[str, object] = {"ready": True}
    loop: Loop | None = None
    while True:
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line:
            break
        request = json.loads(line)
        if request["do"] == "case":
            loop = Loop(kind, place, request["op"], request["size"], request["batch"], request["set_bytes"])
            answer = {}
        elif request["do"] == "run" and loop is not None:
            answer = loop.run(request["seconds"])
        elif request["do"] == "end" and loop is not None:
            loop.close()
            loop, answer = None, {}


if __name__ == "__main__":
    main()

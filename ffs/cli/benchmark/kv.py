"""`ffs bench kv`: runs its cases on a cluster of one server whose device lies in memory
(docs/guides/bench.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ffs.cli.benchmark.allocated_cluster import allocated_cluster
from ffs.cli.benchmark.cost import meter
from ffs.cli.benchmark.floors import prepare_region
from ffs.cli.benchmark.io_floors import open_floors
from ffs.cli.benchmark.kv_cases import KvCase, KvLoop
from ffs.cli.benchmark.noise import measure_noise
from ffs.cli.benchmark.protocol import alternate, is_noisy, summarise
from ffs.cli.benchmark.report import Result
from ffs.cli.devcluster.handle import DevCluster
from ffs.client.client import connect
from ffs.kv.int8 import bench_rows
from ffs.kv.space import Space

DEVICE_BYTES = 3 << 30


@dataclass(slots=True)
class Suite:
    """One run. `memory`: a directory on a tmpfs; all in it is ours. `set_bytes`: of the blocks that are got,
    and of the floor's file."""

    memory: Path
    set_bytes: int
    slices: int
    slice_s: float
    noise: float = 1.0

    def run(
        self, cases: Sequence[KvCase], int8: frozenset[str], say: Callable[[str], None]
    ) -> Iterator[Result]:
        """The results as they come, the noise first, `int8` (of INT8_NAMES) last. Blocking for minutes."""
        say("writing the floor's file")
        prepare_region(self.memory / "floor", self.set_bytes)
        say("noise")
        noise = measure_noise(self.memory / "floor", self.set_bytes, self.slices, self.slice_s)
        self.noise = noise.ratio
        yield noise
        if cases:
            yield from self._on_cluster(cases, say)
        if int8:
            say("int8 values")
            yield from self._int8(int8)

    def _int8(self, names: frozenset[str]) -> Iterator[Result]:
        """Values coded and decoded, GB/s of the plain block, beside a copy of it. No cluster."""
        for row in bench_rows(seconds=self.slices * self.slice_s):
            speeds = {"encode": row.encode_gb_s, "decode": row.decode_gb_s}
            for what, speed in speeds.items():
                if (name := f"int8-{what}-{row.dtype}") in names:
                    more: dict[str, object] = {
                        "backend": row.backend,
                        "block_ratio": round(row.ratio, 4),
                        "values_ratio": round(row.values_ratio, 4),
                        "worst_of_bound": round(row.worst_of_bound, 4),
                    }
                    yield Result(
                        name,
                        speed,
                        row.copy_gb_s,
                        speed / row.copy_gb_s,
                        "GB/s",
                        self.slices,
                        None,
                        noisy=is_noisy(self.noise),
                        more_ok=row.worst_of_bound <= 1,
                        more=more,
                    )

    def _on_cluster(self, cases: Sequence[KvCase], say: Callable[[str], None]) -> Iterator[Result]:
        say("a cluster in memory")
        with allocated_cluster(self.memory / "cluster", DEVICE_BYTES) as cluster:
            for case in cases:
                say(case.name)
                yield self._case(cluster, case)

    def _case(self, cluster: DevCluster, case: KvCase) -> Result:
        cpu = meter(cluster.processes().values())
        with (
            ExitStack() as stack,
            connect(cluster.address, transport=case.transport) as client,
            Space.create(
                client, f"/bench/{case.name}", block_bytes=case.block_bytes, replicas=1, evictable=False
            ) as space,
        ):
            floors = open_floors(case.like, self.memory / "floor", self.set_bytes, self.memory, stack)
            loop = KvLoop(space, case, self.set_bytes, cpu)
            loop.prepare()
            rounds = alternate(loop, floors.contestants, self.slices, self.slice_s)
            depth = max(ring.max_inflight for ring in space.stats().rings)
            space.purge()
            client.remove(space.path)
        summary = summarise(rounds, only=range(floors.counting))
        more: dict[str, object] = {
            "quartiles": [round(q, 4) for q in summary.quartiles],
            **cpu.as_fields(),
            **loop.tally.fields(),
            "max_inflight": depth,
            "op": case.op,
            "size_bytes": case.block_bytes,
            "batch": case.batch,
            "transport": case.transport,
            "device": "tmpfs",
            "replicas": 1,
            "checksum": True,
        }
        return Result(
            case.name,
            summary.ours / 1e9,
            summary.floor / 1e9,
            summary.ratio,
            "GB/s",
            len(rounds),
            None,
            noisy=is_noisy(self.noise),
            more=more,
        )

"""`ffs bench io`: runs its cases, a cluster for each kind of device (docs/guides/bench.md)."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from ffs.cli.benchmark.allocated_cluster import written_cluster
from ffs.cli.benchmark.cost import CpuMeter, meter
from ffs.cli.benchmark.floors import prepare_region
from ffs.cli.benchmark.io_cases import file_loop, write_file
from ffs.cli.benchmark.io_floors import open_floors, result_of
from ffs.cli.benchmark.io_matrix import IoCase
from ffs.cli.benchmark.meta_cases import LmdbFloor, Threads, in_flight
from ffs.cli.benchmark.noise import measure_noise
from ffs.cli.benchmark.protocol import Contestant, Slice, alternate, is_noisy, summarise
from ffs.cli.benchmark.report import Result
from ffs.cli.devcluster.handle import DevCluster
from ffs.client.client import Client, connect

REGION_BYTES = 512 << 20
DEVICE_BYTES = 4 << 30
DISK_BYTES = 2 << 30  # written once before anything is measured
MIB = 1 << 20
META_GOALS = {
    "meta-create": 6000.0,
    "meta-stat": 25000.0,
    "meta-create-threads": 5000.0,
    "meta-stat-threads": 12000.0,
}
META_NAMES = tuple(META_GOALS)


@dataclass(slots=True)
class Suite:
    """One run. `directories`: by device, on the file system that is measured; all in them is ours.
    `huge_pages`: ffs moves the data of its ring's cases from and to reserved ones."""

    directories: Mapping[str, Path]
    slices: int
    slice_s: float
    huge_pages: bool = False
    noise: float = 1.0

    @property
    def noisy(self) -> bool:
        return is_noisy(self.noise)

    def run(
        self, cases: Sequence[IoCase], names: frozenset[str], say: Callable[[str], None]
    ) -> Iterator[Result]:
        """The results as they come: the noise first, names (of META_NAMES) last. Blocking for minutes."""
        by_device = {
            device: list(group) for device, group in itertools.groupby(cases, lambda case: case.device)
        }
        first = next(iter(by_device), "disk")
        self._write_floor(first, say)
        say("noise")
        noise = measure_noise(self.directories[first] / "floor", REGION_BYTES, self.slices, self.slice_s)
        self.noise = noise.ratio
        yield noise
        for device, group in by_device.items():
            home = self.directories[device]
            say(f"a cluster on {device}")
            with self._cluster(device) as cluster:
                if device != "null":
                    self._write_floor(device, say)
                yield from self._io(cluster, home, group, say)
            shutil.rmtree(home / "cluster")
        if names:
            with self._cluster("disk") as cluster:
                yield from self._meta(cluster, names, say)

    def _cluster(self, device: str) -> AbstractContextManager[DevCluster]:
        home = self.directories[device] / "cluster"
        if device == "disk":
            return written_cluster(home, DISK_BYTES)
        return DevCluster(home, device_bytes=DEVICE_BYTES, null_devices=device == "null")

    def _write_floor(self, device: str, say: Callable[[str], None]) -> None:
        file = self.directories[device] / "floor"
        if not file.exists():
            say("writing the floor's file")
            prepare_region(file, REGION_BYTES)

    # --- data path --------------------------------------------------------------------------------

    def _io(
        self, cluster: DevCluster, home: Path, cases: Sequence[IoCase], say: Callable[[str], None]
    ) -> Iterator[Result]:
        written: set[str] = set()
        for case in cases:
            with connect(cluster.address, transport=case.transport, checksum=case.checksum) as client:
                path = f"/bench/{case.table}"
                if path not in written:
                    written.add(path)
                    say(f"writing {case.table}'s file")
                    client.makedirs("/bench", exist_ok=True)
                    write_file(client, path, REGION_BYTES, table=case.table, zeros=case.device == "null")
                say(case.name)
                yield self._io_case(cluster, client, home, path, case)

    def _io_case(self, cluster: DevCluster, client: Client, home: Path, path: str, case: IoCase) -> Result:
        with ExitStack() as stack:
            floors = open_floors(case, home / "floor", REGION_BYTES, home, stack)
            loop = stack.enter_context(
                file_loop(
                    client,
                    path,
                    case.kind,
                    case.block_bytes,
                    case.depth,
                    REGION_BYTES,
                    random=case.random,
                    zeros=case.device == "null",
                    batch=case.depth // 2 if case.op == "requests" else 1,
                    huge_pages=self.huge_pages,
                )
            )
            cpu = meter(cluster.processes().values())
            rounds = alternate(
                metered(loop, cpu, case.block_bytes), floors.contestants, self.slices, self.slice_s
            )
        cost = {**cpu.as_fields(), "huge_pages": self.huge_pages}
        return result_of(case, rounds, floors, cost, noisy=self.noisy)

    # --- namespace --------------------------------------------------------------------------------

    def _meta(
        self, cluster: DevCluster, names: frozenset[str], say: Callable[[str], None]
    ) -> Iterator[Result]:
        home = self.directories["disk"] / "lmdb-floor"
        home.mkdir()
        floor = LmdbFloor(home)
        try:
            with in_flight(cluster.address) as (create, stat):
                say("meta in flight")
                for name, ours, theirs in (
                    ("meta-create", create, floor.create),
                    ("meta-stat", stat, floor.stat),
                ):
                    if name in names:
                        yield self._meta_case(cluster, name, ours, theirs)
            if names & {"meta-create-threads", "meta-stat-threads"}:
                say("meta from threads")
                yield from self._meta_threads(cluster, names, floor)
        finally:
            floor.close()

    def _meta_threads(self, cluster: DevCluster, names: frozenset[str], floor: LmdbFloor) -> Iterator[Result]:
        with connect(cluster.address) as client:
            threads = Threads(client)
            try:
                for name, work, theirs in (
                    ("meta-create-threads", threads.create_one, floor.create),
                    ("meta-stat-threads", threads.stat_one, floor.stat),
                ):
                    if name in names:
                        yield self._meta_case(cluster, name, threads.contestant(work), theirs)
            finally:
                threads.close()

    def _meta_case(self, cluster: DevCluster, name: str, ours: Contestant, theirs: Contestant) -> Result:
        cpu = meter(cluster.processes().values())
        rounds = alternate(metered(ours, cpu, 1), [theirs], self.slices, self.slice_s)
        summary = summarise(rounds)
        more = {"quartiles": [round(q, 4) for q in summary.quartiles], **cpu.as_fields()}
        return Result(
            name,
            summary.ours,
            summary.floor,
            summary.ratio,
            "op/s",
            self.slices,
            META_GOALS[name],
            goal_of="ffs",
            noisy=self.noisy,
            more=more,
        )


def metered(ours: Contestant, cpu: CpuMeter, unit: int) -> Contestant:
    """The same contestant, with its CPU time counted; `unit`: how many of its units are an operation."""

    def run(seconds: float) -> Slice:
        before = cpu.read()
        piece = ours(seconds)
        cpu.add(before, piece.units / unit)
        return piece

    return run

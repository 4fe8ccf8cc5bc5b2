"""`ffs bench io`: which cases there are, and how one is run (docs/guides/bench.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ffs.cli.benchmark.cost import CpuMeter, meter
from ffs.cli.benchmark.floors import FloorSpec, contestant, prepare_region, socket_peer
from ffs.cli.benchmark.io_cases import file_loop, write_file
from ffs.cli.benchmark.meta_cases import LmdbFloor, Threads, in_flight
from ffs.cli.benchmark.protocol import Contestant, Slice, alternate, is_noisy, summarise
from ffs.cli.benchmark.report import Result
from ffs.cli.devcluster.handle import DevCluster
from ffs.client.client import Client, connect

REGION_BYTES = 512 << 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class IoCase:
    """One case of the data path. `share`: how much of the floor a perfect system could reach."""

    name: str
    kind: str
    block_bytes: int
    depth: int
    table: str
    transport: str
    goal: float
    random: bool = False
    share: float = 1.0
    crc: bool = True


IO_CASES = (
    IoCase("read-1m-seq-qd16", "read", MIB, 16, "single", "local", 0.85),
    # Parts of a granule aren't verified, so this floor has no checksum either.
    IoCase("read-4k-rand-qd32", "read", 4096, 32, "single", "local", 0.60, random=True, crc=False),
    IoCase("read-1m-seq-qd16-tcp", "read", MIB, 16, "single", "tcp", 0.80),
    IoCase("write-1m-seq-qd16-r1", "write", MIB, 16, "single", "local", 0.70),
    IoCase("write-1m-seq-qd16-r3", "write", MIB, 16, "default", "local", 0.65, share=1 / 3),
)
META_GOALS = {
    "meta-create": 6000.0,
    "meta-stat": 25000.0,
    "meta-create-threads": 5000.0,
    "meta-stat-threads": 12000.0,
}
NAMES = (*(case.name for case in IO_CASES), *META_GOALS)


@dataclass(slots=True)
class Suite:
    """One run. `directory` lies on the file system that is measured; all in it is ours."""

    directory: Path
    slices: int
    slice_s: float
    noise: float = 1.0

    @property
    def noisy(self) -> bool:
        return is_noisy(self.noise)

    def run(self, names: frozenset[str], say: Callable[[str], None]) -> Iterator[Result]:
        """The results as they come: the noise first. Blocking for minutes."""
        say("writing the floor's file")
        prepare_region(self.directory / "floor", REGION_BYTES)
        say("noise")
        yield self._noise()
        with DevCluster(self.directory / "cluster", device_bytes=4 << 30) as cluster:
            yield from self._io(cluster, [case for case in IO_CASES if case.name in names], say)
            if names & META_GOALS.keys():
                yield from self._meta(cluster, names, say)

    def _floor(self, case: IoCase, *, crc: bool) -> FloorSpec:
        return FloorSpec(
            case.kind,
            str(self.directory / "floor"),
            case.block_bytes,
            case.depth,
            region_bytes=REGION_BYTES,
            random=case.random,
            crc=crc,
        )

    def _noise(self) -> Result:
        case = IO_CASES[0]
        spec = self._floor(case, crc=True)
        with contestant(spec) as one, contestant(spec) as other:
            summary = summarise(alternate(one, [other], self.slices, self.slice_s))
        self.noise = summary.ratio
        return Result(
            "noise",
            summary.ours / 1e9,
            summary.floor / 1e9,
            summary.ratio,
            "GB/s",
            self.slices,
            None,
            noisy=self.noisy,
        )

    # --- data path --------------------------------------------------------------------------------

    def _io(self, cluster: DevCluster, cases: list[IoCase], say: Callable[[str], None]) -> Iterator[Result]:
        written: set[str] = set()
        for case in cases:
            with connect(cluster.address, transport=case.transport) as client:
                if case.table not in written:
                    written.add(case.table)
                    say(f"writing {case.table}'s file")
                    client.makedirs("/bench", exist_ok=True)
                    write_file(client, f"/bench/{case.table}", REGION_BYTES, table=case.table)
                say(case.name)
                yield self._io_case(cluster, client, case)

    def _io_case(self, cluster: DevCluster, client: Client, case: IoCase) -> Result:
        with ExitStack() as stack:
            floors = [stack.enter_context(contestant(self._floor(case, crc=case.crc)))]
            if case.transport == "tcp":
                peer = stack.enter_context(socket_peer())
                spec = FloorSpec("socket", peer, case.block_bytes, case.depth, crc=case.crc)
                floors.append(stack.enter_context(contestant(spec)))
            goals = list(range(len(floors)))
            if case.crc:
                floors.append(stack.enter_context(contestant(self._floor(case, crc=False))))
            loop = stack.enter_context(
                file_loop(
                    client,
                    f"/bench/{case.table}",
                    case.kind,
                    case.block_bytes,
                    case.depth,
                    REGION_BYTES,
                    random=case.random,
                )
            )
            cpu = meter(cluster.processes().values())
            rounds = alternate(metered(loop, cpu, case.block_bytes), floors, self.slices, self.slice_s)
        summary = summarise(rounds, case.share, only=goals)
        more: dict[str, object] = {"quartiles": [round(q, 4) for q in summary.quartiles], **cpu.as_fields()}
        if case.crc:
            plain = summarise(rounds, case.share, only=[len(rounds[0].floors) - 1])
            more |= {"plain_floor": round(plain.floor / 1e9, 4), "plain_ratio": round(plain.ratio, 4)}
        if case.transport == "tcp":
            for index, what in enumerate(("device", "socket")):
                more[f"{what}_floor"] = round(summarise(rounds, only=[index]).floor / 1e9, 4)
        return Result(
            case.name,
            summary.ours / 1e9,
            summary.floor / 1e9,
            summary.ratio,
            "GB/s",
            self.slices,
            case.goal,
            noisy=self.noisy,
            more=more,
        )

    # --- namespace --------------------------------------------------------------------------------

    def _meta(
        self, cluster: DevCluster, names: frozenset[str], say: Callable[[str], None]
    ) -> Iterator[Result]:
        home = self.directory / "lmdb-floor"
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

"""`ffs bench meta`: the namespace under many clients (docs/guides/bench.md).

Four client processes with 32 requests in flight each, two metadata processes over one store, one storage
server where files have data; all on this machine, over loopback.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ffs.cli.benchmark.cost import cpu_ns
from ffs.cli.benchmark.meta_floors import LmdbFloor, msgpack_floor
from ffs.cli.benchmark.meta_worker import BATCH, PAGE, SMALL_BYTES, small_path
from ffs.cli.benchmark.protocol import Contestant, Slice, alternate, is_noisy, summarise
from ffs.cli.benchmark.report import Result
from ffs.cli.benchmark.workers import answer_of, end_all
from ffs.cli.devcluster.state import Directory, Shape
from ffs.cli.devcluster.supervisor import Supervisor
from ffs.client.client import Client, connect

METAS: Final = 2
KILLED: Final = "killed-meta-p99"


@dataclass(frozen=True, slots=True)
class Case:
    """`work`: what a client does (meta_worker.py)."""

    name: str
    work: str
    unit: str
    goal: float | None


CASES: Final = (
    Case("create", "create", "op/s", 12_000),
    Case("stat", "stat", "op/s", 50_000),
    Case("stat-many", "stat_many", "entries/s", 300_000),
    Case("open-read-4k", "open_read", "op/s", 10_000),
    Case("readdir", "readdir", "entries/s", 300_000),
    Case("readdir-attributes", "readdir_attributes", "entries/s", None),
    Case("unlink", "unlink", "op/s", None),
)
KILLED_GOAL_S: Final = 1.0
NAMES: Final = (*(case.name for case in CASES), KILLED)


class Clients:
    """The client processes; they do the same thing at the same time."""

    def __init__(self, count: int, in_flight: int, addresses: Sequence[str]) -> None:
        """Each begins at another metadata service, and knows all of them."""
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for number in range(count):
                turn = number % len(addresses)
                known = ",".join((*addresses[turn:], *addresses[:turn]))
                command = [sys.executable, "-m", "ffs.cli.benchmark.meta_worker", str(number)]
                self._processes.append(
                    subprocess.Popen(
                        [*command, str(in_flight), known],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            for process in self._processes:
                answer_of(process, "a client of the bench")
        except BaseException:
            self.close()
            raise

    def tell(self, told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """One line to each; their answers. Blocking until all are done."""
        for process, line in zip(self._processes, told, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
        return [answer_of(process, "a client of the bench") for process in self._processes]

    def tell_all(self, **told: Any) -> list[dict[str, Any]]:
        return self.tell([told] * len(self._processes))

    def __len__(self) -> int:
        return len(self._processes)

    def close(self) -> None:
        """Ends them. Blocking, bounded."""
        end_all(self._processes)


@dataclass(slots=True)
class Cost:
    """CPU time of a case, by kind of process."""

    metas: tuple[int, ...]
    nodes: tuple[int, ...]
    units: float = 0
    client_ns: int = 0
    meta_ns: int = 0
    node_ns: int = 0

    def read(self) -> tuple[int, int]:
        return sum(map(cpu_ns, self.metas)), sum(map(cpu_ns, self.nodes))

    def add(self, before: tuple[int, int], answers: Sequence[dict[str, Any]]) -> None:
        metas, nodes = self.read()
        self.meta_ns += metas - before[0]
        self.node_ns += nodes - before[1]
        self.client_ns += sum(answer["cpu_ns"] for answer in answers)
        self.units += sum(answer["done"] for answer in answers)

    def as_fields(self) -> dict[str, object]:
        def us(ns: int) -> float:
            return round(ns / self.units / 1000, 2) if self.units else 0.0

        return {
            "client_us": us(self.client_ns),
            "server_us": us(self.meta_ns),
            "storage_us": us(self.node_ns),
        }


@dataclass(slots=True)
class Suite:
    """One run. `directory` lies on the file system that is measured; `store`: URL of the metadata store,
    "" for LMDB below the directory; `files`: how many are looked at and listed."""

    directory: Path
    slices: int
    slice_s: float
    clients: int = 4
    in_flight: int = 32
    files: int = 40_000
    small: int = 1000
    store: str = ""
    kill_s: float = 4.0  # how long the load lasts in which a metadata process is killed
    noise: float = 1.0

    def run(self, names: frozenset[str], say: Callable[[str], None]) -> Iterator[Result]:
        """The results as they come, the noise first. Blocking for minutes."""
        floor = LmdbFloor(self.directory / "lmdb", self.files, self.clients * self.in_flight)
        try:
            yield self._noise(floor)
            shape = Shape(nodes=1, replicas=1, device_bytes=2 << 30, metas=METAS)
            store = store_of_its_own(self.store) if self.store else ""
            cluster = Supervisor(Directory(self.directory / "cluster"), shape, lambda line: None, store=store)
            with cluster.hold():
                say("starting the cluster")
                cluster.start(lambda: False)
                clients = Clients(self.clients, self.in_flight, cluster.address.split(","))
                try:
                    with connect(cluster.address) as client:
                        self._prepare(client, clients, names, say)
                    for case in CASES:
                        if case.name in names:
                            say(case.name)
                            yield self._case(cluster, clients, floor, case)
                    if KILLED in names:
                        say(KILLED)
                        yield self._killed(cluster, clients)
                finally:
                    clients.close()
        finally:
            floor.close()

    def _prepare(
        self, client: Client, clients: Clients, names: frozenset[str], say: Callable[[str], None]
    ) -> None:
        say(f"making {self.files} files")
        for name in ("files", "small", "made", "gone"):
            client.makedirs(f"/bench/{name}")
        share = -(-self.files // len(clients))
        clients.tell(
            [
                {"do": "make", "first": at, "count": min(share, self.files - at)}
                for at in range(0, share * len(clients), share)
            ]
        )
        small = self.small if "open-read-4k" in names else 0
        for number in range(small):
            with client.open(small_path(number), "wb", 0) as file:
                file.write(bytes(SMALL_BYTES))
        clients.tell_all(do="know", files=self.files, small=small)

    def _noise(self, floor: LmdbFloor) -> Result:
        one = floor.contestant("stat")
        summary = summarise(alternate(one, [one], self.slices, min(self.slice_s, 0.05)))
        self.noise = summary.ratio
        return Result(
            "noise",
            summary.ours,
            summary.floor,
            summary.ratio,
            "op/s",
            self.slices,
            None,
            noisy=is_noisy(summary.ratio),
        )

    def _case(self, cluster: Supervisor, clients: Clients, floor: LmdbFloor, case: Case) -> Result:
        pids = processes(cluster)
        cost = Cost(
            tuple(pid for name, pid in pids.items() if name.startswith("meta")),
            tuple(pid for name, pid in pids.items() if name.startswith("node")),
        )
        lmdb = floor.contestant(case.work)
        msgpack = msgpack_floor(case.work, PAGE, BATCH)
        short = min(self.slice_s, 0.1)
        rounds = alternate(
            self._contestant(clients, case, cost),
            [lambda seconds: lmdb(short), lambda seconds: msgpack(short)],
            self.slices,
            self.slice_s,
        )
        summary, packed = summarise(rounds, only=[0]), summarise(rounds, only=[1])
        return Result(
            case.name,
            summary.ours,
            summary.floor,
            summary.ratio,
            case.unit,
            self.slices,
            case.goal,
            goal_of="ffs",
            noisy=is_noisy(self.noise),
            more={
                "quartiles": [round(q, 4) for q in summary.quartiles],
                "msgpack_floor": round(packed.floor, 1),
                "msgpack_ratio": round(packed.ratio, 4),
                **cost.as_fields(),
            },
        )

    def _contestant(self, clients: Clients, case: Case, cost: Cost) -> Contestant:
        def run(seconds: float) -> Slice:
            if case.work == "unlink":
                clients.tell_all(do="refill", count=max(64, int(5000 * seconds)))
            before = cost.read()
            answers = clients.tell_all(do=case.work, seconds=seconds)
            cost.add(before, answers)
            return Slice(
                sum(answer["done"] for answer in answers), max(answer["seconds"] for answer in answers)
            )

        return run

    # --- a metadata process dies --------------------------------------------------------------------

    def _killed(self, cluster: Supervisor, clients: Clients) -> Result:
        """Each metadata process is killed once, under creates and stats, and comes back."""
        quiet, during = [], []
        for index in range(METAS):
            quiet += _latencies(clients, self.kill_s / 2)
            during += self._kill_under_load(cluster, clients, index)
        p99, before = _percentile(during, 0.99), _percentile(quiet, 0.99)
        return Result(
            KILLED,
            p99,
            before,
            before / p99,
            "s",
            METAS,
            KILLED_GOAL_S,
            goal_of="ffs",
            at_most=True,
            noisy=is_noisy(self.noise),
            more={
                "operations": len(during),
                "p50": round(statistics.median(during), 5),
                "longest": round(max(during), 4),
                "quiet_longest": round(max(quiet), 4),
            },
        )

    def _kill_under_load(self, cluster: Supervisor, clients: Clients, index: int) -> list[float]:
        failures: list[BaseException] = []

        def kill() -> None:
            try:
                time.sleep(self.kill_s / 4)
                cluster.kill_meta(index)
                time.sleep(self.kill_s / 4)
                cluster.start_meta(index)
            except BaseException as error:
                failures.append(error)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            return _latencies(clients, self.kill_s)
        finally:
            killer.join()
            if failures:
                raise failures[0]


def store_of_its_own(url: str) -> str:
    """The same database under a prefix that no other run has. What is made there stays there."""
    beginning = url if "?prefix=" in url else f"{url}?prefix="
    return f"{beginning}ffs-bench-{os.urandom(4).hex()}"


def _latencies(clients: Clients, seconds: float) -> list[float]:
    answers = clients.tell_all(do="mixed", seconds=seconds, trace=True)
    return [latency for answer in answers for latency in answer["latencies"]]


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def processes(cluster: Supervisor) -> dict[str, int]:
    """pid by name: "meta", "meta1", "node0"."""
    run = cluster.directory.read_run()
    return {} if run is None else {record.name: record.pid for record in run.processes}

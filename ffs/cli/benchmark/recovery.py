"""`ffs bench recovery`: how fast a returned replica is filled, and what readers feel of it
(docs/guides/bench.md).

A node of a three-way cluster is killed, data is written without it, it comes back and is synced. All
devices of the development cluster are files on one file system, so what recovery reads and what it
writes share a device: the floor reads one file and writes another at the same time, right before and
right after.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ffs import Iov
from ffs.cli.benchmark.device_latency import Copier, read_p99_s
from ffs.cli.benchmark.floors import FloorSpec, contestant, prepare_region
from ffs.cli.benchmark.io_cases import write_file
from ffs.cli.benchmark.moving import Watch
from ffs.cli.benchmark.report import Result
from ffs.cli.devcluster.state import Directory, Shape
from ffs.cli.devcluster.supervisor import Supervisor
from ffs.client.client import Client, connect
from ffs.client.ior import Ior
from ffs.errors import FfsError
from ffs.proto.cluster import StatusReply, TargetState

if TYPE_CHECKING:
    from ffs.client.file import File

NAMES = ("recovery-idle", "recovery-read-4k-p99")
MIB = 1 << 20
FLOOR_BYTES = 256 * MIB
FOREGROUND_BYTES = 128 * MIB
WARM_BYTES = 256 * MIB  # of a first recovery, which doesn't count: servers use memory for the first time
FLOOR_S = 1.0
READ_BYTES = 4096
BEFORE_S = 4.0
LIMIT_S = 300.0
LOOK_S = 0.05  # each look costs the manager and this process a few milliseconds of a core
START_LOOK_S = 0.02
GENTLE_LOOK_S = 0.5  # looking takes the interpreter away from the reader, and a core from all
SERVING = int(TargetState.SERVING)
GOAL_RATE = 0.6  # of the device, when nothing else runs
GOAL_P99 = 0.5  # p99 before over p99 while it runs: it at most doubles


@dataclass(slots=True)
class Suite:
    """One run of `rounds` recoveries of `fill_bytes` each, without and with readers."""

    directory: Path
    rounds: int
    fill_bytes: int

    def run(self, names: frozenset[str], say: Callable[[str], None]) -> Iterator[Result]:
        """The results as they come. Blocking for minutes."""
        say("writing the floor's files")
        for name in ("floor-read", "floor-write"):
            prepare_region(self.directory / name, FLOOR_BYTES)
        device = (2 * self.rounds + 2) * self.fill_bytes + FOREGROUND_BYTES + (2 << 30)
        shape = Shape(nodes=3, replicas=3, device_bytes=device)
        supervisor = Supervisor(Directory(self.directory / "cluster"), shape, lambda line: None)
        with supervisor.hold():
            supervisor.start(lambda: False)
            with connect(supervisor.address) as client:
                client.makedirs("/bench", exist_ok=True)
                write_file(client, "/bench/foreground", FOREGROUND_BYTES, table="default")
                if "recovery-idle" in names:
                    yield self._idle(supervisor, client, say)
                if "recovery-read-4k-p99" in names:
                    yield self._readers(supervisor, client, say)

    def _floor(self) -> float:
        """Bytes/s of the slower of a reader and a writer that run at the same time, 1 MiB, 16 in flight."""
        rates: dict[str, float] = {}

        def one(kind: str) -> None:
            spec = FloorSpec(kind, str(self.directory / f"floor-{kind}"), MIB, 16, region_bytes=FLOOR_BYTES)
            with contestant(spec) as run:
                rates[kind] = run(FLOOR_S).rate

        threads = [threading.Thread(target=one, args=(kind,)) for kind in ("read", "write")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return min(rates.values())

    def _lose_and_fill(self, supervisor: Supervisor, client: Client, number: str, size: int = 0) -> None:
        """Without the last node, `fill_bytes` (or `size`) are written."""
        lost = 2
        supervisor.kill_node(lost)
        _until(lambda: _others_serve(client.cluster_status()), "the cluster goes on without the node")
        write_file(client, f"/bench/fill-{number}", size or self.fill_bytes, table="default")

    def _idle(self, supervisor: Supervisor, client: Client, say: Callable[[str], None]) -> Result:
        rates, floors, ratios, took = [], [], [], []
        say("a recovery that doesn't count")
        self._lose_and_fill(supervisor, client, "warm", min(WARM_BYTES, self.fill_bytes))
        _come_back(supervisor, client)
        for number in range(self.rounds):
            say(f"recovery of {self.fill_bytes >> 20} MiB, {number + 1} of {self.rounds}")
            self._lose_and_fill(supervisor, client, f"idle{number}")
            before = self._floor()
            watch = Watch(0)

            def begins(watch: Watch = watch) -> None:
                watch.pid = _pid(supervisor, "node2")
                watch.start()

            whole = _come_back(supervisor, client, begins)
            seconds = watch.end() or whole
            floor = statistics.mean((before, self._floor()))
            took.append((seconds, whole))
            rates.append(self.fill_bytes / seconds)
            floors.append(floor)
            ratios.append(rates[-1] / floor)
        return Result(
            "recovery-idle",
            statistics.median(rates) / 1e9,
            statistics.median(floors) / 1e9,
            statistics.median(ratios),
            "GB/s",
            self.rounds,
            GOAL_RATE,
            more={
                "bytes": self.fill_bytes,
                "ratios": [round(ratio, 3) for ratio in ratios],
                "seconds": [round(moving, 3) for moving, _ in took],
                "whole_seconds": [round(whole, 3) for _, whole in took],
                "whole_ratio": round(
                    statistics.median(
                        self.fill_bytes / whole / floor
                        for (_, whole), floor in zip(took, floors, strict=True)
                    ),
                    4,
                ),
            },
        )

    def _readers(self, supervisor: Supervisor, client: Client, say: Callable[[str], None]) -> Result:
        quiet, busy, ratios, rates = [], [], [], []
        for number in range(self.rounds):
            say(f"recovery under reads, {number + 1} of {self.rounds}")
            self._lose_and_fill(supervisor, client, f"busy{number}")
            with client.open("/bench/foreground", "rb", buffering=0) as file:
                before = _p99(client, file, lambda begun: time.perf_counter() - begun < BEFORE_S)
                syncs, done = threading.Event(), threading.Event()
                seconds: list[float] = []

                def come_back(
                    syncs: threading.Event = syncs,
                    done: threading.Event = done,
                    seconds: list[float] = seconds,
                ) -> None:
                    try:
                        seconds.append(_come_back(supervisor, client, syncs.set, GENTLE_LOOK_S))
                    finally:
                        syncs.set()
                        done.set()

                thread = threading.Thread(target=come_back)
                thread.start()
                syncs.wait()  # what a process costs to start isn't recovery, and elsewhere on another host
                during = _p99(client, file, lambda begun, done=done: not done.is_set())  # type: ignore[misc]
                thread.join()
            if not seconds:
                raise FfsError("the node didn't come back")
            rates.append(self.fill_bytes / seconds[0])
            quiet.append(before)
            busy.append(during)
            ratios.append(before / during)
        rate = statistics.median(rates)
        reads = self.directory / "floor-foreground"
        prepare_region(reads, FOREGROUND_BYTES)
        raw = read_p99_s(reads, FOREGROUND_BYTES, BEFORE_S)
        source, target = self.directory / "floor-read", self.directory / "floor-write"
        with Copier(source, target, FLOOR_BYTES, rate):
            raw_during = read_p99_s(reads, FOREGROUND_BYTES, BEFORE_S)
        return Result(
            "recovery-read-4k-p99",
            statistics.median(busy) * 1e3,
            statistics.median(quiet) * 1e3,
            statistics.median(ratios),
            "ms",
            self.rounds,
            GOAL_P99,
            more={
                "ratios": [round(ratio, 3) for ratio in ratios],
                "recovery_gb_s": round(rate / 1e9, 4),
                # The bare device, without and with a copy at that rate.
                "device_ms": [round(raw * 1e3, 4), round(raw_during * 1e3, 4)],
            },
        )


def _p99(client: Client, file: File, go_on: Callable[[float], bool]) -> float:
    """Seconds: the 99th percentile of single random reads, one at a time."""
    rng = np.random.default_rng(6)
    took: list[float] = []
    iov = Iov(READ_BYTES)
    with Ior(client, 1, "read") as ring:
        begun = time.perf_counter()
        while go_on(begun) or len(took) < 200:
            offset = int(rng.integers(0, FOREGROUND_BYTES // READ_BYTES)) * READ_BYTES
            sent = time.perf_counter()
            ring.prepare(file, offset, iov, 0)
            ring.submit()
            (_, moved) = ring.wait_array(1)
            took.append(time.perf_counter() - sent)
            if int(moved[0]) != READ_BYTES:
                raise FfsError(f"a read moved {int(moved[0])} of {READ_BYTES} bytes")
    return float(np.percentile(took, 99))


def _pid(supervisor: Supervisor, name: str) -> int:
    """Of a server of the cluster."""
    run = supervisor.directory.read_run()
    for process in run.processes if run is not None else ():
        if process.name == name:
            return process.pid
    raise FfsError(f"the cluster has no process {name}")


def _come_back(
    supervisor: Supervisor,
    client: Client,
    begins: Callable[[], object] = lambda: None,
    look_s: float = LOOK_S,
) -> float:
    """Starts the node; seconds from its first syncing target, when `begins` is called, until all targets
    serve: from the last look that saw none to the first that saw all. Then looks every look_s."""
    supervisor.start_node(2)
    begun = _until(lambda: _syncing(client.cluster_status()), "the node is synced", START_LOOK_S)
    begins()
    _until(lambda: _whole(client.cluster_status()), "every target serves", look_s)
    return time.perf_counter() - begun


def _syncing(status: StatusReply) -> bool:
    return any(int(TargetState.SYNCING) in chain.states for chain in status.chains) or _whole(status)


def _whole(status: StatusReply) -> bool:
    return all(set(chain.states) == {SERVING} and chain.writable for chain in status.chains)


def _others_serve(status: StatusReply) -> bool:
    wide = [chain for chain in status.chains if len(chain.members) > 1]
    return all(chain.writable and chain.states.count(SERVING) < len(chain.members) for chain in wide)


def _until(condition: Callable[[], bool], what: str, look_s: float = LOOK_S) -> float:
    """When it was last seen not to hold, by time.perf_counter; now, if it held at once."""
    before = began = time.perf_counter()
    while not condition():
        if time.perf_counter() > began + LIMIT_S:
            raise FfsError(f"not within {LIMIT_S:.0f} s: {what}")
        before = time.perf_counter()
        time.sleep(look_s)
    return before

"""The cases of `ffs bench engine`: which there are, what reaches which share of the raw device."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ffs._native.engine_bench import EngineBench, EngineCount
from ffs.cli.benchmark.protocol import Contestant, Slice

MIB = 1 << 20
PLACES = ("disk", "tmpfs")


@dataclass(frozen=True, slots=True)
class EngineCase:
    """`goals`: the least ratio on the disk and on tmpfs, None where none is set."""

    name: str
    work: str
    block_bytes: int
    depth: int
    goals: tuple[float | None, float | None]
    random: bool = False
    plain: bool = False
    beside: str = ""
    cold: bool = False  # the store is opened anew before each slice: it knows no granule by block

    def full_name(self, place: str) -> str:
        return f"{self.name}-{place}"

    def goal(self, place: str) -> float | None:
        return self.goals[PLACES.index(place)]

    @property
    def floor_op(self) -> str:
        return "read" if self.work == "read" else "write"


CASES = (
    EngineCase("read-4k-rand-qd32", "read", 4096, 32, (0.90, 0.60), random=True),
    EngineCase("read-1m-seq-qd16", "read", MIB, 16, (0.95, 0.85)),
    EngineCase("write-1m-qd16", "write", MIB, 16, (0.90, None)),
    EngineCase("overwrite-4k-rand-qd64", "overwrite", 4096, 64, (0.50, None), random=True),
    EngineCase("overwrite-4k-rand-qd64-cold", "overwrite", 4096, 64, (None, None), random=True, cold=True),
    EngineCase("read-4k-rand-qd32-plain", "read", 4096, 32, (None, None), random=True, plain=True),
    EngineCase("read-1m-seq-qd16-plain", "read", MIB, 16, (None, None), plain=True),
    EngineCase("write-1m-qd16-plain", "write", MIB, 16, (None, None), plain=True),
    EngineCase("read-4k-snapshots", "read", 4096, 32, (None, None), random=True, beside="snapshots"),
)
BESIDE_COMPACTION = EngineCase(
    "read-4k-compaction", "read", 4096, 32, (None, None), random=True, beside="compaction"
)
START_UP = ("memory-per-chunk", "start-up")

NAMES = (
    *(case.full_name(place) for place in PLACES for case in (*CASES, BESIDE_COMPACTION)),
    *START_UP,
)


@dataclass(slots=True)
class Cost:
    """CPU time of what ran: of the thread that drives it, and of the whole process, where the kernel's
    workers count that carry out what can't be started at once."""

    thread_ns: int = 0
    process_ns: int = 0
    operations: float = 0

    def metered(self, run: Contestant, unit_bytes: int) -> Contestant:
        """The same contestant with its time counted; an operation is `unit_bytes`."""

        def metered_run(seconds: float) -> Slice:
            thread, process = time.thread_time_ns(), time.process_time_ns()
            piece = run(seconds)
            self.thread_ns += time.thread_time_ns() - thread
            self.process_ns += time.process_time_ns() - process
            self.operations += piece.units / unit_bytes
            return piece

        return metered_run

    def fields(self, prefix: str) -> dict[str, object]:
        if not self.operations:
            return {}
        return {
            f"{prefix}_us": round(self.thread_ns / self.operations / 1000, 2),
            f"{prefix}_all_us": round(self.process_ns / self.operations / 1000, 2),
        }


class EngineLoop:
    """Keeps a case's operations in flight in an engine. A contestant (protocol.py) that counts bytes."""

    def __init__(self, engine: EngineBench, case: EngineCase, *, beside: str | None = None) -> None:
        self._engine = engine
        self._case = case
        self._beside = case.beside if beside is None else beside
        self.counts: list[EngineCount] = []

    def __call__(self, seconds: float) -> Slice:
        count = self._engine.run(
            self._case.work,
            max(1, round(seconds * 1000)),
            block_bytes=self._case.block_bytes,
            depth=self._case.depth,
            random=self._case.random,
            plain=self._case.plain,
            beside=self._beside,
        )
        self.counts.append(count)
        return Slice(count.operations * self._case.block_bytes, count.elapsed_ns / 1e9)

    def fields(self) -> dict[str, object]:
        """What the store says of the runs so far."""
        operations = sum(count.operations for count in self.counts)
        flushes = sum(count.flushes for count in self.counts)
        snapshots = sum(count.snapshots for count in self.counts)
        more: dict[str, object] = {
            "longest_operation_us": max(count.longest_operation_us for count in self.counts),
            "longest_step_us": max(count.longest_step_us for count in self.counts),
        }
        if flushes and self._case.work != "read":
            journal = sum(count.journal_bytes for count in self.counts)
            more["operations_a_flush"] = round(operations / flushes, 1)
            more["journal_bytes_an_operation"] = round(journal / max(1, operations))
            granules = sum(count.granules_read for count in self.counts)
            more["granules_read_an_operation"] = round(granules / max(1, operations), 3)
        moved = sum(count.moved_bytes for count in self.counts)
        if moved:
            more["moved_mib"] = round(moved / MIB, 1)
        if snapshots:
            more["snapshots"] = snapshots
        return more

"""`ffs bench ckpt`: checkpoints of several ranks against plain copies, the raw device and torch's own
checkpoints, in the same rounds on the same disk (docs/guides/bench.md).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ffs.cli.benchmark.allocated_cluster import written_cluster
from ffs.cli.benchmark.ckpt_cases import GB, CkptCase
from ffs.cli.benchmark.ckpt_ranks import RankProcesses
from ffs.cli.benchmark.cost import cpu_ns
from ffs.cli.benchmark.floors import FloorSpec, contestant, prepare_region
from ffs.cli.benchmark.protocol import Contestant, alternate, is_noisy, summarise
from ffs.cli.benchmark.report import Result
from ffs.cli.devcluster.handle import DevCluster
from ffs.errors import InvalidArgument

MIB: Final = 1 << 20
RANKS: Final = 4
MLPERF_SAVES: Final = 10
FLOOR_BYTES: Final = 512 * MIB
FLOOR_S: Final = 0.3
KEEP: Final = 1
WARM_SAVES: Final = 3
Row = dict[str, float]


@dataclass(slots=True)
class Cpu:
    """Seconds of processor that ranks and servers spend. `servers`: their pids."""

    servers: tuple[int, ...]
    _before: tuple[float, float] = (0.0, 0.0)

    def count(self, ranks: RankProcesses) -> tuple[float, float]:
        """(ranks, servers): since it was asked last."""
        now = sum(map(cpu_ns, ranks.pids())) / 1e9, sum(map(cpu_ns, self.servers)) / 1e9
        before, self._before = self._before, now
        return now[0] - before[0], now[1] - before[1]


@dataclass(slots=True)
class Suite:
    """One run. `scratch`: a directory on the disk that is measured; all in it is ours. `size_bytes`: of the
    whole state, of all ranks. `rounds`: of each group of cases."""

    scratch: Path
    model: Path
    size_bytes: int
    rounds: int
    ranks: int = RANKS
    noise: float = 1.0

    def run(self, cases: Sequence[CkptCase], say: Callable[[str], None]) -> Iterator[Result]:
        """The results as they come, the noise first. Blocking for minutes."""
        say("writing the floor's file")
        prepare_region(self.scratch / "floor", FLOOR_BYTES)
        yield self._noise()
        groups = [case.group for case in cases]
        plain: list[str] = [group for group in ("save", "second", "training") if group in groups]
        if plain:
            with ExitStack() as stack:
                cluster = stack.enter_context(self._cluster("one", 1, 2.5))
                say(f"{self.ranks} ranks")
                ranks = stack.enter_context(self._ranks(self.ranks, "weights"))
                for group in plain:
                    say(group)
                    yield from self._group(group, cases, cluster, ranks)
        for own, replicas, count, shape in (
            ("replicas", 3, self.ranks, "weights"),
            ("mlperf", 1, 2 * self.ranks, "training"),
        ):
            if own in groups:
                say(own)
                with self._cluster(own, replicas, 2.5) as cluster, self._ranks(count, shape) as ranks:
                    yield from self._group(own, cases, cluster, ranks)

    def _ranks(self, count: int, shape: str) -> RankProcesses:
        return RankProcesses(count, self.model, self.size_bytes, shape, self.scratch)

    @contextmanager
    def _cluster(self, name: str, replicas: int, times: float) -> Iterator[DevCluster]:
        """Room for so many times the state, all of it written once; its disk's room is checked."""
        share = replicas / 3
        # Saves follow each other at once: what is removed comes back a second or two later.
        each = max(2 << 30, int(self.size_bytes * times * share) + (1 << 30)) + (1 << 30)
        free = shutil.disk_usage(self.scratch).free
        wanted = 3 * each + FLOOR_BYTES
        if wanted > free:
            raise InvalidArgument(
                f"--size needs {wanted >> 20} MiB of {self.scratch}, which has {free >> 20}: "
                "give --dir, or less"
            )
        home = self.scratch / f"cluster-{name}"
        with written_cluster(home, each >> 20 << 20, replicas) as cluster:
            yield cluster
        shutil.rmtree(home)

    def _group(
        self, group: str, cases: Sequence[CkptCase], cluster: DevCluster, ranks: RankProcesses
    ) -> Iterator[Result]:
        cpu = Cpu(tuple(cluster.processes().values()))
        measure = {
            "save": self._save_round,
            "second": self._second_round,
            "training": self._training_round,
            "replicas": self._replicas_round,
            "mlperf": self._mlperf_round,
        }[group]
        ranks.tell("open", address=cluster.address, path=f"/bench/{group}", keep=KEEP)
        if group == "training":
            ranks.tell("train", steps=2)
        rounds = 1 if group == "second" else MLPERF_SAVES if group == "mlperf" else self.rounds
        if group != "second":
            measure(ranks, cpu)  # memory comes into being, on both sides
            for _ in range(WARM_SAVES):
                ranks.tell("change")
                ranks.tell("save")
        rows = [measure(ranks, cpu) for _ in range(rounds)]
        ranks.tell("no_training")
        ranks.tell("no_copy")
        ranks.tell("close")
        for case in cases:
            if case.group == group:
                more: dict[str, object] = {
                    key: [round(row[key], 4) for row in rows] for key in rows[0] if key in _SHOWN[group]
                }
                yield case.result(rows, is_noisy(self.noise), more)

    # --- rounds -----------------------------------------------------------------------------

    def _save_round(self, ranks: RankProcesses, cpu: Cpu) -> Row:
        ranks.tell("collect")
        row: Row = {"copy": ranks.slowest("copy")}
        row["torch_save"] = ranks.slowest("torch_save", directory=str(self.scratch))
        row |= self._saved(ranks, cpu)
        peer = str(self.scratch / "dcp")
        ranks.tell("collect")
        row["dcp_save_rate"] = row["whole"] / ranks.slowest("dcp_save", directory=peer)
        _drop(self.scratch / "dcp")
        row["dcp_load_rate"] = row["whole"] / ranks.slowest("dcp_load", directory=peer)
        row |= self._loaded(ranks, row["whole"], cpu)
        row["copy"] = (row["copy"] + ranks.slowest("copy")) / 2
        return row

    def _saved(self, ranks: RankProcesses, cpu: Cpu) -> Row:
        """A save of all tensors, all of them changed."""
        ranks.tell("change")
        ranks.tell("collect")
        before = self._device("write")
        cpu.count(ranks)
        answers = ranks.tell("save")
        spent = cpu.count(ranks)
        after = self._device("write")
        whole = float(sum(answer["written"] for answer in answers)) / GB
        stall = max(answer["stall"] for answer in answers)
        seconds = max(answer["seconds"] for answer in answers)
        return {
            "stall": stall,
            "whole": whole,
            "save_rate": whole / seconds,
            "persist_rate": whole / (seconds - stall),
            "write_rate": (before + after) / 2,
            "save_rank_cpu": spent[0] / whole,
            "save_server_cpu": spent[1] / whole,
        }

    def _loaded(self, ranks: RankProcesses, whole: float, cpu: Cpu) -> Row:
        """Cold: servers read past the page cache."""
        ranks.tell("collect")
        before = self._device("read")
        cpu.count(ranks)
        seconds = ranks.slowest("load")
        spent = cpu.count(ranks)
        after = self._device("read")
        return {
            "load_rate": whole / seconds,
            "read_rate": (before + after) / 2,
            "load_rank_cpu": spent[0] / whole,
            "load_server_cpu": spent[1] / whole,
        }

    def _second_round(self, ranks: RankProcesses, cpu: Cpu) -> Row:
        """A tenth changes, first the last tensors, then tensors here and there: a first save learns which, a
        second one gives the others files of their own."""
        whole = self._written(ranks, "all")
        last = self._written(ranks, "last")
        for _ in range(2):
            self._written(ranks, "scattered")
        return {"whole": whole, "last_written": last, "scattered_written": self._written(ranks, "scattered")}

    def _written(self, ranks: RankProcesses, which: str) -> float:
        ranks.tell("change", which=which)
        return float(sum(answer["written"] for answer in ranks.tell("save"))) / GB

    def _training_round(self, ranks: RankProcesses, cpu: Cpu) -> Row:
        ranks.tell("collect")
        peer = self.scratch / "async"
        dcp_async = ranks.slowest("train_dcp_async", "stall", directory=str(peer))
        ranks.tell("collect")
        answers = ranks.tell("train_save")
        return {
            "dcp_async": dcp_async,
            "stall": max(answer["stall"] for answer in answers),
            "called": max(answer["called"] for answer in answers),
            "persist": max(answer["persist"] for answer in answers),
            "limit": min(answer["limit"] for answer in answers),
            "steps": answers[0]["steps"],
            "with": answers[0]["with"],
            "without": answers[0]["without"],
        }

    def _replicas_round(self, ranks: RankProcesses, cpu: Cpu) -> Row:
        row = self._saved(ranks, cpu)
        return row | {"write_rate": row["write_rate"] / 3}

    def _mlperf_round(self, ranks: RankProcesses, cpu: Cpu) -> Row:
        row = self._saved(ranks, cpu)
        return row | self._loaded(ranks, row["whole"], cpu)

    # --- floors -----------------------------------------------------------------------------

    def _device(self, op: str) -> float:
        """GB/s of the bare device, durable where it writes."""
        with self._floor(op) as run:
            return run(FLOOR_S).rate / GB

    def _floor(self, op: str) -> AbstractContextManager[Contestant]:
        return contestant(FloorSpec(op, str(self.scratch / "floor"), MIB, 16, region_bytes=FLOOR_BYTES))

    def _noise(self) -> Result:
        """One floor against itself."""
        with self._floor("read") as one, self._floor("read") as other:
            summary = summarise(alternate(one, [other]))
        self.noise = summary.ratio
        return Result(
            "noise",
            summary.ours / GB,
            summary.floor / GB,
            summary.ratio,
            "GB/s",
            31,
            None,
            noisy=is_noisy(self.noise),
        )


_CPU: Final = ("save_rank_cpu", "save_server_cpu", "load_rank_cpu", "load_server_cpu")  # seconds a GB
_SHOWN: Final = {
    "save": (
        "stall",
        "copy",
        "torch_save",
        "save_rate",
        "persist_rate",
        "write_rate",
        "load_rate",
        "read_rate",
        *_CPU,
    ),
    "second": ("last_written", "scattered_written"),
    "training": ("stall", "called", "persist", "limit", "steps", "with", "without"),
    "replicas": ("stall", "save_rate", "write_rate", *_CPU[:2]),
    "mlperf": ("stall", "save_rate", "load_rate", *_CPU),
}


def _drop(directory: Path) -> None:
    """Files that are durable out of the page cache."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

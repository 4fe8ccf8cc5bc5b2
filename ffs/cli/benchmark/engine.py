"""`ffs bench engine`: the chunk engine by itself against the raw device (docs/guides/bench.md).

No server and no client: a native driver keeps operations in flight in a store on a file, as a shard does.
The floor reads the very file that the store lies on, or writes one beside it. Everything runs twice, on
a disk and on tmpfs, where O_DIRECT costs no device time, so that what the processor does shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ffs._native.engine_bench import EngineBench, Scale
from ffs.cli.benchmark.engine_cases import (
    BESIDE_COMPACTION,
    CASES,
    MIB,
    PLACES,
    START_UP,
    Cost,
    EngineCase,
    EngineLoop,
)
from ffs.cli.benchmark.floors import FloorSpec, contestant, prepare_region
from ffs.cli.benchmark.protocol import Slice, alternate, is_noisy, summarise
from ffs.cli.benchmark.report import Result
from ffs.errors import FfsError

MEMORY_LIMIT_BYTES = 192  # a chunk of 1 MiB
START_LIMIT_S = 5.0  # of a target with a million chunks
MANY = 500_000
SPREAD_LIMIT = 0.5
SLAB_BYTES = 16 * MIB
DEPTH = 64


@dataclass(slots=True)
class Suite:
    """One run. `directories`: on the disk and on tmpfs, ours alone. `region_bytes` are read and written."""

    directories: dict[str, Path]
    slices: int
    slice_s: float
    region_bytes: int
    chunks: int
    noise: dict[str, float] = field(default_factory=dict)

    def run(self, names: frozenset[str], say: Callable[[str], None]) -> Iterator[Result]:
        """The results as they come. Blocking for minutes."""
        for place in PLACES:
            cases = [case for case in CASES if case.full_name(place) in names]
            compaction = BESIDE_COMPACTION.full_name(place) in names
            if not cases and not compaction:
                continue
            say(f"{place}: filling")
            prepare_region(self.directories[place] / "floor", self.region_bytes)
            with self._engine(place) as engine:
                engine.fill(0, self.region_bytes // MIB, MIB)
                yield self._noise(place)
                for case in cases:
                    say(case.full_name(place))
                    yield self._case(engine, case, place)
            if compaction:
                say(BESIDE_COMPACTION.full_name(place))
                yield self._compaction(place)
            (self.directories[place] / "floor").unlink()
        if names & frozenset(START_UP):
            yield from self._start_up(names, say)

    def _engine(self, place: str) -> EngineBench:
        # A quarter beyond what is stored, for the slots of overwritten chunks that wait for their flush.
        size = max(self.region_bytes * 5 // 4, 14 * SLAB_BYTES) + self.region_bytes // 8 + 64 * MIB
        return EngineBench(self.directories[place] / "engine", size_bytes=size, depth=DEPTH)

    def _floor(self, engine: EngineBench | None, case: EngineCase, place: str) -> FloorSpec:
        """Reads go to the engine's own file, the same blocks: no luck of placement between the two."""
        on_engine = engine is not None and case.floor_op == "read"
        return FloorSpec(
            case.floor_op,
            str(self.directories[place] / ("engine" if on_engine else "floor")),
            case.block_bytes,
            case.depth,
            region_bytes=self.region_bytes,
            region_offset=engine.facts().data_offset if engine is not None and on_engine else 0,
            random=case.random,
            crc=False,
        )

    def _noise(self, place: str) -> Result:
        spec = self._floor(None, CASES[1], place)
        with contestant(spec) as one, contestant(spec) as other:
            summary = summarise(alternate(one, [other], self.slices, self.slice_s))
        self.noise[place] = summary.ratio
        return Result(
            f"noise-{place}",
            summary.ours / 1e9,
            summary.floor / 1e9,
            summary.ratio,
            "GB/s",
            self.slices,
            None,
            noisy=is_noisy(summary.ratio),
            more={"quartiles": [round(q, 4) for q in summary.quartiles], **_machine()},
        )

    def _case(self, engine: EngineBench, case: EngineCase, place: str) -> Result:
        ours, theirs, alone = Cost(), Cost(), Cost()
        loop = EngineLoop(engine, case)
        loop(self.slice_s)  # makes its memory
        loop.counts.clear()
        with ExitStack() as stack:
            floor = stack.enter_context(contestant(self._floor(engine, case, place)))
            floors = [theirs.metered(floor, case.block_bytes)]
            if case.beside:
                floors.append(alone.metered(EngineLoop(engine, case, beside=""), case.block_bytes))
            measured = ours.metered(loop, case.block_bytes)

            def run(seconds: float) -> Slice:
                if case.cold:
                    engine.reopen()  # not counted
                return measured(seconds)

            rounds = alternate(run, floors, self.slices, self.slice_s)
        summary = summarise(rounds, only=[0])
        more: dict[str, object] = {
            "quartiles": [round(q, 4) for q in summary.quartiles],
            **ours.fields("cpu"),
            **theirs.fields("floor_cpu"),
            **loop.fields(),
        }
        if case.beside:
            more["ratio_to_alone"] = round(summarise(rounds, only=[1]).ratio, 4)
        per_op = case.block_bytes < MIB
        scale = case.block_bytes if per_op else 1e9
        return Result(
            case.full_name(place),
            summary.ours / scale,
            summary.floor / scale,
            summary.ratio,
            "op/s" if per_op else "GB/s",
            self.slices,
            case.goal(place),
            noisy=is_noisy(self.noise.get(place, 1.0)) or _spread(summary.quartiles) > SPREAD_LIMIT,
            more=more,
        )

    def _compaction(self, place: str) -> Result:
        """Reads of what is left when most chunks of a nearly full device were removed, while it is packed."""
        size = max(self.region_bytes, 14 * SLAB_BYTES) + self.region_bytes // 8 + 64 * MIB
        small = MIB // 16
        with EngineBench(
            self.directories[place] / "engine",
            size_bytes=size,
            depth=DEPTH,
            max_chunks=2 * size // small,
        ) as engine:
            # All but three slabs, the least that is nearly full.
            room = size - engine.facts().data_offset - 3 * SLAB_BYTES
            engine.fill(0, room // small, small)
            engine.thin(8)
            engine.reopen()
            case = BESIDE_COMPACTION
            return self._case(engine, case, place)

    # --- many chunks --------------------------------------------------------------------------------

    def _start_up(self, names: frozenset[str], say: Callable[[str], None]) -> Iterator[Result]:
        """What many chunks take, in a process of its own. The floor is the limit, `ratio` how far below."""
        say(f"start-up of {self.chunks} chunks")
        code = (
            "import dataclasses, json, sys\n"
            "from ffs._native.engine_bench import measure_scale\n"
            "print(json.dumps(dataclasses.asdict(measure_scale(sys.argv[1], int(sys.argv[2])))))\n"
        )
        path = str(self.directories["disk"] / "many")
        done = subprocess.run(
            [sys.executable, "-c", code, path, str(self.chunks)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise FfsError(f"measuring {self.chunks} chunks: {done.stderr.strip().splitlines()[-1:]}")
        scale = Scale(**json.loads(done.stdout))
        counted, resident = scale.memory_bytes / scale.chunks, scale.resident_bytes / scale.chunks
        opened = scale.open_us / 1e6
        for name, ours, most, unit, more in (
            ("memory-per-chunk", counted, MEMORY_LIMIT_BYTES, "bytes", {"resident": round(resident, 1)}),
            (
                "start-up",
                opened,
                START_LIMIT_S * self.chunks / 1e6,
                "s",
                {
                    "cpu_s": round(scale.open_cpu_us / 1e6, 3),
                    "snapshot_s": round(scale.snapshot_us / 1e6, 3),
                    "snapshot_longest_step_us": scale.longest_step_us,
                },
            ),
        ):
            if name in names:
                ratio = most / ours if ours > 0 else 0.0
                # Of few chunks what a store takes anyway is most.
                goal = 1.0 if self.chunks >= MANY else None
                yield Result(name, ours, most, ratio, unit, 1, goal, more={"chunks": self.chunks, **more})


def _spread(quartiles: tuple[float, float]) -> float:
    """Between the quartiles of the ratios, over their middle: others' writes and flushes show here, which the
    floor's reads against themselves don't feel."""
    low, high = quartiles
    return (high - low) * 2 / (high + low) if high + low > 0 else 0.0


def _machine() -> dict[str, object]:
    """What a reader must know to judge a figure of a shared machine."""
    policies = {os.SCHED_OTHER: "other", os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr", os.SCHED_BATCH: "batch"}
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "scheduling": policies.get(os.sched_getscheduler(0), "?"),
        "nice": os.nice(0),
    }

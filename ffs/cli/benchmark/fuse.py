"""`ffs bench fuse`: the same file read through ffs and through FUSE mounts that pass a directory through
(docs/guides/bench.md)."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ffs.cli.benchmark.cost import meter
from ffs.cli.benchmark.floors import FloorSpec, contestant, prepare_region
from ffs.cli.benchmark.fuse_mounts import (
    bindfs_command,
    build_passthrough,
    check_bindfs,
    mounted,
    passthrough_command,
)
from ffs.cli.benchmark.io_cases import file_loop
from ffs.cli.benchmark.protocol import Contestant, Round, Slice, alternate, is_noisy, summarise
from ffs.cli.benchmark.report import Result
from ffs.cli.benchmark.suite import metered
from ffs.cli.devcluster.handle import DevCluster
from ffs.client.client import Client, connect

REGION_BYTES = 512 << 20
_PIECE = 8 << 20
MOUNTS = ("bindfs", "passthrough")
PLACES = ("disk", "tmpfs")


@dataclass(frozen=True, slots=True)
class FuseCase:
    what: str
    block_bytes: int
    depth: int
    random: bool

    def name(self, mount: str, place: str) -> str:
        return f"fuse-{self.what}-qd{self.depth}-{mount}-{place}"


CASES = (FuseCase("4k-rand", 4096, 32, True), FuseCase("1m-seq", 1 << 20, 16, False))
# Times the mount's rate. Of passthrough: more than that of it.
GOALS = {CASES[0].name("bindfs", "disk"): 6.0, CASES[0].name("passthrough", "disk"): 1.0}
NAMES = tuple(case.name(mount, place) for place in PLACES for case in CASES for mount in MOUNTS)


@dataclass(slots=True)
class Suite:
    """One run. `directories`: by place; all in them is ours. `warn` is told what can't be compared."""

    directories: Mapping[str, Path]
    slices: int
    slice_s: float
    warn: Callable[[str], None]
    region_bytes: int = REGION_BYTES

    def run(self, names: frozenset[str], say: Callable[[str], None]) -> Iterator[Result]:
        """Blocking for a minute. Unsupported names what the machine lacks."""
        check_bindfs()
        for place in PLACES:
            if any(name.endswith(f"-{place}") for name in names):
                yield from self._place(place, names, say)

    def _place(self, place: str, names: frozenset[str], say: Callable[[str], None]) -> Iterator[Result]:
        home = self.directories[place]
        source = home / "source"
        source.mkdir()
        say(f"writing the files on {place}")
        prepare_region(source / "file", self.region_bytes)
        with DevCluster(home / "cluster") as cluster, connect(cluster.address, transport="local") as client:
            copy_in(client, source / "file", "/file")
            with ExitStack() as stack:
                mounts = self._mount(home, source, stack)
                for case in CASES:
                    wanted = {
                        mount: path for mount, path in mounts.items() if case.name(mount, place) in names
                    }
                    if wanted:
                        say(case.name(",".join(wanted), place))
                        yield from self._case(case, place, client, cluster, source / "file", wanted)

    def _mount(self, home: Path, source: Path, stack: ExitStack) -> dict[str, Path]:
        found = {}
        where = home / "bindfs"
        found["bindfs"] = stack.enter_context(
            mounted(bindfs_command(source, where), where, home / "bindfs.log")
        )
        program, why = build_passthrough(home)
        if program is None:
            self.warn(f"no comparison with libfuse's passthrough: {why}")
            return found
        where = home / "passthrough"
        found["passthrough"] = stack.enter_context(
            mounted(passthrough_command(program, source, where), where, home / "passthrough.log")
        )
        return found

    def _case(
        self,
        case: FuseCase,
        place: str,
        client: Client,
        cluster: DevCluster,
        file: Path,
        mounts: Mapping[str, Path],
    ) -> Iterator[Result]:
        with ExitStack() as stack:
            paths = [*(mount / file.name for mount in mounts.values()), file]
            readers = [
                cold(stack.enter_context(contestant(self._reader(case, path))), [path, file])
                for path in paths
            ]
            # The device again: how much of a ratio is noise.
            readers.append(cold(stack.enter_context(contestant(self._reader(case, file))), [file]))
            loop = stack.enter_context(
                file_loop(
                    client,
                    "/file",
                    "read",
                    case.block_bytes,
                    case.depth,
                    self.region_bytes,
                    random=case.random,
                )
            )
            cpu = meter(cluster.processes().values())
            rounds = alternate(metered(loop, cpu, case.block_bytes), readers, self.slices, self.slice_s)
        device = len(mounts)
        noise = statistics.median(
            entry.floors[device + 1].rate / entry.floors[device].rate for entry in rounds
        )
        for index, mount in enumerate(mounts):
            name = case.name(mount, place)
            cost = cpu.as_fields()
            yield result_of(case, name, rounds, index, device, cost, noisy=is_noisy(noise))

    def _reader(self, case: FuseCase, path: Path) -> FloorSpec:
        return FloorSpec(
            "read",
            str(path),
            case.block_bytes,
            case.depth,
            region_bytes=self.region_bytes,
            random=case.random,
            crc=False,
        )


def result_of(
    case: FuseCase,
    name: str,
    rounds: Sequence[Round],
    index: int,
    device: int,
    cost: dict[str, object],
    *,
    noisy: bool,
) -> Result:
    """The line of the mount whose slices are the floors' number `index`; `device`: the device's. Pure."""
    summary = summarise(rounds, only=[index])
    bare = summarise(rounds, only=[device])
    scale, unit = (1 / case.block_bytes, "op/s") if case.random else (1e-9, "GB/s")
    more = {
        "quartiles": [round(q, 4) for q in summary.quartiles],
        **cost,
        "device": round(bare.floor * scale, 4),
        "device_ratio": round(bare.ratio, 4),
        # What the bare device itself would have reached: more isn't to be had here.
        "device_to_mount": round(
            statistics.median(entry.floors[device].rate / entry.floors[index].rate for entry in rounds), 4
        ),
    }
    return Result(
        name,
        summary.ours * scale,
        summary.floor * scale,
        summary.ratio,
        unit,
        len(rounds),
        GOALS.get(name),
        noisy=noisy,
        more=more,
    )


def cold(reader: Contestant, paths: Sequence[Path]) -> Contestant:
    """The same reader, with nothing of these files in the page cache when a slice begins."""

    def run(seconds: float) -> Slice:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return reader(seconds)

    return run


def copy_in(client: Client, source: Path, target: str) -> None:
    """The file's bytes, one copy of each in the cluster."""
    with (
        source.open("rb", buffering=0) as file,
        client.open(target, "wb", buffering=0, table="single") as out,
    ):
        while piece := file.read(_PIECE):
            out.write(piece)

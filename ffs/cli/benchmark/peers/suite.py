"""`ffs bench peers`: ffs's KV blocks and another store's, by turns (docs/guides/bench.md).

Beside Mooncake the device of ffs lies in memory, as Mooncake's blocks do, and ffs is measured over `tcp` and
over `local` in the same rounds, so that both are compared with the same slices of it. Beside vLLM's own tier
both are tiers of vLLM's, on the same file system.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ffs.cli.benchmark.allocated_cluster import allocated_cluster
from ffs.cli.benchmark.cost import meter
from ffs.cli.benchmark.kv_cases import KvLoop, Tally
from ffs.cli.benchmark.peers.cases import DEVICES, P50_GOAL, TRANSPORTS, PeerCase, VllmCase
from ffs.cli.benchmark.peers.mooncake import check, mooncake
from ffs.cli.benchmark.peers.process import PeerProcess
from ffs.cli.benchmark.protocol import Round, Slice, alternate, summarise
from ffs.cli.benchmark.report import Result
from ffs.cli.devcluster.handle import DevCluster
from ffs.client.client import connect
from ffs.errors import NotFound
from ffs.kv.space import Space

DEVICE_BYTES = 3 << 30


@dataclass(slots=True)
class PeerLoop:
    """A peer's process as a contestant."""

    process: PeerProcess
    block_bytes: int
    tally: Tally = field(default_factory=Tally)

    def __call__(self, seconds: float) -> Slice:
        answer = self.process.ask(do="run", seconds=seconds)
        self.tally.calls_ns += answer["calls_ns"]
        self.tally.blocks += answer["blocks"]
        self.tally.errors += answer["errors"]
        self.tally.verified_bytes += answer["verified_bytes"]
        return Slice(answer["blocks"] * self.block_bytes, sum(answer["calls_ns"]) / 1e9)


@dataclass(slots=True)
class Suite:
    """One run. `disk`, `memory`: directories of ours, the second on a tmpfs. `mooncake`, `vllm`: the Python
    of the environment that has it. `set_bytes`: of blocks that are got."""

    disk: Path
    memory: Path
    mooncake: Path
    vllm: Path
    set_bytes: int
    slices: int
    slice_s: float

    def run(
        self, cases: Sequence[PeerCase], vllm_cases: Sequence[VllmCase], say: Callable[[str], None]
    ) -> Iterator[Result]:
        """The results as they come. Blocking for minutes. NotFound: a peer isn't installed."""
        if cases:
            check(self.mooncake)
        if vllm_cases and not self.vllm.exists():
            raise NotFound(f"no environment with vLLM: `make bench-peers` installs it ({self.vllm})")
        if cases:
            say("a cluster in memory, and Mooncake")
            with mooncake(self.mooncake, self.memory) as peer, self._cluster("tmpfs") as cluster:
                for case in cases:
                    say(case.name("*"))
                    yield from self._case(cluster, peer, case)
        for device in DEVICES:
            if some := [case for case in vllm_cases if case.device == device]:
                say(f"a cluster on {device}, and vLLM's tiers")
                with self._cluster(device) as cluster:
                    yield from self._tiers(cluster, self._place(device), some, say)

    def _place(self, device: str) -> Path:
        return self.memory if device == "tmpfs" else self.disk

    @contextmanager
    def _cluster(self, device: str) -> Iterator[DevCluster]:
        home = self._place(device) / "cluster"
        with allocated_cluster(home, DEVICE_BYTES) as cluster:
            yield cluster
        shutil.rmtree(home)

    # --- Mooncake ---------------------------------------------------------------------------------

    def _case(self, cluster: DevCluster, peer: PeerProcess, case: PeerCase) -> Iterator[Result]:
        with ExitStack() as stack:
            ours = [self._ours(cluster, case, transport, stack) for transport in TRANSPORTS]
            theirs = self._peer(peer, case, stack)
            rounds = alternate(ours[0], [theirs, ours[1]], self.slices, self.slice_s)
        by_transport = (rounds, [Round(entry.floors[1], entry.floors[:1]) for entry in rounds])
        for transport, loop, mine in zip(TRANSPORTS, ours, by_transport, strict=True):
            where = {"transport": transport, "device": "tmpfs"}
            yield _result(case, case.name(transport), case.goal(transport), mine, (loop, theirs), where)

    def _ours(self, cluster: DevCluster, case: PeerCase, transport: str, stack: ExitStack) -> KvLoop:
        client = stack.enter_context(connect(cluster.address, transport=transport))
        path = f"/bench/{case.name(transport)}"
        space = stack.enter_context(
            Space.create(client, path, block_bytes=case.block_bytes, replicas=1, evictable=False)
        )
        stack.callback(client.remove, path)
        stack.callback(space.purge)
        loop = KvLoop(space, case.ours(transport), self.set_bytes, meter(cluster.processes().values()))
        loop.prepare()
        return loop

    def _peer(self, process: PeerProcess, case: PeerCase | VllmCase, stack: ExitStack) -> PeerLoop:
        process.ask(do="case", op=case.op, size=case.block_bytes, batch=case.batch, set_bytes=self.set_bytes)
        stack.callback(process.ask, do="end")
        return PeerLoop(process, case.block_bytes)

    # --- vLLM -------------------------------------------------------------------------------------

    def _tiers(
        self, cluster: DevCluster, place: Path, cases: Sequence[VllmCase], say: Callable[[str], None]
    ) -> Iterator[Result]:
        """Both tiers in a process of their own each."""
        command = [str(self.vllm), "-P", str(Path(__file__).parent / "vllm_tier.py")]
        with (
            PeerProcess([*command, "ffs", cluster.address], self.disk / "ffs.log") as ours,
            PeerProcess([*command, "fs", str(place / "vllm-fs")], self.disk / "fs.log") as theirs,
        ):
            for case in cases:
                say(case.name)
                with ExitStack() as stack:
                    loops = self._peer(ours, case, stack), self._peer(theirs, case, stack)
                    rounds = alternate(loops[0], [loops[1]], self.slices, self.slice_s)
                where = {"transport": "auto", "device": case.device}
                yield _result(case, case.name, case.goal, rounds, loops, where, p50_goal=None)


def _result(
    case: PeerCase | VllmCase,
    name: str,
    goal: float | None,
    rounds: Sequence[Round],
    loops: tuple[KvLoop | PeerLoop, PeerLoop],
    where: Mapping[str, object],
    p50_goal: float | None = P50_GOAL,
) -> Result:
    summary = summarise(rounds, only=[0])
    mine, theirs = (loop.tally for loop in loops)
    p50_ratio = mine.percentile_us(50) / theirs.percentile_us(50)
    return Result(
        name,
        summary.ours / 1e9,
        summary.floor / 1e9,
        summary.ratio,
        "GB/s",
        len(rounds),
        goal,
        more_ok=p50_goal is None or p50_ratio <= p50_goal,
        more={
            "quartiles": [round(q, 4) for q in summary.quartiles],
            "p50_ratio": round(p50_ratio, 4),
            "p50_goal": p50_goal,
            **mine.fields(),
            "peer": theirs.fields(),
            "op": case.op,
            "size_bytes": case.block_bytes,
            "batch": case.batch,
            **where,
            "replicas": 1,
            "checksum": True,
        },
    )

"""The cases of `ffs bench peers`, and what ffs has to reach in each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ffs.cli.benchmark.io_matrix import SIZES
from ffs.cli.benchmark.kv_cases import BATCHES, KV_SIZES, KvCase
from ffs.errors import InvalidArgument

P50_GOAL = 0.6
LOAD_GOAL = 1.5
TRANSPORTS = ("tcp", "local")
DEVICES = ("disk", "tmpfs")


@dataclass(frozen=True, slots=True)
class PeerCase:
    """Against Mooncake: "get" or "put" of `batch` blocks a call, ffs over both transports."""

    op: str
    size: str
    batch: int

    @property
    def block_bytes(self) -> int:
        return SIZES[self.size]

    def name(self, transport: str) -> str:
        return f"mooncake-{self.op}-{self.size}-x{self.batch}-{transport}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.name(transport) for transport in TRANSPORTS)

    def ours(self, transport: str) -> KvCase:
        """What ffs does of it."""
        return KvCase(self.op, self.size, self.batch, transport)

    def goal(self, transport: str) -> float:
        """For the ratio of rates."""
        if transport == "local":
            return 2.0
        if self.batch == 1:
            return {"64k": 2.0, "1m": 1.5}.get(self.size, 1.3)
        return 1.3


@dataclass(frozen=True, slots=True)
class VllmCase:
    """Against vLLM's own fs tier: "load" or "store" of a job of `batch` blocks, both on `device`."""

    op: str
    size: str
    batch: int
    device: str

    @property
    def block_bytes(self) -> int:
        return SIZES[self.size]

    @property
    def name(self) -> str:
        return f"vllm-fs-{self.op}-{self.size}-x{self.batch}-{self.device}"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def goal(self) -> float | None:
        """On tmpfs its load is one copy by the kernel, unchecked: measured only. So are stores: its aren't
        durable."""
        return LOAD_GOAL if self.op == "load" and self.device == "disk" else None


CASES = tuple(PeerCase(op, size, batch) for op in ("get", "put") for size in KV_SIZES for batch in BATCHES)
VLLM_CASES = tuple(
    VllmCase(op, size, batch, device)
    for device in DEVICES
    for op in ("load", "store")
    for size in KV_SIZES
    for batch in BATCHES
)


def select(patterns: Sequence[str]) -> tuple[list[PeerCase], list[VllmCase]]:
    """Those of which a name matches one of the patterns (none: all). InvalidArgument: none does."""

    def wanted(case: PeerCase | VllmCase) -> bool:
        return not patterns or any(fnmatchcase(name, each) for name in case.names for each in patterns)

    chosen = [case for case in CASES if wanted(case)], [case for case in VLLM_CASES if wanted(case)]
    if not any(chosen):
        names = ", ".join([*(n for case in CASES for n in case.names), *(case.name for case in VLLM_CASES)])
        raise InvalidArgument(f"no case matches; there are: {names}")
    return chosen

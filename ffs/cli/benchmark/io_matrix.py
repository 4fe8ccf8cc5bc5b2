"""Which cases `ffs bench io` has, which of them have goals, and which are run. Pure. docs/guides/bench.md."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ffs.errors import InvalidArgument

KIB, MIB = 1 << 10, 1 << 20
GRANULE = 64 * KIB  # a checksum covers so much; parts of it aren't verified when they are read

SIZES = {"4k": 4 * KIB, "64k": 64 * KIB, "1m": MIB, "4m": 4 * MIB}
DEPTHS = (1, 16, 128)
TRANSPORTS = ("local", "tcp")
DEVICES = ("disk", "tmpfs", "null")
REPLICAS = (1, 3)
OPS = ("read", "write", "latency", "requests")
REQUESTS_DEPTH = 4096


@dataclass(frozen=True, slots=True)
class IoCase:
    """One case of the data path.

    op: "read" and "write" count bytes; "latency" is one read at a time, in microseconds; "requests" are
    reads a second, as many in flight as make arrays worth their while."""

    op: str
    size: str
    depth: int
    transport: str
    device: str
    replicas: int = 1
    checksum: bool = True

    @property
    def name(self) -> str:
        copies = "" if self.replicas == 1 else f"-r{self.replicas}"
        plain = "" if self.checksum else "-plain"
        return f"{self.op}-{self.size}-qd{self.depth}-{self.transport}-{self.device}{copies}{plain}"

    @property
    def block_bytes(self) -> int:
        return SIZES[self.size]

    @property
    def kind(self) -> str:
        """What its ring is for."""
        return "write" if self.op == "write" else "read"

    @property
    def random(self) -> bool:
        """Small blocks in random order, large ones one after another."""
        return self.block_bytes <= GRANULE

    @property
    def crc(self) -> bool:
        """ffs computes checksums of what moves, so the floor does."""
        return self.checksum and (self.op == "write" or self.block_bytes >= GRANULE)

    @property
    def table(self) -> str:
        return "single" if self.replicas == 1 else "default"

    @property
    def share(self) -> float:
        """How much of the floor a perfect system could reach: all copies go to this one machine's device."""
        return 1 / self.replicas if self.op == "write" else 1.0

    @property
    def goal(self) -> float | None:
        return GOALS.get(self.name)

    @property
    def goal_of(self) -> str:
        return "ffs" if self.op == "requests" else "ratio"

    @property
    def floors(self) -> tuple[str, ...]:
        """Whose slowest one is the floor; of a latency: whose times add up to it."""
        if self.op == "latency":
            return ("device", "message") if self.device != "null" else ("message",)
        found = [] if self.device == "null" else ["device"]
        if self.transport == "tcp":
            found.append("socket")
        return tuple(found) or ("message",)


GOALS = {
    "read-1m-qd16-local-disk": 0.95,
    "read-64k-qd16-local-disk": 0.90,
    "read-4k-qd128-local-disk": 0.85,
    "latency-4k-qd1-local-disk": 1.0,
    "read-1m-qd16-local-tmpfs": 0.80,
    "read-1m-qd16-tcp-tmpfs": 0.90,
    "read-64k-qd16-tcp-tmpfs": 0.85,
    "read-1m-qd16-tcp-null": 0.70,
    "read-64k-qd16-tcp-null": 0.60,
    "write-1m-qd16-local-disk": 0.85,
    "write-1m-qd16-local-disk-r3": 0.80,
    f"requests-4k-qd{REQUESTS_DEPTH}-local-null": 1_000_000.0,
}
# What checksums cost: the same without them.
COMPARED = (
    "read-1m-qd16-local-disk-plain",
    "write-1m-qd16-local-disk-plain",
    "read-1m-qd16-tcp-tmpfs-plain",
    "read-1m-qd16-tcp-null-plain",
)


def all_cases() -> tuple[IoCase, ...]:
    """The whole matrix, by device, so that each device's cluster runs once."""
    found: list[IoCase] = []
    for device in DEVICES:
        for op, transport, copies in itertools.product(("read", "write"), TRANSPORTS, REPLICAS):
            for size, depth in itertools.product(SIZES, DEPTHS):
                found.append(IoCase(op, size, depth, transport, device, copies))
                if copies == 1 and depth == 16:
                    found.append(IoCase(op, size, depth, transport, device, copies, checksum=False))
        found += [IoCase("latency", "4k", 1, transport, device) for transport in TRANSPORTS]
        if device == "null":
            found += [IoCase("requests", "4k", REQUESTS_DEPTH, transport, device) for transport in TRANSPORTS]
    return tuple(found)


CASES = all_cases()
NAMES = tuple(case.name for case in CASES)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for; empty: whatever. `only`: patterns of names, of the whole matrix. `all`: without a
    pattern too not just the cases that have goals, and those they are compared with."""

    only: tuple[str, ...] = ()
    all: bool = False
    ops: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    depths: tuple[int, ...] = ()
    transports: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    replicas: tuple[int, ...] = ()
    checksums: tuple[bool, ...] = ()

    @property
    def by_dimension(self) -> bool:
        return any(
            (
                self.ops,
                self.sizes,
                self.depths,
                self.transports,
                self.devices,
                self.replicas,
                self.checksums,
            )
        )


def select(wanted: Wanted, others: Sequence[str] = ()) -> tuple[tuple[IoCase, ...], frozenset[str]]:
    """The cases to run, and which of `others` (cases without dimensions). InvalidArgument: a pattern or a
    combination that names none."""
    for pattern in wanted.only:
        if not any(fnmatchcase(name, pattern) for name in (*NAMES, *others)):
            raise InvalidArgument(
                f"no case {pattern!r}: names are like {NAMES[0]}, or {others[0] if others else NAMES[-1]}"
            )
    cases = (
        CASES if wanted.all or wanted.only else [case for case in CASES if case.name in (*GOALS, *COMPARED)]
    )
    dimensions: tuple[tuple[str, Sequence[object]], ...] = (
        ("op", wanted.ops),
        ("size", wanted.sizes),
        ("depth", wanted.depths),
        ("transport", wanted.transports),
        ("device", wanted.devices),
        ("replicas", wanted.replicas),
        ("checksum", wanted.checksums),
    )
    chosen = tuple(
        case
        for case in cases
        if all(not asked or getattr(case, name) in asked for name, asked in dimensions)
        and (not wanted.only or any(fnmatchcase(case.name, pattern) for pattern in wanted.only))
    )
    beside = frozenset(
        name
        for name in others
        if not wanted.by_dimension
        and (not wanted.only or any(fnmatchcase(name, pattern) for pattern in wanted.only))
    )
    if not chosen and not beside:
        least = "" if wanted.all or wanted.only else " and has a goal; with --all there may be some"
        raise InvalidArgument(f"no case is all of that{least}")
    return chosen, beside

"""The words of the tier manager: tiers, jobs, wishes and their outcomes (docs/kv_tiers.md, Manager)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ffs.errors import InvalidArgument
from ffs.kv.policy.order import NAMES
from ffs.kv.policy.pins import Lease

if TYPE_CHECKING:
    from ffs.errors import FfsError


class Tier(enum.IntEnum):
    """Below the host's memory; lower numbers are nearer."""

    HOST = 0
    LOCAL = 1
    SPACE = 2


class Outcome(enum.IntEnum):
    HIT = 1
    """In its slot, verified and pinned."""
    MISS = 2
    """Nobody has it: compute it."""
    FAILED = 3
    """It couldn't be had, not even by a second try: compute it; `Wish.errors` says why."""


class Share(enum.StrEnum):
    """When blocks go to the space, where other machines find them."""

    EAGER = "eager"
    """As soon as they are used often enough, in the background."""
    DEMOTE = "demote"
    """When they leave the last tier before it."""
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a tier manager. Sizes in bytes. InvalidArgument for what can't be."""

    block_bytes: int
    """The largest block; a slot of host memory has so many, rounded up to pages."""
    host_bytes: int
    """Of pinned memory."""
    local_bytes: int = 0
    """That blocks may take in the local store; 0: there is none."""
    policy: str = "adaptive"
    admission: bool = True
    share: Share = Share.EAGER
    share_uses: int = 1
    """So often a block must have been used lately to be shared; 1: all of them."""
    high: float = 0.95
    low: float = 0.85
    window: float = 0.05
    """Water marks and residency window, as shares of each tier."""
    least_in_flight: int = 64
    most_in_flight: int = 256
    """Loads in flight from one store: the window's bounds."""
    stores_beside_loads: int = 4
    """Stores in flight while anybody waits for a load."""
    stores_in_flight: int = 32

    def __post_init__(self) -> None:
        if self.policy not in NAMES:
            raise InvalidArgument(f"eviction policy {self.policy!r}: there are {', '.join(NAMES)}")
        if self.block_bytes <= 0 or self.host_bytes < self.stride:
            raise InvalidArgument(
                f"host_bytes is {self.host_bytes}: it must hold a block of {self.block_bytes} bytes at least"
            )
        if not 1 <= self.least_in_flight <= self.most_in_flight <= 512:
            raise InvalidArgument(
                f"loads in flight: 1 <= {self.least_in_flight} <= {self.most_in_flight} <= 512 doesn't hold"
            )
        if not 1 <= self.stores_beside_loads <= self.stores_in_flight:
            raise InvalidArgument("stores_beside_loads is from 1 to stores_in_flight")

    @property
    def stride(self) -> int:
        """From slot to slot."""
        return -(-self.block_bytes // 4096) * 4096

    @property
    def slots(self) -> int:
        return self.host_bytes // self.stride


@dataclass(eq=False, slots=True)
class Job:
    """One block between a slot of the host and a store. `load`: into the slot, else out of it."""

    key: bytes
    tier: Tier
    slot: int
    nbytes: int
    load: bool
    second: bool = False
    """The one retry."""


@dataclass(eq=False, slots=True)
class Wish:
    """Blocks that a request wants in host memory, in order of need. The machine's, but for reading.

    `ahead`: how many blocks after those that were taken may be held or on their way."""

    keys: Sequence[bytes]
    lease: Lease
    urgent: bool
    ahead: int
    outcomes: dict[bytes, Outcome] = field(default_factory=dict)
    """Of blocks that were asked for and not taken yet, as far as they are known."""
    errors: dict[bytes, FfsError] = field(default_factory=dict)
    asked: int = 0
    """Positions that were asked for so far."""
    taken: int = 0
    """Positions that are over."""
    live: bool = True
    repeats: bool = False
    """Some block of it comes more than once."""


@dataclass(slots=True)
class TierCounts:
    """Blocks and bytes between the host and one store, and what became of them."""

    loads: int = 0
    load_bytes: int = 0
    misses: int = 0
    load_errors: int = 0
    retries: int = 0
    stores: int = 0
    store_bytes: int = 0
    store_errors: int = 0
    removals: int = 0
    most_loads_in_flight: int = 0


@dataclass(slots=True)
class Counts:
    """What the machine did, in blocks."""

    wanted: int = 0
    host_hits: int = 0
    misses: int = 0
    failed: int = 0
    puts: int = 0
    puts_refused: int = 0
    """There was no room for them: all of the host's memory is pinned or on its way."""
    dropped: int = 0
    """Left the host without a copy below."""
    local: TierCounts = field(default_factory=TierCounts)
    space: TierCounts = field(default_factory=TierCounts)

    def of(self, tier: Tier) -> TierCounts:
        return self.local if tier == Tier.LOCAL else self.space

"""What leaves the host's memory and the local store: who goes, where it is stored before, and when. The lower
half of the tier manager's state machine (machine.py). Pure.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ffs.kv.policy import Marks, Pins, Residency, ScanGuard, make_order
from ffs.kv.policy.residency import State
from ffs.kv.tally import copied
from ffs.kv.tiers.pace import Breaker, Window
from ffs.kv.tiers.words import Counts, Job, Settings, Share, Tier, Wish

_SHARED_NAMES: Final = 1 << 20  # keys that are known to be in the space, at most
_LEAST_SLOT: Final = 4096


def allocated(nbytes: int) -> int:
    """What a block takes in a chunk store: the next power of two, from 4 KiB on."""
    return max(_LEAST_SLOT, 1 << (nbytes - 1).bit_length())


@dataclass(slots=True)
class Held:
    """A block with a slot. `saves`: tiers to which it is on its way."""

    slot: int
    nbytes: int
    saves: frozenset[Tier] = frozenset()
    given_up: frozenset[Tier] = frozenset()
    onward: bool = False
    """It came up only to be stored in the space."""


@dataclass(slots=True)
class Awaited:
    """A block that somebody wants and that isn't here yet."""

    wishes: list[Wish]
    tier: Tier
    job: Job | None = None
    tried: bool = False
    """An error came already."""
    climbs: bool = False
    """From the local store to the space, by way of the host."""


class Below:
    """See Machine, which is built on it."""

    def __init__(self, settings: Settings, tiers: Sequence[Tier]) -> None:
        """`tiers`: which stores there are, below the host."""
        self.settings = settings
        self.counts = Counts()
        self._tiers = sorted(tiers)
        host_bytes = settings.slots * settings.stride
        self._guard = ScanGuard(max(4096, 4 * settings.slots)) if settings.admission else None
        self.host = self._residency(host_bytes, self._guard)
        self.pins = Pins(self.host)
        self.local: Residency | None = None
        if Tier.LOCAL in self._tiers:
            blocks = settings.local_bytes // settings.stride
            guard = ScanGuard(max(4096, 4 * blocks)) if settings.admission else None
            self.local = self._residency(settings.local_bytes, guard)
        self._held: dict[bytes, Held] = {}
        self._free = list(range(settings.slots - 1, -1, -1))
        self._awaited: dict[bytes, Awaited] = {}
        self._lines: dict[Tier, list[tuple[int, int, bytes]]] = {tier: [] for tier in self._tiers}
        self._saves: dict[Tier, OrderedDict[bytes, None]] = {tier: OrderedDict() for tier in self._tiers}
        self._removals: deque[bytes] = deque()
        self._shared: OrderedDict[bytes, None] = OrderedDict()
        self._climbing: set[bytes] = set()
        self._flying = {tier: 0 for tier in self._tiers}
        self._storing = {tier: 0 for tier in self._tiers}
        self._urgency = 0
        self.windows = {
            tier: Window(settings.least_in_flight, settings.most_in_flight) for tier in self._tiers
        }
        self.breakers = {tier: Breaker() for tier in self._tiers}

    def _residency(self, capacity: int, guard: ScanGuard | None) -> Residency:
        settings = self.settings
        marks = Marks.of(capacity, settings.high, settings.low, settings.window)
        return Residency(marks, make_order(settings.policy, capacity), guard)

    # --- what is where --------------------------------------------------------------------------

    def where(self, key: bytes) -> Tier | None:
        """The nearest tier that is known to have it. Of the space only what passed here is known."""
        if self.host.has(key):
            return Tier.HOST
        if self.local is not None and self.local.has(key):
            return Tier.LOCAL
        return Tier.SPACE if key in self._shared else None

    def slot(self, key: bytes) -> tuple[int, int]:
        """Slot and bytes of a block that is in the host's memory."""
        held = self._held[key]
        return held.slot, held.nbytes

    def note_shared(self, keys: Iterable[bytes]) -> None:
        """The space has them."""
        shared = self._shared
        for key in keys:
            shared[key] = None
            shared.move_to_end(key)
        while len(shared) > _SHARED_NAMES:
            shared.popitem(last=False)

    def loads_wait(self) -> bool:
        """Whether anybody waits for a load."""
        return bool(self._awaited)

    def stores_due(self, tier: Tier) -> bool:
        """Whether anything is to be stored in that tier, or removed from it."""
        return bool(self._saves[tier]) or (tier is Tier.LOCAL and bool(self._removals))

    def queued(self, tier: Tier) -> int:
        """Loads that wait for that tier or are in flight."""
        return self._flying[tier] + len(self._lines[tier])

    def counts_now(self) -> Counts:
        """A copy."""
        return copied(self.counts)

    def idle(self) -> bool:
        """Nothing moves, and nothing is to be moved (what a resting store should remove can wait)."""
        return not (
            self._awaited
            or (self._removals and self.breakers[Tier.LOCAL].closed(float("-inf")))
            or any(self._saves.values())
            or any(self._flying.values())
            or any(self._storing.values())
        )

    def _forget_local(self, key: bytes) -> None:
        self._climbing.discard(key)
        if self.local is not None and self.local.state(key) is not None:
            self.local.drop(key)
            self._removals.append(key)

    def _used_enough(self, key: bytes) -> bool:
        """To be shared. With `share_uses` 1 all are, those too whose use was so long ago that it faded."""
        least = self.settings.share_uses
        return least <= 1 or self._guard is None or self._guard.uses(key) >= least

    def _line_up(self, key: bytes, awaited: Awaited, urgent: bool) -> None:
        self._urgency += 1
        heapq.heappush(self._lines[awaited.tier], (0 if urgent else 1, self._urgency, key))

    # --- leaving the host -----------------------------------------------------------------------

    def _reserve(self, key: bytes) -> bool:
        """Room for one block more, taken from those that can go at once if need be."""
        stride = self.settings.stride
        if not self._free:
            for victim in self.host.victims(stride):
                self._settle(victim)
            if not self._free:
                self._hurry()
        return bool(self._free) and self.host.reserve(key, stride)

    def _hurry(self) -> None:
        """Somebody waits for room: of what leaves, those go that some tier below has, even if it should be in
        another one too. What is being stored stays until that is over."""
        for tier in self._tiers:
            for key in list(self._saves[tier]):
                if self.host.state(key) != State.LEAVING or self._held[key].saves:
                    continue
                if key in self._shared or (self.local is not None and self.local.has(key)):
                    self._go(key)
                    if self._free:
                        return

    def _trim(self) -> None:
        for victim in self.host.victims():
            self._settle(victim)

    def _settle(self, key: bytes) -> None:
        """A block that leaves: it goes now, or is stored below first."""
        held = self._held[key]
        if held.saves:
            return
        tier = self._below(key, held)
        if tier is None:
            self._go(key)
        else:
            self._saves[tier].setdefault(key)
            self._saves[tier].move_to_end(
                key, last=False
            )  # room is wanted: before those that are only shared

    def _below(self, key: bytes, held: Held) -> Tier | None:
        """Where it must be stored before it goes; None: nowhere. See _hurry for when there is no time."""
        local = self.local
        if local is None and key in self._shared:  # as most blocks are, and most managers
            return None
        kept = local is not None and local.has(key)
        if local is not None and not held.onward and not kept and Tier.LOCAL not in held.given_up:
            return Tier.LOCAL
        if Tier.SPACE not in self._saves or Tier.SPACE in held.given_up or key in self._shared:
            return None
        settings = self.settings
        if held.onward:
            return Tier.SPACE
        if settings.share is Share.NEVER or (kept and settings.share is Share.DEMOTE):
            return None
        return Tier.SPACE if self._used_enough(key) else None

    def _go(self, key: bytes) -> None:
        held = self._held.pop(key)
        for line in self._saves.values():
            if line:
                line.pop(key, None)
        self.host.gone(key)
        self._free.append(held.slot)
        if self._climbing:
            self._end_climb(key)
        if key not in self._shared and self.where(key) is None:
            self.counts.dropped += 1

    def adopt(self, key: bytes, nbytes: int) -> bool:
        """The local store has this block from an earlier life. False: there is no room for it, so it is
        removed."""
        local = self.local
        assert local is not None
        if local.state(key) is not None:
            return True
        if not local.reserve(key, allocated(nbytes)):
            self._removals.append(key)
            return False
        local.filled(key)
        return True

    # --- stores ---------------------------------------------------------------------------------

    def saves(self, tier: Tier, most: int, now: float) -> list[Job]:
        """The next stores to that tier. Few while anybody waits for a load: those have priority."""
        settings = self.settings
        line, jobs = self._saves[tier], list[Job]()
        if not line:
            return jobs
        if not self.breakers[tier].closed(now):
            self._give_up(tier, list(line))
            return jobs
        limit = settings.stores_beside_loads if self._awaited else settings.stores_in_flight
        most = min(most, limit - self._storing[tier])
        waiting = []
        while line and len(jobs) < most:
            key, _ = line.popitem(last=False)
            held = self._held.get(key)
            if held is None or not self.host.has(key) or tier in held.saves:
                continue
            if tier is Tier.LOCAL:
                assert self.local is not None
                if self.local.state(key) is not None:
                    continue  # it is there by now
                if not self._room_in_local(key, held):
                    if not self._free and self.host.state(key) == State.LEAVING:
                        # Those that make room there may need a slot here to do so: it goes past them.
                        held.given_up |= {tier}
                        self._settle(key)
                        continue
                    waiting.append(key)
                    break
            held.saves |= {tier}
            jobs.append(Job(key, tier, held.slot, held.nbytes, load=False))
        for key in waiting:
            line[key] = None
            line.move_to_end(key, last=False)
        self._storing[tier] += len(jobs)
        return jobs

    def _room_in_local(self, key: bytes, held: Held) -> bool:
        """False: wait until others have left."""
        local = self.local
        assert local is not None
        nbytes = allocated(held.nbytes)
        for victim in local.victims(nbytes):
            self._leave_local(victim)
        return local.reserve(key, nbytes)

    def _leave_local(self, key: bytes) -> None:
        assert self.local is not None
        climbs = (
            self.settings.share is not Share.NEVER
            and Tier.SPACE in self._saves
            and key not in self._shared
            and self.host.state(key) is None
            and key not in self._awaited
            and self._used_enough(key)
        )
        if climbs:  # up to the host, from there to the space; the removal waits for it
            awaited = self._awaited[key] = Awaited([], Tier.LOCAL, climbs=True)
            self._line_up(key, awaited, False)
            self._climbing.add(key)
            return
        self._remove_local(key)

    def _remove_local(self, key: bytes) -> None:
        assert self.local is not None
        self.local.gone(key)
        self._removals.append(key)

    def _end_climb(self, key: bytes) -> None:
        """It is in the space, or will never be: it leaves the local store, unless it was used meanwhile."""
        if key not in self._climbing:
            return
        self._climbing.discard(key)
        if self.local is not None and self.local.state(key) == State.LEAVING:
            self._remove_local(key)

    def save_ended(self, job: Job, well: bool, now: float) -> None:
        """What became of a store. What failed isn't listed, nor tried again while it stays in the host."""
        tier, key = job.tier, job.key
        self._storing[tier] -= 1
        counts = self.counts.of(tier)
        held = self._held[key]
        held.saves -= {tier}
        if well:
            self.breakers[tier].well()
            counts.stores += 1
            counts.store_bytes += job.nbytes
            if tier is Tier.SPACE:
                self.note_shared((key,))
            else:
                assert self.local is not None
                self.local.filled(key)
        else:
            self.breakers[tier].failed(now)
            counts.store_errors += 1
            held.given_up |= {tier}
            if tier is Tier.LOCAL and self.local is not None:
                self.local.failed(key)
                self._removals.append(key)  # whatever is left of it
        if tier is Tier.SPACE:
            held.onward = False
            self._end_climb(key)
        if self.host.state(key) == State.LEAVING:
            self._settle(key)

    def _give_up(self, tier: Tier, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._saves[tier].pop(key, None)
            held = self._held.get(key)
            if held is None:
                continue
            held.given_up |= {tier}
            if tier is Tier.SPACE:
                held.onward = False
                self._end_climb(key)
            if self.host.state(key) == State.LEAVING:
                self._settle(key)

    def removals_ended(self, left: Sequence[bytes], now: float) -> None:
        """Of a batch, `left` are to be removed still."""
        self._removals.extend(left)
        if left:
            self.breakers[Tier.LOCAL].failed(now)
        else:
            self.breakers[Tier.LOCAL].well()

    def removals(self, most: int, now: float) -> list[bytes]:
        """Blocks to be taken out of the local store; those that came back meanwhile aren't among them."""
        found: list[bytes] = []
        if not self._removals or not self.breakers[Tier.LOCAL].closed(now):
            return found
        while self._removals and len(found) < most:
            key = self._removals.popleft()
            if self.local is not None and self.local.state(key) is None:
                found.append(key)
                self.counts.local.removals += 1
        return found

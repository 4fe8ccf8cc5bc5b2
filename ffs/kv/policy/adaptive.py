"""The default: LRU, LRU-2 and S3-FIFO side by side, and whichever would have hit most of late decides.

No order wins everywhere (docs/kv_tiers.md, Policies): LRU-2 in tiers that are small for what is in use,
LRU in the middle. Each is also run as a miniature: the same tier scaled down, over a sample of the keys,
with keys alone. Hits of the miniatures, by bytes and with old ones fading, say who leads. All orders know all
blocks that are really there, so a change of leader needs no warm-up. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ffs.kv.policy.lru import Lru
from ffs.kv.policy.lru_k import LruK
from ffs.kv.policy.order import Order
from ffs.kv.policy.s3_fifo import S3Fifo

_SHADOW_BLOCKS: Final = 1024
_FADE: Final = 0.5  # of the hits so far, each time the miniatures' tier was read through once
_LEAD: Final = 1.02  # hits more than the leader's, to become the leader


@dataclass(slots=True)
class _Candidate:
    name: str
    order: Order
    """Over the blocks that are there."""
    shadow: Order | None = None
    hits: float = 0.0


@dataclass(slots=True)
class _Miniature:
    """The scaled tier of all candidates: one key in `modulus`."""

    modulus: int
    capacity_bytes: int
    seen_bytes: int = 0
    candidates: list[_Candidate] = field(default_factory=list)


class Adaptive:
    """See order.py. The sample is taken by the keys' first bytes: keys are hashes."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._candidates = [
            _Candidate("lru-2", LruK(capacity_bytes)),
            _Candidate("lru", Lru()),
            _Candidate("s3-fifo", S3Fifo(capacity_bytes)),
        ]
        self._orders: list[Order] = [candidate.order for candidate in self._candidates]
        self._leader = self._candidates[0]
        self._miniature: _Miniature | None = None
        self.changes = 0
        """Of the leader, so far."""

    @property
    def total_bytes(self) -> int:
        return self._leader.order.total_bytes

    @property
    def leader(self) -> str:
        """The name of the order that decides now."""
        return self._leader.name

    def __contains__(self, key: bytes) -> bool:
        return key in self._leader.order

    def __len__(self) -> int:
        return len(self._leader.order)

    def insert(self, key: bytes, nbytes: int, held: bool = False) -> None:
        for order in self._orders:
            order.insert(key, nbytes, held)
        self._learn(key, nbytes)

    def touch(self, key: bytes) -> None:
        for order in self._orders:
            order.touch(key)
        self._learn(key, 0)

    def hold(self, key: bytes) -> None:
        for order in self._orders:
            order.hold(key)

    def free(self, key: bytes) -> None:
        for order in self._orders:
            order.free(key)

    def peek(self) -> bytes | None:
        return self._leader.order.peek()

    def evict(self, key: bytes) -> None:
        for order in self._orders:
            order.evict(key)

    def remove(self, key: bytes) -> None:
        for order in self._orders:
            order.remove(key)

    # --- the miniatures -------------------------------------------------------------------------

    def _start(self, nbytes: int) -> _Miniature:
        """At the first block, whose size says about how many the tier will hold."""
        modulus = max(1, self._capacity // (max(1, nbytes) * _SHADOW_BLOCKS))
        capacity = self._capacity // modulus
        shadows: tuple[Order, ...] = (LruK(capacity), Lru(), S3Fifo(capacity))
        for candidate, shadow in zip(self._candidates, shadows, strict=True):
            candidate.shadow = shadow
        return _Miniature(modulus, capacity, candidates=self._candidates)

    def _learn(self, key: bytes, nbytes: int) -> None:
        mini = self._miniature
        if mini is None:
            mini = self._miniature = self._start(nbytes)
        if mini.modulus > 1 and int.from_bytes(key[:8], "little") % mini.modulus:
            return
        size = nbytes or mini.capacity_bytes // _SHADOW_BLOCKS or 1
        for candidate in mini.candidates:
            shadow = candidate.shadow
            assert shadow is not None
            if key in shadow:
                candidate.hits += size
                shadow.touch(key)
                continue
            if size > mini.capacity_bytes:
                continue
            shadow.insert(key, size)
            while shadow.total_bytes > mini.capacity_bytes:
                victim = shadow.peek()
                assert victim is not None
                shadow.evict(victim)
        mini.seen_bytes += size
        if mini.seen_bytes >= mini.capacity_bytes:
            self._judge(mini)

    def _judge(self, mini: _Miniature) -> None:
        best = max(mini.candidates, key=lambda candidate: candidate.hits)
        if best.hits > self._leader.hits * _LEAD:
            self._leader = best
            self.changes += 1
        mini.seen_bytes = 0
        for candidate in mini.candidates:
            candidate.hits *= _FADE

"""A storage node with one target: its process (crashes, pauses), its clock, its disk, its lease."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sim_library import Sim
from sim_plan import Plan


class Node:
    """`target` is also its node id. The world lets it act; here is what it is."""

    def __init__(self, index: int, target: int, plan: Plan, base_ms: int, rate: float) -> None:
        self.index = index
        self.target = target
        self._base_ms = base_ms
        self._rate = rate
        self.world_ms = 0
        self._stale: int | None = None
        self.sim = Sim(
            target, mutant=plan.mutant, per_chunk=plan.per_chunk, peer_lease_ms=plan.timeout_ms // 5,
            suspect_ms=plan.timeout_ms, sync_window=plan.window, now=base_ms,
        )  # fmt: skip
        self.up = True
        self.starts = 1  # counts processes
        self.incarnation = 0  # as the manager gave it; 0: not registered yet
        self.never_back = False
        self.paused = False
        self.queue: deque[tuple[int, Callable[..., None], tuple[object, ...]]] = deque()
        self.disk_busy = False
        self.disk_factor = 1
        self.damaged: set[bytes] = set()  # keys, as far as the world knows
        # what the process remembers of the manager
        self.term = 0
        self.config = (0, 0)  # the number of the one that it acts on
        self.news = False  # a heartbeat is about to go
        self.replicas = 1  # counts machines: a target that is released gets a new one

    def clock(self) -> int:
        """Its own CLOCK_BOOTTIME, in ms. A process that was stopped between reading it and using it has an
        old one for one event."""
        if self._stale is not None:
            return self._stale
        return self._base_ms + int(self.world_ms * self._rate)

    @property
    def clock_is_old(self) -> bool:
        return self._stale is not None

    def set_old_clock(self, at_ms: int | None) -> None:
        self._stale = at_ms

    def forget(self) -> None:
        """The process ends."""
        self.up = False
        self.paused = False
        self.queue.clear()
        self.disk_busy = False
        self.incarnation = 0
        self.term = 0
        self.config = (0, 0)
        self.news = False
        self._stale = None

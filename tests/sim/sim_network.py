"""Messages between nodes, managers and clients: lost, repeated, late, out of order, cut off.

Endpoints are numbers: targets for nodes, negative ones for managers, 0 for all clients.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from sim_plan import Plan

CLIENTS = 0


class Clock(Protocol):
    now: int

    def at(self, delay: int, f: Callable[..., None], *args: object) -> None: ...


class Network:
    def __init__(self, clock: Clock, rng: random.Random, plan: Plan) -> None:
        self._clock = clock
        self._rng = rng
        self._plan = plan
        self._fifo_until: dict[tuple[int, int], int] = {}
        self._cut: dict[tuple[int, int], int] = {}  # one way, until when
        self.faults = True

    def cut(self, source: int, to: int, until: int) -> None:
        """Nothing sent from `source` to `to` arrives until then."""
        self._cut[source, to] = max(until, self._cut.get((source, to), 0))

    def heal(self) -> None:
        self.faults = False
        self._cut.clear()

    def passes(self, source: int, to: int) -> bool:
        return self._cut.get((source, to), 0) <= self._clock.now

    def send(self, source: int, to: int, f: Callable[..., None], *args: object) -> None:
        """f(*args) happens at the receiver's, zero or more times."""
        plan, rng = self._plan, self._rng
        if not self.faults:
            self._clock.at(self._delay(source, to), f, *args)
            return
        if not self.passes(source, to) or rng.random() < plan.loss:
            return
        for _ in range(2 if rng.random() < plan.repeat else 1):
            self._clock.at(self._delay(source, to), f, *args)

    def once(self, source: int, to: int, f: Callable[..., None], *args: object) -> None:
        """As send, but never twice: requests and replies of one connection."""
        if self.faults and (not self.passes(source, to) or self._rng.random() < self._plan.loss):
            return
        self._clock.at(self._delay(source, to), f, *args)

    def _delay(self, source: int, to: int) -> int:
        plan, rng = self._plan, self._rng
        delay = 1 + int(rng.random() * plan.delay_ms)
        if self.faults and plan.late and rng.random() < plan.late:
            delay += rng.randint(100, 1500)
        if plan.fifo:
            arrival = max(self._clock.now + delay, self._fifo_until.get((source, to), 0))
            self._fifo_until[source, to] = arrival
            delay = arrival - self._clock.now
        return delay

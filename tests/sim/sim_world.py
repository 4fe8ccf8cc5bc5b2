"""A chain in a box: real replicas over model stores, the cluster manager's own decisions, clients that
retry, and faults of every kind. All from one seed.

`run(seed)` plays a safety phase with faults and then a healed phase without, and checks sim_checks.History
at every step. Times are in ms of simulated time. The world is: sim_network, sim_node, sim_manager,
sim_clients, sim_faults; this file makes a replica take an event and carries its effects out.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Protocol

import sim_chain
import sim_wire as wire
from sim_checks import History
from sim_clients import Clients
from sim_faults import Faults
from sim_manager import Managers
from sim_model import Violation
from sim_network import Network
from sim_node import Node
from sim_plan import Plan
from sim_wire import Answer, Outcome, Reply

FIRST_TARGET = 11
UPDATE, SYNC = 0, 255  # types of messages
HEALED_MS = 30_000  # simulated time within which everything must be well again


class Trace(Protocol):
    def __call__(self, text: str, /) -> object: ...


class World:
    def __init__(self, seed: int, plan: Plan | None = None, trace: Trace | None = None) -> None:
        self.rng = random.Random(seed)
        self.plan = plan if plan is not None else Plan.draw(self.rng)
        self.trace = trace
        self.now = 0
        self.steps = 0
        self.order = 0
        self.events: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self.history = History()
        self.network = Network(self, self.rng, self.plan)
        count = self.plan.members + self.plan.spares
        self.nodes = [self._new_node(i) for i in range(count)]
        self.by_target = {n.target: n for n in self.nodes}
        self.clients = Clients(self)
        self.faults = Faults(self)
        self.managers = Managers(self)
        self.excused = False  # it ended with what nobody can repair

    def _new_node(self, index: int) -> Node:
        rate = 1 + self.rng.uniform(-1, 1) * self.plan.drift
        return Node(index, FIRST_TARGET + index, self.plan, self.rng.randint(0, 100_000), rate)

    # ---- time -------------------------------------------------------------------------------

    def at(self, delay: int, f: Callable[..., None], *args: object) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + delay, self.order, f, args))

    def advance(self, until: int) -> None:
        events = self.events
        while events and events[0][0] <= until:
            self.now, _, f, args = heapq.heappop(events)
            f(*args)
        self.now = until

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:6} {text}")

    def name(self, target: int) -> str:
        return f"[{target - FIRST_TARGET}]"

    # ---- a process takes an event ---------------------------------------------------------------

    def arrive(self, node: Node, f: Callable[..., None], *args: object) -> None:
        """f(node, *args), now, or when a stopped process goes on; never in another process."""
        if not node.up:
            return
        if node.paused:
            node.queue.append((node.starts, f, args))
            return
        node.world_ms = self.now
        f(node, *args)

    def arrive_in(self, node: Node, starts: int, f: Callable[..., None], *args: object) -> None:
        if node.starts == starts:
            self.arrive(node, f, *args)

    def resume(self, node: Node, starts: int) -> None:
        if node.starts != starts or not node.paused:
            return
        self.say(f"{self.name(node.target)} goes on")
        node.paused = False
        while node.queue and not node.paused:
            starts, f, args = node.queue.popleft()
            node.world_ms = self.now
            f(node, *args)
            node.set_old_clock(None)
        node.set_old_clock(None)

    def step(self, node: Node, event: bytes) -> None:
        """The replica takes an event, its effects are carried out."""
        self.steps += 1
        self.carry_out(node, node.sim.step(event))

    def carry_out(self, node: Node, answers: list[tuple[int, object]]) -> None:
        history, shadow = self.history, self.history.shadow(node.target)
        began_to_serve = False
        for kind, body in answers:
            if kind == Answer.SEND:
                self._send(node, *body)  # type: ignore[misc]
            elif kind == Answer.RECORD:
                if self.trace is not None:
                    self.say(f"{self.name(node.target)} {body}")
                history.appended(shadow, body)  # type: ignore[arg-type]
                self._write(node)
            elif kind == Answer.REPLY:
                assert isinstance(body, Reply)
                self._answered(node, body)
            elif kind == Answer.STARTED:
                self._started(node, *body)  # type: ignore[misc]
            elif kind == Answer.STATE:
                serving, reason, chain = body  # type: ignore[misc]
                if self.trace is not None:
                    why = "serves" if serving else wire.Reason(reason).name.lower()
                    self.say(f"{self.name(node.target)} {why} in {wire.dotted(chain)}")
                began_to_serve |= serving and not shadow.serving
                sim_chain.state(history, shadow, serving, chain)
                self.faults.may_fail(node, reason)
                self.managers.news(node)
            elif kind == Answer.PROPOSAL:
                self.managers.news(node)
            elif kind == Answer.REPAIRED:
                key, version, ok = body  # type: ignore[misc]
                self.say(f"{self.name(node.target)} repaired {wire.short(key)} {wire.dotted(version)}: {ok}")
                self.faults.repaired(ok)
            elif kind == Answer.FAULT:
                raise Violation(f"target {node.target} breaks its contract: {body}")
        if began_to_serve:
            self.managers.check_promotion(node, "begins to serve")

    def _answered(self, node: Node, reply: Reply) -> None:
        shadow = self.history.shadow(node.target)
        reads = self.clients.is_read(reply.token)
        if reads and reply.outcome in (Outcome.OK, Outcome.ABSENT) and not node.clock_is_old:
            sim_chain.may_answer(self.history, shadow)
        self.clients.replied(node, shadow, reply)

    # ---- messages -------------------------------------------------------------------------------

    def _send(self, node: Node, to: int, body: bytes, type_: int) -> None:
        if self.trace is not None:
            self.say(f"{self.name(node.target)} sends {self._what(type_)} to {self.name(to)}")
        if to in self.by_target:
            self.network.send(node.target, to, self.arrive, self.by_target[to], self._deliver, body, type_)

    def _deliver(self, node: Node, body: bytes, type_: int) -> None:
        state = wire.PayloadState.READY
        if type_ in (UPDATE, SYNC) and self.network.faults:
            if type_ == UPDATE and self.rng.random() < self.plan.later:
                state = wire.PayloadState.LATER
            elif self.rng.random() < self.plan.bad:
                state = wire.PayloadState.BAD
        if self.trace is not None:
            self.say(f"{self.name(node.target)} gets {self._what(type_)} payload={state.name}")
        self.step(node, wire.message(node.clock(), body, state))

    def _what(self, type_: int) -> str:
        return {UPDATE: "update", SYNC: "sync"}.get(type_) or wire.Notice(type_).name.lower()

    # ---- the disk -------------------------------------------------------------------------------

    def _write(self, node: Node) -> None:
        if not node.disk_busy:
            node.disk_busy = True
            self.at(self._disk_delay(node), self.arrive_in, node, node.starts, self._flushed)

    def _disk_delay(self, node: Node) -> int:
        return 1 + int(self.rng.random() * self.plan.disk_ms * node.disk_factor)

    def _flushed(self, node: Node) -> None:
        node.disk_busy = False
        shadow = self.history.shadow(node.target)
        count = len(shadow.tail)
        if count > 1 and self.rng.random() < 0.5:
            count = self.rng.randint(1, count)
        self.history.durable(shadow, count)
        self.step(node, wire.disk(node.clock(), count))
        if shadow.tail:
            self._write(node)

    def _started(self, node: Node, kind: int, op: int) -> None:
        outcome = Outcome.OK
        if kind == 1 and self.network.faults and self.rng.random() < self.plan.bad:
            outcome = Outcome.BAD_CHECKSUM
        more = (node.replicas, op, outcome)
        self.at(self._disk_delay(node), self.arrive_in, node, node.starts, self._ended, *more)

    def _ended(self, node: Node, replicas: int, op: int, outcome: Outcome) -> None:
        if node.replicas != replicas:
            return
        self.step(node, wire.done(node.clock(), op, outcome))

    def ticking(self, node: Node) -> None:
        self.arrive(node, lambda n: self.step(n, wire.tick(n.clock())))
        self.at(50, self.ticking, node)

    # ---- the two phases -----------------------------------------------------------------------

    def begin(self) -> None:
        for node in self.nodes:
            self.at(self.rng.randint(0, 50), self.ticking, node)
        self.managers.begin()
        self.clients.begin()
        self.faults.begin()

    def play(self) -> None:
        self.begin()
        self.advance(self.plan.safety_ms)
        self.heal()
        if not self.excused:
            self.agree()

    def heal(self) -> None:
        """Faults stop; what is under way must end, and every healthy target must serve."""
        self.say("faults stop")
        self.faults.stop()
        deadline = self.now + HEALED_MS
        self.managers.force_lead()
        while self.now < deadline:
            self.advance(self.now + 250)
            if not self.clients.open and self.restless() is None:
                return
        if self.faults.beyond_repair():
            self.excused = True
            return
        stuck = [str(a) for a in self.clients.open if not a.finished]
        raise Violation(f"I12: {self.restless()} after {HEALED_MS} ms; open: {stuck}; {self.managers.what()}")

    def restless(self) -> str | None:
        """What isn't as it should be in the end."""
        goal = self.managers.goal()
        if isinstance(goal, str):
            return goal
        for target in goal:
            node = self.by_target[target]
            s = node.sim.status()
            if not s.serving or s.pendings or s.waiting or s.undurable:
                return f"target {target} isn't quiet: {s}"
        return None

    def agree(self) -> None:
        """At the end all serving members have the same, which is what the history says."""
        goal = self.managers.goal()
        assert not isinstance(goal, str), goal
        for target in goal:
            d = self.by_target[target].sim.dump()
            if d.status.buffers:
                raise Violation(f"target {target} leaks {d.status.buffers} buffers")
            for key, c in self.history.chunks.items():
                there = d.store.chunks.get(key)
                if there is not None and there.pendings:
                    raise Violation(f"target {target} keeps pendings of {key.hex()}")
                state = (there.exists, there.content) if there is not None else (False, b"")
                if state != c.states[-1]:
                    raise Violation(f"I2: target {target} ends with {state}, history is {c.states[-1]}")


def run(seed: int, *, mutant: int = 0, plan: Plan | None = None, trace: Trace | None = None) -> World:
    """One seed. Raises Violation with the command that replays it."""
    if plan is None and mutant:
        plan = Plan.draw(random.Random(seed))
        plan.mutant = mutant
    world = World(seed, plan, trace)
    try:
        world.play()
    except Violation as v:
        note = f"seed {seed}: {v}\nreplay: .venv/bin/python tests/sim/sim_replay.py {seed} --mutant {mutant}"
        raise Violation(note) from v
    return world

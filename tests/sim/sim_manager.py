"""The cluster manager: two processes over a store, with the real decisions (metadata.cluster.chain), the real
judgement of silence (metadata.cluster.presence) and of the primary's lease (metadata.cluster.lease.Watch).

What is modelled here is what lies between: transactions that take time and whose outcome may not be heard,
heartbeats and their answers, configurations that are handed out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import sim_chain
import sim_wire as wire
from msgspec.structs import replace
from sim_model import Config
from sim_node import Node
from sim_wire import Chain, Member

from ffs.proto.cluster import ChainRecord, TargetReport, TargetState
from metadata.cluster.chain import (
    Action,
    Decision,
    Proposal,
    Seat,
    decide,
    people_of,
    recorded_by,
    version_of,
)
from metadata.cluster.lease import Watch
from metadata.cluster.members import goal_of, incarnation_in, serving_of, syncing_of
from metadata.cluster.presence import Presences
from metadata.cluster.schema import LeaseRecord

if TYPE_CHECKING:
    from sim_world import World

CHAIN = 7
MEMBER_STATES = {
    TargetState.SERVING: Member.SERVING,
    TargetState.SYNCING: Member.SYNCING,
    TargetState.OFFLINE: Member.OFFLINE,
}


class Store:
    """The metadata store, as far as the manager of one chain needs it."""

    def __init__(self, record: ChainRecord, duration_ms: int) -> None:
        self.record = record
        self.incarnations: dict[int, int] = {}
        self.lease = LeaseRecord(
            term=0, beat=0, holder=b"", address="", duration_ms=duration_ms, machine="", pid=0, started=0
        )


def members_of(record: ChainRecord) -> tuple[tuple[int, int, int], ...]:
    """As a CONFIGURE event has them."""
    return tuple(
        (target, MEMBER_STATES[TargetState(state)], incarnation)
        for target, state, incarnation in zip(record.members, record.states, record.incarnations, strict=True)
    )


def describe(record: ChainRecord) -> str:
    """For traces: [0]s1 is target 11, serving under incarnation 1."""
    letters = {Member.SERVING: "s", Member.SYNCING: "y", Member.OFFLINE: "-"}
    return " ".join(f"[{t - 11}]{letters[Member(s)]}{i}" for t, s, i in members_of(record))


class Configuration(NamedTuple):
    """What a node is told of its target's chain."""

    number: tuple[int, int]  # term, number in it; a lower one that comes late changes nothing
    routes: tuple[tuple[bool, ChainRecord], ...]  # (proposed, record)
    released: bool  # it is in no chain any more


class Manager:
    """One process. `endpoint` is its number in the network, below 0."""

    def __init__(self, group: Managers, endpoint: int) -> None:
        self.group = group
        self.world = group.world
        self.endpoint = endpoint
        self.up = True
        self.paused_until = 0
        self.cut_until = 0  # from the store
        self.rate = 1 + self.world.rng.uniform(-1, 1) * self.world.plan.drift
        self.generation = 0
        self.reset()

    def reset(self) -> None:
        self.generation += 1
        self.term = 0
        self.leads_until_s = 0.0
        self.watch = Watch()
        self.stand_down()

    def stand_down(self) -> None:
        self.term = 0
        self.presences = Presences(self.world.plan.timeout_ms / 1000)
        self.reports: dict[int, tuple[int, TargetReport]] = {}
        self.proposal: Proposal | None = None  # the last one, live or not: no version is used twice
        self.live: Proposal | None = None
        self.told: object = None  # what nodes are told follows from it
        self.number = 0  # of configurations, in this term
        self.proposed_s = 0.0
        self.withhold: tuple[int, ...] = ()
        self.changed_s = 0.0
        self.record = self.group.store.record  # as it knows it
        self.incarnations: dict[int, int] = {}
        self.in_flight = False

    def clock_s(self) -> float:
        return self.world.now * self.rate / 1000

    def say(self, text: str) -> None:
        self.world.say(f"manager {-self.endpoint} (term {self.term}) {text}")

    # ---- the lease of the primary -----------------------------------------------------------------

    def turn(self) -> None:
        """Every eighth of the failure timeout."""
        world = self.world
        if self.up and world.now >= self.paused_until:
            if world.now >= self.cut_until:
                self._lease()
                if self.term:
                    self._see()
            if self.term:
                self.presences.tick(self.clock_s())
                self.decide()
        world.at(world.plan.timeout_ms // 8, self.turn)

    def _lease(self) -> None:
        store, now_s = self.group.store, self.clock_s()
        found = store.lease
        if self.term:
            if found.term != self.term:
                self.say("learns that it was deposed")
                self.stand_down()
                self.watch = Watch()
                return
            store.lease = replace(found, beat=found.beat + 1)
        elif self.watch.observe(found, now_s):
            store.lease = replace(found, term=found.term + 1, beat=1, holder=bytes([-self.endpoint]))
            self.stand_down()
            self.term = store.lease.term
            self.presences.begin(now_s)
            self.changed_s = now_s
            self.say("takes over")
        else:
            return
        self.leads_until_s = now_s + found.duration_ms / 1000 * 15 / 16

    def may_grant(self) -> bool:
        return self.clock_s() < self.leads_until_s

    def _see(self) -> None:
        store = self.group.store
        if store.record != self.record:
            self.record = store.record
            self.changed_s = self.clock_s()
        self.incarnations = dict(store.incarnations)

    # ---- decisions ----------------------------------------------------------------------------------

    def decide(self) -> None:
        if self.in_flight:
            return
        now_s, timeout_s = self.clock_s(), self.world.plan.timeout_ms / 1000
        d = decide(
            self.record,
            {t: self._seat(t, now_s) for t in people_of(self.record)},
            self.proposal,
            self.term,
            quiet=now_s - self.changed_s > timeout_s / 2,
            overdue=self.live is not None and now_s - self.proposed_s > timeout_s,
            # The third that follows one record.
            unsettled=self.live is not None and self.live.next.counter >= self.record.counter + 3,
        )
        self.withhold = d.withhold
        self.live = d.proposal
        if d.action is Action.PROPOSE:
            self.proposal = d.proposal
            self.proposed_s = self.changed_s = now_s
            self._tell(d, "proposes")
            self.group.push(self)
        elif d.action is Action.RECORD:
            assert d.proposal is not None
            self._tell(d, "records")
            self._commit(d.proposal)

    def _tell(self, d: Decision, what: str) -> None:
        assert d.proposal is not None
        if self.world.trace is not None:
            p = d.proposal.next
            self.say(f"{what} {wire.dotted(version_of(p))} {describe(p)}: {d.reason}")

    def _seat(self, target: int, now_s: float) -> Seat:
        incarnation = self.incarnations.get(target, 0)
        at, report = self.reports.get(target, (0, None))
        return Seat(
            incarnation=incarnation,
            here=self.presences.here(target, incarnation, now_s),
            lapsed=self.presences.lapsed(target, now_s),
            report=report if at == incarnation else None,
        )

    def _commit(self, proposal: Proposal) -> None:
        """One transaction: reads the lease, the record, the members' incarnations; writes the record."""
        world = self.world
        self.in_flight = True
        world.at(world.rng.randint(1, 20), self._apply, proposal, self.term, self.generation)

    def _apply(self, proposal: Proposal, term: int, generation: int) -> None:
        """At the store."""
        world, store = self.world, self.group.store
        lost = world.network.faults and world.rng.random() < world.plan.lost_commits
        if world.now < self.cut_until or (lost and world.rng.random() < 0.5):
            world.at(300, self._heard, term, generation)  # it never got there
            return
        same = all(
            incarnation_in(proposal.next, t) in (0, store.incarnations.get(t, 0))
            for t in proposal.next.members
        )
        if store.lease.term == term and version_of(store.record) == proposal.base and same:
            self.group.record(recorded_by(store.record, proposal))
        world.at(300 if lost else world.rng.randint(1, 20), self._heard, term, generation)

    def _heard(self, term: int, generation: int) -> None:
        """The transaction's outcome is known, or will never be: the store says what is recorded."""
        if generation != self.generation or term != self.term or not self.up:
            return
        self.in_flight = False
        if self.world.now >= max(self.cut_until, self.paused_until):
            self._see()
            self.group.push(self)
            self.decide()

    # ---- nodes ------------------------------------------------------------------------------------------

    def arrive(self, f: Callable[..., None], *args: object) -> None:
        world = self.world
        if not self.up:
            return
        if world.now < self.paused_until:
            world.at(self.paused_until - world.now, self.arrive, f, *args)
            return
        if self.term:
            f(*args)

    def register(self, node: Node, starts: int) -> None:
        store, world = self.group.store, self.world
        if world.now < self.cut_until or store.lease.term != self.term:
            return
        incarnation = store.incarnations.get(node.target, 0) + 1
        store.incarnations[node.target] = self.incarnations[node.target] = incarnation
        self.presences.registered(node.target, incarnation, self.clock_s())
        self.say(f"registers {world.name(node.target)} as {incarnation}")
        world.network.once(
            self.endpoint, node.target, world.arrive_in, node, starts, self.group.registered, incarnation
        )

    def heartbeat(self, node: Node, starts: int, incarnation: int, asked: int, report: TargetReport) -> None:
        known = self.incarnations.get(node.target, 0)
        if known != incarnation:
            if known > incarnation:
                self.world.network.once(
                    self.endpoint, node.target, self.world.arrive_in, node, starts, self.group.superseded
                )
            return
        now_s = self.clock_s()
        self.presences.heard(node.target, incarnation, now_s)
        news = self.reports.get(node.target) != (incarnation, report)
        self.reports[node.target] = (incarnation, report)
        lease_ms = 0
        if self.may_grant() and node.target not in self.withhold:
            lease_ms = self.world.plan.timeout_ms
            self.presences.answered(node.target, now_s)
        if news:
            self.decide()
        answer = (self.term, lease_ms, asked, self.config_of(node.target))
        world = self.world
        world.network.once(
            self.endpoint, node.target, world.arrive_in, node, starts, self.group.configured, *answer
        )

    def config_of(self, target: int) -> Configuration:
        """For a target's node."""
        if self.told != (self.record, self.live, self.incarnations):
            self.told = (self.record, self.live, dict(self.incarnations))
            self.number += 1
        routes: list[tuple[bool, ChainRecord]] = []
        now = self.incarnations.get(target, 0)
        known = target in self.record.members or target in goal_of(self.record)
        if self.record.counter and known and incarnation_in(self.record, target) in (0, now):
            routes.append((False, self.record))
        p = self.live
        if p is not None and p.version > version_of(self.record):
            # One that lost its memory isn't told that it is left out: having made that durable, it would
            # look like one that has what was recorded, though its device may have been wiped.
            stands_down = target in serving_of(self.record) and incarnation_in(self.record, target) == now
            if stands_down or incarnation_in(p.next, target) == now:
                routes.append((True, p.next))
        released = self.record.counter > 0 and not known
        return Configuration((self.term, self.number), tuple(routes), released)


class Managers:
    def __init__(self, world: World) -> None:
        self.world = world
        plan = world.plan
        members = tuple(n.target for n in world.nodes[: plan.members])
        record = ChainRecord(
            id=CHAIN, table=1, term=1, counter=0, members=members,
            states=(int(TargetState.OFFLINE),) * len(members), incarnations=(0,) * len(members),
        )  # fmt: skip
        self.store = Store(record, plan.timeout_ms * 6 // 10)
        self.promotions: dict[Chain, tuple[int, int]] = {}  # target, source
        self.processes = [Manager(self, -1 - i) for i in range(plan.managers)]
        self.changes = 0
        self.active = True

    def endpoints(self) -> list[int]:
        return [m.endpoint for m in self.processes]

    def begin(self) -> None:
        world, plan = self.world, self.world.plan
        for m in self.processes:
            world.at(world.rng.randint(0, 50), m.turn)
        for node in world.nodes:
            self.started(node)
        if plan.manager_every_ms:
            world.at(500 + world.rng.randint(0, plan.manager_every_ms), self._failing)
        if plan.moves_every_ms:
            world.at(500 + world.rng.randint(0, plan.moves_every_ms), self._moving)

    def heal(self) -> None:
        self.active = False
        for m in self.processes:
            m.up = True
            m.paused_until = min(m.paused_until, self.world.now)
            m.cut_until = 0

    # ---- the store ------------------------------------------------------------------------------------

    def record(self, after: ChainRecord) -> None:
        """A transaction has made it the recorded version."""
        world, before = self.world, self.store.record
        self.store.record = after
        self.changes += 1
        version = version_of(after)
        world.say(f"recorded: {wire.dotted(version)} {describe(after)}")
        sim_chain.recorded(world.history, version, Config(serving_of(after), syncing_of(after)))
        if before.counter == 0:
            return
        old = serving_of(before)
        if before.forced:
            lead = world.by_target[before.forced]
            world.history.led_by(world.history.shadow(lead.target), lead.sim.dump().store.epochs)
            world.clients.know_less()
            old = (lead.target,)
        for target in serving_of(after):
            if target not in old:
                shadow = world.history.shadow(target)
                if incarnation_in(after, target) <= shadow.lost_in:
                    continue  # wiped after it had persisted that; it will be found empty when it registers
                self.promotions[version] = (target, old[-1])
                self._compare(version, "is recorded as serving")
                shadow.lost = False

    def check_promotion(self, node: Node, what: str) -> None:
        version = self.world.history.shadow(node.target).adopted
        if version != self.world.history.current:
            return  # stopped meanwhile; leases keep it from answering
        if self.promotions.get(version, (0, 0))[0] == node.target:
            self._compare(version, what)

    def _compare(self, version: Chain, what: str) -> None:
        world = self.world
        target, source = (world.by_target[t] for t in self.promotions[version])
        if world.history.shadow(source.target).lost:
            return
        here, there = target.sim.dump().store, source.sim.dump().store
        shadows = world.history.shadow(target.target), world.history.shadow(source.target)
        sim_chain.promoted(world.history, *shadows, here, there, what)

    # ---- nodes -----------------------------------------------------------------------------------------

    def started(self, node: Node) -> None:
        """A process begins: it registers, then sends heartbeats."""
        self.world.at(self.world.rng.randint(0, 30), self._register, node, node.starts)

    def _register(self, node: Node, starts: int) -> None:
        world = self.world
        if node.starts != starts or not node.up or node.incarnation:
            return
        if not node.paused:
            for m in self.processes:
                world.network.once(node.target, m.endpoint, m.arrive, m.register, node, starts)
        world.at(world.plan.timeout_ms // 2, self._register, node, starts)

    def registered(self, node: Node, incarnation: int) -> None:
        if node.incarnation == 0:
            node.incarnation = incarnation
            self._beating(node, node.starts)

    def superseded(self, node: Node) -> None:
        """It isn't the registered incarnation: it ends, and is started again."""
        self.world.faults.crash(node, 1000, self.world.rng.randint(1, 100))

    def _beating(self, node: Node, starts: int) -> None:
        if node.starts != starts or not node.up:
            return
        self.world.arrive(node, self._beat)
        self.world.at(self.world.plan.timeout_ms // 4, self._beating, node, starts)

    def _beat(self, node: Node) -> None:
        world = self.world
        if node.incarnation == 0:
            return
        report = self.report(node)
        for m in self.processes:
            world.network.once(
                node.target, m.endpoint, m.arrive, m.heartbeat, node, node.starts, node.incarnation,
                node.clock(), report,
            )  # fmt: skip

    def news(self, node: Node) -> None:
        """Something has changed at the target: a heartbeat at once."""
        if not node.news:
            node.news = True
            self.world.at(1, self.world.arrive_in, node, node.starts, self._tell_news)

    def _tell_news(self, node: Node) -> None:
        node.news = False
        self._beat(node)

    def report(self, node: Node) -> TargetReport:
        s = node.sim.status()
        persisted = max(s.proposed, s.adopted)
        state = TargetState.OFFLINE
        if s.serving:
            state = TargetState.SERVING
        elif s.state == Member.SYNCING:
            state = TargetState.SYNCING
        return TargetReport(
            target=node.target, chain=CHAIN, recorded_term=s.chain[0], recorded_counter=s.chain[1],
            persisted_term=persisted[0], persisted_counter=persisted[1], persisted_here=s.persisted_here,
            state=int(state), poisoned=False, used_bytes=0, capacity_bytes=0, free_bytes=0, chunks=0,
            reason=s.reason, leased=s.leased, suspect=s.suspect, sync_target=s.sync_target,
            sync_done=s.sync_done, sync_failure=s.sync_failure, damaged=s.damaged, repaired=s.repaired,
        )  # fmt: skip

    def push(self, manager: Manager) -> None:
        """Nodes wait for changes of their configuration."""
        world = self.world
        for node in world.nodes:
            if node.up and node.incarnation == manager.incarnations.get(node.target, 0):
                config = manager.config_of(node.target)
                world.network.once(
                    manager.endpoint, node.target, world.arrive_in, node, node.starts, self.configured,
                    manager.term, 0, 0, config,
                )  # fmt: skip

    def configured(self, node: Node, term: int, lease_ms: int, asked: int, config: Configuration) -> None:
        """The manager's answer. Those of an earlier term change nothing."""
        world = self.world
        if term < node.term:
            return
        node.term = term
        if lease_ms:
            until = asked + lease_ms * 15 // 16
            world.step(node, wire.lease(node.clock(), until))
        if config.number < node.config or (config.number == node.config and world.rng.random() < 0.9):
            return
        node.config = config.number
        if config.released and node.sim.status().adopted != (0, 0):
            world.faults.release(node)
        for proposed, record in config.routes:
            event = wire.configure(node.clock(), version_of(record), members_of(record), proposed=proposed)
            world.step(node, event)

    # ---- faults --------------------------------------------------------------------------------------------

    def _failing(self) -> None:
        world, rng = self.world, self.world.rng
        if not self.active:
            return
        primary = [m for m in self.processes if m.term and m.up]
        m = rng.choice(primary or self.processes)
        ms = rng.choice((rng.randint(10, 300), rng.randint(300, world.plan.timeout_ms * 3)))
        kind = rng.choice(("crash", "pause", "cut"))
        m.say(f"{kind} for {ms} ms")
        if kind == "crash" and m.up:
            m.reset()
            m.up = False
            world.at(ms, self._back, m)
        elif kind == "pause":
            m.paused_until = world.now + ms
        else:
            m.cut_until = world.now + ms
        world.at(int(rng.expovariate(1 / world.plan.manager_every_ms)) + 1, self._failing)

    def _back(self, m: Manager) -> None:
        m.up = True

    def _moving(self) -> None:
        """Somebody wants other members, or another order."""
        world, rng = self.world, self.world.rng
        if not self.active:
            return
        record = self.store.record
        goal = list(goal_of(record))
        others = [n.target for n in world.nodes if n.target not in goal and n.target not in record.members]
        choice = rng.random()
        if choice < 0.5 and others:
            goal[rng.randrange(len(goal))] = rng.choice(others)
        elif choice < 0.65 and others and len(goal) < 4:
            goal.insert(rng.randint(0, len(goal)), rng.choice(others))
        elif choice < 0.8 and len(goal) > 1:
            goal.pop(rng.randrange(len(goal)))
        else:
            rng.shuffle(goal)
        if not all(world.by_target[t].never_back for t in goal):
            world.say(f"wanted: {goal}")
            self.store.record = replace(record, wanted=tuple(goal))
        world.at(int(rng.expovariate(1 / world.plan.moves_every_ms)) + 1, self._moving)

    def want(self, indexes: tuple[int, ...]) -> None:
        """The members that the chain shall end with, in order."""
        targets = tuple(self.world.nodes[i].target for i in indexes)
        self.store.record = replace(self.store.record, wanted=targets)

    def force_lead(self) -> bool:
        """If all that serve in the recorded version have lost their data, an operator makes another member
        lead. False: there is none, or no need."""
        world, record = self.world, self.store.record
        shadows = [world.history.shadow(t) for t in serving_of(record)]
        if record.counter == 0 or not all(s.lost or world.by_target[s.target].never_back for s in shadows):
            return False
        others = [t for t in record.members if t not in serving_of(record)]
        usable = [
            t
            for t in others
            if not world.by_target[t].never_back and world.history.shadow(t).adopted != (0, 0)
        ]
        if not usable:
            return False
        world.say(f"force-lead: {usable[0]}")
        self.store.record = replace(record, forced=usable[0])
        return True

    # ---- the end -------------------------------------------------------------------------------------------

    def goal(self) -> tuple[int, ...] | str:
        """The serving members, all that can be; or what is missing."""
        record = self.store.record
        serving, wanted = serving_of(record), goal_of(record)
        for target in wanted:
            if not self.world.by_target[target].never_back and target not in serving:
                return f"target {target} doesn't serve"
        complete = not any(self.world.by_target[t].never_back for t in wanted)
        if complete and (serving != wanted or record.members != wanted):
            return f"members are {record.members}, wanted {wanted}"
        return serving

    def what(self) -> str:
        """For people."""
        parts = [f"recorded {self.store.record}", f"incarnations {self.store.incarnations}"]
        for m in self.processes:
            if m.term:
                reports = {t: (i, (r.reason, r.state)) for t, (i, r) in m.reports.items()}
                parts.append(f"manager {-m.endpoint} term {m.term} proposal {m.live} reports {reports}")
        return "; ".join(parts)

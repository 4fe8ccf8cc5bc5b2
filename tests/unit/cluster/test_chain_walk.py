"""Random walks of a chain, its members and its managers: chain.py and presence.py as the manager uses them.

Members write to all of their serving members at once and are filled at once; what is tested is who may serve.
At every step: no member that believes it may serve lacks an acknowledged write; each version is recorded
once, with everybody's persistence; versions grow. When faults stop, the chain becomes whole.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

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
from metadata.cluster.members import incarnation_in, serving_of, syncing_of
from metadata.cluster.node_config import chain_routes
from metadata.cluster.presence import Presences

T = 1.0  # failure timeout, seconds
OFFLINE, SERVING = int(TargetState.OFFLINE), int(TargetState.SERVING)
FAULTS = (
    "crash",
    "crash",
    "wipe",
    "pause",
    "cut",
    "poison",
    "manager",
    "stall",
    "all",
    "want",
    "want",
    "want",
)
SEEDS = int(os.environ.get("FFS_WALKS", "150"))


@dataclass
class Member:
    """A target and its node (the same id). `persisted` and `data` survive a restart."""

    target: int
    persisted: tuple[int, int] = (0, 0)
    data: set[int] = field(default_factory=set)
    incarnation: int = 1
    up: bool = True
    paused: bool = False
    cut: bool = False  # the manager can't be reached
    here: bool = False
    acts: ChainRecord | None = None
    proposed: ChainRecord | None = None  # the newest that was persisted in this incarnation
    poisoned: bool = False
    suspect: int = 0
    lease_s: float = -1.0
    filled: tuple[tuple[int, int], int, int] | None = None  # version, target, its incarnation: in step
    sequence: int = 0

    def version(self) -> tuple[int, int]:
        return (0, 0) if self.acts is None else version_of(self.acts)

    def stood_down(self) -> bool:
        p = self.proposed
        return p is not None and version_of(p) > self.version() and self.target not in serving_of(p)

    def serves(self, now: float) -> bool:
        if not self.up or self.paused or self.poisoned or self.acts is None or self.stood_down():
            return False
        others = set(serving_of(self.acts)) - {self.target}
        if self.target not in serving_of(self.acts):
            return False
        if self.proposed is not None and version_of(self.proposed) > self.version():
            others |= set(serving_of(self.proposed)) - {self.target}
        return not others or now < self.lease_s

    def report(self) -> TargetReport:
        acts = self.version()
        state = OFFLINE
        if self.acts is not None and not self.stood_down() and not self.poisoned:
            state = dict(zip(self.acts.members, self.acts.states, strict=True)).get(self.target, OFFLINE)
        fills = self.filled if self.filled is not None and self.filled[0] == acts else None
        return TargetReport(
            target=self.target,
            chain=9 if self.persisted > (0, 0) or self.acts else 0,
            recorded_term=acts[0],
            recorded_counter=acts[1],
            persisted_term=self.persisted[0],
            persisted_counter=self.persisted[1],
            persisted_here=self.here,
            state=state,
            poisoned=self.poisoned,
            suspect=0 if self.suspect == self.target else self.suspect,
            used_bytes=0,
            capacity_bytes=0,
            free_bytes=0,
            chunks=0,
            sync_target=0 if fills is None else fills[1],
            sync_done=fills is not None,
        )


@dataclass
class Beat:
    asked_s: float
    node: int
    incarnation: int
    sequence: int
    report: TargetReport


class Manager:
    def __init__(self, world: World, term: int) -> None:
        self.world = world
        self.term = term
        self.presences = Presences(T)
        self.presences.begin(world.now)
        self.reports: dict[int, tuple[int, int, TargetReport]] = {}  # incarnation, sequence, report
        self.proposal: Proposal | None = None
        self.proposed_s = 0.0
        self.flight: tuple[ChainRecord, Proposal] | None = None
        self.withheld: tuple[int, ...] = ()
        self.decision: Decision | None = None
        self.quiet_s = world.now

    def seat(self, target: int) -> Seat:
        world = self.world
        incarnation = world.incarnations[target]
        known = self.reports.get(target)
        report = known[2] if known is not None and known[0] == incarnation else None
        here = self.presences.here(target, incarnation, world.now)
        return Seat(incarnation, here, self.presences.lapsed(target, world.now), report)

    def decide(self) -> None:
        world = self.world
        if self.flight is not None:
            return
        seats = {target: self.seat(target) for target in people_of(world.record)}
        before = self.proposal
        decision = decide(
            world.record,
            seats,
            self.proposal,
            self.term,
            may_sync=lambda source, target: world.rng.random() < 0.9,
            quiet=world.now - self.quiet_s > 2,
            overdue=self.proposal is not None and world.now - self.proposed_s > 5 * T,
            stalled=world.rng.random() < 0.1,
            unsettled=world.rng.random() < 0.1,
        )
        again = decide(world.record, seats, self.proposal, self.term, may_sync=lambda s, t: True)
        assert again.action is not Action.RECORD or decision.action is Action.RECORD, (
            "not a function of its facts"
        )
        self.decision = decision
        self.withheld = decision.withhold
        if decision.action is Action.PROPOSE:
            assert decision.proposal is not None
            assert before is None or decision.proposal.version > before.version
            contents = world.contents.setdefault(decision.proposal.version, decision.proposal.next)
            assert contents == decision.proposal.next, "I8: one membership a version"
            self.proposal, self.proposed_s = decision.proposal, world.now
        if decision.action is Action.RECORD:
            assert decision.proposal is not None
            self.flight = (world.record, decision.proposal)
        if decision.action is not Action.NONE or not decision.wants_quiet:
            self.quiet_s = world.now

    def answer(self, beat: Beat) -> tuple[list[tuple[bool, ChainRecord]], float]:
        """(routes, seconds of lease)."""
        world = self.world
        self.presences.heard(beat.node, beat.incarnation, world.now)
        known = self.reports.get(beat.node)
        if known is None or known[0] < beat.incarnation or known[1] < beat.sequence:
            self.reports[beat.node] = (beat.incarnation, beat.sequence, beat.report)
        self.decide()
        lease_s = 0.0
        leaving = set()
        if self.flight is not None:
            leaving = set(serving_of(self.flight[0])) - set(serving_of(self.flight[1].next))
        if beat.node not in leaving and beat.node not in self.withheld:
            lease_s = T
            self.presences.answered(beat.node, world.now)
        record, proposal = world.record, self.proposal
        routes = chain_routes(record, proposal, beat.node, beat.incarnation)
        whole = {version_of(record): record}
        if proposal is not None:
            whole[proposal.version] = proposal.next
        return [(route.proposed, whole[route.term, route.counter]) for route in routes], lease_s

    def commit(self, world: World) -> None:
        assert self.flight is not None
        record, proposal = self.flight
        self.flight = None
        if world.primary is not self or record != world.record:
            return
        named = [m for m in proposal.next.members if incarnation_in(proposal.next, m)]
        if any(incarnation_in(proposal.next, m) != world.incarnations[m] for m in named):
            return
        after = recorded_by(record, proposal)
        assert version_of(after) > version_of(world.record)
        for target in named:
            persisted = (version_of(after), target, incarnation_in(after, target))
            assert persisted in world.persisted, "recorded without its persistence"
        if record.counter and not set(serving_of(after)) & set(serving_of(record)):
            raise AssertionError("the last serving one was left out")
        world.record = after


class World:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 100.0
        n = rng.choice((1, 2, 3, 3, 3, 4))
        self.members = {target: Member(target) for target in range(11, 11 + n + 1)}  # one spare
        first = tuple(range(11, 11 + n))
        self.record = ChainRecord(
            id=9,
            table=1,
            term=1,
            counter=0,
            members=first,
            states=(OFFLINE,) * n,
            incarnations=(0,) * n,
            wanted=first if rng.random() < 0.7 else (),
        )
        self.incarnations = {target: 1 for target in self.members}
        self.contents: dict[tuple[int, int], ChainRecord] = {}
        self.faults = [fault for fault in FAULTS if rng.random() < 0.6] or ["crash"]  # some walks are calmer
        self.faulty = rng.choice((0.01, 0.03, 0.06))
        self.pace = rng.choice((0.05, 0.2, 1.0))  # how much happens within a failure timeout
        self.acked: set[int] = set()
        self.persisted: set[tuple[tuple[int, int], int, int]] = set()  # version, target, incarnation
        self.writes = 0
        self.primary = Manager(self, 1)
        self.beats: list[Beat] = []
        self.replies: list[tuple[Beat, list[tuple[bool, ChainRecord]], float]] = []
        self.trace: list[str] = []

    def step(self) -> None:
        rng = self.rng
        self.now += rng.choice((0.001, 0.01, 0.05, 0.1)) * self.pace
        self.primary.presences.tick(self.now)
        member = rng.choice(list(self.members.values()))
        roll = rng.random()
        if roll < self.faulty:
            self.fault(member)
        elif roll < 0.1:
            self.mend(member)
        elif roll < 0.3:
            self.beat(member)
        elif roll < 0.52:
            self.arrive(faults=True)
        elif roll < 0.74:
            self.reply_arrives(faults=True)
        elif roll < 0.8:
            if self.primary.flight is not None:
                self.primary.commit(self)
        elif roll < 0.9:
            self.write()
        elif roll < 0.97:
            self.fill(member)
        else:
            self.primary.decide()
        self.check()

    def round(self) -> None:
        """Without faults: everybody does what it has to."""
        self.now += 0.05
        self.primary.presences.tick(self.now)
        for member in list(self.members.values()):
            self.mend(member)
            self.beat(self.members[member.target])
        while self.beats:
            self.arrive(faults=False)
        while self.replies:
            self.reply_arrives(faults=False)
        if self.primary.flight is not None:
            self.primary.commit(self)
        self.write()
        for member in self.members.values():
            self.fill(member)
        self.check()

    # faults

    def fault(self, member: Member) -> None:
        rng = self.rng
        kind = rng.choice(FAULTS)
        self.trace.append(f"{self.now:.3f} {kind} {member.target}")
        if kind == "crash":
            self.crash(member)
        elif kind == "wipe" and self.spared(member):
            self.crash(member)
            member.persisted, member.data = (0, 0), set()
        elif kind == "pause":
            member.paused = True
        elif kind == "cut":
            member.cut = True
        elif kind == "poison":
            member.poisoned = True
        elif kind == "manager":
            self.primary = Manager(self, self.primary.term + 1)
            self.replies.clear() if rng.random() < 0.5 else None
        elif kind == "stall":
            self.now += rng.uniform(0.5, 3 * T)
            self.primary.presences.tick(self.now)
        elif kind == "all":
            for one in self.members.values():
                self.crash(one)
        elif kind == "suspect" and self.record.counter:
            member.suspect = rng.choice(self.record.members)
        elif kind == "want" and self.record.wanted:
            size = min(len(self.members), max(1, len(self.record.wanted) + rng.choice((-1, 0, 0, 1))))
            wanted = tuple(rng.sample(sorted(self.members), size))
            self.record = replace(self.record, wanted=wanted)

    def spared(self, member: Member) -> bool:
        """Whether another one that serves in the record, and in what may be recorded next, has all that was
        acknowledged."""
        lead = set(serving_of(self.record))
        proposal = self.primary.proposal
        if proposal is not None and proposal.base == version_of(self.record):
            lead &= set(serving_of(proposal.next))
        return any(
            one is not member and self.acked <= one.data and one.persisted >= version_of(self.record)
            for one in self.members.values()
            if one.target in lead
        )

    def crash(self, member: Member) -> None:
        member.up = False

    def mend(self, member: Member) -> None:
        if not member.up or member.poisoned:
            fresh = Member(member.target, member.persisted, member.data, self.incarnations[member.target] + 1)
            self.members[member.target] = fresh
            self.incarnations[member.target] = fresh.incarnation
            self.primary.presences.registered(member.target, fresh.incarnation, self.now)
        elif self.rng.random() < 0.5:
            member.paused, member.cut, member.suspect = False, False, 0

    # what goes on

    def beat(self, member: Member) -> None:
        if member.up and not member.paused and not member.cut:
            member.sequence += 1
            self.beats.append(
                Beat(self.now, member.target, member.incarnation, member.sequence, member.report())
            )

    def arrive(self, faults: bool) -> None:
        """In any order, some never."""
        if not self.beats:
            return
        beat = self.beats.pop(self.rng.randrange(len(self.beats)) if faults else 0)
        if faults and self.rng.random() < 0.1:
            return
        if beat.incarnation == self.incarnations[beat.node]:
            routes, lease_s = self.primary.answer(beat)
            self.replies.append((beat, routes, lease_s))

    def reply_arrives(self, faults: bool) -> None:
        if not self.replies:
            return
        at = self.rng.randrange(len(self.replies)) if faults else 0
        beat, routes, lease_s = self.replies.pop(at)
        member = self.members[beat.node]
        if not member.up or member.paused or member.incarnation != beat.incarnation or member.cut:
            return
        for proposed, record in routes:
            self.take(member, proposed, record)
        if not routes and member.acts is not None and member.target not in people_of(self.record):
            # Dropped from the chain: its node's configuration, which comes before the lease, releases it.
            member.acts, member.persisted, member.here, member.data = None, (0, 0), False, set()
        if lease_s:
            member.lease_s = max(member.lease_s, beat.asked_s + lease_s * 15 / 16)

    def take(self, member: Member, proposed: bool, record: ChainRecord) -> None:
        """docs/craq.md: as a replica does. A poisoned one can't persist."""
        version = version_of(record)
        if proposed:
            if version <= member.persisted or member.poisoned:
                return
            named = incarnation_in(record, member.target)
            assert named in (0, member.incarnation)
            promoted = set(serving_of(record)) & {syncing_of(member.acts)} if member.acts else set()
            for target in promoted:
                source = member.acts is not None and serving_of(member.acts)[-1] == member.target
                if source and member.filled != (member.version(), target, incarnation_in(record, target)):
                    return  # its own word is needed
            member.persisted, member.here, member.proposed = version, True, record
            self.persisted.add((version, member.target, member.incarnation))
        elif version > member.version():
            part = incarnation_in(record, member.target)
            if part == 0 or (member.here and member.persisted >= version and not member.poisoned):
                member.acts, member.filled = record, None

    def fill(self, member: Member) -> None:
        """As the source, it brings the member that is being filled into step."""
        if not member.up or member.paused or member.poisoned or member.acts is None:
            return
        target = syncing_of(member.acts)
        if not target or serving_of(member.acts)[-1] != member.target:
            return
        other = self.members[target]
        if self.reaches(other, member.acts):
            other.data = set(member.data)
            member.filled = (member.version(), target, other.incarnation)

    def reaches(self, member: Member, record: ChainRecord) -> bool:
        return (
            member.up
            and not member.paused
            and not member.poisoned
            and member.version() == version_of(record)
            and incarnation_in(record, member.target) == member.incarnation
        )

    def write(self) -> None:
        """At some member that believes that it is a head: all its serving members take part, or it fails."""
        for member in self.members.values():
            if (
                member.acts is None
                or not member.serves(self.now)
                or serving_of(member.acts)[0] != member.target
            ):
                continue
            record = member.acts
            part = [self.members[target] for target in serving_of(record)]
            last = part[-1]
            if last.filled is not None and last.filled[0] == version_of(record):
                part.append(self.members[last.filled[1]])
            if all(self.reaches(one, record) and not one.stood_down() for one in part):
                self.writes += 1
                for one in part:
                    one.data.add(self.writes)
                self.acked.add(self.writes)

    def check(self) -> None:
        for member in self.members.values():
            if member.serves(self.now):
                assert member.target in serving_of(self.record), f"left out, and serves: {member}"
                lost = self.acked - member.data
                assert not lost, f"target {member.target} serves without {sorted(lost)[:3]}: {member}"

    def whole(self) -> bool:
        goal = self.record.wanted or self.record.members
        if serving_of(self.record) != goal or set(self.record.members) != set(goal):
            return False
        return all(
            self.members[t].serves(self.now) and self.members[t].version() == version_of(self.record)
            for t in goal
        )


def walk(seed: int) -> World:
    world = World(seed)
    for _ in range(world.rng.randrange(200, 900)):
        world.step()
    for _ in range(500):
        world.round()
        if world.whole():
            return world
    raise AssertionError(f"I12: not whole: {world.primary.decision}")


@pytest.mark.parametrize("part", range(4))
def test_walks(part: int) -> None:
    # A fixed share always; with FFS_WALKS a search from new seeds.
    first = random.randrange(2**32) if "FFS_WALKS" in os.environ else part * SEEDS
    writes = 0
    for seed in range(first, first + SEEDS // 4):
        try:
            writes += walk(seed).writes
        except AssertionError as error:
            raise AssertionError(f"walk({seed}): {error}") from error
    assert writes > SEEDS  # the walks do something

"""metadata.cluster.chain: every row of its tables, and a small world of crashes around it."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import msgspec
import pytest

from ffs.proto.cluster import ChainRecord, TargetReport, TargetState
from metadata.cluster.chain import (
    Action,
    Member,
    Proposal,
    Report,
    check,
    classify,
    decide,
    recorded_by,
    states_now,
)

TERM = 3


def record(counter: int = 5, incarnations: tuple[int, ...] = (1, 1, 1), term: int = 2) -> ChainRecord:
    n = len(incarnations)
    state = TargetState.SERVING if counter else TargetState.OFFLINE
    return ChainRecord(
        id=9,
        table=1,
        term=term,
        counter=counter,
        members=tuple(range(11, 11 + n)),
        states=(int(state),) * n,
        incarnations=incarnations if counter else (0,) * n,
    )


def report(
    at: int,
    persisted: tuple[int, int],
    *,
    incarnation: int = 1,
    here: bool = False,
    acts: tuple[int, int] = (0, 0),
    poisoned: bool = False,
) -> Report:
    return Report(
        incarnation,
        TargetReport(
            target=11 + at,
            chain=9,
            recorded_term=acts[0],
            recorded_counter=acts[1],
            persisted_term=persisted[0],
            persisted_counter=persisted[1],
            persisted_here=here,
            state=1,
            poisoned=poisoned,
            used_bytes=0,
            capacity_bytes=0,
            free_bytes=0,
            chunks=0,
        ),
    )


def current(at: int) -> Report:
    return report(at, (2, 5), here=True, acts=(2, 5))


PROPOSAL = Proposal((3, 6), (1, 2, 1))
MEMBER_ROWS = [
    (Member.ABSENT, None, None),
    (Member.POISONED, report(0, (2, 5), poisoned=True), None),
    (Member.READY, report(0, (3, 6), here=True), PROPOSAL),
    (Member.WIPED, report(0, (0, 0)), None),
    (Member.STALE, report(0, (2, 4)), None),
    (Member.STALE, report(0, (1, 9)), None),
    (Member.AHEAD, report(0, (2, 6)), None),
    (Member.AHEAD, report(0, (3, 1)), None),
    (Member.AHEAD, report(0, (3, 6), here=False), PROPOSAL),
    (Member.AHEAD, report(0, (3, 7), here=True), PROPOSAL),
    (Member.RETURNED, report(0, (2, 6), here=True), PROPOSAL),
    (Member.RETURNED, report(0, (2, 5), incarnation=2), None),
    (Member.CURRENT, report(0, (2, 5)), None),
]


@pytest.mark.parametrize(("expected", "said", "proposal"), MEMBER_ROWS)
def test_member_rows(expected: Member, said: Report | None, proposal: Proposal | None) -> None:
    assert classify(record(), 0, said, proposal) is expected


def test_blank_members_of_a_new_chain() -> None:
    assert classify(record(0), 0, report(0, (0, 0)), None) is Member.BLANK
    with pytest.raises(AssertionError):
        classify(record(0), 0, report(0, (2, 0)), None)


def decision_of(reports: list[Report | None], proposal: Proposal | None = None, **chain: int):  # type: ignore[no-untyped-def]
    return decide(record(**chain), reports, proposal, TERM)


def test_all_serve() -> None:
    decision = decision_of([current(0), current(1), current(2)])
    assert (decision.action, decision.serving, decision.reason) == (Action.NONE, True, "")


def test_recorded_but_not_taken_up_by_all() -> None:
    decision = decision_of([current(0), report(1, (2, 5), here=True, acts=(2, 4)), current(2)])
    assert (decision.action, decision.serving, decision.moving) == (Action.NONE, False, True)
    assert "taking up version 2.5" in decision.reason


def test_one_restarted() -> None:
    reports = [current(0), report(1, (2, 5), incarnation=2), current(2)]
    decision = decision_of(reports)
    assert (decision.action, decision.version) == (Action.PROPOSE, (3, 6))
    waiting = decision_of(reports, PROPOSAL)
    assert (waiting.action, waiting.moving) == (Action.NONE, True)
    ready = [
        report(0, (3, 6), here=True, acts=(2, 5)),
        report(1, (3, 6), here=True, incarnation=2),
        report(2, (3, 6), here=True, acts=(2, 5)),
    ]
    for missing in range(3):
        some = list(ready)
        some[missing] = reports[missing]  # type: ignore[call-overload]
        assert decision_of(some, PROPOSAL).action is Action.NONE  # type: ignore[arg-type]
    final = decision_of(ready, PROPOSAL)  # type: ignore[arg-type]
    assert (final.action, final.version) == (Action.RECORD, (3, 6))
    after = recorded_by(record(), PROPOSAL)
    assert (after.term, after.counter, after.incarnations) == (3, 6, (1, 2, 1))


def test_a_new_chain_begins() -> None:
    blank = [report(at, (0, 0)) for at in range(3)]
    decision = decision_of(blank, counter=0)  # type: ignore[arg-type]
    assert (decision.action, decision.version) == (Action.PROPOSE, (3, 1))


@pytest.mark.parametrize("missing", range(3))
def test_one_absent_holds_it_all(missing: int) -> None:
    """Also while the others have persisted a proposal: it stands until the third is back."""
    reports: list[Report | None] = [report(at, (2, 5), incarnation=2) for at in range(3)]
    reports[missing] = None
    decision = decision_of(reports)
    assert (decision.action, decision.serving) == (Action.NONE, False)
    assert f"target {11 + missing} isn't there" in decision.reason


def test_wiped_and_stale_say_why() -> None:
    wiped = decision_of([report(0, (0, 0), incarnation=2), current(1), current(2)])
    assert wiped.action is Action.NONE
    assert "target 11 is empty" in wiped.reason
    stale = decision_of([current(0), report(1, (2, 4), incarnation=2), current(2)])
    assert stale.action is Action.NONE
    assert "target 12 has version 2.4, the chain is at 2.5" in stale.reason


def test_a_proposal_that_a_dead_manager_never_recorded() -> None:
    """Case 22: two of three had persisted it. The next manager proposes above."""
    reports = [report(0, (3, 6), here=True), current(1), report(2, (3, 6), here=True)]
    decision = decide(record(), reports, None, 4)
    assert (decision.action, decision.version) == (Action.PROPOSE, (4, 7))


def test_restart_between_persisting_and_record() -> None:
    """The version isn't persisted in the present incarnation: proposed anew, above."""
    reports = [
        report(0, (3, 6), here=True),
        report(1, (3, 6), here=False, incarnation=3),
        report(2, (3, 6), here=True),
    ]
    decision = decision_of(reports, PROPOSAL)  # type: ignore[arg-type]
    assert (decision.action, decision.version) == (Action.PROPOSE, (3, 7))


def test_late_persisting_of_a_superseded_proposal_starts_no_race() -> None:
    proposal = Proposal((3, 7), (1, 1, 1))
    reports = [report(0, (3, 7), here=True), report(1, (3, 6), here=True), report(2, (3, 7), here=True)]
    decision = decision_of(reports, proposal)  # type: ignore[arg-type]
    assert (decision.action, decision.moving) == (Action.NONE, True)


def test_a_record_that_is_seen_before_its_transaction_returns() -> None:
    """Found by `ffs up`, one start in four: the proposal that was just recorded is spent, not live."""
    chain = record(6, incarnations=(1, 2, 1), term=3)
    reports = [
        report(0, (3, 6), here=True, acts=(2, 5)),
        report(1, (3, 6), here=True, incarnation=2),
        report(2, (3, 6), here=True, acts=(2, 5)),
    ]
    decision = decide(chain, reports, PROPOSAL, TERM)
    assert (decision.action, decision.moving) == (Action.NONE, True)
    assert "taking up version 3.6" in decision.reason


def test_a_deposed_manager_does_nothing() -> None:
    reports = [report(0, (9, 6), here=True), current(1), current(2)]
    assert decide(record(), reports, None, 3).action is Action.NONE


def test_impossible_records_assert() -> None:
    good = record()
    for changes in (
        {"states": (1, 1, 2)},
        {"states": (1, 1)},
        {"incarnations": (1, 0, 1)},
        {"members": (11, 11, 12)},
        {"members": (), "states": (), "incarnations": ()},
    ):
        fields = {name: getattr(good, name) for name in good.__struct_fields__} | changes
        with pytest.raises(AssertionError):
            check(ChainRecord(**fields))
    with pytest.raises(AssertionError):
        recorded_by(good, Proposal((2, 5), (1, 1, 1)))


def test_states_for_clients() -> None:
    assert states_now(record(), (1, 2, 1)) == (1, 0, 1)


def test_every_combination_has_a_row() -> None:
    """All triples of what members can say, with and without a proposal: a decision, never a fall through."""
    said: list[list[Report | None]] = []
    for at in range(3):
        said.append(
            [
                None,
                current(at),
                report(at, (0, 0)),
                report(at, (2, 4)),
                report(at, (2, 5), incarnation=2),
                report(at, (3, 6), here=True),
                report(at, (3, 6), here=True, incarnation=2),
                report(at, (3, 6), incarnation=2),
                report(at, (3, 8), here=True),
                report(at, (2, 5), poisoned=True),
            ]
        )
    actions = set()
    for reports in itertools.product(*said):
        for proposal in (None, Proposal((3, 6), (1, 2, 1)), Proposal((3, 7), (2, 2, 2))):
            restarted = any(r is not None and r.incarnation != 1 for r in reports)
            if (
                proposal is not None
                and not restarted
                and all(r is not None and r.body.persisted_term == 2 for r in reports)
            ):
                continue  # a proposal without a cause: asserted below
            decision = decide(record(), reports, proposal, TERM)
            actions.add(decision.action)
            if decision.action is Action.RECORD:
                assert all(r is not None and r.body.persisted_here for r in reports)
            if decision.serving:
                assert decision.reason == ""
            else:
                assert decision.reason
    assert actions == set(Action)
    with pytest.raises(AssertionError):
        decide(record(), [current(0), current(1), current(2)], Proposal((3, 6), (1, 1, 1)), TERM)


# --- a world ---------------------------------------------------------------------------------


@dataclass
class Node:
    """A member: what its device keeps, what its process remembers."""

    persisted: tuple[int, int] = (0, 0)
    incarnation: int = 1
    up: bool = True
    here: bool = False
    acts: tuple[int, int] = (0, 0)


@dataclass
class World:
    """Events in any order: reports are delivered late, proposals lost, managers replaced."""

    rng: random.Random
    chain: ChainRecord = field(default_factory=lambda: record(0))
    nodes: list[Node] = field(default_factory=lambda: [Node(), Node(), Node()])
    term: int = TERM
    proposal: Proposal | None = None
    reports: list[Report | None] = field(default_factory=lambda: [None, None, None])

    def step(self, faults: bool) -> None:
        at = self.rng.randrange(3)
        node = self.nodes[at]
        roll = self.rng.random()
        if faults and roll < 0.08:
            node.up = False
        elif faults and roll < 0.11:
            self.term += 1
            self.proposal, self.reports = None, [None, None, None]
        elif not node.up:
            if self.rng.random() < 0.3 or not faults:
                node.up, node.here, node.acts = True, False, (0, 0)
                node.incarnation += 1
                self.reports[at] = None
        elif roll < 0.45 and self.proposal is not None and self.proposal.incarnations[at] == node.incarnation:
            if self.proposal.version > node.persisted:
                node.persisted, node.here = self.proposal.version, True
        elif roll < 0.6:
            version = (self.chain.term, self.chain.counter)
            if self.chain.incarnations[at] == node.incarnation and node.persisted >= version and node.here:
                assert version >= node.acts, "I5"
                node.acts = version
        else:
            self.reports[at] = report(
                at, node.persisted, incarnation=node.incarnation, here=node.here, acts=node.acts
            )
            self.manage()

    def manage(self) -> None:
        decision = decide(self.chain, self.reports, self.proposal, self.term)
        now = tuple(node.incarnation for node in self.nodes)
        if decision.action is Action.PROPOSE:
            assert decision.version > (self.chain.term, self.chain.counter)
            self.proposal = Proposal(decision.version, now)
        elif decision.action is Action.RECORD:
            assert self.proposal is not None
            if self.proposal.incarnations == now:  # the transaction checks
                for node in self.nodes:
                    assert node.persisted == self.proposal.version
                    assert node.here
                before = (self.chain.term, self.chain.counter)
                self.chain = recorded_by(self.chain, self.proposal)
                assert (self.chain.term, self.chain.counter) > before
            self.proposal = None

    def serves(self) -> bool:
        version = (self.chain.term, self.chain.counter)
        return self.chain.counter > 0 and all(node.up and node.acts == version for node in self.nodes)


@pytest.mark.parametrize("part", range(4))
def test_converges_after_any_faults(part: int) -> None:
    """I12 for this issue: when faults stop and all members come back, the chain serves."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(150):
        world = World(rng)
        for _ in range(rng.randrange(400)):
            world.step(faults=True)
        for _ in range(2000):
            if world.serves():
                break
            world.step(faults=False)
        assert world.serves(), world


def test_a_member_that_stopped_serving_is_named() -> None:
    """A replica that can't read the base of an update goes offline by itself: its chain takes no writes,
    and the status that said "serving" was wrong."""
    reports = [current(at) for at in range(3)]
    assert decide(record(), reports, None, TERM).serving
    body = msgspec.structs.replace(reports[1].body, state=int(TargetState.OFFLINE))
    decision = decide(record(), [reports[0], Report(reports[1].incarnation, body), reports[2]], None, TERM)
    assert not decision.serving
    assert decision.action is Action.NONE
    assert "target 12 doesn't serve" in decision.reason

"""metadata.cluster.chain: every row of its tables. The world of crashes around it is test_chain_walk."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from ffs.proto.cluster import ChainRecord, TargetReport, TargetState
from metadata.cluster.chain import (
    Action,
    Decision,
    Member,
    Proposal,
    Seat,
    check,
    decide,
    judge,
    people_of,
    recorded_by,
    shown_states,
    states_now,
)

TERM = 3
R = (2, 5)  # the recorded version in most tests
A, B, C, D = 11, 12, 13, 14
OFFLINE, SERVING, SYNCING = (int(s) for s in (TargetState.OFFLINE, TargetState.SERVING, TargetState.SYNCING))


def record(
    states: str = "sss", *, counter: int = 5, term: int = 2, incarnations: tuple[int, ...] = (), **more: Any
) -> ChainRecord:
    """States as letters: s serving, y syncing, o offline."""
    n = len(states)
    codes = tuple({"s": SERVING, "y": SYNCING, "o": OFFLINE}[letter] for letter in states)
    fields: dict[str, Any] = {"members": tuple(range(11, 11 + n)), **more}
    return ChainRecord(
        id=9,
        table=1,
        term=term,
        counter=counter,
        states=codes,
        incarnations=incarnations or tuple(0 if code == OFFLINE else 1 for code in codes),
        **fields,
    )


def report(
    target: int,
    persisted: tuple[int, int] = R,
    *,
    here: bool = True,
    acts: tuple[int, int] | None = None,
    state: int = SERVING,
    chain: int = 9,
    **more: Any,
) -> TargetReport:
    recorded = persisted if acts is None else acts
    return TargetReport(
        target=target,
        chain=chain,
        recorded_term=recorded[0],
        recorded_counter=recorded[1],
        persisted_term=persisted[0],
        persisted_counter=persisted[1],
        persisted_here=here,
        state=state,
        poisoned=more.pop("poisoned", False),
        used_bytes=0,
        capacity_bytes=0,
        free_bytes=0,
        chunks=0,
        **more,
    )


def seat(said: TargetReport | None, incarnation: int = 1, *, here: bool = True, lapsed: bool = False) -> Seat:
    return Seat(incarnation, here, lapsed, said)


def holds(target: int, **more: Any) -> Seat:
    return seat(report(target, **more))


def gone(incarnation: int = 1) -> Seat:
    return Seat(incarnation, False, True, None)


def silent(incarnation: int = 1) -> Seat:
    return Seat(incarnation, False, False, None)


def returned(target: int, persisted: tuple[int, int] = R) -> Seat:
    return seat(report(target, persisted, here=False, acts=(0, 0), state=OFFLINE), 2)


def outside(target: int, persisted: tuple[int, int] = (1, 1), incarnation: int = 2) -> Seat:
    return seat(report(target, persisted, here=False, acts=(0, 0), state=OFFLINE), incarnation)


def decided(
    chain: ChainRecord, seats: list[Seat], proposal: Proposal | None = None, term: int = TERM, **more: Any
) -> Decision:
    return decide(chain, dict(zip(people_of(chain), seats, strict=True)), proposal, term, **more)


def next_of(decision: Decision) -> tuple[tuple[int, ...], str]:
    """(members, their states as letters) of what is proposed."""
    assert decision.action is Action.PROPOSE, decision
    assert decision.proposal is not None
    after = decision.proposal.next
    return after.members, "".join("osy"[state] for state in after.states)


def persists(proposal: Proposal, seats: list[Seat], *targets: int) -> list[Seat]:
    """The seats when these targets have persisted it; all that act in `base` still do."""
    after = []
    for one in seats:
        if one.report is not None and one.report.target in targets:
            term, counter = proposal.version
            said = replace(
                one.report, persisted_term=term, persisted_counter=counter, persisted_here=True, chain=9
            )
            one = Seat(one.incarnation, one.here, one.lapsed, said)
        after.append(one)
    return after


# --- 1. members ------------------------------------------------------------------------------------

JUDGED = [
    (Member.GONE, A, gone()),
    (Member.GONE, A, seat(report(A), here=False, lapsed=True)),
    (Member.SILENT, A, silent()),
    (Member.SILENT, A, silent(2)),
    (Member.SILENT, A, seat(None)),  # here, says nothing of that target
    (Member.LOST, A, seat(None, 2)),
    (Member.LOST, C, seat(None, 2)),
    (Member.FAILED, A, holds(A, poisoned=True)),
    (Member.FAILED, A, holds(A, reason=8, state=OFFLINE)),
    (Member.FOREIGN, A, holds(A, chain=5)),
    (Member.FOREIGN, C, seat(report(C, chain=5))),
    (Member.OUTSIDE, C, outside(C)),
    (Member.OUTSIDE, C, outside(C, persisted=(0, 0))),
    (Member.OUTSIDE, B, seat(report(B), 2)),  # it was syncing, in another incarnation
    (Member.OUTSIDE, B, outside(B, persisted=(0, 0))),
    (Member.LATE, A, holds(A, persisted=(2, 4))),
    (Member.LATE, B, holds(B, persisted=(0, 0))),
    (Member.DIVERGED, A, holds(A, reason=9, state=OFFLINE)),
    (Member.HOLDS, B, holds(B, reason=9, state=OFFLINE)),  # being filled cures it
    (Member.HOLDS, A, holds(A)),
    (Member.HOLDS, A, holds(A, persisted=(3, 1))),
    (Member.HOLDS, A, seat(report(A), lapsed=True)),
    (Member.WIPED, A, seat(report(A, (0, 0)), 2)),
    (Member.STALE, A, seat(report(A, (1, 9)), 2)),
    (Member.RETURNED, A, returned(A)),
    (Member.RETURNED, A, returned(A, (2, 6))),
]


@pytest.mark.parametrize(("expected", "target", "said"), JUDGED)
def test_judging(expected: Member, target: int, said: Seat) -> None:
    """A serves, B is being filled, C is offline."""
    assert judge(record("syo"), target, said) is expected


def test_all_rows_of_judging_are_tested() -> None:
    assert {row[0] for row in JUDGED} == set(Member)


# --- 2. the next membership -------------------------------------------------------------------------


def test_all_serve() -> None:
    decision = decided(record(), [holds(A), holds(B), holds(C)])
    assert decision.action is Action.NONE
    assert (decision.serving, decision.whole, decision.moving, decision.reason) == (True, True, False, "")


def test_not_taken_up_by_all_yet() -> None:
    decision = decided(record(), [holds(A), holds(B, acts=(2, 4)), holds(C)])
    assert (decision.action, decision.serving, decision.moving) == (Action.NONE, False, True)
    assert "taking up version 2.5" in decision.reason or "isn't" not in decision.reason


def test_a_member_that_stopped_serving_is_named() -> None:
    """A replica that can't read the base of an update goes offline by itself: the status that said
    "serving" was wrong."""
    decision = decided(record(), [holds(A), holds(B, state=OFFLINE, reason=6), holds(C)])
    assert (decision.action, decision.serving) == (Action.NONE, False)
    assert "target 12 doesn't serve" in decision.reason


@pytest.mark.parametrize("at", range(3))
def test_a_member_that_is_gone_is_left_out(at: int) -> None:
    seats = [holds(A), holds(B), holds(C)]
    seats[at] = gone()
    decision = decided(record(), seats)
    members, states = next_of(decision)
    assert states == "sso"
    assert members[2] == 11 + at
    assert decision.proposal is not None
    assert decision.proposal.next.incarnations == (1, 1, 0)
    assert decision.proposal.version == (3, 6)
    assert f"target {11 + at} isn't there" in decision.reason


def test_a_silent_member_is_waited_for() -> None:
    """Its lease may hold. Nothing is proposed, though another one is gone for sure."""
    for quiet in (silent(), silent(2), seat(None), holds(B, persisted=(2, 4))):
        decision = decided(record(), [gone(), quiet, holds(C)])
        assert (decision.action, decision.moving) == (Action.NONE, False), quiet
        assert "target 12" in decision.reason


def test_one_restarted_quickly() -> None:
    """Case 12: it lost its memory, and keeps its place in a new version that all persist."""
    seats = [holds(A), returned(B), holds(C)]
    decision = decided(record(), seats)
    assert next_of(decision) == ((A, B, C), "sss")
    proposal = decision.proposal
    assert proposal is not None
    assert proposal.next.incarnations == (1, 2, 1)
    for missing in (A, B, C):
        some = persists(proposal, seats, *({A, B, C} - {missing}))
        waiting = decided(record(), some, proposal)
        assert (waiting.action, waiting.moving) == (Action.NONE, True)
    ready = decided(record(), persists(proposal, seats, A, B, C), proposal)
    assert (ready.action, ready.proposal) == (Action.RECORD, proposal)
    assert recorded_by(record(), proposal) == proposal.next


def test_members_that_left_their_data_behind_go_offline_first() -> None:
    """Case 15. Only then are they filled: one that is empty and persisted a proposal to be filled would
    look, to the next manager, like one that kept its data."""
    for lost in (seat(report(B, (0, 0)), 2), seat(report(B, (2, 4)), 2), seat(None, 2)):
        decision = decided(record(), [holds(A), lost, holds(C)])
        assert next_of(decision) == ((A, C, B), "sso")
        assert decision.proposal is not None
        ready = decided(
            record(), persists(decision.proposal, [holds(A), lost, holds(C)], A, C), decision.proposal
        )
        assert ready.action is Action.RECORD  # it has another incarnation: it doesn't serve


def test_the_last_one_that_serves_is_never_left_out() -> None:
    """Case 13: any of those that were serving may lead; nobody else."""
    for last in (
        gone(),
        seat(report(A, (0, 0)), 2),
        seat(report(A, (1, 1)), 2),
        seat(None, 2),
        holds(A, poisoned=True),
    ):
        decision = decided(record("so"), [last, outside(B)])
        assert (decision.action, decision.serving) == (Action.NONE, False)
        assert "target 11 must come back: it alone has all data" in decision.reason
    decision = decided(record(), [gone(), gone(), gone()])
    assert "one of 11, 12, 13 must come back" in decision.reason


@pytest.mark.parametrize("first", range(3))
def test_any_one_leads_back_when_all_died(first: int) -> None:
    seats = [gone(), gone(), gone()]
    seats[first] = returned(11 + first)
    members, states = next_of(decided(record(), seats))
    assert (members[0], states) == (11 + first, "soo")


def test_a_syncing_member_isnt_promoted_because_the_serving_one_died() -> None:
    """Case 14, even if it was done a moment ago."""
    said = report(A, sync_target=B, sync_done=True)
    for dead in (seat(said, here=False, lapsed=True), gone()):
        decision = decided(record("sy"), [dead, holds(B, state=SYNCING)])
        assert decision.action is Action.NONE
        assert "target 11 must come back" in decision.reason


def test_an_offline_member_that_is_there_is_filled() -> None:
    for content in ((0, 0), (1, 1), R, (3, 7)):
        decision = decided(record("sso"), [holds(A), holds(B), outside(C, content)])
        assert next_of(decision) == ((A, B, C), "ssy")
        assert decision.proposal is not None
        assert decision.proposal.next.incarnations == (1, 1, 2)
    for absent in (gone(), silent(), seat(None, 2), seat(report(C, poisoned=True)), seat(report(C, chain=5))):
        decision = decided(record("sso"), [holds(A), holds(B), absent])
        assert (decision.action, decision.serving, decision.whole) == (Action.NONE, True, False)
        assert "target 13" in decision.reason


def test_one_at_a_time_is_filled_and_only_where_there_is_room_for_it() -> None:
    seats = [holds(A), outside(B), outside(C)]
    assert next_of(decided(record("soo"), seats)) == ((A, B, C), "syo")
    asked: list[tuple[int, int]] = []

    def only_c(source: int, target: int) -> bool:
        asked.append((source, target))
        return target == C

    assert next_of(decided(record("soo"), seats, may_sync=only_c)) == ((A, C, B), "syo")
    assert asked == [(A, B), (A, C)]
    decision = decided(record("soo"), seats, may_sync=lambda source, target: False)
    assert (decision.action, decision.wants_slot) == (Action.NONE, True)
    assert "waits for others' recovery" in decision.reason
    steady = decided(record("syo"), [holds(A), holds(B, state=SYNCING), outside(C)])
    assert (steady.action, steady.serving) == (Action.NONE, True)


def test_a_syncing_member_stays_through_other_changes() -> None:
    said = holds(C, state=SYNCING)
    assert next_of(decided(record("ssy"), [gone(), holds(B), said])) == ((B, C, A), "syo")
    assert next_of(decided(record("ssy"), [holds(A), returned(B), said])) == ((A, B, C), "ssy")
    assert next_of(decided(record("ssy"), [holds(A), holds(B), outside(C)])) == ((A, B, C), "ssy")
    assert next_of(decided(record("ssy"), [holds(A), holds(B), gone()])) == ((A, B, C), "sso")
    assert next_of(decided(record("ssy"), [holds(A), gone(), silent()])) == ((A, B, C), "soo")
    assert decided(record("ssy"), [holds(A), holds(B), silent()]).action is Action.NONE


def done(target: int, sync_target: int = C, **more: Any) -> Seat:
    return holds(target, sync_target=sync_target, sync_done=True, **more)


def test_promotion() -> None:
    syncing = holds(C, state=SYNCING)
    decision = decided(record("ssy"), [holds(A), done(B), syncing])
    assert next_of(decision) == ((A, B, C), "sss")
    not_enough = [
        [done(A), holds(B), syncing],  # not the source
        [holds(A), done(B, sync_target=A), syncing],  # another's sync
        [holds(A), done(B, acts=(2, 4)), syncing],  # case 11: an earlier attempt's
        [holds(A), done(B, persisted=(3, 9), acts=(3, 9)), syncing],
        [holds(A), done(B), silent()],
        [holds(A), done(B), gone()],
        [holds(A), done(B), outside(C)],
        [holds(A), seat(done(B).report, 2), syncing],  # the source has another incarnation
        [gone(), done(B), syncing],  # not in one version with another change
        [returned(A), done(B), syncing],
    ]
    for seats in not_enough:
        decision = decided(record("ssy"), seats)
        if decision.action is Action.PROPOSE:
            assert C not in [m for m, s in zip(*next_of(decision), strict=True) if s == "s"], seats


def test_a_promotion_stands_while_it_is_persisted() -> None:
    """What the source says of the sync isn't asked again: it said so in the recorded version."""
    seats = [holds(A), done(B), holds(C, state=SYNCING)]
    proposal = decided(record("ssy"), seats).proposal
    assert proposal is not None
    seats[1] = holds(B)
    assert decided(record("ssy"), seats, proposal).action is Action.NONE
    assert decided(record("ssy"), persists(proposal, seats, A, B, C), proposal).action is Action.RECORD
    seats[1] = returned(B)
    assert next_of(decided(record("ssy"), seats, proposal)) == ((A, B, C), "ssy")


def test_suspects() -> None:
    accuse = [holds(A, suspect=B), holds(B), holds(C)]
    decision = decided(record(), accuse)
    assert next_of(decision) == ((A, C, B), "sso")
    assert decision.proposal is not None
    assert decision.proposal.without == ((B, 1),)
    # each other: the later one goes
    assert next_of(decided(record("ss"), [holds(A, suspect=B), holds(B, suspect=A)])) == ((A, B), "so")
    # one that accuses and is accused by two: its word counts for nothing
    mess = [holds(A, suspect=B), holds(B, suspect=C), holds(C, suspect=B)]
    assert next_of(decided(record(), mess)) == ((A, C, B), "sso")
    # a syncing one
    slow = [holds(A), holds(B, suspect=C), holds(C, state=SYNCING)]
    assert next_of(decided(record("ssy"), slow)) == ((A, B, C), "sso")
    # said in another version, or of one that restarted meanwhile, or by one that restarted
    for seats in (
        [holds(A, suspect=B, acts=(2, 4)), holds(B), holds(C)],
        [holds(A, suspect=99), holds(B), holds(C)],
    ):
        assert decided(record(), seats).action is Action.NONE
    assert next_of(decided(record(), [holds(A, suspect=B), returned(B), holds(C)])) == ((A, B, C), "sss")


def test_a_suspect_must_stand_down_and_isnt_taken_back_before() -> None:
    seats = [holds(A, suspect=B), holds(B), holds(C)]
    proposal = decided(record(), seats).proposal
    assert proposal is not None
    seats = persists(proposal, [holds(A), holds(B), holds(C)], A, C)
    waiting = decided(record(), seats, proposal)
    assert (waiting.action, waiting.withhold) == (Action.NONE, (B,))
    assert decided(record(), persists(proposal, seats, B), proposal).action is Action.RECORD
    for over in (
        gone(),
        seat(report(B), lapsed=True),
        holds(B, poisoned=True, state=OFFLINE),
        holds(B, reason=8, state=OFFLINE),
    ):
        seats[1] = over
        decision = decided(record(), seats, proposal)
        assert decision.action is Action.RECORD, over
    seats[1] = holds(B, poisoned=True)  # its reads may still work
    assert decided(record(), seats, proposal).action is Action.NONE
    seats[1] = returned(B)  # it has restarted: taken back
    assert next_of(decided(record(), seats, proposal)) == ((A, B, C), "sss")


def test_a_live_member_that_failed_is_left_out_once_it_has_stopped() -> None:
    seats = [holds(A), holds(B, poisoned=True), holds(C)]
    proposal = decided(record(), seats).proposal
    assert proposal is not None
    assert decided(record(), persists(proposal, seats, A, C), proposal).action is Action.NONE
    seats[1] = holds(B, poisoned=True, state=OFFLINE, reason=8)
    assert decided(record(), persists(proposal, seats, A, C), proposal).action is Action.RECORD


def test_one_that_is_too_slow_to_persist_is_left_out() -> None:
    seats = [holds(A), holds(B), gone()]
    proposal = decided(record(), seats).proposal
    assert proposal is not None
    some = persists(proposal, seats, B)
    assert decided(record(), some, proposal).action is Action.NONE
    decision = decided(record(), some, proposal, overdue=True)
    assert next_of(decision) == ((B, A, C), "soo")
    assert decision.proposal is not None
    assert decision.proposal.without == ((A, 1),)
    again = persists(decision.proposal, seats, B)
    waits = decided(record(), again, decision.proposal)
    assert (waits.action, waits.withhold) == (Action.NONE, (A,))
    nobody = decided(record(), seats, proposal, overdue=True)
    assert nobody.action is Action.NONE  # somebody must lead
    filled = decided(record("sso"), [holds(A), holds(B), outside(C)]).proposal
    assert filled is not None
    slow = persists(filled, [holds(A), holds(B), outside(C)], A, B)
    without = decided(record("sso"), slow, filled, overdue=True)
    assert next_of(without) == ((A, B, C), "sso")
    assert decided(record("sso"), slow, without.proposal).action is Action.NONE  # not for the sake of a sync


def test_one_that_returned_and_cant_persist_is_left_out_for_good() -> None:
    """It was taken back as soon as the others had persisted the version without it, and so on for ever."""
    seats = [holds(A), returned(B)]
    first = decided(record("ss"), seats).proposal
    assert first is not None
    seats = persists(first, seats, A)
    decision = decided(record("ss"), seats, first, overdue=True)
    assert next_of(decision) == ((A, B), "so")
    second = decision.proposal
    assert second is not None
    assert second.without == ((B, 2),)
    assert decided(record("ss"), seats, second).action is Action.NONE
    done_with = decided(record("ss"), persists(second, seats, A), second)
    assert (done_with.action, done_with.proposal) == (Action.RECORD, second)
    again = Seat(3, True, False, returned(B).report)  # it may fare better when it has restarted
    assert next_of(decided(record("ss"), [seats[0], again], second)) == ((A, B), "ss")
    leads = decided(record("ss"), [gone(), seats[1]], second)  # and somebody must lead
    assert next_of(leads) == ((B, A), "so")


def test_one_that_cant_persist_its_fill_is_left_out() -> None:
    """And named, so that it isn't tried again at once."""
    seats = [holds(A), outside(B), outside(C)]
    first = decided(record("soo"), seats).proposal
    assert first is not None
    seats = persists(first, seats, A)
    decision = decided(record("soo"), seats, first, overdue=True)
    assert next_of(decision) == ((A, C, B), "syo")
    assert decision.proposal is not None
    assert decision.proposal.without == ((B, 2),)
    alone = persists(first, [holds(A), outside(B)], A)
    first = replace_record(first, record("sy", term=3, counter=6, incarnations=(1, 2)))
    decision = decided(record("so"), alone, first, overdue=True)
    assert next_of(decision) == ((A, B), "so")
    assert decision.proposal is not None
    assert decision.proposal.without == ((B, 2),)
    assert decided(record("so"), alone, decision.proposal).action is Action.NONE


def replace_record(proposal: Proposal, after: ChainRecord) -> Proposal:
    return Proposal(after, proposal.base, proposal.without)


def test_a_failing_sync_makes_way_for_another() -> None:
    source = holds(A, sync_target=B, sync_failure=28)
    seats = [source, holds(B, state=SYNCING), outside(C)]
    assert decided(record("syo"), seats).action is Action.NONE
    decision = decided(record("syo"), seats, stalled=True)
    assert next_of(decision) == ((A, C, B), "syo")
    proposal = decision.proposal
    assert proposal is not None
    assert proposal.without == ((B, 1),)
    for stalled in (False, True):
        assert decided(record("syo"), seats, proposal, stalled=stalled).action is Action.NONE
    ready = persists(proposal, seats, A, C)
    assert decided(record("syo"), ready, proposal).action is Action.RECORD
    # nobody else can be filled, or not yet, or something else has to change first
    for third in (gone(), silent(), seat(report(C, poisoned=True))):
        alone = decided(record("syo"), [*seats[:2], third], stalled=True)
        assert (alone.action, alone.wants_slot) == (Action.NONE, False)
    paused = decided(record("syo"), seats, stalled=True, may_sync=lambda source, target: target == B)
    assert (paused.action, paused.wants_slot) == (Action.NONE, True)
    changing = [returned(A), *seats[1:]]
    assert next_of(decided(record("syo"), changing, stalled=True)) == ((A, B, C), "syo")
    done_now = [done(A, sync_target=B), *seats[1:]]
    assert next_of(decided(record("syo"), done_now, stalled=True)) == ((A, B, C), "sso")


def test_a_new_chain_begins() -> None:
    blank = [seat(report(t, (0, 0), here=False, acts=(0, 0), chain=0)) for t in (A, B, C)]
    decision = decided(record("ooo", counter=0), blank)
    assert next_of(decision) == ((A, B, C), "sss")
    assert decision.proposal is not None
    assert decision.proposal.version == (3, 1)
    waits = decided(record("ooo", counter=0), [blank[0], silent(), blank[2]])
    assert waits.action is Action.NONE
    assert next_of(decided(record("ooo", counter=0), [blank[0], gone(), blank[2]])) == ((A, C, B), "sso")
    assert decided(record("ooo", counter=0), [gone(), gone(), gone()]).action is Action.NONE
    other = record("ooo", counter=0, wanted=(C, A, B))
    assert next_of(decided(other, blank)) == ((C, A, B), "sss")


def test_joining_and_leaving() -> None:
    """A replica moves from B to D: D joins, is filled, serves; then B leaves, stands down, is dropped."""
    wanted = {"wanted": (A, D, C)}
    seats = [holds(A), holds(B), holds(C), outside(D, (0, 0))]
    assert next_of(decided(record("sss", **wanted), seats)) == ((A, B, C, D), "sssy")
    seats = [holds(A), holds(B), holds(C), holds(D, state=SYNCING)]
    still = decided(record("sssy", **wanted), seats)
    assert (still.action, still.serving, still.whole) == (Action.NONE, True, False)
    assert "target 12 leaves when all wanted ones serve" in still.reason
    seats[2] = done(C, sync_target=D)
    assert next_of(decided(record("sssy", **wanted), seats)) == ((A, B, C, D), "ssss")
    seats = [holds(A), holds(B), holds(C), holds(D)]
    decision = decided(record("ssss", **wanted), seats)
    assert next_of(decision) == ((A, C, D, B), "ssso")
    assert decision.proposal is not None
    alive = persists(decision.proposal, seats, A, C, D)
    assert decided(record("ssss", **wanted), alive, decision.proposal).action is Action.NONE
    assert (
        decided(record("ssss", **wanted), persists(decision.proposal, alive, B), decision.proposal).action
        is Action.RECORD
    )
    left = record("ssso", members=(A, C, D, B), **wanted)
    assert next_of(decided(left, [holds(A), holds(C), holds(D), holds(B, state=OFFLINE)])) == (
        (A, C, D),
        "sss",
    )
    wrong_order = record("sss", members=(A, C, D), **wanted)
    seats = [holds(A), holds(C), holds(D)]
    waits = decided(wrong_order, seats)
    assert (waits.action, waits.wants_quiet, waits.serving, waits.whole) == (Action.NONE, True, True, False)
    decision = decided(wrong_order, seats, quiet=True)
    assert next_of(decision) == ((A, D, C), "sss")
    assert decided(wrong_order, seats, decision.proposal).action is Action.NONE  # it stands without the quiet
    assert decided(record("sss", members=(A, D, C), **wanted), [holds(A), holds(D), holds(C)]).whole


def test_unwanted_members_go_before_a_ninth_comes() -> None:
    eight = tuple(range(11, 19))
    chain = record("sooooooo", members=eight, wanted=(11, 12, 13, 21))
    seats = [holds(11), *(gone() for _ in range(7)), outside(21, (0, 0))]
    assert next_of(decided(chain, seats)) == ((11, 21, 12, 13), "syoo")
    full = record("ssssssss", members=eight, wanted=(*eight[:7], 21))
    seats = [*(holds(m) for m in eight), outside(21, (0, 0))]
    assert decided(full, seats).action is Action.NONE


def test_a_member_that_isnt_wanted_goes_at_once_if_it_doesnt_serve() -> None:
    chain = record("sso", wanted=(A, B))
    assert next_of(decided(chain, [holds(A), holds(B), gone()])) == ((A, B), "ss")
    chain = record("ssy", wanted=(A, B))
    assert next_of(decided(chain, [holds(A), done(B), holds(C, state=SYNCING)])) == ((A, B), "ss")


def test_forced_to_lead() -> None:
    chain = record("so", forced=B)
    assert next_of(decided(chain, [gone(), outside(B)])) == ((B, A), "so")
    for lost in (
        seat(report(A, (0, 0)), 2),
        seat(report(A, (1, 1)), 2),
        seat(None, 2),
        holds(A, poisoned=True, state=OFFLINE),
    ):
        decision = decided(chain, [lost, outside(B)])
        assert next_of(decision) == ((B, A), "so")
        assert decision.proposal is not None
        ready = persists(decision.proposal, [lost, outside(B)], B)
        assert decided(chain, ready, decision.proposal).action is Action.RECORD
        assert recorded_by(chain, decision.proposal).forced == 0
    assert decided(chain, [silent(), outside(B)]).action is Action.NONE
    for absent in (gone(), silent(), seat(report(B, poisoned=True))):
        decision = decided(chain, [gone(), absent])
        assert decision.action is Action.NONE
        assert "target 12, which was forced" in decision.reason
    # whoever was serving comes back in time: it leads, and force is forgotten with the next version
    decision = decided(chain, [returned(A), outside(B)])
    assert next_of(decision) == ((A, B), "sy")
    assert decision.proposal is not None
    assert recorded_by(chain, decision.proposal).forced == 0


def test_consent_to_force_doesnt_outlive_its_cause() -> None:
    """A is back, and B, which was forced, isn't there: nothing has to change but that."""
    chain = record("so", forced=B)
    armed = decided(chain, [silent(), gone()])
    assert armed.action is Action.NONE
    assert "target 12 was forced to lead, unless" in armed.reason
    seats = [holds(A), gone()]
    decision = decided(chain, seats)
    assert next_of(decision) == ((A, B), "so")
    assert "target 12 was forced to lead, unless" in decision.reason
    assert decision.proposal is not None
    assert decided(chain, seats, decision.proposal).action is Action.NONE
    assert decided(chain, persists(decision.proposal, seats, A), decision.proposal).action is Action.RECORD
    after = recorded_by(chain, decision.proposal)
    assert after.forced == 0
    later = decided(after, [gone(), outside(B)])
    assert later.action is Action.NONE
    assert "must come back" in later.reason
    # nor does one that was asked for on a chain that is whole
    whole = record("ss", forced=B)
    assert next_of(decided(whole, [holds(A), holds(B)])) == ((A, B), "ss")


# --- 3. actions --------------------------------------------------------------------------------------


def test_a_proposal_that_a_dead_manager_never_recorded() -> None:
    """Case 22: some had persisted it. The next manager proposes above."""
    seats = [seat(report(A, (3, 6), acts=R)), holds(B), seat(report(C, (3, 6), acts=R))]
    decision = decided(record(), seats, term=4)
    assert next_of(decision) == ((A, B, C), "sss")
    assert decision.proposal is not None
    assert decision.proposal.version == (4, 7)


def test_what_offline_members_persisted_forces_nothing_but_numbers() -> None:
    seats = [holds(A), holds(B), seat(report(C, (3, 8), chain=9), 2)]
    decision = decided(record("sso"), seats, may_sync=lambda source, target: False)
    assert decision.action is Action.NONE
    decision = decided(record("sso"), seats)
    assert decision.proposal is not None
    assert decision.proposal.version == (3, 9)


def test_a_version_is_never_given_two_contents() -> None:
    """A proposal that is replaced leaves its number behind, also when it isn't live any more."""
    seats = [holds(A), holds(B), gone()]
    first = decided(record(), seats).proposal
    assert first is not None
    seats = [holds(A), returned(B), gone()]
    second = decided(record(), seats, first).proposal
    assert second is not None
    assert second.version > first.version
    assert second.next.incarnations != first.next.incarnations


def test_a_proposal_is_dropped_when_its_cause_is_gone() -> None:
    """Somebody may have persisted it, so a version above it is made."""
    proposal = decided(record(), [holds(A), holds(B), gone()]).proposal
    assert proposal is not None
    decision = decided(record(), [holds(A), holds(B), holds(C)], proposal)
    assert next_of(decision) == ((A, B, C), "sss")
    assert decision.proposal is not None
    assert decision.proposal.version == (3, 7)


def test_restart_between_persisting_and_record() -> None:
    seats = [holds(A), returned(B), holds(C)]
    proposal = decided(record(), seats).proposal
    assert proposal is not None
    ready = persists(proposal, seats, A, B, C)
    said = ready[1].report
    assert said is not None
    ready[1] = Seat(3, True, False, replace(said, persisted_here=False))
    decision = decided(record(), ready, proposal)
    assert decision.proposal is not None
    assert (decision.action, decision.proposal.version) == (Action.PROPOSE, (3, 7))


def test_late_persisting_of_a_superseded_proposal_starts_no_race() -> None:
    seats = [holds(A), holds(B), gone()]
    after = replace(record("sso"), term=3, counter=7)
    proposal = Proposal(after, R)
    some = [seat(report(A, (3, 7), acts=R)), seat(report(B, (3, 6), acts=R)), seats[2]]
    decision = decided(record(), some, proposal)
    assert (decision.action, decision.moving) == (Action.NONE, True)


def test_a_record_that_is_seen_before_its_transaction_returns() -> None:
    """Found by `ffs up`, one start in four: the proposal that was just recorded is spent, not live."""
    proposal = decided(record(), [holds(A), returned(B), holds(C)]).proposal
    assert proposal is not None
    seats = persists(proposal, [holds(A), returned(B), holds(C)], A, B, C)
    decision = decided(recorded_by(record(), proposal), seats, proposal)
    assert (decision.action, decision.proposal, decision.moving) == (Action.NONE, None, True)


def test_a_proposal_after_another_version_is_never_recorded() -> None:
    """Two were made from one version; the first is recorded by a transaction that had begun."""
    first = Proposal(replace(record("sso"), term=3, counter=6), R)
    second = Proposal(replace(record("sss"), term=3, counter=7), R)
    chain = recorded_by(record(), first)
    seats = [seat(report(t, (3, 7), acts=R)) for t in (A, B, C)]
    decision = decided(chain, seats, second)
    assert decision.proposal is not None
    assert (decision.action, decision.proposal.base, decision.proposal.version) == (
        Action.PROPOSE,
        (3, 6),
        (3, 8),
    )
    with pytest.raises(AssertionError):
        recorded_by(chain, second)


def test_a_deposed_manager_does_nothing() -> None:
    seats = [seat(report(A, (9, 6), acts=R)), holds(B), gone()]
    assert decided(record(), seats).action is Action.NONE


def test_impossible_records_assert() -> None:
    good = record("syo")
    bad: list[dict[str, Any]] = [
        {"states": (1, 1)},
        {"states": (2, 1, 0)},  # not in order
        {"states": (0, 1, 1)},
        {"states": (1, 2, 2)},  # two syncing
        {"states": (0, 0, 0)},
        {"states": (1, 3, 0)},  # never recorded
        {"incarnations": (0, 1, 0)},
        {"incarnations": (1, 0, 0)},
        {"members": (11, 11, 12)},
        {"members": (11, 0, 12)},
        {"members": (), "states": (), "incarnations": ()},
        {"wanted": (11, 11)},
        {"counter": 0},
    ]
    for changes in bad:
        with pytest.raises(AssertionError):
            check(replace(good, **changes))
    check(good)
    with pytest.raises(AssertionError):
        recorded_by(good, Proposal(good, R))


# --- what is shown -------------------------------------------------------------------------------------


def test_states_for_clients() -> None:
    assert states_now(record("ssy"), (1, 2, 1)) == (SERVING, OFFLINE, SYNCING)


def test_states_for_people() -> None:
    chain = record("ssoo", members=(A, B, C, D))
    waits, serves, off, last = TargetState.WAITING, SERVING, OFFLINE, TargetState.LAST_SERVING
    judged = {A: Member.HOLDS, B: Member.GONE, C: Member.OUTSIDE, D: Member.GONE}
    assert shown_states(chain, judged) == (serves, off, waits, off)
    judged = {A: Member.GONE, B: Member.SILENT, C: Member.OUTSIDE, D: Member.GONE}
    assert shown_states(chain, judged) == (last, last, waits, off)
    judged = {A: Member.WIPED, B: Member.RETURNED, C: Member.GONE, D: Member.GONE}
    assert shown_states(chain, judged) == (off, last, off, off)


# --- everything together ---------------------------------------------------------------------------------


def test_every_combination_has_a_row() -> None:
    """All triples of what members can say, with and without a proposal: a decision, never a fall through,
    never one that `_check_step` refuses; a record only with everybody's persistence."""
    said = [
        [
            gone(),
            silent(),
            seat(None, 2),
            holds(t),
            done(t, sync_target=C),
            holds(t, suspect=B),
            holds(t, poisoned=True),
            holds(t, reason=9, state=OFFLINE),
            holds(t, persisted=(2, 4)),
            seat(report(t, (0, 0)), 2),
            seat(report(t, (2, 4)), 2),
            returned(t),
            seat(report(t, (3, 6), acts=R)),
            seat(report(t, (3, 6), acts=R), lapsed=True),
            seat(report(t, (3, 6), acts=R), 2),
            seat(report(t, (3, 8), acts=R)),
        ]
        for t in (A, B, C)
    ]
    chains = [record("sss"), record("ssy"), record("sso"), record("syo"), record("soo", forced=B)]
    proposals = [
        None,
        Proposal(replace(record("sss"), term=3, counter=6), R),
        Proposal(replace(record("sso"), term=3, counter=6), R),
        Proposal(replace(record("ssy"), term=3, counter=6), R),
        Proposal(replace(record("soo"), term=3, counter=6), R, ((B, 1),)),
        Proposal(replace(record("soo"), term=3, counter=6), R, ((B, 2),)),
    ]
    actions = set()
    for chain, seats, proposal in itertools.product(chains, itertools.product(*said), proposals):
        decision = decided(chain, list(seats), proposal)
        actions.add(decision.action)
        assert decision.whole == (decision.reason == "")
        assert decision.serving or not decision.whole
        if decision.action is Action.RECORD:
            assert decision.proposal is proposal
            assert proposal is not None
            for target, state in zip(proposal.next.members, proposal.next.states, strict=True):
                body = seats[target - 11].report
                if state != OFFLINE:
                    assert body is not None
                    assert (body.persisted_term, body.persisted_counter) == (3, 6)
                    assert body.persisted_here
        if decision.action is Action.PROPOSE:
            assert decision.proposal is not None
            assert decision.proposal.version > R
            assert proposal is None or decision.proposal.version > proposal.version
            # once proposed, the same facts propose nothing more
            again = decided(chain, list(seats), decision.proposal)
            assert again.action is not Action.PROPOSE, "\n".join(map(str, (chain, *seats, decision, again)))
    assert actions == set(Action)

"""metadata.cluster.chain, the next membership: every row of its table."""

from __future__ import annotations

import pytest
from chain_seats import (
    OFFLINE,
    SYNCING,
    A,
    B,
    C,
    D,
    R,
    decided,
    done,
    gone,
    holds,
    next_of,
    outside,
    persists,
    record,
    replace_record,
    report,
    returned,
    seat,
    silent,
)

from metadata.cluster.chain import Action, Seat, recorded_by


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

"""metadata.cluster.chain: judging, actions, what is shown, and all of it together. The next membership is
test_chain_members, the world of crashes around it test_chain_walk."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from chain_seats import (
    OFFLINE,
    SERVING,
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
    report,
    returned,
    seat,
    silent,
)
from msgspec.structs import replace

from ffs.proto.cluster import TargetState
from metadata.cluster.chain import (
    Action,
    Member,
    Proposal,
    Seat,
    check,
    judge,
    recorded_by,
    shown_states,
    states_now,
)

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

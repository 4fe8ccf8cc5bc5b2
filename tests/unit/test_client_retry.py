"""The retry policy: every decision follows from what is known; nothing here waits."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffs import errors
from ffs.client.retry import Attempt, Kind, Next, Policy, backoff_s, decide, kind_of
from ffs.client.slots import SlotTable

POLICY = Policy(deadline_s=10.0, first_delay_s=0.01, most_delay_s=1.0)

attempts = st.builds(
    Attempt,
    kind=st.sampled_from(Kind),
    number=st.integers(0, 100),
    elapsed_s=st.floats(0, 20),
    servers=st.integers(1, 5),
    lost_before=st.booleans(),
    mutation=st.booleans(),
    retry_after_s=st.sampled_from([0.0, 0.5, 30.0]),
)


@given(attempts, st.floats(0, 1, exclude_max=True))
def test_nothing_goes_on_past_the_deadline(attempt: Attempt, jitter: float) -> None:
    decision = decide(POLICY, attempt, jitter)
    if decision.next in (Next.AGAIN, Next.ELSEWHERE):
        assert attempt.elapsed_s + decision.delay_s < POLICY.deadline_s


@given(attempts, st.floats(0, 1, exclude_max=True))
def test_an_answer_that_stands_is_raised_at_once(attempt: Attempt, jitter: float) -> None:
    decision = decide(POLICY, attempt, jitter)
    if attempt.kind is Kind.REFUSED:
        assert decision.next is Next.RAISE


@given(attempts, st.floats(0, 1, exclude_max=True))
def test_a_mutation_that_may_have_happened_is_never_called_failed(attempt: Attempt, jitter: float) -> None:
    """RAISE says that it didn't happen, or that the service answered."""
    decision = decide(POLICY, attempt, jitter)
    lost = attempt.lost_before or attempt.kind is Kind.LOST
    if decision.next is Next.RAISE and attempt.mutation:
        assert not lost or attempt.kind is Kind.REFUSED
    if decision.next is Next.RAISE_UNKNOWN:
        assert attempt.mutation
        assert lost


@given(attempts, st.floats(0, 1, exclude_max=True))
def test_a_session_that_is_over_is_never_retried_here(attempt: Attempt, jitter: float) -> None:
    if attempt.kind is Kind.SESSION_OVER:
        assert decide(POLICY, attempt, jitter).next in (Next.RAISE, Next.RAISE_UNKNOWN)


def test_all_servers_are_tried_before_anything_waits() -> None:
    delays = [
        decide(POLICY, Attempt(Kind.NOT_SENT, number, 0.0, servers=3), 0.0).delay_s for number in range(7)
    ]
    assert delays[:2] == [0.0, 0.0]
    assert delays[2] > 0
    assert delays[3:5] == [0.0, 0.0]
    assert delays[5] > delays[2]


def test_a_busy_server_is_asked_again_itself_when_it_says() -> None:
    decision = decide(POLICY, Attempt(Kind.BUSY, 0, 0.0, servers=3, retry_after_s=0.5), 0.0)
    assert (decision.next, decision.delay_s) == (Next.AGAIN, 0.5)


def test_backoff_grows_and_is_bounded() -> None:
    assert backoff_s(POLICY, 0, 0.0) == pytest.approx(0.005)
    assert backoff_s(POLICY, 3, 0.0) == pytest.approx(0.04)
    assert backoff_s(POLICY, 1000, 0.999) <= 1.0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.Unreachable(), Kind.NOT_SENT),
        (errors.NotPrimary(), Kind.NOT_SENT),
        (errors.ConnectionLost(), Kind.LOST),
        (errors.DeadlineExceeded(), Kind.LOST),
        (errors.ShutDown(), Kind.LOST),
        (errors.OutcomeUnknown(), Kind.LOST),
        (errors.Overloaded(), Kind.BUSY),
        (errors.Fenced(), Kind.SESSION_OVER),
        (errors.NotFound(), Kind.REFUSED),
        (errors.WrongCluster(), Kind.REFUSED),
        (errors.ChainUnavailable(), Kind.REFUSED),
    ],
)
def test_kinds(error: errors.FfsError, kind: Kind) -> None:
    assert kind_of(error) is kind


def test_slots_are_used_again_with_growing_sequences() -> None:
    table = SlotTable(2)
    first, second = table.take(), table.take()
    assert (first.number, second.number) == (0, 1)
    assert (first.sequence, second.sequence) == (1, 1)
    table.give(first)
    again = table.take()
    assert (again.number, again.sequence) == (0, 2)


def test_a_full_slot_table_waits_for_one_to_come_back() -> None:
    table = SlotTable(1)
    held = table.take()
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(table.take().sequence))
    waiter.start()
    table.give(held)
    waiter.join(30)
    assert got == [2]

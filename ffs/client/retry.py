"""What to do next after a failed request: pure decisions, no clock and no I/O of their own.

The doing (connecting, sleeping) stands in `ffs.client.caller`. docs/client.md, Retries.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ffs import errors


class Kind(enum.Enum):
    """How an attempt failed."""

    NOT_SENT = enum.auto()
    """No connection, or a server that is going away: certainly not carried out."""
    LOST = enum.auto()
    """The connection broke or the answer didn't come in time: perhaps carried out."""
    BUSY = enum.auto()
    """The server asks to come again: not carried out."""
    REFUSED = enum.auto()
    """An answer that stands: NotFound and the like."""
    SESSION_OVER = enum.auto()
    """The service doesn't know the session any more, and with it what was carried out."""


class Next(enum.Enum):
    """What the caller does now."""

    RAISE = enum.auto()
    """Give the error to the user."""
    RAISE_UNKNOWN = enum.auto()
    """Raise OutcomeUnknown: an earlier attempt may have been carried out."""
    AGAIN = enum.auto()
    """After `delay_s`, send the same request (same slot and sequence) to the same server."""
    ELSEWHERE = enum.auto()
    """After `delay_s`, send the same request to the next metadata service."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The next step and how long to wait before it, in seconds."""

    next: Next
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Bounds of the retries of one request. Times in seconds."""

    deadline_s: float = 30.0
    first_delay_s: float = 0.01
    most_delay_s: float = 1.0
    reply_timeout_s: float | None = None
    """Of one attempt; None: the connection's own."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is known when an attempt has failed."""

    kind: Kind
    number: int
    """0 for the first."""
    elapsed_s: float
    """Since the request began."""
    servers: int
    """Metadata services known; a full turn over them is made without waiting."""
    lost_before: bool = False
    """An earlier attempt ended LOST."""
    mutation: bool = False
    retry_after_s: float = 0.0
    """The server's wish; 0: none."""


def kind_of(error: errors.FfsError) -> Kind:
    """The kind of an error, whether a reply carried it or the connection raised it."""
    if isinstance(error, errors.Unreachable | errors.NotPrimary):
        return Kind.NOT_SENT
    if isinstance(error, errors.ConnectionLost | errors.DeadlineExceeded | errors.ShutDown):
        # ShutDown: another thread turned to the next service, or a service is going away.
        return Kind.LOST
    if isinstance(error, errors.OutcomeUnknown):
        return Kind.LOST
    if isinstance(error, errors.Fenced):
        return Kind.SESSION_OVER
    if isinstance(error, errors.Overloaded):
        return Kind.BUSY
    return Kind.REFUSED


def backoff_s(policy: Policy, step: int, jitter: float) -> float:
    """Exponential from `first_delay_s`, at most `most_delay_s`, times a jitter within [0.5, 1)."""
    whole = min(policy.first_delay_s * (1 << min(step, 20)), policy.most_delay_s)
    return whole * (0.5 + jitter / 2)


def decide(policy: Policy, attempt: Attempt, jitter: float) -> Decision:
    """The next step after `attempt`. `jitter` is a random number of [0, 1)."""
    lost = attempt.mutation and (attempt.lost_before or attempt.kind is Kind.LOST)
    if attempt.kind is Kind.REFUSED:
        return Decision(Next.RAISE)
    if attempt.kind is Kind.SESSION_OVER:
        return Decision(Next.RAISE_UNKNOWN if lost else Next.RAISE)
    if attempt.kind is Kind.BUSY:
        delay = attempt.retry_after_s or backoff_s(policy, attempt.number, jitter)
        step = Next.AGAIN
    else:
        turn, place = divmod(attempt.number, max(attempt.servers, 1))
        # The first attempt may have met a connection that went stale while it was idle.
        whole_turn = place == attempt.servers - 1 and attempt.number > 0
        delay = backoff_s(policy, turn, jitter) if whole_turn else 0.0
        step = Next.ELSEWHERE
    if attempt.elapsed_s + delay >= policy.deadline_s:
        return Decision(Next.RAISE_UNKNOWN if lost else Next.RAISE)
    return Decision(step, delay)

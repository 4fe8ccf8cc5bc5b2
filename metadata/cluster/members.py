"""What a chain's members are, judged from what they say. Pure. The table is in metadata.cluster.chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from ffs.proto.cluster import ChainRecord, TargetReport, TargetState

Version = tuple[int, int]  # (term, counter), as docs/craq.md

# craq/replica.h, Reason
DEVICE_FAILED: Final = 8
DIVERGED: Final = 9


class Member(IntEnum):
    """Rows of the judging table (metadata.cluster.chain), in its order."""

    GONE = 0
    SILENT = 1
    LOST = 2
    FAILED = 3
    FOREIGN = 4
    OUTSIDE = 5
    LATE = 6
    DIVERGED = 7
    HOLDS = 8
    WIPED = 9
    STALE = 10
    RETURNED = 11


@dataclass(frozen=True, slots=True)
class Seat:
    """What is known of a target's node, and of the target, now."""

    incarnation: int  # the node's present one, as registered
    here: bool  # it was heard in that incarnation within the failure timeout
    lapsed: bool  # no lease that a manager gave to this node can still hold
    report: TargetReport | None  # the target's last one in that incarnation


Seats = Mapping[int, Seat]  # by target: every member and every wanted target of the chain


@dataclass(frozen=True, slots=True)
class Proposal:
    """The whole next record, that members were asked to persist. It was made from the recorded version
    `base` and can only follow that one. `without`: whom it leaves out though they are there (suspected,
    too slow to persist, not getting filled), and their incarnations, until it is recorded or they restart."""

    next: ChainRecord
    base: Version
    without: tuple[tuple[int, int], ...] = ()  # (target, incarnation)

    @property
    def version(self) -> Version:
        return self.next.term, self.next.counter


def version_of(record: ChainRecord) -> Version:
    return record.term, record.counter


def persisted_of(report: TargetReport) -> Version:
    return report.persisted_term, report.persisted_counter


def recorded_in(report: TargetReport) -> Version:
    """The recorded version that the target acts in."""
    return report.recorded_term, report.recorded_counter


def members_in(record: ChainRecord, state: TargetState) -> tuple[int, ...]:
    return tuple(m for m, s in zip(record.members, record.states, strict=True) if s == state)


def serving_of(record: ChainRecord) -> tuple[int, ...]:
    return members_in(record, TargetState.SERVING)


def syncing_of(record: ChainRecord) -> int:
    """The member that is being filled; 0: none."""
    return next(iter(members_in(record, TargetState.SYNCING)), 0)


def incarnation_in(record: ChainRecord, target: int) -> int:
    """Under which the target takes part in that version; 0: it takes no part."""
    if target not in record.members:
        return 0
    at = record.members.index(target)
    return 0 if record.states[at] == TargetState.OFFLINE else record.incarnations[at]


def goal_of(record: ChainRecord) -> tuple[int, ...]:
    """The targets that the chain shall end with, in order."""
    return record.wanted or record.members


def judge(record: ChainRecord, target: int, seat: Seat) -> Member:
    """The first row of the judging table that fits."""
    took_part_as = incarnation_in(record, target)
    if not seat.here:
        return Member.GONE if seat.lapsed else Member.SILENT
    body = seat.report
    if body is None:
        return Member.SILENT if seat.incarnation == took_part_as else Member.LOST
    assert body.target == target, (body, record)
    if body.poisoned or (body.reason == DEVICE_FAILED and body.state == TargetState.OFFLINE):
        return Member.FAILED
    if body.chain not in (0, record.id):
        return Member.FOREIGN
    if took_part_as == 0:
        return Member.OUTSIDE
    if seat.incarnation == took_part_as:
        return _judge_same(record, target, body)
    if record.states[record.members.index(target)] == TargetState.SYNCING:
        return Member.OUTSIDE
    persisted = persisted_of(body)
    if persisted == (0, 0):
        return Member.WIPED
    return Member.STALE if persisted < version_of(record) else Member.RETURNED


def _judge_same(record: ChainRecord, target: int, body: TargetReport) -> Member:
    """A member that takes part in the incarnation that it has now."""
    if persisted_of(body) < version_of(record):
        return Member.LATE  # it persisted that version before it was recorded
    serving = record.states[record.members.index(target)] == TargetState.SERVING
    if serving and body.reason == DIVERGED and body.state == TargetState.OFFLINE:
        return Member.DIVERGED
    return Member.HOLDS

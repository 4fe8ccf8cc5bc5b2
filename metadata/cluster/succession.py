"""The next membership of a chain: `succession(...)`. Pure. The table is in metadata.cluster.chain.

Always computed from the recorded version. What a live proposal has chosen freely - whom to fill, whom
it left out under suspicion, whether to order anew - is chosen again while it is possible, so that a
proposal isn't replaced for a whim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ffs.proto.cluster import MAX_REPLICAS, ChainRecord, TargetState
from metadata.cluster.members import (
    Member,
    Proposal,
    Seats,
    Version,
    goal_of,
    incarnation_in,
    persisted_of,
    recorded_in,
    serving_of,
    syncing_of,
    version_of,
)

MaySync = Callable[[int, int], bool]  # (source, target): whether that sync may begin now


@dataclass(slots=True)
class Succession:
    """Members of the next version by state. `holds`: nothing may be recorded now, for that reason."""

    serving: tuple[int, ...] = ()
    syncing: int = 0
    offline: tuple[int, ...] = ()
    without: tuple[tuple[int, int], ...] = ()  # as Proposal's
    holds: str = ""
    wants_slot: bool = False  # somebody could be filled, but may_sync said no
    wants_quiet: bool = False  # only the order is left to be put right
    forced: bool = False


@dataclass(slots=True)
class Facts:
    """The arguments of `succession`, and what follows from them at once."""

    record: ChainRecord
    seats: Seats
    judged: Mapping[int, Member]
    live: Proposal | None
    may_sync: MaySync
    quiet: bool
    overdue: bool
    stalled: bool
    unsettled: bool
    goal: tuple[int, ...] = field(init=False)
    was_serving: tuple[int, ...] = field(init=False)
    was_syncing: int = field(init=False)

    def __post_init__(self) -> None:
        self.goal = goal_of(self.record)
        self.was_serving = serving_of(self.record)
        self.was_syncing = syncing_of(self.record)


def succession(facts: Facts) -> Succession:
    if facts.record.counter == 0:
        return _beginning(facts)
    judged = facts.judged
    waited = [m for m in facts.was_serving if judged[m] in (Member.SILENT, Member.LATE)]
    fit = tuple(m for m in facts.was_serving if judged[m] in (Member.HOLDS, Member.RETURNED))
    if waited:
        return Succession(holds=f"waiting for target {waited[0]}: it may still hold a lease")
    if not fit:
        return _forced(facts)
    out = _left_out(facts, fit)
    stays = _settled(facts, tuple(m for m in fit if m not in out))
    leaving = _leaving(facts, stays)
    steady = stays == facts.was_serving and all(judged[m] is Member.HOLDS for m in stays)
    chosen = Succession(
        serving=tuple(m for m in stays if m not in leaving),
        without=tuple((m, facts.seats[m].incarnation) for m in out),
    )
    if steady and _promotes(facts, out):
        chosen.serving += (facts.was_syncing,)
    else:
        chosen.syncing = _syncing(facts, chosen, out, changing=not steady or bool(leaving))
        if steady and not leaving and not chosen.syncing:
            _order(facts, chosen)
    chosen.offline = _offline(facts, chosen)
    if chosen.syncing and len(chosen.serving) + len(chosen.offline) >= MAX_REPLICAS:
        assert chosen.syncing not in facts.record.members, chosen
        chosen.syncing = 0  # it joins when somebody has left
    return chosen


def _beginning(facts: Facts) -> Succession:
    """A chain that was never recorded has no data: whoever is there begins it."""
    waited = [m for m in facts.goal if facts.judged[m] in (Member.SILENT, Member.FOREIGN)]
    serving = tuple(m for m in facts.goal if facts.judged[m] is Member.OUTSIDE)
    if waited:
        return Succession(holds=f"waiting for target {waited[0]} to begin")
    if not serving:
        return Succession(holds="no member is there to begin it")
    return Succession(serving=serving, offline=tuple(m for m in facts.goal if m not in serving))


def _forced(facts: Facts) -> Succession:
    """No member that was serving can: only an operator can give up what they had."""
    forced = facts.record.forced
    if not forced:
        missed = ", ".join(str(m) for m in facts.was_serving)
        what = "targets that were serving last can't serve: one of" if "," in missed else "target"
        return Succession(holds=f"{what} {missed} must come back: it alone has all data")
    usable = (Member.OUTSIDE, Member.WIPED, Member.STALE, Member.DIVERGED, Member.HOLDS, Member.RETURNED)
    if facts.judged[forced] not in usable:
        return Succession(holds=f"waiting for target {forced}, which was forced to lead")
    others = tuple(m for m in facts.record.members if m != forced)
    return Succession(serving=(forced,), offline=others, forced=True)


def _left_out(facts: Facts, fit: tuple[int, ...]) -> tuple[int, ...]:
    """Members that are there and must go: suspected by their neighbours, too slow to persist, or left out
    for such a reason by the live proposal."""
    live = facts.live
    out: list[int] = []
    if live is not None:
        # One that can't persist in the incarnation in which it came back would be taken back for ever.
        there = (Member.HOLDS, Member.RETURNED, Member.OUTSIDE)
        out += [
            m
            for m, incarnation in live.without
            if facts.judged.get(m) in there and facts.seats[m].incarnation == incarnation
        ]
    out += _suspects(facts, out)
    if live is not None and facts.overdue:
        out += [m for m in _slow(facts, live) if m not in out]
    if all(m in out for m in fit):
        return ()  # somebody must lead
    return tuple(out)


def _settled(facts: Facts, stays: tuple[int, ...]) -> tuple[int, ...]:
    """Members that come and go would replace each proposal before it is persisted, for as long as they do so.
    After a while whoever is back stays left out by the live one: it gets smaller, and then it is recorded."""
    if not facts.unsettled or facts.live is None:
        return stays
    kept = serving_of(facts.live.next)
    return tuple(m for m in stays if m in kept or facts.judged[m] is not Member.HOLDS) or stays


def _slow(facts: Facts, live: Proposal) -> list[int]:
    """Who takes part in the live proposal, is there, and hasn't persisted it."""
    found = []
    for target in live.next.members:
        seat = facts.seats[target]
        if incarnation_in(live.next, target) and seat.here and seat.report is not None:
            found += [target] if persisted_of(seat.report) < live.version else []
    return found


def _suspects(facts: Facts, known: list[int]) -> list[int]:
    """Whoever most of the others accuse goes first; of equals the later one; its own word is void then."""
    accusations: dict[int, int] = {}
    for target in facts.was_serving:
        report = facts.seats[target].report
        if facts.judged[target] is not Member.HOLDS or report is None:
            continue
        if report.suspect and recorded_in(report) == version_of(facts.record):
            accusations[target] = report.suspect
    order = (*facts.was_serving, facts.was_syncing)
    found: list[int] = []
    while True:
        counts: dict[int, int] = {}
        for accuser, accused in accusations.items():
            blind = accuser in known or accuser in found or accused in known or accused in found
            if not blind and accused in order and facts.judged[accused] is Member.HOLDS:
                counts[accused] = counts.get(accused, 0) + 1
        if not counts:
            return found
        found.append(max(counts, key=lambda target: (counts[target], order.index(target))))


def _leaving(facts: Facts, stays: tuple[int, ...]) -> tuple[int, ...]:
    """Serving members that aren't wanted go when every wanted one serves."""
    if not all(m in stays for m in facts.goal):
        return ()
    return tuple(m for m in stays if m not in facts.goal)


def _promotes(facts: Facts, out: tuple[int, ...]) -> bool:
    """Whether the syncing member is done: its source says so in exactly the recorded version, in the
    incarnation in which it takes part in it. A live proposal that promotes it was made for that."""
    target = facts.was_syncing
    if not target or target in out or target not in facts.goal or facts.judged[target] is not Member.HOLDS:
        return False
    if facts.live is not None and target in serving_of(facts.live.next):
        return True
    report = facts.seats[facts.was_serving[-1]].report
    assert report is not None, facts
    in_version = recorded_in(report) == version_of(facts.record)
    return in_version and report.sync_target == target and report.sync_done


def _syncing(facts: Facts, chosen: Succession, out: tuple[int, ...], *, changing: bool) -> int:
    """Whom the last serving member fills in the next version; 0: nobody."""
    present = facts.was_syncing
    if present and present in facts.goal and present not in out:
        if facts.judged[present] is Member.HOLDS:
            # A live proposal isn't replaced for the sake of a sync.
            wait = changing or not facts.stalled or facts.live is not None
            return present if wait else _instead(facts, chosen, out)
        if facts.judged[present] in (Member.SILENT, Member.LATE) and not changing:
            return present  # nothing has to be persisted, so it may be waited for
    # Who was serving is first recorded as offline, then filled: else one that lost its data, and persisted
    # a proposal to be filled that was never recorded, would look like one that kept it.
    possible = [
        m
        for m in facts.goal
        if m not in facts.was_serving and m not in out and facts.judged[m] is Member.OUTSIDE
    ]
    if facts.live is not None:
        filled = syncing_of(facts.live.next)
        if filled in possible or not filled:
            return filled  # that proposal isn't replaced for the sake of a sync
    for target in possible:
        if facts.may_sync(chosen.serving[-1], target):
            return target
    chosen.wants_slot = bool(possible)
    return 0


def _instead(facts: Facts, chosen: Succession, out: tuple[int, ...]) -> int:
    """Whom to fill in place of the one whose sync has failed for a while; that one, if there is nobody."""
    present = facts.was_syncing
    others = [
        m
        for m in facts.goal
        if m not in facts.was_serving and m not in (*out, present) and facts.judged[m] is Member.OUTSIDE
    ]
    for target in others:
        if facts.may_sync(chosen.serving[-1], target):
            chosen.without += ((present, facts.seats[present].incarnation),)
            return target
    chosen.wants_slot = bool(others)
    return present


def _order(facts: Facts, chosen: Succession) -> None:
    """Puts the wanted order right, once things have been quiet."""
    if set(chosen.serving) != set(facts.goal) or chosen.serving == facts.goal:
        return
    if facts.live is not None:
        if serving_of(facts.live.next) == facts.goal:
            chosen.serving = facts.goal
    elif facts.quiet:
        chosen.serving = facts.goal
    else:
        chosen.wants_quiet = True


def _offline(facts: Facts, chosen: Succession) -> tuple[int, ...]:
    """The rest: wanted ones, and those that serve now - they must learn that they don't."""
    return tuple(
        m
        for m in facts.record.members
        if m not in chosen.serving and m != chosen.syncing and (m in facts.goal or m in facts.was_serving)
    )


def next_record(facts: Facts, chosen: Succession, version: Version) -> ChainRecord:
    """The record that a succession makes, under a version."""
    part = (*chosen.serving, *((chosen.syncing,) if chosen.syncing else ()))
    states = (
        [int(TargetState.SERVING)] * len(chosen.serving)
        + [int(TargetState.SYNCING)] * (1 if chosen.syncing else 0)
        + [int(TargetState.OFFLINE)] * len(chosen.offline)
    )
    return ChainRecord(
        id=facts.record.id,
        table=facts.record.table,
        term=version[0],
        counter=version[1],
        members=(*part, *chosen.offline),
        states=tuple(states),
        incarnations=(*(facts.seats[m].incarnation for m in part), *(0 for _ in chosen.offline)),
        wanted=facts.record.wanted,
        forced=0,
    )


def same_part(record: ChainRecord, other: ChainRecord) -> bool:
    """Whether two records have the same members in the same states and incarnations."""
    return (
        record.members == other.members
        and record.states == other.states
        and all(incarnation_in(record, m) == incarnation_in(other, m) for m in record.members)
    )

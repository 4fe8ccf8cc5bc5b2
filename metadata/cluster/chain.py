"""What to do with a chain: `decide(record, seats, proposal, term)`. Pure. docs/control_plane.md, Chains.

A chain's record names its version and its members: the serving ones in chain order, then at most one
that is syncing, then offline ones, which take no part. Every change goes three steps:

    propose   the next record, computed from the recorded one, goes to all that it names as serving or
              syncing, and to those that serve now and shall not any more
    persist   each of the former makes it durable in its present incarnation; each of the latter that is
              alive stands down (it stops serving, then makes it durable)
    record    when all have, one transaction makes it the recorded version; members act in recorded
              versions only

Everything follows from the record and from what members say, so a manager that dies in between leaves
nothing to repair: a persisted version above the recorded one makes the next manager propose above it.

1. Each member is judged by itself, first row that fits:

    member    what is known of it
    --------  -------------------------------------------------------------------------------------
    GONE      not heard for the failure timeout; no lease that it was given can still hold
    SILENT    not heard, but a lease may hold; or it has only just registered
    LOST      its node runs, in another incarnation than recorded, without this target
    FAILED    its device refuses everything until restart
    FOREIGN   it still has what it had in another chain
    OUTSIDE   takes no part in the recorded version, and could be filled; any content, any incarnation
              (also a syncing member in another incarnation than recorded, and all of a new chain)
    LATE      same incarnation as recorded, yet says it persisted an older version: an old report
    DIVERGED  serves in the record, lacks what its predecessor has committed, and has stopped
    HOLDS     takes part, in the incarnation that the record names
    WIPED     serves in the record; another incarnation, and nothing persisted
    STALE     the same, and an older version persisted
    RETURNED  the same, and the recorded version (or a proposal above it) persisted: it lost its
              memory and kept its data

2. The next membership (metadata.cluster.succession):

    judged                   serving in the record       syncing in the record      offline, or wanted
    -----------------------  --------------------------  -------------------------  -------------------
    SILENT LATE              nothing changes: wait       stays; if anything else    stays offline
                                                         changes: offline
    GONE LOST FAILED FOREIGN offline                     offline                    stays offline
    WIPED STALE DIVERGED     offline (then syncing)      impossible                 impossible
    RETURNED                 serving, unless left out    impossible                 impossible
    HOLDS                    serving, unless left out    stays, or is promoted;     impossible
                                                         offline if left out
    OUTSIDE                  impossible                  syncing, in the new        syncing, if no other
                                                         incarnation                is and a slot is free

    - If no serving member is left, the record stays and its serving members are waited for: one of
      them has all that was acknowledged. Only `forced` (force-lead) overrides that. If one of them comes
      back first, it leads, and the consent is void for any later time.
    - Left out though it holds: a suspect (a neighbour waits for its answers for a whole failure timeout,
      while both are there), one that is too slow to persist, one that isn't wanted when all wanted serve.
      One that has returned: only when it is too slow to persist. A live proposal goes on leaving out whom it
      left out, until they restart.
    - When proposals have followed each other for a while, and none was recorded - members come and go, on
      a machine that is too busy for its timeout -, who holds and is back stays left out by the live one.
    - A syncing member whose sync has failed for a while goes offline when another one can be filled instead.
    - Promoted, as the new last one: when its source, the last serving member, says so (sync_done) in
      exactly the recorded version, all serving members hold and none leaves.
    - Members that aren't wanted and don't serve are dropped. When all wanted serve, nothing is under way
      and it has been quiet: once the wanted order.
    - A new chain is begun by whoever is there, once nobody is silent.

3. The action, from the next membership N and the live proposal P (one is live while it follows the recorded
   version and those whom it names have the incarnations that it names):

    N                    no live P, nobody ahead    no live P, somebody ahead   live P
    -------------------  -------------------------  --------------------------  -----------------------
    hold                 nothing                    nothing                     nothing (P stands)
    as recorded          nothing (`forced` set:     propose N                   propose N, above P
                         propose N, which spends it)
    another              propose N                  propose N                   P names N: wait, or
                                                                                record; else propose N

    Somebody is ahead: takes part in the record and has persisted a version above it (and above P).
    P is recorded when all that it names have persisted it in this incarnation, and each that serves now
    and not in P is over: its lease has certainly ended, or it has another incarnation, or it has persisted
    P itself, or its device has failed for good.

A manager that sees a version of a later term than its own does nothing: its time is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from msgspec.structs import replace

from ffs.proto.cluster import MAX_REPLICAS, ChainRecord, TargetState
from metadata.cluster.members import (
    DEVICE_FAILED,
    Member,
    Proposal,
    Seat,
    Seats,
    Version,
    goal_of,
    incarnation_in,
    judge,
    persisted_of,
    recorded_in,
    serving_of,
    syncing_of,
    version_of,
)
from metadata.cluster.reasons import reason_of
from metadata.cluster.succession import Facts, MaySync, Succession, next_record, same_part, succession

__all__ = [
    "Action",
    "Decision",
    "Member",
    "Proposal",
    "Seat",
    "Version",
    "check",
    "decide",
    "judge",
    "people_of",
    "recorded_by",
    "shown_states",
    "states_now",
    "version_of",
]


class Action(IntEnum):
    NONE = 0  # nothing to do now
    PROPOSE = 1  # hand `proposal` out, in place of the one before
    RECORD = 2  # make `proposal` the recorded version


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    proposal: Proposal | None  # that of the action; NONE: the live one, if there is one
    serving: bool  # the chain takes updates: all serving members act in the recorded version
    whole: bool  # ... and they are all that are wanted, in the wanted order
    moving: bool  # an exchange is going on: look again soon
    reason: str  # "" when whole; else what is missing and what it waits for
    judged: Mapping[int, Member]  # members and wanted targets
    wants_slot: bool = False  # waits for another sync to end
    wants_quiet: bool = False  # would put the order right
    withhold: tuple[int, ...] = ()  # targets whose nodes get no lease until they have stood down


def people_of(record: ChainRecord) -> tuple[int, ...]:
    """The targets whose seats `decide` wants to know."""
    forced = (record.forced,) if record.forced else ()
    return tuple(dict.fromkeys((*record.members, *record.wanted, *forced)))


def check(record: ChainRecord) -> None:
    """Asserts that the record is one that this program can have written."""
    n = len(record.members)
    assert 1 <= n <= MAX_REPLICAS, record
    assert len(record.states) == len(record.incarnations) == n, record
    assert len({0, *record.members}) == n + 1, record
    assert len(set(record.wanted)) == len(record.wanted), record
    serving = sum(state == TargetState.SERVING for state in record.states)
    syncing = sum(state == TargetState.SYNCING for state in record.states)
    rest = n - serving - syncing
    shape = [TargetState.SERVING] * serving + [TargetState.SYNCING] * syncing + [TargetState.OFFLINE] * rest
    assert list(record.states) == shape, record
    assert syncing <= 1, record
    if record.counter == 0:
        assert serving == syncing == 0, record
        assert set(record.incarnations) == {0}, record
    else:
        assert serving >= 1, record
        assert 0 not in record.incarnations[: serving + syncing], record


def decide(
    record: ChainRecord,
    seats: Seats,
    proposal: Proposal | None,
    term: int,
    *,
    may_sync: MaySync = lambda source, target: True,
    quiet: bool = False,
    overdue: bool = False,
    stalled: bool = False,
    unsettled: bool = False,
) -> Decision:
    """What the primary of `term` does now. `seats`: of all `people_of(record)`. `proposal`: the last
    one of this chain in this term, live or not. `quiet`: nothing has changed for a while. `overdue`: the live
    proposal has waited for its members for longer than it should. `stalled`: the sync of the
    recorded version has failed for a while. `unsettled`: proposals have followed each other for a while, and
    none was recorded."""
    check(record)
    judged = {target: judge(record, target, seats[target]) for target in people_of(record)}
    live = proposal if proposal is not None and _is_live(record, proposal, seats) else None
    facts = Facts(record, seats, judged, live, may_sync, quiet, overdue, stalled, unsettled)
    chosen = succession(facts)
    top = _top(record, seats, proposal)
    serving, acting = _serves(record, seats, judged)
    whole = serving and serving_of(record) == goal_of(record) and record.members == goal_of(record)

    def decision(action: Action, given: Proposal | None, withhold: Sequence[int] = ()) -> Decision:
        changing = action is not Action.NONE or given is not None
        return Decision(
            action=action,
            proposal=given,
            serving=serving,
            whole=whole and not changing,
            moving=changing or (not acting and not chosen.holds),
            reason="" if whole and not changing else reason_of(facts, chosen, given),
            judged=judged,
            wants_slot=chosen.wants_slot,
            wants_quiet=chosen.wants_quiet,
            withhold=tuple(withhold),
        )

    if top[0] > term or chosen.holds:
        return decision(Action.NONE, live)
    after = next_record(facts, chosen, (term, top[1] + 1))
    _check_step(record, after, chosen)
    ahead = _ahead(record, seats, live)
    if live is None and not ahead and not record.forced and same_part(record, after):
        return decision(Action.NONE, None)
    if live is None or ahead or not same_part(live.next, after):
        return decision(Action.PROPOSE, Proposal(after, version_of(record), chosen.without))
    standing = [m for m in serving_of(record) if m not in serving_of(live.next) and not _over(facts, live, m)]
    if not standing and all(_ready(live, m, seats[m]) for m in live.next.members):
        assert live.version > version_of(record), (record, live)
        return decision(Action.RECORD, live)
    pressing = overdue or any(target in serving_of(record) for target, _ in live.without)
    return decision(Action.NONE, live, standing if pressing else ())


def recorded_by(record: ChainRecord, proposal: Proposal) -> ChainRecord:
    """The record after RECORD. What an operator wants now stays; a forced lead is spent."""
    assert proposal.base == version_of(record), (record, proposal)
    assert proposal.version > version_of(record), (record, proposal)
    after = replace(proposal.next, wanted=record.wanted, forced=0)
    check(after)
    return after


def states_now(record: ChainRecord, incarnations: Sequence[int]) -> tuple[int, ...]:
    """The members' states for clients, given their nodes' present incarnations: one that restarted doesn't
    take part before a version was recorded with it."""
    return tuple(
        state if was == now else int(TargetState.OFFLINE)
        for state, was, now in zip(record.states, record.incarnations, incarnations, strict=True)
    )


def shown_states(record: ChainRecord, judged: Mapping[int, Member]) -> tuple[int, ...]:
    """The members' states for people: WAITING and LAST_SERVING, too."""
    led = any(judged[m] is Member.HOLDS for m in serving_of(record))
    shown = []
    for target, state in zip(record.members, record.states, strict=True):
        member = judged[target]
        if state == TargetState.OFFLINE:
            waits = member is Member.OUTSIDE and target in goal_of(record) and record.counter > 0
            shown.append(TargetState.WAITING if waits else TargetState.OFFLINE)
        elif member is Member.HOLDS:
            shown.append(TargetState(state))
        elif state == TargetState.SERVING and not led and member is not Member.WIPED:
            shown.append(TargetState.LAST_SERVING)
        else:
            shown.append(TargetState.OFFLINE)
    return tuple(map(int, shown))


# inside


def _is_live(record: ChainRecord, proposal: Proposal, seats: Seats) -> bool:
    """Spent when it, or another after the same version, has been recorded, by us or over our head."""
    if proposal.base != version_of(record) or proposal.version <= version_of(record):
        return False
    named = proposal.next.members
    return all(
        target in seats and incarnation_in(proposal.next, target) in (0, seats[target].incarnation)
        for target in named
    )


def _top(record: ChainRecord, seats: Seats, proposal: Proposal | None) -> Version:
    """The highest version of this chain that was ever seen."""
    seen = [version_of(record)]
    seen += [
        persisted_of(seat.report)
        for seat in seats.values()
        if seat.report is not None and seat.report.chain == record.id
    ]
    if proposal is not None:
        seen.append(proposal.version)
    return max(seen)


def _ahead(record: ChainRecord, seats: Seats, live: Proposal | None) -> bool:
    known = version_of(record) if live is None else live.version
    reports = [seats[target].report for target in record.members if incarnation_in(record, target)]
    return any(r is not None and r.chain == record.id and persisted_of(r) > known for r in reports)


def _ready(live: Proposal, target: int, seat: Seat) -> bool:
    """Whether it has persisted the proposal, if the proposal names it."""
    if not incarnation_in(live.next, target):
        return True
    report = seat.report
    return report is not None and report.persisted_here and persisted_of(report) == live.version


def _over(facts: Facts, live: Proposal, target: int) -> bool:
    """Whether a member that serves in the recorded version, and not in the next, surely doesn't any more."""
    seat = facts.seats[target]
    if seat.lapsed or seat.incarnation != incarnation_in(facts.record, target):
        return True
    report = seat.report
    if report is None:
        return False
    failed = report.state == TargetState.OFFLINE and (report.poisoned or report.reason == DEVICE_FAILED)
    return failed or (report.persisted_here and persisted_of(report) == live.version)


def _serves(record: ChainRecord, seats: Seats, judged: Mapping[int, Member]) -> tuple[bool, bool]:
    """(All serving members serve, all members act) in the recorded version."""
    serves = acts = record.counter > 0
    for target in record.members:
        report = seats[target].report
        if not incarnation_in(record, target):
            continue
        in_version = (
            judged[target] is Member.HOLDS
            and report is not None
            and recorded_in(report) == version_of(record)
        )
        acts = acts and in_version
        if target in serving_of(record):
            serves = serves and in_version and report is not None and report.state == TargetState.SERVING
    return serves, acts


def _check_step(record: ChainRecord, after: ChainRecord, chosen: Succession) -> None:
    """What no next record may do, whatever the tables say."""
    check(after)
    if record.counter == 0 or chosen.forced:
        return
    was, now = set(serving_of(record)), set(serving_of(after))
    assert was & now, (record, after)  # never without any that has all data
    assert now - was <= {syncing_of(record)}, (record, after)  # none serves that wasn't filled
    assert syncing_of(after) not in was, (record, after)
    assert was <= set(after.members), (record, after)  # who served learns that it doesn't

"""What to do with a chain: `decide(chain, reports, proposal)`. Pure. docs/control_plane.md, Chains.

Membership never changes yet: a chain serves when all its members acted in its recorded version
without losing their memory. A member that restarted kept what it persisted and lost the rest (who
acknowledged what, which updates were on their way), so the chain may only go on in a new version
that every member has persisted in its present incarnation: *lead back*. Two steps, each decided
here from reports alone, so a manager that dies between them leaves nothing to repair:

    propose   all members report the recorded version (or a later proposal of it that was never
              recorded) as persisted: ask them to persist counter + 1
    record    all have persisted exactly that, in the incarnation that they have now: one
              transaction makes it the recorded version, and members adopt it

Each member is judged by itself, first row that fits:

    member     what its report says                                      then
    ---------  --------------------------------------------------------  --------------------
    ABSENT     no report of the present incarnation within the timeout   wait for it
    POISONED   its device refuses everything until restart               wait for its restart
    READY      persisted the live proposal, in this incarnation          count it
    BLANK      never recorded chain; nothing persisted                   propose
    WIPED      recorded chain; nothing persisted                         offline: recovery
    STALE      persisted an older version than the recorded one          offline: recovery
    AHEAD      persisted a later version than the recorded one, and not  propose above it
               an older one than the live proposal
    CURRENT    persisted the recorded one, same incarnation as recorded  serves
    RETURNED   persisted the recorded one, another incarnation; or a     propose
               proposal that is older than the live one

and the chain by its worst member (down the table), with a live proposal or without:

    worst                       no live proposal     live proposal
    --------------------------  -------------------  -----------------------------
    ABSENT POISONED             hold                 hold (the proposal stands)
    WIPED STALE                 offline              offline
    AHEAD                       propose              propose anew, above
    BLANK                       propose              wait until it persists
    RETURNED                    propose              wait until it persists
    CURRENT (all of them)       serving, once all    impossible: a proposal has a cause
                                act in it
    CURRENT and READY           impossible           wait until they persist
    READY (all of them)         impossible           record

A proposal is live while it is above the recorded version (a record that has just become visible may
be seen before its transaction has returned) and every member has the incarnation that it was made
for. A manager that sees a version of a later term than its own does nothing: its time is over.
Recovery of a replica that is WIPED or STALE is not built yet: such a chain stays offline and says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ffs.proto.cluster import MAX_REPLICAS, ChainRecord, TargetReport, TargetState

Version = tuple[int, int]  # (term, counter), as docs/craq.md


class Member(IntEnum):
    """Worst first."""

    ABSENT = 0
    POISONED = 1
    WIPED = 2
    STALE = 3
    AHEAD = 4
    BLANK = 5
    RETURNED = 6
    CURRENT = 7
    READY = 8


class Action(IntEnum):
    NONE = 0  # nothing to do now
    PROPOSE = 1  # ask all members to persist `version`
    RECORD = 2  # make `version` the recorded one


@dataclass(frozen=True, slots=True)
class Proposal:
    """A version that members were asked to persist, for the incarnations that they had."""

    version: Version
    incarnations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A member's last report in its present incarnation."""

    incarnation: int
    body: TargetReport


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    version: Version  # of action; else the recorded one
    serving: bool  # every member serves
    moving: bool  # an exchange is going on: look again soon
    reason: str  # "" when serving; else why not and what it waits for
    members: tuple[Member, ...]


def check(chain: ChainRecord) -> None:
    """Asserts that the record is one that this program can have written."""
    n = len(chain.members)
    assert 1 <= n <= MAX_REPLICAS, chain
    assert len(chain.states) == len(chain.incarnations) == n, chain
    assert len(set(chain.members)) == n, chain
    if chain.counter == 0:
        assert set(chain.states) == {TargetState.OFFLINE}, chain
        assert set(chain.incarnations) == {0}, chain
    else:
        # Syncing, waiting and last-serving members come with recovery, which isn't built yet.
        assert set(chain.states) == {TargetState.SERVING}, chain
        assert 0 not in chain.incarnations, chain


def classify(chain: ChainRecord, at: int, report: Report | None, proposal: Proposal | None) -> Member:
    """The first row of the members' table that fits. `proposal` is a live one or None."""
    if report is None:
        return Member.ABSENT
    body = report.body
    assert body.target == chain.members[at], (body, chain)
    if body.poisoned:
        return Member.POISONED
    recorded: Version = (chain.term, chain.counter)
    persisted: Version = (body.persisted_term, body.persisted_counter)
    if proposal is not None and persisted == proposal.version and body.persisted_here:
        return Member.READY
    if persisted == (0, 0):
        return Member.BLANK if chain.counter == 0 else Member.WIPED
    if persisted > recorded:
        superseded = proposal is not None and persisted < proposal.version
        return Member.RETURNED if superseded else Member.AHEAD
    if persisted < recorded:
        return Member.STALE
    if chain.counter == 0:
        # Members are never asked to persist a version with counter 0.
        raise AssertionError(f"chain {chain.id}: target {body.target} persisted {persisted}")
    return Member.CURRENT if report.incarnation == chain.incarnations[at] else Member.RETURNED


def decide(
    chain: ChainRecord, reports: Sequence[Report | None], proposal: Proposal | None, term: int
) -> Decision:
    """What the primary of `term` does now. `reports` stand in the order of chain.members."""
    check(chain)
    assert len(reports) == len(chain.members), (chain, reports)
    recorded: Version = (chain.term, chain.counter)
    if proposal is not None and proposal.version <= recorded:
        proposal = None  # spent: it has been recorded, by us or over our head
    live = proposal if proposal is not None and _is_live(proposal, reports) else None
    members = tuple(classify(chain, at, report, live) for at, report in enumerate(reports))
    worst = min(members)
    reason = _reason(chain, reports, members)

    def nothing(*, serving: bool = False, moving: bool = False) -> Decision:
        return Decision(Action.NONE, recorded, serving, moving, "" if serving else reason, members)

    def propose() -> Decision:
        seen = [recorded]
        seen += [(r.body.persisted_term, r.body.persisted_counter) for r in reports if r is not None]
        if proposal is not None:
            seen.append(proposal.version)
        top = max(seen)
        if top[0] > term:
            return nothing()
        return Decision(Action.PROPOSE, (term, top[1] + 1), False, True, reason, members)

    match worst, live is not None:
        case ((Member.ABSENT | Member.POISONED | Member.WIPED | Member.STALE), _):
            return nothing()
        case Member.AHEAD, _:
            return propose()
        case ((Member.BLANK | Member.RETURNED), False):
            return propose()
        case ((Member.BLANK | Member.RETURNED), True):
            return nothing(moving=True)
        case Member.CURRENT, False:
            assert Member.READY not in members, (chain, members)
            acting = all(_acts_in(report) == recorded for report in reports)
            return nothing(serving=acting and all(map(_serves, reports)), moving=not acting)
        case Member.CURRENT, True:
            assert Member.READY in members, (chain, members, proposal)
            return nothing(moving=True)
        case Member.READY, True:
            assert live is not None
            assert live.version > recorded, (chain, live)
            return Decision(Action.RECORD, live.version, False, True, reason, members)
    raise AssertionError(f"chain {chain.id}: no row for {members}, proposal {proposal}")


def recorded_by(chain: ChainRecord, proposal: Proposal) -> ChainRecord:
    """chain': the record after RECORD."""
    term, counter = proposal.version
    assert (term, counter) > (chain.term, chain.counter), (chain, proposal)
    serving = int(TargetState.SERVING)
    after = ChainRecord(
        id=chain.id,
        table=chain.table,
        term=term,
        counter=counter,
        members=chain.members,
        states=(serving,) * len(chain.members),
        incarnations=proposal.incarnations,
    )
    check(after)
    return after


def states_now(chain: ChainRecord, incarnations: Sequence[int]) -> tuple[int, ...]:
    """The members' states for clients, given their nodes' present incarnations: a member that
    restarted doesn't serve before the chain is led back."""
    return tuple(
        state if was == now else int(TargetState.OFFLINE)
        for state, was, now in zip(chain.states, chain.incarnations, incarnations, strict=True)
    )


def _acts_in(report: Report | None) -> Version | None:
    return None if report is None else (report.body.recorded_term, report.body.recorded_counter)


def _serves(report: Report | None) -> bool:
    return report is not None and report.body.state == TargetState.SERVING


def _is_live(proposal: Proposal, reports: Sequence[Report | None]) -> bool:
    """An absent member doesn't end a proposal: it may be silent only for a while."""
    return all(
        report is None or report.incarnation == incarnation
        for report, incarnation in zip(reports, proposal.incarnations, strict=True)
    )


def _reason(chain: ChainRecord, reports: Sequence[Report | None], members: Sequence[Member]) -> str:
    parts = []
    for at, member in enumerate(members):
        target = chain.members[at]
        report = reports[at]
        match member:
            case Member.ABSENT:
                parts.append(f"target {target} isn't there: waiting for its node")
            case Member.POISONED:
                parts.append(f"target {target}'s device failed a write: restart its node")
            case Member.WIPED:
                parts.append(f"target {target} is empty: its device was replaced or formatted anew")
            case Member.STALE:
                assert report is not None
                body = report.body
                parts.append(
                    f"target {target} has version {body.persisted_term}.{body.persisted_counter}, the chain "
                    f"is at {chain.term}.{chain.counter}: it missed changes, and recovery isn't built yet"
                )
            case Member.BLANK | Member.RETURNED | Member.AHEAD | Member.READY:
                parts.append(f"target {target} is coming back")
            case Member.CURRENT:
                if _acts_in(report) == (chain.term, chain.counter) and not _serves(report):
                    parts.append(
                        f"target {target} doesn't serve: it is resuming, or lacks or can't read what its "
                        "predecessor has (its node's log says which; a restart of the node tries again)"
                    )
    return "; ".join(parts) or f"members are taking up version {chain.term}.{chain.counter}"

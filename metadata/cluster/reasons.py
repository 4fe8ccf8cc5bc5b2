"""Why a chain isn't whole, in words for people. Pure."""

from __future__ import annotations

import os

from metadata.cluster.members import (
    DIVERGED,
    Member,
    Proposal,
    incarnation_in,
    persisted_of,
    recorded_in,
    serving_of,
    syncing_of,
    version_of,
)
from metadata.cluster.succession import Facts, Succession


def reason_of(facts: Facts, chosen: Succession, proposal: Proposal | None) -> str:
    """One or more clauses, the most telling first; never empty."""
    parts = [chosen.holds] if chosen.holds else []
    if facts.record.forced:
        armed = f"target {facts.record.forced} was forced to lead"
        parts += [] if armed in chosen.holds else [f"{armed}, unless one that was serving is back first"]
    parts += [part for target in facts.judged if (part := _of_member(facts, target))]
    if chosen.wants_slot:
        parts.append("a replica waits for others' recovery to end, or for its next try after a failure")
    if not parts and proposal is not None:
        parts.append(f"members are making version {proposal.version[0]}.{proposal.version[1]} durable")
    if not parts and chosen.wants_quiet:
        parts.append("its members' order will be put right when it has been quiet for a while")
    term, counter = version_of(facts.record)
    return "; ".join(parts) or f"members are taking up version {term}.{counter}"


def _of_member(facts: Facts, target: int) -> str:
    record = facts.record
    report = facts.seats[target].report
    match facts.judged[target]:
        case Member.GONE:
            return f"target {target} isn't there: waiting for its node"
        case Member.SILENT:
            return f"target {target} isn't heard: waiting for its node, or for its lease to end"
        case Member.LATE:
            return f"target {target}'s next report is waited for"
        case Member.LOST:
            return f"target {target}'s node runs without its device"
        case Member.FAILED:
            return f"target {target}'s device failed a write: replace it, or restart its node"
        case Member.FOREIGN:
            return f"target {target} must first drop what it had in another chain"
        case Member.DIVERGED:
            return f"target {target} lacks what its predecessor has: it will be filled again"
        case Member.WIPED:
            return f"target {target} is empty: its device was replaced or formatted anew"
        case Member.STALE:
            assert report is not None
            term, counter = persisted_of(report)
            return f"target {target} has version {term}.{counter}, older than {record.term}.{record.counter}"
        case Member.RETURNED:
            return f"target {target} is coming back"
        case Member.OUTSIDE:
            return "" if record.counter == 0 else f"target {target} waits to be filled"
        case Member.HOLDS:
            return _of_holding(facts, target)
    raise AssertionError(facts.judged[target])


def _of_holding(facts: Facts, target: int) -> str:
    record = facts.record
    report = facts.seats[target].report
    assert report is not None, target
    if target == syncing_of(record):
        source = facts.seats[serving_of(record)[-1]].report
        trouble = ""
        if source is not None and source.sync_target == target and source.sync_failure:
            trouble = f" ({os.strerror(source.sync_failure)})"
        return f"target {target} is being filled{trouble}"
    if target not in facts.goal:
        return f"target {target} leaves when all wanted ones serve"
    acts = recorded_in(report) == version_of(record)
    if acts and incarnation_in(record, target) and report.state == 0 and report.reason != DIVERGED:
        version = f"{record.term}.{record.counter}"
        return f"target {target} doesn't serve in version {version} (reason {report.reason})"
    return ""

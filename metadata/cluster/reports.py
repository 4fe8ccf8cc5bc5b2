"""What a heartbeat reports of a node's targets: what of it can be, and for which chains it is news. Pure.

docs/control_plane.md, Primary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ffs.proto.cluster import TargetReport
from metadata.cluster.members import persisted_of, recorded_in
from metadata.cluster.routing import View

# Refusals: logged with the node and the target.
NOT_ITS_OWN: Final = "node %d reports target %d, not its own"
ACTS_AHEAD: Final = "node %d: target %d acts in a version that it hasn't persisted"
CAME_LATE: Final = "node %d: an old report of target %d came late"


@dataclass(frozen=True, slots=True)
class Taken:
    reports: dict[int, TargetReport]  # by target, those that count from now on
    changed: set[int]  # chains to look at
    refused: list[tuple[str, int]]  # a refusal's text, target


def take(view: View, node: int, before: Mapping[int, TargetReport], said: Iterable[TargetReport]) -> Taken:
    """`before`: what counted so far, of the same incarnation. One that can't be leaves the one before."""
    taken = Taken({}, set(), [])
    for report in said:
        target = view.targets.get(report.target)
        if target is None or target.node != node:
            taken.refused.append((NOT_ITS_OWN, report.target))
            continue
        last = before.get(report.target)
        refusal = _refusal(last, report)
        if refusal:
            taken.refused.append((refusal, report.target))
        counts = last if refusal else report
        if counts is None:
            continue
        taken.reports[report.target] = counts
        if target.chain and _essence(last) != _essence(counts):
            taken.changed.add(target.chain)
    for gone in before.keys() - taken.reports.keys():
        if gone in view.targets and view.targets[gone].chain:
            taken.changed.add(view.targets[gone].chain)
    return taken


def _refusal(last: TargetReport | None, report: TargetReport) -> str:
    if recorded_in(report) > persisted_of(report):
        return ACTS_AHEAD
    if last is not None and report.chain == last.chain and persisted_of(report) < persisted_of(last):
        return CAME_LATE
    return ""


def _essence(report: TargetReport | None) -> object:
    """What decisions look at; the rest (bytes, chunks) changes all the time."""
    if report is None:
        return None
    return (
        report.chain,
        report.recorded_term,
        report.recorded_counter,
        report.persisted_term,
        report.persisted_counter,
        report.persisted_here,
        report.state,
        report.poisoned,
        report.reason,
        report.suspect,
        report.sync_target,
        report.sync_done,
        report.sync_failure,
    )

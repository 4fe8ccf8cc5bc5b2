"""A chain of three: its records, what its members report, and what is decided. For the tests of
metadata.cluster.chain."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ffs.proto.cluster import ChainRecord, TargetReport, TargetState
from metadata.cluster.chain import Action, Decision, Proposal, Seat, decide, people_of

TERM = 3
R = (2, 5)  # the recorded version in most tests
A, B, C, D = 11, 12, 13, 14
OFFLINE, SERVING, SYNCING = (int(s) for s in (TargetState.OFFLINE, TargetState.SERVING, TargetState.SYNCING))


def record(
    states: str = "sss", *, counter: int = 5, term: int = 2, incarnations: tuple[int, ...] = (), **more: Any
) -> ChainRecord:
    """States as letters: s serving, y syncing, o offline."""
    n = len(states)
    codes = tuple({"s": SERVING, "y": SYNCING, "o": OFFLINE}[letter] for letter in states)
    fields: dict[str, Any] = {"members": tuple(range(11, 11 + n)), **more}
    return ChainRecord(
        id=9,
        table=1,
        term=term,
        counter=counter,
        states=codes,
        incarnations=incarnations or tuple(0 if code == OFFLINE else 1 for code in codes),
        **fields,
    )


def report(
    target: int,
    persisted: tuple[int, int] = R,
    *,
    here: bool = True,
    acts: tuple[int, int] | None = None,
    state: int = SERVING,
    chain: int = 9,
    **more: Any,
) -> TargetReport:
    recorded = persisted if acts is None else acts
    return TargetReport(
        target=target,
        chain=chain,
        recorded_term=recorded[0],
        recorded_counter=recorded[1],
        persisted_term=persisted[0],
        persisted_counter=persisted[1],
        persisted_here=here,
        state=state,
        poisoned=more.pop("poisoned", False),
        used_bytes=0,
        capacity_bytes=0,
        free_bytes=0,
        chunks=0,
        **more,
    )


def seat(said: TargetReport | None, incarnation: int = 1, *, here: bool = True, lapsed: bool = False) -> Seat:
    return Seat(incarnation, here, lapsed, said)


def holds(target: int, **more: Any) -> Seat:
    return seat(report(target, **more))


def gone(incarnation: int = 1) -> Seat:
    return Seat(incarnation, False, True, None)


def silent(incarnation: int = 1) -> Seat:
    return Seat(incarnation, False, False, None)


def returned(target: int, persisted: tuple[int, int] = R) -> Seat:
    return seat(report(target, persisted, here=False, acts=(0, 0), state=OFFLINE), 2)


def outside(target: int, persisted: tuple[int, int] = (1, 1), incarnation: int = 2) -> Seat:
    return seat(report(target, persisted, here=False, acts=(0, 0), state=OFFLINE), incarnation)


def decided(
    chain: ChainRecord, seats: list[Seat], proposal: Proposal | None = None, term: int = TERM, **more: Any
) -> Decision:
    return decide(chain, dict(zip(people_of(chain), seats, strict=True)), proposal, term, **more)


def next_of(decision: Decision) -> tuple[tuple[int, ...], str]:
    """(members, their states as letters) of what is proposed."""
    assert decision.action is Action.PROPOSE, decision
    assert decision.proposal is not None
    after = decision.proposal.next
    return after.members, "".join("osy"[state] for state in after.states)


def persists(proposal: Proposal, seats: list[Seat], *targets: int) -> list[Seat]:
    """The seats when these targets have persisted it; all that act in `base` still do."""
    after = []
    for one in seats:
        if one.report is not None and one.report.target in targets:
            term, counter = proposal.version
            said = replace(
                one.report, persisted_term=term, persisted_counter=counter, persisted_here=True, chain=9
            )
            one = Seat(one.incarnation, one.here, one.lapsed, said)
        after.append(one)
    return after


def done(target: int, sync_target: int = C, **more: Any) -> Seat:
    return holds(target, sync_target=sync_target, sync_done=True, **more)


def replace_record(proposal: Proposal, after: ChainRecord) -> Proposal:
    return Proposal(after, proposal.base, proposal.without)

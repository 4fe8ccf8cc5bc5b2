"""Changes of a chain: I5 (monotone), I7 (promotion), I8 (one membership a version), and who may answer."""

from __future__ import annotations

from sim_checks import History
from sim_model import Config, Shadow, Violation
from sim_wire import Chain, Outcome, RetryDump, Store, short

PENDING, DONE, REFUSED = 1, 2, 3


def recorded(h: History, version: Chain, config: Config) -> None:
    """I8. The manager's transaction has committed."""
    if version in h.versions:
        raise Violation(f"I8: {version} is recorded twice: {h.versions[version]}, {config}")
    if version <= h.current:
        raise Violation(f"I8: {version} is recorded after {h.current}")
    if not config.serving:
        raise Violation(f"I8: {version} has no serving member")
    h.versions[version] = config
    h.current = version


def state(h: History, s: Shadow, serving: bool, chain: Chain) -> None:
    """A replica says in which chain version it acts."""
    if chain != (0, 0):
        if chain < s.adopted:
            raise Violation(f"I5: {s} goes from {s.adopted} to {chain}")
        if chain not in h.versions:
            raise Violation(f"I8: {s} adopts {chain}, which isn't recorded")
        if serving and s.target not in h.versions[chain].serving:
            raise Violation(f"I8: {s} serves in {chain}: {h.versions[chain]}")
    s.adopted = max(s.adopted, chain)
    s.serving = serving


def may_answer(h: History, s: Shadow) -> None:
    """While a replica answers, no version is recorded in which it doesn't serve: leases see to that."""
    if s.target not in h.versions[h.current].serving:
        raise Violation(f"lease: {s} answers, {h.current} goes on without it: {h.versions[h.current]}")


def promoted(h: History, s: Shadow, source: Shadow, here: Store, there: Store, what: str) -> None:
    """I7: `s` has all that its predecessor `source` has committed (and perhaps what that has pending)."""
    for key, c in h.chunks.items():
        mine, its = s.durable_position.get(key, 0), source.position.get(key, 0)
        if mine >= its:
            continue
        if not c.states[mine][0] and not c.states[its][0]:
            # Created and removed meanwhile: there was nothing to send.
            s.position[key] = max(its, s.position.get(key, 0))
            s.durable_position[key] = its
        elif not any(h.has(s, key, v) for v, position in c.positions.items() if position == its):
            raise Violation(f"I7: {s} {what} with position {mine} of {short(key)}, {source} is at {its}")
    for who, entry in there.retry.items():
        op = h.ops.get((*who, entry.sequence))
        untold = entry.state == REFUSED and op is not None and not op.refused  # it may still be on its way
        if who[0] not in h.fenced and not untold and not _covers(here.retry.get(who), entry):
            raise Violation(f"I7: {s} {what} with retry entry {here.retry.get(who)}, {source} has {entry}")
    for space, epoch in h.least_epoch.items():  # acknowledged; one on its way comes down once more
        if here.epochs.get(space, 0) < epoch:
            raise Violation(f"I7: {s} {what} with epoch {here.epochs.get(space, 0)} of {space}, not {epoch}")


def _covers(mine: RetryDump | None, its: RetryDump) -> bool:
    """What the source knows of a channel is known here. Its pending entries, and those of updates that were
    dropped, count as none; what it has pending may be done here."""
    if its.state == PENDING or its.outcome == Outcome.DROPPED:
        return mine is None or mine.sequence <= its.sequence
    if mine is None:
        return False
    if mine.sequence > its.sequence:
        return True
    return (mine.sequence, mine.version, mine.state, mine.outcome) == (
        its.sequence, its.version, its.state, its.outcome,
    )  # fmt: skip

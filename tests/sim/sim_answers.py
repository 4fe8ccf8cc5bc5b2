"""What clients are told, judged by the history: I1, I3, I6.

A read or update is linearizable if its answer is at or above what was known (to any client) when it was
invoked: `lower` of sim_model.Op and Asked. It holds across replicas and changes of the chain alike.
"""

from __future__ import annotations

from sim_checks import History
from sim_model import Asked, AskedLast, Chunk, Op, Shadow, Violation
from sim_wire import NONE, Outcome, Reply, Version, space_of

REFUSALS = (Outcome.NO_SPACE, Outcome.OVER_QUOTA, Outcome.FELL_WITH_BASE)


def answered_update(h: History, op: Op, reply: Reply, by: Shadow) -> None:
    c = h.chunk(op.key)
    out = reply.outcome
    if out == Outcome.OK and reply.version != NONE:
        _acknowledged(h, op, c, reply.version, by)
    elif out in (Outcome.OK, Outcome.ABSENT):
        _saw_absent(c, op.lower, f"{op.kind.name} of an absent chunk")
    elif out in (Outcome.EXISTED, Outcome.TAG_DIFFERS):
        _saw(c, op.lower, reply.version, None, f"create: {out.name}")
    elif out in REFUSALS and op.identity[0] != 0:
        if op.version != NONE:
            raise Violation(f"I6: {op.identity} is answered {out.name}, but {op.version} is committed")
        op.refused = True
    op.answered = out


def _acknowledged(h: History, op: Op, c: Chunk, version: Version, by: Shadow) -> None:
    position = c.positions.get(version)
    if position is None:
        raise Violation(f"I1: {version} is acknowledged and committed nowhere")
    if op.identity[0] != 0 and h.identity_of[op.key, version] != op.identity:
        raise Violation(f"I6: {op.identity} is answered with {version}, another's")
    for config in {by.adopted, h.current}:
        for s in h.lacking(config, op.key, version):
            raise Violation(f"I1: {version} is acknowledged by {by}, {s} of {config} hasn't it durably")
    if position <= op.lower and op.identity[0] != 0:
        raise Violation(f"I3: {op.identity} took effect at {position}, before it was invoked ({op.lower})")
    c.known = max(c.known, position)


def answered_read(h: History, asked: Asked, reply: Reply) -> None:
    c = h.chunk(asked.key)
    if asked.uncommitted_ok:
        known = h.contents.get((asked.key, reply.version))
        if reply.outcome == Outcome.OK and (known is None or known[1] != reply.content):
            raise Violation(f"I2: an uncommitted read gives {reply.content!r} as {reply.version}")
    elif reply.outcome == Outcome.OK:
        content = None if asked.facts_only else reply.content
        _saw(c, asked.lower, reply.version, content, "read")
    elif reply.outcome == Outcome.TAG_DIFFERS:
        _saw(c, asked.lower, reply.version, None, "read")
    elif reply.outcome == Outcome.ABSENT:
        _saw_absent(c, asked.lower, "read")


def _saw(c: Chunk, lower: int, version: Version, content: bytes | None, what: str) -> None:
    position = c.positions.get(version)
    if position is None:
        raise Violation(f"I3: {what} gives {version}, which is committed nowhere")
    if position < lower:
        raise Violation(f"I3: {what} gives {version} at {position}, after {lower} was known")
    if content is not None and c.states[position] != (True, content):
        raise Violation(f"I10: {what} gives {content!r} as {version}, is {c.states[position]}")
    c.known = max(c.known, position)


def _saw_absent(c: Chunk, lower: int, what: str) -> None:
    for position in range(lower, len(c.states)):
        if not c.states[position][0]:
            c.known = max(c.known, position)
            return
    raise Violation(f"I3: {what} finds no chunk, which was there all the time since {lower}")


def answered_last(h: History, asked: AskedLast, reply: Reply) -> None:
    if reply.outcome not in (Outcome.OK, Outcome.ABSENT):
        return
    found = reply.key if reply.outcome == Outcome.OK else b""
    for key, c in h.chunks.items():
        if space_of(key) != asked.space or key < found:
            continue
        states = c.states[asked.lower.get(key, 0) :]
        if key > found and all(exists for exists, _ in states):
            raise Violation(f"I3: last chunk says {found.hex()}, {key.hex()} was there all the time")
        if key == found and not any(exists for exists, _ in states):
            raise Violation(f"I3: last chunk says {found.hex()}, which wasn't there")

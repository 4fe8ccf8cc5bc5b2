"""What must hold at every step: invariants I1 to I6 of docs/craq.md, from what the replicas tell.

`History` is the truth about contents: the order of commits of each chunk, and an own model of what each
update makes of its base. `Shadow` is what is durable and what is committed on one member.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sim_wire import MAX_EPOCH, NONE, Identity, Kind, Outcome, Record, RecordKind, Reply, Version, space_of

CONTENT = tuple[bool, bytes]  # exists, bytes
ABSENT: CONTENT = (False, b"")


class Violation(AssertionError):
    """An invariant doesn't hold."""


@dataclass(slots=True)
class Op:
    """A client's update, however often it is sent."""

    identity: Identity
    kind: Kind
    key: bytes
    offset: int = 0
    length: int = 0
    payload: bytes = b""
    tag: int = 0
    epoch: int = 0
    lower: int = 0  # position in the chunk's order that was known when it was invoked
    least_epoch: int = 0  # of the space, acknowledged when it was invoked
    version: Version = NONE  # that committed
    refused: bool = False
    answered: Outcome | None = None


@dataclass(slots=True)
class Asked:
    """A read: what was known when it was invoked."""

    key: bytes
    lower: int
    uncommitted_ok: bool = False
    facts_only: bool = False


@dataclass(slots=True)
class AskedLast:
    space: int
    lower: dict[bytes, int]


def apply(op_kind: int, base: CONTENT, offset: int, length: int, payload: bytes) -> CONTENT:
    """The model of an update."""
    content = base[1]
    if op_kind == Kind.REMOVE:
        return ABSENT
    if op_kind == Kind.TRUNCATE:
        return True, content[:length] + bytes(max(0, length - len(content)))
    if op_kind == Kind.WRITE:
        content = content + bytes(max(0, offset - len(content)))
        return True, content[:offset] + payload + content[offset + len(payload) :]
    return True, payload


class Shadow:
    """What one member has: durably, and (position in the order of commits) committed."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.tail: list[Record] = []
        self.durable: set[tuple[bytes, Version]] = set()
        self.position: dict[bytes, int] = {}
        self.durable_position: dict[bytes, int] = {}
        self.serving = False
        self.adopted = (0, 0)


@dataclass(slots=True)
class Chunk:
    states: list[CONTENT] = field(default_factory=lambda: [ABSENT])
    positions: dict[Version, int] = field(default_factory=dict)
    known: int = 0  # the highest position that some client was told of


class History:
    def __init__(self, members: int) -> None:
        self.shadows = [Shadow(i) for i in range(members)]
        self.chunks: dict[bytes, Chunk] = {}
        self.contents: dict[tuple[bytes, Version], CONTENT] = {}
        self.ops: dict[Identity, Op] = {}
        self.creates: dict[tuple[bytes, bytes], Op] = {}  # client 0, by payload
        self.identity_of: dict[tuple[bytes, Version], Identity] = {}
        self.least_epoch: dict[int, int] = {}  # acknowledged
        self.commits = 0
        self.fenced: set[int] = set()  # clients whose retry entries may be gone

    def chunk(self, key: bytes) -> Chunk:
        c = self.chunks.get(key)
        if c is None:
            c = self.chunks[key] = Chunk()
        return c

    # ---- the journal ------------------------------------------------------------------------

    def appended(self, s: Shadow, r: Record) -> None:
        s.tail.append(r)
        if r.kind <= RecordKind.STAGE_COMMIT and r.outcome == Outcome.OK:
            self._staged(s, r)
        elif r.kind == RecordKind.COMMIT:
            s.position[r.key] = self._committed(s, r)
        elif r.kind == RecordKind.REFUSE and self._known(r):
            raise Violation(f"I1: member {s.index} refuses the committed {r.version} ({r.outcome.name})")

    def _known(self, r: Record) -> bool:
        """Committed, with a retry entry that says so."""
        remembered = r.identity[0] != 0 and r.identity[0] not in self.fenced
        return remembered and r.version in self.chunk(r.key).positions

    def durable(self, s: Shadow, count: int) -> None:
        for r in s.tail[:count]:
            if r.kind == RecordKind.STAGE and r.outcome == Outcome.OK:
                s.durable.add((r.key, r.version))
            elif r.kind == RecordKind.STAGE_COMMIT and r.outcome == Outcome.OK:
                s.durable.add((r.key, r.version))
                s.position[r.key] = s.durable_position[r.key] = self._committed(s, r)
            elif r.kind == RecordKind.COMMIT:
                s.durable_position[r.key] = self.chunk(r.key).positions[r.version]
            elif r.kind == RecordKind.REFUSE:
                s.durable.discard((r.key, r.version))
        del s.tail[:count]

    def crashed(self, s: Shadow, keep: int) -> None:
        self.durable(s, keep)
        s.tail.clear()
        s.position = dict(s.durable_position)
        s.serving = False

    def _staged(self, s: Shadow, r: Record) -> None:
        """I2 (one content a version), I4 (applied on the named base)."""
        content: CONTENT = (not r.removal, r.content)
        before = self.contents.get((r.key, r.version))
        if before is not None:
            if before != content:
                raise Violation(f"I2: member {s.index} stages {content} under {r.version}, was {before}")
            if self.identity_of[r.key, r.version] != r.identity:
                raise Violation(f"I2: {r.version} has two identities")
            return
        op = self._op_of(r)
        base = ABSENT
        if r.base != NONE:
            if (r.key, r.base) not in self.contents:
                raise Violation(f"I4: {r.version} is built on the unknown {r.base}")
            base = self.contents[r.key, r.base]
        expected = ABSENT if op is None else apply(op.kind, base, op.offset, op.length, op.payload)
        if expected != content:
            raise Violation(f"I4: {r.version} on {r.base} is {content}, expected {expected}")
        if op is not None and op.epoch < op.least_epoch:
            raise Violation(f"{r.version} has epoch {op.epoch}, asked for after {op.least_epoch} was set")
        self.contents[r.key, r.version] = content
        self.identity_of[r.key, r.version] = r.identity

    def _op_of(self, r: Record) -> Op | None:
        """None: a removal of the collection's."""
        if r.identity[0] != 0:
            return self.ops[r.identity]
        if r.removal:
            return None
        op = self.creates.get((r.key, r.content))
        if op is None:
            raise Violation(f"I2: {r.version} has a content that nobody sent")
        return op

    def _committed(self, s: Shadow, r: Record) -> int:
        """I2 (one order of commits), I4 (all behind have it), I6 (once an identity)."""
        c = self.chunk(r.key)
        content: CONTENT = (not r.removal, r.content)
        now = s.position.get(r.key, 0)
        position = c.positions.get(r.version)
        if position is None:
            # A create and its removal, both without a retry entry, may be refused when they come again
            # to a member that has committed both, or be dropped: nobody can tell.
            same = c.states[now] == c.states[-1] == ABSENT
            if now != len(c.states) - 1 and not same:
                raise Violation(
                    f"I2: member {s.index} commits the new {r.version} on position {now}, "
                    f"others are at {len(c.states) - 1}"
                )
            position = len(c.states)
            c.states.append(content)
            c.positions[r.version] = position
            self.commits += 1
            self._once(r)
        elif position != now + 1:
            # A member that committed a removal, restarted, and was sent what led to it again.
            again = not s.serving and position <= now and not c.states[now][0]
            if not again:
                raise Violation(f"I2: member {s.index} goes from position {now} to {position}")
        if c.states[position] != content:
            raise Violation(f"I2: member {s.index} commits {content} as {r.version}")
        for other in self.shadows:
            if (r.key, r.version) not in other.durable:
                raise Violation(f"I4: member {s.index} commits {r.version}, {other.index} hasn't it durably")
        return position

    def _once(self, r: Record) -> None:
        if r.identity[0] == 0:
            return
        op = self.ops[r.identity]
        if op.version not in (NONE, r.version):
            raise Violation(f"I6: {r.identity} takes effect as {op.version} and as {r.version}")
        if op.refused:
            raise Violation(f"I6: {r.identity} takes effect after it was answered with {op.answered}")
        op.version = r.version

    # ---- roles ------------------------------------------------------------------------------

    def state(self, s: Shadow, serving: bool, chain: tuple[int, int]) -> None:
        if chain < s.adopted and chain != (0, 0):
            raise Violation(f"I5: member {s.index} goes from {s.adopted} to {chain}")
        s.adopted = max(s.adopted, chain)
        s.serving = serving

    # ---- answers ----------------------------------------------------------------------------

    def answered_update(self, op: Op, reply: Reply) -> None:
        c = self.chunk(op.key)
        out = reply.outcome
        refusals = (Outcome.NO_SPACE, Outcome.OVER_QUOTA, Outcome.FELL_WITH_BASE)
        if out == Outcome.OK and reply.version != NONE:
            self._acknowledged(op, c, reply.version)
        elif out in (Outcome.OK, Outcome.ABSENT):
            self._saw_absent(c, op.lower, f"{op.kind.name} of an absent chunk")
        elif out in (Outcome.EXISTED, Outcome.TAG_DIFFERS):
            self._saw(c, op.lower, reply.version, None, f"create: {out.name}")
        elif out in refusals and op.identity[0] != 0:
            if op.version != NONE:
                raise Violation(f"I6: {op.identity} is answered {out.name}, but {op.version} is committed")
            op.refused = True
        op.answered = out

    def _acknowledged(self, op: Op, c: Chunk, version: Version) -> None:
        position = c.positions.get(version)
        if position is None:
            raise Violation(f"I1: {version} is acknowledged and committed nowhere")
        if op.identity[0] != 0 and self.identity_of[op.key, version] != op.identity:
            raise Violation(f"I6: {op.identity} is answered with {version}, another's")
        for s in self.shadows:
            if (op.key, version) not in s.durable:
                raise Violation(f"I1: {version} is acknowledged, member {s.index} hasn't it durably")
        if position <= op.lower and op.identity[0] != 0:
            raise Violation(
                f"I3: {op.identity} took effect at {position}, before it was invoked ({op.lower})"
            )
        c.known = max(c.known, position)

    def answered_read(self, asked: Asked, reply: Reply) -> None:
        c = self.chunk(asked.key)
        if asked.uncommitted_ok:
            known = self.contents.get((asked.key, reply.version))
            if reply.outcome == Outcome.OK and (known is None or known[1] != reply.content):
                raise Violation(f"I2: an uncommitted read gives {reply.content} as {reply.version}")
        elif reply.outcome == Outcome.OK:
            content = None if asked.facts_only else reply.content
            self._saw(c, asked.lower, reply.version, content, "read")
        elif reply.outcome == Outcome.TAG_DIFFERS:
            self._saw(c, asked.lower, reply.version, None, "read")
        elif reply.outcome == Outcome.ABSENT:
            self._saw_absent(c, asked.lower, "read")

    def _saw(self, c: Chunk, lower: int, version: Version, content: bytes | None, what: str) -> None:
        position = c.positions.get(version)
        if position is None:
            raise Violation(f"I3: {what} gives {version}, which is committed nowhere")
        if position < lower:
            raise Violation(f"I3: {what} gives {version} at {position}, after {lower} was known")
        if content is not None and c.states[position] != (True, content):
            raise Violation(f"I2: {what} gives {content} as {version}, is {c.states[position]}")
        c.known = max(c.known, position)

    def _saw_absent(self, c: Chunk, lower: int, what: str) -> None:
        for position in range(lower, len(c.states)):
            if not c.states[position][0]:
                c.known = max(c.known, position)
                return
        raise Violation(f"I3: {what} finds no chunk, which was there all the time since {lower}")

    def answered_last(self, asked: AskedLast, reply: Reply) -> None:
        if reply.outcome not in (Outcome.OK, Outcome.ABSENT):
            return
        found = reply.key if reply.outcome == Outcome.OK else b""
        for key, c in self.chunks.items():
            if space_of(key) != asked.space or key < found:
                continue
            states = c.states[asked.lower.get(key, 0) :]
            if key > found and all(exists for exists, _ in states):
                raise Violation(f"I3: last chunk says {found.hex()}, {key.hex()} was there all the time")
            if key == found and not any(exists for exists, _ in states):
                raise Violation(f"I3: last chunk says {found.hex()}, which wasn't there")

    def epoch_set(self, space: int, epoch: int) -> None:
        self.least_epoch[space] = max(self.least_epoch.get(space, 0), epoch)

    def space_removed(self, space: int) -> None:
        for key, c in self.chunks.items():
            if space_of(key) == space and self.least_epoch.get(space) == MAX_EPOCH and c.states[-1][0]:
                raise Violation(f"I9: {key.hex()} is there after its space was removed")

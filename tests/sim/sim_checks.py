"""What must hold at every step, from what the replicas write: I1, I2, I4, I6 of docs/craq.md.

`History` is the truth about contents: the order of commits of each chunk, and an own model of what each
update makes of its base. sim_answers judges what clients are told by it, sim_chain the changes of a chain.
"""

from __future__ import annotations

from sim_model import ABSENT, CONTENT, Chunk, Config, Op, Shadow, Violation, apply
from sim_wire import NONE, Chain, Identity, Outcome, Record, RecordKind, Version, space_of

OK = Outcome.OK


class History:
    def __init__(self) -> None:
        self.shadows: dict[int, Shadow] = {}
        self.chunks: dict[bytes, Chunk] = {}
        self.contents: dict[tuple[bytes, Version], CONTENT] = {}
        self.base_of: dict[tuple[bytes, Version], Version] = {}
        self.ops: dict[Identity, Op] = {}
        self.creates: dict[tuple[bytes, bytes], Op] = {}  # client 0, by payload
        self.identity_of: dict[tuple[bytes, Version], Identity] = {}
        self.least_epoch: dict[int, int] = {}  # acknowledged
        self.commits = 0
        self.installs = 0
        self.fenced: set[int] = set()  # clients whose retry entries may be gone
        self.versions: dict[Chain, Config] = {}  # recorded
        self.current: Chain = (0, 0)

    def shadow(self, target: int) -> Shadow:
        s = self.shadows.get(target)
        if s is None:
            s = self.shadows[target] = Shadow(target)
        return s

    def chunk(self, key: bytes) -> Chunk:
        c = self.chunks.get(key)
        if c is None:
            c = self.chunks[key] = Chunk()
        return c

    def has(self, s: Shadow, key: bytes, version: Version) -> bool:
        """Durably: pending or committed, itself or what came after it."""
        if version in s.staged.get(key, ()):
            return True
        position = self.chunk(key).positions.get(version)
        return position is not None and s.durable_position.get(key, 0) >= position

    # ---- the journal ------------------------------------------------------------------------

    def appended(self, s: Shadow, r: Record) -> None:
        s.tail.append(r)
        if r.outcome != OK and r.kind != RecordKind.REFUSE:
            return
        if r.kind == RecordKind.STAGE:
            self._staged(s, r)
        elif r.kind == RecordKind.COMMIT:
            s.position[r.key] = self._committed(s, r)
        elif r.kind == RecordKind.REFUSE:
            acts = self.current in self.versions and s.target in self.versions[self.current].serving
            if acts and self._known(r):
                raise Violation(f"I1: {s} refuses the committed {r.version} ({r.outcome.name})")
        elif r.kind == RecordKind.INSTALL:
            s.position[r.key] = self._installed(s, r)
        elif r.kind == RecordKind.ERASE:
            s.position[r.key] = self._erased(r.key)

    def durable(self, s: Shadow, count: int) -> None:
        for at, r in enumerate(s.tail[:count]):
            if r.outcome != OK and r.kind != RecordKind.REFUSE:
                continue
            if r.kind == RecordKind.STAGE:
                s.staged.setdefault(r.key, set()).add(r.version)
            elif r.kind == RecordKind.COMMIT:
                s.durable_position[r.key] = self.chunk(r.key).positions[r.version]
            elif r.kind == RecordKind.REFUSE:
                s.staged.get(r.key, set()).discard(r.version)
            elif r.kind == RecordKind.INSTALL:
                self._install_durable(s, r, s.tail[at + 1 :])
            elif r.kind == RecordKind.ERASE:
                s.staged.pop(r.key, None)
                self._reached(s, r.key, self._erase_durable(s, r.key), s.tail[at + 1 :])
            elif r.kind == RecordKind.RESET:
                s.staged.clear()
        del s.tail[:count]

    def crashed(self, s: Shadow, keep: int) -> None:
        self.durable(s, keep)
        s.tail.clear()
        s.position = dict(s.durable_position)
        s.serving = False

    def wiped(self, s: Shadow, incarnation: int) -> None:
        """A new device under the same target, while its node had that incarnation."""
        fresh = Shadow(s.target)
        fresh.lost = True
        fresh.lost_in = incarnation
        self.shadows[s.target] = fresh

    def _known(self, r: Record) -> bool:
        """Committed, with a retry entry that says so."""
        remembered = r.identity[0] != 0 and r.identity[0] not in self.fenced
        return remembered and r.version in self.chunk(r.key).positions

    def _staged(self, s: Shadow, r: Record) -> None:
        """I2 (one content a version), I4 (applied on the named base)."""
        content: CONTENT = (not r.removal, r.content)
        before = self.contents.get((r.key, r.version))
        if before is not None:
            if before != content:
                raise Violation(f"I2: {s} stages {content} under {r.version}, was {before}")
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
        self.base_of[r.key, r.version] = r.base
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

    # ---- commits ------------------------------------------------------------------------------

    def lacking(self, config: Chain, key: bytes, version: Version) -> list[Shadow]:
        """Members that serve in that recorded version of the chain and don't have the update durably. One
        that has been left out since may have been reset, to be filled anew."""
        now = self.versions[self.current].serving
        members = [self.shadow(t) for t in self.versions[config].serving if t in now]
        return [s for s in members if not s.lost and not self.has(s, key, version)]

    def _committed(self, s: Shadow, r: Record) -> int:
        """I2 (one order of commits), I4 (all members have it), I6 (once an identity)."""
        c = self.chunk(r.key)
        content: CONTENT = (not r.removal, r.content)
        now = s.position.get(r.key, 0)
        position = c.positions.get(r.version)
        if position is None:
            # A create and its removal, both without a retry entry, may be refused when they come again
            # to a member that has committed both, or be dropped: nobody can tell.
            same = c.states[now] == c.states[-1] == ABSENT
            if now != len(c.states) - 1 and not same:
                there = len(c.states) - 1
                raise Violation(
                    f"I2: {s} commits the new {r.version} on position {now}, others are at {there}"
                )
            position = self._append(r.key, r.version, content)
        elif position != now + 1:
            # A member that committed a removal, restarted, and was sent what led to it again.
            again = not s.serving and position <= now and not c.states[now][0]
            if not again:
                raise Violation(f"I2: {s} goes from position {now} to {position}")
        if c.states[position] != content:
            raise Violation(f"I2: {s} commits {content} as {r.version}")
        for other in self.lacking(s.adopted, r.key, r.version):
            raise Violation(f"I4: {s} commits {r.version}, {other} hasn't it durably")
        return position

    def _append(self, key: bytes, version: Version, content: CONTENT) -> int:
        c = self.chunk(key)
        c.states.append(content)
        c.positions[version] = len(c.states) - 1
        self.commits += 1
        self._once(key, version)
        return len(c.states) - 1

    def _once(self, key: bytes, version: Version) -> None:
        identity = self.identity_of[key, version]
        if identity[0] == 0:
            return
        op = self.ops[identity]
        if op.version not in (NONE, version):
            raise Violation(f"I6: {identity} takes effect as {op.version} and as {version}")
        if op.refused:
            raise Violation(f"I6: {identity} takes effect after it was answered with {op.answered}")
        op.version = version

    # ---- recovery -----------------------------------------------------------------------------

    def _installed(self, s: Shadow, r: Record) -> int:
        """A whole chunk from a serving member: what it has committed, or is certain to commit."""
        self.installs += 1
        content = self.contents.get((r.key, r.version))
        if content is None:
            raise Violation(f"I2: {s} installs {r.version}, which nobody staged")
        if content != (True, r.content):
            raise Violation(f"I10: {s} installs {r.content} as {r.version}, is {content}")
        position = self.chunk(r.key).positions.get(r.version)
        if position is None and not self._held_by_all(s, r.key, r.version):
            raise Violation(f"I4: {s} installs {r.version}, which may never be committed")
        return s.position.get(r.key, 0) if position is None else position

    def _reached(self, s: Shadow, key: bytes, position: int, later: list[Record]) -> None:
        """Durably; and what it shows, unless it shows a later record's."""
        s.durable_position[key] = position
        moves = (RecordKind.COMMIT, RecordKind.INSTALL, RecordKind.ERASE)
        if not any(r.key == key and r.kind in moves for r in later):
            s.position[key] = position

    def _install_durable(self, s: Shadow, r: Record, later: list[Record]) -> None:
        """A version that all serving members and the one that is being filled have is certain to commit,
        whoever leads the chain from now on: it counts as committed."""
        if r.base == NONE:
            s.staged[r.key] = {r.version}
        position = self._certain(s, r.key, r.version)
        if position is not None:
            self._reached(s, r.key, position, later)

    def _held_by_all(self, s: Shadow, key: bytes, version: Version) -> bool:
        """All that serve in its chain version have it durably, and all that it is built on."""
        c = self.chunk(key)
        steps = self._steps(key, version)
        base = self.base_of[key, steps[-1]]
        newest = c.states[-1] == ABSENT if base == NONE else c.positions[base] == len(c.states) - 1
        return newest and not any(self.lacking(s.adopted, key, v) for v in steps)

    def _steps(self, key: bytes, version: Version) -> list[Version]:
        """It and what lies below it, down to what is committed."""
        steps = [version]
        while (base := self.base_of[key, steps[-1]]) != NONE and base not in self.chunk(key).positions:
            steps.append(base)
        return steps

    def _certain(self, s: Shadow, key: bytes, version: Version) -> int | None:
        """The position of a version, which it gets now if it is certain to commit; None: it isn't yet."""
        c = self.chunk(key)
        if version in c.positions:
            return c.positions[version]
        if not self._held_by_all(s, key, version):
            return None
        for v in reversed(self._steps(key, version)):
            self._append(key, v, self.contents[key, v])
        return c.positions[version]

    def _erased(self, key: bytes) -> int:
        """The latest position at which there is no chunk."""
        return max(p for p, state in enumerate(self.chunk(key).states) if not state[0])

    def _erase_durable(self, s: Shadow, key: bytes) -> int:
        """A source says that there is no chunk when that is committed there, or when the oldest pending
        version is a removal that is certain: one of what is committed, which gets its position here. Never of
        a later removal, on top of what was written anew since: the source may have both durably, as the only
        serving member, while the one that is filled has neither, and may be promoted before it gets them."""
        c = self.chunk(key)
        if not c.states[-1][0] or s.adopted not in self.versions:
            return self._erased(key)
        newest = next(v for v, position in c.positions.items() if position == len(c.states) - 1)
        removals = [v for (k, v), content in self.contents.items() if k == key and not content[0]]
        for version in removals:
            if self.base_of[key, version] == newest and self._certain(s, key, version) is not None:
                break
        return self._erased(key)

    # ---- loss ---------------------------------------------------------------------------------

    def led_by(self, s: Shadow, epochs: dict[int, int]) -> None:
        """force-lead: what `s` doesn't have is lost, knowingly."""
        self.least_epoch = {space: min(e, epochs.get(space, 0)) for space, e in self.least_epoch.items()}
        for key, c in self.chunks.items():
            end = s.durable_position.get(key, 0)
            for version, position in list(c.positions.items()):
                if position > end:
                    del c.positions[version]
                    identity = self.identity_of[key, version]
                    if identity[0] != 0:
                        self.ops[identity].version = NONE
            del c.states[end + 1 :]
            c.known = min(c.known, end)
            for other in self.shadows.values():
                for positions in (other.position, other.durable_position):
                    positions[key] = min(positions.get(key, 0), end)

    def epoch_set(self, space: int, epoch: int) -> None:
        self.least_epoch[space] = max(self.least_epoch.get(space, 0), epoch)

    def space_removed(self, space: int, maximum: int) -> None:
        for key, c in self.chunks.items():
            if space_of(key) == space and self.least_epoch.get(space) == maximum and c.states[-1][0]:
                raise Violation(f"I9: {key.hex()} is there after its space was removed")

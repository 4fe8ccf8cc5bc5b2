"""A chain whose every step a test decides: for the named cases of docs/craq.md.

Messages lie in `net` until the test delivers or drops them, journal records wait for `flush`. `History`
of sim_checks looks on, so the invariants hold in every schedule too. The test is the manager: `propose`
and `record` hand configurations out, `lease` the manager's lease.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sim_answers
import sim_chain
import sim_wire as wire
from sim_checks import History
from sim_library import Sim
from sim_model import Asked, Config, Op, Shadow, Violation
from sim_wire import (
    NONE,
    Answer,
    Identity,
    Kind,
    Member,
    Notice,
    Outcome,
    Reason,
    Reply,
    Version,
    key_of,
)

UPDATE, SYNC = 0, 255
HELD, ACK, REFUSAL, CANCEL, MISSING = Notice.HELD, Notice.ACK, Notice.REFUSAL, Notice.CANCEL, Notice.MISSING
QUERY, ANSWER = Notice.QUERY, Notice.ANSWER
KEY = key_of(1, 0)
FAILED = (Reason.DEVICE_FAILED, Reason.DIVERGED)
FIRST_TARGET = 11


@dataclass(slots=True)
class Message:
    source: int
    to: int
    type: int
    body: bytes


class Bench:
    """Nodes are numbered from 0; the first `members` of them serve at first, 0 is the head. `started`
    operations (reads, loads, fetches, copies) end at once unless `hold_ops`. Leases are off unless
    `peer_lease_ms`."""

    def __init__(
        self, members: int = 3, *, spares: int = 0, mutant: int = 0, per_chunk: int = 16,
        peer_lease_ms: int = 0, window: int = 4,
    ) -> None:  # fmt: skip
        count = members + spares
        self.now = 1000
        self.nodes = [
            Sim(
                FIRST_TARGET + i, mutant=mutant, per_chunk=per_chunk, peer_lease_ms=peer_lease_ms,
                now=self.now, sync_window=window,
            )
            for i in range(count)
        ]  # fmt: skip
        self.history = History()
        self.net: list[Message] = []
        self.replies: dict[int, Reply] = {}
        self.reads: dict[int, Asked] = {}
        self.proposals: list[tuple[int, wire.Chain]] = []  # node, version: made durable
        self.repaired: list[tuple[int, bytes, bool]] = []
        self.ops: list[tuple[int, int, int]] = []  # node, kind, op
        self.hold_ops = False
        self.may_fail = False  # a member may end as failed or diverged
        self.token = 0
        self.chain = (1, 0)
        self.serving: list[int] = list(range(members))
        self.syncing: int | None = None
        self.incarnations = [1] * count
        self.op_of: dict[int, Op] = {}
        self.new_chain()

    # ---- the machinery ----------------------------------------------------------------------

    def shadow(self, n: int) -> Shadow:
        return self.history.shadow(FIRST_TARGET + n)

    def step(self, n: int, event: bytes) -> None:
        self.take(n, self.nodes[n].step(event))

    def take(self, n: int, answers: list[tuple[int, object]]) -> None:
        for kind, body in answers:
            if kind == Answer.SEND:
                to, message, type_ = body  # type: ignore[misc]
                self.net.append(Message(n, to - FIRST_TARGET, type_, message))
            elif kind == Answer.RECORD:
                self.history.appended(self.shadow(n), body)  # type: ignore[arg-type]
            elif kind == Answer.REPLY:
                assert isinstance(body, Reply)
                self._replied(n, body)
            elif kind == Answer.STARTED:
                self.ops.append((n, *body))  # type: ignore[misc]
            elif kind == Answer.STATE:
                serving, reason, chain = body  # type: ignore[misc]
                sim_chain.state(self.history, self.shadow(n), serving, chain)
                if reason in FAILED and not self.may_fail:
                    raise Violation(f"member {n} failed: {Reason(reason).name}")
            elif kind == Answer.PROPOSAL:
                self.proposals.append((n, body))  # type: ignore[arg-type]
            elif kind == Answer.REPAIRED:
                key, _, ok = body  # type: ignore[misc]
                self.repaired.append((n, key, ok))
            elif kind == Answer.FAULT:
                raise Violation(f"member {n} breaks its contract: {body}")
        if not self.hold_ops:
            self.end_ops()

    def _replied(self, n: int, reply: Reply) -> None:
        assert reply.token not in self.replies
        self.replies[reply.token] = reply
        if reply.token in self.op_of:
            sim_answers.answered_update(self.history, self.op_of[reply.token], reply, self.shadow(n))
        elif reply.token in self.reads:
            if reply.outcome == Outcome.OK:
                sim_chain.may_answer(self.history, self.shadow(n))
            sim_answers.answered_read(self.history, self.reads[reply.token], reply)

    def end_ops(self, outcome: int = Outcome.OK) -> None:
        while self.ops:
            n, _, op = self.ops.pop(0)
            self.step(n, wire.done(self.now, op, outcome))

    def flush(self, *members: int, count: int | None = None) -> None:
        """Journal records become durable: of these members (none named: of all)."""
        for n in members or range(len(self.nodes)):
            shadow = self.shadow(n)
            c = len(shadow.tail) if count is None else min(count, len(shadow.tail))
            if c:
                self.history.durable(shadow, c)
                self.step(n, wire.disk(self.now, c))

    def deliver(self, want: Callable[[Message], bool] | None = None) -> int:
        """Delivers what lies in the net now (that `want` wants), in order; the rest stays."""
        batch = [m for m in self.net if want is None or want(m)]
        self.net = [m for m in self.net if not (want is None or want(m))]
        for m in batch:
            if 0 <= m.to < len(self.nodes):
                self.step(m.to, wire.message(self.now, m.body))
        return len(batch)

    def drop(self, want: Callable[[Message], bool] | None = None) -> int:
        before = len(self.net)
        self.net = [m for m in self.net if want is not None and not want(m)]
        return before - len(self.net)

    def settle(self) -> None:
        """Everything is delivered and flushed until nothing moves."""
        while self.net or any(self.shadow(n).tail for n in range(len(self.nodes))):
            self.deliver()
            self.flush()

    def tick(self, ms: int = 300, *members: int) -> None:
        self.now += ms
        for n in members or range(len(self.nodes)):
            self.step(n, wire.tick(self.now))

    def run(self, ms: int, step_ms: int = 50) -> None:
        """Time passes, everything arrives and ends."""
        for _ in range(0, ms, step_ms):
            self.tick(step_ms)
            self.settle()

    def restart(self, *members: int, keep: int = 0, wipe: bool = False) -> None:
        for n in members:
            self.history.crashed(self.shadow(n), keep)
            self.nodes[n].step(wire.crash(self.now, keep))
            if wipe:
                self.history.wiped(self.shadow(n), self.incarnations[n])
                self.nodes[n].step(wire.start(self.now, wipe=True))
            self.ops = [o for o in self.ops if o[0] != n]
            self.incarnations[n] += 1

    # ---- the manager ------------------------------------------------------------------------

    def config(self, serving: Sequence[int], syncing: int | None) -> list[tuple[int, int, int]]:
        states = [(n, Member.SERVING) for n in serving]
        states += [(syncing, Member.SYNCING)] if syncing is not None else []
        rest = [n for n in range(len(self.nodes)) if n not in serving and n != syncing]
        states += [(n, Member.OFFLINE) for n in rest]
        return [
            (FIRST_TARGET + n, state, 0 if state == Member.OFFLINE else self.incarnations[n])
            for n, state in states
        ]

    def propose(
        self, serving: Sequence[int], syncing: int | None = None, *, to: Sequence[int] | None = None
    ) -> wire.Chain:
        """The next chain version, to whom it concerns (or to these). Returns it."""
        version = (self.chain[0], self.chain[1] + 1)
        concerned = dict.fromkeys([*serving, *([] if syncing is None else [syncing]), *self.serving])
        event = wire.configure(self.now, version, self.config(serving, syncing), proposed=True)
        for n in concerned if to is None else to:
            self.step(n, event)
        return version

    def record(
        self, serving: Sequence[int] | None = None, syncing: int | None = None, *,
        to: Sequence[int] | None = None, same: bool = False,
    ) -> None:  # fmt: skip
        """A new chain version is recorded and handed to all (or to these); `same`: handed out once more."""
        if not same:
            before = self.serving
            if serving is not None:
                self.serving, self.syncing = list(serving), syncing
            self.chain = (self.chain[0], self.chain[1] + 1)
            targets = [FIRST_TARGET + n for n in self.serving]
            second = 0 if self.syncing is None else FIRST_TARGET + self.syncing
            sim_chain.recorded(self.history, self.chain, Config(tuple(targets), second))
            if self.chain[1] > 1:
                for n in self.serving:
                    if n not in before:
                        self.check_promotion(n, before[-1])
        event = wire.configure(self.now, self.chain, self.config(self.serving, self.syncing))
        for n in range(len(self.nodes)) if to is None else to:
            self.step(n, event)

    def check_promotion(self, n: int, source: int) -> None:
        here, there = self.nodes[n].dump().store, self.nodes[source].dump().store
        shadows = self.shadow(n), self.shadow(source)
        sim_chain.promoted(self.history, *shadows, here, there, "is promoted")
        self.shadow(n).lost = False

    def change(self, serving: Sequence[int], syncing: int | None = None) -> None:
        """Propose, persist, record: all goes well."""
        self.propose(serving, syncing)
        self.settle()
        self.record(serving, syncing)
        self.settle()

    def new_chain(self) -> None:
        """The manager records a new chain version; all members adopt it and serve."""
        self.record()
        self.settle()
        for n in self.serving:
            assert self.nodes[n].status().serving, self.nodes[n].dump()

    def lease(self, ms: int, *members: int) -> None:
        """The manager's lease, from now on."""
        for n in members or range(len(self.nodes)):
            self.step(n, wire.lease(self.now, self.now + ms))

    def done_by(self, n: int) -> bool:
        """Whether the last serving member says that `n` has everything."""
        status = self.nodes[self.serving[-1]].status()
        return status.sync_done and status.sync_target == FIRST_TARGET + n

    def sync_to_done(self, n: int, ms: int = 20_000) -> None:
        """`n` is filled by the last serving member."""
        if self.syncing != n:
            self.change(self.serving, n)
        for _ in range(0, ms, 50):
            if self.done_by(n):
                return
            self.tick(50)
            self.settle()
        raise AssertionError((self.nodes[self.serving[-1]].dump(), self.nodes[n].dump()))

    def sync(self, n: int) -> None:
        """`n` is filled by the last serving member, and promoted."""
        self.sync_to_done(n)
        self.change([*self.serving, n])

    # ---- clients ----------------------------------------------------------------------------

    def send(
        self, kind: Kind, who: Identity, *, key: bytes = KEY, again: Op | None = None, **more: object
    ) -> int:
        """An update to the head; the token under which `replies` will have the answer."""
        self.token += 1
        op = again
        if op is None:
            op = Op(who, kind, key, lower=self.history.chunk(key).known)
            op.offset = int(more.get("offset", 0))  # type: ignore[call-overload]
            op.payload = more.get("payload", b"")  # type: ignore[assignment]
            op.length = int(more.get("length", len(op.payload)))  # type: ignore[call-overload]
            op.epoch = int(more.get("epoch", 0))  # type: ignore[call-overload]
            op.tag = int(more.get("tag", 0))  # type: ignore[call-overload]
            if who[0] == 0:
                self.history.creates[key, op.payload] = op
            else:
                self.history.ops[who] = op
        self.op_of[self.token] = op
        event = wire.update(
            self.now, self.token, more.get("chain", self.chain), op.identity, key, op.kind, offset=op.offset,
            length=op.length, payload=op.payload, tag=op.tag, epoch=op.epoch,
            deadline=more.get("deadline", 0), expected=more.get("expected", NONE),
            payload_state=more.get("payload_state", wire.PayloadState.READY),
            need_existing=more.get("need_existing", False), authority=more.get("authority", Outcome.OK),
        )  # fmt: skip
        self.step(int(more.get("at", self.serving[0])), event)  # type: ignore[call-overload]
        return self.token

    def write(self, who: Identity, payload: bytes, offset: int = 0, **more: object) -> int:
        return self.send(Kind.WRITE, who, payload=payload, offset=offset, **more)

    def again(self, token: int) -> int:
        """The same request once more, as a client does that got no answer."""
        op = self.op_of[token]
        return self.send(op.kind, op.identity, key=op.key, again=op)

    def done(self, token: int) -> Version:
        """Everything runs; the request was answered with success."""
        self.settle()
        assert self.replies[token].outcome == Outcome.OK, self.replies[token]
        return self.replies[token].version

    def outcome(self, token: int) -> Outcome | None:
        return self.replies[token].outcome if token in self.replies else None

    def read(self, n: int, key: bytes = KEY, **more: int) -> int:
        self.token += 1
        self.reads[self.token] = Asked(key, self.history.chunk(key).known)
        self.step(n, wire.read(self.now, self.token, more.pop("chain", self.chain), key, **more))  # type: ignore[arg-type]
        return self.token

    def contents(self, key: bytes = KEY) -> list[bytes | None]:
        """What each serving member has committed, when nothing is pending."""
        out: list[bytes | None] = []
        for n in self.serving:
            d = self.nodes[n].dump()
            c = d.store.chunks.get(key)
            assert c is None or not c.pendings, d
            assert d.status.buffers == 0, d
            out.append(c.content if c is not None and c.exists else None)
        return out


def of(type_: int, to: int | None = None) -> Callable[[Message], bool]:
    return lambda m: m.type == type_ and (to is None or m.to == to)

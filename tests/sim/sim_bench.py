"""A chain whose every step a test decides: for the named cases of docs/craq.md.

Messages lie in `net` until the test delivers or drops them, journal records wait for `flush`. `History`
of sim_checks looks on, so the invariants hold in every schedule too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sim_wire as wire
from sim_checks import History, Op, Violation
from sim_wire import NONE, Answer, Identity, Kind, Outcome, Reply, Sim, Version, key_of

UPDATE, HELD, ACK, REFUSAL, CANCEL, MISSING, QUERY, ANSWER = 0, 1, 2, 3, 4, 5, 6, 7
KEY = key_of(1, 0)
FAILED = (8, 9)  # reasons


@dataclass(slots=True)
class Message:
    source: int
    to: int
    type: int
    body: bytes


class Bench:
    """Members are numbered from 0, the head. `started` operations (reads, loads, fetches) end at
    once unless `hold_ops`."""

    def __init__(self, members: int = 3, *, mutant: int = 0, per_chunk: int = 16) -> None:
        self.nodes = [Sim(11 + i, mutant=mutant, per_chunk=per_chunk) for i in range(members)]
        self.history = History(members)
        self.net: list[Message] = []
        self.replies: dict[int, Reply] = {}
        self.ops: list[tuple[int, int, int]] = []  # node, kind, op
        self.hold_ops = False
        self.now = 1000
        self.token = 0
        self.chain = (1, 0)
        self.op_of: dict[int, Op] = {}
        self.new_chain()

    # ---- the machinery ----------------------------------------------------------------------

    def step(self, n: int, event: bytes) -> None:
        shadow = self.history.shadows[n]
        for kind, body in self.nodes[n].step(event):
            if kind == Answer.SEND:
                to, message, type_ = body  # type: ignore[misc]
                self.net.append(Message(n, to - 11, type_, message))
            elif kind == Answer.RECORD:
                self.history.appended(shadow, body)  # type: ignore[arg-type]
            elif kind == Answer.REPLY:
                assert isinstance(body, Reply)
                assert body.token not in self.replies
                self.replies[body.token] = body
                if body.token in self.op_of:
                    self.history.answered_update(self.op_of[body.token], body)
            elif kind == Answer.STARTED:
                self.ops.append((n, *body))  # type: ignore[misc]
            elif kind == Answer.STATE:
                serving, reason, chain = body  # type: ignore[misc]
                self.history.state(shadow, serving, chain)
                if reason in FAILED:
                    raise Violation(f"member {n} failed: {reason}")
            elif kind == Answer.FAULT:
                raise Violation(f"member {n} breaks its contract: {body}")
        if not self.hold_ops:
            self.end_ops()

    def end_ops(self) -> None:
        while self.ops:
            n, _, op = self.ops.pop(0)
            self.step(n, wire.done(self.now, op))

    def flush(self, *members: int, count: int | None = None) -> None:
        """Journal records become durable: of these members (none named: of all)."""
        for n in members or range(len(self.nodes)):
            shadow = self.history.shadows[n]
            c = len(shadow.tail) if count is None else min(count, len(shadow.tail))
            if c:
                self.history.durable(shadow, c)
                self.step(n, wire.disk(self.now, c))

    def deliver(self, want: Callable[[Message], bool] | None = None) -> int:
        """Delivers what lies in the net now (that `want` wants), in order; the rest stays."""
        batch = [m for m in self.net if want is None or want(m)]
        self.net = [m for m in self.net if not (want is None or want(m))]
        for m in batch:
            self.step(m.to, wire.message(self.now, m.body))
        return len(batch)

    def drop(self, want: Callable[[Message], bool] | None = None) -> int:
        before = len(self.net)
        self.net = [m for m in self.net if want is not None and not want(m)]
        return before - len(self.net)

    def settle(self) -> None:
        """Everything is delivered and flushed until nothing moves."""
        while self.net or any(s.tail for s in self.history.shadows):
            self.deliver()
            self.flush()

    def tick(self, ms: int = 300) -> None:
        self.now += ms
        for n in range(len(self.nodes)):
            self.step(n, wire.tick(self.now))

    def restart(self, *members: int, keep: int = 0) -> None:
        for n in members:
            self.history.crashed(self.history.shadows[n], keep)
            self.nodes[n].step(wire.crash(self.now, keep))
            self.ops = [o for o in self.ops if o[0] != n]

    def new_chain(self) -> None:
        """The manager records a new chain version; all members adopt it and serve."""
        self.record()
        self.settle()
        for n in range(len(self.nodes)):
            assert self.nodes[n].status().serving, self.nodes[n].dump()

    def record(self) -> None:
        self.chain = (self.chain[0], self.chain[1] + 1)
        for n in range(len(self.nodes)):
            self.step(
                n, wire.configure(self.now, self.chain, [(11 + i, 1, 1) for i in range(len(self.nodes))])
            )

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
        self.step(0, event)
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
        self.step(n, wire.read(self.now, self.token, more.pop("chain", self.chain), key, **more))  # type: ignore[arg-type]
        return self.token

    def contents(self, key: bytes = KEY) -> list[bytes | None]:
        """What each member has committed, when nothing is pending."""
        out: list[bytes | None] = []
        for node in self.nodes:
            d = node.dump()
            c = d.store.chunks.get(key)
            assert c is None or not c.pendings, d
            assert d.status.buffers == 0, d
            out.append(c.content if c is not None and c.exists else None)
        return out


def of(type_: int, to: int | None = None) -> Callable[[Message], bool]:
    return lambda m: m.type == type_ and (to is None or m.to == to)

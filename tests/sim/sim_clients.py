"""Clients: with routing that may be old, retries that keep their sequence, and little patience."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import sim_answers
import sim_wire as wire
from sim_model import Asked, AskedLast, Op, Shadow, Violation
from sim_network import CLIENTS
from sim_node import Node
from sim_wire import MAX_EPOCH, Chain, Kind, Outcome, Reply, key_of

if TYPE_CHECKING:
    from sim_world import World

SPACE, DOOMED = 1, 2
RETRY = {
    Outcome.STALE_CHAIN,
    Outcome.OFFLINE,
    Outcome.NOT_HEAD,
    Outcome.TIMED_OUT,
    Outcome.BAD_CHECKSUM,
    Outcome.CORRUPT,
}


@dataclass(slots=True)
class Attempts:
    """A client's operation in progress."""

    client: Client
    channel: int
    op: Op | None = None
    read: Asked | None = None
    epoch: tuple[int, int] | None = None
    page: bool = False
    after: bytes | None = None
    last: AskedLast | None = None
    tries: int = 0
    again_after: int = 0  # the try after which it asks again
    finished: bool = False

    def __str__(self) -> str:
        return f"{self.op or self.read or self.last or self.epoch or 'page'}, try {self.tries}"


@dataclass(slots=True)
class Client:
    number: int
    chain: Chain = (0, 0)  # of its routing, as the next
    serving: tuple[int, ...] = ()
    sequences: dict[int, int] = field(default_factory=dict)


class Clients:
    def __init__(self, world: World) -> None:
        self.world = world
        self.tokens: dict[int, Attempts] = {}
        self.outcomes: dict[int, Outcome] = {}  # of ask_once
        self.token = 0
        self.open: list[Attempts] = []
        self.clients = [Client(i + 1) for i in range(world.plan.clients)]
        self.sessions = world.plan.clients
        self.fenced: list[int] = []
        self.finished = 0
        self.serial = 0
        self.epoch = 1  # of SPACE, as the metadata service has it
        self.doom = "none"  # then "asked", "set", "removed"
        self.active = True

    def begin(self) -> None:
        for client in self.clients:
            for channel in range(self.world.plan.channels):
                self.world.at(self.world.rng.randint(100, 300), self._goes_on, client, channel)

    def submit(self, a: Attempts) -> Attempts:
        """An operation of a test's own."""
        self.open.append(a)
        self._refresh(a.client)
        self._attempt(a)
        return a

    def ask_once(self, a: Attempts, node: Node, within_ms: int) -> Outcome | None:
        """One request to one node; its outcome, or None."""
        self.token += 1
        token = self.token
        self.tokens[token] = a
        a.finished = True  # nobody repeats it
        self.world.arrive(node, self._request, a, token, a.client.chain, within_ms)
        end = self.world.now + 2 * within_ms
        while token in self.tokens and self.world.now < end:
            self.world.advance(self.world.now + 5)
        return self.outcomes.get(token)

    def know_less(self) -> None:
        """After a forced lead."""
        known = {key: c.known for key, c in self.world.history.chunks.items()}
        for a in self.open:
            for asked in (a.op, a.read):
                if asked is not None:
                    asked.lower = min(asked.lower, known.get(asked.key, 0))
            if a.last is not None:
                a.last.lower = {k: min(n, known.get(k, 0)) for k, n in a.last.lower.items()}

    def is_read(self, token: int) -> bool:
        a = self.tokens[token]
        return a.read is not None or a.last is not None

    # ---- what to do next ------------------------------------------------------------------------

    def _goes_on(self, client: Client, channel: int) -> None:
        """Channel by channel: one update outstanding in each."""
        world = self.world
        if not self.active:
            return
        if world.plan.fences and world.rng.random() < 0.03:
            client = self._new_session(client)
        a = self._new(client, channel)
        self.open.append(a)
        self._attempt(a)

    def _new_session(self, client: Client) -> Client:
        """One channel goes on as a client of its own; its old session ends, whatever it has under way."""
        world = self.world
        self.sessions += 1
        fresh = Client(self.sessions, client.chain, client.serving)
        if client.number not in self.fenced:
            self.fenced.append(client.number)
            world.history.fenced.add(client.number)
            for node in world.nodes:
                world.at(world.rng.randint(1, 2000), self._fence, node, client.number)
        return fresh

    def _fence(self, node: Node, number: int) -> None:
        world = self.world
        shadow = world.history.shadow(node.target)
        if not node.up or node.paused or shadow.tail:  # the model's fence is one record: durable at once
            world.at(50, self._fence, node, number)
            return
        world.step(node, wire.fence(node.clock(), number))
        world.history.durable(shadow, len(shadow.tail))
        world.step(node, wire.disk(node.clock(), 1))

    def _new(self, client: Client, channel: int) -> Attempts:
        rng, plan, history = self.world.rng, self.world.plan, self.world.history
        if plan.epochs and rng.random() < 0.08:
            return self._about_space(client, channel)
        what = rng.choices((*list(Kind), None), plan.mix)[0]
        space = DOOMED if plan.epochs and rng.random() < 0.3 else SPACE
        key = key_of(space, rng.randrange(plan.keys))
        chunk = history.chunk(key)
        if what is None:
            flags = rng.choices((0, 1, 2), (8, 1, 1))[0]
            asked = Asked(key, chunk.known, uncommitted_ok=flags == 1, facts_only=flags == 2)
            return Attempts(client, channel, read=asked)
        self.serial += 1
        sequence = client.sequences[channel] = client.sequences.get(channel, 0) + 1
        identity = (0, 0, 0) if what == Kind.CREATE else (client.number, channel, sequence)
        size = rng.choice((4, 4, 8, 20))
        payload = self.serial.to_bytes(4, "big") * (size // 4)
        op = Op(identity, what, key, lower=chunk.known, epoch=self.epoch if space == SPACE else 0)
        op.least_epoch = history.least_epoch.get(space, 0)
        if plan.epochs and rng.random() < 0.1 and op.epoch:
            op.epoch -= 1
        if what == Kind.WRITE:
            op.offset, op.payload, op.length = rng.choice((0, 2, 4, 9)), payload, len(payload)
        elif what in (Kind.REPLACE, Kind.CREATE):
            op.payload, op.length, op.tag = payload, len(payload), rng.randint(1, 3)
        elif what == Kind.TRUNCATE:
            op.length = rng.choice((0, 3, 12))
        if what == Kind.CREATE:
            history.creates[key, payload] = op
        else:
            history.ops[identity] = op
        return Attempts(client, channel, op=op)

    def _about_space(self, client: Client, channel: int) -> Attempts:
        rng = self.world.rng
        choice = rng.random()
        if choice < 0.4:
            self.epoch += 1
            return Attempts(client, channel, epoch=(SPACE, self.epoch))
        if choice < 0.6 and self.doom == "none":
            self.doom = "asked"
            return Attempts(client, channel, epoch=(DOOMED, MAX_EPOCH))
        if choice < 0.8 and self.doom == "set":
            return Attempts(client, channel, page=True)
        space = rng.choice((SPACE, DOOMED))
        lower = {k: c.known for k, c in self.world.history.chunks.items()}
        return Attempts(client, channel, last=AskedLast(space, lower))

    # ---- asking ---------------------------------------------------------------------------------

    def _attempt(self, a: Attempts) -> None:
        if a.finished:
            return
        world, rng = self.world, self.world.rng
        faults = world.network.faults
        a.tries += 1
        client = a.client
        if client.serving:
            target = client.serving[0]
            if a.read is not None or a.last is not None:
                target = rng.choice(client.serving)
            copies = 2 if faults and a.op is not None and rng.random() < world.plan.uncached else 1
            for _ in range(copies):
                self.token += 1
                self.tokens[self.token] = a
                node = world.by_target[target]
                deadline = rng.choice((300, 2000)) if faults and rng.random() < 0.5 else 0
                world.network.once(
                    CLIENTS, target, world.arrive, node, self._request, a, self.token, client.chain, deadline
                )
        patience = rng.choice((400, 1500, 3000)) if faults else 1000
        world.at(patience, self._impatient, a, a.tries)

    def _request(self, node: Node, a: Attempts, token: int, chain: Chain, patience: int) -> None:
        now = node.clock()
        deadline = now + patience if patience else 0
        if a.op is not None:
            op, later = a.op, self.world.rng.random() < self.world.plan.later
            event = wire.update(
                now, token, chain, op.identity, op.key, op.kind, offset=op.offset, length=op.length,
                payload=op.payload, tag=op.tag, epoch=op.epoch, deadline=deadline,
                payload_state=wire.PayloadState.LATER if later else wire.PayloadState.READY,
            )  # fmt: skip
        elif a.read is not None:
            flags = (1 if a.read.uncommitted_ok else 0) | (2 if a.read.facts_only else 0)
            event = wire.read(now, token, chain, a.read.key, epoch=MAX_EPOCH, flags=flags, deadline=deadline)
        elif a.epoch is not None:
            event = wire.set_epoch(now, token, chain, *a.epoch, deadline)
        elif a.page:
            event = wire.remove_page(now, token, chain, DOOMED, a.after, 2, deadline)
        else:
            assert a.last is not None
            event = wire.last_chunk(now, token, chain, a.last.space, deadline)
        self.world.step(node, event)

    def _impatient(self, a: Attempts, tries: int) -> None:
        if a.finished or a.tries != tries:
            return
        if self.active and self.world.rng.random() < 0.2 and not a.page and a.epoch is None:
            self._finish(a)  # gives up: outcome unknown
            return
        self._refresh(a.client)
        self._attempt(a)

    def _refresh(self, client: Client) -> None:
        world = self.world
        if world.network.faults and world.rng.random() < world.plan.stale:
            return
        client.chain = world.history.current
        if world.history.current in world.history.versions:
            client.serving = world.history.versions[world.history.current].serving

    # ---- being answered ---------------------------------------------------------------------------

    def replied(self, node: Node, by: Shadow, reply: Reply) -> None:
        world, history = self.world, self.world.history
        a = self.tokens.pop(reply.token, None)
        if a is None:
            raise Violation(f"token {reply.token} is answered twice")
        if a.finished:
            self.outcomes[reply.token] = reply.outcome
        if world.trace is not None:
            world.say(f"{world.name(node.target)} answers {reply} to {a}")
        if a.op is not None:
            sim_answers.answered_update(history, a.op, reply, by)
        elif a.read is not None:
            sim_answers.answered_read(history, a.read, reply)
        elif a.last is not None:
            sim_answers.answered_last(history, a.last, reply)
        elif a.epoch is not None and reply.outcome == Outcome.OK:
            history.epoch_set(*a.epoch)
            if a.epoch[0] == DOOMED and self.doom == "asked":
                self.doom = "set"
        elif a.page and reply.outcome == Outcome.OK and not reply.more:
            self.doom = "removed"
            history.space_removed(DOOMED, MAX_EPOCH)
        world.network.once(node.target, CLIENTS, self._heard, a, reply)

    def _heard(self, a: Attempts, reply: Reply) -> None:
        if a.finished:
            return
        if reply.outcome in RETRY:
            if a.again_after == a.tries:
                return  # the answer to another copy
            a.again_after = a.tries
            self._refresh(a.client)
            self.world.at(self.world.rng.randint(5, 100), self._attempt, a)
            return
        if a.page and reply.outcome == Outcome.OK and reply.more:
            a.after = reply.key
            self._attempt(a)
            return
        self.finished += 1
        self._finish(a)

    def _finish(self, a: Attempts) -> None:
        a.finished = True
        self.open.remove(a)
        self.world.at(self.world.rng.randint(1, 60), self._goes_on, a.client, a.channel)

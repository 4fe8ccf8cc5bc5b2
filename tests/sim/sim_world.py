"""A chain in a box: real replicas over model stores, a network that loses, repeats, delays and reorders,
disks that are slow, members that crash with any prefix of their journal, clients that retry, and the
cluster manager's own decisions (metadata.cluster.chain). All from one seed.

`run(seed)` plays a safety phase with faults and then a liveness phase without, and checks
sim_checks.History at every step. Times are in ms of simulated time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import sim_wire as wire
from sim_checks import Asked, AskedLast, History, Op, Violation
from sim_wire import MAX_EPOCH, Answer, Kind, Outcome, Reply, key_of

from ffs.proto.cluster import ChainRecord, TargetReport, TargetState
from metadata.cluster.chain import Action, Proposal, Report, decide, recorded_by

SPACE, DOOMED = 1, 2
RETRY = {
    Outcome.STALE_CHAIN,
    Outcome.OFFLINE,
    Outcome.NOT_HEAD,
    Outcome.TIMED_OUT,
    Outcome.BAD_CHECKSUM,
}


@dataclass(slots=True)
class Plan:
    """What a seed draws (printed with a failure)."""

    members: int = 3
    clients: int = 3
    channels: int = 2
    keys: int = 3
    safety_ms: int = 6000
    fifo: bool = False  # messages of a pair keep their order
    loss: float = 0.03
    repeat: float = 0.03
    delay_ms: int = 15
    disk_ms: int = 25
    later: float = 0.1  # payloads that are fetched
    bad: float = 0.01  # payloads that fail their checksums
    crash_every_ms: int = 1500  # 0: never
    crash_all: float = 0.3
    no_space: float = 0.0  # share of the time in which some member is full
    manager_dies: float = 0.0
    epochs: bool = False  # space epochs, removal of a space
    fences: bool = False  # sessions end: clients are fenced, their retry entries go
    uncached: float = 0.1  # updates sent twice by the network
    mix: tuple[int, ...] = (6, 1, 1, 1, 2, 6)  # write truncate remove replace create read
    per_chunk: int = 16
    mutant: int = 0

    @staticmethod
    def draw(rng: random.Random) -> Plan:
        p = Plan()
        p.members = rng.choice((1, 2, 3, 3, 3, 3, 4))
        p.clients = rng.randint(1, 4)
        p.channels = rng.randint(1, 3)
        p.keys = rng.choice((1, 1, 2, 4))
        p.safety_ms = rng.choice((1500, 3000, 5000))
        p.fifo = rng.random() < 0.4
        p.loss = 0.0 if p.fifo else rng.choice((0.0, 0.02, 0.1))
        p.repeat = 0.0 if p.fifo else rng.choice((0.0, 0.05, 0.2))
        p.delay_ms = rng.choice((1, 5, 20, 120))
        p.disk_ms = rng.choice((1, 5, 20, 120))
        p.later = rng.choice((0.0, 0.2))
        p.bad = rng.choice((0.0, 0.0, 0.05))
        p.crash_every_ms = rng.choice((0, 400, 1000, 2500))
        p.crash_all = rng.choice((0.0, 0.3, 1.0))
        p.no_space = rng.choice((0.0, 0.0, 0.3))
        p.manager_dies = rng.choice((0.0, 0.1))
        p.epochs = rng.random() < 0.3
        p.fences = rng.random() < 0.3
        p.uncached = rng.choice((0.0, 0.2))
        p.mix = rng.choice(((6, 1, 1, 1, 2, 6), (8, 0, 0, 0, 0, 4), (2, 2, 3, 1, 3, 6), (4, 1, 1, 1, 1, 20)))
        p.per_chunk = rng.choice((1, 3, 16))
        return p


class Node:
    def __init__(self, world: World, index: int, target: int) -> None:
        plan = world.plan
        self.index = index
        self.target = target
        self.sim = wire.Sim(target, mutant=plan.mutant, per_chunk=plan.per_chunk)
        self.shadow = world.history.shadows[index]
        self.up = True
        self.incarnation = 1
        self.disk_busy = False


@dataclass(slots=True)
class Attempts:
    """A client's operation in progress."""

    op: Op | None = None
    read: Asked | None = None
    read_from: int = 0
    epoch: tuple[int, int] | None = None
    page: bool = False
    after: bytes | None = None
    last: AskedLast | None = None
    tries: int = 0
    finished: bool = False


@dataclass(slots=True)
class Client:
    number: int
    chain: tuple[int, int] = (0, 0)
    sequences: dict[int, int] = field(default_factory=dict)


class World:
    def __init__(
        self, seed: int, plan: Plan | None = None, trace: Callable[[str], None] | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.plan = plan if plan is not None else Plan.draw(self.rng)
        self.history = History(self.plan.members)
        self.now = 0
        self.steps = 0
        self.events: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self.order = 0
        self.trace = trace
        self.nodes = [Node(self, i, 11 + i) for i in range(self.plan.members)]
        self.by_target = {n.target: n for n in self.nodes}
        self.fifo_until: dict[tuple[int, int], int] = {}
        self.faults = True
        self.tokens: dict[int, Attempts] = {}
        self.token = 0
        self.open: list[Attempts] = []
        self.clients = [Client(i + 1) for i in range(self.plan.clients)]
        self.sessions = self.plan.clients
        self.fenced: list[int] = []
        self.finished_ops = 0
        self.serial = 0
        self.epoch = 1  # of SPACE, as the metadata service has it
        self.doom = "none"  # then "asked", "set", "removed"
        self.hold = 0  # nothing new from clients until then
        members = tuple(n.target for n in self.nodes)
        self.term = 1
        self.chain = ChainRecord(
            id=7, table=1, term=1, counter=0, members=members,
            states=(int(TargetState.OFFLINE),) * len(members), incarnations=(0,) * len(members),
        )  # fmt: skip
        self.proposal: Proposal | None = None

    # ---- time -------------------------------------------------------------------------------

    def at(self, delay: int, f: Callable[..., None], *args: object) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + delay, self.order, f, args))

    def advance(self, until: int) -> None:
        events = self.events
        while events and events[0][0] <= until:
            self.now, _, f, args = heapq.heappop(events)
            f(*args)
        self.now = until

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:6} {text}")

    # ---- a replica takes an event, its effects are carried out --------------------------------

    def step(self, node: Node, event: bytes) -> None:
        self.steps += 1
        for kind, body in node.sim.step(event):
            if kind == Answer.SEND:
                self.send(node, *body)  # type: ignore[misc]
            elif kind == Answer.RECORD:
                if self.trace is not None:
                    self.say(f"[{node.index}] {body}")
                self.history.appended(node.shadow, body)  # type: ignore[arg-type]
                self.write(node)
            elif kind == Answer.REPLY:
                self.replied(body)  # type: ignore[arg-type]
            elif kind == Answer.STARTED:
                self.started(node, *body)  # type: ignore[misc]
            elif kind == Answer.STATE:
                serving, reason, chain = body  # type: ignore[misc]
                self.say(f"[{node.index}] serving={serving} reason={reason} chain={chain}")
                self.history.state(node.shadow, serving, chain)
                if reason in (8, 9):
                    raise Violation(f"member {node.index} failed: reason {reason}")
            elif kind == Answer.FAULT:
                raise Violation(f"member {node.index} breaks its contract: {body}")

    def send(self, node: Node, to: int, body: bytes, type_: int) -> None:
        plan, rng = self.plan, self.rng
        if self.trace is not None:
            self.say(f"[{node.index}] sends {'update' if type_ == 0 else type_} to {to - 11}")
        if self.faults and rng.random() < plan.loss:
            return
        copies = 2 if self.faults and rng.random() < plan.repeat else 1
        for _ in range(copies):
            delay = 1 + int(rng.random() * plan.delay_ms)
            if plan.fifo:
                pair = (node.index, to)
                arrival = max(self.now + delay, self.fifo_until.get(pair, 0))
                self.fifo_until[pair] = arrival
                delay = arrival - self.now
            self.at(delay, self.deliver, self.by_target[to], body, type_)

    def deliver(self, node: Node, body: bytes, type_: int) -> None:
        if not node.up:
            return
        state = wire.PayloadState.READY
        if type_ == 0 and self.faults:
            if self.rng.random() < self.plan.later:
                state = wire.PayloadState.LATER
            elif self.rng.random() < self.plan.bad:
                state = wire.PayloadState.BAD
        if self.trace is not None:
            self.say(f"[{node.index}] gets {'update' if type_ == 0 else type_} payload={state.name}")
        self.step(node, wire.message(self.now, body, state))

    def write(self, node: Node) -> None:
        if not node.disk_busy:
            node.disk_busy = True
            self.at(1 + int(self.rng.random() * self.plan.disk_ms), self.flushed, node, node.incarnation)

    def flushed(self, node: Node, incarnation: int) -> None:
        if not node.up or node.incarnation != incarnation:
            return
        node.disk_busy = False
        count = len(node.shadow.tail)
        if count > 1 and self.rng.random() < 0.5:
            count = self.rng.randint(1, count)
        self.history.durable(node.shadow, count)
        self.step(node, wire.disk(self.now, count))
        if node.shadow.tail:
            self.write(node)

    def started(self, node: Node, kind: int, op: int) -> None:
        outcome = Outcome.OK
        if kind == 1 and self.faults and self.rng.random() < self.plan.bad:
            outcome = Outcome.BAD_CHECKSUM
        delay = 1 + int(self.rng.random() * self.plan.disk_ms)
        self.at(delay, self.ended, node, node.incarnation, op, outcome)

    def ended(self, node: Node, incarnation: int, op: int, outcome: Outcome) -> None:
        if node.up and node.incarnation == incarnation:
            self.step(node, wire.done(self.now, op, outcome))

    def ticking(self, node: Node) -> None:
        if node.up:
            self.step(node, wire.tick(self.now))
        self.at(50, self.ticking, node)

    # ---- faults -----------------------------------------------------------------------------

    def crash(self, node: Node, keep: int, down_ms: int) -> None:
        """Loses all but what is durable and the first `keep` records that aren't."""
        keep = min(keep, len(node.shadow.tail))
        self.say(f"[{node.index}] crashes, {keep} of {len(node.shadow.tail)} records survive")
        self.history.crashed(node.shadow, keep)
        node.up = False
        node.disk_busy = False
        node.incarnation += 1
        node.sim.step(wire.crash(self.now, keep))
        self.at(down_ms, self.restart, node, node.incarnation)

    def restart(self, node: Node, incarnation: int) -> None:
        if node.incarnation != incarnation or node.up:
            return
        self.say(f"[{node.index}] is back")
        node.up = True
        for other in self.nodes:
            if other is not node and other.up:
                self.step(other, wire.connected(self.now, node.target))
                self.step(node, wire.connected(self.now, other.target))

    def crashing(self) -> None:
        if not self.faults or self.plan.crash_every_ms == 0:
            return
        rng = self.rng
        everyone = rng.random() < self.plan.crash_all
        for node in self.nodes if everyone else [rng.choice(self.nodes)]:
            if node.up:
                tail = len(node.shadow.tail)
                self.crash(node, rng.choice((0, tail, rng.randint(0, tail))), rng.randint(1, 400))
        self.at(int(rng.expovariate(1 / self.plan.crash_every_ms)) + 1, self.crashing)

    def filling(self) -> None:
        """Some member is full for a while: it says so before, or only when it writes."""
        rng = self.rng
        for node in self.nodes:
            full = self.faults and rng.random() < self.plan.no_space
            code = rng.choice((Outcome.NO_SPACE, Outcome.OVER_QUOTA))
            admit = code if full and rng.random() < 0.3 else Outcome.OK
            node.sim.step(wire.space(self.now, admit, code if full else Outcome.OK))
        if self.faults and self.plan.no_space > 0:
            self.at(rng.randint(50, 500), self.filling)

    # ---- the manager ------------------------------------------------------------------------

    def managing(self) -> None:
        rng = self.rng
        if self.faults and rng.random() < self.plan.manager_dies:
            self.term += 1
            self.proposal = None
        reports = [self.report(n) for n in self.nodes]
        d = decide(self.chain, reports, self.proposal, self.term)
        if d.action == Action.PROPOSE:
            incarnations = tuple(n.incarnation for n in self.nodes)
            self.proposal = Proposal(version=d.version, incarnations=incarnations)
            self.say(f"manager proposes {d.version}: {d.reason}")
        elif d.action == Action.RECORD:
            assert self.proposal is not None
            self.chain = recorded_by(self.chain, self.proposal)
            self.proposal = None
            self.say(f"manager records {d.version}")
        for node in self.nodes:
            if self.proposal is not None:
                self.tell(node, self.proposal.version, True)
            if self.chain.counter:
                self.tell(node, (self.chain.term, self.chain.counter), False)
        self.at(rng.randint(40, 120), self.managing)

    def report(self, node: Node) -> Report | None:
        if not node.up or (self.faults and self.rng.random() < self.plan.loss):
            return None
        d = node.sim.status()
        persisted = max(d.proposed, d.adopted)
        body = TargetReport(
            target=node.target, chain=7, recorded_term=d.chain[0], recorded_counter=d.chain[1],
            persisted_term=persisted[0], persisted_counter=persisted[1], persisted_here=d.persisted_here,
            state=1, poisoned=False, used_bytes=0, capacity_bytes=0, free_bytes=0, chunks=0,
        )  # fmt: skip
        return Report(incarnation=node.incarnation, body=body)

    def tell(self, node: Node, version: tuple[int, int], proposed: bool) -> None:
        if self.faults and self.rng.random() < self.plan.loss:
            return
        self.at(1 + int(self.rng.random() * self.plan.delay_ms), self.told, node, version, proposed)

    def told(self, node: Node, version: tuple[int, int], proposed: bool) -> None:
        if node.up:
            members = [(m, 1, n.incarnation) for m, n in zip(self.chain.members, self.nodes, strict=True)]
            self.step(node, wire.configure(self.now, version, members, proposed=proposed))

    # ---- clients ----------------------------------------------------------------------------

    def client_goes_on(self, client: Client, channel: int) -> None:
        """Channel by channel: one update outstanding in each."""
        if not self.faults:
            return
        if self.now < self.hold:
            self.at(self.hold - self.now, self.client_goes_on, client, channel)
            return
        if self.plan.fences and self.rng.random() < 0.03:
            client = self.new_session(client, channel)
        a = self.new_attempts(client, channel)
        self.open.append(a)
        self.attempt(client, channel, a)

    def new_session(self, client: Client, channel: int) -> Client:
        """One channel goes on as a client of its own; its old session ends, whatever it has under way."""
        self.sessions += 1
        fresh = Client(self.sessions, client.chain)
        if client.number not in self.fenced:
            self.fenced.append(client.number)
            self.history.fenced.add(client.number)
            for node in self.nodes:
                self.at(self.rng.randint(1, 2000), self.fence, node, client.number)
        return fresh

    def fence(self, node: Node, number: int) -> None:
        if not node.up or node.shadow.tail:  # the model's fence is one record: keep it durable at once
            self.at(50, self.fence, node, number)
            return
        self.step(node, wire.fence(self.now, number))
        self.history.durable(node.shadow, len(node.shadow.tail))
        self.step(node, wire.disk(self.now, 1))

    def new_attempts(self, client: Client, channel: int) -> Attempts:
        rng = self.rng
        if self.plan.epochs and rng.random() < 0.08:
            return self.about_space()
        what = rng.choices((*list(Kind), None), self.plan.mix)[0]
        space = DOOMED if self.plan.epochs and rng.random() < 0.3 else SPACE
        key = key_of(space, rng.randrange(self.plan.keys))
        chunk = self.history.chunk(key)
        if what is None:
            flags = rng.choices((0, 1, 2), (8, 1, 1))[0]
            asked = Asked(key, chunk.known, uncommitted_ok=flags == 1, facts_only=flags == 2)
            return Attempts(read=asked, read_from=rng.randrange(self.plan.members))
        self.serial += 1
        sequence = client.sequences[channel] = client.sequences.get(channel, 0) + 1
        identity = (0, 0, 0) if what == Kind.CREATE else (client.number, channel, sequence)
        size = rng.choice((4, 4, 8, 20))
        payload = self.serial.to_bytes(4, "big") * (size // 4)
        op = Op(identity, what, key, lower=chunk.known, epoch=self.epoch if space == SPACE else 0)
        op.least_epoch = self.history.least_epoch.get(space, 0)
        if self.plan.epochs and rng.random() < 0.1 and op.epoch:
            op.epoch -= 1
        if what == Kind.WRITE:
            op.offset, op.payload, op.length = rng.choice((0, 2, 4, 9)), payload, len(payload)
        elif what in (Kind.REPLACE, Kind.CREATE):
            op.payload, op.length, op.tag = payload, len(payload), rng.randint(1, 3)
        elif what == Kind.TRUNCATE:
            op.length = rng.choice((0, 3, 12))
        if what == Kind.CREATE:
            self.history.creates[key, payload] = op
        else:
            self.history.ops[identity] = op
        return Attempts(op=op)

    def about_space(self) -> Attempts:
        rng = self.rng
        choice = rng.random()
        if choice < 0.4:
            self.epoch += 1
            return Attempts(epoch=(SPACE, self.epoch))
        if choice < 0.6 and self.doom == "none":
            self.doom = "asked"
            return Attempts(epoch=(DOOMED, MAX_EPOCH))
        if choice < 0.8 and self.doom == "set":
            return Attempts(page=True)
        space = rng.choice((SPACE, DOOMED))
        lower = {k: c.known for k, c in self.history.chunks.items()}
        return Attempts(last=AskedLast(space, lower), read_from=rng.randrange(self.plan.members))

    def attempt(self, client: Client, channel: int, a: Attempts) -> None:
        if a.finished:
            return
        rng = self.rng
        a.tries += 1
        self.token += 1
        token = self.token
        self.tokens[token] = a
        deadline = self.now + rng.choice((300, 2000)) if self.faults and rng.random() < 0.5 else 0
        head = self.nodes[0]
        node, event = head, b""
        if a.op is not None:
            op = a.op
            state = wire.PayloadState.LATER if rng.random() < self.plan.later else wire.PayloadState.READY
            event = wire.update(
                0, token, client.chain, op.identity, op.key, op.kind, offset=op.offset, length=op.length,
                payload=op.payload, tag=op.tag, epoch=op.epoch, deadline=deadline, payload_state=state,
            )  # fmt: skip
        elif a.read is not None:
            flags = (1 if a.read.uncommitted_ok else 0) | (2 if a.read.facts_only else 0)
            event = wire.read(
                0, token, client.chain, a.read.key, epoch=MAX_EPOCH, flags=flags, deadline=deadline
            )
            node = self.nodes[a.read_from]
        elif a.epoch is not None:
            event = wire.set_epoch(0, token, client.chain, *a.epoch, deadline)
        elif a.page:
            event = wire.remove_page(0, token, client.chain, DOOMED, a.after, 2, deadline)
        elif a.last is not None:
            event = wire.last_chunk(0, token, client.chain, a.last.space, deadline)
            node = self.nodes[a.read_from]
        self.tokens[-token] = a
        self.waiting_for = (client, channel)
        self.owners[token] = (client, channel)
        copies = 2 if self.faults and a.op is not None and rng.random() < self.plan.uncached else 1
        for copy in range(copies):
            if self.faults and rng.random() < self.plan.loss:
                continue
            if copy == 1:
                self.token += 1
                self.tokens[self.token] = a
                self.owners[self.token] = (client, channel)
                event = event[:9] + self.token.to_bytes(8, "little") + event[17:]
            self.at(1 + int(rng.random() * self.plan.delay_ms), self.request, node, event)
        patience = rng.choice((400, 1500, 3000)) if self.faults else 1000
        self.at(patience, self.impatient, client, channel, a, a.tries)

    owners: dict[int, tuple[Client, int]]

    def request(self, node: Node, event: bytes) -> None:
        if node.up:
            self.step(node, event[:1] + self.now.to_bytes(8, "little") + event[9:])

    def impatient(self, client: Client, channel: int, a: Attempts, tries: int) -> None:
        if a.finished or a.tries != tries:
            return
        if self.faults and self.rng.random() < 0.2 and not a.page and a.epoch is None:
            self.finish(client, channel, a)  # gives up: outcome unknown
            return
        self.refresh(client)
        self.attempt(client, channel, a)

    def refresh(self, client: Client) -> None:
        client.chain = (self.chain.term, self.chain.counter)

    def replied(self, reply: Reply) -> None:
        a = self.tokens.pop(reply.token, None)
        if a is None:
            raise Violation(f"token {reply.token} is answered twice")
        client, channel = self.owners.pop(reply.token)
        self.tokens.pop(-reply.token, None)
        if self.trace is not None:
            self.say(f"reply {reply} to {a}")
        if a.op is not None:
            self.history.answered_update(a.op, reply)
        elif a.read is not None:
            self.history.answered_read(a.read, reply)
        elif a.last is not None:
            self.history.answered_last(a.last, reply)
        elif a.epoch is not None and reply.outcome == Outcome.OK:
            self.history.epoch_set(*a.epoch)
            if a.epoch[0] == DOOMED and self.doom == "asked":
                self.doom = "set"
        elif a.page and reply.outcome == Outcome.OK and not reply.more:
            self.doom = "removed"
            self.history.space_removed(DOOMED)
        if self.faults and self.rng.random() < self.plan.loss:
            return
        delay = 1 + int(self.rng.random() * self.plan.delay_ms)
        self.at(delay, self.heard, client, channel, a, reply)

    def heard(self, client: Client, channel: int, a: Attempts, reply: Reply) -> None:
        if a.finished:
            return
        if reply.outcome in RETRY:
            self.refresh(client)
            self.at(self.rng.randint(5, 100), self.attempt, client, channel, a)
            return
        if a.page and reply.outcome == Outcome.OK and reply.more:
            a.after = reply.key
            self.attempt(client, channel, a)
            return
        self.finished_ops += 1
        self.finish(client, channel, a)

    def finish(self, client: Client, channel: int, a: Attempts) -> None:
        a.finished = True
        self.open.remove(a)
        self.at(self.rng.randint(1, 60), self.client_goes_on, client, channel)

    # ---- the two phases -----------------------------------------------------------------------

    def start(self) -> None:
        self.owners = {}
        for node in self.nodes:
            self.at(self.rng.randint(0, 50), self.ticking, node)
        self.at(0, self.managing)
        for client in self.clients:
            for channel in range(self.plan.channels):
                self.at(self.rng.randint(100, 300), self.client_goes_on, client, channel)
        if self.plan.crash_every_ms:
            self.at(500 + self.rng.randint(0, self.plan.crash_every_ms), self.crashing)
        if self.plan.no_space:
            self.at(self.rng.randint(0, 500), self.filling)

    def heal(self) -> None:
        """Faults stop; what is under way must end."""
        self.faults = False
        self.say("faults stop")
        self.filling()
        for node in self.nodes:
            self.restart(node, node.incarnation)
        deadline = self.now + 30_000
        while self.now < deadline:
            self.advance(self.now + 250)
            if not self.open and self.quiet():
                return
        stuck = [a for a in self.open if not a.finished]
        raise Violation(f"I12: not quiet after 30 s: {stuck}, {[n.sim.dump() for n in self.nodes]}")

    def quiet(self) -> bool:
        for node in self.nodes:
            d = node.sim.status()
            if not d.serving or d.pendings or d.waiting or d.undurable:
                return False
        return True

    def agree(self) -> None:
        """At the end all members have the same, which is what the history says."""
        for node in self.nodes:
            d = node.sim.dump()
            if d.status.buffers:
                raise Violation(f"member {node.index} leaks {d.status.buffers} buffers")
            for key, c in self.history.chunks.items():
                there = d.store.chunks.get(key)
                if there is not None and there.pendings:
                    raise Violation(f"member {node.index} keeps pendings of {key.hex()}")
                state = (there.exists, there.content) if there is not None else (False, b"")
                if state != c.states[-1]:
                    raise Violation(f"I2: member {node.index} ends with {state}, history is {c.states[-1]}")


def run(
    seed: int, *, mutant: int = 0, plan: Plan | None = None, trace: Callable[[str], None] | None = None
) -> World:
    """One seed. Raises Violation with the command that replays it."""
    world = World(seed, plan, trace)
    try:
        world = play(world, seed, mutant, plan, trace)
    except Violation as v:
        note = f"seed {seed}: {v}\nreplay: .venv/bin/python tests/sim/sim_replay.py {seed} --mutant {mutant}"
        raise Violation(note) from v
    return world


def play(
    world: World, seed: int, mutant: int, plan: Plan | None, trace: Callable[[str], None] | None
) -> World:
    if mutant:
        drawn = world.plan
        drawn.mutant = mutant
        rng = world.rng
        world = World(seed, drawn, trace)
        world.rng = rng
    world.start()
    world.advance(world.plan.safety_ms)
    world.heal()
    world.agree()
    return world

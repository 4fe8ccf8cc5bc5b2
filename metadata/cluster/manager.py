"""The primary: heartbeats in, decisions on chains out. docs/control_plane.md, Primary.

What it knows beyond the store - last reports, who is there, live proposals, which fences a node has - is in
memory only: a new primary learns it from the next heartbeats, and metadata.cluster.chain is built so that
this is enough. Requests that only look (heartbeats, routing, status) are answered at once; those that
write go through metadata.cluster.registry. One event loop.

What keeps leases true (metadata.cluster.presence says why):
- none is given before the store was read in this term, nor while another process may have taken over;
- a heartbeat's news are decided upon before it is answered; none is given to a node while a record that
  leaves out what it serves is under way;
- a reply that gives one carries the configuration, unless the node acts on it already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from ffs.errors import Fenced, FfsError, NotPermitted, NotPrimary, ProtocolError
from ffs.proto.auth import RotateKeys
from ffs.proto.cluster import (
    AllocateTargets,
    AllocateTargetsReply,
    AnnounceNode,
    ChainRecord,
    CreateTable,
    GetRouting,
    GetStatus,
    Heartbeat,
    HeartbeatReply,
    NodeConfig,
    Ping,
    RegisterNode,
    RegisterNodeReply,
    TargetReport,
    WaitConfig,
    WaitConfigReply,
)
from ffs.proto.commands import GetSpaces
from ffs.proto.common import Message, OkReply
from ffs.rpc.handshake import Peer
from metadata.auth.keys import KeyKeeper, Signer
from metadata.cluster import chain as chains
from metadata.cluster import reports
from metadata.cluster.clock import ManagerClock, monotonic_s
from metadata.cluster.commands import Commands
from metadata.cluster.decisions import SYNCS_OF_NODE, Decisions
from metadata.cluster.device_usage import DeviceUsage
from metadata.cluster.fences import Fences
from metadata.cluster.lease import Lease
from metadata.cluster.members import Proposal, Seat
from metadata.cluster.node_config import Configs, node_config
from metadata.cluster.presence import Presences
from metadata.cluster.registry import Registry
from metadata.cluster.routing import RoutingCache, View
from metadata.cluster.spaces import Spaces
from metadata.cluster.status import SyncRates, status_reply
from metadata.kv.contract import Store

log = logging.getLogger("ffs.meta.manager")

FAILURE_TIMEOUT_S: Final = 10.0
BEATS: Final = 4  # in a failure timeout
TICK_S: Final = 0.5
BEAT_MOVING_MS: Final = 20  # while an exchange is going on, for nodes that don't wait for configurations
MAX_WAIT_MS: Final = 60_000
RECORDS_A_TRANSACTION: Final = 1000
HELD_UP_LOG_S: Final = 10.0  # between two warnings that this process was late


@dataclass(slots=True)
class NodeState:
    """What the primary knows of a node's present incarnation."""

    incarnation: int
    heard_s: float  # of the last heartbeat; before the first, of registering
    beats: int = 0
    sequence: int = 0  # of the last heartbeat
    reports: dict[int, TargetReport] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    acted: NodeConfig | None = None  # what it acted on at its last heartbeat, if that is still known
    waits: int = 0  # WaitConfig that are open
    keys: int | None = None  # revision of the signing keys that it acts on; None: it takes none


class Manager:
    """Answers everything of ffs.proto.cluster that goes to the metadata service."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        clock: ManagerClock,
        routing: RoutingCache,
        *,
        cluster: bytes,
        failure_timeout_s: float = FAILURE_TIMEOUT_S,
        syncs_of_node: int = SYNCS_OF_NODE,
        now_s: Callable[[], float] = monotonic_s,
        signer: Signer | None = None,
        key_period_ms: int = 0,
    ) -> None:
        self._store = store
        self.lease = lease
        self.clock = clock
        self._routing = routing
        self.cluster = cluster
        self.failure_timeout_s = failure_timeout_s
        self.now_s = now_s
        self._registry = Registry(store, lease)
        self.nodes: dict[int, NodeState] = {}
        self._presences = Presences(failure_timeout_s)
        self._chains = Decisions(self._seat, failure_timeout_s, syncs_of_node)
        self._configs = Configs(lambda node: node_config(self.view, node, self._chains.proposals))
        self.spaces = Spaces(store, lease, lambda: self.view, self._configs.changed, now_s)
        self.keys = KeyKeeper(
            store,
            lease,
            clock,
            signer=signer,
            period_ms=key_period_ms,
            behind=self._behind_keys,
            changed=lambda: self._configs.changed(self.view.nodes),
            now_s=now_s,
        )
        self.signed = signer is not None
        self.rates = SyncRates()
        self._commands = Commands(store, lease, routing, self)
        self._term = 0  # that what follows belongs to; 0: nothing has been read yet in this one
        self._entering = asyncio.Lock()
        self._looked_at = View()
        self._judged: dict[int, tuple[int, bool, bool]] = {}  # node -> incarnation, here, lapsed
        self._fences = Fences(store, lease, clock, self.nodes, lambda: self._configs.changed(self.view.nodes))
        self._usage = DeviceUsage(self._registry, routing, now_s)
        self._said: set[tuple[str, int, int]] = set()  # refused reports: what was logged once already
        self._said_late_s = float("-inf")
        self._wake_recorder = asyncio.Event()
        self._wake_alive = asyncio.Event()

    @property
    def view(self) -> View:
        """What this process last read."""
        return self._routing.view

    @property
    def decisions(self) -> dict[int, chains.Decision]:
        """The last one on each chain."""
        return self._chains.of

    async def _enter_term(self) -> None:
        """Whoever notices a new term first - a request may come before `_follow_lease` runs - begins it:
        nothing of an earlier one counts, and the store is read again, since the primary before this one
        may have changed it up to the moment when its lease was taken."""
        async with self._entering:
            term = self.lease.term
            if term == self._term:
                return
            self._term = 0
            self._routing.heard_usage.clear()
            if term == 0:
                return
            await self._routing.refresh()
            await self.spaces.enter(term)
            if self.lease.term != term:
                raise NotPrimary("the manager's lease has gone to another process")
            self._presences.begin(self.now_s(), self.lease.earlier_grants_ms / 1000.0)
            self.nodes.clear()
            self._judged.clear()
            self._said.clear()
            self._chains.forget(term)
            self._configs.forget()
            self._fences.clear()
            self._looked_at = View()
            self._term = term
            self._look_at_view()

    async def records_changed(self) -> None:
        """After a transaction that changed records: reads them, and decides on what they change."""
        await self._routing.refresh()
        self._look_at_view()

    # requests

    def handle_now(self, peer: Peer, request: Message) -> Message | None:
        kind = type(request)
        if kind is GetRouting:
            return self._routing.reply_now(request.known_epoch)  # type: ignore[attr-defined]
        if kind is Ping:
            return OkReply()
        if isinstance(request, (Heartbeat, GetStatus, GetSpaces, *Commands.REQUESTS)):
            self.lease.require()
            if self._term != self.lease.term:
                return None  # `handle` begins the term first
            return self._answer(peer, request)
        return None

    def _answer(self, peer: Peer, request: Message) -> Message | None:
        """What needs no waiting."""
        self._look_at_view()
        if isinstance(request, Heartbeat):
            return self._heartbeat(peer, request)
        if isinstance(request, GetStatus):
            return status_reply(self, self.view, self.cluster, self.lease, self.clock)
        if isinstance(request, GetSpaces):
            return self.spaces.reply(request) if self.spaces.knows(request.space) else None
        return self._commands.handle_now(peer, request)

    async def handle(self, peer: Peer, request: Message) -> Message:
        if isinstance(request, GetRouting):
            return await self._routing.reply_changed(request.known_epoch, min(request.wait_ms, MAX_WAIT_MS))
        self.lease.require()
        await self._enter_term()
        self.lease.require()
        if isinstance(request, (Heartbeat, GetStatus, GetSpaces, *Commands.REQUESTS)):
            reply = self._answer(peer, request)
            if reply is None and isinstance(request, GetSpaces):
                await self.spaces.tick()  # it may have been made just now
                return self.spaces.reply(request)
            return reply if reply is not None else await self._commands.handle(peer, request)
        if isinstance(request, RotateKeys):
            return await self.keys.handle(request.look)
        if isinstance(request, CreateTable):
            made = await self._registry.create_table(request)
            await self.records_changed()
            return made
        if peer.role != "storage":
            raise NotPermitted(f"{type(request).__name__} is for storage nodes, not for role {peer.role}")
        if isinstance(request, WaitConfig):
            return await self._wait_config(peer, request)
        if isinstance(request, AllocateTargets):
            return AllocateTargetsReply(targets=await self._registry.allocate_targets(request))
        if isinstance(request, RegisterNode):
            return await self._register(request)
        if isinstance(request, AnnounceNode):
            await self._registry.announce(request)
            await self.records_changed()
            return OkReply()
        raise ProtocolError(f"{type(request).__name__} isn't a request to a metadata server")

    def cancellable(self, request: Message) -> bool:
        """A long poll may be dropped; what writes may not."""
        return isinstance(request, GetRouting | WaitConfig)

    # background

    async def run(self) -> None:
        """The primary's work, for ever: goes on and off with the lease."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_lease())
            group.create_task(self._watch())
            group.create_task(self._tick())
            group.create_task(self._record())
            group.create_task(self._keep_alive())

    async def _follow_lease(self) -> None:
        term = 0
        while True:
            term = await self.lease.changed_from(term)
            await _survive(self._enter_term())

    async def _watch(self) -> None:
        """Judges who is there, as often as that may change. Waits for nothing else: when it is late, so was
        the whole process."""
        period_s = min(self.failure_timeout_s / 10, 0.25)
        while True:
            now = self._now()
            await asyncio.sleep(min(period_s, max(0.001, self._presences.next_change_s(now) - now)))
            self._now()
            if self.lease.primary and self._term == self.lease.term:
                self._look_at_view()
                self._judge_presence()

    def _now(self) -> float:
        """The time by which nodes are judged. Asked for before any of them is: whatever runs first after this
        process was held up - a request, mostly - forgives that time, else it would take all for gone."""
        now = self.now_s()
        forgiven_s = self._presences.tick(now)
        if forgiven_s and self.lease.primary and now - self._said_late_s > HELD_UP_LOG_S:
            self._said_late_s = now
            log.warning("this process was held up for %.1f s: that silence isn't counted", forgiven_s)
        return now

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await _survive(self._enter_term())  # again, if the store failed when the term began
            if self.lease.primary and self._term == self.lease.term:
                await _survive(self.records_changed())
                self._chains.look_again(self.view, self._now())
                self._hand_out()
                await _survive(self._fences.load(self.view))
                await _survive(self._usage.save([node for node, state in self.nodes.items() if state.beats]))
                await _survive(self._commands.tick())
                await _survive(self.spaces.tick())
                await _survive(self.keys.tick())

    async def _keep_alive(self) -> None:
        while True:
            await self._wake_alive.wait()
            self._wake_alive.clear()
            if not await _survive(self._store_presence()):
                await asyncio.sleep(TICK_S)
                self._wake_alive.set()

    async def _record(self) -> None:
        """Commits RECORD decisions, many in one transaction."""
        while True:
            await self._wake_recorder.wait()
            self._wake_recorder.clear()
            while self._chains.to_record and self.lease.primary:
                await _survive(self._record_batch(self._chains.take_batch(RECORDS_A_TRANSACTION)))

    async def _record_batch(self, batch: list[tuple[ChainRecord, Proposal]]) -> None:
        """Whatever becomes of it: nobody that it leaves out gets a lease before that is known."""
        term, renewals = self._term, self.lease.renewals
        try:
            for chain in await self._registry.record_chains(batch):
                log.info("chain %d: version %d.%d is recorded", chain.id, chain.term, chain.counter)
        except NotPrimary:
            raise
        except FfsError as error:
            # It may still be committed, until the record of the lease, which it has read, changes.
            log.warning("whether %d chain versions are recorded is unknown: %s", len(batch), error)
            while self._term == term and self.lease.renewals == renewals:  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.02)
        while self._term == term and not await _survive(self._routing.refresh()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if self._term == term:
            self._chains.landed(record.id for record, _ in batch)
            self._look_at_view()
            self._look(record.id for record, _ in batch)

    # nodes

    async def _register(self, request: RegisterNode) -> RegisterNodeReply:
        node = await self._registry.register(request, self.is_gone)
        await self._routing.refresh()  # from now on the one before is refused
        now = self._now()
        self._presences.registered(node.id, node.incarnation, now)
        state = self.nodes.get(node.id)
        if state is None or state.incarnation < node.incarnation:
            self.nodes[node.id] = NodeState(node.incarnation, now)
        self._look_at_view()
        log.info("node %s (%d) registered, incarnation %d", node.name, node.id, node.incarnation)
        return RegisterNodeReply(
            node=node.id,
            incarnation=node.incarnation,
            manager_ms=self.clock.now_ms(),
            failure_timeout_ms=int(self.failure_timeout_s * 1000),
        )

    def is_gone(self, node: int) -> bool:
        """Whether it surely holds no lease any more."""
        return self._presences.lapsed(node, self._now())

    def _state_of(self, node: int, incarnation: int) -> NodeState:
        """Of a node that speaks. Raises Fenced if another process has its place."""
        record = self.view.nodes.get(node)
        if record is None or record.incarnation != incarnation:
            raise Fenced(f"node {node} incarnation {incarnation} isn't the registered one: register")
        state = self.nodes.get(node)
        if state is None or state.incarnation != incarnation:
            state = self.nodes[node] = NodeState(incarnation, self._now())
        return state

    def _heartbeat(self, peer: Peer, beat: Heartbeat) -> HeartbeatReply:
        if peer.role != "storage":
            raise NotPermitted(f"heartbeats are for storage nodes, not for role {peer.role}")
        state = self._state_of(beat.node, beat.incarnation)
        now = self._now()
        state.fenced.update(beat.fenced)
        state.keys = beat.keys
        changed: set[int] = set()
        if not beat.sequence or beat.sequence > state.sequence:
            was_here = self._presences.here(beat.node, beat.incarnation, now)
            self._presences.heard(beat.node, beat.incarnation, now)
            state.sequence, state.heard_s = beat.sequence, now
            state.beats += 1
            state.acted = self._configs.numbered(beat.node, beat.config)
            self.spaces.heard(beat)
            taken = reports.take(self.view, beat.node, state.reports, beat.reports)
            state.reports, changed = taken.reports, taken.changed
            for refusal, target in taken.refused:
                self._say_once(refusal, beat.node, target)
            self._usage.heard(beat.node, state.reports)
            self.rates.heard(state.reports.values(), now)
            if not was_here:
                self._chains.came_back(state.reports)
                changed |= self.view.chains_of(beat.node)
        self._look(changed)
        return self._beat_reply(peer, beat, state, now)

    def _say_once(self, text: str, node: int, target: int) -> None:
        if (text, node, target) not in self._said:
            self._said.add((text, node, target))
            log.error(text, node, target)

    def _beat_reply(self, peer: Peer, beat: Heartbeat, state: NodeState, now: float) -> HeartbeatReply:
        if not self.lease.may_grant():
            # Another process may be the manager by now: nothing that it would have to say.
            return HeartbeatReply(manager_ms=self.clock.now_ms(), next_ms=BEAT_MOVING_MS, term=self._term)
        lease_ms = 0
        if self._chains.may_lease(beat.node):
            lease_ms = int(self.failure_timeout_s * 1000)
            self._presences.answered(beat.node, now)
        config = self._configs.of(beat.node, self._term)
        fresh = config.number != beat.config
        next_ms = int(self.failure_timeout_s * 1000 / BEATS)
        moving = fresh or not lease_ms or any(self._chains.moving(route.chain) for route in config.chains)
        if moving and not state.waits:
            next_ms = min(next_ms, BEAT_MOVING_MS)
        return HeartbeatReply(
            manager_ms=self.clock.now_ms(),
            next_ms=next_ms,
            config=config if fresh else None,
            fences=self._fences.news_for(state),
            lease_ms=lease_ms,
            term=self._term,
            spaces=self.spaces.news_for(beat.node, beat.spaces),
            keys=self.keys.news_for(peer, beat.keys),
        )

    def _behind_keys(self, revision: int) -> list[str]:
        """Live nodes that don't act on that revision of the signing keys."""
        now = self._now()
        return [
            node.name
            for node in self.view.nodes.values()
            if self._presences.here(node.id, node.incarnation, now)
            and (state := self.nodes.get(node.id)) is not None
            and state.keys is not None
            and state.keys < revision
        ]

    async def _wait_config(self, peer: Peer, request: WaitConfig) -> WaitConfigReply:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.wait_ms, MAX_WAIT_MS) / 1000.0
        term = self._term
        while True:
            self.lease.require()
            if self._term != term or self.lease.term != term or not self.lease.may_grant():
                raise NotPrimary("the manager's lease may have gone to another process: ask again")
            self._look_at_view()
            state = self._state_of(request.node, request.incarnation)
            config = self._configs.of(request.node, term)
            fences = self._fences.news_for(state)
            spaces = self.spaces.news_for(request.node, request.spaces)
            keys = self.keys.news_for(peer, request.keys)
            left_s = deadline - loop.time()
            news = config.number != request.config or fences or spaces is not None or keys is not None
            if news or left_s <= 0:
                fresh = config if config.number != request.config else None
                return WaitConfigReply(config=fresh, fences=fences, term=term, spaces=spaces, keys=keys)
            state.waits += 1
            try:
                await self._configs.wait(request.node, left_s)
            finally:
                state.waits -= 1

    # decisions

    def _seat(self, target: int) -> Seat:
        view, now = self.view, self._now()
        node = view.node_of(target)
        state = self.nodes.get(node.id)
        known = state is not None and state.incarnation == node.incarnation
        return Seat(
            incarnation=node.incarnation,
            here=self._presences.here(node.id, node.incarnation, now),
            lapsed=self._presences.lapsed(node.id, now),
            report=state.reports.get(target) if known and state is not None else None,
        )

    def _look_at_view(self) -> None:
        """Another view may have other chains, incarnations, versions: decides on those, tells their nodes."""
        view, before = self.view, self._looked_at
        if view is before or not self.lease.primary or self._term != self.lease.term:
            return
        self._looked_at = view
        for node in self.nodes.keys() - view.nodes.keys():
            del self.nodes[node]  # it was forgotten
        touched = {n for n, record in view.nodes.items() if before.nodes.get(n) is not record}
        changed = {c for c, record in view.chains.items() if before.chains.get(c) is not record}
        for target_id, target in view.targets.items():
            was = before.targets.get(target_id)
            if was is not target:
                touched.add(target.node)
                if target.chain:
                    changed.add(target.chain)
                if was is not None and was.chain:
                    changed.add(was.chain)
        for node in touched:
            changed |= view.chains_of(node)
        for chain_id in changed:
            old = before.chains.get(chain_id)
            members = {
                *view.chains[chain_id].members,
                *view.chains[chain_id].wanted,
                *(old.members if old else ()),
            }
            touched.update(view.targets[member].node for member in members)
        self._configs.changed(touched)
        self._look(changed)

    def _look(self, chain_ids: Iterable[int]) -> None:
        self._chains.look(self.view, chain_ids, self._now())
        self._hand_out()

    def _hand_out(self) -> None:
        """What decisions have made: to the nodes that wait, and to the store."""
        if self._chains.touched:
            self._configs.changed(self._chains.touched)
            self._chains.touched.clear()
        if self._chains.to_record:
            self._wake_recorder.set()

    def _judge_presence(self) -> None:
        now = self._now()
        changed: set[int] = set()
        for node in self.view.nodes.values():
            judged = (
                node.incarnation,
                self._presences.here(node.id, node.incarnation, now),
                self._presences.lapsed(node.id, now),
            )
            if self._judged.get(node.id) != judged:
                self._judged[node.id] = judged
                changed |= self.view.chains_of(node.id)
            if (node.alive and not judged[1] and judged[2]) or (
                not node.alive and judged[1] and node.control
            ):
                self._wake_alive.set()
        self._look(changed)

    async def _store_presence(self) -> None:
        """`alive` in the records, for clients."""
        changed = False
        if not self.lease.primary or self._term != self.lease.term:
            return
        for node in list(self.view.nodes.values()):
            _, here, lapsed = self._judged.get(node.id, (0, False, False))
            if node.alive and not here and lapsed:
                log.warning(
                    "node %s (%d) has been silent for %g s", node.name, node.id, self.failure_timeout_s
                )
                await self._registry.set_alive(node.id, node.incarnation, False)
                changed = True
            elif not node.alive and here and node.control:
                await self._registry.set_alive(node.id, node.incarnation, True)
                changed = True
        if changed:
            await self.records_changed()


async def _survive(work: Awaitable[object]) -> bool:
    """A failure of the store, or of the lease, ends one round of work and not the manager. Whether it went
    well."""
    try:
        await work
    except FfsError as error:
        log.warning("%s", error)
        return False
    return True

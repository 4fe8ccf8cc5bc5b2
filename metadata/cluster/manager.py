"""The primary: heartbeats in, decisions on chains out. docs/control_plane.md, Manager.

What it knows beyond the store - last reports, live proposals, which fences a node has - is in memory
only: a new primary learns it from the next heartbeats, and metadata.cluster.chain is built so that
this is enough. Requests that only look (heartbeats, routing, status) are answered at once; those that
write go through metadata.cluster.registry. One event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from ffs.errors import Fenced, FfsError, NotPermitted, ProtocolError
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
    collector_client,
)
from ffs.proto.common import Message, OkReply
from ffs.proto.records import FencedClient
from ffs.rpc.handshake import Peer
from metadata.cluster import chain as chains
from metadata.cluster.clock import ManagerClock
from metadata.cluster.lease import Lease
from metadata.cluster.node_config import node_routes
from metadata.cluster.registry import Registry
from metadata.cluster.routing import RoutingCache, View
from metadata.cluster.status import status_reply
from metadata.fs.schema import fence_key
from metadata.fs.sessions import fenced_clients
from metadata.kv.contract import Snapshot, Store, Transaction

log = logging.getLogger("ffs.meta.manager")

FAILURE_TIMEOUT_S: Final = 5.0  # a node that is silent for so long counts as gone
TICK_S: Final = 0.5
BEAT_MS: Final = 1000
BEAT_WAITING_MS: Final = 200  # while a chain of the node doesn't serve
BEAT_MOVING_MS: Final = 20  # while an exchange is going on
FENCES_A_REPLY: Final = 1024
RECORDS_A_TRANSACTION: Final = 1000
USAGE_S: Final = 2.0


@dataclass(slots=True)
class NodeState:
    """What the primary knows of a node's present incarnation."""

    incarnation: int
    heard_s: float  # monotonic; of the last heartbeat, or of taking over
    beats: int = 0
    reports: dict[int, TargetReport] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    config: NodeConfig | None = None
    config_of: tuple[View, int] | None = None  # (view, generation) that it was made from


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
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._lease = lease
        self._clock = clock
        self._routing = routing
        self._cluster = cluster
        self._now_s = now_s
        self._registry = Registry(store, lease)
        self._term = 0  # that what follows belongs to
        self._config_count = 0  # never starts anew: a node knows its configuration by term and number
        self._forget()
        self._usage_s = float("-inf")
        self._wake_recorder = asyncio.Event()

    def _forget(self) -> None:
        """A new term begins: nothing of an earlier one counts."""
        self.nodes: dict[int, NodeState] = {}
        self.decisions: dict[int, chains.Decision] = {}
        self._proposals: dict[int, chains.Proposal] = {}
        self._generation = 0  # of proposals
        self._to_record: dict[int, tuple[ChainRecord, chains.Proposal]] = {}
        self._fences: frozenset[int] = frozenset()
        self._decided_of: View | None = None

    def _enter_term(self) -> None:
        """Whoever notices a new term first - a request may come before `_follow_lease` runs - begins it."""
        term = self._lease.term
        if term != self._term:
            self._term = term
            self._forget()

    # requests

    def handle_now(self, peer: Peer, request: Message) -> Message | None:
        kind = type(request)
        if kind is GetRouting:
            reply = self._routing.reply_now(request.known_epoch)  # type: ignore[attr-defined]
            return reply
        if kind is Heartbeat:
            return self._heartbeat(peer, request)  # type: ignore[arg-type]
        if kind is GetStatus:
            self._lease.require()
            self._enter_term()
            self._decide_all_if_new()
            return status_reply(self, self._routing.view, self._cluster, self._lease, self._clock)
        if kind is Ping:
            return OkReply()
        return None

    async def handle(self, peer: Peer, request: Message) -> Message:
        if isinstance(request, GetRouting):
            return await self._routing.reply_changed(request.known_epoch, min(request.wait_ms, 60_000))
        self._lease.require()
        self._enter_term()
        if isinstance(request, CreateTable):
            reply = await self._registry.create_table(request)
            await self._routing.refresh()
            self._decide_all_if_new()
            return reply
        if peer.role != "storage":
            raise NotPermitted(f"{type(request).__name__} is for storage nodes, not for role {peer.role}")
        if isinstance(request, AllocateTargets):
            return AllocateTargetsReply(targets=await self._registry.allocate_targets(request))
        if isinstance(request, RegisterNode):
            return await self._register(request)
        if isinstance(request, AnnounceNode):
            await self._registry.announce(request)
            await self._routing.refresh()
            self._decide_all_if_new()
            return OkReply()
        raise ProtocolError(f"{type(request).__name__} isn't a request to a metadata server")

    def cancellable(self, request: Message) -> bool:
        """A long poll may be dropped; what writes may not."""
        return type(request) is GetRouting

    # background

    async def run(self) -> None:
        """The primary's work, for ever: goes on and off with the lease."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_lease())
            group.create_task(self._tick())
            group.create_task(self._record())

    async def _follow_lease(self) -> None:
        term = 0
        while True:
            term = await self._lease.changed_from(term)
            self._enter_term()
            if term:
                await _survive(self._routing.refresh())
                now = self._now_s()
                for node in self._routing.view.nodes.values():
                    if node.alive:
                        self.nodes.setdefault(node.id, NodeState(node.incarnation, now))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._lease.primary:
                await _survive(self._routing.refresh())
                await _survive(self._load_fences())
                await _survive(self._judge_silence())
                await _survive(self._save_usage())
                self._decide_all_if_new()

    async def _record(self) -> None:
        """Commits RECORD decisions, many in one transaction."""
        while True:
            await self._wake_recorder.wait()
            self._wake_recorder.clear()
            while self._to_record and self._lease.primary:
                batch = list(self._to_record.items())[:RECORDS_A_TRANSACTION]
                for chain_id, _ in batch:
                    del self._to_record[chain_id]
                await _survive(self._record_batch([pair for _, pair in batch]))

    async def _record_batch(self, batch: list[tuple[ChainRecord, chains.Proposal]]) -> None:
        try:
            recorded = await self._registry.record_chains(batch)
        finally:
            # Recorded or not, the next decision starts from what the store says.
            for chain, _ in batch:
                self._proposals.pop(chain.id, None)
            self._generation += 1
        for chain in recorded:
            log.info("chain %d: version %d.%d is recorded", chain.id, chain.term, chain.counter)
        await self._routing.refresh()
        self._decide_all_if_new()
        self._decide(chain.id for chain, _ in batch)

    # nodes

    async def _register(self, request: RegisterNode) -> RegisterNodeReply:
        node = await self._registry.register(request)
        self.nodes[node.id] = NodeState(node.incarnation, self._now_s())
        await self._routing.refresh()
        self._decide_all_if_new()
        log.info("node %s (%d) registered, incarnation %d", node.name, node.id, node.incarnation)
        return RegisterNodeReply(node=node.id, incarnation=node.incarnation, manager_ms=self._clock.now_ms())

    def _heartbeat(self, peer: Peer, beat: Heartbeat) -> HeartbeatReply:
        self._lease.require()
        self._enter_term()
        if peer.role != "storage":
            raise NotPermitted(f"heartbeats are for storage nodes, not for role {peer.role}")
        record = self._routing.view.nodes.get(beat.node)
        if record is None or record.incarnation != beat.incarnation:
            raise Fenced(
                f"node {beat.node} incarnation {beat.incarnation} isn't the registered one: register"
            )
        state = self.nodes.get(beat.node)
        if state is None or state.incarnation != beat.incarnation:
            state = self.nodes[beat.node] = NodeState(beat.incarnation, self._now_s())
        state.heard_s = self._now_s()
        state.beats += 1
        state.fenced.update(beat.fenced)
        news = state.reports
        state.reports = {report.target: report for report in beat.reports}
        self._decide_all_if_new()
        self._decide(self._chains_with_news(news, state.reports))
        return self._beat_reply(beat, state)

    def _beat_reply(self, beat: Heartbeat, state: NodeState) -> HeartbeatReply:
        config = self._config_of(beat.node, state)
        fresh = config.number != beat.config
        decisions = [self.decisions.get(route.chain) for route in config.chains]
        next_ms = BEAT_MS
        if fresh or any(d is not None and d.moving for d in decisions):
            next_ms = BEAT_MOVING_MS
        elif not all(d is not None and d.serving for d in self._decisions_of_node(beat.node)):
            next_ms = BEAT_WAITING_MS
        fences = sorted(self._fences - state.fenced)[:FENCES_A_REPLY]
        return HeartbeatReply(
            manager_ms=self._clock.now_ms(),
            next_ms=next_ms,
            config=config if fresh else None,
            fences=tuple(fences),
        )

    def _decisions_of_node(self, node: int) -> Iterable[chains.Decision | None]:
        view = self._routing.view
        for device in view.nodes[node].devices:
            for target in device.targets:
                record = view.targets.get(target)
                if record is not None and record.chain:
                    yield self.decisions.get(record.chain)

    # decisions

    def _chains_with_news(self, before: dict[int, TargetReport], now: dict[int, TargetReport]) -> set[int]:
        targets = self._routing.view.targets
        changed = set()
        for target, report in now.items():
            record = targets.get(target)
            if record is not None and record.chain and _essence(before.get(target)) != _essence(report):
                changed.add(record.chain)
        return changed

    def _decide_all_if_new(self) -> None:
        """Another view may have other chains, incarnations, versions: looks at all again."""
        view = self._routing.view
        if self._lease.primary and view is not self._decided_of:
            self._decided_of = view
            self._decide(view.chains)

    def _decide(self, chain_ids: Iterable[int]) -> None:
        view = self._routing.view
        for chain_id in list(chain_ids):
            record = view.chains[chain_id]
            reports = [self._report_of(view, member) for member in record.members]
            decision = chains.decide(record, reports, self._proposals.get(chain_id), self._lease.term)
            self._log_change(chain_id, decision)
            self.decisions[chain_id] = decision
            match decision.action:
                case chains.Action.PROPOSE:
                    self._proposals[chain_id] = chains.Proposal(decision.version, view.incarnations(record))
                    self._generation += 1
                case chains.Action.RECORD:
                    self._to_record[chain_id] = (record, self._proposals[chain_id])
                    self._wake_recorder.set()
                case chains.Action.NONE:
                    self._to_record.pop(chain_id, None)

    def _log_change(self, chain_id: int, decision: chains.Decision) -> None:
        before = self.decisions.get(chain_id)
        if before is None or before.serving != decision.serving or before.reason != decision.reason:
            log.debug("chain %d: %s", chain_id, decision.reason or "serves")

    def _report_of(self, view: View, target: int) -> chains.Report | None:
        node = view.targets[target].node
        state = self.nodes.get(node)
        if state is None or state.incarnation != view.nodes[node].incarnation or not view.nodes[node].alive:
            return None
        report = state.reports.get(target)
        return None if report is None else chains.Report(state.incarnation, report)

    # configuration of nodes

    def _config_of(self, node_id: int, state: NodeState) -> NodeConfig:
        """What the node must know now; a new number only if it differs from the last one."""
        view = self._routing.view
        made_from = (view, self._generation)
        if state.config is not None and state.config_of == made_from:
            return state.config
        routes, targets = node_routes(view, node_id, self._proposals)
        last = state.config
        if last is None or (last.chains, last.targets) != (routes, targets):
            self._config_count += 1
            number = (self._lease.term, self._config_count)
            last = NodeConfig(number=number, epoch=view.epoch, chains=routes, targets=targets)
        state.config = last
        state.config_of = made_from
        return last

    # ticks

    async def _load_fences(self) -> None:
        """Sessions that are over. One is forgotten when every node has fenced it and the last of its
        capabilities has expired."""
        found = await self._store.read(_all_fenced)
        view = self._routing.view
        now_ms = self._clock.now_ms()
        done = [
            client
            for client, fenced in found.items()
            if fenced.capability_expiry_ms < now_ms and self._all_have_fenced(view, client)
        ]
        if done:

            async def forget(txn: Transaction) -> None:
                await self._lease.guard(txn)
                for client in done:
                    txn.clear(fence_key(client))

            await self._store.run(forget)
        # The collectors of processes that are gone are sessions that are over, too.
        gone = {
            collector_client(node.id, node.incarnation - 1)
            for node in view.nodes.values()
            if node.incarnation > 1
        }
        self._fences = frozenset(found.keys() - set(done)) | gone
        for state in self.nodes.values():
            state.fenced &= self._fences

    def _all_have_fenced(self, view: View, client: int) -> bool:
        states = [self.nodes.get(node) for node in view.nodes]
        return all(state is not None and client in state.fenced for state in states)

    async def _judge_silence(self) -> None:
        now = self._now_s()
        changed = False
        for node in list(self._routing.view.nodes.values()):
            state = self.nodes.get(node.id)
            silent = state is None or now - state.heard_s > FAILURE_TIMEOUT_S
            if node.alive and silent:
                log.warning("node %s (%d) has been silent for %g s", node.name, node.id, FAILURE_TIMEOUT_S)
                await self._registry.set_alive(node.id, node.incarnation, False)
                changed = True
            elif not node.alive and not silent and node.control and state is not None and state.beats:
                await self._registry.set_alive(node.id, node.incarnation, True)
                changed = True
        if changed:
            await self._routing.refresh()

    async def _save_usage(self) -> None:
        if self._now_s() - self._usage_s < USAGE_S:
            return
        self._usage_s = self._now_s()
        view = self._routing.view
        for node_id, state in list(self.nodes.items()):
            devices = [
                (device.uuid, report.capacity_bytes, report.free_bytes)
                for device in view.nodes[node_id].devices
                if (report := state.reports.get(device.targets[0])) is not None
            ]
            if any(view.usage.get(uuid) != (capacity, free) for uuid, capacity, free in devices):
                await self._registry.save_usage(node_id, devices)


def _essence(report: TargetReport | None) -> object:
    """What decisions look at; the rest (bytes, chunks) changes all the time."""
    if report is None:
        return None
    return (
        (report.recorded_term, report.recorded_counter),
        (report.persisted_term, report.persisted_counter),
        report.state,
        report.persisted_here,
        report.poisoned,
    )


async def _all_fenced(snapshot: Snapshot) -> dict[int, FencedClient]:
    found: dict[int, FencedClient] = {}
    while page := await fenced_clients(snapshot, max(found, default=0)):
        found.update(page)
    return found


async def _survive(work: Awaitable[object]) -> None:
    """A failure of the store, or of the lease, ends one round of work and not the manager."""
    try:
        await work
    except FfsError as error:
        log.warning("%s", error)

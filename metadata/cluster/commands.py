"""`ffs cluster ...` at the primary: plans, made true in the store, and gone on with. docs/operations.md.

A command computes a plan from the records, stores it, and answers; chains follow by themselves
(metadata.cluster.chain). `tick` goes on with what was begun - drains, a rebalance, released targets - from
the records alone, whichever process is the primary by then. One event loop; plans of large clusters are
computed in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from msgspec.structs import replace

from ffs.errors import Busy, FfsError, InvalidArgument, NoSpace, NotFound, NotPermitted, Overloaded
from ffs.proto.cluster import ChainRecord, NodeRecord
from ffs.proto.commands import (
    DrainNode,
    ForceLead,
    ForceLeadReply,
    ForgetNode,
    GetCluster,
    MoveReply,
    Rebalance,
    ReplaceTarget,
)
from ffs.proto.common import Message
from ffs.rpc.handshake import Peer
from metadata.cluster import plan as plans
from metadata.cluster.balance import rebalance
from metadata.cluster.lease import Lease
from metadata.cluster.members import Member, goal_of, serving_of
from metadata.cluster.moves import (
    Moves,
    RebalanceRecord,
    find_device,
    find_node,
    find_targets,
    fresh_devices,
    in_chains,
    is_released,
    observe,
    released,
    successors,
)
from metadata.cluster.routing import RoutingCache, View
from metadata.cluster.status import cluster_reply, silent_ms
from metadata.kv.contract import Store

if TYPE_CHECKING:
    from metadata.cluster.manager import Manager

log = logging.getLogger("ffs.meta.commands")

TRIES: Final = 4  # a chain may change between plan and transaction
NAMED: Final = 20  # chains that a refusal names

Planner = Callable[[plans.Cluster], plans.Plan]


class Commands:
    """The manager hands over these requests, and calls `tick` while it is the primary."""

    REQUESTS: ClassVar[tuple[type[Message], ...]] = (
        GetCluster,
        DrainNode,
        ReplaceTarget,
        Rebalance,
        ForceLead,
        ForgetNode,
    )

    def __init__(self, store: Store, lease: Lease, routing: RoutingCache, manager: Manager) -> None:
        self._moves = Moves(store, lease)
        self._lease = lease
        self._routing = routing
        self._manager = manager
        self._busy = asyncio.Lock()
        self._looked_at: tuple[View, int] | None = None
        self.rebalancing: RebalanceRecord | None = None
        self.notes: dict[int, str] = {}  # node -> why what was begun there can't go on
        self._noted: dict[int, str] = {}  # at the last look

    def handle_now(self, peer: Peer, request: Message) -> Message | None:
        if type(request) is GetCluster:
            return cluster_reply(self._manager, self)
        return None

    async def handle(self, peer: Peer, request: Message) -> Message:
        if peer.role == "storage":
            raise NotPermitted(f"{type(request).__name__} is for people, not for role {peer.role}")
        async with self._busy:
            await self._manager.records_changed()
            if isinstance(request, DrainNode):
                return await self._drain(request)
            if isinstance(request, ReplaceTarget):
                return await self._replace(request)
            if isinstance(request, Rebalance):
                return await self._rebalance(request)
            if isinstance(request, ForgetNode):
                return await self._forget(request)
            assert isinstance(request, ForceLead), request
            return await self._force(request)

    async def tick(self) -> None:
        """Goes on with what the records say was begun. Call it about twice a second while primary."""
        async with self._busy:
            await self._free_released()
            self.rebalancing = await self._moves.rebalancing()
            view = self._routing.view
            seen = (view, self._reported())
            if seen == self._looked_at:
                return  # nothing has changed that a plan depends on
            self._looked_at = seen
            self._noted, self.notes = self.notes, {}
            await self._put_in_place(view)
            await self._go_on_draining(self._routing.view)
            await self._go_on_rebalancing()

    # drain

    async def _drain(self, request: DrainNode) -> MoveReply:
        node = find_node(self._routing.view, request.node)
        if request.undo:
            if not node.draining:
                raise InvalidArgument(f"node {node.name} isn't being drained: there is nothing to undo")
            await self._moves.set_draining(node.id, False)
            self.notes.pop(node.id, None)
            await self._manager.records_changed()
            log.warning("node %s isn't drained any more", node.name)
            return await self._carry_out(lambda cluster: plans.undo_drain(cluster, node.id), node.id)

        def plan(cluster: plans.Cluster) -> plans.Plan:
            return plans.drain(cluster, {node.id})

        await self._planned_or_refused(plan)  # a refusal leaves all as it is
        await self._moves.set_draining(node.id, True)
        await self._manager.records_changed()
        log.warning("node %s is being drained", node.name)
        return await self._carry_out(plan, node.id)

    async def _go_on_draining(self, view: View) -> None:
        leaving = [
            node.id
            for node in view.nodes.values()
            if node.draining
            and any(
                view.targets[target].node == node.id
                for chain in view.chains.values()
                for target in goal_of(chain)
            )
        ]
        if not leaving:
            return
        plan = await self._planned(lambda cluster: plans.drain(cluster, set(leaving), partly=True))
        if plan.unplaced:
            for node_id in leaving:
                self._note(node_id, "; ".join(plan.notes))
        await self._apply(plan)

    # forget

    async def _forget(self, request: ForgetNode) -> MoveReply:
        view = self._routing.view
        node = find_node(view, request.node)
        if node.alive:
            raise InvalidArgument(
                f"node {node.name} is alive: drain it (ffs cluster drain {node.name}), then stop its server"
            )
        needed = sum(
            view.targets[target].node == node.id
            for chain in view.chains.values()
            for target in {*chain.members, *goal_of(chain)}
        )
        if needed:
            raise InvalidArgument(
                f"chains need {plans.some(needed, 'target')} of node {node.name}: have them replaced first "
                f"(ffs cluster drain {node.name})"
            )
        if not self._manager.is_gone(node.id):
            raise Busy(f"node {node.name} may hold a lease still: try again in a few seconds")
        await self._moves.forget(node)
        self.notes.pop(node.id, None)
        await self._manager.records_changed()
        log.warning("node %s (%d) is forgotten, with its devices", node.name, node.id)
        return MoveReply(node=node.id)

    # replace

    async def _put_in_place(self, view: View) -> None:
        """A node that has come back with an empty disk gets its replicas again, without a command. Nothing is
        given up by that: what is replaced leaves its chain only when the new replica serves."""
        for gone, fresh in successors(view):
            node = next(node for node in view.nodes.values() for d in node.devices if d.uuid == fresh)
            state = self._manager.nodes.get(node.id)
            if state is None or not state.beats:
                continue  # how large it is comes with the first report
            targets = in_chains(view, gone)
            try:
                plan = await self._planned(partial(plans.replace, targets=targets, device=fresh))
            except FfsError as error:
                self._note(node.id, f"its new device can't take the place of {gone.hex()}: {error.message}")
                continue
            await self._apply(plan)
            log.warning(
                "node %s: device %s has taken the place of %s, %s to be filled",
                node.name,
                fresh.hex(),
                gone.hex(),
                plans.some(len(targets), "target"),
            )

    def _note(self, node: int, note: str) -> None:
        """Said by status until the next look, and logged when it is new."""
        if self._noted.get(node) != note:
            log.warning("node %s: %s", self._routing.view.nodes[node].name, note)
        self.notes[node] = note

    async def _replace(self, request: ReplaceTarget) -> MoveReply:
        view = self._routing.view
        targets, left = find_targets(view, request.what)
        onto = find_device(view, request.device).uuid if request.device else None
        if onto == left:
            raise InvalidArgument(
                "that is the device whose targets are to go: choose another", request.device
            )

        def plan(cluster: plans.Cluster) -> plans.Plan:
            return plans.replace(cluster, targets, onto, fresh_devices(cluster, left))

        reply = await self._carry_out(plan, view.targets[min(targets)].node)
        log.warning("%s are replaced", plans.some(len(targets), "target"))
        return reply

    # rebalance

    async def _rebalance(self, request: Rebalance) -> MoveReply:
        onto = find_node(self._routing.view, request.onto) if request.onto else None
        if onto is not None:
            self._check_can_take(onto)
        node = onto.id if onto is not None else 0
        if request.only_plan:
            return _reply(await self._planned(lambda cluster: rebalance(cluster, node)), node)
        self.rebalancing = RebalanceRecord(onto=node)
        await self._moves.set_rebalancing(self.rebalancing)
        reply = await self._carry_out(lambda cluster: rebalance(cluster, node), node)
        self._looked_at = None
        log.warning("rebalance: %s move", plans.some(reply.targets, "target"))
        return reply

    def _check_can_take(self, node: NodeRecord) -> None:
        if not node.alive:
            raise InvalidArgument(f"node {node.name} isn't alive: start its server first")
        if node.draining:
            raise InvalidArgument(
                f"node {node.name} is being drained: undo that first (ffs cluster drain {node.name} --undo)"
            )

    async def _go_on_rebalancing(self) -> None:
        """Until nothing is to move and nothing is on its way: what arrives sets targets free for others."""
        going = self.rebalancing
        if going is None:
            return
        plan = await self._planned(lambda cluster: rebalance(cluster, going.onto))
        await self._apply(plan)
        if not plan.changes and not self._on_the_way():
            await self._moves.set_rebalancing(None)
            self.rebalancing = None
            log.warning("rebalance: done")

    def _on_the_way(self) -> bool:
        view = self._routing.view
        moving = any(set(chain.members) != set(goal_of(chain)) for chain in view.chains.values())
        # Targets of a disk that is gone can drop nothing: nobody waits for them.
        return moving or any(released(view, node.id) for node in view.nodes.values() if node.alive)

    # force-lead

    async def _force(self, request: ForceLead) -> ForceLeadReply:
        view = self._routing.view
        target = view.targets.get(request.target)
        chain = view.chains.get(target.chain) if target is not None else None
        if target is None or chain is None or target.id not in (*chain.members, *chain.wanted):
            raise NotFound(f"target {request.target} is in no chain (ffs cluster chains)")
        absent = self._why_forced(view, chain, target.id)
        silent = {name for member, name, _ in absent if not view.nodes[view.targets[member].node].alive}
        reply = ForceLeadReply(
            chain=chain.id,
            done=False,
            absent=absent,
            silent=tuple(sorted(silent)),
            notes=self._knows(view, target.id),
        )
        if not request.confirmed:
            return reply
        await self._moves.force(chain, target.id)
        await self._manager.records_changed()
        log.error("chain %d: target %d was told to lead alone; %s may know more", chain.id, target.id, absent)
        return replace(reply, done=True)

    def _why_forced(self, view: View, chain: ChainRecord, target: int) -> tuple[tuple[int, str, str], ...]:
        """Who may know more. InvalidArgument while the chain can go on without force, or the target can't."""
        decision = self._manager.decisions.get(chain.id)
        if decision is None:
            raise Busy(f"chain {chain.id} hasn't been looked at yet: try again in a few seconds")
        judged = decision.judged
        if judged.get(target) in (Member.GONE, Member.SILENT, Member.LOST, Member.FAILED):
            raise InvalidArgument(
                f"target {target} isn't there, or its device has failed: start its node, or name another"
            )
        serving = serving_of(chain)
        for member in serving:
            name = self._node_of(view, member)
            if judged[member] in (Member.HOLDS, Member.RETURNED, Member.LATE):
                raise InvalidArgument(
                    f"chain {chain.id} needs no force: target {member} on node {name} has all of it and leads"
                )
            if judged[member] is Member.SILENT:
                raise InvalidArgument(
                    f"target {member} on node {name} may be there still: wait for the failure timeout "
                    f"({self._manager.failure_timeout_s:g} s) and ask again"
                )
        return tuple((m, self._node_of(view, m), self._why_not(m, judged[m])) for m in serving if m != target)

    @staticmethod
    def _node_of(view: View, target: int) -> str:
        return view.nodes[view.targets[target].node].name

    def _why_not(self, target: int, judged: Member) -> str:
        match judged:
            case Member.GONE:
                state = self._manager.nodes.get(self._routing.view.targets[target].node)
                silent = silent_ms(state, self._manager.now_s())
                return f"not heard for {silent // 1000} s" if silent >= 0 else "not heard by this manager"
            case Member.LOST:
                return "its node runs without its device"
            case Member.FAILED:
                return "its device has failed"
            case Member.WIPED:
                return "its device is empty"
            case Member.STALE:
                return "it has an older version"
            case _:
                return "it has something else"

    def _knows(self, view: View, target: int) -> tuple[str, ...]:
        node = view.targets[target].node
        state = self._manager.nodes.get(node)
        report = state.reports.get(target) if state is not None else None
        if report is None:
            return ()
        version = f"{report.persisted_term}.{report.persisted_counter}"
        if (report.persisted_term, report.persisted_counter) == (0, 0):
            version = "none"
        return (f"target {target} has {report.chunks} chunks, and took part last in version {version}",)

    # plans

    async def _planned(self, planner: Planner) -> plans.Plan:
        cluster = observe(self._routing.view, self._manager.nodes)
        return await asyncio.to_thread(planner, cluster)

    async def _planned_or_refused(self, planner: Planner) -> plans.Plan:
        """Overloaded (ask again) where room is short only until released targets are empty."""
        try:
            return await self._planned(planner)
        except NoSpace as error:
            view = self._routing.view
            emptied = sum(len(released(view, node.id)) for node in view.nodes.values() if node.alive)
            if emptied:
                raise Overloaded(
                    f"{error.message}; or try again soon: {plans.some(emptied, 'target')} that chains have "
                    "given up are being emptied"
                ) from None
            raise

    async def _carry_out(self, planner: Planner, node: int) -> MoveReply:
        """Plans and stores until nothing is left to do, or the records keep changing."""
        plan = first = await self._planned_or_refused(planner)
        for _ in range(TRIES):
            if not plan.changes or len(await self._apply(plan)) == len(plan.changes):
                break
            plan = await self._planned(planner)
        return _reply(first, node)

    async def _apply(self, plan: plans.Plan) -> list[int]:
        if not plan.changes:
            return []
        done = await self._moves.apply(plan.changes)
        await self._manager.records_changed()
        log.info("new goals for %s", plans.some(len(done), "chain"))
        return done

    async def _free_released(self) -> None:
        """Released targets whose server has done what its configuration said, and has nothing any more."""
        view = self._routing.view
        empty = []
        for node_id, state in self._manager.nodes.items():
            if state.acted is None or view.nodes[node_id].incarnation != state.incarnation:
                continue
            for target in state.acted.released:
                report = state.reports.get(target)
                if report is not None and report.chain == 0 and is_released(view, view.targets[target]):
                    empty.append(target)
        if empty:
            freed = await self._moves.free(empty)
            await self._manager.records_changed()
            log.info("%s free", plans.some(len(freed), "target"))

    def _reported(self) -> int:
        """How many nodes have been heard in their present incarnation: plans look at what they report."""
        return sum(state.beats > 0 for state in self._manager.nodes.values())


def _reply(plan: plans.Plan, node: int) -> MoveReply:
    return MoveReply(
        chains=tuple(change.chain for change in plan.changes),
        targets=sum(len(change.fill) for change in plan.changes),
        reordered=sum(not change.fill for change in plan.changes),
        node=node,
        notes=plan.notes,
    )

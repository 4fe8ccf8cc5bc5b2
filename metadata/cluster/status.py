"""What people want to know: GetStatus, GetCluster, and why a chain isn't whole. Pure but for clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ffs.proto.cluster import (
    ChainRecord,
    ChainStatus,
    DeviceInfo,
    DeviceStatus,
    NodeRecord,
    NodeStatus,
    StatusReply,
    TargetRecord,
    TargetReport,
    TargetState,
)
from ffs.proto.commands import ChainView, ClusterReply, DeviceView, NodeView, SyncView, TargetView
from metadata.cluster.chain import Decision, shown_states
from metadata.cluster.clock import ManagerClock
from metadata.cluster.lease import Lease
from metadata.cluster.members import goal_of
from metadata.cluster.moves import is_free, is_released, misplaced
from metadata.cluster.placement import domain_of
from metadata.cluster.routing import View

if TYPE_CHECKING:
    from metadata.cluster.commands import Commands
    from metadata.cluster.manager import Manager, NodeState

RATE_S: Final = 2.0  # the span that a speed is measured over
WAITING: Final = "waiting for reports"


def silent_ms(state: NodeState | None, now_s: float) -> int:
    """Since the node's last heartbeat; -1: none since this manager took over."""
    return int((now_s - state.heard_s) * 1000) if state is not None and state.beats > 0 else -1


# --- GetStatus: `ffs status`, and who waits for a cluster to serve ------------------------------


def status_reply(
    manager: Manager, view: View, cluster: bytes, lease: Lease, clock: ManagerClock
) -> StatusReply:
    return StatusReply(
        cluster=cluster,
        epoch=view.epoch,
        term=lease.term,
        primary=lease.primary_address,
        manager_ms=clock.now_ms(),
        nodes=tuple(_node(node, manager.nodes.get(node.id), manager.now_s()) for node in _started(view)),
        chains=tuple(_chain(manager, view, chain) for chain in view.chains.values()),
        tables=view.table_routes(),
        signed=manager.signed,
    )


def _started(view: View) -> list[NodeRecord]:
    """Without those that got target ids only: their first start failed when it formatted a device."""
    return [node for node in view.nodes.values() if node.incarnation]


def _node(node: NodeRecord, state: NodeState | None, now_s: float) -> NodeStatus:
    return NodeStatus(
        id=node.id,
        name=node.name,
        alive=node.alive,
        incarnation=node.incarnation,
        host=node.host,
        control=node.control,
        silent_ms=silent_ms(state, now_s),
        devices=tuple(_device(device, state) for device in node.devices),
    )


def _device(device: DeviceInfo, state: NodeState | None) -> DeviceStatus:
    reports = [] if state is None else [state.reports[t] for t in device.targets if t in state.reports]
    return DeviceStatus(
        path=device.path,
        uuid=device.uuid,
        size_bytes=device.size_bytes,
        capacity_bytes=max((report.capacity_bytes for report in reports), default=0),
        free_bytes=max((report.free_bytes for report in reports), default=0),
        targets=len(device.targets),
        poisoned=any(report.poisoned for report in reports),
    )


def _chain(manager: Manager, view: View, chain: ChainRecord) -> ChainStatus:
    decision = manager.decisions.get(chain.id)
    return ChainStatus(
        id=chain.id,
        table=chain.table,
        term=chain.term,
        counter=chain.counter,
        members=chain.members,
        states=_states(view, chain, decision),
        nodes=tuple(view.targets[member].node for member in chain.members),
        writable=decision is not None and decision.serving,
        readable=_readable(view, chain),
        reason=WAITING if decision is None else decision.reason,
    )


def _states(view: View, chain: ChainRecord, decision: Decision | None) -> tuple[int, ...]:
    if decision is None or any(member not in decision.judged for member in chain.members):
        return view.chain_route(chain).states
    return shown_states(chain, decision.judged)


def _readable(view: View, chain: ChainRecord) -> bool:
    states = view.chain_route(chain).states
    alive = [view.nodes[view.targets[member].node].alive for member in chain.members]
    return any(state == TargetState.SERVING and up for state, up in zip(states, alive, strict=True))


# --- GetCluster: `ffs cluster ...` --------------------------------------------------------------


def cluster_reply(manager: Manager, commands: Commands) -> ClusterReply:
    view = manager.view
    reports = {
        target: report
        for node, state in manager.nodes.items()
        if node in view.nodes and view.nodes[node].incarnation == state.incarnation
        for target, report in state.reports.items()
    }
    used = {target for chain in view.chains.values() for target in (*chain.members, *goal_of(chain))}
    wrong = misplaced(view)
    targets_of: dict[int, list[TargetRecord]] = {}
    for target in view.targets.values():
        targets_of.setdefault(target.node, []).append(target)
    return ClusterReply(
        cluster=manager.cluster,
        epoch=view.epoch,
        term=manager.lease.term,
        primary=manager.lease.primary_address,
        manager_ms=manager.clock.now_ms(),
        rebalancing=commands.rebalancing is not None,
        nodes=tuple(
            _node_view(
                manager,
                commands.notes.get(node.id) or wrong.get(node.id, ""),
                node,
                targets_of.get(node.id, []),
                reports,
                used,
            )
            for node in _started(view)
        ),
        targets=tuple(
            _target_view(manager, target, reports.get(target.id))
            for target in view.targets.values()
            if target.id in used or is_released(view, target)
        ),
        chains=tuple(_chain_view(manager, chain, reports) for chain in view.chains.values()),
        tables=view.table_routes(),
        spaces=manager.spaces.views(),
    )


def _node_view(
    manager: Manager,
    note: str,
    node: NodeRecord,
    mine: Sequence[TargetRecord],
    reports: Mapping[int, TargetReport],
    used: set[int],
) -> NodeView:
    view = manager.view
    here = {device.uuid: device for device in node.devices}
    by_device: dict[bytes, list[TargetRecord]] = {uuid: [] for uuid in here}
    for target in mine:
        if target.device in here or target.id in used:
            by_device.setdefault(target.device, []).append(target)
    return NodeView(
        id=node.id,
        name=node.name,
        domain=node.domain,
        alive=node.alive,
        draining=node.draining,
        incarnation=node.incarnation,
        host=node.host,
        control=node.control,
        silent_ms=silent_ms(manager.nodes.get(node.id), manager.now_s()),
        leaving=sum(target.id in used for target in mine),
        note=note,
        devices=tuple(
            _device_view(view, uuid, here.get(uuid), targets, reports, used, node.alive)
            for uuid, targets in by_device.items()
        ),
    )


def _device_view(
    view: View,
    uuid: bytes,
    device: DeviceInfo | None,
    targets: Iterable[TargetRecord],
    reports: Mapping[int, TargetReport],
    used: set[int],
    alive: bool,
) -> DeviceView:
    targets = list(targets)
    said = [reports[target.id] for target in targets if target.id in reports]
    return DeviceView(
        uuid=uuid,
        path=device.path if device is not None else "",
        here=device is not None and alive,
        poisoned=any(report.poisoned for report in said),
        size_bytes=device.size_bytes if device is not None else 0,
        capacity_bytes=max((report.capacity_bytes for report in said), default=0),
        free_bytes=min((report.free_bytes for report in said), default=0),
        targets=len(targets),
        used_targets=sum(target.id in used for target in targets),
        free_targets=sum(is_free(view, target) for target in targets) if device is not None else 0,
        role=device.role if device is not None else "",
        null_data=device is not None and device.null_data,
    )


def _target_view(manager: Manager, target: TargetRecord, report: TargetReport | None) -> TargetView:
    view = manager.view
    chain = view.chains[target.chain]
    member = target.id in chain.members
    state = int(TargetState.OFFLINE)
    if member:
        states = _states(view, chain, manager.decisions.get(chain.id))
        state = states[chain.members.index(target.id)]
    return TargetView(
        id=target.id,
        node=target.node,
        device=target.device,
        chain=target.chain,
        state=state,
        wanted=target.id in goal_of(chain),
        member=member,
        released=is_released(view, target),
        here=report is not None and view.nodes[target.node].alive,
        poisoned=report is not None and report.poisoned,
        used_bytes=report.used_bytes if report is not None else 0,
        chunks=report.chunks if report is not None else 0,
        damaged=report.damaged if report is not None else 0,
        repaired=report.repaired if report is not None else 0,
        scrubbed_bytes=report.scrubbed_bytes if report is not None else 0,
    )


def _chain_view(manager: Manager, chain: ChainRecord, reports: Mapping[int, TargetReport]) -> ChainView:
    view = manager.view
    decision = manager.decisions.get(chain.id)
    return ChainView(
        id=chain.id,
        table=chain.table,
        term=chain.term,
        counter=chain.counter,
        members=chain.members,
        states=_states(view, chain, decision),
        wanted=goal_of(chain),
        writable=decision is not None and decision.serving,
        readable=_readable(view, chain),
        whole=decision is not None and decision.whole,
        forced=chain.forced,
        reason=WAITING if decision is None else decision.reason,
        shared_domain=_shared_domain(view, chain),
        sync=_sync(manager, chain, reports),
    )


def _shared_domain(view: View, chain: ChainRecord) -> str:
    nodes = [view.nodes[view.targets[target].node] for target in goal_of(chain)]
    counts = Counter(domain_of(node.id, node.domain) for node in nodes)
    return min((label for (label, _), count in counts.items() if count > 1), default="")


def _sync(manager: Manager, chain: ChainRecord, reports: Mapping[int, TargetReport]) -> SyncView | None:
    for member in chain.members:
        report = reports.get(member)
        if report is not None and report.chain == chain.id and report.sync_target:
            return SyncView(
                source=member,
                target=report.sync_target,
                done=report.sync_done,
                failure=report.sync_failure,
                chunks_total=report.sync_chunks_total,
                chunks_compared=report.sync_chunks_compared,
                chunks_sent=report.sync_chunks_sent,
                bytes_sent=report.sync_bytes_sent,
                bytes_per_s=manager.rates.of(member),
            )
    return None


# --- speed ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sample:
    since_s: float
    bytes: int
    last_s: float
    last_bytes: int
    per_s: int = 0


class SyncRates:
    """How fast syncs go, from what sources report of the bytes that they have sent."""

    def __init__(self) -> None:
        self._of: dict[int, _Sample] = {}

    def heard(self, reports: Iterable[TargetReport], now_s: float) -> None:
        """Call with each heartbeat's reports."""
        for report in reports:
            if not report.sync_target:
                self._of.pop(report.target, None)
                continue
            sample = self._of.get(report.target)
            if sample is None or report.sync_bytes_sent < sample.last_bytes:  # another sync
                self._of[report.target] = _Sample(
                    now_s, report.sync_bytes_sent, now_s, report.sync_bytes_sent
                )
                continue
            if now_s > sample.since_s:
                sample.per_s = int((report.sync_bytes_sent - sample.bytes) / (now_s - sample.since_s))
            sample.last_s, sample.last_bytes = now_s, report.sync_bytes_sent
            if now_s - sample.since_s >= RATE_S:
                sample.since_s, sample.bytes = now_s, report.sync_bytes_sent

    def of(self, target: int) -> int:
        """Bytes per second of the sync from this source; 0: none, or not known yet."""
        sample = self._of.get(target)
        return sample.per_s if sample is not None else 0

"""StatusReply for people: nodes, devices, chains and why a chain doesn't serve. Pure but for clocks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ffs.proto.cluster import (
    ChainRecord,
    ChainStatus,
    DeviceInfo,
    DeviceStatus,
    NodeRecord,
    NodeStatus,
    StatusReply,
    TargetState,
)
from metadata.cluster.clock import ManagerClock
from metadata.cluster.lease import Lease
from metadata.cluster.routing import View

if TYPE_CHECKING:
    from metadata.cluster.manager import Manager, NodeState


def status_reply(
    manager: Manager, view: View, cluster: bytes, lease: Lease, clock: ManagerClock
) -> StatusReply:
    return StatusReply(
        cluster=cluster,
        epoch=view.epoch,
        term=lease.term,
        primary=lease.primary_address,
        manager_ms=clock.now_ms(),
        nodes=tuple(_node(node, manager.nodes.get(node.id)) for node in view.nodes.values()),
        chains=tuple(_chain(manager, view, chain) for chain in view.chains.values()),
        tables=view.table_routes(),
    )


def _node(node: NodeRecord, state: NodeState | None) -> NodeStatus:
    heard = state is not None and state.beats > 0
    return NodeStatus(
        id=node.id,
        name=node.name,
        alive=node.alive,
        incarnation=node.incarnation,
        host=node.host,
        control=node.control,
        silent_ms=int((time.monotonic() - state.heard_s) * 1000) if state is not None and heard else -1,
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
    route = view.chain_route(chain)
    alive = [view.nodes[view.targets[member].node].alive for member in chain.members]
    return ChainStatus(
        id=chain.id,
        table=chain.table,
        term=chain.term,
        counter=chain.counter,
        members=chain.members,
        states=route.states,
        nodes=tuple(view.targets[member].node for member in chain.members),
        writable=decision is not None and decision.serving,
        readable=any(
            state == TargetState.SERVING and up for state, up in zip(route.states, alive, strict=True)
        ),
        reason="waiting for reports" if decision is None else decision.reason,
    )

"""Moves of targets: what plans see of the cluster, and the transactions that make a plan true.

A move is nothing but what the records say. A chain's `wanted` names the targets that it shall end with; a
target that it newly wants is reserved by its TargetRecord.chain; one that the chain neither has nor wants any
more is *released*: its server drops what it holds and then reports chain 0, and the record says 0 again: it
is free. Beside that only two intentions are stored: NodeRecord.draining, and RebalanceRecord (`cR`). So a
manager that takes over in the middle goes on from what it reads. docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ffs.errors import Busy, Damaged, InvalidArgument, NotFound
from ffs.proto.cluster import ChainRecord, DeviceInfo, NodeRecord, TargetRecord, TargetReport
from metadata.cluster import plan as plans
from metadata.cluster.lease import Lease
from metadata.cluster.members import goal_of, serving_of
from metadata.cluster.routing import View
from metadata.cluster.schema import (
    DEVICES,
    NODE_UUIDS,
    TARGETS,
    chain_key,
    decode,
    encode,
    get_record,
    node_key,
    raise_epoch,
    target_key,
    usage_key,
)
from metadata.kv.contract import Store, Transaction, after

if TYPE_CHECKING:
    from metadata.cluster.manager import NodeState

CHAINS_A_TRANSACTION: Final = 500
REBALANCE: Final = b"cR"


class RebalanceRecord(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """A rebalance that goes on until there is nothing to move. `onto`: only to this node; 0: to all."""

    v: int = 1
    onto: int = 0


_rebalance = msgspec.msgpack.Decoder(RebalanceRecord)


# --- what is there ------------------------------------------------------------------------------------


def is_released(view: View, target: TargetRecord) -> bool:
    """Its chain has given it up, and it isn't free yet."""
    if target.chain == 0:
        return False
    chain = view.chains.get(target.chain)
    return chain is None or target.id not in {*chain.members, *chain.wanted}


def released(view: View, node_id: int) -> tuple[int, ...]:
    """The node's targets that shall drop what they hold."""
    return tuple(
        target
        for device in view.nodes[node_id].devices
        for target in device.targets
        if target in view.targets and is_released(view, view.targets[target])
    )


def is_free(view: View, target: TargetRecord) -> bool:
    """Whether a chain may be given it: here, in no chain, and announced by its node."""
    return target.chain == 0 and target.port != 0 and view.nodes[target.node].alive


def observe(view: View, states: Mapping[int, NodeState]) -> plans.Cluster:
    """The cluster as plans see it."""
    nodes = {
        node.id: plans.Node(node.id, node.name, node.domain, node.alive, node.draining)
        for node in view.nodes.values()
    }
    reports = _reports(view, states)
    homes = {target.id: target.device for target in view.targets.values()}
    devices = {
        device.uuid: _device(view, node, device, reports)
        for node in view.nodes.values()
        for device in node.devices
    }
    for target in view.targets.values():  # devices that a node had, and hasn't open now
        if target.device not in devices:
            devices[target.device] = plans.Device(target.device, target.node, "", 0, 0, (), usable=False)
    chains = {
        chain.id: plans.Chain(
            id=chain.id,
            table=chain.table,
            members=chain.members,
            serving=frozenset(serving_of(chain)),
            goal=goal_of(chain),
            used_bytes=max((reports[m].used_bytes for m in chain.members if m in reports), default=0),
        )
        for chain in view.chains.values()
    }
    roles = {table.id: table.role for table in view.latest.values() if table.role}
    return plans.Cluster(nodes, devices, homes, chains, roles)


def _reports(view: View, states: Mapping[int, NodeState]) -> dict[int, TargetReport]:
    """Of the nodes' present incarnations."""
    return {
        target: report
        for node, state in states.items()
        if node in view.nodes and view.nodes[node].incarnation == state.incarnation
        for target, report in state.reports.items()
    }


def _device(
    view: View, node: NodeRecord, device: DeviceInfo, reports: Mapping[int, TargetReport]
) -> plans.Device:
    mine = [reports[target] for target in device.targets if target in reports]
    capacity, free = view.usage.get(device.uuid, (device.size_bytes, device.size_bytes))
    if mine:
        capacity = max(report.capacity_bytes for report in mine)
        free = min(report.free_bytes for report in mine)
    targets = [view.targets[target] for target in device.targets if target in view.targets]
    return plans.Device(
        uuid=device.uuid,
        node=node.id,
        path=device.path,
        capacity_bytes=capacity,
        free_bytes=free,
        free=tuple(sorted(target.id for target in targets if is_free(view, target))),
        usable=node.alive and not any(report.poisoned for report in mine),
        role=device.role,
    )


# --- what people name -----------------------------------------------------------------------------


def find_node(view: View, text: str) -> NodeRecord:
    """By name, else by id. Of several with a name (only one is alive) the live one."""
    named = sorted(
        (node for node in view.nodes.values() if node.name == text), key=lambda n: (not n.alive, -n.id)
    )
    if named:
        return named[0]
    if text.isascii() and text.isdigit() and int(text) in view.nodes:
        return view.nodes[int(text)]
    known = ", ".join(node.name for node in view.nodes.values()) or "none"
    raise NotFound(f"no node {text}; there are: {known}")


def find_device(view: View, text: str) -> plans.Device:
    """By uuid in hex, or as PATH@NODE. A device that its node hasn't open now is found by uuid, and by
    PATH@NODE when the node's only device that is missing must have been there."""
    cluster = observe(view, {})
    path, at, name = text.rpartition("@")
    if not at:
        try:
            return cluster.devices[bytes.fromhex(text.replace("-", ""))]
        except (KeyError, ValueError):
            raise NotFound(f"no device {text}: give its uuid, or PATH@NODE (ffs cluster nodes)") from None
    node = find_node(view, name)
    here = [d for d in cluster.devices.values() if d.node == node.id and d.path]
    found = [device for device in here if device.path == path]
    if found:
        return found[0]
    paths = ", ".join(sorted(device.path for device in here)) or "none"
    raise NotFound(f"node {node.name} has no device {path}; it has: {paths}")


def find_targets(view: View, text: str) -> tuple[set[int], bytes]:
    """A target by id, or all of a device that chains have or want; and the device they are on."""
    if text.isascii() and text.isdigit() and len(text) < 19:
        target = view.targets.get(int(text))
        if target is None:
            raise NotFound(f"no target {text} (ffs cluster targets)")
        if target.chain == 0 or is_released(view, target):
            raise InvalidArgument(f"target {text} is in no chain: there is nothing to replace")
        return {target.id}, target.device
    device = find_device(view, text).uuid
    if not in_chains(view, device) and "@" in text:
        device = _missing_device(view, find_node(view, text.rpartition("@")[2]), text)
    targets = in_chains(view, device)
    if not targets:
        raise InvalidArgument(f"no chain has a target on device {text}: there is nothing to replace")
    return targets, device


def in_chains(view: View, device: bytes) -> set[int]:
    """Targets of the device that chains shall end with."""
    return {target for chain in view.chains.values() for target in goal_of(chain)} & {
        target.id for target in view.targets.values() if target.device == device
    }


def _missing_device(view: View, node: NodeRecord, text: str) -> bytes:
    """The one whose place a new device has taken."""
    here = {device.uuid for device in node.devices}
    missing = sorted({target.device for target in view.targets.values() if target.node == node.id} - here)
    missing = [device for device in missing if in_chains(view, device)]
    if len(missing) > 1:
        raise InvalidArgument(
            f"node {node.name} lacks several devices: name the one that {text} replaces by its uuid: "
            + ", ".join(device.hex() for device in missing)
        )
    if not missing:
        raise InvalidArgument(f"no chain has a target on device {text}: there is nothing to replace")
    return missing[0]


def fresh_devices(cluster: plans.Cluster, lost: bytes) -> list[bytes]:
    """Devices of the same node that no chain uses: one of them has taken the place of a lost one."""
    if cluster.devices[lost].usable:
        return []
    used = {cluster.homes[target] for chain in cluster.chains.values() for target in chain.goal}
    node = cluster.devices[lost].node
    return sorted(d.uuid for d in cluster.devices.values() if d.node == node and d.uuid not in used)


def successors(view: View) -> list[tuple[bytes, bytes]]:
    """Devices that chains want and that have gone, each with the unused one that has taken its place: of the
    same node, which runs without the old one; or of a node that has the name of one that is silent (the same
    machine, with its directory lost too)."""
    here = {device.uuid for node in view.nodes.values() if node.alive for device in node.devices}
    lost: dict[bytes, int] = {}  # device -> the node that had it
    roles: dict[bytes, str] = {}  # of lost devices: that of the tables of their targets
    for chain in view.chains.values():
        for target in (view.targets[member] for member in goal_of(chain)):
            if target.device not in here:
                lost[target.device] = target.node
                roles[target.device] = role_of(view, chain)
    if not lost:
        return []
    found = []
    for node in view.nodes.values():
        if not node.alive or node.draining:
            continue
        family = {node.id} | {n.id for n in view.nodes.values() if n.name == node.name and not n.alive}
        gone = [device for device, owner in lost.items() if owner in family]
        unused = [
            device
            for device in node.devices
            if all(t in view.targets and view.targets[t].chain == 0 for t in device.targets)
        ]
        for device in sorted(gone):
            # Without a role, where one belongs: it may have been forgotten, and the refusal says so.
            fit = [d for d in unused if d.role == roles[device]] or [d for d in unused if not d.role]
            if fit:
                unused.remove(fit[0])
                found.append((device, fit[0].uuid))
    return found


def role_of(view: View, chain: ChainRecord) -> str:
    """Of the devices that the chain's targets belong on."""
    table = view.latest.get(chain.table)
    return table.role if table is not None else ""


def misplaced(view: View) -> dict[int, str]:
    """node -> what is wrong there: chains of a table of one role have targets on a device of another."""
    devices = {d.uuid: (node, d) for node in view.nodes.values() for d in node.devices}
    wrong: dict[bytes, set[int]] = {}  # device -> tables
    for chain in view.chains.values():
        role = role_of(view, chain)
        for target in goal_of(chain):
            _, device = devices.get(view.targets[target].device, (None, None))
            if device is not None and device.role != role:
                wrong.setdefault(device.uuid, set()).add(chain.table)
    found: dict[int, str] = {}
    for uuid, tables in wrong.items():
        node, device = devices[uuid]
        words = [f"{view.latest[t].name} ({plans.role_words(view.latest[t].role)})" for t in sorted(tables)]
        found[node.id] = (
            f"device {device.path} has {plans.role_words(device.role)}, and chains of table "
            f"{', '.join(words)} have targets on it: start the node with the right role, or move them away "
            "(ffs cluster rebalance)"
        )
    return found


# --- transactions ---------------------------------------------------------------------------------


class Moves:
    """Each reads the lease, so only the primary's can commit. One event loop."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self._lease = lease

    async def apply(self, changes: Sequence[plans.Change]) -> list[int]:
        """Makes goals `wanted` and reserves the targets that are new in them, in batches. The chains of
        those changes that still fitted what the store says; the caller plans anew for others."""
        done: list[int] = []
        for at in range(0, len(changes), CHAINS_A_TRANSACTION):
            done += await self._apply_batch(changes[at : at + CHAINS_A_TRANSACTION])
        return done

    async def _apply_batch(self, changes: Sequence[plans.Change]) -> list[int]:
        async def body(txn: Transaction) -> list[int]:
            await self._lease.guard(txn)
            done = []
            for change in changes:
                chain = await get_record(txn, ChainRecord, chain_key(change.chain))
                if chain is None or goal_of(chain) != change.before:
                    continue
                if not await self._reserve(txn, chain, change.fill):
                    continue
                txn.set(chain_key(chain.id), encode(replace(chain, wanted=change.goal)))
                done.append(chain.id)
            if done:
                await raise_epoch(txn)
            return done

        return await self._store.run(body, urgent=True)

    async def _reserve(self, txn: Transaction, chain: ChainRecord, fill: Sequence[int]) -> bool:
        """False, with nothing written, if one belongs to another chain or its node is being drained."""
        targets = []
        for target_id in fill:
            target = await get_record(txn, TargetRecord, target_key(target_id))
            if target is None or target.chain not in (0, chain.id):
                return False
            node = await get_record(txn, NodeRecord, node_key(target.node))
            if node is None or (node.draining and target_id not in chain.members):
                return False
            targets.append(target)
        for target in targets:
            if target.chain == 0:
                txn.set(target_key(target.id), encode(replace(target, chain=chain.id)))
        return True

    async def free(self, targets: Collection[int]) -> list[int]:
        """Those that are released become free; the caller knows that they have dropped what they held."""

        async def body(txn: Transaction) -> list[int]:
            await self._lease.guard(txn)
            freed = []
            for target_id in sorted(targets)[: 4 * CHAINS_A_TRANSACTION]:
                target = await get_record(txn, TargetRecord, target_key(target_id))
                if target is None or target.chain == 0:
                    continue
                chain = await get_record(txn, ChainRecord, chain_key(target.chain))
                if chain is not None and target_id in {*chain.members, *chain.wanted}:
                    continue
                txn.set(target_key(target_id), encode(replace(target, chain=0)))
                freed.append(target_id)
            if freed:
                await raise_epoch(txn)
            return freed

        return await self._store.run(body)

    async def set_draining(self, node_id: int, draining: bool) -> None:
        async def body(txn: Transaction) -> None:
            await self._lease.guard(txn)
            node = await get_record(txn, NodeRecord, node_key(node_id))
            if node is None:
                raise NotFound(f"no node {node_id}")
            if node.draining != draining:
                txn.set(node_key(node_id), encode(replace(node, draining=draining)))
                await raise_epoch(txn)

        await self._store.run(body, urgent=True)

    async def forget(self, seen: NodeRecord) -> None:
        """Removes a node with its devices and targets. Busy if it has come back, or a chain names one."""

        async def body(txn: Transaction) -> None:
            await self._lease.guard(txn)
            node = await get_record(txn, NodeRecord, node_key(seen.id))
            if node is None:
                return
            if node.incarnation != seen.incarnation or node.alive:
                raise Busy(f"node {seen.name} has come back meanwhile")
            devices = set()
            for key, value in await txn.range(TARGETS, after(TARGETS)):
                target = decode(TargetRecord, key, value)
                if target.node != node.id:
                    continue
                chain = await get_record(txn, ChainRecord, chain_key(target.chain)) if target.chain else None
                if chain is not None and target.id in {*chain.members, *goal_of(chain)}:
                    raise Busy(
                        f"chain {chain.id} still has target {target.id} of node {node.name}: try again"
                    )
                devices.add(target.device)
                txn.clear(key)
            for device in devices:
                txn.clear(DEVICES + device)
            txn.clear(NODE_UUIDS + node.uuid)
            txn.clear(node_key(node.id))
            txn.clear(usage_key(node.id))
            await raise_epoch(txn)

        await self._store.run(body, urgent=True)

    async def force(self, seen: ChainRecord, target: int) -> None:
        """Busy if the chain isn't what the decision saw."""

        async def body(txn: Transaction) -> None:
            await self._lease.guard(txn)
            chain = await get_record(txn, ChainRecord, chain_key(seen.id))
            if chain != seen:
                raise Busy(f"chain {seen.id} has changed meanwhile: look at it again")
            txn.set(chain_key(seen.id), encode(replace(chain, forced=target)))
            await raise_epoch(txn)

        await self._store.run(body, urgent=True)

    async def rebalancing(self) -> RebalanceRecord | None:
        """The one that goes on."""
        value = await self._store.read(lambda snapshot: snapshot.get(REBALANCE))
        if value is None:
            return None
        try:
            return _rebalance.decode(value)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Damaged(f"record {REBALANCE!r} of the metadata store can't be read: {error}") from None

    async def set_rebalancing(self, record: RebalanceRecord | None) -> None:
        async def body(txn: Transaction) -> None:
            await self._lease.guard(txn)
            if record is None:
                txn.clear(REBALANCE)
            else:
                txn.set(REBALANCE, msgspec.msgpack.encode(record))

        await self._store.run(body)

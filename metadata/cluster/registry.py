"""The manager's transactions: nodes, targets, tables, chain versions. docs/control_plane.md, Store.

Every one reads the lease (so only the primary's can commit), may run more than once, and raises
the routing epoch when it changes what routing shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ffs.errors import Busy, Exists, Fenced, InvalidArgument, NotFound, Overloaded
from ffs.proto.cluster import (
    MAX_TARGETS_OF_DEVICE,
    ROLES,
    AllocateTargets,
    AnnounceNode,
    ChainRecord,
    CreateTable,
    CreateTableReply,
    DeviceInfo,
    NodeRecord,
    RegisterNode,
    TableRecord,
    TargetRecord,
    TargetState,
)
from metadata.cluster import chain as chains
from metadata.cluster.lease import Lease
from metadata.cluster.members import incarnation_in
from metadata.cluster.placement import FreeDevice, place
from metadata.cluster.schema import (
    DEVICES,
    NODE_UUIDS,
    NODES,
    TABLES,
    TARGETS,
    DeviceRecord,
    UsageRecord,
    chain_key,
    decode,
    encode,
    get_record,
    new_ids,
    node_key,
    pack_u64,
    raise_epoch,
    table_key,
    target_key,
    unpack_u64,
    usage_key,
)
from metadata.kv.contract import Store, Transaction, after


class Registry:
    """One event loop."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self._lease = lease

    # nodes

    async def allocate_targets(self, request: AllocateTargets) -> tuple[int, ...]:
        """Target ids for a device that is about to be formatted. The same again for the same device."""
        _check_uuid("node", request.node_uuid)
        _check_uuid("device", request.device_uuid)
        if not 1 <= request.count <= MAX_TARGETS_OF_DEVICE:
            raise InvalidArgument(f"{request.count} targets on a device: give 1 to {MAX_TARGETS_OF_DEVICE}")

        async def body(txn: Transaction) -> tuple[int, ...]:
            await self._lease.guard(txn)
            key = DEVICES + request.device_uuid
            known = await get_record(txn, DeviceRecord, key)
            if known is not None:
                return known.targets
            node = await self._node_of(txn, request.node_uuid, request.node_name)
            targets = tuple(await new_ids(txn, b"t", request.count))
            txn.set(key, encode(DeviceRecord(node=node.id, targets=targets)))
            for target in targets:
                record = TargetRecord(id=target, node=node.id, device=request.device_uuid)
                txn.set(target_key(target), encode(record))
            return targets

        return await self._store.run(body, urgent=True)

    async def register(self, request: RegisterNode, gone: Callable[[int], bool]) -> NodeRecord:
        """A started process of a node: a new incarnation, and its devices as they are now. `gone`: whether a
        node surely holds no lease any more."""
        _check_uuid("node", request.uuid)
        if len(request.domain) > 100 or not (request.domain == "" or request.domain.isprintable()):
            raise InvalidArgument(f"domain {request.domain!r}: give at most 100 printable characters")
        for device in request.devices:
            check_role(device.role, device.path)

        async def body(txn: Transaction) -> NodeRecord:
            await self._lease.guard(txn)
            node = await self._node_of(txn, request.uuid, request.name)
            if request.start and request.start == node.start:
                return node
            last = node.incarnation
            for device in request.devices:
                # Above the incarnations of all nodes that had its devices, so that one never means two.
                last = max(last, await self._adopt_device(txn, node, device, gone))
            node = replace(
                node,
                name=request.name,
                incarnation=last + 1,
                previous=node.incarnation,
                domain=request.domain,
                host_id=request.host_id,
                devices=request.devices,
                alive=False,
                control="",
                start=request.start,
            )
            txn.set(node_key(node.id), encode(node))
            await raise_epoch(txn)
            return node

        return await self._store.run(body, urgent=True)

    async def announce(self, request: AnnounceNode) -> None:
        """The registered incarnation serves, here."""

        async def body(txn: Transaction) -> None:
            await self._lease.guard(txn)
            node = await self._present(txn, request.node, request.incarnation)
            known = {target for device in node.devices for target in device.targets}
            for endpoint in request.endpoints:
                if endpoint.target not in known:
                    raise InvalidArgument(f"node {node.name} announces target {endpoint.target}, not its own")
                target = await self._target(txn, endpoint.target)
                target = replace(target, port=endpoint.port, socket_path=endpoint.socket_path)
                txn.set(target_key(target.id), encode(target))
            node = replace(node, host=request.host, control=request.control, alive=True)
            txn.set(node_key(node.id), encode(node))
            await raise_epoch(txn)

        await self._store.run(body, urgent=True)

    async def set_alive(self, node_id: int, incarnation: int, alive: bool) -> None:
        """Whether heartbeats come. Nothing if the node has registered again meanwhile."""

        async def body(txn: Transaction) -> None:
            await self._lease.guard(txn)
            node = await get_record(txn, NodeRecord, node_key(node_id))
            if node is None or node.incarnation != incarnation or node.alive == alive:
                return
            txn.set(node_key(node_id), encode(replace(node, alive=alive)))
            await raise_epoch(txn)

        await self._store.run(body, urgent=True)

    async def save_usage(self, node: int, devices: Sequence[tuple[bytes, int, int]]) -> None:
        """For statfs of the other metadata processes."""

        async def body(txn: Transaction) -> None:
            await self._lease.guard(txn)
            txn.set(usage_key(node), encode(UsageRecord(devices=tuple(devices))))

        await self._store.run(body)

    # chains

    async def record_chains(
        self, proposals: Sequence[tuple[ChainRecord, chains.Proposal]]
    ) -> list[ChainRecord]:
        """Makes proposed versions the recorded ones, in one transaction: those whose chain is still what the
        decision saw, and whose members that take part are still in the incarnations that persisted them.
        Returns what was recorded. What a version drops is freed elsewhere (metadata.cluster.moves)."""

        async def body(txn: Transaction) -> list[ChainRecord]:
            await self._lease.guard(txn)
            recorded = []
            for chain, proposal in proposals:
                found = await get_record(txn, ChainRecord, chain_key(chain.id))
                if found != chain or not await self._still(txn, proposal.next):
                    continue
                after_it = chains.recorded_by(chain, proposal)
                txn.set(chain_key(chain.id), encode(after_it))
                recorded.append(after_it)
            if recorded:
                await raise_epoch(txn)
            return recorded

        return await self._store.run(body, urgent=True)

    async def create_table(self, request: CreateTable) -> CreateTableReply:
        """A new table over the free targets of all live nodes."""
        if not request.name or len(request.name) > 100 or not request.name.isprintable():
            raise InvalidArgument(f"table name {request.name!r}: give 1 to 100 printable characters")
        check_role(request.role)

        async def body(txn: Transaction) -> CreateTableReply:
            await self._lease.guard(txn)
            for key, value in await txn.range(TABLES, after(TABLES)):
                table = decode(TableRecord, key, value)
                if table.name == request.name:
                    return _existing(table, request)
            devices = await self._free_devices(txn, request)
            placed = place(request.replicas, devices, request.chains_per_device, name=request.name)
            return await self._make_table(txn, request, placed)

        return await self._store.run(body, urgent=True)

    # inside

    async def _make_table(
        self, txn: Transaction, request: CreateTable, placed: list[tuple[int, ...]]
    ) -> CreateTableReply:
        table = (await new_ids(txn, b"b", 1))[0]
        ids = await new_ids(txn, b"c", len(placed))
        for chain_id, members in zip(ids, placed, strict=True):
            chain = ChainRecord(
                id=chain_id,
                table=table,
                term=self._lease.term,
                counter=0,
                members=members,
                states=(int(TargetState.OFFLINE),) * len(members),
                incarnations=(0,) * len(members),
                wanted=members,
            )
            chains.check(chain)
            txn.set(chain_key(chain_id), encode(chain))
            for member in members:
                target = await self._target(txn, member)
                assert target.chain == 0, target
                txn.set(target_key(member), encode(replace(target, chain=chain_id)))
        record = TableRecord(
            id=table,
            name=request.name,
            version=1,
            replicas=request.replicas,
            chains=tuple(ids),
            role=request.role,
        )
        txn.set(table_key(table, 1), encode(record))
        await raise_epoch(txn)
        return CreateTableReply(table=table, version=1, chains=len(ids))

    async def _free_devices(self, txn: Transaction, request: CreateTable) -> list[FreeDevice]:
        """Devices of the table's role with free targets. InvalidArgument if no node has one of that role."""
        nodes = [decode(NodeRecord, key, value) for key, value in await txn.range(NODES, after(NODES))]
        alive = {node.id: node for node in nodes if node.alive and not node.draining}
        devices = [device for node in alive.values() for device in node.devices]
        here = {target for device in devices if device.role == request.role for target in device.targets}
        if len(alive) < request.wait_nodes:
            raise Overloaded(
                f"table {request.name} waits for {request.wait_nodes} nodes, {len(alive)} are alive"
            )
        if devices and not here:
            raise InvalidArgument(f"table {request.name}: {no_device_of(request.role)}")
        free: dict[tuple[int, bytes], list[int]] = {}
        for key, value in await txn.range(TARGETS, after(TARGETS)):
            target = decode(TargetRecord, key, value)
            if target.chain == 0 and target.node in alive and target.port and target.id in here:
                free.setdefault((target.node, target.device), []).append(target.id)
        return [
            FreeDevice(node, min(targets), tuple(sorted(targets)), alive[node].domain)
            for (node, _), targets in free.items()
        ]

    async def _node_of(self, txn: Transaction, uuid: bytes, name: str) -> NodeRecord:
        """The node of a uuid; a new one if there is none. Its name must not be another live node's."""
        if not name or len(name) > 100 or not name.isprintable():
            raise InvalidArgument(f"node name {name!r}: give 1 to 100 printable characters")
        for key, value in await txn.range(NODES, after(NODES)):
            other = decode(NodeRecord, key, value)
            if other.name == name and other.uuid != uuid and other.alive:
                raise Exists(
                    f"node name {name} belongs to a live node with another directory "
                    f"({other.control or 'not announced'}): give this one another --name"
                )
        known = await txn.get(NODE_UUIDS + uuid)
        if known is not None:
            node = await get_record(txn, NodeRecord, node_key(unpack_u64(known)))
            assert node is not None, known
            assert node.uuid == uuid, (known, node)
            return node
        node = NodeRecord(id=(await new_ids(txn, b"n", 1))[0], name=name, uuid=uuid, incarnation=0)
        txn.set(NODE_UUIDS + uuid, pack_u64(node.id))
        txn.set(node_key(node.id), encode(node))
        return node

    async def _adopt_device(
        self, txn: Transaction, node: NodeRecord, device: DeviceInfo, gone: Callable[[int], bool]
    ) -> int:
        """A device is where its disk is: it may have been moved from a node that is gone. Returns the last
        incarnation under which its targets may have taken part in a chain."""
        path = device.path
        known = await get_record(txn, DeviceRecord, DEVICES + device.uuid)
        if known is None or known.targets != tuple(device.targets):
            raise NotFound(
                "the metadata store doesn't know this device's targets: it belongs to another store "
                "(an older backup?); format it anew only if its data isn't needed",
                path,
            )
        if known.node == node.id:
            return node.incarnation
        owner = await get_record(txn, NodeRecord, node_key(known.node))
        if owner is not None and owner.alive:
            raise Busy(f"the device belongs to node {owner.name}, which is alive", path)
        if owner is not None and not gone(owner.id):
            raise Busy(
                f"the device belongs to node {owner.name}, whose lease may still hold: try again", path
            )
        txn.set(DEVICES + device.uuid, encode(replace(known, node=node.id)))
        for target_id in device.targets:
            target = await self._target(txn, target_id)
            txn.set(target_key(target_id), encode(replace(target, node=node.id, port=0, socket_path="")))
        return 0 if owner is None else owner.incarnation

    async def _present(self, txn: Transaction, node_id: int, incarnation: int) -> NodeRecord:
        node = await get_record(txn, NodeRecord, node_key(node_id))
        if node is None:
            raise NotFound(f"node {node_id} isn't registered")
        if node.incarnation != incarnation:
            raise Fenced(f"node {node.name} has been started again as incarnation {node.incarnation}")
        return node

    async def _target(self, txn: Transaction, target_id: int) -> TargetRecord:
        target = await get_record(txn, TargetRecord, target_key(target_id))
        if target is None:
            raise NotFound(f"target {target_id} isn't known")
        return target

    async def _still(self, txn: Transaction, record: ChainRecord) -> bool:
        """Whether all that take part in it are in the incarnations that it names."""
        for target_id in record.members:
            incarnation = incarnation_in(record, target_id)
            if not incarnation:
                continue
            target = await self._target(txn, target_id)
            node = await get_record(txn, NodeRecord, node_key(target.node))
            assert node is not None, target
            if node.incarnation != incarnation:
                return False
        return True


def check_role(role: str, path: str | None = None) -> None:
    """Raises InvalidArgument, naming the device if it is one's."""
    if role not in ROLES:
        known = " or ".join(name for name in ROLES if name)
        raise InvalidArgument(f"role {role!r}: give {known}, or none", path)


def no_device_of(role: str) -> str:
    """What is missing, and the way out."""
    if role:
        return (
            f"no live node has a device of role {role}: start storage servers with "
            f"--device PATH,role={role}, or make the table without --role"
        )
    return "no live node has a device without a role: give the table a role (--role), or add such devices"


def _existing(table: TableRecord, request: CreateTable) -> CreateTableReply:
    wrong = []
    if table.role != request.role:
        wrong.append(f"role {table.role or 'none'}, not {request.role or 'none'}")
    if table.replicas != request.replicas:
        word = "replica" if table.replicas == 1 else "replicas"
        wrong.append(f"{table.replicas} {word}, not {request.replicas}")
    if wrong:
        raise Exists(f"table {table.name} exists with {', '.join(wrong)}: choose another name")
    return CreateTableReply(table=table.id, version=table.version, chains=len(table.chains))


def _check_uuid(what: str, uuid: bytes) -> None:
    if len(uuid) != 16 or uuid == bytes(16):
        raise InvalidArgument(f"a {what} uuid has 16 bytes, not all zero: got {uuid.hex() or 'nothing'}")

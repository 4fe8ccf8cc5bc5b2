"""What this process knows of the cluster, and who waits for a change. docs/control_plane.md, Routing.

Any metadata process answers routing: all of it follows from records in the store, and the routing
epoch says whether they have changed. The primary refreshes right after its own transactions; the
others see a change within POLL_S. One event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ffs.errors import FfsError
from ffs.layout import MAX_CHUNK_BYTES
from ffs.proto.cluster import (
    ChainRecord,
    ChainRoute,
    NodeRecord,
    RoutingReply,
    TableRecord,
    TableRoute,
    TargetRecord,
    TargetRoute,
)
from metadata.cluster import chain as chains
from metadata.cluster.clock import ManagerClock
from metadata.cluster.schema import (
    CHAINS,
    EPOCH,
    MANAGER_TIME,
    NODES,
    TABLES,
    TARGETS,
    USAGE,
    R,
    UsageRecord,
    decode,
    unpack_u64,
)
from metadata.fs.ports import TableView
from metadata.kv.contract import Snapshot, Store, after

log = logging.getLogger("ffs.meta.routing")

POLL_S: Final = 0.1
DEFAULT_TABLE: Final = "default"
DEFAULT_CHUNK_BYTES: Final = 1024 * 1024
assert DEFAULT_CHUNK_BYTES <= MAX_CHUNK_BYTES


@dataclass(slots=True)
class View:
    """The records of one epoch. Never changed once made. A record that is the same in two views is the same
    object."""

    epoch: int = 0
    nodes: dict[int, NodeRecord] = field(default_factory=dict)
    targets: dict[int, TargetRecord] = field(default_factory=dict)
    chains: dict[int, ChainRecord] = field(default_factory=dict)
    tables: dict[tuple[int, int], TableRecord] = field(default_factory=dict)
    latest: dict[int, TableRecord] = field(default_factory=dict)  # by table id
    usage: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # device -> (capacity, free)
    _of_nodes: dict[int, set[int]] | None = None

    def chains_of(self, node: int) -> set[int]:
        """The chains that targets of a node belong to: are members of, shall become, or were."""
        if self._of_nodes is None:
            self._of_nodes = {}
            for target in self.targets.values():
                if target.chain:
                    self._of_nodes.setdefault(target.node, set()).add(target.chain)
        return self._of_nodes.get(node, set())

    def node_of(self, target: int) -> NodeRecord:
        return self.nodes[self.targets[target].node]

    def incarnations(self, chain: ChainRecord) -> tuple[int, ...]:
        """The present incarnations of the members' nodes."""
        return tuple(self.node_of(member).incarnation for member in chain.members)

    def target_route(self, target: TargetRecord) -> TargetRoute:
        node = self.nodes[target.node]
        return TargetRoute(
            target=target.id,
            node=node.id,
            host=node.host,
            host_id=node.host_id,
            socket_path=target.socket_path,
            port=target.port,
            alive=node.alive,
        )

    def chain_route(self, chain: ChainRecord) -> ChainRoute:
        """As clients see it now: who restarted and isn't led back yet doesn't serve. One that the manager
        doesn't hear may: under its peers' leases, or alone (TargetRoute.alive says so)."""
        return ChainRoute(
            chain=chain.id,
            table=chain.table,
            term=chain.term,
            counter=chain.counter,
            members=chain.members,
            states=chains.states_now(chain, self.incarnations(chain)),
        )

    def table_routes(self) -> tuple[TableRoute, ...]:
        return tuple(
            TableRoute(
                id=t.id, name=t.name, version=t.version, replicas=t.replicas, chains=t.chains, role=t.role
            )
            for _, t in sorted(self.tables.items())
        )


def default_table(tables: Iterable[TableRecord], role: str) -> TableRecord | None:
    """The table of what names none and asks for `role`: the first one of that role, else the one named
    default, else the first one; but never one of another role. `tables`: by id."""
    tables = list(tables)
    fitting = [table for table in tables if role and table.role == role]
    plain = [table for table in tables if not table.role]
    named = [table for table in plain if table.name == DEFAULT_TABLE]
    return next(iter([*fitting, *named, *plain]), None)


class RoutingCache:
    """Implements metadata.fs.ports.ClusterPort besides."""

    def __init__(self, store: Store, clock: ManagerClock) -> None:
        self._store = store
        self._clock = clock
        self.view = View()
        self._reply: RoutingReply | None = None
        self._tables: dict[tuple[int, int, str], TableView | None] = {}
        self._decoded: dict[bytes, tuple[bytes, object]] = {}  # by key, of the last view
        self._waiters: set[asyncio.Future[None]] = set()
        self._lock = asyncio.Lock()
        self.heard_usage: dict[bytes, tuple[int, int]] = {}  # as View.usage; the primary hears it first

    async def refresh(self) -> bool:
        """Reads the records if the epoch has changed; tells whoever waits. Whether it had."""
        async with self._lock:
            view = await self._store.read(self._load)
            if view is self.view:
                return False
            self.view = view
            self._reply = None
            self._tables.clear()
            waiters, self._waiters = self._waiters, set()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            return True

    async def poll(self) -> None:
        """Refreshes for ever. A store that fails for a moment leaves the last view."""
        failed_s = float("-inf")
        while True:
            try:
                await self.refresh()
            except FfsError as error:
                if time.monotonic() - failed_s > 10.0:
                    failed_s = time.monotonic()
                    log.warning("the store can't be read: %s", error)
            await asyncio.sleep(POLL_S)

    def reply_now(self, known_epoch: int) -> RoutingReply | None:
        """The reply to GetRouting if the epoch isn't the known one."""
        view = self.view
        if view.epoch == known_epoch:
            return None
        if self._reply is None:
            used = [view.targets[member] for chain in view.chains.values() for member in chain.members]
            self._reply = RoutingReply(
                epoch=view.epoch,
                changed=True,
                chains=tuple(view.chain_route(chain) for chain in view.chains.values()),
                targets=tuple(view.target_route(target) for target in used),
                tables=view.table_routes(),
            )
        self._reply.manager_ms = self._clock.now_ms()
        return self._reply

    async def reply_changed(self, known_epoch: int, wait_ms: int) -> RoutingReply:
        """The reply, waiting up to wait_ms for another epoch than the known one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000.0
        while (reply := self.reply_now(known_epoch)) is None:
            left = deadline - loop.time()
            if left <= 0:
                return RoutingReply(epoch=known_epoch, changed=False, manager_ms=self._clock.now_ms())
            await self.wait_change(left)
        return reply

    async def wait_change(self, timeout_s: float) -> None:
        """Returns at the next change of the view, or after timeout_s."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            self._waiters.discard(waiter)

    # ClusterPort

    def manager_time_ms(self) -> int:
        return self._clock.now_ms()

    def table(self, table: int, version: int = 0, *, role: str = "") -> TableView | None:
        """Asked at every creation: answered from a dictionary that lasts as long as the view."""
        key = (table, version, role)
        if key not in self._tables:
            self._tables[key] = self._find_table(table, version, role)
        return self._tables[key]

    def _find_table(self, table: int, version: int, role: str) -> TableView | None:
        view = self.view
        if table == 0:
            record = default_table(view.latest.values(), role)
        elif version == 0:
            record = view.latest.get(table)
        else:
            record = view.tables.get((table, version))
        if record is None:
            return None
        return TableView(
            id=record.id,
            name=record.name,
            version=record.version,
            chains=record.chains,
            replicas=record.replicas,
            chunk_size=DEFAULT_CHUNK_BYTES,
        )

    def space_bytes(self, table: int) -> tuple[int, int]:
        """The sums of what the devices of the table's targets report, over its replicas. Tables share
        devices, so what is free is free to each of them. A device counts from its first report on."""
        view = self.view
        record = self.table(table)
        if record is None:
            return 0, 0
        devices = {view.targets[m].device for c in record.chains for m in view.chains[c].members}
        usage = {**view.usage, **self.heard_usage}
        known = [usage[device] for device in devices if device in usage]
        total = sum(capacity for capacity, _ in known)
        free = sum(free for _, free in known)
        return total // record.replicas, free // record.replicas

    # inside

    async def _load(self, snapshot: Snapshot) -> View:
        self._clock.heard(await snapshot.get(MANAGER_TIME))
        epoch = unpack_u64(await snapshot.get(EPOCH))
        usage = await self._load_usage(snapshot)
        if epoch == self.view.epoch:
            self.view.usage = usage
            return self.view
        view = View(epoch=epoch, usage=usage)
        kept: dict[bytes, tuple[bytes, object]] = {}
        for node in await self._all(snapshot, NODES, NodeRecord, kept):
            view.nodes[node.id] = node
        for target in await self._all(snapshot, TARGETS, TargetRecord, kept):
            view.targets[target.id] = target
        for chain in await self._all(snapshot, CHAINS, ChainRecord, kept):
            view.chains[chain.id] = chain
        for table in await self._all(snapshot, TABLES, TableRecord, kept):
            view.tables[table.id, table.version] = table
            view.latest[table.id] = table  # versions come in order
        self._decoded = kept
        return view

    async def _all(
        self, snapshot: Snapshot, prefix: bytes, kind: type[R], kept: dict[bytes, tuple[bytes, object]]
    ) -> list[R]:
        """Of thousands of records few change at a time: those that didn't aren't decoded again."""
        records: list[R] = []
        for key, value in await snapshot.range(prefix, after(prefix)):
            before = self._decoded.get(key)
            record = before[1] if before is not None and before[0] == value else decode(kind, key, value)
            assert isinstance(record, kind)
            kept[key] = (value, record)
            records.append(record)
        return records

    @staticmethod
    async def _load_usage(snapshot: Snapshot) -> dict[bytes, tuple[int, int]]:
        pairs = await snapshot.range(USAGE, after(USAGE))
        records = [decode(UsageRecord, key, value) for key, value in pairs]
        return {uuid: (capacity, free) for r in records for uuid, capacity, free in r.devices}

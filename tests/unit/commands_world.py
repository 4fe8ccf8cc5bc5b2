"""A store with nodes, targets and chains, for the tests of metadata.cluster.moves and .commands.

The manager is a stand-in that only keeps reports; `settle` does what chains do in time: it makes records
follow what they want, and servers drop what is released. Everything else is real, and a second manager may
take over at any point.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ffs.proto import cluster as proto
from ffs.rpc.handshake import Peer
from metadata.cluster.clock import ManagerClock
from metadata.cluster.commands import Commands
from metadata.cluster.lease import Lease
from metadata.cluster.members import goal_of
from metadata.cluster.moves import released
from metadata.cluster.placement import FreeDevice, place
from metadata.cluster.routing import RoutingCache, View
from metadata.cluster.schema import chain_key, encode, node_key, raise_epoch, table_key, target_key
from metadata.cluster.spaces import Spaces
from metadata.cluster.status import SyncRates
from metadata.kv.contract import Store, Transaction
from metadata.kv.memory import MemoryStore

PERSON = Peer("client", "c", 0, 0, 1, False)
SERVING, OFFLINE = int(proto.TargetState.SERVING), int(proto.TargetState.OFFLINE)


def device_uuid(node: int, device: int = 0) -> bytes:
    return bytes([node, device + 1]) * 8


@dataclass
class State:
    """What the manager keeps of a node."""

    incarnation: int = 1
    heard_s: float = 0.0
    beats: int = 1
    reports: dict[int, proto.TargetReport] = field(default_factory=dict)
    acted: proto.NodeConfig | None = None


class Manager:
    """The parts of metadata.cluster.manager.Manager that commands use."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock = ManagerClock()
        self.lease = Lease(store, self.clock, "m:1", duration_ms=1000)
        self.routing = RoutingCache(store, self.clock)
        self.nodes: dict[int, State] = {}
        self.decisions: dict[int, Any] = {}
        self.holding: set[int] = set()  # nodes that may hold a lease
        self.rates = SyncRates()
        self.spaces = Spaces(store, self.lease, lambda: self.view, lambda nodes: None, self.now_s)
        self.cluster = b"c" * 16
        self.failure_timeout_s = 1.0
        self.commands = Commands(store, self.lease, self.routing, self)  # type: ignore[arg-type]

    @property
    def view(self) -> View:
        return self.routing.view

    def now_s(self) -> float:
        return 100.0

    def is_gone(self, node: int) -> bool:
        return node not in self.holding

    async def records_changed(self) -> None:
        await self.routing.refresh()

    async def ask(self, request: Any) -> Any:
        reply = self.commands.handle_now(PERSON, request)
        return reply if reply is not None else await self.commands.handle(PERSON, request)

    def hear(self, **changes: object) -> None:
        """Heartbeats of all live nodes: each target says the chain that its record names."""
        for node in self.view.nodes.values():
            if not node.alive:
                continue
            let_go = released(self.view, node.id)
            config = proto.NodeConfig(number=(1, 1), epoch=0, chains=(), targets=(), released=let_go)
            state = self.nodes[node.id] = State(node.incarnation, 99.0, 1, acted=config)
            for device in node.devices:
                for target in device.targets:
                    chain = 0 if target in let_go else self.view.targets[target].chain
                    state.reports[target] = replace(report(target, chain), **changes)


def report(target: int, chain: int) -> proto.TargetReport:
    return proto.TargetReport(
        target=target,
        chain=chain,
        recorded_term=1,
        recorded_counter=1,
        persisted_term=1,
        persisted_counter=1,
        persisted_here=True,
        state=SERVING,
        poisoned=False,
        used_bytes=1000,
        capacity_bytes=1 << 30,
        free_bytes=1 << 29,
        chunks=7,
    )


async def write(store: Store, records: dict[bytes, Any]) -> None:
    async def body(txn: Transaction) -> None:
        for key, record in records.items():
            txn.set(key, encode(record))
        await raise_epoch(txn)

    await store.run(body)


def node_records(number: int, *, targets: int, devices: int = 1) -> dict[bytes, Any]:
    ids = iter(range(number * 100, number * 100 + targets * devices))
    disks = tuple(
        proto.DeviceInfo(
            uuid=device_uuid(number, d),
            path=f"/dev/{d}",
            size_bytes=1 << 30,
            targets=tuple(next(ids) for _ in range(targets)),
        )
        for d in range(devices)
    )
    node = proto.NodeRecord(
        id=number,
        name=f"n{number}",
        uuid=bytes([number]) * 16,
        incarnation=1,
        host="h",
        control="h:1",
        alive=True,
        devices=disks,
    )
    records: dict[bytes, Any] = {node_key(number): node}
    for disk in disks:
        for target in disk.targets:
            records[target_key(target)] = proto.TargetRecord(id=target, node=number, device=disk.uuid, port=1)
    return records


async def populate(store: Store, nodes: int, *, replicas: int, each: int, targets: int = 16) -> None:
    """A table over `nodes` nodes, all serving."""
    records: dict[bytes, Any] = {}
    for number in range(1, nodes + 1):
        records |= node_records(number, targets=targets)
    free = [FreeDevice(n, 0, tuple(range(n * 100, n * 100 + targets))) for n in range(1, nodes + 1)]
    chains = place(replicas, free, each)
    for number, members in enumerate(chains, 1):
        records[chain_key(number)] = proto.ChainRecord(
            id=number,
            table=1,
            term=1,
            counter=1,
            members=members,
            states=(SERVING,) * replicas,
            incarnations=(1,) * replicas,
            wanted=members,
        )
        for target in members:
            records[target_key(target)] = replace(records[target_key(target)], chain=number)
    records[table_key(1, 1)] = proto.TableRecord(
        id=1, name="default", version=1, replicas=replicas, chains=tuple(range(1, len(chains) + 1))
    )
    await write(store, records)


@contextlib.asynccontextmanager
async def primary(store: Store) -> AsyncIterator[Manager]:
    manager = Manager(store)
    task = asyncio.create_task(manager.lease.run())
    try:
        assert await manager.lease.changed_from(0) > 0
        await manager.routing.refresh()
        manager.hear()
        yield manager
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def cluster(
    nodes: int = 4, *, replicas: int = 2, each: int = 8, targets: int = 16
) -> AsyncIterator[Manager]:
    store = MemoryStore()
    await populate(store, nodes, replicas=replicas, each=each, targets=targets)
    async with primary(store) as manager:
        yield manager
    await store.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


async def settle(manager: Manager, only: int | None = None) -> None:
    """Chains (or `only` one) end with what they want; released targets are dropped and free."""
    records: dict[bytes, Any] = {}
    for chain in manager.view.chains.values():
        goal = goal_of(chain)
        if only in (None, chain.id) and chain.members != goal:
            records[chain_key(chain.id)] = replace(
                chain,
                counter=chain.counter + 1,
                members=goal,
                states=(SERVING,) * len(goal),
                incarnations=(1,) * len(goal),
            )
    await write(manager.store, records)
    await manager.routing.refresh()
    manager.hear()
    await manager.commands.tick()


def on_node(view: View, node: int) -> set[int]:
    return {
        target
        for chain in view.chains.values()
        for target in (*chain.members, *chain.wanted)
        if view.targets[target].node == node
    }


def check(view: View) -> None:
    """What must hold of records at any time."""
    for chain in view.chains.values():
        for target in (*chain.members, *chain.wanted):
            assert view.targets[target].chain == chain.id, "a target that two want"
        nodes = [view.targets[t].node for t in goal_of(chain)]
        assert len(set(nodes)) == len(nodes)

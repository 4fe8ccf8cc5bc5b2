"""metadata.cluster.moves and .commands over a real store: what commands write, and what goes on by itself.

The manager is a stand-in that only keeps reports; `settle` does what chains do in time: it makes records
follow what they want, and servers drop what is released. Everything else is real, and a second manager may
take over at any point.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from ffs.errors import Busy, InvalidArgument, NoSpace, NotFound, NotPermitted, Overloaded
from ffs.proto import cluster as proto
from ffs.rpc.handshake import Peer
from metadata.cluster.clock import ManagerClock
from metadata.cluster.commands import Commands
from metadata.cluster.lease import Lease
from metadata.cluster.members import Member, goal_of
from metadata.cluster.moves import (
    Moves,
    RebalanceRecord,
    find_device,
    find_node,
    find_targets,
    is_free,
    is_released,
    observe,
    released,
)
from metadata.cluster.placement import FreeDevice, place
from metadata.cluster.plan import Change
from metadata.cluster.routing import RoutingCache, View
from metadata.cluster.schema import (
    DEVICES,
    NODE_UUIDS,
    DeviceRecord,
    chain_key,
    encode,
    node_key,
    raise_epoch,
    table_key,
    target_key,
)
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


# --- drain ----------------------------------------------------------------------------------------


def test_drain_moves_all_and_frees_what_was_there() -> None:
    async def test() -> None:
        async with cluster() as manager:
            before = on_node(manager.view, 2)
            assert before
            reply = await manager.ask(proto.DrainNode(node="n2"))
            check(manager.view)
            assert reply.targets == len(before) == len(reply.chains)
            assert manager.view.nodes[2].draining
            assert on_node(manager.view, 2) == before  # still members
            status = await manager.ask(proto.GetCluster())
            assert next(n for n in status.nodes if n.id == 2).leaving == len(before)
            await settle(manager)
            assert on_node(manager.view, 2) == set()
            assert released(manager.view, 2) == ()
            assert all(manager.view.targets[target].chain == 0 for target in before)
            status = await manager.ask(proto.GetCluster())
            assert next(n for n in status.nodes if n.id == 2).leaving == 0
            assert status.targets
            assert all(target.node != 2 for target in status.targets)

    run(test)


def test_a_refused_drain_leaves_all_as_it_was() -> None:
    async def test() -> None:
        async with cluster(nodes=2) as manager:
            before = manager.view
            with pytest.raises(InvalidArgument, match=r"2 replicas on distinct nodes, and 1 node would"):
                await manager.ask(proto.DrainNode(node="n2"))
            assert manager.view is before
        async with cluster(nodes=4, targets=8) as manager:
            with pytest.raises(NoSpace, match="add a node or a device"):
                await manager.ask(proto.DrainNode(node="2"))
            assert not manager.view.nodes[2].draining
            with pytest.raises(NotFound, match="no node n9; there are: n1, n2, n3, n4"):
                await manager.ask(proto.DrainNode(node="n9"))

    run(test)


def test_room_that_is_about_to_be_there_is_worth_waiting_for() -> None:
    async def test() -> None:
        async with cluster(nodes=4, targets=12) as manager:
            await manager.ask(proto.DrainNode(node="n2"))
            await manager.ask(proto.DrainNode(node="n2", undo=True))
            released_now = [t for t in manager.view.targets.values() if is_released(manager.view, t)]
            assert released_now
            with pytest.raises(Overloaded, match="that chains have given up are being emptied"):
                await manager.ask(proto.DrainNode(node="n3"))
            assert not manager.view.nodes[3].draining
            manager.hear()
            await manager.commands.tick()
            assert (await manager.ask(proto.DrainNode(node="n3"))).targets == 8

    run(test)


def test_another_manager_goes_on_with_a_drain() -> None:
    """Killed after the node was marked, and before any chain was told."""

    async def test() -> None:
        store = MemoryStore()
        await populate(store, 4, replicas=2, each=8)
        async with primary(store) as manager:
            await Moves(store, manager.lease).set_draining(3, True)
        async with primary(store) as second:
            assert on_node(second.view, 3)
            for _ in range(3):
                await second.commands.tick()
                await settle(second)
            check(second.view)
            assert on_node(second.view, 3) == set()
        await store.close()

    run(test)


def test_a_drain_without_room_says_so_and_goes_on_when_there_is() -> None:
    async def test() -> None:
        async with cluster(nodes=4, targets=8) as manager:
            await Moves(manager.store, manager.lease).set_draining(1, True)
            await manager.routing.refresh()
            await manager.commands.tick()
            status = await manager.ask(proto.GetCluster())
            assert "add a node or a device" in next(n for n in status.nodes if n.id == 1).note
            await write(manager.store, node_records(5, targets=16))
            await manager.routing.refresh()
            manager.hear()
            for _ in range(3):
                await manager.commands.tick()
                await settle(manager)
            assert on_node(manager.view, 1) == set()
            status = await manager.ask(proto.GetCluster())
            assert all(node.note == "" for node in status.nodes)

    run(test)


def test_undo_of_what_is_not_drained_is_refused() -> None:
    async def test() -> None:
        async with cluster() as manager:
            with pytest.raises(InvalidArgument, match="n2 isn't being drained"):
                await manager.ask(proto.DrainNode(node="n2", undo=True))
            await manager.ask(proto.DrainNode(node="n2"))
            await manager.ask(proto.DrainNode(node="n2", undo=True))
            with pytest.raises(InvalidArgument, match="nothing to undo"):
                await manager.ask(proto.DrainNode(node="n2", undo=True))

    run(test)


def test_a_node_that_is_off_and_not_needed_is_forgotten() -> None:
    async def test() -> None:
        async with cluster() as manager:
            with pytest.raises(InvalidArgument, match="n2 is alive"):
                await manager.ask(proto.ForgetNode(node="n2"))
            node = manager.view.nodes[2]
            kept = DeviceRecord(node=2, targets=node.devices[0].targets)
            await write(manager.store, {DEVICES + node.devices[0].uuid: kept, NODE_UUIDS + node.uuid: 2})
            await write(manager.store, {node_key(2): replace(node, alive=False)})
            await manager.routing.refresh()
            with pytest.raises(InvalidArgument, match="chains need"):
                await manager.ask(proto.ForgetNode(node="n2"))
            await write(manager.store, {node_key(2): replace(node, alive=True)})
            await manager.routing.refresh()
            await manager.ask(proto.DrainNode(node="n2"))
            await settle(manager)
            drained = manager.view.nodes[2]
            await write(manager.store, {node_key(2): replace(drained, alive=False)})
            await manager.routing.refresh()
            manager.holding = {2}
            with pytest.raises(Busy, match="may hold a lease"):
                await manager.ask(proto.ForgetNode(node="n2"))
            manager.holding = set()
            before = manager.view
            reply = await manager.ask(proto.ForgetNode(node="n2"))
            assert reply.node == 2
            view = manager.view
            assert set(view.nodes) == set(before.nodes) - {2}
            assert {t for t, r in before.targets.items() if r.node != 2} == set(view.targets)
            assert view.chains == before.chains
            keys = await manager.store.read(lambda snap: snap.range(b"c", b"d"))
            traces = [key for key, value in keys if node.uuid in key or node.devices[0].uuid in key + value]
            assert traces == []
            status = await manager.ask(proto.GetCluster())
            assert [n.id for n in status.nodes] == sorted(view.nodes)
            with pytest.raises(NotFound):
                await manager.ask(proto.ForgetNode(node="n2"))

    run(test)


def test_a_node_that_came_back_is_not_forgotten() -> None:
    async def test() -> None:
        async with cluster() as manager:
            await manager.ask(proto.DrainNode(node="n2"))
            await settle(manager)
            seen = manager.view.nodes[2]
            await write(manager.store, {node_key(2): replace(seen, incarnation=2, alive=False)})
            with pytest.raises(Busy, match="has come back"):
                await manager.commands._moves.forget(replace(seen, alive=False))

    run(test)


def test_undo_takes_back_what_has_not_moved() -> None:
    async def test() -> None:
        async with cluster() as manager:
            before = {c.id: c.wanted for c in manager.view.chains.values()}
            reply = await manager.ask(proto.DrainNode(node="n2"))
            moved = reply.chains[0]
            await settle(manager, only=moved)
            undone = await manager.ask(proto.DrainNode(node="n2", undo=True))
            assert set(undone.chains) == set(reply.chains) - {moved}
            assert not manager.view.nodes[2].draining
            for chain in manager.view.chains.values():
                assert (chain.wanted == before[chain.id]) == (chain.id != moved)
            await settle(manager)
            check(manager.view)
            assert not any(is_released(manager.view, t) for t in manager.view.targets.values())

    run(test)


# --- replace ----------------------------------------------------------------------------------------


async def lose_disk(manager: Manager, number: int) -> None:
    """The node comes back with another disk at the same path."""
    node = manager.view.nodes[number]
    fresh = proto.DeviceInfo(
        uuid=device_uuid(number, 8),
        path="/dev/0",
        size_bytes=1 << 30,
        targets=tuple(range(number * 100 + 50, number * 100 + 66)),
    )
    records: dict[bytes, Any] = {
        node_key(number): replace(node, devices=(fresh,), incarnation=node.incarnation + 1)
    }
    for target in fresh.targets:
        records[target_key(target)] = proto.TargetRecord(id=target, node=number, device=fresh.uuid, port=1)
    await write(manager.store, records)
    await manager.routing.refresh()
    manager.hear()


def test_replace_a_dead_disk_by_its_place() -> None:
    async def test() -> None:
        async with cluster(nodes=3) as manager:
            lost = on_node(manager.view, 2)
            await lose_disk(manager, 2)
            status = await manager.ask(proto.GetCluster())
            devices = {d.uuid: d for n in status.nodes if n.id == 2 for d in n.devices}
            assert (devices[device_uuid(2)].here, devices[device_uuid(2)].used_targets) == (False, len(lost))
            reply = await manager.ask(proto.ReplaceTarget(what="/dev/0@n2"))
            assert reply.targets == len(lost)
            check(manager.view)
            wanted = {t for c in manager.view.chains.values() for t in c.wanted}
            fresh = {t for t in wanted if manager.view.targets[t].device == device_uuid(2, 8)}
            assert len(fresh) == len(lost)
            assert not wanted & lost
            with pytest.raises(InvalidArgument, match="nothing to replace"):
                await manager.ask(proto.ReplaceTarget(what=device_uuid(2).hex()))

    run(test)


def test_a_new_disk_takes_the_place_of_a_lost_one_by_itself() -> None:
    async def test() -> None:
        async with cluster(nodes=3) as manager:
            lost = on_node(manager.view, 2)
            await lose_disk(manager, 2)
            manager.nodes[2].beats = 0
            await manager.commands.tick()
            assert {t for c in manager.view.chains.values() for t in c.wanted} & lost, "not heard yet"
            manager.hear()
            await manager.commands.tick()
            check(manager.view)
            wanted = {t for c in manager.view.chains.values() for t in c.wanted}
            assert not wanted & lost
            assert len({t for t in wanted if manager.view.targets[t].device == device_uuid(2, 8)}) == len(
                lost
            )
            before = manager.view
            await manager.commands.tick()
            assert manager.view is before
            await settle(manager)
            assert on_node(manager.view, 2) & lost == set()
            # The lost disk's targets stay on record, and can drop nothing: a rebalance doesn't wait for them.
            await manager.ask(proto.Rebalance())
            for _ in range(4):
                await settle(manager)
            await manager.commands.tick()
            assert not (await manager.ask(proto.GetCluster())).rebalancing

    run(test)


def test_a_machine_that_comes_back_with_nothing_gets_its_replicas_again() -> None:
    """Its directory was lost too: another node, of the same name. Two that are alive are two machines."""

    async def test() -> None:
        async with cluster(nodes=3) as manager:
            lost = on_node(manager.view, 2)
            records = node_records(7, targets=16)
            records[node_key(7)] = replace(records[node_key(7)], name="n2")
            await write(manager.store, records)
            await manager.routing.refresh()
            manager.hear()
            await manager.commands.tick()
            assert on_node(manager.view, 7) == set()
            await write(manager.store, {node_key(2): replace(manager.view.nodes[2], alive=False)})
            await manager.routing.refresh()
            await manager.commands.tick()
            check(manager.view)
            assert len(on_node(manager.view, 7)) == len(lost)
            assert not {t for c in manager.view.chains.values() for t in c.wanted} & lost

    run(test)


def test_a_new_disk_that_is_too_small_is_said() -> None:
    async def test() -> None:
        async with cluster(nodes=3) as manager:
            await lose_disk(manager, 2)
            manager.hear(free_bytes=10)
            before = manager.view
            await manager.commands.tick()
            assert manager.view is before
            status = await manager.ask(proto.GetCluster())
            note = next(node.note for node in status.nodes if node.id == 2)
            assert "its new device can't take the place of" in note
            assert "10 bytes free: too little" in note

    run(test)


def test_replace_one_target_onto_a_device() -> None:
    async def test() -> None:
        async with cluster(nodes=4) as manager:
            chain = manager.view.chains[1]
            nodes = {manager.view.targets[t].node for t in chain.members}
            other = min({1, 2, 3, 4} - nodes)
            reply = await manager.ask(
                proto.ReplaceTarget(what=str(chain.members[1]), device=f"/dev/0@n{other}")
            )
            assert (reply.chains, reply.targets) == ((1,), 1)
            wanted = manager.view.chains[1].wanted
            assert wanted[0] == chain.members[0]
            assert manager.view.targets[wanted[1]].node == other
            its_own = manager.view.targets[chain.members[0]].device.hex()
            with pytest.raises(InvalidArgument, match="the device whose targets are to go"):
                await manager.ask(proto.ReplaceTarget(what=str(chain.members[0]), device=its_own))

    run(test)


def test_names_that_mean_nothing_are_refused() -> None:
    async def test() -> None:
        async with cluster(nodes=3) as manager:
            view = manager.view
            assert find_node(view, "n3").id == find_node(view, "3").id == 3
            assert find_device(view, device_uuid(2).hex()).node == 2
            with pytest.raises(NotFound, match=r"node n1 has no device /dev/7; it has: /dev/0"):
                find_device(view, "/dev/7@n1")
            with pytest.raises(NotFound, match="give its uuid, or PATH@NODE"):
                find_device(view, "/dev/0")
            with pytest.raises(NotFound, match="no target 9999"):
                find_targets(view, "9999")
            with pytest.raises(InvalidArgument, match="in no chain"):
                find_targets(view, "115")
            targets, device = find_targets(view, device_uuid(1).hex())
            assert (targets, device) == (on_node(view, 1), device_uuid(1))

    run(test)


# --- growing ----------------------------------------------------------------------------------------


def test_add_gives_a_new_node_its_share_and_ends() -> None:
    async def test() -> None:
        async with cluster(nodes=3, replicas=2, each=12) as manager:
            await write(manager.store, node_records(4, targets=16))
            await manager.routing.refresh()
            manager.hear()
            reply = await manager.ask(proto.Rebalance(onto="n4"))
            assert reply.targets == 9
            await manager.commands.tick()
            assert (await manager.ask(proto.GetCluster())).rebalancing, "chains are on their way"
            for _ in range(4):
                await settle(manager)
            check(manager.view)
            assert len(on_node(manager.view, 4)) == 9
            await manager.commands.tick()
            assert not (await manager.ask(proto.GetCluster())).rebalancing

    run(test)


def test_another_manager_goes_on_with_a_rebalance() -> None:
    async def test() -> None:
        store = MemoryStore()
        await populate(store, 3, replicas=2, each=12)
        await write(store, node_records(4, targets=16))
        async with primary(store) as manager:
            await Moves(store, manager.lease).set_rebalancing(RebalanceRecord())
        async with primary(store) as second:
            for _ in range(5):
                await second.commands.tick()
                await settle(second)
            assert len(on_node(second.view, 4)) == 9
            assert await Moves(store, second.lease).rebalancing() is None
        await store.close()

    run(test)


def test_a_dry_run_changes_nothing_and_add_says_what_is_wrong() -> None:
    async def test() -> None:
        async with cluster(nodes=3, each=12) as manager:
            await write(manager.store, node_records(4, targets=16))
            await manager.routing.refresh()
            manager.hear()
            before = manager.view
            assert (await manager.ask(proto.Rebalance(only_plan=True))).targets == 9
            assert manager.view is before
            await Moves(manager.store, manager.lease).set_draining(4, True)
            with pytest.raises(InvalidArgument, match=r"is being drained: undo that first.*--undo"):
                await manager.ask(proto.Rebalance(onto="n4"))

    run(test)


# --- races ------------------------------------------------------------------------------------------


def test_a_plan_that_is_no_longer_true_is_not_carried_out() -> None:
    async def test() -> None:
        async with cluster(nodes=4) as manager:
            moves = Moves(manager.store, manager.lease)
            chain = manager.view.chains[1]
            free = next(
                t
                for t in manager.view.targets.values()
                if is_free(manager.view, t)
                and t.node not in {manager.view.targets[m].node for m in chain.members}
            )
            goal = (chain.members[0], free.id)
            change = Change(1, chain.members, goal, (free.id,))
            assert await moves.apply([change]) == [1]
            assert await moves.apply([change]) == []  # the goal isn't that any more
            taken = Change(2, manager.view.chains[2].members, (free.id, 101), (free.id,))
            assert await moves.apply([taken]) == []
            await moves.set_draining(free.node, True)
            other = replace(free, id=free.id + 1)
            drained = Change(3, manager.view.chains[3].members, (other.id, 1), (other.id,))
            assert await moves.apply([drained]) == []
            await manager.routing.refresh()
            check(manager.view)

    run(test)


def test_a_released_target_is_free_only_when_its_server_says_that_it_is_empty() -> None:
    async def test() -> None:
        async with cluster(nodes=4) as manager:
            await manager.ask(proto.DrainNode(node="n2"))
            chain = next(c for c in manager.view.chains.values() if c.wanted != c.members)
            left = next(t for t in chain.members if t not in chain.wanted)
            await write(
                manager.store,
                {chain_key(chain.id): replace(chain, counter=9, members=chain.wanted)},
            )
            await manager.routing.refresh()
            assert released(manager.view, 2) == (left,)
            state = manager.nodes[2]
            unaware = replace(state.acted, released=()) if state.acted is not None else None
            state.reports[left], state.acted = report(left, 0), unaware
            await manager.commands.tick()
            assert manager.view.targets[left].chain == chain.id, "its server didn't know yet"
            manager.hear()
            state.reports[left] = report(left, chain.id)
            manager.nodes[2].reports[left] = report(left, chain.id)
            await manager.commands.tick()
            assert manager.view.targets[left].chain == chain.id, "it isn't empty yet"
            manager.hear()
            await manager.commands.tick()
            assert manager.view.targets[left].chain == 0
            assert await Moves(manager.store, manager.lease).free([chain.wanted[0]]) == []

    run(test)


def test_full_and_failed_devices_take_nothing() -> None:
    async def test() -> None:
        async with cluster(nodes=4) as manager:
            manager.hear(free_bytes=10)
            with pytest.raises(NoSpace, match="holds up to 1000 bytes, and the emptiest device has 10 left"):
                await manager.ask(proto.DrainNode(node="n2"))
            manager.hear()
            for target, known in manager.nodes[3].reports.items():
                manager.nodes[3].reports[target] = replace(known, poisoned=True)
            await manager.ask(proto.DrainNode(node="n2"))
            before = {t for c in manager.view.chains.values() for t in c.members}
            fresh = {t for c in manager.view.chains.values() for t in c.wanted} - before
            assert {manager.view.targets[t].node for t in fresh} <= {1, 4}
            assert not observe(manager.view, manager.nodes).devices[device_uuid(3)].usable  # type: ignore[arg-type]

    run(test)


# --- force-lead -------------------------------------------------------------------------------------


def judged(manager: Manager, chain: int, members: dict[int, Member]) -> None:
    manager.decisions[chain] = SimpleNamespace(
        judged=members, serving=False, whole=False, reason="nobody leads"
    )


def test_force_lead_only_when_nobody_else_can() -> None:
    async def test() -> None:
        async with cluster(nodes=3, replicas=3) as manager:
            chain = manager.view.chains[1]
            one, two, three = chain.members
            offline = replace(chain, states=(SERVING, SERVING, OFFLINE), incarnations=(1, 1, 0), counter=5)
            await write(manager.store, {chain_key(1): offline})
            with pytest.raises(Busy, match="hasn't been looked at yet"):
                await manager.ask(proto.ForceLead(target=three))
            judged(manager, 1, {one: Member.GONE, two: Member.RETURNED, three: Member.OUTSIDE})
            with pytest.raises(InvalidArgument, match=f"needs no force: target {two} "):
                await manager.ask(proto.ForceLead(target=three, confirmed=True))
            judged(manager, 1, {one: Member.GONE, two: Member.SILENT, three: Member.OUTSIDE})
            with pytest.raises(InvalidArgument, match="wait for the failure timeout"):
                await manager.ask(proto.ForceLead(target=three, confirmed=True))
            judged(manager, 1, {one: Member.GONE, two: Member.WIPED, three: Member.GONE})
            with pytest.raises(InvalidArgument, match="isn't there"):
                await manager.ask(proto.ForceLead(target=three, confirmed=True))
            assert manager.view.chains[1].forced == 0
            judged(manager, 1, {one: Member.GONE, two: Member.WIPED, three: Member.OUTSIDE})
            asked = await manager.ask(proto.ForceLead(target=three))
            assert (asked.chain, asked.done, manager.view.chains[1].forced) == (1, False, 0)
            assert [(member, why) for member, _, why in asked.absent] == [
                (one, "not heard for 1 s"),
                (two, "its device is empty"),
            ]
            assert asked.silent == ()  # the records say alive
            assert asked.notes == (f"target {three} has 7 chunks, and took part last in version 1.1",)
            done = await manager.ask(proto.ForceLead(target=three, confirmed=True))
            assert done.done
            assert manager.view.chains[1].forced == three
            with pytest.raises(NotFound, match="is in no chain"):
                await manager.ask(proto.ForceLead(target=9999))

    run(test)


def test_storage_nodes_give_no_commands() -> None:
    async def test() -> None:
        async with cluster() as manager:
            with pytest.raises(NotPermitted):
                await manager.commands.handle(
                    Peer("storage", "n", 0, 0, 1, False), proto.DrainNode(node="n2")
                )

    run(test)


# --- speed ------------------------------------------------------------------------------------------


def test_rates() -> None:
    rates = SyncRates()
    sending = replace(report(1, 1), sync_target=9)
    for second in range(8):
        rates.heard([replace(sending, sync_bytes_sent=second * 1000)], float(second))
    assert rates.of(1) == 1000
    rates.heard([replace(sending, sync_bytes_sent=0)], 8.0)  # begun again
    assert rates.of(1) == 0
    rates.heard([report(1, 1)], 9.0)
    assert rates.of(1) == 0

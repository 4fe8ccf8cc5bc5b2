"""Drains and what undoes them, over a real store: what commands write, and what goes on by itself."""

from __future__ import annotations

import pytest
from commands_world import check, cluster, node_records, on_node, populate, primary, run, settle, write
from msgspec.structs import replace

from ffs.errors import Busy, InvalidArgument, NoSpace, NotFound, Overloaded
from ffs.proto.commands import DrainNode, ForgetNode, GetCluster
from metadata.cluster.moves import Moves, is_released, released
from metadata.cluster.schema import DEVICES, NODE_UUIDS, DeviceRecord, node_key
from metadata.kv.memory import MemoryStore


def test_drain_moves_all_and_frees_what_was_there() -> None:
    async def test() -> None:
        async with cluster() as manager:
            before = on_node(manager.view, 2)
            assert before
            reply = await manager.ask(DrainNode(node="n2"))
            check(manager.view)
            assert reply.targets == len(before) == len(reply.chains)
            assert manager.view.nodes[2].draining
            assert on_node(manager.view, 2) == before  # still members
            status = await manager.ask(GetCluster())
            assert next(n for n in status.nodes if n.id == 2).leaving == len(before)
            await settle(manager)
            assert on_node(manager.view, 2) == set()
            assert released(manager.view, 2) == ()
            assert all(manager.view.targets[target].chain == 0 for target in before)
            status = await manager.ask(GetCluster())
            assert next(n for n in status.nodes if n.id == 2).leaving == 0
            assert status.targets
            assert all(target.node != 2 for target in status.targets)

    run(test)


def test_a_refused_drain_leaves_all_as_it_was() -> None:
    async def test() -> None:
        async with cluster(nodes=2) as manager:
            before = manager.view
            with pytest.raises(InvalidArgument, match=r"2 replicas on distinct nodes, and 1 node would"):
                await manager.ask(DrainNode(node="n2"))
            assert manager.view is before
        async with cluster(nodes=4, targets=8) as manager:
            with pytest.raises(NoSpace, match="add a node or a device"):
                await manager.ask(DrainNode(node="2"))
            assert not manager.view.nodes[2].draining
            with pytest.raises(NotFound, match="no node n9; there are: n1, n2, n3, n4"):
                await manager.ask(DrainNode(node="n9"))

    run(test)


def test_room_that_is_about_to_be_there_is_worth_waiting_for() -> None:
    async def test() -> None:
        async with cluster(nodes=4, targets=12) as manager:
            await manager.ask(DrainNode(node="n2"))
            await manager.ask(DrainNode(node="n2", undo=True))
            released_now = [t for t in manager.view.targets.values() if is_released(manager.view, t)]
            assert released_now
            with pytest.raises(Overloaded, match="that chains have given up are being emptied"):
                await manager.ask(DrainNode(node="n3"))
            assert not manager.view.nodes[3].draining
            manager.hear()
            await manager.commands.tick()
            assert (await manager.ask(DrainNode(node="n3"))).targets == 8

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
            status = await manager.ask(GetCluster())
            assert "add a node or a device" in next(n for n in status.nodes if n.id == 1).note
            await write(manager.store, node_records(5, targets=16))
            await manager.routing.refresh()
            manager.hear()
            for _ in range(3):
                await manager.commands.tick()
                await settle(manager)
            assert on_node(manager.view, 1) == set()
            status = await manager.ask(GetCluster())
            assert all(node.note == "" for node in status.nodes)

    run(test)


def test_undo_of_what_is_not_drained_is_refused() -> None:
    async def test() -> None:
        async with cluster() as manager:
            with pytest.raises(InvalidArgument, match="n2 isn't being drained"):
                await manager.ask(DrainNode(node="n2", undo=True))
            await manager.ask(DrainNode(node="n2"))
            await manager.ask(DrainNode(node="n2", undo=True))
            with pytest.raises(InvalidArgument, match="nothing to undo"):
                await manager.ask(DrainNode(node="n2", undo=True))

    run(test)


def test_a_node_that_is_off_and_not_needed_is_forgotten() -> None:
    async def test() -> None:
        async with cluster() as manager:
            with pytest.raises(InvalidArgument, match="n2 is alive"):
                await manager.ask(ForgetNode(node="n2"))
            node = manager.view.nodes[2]
            kept = DeviceRecord(node=2, targets=node.devices[0].targets)
            await write(manager.store, {DEVICES + node.devices[0].uuid: kept, NODE_UUIDS + node.uuid: 2})
            await write(manager.store, {node_key(2): replace(node, alive=False)})
            await manager.routing.refresh()
            with pytest.raises(InvalidArgument, match="chains need"):
                await manager.ask(ForgetNode(node="n2"))
            await write(manager.store, {node_key(2): replace(node, alive=True)})
            await manager.routing.refresh()
            await manager.ask(DrainNode(node="n2"))
            await settle(manager)
            drained = manager.view.nodes[2]
            await write(manager.store, {node_key(2): replace(drained, alive=False)})
            await manager.routing.refresh()
            manager.holding = {2}
            with pytest.raises(Busy, match="may hold a lease"):
                await manager.ask(ForgetNode(node="n2"))
            manager.holding = set()
            before = manager.view
            reply = await manager.ask(ForgetNode(node="n2"))
            assert reply.node == 2
            view = manager.view
            assert set(view.nodes) == set(before.nodes) - {2}
            assert {t for t, r in before.targets.items() if r.node != 2} == set(view.targets)
            assert view.chains == before.chains
            keys = await manager.store.read(lambda snap: snap.range(b"c", b"d"))
            traces = [key for key, value in keys if node.uuid in key or node.devices[0].uuid in key + value]
            assert traces == []
            status = await manager.ask(GetCluster())
            assert [n.id for n in status.nodes] == sorted(view.nodes)
            with pytest.raises(NotFound):
                await manager.ask(ForgetNode(node="n2"))

    run(test)


def test_a_node_that_came_back_is_not_forgotten() -> None:
    async def test() -> None:
        async with cluster() as manager:
            await manager.ask(DrainNode(node="n2"))
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
            reply = await manager.ask(DrainNode(node="n2"))
            moved = reply.chains[0]
            await settle(manager, only=moved)
            undone = await manager.ask(DrainNode(node="n2", undo=True))
            assert set(undone.chains) == set(reply.chains) - {moved}
            assert not manager.view.nodes[2].draining
            for chain in manager.view.chains.values():
                assert (chain.wanted == before[chain.id]) == (chain.id != moved)
            await settle(manager)
            check(manager.view)
            assert not any(is_released(manager.view, t) for t in manager.view.targets.values())

    run(test)

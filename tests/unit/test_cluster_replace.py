"""Disks that are lost, come back or are replaced, and targets that move, over a real store."""

from __future__ import annotations

from typing import Any

import pytest
from commands_world import Manager, check, cluster, device_uuid, node_records, on_node, run, settle, write
from msgspec.structs import replace

from ffs.errors import InvalidArgument, NotFound
from ffs.proto import cluster as proto
from ffs.proto.commands import GetCluster, Rebalance, ReplaceTarget
from metadata.cluster.moves import find_device, find_node, find_targets
from metadata.cluster.schema import node_key, target_key


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
            status = await manager.ask(GetCluster())
            devices = {d.uuid: d for n in status.nodes if n.id == 2 for d in n.devices}
            assert (devices[device_uuid(2)].here, devices[device_uuid(2)].used_targets) == (False, len(lost))
            reply = await manager.ask(ReplaceTarget(what="/dev/0@n2"))
            assert reply.targets == len(lost)
            check(manager.view)
            wanted = {t for c in manager.view.chains.values() for t in c.wanted}
            fresh = {t for t in wanted if manager.view.targets[t].device == device_uuid(2, 8)}
            assert len(fresh) == len(lost)
            assert not wanted & lost
            with pytest.raises(InvalidArgument, match="nothing to replace"):
                await manager.ask(ReplaceTarget(what=device_uuid(2).hex()))

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
            await manager.ask(Rebalance())
            for _ in range(4):
                await settle(manager)
            await manager.commands.tick()
            assert not (await manager.ask(GetCluster())).rebalancing

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
            status = await manager.ask(GetCluster())
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
            reply = await manager.ask(ReplaceTarget(what=str(chain.members[1]), device=f"/dev/0@n{other}"))
            assert (reply.chains, reply.targets) == ((1,), 1)
            wanted = manager.view.chains[1].wanted
            assert wanted[0] == chain.members[0]
            assert manager.view.targets[wanted[1]].node == other
            its_own = manager.view.targets[chain.members[0]].device.hex()
            with pytest.raises(InvalidArgument, match="the device whose targets are to go"):
                await manager.ask(ReplaceTarget(what=str(chain.members[0]), device=its_own))

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

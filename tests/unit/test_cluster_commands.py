"""metadata.cluster.moves and .commands over a real store: growing, races, force-lead, and rates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from commands_world import (
    OFFLINE,
    SERVING,
    Manager,
    check,
    cluster,
    device_uuid,
    node_records,
    on_node,
    populate,
    primary,
    report,
    run,
    settle,
    write,
)
from msgspec.structs import replace

from ffs.errors import Busy, InvalidArgument, NoSpace, NotFound, NotPermitted
from ffs.proto.commands import DrainNode, ForceLead, GetCluster, Rebalance
from ffs.rpc.handshake import Peer
from metadata.cluster.members import Member
from metadata.cluster.moves import Moves, RebalanceRecord, is_free, observe, released
from metadata.cluster.plan import Change
from metadata.cluster.schema import chain_key, node_key
from metadata.cluster.status import SyncRates
from metadata.kv.memory import MemoryStore

# --- growing ----------------------------------------------------------------------------------------


def test_add_gives_a_new_node_its_share_and_ends() -> None:
    async def test() -> None:
        async with cluster(nodes=3, replicas=2, each=12) as manager:
            await write(manager.store, node_records(4, targets=16))
            await manager.routing.refresh()
            manager.hear()
            reply = await manager.ask(Rebalance(onto="n4"))
            assert reply.targets == 9
            await manager.commands.tick()
            assert (await manager.ask(GetCluster())).rebalancing, "chains are on their way"
            for _ in range(4):
                await settle(manager)
            check(manager.view)
            assert len(on_node(manager.view, 4)) == 9
            await manager.commands.tick()
            assert not (await manager.ask(GetCluster())).rebalancing

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
            assert (await manager.ask(Rebalance(only_plan=True))).targets == 9
            assert manager.view is before
            await Moves(manager.store, manager.lease).set_draining(4, True)
            with pytest.raises(InvalidArgument, match=r"is being drained: undo that first.*--undo"):
                await manager.ask(Rebalance(onto="n4"))

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
            await manager.ask(DrainNode(node="n2"))
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
                await manager.ask(DrainNode(node="n2"))
            manager.hear()
            for target, known in manager.nodes[3].reports.items():
                manager.nodes[3].reports[target] = replace(known, poisoned=True)
            await manager.ask(DrainNode(node="n2"))
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
                await manager.ask(ForceLead(target=three))
            judged(manager, 1, {one: Member.GONE, two: Member.RETURNED, three: Member.OUTSIDE})
            with pytest.raises(InvalidArgument, match=f"needs no force: target {two} "):
                await manager.ask(ForceLead(target=three, confirmed=True))
            judged(manager, 1, {one: Member.GONE, two: Member.SILENT, three: Member.OUTSIDE})
            with pytest.raises(InvalidArgument, match="wait for the failure timeout"):
                await manager.ask(ForceLead(target=three, confirmed=True))
            judged(manager, 1, {one: Member.GONE, two: Member.WIPED, three: Member.GONE})
            with pytest.raises(InvalidArgument, match="isn't there"):
                await manager.ask(ForceLead(target=three, confirmed=True))
            assert manager.view.chains[1].forced == 0
            judged(manager, 1, {one: Member.GONE, two: Member.WIPED, three: Member.OUTSIDE})
            asked = await manager.ask(ForceLead(target=three))
            assert (asked.chain, asked.done, manager.view.chains[1].forced) == (1, False, 0)
            assert [(member, why) for member, _, why in asked.absent] == [
                (one, "not heard for 1 s"),
                (two, "its device is empty"),
            ]
            assert asked.silent == ()  # the records say alive
            assert asked.notes == (f"target {three} has 7 chunks, and took part last in version 1.1",)
            done = await manager.ask(ForceLead(target=three, confirmed=True))
            assert done.done
            assert manager.view.chains[1].forced == three
            with pytest.raises(NotFound, match="is in no chain"):
                await manager.ask(ForceLead(target=9999))

    run(test)


def test_what_a_device_is_registered_as_is_told() -> None:
    async def test() -> None:
        async with cluster(nodes=3) as manager:
            record = manager.view.nodes[2]
            (device,) = record.devices
            told = replace(device, null_data=True, role="kv")
            await write(manager.store, {node_key(2): replace(record, devices=(told,))})
            await manager.routing.refresh()
            status = await manager.ask(GetCluster())
            devices = [device for node in status.nodes for device in node.devices]
            assert [device.null_data for device in devices] == [False, True, False]
            assert [device.role for device in devices] == ["", "kv", ""]

    run(test)


def test_storage_nodes_give_no_commands() -> None:
    async def test() -> None:
        async with cluster() as manager:
            with pytest.raises(NotPermitted):
                await manager.commands.handle(Peer("storage", "n", 0, 0, 1, False), DrainNode(node="n2"))

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

"""The cluster manager: registration, tables, routing, fences, terms, time. Changes of membership are in
test_manager_chains.py; manager_world.py is the world of both."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from manager_world import (
    CLIENT,
    Process,
    SimNode,
    Target,
    cluster,
    run,
    until,
    until_primary,
    until_serving,
)

from ffs.errors import (
    Busy,
    Exists,
    Fenced,
    InvalidArgument,
    NotFound,
    NotPermitted,
    NotPrimary,
    Overloaded,
)
from ffs.proto import cluster as proto
from ffs.proto.records import FencedClient
from metadata.cluster.chain import Proposal, version_of
from metadata.cluster.clock import ManagerClock
from metadata.cluster.lease import Watch
from metadata.cluster.schema import LeaseRecord
from metadata.fs.schema import encode, fence_key
from metadata.kv.contract import Transaction
from metadata.kv.memory import MemoryStore


def test_a_cluster_forms_and_serves() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            routing = await process.ask(proto.GetRouting(), CLIENT)
            assert len(routing.chains) == 4
            assert all(route.states == (1, 1, 1) for route in routing.chains)
            assert {route.target for route in routing.targets} == set(range(1, 13))
            assert all(route.port and route.alive for route in routing.targets)
            (table,) = routing.tables
            assert (table.name, table.version, table.replicas, table.chains) == (
                "default",
                1,
                3,
                (1, 2, 3, 4),
            )
            view = process.routing.table(0)
            assert view is not None
            assert (view.id, view.chains) == (table.id, (1, 2, 3, 4))
            assert process.routing.table(77) is None

            async def steady() -> bool:
                return [(await node.beat(process)).next_ms for node in all_nodes] == [1250] * 3

            await until(steady)

    run(body)


def test_all_restart_and_lead_back() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            before = {c.id: (c.term, c.counter) for c in process.routing.view.chains.values()}
            for node in all_nodes[:2]:
                await node.start(process)
                await node.beat(process)
            routing = await process.ask(proto.GetRouting(), CLIENT)
            assert all(sorted(route.states) == [0, 0, 1] for route in routing.chains)
            status = await process.ask(proto.GetStatus())
            assert not any(chain.writable for chain in status.chains)
            await all_nodes[2].start(process)
            status = await process.ask(proto.GetStatus())
            assert all("isn't heard" in chain.reason for chain in status.chains)
            await until_serving(process, all_nodes)
            after = {c.id: (c.term, c.counter) for c in process.routing.view.chains.values()}
            assert all(after[chain] > before[chain] for chain in before)

    run(body)


def test_one_restarts() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            others = [dict.fromkeys(node.targets) for node in all_nodes]
            await all_nodes[1].start(process)
            await until_serving(process, all_nodes)
            assert [dict.fromkeys(node.targets) for node in all_nodes] == others
            assert all(t.acts == t.persisted for node in all_nodes for t in node.targets.values())

    run(body)


def test_a_restarted_member_isnt_given_the_recorded_version() -> None:
    """It has lost its memory: it may only persist a proposal, until that is recorded."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            await all_nodes[0].start(process)
            reply = await all_nodes[0].beat(process)
            assert reply.config is not None
            assert {route.proposed for route in reply.config.chains} <= {True}
            assert all(target.acts == (0, 0) for target in all_nodes[0].targets.values())

    run(body)


def test_a_record_whose_grounds_have_gone_isnt_made() -> None:
    """A member restarts, or the chain changes, between the decision and its transaction."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            registry = process.manager._registry
            chain = process.routing.view.chains[1]

            def proposal() -> Proposal:
                now = process.routing.view.incarnations(chain)
                after = msgspec.structs.replace(chain, counter=chain.counter + 1, incarnations=now)
                return Proposal(after, version_of(chain))

            good = proposal()
            await all_nodes[1].start(process)
            assert await registry.record_chains([(chain, good)]) == []
            now = proposal()
            assert [c.counter for c in await registry.record_chains([(chain, now)])] == [chain.counter + 1]
            assert await registry.record_chains([(chain, now)]) == []

    run(body)


def test_another_manager_takes_over_and_finishes() -> None:
    """Case 22: proposals persisted, never recorded; the next manager proposes above."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, store):
            term = process.lease.term
            for node in all_nodes:
                await node.start(process)
            for node in all_nodes:
                await node.beat(process)
            await all_nodes[0].beat(process)  # persists proposals
            assert any(t.here for t in all_nodes[0].targets.values())
            await process.kill()
            async with Process(store, "m2:1") as second:
                second.lease._dead = lambda record: False  # type: ignore[method-assign,assignment]
                await until_primary(second)
                assert second.lease.term == term + 1
                with pytest.raises(NotPrimary):
                    await process.manager._registry.set_alive(1, 1, False)  # the old one can't write
                await until_serving(second, all_nodes)
                assert all(c.term == term + 1 for c in second.routing.view.chains.values())

    run(body)


def test_the_second_process_serves_routing_and_names_the_primary() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, store), Process(store, "m2:1") as second:

            async def known() -> bool:
                return second.routing.view.epoch == process.routing.view.epoch

            await until(known)
            routing = await second.ask(proto.GetRouting(), CLIENT)
            assert len(routing.chains) == 4

            async def names() -> bool:
                with pytest.raises(NotPrimary) as caught:
                    await second.ask(proto.GetStatus())
                return "ask m1:1" in str(caught.value)

            await until(names)
            with pytest.raises(NotPrimary):
                await all_nodes[0].beat(second)

            async def has_usage() -> bool:
                return second.routing.space_bytes(0) == ((3 << 30) // 3, (3 << 29) // 3)

            await until(has_usage)
            await process.stop()  # releases: the second takes over without waiting the lease out
            await until_primary(second)
            assert second.clock.now_ms() >= process.clock.now_ms()

    run(body)


def test_space_is_known_as_soon_as_chains_serve() -> None:
    """The sum over devices of what they report, over the replicas: with nothing waited for."""

    async def body() -> None:
        async with cluster(count=4, replicas=2) as (process, all_nodes, _):
            assert process.routing.space_bytes(0) == ((4 << 30) // 2, (4 << 29) // 2)
            all_nodes[1].free_bytes = 5
            await all_nodes[1].beat(process)
            assert process.routing.space_bytes(0) == ((4 << 30) // 2, ((3 << 29) + 5) // 2)
            assert process.routing.space_bytes(99) == (0, 0)
            for node in all_nodes:
                await node.beat(process)
            await process.manager._usage.save(process.manager.nodes)
            async with Process(process.manager._store, "m2:1") as second:

                async def known() -> bool:
                    return second.routing.space_bytes(0) == process.routing.space_bytes(0)

                await until(known)

    run(body)


def test_routing_is_pushed_when_it_changes() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            epoch = process.routing.view.epoch
            same = await process.ask(proto.GetRouting(known_epoch=epoch, wait_ms=1), CLIENT)
            assert (same.changed, same.chains) == (False, ())
            waiting = asyncio.ensure_future(
                process.ask(proto.GetRouting(known_epoch=epoch, wait_ms=30_000), CLIENT)
            )
            await asyncio.sleep(0.02)
            assert not waiting.done()
            await all_nodes[0].start(process)
            reply = await waiting
            assert reply.changed
            assert reply.epoch > epoch

    run(body)


def test_earlier_incarnations_are_refused() -> None:
    """Case 11: a heartbeat of an earlier incarnation arrives late."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            old = SimNode(**{**vars(all_nodes[0])})
            await all_nodes[0].start(process)
            with pytest.raises(Fenced, match="register"):
                await old.beat(process)
            with pytest.raises(Fenced):
                await process.ask(
                    proto.AnnounceNode(
                        node=old.id, incarnation=old.incarnation, host="h", control="c", endpoints=()
                    )
                )

    run(body)


def test_fences_go_out_until_acknowledged_and_are_forgotten() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, store):

            async def end_session(txn: Transaction) -> None:
                txn.set(fence_key(42), encode(FencedClient(capability_expiry_ms=1)))
                txn.set(
                    fence_key(43), encode(FencedClient(capability_expiry_ms=process.clock.now_ms() + 10**7))
                )

            await store.run(end_session)

            async def everywhere() -> bool:
                for node in all_nodes[:2]:
                    await node.beat(process)
                return all({42, 43} <= node.fences for node in all_nodes[:2])

            await until(everywhere)
            for _ in range(3):
                for node in all_nodes[:2]:
                    await node.beat(process)
            assert (await all_nodes[0].beat(process)).fences == ()
            assert await store.read(lambda snap: snap.get(fence_key(42))) is not None  # one node is missing

            async def forgotten() -> bool:
                for node in all_nodes:
                    await node.beat(process)
                return await store.read(lambda snap: snap.get(fence_key(42))) is None

            await until(forgotten)
            assert await store.read(lambda snap: snap.get(fence_key(43))) is not None  # not expired
            await all_nodes[0].start(process)  # a new incarnation knows nothing

            async def again() -> bool:
                await all_nodes[0].beat(process)
                return 43 in all_nodes[0].fences

            await until(again)

    run(body)


def test_the_collector_of_a_process_that_is_gone_is_fenced() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            gone = proto.collector_client(all_nodes[0].id, all_nodes[0].incarnation)
            await all_nodes[0].start(process)

            async def fenced() -> bool:
                await all_nodes[1].beat(process)
                return gone in all_nodes[1].fences

            await until(fenced)

    run(body)


def test_tables_refuse_with_the_reason() -> None:
    async def body() -> None:
        async with cluster(count=2, replicas=2) as (process, _, _):
            create = proto.CreateTable
            with pytest.raises(InvalidArgument, match="3 replicas on distinct nodes"):
                await process.ask(create(name="three", replicas=3), CLIENT)
            with pytest.raises(Overloaded, match="waits for 5 nodes, 2 are alive"):
                await process.ask(create(name="five", replicas=2, wait_nodes=5), CLIENT)
            with pytest.raises(Exists, match="exists with 2 replicas"):
                await process.ask(create(name="default", replicas=1), CLIENT)
            same = await process.ask(create(name="default", replicas=2), CLIENT)
            assert (same.table, same.chains) == (1, 4)
            with pytest.raises(InvalidArgument, match="0 nodes have free targets"):
                await process.ask(create(name="more", replicas=1), CLIENT)
            with pytest.raises(InvalidArgument, match="printable"):
                await process.ask(create(name="a\nb", replicas=1), CLIENT)

    run(body)


def test_registration_refuses_what_doesnt_belong() -> None:
    async def body() -> None:
        async with cluster(count=2, replicas=2) as (process, all_nodes, _):
            first, second = all_nodes
            thief = SimNode("thief", b"t" * 16, first.device, targets=dict(first.targets))
            with pytest.raises(Busy, match="belongs to node n0, which is alive"):
                await thief.start(process)
            foreign = SimNode("foreign", b"f" * 16, b"x" * 16, targets={999: Target()})
            with pytest.raises(NotFound, match="another store"):
                await foreign.start(process)
            same_name = SimNode("n1", b"s" * 16, b"y" * 16)
            with pytest.raises(Exists, match="another --name"):
                await same_name.start(process)
            with pytest.raises(NotPermitted):
                await process.ask(
                    proto.RegisterNode(name="c", uuid=b"c" * 16, host_id="", devices=()), CLIENT
                )
            with pytest.raises(InvalidArgument, match="16 bytes"):
                await process.ask(proto.RegisterNode(name="c", uuid=b"", host_id="", devices=()))
            await second.beat(process)

    run(body)


def test_lease_is_judged_by_change_alone() -> None:
    def lease(term: int, beat: int, holder: bytes = b"h") -> LeaseRecord:
        return LeaseRecord(
            term=term,
            beat=beat,
            holder=holder,
            address="",
            duration_ms=1000,
            machine="",
            pid=1,
            started=1,
        )

    watch = Watch()
    assert watch.observe(None, 0.0)
    assert not watch.observe(lease(1, 1), 0.0)
    assert not watch.observe(lease(1, 1), 0.99)
    assert not watch.observe(lease(1, 2), 1.5)  # it changed: alive
    assert not watch.observe(lease(1, 2), 2.4)
    assert watch.observe(lease(1, 2), 2.5)
    assert watch.observe(lease(1, 3, b""), 2.5)  # released


def test_manager_time_never_goes_back_and_never_passes_its_limit() -> None:
    async def body() -> None:
        store = MemoryStore()
        now = [0]
        wall = [1_000_000]
        first = ManagerClock(lambda: now[0], lambda: wall[0])
        await store.run(first.take)
        first.stored()
        assert first.now_ms() == 1_000_000
        now[0] += 4000
        assert first.now_ms() == 1_004_000
        now[0] += 100_000  # a holder that couldn't renew: it stands still at the limit
        assert first.now_ms() == 1_006_000
        wall[0] = 5  # the wall clock steps back
        second = ManagerClock(lambda: now[0], lambda: wall[0])
        await store.run(second.take)
        second.stored()
        assert second.now_ms() == 1_006_000
        follower = ManagerClock(lambda: now[0], lambda: wall[0])
        from metadata.cluster.schema import MANAGER_TIME

        follower.heard(await store.read(lambda snap: snap.get(MANAGER_TIME)))
        assert follower.now_ms() == 1_012_000
        await store.run(follower.take)
        follower.stored()
        assert follower.now_ms() >= 1_012_000
        await store.close()

    run(body)


def test_numbers_of_configurations_never_start_anew() -> None:
    """A heartbeat that came between a new lease and the beginning of its term was given a number that was
    given again, for other content: its node never learned of the proposal that its chain waited for."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            before = max(node.config for node in all_nodes)
            process.manager._configs.forget()
            for node in all_nodes:
                await node.beat(process)
                assert node.config > before

    run(body)


def test_a_heartbeat_begins_the_term_that_it_meets() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            assert len(process.manager.nodes) == 3
            process.manager._term -= 1
            await all_nodes[0].beat(process)
            assert list(process.manager.nodes) == [all_nodes[0].id]
            assert process.manager._term == process.lease.term

    run(body)


def test_a_change_of_state_alone_is_decided_upon() -> None:
    """A member that had adopted its version and then began to serve left its chain called unwritable."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            state = process.manager.nodes[all_nodes[0].id]
            chain = next(iter(all_nodes[0].targets.values())).chain
            for ident, report in state.reports.items():
                state.reports[ident] = msgspec.structs.replace(report, state=0)
            process.manager._look([chain])
            assert not process.manager.decisions[chain].serving
            await all_nodes[0].beat(process)  # the same, but for the state
            assert process.manager.decisions[chain].serving

    run(body)

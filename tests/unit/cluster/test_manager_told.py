"""What the cluster manager tells nodes and takes from them: configurations, reports, roles."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from manager_world import CLIENT, cluster, run, until_serving
from msgspec.structs import replace

from ffs.errors import Fenced, NotPermitted, NotPrimary
from ffs.proto import cluster as proto
from ffs.proto.records import FencedClient
from ffs.rpc.handshake import Peer
from metadata.cluster.chain import Proposal
from metadata.cluster.node_config import chain_routes
from metadata.fs.schema import encode, fence_key
from metadata.kv.contract import Transaction


def test_who_is_told_what() -> None:
    """One that restarted isn't told the recorded version; one that lost its data isn't told a proposal that
    leaves it out: it would persist it, and then look as if it had kept its data."""
    record = proto.ChainRecord(
        id=9,
        table=1,
        term=1,
        counter=5,
        members=(11, 12, 13, 14),
        states=(1, 1, 2, 0),
        incarnations=(1, 1, 1, 0),
    )
    after = replace(
        record, counter=6, members=(11, 14, 12, 13), states=(1, 2, 0, 0), incarnations=(1, 3, 0, 0)
    )
    proposal = Proposal(after, (1, 5))

    def told(target: int, incarnation: int, given: Proposal | None = proposal) -> list[bool]:
        return [route.proposed for route in chain_routes(record, given, target, incarnation)]

    assert told(11, 1) == [False, True]
    assert told(11, 2) == []
    assert told(12, 1) == [False, True]  # it serves: it shall stand down
    assert told(12, 2) == []  # it restarted: it doesn't serve
    assert told(13, 1) == [False]  # the syncing one needn't agree
    assert told(14, 3) == [False, True]
    assert told(14, 2) == [False]
    assert told(15, 1) == []
    assert told(11, 1, None) == [False]
    assert told(11, 1, Proposal(after, (1, 4))) == [False]  # made after another version
    (_, route) = chain_routes(record, proposal, 11, 1)
    assert (route.term, route.counter, route.members) == (1, 6, (11, 14, 12, 13))
    assert (route.states, route.incarnations) == ((1, 2, 0, 0), (1, 3, 0, 0))


def test_configurations_are_pushed_to_nodes_that_wait() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, store):
            one = all_nodes[0]

            def wait(wait_ms: int = 30_000) -> asyncio.Task[Any]:
                request = proto.WaitConfig(
                    node=one.id, incarnation=one.incarnation, config=one.config, wait_ms=wait_ms
                )
                return asyncio.ensure_future(process.ask(request))

            while (await one.beat(process)).config is not None or (await one.beat(process)).fences:
                pass
            nothing = await wait(1)
            assert (nothing.config, nothing.fences, nothing.term) == (None, (), process.lease.term)
            waiting = wait()
            await asyncio.sleep(0.01)
            assert not waiting.done()
            assert (await one.beat(process)).next_ms == 1250
            await all_nodes[1].start(process)
            await all_nodes[1].beat(process)  # a proposal is made, which `one` must persist
            reply = await waiting
            while not any(route.proposed for route in reply.config.chains):
                one.act_on(reply.config)
                reply = await wait()
            one.act_on(reply.config)
            await until_serving(process, all_nodes)

            async def end_session(txn: Transaction) -> None:
                txn.set(fence_key(42), encode(FencedClient(capability_expiry_ms=10**15)))

            await one.beat(process)
            waiting = wait()
            await store.run(end_session)
            while 42 not in (reply := await waiting).fences:
                if reply.config is not None:
                    one.act_on(reply.config)
                one.fenced = reply.fences
                await one.beat(process)
                waiting = wait()
            with pytest.raises(NotPermitted):
                await process.ask(
                    proto.WaitConfig(node=one.id, incarnation=1, config=(0, 0), wait_ms=1), CLIENT
                )
            request = proto.WaitConfig(node=one.id, incarnation=99, config=(0, 0), wait_ms=1)
            with pytest.raises(Fenced):
                await process.ask(request)

    run(body)


def test_waiting_ends_with_the_term() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            one = all_nodes[0]
            while (await one.beat(process)).config is not None:
                pass
            request = proto.WaitConfig(
                node=one.id, incarnation=one.incarnation, config=one.config, wait_ms=30_000
            )
            waiting = asyncio.ensure_future(process.ask(request))
            await asyncio.sleep(0.01)
            process.lease._lose()
            process.manager._configs.changed([one.id])
            with pytest.raises(NotPrimary):
                await waiting

    run(body)


def test_impossible_and_late_reports_change_nothing() -> None:
    """S2: ids and versions of every report are looked at."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            one = all_nodes[0]
            before = dict(process.routing.view.chains)
            old = one.heartbeat()
            await one.beat(process)
            known = dict(process.manager.nodes[one.id].reports)
            ident, report = next((i, r) for i, r in known.items() if r.chain)
            late = replace(
                old, reports=tuple(replace(r, persisted_counter=0, recorded_counter=0) for r in old.reports)
            )
            await process.ask(late)  # it was sent before the last one
            assert process.manager.nodes[one.id].reports == known

            async def says(**changes: Any) -> None:
                beat = one.heartbeat()
                odd = replace(report, **changes)
                others = tuple(r for r in beat.reports if r.target != ident)
                await process.ask(replace(beat, reports=(odd, *others)))

            await says(persisted_counter=0, persisted_term=0, recorded_term=0, recorded_counter=0)
            assert process.manager.nodes[one.id].reports[ident] == report  # a version never goes back
            await says(recorded_counter=99)
            assert process.manager.nodes[one.id].reports[ident] == report  # it acts above what it persisted
            await says(target=next(iter(all_nodes[1].targets)))
            assert next(iter(all_nodes[1].targets)) not in process.manager.nodes[one.id].reports
            await says(target=77777)
            assert 77777 not in process.manager.nodes[one.id].reports
            assert process.routing.view.chains == before
            await one.beat(process)
            await until_serving(process, all_nodes)

    run(body)


def test_another_role_sends_no_heartbeats() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            for peer in (CLIENT, Peer("admin", "a", 0, 0, 1, False)):
                with pytest.raises(NotPermitted):
                    await process.ask(all_nodes[0].heartbeat(), peer)

    run(body)

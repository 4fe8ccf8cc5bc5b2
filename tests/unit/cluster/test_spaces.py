"""Policies of KV spaces: from the index to the nodes, and their use back, over a real manager and store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from manager_world import CLIENT, STORAGE, Process, SimNode, cluster, run, until, until_primary, until_serving
from msgspec.structs import replace

from ffs.errors import NotFound
from ffs.layout import Layout
from ffs.proto import cluster as proto
from ffs.proto.commands import GetCluster, GetSpaces
from ffs.proto.records import KV_DEDUP, KV_EVICTABLE, KV_SPACE, Inode, KvParams
from ffs.proto.spaces import SPACE_EVICTABLE, SpaceUse
from metadata.cluster import schema
from metadata.cluster import spaces as module
from metadata.cluster.schema import table_key
from metadata.cluster.spaces import shares_key
from metadata.fs.schema import KV_INDEX_COMPLETE, encode, inode_key, kv_index_key
from metadata.fs.spaces import SpaceIndex, forget_space, keep_complete, note_space, read_index
from metadata.kv.contract import Store, Transaction

GIB = 1 << 30
TABLE = 1


async def put_space(
    store: Store,
    ino: int,
    quota: int,
    *,
    ttl_ms: int = 0,
    flags: int = KV_EVICTABLE,
    stripe: int = 0,
    version: int = 1,
) -> None:
    """As the namespace does, at creation and at a change."""
    inode = Inode(
        type=KV_SPACE,
        mode=0o666,
        uid=0,
        gid=0,
        btime_ns=1,
        ctime_ns=1,
        layout=Layout(TABLE, version, ino, 1 << 20, stripe),
        kv=KvParams(1 << 20, quota_bytes=quota, ttl_ms=ttl_ms, flags=flags),
    )

    async def body(txn: Transaction) -> None:
        txn.set(KV_INDEX_COMPLETE, b"\x01")
        txn.set(inode_key(ino), encode(inode))
        note_space(txn, ino, inode)

    await store.run(body)


async def put_table(store: Store, table: proto.TableRecord) -> None:
    async def body(txn: Transaction) -> None:
        txn.set(table_key(table.id, table.version), schema.encode(table))
        await schema.raise_epoch(txn)

    await store.run(body)


async def drop_space(store: Store, ino: int) -> None:
    async def body(txn: Transaction) -> None:
        forget_space(txn, ino)

    await store.run(body)


async def beat(process: Process, nodes: Iterable[SimNode]) -> None:
    await process.manager.spaces.tick()
    for node in nodes:
        await node.beat(process)


def quotas(node: SimNode, space: int) -> dict[int, int]:
    """chain -> share, as the node was told."""
    return {policy.chain: policy.quota_bytes for policy in node.spaces.policies if policy.space == space}


def chains_of(process: Process, node: SimNode) -> set[int]:
    return set(process.routing.view.chains_of(node.id))


def use_of(target: int, space: int, held: int, evicted: int = 0) -> SpaceUse:
    return SpaceUse(
        target=target,
        space=space,
        chunks=held >> 20,
        bytes=held,
        evicted_chunks=evicted >> 20,
        evicted_bytes=evicted,
        hits=3,
        expired_chunks=2,
        shared_chunks=4,
        saved_bytes=8192,
    )


def head_of(process: Process, chain: int) -> int:
    return process.routing.view.chains[chain].members[0]


def says(process: Process, nodes: list[SimNode], space: int, loads: dict[int, tuple[int, int]]) -> None:
    """`loads`: (held, evicted) by chain. Every member holds the same; only the head has evicted."""
    for chain, (held, evicted) in loads.items():
        for at, member in enumerate(process.routing.view.chains[chain].members):
            node = next(node for node in nodes if member in node.targets)
            node.use[member, space] = use_of(member, space, held, evicted if at == 0 else 0)


def test_every_node_is_told_the_policies_of_its_chains() -> None:
    async def body() -> None:
        async with cluster(count=4, replicas=2) as (process, nodes, store):
            assert all(node.spaces.policies == () for node in nodes)
            assert all(node.spaces.revision > (0, 0) for node in nodes)
            await put_space(store, 500, 10 * GIB + 1, ttl_ms=7000)
            await put_space(store, 501, 0, flags=0)
            await beat(process, nodes)
            seen: dict[int, int] = {}
            for node in nodes:
                mine = quotas(node, 500)
                assert mine.keys() == chains_of(process, node)
                seen.update(mine)
                for policy in node.spaces.policies:
                    if policy.space == 500:
                        assert (policy.ttl_ms, policy.flags) == (7000, SPACE_EVICTABLE)
                    else:
                        assert (policy.quota_bytes, policy.ttl_ms, policy.flags) == (0, 0, 0)
                assert quotas(node, 501).keys() == mine.keys()
            assert sum(seen.values()) == 10 * GIB + 1
            assert seen.keys() == set(process.routing.view.latest[TABLE].chains)
            told = [node.told for node in nodes]
            await beat(process, nodes)
            assert [node.told for node in nodes] == told  # nothing new, nothing said

    run(body)


def test_a_stripe_is_only_its_chains() -> None:
    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            await put_space(store, 500, 100, stripe=2)
            await beat(process, nodes)
            assert sorted(quotas(nodes[0], 500).values()) == [50, 50]

    run(body)


def test_a_change_and_a_removal_are_pushed_to_who_waits() -> None:
    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            node = nodes[0]

            async def wait() -> proto.WaitConfigReply:
                request = proto.WaitConfig(
                    node=node.id,
                    incarnation=node.incarnation,
                    config=node.config,
                    wait_ms=30_000,
                    spaces=node.spaces.revision,
                )
                reply = await process.ask(request, STORAGE)
                assert isinstance(reply, proto.WaitConfigReply)
                return reply

            for quota in (4000, 8000):
                waiting = asyncio.ensure_future(wait())
                await asyncio.sleep(0.02)
                assert not waiting.done()
                await put_space(store, 500, quota)
                reply = await asyncio.wait_for(waiting, 10)  # the manager's own tick finds it
                assert reply.config is None
                assert reply.spaces is not None
                assert reply.spaces.revision > node.spaces.revision
                node.take_spaces(reply.spaces)
                assert sum(quotas(node, 500).values()) == quota
            waiting = asyncio.ensure_future(wait())
            await drop_space(store, 500)
            reply = await asyncio.wait_for(waiting, 10)
            assert reply.spaces is not None
            assert reply.spaces.policies == ()

    run(body)


def test_a_restarted_server_is_told_all_with_its_first_heartbeat() -> None:
    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            await put_space(store, 500, 4000)
            await beat(process, nodes)
            before = quotas(nodes[0], 500)
            await nodes[0].start(process)
            assert nodes[0].spaces.policies == ()
            reply = await process.ask(nodes[0].heartbeat())
            assert reply.spaces is not None
            nodes[0].hear(reply)
            assert quotas(nodes[0], 500) == before

    run(body)


def test_a_node_of_an_earlier_version_is_told_nothing() -> None:
    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            await nodes[0].start(process)
            nodes[0].takes_spaces = False
            await put_space(store, 500, 4000)
            await process.manager.spaces.tick()
            reply = await process.ask(nodes[0].heartbeat())
            assert reply.spaces is None
            nodes[0].hear(reply)
            request = proto.WaitConfig(
                node=nodes[0].id, incarnation=nodes[0].incarnation, config=nodes[0].config, wait_ms=1
            )
            assert (await process.ask(request)).spaces is None

    run(body)


def test_use_is_what_the_heads_say() -> None:
    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            await put_space(store, 500, 4 * GIB, ttl_ms=60_000, flags=KV_EVICTABLE | KV_DEDUP)
            await beat(process, nodes)
            chains = list(process.routing.view.latest[TABLE].chains)
            says(process, nodes, 500, {chain: (chain << 20, 1 << 20) for chain in chains[:-1]})
            nodes[0].use[head_of(process, chains[0]), 999] = use_of(head_of(process, chains[0]), 999, 5 << 20)
            await beat(process, nodes)
            reply = await process.ask(GetSpaces(space=500), CLIENT)
            (view,) = reply.spaces
            assert reply.complete
            assert (view.quota_bytes, view.ttl_ms, view.evictable) == (4 * GIB, 60_000, True)
            assert {policy.flags for node in nodes for policy in node.spaces.policies} == {3}
            assert view.dedup
            assert (view.shared_chunks, view.saved_bytes) == (4 * (len(chains) - 1), 8192 * (len(chains) - 1))
            assert view.bytes == sum(chains[:-1]) << 20
            assert view.chunks == sum(chains[:-1])
            assert (view.evicted_chunks, view.evicted_bytes) == (len(chains) - 1, len(chains) - 1 << 20)
            assert view.expired_chunks == 2 * view.hits // 3 > 0
            assert (view.chains, view.reported) == (len(chains), len(chains) - 1)
            assert sum(share.quota_bytes for share in view.shares) == 4 * GIB
            assert [share.known for share in view.shares] == [True] * (len(chains) - 1) + [False]
            everything = await process.ask(GetSpaces(), CLIENT)
            assert [space.space for space in everything.spaces] == [500]  # 999 isn't one
            assert everything.spaces[0].shares == ()
            of_cluster = await process.ask(GetCluster(), CLIENT)
            assert of_cluster.spaces == everything.spaces
            with pytest.raises(NotFound):
                await process.ask(GetSpaces(space=7), CLIENT)
            for node in nodes:  # a heartbeat without use says nothing of it
                node.use.clear()
            await beat(process, nodes)
            assert (await process.ask(GetSpaces(), CLIENT)).spaces == everything.spaces
            await nodes[0].start(process)  # its counters begin anew; what it held isn't known
            (restarted,) = (await process.ask(GetSpaces(), CLIENT)).spaces
            assert restarted.evicted_bytes < everything.spaces[0].evicted_bytes

    run(body)


def test_the_use_of_very_many_is_added_up_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHAINS_A_TICK", 4)  # one space of four chains at a time

    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            for ino in (500, 501, 502):
                await put_space(store, ino, 4 * GIB)
            await beat(process, nodes)
            chains = process.routing.view.latest[TABLE].chains
            for ino in (500, 501, 502):
                says(process, nodes, ino, {chain: (ino << 20, 0) for chain in chains})

            async def shown() -> bool:
                await beat(process, nodes)
                reply = await process.ask(GetSpaces(), CLIENT)
                assert [view.space for view in reply.spaces] == [500, 501, 502]
                return [view.bytes for view in reply.spaces] == [4 * ino << 20 for ino in (500, 501, 502)]

            await until(shown)
            (exact,) = (await process.ask(GetSpaces(space=501), CLIENT)).spaces
            assert exact.bytes == 4 * 501 << 20
            await put_space(store, 501, 2 * GIB)
            await process.manager.spaces.tick()
            views = (await process.ask(GetSpaces(), CLIENT)).spaces
            assert [view.quota_bytes for view in views] == [4 * GIB, 2 * GIB, 4 * GIB]

    run(body)


async def evict_most(process: Process, nodes: list[SimNode], hot: int, rounds: int) -> None:
    """Rounds in which chain `hot` evicts half of its share, and the others a little."""
    evicted: dict[int, int] = {}
    for _ in range(rounds):
        shares = quotas(nodes[0], 500)
        for chain, share in shares.items():
            evicted[chain] = evicted.get(chain, 0) + (share // 2 if chain == hot else share // 50)
        says(process, nodes, 500, {chain: (share, evicted[chain]) for chain, share in shares.items()})
        for node in nodes:
            await node.beat(process)
        process.manager.spaces._round_s = float("-inf")
        await beat(process, nodes)


def test_shares_follow_evictions_and_a_new_manager_goes_on_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND_S", 1e9)

    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            await put_space(store, 500, 4 * GIB)
            await beat(process, nodes)
            even = quotas(nodes[0], 500)
            hot = sorted(even)[1]
            await evict_most(process, nodes, hot, 1)
            assert quotas(nodes[0], 500) == even  # what was evicted before the first round isn't known
            await evict_most(process, nodes, hot, 6)
            moved = quotas(nodes[0], 500)
            assert moved[hot] > even[hot]
            assert sum(moved.values()) == 4 * GIB
            assert all(quotas(node, 500) == moved for node in nodes)
            async with Process(store, "m2:1") as second:
                await process.stop()
                await until_primary(second)
                await until_serving(second, nodes)
                assert quotas(nodes[0], 500) == moved
                assert nodes[0].spaces.revision[0] > 1
                await put_space(store, 500, 2 * GIB)
                await beat(second, nodes)
                halved = quotas(nodes[0], 500)
                assert sum(halved.values()) == 2 * GIB
                assert abs(halved[hot] - moved[hot] // 2) < 8
                await drop_space(store, 500)
                await beat(second, nodes)
                assert await store.read(lambda snap: snap.get(shares_key(500))) is None

    run(body)


def test_even_shares_are_not_stored() -> None:
    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            await put_space(store, 500, 4 * GIB)
            await beat(process, nodes)
            assert await store.read(lambda snap: snap.get(shares_key(500))) is None

    run(body)


def test_a_space_of_a_table_that_is_not_known_yet_waits_for_it() -> None:
    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            known = process.routing.view.tables.pop((TABLE, 1))
            await put_space(store, 500, 4000)
            await process.manager.spaces.tick()
            assert process.manager.spaces._pending == {500}
            await process.manager.spaces.tick()
            process.routing.view.tables[TABLE, 1] = known
            await beat(process, nodes)
            assert sum(quotas(nodes[0], 500).values()) == 4000

    run(body)


def test_each_space_is_split_over_the_version_of_the_table_that_it_was_made_with() -> None:
    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            first = process.routing.view.tables[TABLE, 1]
            await put_space(store, 500, 4 * GIB)
            await beat(process, nodes)
            old = quotas(nodes[0], 500)
            assert old.keys() == set(first.chains)
            await put_table(store, replace(first, version=2, chains=first.chains[:2]))
            await process.manager.records_changed()
            await put_space(store, 501, 4 * GIB, version=2)
            await beat(process, nodes)
            assert quotas(nodes[0], 500) == old  # keys never move between chains
            assert quotas(nodes[0], 501) == {chain: 2 * GIB for chain in sorted(first.chains[:2])}

    run(body)


def test_more_policies_than_fit_leave_the_later_spaces_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "POLICIES_OF_NODE", 6)  # of 4 chains each

    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            for ino in (500, 501):
                await put_space(store, ino, 4000)
            await beat(process, nodes)
            assert {policy.space for policy in nodes[0].spaces.policies} == {500}
            assert sum("more KV spaces" in line for line in caplog.messages) == len(nodes)

    run(body)


def test_a_damaged_record_stops_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            await put_space(store, 500, 4000)
            await beat(process, nodes)
            kept = nodes[0].spaces

            async def damage(txn: Transaction) -> None:
                txn.set(kv_index_key(501), b"\xc1")

            async def mend(txn: Transaction) -> None:
                txn.clear(kv_index_key(501))

            await store.run(damage)
            async with Process(store, "m2:1") as second:
                await process.stop()
                await until_primary(second)
                await until_serving(second, nodes)
                assert nodes[0].spaces == kept  # what it has stands
                await second.manager.spaces.tick()
                await second.manager.spaces.tick()
                assert sum("no policies of KV spaces" in line for line in caplog.messages) == 1
                await store.run(mend)

                async def told() -> bool:
                    for node in nodes:
                        await node.beat(second)
                    return nodes[0].spaces.revision > kept.revision

                await until(told)
                assert nodes[0].spaces.policies == kept.policies

    run(body)


def test_an_earlier_stores_spaces_come_when_the_index_is_made() -> None:
    async def body() -> None:
        async with cluster(count=3, replicas=3) as (process, nodes, store):
            await put_space(store, 500, 4000)

            async def unmake(txn: Transaction) -> None:
                txn.clear(kv_index_key(500))
                txn.clear(KV_INDEX_COMPLETE)

            await store.run(unmake)
            await beat(process, nodes)
            assert nodes[0].spaces.policies == ()
            assert not (await process.ask(GetSpaces(), CLIENT)).complete
            with pytest.raises(NotFound, match="being made"):
                await process.ask(GetSpaces(space=500), CLIENT)
            await keep_complete(store)
            assert (await store.read(lambda snap: read_index(snap, SpaceIndex()))).complete
            await beat(process, nodes)
            assert sum(quotas(nodes[0], 500).values()) == 4000
            await keep_complete(store)

    run(body)

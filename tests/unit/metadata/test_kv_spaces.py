"""The bounds of KV spaces, and the index of them that the manager reads: in step with the names, always."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from namespace_fakes import Caller, make_namespace

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import Creds
from ffs.proto.records import KV_DEDUP, KV_EVICTABLE, KvParams
from metadata.fs import spaces
from metadata.fs.collector import Collector
from metadata.fs.schema import KV_INDEX, KV_INDEX_COMPLETE
from metadata.fs.spaces import SpaceIndex, read_index, slot_bytes
from metadata.kv.contract import Store, Transaction, after
from metadata.kv.memory import MemoryStore

ME = Creds(1000, 1000)
OTHER = Creds(1001, 1001)
PARAMS = KvParams(65536, quota_bytes=1 << 30, ttl_ms=5000, flags=KV_EVICTABLE)
Test = Callable[[Store, Caller, Collector], Awaitable[None]]


def run(test: Test) -> None:
    async def body() -> None:
        store = MemoryStore()
        namespace, _, _ = await make_namespace(store)
        caller = await Caller.connect(namespace, ME)
        await test(store, caller, Collector(namespace.core))
        await store.close()

    asyncio.run(asyncio.wait_for(body(), 30))


async def index(store: Store) -> SpaceIndex:
    return await store.read(lambda snap: read_index(snap, SpaceIndex()))


async def make(caller: Caller, path: bytes, params: KvParams = PARAMS) -> int:
    opened = await caller(meta.KvCreate(path=path, params=params))
    return int(opened.ino)


def test_creation_and_change_are_indexed_at_once() -> None:
    async def test(store: Store, caller: Caller, collector: Collector) -> None:
        first = await index(store)
        assert first.complete
        assert first.spaces == {}
        ino = await make(caller, b"/kv")
        second = await index(store)
        assert second.changes > first.changes
        assert second.spaces[ino].kv == PARAMS
        stat = await caller(meta.Stat(path=b"/kv"))
        assert second.spaces[ino].layout == stat.attributes.layout
        what = meta.SET_QUOTA | meta.SET_EVICTABLE
        request = meta.SetKvSpace(path=b"/kv", what=what, quota_bytes=7 << 20, ttl_ms=9, evictable=False)
        kv = (await caller(request)).attributes.kv
        assert (kv.quota_bytes, kv.ttl_ms, kv.flags) == (7 << 20, 5000, 0)
        third = await index(store)
        assert third.changes > second.changes
        assert third.spaces[ino].kv == kv
        assert (await caller(meta.Stat(path=b"/kv"))).attributes.kv == kv
        ticket = (await caller(meta.Stat(path=b"/kv", want_ticket=True))).ticket
        by_id = meta.SetKvSpace(ino=ino, what=meta.SET_TTL, ttl_ms=0, ticket=ticket)
        kv = (await caller(by_id)).attributes.kv
        assert (kv.quota_bytes, kv.ttl_ms, kv.flags) == (7 << 20, 0, 0)
        for what, evictable, dedup, flags in (
            (meta.SET_DEDUP, False, True, KV_DEDUP),
            (meta.SET_EVICTABLE, True, False, KV_DEDUP | KV_EVICTABLE),
            (meta.SET_DEDUP, False, False, KV_EVICTABLE),
        ):
            request = meta.SetKvSpace(path=b"/kv", what=what, evictable=evictable, dedup=dedup)
            assert (await caller(request)).attributes.kv.flags == flags
            assert (await index(store)).spaces[ino].kv.flags == flags

    run(test)


def test_nothing_else_is_indexed() -> None:
    async def test(store: Store, caller: Caller, collector: Collector) -> None:
        await caller(meta.MkDir(path=b"/d"))
        await caller(meta.Open(path=b"/d/f", flags=meta.OPEN_CREATE | meta.OPEN_WRITE))
        await caller(meta.SymLink(path=b"/s", target=b"/d"))
        await caller(meta.Unlink(path=b"/s"))
        await caller(meta.Unlink(path=b"/d/f"))
        known = await index(store)
        assert known.spaces == {}
        assert known.changes == 0

    run(test)


def test_every_way_of_losing_a_name_takes_it_out() -> None:
    async def test(store: Store, caller: Caller, collector: Collector) -> None:
        await make(caller, b"/unlinked")
        await caller(meta.Unlink(path=b"/unlinked"))
        assert (await index(store)).spaces == {}
        await make(caller, b"/many")
        await caller(meta.UnlinkMany(paths=(b"/many",)))
        assert (await index(store)).spaces == {}
        await make(caller, b"/alone")
        await caller(meta.RemoveTree(path=b"/alone"))
        assert (await index(store)).spaces == {}
        await caller(meta.MkDir(path=b"/tree/deep", parents=True))
        ino = await make(caller, b"/tree/deep/kv")
        await caller(meta.RemoveTree(path=b"/tree"))
        assert list((await index(store)).spaces) == [ino]  # still there: its entry goes with the collector
        await collector.step()
        await collector.step()
        assert (await index(store)).spaces == {}
        await make(caller, b"/victim")
        other = await make(caller, b"/winner")
        await caller(meta.Rename(source=b"/winner", target=b"/victim"))
        assert list((await index(store)).spaces) == [other]
        await caller(meta.Open(path=b"/file", flags=meta.OPEN_CREATE | meta.OPEN_WRITE))
        await caller(meta.Link(source=b"/file", target=b"/victim", replace=True))
        assert (await index(store)).spaces == {}

    run(test)


def test_rename_exchange_and_a_second_name_keep_it() -> None:
    async def test(store: Store, caller: Caller, collector: Collector) -> None:
        a, b = await make(caller, b"/a"), await make(caller, b"/b", KvParams(4096))
        await caller(meta.MkDir(path=b"/d"))
        await caller(meta.Rename(source=b"/a", target=b"/d/a"))
        await caller(meta.Rename(source=b"/d/a", target=b"/b", flags=meta.RENAME_EXCHANGE))
        await caller(meta.Link(source=b"/b", target=b"/second"))
        await caller(meta.Unlink(path=b"/b"))
        assert set((await index(store)).spaces) == {a, b}
        await caller(meta.Unlink(path=b"/second"))
        assert set((await index(store)).spaces) == {b}

    run(test)


def test_only_the_owner_changes_bounds_and_only_possible_ones() -> None:
    async def test(store: Store, caller: Caller, collector: Collector) -> None:
        ino = await make(caller, b"/kv")
        await caller(meta.Open(path=b"/f", flags=meta.OPEN_CREATE | meta.OPEN_WRITE))
        refused: list[tuple[type[errors.FfsError], dict[str, Any]]] = [
            (errors.InvalidArgument, {"path": b"/kv", "what": meta.SET_QUOTA, "quota_bytes": -1}),
            (errors.InvalidArgument, {"path": b"/kv", "what": meta.SET_TTL, "ttl_ms": -1}),
            (errors.InvalidArgument, {"path": b"/kv", "what": meta.SET_TTL, "ttl_ms": 1 << 62}),
            (errors.InvalidArgument, {"path": b"/kv", "what": 16}),
            (errors.InvalidArgument, {"path": b"/f", "what": meta.SET_TTL}),
            (errors.InvalidArgument, {"path": b"/", "what": meta.SET_TTL}),
            (errors.NotFound, {"path": b"/none", "what": meta.SET_TTL}),
        ]
        before = await index(store)
        for cls, fields in refused:
            with pytest.raises(cls):
                await caller(meta.SetKvSpace(**fields))
        caller.creds = OTHER
        with pytest.raises(errors.NotPermitted):
            await caller(meta.SetKvSpace(path=b"/kv", what=meta.SET_QUOTA, quota_bytes=1 << 20))
        assert await index(store) == before
        caller.creds = Creds()
        await caller(meta.SetKvSpace(path=b"/kv", what=meta.SET_QUOTA, quota_bytes=1 << 20))
        assert (await index(store)).spaces[ino].kv.quota_bytes == 1 << 20
        with pytest.raises(errors.InvalidArgument):
            await make(caller, b"/flags", KvParams(4096, flags=4))
        with pytest.raises(errors.InvalidArgument):
            await make(caller, b"/quota", KvParams(4096, quota_bytes=-1))

    run(test)


def test_a_quota_gives_every_chain_a_block() -> None:
    """Five chains, or the stripe of a space; blocks of 65 KiB take slots of 128 KiB."""

    async def test(store: Store, caller: Caller, collector: Collector) -> None:
        slot = 128 << 10
        least = KvParams(65 << 10, quota_bytes=5 * slot)
        with pytest.raises(errors.InvalidArgument, match=f"give at least {5 * slot}"):
            await make(caller, b"/kv", KvParams(65 << 10, quota_bytes=5 * slot - 1))
        await make(caller, b"/kv", least)
        for quota in (1, 5 * slot - 1):
            with pytest.raises(errors.InvalidArgument, match="5 chains"):
                await caller(meta.SetKvSpace(path=b"/kv", what=meta.SET_QUOTA, quota_bytes=quota))
        await caller(meta.SetKvSpace(path=b"/kv", what=meta.SET_QUOTA, quota_bytes=0))
        narrow = KvParams(65 << 10, quota_bytes=slot)
        await caller(meta.KvCreate(path=b"/one", params=narrow, layout=meta.LayoutChoice(stripe=1)))
        assert [slot_bytes(block) for block in (1, 4096, 4097, 65536, 65537, 16 << 20)] == [
            4096,
            4096,
            8192,
            65536,
            131072,
            16 << 20,
        ]

    run(test)


def test_a_repeated_request_changes_nothing_again() -> None:
    async def test(store: Store, caller: Caller, collector: Collector) -> None:
        await make(caller, b"/kv")
        first = await caller(meta.SetKvSpace(path=b"/kv", what=meta.SET_QUOTA, quota_bytes=5 << 20))
        repeated, caller.last = caller.last, None
        await caller.send(caller.prepare(meta.Stat(path=b"/")))
        before = await index(store)
        caller.last = repeated
        again = await caller.resend()
        assert isinstance(again, meta.StatReply)
        assert again.attributes.kv == first.attributes.kv
        assert await index(store) == before

    run(test)


def test_a_space_without_a_name_that_is_open_still_is_not_indexed_again() -> None:
    async def test(store: Store, caller: Caller, collector: Collector) -> None:
        ino = await make(caller, b"/kv")
        ticket = (await caller(meta.Stat(path=b"/kv", want_ticket=True))).ticket
        await caller(meta.Unlink(path=b"/kv"))
        await caller(meta.SetKvSpace(ino=ino, what=meta.SET_QUOTA, quota_bytes=5 << 20, ticket=ticket))
        assert (await index(store)).spaces == {}

    run(test)


def test_an_older_store_gets_its_index() -> None:
    async def test(store: Store, caller: Caller, collector: Collector) -> None:
        inos = {await make(caller, b"/kv%d" % at, KvParams(4096, quota_bytes=at << 20)) for at in range(5)}
        gone = await make(caller, b"/gone")
        await caller(meta.MkDir(path=b"/d"))
        await caller(meta.Open(path=b"/d/f", flags=meta.OPEN_CREATE | meta.OPEN_WRITE))
        await caller(meta.Unlink(path=b"/gone"))
        whole = await index(store)

        async def forget(txn: Transaction) -> None:
            txn.clear_range(KV_INDEX, after(KV_INDEX))
            txn.clear(KV_INDEX_COMPLETE)

        await store.run(forget)
        bare = await index(store)
        assert not bare.complete
        assert bare.spaces == {}
        assert await spaces.complete(store) == 5
        found = await index(store)
        assert found.complete
        assert found.spaces == whole.spaces
        assert found.spaces.keys() == inos
        assert gone not in found.spaces
        assert await spaces.complete(store) == 0

    run(test)


def test_pages_of_inodes_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "PAGE", 3)
    test_an_older_store_gets_its_index()


def test_an_unchanged_index_is_not_read_again() -> None:
    async def test(store: Store, caller: Caller, collector: Collector) -> None:
        await make(caller, b"/kv")
        known = await index(store)
        assert await store.read(lambda snap: read_index(snap, known)) is known
        await make(caller, b"/kv2")
        assert await store.read(lambda snap: read_index(snap, known)) is not known

    run(test)


def test_a_table_of_the_role_is_taken_where_none_is_named() -> None:
    async def test(store: Store, caller: Caller, collector: Collector) -> None:
        cluster: Any = collector._core.cluster
        cluster.defaults = {"kv": 2}
        kv = await caller(meta.KvCreate(path=b"/kv", params=PARAMS))
        file = await caller(meta.Open(path=b"/f", flags=meta.OPEN_CREATE | meta.OPEN_WRITE))
        assert (kv.attributes.layout.table, file.attributes.layout.table) == (2, 1)
        named = await caller(meta.KvCreate(path=b"/kv1", params=PARAMS, layout=meta.LayoutChoice(table=1)))
        assert named.attributes.layout.table == 1
        await caller(meta.MkDir(path=b"/d", layout=meta.LayoutChoice(table=1)))
        inherited = await caller(meta.KvCreate(path=b"/d/kv", params=PARAMS))
        assert inherited.attributes.layout.table == 1
        cluster.tables = {}
        with pytest.raises(errors.ChainUnavailable, match="KV spaces"):
            await caller(meta.KvCreate(path=b"/kv3", params=PARAMS))
        with pytest.raises(errors.ChainUnavailable, match="files"):
            await caller(meta.Open(path=b"/f3", flags=meta.OPEN_CREATE | meta.OPEN_WRITE))

    run(test)

"""For every request of the namespace: situations in which it is made. Used by test_exactly_once.py.

A case is an async function of a World that brings about the situation and returns the request. Read-only
requests stand in READ_ONLY, with the reason to leave one out in NOT_REPEATABLE. A request class that has
neither fails the test: add a case, one in which it succeeds and one in which it fails.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from namespace_fakes import CLUSTER, Caller, FakeChains, FakeCluster

from ffs import errors
from ffs.proto import meta, quota
from ffs.proto.common import Creds
from ffs.proto.records import ROOT_INO, KvParams
from metadata.fs.core import Core
from metadata.fs.namespace import Namespace, format_store
from metadata.fs.schema import (
    SUB_ENTRIES,
    TICKET_KEY,
    inode_key,
    quota_bytes_key,
    quota_in_key,
    quota_key,
    signed,
)
from metadata.kv.contract import Transaction
from metadata.kv.faults import Died, FaultyStore, Rates
from metadata.kv.memory import MemoryStore

NOW_NS = 10**18
USER = Creds(1000, 1000)
BATCH = 140  # three pages


class DyingChains(FakeChains):
    """The process ends at call `die_at`, before or after it was carried out."""

    die_at = -1

    def _check(self, chain: int, space: int, epoch: int | None = None) -> dict[tuple[int, bytes], int]:
        if self.calls == self.die_at:
            self.calls += 1
            raise Died("at a chain")
        return super()._check(chain, space, epoch)


class World:
    """A store, its chains, and two metadata processes."""

    store: FaultyStore
    chains: DyingChains
    first: Namespace
    second: Namespace
    me: Caller
    other: Caller  # another client

    @classmethod
    async def make(cls) -> World:
        world = cls()
        world.store = FaultyStore(MemoryStore(), Rates(), random.Random(0))
        world.chains = DyingChains()
        cluster = FakeCluster()
        await format_store(world.store, CLUSTER, now_ns=NOW_NS, root_mode=0o777)
        world.first, world.second = (
            Namespace(
                Core(
                    world.store,
                    cluster,
                    world.chains,
                    cluster_id=CLUSTER,
                    clock_ns=lambda: NOW_NS,
                    rng=random.Random(seed),
                )
            )
            for seed in (1, 2)
        )
        world.me = await Caller.connect(world.first)
        world.other = await Caller.connect(world.first)
        world.other.slot = 1
        return world

    async def file(self, path: bytes, length: int = 0, *, flags: int = 0, keep: bool = False) -> meta.Opened:
        """A file with so many bytes; open still if `keep`."""
        flags |= meta.OPEN_WRITE | (0 if flags & meta.OPEN_TMPFILE else meta.OPEN_CREATE)
        opened: meta.Opened = await self.me(meta.Open(path=path, flags=flags))
        if length:
            self.put(opened, length)
            await self.me(meta.Fsync(ino=opened.ino, handle=opened.handle, length=length))
        if not keep:
            await self.me(meta.Close(ino=opened.ino, handle=opened.handle))
        return opened

    def put(self, opened: meta.Opened, length: int) -> None:
        layout = opened.attributes.layout
        assert layout is not None
        self.chains.write(opened.ino, layout, opened.attributes.epoch, 0, length, range(100, 105))


Case = Callable[[World], Awaitable[meta.Request]]
CASES: dict[type[meta.Request], list[Case]] = {}

READ_ONLY: set[type[meta.Request]] = {
    meta.Stat,
    meta.StatMany,
    meta.Access,
    meta.ReadDir,
    meta.ReadLink,
    meta.StatFs,
    meta.CapabilityRenew,
    meta.KvOpen,
    meta.GetLocks,
    meta.GetXattr,
    meta.ListXattr,
    meta.FsckScan,
    quota.GetQuota,
    quota.ListQuotas,
}
NOT_REPEATABLE: set[type[meta.Request]] = {
    meta.SessionOpen,  # a session whose answer was lost ends by itself
}


def case(kind: type[meta.Request]) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES.setdefault(kind, []).append(function)
        return function

    return add


# --- sessions -------------------------------------------------------------------------------


@case(meta.SessionRenew)
async def renewal(world: World) -> meta.Request:
    return meta.SessionRenew()


@case(meta.SessionClose)
async def end_of_a_session(world: World) -> meta.Request:
    await world.file(b"/f", keep=True)
    return meta.SessionClose()


# --- files ----------------------------------------------------------------------------------


@case(meta.Open)
async def creation(world: World) -> meta.Request:
    return meta.Open(path=b"/f", flags=meta.OPEN_WRITE | meta.OPEN_CREATE | meta.OPEN_EXCL)


@case(meta.Open)
async def creation_of_what_is_there(world: World) -> meta.Request:
    await world.file(b"/f")
    return meta.Open(path=b"/f", flags=meta.OPEN_WRITE | meta.OPEN_CREATE | meta.OPEN_EXCL)


@case(meta.Open)
async def open_for_writing(world: World) -> meta.Request:
    await world.file(b"/f", 5000)
    return meta.Open(path=b"/f", flags=meta.OPEN_WRITE)


@case(meta.Open)
async def open_with_truncation(world: World) -> meta.Request:
    await world.file(b"/f", 20_000)
    return meta.Open(path=b"/f", flags=meta.OPEN_WRITE | meta.OPEN_TRUNC)


@case(meta.Open)
async def temporary_file(world: World) -> meta.Request:
    return meta.Open(path=b"/", flags=meta.OPEN_WRITE | meta.OPEN_TMPFILE)


@case(meta.OpenMany)
async def many_creations(world: World) -> meta.Request:
    await world.file(b"/m070")
    flags = meta.OPEN_READ | meta.OPEN_CREATE | meta.OPEN_EXCL
    return meta.OpenMany(entries=tuple(meta.OpenEntry(b"/m%03d" % i, flags) for i in range(BATCH)))


@case(meta.OpenMany)
async def many_truncations(world: World) -> meta.Request:
    for i in (0, 65, 66):
        await world.file(b"/m%03d" % i, 9000)
    flags = meta.OPEN_WRITE | meta.OPEN_TRUNC
    return meta.OpenMany(entries=tuple(meta.OpenEntry(b"/m%03d" % i, flags) for i in range(70)))


@case(meta.Close)
async def close_with_a_length(world: World) -> meta.Request:
    opened = await world.file(b"/f", keep=True)
    world.put(opened, 7000)
    return meta.Close(ino=opened.ino, handle=opened.handle, length=7000, written=True)


@case(meta.Close)
async def close_of_what_is_closed(world: World) -> meta.Request:
    opened = await world.file(b"/f")
    return meta.Close(ino=opened.ino, handle=opened.handle)


@case(meta.CloseMany)
async def many_closes(world: World) -> meta.Request:
    entries = []
    for i in range(BATCH):
        opened = await world.file(b"/c%d" % i, keep=True)
        handle = opened.handle if i % 50 else 99
        entries.append(meta.CloseEntry(opened.ino, handle, 0, 100 + i, True))
    return meta.CloseMany(entries=tuple(entries))


@case(meta.Fsync)
async def published_length(world: World) -> meta.Request:
    opened = await world.file(b"/f", keep=True)
    world.put(opened, 7000)
    return meta.Fsync(ino=opened.ino, handle=opened.handle, length=7000)


@case(meta.Fsync)
async def length_without_a_session(world: World) -> meta.Request:
    opened = await world.file(b"/f")
    return meta.Fsync(ino=opened.ino, handle=opened.handle, length=7000)


@case(meta.Append)
async def reservation(world: World) -> meta.Request:
    opened = await world.file(b"/f", 100, flags=meta.OPEN_APPEND, keep=True)
    return meta.Append(ino=opened.ino, handle=opened.handle, length=50)


@case(meta.Append)
async def reservation_without_a_session(world: World) -> meta.Request:
    opened = await world.file(b"/f")
    return meta.Append(ino=opened.ino, handle=opened.handle, length=50)


@case(meta.Truncate)
async def shortening(world: World) -> meta.Request:
    await world.file(b"/f", 20_000)
    return meta.Truncate(path=b"/f", length=5000)


@case(meta.Truncate)
async def shortening_by_a_writer(world: World) -> meta.Request:
    opened = await world.file(b"/f", 20_000, keep=True)
    return meta.Truncate(ino=opened.ino, handle=opened.handle, length=4096)


@case(meta.Truncate)
async def lengthening(world: World) -> meta.Request:
    await world.file(b"/f", 100)
    return meta.Truncate(path=b"/f", length=5000)


@case(meta.Truncate)
async def truncation_of_nothing(world: World) -> meta.Request:
    return meta.Truncate(path=b"/f", length=5000)


@case(meta.SetAttr)
async def other_mode_and_owner(world: World) -> meta.Request:
    await world.file(b"/f")
    what = meta.SET_MODE | meta.SET_UID | meta.SET_MTIME
    return meta.SetAttr(path=b"/f", what=what, mode=0o600, uid=7, mtime_ns=5)


@case(meta.SetAttr)
async def mode_of_somebody_elses(world: World) -> meta.Request:
    await world.file(b"/f")
    world.me.creds = USER
    return meta.SetAttr(path=b"/f", what=meta.SET_MODE, mode=0o600)


@case(meta.SetAttr)
async def time_of_a_symlink(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.me(meta.SymLink(path=b"/l", target=b"f"))
    return meta.SetAttr(path=b"/l", follow=False, what=meta.SET_MTIME, mtime_ns=5)


@case(meta.SetXattr)
async def attribute(world: World) -> meta.Request:
    await world.file(b"/f")
    return meta.SetXattr(path=b"/f", name=b"user.a", value=b"1", flags=meta.XATTR_CREATE)


@case(meta.SetXattr)
async def attribute_that_is_there(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.me(meta.SetXattr(path=b"/f", name=b"user.a", value=b"1"))
    return meta.SetXattr(path=b"/f", name=b"user.a", value=b"2", flags=meta.XATTR_CREATE)


@case(meta.RemoveXattr)
async def removal_of_an_attribute(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.me(meta.SetXattr(path=b"/f", name=b"user.a", value=b"1"))
    return meta.RemoveXattr(path=b"/f", name=b"user.a")


@case(meta.RemoveXattr)
async def removal_of_a_missing_attribute(world: World) -> meta.Request:
    await world.file(b"/f")
    return meta.RemoveXattr(path=b"/f", name=b"user.a")


# --- names ----------------------------------------------------------------------------------


@case(meta.MkDir)
async def directory(world: World) -> meta.Request:
    return meta.MkDir(path=b"/d")


@case(meta.MkDir)
async def directory_that_is_there(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d"))
    return meta.MkDir(path=b"/d")


@case(meta.MkDir)
async def directories_on_the_way(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/a"))
    return meta.MkDir(path=b"/a/b/c/d", parents=True)


@case(meta.MkDir)
async def directories_with_an_impossible_name(world: World) -> meta.Request:
    """What was made on the way is thrown away with the failure."""
    return meta.MkDir(path=b"/a/b/" + b"n" * 256, parents=True)


@case(meta.Rename)
async def rename(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d"))
    await world.file(b"/f", 5000)
    return meta.Rename(source=b"/f", target=b"/d/g")


@case(meta.Rename)
async def rename_over_a_file(world: World) -> meta.Request:
    await world.file(b"/f", 5000)
    await world.file(b"/g", 6000)
    return meta.Rename(source=b"/f", target=b"/g")


@case(meta.Rename)
async def exchange(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d/e", parents=True))
    await world.file(b"/f")
    return meta.Rename(source=b"/f", target=b"/d/e", flags=meta.RENAME_EXCHANGE)


@case(meta.Rename)
async def rename_onto_what_is_there(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.file(b"/g")
    return meta.Rename(source=b"/f", target=b"/g", flags=meta.RENAME_NOREPLACE)


@case(meta.Link)
async def further_name(world: World) -> meta.Request:
    await world.file(b"/f")
    return meta.Link(source=b"/f", target=b"/g")


@case(meta.Link)
async def publication(world: World) -> meta.Request:
    await world.file(b"/g", 5000)
    opened = await world.file(b"/", 7000, flags=meta.OPEN_TMPFILE, keep=True)
    return meta.Link(ino=opened.ino, handle=opened.handle, target=b"/g", replace=True)


@case(meta.Link)
async def name_that_is_taken(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.file(b"/g")
    return meta.Link(source=b"/f", target=b"/g")


@case(meta.SymLink)
async def symbolic_link(world: World) -> meta.Request:
    return meta.SymLink(path=b"/l", target=b"/nowhere")


@case(meta.SymLink)
async def symbolic_link_of_a_taken_name(world: World) -> meta.Request:
    await world.file(b"/l")
    return meta.SymLink(path=b"/l", target=b"/nowhere")


@case(meta.Unlink)
async def unlink(world: World) -> meta.Request:
    await world.file(b"/f", 5000)
    return meta.Unlink(path=b"/f")


@case(meta.Unlink)
async def unlink_of_one_name_of_two(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.me(meta.Link(source=b"/f", target=b"/g"))
    return meta.Unlink(path=b"/f")


@case(meta.Unlink)
async def unlink_of_nothing(world: World) -> meta.Request:
    return meta.Unlink(path=b"/f")


@case(meta.UnlinkMany)
async def many_unlinks(world: World) -> meta.Request:
    for i in range(BATCH):
        if i % 50:
            await world.file(b"/u%d" % i)
    return meta.UnlinkMany(paths=tuple(b"/u%d" % i for i in range(BATCH)))


@case(meta.RmDir)
async def rmdir(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d"))
    return meta.RmDir(path=b"/d")


@case(meta.RmDir)
async def rmdir_of_a_full_one(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d/e", parents=True))
    return meta.RmDir(path=b"/d")


@case(meta.RemoveTree)
async def removal_of_a_tree(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d/e", parents=True))
    await world.file(b"/d/e/f")
    return meta.RemoveTree(path=b"/d")


@case(meta.RemoveTree)
async def removal_of_a_tree_by_another(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d/e", mode=0o777, parents=True))
    await world.file(b"/d/e/f")
    world.me.creds = USER
    return meta.RemoveTree(path=b"/d")


@case(meta.RemoveTree)
async def removal_of_a_tree_that_may_not_be(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d/e", mode=0o700, parents=True, parent_mode=0o777))
    await world.file(b"/d/e/f")
    world.me.creds = USER
    return meta.RemoveTree(path=b"/d")


# --- KV spaces ------------------------------------------------------------------------------


@case(meta.KvCreate)
async def space(world: World) -> meta.Request:
    return meta.KvCreate(path=b"/kv", params=KvParams(4096, quota_bytes=1 << 20))


@case(meta.KvCreate)
async def space_of_a_taken_name(world: World) -> meta.Request:
    await world.file(b"/kv")
    return meta.KvCreate(path=b"/kv", params=KvParams(4096), exist_ok=True)


@case(meta.SetKvSpace)
async def bounds(world: World) -> meta.Request:
    await world.me(meta.KvCreate(path=b"/kv", params=KvParams(4096)))
    return meta.SetKvSpace(path=b"/kv", what=meta.SET_QUOTA, quota_bytes=1 << 20)


@case(meta.SetKvSpace)
async def bounds_of_a_file(world: World) -> meta.Request:
    await world.file(b"/kv")
    return meta.SetKvSpace(path=b"/kv", what=meta.SET_QUOTA, quota_bytes=1 << 20)


# --- locks ----------------------------------------------------------------------------------


@case(meta.Lock)
async def lock(world: World) -> meta.Request:
    await world.file(b"/f")
    return meta.Lock(path=b"/f", owner=1)


@case(meta.Lock)
async def lock_that_another_has(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.other(meta.Lock(path=b"/f", owner=1))
    return meta.Lock(path=b"/f", owner=1)


@case(meta.Lock)
async def lock_of_entries(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d"))
    return meta.Lock(path=b"/d", kind=meta.LOCK_ENTRIES, owner=1)


@case(meta.Lock)
async def lock_of_what_a_dead_client_had(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.other(meta.Lock(path=b"/f", owner=1))
    await world.first.handle(meta.SessionClose(client=world.other.client))
    return meta.Lock(path=b"/f", owner=1)


@case(meta.Unlock)
async def end_of_a_lock(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d"))
    await world.me(meta.Lock(path=b"/d", kind=meta.LOCK_ENTRIES, owner=1))
    return meta.Unlock(path=b"/d", kind=meta.LOCK_ENTRIES, owner=1)


@case(meta.Unlock)
async def end_of_others_locks(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.other(meta.Lock(path=b"/f", owner=1, exclusive=False))
    return meta.Unlock(path=b"/f", force=True)


@case(meta.Unlock)
async def end_of_others_locks_by_somebody(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.other(meta.Lock(path=b"/f", owner=1))
    world.me.creds = USER
    return meta.Unlock(path=b"/f", force=True)


# --- checks ---------------------------------------------------------------------------------


async def _wrong_count(world: World) -> meta.FsckRepair:
    async def damage(txn: Transaction) -> None:
        txn.add(inode_key(ROOT_INO) + SUB_ENTRIES, 3)

    await world.file(b"/f")
    await world.store.run(damage)
    page = await world.me(meta.FsckScan(what=meta.SCAN_ENTRIES))
    [finding] = page.findings
    return meta.FsckRepair(finding=finding)


@case(meta.FsckRepair)
async def repair(world: World) -> meta.Request:
    return await _wrong_count(world)


@case(meta.FsckRepair)
async def repair_by_a_user(world: World) -> meta.Request:
    request = await _wrong_count(world)
    world.me.creds = USER
    return request


@case(meta.FsckRepair)
async def repair_of_what_a_quota_counts(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 20)
    await world.file(b"/q/f", 5000)
    view = (await world.me(quota.GetQuota(path=b"/q"))).quota

    async def damage(txn: Transaction) -> None:
        txn.add(quota_bytes_key(view.quota, 0), 3)

    await world.store.run(damage)
    page = await world.me(meta.FsckScan(what=meta.SCAN_QUOTAS))
    _, ino, used, _, stamp = struct.unpack("<QQqqQ", page.rows)
    finding = meta.FsckFinding(
        kind="wrong-quota-usage",
        ino=ino,
        key=quota_key(view.quota),
        found=used,
        expected=5000,
        stamp=stamp.to_bytes(8, "little"),
        repair="count the directory anew",
    )
    return meta.FsckRepair(finding=finding)


# --- quotas ---------------------------------------------------------------------------------


async def _in_a_quota(world: World, **limits: int) -> None:
    await world.me(meta.MkDir(path=b"/q"))
    await world.me(quota.SetQuota(path=b"/q", **limits))


@case(quota.SetQuota)
async def new_quota(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/q"))
    return quota.SetQuota(path=b"/q", limit_bytes=1 << 20, limit_entries=10)


@case(quota.SetQuota)
async def quota_of_what_is_there(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/q/d", parents=True))
    return quota.SetQuota(path=b"/q", limit_bytes=1 << 20)


@case(quota.SetQuota)
async def other_limits(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 20)
    return quota.SetQuota(path=b"/q", limit_entries=7)


@case(quota.SetQuota)
async def end_of_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 20)
    await world.file(b"/q/f", 5000)
    return quota.SetQuota(path=b"/q", clear=True)


@case(quota.SetQuota)
async def quota_in_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world)
    await world.me(meta.MkDir(path=b"/q/d"))
    return quota.SetQuota(path=b"/q/d", limit_bytes=1 << 20)


@case(quota.SetQuota)
async def quota_by_a_user(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/q"))
    world.me.creds = USER
    return quota.SetQuota(path=b"/q", limit_bytes=1 << 20)


@case(quota.Reserve)
async def room_for_a_writer(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 30)
    opened = await world.file(b"/q/f", keep=True)
    return quota.Reserve(ino=opened.ino, handle=opened.handle, epoch=0, end=50 << 20)


@case(quota.Reserve)
async def room_that_isnt_there(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 20)
    opened = await world.file(b"/q/f", keep=True)
    return quota.Reserve(ino=opened.ino, handle=opened.handle, epoch=0, end=(1 << 20) + 1)


@case(quota.Reserve)
async def room_where_nothing_counts(world: World) -> meta.Request:
    opened = await world.file(b"/f", keep=True)
    return quota.Reserve(ino=opened.ino, handle=opened.handle, epoch=0, end=1 << 20)


@case(meta.Open)
async def creation_in_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 30, limit_entries=1)
    return meta.Open(path=b"/q/f", flags=meta.OPEN_WRITE | meta.OPEN_CREATE)


@case(meta.Open)
async def creation_beyond_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world, limit_entries=1)
    await world.file(b"/q/e")
    return meta.Open(path=b"/q/f", flags=meta.OPEN_WRITE | meta.OPEN_CREATE)


@case(meta.Open)
async def truncation_in_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 30)
    await world.file(b"/q/f", 20_000)
    return meta.Open(path=b"/q/f", flags=meta.OPEN_WRITE | meta.OPEN_TRUNC)


@case(meta.OpenMany)
async def many_creations_beyond_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world, limit_entries=100)
    flags = meta.OPEN_WRITE | meta.OPEN_CREATE
    return meta.OpenMany(entries=tuple(meta.OpenEntry(b"/q/m%03d" % i, flags) for i in range(BATCH)))


@case(meta.Close)
async def close_in_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 30)
    opened = await world.file(b"/q/f", keep=True)
    world.put(opened, 7000)
    return meta.Close(ino=opened.ino, handle=opened.handle, length=7000, written=True)


@case(meta.Append)
async def append_beyond_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1000)
    opened = await world.file(b"/q/f", 900, flags=meta.OPEN_APPEND, keep=True)
    return meta.Append(ino=opened.ino, handle=opened.handle, length=101)


@case(meta.Truncate)
async def lengthening_beyond_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1000)
    await world.file(b"/q/f", 900)
    return meta.Truncate(path=b"/q/f", length=1001)


@case(meta.Rename)
async def rename_out_of_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world)
    await world.file(b"/q/f", 5000)
    return meta.Rename(source=b"/q/f", target=b"/f")


@case(meta.Rename)
async def rename_to_where_is_counted(world: World) -> meta.Request:
    """The directory isn't counted yet, its new place is."""
    await world.me(meta.MkDir(path=b"/q/d/e", parents=True))
    await world.file(b"/q/d/e/f", 5000)
    await world.me(quota.SetQuota(path=b"/q"))
    return meta.Rename(source=b"/q/d/e", target=b"/q/e")


@case(meta.Link)
async def link_out_of_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world)
    await world.file(b"/q/f", 5000)
    return meta.Link(source=b"/q/f", target=b"/f")


@case(meta.Link)
async def publication_in_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 20)
    await world.file(b"/q/g", 5000)
    opened = await world.file(b"/", 7000, flags=meta.OPEN_TMPFILE, keep=True)
    return meta.Link(ino=opened.ino, handle=opened.handle, target=b"/q/g", replace=True)


@case(meta.Unlink)
async def unlink_in_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 20)
    await world.file(b"/q/f", 5000)
    return meta.Unlink(path=b"/q/f")


@case(meta.RemoveTree)
async def removal_of_a_quota(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 20)
    await world.file(b"/q/f", 5000)
    return meta.RemoveTree(path=b"/q")


# --- what a store holds, comparable between worlds -------------------------------------------


async def content(world: World) -> list[Any]:
    """All keys and chunks, with inodes numbered by their place in the tree: an attempt that is thrown away
    uses an id up, so the same story has other ids in it after a fault. Left out: blocks of ids, what renewals
    count, capabilities' ids, the answers kept in slots, and the key of tickets, which is random."""
    pairs = await world.store.read(lambda snap: snap.range(b"\0", b"\xff"))
    rank = _places(pairs)
    out: list[Any] = []
    usage: Counter[Any] = Counter()
    for key, value in pairs:
        kind = key[:1]
        if kind in b"kb" or key == TICKET_KEY:
            continue
        if kind == b"i":
            ino, rest = int.from_bytes(key[3:11], "big"), key[11:]
        elif key[:2] in (b"Ql", b"Qb", b"Qe", b"Qs"):
            kind, ino, rest = key[:2], quota_in_key(key), key[10:]
            if kind in (b"Qb", b"Qe"):
                usage[kind, rank.get(ino, ino)] += signed(value)  # the shard is the inode's
                continue
        else:
            ino, rest = int.from_bytes(key[1:9], "big"), key[9:]
        words = [
            rank.get(int.from_bytes(rest[at : at + 8], "big"), rest[at : at + 8].hex())
            for at in range(0, len(rest), 8)
        ]
        out.append((kind, rank.get(ino, ino), words, _comparable(key, value, rank)))
    chunks = {
        (rank.get(space, space), key, length)
        for held in world.chains.chunks.values()
        for (space, key), length in held.items()
    }
    epochs: dict[Any, list[int]] = {}
    for (_, space), epoch in world.chains.epochs.items():
        epochs.setdefault(rank.get(space, space), []).append(epoch)
    order = {key: sorted(found) for key, found in epochs.items()}
    out += [(*which, used) for which, used in usage.items()]
    return [*sorted(out, key=repr), sorted(chunks, key=repr), sorted(order.items(), key=repr)]


def _places(pairs: list[tuple[bytes, bytes]]) -> dict[int, str]:
    """A name for each inode: its place in a walk from the root, then those without a name, and quotas, by
    age."""
    entries = [
        (int.from_bytes(key[1:9], "big"), msgspec.msgpack.decode(value)[1])
        for key, value in pairs
        if key[:1] == b"d"
    ]
    order = [1]
    for ino in order:  # grows meanwhile
        order += [child for parent, child in entries if parent == ino and child not in order]
    inodes = {int.from_bytes(key[3:11], "big") for key, _ in pairs if key[:1] == b"i"}
    rest = sorted(inodes - set(order)) + [quota_in_key(key) for key, _ in pairs if key[:2] == b"Ql"]
    return {ino: f"#{at}" for at, ino in enumerate(order + rest)}


def _comparable(key: bytes, value: bytes, rank: dict[int, str]) -> Any:
    if key[:1] == b"w":
        return None  # names a capability
    if key[:1] == b"r":  # version and sequence; or a page of answers
        return msgspec.msgpack.decode(value)[:2] if len(key) == 13 else None
    if len(value) == 8:
        return value  # a counter
    try:
        return _ranked(msgspec.msgpack.decode(value), rank)
    except msgspec.MsgspecError:
        return value


def _ranked(value: Any, rank: dict[int, str]) -> Any:
    if isinstance(value, list):
        return [_ranked(item, rank) for item in value]
    return rank.get(value, value) if isinstance(value, int) else value


def told(reply: Any) -> Any:
    """What of a reply must be the same in every world: its kind, or the error."""
    if isinstance(reply, errors.FfsError):
        raise reply
    results = getattr(reply, "results", None)
    if results is not None:
        return [told(result) for result in results]
    return type(reply), getattr(reply, "code", 0)

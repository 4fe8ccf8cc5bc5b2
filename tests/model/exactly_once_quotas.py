"""Cases of quotas, and of fsck's repairs (exactly_once.py)."""

from __future__ import annotations

import struct

from exactly_once_world import BATCH, USER, World, case

from ffs.proto import checks, meta, quota
from ffs.proto.records import ROOT_INO
from metadata.fs.schema import SUB_ENTRIES, inode_key, quota_bytes_key, quota_key
from metadata.kv.contract import Transaction

# --- checks ---------------------------------------------------------------------------------


async def _wrong_count(world: World) -> checks.FsckRepair:
    async def damage(txn: Transaction) -> None:
        txn.add(inode_key(ROOT_INO) + SUB_ENTRIES, 3)

    await world.file(b"/f")
    await world.store.run(damage)
    page = await world.me(checks.FsckScan(what=checks.SCAN_ENTRIES))
    [finding] = page.findings
    return checks.FsckRepair(finding=finding)


@case(checks.FsckRepair)
async def repair(world: World) -> meta.Request:
    return await _wrong_count(world)


@case(checks.FsckRepair)
async def repair_by_a_user(world: World) -> meta.Request:
    request = await _wrong_count(world)
    world.me.creds = USER
    return request


@case(checks.FsckRepair)
async def repair_of_what_a_quota_counts(world: World) -> meta.Request:
    await _in_a_quota(world, limit_bytes=1 << 20)
    await world.file(b"/q/f", 5000)
    view = (await world.me(quota.GetQuota(path=b"/q"))).quota

    async def damage(txn: Transaction) -> None:
        txn.add(quota_bytes_key(view.quota, 0), 3)

    await world.store.run(damage)
    page = await world.me(checks.FsckScan(what=checks.SCAN_QUOTAS))
    _, ino, used, _, stamp = struct.unpack("<QQqqQ", page.rows)
    finding = checks.FsckFinding(
        kind="wrong-quota-usage",
        ino=ino,
        key=quota_key(view.quota),
        found=used,
        expected=5000,
        stamp=stamp.to_bytes(8, "little"),
        repair="count the directory anew",
    )
    return checks.FsckRepair(finding=finding)


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

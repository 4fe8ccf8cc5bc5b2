"""Quotas of directories: set, cleared, looked at, listed. What they count is in metadata/fs/quota.py."""

from __future__ import annotations

import contextlib
from typing import Final

from msgspec.structs import replace

from ffs import errors
from ffs.proto.common import Creds
from ffs.proto.quota import (
    KEEP,
    MAX_LIMIT,
    MAX_LIST,
    MAX_QUOTAS,
    READY,
    GetQuota,
    ListQuotas,
    QuotaList,
    QuotaReply,
    QuotaView,
    SetQuota,
)
from ffs.proto.records import DIRECTORY, FLAG_REMOVED, ROOT_INO, Inode, QuotaRecord
from metadata.fs import quota
from metadata.fs.core import Core
from metadata.fs.ops.fsck import path_of_directory
from metadata.fs.ops.open import check_alive
from metadata.fs.ops.stat import resolve
from metadata.fs.quota import Get
from metadata.fs.schema import (
    QUOTAS,
    Reader,
    decode_quota,
    encode,
    find_inode,
    get_inode,
    inode_key,
    quota_in_key,
    quota_key,
)
from metadata.fs.walk import walk
from metadata.kv.contract import Snapshot, Transaction, after

SEARCHES: Final = 16  # paths of one page that are looked for from below, where the known one is wrong


async def need_administrator(reader: Reader, creds: Creds, path: bytes) -> None:
    """root, or who owns the root directory. NotPermitted."""
    root = await get_inode(reader, ROOT_INO)
    if creds.uid not in (0, root.uid):
        raise errors.NotPermitted("only root and the owner of / set quotas and list them", path or None)


# --- setting --------------------------------------------------------------------------------


async def set_quota(core: Core, txn: Transaction, req: SetQuota) -> QuotaReply:
    """Changes limits in place. A new quota gets a new id; what is in the directory is left to the sweep."""
    path = req.path
    await need_administrator(txn, req.creds, path)
    for what, limit in (("bytes", req.limit_bytes), ("entries", req.limit_entries)):
        if limit != KEEP and not 0 <= limit <= MAX_LIMIT:
            raise errors.InvalidArgument(f"limit of {what} {limit}: give 0 (none) to {MAX_LIMIT}", path)
    ino, inode = await resolve(txn, req.creds, path, req.ino)
    if inode.type != DIRECTORY:
        raise errors.NotADirectory("quotas are set on directories", path)
    check_alive(inode, path)
    label = inode.quota
    record = await quota.find_quota(txn, label)
    if record is not None and record.ino != ino:
        record = None
    if req.clear:
        if record is None:
            raise errors.InvalidArgument("no quota is set on this directory", path)
        quota.forget(txn, label)
        txn.set(inode_key(ino), encode(replace(inode, quota=0)))
        return QuotaReply()
    if record is None:
        await _need_apart(txn, ino, inode, path)
        label = await core.inos.take()
        record = await quota.start(txn, label, ino, inode, QuotaRecord(ino=ino, state=READY))
    record = replace(
        record,
        limit_bytes=record.limit_bytes if req.limit_bytes == KEEP else req.limit_bytes,
        limit_entries=record.limit_entries if req.limit_entries == KEEP else req.limit_entries,
        path=record.path if req.ino else path,
    )
    txn.set(quota_key(label), encode(record))
    return QuotaReply(quota=await _view(txn.peek, label, record, record.path))


async def _need_apart(txn: Transaction, ino: int, inode: Inode, path: bytes) -> None:
    """No quota counts this directory, and none is set below it. InvalidArgument; TooLarge when there are as
    many as there may be."""
    above = await quota.quota_above(txn, ino, inode)
    if above:
        record = await quota.find_quota(txn, above)
        assert record is not None, above
        raise errors.InvalidArgument(
            f"the quota of {quota.show(record)} counts this directory: quotas don't nest", path
        )
    pairs = await txn.range(QUOTAS, after(QUOTAS))
    if len(pairs) >= MAX_QUOTAS:
        raise errors.TooLarge(f"there are {MAX_QUOTAS} quotas, and no more can be", path)
    apart = {ROOT_INO} - {ino}
    for _, value in pairs:
        record = decode_quota(value)
        if await _is_below(txn, record.ino, ino, apart):
            raise errors.InvalidArgument(
                f"{quota.show(record)} below it has a quota: quotas don't nest", path
            )


async def _is_below(txn: Transaction, ino: int, ancestor: int, apart: set[int]) -> bool:
    """Is directory `ino` the directory `ancestor`, or in it? What is taken out of the tree is in nothing.
    `apart`: those that aren't, grows. Every parent that is read may conflict: a rename can't bring one in
    meanwhile."""
    way = []
    while ino != ancestor and ino not in apart:
        inode = await find_inode(txn, ino)
        if inode is None or inode.flags & FLAG_REMOVED:
            apart.add(ino)
            break
        way.append(ino)
        ino = inode.parent
    if ino == ancestor:
        return True
    apart.update(way)
    return False


# --- looking --------------------------------------------------------------------------------


async def get_quota(core: Core, reader: Snapshot, req: GetQuota) -> QuotaReply:
    if req.ino:
        ino, inode = await resolve(reader, req.creds, req.path, req.ino)
        folder, above = ino, inode
    else:
        found = await walk(reader, req.creds, req.path)
        if not found.ino:
            raise errors.NotFound(None, req.path)
        ino, inode = found.ino, await get_inode(reader, found.ino)
        folder, above = found.parent, found.parent_inode
    if inode.type == DIRECTORY:
        folder, above = ino, inode
    label = inode.quota
    record = await quota.find_quota(reader, label)
    if record is None and above.type == DIRECTORY:
        label = await quota.quota_of(reader, folder, above)
        record = await quota.find_quota(reader, label)
    if record is None:
        return QuotaReply()
    path = record.path if await _leads(reader, record) else await path_of_directory(reader, record.ino)
    return QuotaReply(quota=await _view(reader.get, label, record, path))


async def list_quotas(core: Core, reader: Snapshot, req: ListQuotas) -> QuotaList:
    await need_administrator(reader, req.creds, b"")
    limit = min(max(req.limit, 1), MAX_LIST)
    pairs = await reader.range(quota_key(req.after + 1), after(QUOTAS), limit + 1)
    views = []
    searches = SEARCHES
    for key, value in pairs[:limit]:
        record = decode_quota(value)
        path = record.path if await _leads(reader, record) else b""
        if not path and searches:
            searches -= 1
            path = await path_of_directory(reader, record.ino)
        views.append(await _view(reader.get, quota_in_key(key), record, path))
    return QuotaList(quotas=views, more=len(pairs) > limit)


async def _leads(reader: Reader, record: QuotaRecord) -> bool:
    """Is the directory where it was when its quota was set?"""
    with contextlib.suppress(errors.FfsError):
        return (await walk(reader, Creds(), record.path)).ino == record.ino
    return False


async def _view(get: Get, label: int, record: QuotaRecord, path: bytes) -> QuotaView:
    used_bytes, used_entries = await quota.usage(get, label)
    return QuotaView(
        quota=label,
        ino=record.ino,
        path=path,
        limit_bytes=record.limit_bytes,
        limit_entries=record.limit_entries,
        used_bytes=used_bytes,
        used_entries=used_entries,
        state=record.state,
    )

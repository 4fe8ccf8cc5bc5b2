"""rename: atomic, with replace, no-replace and exchange, and the loop check."""

from __future__ import annotations

import msgspec

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import Creds, OkReply
from ffs.proto.meta import RENAME_EXCHANGE, RENAME_NOREPLACE
from ffs.proto.records import DIRECTORY, ROOT_INO, Dirent, Inode
from metadata.fs import quota
from metadata.fs.core import Core
from metadata.fs.ops.lock import need_unlocked
from metadata.fs.ops.open import check_alive
from metadata.fs.schema import (
    SUB_CTIME,
    SUB_LINKS,
    Reader,
    dirent_key,
    dirent_span,
    encode,
    get_inode,
    inode_key,
)
from metadata.fs.walk import Found, W, X, need, need_name, need_unsticky, walk
from metadata.kv.contract import Transaction


async def rename(core: Core, txn: Transaction, req: meta.Rename) -> OkReply:
    creds, exchange = req.creds, bool(req.flags & RENAME_EXCHANGE)
    if req.flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or req.flags == RENAME_NOREPLACE | RENAME_EXCHANGE:
        raise errors.InvalidArgument(f"rename flags {req.flags}: 0, no-replace or exchange", req.source)
    source = await walk(txn, creds, req.source.rstrip(b"/") or req.source[:1], follow=False, entry=True)
    target = await walk(txn, creds, req.target.rstrip(b"/") or req.target[:1], follow=False, entry=True)
    if source.special:
        raise errors.Busy(None, req.source, req.target)
    if target.special:
        cls = errors.Exists if req.flags & RENAME_NOREPLACE else errors.Busy
        raise cls(None, req.source, req.target)
    moved, victim = await _judge(txn, req, source, target, exchange)
    if target.ino == source.ino:
        return OkReply()
    await need_unlocked(txn, req.client, source.parent, source.parent_inode, req.source)
    await need_unlocked(txn, req.client, target.parent, target.parent_inode, req.target)
    if victim is not None and not exchange:
        await need_unlocked(txn, req.client, target.ino, victim, req.target)
    if source.parent != target.parent:
        await _need_one_quota(txn, req, source, target)
    moved = await quota.adopt_in(txn, source.ino, moved, target.parent_inode)
    now = core.now_ns()
    if exchange and victim is not None:
        victim = await quota.adopt_in(txn, target.ino, victim, source.parent_inode)
        _swap(core, txn, source, target, moved, victim, now)
        await quota.note_path(txn, target.ino, victim, req.source)
    else:
        await _move(core, txn, source, target, moved, victim, now)
    await quota.note_path(txn, source.ino, moved, req.target)
    return OkReply()


async def _need_one_quota(txn: Transaction, req: meta.Rename, source: Found, target: Found) -> None:
    """Both directories are counted by the same quota, or by none. CrossDevice."""
    here, there = source.parent_inode, target.parent_inode
    if not here.quota and not there.quota and not await quota.is_counting(txn):
        return
    mine = await quota.quota_of(txn, source.parent, here)
    if mine != await quota.quota_of(txn, target.parent, there):
        raise errors.CrossDevice(
            "a quota counts one of the two directories and not the other: copy", req.source, req.target
        )


async def _judge(
    txn: Transaction, req: meta.Rename, source: Found, target: Found, exchange: bool
) -> tuple[Inode, Inode | None]:
    """All that may forbid it, in Linux's order: (what moves, what stands in its way)."""
    creds, names = req.creds, (req.source, req.target)
    need_name(source, req.source)
    if not source.ino:
        raise errors.NotFound(None, *names)
    need_name(target, req.target)
    if target.ino and req.flags & RENAME_NOREPLACE:
        raise errors.Exists(None, *names)
    if not target.ino and exchange:
        raise errors.NotFound("an exchange needs both names", *names)
    moved = await get_inode(txn, source.ino)
    victim = await get_inode(txn, target.ino) if target.ino else None
    source_slash, target_slash = req.source.endswith(b"/"), req.target.endswith(b"/")
    if moved.type != DIRECTORY and (source_slash or (target_slash and not exchange)):
        raise errors.NotADirectory(None, *names)
    if exchange and target_slash and victim is not None and victim.type != DIRECTORY:
        raise errors.NotADirectory(None, *names)
    if source.parent != target.parent:
        if await is_inside(txn, target.parent, source.ino):
            raise errors.InvalidArgument("a directory can't go into itself", *names)
        if target.ino and await is_inside(txn, source.parent, target.ino):
            if exchange:
                raise errors.InvalidArgument("a directory can't go into itself", *names)
            raise errors.NotEmpty(None, *names)
    if source.ino == target.ino:
        return moved, victim
    _need_delete(source, moved, creds, req.source)
    if victim is None:
        need(target.parent_inode, creds, W | X, req.target)
        check_alive(target.parent_inode, req.target)
    else:
        _need_delete(target, victim, creds, req.target)
        if not exchange:
            if moved.type == DIRECTORY and victim.type != DIRECTORY:
                raise errors.NotADirectory(None, *names)
            if moved.type != DIRECTORY and victim.type == DIRECTORY:
                raise errors.IsADirectory(None, *names)
    if source.parent != target.parent:  # ".." of a directory is written
        if moved.type == DIRECTORY:
            need(moved, creds, W, req.source)
        if exchange and victim is not None and victim.type == DIRECTORY:
            need(victim, creds, W, req.target)
    replaced = victim is not None and victim.type == DIRECTORY and not exchange
    if replaced and await txn.range(*dirent_span(target.ino), 1):
        raise errors.NotEmpty(None, *names)
    return moved, victim


def _need_delete(found: Found, inode: Inode, creds: Creds, path: bytes) -> None:
    need(found.parent_inode, creds, W | X, path)
    need_unsticky(found.parent_inode, inode, creds, path)


async def is_inside(reader: Reader, ino: int, ancestor: int) -> bool:
    """Is directory `ino` the directory `ancestor`, or in it? Every parent that is read may conflict, so two
    renames at once can't make a ring."""
    while ino != ancestor:
        if ino == ROOT_INO:
            return False
        ino = (await get_inode(reader, ino)).parent
    return True


async def _move(
    core: Core,
    txn: Transaction,
    source: Found,
    target: Found,
    moved: Inode,
    victim: Inode | None,
    now: int,
) -> None:
    if victim is not None:
        if victim.type == DIRECTORY:
            await core.erase_inode(txn, target.ino, victim)
        else:
            await core.drop_link(txn, target.ino, victim, now)
        core.remove_entry(txn, target.parent, target.name, victim.type, now)
    core.remove_entry(txn, source.parent, source.name, moved.type, now)
    core.add_entry(txn, target.parent, target.name, source.ino, moved.type, now)
    txn.max(inode_key(source.ino) + SUB_CTIME, now)
    _reparent(txn, source.ino, moved, source.parent, target.parent)
    core.work.set()


def _swap(
    core: Core, txn: Transaction, source: Found, target: Found, moved: Inode, victim: Inode, now: int
) -> None:
    for where, ino, inode in ((source, target.ino, victim), (target, source.ino, moved)):
        txn.set(dirent_key(where.parent, where.name), encode(Dirent(1, ino, inode.type)))
        core.touch(txn, where.parent, now)
        txn.max(inode_key(ino) + SUB_CTIME, now)
    change = (victim.type == DIRECTORY) - (moved.type == DIRECTORY)
    if change and source.parent != target.parent:
        txn.add(inode_key(source.parent) + SUB_LINKS, change)
        txn.add(inode_key(target.parent) + SUB_LINKS, -change)
    _reparent(txn, source.ino, moved, source.parent, target.parent)
    _reparent(txn, target.ino, victim, target.parent, source.parent)


def _reparent(txn: Transaction, ino: int, inode: Inode, old: int, new: int) -> None:
    if inode.type == DIRECTORY and old != new:
        txn.set(inode_key(ino), encode(msgspec.structs.replace(inode, parent=new)))

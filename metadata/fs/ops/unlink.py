"""unlink, rmdir, remove_tree."""

from __future__ import annotations

import msgspec

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import Creds, OkReply
from ffs.proto.records import DIRECTORY, FLAG_REMOVED, Garbage, Inode
from metadata.fs import quota
from metadata.fs.core import Core
from metadata.fs.ops.lock import need_unlocked, need_unlocked_below
from metadata.fs.schema import (
    Reader,
    decode_dirent,
    dirent_span,
    encode,
    find_inode,
    garbage_key,
    get_inode,
    inode_key,
)
from metadata.fs.walk import Found, W, X, may, need, need_name, need_unsticky, owns, walk
from metadata.kv.contract import Transaction

PAGE = 500


async def unlink(core: Core, txn: Transaction, req: meta.Unlink) -> OkReply:
    await unlink_path(core, txn, req, req.path)
    return OkReply()


async def unlink_path(core: Core, txn: Transaction, req: meta.Request, path: bytes) -> None:
    creds = req.creds
    found = await walk(txn, creds, path, follow=False, entry=True)
    if found.special:
        raise errors.IsADirectory(None, path)
    need_name(found, path)
    if not found.ino:
        raise errors.NotFound(None, path)
    if found.slash:
        cls = errors.IsADirectory if found.type == DIRECTORY else errors.NotADirectory
        raise cls("a name to unlink doesn't end in /", path)
    inode = await get_inode(txn, found.ino)
    need(found.parent_inode, creds, W | X, path)
    need_unsticky(found.parent_inode, inode, creds, path)
    if inode.type == DIRECTORY:
        raise errors.IsADirectory("use rmdir", path)
    await need_unlocked(txn, req.client, found.parent, found.parent_inode, path)
    now = core.now_ns()
    await core.drop_link(txn, found.ino, inode, now)
    core.remove_entry(txn, found.parent, found.name, inode.type, now)
    core.work.set()


async def rmdir(core: Core, txn: Transaction, req: meta.RmDir) -> OkReply:
    creds, path = req.creds, req.path
    found = await walk(txn, creds, path, follow=False, entry=True)
    _refuse_special(found, path)
    need_name(found, path)
    if not found.ino:
        raise errors.NotFound(None, path)
    inode = await get_inode(txn, found.ino)
    need(found.parent_inode, creds, W | X, path)
    need_unsticky(found.parent_inode, inode, creds, path)
    if inode.type != DIRECTORY:
        raise errors.NotADirectory("use unlink", path)
    if await txn.range(*dirent_span(found.ino), 1):
        raise errors.NotEmpty(None, path)
    await need_unlocked(txn, req.client, found.parent, found.parent_inode, path)
    await need_unlocked(txn, req.client, found.ino, inode, path)
    # Whoever makes an entry in it reads its inode, which goes here: one of the two is a conflict.
    await core.erase_inode(txn, found.ino, inode)
    core.remove_entry(txn, found.parent, found.name, DIRECTORY, core.now_ns())
    return OkReply()


def _refuse_special(found: Found, path: bytes) -> None:
    if found.name == b"":
        raise errors.Busy("the root directory stays", path)
    if found.name == b".":
        raise errors.InvalidArgument("remove a directory by its name, not by .", path)
    if found.name == b"..":
        raise errors.NotEmpty(None, path)


async def remove_tree(core: Core, txn: Transaction, req: meta.RemoveTree, checked: int) -> OkReply:
    """Detaches a directory with all in it. `checked`: the inode that `check_tree` found removable by a user
    who doesn't own it."""
    creds, path = req.creds, req.path
    found = await walk(txn, creds, path, follow=False, entry=True)
    _refuse_special(found, path)
    need_name(found, path)
    if not found.ino:
        raise errors.NotFound(None, path)
    inode = await get_inode(txn, found.ino)
    if inode.type != DIRECTORY:
        if found.slash:
            raise errors.NotADirectory(None, path)
        await unlink_path(core, txn, req, path)
        return OkReply()
    need(found.parent_inode, creds, W | X, path)
    need_unsticky(found.parent_inode, inode, creds, path)
    if not owns(inode, creds) and checked != found.ino:
        raise errors.AccessDenied("the tree changed while it was looked through: try again", path)
    await need_unlocked(txn, req.client, found.parent, found.parent_inode, path)
    await need_unlocked(txn, req.client, found.ino, inode, path)
    await need_unlocked_below(txn, req.client, found.ino, path)
    now = core.now_ns()
    await quota.forget_with(txn, found.ino, inode)
    mark_removed(txn, found.ino, inode)
    txn.set(garbage_key(found.ino), encode(Garbage(type=DIRECTORY, since_ns=now)))
    core.remove_entry(txn, found.parent, found.name, DIRECTORY, now)
    core.work.set()
    return OkReply()


def mark_removed(txn: Transaction, ino: int, inode: Inode) -> None:
    """From now on nothing is made in this directory."""
    if not inode.flags & FLAG_REMOVED:
        txn.set(inode_key(ino), encode(msgspec.structs.replace(inode, flags=inode.flags | FLAG_REMOVED)))


async def find_tree(reader: Reader, creds: Creds, path: bytes) -> tuple[int, bool]:
    """(inode of the tree's root, whether it must be looked through): a user may remove what he owns; else
    every directory with something in it must let him. (0, False): the operation will say what is wrong."""
    found = await walk(reader, creds, path, follow=False, entry=True)
    if found.special or not found.ino or found.type != DIRECTORY:
        return 0, False
    inode = await get_inode(reader, found.ino)
    return found.ino, not owns(inode, creds)


async def check_page(
    reader: Reader, creds: Creds, ino: int, after: bytes, path: bytes
) -> tuple[list[int], bytes]:
    """Looks at one page of directory `ino`: (directories in it, name to go on after; b"" at the end)."""
    inode = await find_inode(reader, ino)
    if inode is None:
        return [], b""
    pairs = await reader.range(*dirent_span(ino, after), PAGE)
    if pairs and not may(inode, creds, W | X):
        raise errors.AccessDenied("a directory in the tree isn't writable", path)
    dirents = [decode_dirent(value) for _, value in pairs]
    if inode.mode & 0o1000 and not owns(inode, creds):
        for dirent in dirents:
            need_unsticky(inode, await get_inode(reader, dirent.ino), creds, path)
    inside = [dirent.ino for dirent in dirents if dirent.type == DIRECTORY]
    return inside, pairs[-1][0][9:] if len(pairs) == PAGE else b""

"""link (atomic publication too) and symlink."""

from __future__ import annotations

from typing import Final

from ffs import errors
from ffs.proto import meta
from ffs.proto.meta import MAX_PATH_BYTES
from ffs.proto.quota import COUNTING
from ffs.proto.records import DIRECTORY, SYMLINK, Inode
from metadata.fs import quota
from metadata.fs.core import Core, attributes
from metadata.fs.ops.lock import need_unlocked
from metadata.fs.ops.open import check_alive
from metadata.fs.ops.stat import resolve
from metadata.fs.schema import (
    SUB_CTIME,
    SUB_LINKS,
    encode,
    garbage_key,
    get_inode,
    inode_key,
    signed,
    writer_key,
)
from metadata.fs.walk import Found, W, X, need, need_name, need_unsticky, owns, walk
from metadata.kv.contract import Transaction

MAX_LINKS = 65000
_BORDER: Final = "a quota counts one of the two directories and not the other: copy the file"


async def link(core: Core, txn: Transaction, req: meta.Link) -> meta.StatReply:
    """A name for a file. What it replaces, if that is asked for, goes in the same transaction."""
    ino, inode = await resolve(txn, req.creds, req.source, req.ino, req.follow)
    path = req.target
    found = await walk(txn, req.creds, path, follow=False, entry=True)
    need_name(found, path)
    if found.special or (found.ino and not req.replace):
        raise errors.Exists(None, path)
    if found.slash:
        raise errors.NotFound("a file's name doesn't end in /", path)
    need(found.parent_inode, req.creds, W | X, path)
    check_alive(found.parent_inode, path)
    await need_unlocked(txn, req.client, found.parent, found.parent_inode, path)
    if inode.type == DIRECTORY:
        raise errors.NotPermitted("a directory has one name only", path)
    key = inode_key(ino)
    links = 1 + signed(await txn.get(key + SUB_LINKS))
    if req.ino:
        mine = await txn.get(writer_key(ino, req.client, req.handle)) is not None
        if links == 0 and not mine:
            raise errors.NotFound(f"inode {ino} has no name and isn't open here", path)
        if not (mine or owns(inode, req.creds)):
            raise errors.NotPermitted("linking by inode needs its write session or ownership", path)
    if links >= MAX_LINKS:
        raise errors.TooManyLinks(f"a file has at most {MAX_LINKS} names", path)
    if found.ino == ino:  # it has that name already
        return meta.StatReply(attributes=await attributes(txn.peek, ino, inode))
    inode = await _counted(txn, req, found, ino, inode, links)
    if found.ino:
        await _replace(core, txn, req, found)
    now = core.now_ns()
    if links == 0:
        txn.clear(garbage_key(ino))
    txn.add(key + SUB_LINKS, 1)
    txn.max(key + SUB_CTIME, now)
    core.add_entry(txn, found.parent, found.name, ino, inode.type, now, new=not found.ino)
    return meta.StatReply(attributes=await attributes(txn.peek, ino, inode))


async def _counted(
    txn: Transaction, req: meta.Link, found: Found, ino: int, inode: Inode, links: int
) -> Inode:
    """The file as the quota of the name's directory counts it. A file that one counts gets no name outside,
    and one that none counts none inside, unless it has no name yet or the quota still counts. CrossDevice,
    QuotaExceeded."""
    parent = found.parent_inode
    if not inode.quota and not parent.quota:
        return inode
    mine = await quota.find_quota(txn, inode.quota)
    if mine is None:
        theirs = await quota.find_quota(txn, parent.quota)
        if theirs is not None and links and theirs.state != COUNTING:
            raise errors.CrossDevice(_BORDER, req.source or None, req.target)
        return await quota.admit_file(txn, ino, inode, parent, req.target)
    if inode.quota != parent.quota and inode.quota != await quota.quota_of(txn, found.parent, parent):
        raise errors.CrossDevice(_BORDER, req.source or None, req.target)
    return inode


async def _replace(core: Core, txn: Transaction, req: meta.Link, found: Found) -> None:
    victim = await get_inode(txn, found.ino)
    need_unsticky(found.parent_inode, victim, req.creds, req.target)
    if victim.type == DIRECTORY:
        raise errors.IsADirectory("a file doesn't replace a directory", req.target)
    await core.drop_link(txn, found.ino, victim, core.now_ns())


async def symlink(core: Core, txn: Transaction, req: meta.SymLink) -> meta.StatReply:
    if not req.target:
        raise errors.NotFound("a symbolic link needs a target", req.path)
    if len(req.target) >= MAX_PATH_BYTES:
        raise errors.NameTooLong(f"a target has less than {MAX_PATH_BYTES} bytes", req.path)
    if b"\0" in req.target:
        raise errors.InvalidArgument("a target has no NUL byte", req.path)
    found = await walk(txn, req.creds, req.path, follow=False, entry=True)
    need_name(found, req.path)
    if found.ino:
        raise errors.Exists(None, req.path)
    if found.slash:
        raise errors.NotFound("a link's name doesn't end in /", req.path)
    need(found.parent_inode, req.creds, W | X, req.path)
    check_alive(found.parent_inode, req.path)
    await need_unlocked(txn, req.client, found.parent, found.parent_inode, req.path)
    ino = await core.inos.take()
    now = core.now_ns()
    parent = found.parent_inode
    label = await quota.admit(txn, parent, ino, req.path)
    inode: Inode = core.new_inode(SYMLINK, 0o777, req.creds, parent, now, target=req.target, quota=label)
    txn.set(inode_key(ino), encode(inode))
    core.add_entry(txn, found.parent, found.name, ino, SYMLINK, now)
    return meta.StatReply(attributes=await attributes(txn.peek, ino, inode))

"""chmod, chown, utime."""

from __future__ import annotations

import msgspec

from ffs import errors
from ffs.proto import meta
from ffs.proto.meta import SET_GID, SET_MODE, SET_MTIME, SET_MTIME_NOW, SET_UID
from ffs.proto.records import DIRECTORY
from metadata.fs.core import Core, attributes
from metadata.fs.ops.stat import resolve
from metadata.fs.schema import SUB_CTIME, SUB_MTIME, counter, encode, inode_key
from metadata.fs.walk import W, may, owns
from metadata.kv.contract import Transaction


async def setattr(core: Core, txn: Transaction, req: meta.SetAttr) -> meta.StatReply:
    ino, inode = await resolve(txn, req.creds, req.path, req.ino, req.follow)
    creds, path, what = req.creds, req.path, req.what
    if what >> 5:
        raise errors.InvalidArgument(f"attributes {what:#x} aren't known to this version", path)
    for name, number in (("uid", req.uid), ("gid", req.gid)):
        if not 0 <= number < 0xFFFF_FFFF:
            raise errors.InvalidArgument(f"{name} {number} is out of range", path)
    in_group = inode.gid == creds.gid or inode.gid in creds.groups
    changes: dict[str, int] = {}
    if what & SET_MODE:
        if not owns(inode, creds):
            raise errors.NotPermitted("only the owner may change the mode", path)
        mode = req.mode & 0o7777
        if creds.uid and not in_group:
            mode &= ~0o2000
        changes["mode"] = mode
    if what & SET_UID:
        if creds.uid and not (creds.uid == inode.uid == req.uid):
            raise errors.NotPermitted("only root may give a file away", path)
        changes["uid"] = req.uid
    if what & SET_GID:
        member = req.gid == creds.gid or req.gid in creds.groups
        if creds.uid and not (creds.uid == inode.uid and (member or req.gid == inode.gid)):
            raise errors.NotPermitted("only root, or the owner to a group of his own, may change it", path)
        changes["gid"] = req.gid
    if what & (SET_UID | SET_GID) and inode.type != DIRECTORY:
        mode = changes.get("mode", inode.mode)
        changes["mode"] = mode & ~(0o6000 if mode & 0o010 else 0o4000)
    if what & SET_MTIME and not owns(inode, creds):
        raise errors.NotPermitted("only the owner may set times", path)
    if what & SET_MTIME_NOW and not (owns(inode, creds) or may(inode, creds, W)):
        raise errors.AccessDenied("touching needs ownership or write permission", path)
    if what & SET_MTIME and not 0 <= req.mtime_ns < 1 << 63:
        raise errors.InvalidArgument(f"time {req.mtime_ns} ns is out of range", path)
    now = core.now_ns()
    key = inode_key(ino)
    if changes:
        inode = msgspec.structs.replace(inode, **changes)
        txn.set(key, encode(inode))
    if what & (SET_MTIME | SET_MTIME_NOW):
        txn.set(key + SUB_MTIME, counter(req.mtime_ns if what & SET_MTIME else now))
    if what:
        txn.max(key + SUB_CTIME, now)
    return meta.StatReply(attributes=await attributes(txn.peek, ino, inode))

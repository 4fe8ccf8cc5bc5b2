"""mkdir, with or without parents."""

from __future__ import annotations

from ffs import errors
from ffs.proto import meta
from ffs.proto.records import DIRECTORY, Inode
from metadata.fs import quota
from metadata.fs.core import Core, attributes
from metadata.fs.ops.lock import need_unlocked
from metadata.fs.ops.open import check_alive
from metadata.fs.schema import encode, get_inode, inode_key
from metadata.fs.walk import Found, W, X, need, need_name, walk, walk_missing
from metadata.kv.contract import Transaction


async def mkdir(core: Core, txn: Transaction, req: meta.MkDir) -> meta.StatReply:
    if req.parents:
        return await _make_all(core, txn, req)
    found = await walk(txn, req.creds, req.path, follow=False, entry=True)
    need_name(found, req.path)
    if found.ino:
        raise errors.Exists(None, req.path)
    ino, inode = await _make(core, txn, req, found, req.mode)
    return meta.StatReply(attributes=await attributes(txn.peek, ino, inode))


async def _make_all(core: Core, txn: Transaction, req: meta.MkDir) -> meta.StatReply:
    """Makes what is missing on the way, in one transaction; a directory that exists is fine."""
    while True:
        found = await walk_missing(txn, req.creds, req.path)
        if found.ino:
            if found.type != DIRECTORY:
                raise errors.Exists("something else than a directory has that name", req.path)
            return meta.StatReply(
                attributes=await attributes(txn.peek, found.ino, await get_inode(txn, found.ino))
            )
        # The walk sees the transaction's own writes: it gets one name further each time.
        await _make(core, txn, req, found, req.parent_mode if found.rest else req.mode)


async def _make(core: Core, txn: Transaction, req: meta.MkDir, found: Found, mode: int) -> tuple[int, Inode]:
    parent = found.parent_inode
    need(parent, req.creds, W | X, req.path)
    check_alive(parent, req.path)
    await need_unlocked(txn, req.client, found.parent, parent, req.path)
    layout = core.inherited_layout(parent.layout, req.layout)
    ino = await core.inos.take()
    now = core.now_ns()
    label = await quota.admit(txn, parent, ino, req.path)
    inode = core.new_inode(
        DIRECTORY, mode & 0o1777, req.creds, parent, now, parent=found.parent, layout=layout, quota=label
    )
    txn.set(inode_key(ino), encode(inode))
    core.add_entry(txn, found.parent, found.name, ino, DIRECTORY, now)
    return ino, inode

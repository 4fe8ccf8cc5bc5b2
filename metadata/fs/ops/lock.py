"""Locks: advisory ones (flock), and those of a directory's entries. docs/metadata.md, Locks.

A lock belongs to (client session, owner) and counts as long as the session lives: whoever meets one of a
session that is over takes it away. Who has to wait does so in the service that it asked (waiters.py).
"""

from __future__ import annotations

from typing import Final

import msgspec

from ffs import errors
from ffs.proto import locking
from ffs.proto.locking import LOCK_ENTRIES, LOCK_FLOCK, LockHolder
from ffs.proto.records import DIRECTORY, FLAG_LOCKED, FLAG_REMOVED, Inode, LockRecord
from metadata.fs.core import Core
from metadata.fs.ops.stat import resolve
from metadata.fs.schema import (
    ENTRIES_LOCKS,
    Reader,
    client_lock_key,
    decode_lock,
    decode_session,
    encode,
    entries_lock_key,
    find_inode,
    inode_key,
    lock_key,
    locks_span,
    session_key,
    split_entries_lock,
    split_lock,
    writers_span,
)
from metadata.fs.walk import R, W, X, may, need, owns
from metadata.kv.contract import Transaction

MAX_HOLDERS: Final = 1000  # of one inode: more shared locks are refused
MAX_ENTRIES_LOCKS: Final = 4000  # of directories: with more, no tree is removed


class Held(Exception):
    """Others have it: the request waits, and is judged again when something was released."""

    def __init__(self, ino: int) -> None:
        super().__init__(ino)
        self.ino = ino


async def lock(core: Core, txn: Transaction, req: locking.Lock, *, wait: bool) -> locking.LockReply:
    """Takes it if nobody is in the way; else raises Held if `wait`, or says who has it."""
    if req.kind not in (LOCK_FLOCK, LOCK_ENTRIES):
        raise errors.InvalidArgument(f"locks of kind {req.kind} aren't known to this version", req.path)
    ino, inode = await resolve(txn, req.creds, req.path, req.ino)
    if req.kind == LOCK_ENTRIES:
        if inode.type != DIRECTORY:
            raise errors.NotADirectory("only a directory's entries can be locked", req.path)
        need(inode, req.creds, W | X, req.path)
    elif not (may(inode, req.creds, R) or may(inode, req.creds, W) or await _writes(txn, req.client, ino)):
        raise errors.AccessDenied("a lock needs read or write permission", req.path)
    exclusive = req.exclusive or req.kind == LOCK_ENTRIES
    mine = lock_key(ino, req.kind, req.client, req.owner)
    held = await _living(txn, ino)
    others = [
        holder
        for holder in held
        if holder.kind == req.kind
        and (holder.client, holder.owner) != (req.client, req.owner)
        and (exclusive or holder.exclusive)
    ]
    if others:
        if wait:
            raise Held(ino)
        return locking.LockReply(ino=ino, granted=False, holders=others[:MAX_HOLDERS])
    if len(held) >= MAX_HOLDERS:
        raise errors.Busy(f"{len(held)} locks are held already", req.path)
    txn.set(mine, encode(LockRecord(exclusive=exclusive, since_ns=core.now_ns())))
    txn.set(client_lock_key(req.client, ino, req.kind, req.owner), b"")
    if req.kind == LOCK_ENTRIES:
        txn.set(entries_lock_key(ino, req.client, req.owner), b"")
    if req.kind == LOCK_ENTRIES and not inode.flags & FLAG_LOCKED:
        # Whoever makes or removes an entry reads this inode: one of the two is a conflict.
        txn.set(inode_key(ino), encode(msgspec.structs.replace(inode, flags=inode.flags | FLAG_LOCKED)))
    return locking.LockReply(ino=ino, granted=True, holders=[])


async def give_up_shared(txn: Transaction, req: locking.Lock, ino: int) -> bool:
    """Before waiting for an exclusive lock: a shared one of the same owner goes, or two who want to change
    theirs would wait for each other. Says whether there was one."""
    mine = lock_key(ino, req.kind, req.client, req.owner)
    if not req.exclusive or await txn.get(mine) is None:
        return False
    release(txn, ino, req.kind, req.client, req.owner)
    return True


async def unlock(core: Core, txn: Transaction, req: locking.Unlock) -> locking.LocksReply:
    if not req.force:
        ino = req.ino or (await resolve(txn, req.creds, req.path, 0))[0]
        data = await txn.get(lock_key(ino, req.kind, req.client, req.owner))
        if data is None:
            return locking.LocksReply(ino=ino, holders=[])
        await end(txn, ino, req.kind, req.client, req.owner)
        gone = decode_lock(data)
        holder = LockHolder(req.client, req.owner, req.kind, gone.exclusive, gone.since_ns)
        return locking.LocksReply(ino=ino, holders=[holder])
    ino, inode = await resolve(txn, req.creds, req.path, req.ino)
    if not owns(inode, req.creds):
        raise errors.NotPermitted("only the owner, or root, may end the locks of others", req.path)
    held = [holder for holder in await _living(txn, ino) if holder.kind == req.kind]
    for holder in held:
        await end(txn, ino, holder.kind, holder.client, holder.owner)
    return locking.LocksReply(ino=ino, holders=held)


async def get_locks(core: Core, reader: Reader, req: locking.GetLocks) -> locking.LocksReply:
    ino, _ = await resolve(reader, req.creds, req.path, req.ino)
    return locking.LocksReply(ino=ino, holders=await _holders(reader, ino))


async def need_unlocked(reader: Reader, client: int, ino: int, inode: Inode, path: bytes) -> None:
    """Raises Busy if another session holds the lock of this directory's entries."""
    if not inode.flags & FLAG_LOCKED:
        return
    for holder in await _holders(reader, ino):
        if holder.kind == LOCK_ENTRIES and holder.client != client:
            who = holder.label or f"client {holder.client}"
            raise errors.Busy(
                f"the directory is locked by {who}: wait for it, or end the lock (ffs flock --break)", path
            )


async def need_unlocked_below(txn: Transaction, client: int, top: int, path: bytes) -> None:
    """Raises Busy if another session holds the lock of a directory below `top`, which is to go whole.

    All locks of directories' entries in the cluster are looked at, each from below: they are few, a tree may
    be large. Who takes one meanwhile writes into the span that was read here: one of the two conflicts."""
    pairs = await txn.range(*ENTRIES_LOCKS, MAX_ENTRIES_LOCKS + 1)
    if len(pairs) > MAX_ENTRIES_LOCKS:
        raise errors.Busy(
            f"more than {MAX_ENTRIES_LOCKS} directories are locked: whether one of them lies in this tree "
            "can't be told",
            path,
        )
    outside: set[int] = set()  # directories that aren't below `top`
    for key, _ in pairs:
        ino, holder, owner = split_entries_lock(key)
        if holder == client:
            continue
        session = await txn.get(session_key(holder))
        if session is None or await txn.get(lock_key(ino, LOCK_ENTRIES, holder, owner)) is None:
            release(txn, ino, LOCK_ENTRIES, holder, owner)
            continue
        if await _lies_below(txn, ino, top, outside):
            who = decode_session(session).label or f"client {holder}"
            raise errors.Busy(
                f"a directory in the tree (inode {ino}) is locked by {who}: wait for it, or end the lock "
                "(ffs flock --break)",
                path,
            )


async def _lies_below(reader: Reader, ino: int, top: int, outside: set[int]) -> bool:
    """`outside` grows by what was met on a way that led elsewhere."""
    way: list[int] = []
    while ino not in outside:
        if ino == top:
            return True
        way.append(ino)
        inode = await find_inode(reader, ino)
        # A tree that was removed isn't where its root says; and the root directory is its own parent.
        if inode is None or inode.flags & FLAG_REMOVED or inode.parent in (0, ino):
            break
        ino = inode.parent
    outside.update(way)
    return False


async def _writes(reader: Reader, client: int, ino: int) -> bool:
    """Has the client the file open for writing? Its permission was judged then."""
    first, _ = writers_span(ino)
    mine = client.to_bytes(8, "big")
    return bool(await reader.range(first + mine, first + mine + b"\xff" * 9, 1))


async def _holders(reader: Reader, ino: int) -> list[LockHolder]:
    """Locks of sessions that live."""
    found = []
    for key, value in await reader.range(*locks_span(ino)):
        _, kind, client, owner = split_lock(key)
        session = await reader.get(session_key(client))
        if session is not None:
            record = decode_lock(value)
            label = decode_session(session).label
            found.append(LockHolder(client, owner, kind, record.exclusive, record.since_ns, label))
    return found


async def _living(txn: Transaction, ino: int) -> list[LockHolder]:
    """`_holders`; what sessions that are over have left goes."""
    holders = await _holders(txn, ino)
    living = {holder.client for holder in holders}
    for key, _ in await txn.range(*locks_span(ino)):
        _, kind, client, owner = split_lock(key)
        if client not in living:
            release(txn, ino, kind, client, owner)
    return holders


async def end(txn: Transaction, ino: int, kind: int, client: int, owner: int) -> None:
    """Ends a lock, and takes the mark off a directory."""
    release(txn, ino, kind, client, owner)
    if kind == LOCK_ENTRIES:
        inode = await find_inode(txn, ino)
        if inode is not None and inode.flags & FLAG_LOCKED:
            txn.set(inode_key(ino), encode(msgspec.structs.replace(inode, flags=inode.flags & ~FLAG_LOCKED)))


def release(txn: Transaction, ino: int, kind: int, client: int, owner: int) -> None:
    txn.clear(lock_key(ino, kind, client, owner))
    txn.clear(client_lock_key(client, ino, kind, owner))
    if kind == LOCK_ENTRIES:
        txn.clear(entries_lock_key(ino, client, owner))

"""The way in: a request comes, an operation runs - on a snapshot, or in a transaction with its retry slot -
and a reply goes. docs/metadata.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from ffs import errors
from ffs.proto import checks, locking, meta, xattrs
from ffs.proto.common import ErrorReply, Message, OkReply, error_reply
from ffs.proto.quota import GetQuota, ListQuotas, Reserve, SetQuota
from ffs.proto.records import DIRECTORY, ROOT_INO, Inode, StoreHeader
from metadata.fs import retry, sessions
from metadata.fs.core import Core, TrimPending
from metadata.fs.ops import (
    close,
    fsck,
    fsck_repair,
    kvspace,
    link,
    lock,
    mkdir,
    open,
    quota,
    readdir,
    rename,
    setattr,
    stat,
    truncate,
    unlink,
    xattr,
)
from metadata.fs.schema import (
    HEADER_KEY,
    KV_INDEX_COMPLETE,
    TICKET_KEY,
    Reader,
    decode_header,
    encode,
    inode_key,
)
from metadata.fs.tickets import Tickets, new_key
from metadata.fs.trim import finish
from metadata.kv.contract import Conflict, Snapshot, Store, TooOld, Transaction, UnknownResult

_log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

# struct.error and OverflowError: a number that doesn't fit into a key or counter.
FAILURES: Final = (OSError, msgspec.MsgspecError, struct.error, OverflowError)
BATCH_PAGE: Final = 64  # entries of a batch in one transaction

ReadOp = Callable[[Core, Any, Any], Awaitable[Message]]
ProofOp = Callable[[Core, Any, Any, int], Awaitable[Message]]

# Only reading: answered from a snapshot, at once where the store can.
READS: Final[dict[type[Message], ReadOp]] = {
    meta.Stat: stat.stat,
    meta.StatMany: stat.stat_many,
    meta.Access: stat.access,
    meta.ReadLink: stat.readlink,
    meta.StatFs: stat.statfs,
    meta.ReadDir: readdir.readdir,
    locking.GetLocks: lock.get_locks,
    xattrs.GetXattr: xattr.get,
    xattrs.ListXattr: xattr.list_names,
    GetQuota: quota.get_quota,
    ListQuotas: quota.list_quotas,
}
# Only reading, and giving a capability.
PROOFS: Final[dict[type[Message], ProofOp]] = {
    meta.Open: open.open_read,  # where it has no mutating flags
    meta.CapabilityRenew: truncate.renew,
    meta.KvOpen: kvspace.open_space,
}
# Writing, one transaction.
WRITES: Final[dict[type[Message], ReadOp]] = {
    meta.Close: close.close,
    meta.Fsync: close.fsync,
    meta.Append: close.append,
    meta.SetAttr: setattr.setattr,
    meta.MkDir: mkdir.mkdir,
    meta.Rename: rename.rename,
    meta.Link: link.link,
    meta.SymLink: link.symlink,
    meta.Unlink: unlink.unlink,
    meta.RmDir: unlink.rmdir,
    meta.SetKvSpace: kvspace.set_space,
    xattrs.SetXattr: xattr.set_value,
    xattrs.RemoveXattr: xattr.remove,
    checks.FsckRepair: fsck_repair.repair,
    SetQuota: quota.set_quota,
    Reserve: close.reserve,
}
# Writing, and giving a capability.
PROOF_WRITES: Final[dict[type[Message], ProofOp]] = {
    meta.Open: open.open_write,
    meta.Truncate: truncate.truncate,
    meta.KvCreate: kvspace.create,
}


async def format_store(
    store: Store,
    cluster_id: bytes,
    *,
    now_ns: int,
    root_uid: int = 0,
    root_gid: int = 0,
    root_mode: int = 0o755,
    created_by: str = "",
) -> StoreHeader:
    """Makes a store the one of a cluster, with its root directory; content with one that is already.

    WrongCluster if it is another's, VersionMismatch if a newer version made it."""
    if len(cluster_id) != 16:
        raise errors.InvalidArgument(f"a cluster id has 16 bytes, not {len(cluster_id)}")

    ticket_key = new_key()

    async def body(txn: Transaction) -> StoreHeader:
        data = await txn.get(HEADER_KEY)
        if data is not None:
            return decode_header(data)
        header = StoreHeader(cluster=cluster_id, created_ns=now_ns, created_by=created_by)
        root = Inode(
            type=DIRECTORY,
            mode=root_mode,
            uid=root_uid,
            gid=root_gid,
            btime_ns=now_ns,
            ctime_ns=now_ns,
            parent=ROOT_INO,
        )
        txn.set(HEADER_KEY, encode(header))
        txn.set(inode_key(ROOT_INO), encode(root))
        txn.set(KV_INDEX_COMPLETE, b"\x01")
        txn.set(TICKET_KEY, ticket_key)
        return header

    header = await store.run(body)
    check_header(header, cluster_id)
    return header


async def read_header(store: Store) -> StoreHeader | None:
    """What a store is; None if it's empty."""
    data = await store.read(lambda snap: snap.get(HEADER_KEY))
    if data is None:
        return None
    header = decode_header(data)
    check_header(header, header.cluster)
    return header


def check_header(header: StoreHeader, cluster_id: bytes) -> None:
    if header.incompat:
        raise errors.VersionMismatch(
            f"the metadata store was made by {header.created_by or 'a newer version'} with features "
            f"{header.incompat:#x} that this one doesn't know: update it"
        )
    if header.cluster != cluster_id:
        raise errors.WrongCluster(
            f"the metadata store belongs to cluster {header.cluster.hex()}, not {cluster_id.hex()}"
        )


class Namespace:
    """Serves the messages of ffs.proto.meta over a formatted store. One event loop; nothing blocks."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._tickets = Tickets(core.store)

    def try_handle_now(self, req: Message) -> Message | None:
        """The reply of a request that only reads, in microseconds; None if it takes `handle`."""
        if not self.core.store.reads_now:
            return None
        try:
            if not (isinstance(req, meta.Request) and req.creds.uid):
                return self._read_now(req)
            if not self._tickets.loaded:
                return None
            self._tickets.check(req)
            reply = self._read_now(req)
            if reply is not None:
                self._tickets.give(req, reply)
            return reply
        except TrimPending:
            return None
        except FAILURES as error:
            return error_reply(_as_error(error))

    def _read_now(self, req: Message) -> Message | None:
        core, store, kind = self.core, self.core.store, type(req)
        read = READS.get(kind)
        if read is not None:
            return store.read_now(lambda snap: read(core, snap, req))
        proof = PROOFS.get(kind)
        if proof is None or (kind is meta.Open and req.flags & open.MUTATING):  # type: ignore[attr-defined]
            return None
        ident = core.capabilities.take_now()
        if not ident:
            return None
        return store.read_now(lambda snap: proof(core, snap, req, ident))

    async def handle(self, req: Message) -> Message:
        """The reply of any request; an error of it is an ErrorReply too."""
        try:
            if not (isinstance(req, meta.Request) and req.creds.uid):
                return await self._trimmed(req)
            if not self._tickets.loaded:
                await self._tickets.load()
            self._tickets.check(req)
            reply = await self._trimmed(req)
            self._tickets.give(req, reply)
            return reply
        except FAILURES as error:
            return error_reply(_as_error(error))

    async def _trimmed(self, req: Message) -> Message:
        """`_dispatch`; truncations that it has to wait for are finished first."""
        while True:
            try:
                return await self._dispatch(req)
            except TrimPending as pending:
                await finish(self.core, pending.ino)

    async def _dispatch(self, req: Message) -> Message:
        core, kind = self.core, type(req)
        if kind in READS or (isinstance(req, meta.Open) and not req.flags & open.MUTATING):
            return await self._read(req)
        if isinstance(req, meta.Open | meta.Truncate | meta.KvCreate):
            ident = await core.capabilities.take()
            op = PROOF_WRITES[kind]
            reply = await self._mutate(req, lambda txn: op(core, txn, req, ident))
            if isinstance(reply, meta.TruncateReply) or (
                isinstance(reply, meta.Opened) and req.flags & meta.OPEN_TRUNC  # type: ignore[union-attr]
            ):
                await finish(core, reply.ino)
            return reply
        write = WRITES.get(kind)
        if write is not None and isinstance(req, meta.Request):
            return await self._mutate(req, lambda txn: write(core, txn, req))
        if kind in PROOFS:
            return await self._read(req)
        if isinstance(req, meta.RemoveTree):
            return await self._remove_tree(req)
        if isinstance(req, meta.OpenMany | meta.CloseMany | meta.UnlinkMany):
            return await self._batches(req)
        if isinstance(req, locking.Lock):
            return await self._lock(req)
        if isinstance(req, locking.Unlock):
            reply = await self._mutate(req, lambda txn: lock.unlock(core, txn, req))
            if isinstance(reply, locking.LocksReply):
                core.lock_waiters.released(reply.ino)
            return reply
        if isinstance(req, checks.FsckScan):
            return await fsck.scan(core, req)
        if isinstance(req, meta.SessionOpen):
            return await sessions.open_session(core, req)
        if isinstance(req, meta.SessionRenew):
            return await sessions.renew_session(core, req.client)
        if isinstance(req, meta.SessionClose):
            await sessions.end_session(core, req.client)
            return OkReply()
        raise errors.ProtocolError(f"the namespace doesn't serve {kind.__name__}")

    async def _read(self, req: Message) -> Message:
        core, kind = self.core, type(req)
        read = READS.get(kind)
        if read is not None:
            return await core.store.read(lambda snap: read(core, snap, req))
        proof = PROOFS[kind]
        ident = await core.capabilities.take()
        return await core.store.read(lambda snap: proof(core, snap, req, ident))

    async def _mutate(self, req: meta.Request, op: Callable[[Transaction], Awaitable[Message]]) -> Message:
        """Runs an operation in a transaction with the slot of its request."""
        retry.check_identity(req)

        async def body(txn: Transaction) -> Message:
            reply = await retry.first_answer(txn, req)
            if reply is None:
                try:
                    reply = await op(txn)
                except errors.FfsError as error:
                    if retry.stands(error):
                        raise _Refused(error) from error
                    raise
                retry.note(txn, req, reply)
            return reply

        try:
            return await self.core.store.run(body)
        except _Refused as refused:
            return await self._refuse(req, refused.error)

    async def _refuse(self, req: meta.Request, error: errors.FfsError) -> Message:
        """Notes a failure before it is told, so that the same request, held up on its way to another
        process, doesn't take effect afterwards. If that was quicker, its answer is the one."""

        async def body(txn: Transaction) -> Message:
            reply = await retry.first_answer(txn, req)
            if reply is None:
                reply = error_reply(error)
                retry.note(txn, req, reply)
            return reply

        return await self.core.store.run(body)

    # --- locks ---

    async def _lock(self, req: locking.Lock) -> Message:
        """Waits while others hold it, until the time that the request gives is up."""
        core = self.core
        loop = asyncio.get_running_loop()
        end = loop.time() + min(max(req.wait_ms, 0), locking.MAX_LOCK_WAIT_MS) / 1000
        while True:
            left = end - loop.time()
            take = partial(lock.lock, core, req=req, wait=left > 0)
            try:
                return await self._mutate(req, take)
            except lock.Held as held:
                ino = held.ino
            if await core.store.run(partial(self._give_up_shared, req, ino)):
                core.lock_waiters.released(ino)
            await core.lock_waiters.wait(ino, left)

    @staticmethod
    async def _give_up_shared(req: locking.Lock, ino: int, txn: Transaction) -> bool:
        if await retry.first_answer(txn, req) is not None:
            return False
        return await lock.give_up_shared(txn, req, ino)

    # --- trees ---

    async def _remove_tree(self, req: meta.RemoveTree) -> Message:
        core = self.core
        checked = 0
        retry.check_identity(req)

        async def body(txn: Transaction) -> Message:
            return await unlink.remove_tree(core, txn, req, checked)

        async def look(snap: Snapshot) -> tuple[int, bool]:
            with contextlib.suppress(errors.FfsError):
                return await unlink.find_tree(snap, req.creds, req.path)
            return 0, False  # the operation will raise it, unless it was done already

        root, doubtful = await core.store.read(look)
        if doubtful:
            try:
                await self._check_tree(req, root)
                checked = root
            except errors.FfsError as error:
                if not retry.stands(error):
                    raise
                return await self._refuse(req, error)
        return await self._mutate(req, body)

    async def _check_tree(self, req: meta.RemoveTree, root: int) -> None:
        """Walks a tree by pages, each a snapshot of its own."""
        stack = [root]
        while stack:
            ino, after = stack.pop(), b""
            while True:
                start = after

                async def page(snap: Reader, ino: int = ino, start: bytes = start) -> tuple[list[int], bytes]:
                    return await unlink.check_page(snap, req.creds, ino, start, req.path)

                inside, after = await self.core.store.read(page)
                stack += inside
                if not after:
                    break

    # --- batches ---

    async def _batches(self, req: meta.OpenMany | meta.CloseMany | meta.UnlinkMany) -> Message:
        core = self.core
        if isinstance(req, meta.OpenMany):
            first = 0
            if any(entry.flags & open.MUTATING for entry in req.entries):
                return meta.OpenManyReply(results=await self._open_many(req))
            idents = [await core.capabilities.take() for _ in req.entries]

            async def read(snap: Snapshot) -> list[Any]:
                return [
                    await _entry(open.open_read(core, snap, self._open_of(req, entry), idents[index]))
                    for index, entry in enumerate(req.entries, first)
                ]

            _check_batch(req.entries)
            return meta.OpenManyReply(results=await core.store.read(read))
        if isinstance(req, meta.CloseMany):

            async def end(txn: Transaction, index: int) -> Message:
                return await close.end_one(core, txn, req.client, req.entries[index])

            return meta.CloseManyReply(results=await self._batch(req, req.entries, end))

        async def remove(txn: Transaction, index: int) -> Message:
            await unlink.unlink_path(core, txn, req, req.paths[index])
            return OkReply()

        return meta.UnlinkManyReply(results=await self._batch(req, req.paths, remove))

    @staticmethod
    def _open_of(req: meta.OpenMany, entry: meta.OpenEntry) -> meta.Open:
        return meta.Open(
            client=req.client,
            slot=req.slot,
            sequence=req.sequence,
            creds=req.creds,
            path=entry.path,
            flags=entry.flags,
            mode=entry.mode,
            layout=req.layout,
        )

    async def _open_many(self, req: meta.OpenMany) -> list[Any]:
        core = self.core

        async def one(txn: Transaction, index: int) -> Message:
            entry = req.entries[index]
            ident = await core.capabilities.take()
            return await open.open_write(core, txn, self._open_of(req, entry), ident, index)

        results = await self._batch(req, req.entries, one)
        for entry, reply in zip(req.entries, results, strict=True):
            if entry.flags & meta.OPEN_TRUNC and isinstance(reply, meta.Opened):
                await finish(core, reply.ino)
        return results

    async def _batch(
        self,
        req: meta.Request,
        entries: Sequence[object],
        one: Callable[[Transaction, int], Coroutine[Any, Any, Message]],
    ) -> list[Any]:
        """Runs a batch page by page, each page a transaction that notes the outcomes of its entries."""
        retry.check_identity(req)
        _check_batch(entries)
        results: list[Any] = []
        for page, begin in enumerate(range(0, len(entries), BATCH_PAGE)):
            indexes = range(begin, min(begin + BATCH_PAGE, len(entries)))

            async def body(txn: Transaction, page: int = page, indexes: range = indexes) -> list[Message]:
                replies = await retry.first_page(txn, req, page)
                if replies is None:
                    replies = [await _entry(one(txn, index)) for index in indexes]
                    retry.note_page(txn, req, page, replies)
                return replies

            while True:
                try:
                    results += await self.core.store.run(body)
                    break
                except TrimPending as pending:
                    await finish(self.core, pending.ino)
        return results


class _Refused(Exception):
    """What an operation answered, while its transaction is thrown away."""

    def __init__(self, error: errors.FfsError) -> None:
        super().__init__(error)
        self.error = error


def _check_batch(entries: Sequence[object]) -> None:
    if len(entries) > meta.MAX_BATCH:
        raise errors.InvalidArgument(f"a batch has at most {meta.MAX_BATCH} entries, not {len(entries)}")


async def _entry(work: Coroutine[Any, Any, Message]) -> Message | ErrorReply:
    """An entry's reply or its error; what concerns the whole transaction goes through."""
    try:
        return await work
    except (Conflict, TooOld, UnknownResult, errors.DeviceFailed, errors.ShutDown):
        raise
    except FAILURES as error:
        return error_reply(_as_error(error))


def _as_error(error: Exception) -> OSError:
    """What may go wrong in an operation, as what is said of it."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, msgspec.MsgspecError):
        _log.error("a record of the metadata store can't be read: %s", error)
        return errors.Damaged(f"a record of the metadata store can't be read: {error}")
    return errors.InvalidArgument(f"a number in the request is out of range: {error}")

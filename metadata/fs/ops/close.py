"""close, fsync, append: what a writer tells of its file's length."""

from __future__ import annotations

from ffs import errors
from ffs.layout import MAX_FILE_BYTES
from ffs.proto import meta
from ffs.proto.quota import NO_QUOTA, Reserve, Reserved
from ffs.proto.records import Inode
from metadata.fs import quota
from metadata.fs.core import Core
from metadata.fs.ops.open import need_trimmed
from metadata.fs.schema import (
    SUB_APPEND,
    SUB_DOUBTFUL,
    SUB_LENGTH,
    client_writer_key,
    counter,
    decode_inode,
    get_inode,
    inode_key,
    unsigned,
    writer_key,
)
from metadata.kv.contract import Transaction


async def close(core: Core, txn: Transaction, req: meta.Close) -> meta.LengthReply:
    return await end_one(core, txn, req.client, req)


async def fsync(core: Core, txn: Transaction, req: meta.Fsync) -> meta.LengthReply:
    await need_writer(txn, req.client, req.ino, req.handle)
    reply, inode = await _merge(core, txn, req)
    if inode.quota:
        reply.reserved = await quota.report(txn, req.ino, inode, reply.length)
    return reply


async def end_one(
    core: Core, txn: Transaction, client: int, req: meta.Close | meta.CloseEntry
) -> meta.LengthReply:
    """Merges the length and ends the write session."""
    await need_writer(txn, client, req.ino, req.handle)
    reply, inode = await _merge(core, txn, req)
    txn.clear(writer_key(req.ino, client, req.handle))
    txn.clear(client_writer_key(client, req.ino, req.handle))
    if inode.quota:
        await quota.writer_ends(txn, req.ino, inode)
    core.work.set()  # it may have been the last hold on an unlinked file
    return reply


async def need_writer(txn: Transaction, client: int, ino: int, handle: int) -> None:
    if await txn.get(writer_key(ino, client, handle)) is None:
        raise errors.BadHandle(f"write session {handle} of inode {ino} is over: open the file again")


async def _merge(
    core: Core, txn: Transaction, req: meta.Close | meta.CloseEntry | meta.Fsync
) -> tuple[meta.LengthReply, Inode]:
    """Takes a length as a maximum, if its epoch is the file's, or the one before: by one it goes up when
    another writer is settled, which cuts nothing; by a truncation it goes up by two."""
    if not 0 <= req.length <= MAX_FILE_BYTES:
        raise errors.TooLarge(f"a file's length is 0 to {MAX_FILE_BYTES} bytes, not {req.length}")
    key = inode_key(req.ino)
    data = await txn.get(key)
    if data is None:
        raise errors.NotFound(f"inode {req.ino} is gone")
    inode = decode_inode(data)
    epoch = inode.epoch
    length = unsigned(await txn.peek(key + SUB_LENGTH))
    if req.written and req.epoch > epoch:
        raise errors.InvalidArgument(f"epoch {req.epoch} of inode {req.ino} was never given; it is {epoch}")
    if req.doubtful:
        txn.max(key + SUB_DOUBTFUL, 1)
    if not req.written:
        return meta.LengthReply(length=length, epoch=epoch), inode
    if req.epoch < epoch - 1:
        await need_trimmed(txn, req.ino)  # the answer tells the new epoch
        return meta.LengthReply(length=length, epoch=epoch, merged=False), inode
    txn.max(key + SUB_LENGTH, req.length)
    core.touch(txn, req.ino, core.now_ns())
    return meta.LengthReply(length=max(length, req.length), epoch=epoch), inode


async def append(core: Core, txn: Transaction, req: meta.Append) -> meta.AppendReply:
    """Reserves a range beyond the length and all earlier reservations."""
    if req.length < 0:
        raise errors.InvalidArgument(f"can't append {req.length} bytes")
    await need_writer(txn, req.client, req.ino, req.handle)
    key = inode_key(req.ino)
    data = await txn.get(key)
    if data is None:
        raise errors.NotFound(f"inode {req.ino} is gone")
    offset = max(unsigned(await txn.get(key + SUB_LENGTH)), unsigned(await txn.get(key + SUB_APPEND)))
    end = offset + req.length
    if end > MAX_FILE_BYTES:
        raise errors.TooLarge(f"a file ends at {MAX_FILE_BYTES} bytes; {offset} + {req.length} is beyond")
    inode, reserved = decode_inode(data), NO_QUOTA
    if inode.quota:
        reserved = await quota.reserve(txn, req.ino, inode, end, ahead=False)  # the next one asks anyway
    txn.set(key + SUB_APPEND, counter(end))
    return meta.AppendReply(offset=offset, epoch=inode.epoch, reserved=reserved)


async def reserve(core: Core, txn: Transaction, req: Reserve) -> Reserved:
    """Room for what a writer is about to write, unless the file was truncated since it last looked."""
    if not 0 <= req.end <= MAX_FILE_BYTES:
        raise errors.TooLarge(f"a file ends at 0 to {MAX_FILE_BYTES} bytes, not {req.end}")
    await need_writer(txn, req.client, req.ino, req.handle)
    inode = await get_inode(txn, req.ino)
    reserved = NO_QUOTA
    if req.epoch > inode.epoch:
        raise errors.InvalidArgument(
            f"epoch {req.epoch} of inode {req.ino} was never given; it is {inode.epoch}"
        )
    if req.epoch == inode.epoch:
        reserved = await quota.reserve(txn, req.ino, inode, req.end)
    else:
        await need_trimmed(txn, req.ino)  # the answer tells the new epoch
    return Reserved(reserved=reserved, epoch=inode.epoch)

"""truncate, and the renewal of capabilities, which hands out the new epoch."""

from __future__ import annotations

from ffs import errors
from ffs.layout import MAX_FILE_BYTES
from ffs.proto import meta
from ffs.proto.common import RIGHT_READ, RIGHT_WRITE
from ffs.proto.records import DIRECTORY, FILE, KV_SPACE
from metadata.fs import quota
from metadata.fs.core import Core
from metadata.fs.ops.close import need_writer
from metadata.fs.ops.open import cut, need_trimmed
from metadata.fs.ops.stat import resolve
from metadata.fs.schema import Reader, get_inode, session_key, writer_key
from metadata.fs.walk import R, W, may, need
from metadata.kv.contract import Transaction


async def truncate(core: Core, txn: Transaction, req: meta.Truncate, capability: int) -> meta.TruncateReply:
    ino, inode = await resolve(txn, req.creds, req.path, req.ino)
    if inode.type == DIRECTORY:
        raise errors.IsADirectory(None, req.path)
    if inode.type != FILE:
        raise errors.InvalidArgument("only a file has a length to set", req.path)
    if req.length < 0:
        raise errors.InvalidArgument(f"a length isn't negative: {req.length}", req.path)
    if req.length > MAX_FILE_BYTES:
        raise errors.TooLarge(f"a file has at most {MAX_FILE_BYTES} bytes, not {req.length}", req.path)
    if req.handle:
        await need_writer(txn, req.client, ino, req.handle)
    else:
        need(inode, req.creds, W, req.path)
    await need_trimmed(txn, ino)
    inode = await cut(core, txn, ino, inode, req.length, req.path)
    reply = meta.TruncateReply(ino=ino, length=req.length, epoch=inode.epoch)
    if inode.quota and await quota.find_quota(txn, inode.quota) is not None:
        reply.reserved = req.length
    if req.handle:
        rights = RIGHT_READ | RIGHT_WRITE if may(inode, req.creds, R) else RIGHT_WRITE
        reply.capability, reply.capability_expiry_ms = core.capability(
            capability, req.client, ino, inode, rights
        )
    return reply


async def renew(
    core: Core, reader: Reader, req: meta.CapabilityRenew, capability: int
) -> meta.CapabilityReply:
    """A fresh capability. Writing a file needs its session; reading, and a KV space, are judged by the mode,
    as at open."""
    inode = await get_inode(reader, req.ino)
    if inode.type not in (FILE, KV_SPACE):
        raise errors.InvalidArgument(f"inode {req.ino} has no chunks")
    if not req.rights or req.rights & ~(RIGHT_READ | RIGHT_WRITE):
        raise errors.InvalidArgument(f"rights {req.rights}: 1 to read, 2 to write, 3 for both")
    want = (R if req.rights & RIGHT_READ else 0) | (W if req.rights & RIGHT_WRITE else 0)
    if inode.type == FILE and req.handle:
        # The write session of a dead client stands until it is settled; the epoch goes up before. Under that
        # one the client could still write, at servers that haven't heard of its fence yet.
        if await reader.get(session_key(req.client)) is None:
            raise errors.Fenced(f"client session {req.client} is over: connect again")
        if await reader.get(writer_key(req.ino, req.client, req.handle)) is None:
            raise errors.BadHandle(
                f"write session {req.handle} of inode {req.ino} is over: open the file again"
            )
        if req.rights & RIGHT_READ:
            # The session says that writing was allowed, no more: reading is judged as for readers.
            need(inode, req.creds, R, b"")
    elif inode.type == FILE and req.rights & RIGHT_WRITE:
        raise errors.BadHandle("writing a file needs the handle of its write session")
    else:
        need(inode, req.creds, want, b"")
    await need_trimmed(reader, req.ino)
    proof, expiry = core.capability(capability, req.client, req.ino, inode, req.rights)
    return meta.CapabilityReply(capability=proof, capability_expiry_ms=expiry, epoch=inode.epoch)

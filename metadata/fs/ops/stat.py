"""stat, stat_many, access, statfs, readlink."""

from __future__ import annotations

from ffs import errors
from ffs.proto import meta
from ffs.proto.cluster import ROLE_BULK
from ffs.proto.common import Creds, ErrorReply, OkReply, error_reply
from ffs.proto.records import SYMLINK, Inode
from metadata.fs import quota
from metadata.fs.core import Core, attributes
from metadata.fs.many import attributes_many, find_many
from metadata.fs.schema import Reader, decode_inode, inode_key
from metadata.fs.walk import may, walk
from metadata.kv.contract import Conflict, Snapshot, TooOld


async def resolve(
    reader: Reader, creds: Creds, path: bytes, ino: int, follow: bool = True
) -> tuple[int, Inode]:
    """The inode of a request that names it by id or by path. NotFound."""
    if not ino:
        found = await walk(reader, creds, path, follow)
        ino = found.ino
        if not ino:
            raise errors.NotFound(None, path)
    data = await reader.get(inode_key(ino))
    if data is None:
        raise errors.NotFound(f"inode {ino} is gone", path or None)
    return ino, decode_inode(data)


async def stat(core: Core, reader: Reader, req: meta.Stat) -> meta.StatReply:
    ino, inode = await resolve(reader, req.creds, req.path, req.ino, req.follow)
    return meta.StatReply(attributes=await attributes(reader.get, ino, inode))


async def stat_many(core: Core, snap: Snapshot, req: meta.StatMany) -> meta.StatManyReply:
    """All of one snapshot."""
    if len(req.paths) > meta.MAX_BATCH:
        raise errors.InvalidArgument(f"a batch has at most {meta.MAX_BATCH} entries, not {len(req.paths)}")
    results: list[meta.StatReply | ErrorReply] = []
    plain = await find_many(snap, req.creds, req.paths, req.follow)
    known = await attributes_many(snap, filter(None, plain))
    for ino, path in zip(plain, req.paths, strict=True):
        told = known.get(ino)
        if told is not None:
            results.append(meta.StatReply(attributes=told))
            continue
        try:
            ino, inode = await resolve(snap, req.creds, path, 0, req.follow)
            results.append(meta.StatReply(attributes=await attributes(snap.get, ino, inode)))
        except (Conflict, TooOld):
            raise
        except errors.FfsError as error:
            results.append(error_reply(error))
    return meta.StatManyReply(results=results)


async def access(core: Core, reader: Reader, req: meta.Access) -> OkReply:
    if not 0 <= req.want <= 7:
        raise errors.InvalidArgument(f"access mode {req.want}: a sum of 4, 2 and 1", req.path)
    _, inode = await resolve(reader, req.creds, req.path, 0)
    if not may(inode, req.creds, req.want):
        raise errors.AccessDenied(None, req.path)
    return OkReply()


async def readlink(core: Core, reader: Reader, req: meta.ReadLink) -> meta.ReadLinkReply:
    _, inode = await resolve(reader, req.creds, req.path, 0, follow=False)
    if inode.type != SYMLINK:
        raise errors.InvalidArgument("not a symbolic link", req.path)
    return meta.ReadLinkReply(target=inode.target)


async def statfs(core: Core, reader: Reader, req: meta.StatFs) -> meta.StatFsReply:
    _, inode = await resolve(reader, req.creds, req.path, req.ino)
    table = inode.layout.table if inode.layout else 0
    view = core.cluster.table(table) if table else core.default_table(ROLE_BULK, req.path)
    if view is None:
        raise errors.ChainUnavailable(f"chain table {table} isn't known here yet", req.path)
    total, free = core.cluster.space_bytes(view.id)
    size = (inode.layout.chunk_size if inode.layout else 0) or view.chunk_size
    reply = meta.StatFsReply(
        total_bytes=total, free_bytes=free, chunk_size=size, table=view.id, replicas=view.replicas
    )
    record = await quota.find_quota(reader, inode.quota)
    if record is not None and record.limit_bytes:
        used, _ = await quota.usage(reader.get, inode.quota)
        reply.quota_bytes = record.limit_bytes
        reply.quota_free_bytes = max(record.limit_bytes - used, 0)
    return reply

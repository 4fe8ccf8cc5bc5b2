"""readdir: one page of a directory, a snapshot by itself."""

from __future__ import annotations

from ffs import errors
from ffs.proto import meta
from ffs.proto.records import DIRECTORY
from metadata.fs.core import Core
from metadata.fs.many import attributes_many
from metadata.fs.ops.stat import resolve
from metadata.fs.schema import (
    DIRENT_PREFIX_BYTES,
    decode_dirent,
    dirent_span,
)
from metadata.fs.walk import R, X, may, need
from metadata.kv.contract import Snapshot


async def readdir(core: Core, snap: Snapshot, req: meta.ReadDir) -> meta.ReadDirReply:
    if not 1 <= req.limit <= meta.MAX_PAGE:
        raise errors.InvalidArgument(f"a page has 1 to {meta.MAX_PAGE} entries, not {req.limit}", req.path)
    ino, inode = await resolve(snap, req.creds, req.path, req.ino)
    if inode.type != DIRECTORY:
        raise errors.NotADirectory(None, req.path)
    need(inode, req.creds, R, req.path)
    pairs = await snap.range(*dirent_span(ino, req.after), req.limit + 1)
    more = len(pairs) > req.limit
    if more:
        pairs.pop()
    dirents = [decode_dirent(value) for _, value in pairs]
    entries = [
        meta.DirEntry(pair[0][DIRENT_PREFIX_BYTES:], dirent.ino, dirent.type)
        for pair, dirent in zip(pairs, dirents, strict=True)
    ]
    if req.attributes and may(inode, req.creds, X):
        known = await attributes_many(snap, [dirent.ino for dirent in dirents])
        for entry in entries:
            entry.attributes = known.get(entry.ino)
    return meta.ReadDirReply(ino=ino, entries=entries, more=more)

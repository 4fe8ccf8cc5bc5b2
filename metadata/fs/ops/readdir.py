"""readdir: one page of a directory, a snapshot by itself."""

from __future__ import annotations

from ffs import errors
from ffs.proto import meta
from ffs.proto.records import DIRECTORY
from metadata.fs.core import Core, attributes
from metadata.fs.ops.stat import resolve
from metadata.fs.schema import (
    DIRENT_PREFIX_BYTES,
    Reader,
    decode_dirent,
    decode_inode,
    dirent_span,
    inode_key,
)
from metadata.fs.walk import R, X, may, need


async def readdir(core: Core, reader: Reader, req: meta.ReadDir) -> meta.ReadDirReply:
    if not 1 <= req.limit <= meta.MAX_PAGE:
        raise errors.InvalidArgument(f"a page has 1 to {meta.MAX_PAGE} entries, not {req.limit}", req.path)
    ino, inode = await resolve(reader, req.creds, req.path, req.ino)
    if inode.type != DIRECTORY:
        raise errors.NotADirectory(None, req.path)
    need(inode, req.creds, R, req.path)
    pairs = await reader.range(*dirent_span(ino, req.after), req.limit + 1)
    more = len(pairs) > req.limit
    if more:
        pairs.pop()
    entries = []
    for key, value in pairs:
        dirent = decode_dirent(value)
        entries.append(meta.DirEntry(key[DIRENT_PREFIX_BYTES:], dirent.ino, dirent.type))
    if req.attributes and may(inode, req.creds, X):
        for entry in entries:
            data = await reader.get(inode_key(entry.ino))
            if data is not None:
                entry.attributes = await attributes(reader.get, entry.ino, decode_inode(data))
    return meta.ReadDirReply(ino=ino, entries=entries, more=more)

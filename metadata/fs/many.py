"""Looking at many inodes at once: few reads of a snapshot for all of them, and no coroutine for each.

An inode and its counters lie together, and inodes that were made together lie together, so a run of
neighbours is one range. docs/metadata.md, Speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

from ffs import errors
from ffs.proto.common import Creds
from ffs.proto.meta import MAX_NAME_BYTES, Attributes
from ffs.proto.records import DIRECTORY, SYMLINK
from metadata.fs.core import SUB_SIZE, attributes_of
from metadata.fs.schema import (
    SUB_CTIME,
    SUB_LINKS,
    SUB_MTIME,
    decode_dirent,
    decode_inode,
    dirent_key,
    inode_key,
)
from metadata.fs.walk import X, may, walk
from metadata.kv.contract import Snapshot

GAP: Final = 4  # ids: neighbours of a run lie no further apart


async def attributes_many(snap: Snapshot, inos: Iterable[int]) -> dict[int, Attributes]:
    """What stat tells of each; those that are gone are missing."""
    wanted = sorted(set(inos))
    table = dict(chain.from_iterable(await snap.ranges(_runs(wanted))))
    get = table.get
    found: dict[int, Attributes] = {}
    for ino in wanted:
        key = inode_key(ino)
        data = get(key)
        if data is not None:
            inode = decode_inode(data)
            size = SUB_SIZE.get(inode.type)
            found[ino] = attributes_of(
                ino,
                inode,
                get(key + SUB_LINKS),
                get(key + SUB_MTIME),
                get(key + SUB_CTIME),
                None if size is None else get(key + size),
            )
    return found


def _runs(inos: Sequence[int]) -> list[tuple[bytes, bytes]]:
    """Ranges that hold these inodes (in order) with their counters, and few others."""
    spans: list[tuple[bytes, bytes]] = []
    first = last = 0
    for ino in inos:
        if last and (ino - last > GAP or ino >> 8 != last >> 8):
            spans.append((inode_key(first), inode_key(last) + b"\xff"))
            first = 0
        first = first or ino
        last = ino
    if last:
        spans.append((inode_key(first), inode_key(last) + b"\xff"))
    return spans


async def find_many(snap: Snapshot, creds: Creds, paths: Sequence[bytes], follow: bool) -> list[int]:
    """The inode of each path where its last name is a plain entry of a directory that `creds` may search;
    0 where it takes a walk of its own to say what is there: a symbolic link, an unusual name, an error."""
    parents: dict[bytes, int] = {}
    keys: list[bytes] = []
    at: list[int] = []
    for index, path in enumerate(paths):
        above, _, name = path.rpartition(b"/")
        usual = path.startswith(b"/") and len(path) <= MAX_NAME_BYTES and b"\0" not in path
        if not usual or name in (b"", b".", b".."):
            continue
        parent = parents.get(above)
        if parent is None:
            parent = parents[above] = await _search(snap, creds, above or b"/")
        if parent:
            keys.append(dirent_key(parent, name))
            at.append(index)
    found = [0] * len(paths)
    for index, data in zip(at, await snap.get_many(keys), strict=True):
        if data is not None:
            entry = decode_dirent(data)
            if not (follow and entry.type == SYMLINK):
                found[index] = entry.ino
    return found


async def _search(snap: Snapshot, creds: Creds, path: bytes) -> int:
    """The directory at `path`, 0 if it can't be searched, for whatever reason."""
    try:
        ino = (await walk(snap, creds, path)).ino
        data = await snap.get(inode_key(ino)) if ino else None
    except (errors.NotFound, errors.NotADirectory, errors.AccessDenied, errors.SymlinkLoop):
        return 0
    except (errors.NameTooLong, errors.InvalidArgument):
        return 0
    if data is None:
        return 0
    inode = decode_inode(data)
    return ino if inode.type == DIRECTORY and may(inode, creds, X) else 0

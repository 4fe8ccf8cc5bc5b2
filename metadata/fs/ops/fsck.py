"""fsck: reading pages for a check, and looking at findings again. docs/guides/fsck.md.

A page is judged from one snapshot, so what it finds is so at one moment. What takes several pages - the
entries of a large directory, how many names an inode has - is guarded by a stamp: it counts only if the
counters and times of the inode haven't changed meanwhile. fsck_repair.py mends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from ffs import errors
from ffs.proto import checks, meta
from ffs.proto.checks import FsckFinding, FsckPage
from ffs.proto.records import DIRECTORY, ROOT_INO
from metadata.fs import fsck
from metadata.fs.core import Core
from metadata.fs.fsck import Entry
from metadata.fs.ids import given_out
from metadata.fs.ops import fsck_chunks, fsck_quota
from metadata.fs.ops import fsck_pages as pages
from metadata.fs.schema import (
    Reader,
    decode_dirent,
    decode_inode,
    decode_kv_index,
    decode_quota,
    dirent_span,
    find_inode,
    garbage_key,
    inode_key,
    inode_span,
)
from metadata.kv.contract import Snapshot

MAX_DEPTH: Final = 64  # how far up, and among how many siblings, a path is looked for
MAX_SIBLINGS: Final = 5000


async def scan(core: Core, req: checks.FsckScan) -> FsckPage:
    """One page. Raises NotPermitted, InvalidArgument."""
    read = core.store.read
    await read(lambda snap: need_administrator(snap, req))
    after = req.after
    if req.what == checks.SCAN_ENTRIES:
        return await read(lambda snap: pages.entries(snap, after, (b"d", b"e")))
    if req.what == checks.SCAN_DIRECTORY:
        return await read(lambda snap: pages.entries(snap, after, dirent_span(req.ino), req.ino))
    if req.what == checks.SCAN_INODES:
        return await read(lambda snap: pages.inodes(snap, after or b"i"))
    if req.what == checks.SCAN_SESSIONS:
        return await read(lambda snap: pages.sessions(snap, after or b"L"))
    if req.what == checks.SCAN_SPACES:
        return await read(lambda snap: pages.spaces(snap, after or b"q"))
    if req.what in (checks.SCAN_NAMES, checks.SCAN_STATE):
        if len(req.only) % pages.ID.size or len(req.only) > checks.MAX_FSCK_ONLY * pages.ID.size:
            raise errors.InvalidArgument(f"give at most {checks.MAX_FSCK_ONLY} inode ids of 8 bytes")
        only = [ino for (ino,) in pages.ID.iter_unpack(req.only)]
        if req.what == checks.SCAN_STATE:
            return await read(lambda snap: pages.states(snap, only))
        return await read(lambda snap: pages.names(snap, after or b"d", frozenset(only)))
    if req.what == checks.SCAN_CHUNKS:
        return await fsck_chunks.chunks_of(core, req)
    if req.what == checks.SCAN_QUOTAS:
        return await read(lambda snap: fsck_quota.quotas(snap, after))
    if req.what == checks.SCAN_CHARGES:
        return await read(lambda snap: fsck_quota.charges(snap, after))
    if req.what == checks.SCAN_AGAIN:
        return await _again(core, req.findings)
    raise errors.InvalidArgument(f"this version can't scan for {req.what}")


async def need_administrator(reader: Reader, req: meta.Request) -> None:
    """root, or who owns the root directory. (Users with tokens don't come so far: metadata.server.)"""
    root = await find_inode(reader, ROOT_INO)
    if req.creds.uid != 0 and (root is None or root.uid != req.creds.uid):
        raise errors.NotPermitted("fsck is for root, and for the owner of /")


# --- again ----------------------------------------------------------------------------------


async def _again(core: Core, findings: Sequence[FsckFinding]) -> FsckPage:
    if len(findings) > checks.MAX_FSCK_FINDINGS:
        raise errors.InvalidArgument(
            f"at most {checks.MAX_FSCK_FINDINGS} findings are looked at again at once"
        )
    page = FsckPage(findings=[], looked=len(findings))
    for finding in findings:

        async def look(snap: Snapshot, finding: FsckFinding = finding) -> FsckFinding | None:
            now = await still(core, snap, finding)
            return None if now is None else replace(now, path=await _path(snap, now))

        now = await core.store.read(look)
        if now is not None and now.kind in _OF_CHUNKS:
            seen = await fsck_chunks.chunks_again(core, now)
            now = None if seen is None else replace(seen, path=now.path)
        page.findings += [now] if now is not None else []
    return page


_OF_CHUNKS: Final = (fsck.ORPHAN_CHUNKS, fsck.CHUNKS_BEYOND, fsck.MISPLACED)
OF_ENTRIES: Final = (fsck.DANGLING, fsck.ENTRY_TYPE, fsck.PARENT, fsck.NO_DIRECTORY)


async def still(core: Core, reader: Reader, finding: FsckFinding) -> FsckFinding | None:
    """The finding as it is now, judged from the same records; None if it doesn't hold."""
    kind, key, ino = finding.kind, finding.key, finding.ino
    now: FsckFinding | None = None
    if kind in OF_ENTRIES:
        data = await reader.get(key)
        entry = None if data is None else pages.parse_entry(key, data)
        if isinstance(entry, Entry):
            inodes = {each: await find_inode(reader, each) for each in (entry.parent, entry.ino)}
            now = next(fsck.judge_entries([entry], inodes), None)
    elif kind in (fsck.ENTRIES, fsck.SUBDIRECTORIES):
        return await _still_counts(reader, finding)
    elif kind in (fsck.ORPHAN, fsck.LINKS):
        return finding if finding.stamp and await pages.state(reader, ino) == finding.stamp else None
    elif kind == fsck.COUNTERS:
        there = await reader.get(inode_key(ino)) is None and await reader.range(*inode_span(ino), 1)
        now = finding if there else None
    elif kind in (fsck.LEFT, fsck.SESSIONLESS, fsck.UNPAIRED):
        if await reader.get(key) is not None:
            now = await pages.judge_kept(reader, key)
    elif kind in (fsck.SPACE_MISSING, fsck.SPACE_LEFT, fsck.SPACE_DIFFERS):
        now = await pages.judge_space(reader, key)
    elif kind in _OF_CHUNKS:
        owner = await fsck_chunks.owner_of(core, reader, ino, finding.chain)
        if kind == fsck.CHUNKS_BEYOND:
            same = owner is not None and not owner.reasons and owner.length == finding.expected
            if same and owner is not None and owner.inode.epoch.to_bytes(8, "little") == finding.stamp:
                now = finding
        else:
            known = owner is not None or await given_out(reader, ino)
            held = fsck.Held(ino, key, 0, 0)
            now = fsck.judge_chunks(held, owner, finding.chain, finding.table, known)
    elif kind in fsck_quota.KINDS:
        now = await fsck_quota.still(reader, finding)
    elif kind == fsck.UNREADABLE:
        now = await _still_unreadable(reader, finding)
    return now if now is not None and now.kind == kind else None


async def _still_unreadable(reader: Reader, finding: FsckFinding) -> FsckFinding | None:
    decode = {b"d": decode_dirent, b"i": decode_inode, b"q": decode_kv_index, b"Q": decode_quota}.get(
        finding.key[:1]
    )
    data = await reader.get(finding.key)
    if decode is None or data is None:
        return None
    try:
        decode(data)
    except msgspec.MsgspecError:
        return finding
    return None


async def _still_counts(reader: Reader, finding: FsckFinding) -> FsckFinding | None:
    """Counted anew; a large directory stands by its stamp."""
    ino = finding.ino
    inode = await find_inode(reader, ino)
    if inode is None or inode.type != DIRECTORY or await reader.get(garbage_key(ino)) is not None:
        return None
    counters = await pages.counters_of(reader, ino)
    pairs = await reader.range(*dirent_span(ino), pages.IN_ONE + 1)
    if len(pairs) > pages.IN_ONE:
        return finding if fsck.stamp_of(counters) == finding.stamp else None
    parsed = [pages.parse_entry(key, value) for key, value in pairs]
    inside = sum(1 for entry in parsed if isinstance(entry, Entry) and entry.type == DIRECTORY)
    judged = fsck.judge_counts(ino, counters, len(pairs), inside)
    return next((each for each in judged if each.kind == finding.kind), None)


async def _path(reader: Reader, finding: FsckFinding) -> bytes:
    """Where it is, as far as that is cheap; b"": it isn't."""
    if finding.parent:
        folder = await path_of_directory(reader, finding.parent)
        return folder.rstrip(b"/") + b"/" + finding.name if folder else b""
    if finding.kind in (fsck.ENTRIES, fsck.SUBDIRECTORIES, fsck_quota.USAGE):
        return await path_of_directory(reader, finding.ino)
    return b""


async def path_of_directory(reader: Reader, ino: int) -> bytes:
    names: list[bytes] = []
    for _ in range(MAX_DEPTH):
        if ino == ROOT_INO:
            return b"/" + b"/".join(reversed(names))
        inode = await find_inode(reader, ino)
        if inode is None or inode.type != DIRECTORY:
            return b""
        siblings = await reader.range(*dirent_span(inode.parent), MAX_SIBLINGS)
        parsed = (pages.parse_entry(key, value) for key, value in siblings)
        name = next((each.name for each in parsed if isinstance(each, Entry) and each.ino == ino), None)
        if name is None:
            return b""
        names.append(name)
        ino = inode.parent
    return b""

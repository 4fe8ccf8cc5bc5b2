"""fsck: reading pages for a check, looking at findings again, mending them. docs/guides/fsck.md.

A page is judged from one snapshot, so what it finds is so at one moment. What takes several pages - the
entries of a large directory, how many names an inode has - is guarded by a stamp: it counts only if the
counters and times of the inode haven't changed meanwhile. A repair looks again in its own transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from ffs import errors
from ffs.layout import Layout
from ffs.proto import meta
from ffs.proto.meta import FsckFinding, FsckPage, FsckRepaired
from ffs.proto.records import (
    DIRECTORY,
    FILE,
    FLAG_REMOVED,
    KV_SPACE,
    ROOT_INO,
    ClientSession,
    Garbage,
    Inode,
)
from metadata.fs import fsck
from metadata.fs.core import Core
from metadata.fs.fsck import Counters, Entry
from metadata.fs.ids import given_out
from metadata.fs.ops import open as open_op
from metadata.fs.schema import (
    DIRENT_PREFIX_BYTES,
    KV_INDEX_COMPLETE,
    SUB_CTIME,
    SUB_DOUBTFUL,
    SUB_ENTRIES,
    SUB_LENGTH,
    SUB_LINKS,
    SUB_MTIME,
    Reader,
    client_lock_key,
    client_writer_key,
    counter,
    decode_dirent,
    decode_inode,
    decode_kv_index,
    dirent_key,
    dirent_span,
    encode,
    ended_key,
    find_inode,
    garbage_key,
    id_in_key,
    inode_key,
    inode_span,
    kv_index_key,
    lock_key,
    session_key,
    signed,
    split_client_lock,
    split_client_writer,
    split_lock,
    trim_key,
    unsigned,
    writer_key,
    writers_span,
    xattr_names_key,
    xattrs_span,
)
from metadata.fs.spaces import forget_space, note_space
from metadata.kv.contract import Snapshot, Transaction

PAGE: Final = 1000  # entries; a page is some milliseconds of this process
NAMES_PAGE: Final = 4000
INODE_PAGE: Final = 2000  # keys: inodes and their counters
SKIP_PAGE: Final = 200  # clients or inodes, of whose many keys only the first is read
CHUNK_PAGE: Final = 1024
IN_ONE: Final = 20_000  # entries of a directory that are counted in one transaction
LOST_FOUND: Final = b"lost+found"
MAX_DEPTH: Final = 64  # how far up, and among how many siblings, a path is looked for
MAX_SIBLINGS: Final = 5000

_ID: Final = Struct("<Q")
_STATE: Final = Struct("<QqQBB")  # meta.FSCK_STATE
_INODE_KEY_BYTES: Final = len(inode_key(0))


class Cursor(msgspec.Struct, array_like=True):
    """Where a scan of entries goes on; and of a directory that began in an earlier page, what was counted."""

    next: bytes
    parent: int = 0
    entries: int = 0
    subdirectories: int = 0
    stamp: bytes = b""


_decode_cursor: Final = msgspec.msgpack.Decoder(Cursor).decode


async def scan(core: Core, req: meta.FsckScan) -> FsckPage:
    """One page. Raises NotPermitted, InvalidArgument."""
    read = core.store.read
    await read(lambda snap: _need_administrator(snap, req))
    after = req.after
    if req.what == meta.SCAN_ENTRIES:
        return await read(lambda snap: _entries(snap, after, (b"d", b"e")))
    if req.what == meta.SCAN_DIRECTORY:
        return await read(lambda snap: _entries(snap, after, dirent_span(req.ino), req.ino))
    if req.what == meta.SCAN_INODES:
        return await read(lambda snap: _inodes(snap, after or b"i"))
    if req.what == meta.SCAN_SESSIONS:
        return await read(lambda snap: _sessions(snap, after or b"L"))
    if req.what == meta.SCAN_SPACES:
        return await read(lambda snap: _spaces(snap, after or b"q"))
    if req.what in (meta.SCAN_NAMES, meta.SCAN_STATE):
        if len(req.only) % _ID.size or len(req.only) > meta.MAX_FSCK_ONLY * _ID.size:
            raise errors.InvalidArgument(f"give at most {meta.MAX_FSCK_ONLY} inode ids of 8 bytes")
        only = [ino for (ino,) in _ID.iter_unpack(req.only)]
        if req.what == meta.SCAN_STATE:
            return await read(lambda snap: _states(snap, only))
        return await read(lambda snap: _names(snap, after or b"d", frozenset(only)))
    if req.what == meta.SCAN_CHUNKS:
        return await _chunks(core, req)
    if req.what == meta.SCAN_AGAIN:
        return await _again(core, req.findings)
    raise errors.InvalidArgument(f"this version can't scan for {req.what}")


async def _need_administrator(reader: Reader, req: meta.Request) -> None:
    """root, or who owns the root directory. (Users with tokens don't come so far: metadata.server.)"""
    root = await find_inode(reader, ROOT_INO)
    if req.creds.uid != 0 and (root is None or root.uid != req.creds.uid):
        raise errors.NotPermitted("fsck is for root, and for the owner of /")


# --- reading --------------------------------------------------------------------------------


def _parse_entry(key: bytes, value: bytes) -> Entry | FsckFinding:
    parent, name = id_in_key(key), key[DIRENT_PREFIX_BYTES:]
    try:
        dirent = decode_dirent(value)
    except msgspec.MsgspecError as error:
        return fsck.unreadable(key, 0, error)
    return Entry(key, parent, name, dirent.ino, dirent.type)


async def _find_all(snap: Snapshot, inos: Iterable[int]) -> dict[int, Inode | None]:
    """By id. Those that can't be read aren't in it: nothing is said of them here."""
    wanted = list(inos)
    found: dict[int, Inode | None] = {}
    for ino, data in zip(wanted, await snap.get_many([inode_key(i) for i in wanted]), strict=True):
        try:
            found[ino] = None if data is None else decode_inode(data)
        except msgspec.MsgspecError:
            continue
    return found


async def _counters(reader: Reader, ino: int) -> Counters:
    key = inode_key(ino)
    return Counters(
        signed(await reader.get(key + SUB_ENTRIES)),
        signed(await reader.get(key + SUB_LINKS)),
        unsigned(await reader.get(key + SUB_MTIME)),
    )


async def _entries(snap: Snapshot, after: bytes, span: tuple[bytes, bytes], alone: int = 0) -> FsckPage:
    """Entries against inodes, and directories' counters against their entries. `alone`: of one directory."""
    cursor = _decode_cursor(after) if after else Cursor(span[0], alone)
    pairs = await snap.range(cursor.next, span[1], PAGE)
    more = len(pairs) == PAGE
    page = FsckPage(findings=[], looked=len(pairs))
    entries: list[Entry] = []
    for key, value in pairs:
        entry = _parse_entry(key, value)
        if isinstance(entry, FsckFinding):
            page.findings.append(entry)
            entry = Entry(key, id_in_key(key), b"", 0, 0)
        entries.append(entry)
    groups = fsck.runs(entries)
    if cursor.parent and (not groups or groups[0].parent != cursor.parent):
        groups.insert(0, fsck.Run(cursor.parent, 0, 0))
    parents = [run.parent for run in groups]
    inodes = await _find_all(snap, {*parents, *(entry.ino for entry in entries)})
    known = [entry for entry in entries if entry.ino and entry.ino in inodes and entry.parent in inodes]
    page.findings += fsck.judge_entries(known, inodes)
    removed = await snap.get_many([garbage_key(parent) for parent in parents])
    again = []
    following = Cursor(pairs[-1][0] + b"\0") if more else None
    for index, (run, garbage) in enumerate(zip(groups, removed, strict=True)):
        inode = inodes.get(run.parent)
        if inode is None or inode.type != DIRECTORY or garbage is not None:
            continue  # of a directory that is being collected the counters are nobody's concern
        counters = await _counters(snap, run.parent)
        stamp, count, inside = fsck.stamp_of(counters), run.entries, run.subdirectories
        carried = index == 0 and run.parent == cursor.parent and cursor.stamp
        if carried:
            count, inside = count + cursor.entries, inside + cursor.subdirectories
        if following is not None and index == len(groups) - 1:
            began = cursor.stamp if carried else stamp
            following = Cursor(following.next, run.parent, count, inside, began)
        elif carried and stamp != cursor.stamp:
            again.append(run.parent)
        else:
            page.findings += fsck.judge_counts(run.parent, counters, count, inside)
    page.again = tuple(again)
    page.next = b"" if following is None else encode(following)
    ids = (e.ino for e in entries if e.ino and (not alone or e.type == DIRECTORY))
    page.rows = b"".join(map(_ID.pack, ids))
    return page


def _row(ino: int, inode: Inode, links: bytes | None, ctime: bytes | None, garbage: bytes | None) -> bytes:
    """FSCK_STATE: what is waiting for collection has no name."""
    names = 0 if garbage is not None else 1 if inode.type == DIRECTORY else 1 + signed(links)
    return _STATE.pack(ino, names, max(unsigned(ctime), inode.ctime_ns), inode.type, garbage is not None)


async def _state(reader: Reader, ino: int) -> bytes:
    """FSCK_STATE of one inode; b"" if it's gone."""
    inode = await find_inode(reader, ino)
    if inode is None:
        return b""
    key = inode_key(ino)
    links, ctime = await reader.get(key + SUB_LINKS), await reader.get(key + SUB_CTIME)
    return _row(ino, inode, links, ctime, await reader.get(garbage_key(ino)))


async def _states(snap: Snapshot, only: Sequence[int]) -> FsckPage:
    return FsckPage(findings=[], rows=b"".join([await _state(snap, ino) for ino in only]))


async def _names(snap: Snapshot, after: bytes, only: frozenset[int]) -> FsckPage:
    pairs = await snap.range(after, b"e", NAMES_PAGE)
    entries = (_parse_entry(key, value) for key, value in pairs)
    hits = [entry.ino for entry in entries if isinstance(entry, Entry) and entry.ino in only]
    following = pairs[-1][0] + b"\0" if len(pairs) == NAMES_PAGE else b""
    return FsckPage(findings=[], next=following, rows=b"".join(map(_ID.pack, hits)), looked=len(pairs))


class _Group(NamedTuple):
    """An inode's keys."""

    ino: int
    data: bytes | None  # of the inode itself
    counters: dict[bytes, bytes]


def _groups(pairs: Sequence[tuple[bytes, bytes]]) -> list[_Group]:
    out: list[_Group] = []
    for key, value in pairs:
        ino = int.from_bytes(key[_INODE_KEY_BYTES - 8 : _INODE_KEY_BYTES], "big")
        if not out or out[-1].ino != ino:
            out.append(_Group(ino, value if len(key) == _INODE_KEY_BYTES else None, {}))
        if len(key) > _INODE_KEY_BYTES:
            out[-1].counters[key[_INODE_KEY_BYTES:]] = value
    return out


async def _inodes(snap: Snapshot, after: bytes) -> FsckPage:
    pairs = await snap.range(after, b"j", INODE_PAGE)
    groups = _groups(pairs)
    page = FsckPage(findings=[])
    if len(pairs) == INODE_PAGE:  # the last one may go on in the next page
        page.next = inode_key(groups.pop().ino)
    page.looked = len(groups)
    indexed = await snap.get(KV_INDEX_COMPLETE) is not None
    removed = await snap.get_many([garbage_key(group.ino) for group in groups])
    rows = []
    for (ino, data, counters), garbage in zip(groups, removed, strict=True):
        if data is None:
            page.findings.append(fsck.judge_left(inode_key(ino), ino))
            continue
        try:
            inode = decode_inode(data)
        except msgspec.MsgspecError as error:
            page.findings.append(fsck.unreadable(inode_key(ino), ino, error))
            continue
        if ino != ROOT_INO:
            rows.append(_row(ino, inode, counters.get(SUB_LINKS), counters.get(SUB_CTIME), garbage))
        if inode.type == DIRECTORY and garbage is None and not await snap.range(*dirent_span(ino), 1):
            page.findings += fsck.judge_counts(ino, await _counters(snap, ino), 0, 0)
        if inode.type == KV_SPACE and indexed and await snap.get(kv_index_key(ino)) is None:
            finding = fsck.judge_space(kv_index_key(ino), ino, inode, garbage is None, None)
            page.findings += [finding] if finding is not None else []
    page.rows = b"".join(rows)
    return page


async def _has_session(reader: Reader, client: int) -> bool:
    """It lives, or is being settled."""
    return (
        await reader.get(session_key(client)) is not None or await reader.get(ended_key(client)) is not None
    )


async def _judge_held(reader: Reader, key: bytes) -> FsckFinding | None:
    """A key of a write session or lock."""
    kind, ino, client, twin = _parse_held(key)
    return fsck.judge_held(
        key,
        ino,
        client,
        await reader.get(twin) is not None,
        await _has_session(reader, client),
        kind not in b"wW" or await reader.get(inode_key(ino)) is not None,
    )


def _parse_held(key: bytes) -> tuple[bytes, int, int, bytes]:
    """(first byte, inode, client, the key of the same by the other)."""
    kind = key[:1]
    if kind == b"w":
        ino, client, handle = (int.from_bytes(key[at : at + 8], "big") for at in (1, 9, 17))
        return kind, ino, client, client_writer_key(client, ino, handle)
    if kind == b"W":
        client, ino, handle = split_client_writer(key)
        return kind, ino, client, writer_key(ino, client, handle)
    if kind == b"L":
        ino, what, client, owner = split_lock(key)
        return kind, ino, client, client_lock_key(client, ino, what, owner)
    client, ino, what, owner = split_client_lock(key)
    return kind, ino, client, lock_key(ino, what, client, owner)


# Prefixes of SCAN_SESSIONS; True: only the first key of each id after it is looked at.
_KEPT: Final = {b"L": False, b"M": False, b"W": False, b"r": True, b"t": False, b"u": True, b"w": False}


async def _sessions(snap: Snapshot, after: bytes) -> FsckPage:
    prefix = after[:1]
    if prefix not in _KEPT:
        raise errors.InvalidArgument("that isn't where a page of sessions ended")
    end = bytes([prefix[0] + 1])
    keys: list[bytes] = []
    if _KEPT[prefix]:
        start = after
        while len(keys) < SKIP_PAGE and (pairs := await snap.range(start, end, 1)):
            keys.append(pairs[0][0])
            start = prefix + (id_in_key(keys[-1]) + 1).to_bytes(8, "big")
        following = start if len(keys) == SKIP_PAGE else b""
    else:
        keys = [key for key, _ in await snap.range(after, end, PAGE)]
        following = keys[-1] + b"\0" if len(keys) == PAGE else b""
    judged = [await _judge_kept(snap, key) for key in keys]
    if not following:
        following = next((each for each in _KEPT if each > prefix), b"")
    findings = [finding for finding in judged if finding is not None]
    return FsckPage(findings=findings, next=following, looked=len(keys))


async def _judge_kept(reader: Reader, key: bytes) -> FsckFinding | None:
    ident = id_in_key(key)
    if key[:1] == b"r":
        return fsck.judge_slots(key, ident, await _has_session(reader, ident))
    if key[:1] in b"tu":
        return fsck.judge_left(key, ident) if await reader.get(inode_key(ident)) is None else None
    return await _judge_held(reader, key)


async def _spaces(snap: Snapshot, after: bytes) -> FsckPage:
    pairs = await snap.range(after, b"r", PAGE)
    judged = [await _judge_space(snap, key) for key, _ in pairs]
    following = pairs[-1][0] + b"\0" if len(pairs) == PAGE else b""
    findings = [finding for finding in judged if finding is not None]
    return FsckPage(findings=findings, next=following, looked=len(pairs))


async def _judge_space(reader: Reader, key: bytes) -> FsckFinding | None:
    ino = id_in_key(key)
    data = await reader.get(key)
    try:
        entry = None if data is None else decode_kv_index(data)
    except msgspec.MsgspecError as error:
        return fsck.unreadable(key, ino, error)
    named = await reader.get(garbage_key(ino)) is None
    return fsck.judge_space(key, ino, await find_inode(reader, ino), named, entry)


# --- chunks ---------------------------------------------------------------------------------


async def _owner(core: Core, reader: Reader, ino: int, chain: int) -> fsck.Owner | None:
    inode = await find_inode(reader, ino)
    if inode is None:
        return None
    key = inode_key(ino)
    reasons = bool(
        await reader.range(*writers_span(ino), 1)
        or await reader.get(trim_key(ino)) is not None
        or await reader.get(garbage_key(ino)) is not None
        or await reader.get(key + SUB_DOUBTFUL) is not None
    )
    length = unsigned(await reader.get(key + SUB_LENGTH))
    return fsck.Owner(inode, length, _is_placed(core, inode, chain), reasons)


def _is_placed(core: Core, inode: Inode, chain: int) -> bool:
    """Whether its chunks may lie on the chain. A table that isn't known here says nothing against it."""
    if inode.layout is None:
        return False
    try:
        return chain in core.chunks.placement(inode.layout).chains
    except errors.ChainUnavailable:
        return True


async def _judge_chunks(
    core: Core, snap: Snapshot, held: fsck.Held, chain: int, table: int
) -> FsckFinding | None:
    owner = await _owner(core, snap, held.space, chain)
    known = owner is not None or await given_out(snap, held.space)
    return fsck.judge_chunks(held, owner, chain, table, known)


async def _list(core: Core, chain: int, first: bytes, limit: int) -> tuple[list[fsck.Held], bytes, int]:
    """(spaces, where to go on, chunks). What isn't committed at the replica that answers doesn't count."""
    chunks, more = await core.chunks.list_chunks(chain, first, limit)
    following = _next_key(chunks[-1].key) if more and chunks else b""
    held = fsck.held_spaces((chunk.key, chunk.length) for chunk in chunks if not chunk.pending)
    return held, following, len(chunks)


def _next_key(key: bytes) -> bytes:
    return ((int.from_bytes(key, "big") + 1) & ((1 << 192) - 1)).to_bytes(24, "big")


_UNKNOWN: Final = (errors.ChainUnavailable, errors.Unreachable, errors.DeadlineExceeded, errors.ProtocolError)


async def _chunks(core: Core, req: meta.FsckScan) -> FsckPage:
    """What a chain holds, against inodes that are read afterwards. Of a space that isn't a file's the
    first chunks are enough."""
    try:
        held, following, count = await _list(core, req.chain, req.after or bytes(24), CHUNK_PAGE)
    except _UNKNOWN as error:
        return FsckPage(findings=[], unknown=error.message or type(error).__name__)

    async def judge(snap: Snapshot) -> tuple[list[FsckFinding], bool]:
        judged = [await _judge_chunks(core, snap, each, req.chain, req.table) for each in held]
        last = await find_inode(snap, held[-1].space) if held else None
        skip = bool(held) and (last is None or last.type != FILE)
        return [finding for finding in judged if finding is not None], skip

    findings, skip = await core.store.read(judge)
    if skip and following and held[-1].space == int.from_bytes(following[:8], "big"):
        following = (held[-1].space + 1).to_bytes(8, "big") + bytes(16)
    return FsckPage(findings=findings, next=following, looked=count)


async def _chunks_again(core: Core, finding: FsckFinding) -> FsckFinding | None:
    """The chunks are still there after the inode was found as it is, and it is still so afterwards. A
    chain that doesn't answer says nothing: no finding."""
    key = finding.key
    if finding.kind == fsck.CHUNKS_BEYOND:  # the chunk that holds the furthest byte on that chain
        owner = await core.store.read(lambda snap: _owner(core, snap, finding.ino, finding.chain))
        if owner is None or owner.inode.layout is None:
            return None
        index = (finding.found - 1) // owner.inode.layout.chunk_size
        key = finding.ino.to_bytes(8, "big") + index.to_bytes(16, "big")
    try:
        held, _, _ = await _list(core, finding.chain, key, 1)
    except _UNKNOWN:
        return None
    if not held or held[0].space != finding.ino:
        return None
    now = await core.store.read(lambda snap: _judge_chunks(core, snap, held[0], finding.chain, finding.table))
    same = now is not None and (now.kind, now.stamp) == (finding.kind, finding.stamp)
    return replace(now, key=finding.key) if now is not None and same else None


# --- again ----------------------------------------------------------------------------------


async def _again(core: Core, findings: Sequence[FsckFinding]) -> FsckPage:
    if len(findings) > meta.MAX_FSCK_FINDINGS:
        raise errors.InvalidArgument(f"at most {meta.MAX_FSCK_FINDINGS} findings are looked at again at once")
    page = FsckPage(findings=[], looked=len(findings))
    for finding in findings:

        async def look(snap: Snapshot, finding: FsckFinding = finding) -> FsckFinding | None:
            now = await _still(core, snap, finding)
            return None if now is None else replace(now, path=await _path(snap, now))

        now = await core.store.read(look)
        if now is not None and now.kind in _OF_CHUNKS:
            seen = await _chunks_again(core, now)
            now = None if seen is None else replace(seen, path=now.path)
        page.findings += [now] if now is not None else []
    return page


_OF_CHUNKS: Final = (fsck.ORPHAN_CHUNKS, fsck.CHUNKS_BEYOND, fsck.MISPLACED)
_OF_ENTRIES: Final = (fsck.DANGLING, fsck.ENTRY_TYPE, fsck.PARENT, fsck.NO_DIRECTORY)


async def _still(core: Core, reader: Reader, finding: FsckFinding) -> FsckFinding | None:
    """The finding as it is now, judged from the same records; None if it doesn't hold."""
    kind, key, ino = finding.kind, finding.key, finding.ino
    now: FsckFinding | None = None
    if kind in _OF_ENTRIES:
        data = await reader.get(key)
        entry = None if data is None else _parse_entry(key, data)
        if isinstance(entry, Entry):
            inodes = {each: await find_inode(reader, each) for each in (entry.parent, entry.ino)}
            now = next(fsck.judge_entries([entry], inodes), None)
    elif kind in (fsck.ENTRIES, fsck.SUBDIRECTORIES):
        return await _still_counts(reader, finding)
    elif kind in (fsck.ORPHAN, fsck.LINKS):
        return finding if finding.stamp and await _state(reader, ino) == finding.stamp else None
    elif kind == fsck.COUNTERS:
        there = await reader.get(inode_key(ino)) is None and await reader.range(*inode_span(ino), 1)
        now = finding if there else None
    elif kind in (fsck.LEFT, fsck.SESSIONLESS, fsck.UNPAIRED):
        if await reader.get(key) is not None:
            now = await _judge_kept(reader, key)
    elif kind in (fsck.SPACE_MISSING, fsck.SPACE_LEFT, fsck.SPACE_DIFFERS):
        now = await _judge_space(reader, key)
    elif kind in _OF_CHUNKS:
        owner = await _owner(core, reader, ino, finding.chain)
        if kind == fsck.CHUNKS_BEYOND:
            same = owner is not None and not owner.reasons and owner.length == finding.expected
            if same and owner is not None and owner.inode.epoch.to_bytes(8, "little") == finding.stamp:
                now = finding
        else:
            known = owner is not None or await given_out(reader, ino)
            held = fsck.Held(ino, key, 0, 0)
            now = fsck.judge_chunks(held, owner, finding.chain, finding.table, known)
    elif kind == fsck.UNREADABLE:
        now = await _still_unreadable(reader, finding)
    return now if now is not None and now.kind == kind else None


async def _still_unreadable(reader: Reader, finding: FsckFinding) -> FsckFinding | None:
    decode = {b"d": decode_dirent, b"i": decode_inode, b"q": decode_kv_index}.get(finding.key[:1])
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
    counters = await _counters(reader, ino)
    pairs = await reader.range(*dirent_span(ino), IN_ONE + 1)
    if len(pairs) > IN_ONE:
        return finding if fsck.stamp_of(counters) == finding.stamp else None
    parsed = [_parse_entry(key, value) for key, value in pairs]
    inside = sum(1 for entry in parsed if isinstance(entry, Entry) and entry.type == DIRECTORY)
    judged = fsck.judge_counts(ino, counters, len(pairs), inside)
    return next((each for each in judged if each.kind == finding.kind), None)


async def _path(reader: Reader, finding: FsckFinding) -> bytes:
    """Where it is, as far as that is cheap; b"": it isn't."""
    if finding.parent:
        folder = await _path_of_directory(reader, finding.parent)
        return folder.rstrip(b"/") + b"/" + finding.name if folder else b""
    if finding.kind in (fsck.ENTRIES, fsck.SUBDIRECTORIES):
        return await _path_of_directory(reader, finding.ino)
    return b""


async def _path_of_directory(reader: Reader, ino: int) -> bytes:
    names: list[bytes] = []
    for _ in range(MAX_DEPTH):
        if ino == ROOT_INO:
            return b"/" + b"/".join(reversed(names))
        inode = await find_inode(reader, ino)
        if inode is None or inode.type != DIRECTORY:
            return b""
        siblings = await reader.range(*dirent_span(inode.parent), MAX_SIBLINGS)
        parsed = (_parse_entry(key, value) for key, value in siblings)
        name = next((each.name for each in parsed if isinstance(each, Entry) and each.ino == ino), None)
        if name is None:
            return b""
        names.append(name)
        ino = inode.parent
    return b""


# --- repairs --------------------------------------------------------------------------------


async def repair(core: Core, txn: Transaction, req: meta.FsckRepair) -> FsckRepaired:
    """Mends one finding, if it holds in this transaction. NotPermitted; InvalidArgument if it can't be."""
    await _need_administrator(txn, req)
    finding = await _still(core, txn, req.finding)
    if finding is None:
        return FsckRepaired(done=False, text="it isn't so any more")
    kind = finding.kind
    if not finding.repair:
        raise errors.InvalidArgument(f"{kind} can't be repaired here: {finding.text}")
    if kind in _OF_ENTRIES:
        text = await _repair_entry(core, txn, finding)
    elif kind in (fsck.ENTRIES, fsck.SUBDIRECTORIES):
        sub = SUB_ENTRIES if kind == fsck.ENTRIES else SUB_LINKS
        txn.add(inode_key(finding.ino) + sub, finding.expected - finding.found)
        text = f"corrected to {finding.expected}"
    elif kind == fsck.ORPHAN:
        text = await _attach(core, txn, finding.ino)
    elif kind == fsck.LINKS:
        text = await _repair_links(core, txn, finding)
    elif kind in (fsck.COUNTERS, fsck.LEFT):
        _remove_left(txn, finding)
        text = "removed"
    elif kind == fsck.SESSIONLESS:
        text = _end_again(core, txn, finding.key)
    elif kind == fsck.UNPAIRED:
        text = _pair(txn, finding.key)
    elif kind in (fsck.SPACE_MISSING, fsck.SPACE_DIFFERS):
        inode = await find_inode(txn, finding.ino)
        assert inode is not None, finding
        note_space(txn, finding.ino, inode)
        text = "written into the index"
    elif kind == fsck.SPACE_LEFT:
        forget_space(txn, finding.ino)
        text = "taken out of the index"
    elif kind == fsck.ORPHAN_CHUNKS:
        text = _collect(core, txn, finding)
    else:
        text = await _cut(core, txn, finding)
    core.work.set()
    return FsckRepaired(done=True, text=text)


async def _repair_entry(core: Core, txn: Transaction, finding: FsckFinding) -> str:
    parent, name, now = finding.parent, finding.name, core.now_ns()
    entry = decode_dirent(await txn.get(finding.key) or b"")
    inode = await find_inode(txn, entry.ino)
    if finding.kind == fsck.DANGLING:
        core.remove_entry(txn, parent, name, entry.type, now)
        return f"removed the entry {fsck.show(name)} of directory {parent}"
    if finding.kind == fsck.NO_DIRECTORY:
        txn.clear(finding.key)
        return "removed the entry" if inode is None else await _attach(core, txn, entry.ino, another=False)
    assert inode is not None, finding
    if finding.kind == fsck.PARENT:
        await _need_one_place(txn, entry.ino, inode.parent, parent)
        txn.set(inode_key(entry.ino), encode(replace(inode, parent=parent)))
        return f"the directory's parent is {parent} now"
    txn.set(finding.key, encode(replace(entry, type=inode.type)))
    change = (inode.type == DIRECTORY) - (entry.type == DIRECTORY)
    if change:
        txn.add(inode_key(parent) + SUB_LINKS, change)
    return f"the entry says {fsck.WORDS.get(inode.type, inode.type)} now"


async def _need_one_place(txn: Transaction, ino: int, old: int, new: int) -> None:
    """A directory becomes its entry's, unless it is where it says, too, or would be its own ancestor."""
    pairs = await txn.range(*dirent_span(old), IN_ONE)
    parsed = (_parse_entry(key, value) for key, value in pairs)
    if any(isinstance(each, Entry) and each.ino == ino for each in parsed):
        raise errors.InvalidArgument(f"directory {ino} has two names, in directories {old} and {new}")
    seen = {ROOT_INO}
    above = new
    while above not in seen:
        seen.add(above)
        inode = await find_inode(txn, above)
        above = ROOT_INO if inode is None else inode.parent
    if ino in seen:
        raise errors.InvalidArgument(f"directory {new} lies in directory {ino} itself")


async def _attach(core: Core, txn: Transaction, ino: int, *, another: bool = True) -> str:
    """A name in /lost+found. `another`: it has none, so it is to count one from now on."""
    inode = await find_inode(txn, ino)
    assert inode is not None, ino
    folder = await _lost_found(core, txn)
    name = str(ino).encode()
    while await txn.get(dirent_key(folder, name)) is not None:
        name += b"+"
    core.add_entry(txn, folder, name, ino, inode.type, core.now_ns())
    if inode.type == DIRECTORY:
        flags = inode.flags & ~FLAG_REMOVED
        txn.set(inode_key(ino), encode(replace(inode, parent=folder, flags=flags)))
    elif another:
        txn.set(inode_key(ino) + SUB_LINKS, counter(0))
        if inode.type == KV_SPACE:
            note_space(txn, ino, inode)
    return f"attached as /lost+found/{name.decode()}"


async def _lost_found(core: Core, txn: Transaction) -> int:
    """The directory, made if it isn't there: only its owner, who owns /, may look into it."""
    data = await txn.get(dirent_key(ROOT_INO, LOST_FOUND))
    if data is not None:
        entry = decode_dirent(data)
        inode = await find_inode(txn, entry.ino)
        if inode is None or inode.type != DIRECTORY:
            raise errors.Exists("something else than a directory has that name: rename it", b"/lost+found")
        open_op.check_alive(inode, b"/lost+found")
        return entry.ino
    root = await find_inode(txn, ROOT_INO)
    if root is None:
        raise errors.Damaged("the store has no root directory")
    ino, now = await core.inos.take(), core.now_ns()
    inode = Inode(
        type=DIRECTORY, mode=0o700, uid=root.uid, gid=root.gid, btime_ns=now, ctime_ns=now, parent=ROOT_INO
    )
    txn.set(inode_key(ino), encode(inode))
    core.add_entry(txn, ROOT_INO, LOST_FOUND, ino, DIRECTORY, now)
    return ino


async def _repair_links(core: Core, txn: Transaction, finding: FsckFinding) -> str:
    """By the names that were counted; the stamp says that none came or went since."""
    ino, names = finding.ino, finding.expected
    inode = await find_inode(txn, ino)
    assert inode is not None, finding
    text = f"corrected to {names}"
    if inode.type == DIRECTORY:
        if names != 1:
            raise errors.InvalidArgument(f"directory {ino} has {names} names")
        txn.set(inode_key(ino), encode(replace(inode, flags=inode.flags & ~FLAG_REMOVED)))
    else:
        key = inode_key(ino) + SUB_LINKS
        txn.add(key, names - 1 - signed(await txn.get(key)))
    if await txn.get(garbage_key(ino)) is not None:
        txn.clear(garbage_key(ino))
        text += ", and taken out of collection"
        if inode.type == KV_SPACE:
            note_space(txn, ino, inode)
    txn.max(inode_key(ino) + SUB_CTIME, core.now_ns())
    return text


def _remove_left(txn: Transaction, finding: FsckFinding) -> None:
    key, ino = finding.key, finding.ino
    if key[:1] == b"i":
        txn.clear_range(*inode_span(ino))
    elif key[:1] == b"u":
        txn.clear_range(*xattrs_span(ino))
        txn.clear(xattr_names_key(ino))
    else:
        txn.clear(key)
        if key[:1] in b"wW":
            txn.clear(_parse_held(key)[3])


def _end_again(core: Core, txn: Transaction, key: bytes) -> str:
    """The client's session becomes one that is over and to be settled, as if it had just ended."""
    client = id_in_key(key) if key[:1] == b"r" else _parse_held(key)[2]
    if key[:1] in b"wL":
        txn.set(_parse_held(key)[3], b"")  # it is found by client
    record = ClientSession(ttl_ms=1000, label="found by fsck", opened_ns=core.now_ns(), ended=True)
    txn.set(ended_key(client), encode(record))
    return f"client {client} is being settled"


def _pair(txn: Transaction, key: bytes) -> str:
    """The record by inode says what there is."""
    if key[:1] in b"wL":
        txn.set(_parse_held(key)[3], b"")
        return "the missing record was written"
    txn.clear(key)
    return "the record was removed"


def _collect(core: Core, txn: Transaction, finding: FsckFinding) -> str:
    """Gives the space an inode again that is waiting for collection, so that the collector removes its chunks
    on all chains of the table and shuts them for it."""
    view = core.cluster.table(finding.table)
    if view is None or finding.chain not in view.chains:
        raise errors.InvalidArgument(f"chain {finding.chain} isn't of chain table {finding.table}")
    now = core.now_ns()
    layout = Layout(view.id, view.version, finding.ino, view.chunk_size, 0)
    inode = Inode(type=FILE, mode=0, uid=0, gid=0, btime_ns=now, ctime_ns=now, layout=layout)
    txn.set(inode_key(finding.ino), encode(inode))
    txn.set(inode_key(finding.ino) + SUB_LINKS, counter(-1))
    txn.set(garbage_key(finding.ino), encode(Garbage(type=FILE, since_ns=now, doubtful=True)))
    return "the chunks are being collected"


async def _cut(core: Core, txn: Transaction, finding: FsckFinding) -> str:
    """As a truncation to the length that the file has, which finds chunks wherever they are."""
    inode = await find_inode(txn, finding.ino)
    assert inode is not None, finding
    txn.max(inode_key(finding.ino) + SUB_DOUBTFUL, 1)
    await open_op.cut(core, txn, finding.ino, inode, finding.expected)
    return f"is being cut to {finding.expected} bytes"

"""fsck: reading pages for a check, and looking at findings again. docs/guides/fsck.md.

A page is judged from one snapshot, so what it finds is so at one moment. What takes several pages - the
entries of a large directory, how many names an inode has - is guarded by a stamp: it counts only if the
counters and times of the inode haven't changed meanwhile. fsck_repair.py mends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from ffs import errors
from ffs.proto import meta
from ffs.proto.meta import FsckFinding, FsckPage
from ffs.proto.records import (
    DIRECTORY,
    FILE,
    KV_SPACE,
    ROOT_INO,
    Inode,
)
from metadata.fs import fsck
from metadata.fs.core import Core
from metadata.fs.fsck import Counters, Entry
from metadata.fs.ids import given_out
from metadata.fs.ops import fsck_quota
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
    decode_dirent,
    decode_inode,
    decode_kv_index,
    decode_quota,
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
)
from metadata.kv.contract import Snapshot

PAGE: Final = 1000  # entries; a page is some milliseconds of this process
NAMES_PAGE: Final = 4000
INODE_PAGE: Final = 2000  # keys: inodes and their counters
SKIP_PAGE: Final = 200  # clients or inodes, of whose many keys only the first is read
CHUNK_PAGE: Final = 1024
IN_ONE: Final = 20_000  # entries of a directory that are counted in one transaction
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
    await read(lambda snap: need_administrator(snap, req))
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
    if req.what == meta.SCAN_QUOTAS:
        return await read(lambda snap: fsck_quota.quotas(snap, after))
    if req.what == meta.SCAN_CHARGES:
        return await read(lambda snap: fsck_quota.charges(snap, after))
    if req.what == meta.SCAN_AGAIN:
        return await _again(core, req.findings)
    raise errors.InvalidArgument(f"this version can't scan for {req.what}")


async def need_administrator(reader: Reader, req: meta.Request) -> None:
    """root, or who owns the root directory. (Users with tokens don't come so far: metadata.server.)"""
    root = await find_inode(reader, ROOT_INO)
    if req.creds.uid != 0 and (root is None or root.uid != req.creds.uid):
        raise errors.NotPermitted("fsck is for root, and for the owner of /")


# --- reading --------------------------------------------------------------------------------


def parse_entry(key: bytes, value: bytes) -> Entry | FsckFinding:
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
        entry = parse_entry(key, value)
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
    page.findings += await fsck_quota.judge_labels(snap, known, inodes)
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
    entries = (parse_entry(key, value) for key, value in pairs)
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
    kind, ino, client, twin = parse_held(key)
    return fsck.judge_held(
        key,
        ino,
        client,
        await reader.get(twin) is not None,
        await _has_session(reader, client),
        kind not in b"wW" or await reader.get(inode_key(ino)) is not None,
    )


def parse_held(key: bytes) -> tuple[bytes, int, int, bytes]:
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
            now = await still(core, snap, finding)
            return None if now is None else replace(now, path=await _path(snap, now))

        now = await core.store.read(look)
        if now is not None and now.kind in _OF_CHUNKS:
            seen = await _chunks_again(core, now)
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
        entry = None if data is None else parse_entry(key, data)
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
    counters = await _counters(reader, ino)
    pairs = await reader.range(*dirent_span(ino), IN_ONE + 1)
    if len(pairs) > IN_ONE:
        return finding if fsck.stamp_of(counters) == finding.stamp else None
    parsed = [parse_entry(key, value) for key, value in pairs]
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
        parsed = (parse_entry(key, value) for key, value in siblings)
        name = next((each.name for each in parsed if isinstance(each, Entry) and each.ino == ino), None)
        if name is None:
            return b""
        names.append(name)
        ino = inode.parent
    return b""

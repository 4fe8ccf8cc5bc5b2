"""fsck: pages of entries, inodes, sessions and spaces, each judged from one snapshot. docs/guides/fsck.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from ffs import errors
from ffs.proto.checks import FsckFinding, FsckPage
from ffs.proto.records import DIRECTORY, KV_SPACE, ROOT_INO, Inode
from metadata.fs import fsck
from metadata.fs.fsck import Counters, Entry
from metadata.fs.ops import fsck_quota
from metadata.fs.schema import (
    DIRENT_PREFIX_BYTES,
    KV_INDEX_COMPLETE,
    SUB_CTIME,
    SUB_ENTRIES,
    SUB_LINKS,
    SUB_MTIME,
    Reader,
    client_lock_key,
    client_writer_key,
    decode_dirent,
    decode_inode,
    decode_kv_index,
    dirent_span,
    encode,
    ended_key,
    find_inode,
    garbage_key,
    id_in_key,
    inode_key,
    kv_index_key,
    lock_key,
    session_key,
    signed,
    split_client_lock,
    split_client_writer,
    split_lock,
    unsigned,
    writer_key,
)
from metadata.kv.contract import Snapshot

PAGE: Final = 1000  # entries; a page is some milliseconds of this process
NAMES_PAGE: Final = 4000
INODE_PAGE: Final = 2000  # keys: inodes and their counters
SKIP_PAGE: Final = 200  # clients or inodes, of whose many keys only the first is read
IN_ONE: Final = 20_000  # entries of a directory that are counted in one transaction

ID: Final = Struct("<Q")
_STATE: Final = Struct("<QqQBB")  # checks.FSCK_STATE
_INODE_KEY_BYTES: Final = len(inode_key(0))


class Cursor(msgspec.Struct, array_like=True):
    """Where a scan of entries goes on; and of a directory that began in an earlier page, what was counted."""

    next: bytes
    parent: int = 0
    entries: int = 0
    subdirectories: int = 0
    stamp: bytes = b""


_decode_cursor: Final = msgspec.msgpack.Decoder(Cursor).decode


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


async def counters_of(reader: Reader, ino: int) -> Counters:
    key = inode_key(ino)
    return Counters(
        signed(await reader.get(key + SUB_ENTRIES)),
        signed(await reader.get(key + SUB_LINKS)),
        unsigned(await reader.get(key + SUB_MTIME)),
    )


async def entries(snap: Snapshot, after: bytes, span: tuple[bytes, bytes], alone: int = 0) -> FsckPage:
    """Entries against inodes, and directories' counters against their entries. `alone`: of one directory."""
    try:
        cursor = _decode_cursor(after) if after else Cursor(span[0], alone)
    except msgspec.MsgspecError as error:
        raise errors.InvalidArgument(f"`after` isn't what a page said to go on with: {error}") from None
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
        counters = await counters_of(snap, run.parent)
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
    page.rows = b"".join(map(ID.pack, ids))
    return page


def _row(ino: int, inode: Inode, links: bytes | None, ctime: bytes | None, garbage: bytes | None) -> bytes:
    """FSCK_STATE: what is waiting for collection has no name."""
    names = 0 if garbage is not None else 1 if inode.type == DIRECTORY else 1 + signed(links)
    return _STATE.pack(ino, names, max(unsigned(ctime), inode.ctime_ns), inode.type, garbage is not None)


async def state(reader: Reader, ino: int) -> bytes:
    """FSCK_STATE of one inode; b"" if it's gone."""
    inode = await find_inode(reader, ino)
    if inode is None:
        return b""
    key = inode_key(ino)
    links, ctime = await reader.get(key + SUB_LINKS), await reader.get(key + SUB_CTIME)
    return _row(ino, inode, links, ctime, await reader.get(garbage_key(ino)))


async def states(snap: Snapshot, only: Sequence[int]) -> FsckPage:
    return FsckPage(findings=[], rows=b"".join([await state(snap, ino) for ino in only]))


async def names(snap: Snapshot, after: bytes, only: frozenset[int]) -> FsckPage:
    pairs = await snap.range(after, b"e", NAMES_PAGE)
    entries = (parse_entry(key, value) for key, value in pairs)
    hits = [entry.ino for entry in entries if isinstance(entry, Entry) and entry.ino in only]
    following = pairs[-1][0] + b"\0" if len(pairs) == NAMES_PAGE else b""
    return FsckPage(findings=[], next=following, rows=b"".join(map(ID.pack, hits)), looked=len(pairs))


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


async def inodes(snap: Snapshot, after: bytes) -> FsckPage:
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
            page.findings += fsck.judge_counts(ino, await counters_of(snap, ino), 0, 0)
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


async def sessions(snap: Snapshot, after: bytes) -> FsckPage:
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
    judged = [await judge_kept(snap, key) for key in keys]
    if not following:
        following = next((each for each in _KEPT if each > prefix), b"")
    findings = [finding for finding in judged if finding is not None]
    return FsckPage(findings=findings, next=following, looked=len(keys))


async def judge_kept(reader: Reader, key: bytes) -> FsckFinding | None:
    ident = id_in_key(key)
    if key[:1] == b"r":
        return fsck.judge_slots(key, ident, await _has_session(reader, ident))
    if key[:1] in b"tu":
        return fsck.judge_left(key, ident) if await reader.get(inode_key(ident)) is None else None
    return await _judge_held(reader, key)


async def spaces(snap: Snapshot, after: bytes) -> FsckPage:
    pairs = await snap.range(after, b"r", PAGE)
    judged = [await judge_space(snap, key) for key, _ in pairs]
    following = pairs[-1][0] + b"\0" if len(pairs) == PAGE else b""
    findings = [finding for finding in judged if finding is not None]
    return FsckPage(findings=findings, next=following, looked=len(pairs))


async def judge_space(reader: Reader, key: bytes) -> FsckFinding | None:
    ino = id_in_key(key)
    data = await reader.get(key)
    try:
        entry = None if data is None else decode_kv_index(data)
    except msgspec.MsgspecError as error:
        return fsck.unreadable(key, ino, error)
    named = await reader.get(garbage_key(ino)) is None
    return fsck.judge_space(key, ino, await find_inode(reader, ino), named, entry)

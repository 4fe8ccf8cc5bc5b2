"""What is wrong with what was read: the judgements of `ffs fsck`. Pure. docs/guides/fsck.md.

`metadata.fs.ops.fsck` reads - each group of records that is judged together from one snapshot - and
repairs; `ffs.client.fsck` puts pages together and looks a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ffs.proto.checks import FsckFinding
from ffs.proto.records import DIRECTORY, FILE, KV_SPACE, SYMLINK, Inode, KvIndexEntry

# Kinds of findings.
UNREADABLE: Final = "unreadable-record"
DANGLING: Final = "dangling-entry"
ENTRY_TYPE: Final = "wrong-entry-type"
PARENT: Final = "wrong-parent"
NO_DIRECTORY: Final = "entry-without-directory"
ENTRIES: Final = "wrong-entry-count"
SUBDIRECTORIES: Final = "wrong-subdirectory-count"
ORPHAN: Final = "orphan-inode"
LINKS: Final = "wrong-link-count"
COUNTERS: Final = "counters-without-inode"
LEFT: Final = "record-without-inode"
SESSIONLESS: Final = "record-without-session"
UNPAIRED: Final = "record-without-twin"
SPACE_MISSING: Final = "kv-space-not-indexed"
SPACE_LEFT: Final = "kv-space-left-in-index"
SPACE_DIFFERS: Final = "kv-space-index-differs"
ORPHAN_CHUNKS: Final = "orphan-chunks"
CHUNKS_BEYOND: Final = "chunks-beyond-length"
MISPLACED: Final = "chunks-on-wrong-chain"

WORDS: Final = {DIRECTORY: "directory", FILE: "file", SYMLINK: "symbolic link", KV_SPACE: "KV space"}


class Entry(NamedTuple):
    """A directory entry as it is stored."""

    key: bytes
    parent: int
    name: bytes
    ino: int
    type: int


@dataclass(frozen=True, slots=True)
class Counters:
    """Of a directory, beside its inode."""

    entries: int
    subdirectories: int
    mtime: int

    def numbers(self) -> tuple[int, int, int]:
        return self.entries, self.subdirectories, self.mtime


def show(name: bytes) -> str:
    return repr(name.decode("utf-8", "backslashreplace"))


def judge_entries(entries: Iterable[Entry], inodes: Mapping[int, Inode | None]) -> Iterator[FsckFinding]:
    """Each entry against the inode that it leads to, and against its directory. `inodes`: all of both."""
    for entry in entries:
        parent, child = inodes[entry.parent], inodes[entry.ino]
        about = {"ino": entry.ino, "parent": entry.parent, "name": entry.name, "key": entry.key}
        shown = f"entry {show(entry.name)}"
        if parent is None or parent.type != DIRECTORY:
            yield FsckFinding(
                kind=NO_DIRECTORY,
                text=f"{shown} (inode {entry.ino}) lies in inode {entry.parent}, which isn't a directory",
                repair="move it to /lost+found, or remove it if it leads nowhere",
                **about,  # type: ignore[arg-type]
            )
        elif child is None:
            yield FsckFinding(
                kind=DANGLING,
                text=f"{shown} leads to inode {entry.ino}, which isn't there",
                repair="remove the entry",
                **about,  # type: ignore[arg-type]
            )
        elif child.type != entry.type:
            yield FsckFinding(
                kind=ENTRY_TYPE,
                found=entry.type,
                expected=child.type,
                text=f"{shown} says {WORDS.get(entry.type, entry.type)}, inode {entry.ino} is a "
                f"{WORDS.get(child.type, child.type)}",
                repair="correct the entry",
                **about,  # type: ignore[arg-type]
            )
        elif child.type == DIRECTORY and child.parent != entry.parent:
            yield FsckFinding(
                kind=PARENT,
                found=child.parent,
                expected=entry.parent,
                text=f"directory {entry.ino} takes inode {child.parent} for its parent, but lies in "
                f"{entry.parent}",
                repair="correct the directory's parent",
                **about,  # type: ignore[arg-type]
            )


def judge_counts(ino: int, counters: Counters, entries: int, subdirectories: int) -> Iterator[FsckFinding]:
    """A directory's counters against its entries. The stamp: what they were."""
    for kind, counted, there, what in (
        (ENTRIES, counters.entries, entries, "entries"),
        (SUBDIRECTORIES, counters.subdirectories, subdirectories, "subdirectories"),
    ):
        if counted != there:
            yield FsckFinding(
                kind=kind,
                ino=ino,
                found=counted,
                expected=there,
                stamp=stamp_of(counters),
                text=f"directory {ino} counts {counted} {what} and has {there}",
                repair="correct the count",
            )


def stamp_of(counters: Counters) -> bytes:
    return b"".join(value.to_bytes(16, "little", signed=True) for value in counters.numbers())


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring entries of one directory."""

    parent: int
    entries: int
    subdirectories: int


def runs(entries: Sequence[Entry]) -> list[Run]:
    """In order. Entries come in the order of their keys, so a directory is in one piece."""
    out: list[Run] = []
    for entry in entries:
        inside = int(entry.type == DIRECTORY)
        if out and out[-1].parent == entry.parent:
            last = out[-1]
            out[-1] = Run(last.parent, last.entries + 1, last.subdirectories + inside)
        else:
            out.append(Run(entry.parent, 1, inside))
    return out


def judge_held(
    key: bytes, ino: int, client: int, twin: bool, session: bool, inode: bool
) -> FsckFinding | None:
    """A write session or lock, under one of its two keys. `twin`: the other key is there; `session`: the
    client's session lives or is being settled."""
    what = "write session" if key[:1] in b"wW" else "lock"
    shown = f"{what} of client {client} on inode {ino}"
    if not session:
        return FsckFinding(
            kind=SESSIONLESS,
            ino=ino,
            key=key,
            text=f"{shown}: the client has no session",
            repair="settle it as that of a client that is gone",
        )
    if what == "write session" and not inode:
        return FsckFinding(
            kind=LEFT, ino=ino, key=key, text=f"{shown}: there is no such inode", repair="remove the record"
        )
    if not twin:
        by = "client" if key[:1] in b"wL" else "inode"
        return FsckFinding(
            kind=UNPAIRED,
            ino=ino,
            key=key,
            text=f"{shown}: its record by {by} is missing",
            repair="make the two records agree",
        )
    return None


def judge_slots(key: bytes, client: int, session: bool) -> FsckFinding | None:
    if session:
        return None
    return FsckFinding(
        kind=SESSIONLESS,
        key=key,
        text=f"answers kept for client {client}, which has no session",
        repair="settle it as that of a client that is gone",
    )


def judge_space(
    key: bytes, ino: int, inode: Inode | None, named: bool, entry: KvIndexEntry | None
) -> FsckFinding | None:
    """A KV space or what may be one, against its entry in the index. `named`: no collection record."""
    is_space = inode is not None and inode.type == KV_SPACE
    if entry is None:
        if not is_space or not named:
            return None
        return FsckFinding(
            kind=SPACE_MISSING,
            ino=ino,
            key=key,
            text=f"KV space {ino} isn't in the index, so nothing is evicted from it",
            repair="put it into the index",
        )
    if not is_space or not named:
        return FsckFinding(
            kind=SPACE_LEFT,
            ino=ino,
            key=key,
            text=f"the index of KV spaces has inode {ino}, which isn't one with a name",
            repair="take it out of the index",
        )
    assert inode is not None
    if (entry.kv, entry.layout) != (inode.kv, inode.layout):
        return FsckFinding(
            kind=SPACE_DIFFERS,
            ino=ino,
            key=key,
            text=f"the index has other bounds for KV space {ino} than the space itself",
            repair="take the space's own into the index",
        )
    return None


def judge_left(key: bytes, ino: int) -> FsckFinding:
    """A record of an inode that isn't there."""
    what = {b"u": "extended attributes", b"t": "a truncation", b"i": "counters"}[key[:1]]
    return FsckFinding(
        kind=COUNTERS if key[:1] == b"i" else LEFT,
        ino=ino,
        key=key,
        text=f"there is no inode {ino}, but {what} of it",
        repair="remove the record",
    )


def unreadable(key: bytes, ino: int, error: Exception) -> FsckFinding:
    return FsckFinding(kind=UNREADABLE, ino=ino, key=key, text=f"record {key!r} can't be read: {error}")


# --- chunks ---------------------------------------------------------------------------------


class Held(NamedTuple):
    """What a chain has of a space: its first chunk in the page, and the one that reaches furthest."""

    space: int
    first_key: bytes  # 24 bytes
    last_index: int
    last_bytes: int


@dataclass(frozen=True, slots=True)
class Owner:
    """The inode of a space, with all that lets chunks lie beyond its length."""

    inode: Inode
    length: int
    placed: bool  # chunks of it belong on the chain
    reasons: bool  # a write session, a truncation, a collection record, a doubtful mark


def held_spaces(chunks: Iterable[tuple[bytes, int]]) -> list[Held]:
    """Of (key of 24 bytes, bytes) in order of keys."""
    out: list[Held] = []
    for key, size in chunks:
        space, index = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big")
        first = out.pop().first_key if out and out[-1].space == space else key
        out.append(Held(space, first, index, size))
    return out


def judge_chunks(
    held: Held, owner: Owner | None, chain: int, table: int, given_out: bool
) -> FsckFinding | None:
    """`given_out`: the store has given that id to somebody."""
    if owner is None:
        text = f"chain {chain} has chunks of space {held.space}, which has no inode"
        if not given_out:
            text += "; this store never gave out that id: was it restored from an older copy?"
        return FsckFinding(
            kind=ORPHAN_CHUNKS,
            ino=held.space,
            key=held.first_key,
            chain=chain,
            table=table,
            text=text,
            repair="remove the chunks" if given_out else "",
        )
    inode = owner.inode
    if inode.type not in (FILE, KV_SPACE) or inode.layout is None:
        return FsckFinding(
            kind=ORPHAN_CHUNKS,
            ino=held.space,
            key=held.first_key,
            chain=chain,
            table=table,
            text=f"chain {chain} has chunks of inode {held.space}, a {WORDS.get(inode.type, inode.type)}",
        )
    if not owner.placed:
        return FsckFinding(
            kind=MISPLACED,
            ino=held.space,
            key=held.first_key,
            chain=chain,
            table=table,
            text=f"chain {chain} has chunks of inode {held.space}, which lies on other chains",
        )
    if inode.type == KV_SPACE or owner.reasons:
        return None
    end = held.last_index * inode.layout.chunk_size + held.last_bytes
    if end <= owner.length:
        return None
    return FsckFinding(
        kind=CHUNKS_BEYOND,
        ino=held.space,
        key=held.first_key,
        chain=chain,
        table=table,
        found=end,
        expected=owner.length,
        stamp=inode.epoch.to_bytes(8, "little"),
        text=f"file {held.space} has {owner.length} bytes, chain {chain} has some up to byte {end}",
        repair="cut what is beyond the file's length",
    )

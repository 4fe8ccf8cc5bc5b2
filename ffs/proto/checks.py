"""Messages of fsck: what is looked at, what was found, what is mended (docs/guides/fsck.md).

Requests of the namespace with the rules of ffs.proto.meta for identity and errors; tags 92-95. No I/O.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from ffs.proto.common import Message, Request

# What FsckScan looks at.
SCAN_ENTRIES: Final = 1  # all entries of all directories; rows: the inode that each leads to, u64
SCAN_INODES: Final = 2  # all inodes; rows: FSCK_STATE of those that should have a name
SCAN_SESSIONS: Final = 3  # write sessions, locks, slots
SCAN_SPACES: Final = 4  # the index of KV spaces
SCAN_DIRECTORY: Final = 5  # the entries of directory `ino`; rows: its subdirectories, u64
SCAN_NAMES: Final = 6  # all entries; rows: of those that lead to an inode of `only`, which one, u64
SCAN_STATE: Final = 7  # the inodes of `only`; rows: FSCK_STATE of each that is there
SCAN_CHUNKS: Final = 8  # what `chain`, of chain table `table`, holds
SCAN_AGAIN: Final = 9  # `findings`: those that still hold
SCAN_QUOTAS: Final = 10  # quotas; rows: FSCK_USAGE of each
SCAN_CHARGES: Final = 11  # all inodes; rows: FSCK_SUM of those in the page that a quota counts

FSCK_STATE: Final = (("ino", "<u8"), ("links", "<i8"), ("ctime_ns", "<u8"), ("type", "u1"), ("garbage", "u1"))
"""A row of SCAN_INODES and SCAN_STATE, as numpy names it. `links`: names that it should have."""
FSCK_USAGE: Final = (
    ("quota", "<u8"),
    ("ino", "<u8"),
    ("bytes", "<i8"),
    ("entries", "<i8"),
    ("stamp", "<u8"),
)
"""A row of SCAN_QUOTAS: the quota's id, its directory, what it counts, what changes with all of that."""
FSCK_SUM: Final = (("quota", "<u8"), ("bytes", "<i8"), ("entries", "<i8"))
"""A row of SCAN_CHARGES: what is charged by the inodes of one page."""
MAX_FSCK_ONLY: Final = 4096
MAX_FSCK_FINDINGS: Final = 50


class FsckFinding(Struct, array_like=True, frozen=True, kw_only=True):
    """Something that is wrong. docs/guides/fsck.md lists the kinds."""

    v: int = 1
    kind: str
    ino: int = 0
    parent: int = 0  # the directory, where an entry is meant
    name: bytes = b""
    key: bytes = b""  # of the record in the store, or of the first chunk
    found: int = 0  # a number that is wrong
    expected: int = 0  # and what it should be
    chain: int = 0
    table: int = 0
    stamp: bytes = b""  # the finding stands while this is so
    text: str = ""  # for people
    path: bytes = b""  # where it is, if that can be told
    repair: str = ""  # what a repair would do; "": it can't be repaired here


class FsckScan(Request, tag=92, kw_only=True):
    """One page of a check, for administrators. The service keeps nothing between pages: `after` is the last
    page's `next`, and any metadata process answers."""

    what: int  # SCAN_*
    after: bytes = b""
    ino: int = 0
    only: bytes = b""  # inode ids, u64 little-endian, at most MAX_FSCK_ONLY
    chain: int = 0
    table: int = 0
    findings: tuple[FsckFinding, ...] = ()  # at most MAX_FSCK_FINDINGS


class FsckPage(Message, tag=93, kw_only=True):
    """`next` b"": that was all."""

    findings: list[FsckFinding]
    next: bytes = b""
    rows: bytes = b""
    looked: int = 0  # records, or chunks
    again: tuple[int, ...] = ()  # directories that changed while their entries were counted
    unknown: str = ""  # a chain that doesn't answer: why


class FsckRepair(Request, tag=94, kw_only=True):
    """Mends one finding in one transaction, if it still holds. For administrators."""

    finding: FsckFinding


class FsckRepaired(Message, tag=95, kw_only=True):
    """`done` False: it doesn't hold any more, nothing was done. `text`: what was done."""

    done: bool
    text: str = ""

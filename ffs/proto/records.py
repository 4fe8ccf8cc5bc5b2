"""What the metadata service persists for the namespace: msgpack arrays, `v` first.

Read ffs.proto.common for the form and its rules of change; docs/metadata.md gives the keys and a
worked example. Records of the cluster (node, target, chain, chain table) are in ffs.proto.cluster.
Counters that change often are not in here but under keys of their own, as plain u64 little-endian
(length, append reservation, mtime, links, entries): metadata/fs/schema.py.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from ffs.proto.common import Layout

# Types of inodes and entries. Stable numbers.
DIRECTORY: Final = 1
FILE: Final = 2
SYMLINK: Final = 3
KV_SPACE: Final = 4

# Inode flags.
FLAG_REMOVED: Final = 1  # a directory taken out of the tree: nothing may be made in it any more
FLAG_TABLE_SET: Final = 2  # a directory's layout was chosen for it, not inherited
FLAG_XATTR: Final = 4  # it has, or once had, extended attributes
FLAG_LOCKED: Final = 8  # a directory: somebody may hold the lock of its entries

ROOT_INO: Final = 1


class KvParams(Struct, array_like=True, frozen=True, gc=False):
    """Geometry and bounds of a KV space. Geometry is fixed at creation; quota, TTL and flags may change."""

    block_bytes: int  # largest payload of a block
    parts: int = 1  # equal ranges of a block (groups of layers), each a chunk with a key of its own
    quota_bytes: int = 0  # 0: none; over all chains, as allocated on one replica
    ttl_ms: int = 0  # 0: none; in manager time
    identity: bytes = b""  # hash of model and layout identity that all users must agree on
    flags: int = 0  # KV_EVICTABLE, KV_DEDUP


KV_EVICTABLE: Final = 1  # blocks may be dropped to make room; without it a full space refuses new ones
KV_DEDUP: Final = 2  # each target keeps equal blocks once


class Inode(Struct, array_like=True, gc=False, kw_only=True):
    """One object. For directories `layout` is what children inherit (its seed is unused)."""

    v: int = 1
    type: int
    mode: int  # permission bits, 0o7777
    uid: int
    gid: int
    btime_ns: int  # creation; mtime too until something sets it
    ctime_ns: int
    flags: int = 0
    parent: int = 0  # directories: where "..", and the loop check of rename, go
    epoch: int = 0  # files: truncate epoch
    layout: Layout | None = None
    target: bytes = b""  # symlinks
    kv: KvParams | None = None
    quota: int = 0  # id of the quota that counts it, or, of its directory, counts what is in it


class XattrNames(Struct, array_like=True, kw_only=True):
    """The names of an inode's extended attributes; each value has a key of its own."""

    v: int = 1
    names: list[bytes] = []
    value_bytes: int = 0  # of all values together


class Dirent(Struct, array_like=True, gc=False):
    v: int
    ino: int
    type: int


class KvIndexEntry(Struct, array_like=True, gc=False, kw_only=True):
    """A KV space that a name leads to, for the manager: a copy of what its inode says. Key: its inode id."""

    v: int = 1
    layout: Layout
    kv: KvParams


class QuotaRecord(Struct, array_like=True, gc=False, frozen=True, kw_only=True):
    """A quota of a directory. Key: its id, which is never given again; so an inode that names an id
    without a record is counted by none. docs/metadata.md, Quotas."""

    v: int = 1
    ino: int  # the directory
    limit_bytes: int = 0  # 0: none
    limit_entries: int = 0
    state: int  # ffs.proto.quota.COUNTING, READY
    path: bytes = b""  # where the directory was last seen: a hint


class ClientSession(Struct, array_like=True, gc=False, kw_only=True):
    """A connected client. It is alive while its counter of renewals changes within `ttl_ms`, on a
    watcher's own clock."""

    v: int = 1
    ttl_ms: int
    label: str = ""
    opened_ns: int = 0
    ended: bool = False  # fenced; its files are being closed


class WriteSession(Struct, array_like=True, gc=False, kw_only=True):
    """A file open for write: key (inode, client, handle)."""

    v: int = 1
    opened_ns: int
    capability: int  # its id
    settled_at: int = 0  # the epoch to which the file was raised against it, after its client was gone


class LockRecord(Struct, array_like=True, gc=False, kw_only=True):
    """A lock that is held: key (inode, kind, client, owner). It counts while the client's session lives."""

    v: int = 1
    exclusive: bool
    since_ns: int


class RetrySlot(Struct, array_like=True, gc=False):
    """Outcome of the last request of (client, slot). `reply` holds the encoded reply; batches keep
    the replies of the entries done so far."""

    v: int
    sequence: int
    reply: bytes
    done: int = 0  # batches: entries done


class Garbage(Struct, array_like=True, gc=False, kw_only=True):
    """An inode that no name leads to: collected when its last write session is over."""

    v: int = 1
    type: int
    since_ns: int
    doubtful: bool = False  # chunks may lie anywhere: a writer of it died after it had lost its name


class Trim(Struct, array_like=True, gc=False, kw_only=True):
    """A truncation whose chunks aren't cut yet: nothing may extend the file before they are."""

    v: int = 1
    epoch: int
    length: int
    old: int = -1  # the file had at most that many bytes; -1: unknown, there were writers


class FencedClient(Struct, array_like=True, gc=False, kw_only=True):
    """A session that is over; storage servers forget it when its last capability has expired."""

    v: int = 1
    capability_expiry_ms: int


class TicketKey(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """What tickets are made with (metadata/fs/tickets.py)."""

    v: int = 1
    secret: bytes

    def __repr__(self) -> str:
        return "TicketKey()"


class StoreHeader(Struct, array_like=True, gc=False, kw_only=True):
    """What a store is. Unknown bits in `incompat` refuse it."""

    v: int = 1
    cluster: bytes  # 16 bytes
    created_ns: int
    compat: int = 0
    incompat: int = 0
    created_by: str = ""

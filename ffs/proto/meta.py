"""Messages of the namespace: requests and their typed replies.

Every request carries who asks (`creds`) and its identity (`client`, `slot`, `sequence`). A request
that changes something is idempotent by it: sent again, it gives its first answer. A slot has one
request outstanding and its sequence grows by at least 1 at each new one; slots are 0..1023.
Requests that only read ignore the identity (client 0 will do).

Paths are absolute, bytes, `/`-separated; "." and ".." are walked as POSIX walks them. Where a
request has both `ino` and `path`, `ino` != 0 names the object itself and the path is unused: that
is how one acts on an open file. Unless root asks, such a request carries the `ticket` that came with the
reply by which the asker came to know the object by a path (Opened, KvOpened, ReadDirReply with `more`,
StatReply where it was wanted): docs/metadata.md, Tickets. Times are ns since the epoch, lengths bytes.

Any request may be answered by common.ErrorReply. REPLY_OF maps request to reply class; `REQUESTS`
and `REPLIES` are the unions to decode. docs/metadata.md, Messages.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from ffs.proto.checks import FsckPage, FsckRepair, FsckRepaired, FsckScan
from ffs.proto.common import ErrorReply, Layout, Message, OkReply
from ffs.proto.common import Request as Request
from ffs.proto.locking import GetLocks, Lock, LockReply, LocksReply, Unlock
from ffs.proto.quota import (
    NO_QUOTA,
    GetQuota,
    ListQuotas,
    QuotaList,
    QuotaReply,
    Reserve,
    Reserved,
    SetQuota,
)
from ffs.proto.records import KvParams
from ffs.proto.xattrs import GetXattr, ListXattr, ListXattrReply, RemoveXattr, SetXattr, XattrReply

MAX_SLOTS: Final = 1024
MAX_BATCH: Final = 4096
MAX_NAME_BYTES: Final = 255
MAX_PATH_BYTES: Final = 4096
MAX_PAGE: Final = 4096  # entries of a listing

# Open flags.
OPEN_READ: Final = 1
OPEN_WRITE: Final = 2
OPEN_CREATE: Final = 4
OPEN_EXCL: Final = 8
OPEN_TRUNC: Final = 16
OPEN_APPEND: Final = 32
OPEN_TMPFILE: Final = 64  # path is a directory; the file has no name until Link gives it one
OPEN_NOFOLLOW: Final = 128  # a symlink at the end of the path is ELOOP

# Rename flags.
RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2

# What SetAttr sets.
SET_MODE: Final = 1
SET_UID: Final = 2
SET_GID: Final = 4
SET_MTIME: Final = 8
SET_MTIME_NOW: Final = 16

# What SetKvSpace sets.
SET_QUOTA: Final = 1
SET_TTL: Final = 2
SET_EVICTABLE: Final = 4
SET_DEDUP: Final = 8
MAX_BOUND: Final = (1 << 62) - 1  # of quota_bytes and ttl_ms


class Attributes(Struct, array_like=True, gc=False):
    """What stat tells. There is no atime: reading never writes."""

    v: int
    ino: int
    type: int  # records.DIRECTORY, FILE, SYMLINK, KV_SPACE
    mode: int  # permission bits only, 0o7777
    uid: int
    gid: int
    nlink: int
    length: int  # files: as last reported by a writer; symlinks: of the target; directories: entries
    mtime_ns: int
    ctime_ns: int
    btime_ns: int
    epoch: int  # truncate epoch (for writing only Opened, TruncateReply and CapabilityReply tell it in time)
    layout: Layout | None = None
    kv: KvParams | None = None


# --- client session -------------------------------------------------------------------------


class SessionOpen(Request, tag=10, kw_only=True):
    """First thing that a client asks. Its `client` is 0 and it isn't idempotent: a session whose
    reply was lost ends by itself."""

    label: str = ""  # for people: host, program, pid
    ttl_ms: int = 30_000  # renewed at least every third of it; 1 s .. 10 min


class SessionOpened(Message, tag=11, kw_only=True):
    client: int  # unique for ever
    ttl_ms: int
    slots: int = MAX_SLOTS
    manager_time_ms: int = 0
    cluster: bytes = b""


class SessionRenew(Request, tag=12, kw_only=True):
    """Fenced if the session is over."""


class SessionRenewed(Message, tag=13, kw_only=True):
    ttl_ms: int
    manager_time_ms: int = 0


class SessionClose(Request, tag=14, kw_only=True):
    """Ends the session and its write sessions (their lengths are asked of the chains). Repeatable."""


# --- looking --------------------------------------------------------------------------------


class Stat(Request, tag=16, kw_only=True):
    path: bytes = b""
    ino: int = 0
    follow: bool = True
    ticket: bytes = b""
    want_ticket: bool = False  # of what `path` leads to, in the reply


class StatReply(Message, tag=17, kw_only=True):
    attributes: Attributes
    ticket: bytes = b""


class StatMany(Request, tag=18, kw_only=True):
    paths: tuple[bytes, ...]
    follow: bool = True


class StatManyReply(Message, tag=19, kw_only=True):
    """One an entry, in order."""

    results: list[StatReply | ErrorReply]


class Access(Request, tag=20, kw_only=True):
    """May `creds` do `want` (4 read, 2 write, 1 search or execute; 0 exists)? OkReply or AccessDenied."""

    path: bytes
    want: int = 0


class ReadDir(Request, tag=21, kw_only=True):
    """One page of a directory, in byte order of names, from the first name after `after`."""

    path: bytes = b""
    ino: int = 0
    after: bytes = b""
    limit: int = 1000
    attributes: bool = False
    ticket: bytes = b""


class DirEntry(Struct, array_like=True, gc=False):
    name: bytes
    ino: int
    type: int
    attributes: Attributes | None = None  # None too if the entry went between two reads, or without x


class ReadDirReply(Message, tag=22, kw_only=True):
    """`more`: ask again with `after` = the last name. A page is a snapshot, the listing isn't."""

    ino: int
    entries: list[DirEntry]
    more: bool = False
    ticket: bytes = b""


class ReadLink(Request, tag=23, kw_only=True):
    path: bytes


class ReadLinkReply(Message, tag=24, kw_only=True):
    target: bytes


class StatFs(Request, tag=25, kw_only=True):
    """Of the chain table of the object at `path`, or of `ino`."""

    path: bytes = b"/"
    ino: int = 0
    ticket: bytes = b""


class StatFsReply(Message, tag=26, kw_only=True):
    total_bytes: int  # usable: after replication
    free_bytes: int
    chunk_size: int
    table: int
    replicas: int = 1
    quota_bytes: int = 0  # limit of the quota that counts the object; 0: none
    quota_free_bytes: int = 0  # what that leaves, if there is one


# --- files ----------------------------------------------------------------------------------


class LayoutChoice(Struct, array_like=True, frozen=True, gc=False):
    """What a creator may ask for; 0 takes what the directory gives."""

    table: int = 0
    chunk_size: int = 0
    stripe: int = -1  # -1: inherited; 0: all chains of the table


class Open(Request, tag=30, kw_only=True):
    path: bytes = b""
    ino: int = 0  # open again what is open (a link count of 0 is no hindrance to the holder)
    flags: int = OPEN_READ
    mode: int = 0o666  # of a new file; the client has applied its umask
    layout: LayoutChoice | None = None
    ticket: bytes = b""


class Opened(Message, tag=31, kw_only=True):
    """`handle` != 0 is a write session: Close ends it. Reading leaves no state."""

    ino: int
    attributes: Attributes
    handle: int = 0
    created: bool = False
    capability: bytes = b""  # common.encode_capability
    capability_expiry_ms: int = 0  # manager time
    reserved: int = NO_QUOTA  # ffs.proto.quota: the end up to which a writer may write
    ticket: bytes = b""


class OpenEntry(Struct, array_like=True, frozen=True, gc=False):
    path: bytes
    flags: int = OPEN_READ
    mode: int = 0o666


class OpenMany(Request, tag=32, kw_only=True):
    """open_many, and create_many with OPEN_CREATE. Entries stand for themselves: some may fail."""

    entries: tuple[OpenEntry, ...]
    layout: LayoutChoice | None = None


class OpenManyReply(Message, tag=33, kw_only=True):
    results: list[Opened | ErrorReply]


class Close(Request, tag=34, kw_only=True):
    """Ends a write session. With `written`, `length` is the end of the furthest write under `epoch`.
    `doubtful`: a write beyond that was given up with its outcome unknown, so there may be chunks there."""

    ino: int
    handle: int
    epoch: int = 0
    length: int = 0
    written: bool = False
    doubtful: bool = False


class Fsync(Request, tag=35, kw_only=True):
    """Publishes a length; the session goes on. The data is durable already when writes are answered."""

    ino: int
    handle: int
    epoch: int = 0
    length: int = 0
    written: bool = True
    doubtful: bool = False


class LengthReply(Message, tag=36, kw_only=True):
    """Answer to Close, Fsync. `merged` False: the epoch was old, so the length wasn't taken; look at
    `epoch` and `length` and report what was written since under the new epoch."""

    length: int
    epoch: int
    merged: bool = True
    reserved: int = NO_QUOTA  # ffs.proto.quota


class CloseEntry(Struct, array_like=True, frozen=True, gc=False):
    ino: int
    handle: int
    epoch: int = 0
    length: int = 0
    written: bool = False
    doubtful: bool = False


class CloseMany(Request, tag=37, kw_only=True):
    entries: tuple[CloseEntry, ...]


class CloseManyReply(Message, tag=38, kw_only=True):
    results: list[LengthReply | ErrorReply]


class Append(Request, tag=39, kw_only=True):
    """Reserves `length` bytes at the end for one O_APPEND write. The file's length grows when the
    writer reports it (Fsync, Close), so nobody sees zeros meanwhile."""

    ino: int
    handle: int
    length: int


class AppendReply(Message, tag=40, kw_only=True):
    offset: int
    epoch: int
    reserved: int = NO_QUOTA  # ffs.proto.quota


class Truncate(Request, tag=41, kw_only=True):
    """Sets the length. Chunks are cut, and old writers fenced by the epoch, before the answer.
    `handle` != 0: by a writer of `ino`, whose permission was judged at open."""

    path: bytes = b""
    ino: int = 0
    handle: int = 0
    length: int = 0
    ticket: bytes = b""


class TruncateReply(Message, tag=42, kw_only=True):
    length: int
    epoch: int
    capability: bytes = b""  # for the new epoch, when `handle` was given
    capability_expiry_ms: int = 0
    ino: int = 0
    reserved: int = NO_QUOTA  # ffs.proto.quota


class CapabilityRenew(Request, tag=43, kw_only=True):
    """A new capability for an open file or KV space. `handle` 0: for reading (KV: as opened)."""

    ino: int
    handle: int = 0
    rights: int = 1  # common.RIGHT_*
    ticket: bytes = b""


class CapabilityReply(Message, tag=44, kw_only=True):
    capability: bytes
    capability_expiry_ms: int
    epoch: int


class SetAttr(Request, tag=45, kw_only=True):
    """chmod, chown, utime. `what` is a sum of SET_*. Answer: StatReply."""

    path: bytes = b""
    ino: int = 0
    follow: bool = True
    what: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    ticket: bytes = b""


# --- names ----------------------------------------------------------------------------------


class MkDir(Request, tag=50, kw_only=True):
    """`parents`: makes what is missing on the way and is content with what exists (os.makedirs with
    exist_ok). A layout given here is inherited by what is made inside. Answer: StatReply."""

    path: bytes
    mode: int = 0o777
    parents: bool = False
    layout: LayoutChoice | None = None
    parent_mode: int = 0o777  # of those made on the way


class Rename(Request, tag=51, kw_only=True):
    """Atomic. Answer: OkReply."""

    source: bytes
    target: bytes
    flags: int = 0  # RENAME_*


class Link(Request, tag=52, kw_only=True):
    """A new name for a file: of `source`, or of the open file `ino` (O_TMPFILE). With `replace`, an
    existing file of that name is replaced in the same transaction: atomic publication.
    Answer: StatReply."""

    target: bytes
    source: bytes = b""
    ino: int = 0
    handle: int = 0  # with ino
    follow: bool = False
    replace: bool = False
    ticket: bytes = b""


class SymLink(Request, tag=53, kw_only=True):
    """Answer: StatReply."""

    path: bytes
    target: bytes


class Unlink(Request, tag=54, kw_only=True):
    """Anything but a directory. Answer: OkReply."""

    path: bytes


class UnlinkMany(Request, tag=55, kw_only=True):
    paths: tuple[bytes, ...]


class UnlinkManyReply(Message, tag=56, kw_only=True):
    results: list[OkReply | ErrorReply]


class RmDir(Request, tag=57, kw_only=True):
    """An empty directory. Answer: OkReply."""

    path: bytes


class RemoveTree(Request, tag=58, kw_only=True):
    """A directory and all in it, or a file. One transaction detaches it; space comes back in the
    background. Answer: OkReply."""

    path: bytes


# --- KV spaces ------------------------------------------------------------------------------


class KvCreate(Request, tag=60, kw_only=True):
    """Makes a KV space at `path`; it needs `exist_ok` and equal geometry to be content with one that
    exists (whose quota, TTL and flags stay as they are). Answer: KvOpened."""

    path: bytes
    params: KvParams
    mode: int = 0o666
    layout: LayoutChoice | None = None
    exist_ok: bool = False


class KvOpen(Request, tag=61, kw_only=True):
    path: bytes
    write: bool = True


class KvOpened(Message, tag=62, kw_only=True):
    """Has all that get and put need: no metadata after this but routing and capability renewal."""

    ino: int  # the space
    attributes: Attributes
    capability: bytes
    capability_expiry_ms: int
    created: bool = False
    ticket: bytes = b""


class SetKvSpace(Request, tag=63, kw_only=True):
    """Changes bounds of a KV space, as its owner or root; servers follow within seconds. `what` is a sum of
    SET_QUOTA, SET_TTL, SET_EVICTABLE, SET_DEDUP. Answer: StatReply."""

    path: bytes = b""
    ino: int = 0
    what: int = 0
    quota_bytes: int = 0  # 0: none
    ttl_ms: int = 0  # 0: none
    evictable: bool = True
    ticket: bytes = b""
    dedup: bool = False


REQUESTS = (
    SessionOpen
    | SessionRenew
    | SessionClose
    | Stat
    | StatMany
    | Access
    | ReadDir
    | ReadLink
    | StatFs
    | Open
    | OpenMany
    | Close
    | Fsync
    | CloseMany
    | Append
    | Truncate
    | CapabilityRenew
    | SetAttr
    | MkDir
    | Rename
    | Link
    | SymLink
    | Unlink
    | UnlinkMany
    | RmDir
    | RemoveTree
    | KvCreate
    | KvOpen
    | SetKvSpace
    | Lock
    | Unlock
    | GetLocks
    | GetXattr
    | SetXattr
    | RemoveXattr
    | ListXattr
    | FsckScan
    | FsckRepair
    | SetQuota
    | GetQuota
    | ListQuotas
    | Reserve
)

REPLIES = (
    ErrorReply
    | OkReply
    | SessionOpened
    | SessionRenewed
    | StatReply
    | StatManyReply
    | ReadDirReply
    | ReadLinkReply
    | StatFsReply
    | Opened
    | OpenManyReply
    | LengthReply
    | CloseManyReply
    | AppendReply
    | TruncateReply
    | CapabilityReply
    | UnlinkManyReply
    | KvOpened
    | LockReply
    | LocksReply
    | XattrReply
    | ListXattrReply
    | FsckPage
    | FsckRepaired
    | QuotaReply
    | QuotaList
    | Reserved
)

REPLY_OF: dict[type[Request], type[Message]] = {
    SessionOpen: SessionOpened,
    SessionRenew: SessionRenewed,
    SessionClose: OkReply,
    Stat: StatReply,
    StatMany: StatManyReply,
    Access: OkReply,
    ReadDir: ReadDirReply,
    ReadLink: ReadLinkReply,
    StatFs: StatFsReply,
    Open: Opened,
    OpenMany: OpenManyReply,
    Close: LengthReply,
    Fsync: LengthReply,
    CloseMany: CloseManyReply,
    Append: AppendReply,
    Truncate: TruncateReply,
    CapabilityRenew: CapabilityReply,
    SetAttr: StatReply,
    MkDir: StatReply,
    Rename: OkReply,
    Link: StatReply,
    SymLink: StatReply,
    Unlink: OkReply,
    UnlinkMany: UnlinkManyReply,
    RmDir: OkReply,
    RemoveTree: OkReply,
    KvCreate: KvOpened,
    KvOpen: KvOpened,
    SetKvSpace: StatReply,
    Lock: LockReply,
    Unlock: LocksReply,
    GetLocks: LocksReply,
    GetXattr: XattrReply,
    SetXattr: OkReply,
    RemoveXattr: OkReply,
    ListXattr: ListXattrReply,
    FsckScan: FsckPage,
    FsckRepair: FsckRepaired,
    SetQuota: QuotaReply,
    GetQuota: QuotaReply,
    ListQuotas: QuotaList,
    Reserve: Reserved,
}

"""Quotas of directories: how many bytes and entries may stand in one, and what is used of it.

Requests of the namespace with the rules of ffs.proto.meta for identity, paths and errors; tags 48-49, 88-91
and 96. No I/O. docs/metadata.md, Quotas.

A writer asks for room before it writes. `reserved` - here, and in Opened, AppendReply, TruncateReply and
LengthReply of ffs.proto.meta - is the end, in bytes from the file's beginning, up to which the file may be
written under its present epoch. Of several the largest counts. A new epoch, however it was learnt, ends it:
ask again. NO_QUOTA: nothing counts the file, so it may grow without asking; a later reply may say otherwise.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from ffs.proto.common import Message, Request

NO_QUOTA: Final = -1  # of `reserved`
KEEP: Final = -1  # of a limit in SetQuota: as it is
MAX_LIMIT: Final = (1 << 62) - 1
MAX_QUOTAS: Final = 10_000  # of a cluster
MAX_LIST: Final = 200  # quotas of one page

# States of a quota.
COUNTING: Final = 1  # what was there before is being counted: usage grows, and is less than what there is
READY: Final = 2


class QuotaView(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """A quota as it is now. Bytes are lengths of files (holes too, replicas not), and what is reserved for
    files that are open for writing, until the last writer closes. Entries are files, directories, symbolic
    links and KV spaces below the directory; one with several names is one."""

    v: int = 1
    quota: int  # its id: another one each time that a directory is given a quota, or counted anew
    ino: int  # the directory
    path: bytes = b""  # where it is; b"" if that can't be told
    limit_bytes: int = 0  # at most so many; 0: no limit, only counted
    limit_entries: int = 0  # likewise
    used_bytes: int = 0
    used_entries: int = 0
    state: int = READY


class SetQuota(Request, tag=88, kw_only=True):
    """Gives a directory a quota, changes its limits, or - `clear` - takes it away. Only root and the owner of
    `/` may (NotPermitted). Answer: QuotaReply, with the quota as it is afterwards; None after `clear`.

    What is in the directory already is counted in the background (COUNTING). A limit below what is used
    refuses what is new. InvalidArgument: quotas don't nest - one counts this directory already, or one is
    set below it - or, `clear`, none is set on it. NotADirectory."""

    path: bytes = b""
    ino: int = 0
    limit_bytes: int = KEEP  # at most so many; 0: no limit; KEEP: as it is (new: no limit)
    limit_entries: int = KEEP  # likewise
    clear: bool = False
    ticket: bytes = b""


class GetQuota(Request, tag=89, kw_only=True):
    """The quota that counts the object at `path`, or `ino`. Who may stat it may ask. Answer: QuotaReply."""

    path: bytes = b""
    ino: int = 0
    ticket: bytes = b""


class QuotaReply(Message, tag=90, kw_only=True):
    """`quota` None: none counts it."""

    quota: QuotaView | None = None


class ListQuotas(Request, tag=91, kw_only=True):
    """One page of all quotas, by id, from the first one beyond `after`. Only for root and the owner of `/`
    (NotPermitted). Answer: QuotaList."""

    after: int = 0
    limit: int = MAX_LIST


class QuotaList(Message, tag=96, kw_only=True):
    """`more`: ask again with `after` = the last one's `quota`. A page is a snapshot, the list isn't."""

    quotas: list[QuotaView]
    more: bool = False


class Reserve(Request, tag=48, kw_only=True):
    """By a writer: room up to `end`, before it writes beyond what is reserved. QuotaExceeded if there isn't
    so much; nothing is reserved then, and what was stays. BadHandle. Answer: Reserved."""

    ino: int
    handle: int  # of the write session
    epoch: int  # that the writer writes under
    end: int  # bytes from the file's beginning


class Reserved(Message, tag=49, kw_only=True):
    """`epoch` other than the one asked with: the file was truncated, nothing was reserved; learn the new
    epoch and ask again. Else `reserved` is `end` at least, and more where there is room; or NO_QUOTA."""

    reserved: int
    epoch: int

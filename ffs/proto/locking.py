"""Locks: advisory ones of anything, and of a directory's entries. docs/metadata.md, Locks.

Requests of the namespace with the rules of ffs.proto.meta for identity, paths and errors; tags 70-74. No I/O.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from ffs.proto.common import Message, Request

# Kinds of locks.
LOCK_FLOCK: Final = 0  # advisory, of anything: as flock(2)
LOCK_ENTRIES: Final = 1  # of a directory: only the holder's session changes its entries
MAX_LOCK_WAIT_MS: Final = 10_000  # of one request


class LockHolder(Struct, array_like=True, frozen=True, gc=False):
    client: int
    owner: int
    kind: int  # LOCK_*
    exclusive: bool
    since_ns: int
    label: str = ""  # of the client session


class Lock(Request, tag=70, kw_only=True):
    """Takes a lock for (client, owner), or changes the one that it has. It ends by Unlock, and with the
    session. `wait_ms`: the service waits so long for others to let go (at most MAX_LOCK_WAIT_MS); while it
    waits for an exclusive lock, a shared one of the same owner is given up."""

    path: bytes = b""
    ino: int = 0
    kind: int = LOCK_FLOCK
    owner: int = 0  # chosen by the client: one lock each
    exclusive: bool = True
    wait_ms: int = 0
    ticket: bytes = b""


class LockReply(Message, tag=71, kw_only=True):
    """`granted` False: `holders` have it."""

    ino: int
    granted: bool
    holders: list[LockHolder]


class Unlock(Request, tag=72, kw_only=True):
    """Ends the lock of (client, owner), if there is one; with `force`, as the owner of the file or root, all
    locks of this kind. The inode may be gone. Answer: LocksReply, with what ended."""

    path: bytes = b""
    ino: int = 0
    kind: int = LOCK_FLOCK
    owner: int = 0
    force: bool = False
    ticket: bytes = b""


class GetLocks(Request, tag=73, kw_only=True):
    """Who holds locks of an inode."""

    path: bytes = b""
    ino: int = 0
    ticket: bytes = b""


class LocksReply(Message, tag=74, kw_only=True):
    ino: int
    holders: list[LockHolder]

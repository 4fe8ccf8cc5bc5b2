"""Locks: of a file or directory as flock(2), and of a directory's entries. docs/client.md, Locks.

A lock belongs to the session of this process: it ends with it, and a child of fork doesn't have it. Waiting
is done by the service; other threads of this process go on meanwhile.
"""

from __future__ import annotations

import fcntl
import logging
import secrets
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from ffs.client.core import Core
from ffs.client.session import Session
from ffs.errors import Busy, Fenced, FfsError, InvalidArgument, Overloaded
from ffs.proto import locking
from ffs.proto.locking import LOCK_ENTRIES, LOCK_FLOCK, LockHolder

_log = logging.getLogger(__name__)

WAIT_MS: Final = 5000  # of one request, while a lock is waited for


def describe_holders(holders: list[LockHolder]) -> str:
    """For people: who has it."""
    if not holders:
        return "somebody"
    first = holders[0].label or f"client {holders[0].client}"
    return first if len(holders) == 1 else f"{first} and {len(holders) - 1} more"


class Lock:
    """One lock of one inode, held or not. Thread-safe; a waiting `acquire` keeps other threads from it."""

    def __init__(
        self, core: Callable[[], Core], ino: int, path: str, ticket: bytes, kind: int = LOCK_FLOCK
    ) -> None:
        """`core` gives the core of the calling process; `ticket` is that of `ino`."""
        self._core = core
        self._ino = ino
        self._ticket = ticket
        self._path = path
        self._kind = kind
        self._owner = secrets.randbits(63)
        self._session: Session | None = None  # under which it is held
        self._mutex = threading.Lock()

    @property
    def held(self) -> bool:
        """Whether this process has it. False too when the session it was taken under is over."""
        session = self._session
        return session is not None and not session.over and self._is_ours(session)

    def _is_ours(self, session: Session) -> bool:
        try:
            return self._core().session() is session
        except FfsError:
            return False

    @property
    def lost(self) -> bool:
        """Whether it was held and its session is over since. Doesn't ask anybody: a process that is cut off
        from the service learns of it when it's back."""
        session = self._session
        return session is not None and session.over

    def ended(self) -> bool:
        """Whether the service says that this lock, taken before, isn't there any more: others may have ended
        it (`Client.break_locks`), which its holder isn't told. False too when no service answers soon, or it
        can't say. Blocking, a few seconds at most."""
        session = self._session
        if session is None:
            return False
        request = locking.GetLocks(ino=self._ino, ticket=self._ticket)
        try:
            reply = self._core().ask_if_there(request, locking.LocksReply)
        except FfsError as error:
            _log.info("%s: who holds locks of it can't be told: %s", self._path, error)
            return False
        if reply is None:
            return False
        mine = session.client_id, self._owner, self._kind
        return all((each.client, each.owner, each.kind) != mine for each in reply.holders)

    def acquire(self, *, exclusive: bool = True, timeout: float | None = None) -> list[LockHolder] | None:
        """Take it, or change it. `timeout`: seconds to wait, 0 not at all, None as long as it takes.

        Returns None when it is taken, else who has it. Blocking. While it waits to make a shared lock
        exclusive, the shared one is given up. Raises NotFound, AccessDenied; Busy: too many locks."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._mutex:
            while True:
                most_ms = min(WAIT_MS, int(self._core().options.request_timeout_s * 500))
                left_ms = most_ms if end is None else int(max(0.0, end - time.monotonic()) * 1000)
                reply = self._ask(exclusive, min(left_ms, most_ms))
                if reply.granted:
                    return None
                if left_ms <= most_ms and end is not None:
                    return reply.holders

    def _ask(self, exclusive: bool, wait_ms: int) -> locking.LockReply:
        for turn in range(3):
            session = self._core().session()
            request = locking.Lock(
                ino=self._ino,
                kind=self._kind,
                owner=self._owner,
                exclusive=exclusive,
                wait_ms=wait_ms,
                ticket=self._ticket,
            )
            try:
                # Given up in the middle, it may be taken all the same: then it is released at once.
                reply = session.call(request, locking.LockReply, undo=self._unlock())
            except Fenced:
                if turn == 2:
                    raise
                continue
            self._session = session if reply.granted else None if wait_ms and exclusive else self._session
            return reply
        raise AssertionError("unreachable")

    def _unlock(self) -> locking.Unlock:
        return locking.Unlock(ino=self._ino, kind=self._kind, owner=self._owner, ticket=self._ticket)

    def release(self) -> None:
        """Let go; nothing if it isn't held here. Blocking."""
        with self._mutex:
            session, self._session = self._session, None
            if session is None or session.over or not self._is_ours(session):
                return
            session.call(self._unlock(), locking.LocksReply)

    def flock(self, operation: int) -> None:
        """As fcntl.flock: LOCK_SH, LOCK_EX or LOCK_UN, with LOCK_NB not to wait (BlockingIOError)."""
        what = operation & ~fcntl.LOCK_NB
        if what == fcntl.LOCK_UN:
            self.release()
            return
        if what not in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            raise InvalidArgument("flock: give one of LOCK_SH, LOCK_EX, LOCK_UN", self._path)
        timeout = 0.0 if operation & fcntl.LOCK_NB else None
        holders = self.acquire(exclusive=what == fcntl.LOCK_EX, timeout=timeout)
        if holders is not None:
            raise Overloaded(f"locked by {describe_holders(holders)}", self._path)


class DirectoryLock:
    """What `Client.lock_directory` returns: the lock of a directory's entries, held. A context manager."""

    def __init__(
        self, core: Callable[[], Core], ino: int, path: str, ticket: bytes, timeout: float | None
    ) -> None:
        """Takes it. Raises Busy, naming the holder, if it isn't free in time."""
        self._path = path
        self._lock = Lock(core, ino, path, ticket, LOCK_ENTRIES)
        holders = self._lock.acquire(timeout=timeout)
        if holders is not None:
            raise Busy(f"the directory is locked by {describe_holders(holders)}", path)

    @property
    def held(self) -> bool:
        """Whether it still counts: a session that couldn't be renewed takes it along."""
        return self._lock.held

    def release(self) -> None:
        """Let go. Repeatable; blocking."""
        self._lock.release()

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = not self.held
        self.release()
        if lost and kind is None:
            raise Fenced("the lock was lost before it was released: its session is over", self._path)

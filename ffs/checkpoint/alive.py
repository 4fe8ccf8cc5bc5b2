"""How ranks tell each other that they live: a file each, in a directory of the store, which its rank holds
locked (docs/guides/checkpoint.md, Ranks that die).

The lock belongs to the session of the rank's process and ends with it, so a rank that dies is noticed when
its session has run out (`session_ttl` of its client), whatever it was doing.
"""

from __future__ import annotations

import contextlib
import posixpath
import threading
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from ffs.client.locks import Lock
from ffs.errors import FfsError, NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client

_PREFIX: Final = "alive-"
_BEING_MADE: Final = ".alive-"


def alive_name(rank: int) -> str:
    return f"{_PREFIX}{rank:05d}"


class Alive:
    """One rank's lock, and its look at those of the others. Any thread; all methods block."""

    def __init__(self, client: Client, directory: str, rank: int) -> None:
        self.client = client
        self.directory = directory
        self.rank = rank
        self._mutex = threading.Lock()
        self._lock: Lock | None = None
        self._seen: set[int] = set()  # ranks whose files were there

    def ensure(self) -> None:
        """Holds the lock when it returns, also if it was lost since with the session that it was taken under.
        Raises what the store says."""
        with self._mutex:
            while self._lock is None or not self._lock.held:
                self._lock = self._taken()

    def _taken(self) -> Lock | None:
        mine = posixpath.join(self.directory, alive_name(self.rank))
        scratch = posixpath.join(self.directory, f"{_BEING_MADE}{self.rank:05d}-{uuid.uuid4().hex}")
        self.client.makedirs(self.directory, exist_ok=True)
        try:
            self.client.mknod(scratch)
            inode, ticket = self.client.ticket(scratch)
            lock = Lock(self.client.core_of_process, inode, scratch, ticket)
            lock.acquire(timeout=0.0)
            self.client.replace(scratch, mine)  # nobody finds it unlocked
        except NotFound:
            return None  # somebody took the directory for remains in that moment
        return lock if self.client.lexists(mine) else None

    def ended(self, ranks: Iterable[int]) -> list[int]:
        """Of `ranks` those that were there once and hold their lock no more. One that has never been there
        isn't among them: it may come."""
        try:
            names = set(self.client.listdir(self.directory))
        except NotFound:
            names = set()
        found = []
        for rank in ranks:
            if alive_name(rank) in names:
                self._seen.add(rank)
                if is_free(self.client, posixpath.join(self.directory, alive_name(rank))):
                    found.append(rank)
            elif rank in self._seen:
                found.append(rank)
        return found

    def let_go(self) -> None:
        """Best effort: the lock ends with the session anyway."""
        with self._mutex:
            lock, self._lock = self._lock, None
            if lock is not None:
                with contextlib.suppress(FfsError):
                    lock.release()

    def close(self) -> None:
        """Lets go, and takes the file away, with the directory if it was the last one. Best effort."""
        with self._mutex:
            held = self._lock is not None
        if held:
            with contextlib.suppress(FfsError):
                self.client.remove(posixpath.join(self.directory, alive_name(self.rank)))
        self.let_go()
        if held:
            with contextlib.suppress(FfsError):
                self.client.rmdir(self.directory)


def is_free(client: Client, path: str) -> bool:
    """Whether nobody holds the lock of the file there, or it has gone."""
    try:
        return not client.locks(path)
    except NotFound:
        return True


def locks_in(names: Iterable[str]) -> list[str]:
    """Of a directory's names those of such files, also of ones that are being made. Pure."""
    return [name for name in names if name.startswith((_PREFIX, _BEING_MADE))]


def anybody_in(client: Client, directory: str) -> bool:
    """Whether any rank holds its lock there."""
    try:
        names = locks_in(client.listdir(directory))
    except NotFound:
        return False
    return not all(is_free(client, posixpath.join(directory, name)) for name in names)

"""Files of this machine or of the cluster, for `convert`: the same few calls on both. All block."""

from __future__ import annotations

import contextlib
import fcntl
import os
import posixpath
import re
import shutil
import uuid
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from ffs.checkpoint.commit import Attempt
from ffs.checkpoint.remains import collect_quietly
from ffs.errors import Exists

if TYPE_CHECKING:
    from ffs.client.client import Client

_MAKING: Final = re.compile(r"\..*\.making-[0-9a-f]{32}")


class Files(Protocol):
    def open(self, path: str) -> IO[bytes]: ...

    def exists(self, path: str) -> bool: ...

    def is_directory(self, path: str) -> bool: ...

    def create(self, path: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A file that appears when all went well. Exists. Directories above are made."""
        ...

    def create_directory(self, path: str) -> contextlib.AbstractContextManager[str]:
        """A directory by another name, which gets this one when all went well. Exists."""
        ...

    def write(self, path: str) -> IO[bytes]:
        """A file in such a directory."""
        ...


def local_files() -> Files:
    return _Local()


def store_files(client: Client) -> Files:
    return _Store(client)


class _Local:
    def open(self, path: str) -> IO[bytes]:
        return open(path, "rb")

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def write(self, path: str) -> IO[bytes]:
        return open(path, "xb")

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[IO[bytes]]:
        with _hidden_directory(path) as (hidden, parent):
            where = os.path.join(hidden, "file")
            with open(where, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(where, path)  # fails where a rename would replace
            except FileExistsError:
                raise Exists("was made meanwhile", path) from None
            _sync(parent)

    @contextlib.contextmanager
    def create_directory(self, path: str) -> Iterator[str]:
        with _hidden_directory(path) as (hidden, parent):
            where = os.path.join(hidden, "data")
            os.mkdir(where)
            yield where
            for name in os.listdir(where):
                _sync(os.path.join(where, name))
            _sync(where)
            if os.path.lexists(path):
                raise Exists("was made meanwhile", path)
            os.rename(where, path)  # of the same name, an empty directory at most could be replaced
            _sync(parent)


@contextlib.contextmanager
def _hidden_directory(path: str) -> Iterator[tuple[str, str]]:
    """A directory beside `path`, locked while it is used, and the one that has both. What a process that was
    killed has left there is taken away before: nobody holds its lock."""
    parent, name = os.path.split(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    _collect(parent)
    lock = None
    while lock is None:  # else somebody took it for remains in that moment
        hidden = os.path.join(parent, f".{name[:200]}.making-{uuid.uuid4().hex}")
        os.mkdir(hidden)
        try:
            lock = _locked(hidden)
        except OSError:  # no locks there: then nobody can take it for remains either
            lock = _opened(hidden)
    try:
        yield hidden, parent
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        os.close(lock)


def _collect(parent: str) -> None:
    for name in os.listdir(parent):
        if not _MAKING.fullmatch(name):
            continue
        path = os.path.join(parent, name)
        with contextlib.suppress(OSError):  # what isn't ours to look at or to remove stays
            lock = _locked(path)
            if lock is not None:
                try:
                    shutil.rmtree(path)
                finally:
                    os.close(lock)


def _opened(directory: str) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _locked(directory: str) -> int | None:
    """A descriptor that has its lock until it is closed; None: another process has it, or it has gone.
    OSError: it can't be locked."""
    try:
        fd = _opened(directory)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(directory)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


class _Store:
    def __init__(self, client: Client) -> None:
        self._client = client

    def open(self, path: str) -> IO[bytes]:
        file: Any = self._client.open(path, "rb")
        return file  # type: ignore[no-any-return]

    def exists(self, path: str) -> bool:
        return self._client.lexists(path)

    def is_directory(self, path: str) -> bool:
        return self._client.isdir(path)

    def write(self, path: str) -> IO[bytes]:
        file: Any = self._client.open(path, "xb")
        return file  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[IO[bytes]]:
        self._client.makedirs(posixpath.dirname(path) or "/", exist_ok=True)
        # Without a name until it is closed: of a process that is killed nothing stays.
        with self._client.open(path, "xb", atomic=True) as file:
            yield file

    @contextlib.contextmanager
    def create_directory(self, path: str) -> Iterator[str]:
        attempt = Attempt(self._client, path, uuid.uuid4().hex)
        collect_quietly(self._client, posixpath.dirname(path) or "/")
        attempt.begin()
        try:
            yield attempt.data
            self._client.rename_exclusive(attempt.data, path)
        finally:
            attempt.tidy()


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

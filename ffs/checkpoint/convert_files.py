"""Files of this machine or of the cluster, for `convert`: the same few calls on both. All block."""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import uuid
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Protocol

from ffs.errors import Exists

if TYPE_CHECKING:
    from ffs.client.client import Client


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
        hidden = _hidden(os.path.abspath(path))
        os.makedirs(os.path.dirname(hidden), exist_ok=True)
        try:
            with open(hidden, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(hidden, path)  # fails where a rename would replace
            except FileExistsError:
                raise Exists("was made meanwhile", path) from None
            _sync(os.path.dirname(hidden))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(hidden)

    @contextlib.contextmanager
    def create_directory(self, path: str) -> Iterator[str]:
        hidden = _hidden(os.path.abspath(path))
        os.makedirs(hidden)
        try:
            yield hidden
            for name in os.listdir(hidden):
                _sync(os.path.join(hidden, name))
            _sync(hidden)
            if os.path.lexists(path):
                raise Exists("was made meanwhile", path)
            os.rename(hidden, path)  # of the same name, an empty directory at most could be replaced
            _sync(os.path.dirname(hidden))
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


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
        hidden = _hidden(path)
        try:
            with self.write(hidden) as file:
                yield file
            self._client.rename_exclusive(hidden, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._client.remove(hidden)
            raise

    @contextlib.contextmanager
    def create_directory(self, path: str) -> Iterator[str]:
        hidden = _hidden(path)
        self._client.makedirs(hidden)
        try:
            yield hidden
            self._client.rename_exclusive(hidden, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._client.rmtree(hidden)
            raise


def _hidden(path: str) -> str:
    parent, name = posixpath.split(path)
    return posixpath.join(parent, f".{name[:200]}.making-{uuid.uuid4().hex}")


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

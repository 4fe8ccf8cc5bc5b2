"""A checkpoint's manifest, and the lock that keeps the checkpoint from being removed by retention while it is
read (docs/guides/checkpoint.md, Retention; FAULTS C8, C19).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import posixpath
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ffs.checkpoint import manifest as manifests
from ffs.checkpoint.manifest import Manifest
from ffs.errors import NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

log = logging.getLogger("ffs.checkpoint")

GRACE_S: Final = 1.0  # of reading without a lock


class Gone(NotFound):
    """The checkpoint that was begun to be read was removed. Another may have its name by now."""


def read_manifest(client: Client, path: str) -> Manifest:
    """The manifest of the checkpoint at `path`. Blocking. NotFound if there is none; Damaged."""
    with _opened(client, path) as file:
        return _decoded(file, path)


@contextlib.contextmanager
def held(client: Client, path: str) -> Iterator[Manifest]:
    """The manifest, while the lock is had. Blocking. NotFound; Damaged."""
    while True:
        with _opened(client, path) as file:
            file.flock(fcntl.LOCK_SH)
            if _is_there(client, path, file):  # else it was being removed just now
                yield _decoded(file, path)
                return


class Hold:
    """What `holding` gives: `manifest`, and whether what was read counts. Any thread."""

    manifest: Manifest

    def __init__(self, client: Client, path: str, file: File) -> None:
        self._client, self._path, self._file = client, path, file
        self._mutex = threading.Lock()
        self._over = threading.Event()
        self._asks = False
        self._later = threading.Thread(target=self._lock_later, name="ffs-hold", daemon=True)
        self._later.start()

    def decide(self) -> None:
        """Returns if what was read until now counts. Gone: the checkpoint was being removed; what was read
        counts for nothing. Blocking."""
        # A removal begins with the checkpoint's name: while that is there, nothing below it was touched.
        if not _is_there(self._client, self._path, self._file):
            raise Gone("the checkpoint was removed while it was read", self._path)

    @contextlib.contextmanager
    def unless_gone(self) -> Iterator[None]:
        """What is raised in there is raised if the checkpoint stays; else Gone: files that are being
        removed look damaged."""
        try:
            yield
        except Exception as error:
            try:
                self.decide()
            except Gone as gone:
                raise gone from error
            raise

    def end(self) -> None:
        """Before the file is closed: a lock that is being asked for would outlive it. Blocking then."""
        with self._mutex:
            self._over.set()
        if self._asks:
            self._later.join()

    def _lock_later(self) -> None:
        if self._over.wait(GRACE_S):
            return
        with self._mutex:
            if self._over.is_set():
                return
            self._asks = True
        try:
            self._file.flock(fcntl.LOCK_SH)
        except Exception as error:  # more readers than a file can have locks, say
            log.warning("%s is read without a lock, and may be removed meanwhile: %s", self._path, error)


@contextlib.contextmanager
def holding(client: Client, path: str) -> Iterator[Hold]:
    """As `held`, but whoever is done soon needs no lock: `Hold.decide` says afterwards whether what was read
    counts. (Locks are durable: each would wait for a flush, behind what all ranks read, and for another when
    it ends.) A reader that takes longer than GRACE_S gets it meanwhile. Blocking. NotFound; Damaged."""
    with _opened(client, path) as file:
        hold = Hold(client, path, file)
        try:
            with hold.unless_gone():
                hold.manifest = _decoded(file, path)
            yield hold
        finally:
            hold.end()


def _manifest_of(path: str) -> str:
    return posixpath.join(path, manifests.FILE_NAME)


def _opened(client: Client, path: str) -> Any:
    try:
        return client.open(_manifest_of(path), "rb", buffering=0)
    except FileNotFoundError as error:
        raise NotFound("no checkpoint: it has no manifest.json", path) from error


def _is_there(client: Client, path: str, file: File) -> bool:
    """Whether the checkpoint is still the one whose manifest this is."""
    try:
        return client.stat(_manifest_of(path)).st_ino == file.inode
    except NotFound:
        return False


def _decoded(file: File, path: str) -> Manifest:
    return manifests.decode(file.pread(file.size, 0), _manifest_of(path))

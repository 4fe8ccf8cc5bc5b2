"""The calls on names that change nothing, named as in os and os.path. docs/client.md, Namespace.

All block; all are thread-safe; all raise OSErrors of ffs.errors with the path in them.
"""

from __future__ import annotations

import os
import stat as stat_bits
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import TypeVar

from ffs import errors
from ffs.client.attributes import DirectoryEntry, DiskUsage, stat_result
from ffs.client.core import Core
from ffs.client.paths import PathLike, check_path, decode_text, join, wire_path
from ffs.proto import meta
from ffs.proto.common import ErrorReply, OkReply, to_error

E = TypeVar("E")

_PAGE_ENTRIES = 1000
_BATCH_ENTRIES = 1024


class Lookups:
    """Mixed into Client."""

    @property
    def core(self) -> Core:
        """Connections, routing and session of this process."""
        raise NotImplementedError

    def core_of_process(self) -> Core:
        """`core`, as a function: for what outlives a fork."""
        raise NotImplementedError

    @property
    def device(self) -> int:
        """st_dev of everything in this cluster."""
        raise NotImplementedError

    def attributes(self, path: PathLike, *, follow_symlinks: bool = True) -> meta.Attributes:
        """All that the service knows of an inode: layout and epoch too."""
        request = meta.Stat(path=wire_path(path), follow=follow_symlinks)
        return self.core.ask(request, meta.StatReply).attributes

    def ticket(self, path: PathLike) -> tuple[int, bytes]:
        """The inode id of what is at `path`, and what requests that name it by its id carry."""
        reply = self.core.ask(meta.Stat(path=wire_path(path), want_ticket=True), meta.StatReply)
        return reply.attributes.ino, reply.ticket

    def stat(self, path: PathLike, *, follow_symlinks: bool = True) -> os.stat_result:
        """As os.stat. There is no atime; st_atime repeats st_mtime."""
        request = meta.Stat(path=wire_path(path), follow=follow_symlinks)
        return stat_result(self.core.ask(request, meta.StatReply).attributes, self.device)

    def lstat(self, path: PathLike) -> os.stat_result:
        """As os.lstat: of a symbolic link itself."""
        return self.stat(path, follow_symlinks=False)

    def stat_many(
        self, paths: Iterable[PathLike], *, follow_symlinks: bool = True
    ) -> list[os.stat_result | errors.FfsError]:
        """`stat` of many paths in few requests: for each its result, or its error in place of one."""
        found: list[os.stat_result | errors.FfsError] = []
        for page in pages([wire_path(path) for path in paths]):
            request = meta.StatMany(paths=tuple(page), follow=follow_symlinks)
            for result in self.core.ask(request, meta.StatManyReply).results:
                if isinstance(result, ErrorReply):
                    found.append(to_error(result))
                else:
                    found.append(stat_result(result.attributes, self.device))
        return found

    def exists(self, path: PathLike) -> bool:
        """As os.path.exists: False for a dangling link. Errors other than absence are raised."""
        return self._mode_of(path, True) is not None

    def lexists(self, path: PathLike) -> bool:
        """As os.path.lexists: True for a dangling link."""
        return self._mode_of(path, False) is not None

    def isfile(self, path: PathLike) -> bool:
        """As os.path.isfile."""
        return stat_bits.S_ISREG(self._mode_of(path, True) or 0)

    def isdir(self, path: PathLike) -> bool:
        """As os.path.isdir."""
        return stat_bits.S_ISDIR(self._mode_of(path, True) or 0)

    def islink(self, path: PathLike) -> bool:
        """As os.path.islink."""
        return stat_bits.S_ISLNK(self._mode_of(path, False) or 0)

    def getsize(self, path: PathLike) -> int:
        """As os.path.getsize: bytes."""
        return self.stat(path).st_size

    def _mode_of(self, path: PathLike, follow: bool) -> int | None:
        try:
            return self.stat(path, follow_symlinks=follow).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None

    def access(self, path: PathLike, mode: int = os.F_OK) -> bool:
        """As os.access: may this process do `mode` (os.R_OK | os.W_OK | os.X_OK; os.F_OK: is it there)?"""
        try:
            self.core.ask(meta.Access(path=wire_path(path), want=mode), OkReply)
        except (errors.AccessDenied, errors.NotPermitted, FileNotFoundError, NotADirectoryError):
            return False
        return True

    def listdir(self, path: PathLike = "/") -> list[str]:
        """As os.listdir: names in no order to rely on. What a rename moves meanwhile may show twice."""
        names: list[str] = []
        for _, entries in self._read_pages(path, attributes=False):
            names += [decode_text(entry.name) for entry in entries]
        return names

    def scandir(self, path: PathLike = "/") -> ScandirIterator:
        """As os.scandir: an iterator and context manager of entries that know their attributes already."""
        listing = self._read_pages(path, attributes=True)
        first = next(listing)  # so that a path which isn't a directory is refused here, as by os.scandir
        return ScandirIterator(self._entries_of(chain((first,), listing)))

    def _entries_of(self, listing: Iterable[tuple[str, list[meta.DirEntry]]]) -> Iterator[DirectoryEntry]:
        def look(entry_path: str, follow: bool) -> os.stat_result:
            return self.stat(entry_path, follow_symlinks=follow)

        for directory, entries in listing:
            for entry in entries:
                yield DirectoryEntry(directory, entry, self.device, look)

    def _read_pages(self, path: PathLike, *, attributes: bool) -> Iterator[tuple[str, list[meta.DirEntry]]]:
        directory = check_path(path)
        request = meta.ReadDir(path=wire_path(directory), limit=_PAGE_ENTRIES, attributes=attributes)
        while True:
            page = self.core.ask(request, meta.ReadDirReply)
            yield directory, page.entries
            if not page.more or not page.entries:
                return
            request = meta.ReadDir(
                ino=page.ino,
                after=page.entries[-1].name,
                limit=_PAGE_ENTRIES,
                attributes=attributes,
                ticket=page.ticket,
            )

    def walk(
        self,
        top: PathLike = "/",
        topdown: bool = True,
        onerror: Callable[[OSError], object] | None = None,
        followlinks: bool = False,
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """As os.walk."""
        directory = check_path(top)
        folders: list[str] = []
        others: list[str] = []
        followed: list[str] = []
        try:
            for entry in self.scandir(directory):
                if _is_directory(entry):
                    folders.append(entry.name)
                    if followlinks or not entry.is_symlink():
                        followed.append(entry.name)
                else:
                    others.append(entry.name)
        except OSError as error:
            if onerror is not None:
                onerror(error)
            return
        if topdown:
            yield directory, folders, others
            links = set(folders) - set(followed)
            followed = [name for name in folders if name not in links]
        for name in followed:
            yield from self.walk(join(directory, name), topdown, onerror, followlinks)
        if not topdown:
            yield directory, folders, others

    def readlink(self, path: PathLike) -> str:
        """As os.readlink."""
        return decode_text(self.core.ask(meta.ReadLink(path=wire_path(path)), meta.ReadLinkReply).target)

    def statvfs(self, path: PathLike = "/") -> os.statvfs_result:
        """As os.statvfs, for the chain table of what is at `path`: usable bytes, after replication. A
        quota that counts it and leaves less is told instead."""
        total_bytes, free_bytes = self._space(path)
        block = 4096
        free = free_bytes // block
        return os.statvfs_result(
            (block, block, total_bytes // block, free, free, 0, 0, 0, 0, meta.MAX_NAME_BYTES)
        )

    def disk_usage(self, path: PathLike = "/") -> DiskUsage:
        """As shutil.disk_usage, for the chain table of what is at `path`, or the quota that counts it."""
        total, free = self._space(path)
        return DiskUsage(total, total - free, free)

    def _space(self, path: PathLike) -> tuple[int, int]:
        """Bytes in all, and free ones, for who writes to `path`."""
        reply = self.core.ask(meta.StatFs(path=wire_path(path)), meta.StatFsReply)
        if not reply.quota_bytes:
            return reply.total_bytes, reply.free_bytes
        return min(reply.total_bytes, reply.quota_bytes), min(reply.free_bytes, reply.quota_free_bytes)


class ScandirIterator(Iterator[DirectoryEntry]):
    """What `scandir` returns."""

    def __init__(self, entries: Iterator[DirectoryEntry]) -> None:
        self._entries = entries

    def __next__(self) -> DirectoryEntry:
        return next(self._entries)

    def __enter__(self) -> ScandirIterator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration early; repeatable."""
        self._entries = iter(())


def _is_directory(entry: DirectoryEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link that leads nowhere: os.walk takes it for a file


def pages(entries: Sequence[E]) -> Iterator[Sequence[E]]:
    """`entries` in batches that one request may carry."""
    for start in range(0, len(entries), _BATCH_ENTRIES):
        yield entries[start : start + _BATCH_ENTRIES]

"""The calls on names, named and behaving as in os and shutil. docs/client.md, Namespace.

All block; all are thread-safe; all raise OSErrors of ffs.errors with the path in them. A call
that changes something takes effect once, also when its answer is lost and it is sent again.
"""

from __future__ import annotations

import os
import stat as stat_bits
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import TypeVar

from ffs import errors
from ffs.client.attributes import DirectoryEntry, DiskUsage, stat_result
from ffs.client.core import Core
from ffs.client.paths import PathLike, check_path, decode_text, encode_text, join, split, wire_path
from ffs.client.routing import check_layout_options
from ffs.proto import meta, records
from ffs.proto.common import ErrorReply, Message, OkReply, to_error

M = TypeVar("M", bound=Message)

_PAGE_ENTRIES = 1000
_BATCH_ENTRIES = 1024

F_OK, R_OK, W_OK, X_OK = 0, 4, 2, 1


class Namespace:
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

    def _layout_choice(
        self, table: str | int | None, chunk_size: int | None, stripe: int | None
    ) -> meta.LayoutChoice | None:
        """What a creator asks for; None where nothing is said. InvalidArgument, NotFound (no such table)."""
        if table is None and chunk_size is None and stripe is None:
            return None
        check_layout_options(chunk_size, stripe)
        return meta.LayoutChoice(
            table=0 if table is None else self.core.routing.table_id(table),
            chunk_size=chunk_size or 0,
            stripe=-1 if stripe is None else stripe,
        )

    # --- looking ----------------------------------------------------------------------------

    def attributes(self, path: PathLike, *, follow_symlinks: bool = True) -> meta.Attributes:
        """All that the service knows of an inode: layout and epoch too."""
        request = meta.Stat(path=wire_path(path), follow=follow_symlinks)
        return self.core.ask(request, meta.StatReply).attributes

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

    def access(self, path: PathLike, mode: int = F_OK) -> bool:
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
                ino=page.ino, after=page.entries[-1].name, limit=_PAGE_ENTRIES, attributes=attributes
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
        """As os.statvfs, for the chain table of what is at `path`: usable bytes, after replication."""
        reply = self.core.ask(meta.StatFs(path=wire_path(path)), meta.StatFsReply)
        block = 4096
        free = reply.free_bytes // block
        return os.statvfs_result(
            (block, block, reply.total_bytes // block, free, free, 0, 0, 0, 0, meta.MAX_NAME_BYTES)
        )

    def disk_usage(self, path: PathLike = "/") -> DiskUsage:
        """As shutil.disk_usage, for the chain table of what is at `path`."""
        reply = self.core.ask(meta.StatFs(path=wire_path(path)), meta.StatFsReply)
        return DiskUsage(reply.total_bytes, reply.total_bytes - reply.free_bytes, reply.free_bytes)

    # --- directories ------------------------------------------------------------------------

    def mkdir(
        self,
        path: PathLike,
        mode: int = 0o777,
        *,
        table: str | int | None = None,
        chunk_size: int | None = None,
        stripe: int | None = None,
    ) -> None:
        """As os.mkdir. The layout options are inherited by what is made inside.

        table: chain table, by name or id. chunk_size: bytes, a power of two of 4 KiB to 16 MiB.
        stripe: over how many chains a file goes; 0 for all of the table.
        """
        self._mkdir(path, mode, False, self._layout_choice(table, chunk_size, stripe))

    def makedirs(
        self,
        path: PathLike,
        mode: int = 0o777,
        exist_ok: bool = False,
        *,
        table: str | int | None = None,
        chunk_size: int | None = None,
        stripe: int | None = None,
    ) -> None:
        """As os.makedirs, in one request with exist_ok. Layout options as in mkdir, for what is made."""
        layout = self._layout_choice(table, chunk_size, stripe)
        if not exist_ok:
            parent, name = split(check_path(path))
            if name and parent != "/":
                self._mkdir(parent, mode, True, None)
        self._mkdir(path, mode, exist_ok, layout)

    def _mkdir(self, path: PathLike, mode: int, parents: bool, layout: meta.LayoutChoice | None) -> None:
        core = self.core
        request = meta.MkDir(
            path=wire_path(path),
            mode=mode & 0o7777 & ~core.umask,
            parents=parents,
            layout=layout,
            parent_mode=0o777 & ~core.umask,
        )
        core.change(request, meta.StatReply)

    def rmdir(self, path: PathLike) -> None:
        """As os.rmdir: an empty directory."""
        self.core.change(meta.RmDir(path=wire_path(path)), OkReply)

    def rmtree(self, path: PathLike, ignore_errors: bool = False) -> None:
        """As shutil.rmtree, but in one transaction: the tree is gone at once, its space comes back later.

        Needs write and search permission on the parent and ownership of the root of the tree, or of
        all in it.
        """
        try:
            attributes = self.attributes(path, follow_symlinks=False)
            if attributes.type != records.DIRECTORY:
                raise errors.NotADirectory(
                    "rmtree takes a directory, not a link or a file; use remove", check_path(path)
                )
            self.core.change(meta.RemoveTree(path=wire_path(path)), OkReply)
        except OSError:
            if not ignore_errors:
                raise

    # --- names ------------------------------------------------------------------------------

    def remove(self, path: PathLike) -> None:
        """As os.remove. A file that is open for writing keeps its chunks until it is closed."""
        self.core.change(meta.Unlink(path=wire_path(path)), OkReply)

    def unlink(self, path: PathLike) -> None:
        """As os.unlink; the same as remove."""
        self.remove(path)

    def unlink_many(self, paths: Iterable[PathLike]) -> list[errors.FfsError | None]:
        """`remove` of many paths in few requests: None, or its error, for each."""
        found: list[errors.FfsError | None] = []
        for page in pages([wire_path(path) for path in paths]):
            reply = self.core.change(meta.UnlinkMany(paths=tuple(page)), meta.UnlinkManyReply)
            found += [
                to_error(result) if isinstance(result, ErrorReply) else None for result in reply.results
            ]
        return found

    def mknod(
        self,
        path: PathLike,
        mode: int = 0o600,
        *,
        table: str | int | None = None,
        chunk_size: int | None = None,
        stripe: int | None = None,
    ) -> None:
        """As os.mknod: make an empty file, in one request; Exists if there is one. Layout as in mkdir."""
        core = self.core
        request = meta.Open(
            path=wire_path(path),
            flags=meta.OPEN_READ | meta.OPEN_CREATE | meta.OPEN_EXCL,
            mode=mode & 0o7777 & ~core.umask,
            layout=self._layout_choice(table, chunk_size, stripe),
        )
        core.change(request, meta.Opened)

    def create_many(
        self,
        paths: Iterable[PathLike],
        mode: int = 0o666,
        exist_ok: bool = False,
        *,
        table: str | int | None = None,
        chunk_size: int | None = None,
        stripe: int | None = None,
    ) -> list[os.stat_result | errors.FfsError]:
        """Create many empty files in few requests: for each its attributes, or its error."""
        core = self.core
        flags = meta.OPEN_READ | meta.OPEN_CREATE | (0 if exist_ok else meta.OPEN_EXCL)
        layout = self._layout_choice(table, chunk_size, stripe)
        bits = mode & 0o7777 & ~core.umask
        found: list[os.stat_result | errors.FfsError] = []
        entries = [meta.OpenEntry(wire_path(path), flags, bits) for path in paths]
        for page in pages(entries):
            reply = core.change(meta.OpenMany(entries=tuple(page), layout=layout), meta.OpenManyReply)
            for result in reply.results:
                if isinstance(result, ErrorReply):
                    found.append(to_error(result))
                else:
                    found.append(stat_result(result.attributes, self.device))
        return found

    def rename(self, source: PathLike, target: PathLike) -> None:
        """As os.rename on POSIX: atomic, and an existing file at `target` is replaced."""
        self._rename(source, target, 0)

    def replace(self, source: PathLike, target: PathLike) -> None:
        """As os.replace; the same as rename."""
        self._rename(source, target, 0)

    def rename_exclusive(self, source: PathLike, target: PathLike) -> None:
        """Rename only if nothing is at `target`; else Exists."""
        self._rename(source, target, meta.RENAME_NOREPLACE)

    def exchange(self, first: PathLike, second: PathLike) -> None:
        """Swap two names in one step; both must exist."""
        self._rename(first, second, meta.RENAME_EXCHANGE)

    def _rename(self, source: PathLike, target: PathLike, flags: int) -> None:
        request = meta.Rename(source=wire_path(source), target=wire_path(target), flags=flags)
        self.core.change(request, OkReply)

    def link(self, source: PathLike, target: PathLike, *, follow_symlinks: bool = False) -> None:
        """As os.link: a further name for a file."""
        request = meta.Link(source=wire_path(source), target=wire_path(target), follow=follow_symlinks)
        self.core.change(request, meta.StatReply)

    def symlink(self, source: str | os.PathLike[str], target: PathLike) -> None:
        """As os.symlink(src, dst): `target` becomes a link to `source`, which needn't exist."""
        text = os.fspath(source)
        if not text or "\0" in text:
            raise errors.InvalidArgument("the target of a symbolic link can't be empty or have a NUL", text)
        self.core.change(meta.SymLink(path=wire_path(target), target=encode_text(text)), meta.StatReply)

    # --- attributes -------------------------------------------------------------------------

    def truncate(self, path: PathLike, length: int) -> None:
        """As os.truncate: cut, or extended by a hole that reads as zeros."""
        if length < 0:
            raise errors.InvalidArgument(f"length {length} is negative", check_path(path))
        self.core.change(meta.Truncate(path=wire_path(path), length=length), meta.TruncateReply)

    def chmod(self, path: PathLike, mode: int, *, follow_symlinks: bool = True) -> None:
        """As os.chmod."""
        self._set(path, follow_symlinks, meta.SetAttr(what=meta.SET_MODE, mode=mode & 0o7777))

    def chown(self, path: PathLike, uid: int, gid: int, *, follow_symlinks: bool = True) -> None:
        """As os.chown: -1 leaves a value as it is."""
        what = (meta.SET_UID if uid != -1 else 0) | (meta.SET_GID if gid != -1 else 0)
        self._set(path, follow_symlinks, meta.SetAttr(what=what, uid=max(uid, 0), gid=max(gid, 0)))

    def utime(
        self,
        path: PathLike,
        times: tuple[float, float] | None = None,
        *,
        ns: tuple[int, int] | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """As os.utime; the first of each pair, the access time, is accepted and isn't kept."""
        if times is not None and ns is not None:
            raise ValueError("utime: you may specify either 'times' or 'ns' but not both")
        if ns is None and times is not None:
            whole, part = divmod(times[1], 1)
            ns = (0, int(whole) * 1_000_000_000 + int(part * 1e9))
        if ns is None:
            request = meta.SetAttr(what=meta.SET_MTIME_NOW, mtime_ns=time.time_ns())
        else:
            request = meta.SetAttr(what=meta.SET_MTIME, mtime_ns=ns[1])
        self._set(path, follow_symlinks, request)

    def _set(self, path: PathLike, follow: bool, request: meta.SetAttr) -> None:
        request.path = wire_path(path)
        request.follow = follow
        self.core.change(request, meta.StatReply)


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


E = TypeVar("E")


def pages(entries: Sequence[E]) -> Iterator[Sequence[E]]:
    """`entries` in batches that one request may carry."""
    for start in range(0, len(entries), _BATCH_ENTRIES):
        yield entries[start : start + _BATCH_ENTRIES]

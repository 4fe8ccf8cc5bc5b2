"""The two ends of a copy under one set of calls: this machine's files and a cluster's.

Paths are str with surrogateescape on both. Every call blocks and raises OSErrors. Thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from ffs import errors
from ffs.cli.location import Location
from ffs.client.core import read_umask
from ffs.client.handle import OpenFile
from ffs.client.lookups import pages
from ffs.client.paths import encode_path, split, wire_path
from ffs.proto import meta
from ffs.proto.common import ErrorReply, to_error

if TYPE_CHECKING:
    import argparse

    from ffs.client.client import Client
    from ffs.client.file import File

Entry = tuple[str, os.stat_result]


class Reader(Protocol):
    """An open source."""

    def read_at(self, offset: int, out: memoryview) -> int:
        """Fill `out`; fewer bytes only at the end. Any thread."""

    def close(self) -> None: ...


class Writer(Protocol):
    """An open target, which has no name before `commit`."""

    kept: int
    """Bytes that an earlier run left in it and that needn't be moved again."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data`. Any thread."""

    def checkpoint(self) -> None:
        """What was written so far will be found by a later run, if the target is resumable."""

    def commit(self, size: int, meta: Meta) -> None:
        """Give it its attributes and then its name, in one step."""

    def abandon(self) -> None:
        """Leave no trace (a resumable one: the part that is there). Repeatable."""


class Meta:
    """What a target gets beside its content. None: as a new file has it."""

    __slots__ = ("mode", "mtime_ns", "owner")

    def __init__(
        self, mode: int | None = None, mtime_ns: int | None = None, owner: tuple[int, int] | None = None
    ) -> None:
        self.mode = mode
        self.mtime_ns = mtime_ns
        self.owner = owner


class Side(Protocol):
    """One end of a copy."""

    remote: bool

    def stat(self, path: str, *, follow: bool = True) -> os.stat_result: ...
    def stat_many(self, paths: Sequence[str]) -> list[os.stat_result | None]:
        """lstat of each; None where nothing is. Other errors are raised."""

    def entries(self, path: str) -> list[Entry]:
        """(name, lstat) of a directory's entries, in order of names."""

    def readlink(self, path: str) -> str: ...
    def symlink(self, leads_to: str, path: str) -> None:
        """Makes a symlink; replaces a file or symlink of that name, in one step."""

    def mkdir(self, path: str, mode: int) -> None:
        """Makes one directory; content if there is one."""

    def makedirs(self, path: str) -> None: ...
    def apply(self, path: str, meta: Meta) -> None:
        """Mode, owner, mtime of what is there (of a link itself, which has no mode: owner and mtime)."""

    def remove(self, path: str) -> None: ...
    def remove_many(self, paths: Sequence[str]) -> list[OSError | None]: ...
    def rmtree(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def open_readers(self, paths: Sequence[str]) -> list[Reader | OSError]: ...
    def open_writers(self, targets: Sequence[tuple[str, int]]) -> list[Writer | OSError]:
        """For each (path, mode of a new file)."""

    def open_part(self, path: str, part: str, mode: int, size: int) -> Writer:
        """A target whose content grows in a file `part` beside it, which a later run finds again."""


def exists(side: Side, path: str) -> bool:
    """Whether anything has that name, also a dangling link."""
    return lstat_or_none(side, path) is not None


def lstat_or_none(side: Side, path: str) -> os.stat_result | None:
    """lstat, None where nothing is."""
    try:
        return side.stat(path, follow=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_directory(side: Side, path: str) -> bool:
    """Whether it is a directory or leads to one."""
    try:
        return stat.S_ISDIR(side.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


# --- this machine -------------------------------------------------------------------------------------


class LocalSide:
    """Files of this machine."""

    remote = False

    def stat(self, path: str, *, follow: bool = True) -> os.stat_result:
        return os.stat(path, follow_symlinks=follow)

    def stat_many(self, paths: Sequence[str]) -> list[os.stat_result | None]:
        return [lstat_or_none(self, path) for path in paths]

    def entries(self, path: str) -> list[Entry]:
        found = []
        with os.scandir(path) as listing:
            for entry in listing:
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
        return sorted(found, key=lambda entry: entry[0])

    def readlink(self, path: str) -> str:
        return os.readlink(path)

    def symlink(self, leads_to: str, path: str) -> None:
        scratch = scratch_name(path)
        os.symlink(leads_to, scratch)
        try:
            os.replace(scratch, path)
        except OSError:
            os.unlink(scratch)
            raise

    def mkdir(self, path: str, mode: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode)
            return
        if not os.path.isdir(path):
            raise errors.NotADirectory("is in the way: it isn't a directory", path)

    def makedirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def apply(self, path: str, meta: Meta) -> None:
        if meta.owner is not None:
            with contextlib.suppress(PermissionError):
                os.chown(path, *meta.owner, follow_symlinks=False)
        if meta.mode is not None and not os.path.islink(path):
            os.chmod(path, meta.mode)
        if meta.mtime_ns is not None:
            os.utime(path, ns=(meta.mtime_ns, meta.mtime_ns), follow_symlinks=False)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_many(self, paths: Sequence[str]) -> list[OSError | None]:
        found: list[OSError | None] = []
        for path in paths:
            try:
                os.unlink(path)
                found.append(None)
            except OSError as error:
                found.append(error)
        return found

    def rmtree(self, path: str) -> None:
        shutil.rmtree(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def open_readers(self, paths: Sequence[str]) -> list[Reader | OSError]:
        found: list[Reader | OSError] = []
        for path in paths:
            try:
                found.append(_LocalReader(path))
            except OSError as error:
                found.append(error)
        return found

    def open_writers(self, targets: Sequence[tuple[str, int]]) -> list[Writer | OSError]:
        found: list[Writer | OSError] = []
        for path, mode in targets:
            try:
                found.append(_LocalWriter(path, scratch_name(path), mode, resumable=False))
            except OSError as error:
                found.append(error)
        return found

    def open_part(self, path: str, part: str, mode: int, size: int) -> Writer:
        return _LocalWriter(path, part, mode, resumable=True)


def scratch_name(path: str) -> str:
    """A name beside `path` that is this process's own and fits."""
    folder, name = os.path.split(path.rstrip("/"))
    while len(os.fsencode(name)) > 200:
        name = name[:-1]
    return os.path.join(folder, f".{name}.{os.getpid()}.{os.urandom(4).hex()}.ffs-part")


class _LocalReader:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, offset: int, out: memoryview) -> int:
        done = 0
        while done < len(out):
            count = os.preadv(self._fd, [out[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        os.close(self._fd)


class _LocalWriter:
    def __init__(self, path: str, scratch: str, mode: int, *, resumable: bool) -> None:
        self._path, self._scratch, self._resumable = path, scratch, resumable
        self._fd = -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if resumable else os.O_EXCL)
        self._fd = os.open(scratch, flags, mode & 0o777)
        self.kept = os.fstat(self._fd).st_size

    def write_at(self, offset: int, data: memoryview) -> None:
        while data:
            count = os.pwrite(self._fd, data, offset)
            offset += count
            data = data[count:]

    def checkpoint(self) -> None:
        pass  # what was written is in the file

    def commit(self, size: int, meta: Meta) -> None:
        fd = self._fd
        os.ftruncate(fd, size)
        if meta.owner is not None:
            with contextlib.suppress(PermissionError):
                os.fchown(fd, *meta.owner)
        if meta.mode is not None:
            os.fchmod(fd, meta.mode)
        if meta.mtime_ns is not None:
            os.utime(fd, ns=(meta.mtime_ns, meta.mtime_ns))
        os.fsync(fd)  # else a power cut may leave the name with nothing under it
        os.replace(self._scratch, self._path)
        self._resumable = True  # nothing of it is left to remove
        self.abandon()

    def abandon(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        os.close(fd)
        if not self._resumable:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._scratch)


# --- a cluster ----------------------------------------------------------------------------------------


class ClusterSide:
    """Files of one cluster."""

    remote = True

    def __init__(self, client: Client) -> None:
        self.client = client

    def stat(self, path: str, *, follow: bool = True) -> os.stat_result:
        return self.client.stat(path, follow_symlinks=follow)

    def stat_many(self, paths: Sequence[str]) -> list[os.stat_result | None]:
        found: list[os.stat_result | None] = []
        for result in self.client.stat_many(paths, follow_symlinks=False):
            if isinstance(result, FileNotFoundError | NotADirectoryError):
                found.append(None)
            elif isinstance(result, OSError):
                raise result
            else:
                found.append(result)
        return found

    def entries(self, path: str) -> list[Entry]:
        found = []
        for entry in self.client.scandir(path):
            with contextlib.suppress(FileNotFoundError):
                found.append((entry.name, entry.stat(follow_symlinks=False)))
        return sorted(found, key=lambda entry: entry[0])

    def readlink(self, path: str) -> str:
        return self.client.readlink(path)

    def symlink(self, leads_to: str, path: str) -> None:
        try:
            self.client.symlink(leads_to, path)
        except FileExistsError:
            scratch = scratch_name(path)
            self.client.symlink(leads_to, scratch)
            try:
                self.client.replace(scratch, path)
            except OSError:
                self.client.remove(scratch)
                raise

    def mkdir(self, path: str, mode: int) -> None:
        try:
            self.client.mkdir(path, mode)
        except FileExistsError:
            if not self.client.isdir(path):
                raise errors.NotADirectory("is in the way: it isn't a directory", path) from None

    def makedirs(self, path: str) -> None:
        self.client.makedirs(path, exist_ok=True)

    def apply(self, path: str, meta: Meta) -> None:
        if meta.owner is not None:
            with contextlib.suppress(PermissionError):
                self.client.chown(path, *meta.owner, follow_symlinks=False)
        if meta.mode is not None and not self.client.islink(path):
            self.client.chmod(path, meta.mode)
        if meta.mtime_ns is not None:
            time_ns = max(meta.mtime_ns, 0)  # a cluster has no times before 1970
            self.client.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)

    def remove(self, path: str) -> None:
        self.client.remove(path)

    def remove_many(self, paths: Sequence[str]) -> list[OSError | None]:
        return list(self.client.unlink_many(paths))

    def rmtree(self, path: str) -> None:
        self.client.rmtree(path)

    def rmdir(self, path: str) -> None:
        self.client.rmdir(path)

    def open_readers(self, paths: Sequence[str]) -> list[Reader | OSError]:
        return [
            result if isinstance(result, OSError) else _ClusterReader(result)
            for result in self.client.open_many(paths, "rb")
        ]

    def open_writers(self, targets: Sequence[tuple[str, int]]) -> list[Writer | OSError]:
        """Unnamed files, made in few requests: a run that is killed leaves nothing behind."""
        return [
            result if isinstance(result, OSError) else _UnnamedWriter(self.client, result)
            for result in _open_unnamed_many(self.client, targets)
        ]

    def open_part(self, path: str, part: str, mode: int, size: int) -> Writer:
        return _PartWriter(self.client, path, part, mode)


class _ClusterReader:
    def __init__(self, file: File) -> None:
        self._file = file

    def read_at(self, offset: int, out: memoryview) -> int:
        # To the length at open: whoever reads on asks the service each time whether there is more.
        left = max(0, self._file.size - offset)
        return self._file.pread_into(out[:left], offset)

    def close(self) -> None:
        self._file.close()


def _of_file(error: errors.FfsError, path: str) -> errors.FfsError:
    """What finds no room is the file, where the service names the directory that it is made in, as its own
    name isn't known there yet. What else is wrong is of the directory."""
    if isinstance(error, errors.QuotaExceeded | errors.NoSpace):
        error.filename = path
    return error


def _open_unnamed_many(client: Client, targets: Sequence[tuple[str, int]]) -> list[File | OSError]:
    from ffs.client.file import File

    core = client.core
    flags = meta.OPEN_TMPFILE | meta.OPEN_WRITE
    found: list[File | OSError] = []
    for page in pages(list(targets)):
        entries = tuple(
            meta.OpenEntry(wire_path(split(path)[0]), flags, mode & 0o7777 & ~core.umask)
            for path, mode in page
        )
        session, reply = core.change_under_session(meta.OpenMany(entries=entries), meta.OpenManyReply)
        for (path, _), result in zip(page, reply.results, strict=True):
            if isinstance(result, ErrorReply):
                found.append(_of_file(to_error(result), path))
                continue
            handle = OpenFile(client.core_of_process, path, flags)
            handle.adopt(core, session, result)
            file = File(client, handle, "wb", publish_as=path, replace=True)
            client._opened(file)
            found.append(file)
    return found


class _UnnamedWriter:
    """A file that `commit` links to its name, replacing what is there."""

    kept = 0

    def __init__(self, client: Client, file: File) -> None:
        self._client, self._file = client, file

    def write_at(self, offset: int, data: memoryview) -> None:
        self._file.pwrite(data, offset)

    def checkpoint(self) -> None:
        pass

    def commit(self, size: int, meta: Meta) -> None:
        self._file.flush()  # a later report of the length would set the time anew
        if self._file.size < size:
            self._file.truncate(size)
        set_attributes(self._client, self._file, meta)
        self._file.close()

    def abandon(self) -> None:
        if not self._file.closed:
            self._file.discard()


class _PartWriter:
    """A named file that `commit` renames."""

    def __init__(self, client: Client, path: str, part: str, mode: int) -> None:
        self._client, self._path, self._part = client, path, part
        client_file = client.open(part, "r+b" if client.lexists(part) else "xb", 0, permissions=mode & 0o777)
        self._file: File = client_file
        self.kept = self._file.size

    def write_at(self, offset: int, data: memoryview) -> None:
        self._file.pwrite(data, offset)

    def checkpoint(self) -> None:
        self._file.flush()

    def commit(self, size: int, meta: Meta) -> None:
        self._file.flush()
        if self._file.size != size:
            self._file.truncate(size)
        self._file.close()
        set_attributes(self._client, self._file, meta)
        self._client.replace(self._part, self._path)

    def abandon(self) -> None:
        if not self._file.closed:
            self._file.close()


def set_attributes(client: Client, file: File, wanted: Meta) -> None:
    """Mode, mtime and owner of an open file, which needn't have a name."""
    core = client.core
    if wanted.owner is not None:
        owner = meta.SetAttr(
            ino=file.inode,
            ticket=file.ticket,
            what=meta.SET_UID | meta.SET_GID,
            uid=wanted.owner[0],
            gid=wanted.owner[1],
        )
        with contextlib.suppress(PermissionError):
            core.change(owner, meta.StatReply)
    request = meta.SetAttr(ino=file.inode, ticket=file.ticket)
    if wanted.mode is not None:
        request.what |= meta.SET_MODE
        request.mode = wanted.mode & 0o7777
    if wanted.mtime_ns is not None:
        request.what |= meta.SET_MTIME
        request.mtime_ns = max(wanted.mtime_ns, 0)
    if request.what:
        core.change(request, meta.StatReply)


# --- which side ---------------------------------------------------------------------------------------


class Sides:
    """The sides of a command: one client for each cluster that its locations name."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._stack = contextlib.ExitStack()
        self._local = LocalSide()
        self._clusters: dict[str, ClusterSide] = {}

    def of(self, place: Location) -> Side:
        """The side of a location. Connects on first use."""
        if not place.remote:
            return self._local
        from ffs.cli.parsing import connect

        if place.address and self._args.cluster and place.address != self._args.cluster:
            raise errors.InvalidArgument(
                f"--cluster {self._args.cluster} contradicts {place}: give one of them"
            )
        if place.address not in self._clusters:
            client = self._stack.enter_context(connect(self._args, place.address or None))
            for side in self._clusters.values():
                if side.client.cluster == client.cluster:  # one cluster by two names
                    self._clusters[place.address] = side
                    return side
            self._clusters[place.address] = ClusterSide(client)
        return self._clusters[place.address]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def umask_mode(mode: int) -> int:
    """The permission bits of a new file that is a copy of one with `mode`."""
    return mode & 0o777 & ~read_umask()


def check_remote_path(path: str) -> None:
    """InvalidArgument or NameTooLong for what can't be a path of the store."""
    encode_path(path)

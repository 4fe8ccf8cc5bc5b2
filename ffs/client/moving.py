"""Moving where a rename can't: in or out of a directory with a quota, by a copy. docs/client.md, Quotas.

The copy grows beside the target under a name of its own and gets its name by a rename when it is whole; then
the source is removed. Killed in between, the source is whole, and a hidden `.NAME....ffs-part` may be left.
What others change in the source meanwhile is lost, as with any move by a copy.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from ffs import errors
from ffs.client.paths import check_path, join, split

if TYPE_CHECKING:
    from ffs.client.client import Client

_PIECE_BYTES: Final = 8 << 20
_WORKERS: Final = 8
_AHEAD: Final = 256  # files that are handed to workers and not done yet


def move(client: Client, source: str, target: str, *, replace: bool = True) -> None:
    """A rename, and where a quota is between the two, a copy. Blocking. replace=False: Exists instead."""
    try:
        if replace:
            client.replace(source, target)
        else:
            client.rename_exclusive(source, target)
    except errors.CrossDevice:
        move_by_copy(client, source, target, replace=replace)


def move_by_copy(client: Client, source: str, target: str, *, replace: bool = True) -> None:
    """Copy what is at `source`, with all below it, to `target`, then remove it. Blocking.

    Modes, times, owners (for root), extended attributes and hard links within the tree are kept. What is at
    `target` is replaced as by a rename; with replace=False it is Exists. KV spaces, and directories that have
    a quota of their own, can't be copied (InvalidArgument, and nothing is changed). Raises what
    reading, writing and the rename raise.
    """
    source, target = check_path(source), check_path(target)
    info = client.lstat(source)
    _check(client, source, target, info, replace)
    if stat.S_ISDIR(info.st_mode):
        check_quotas(client, source)
    parent, name = split(target)
    scratch = join(parent, _scratch_name(name))
    try:
        with _Copier(client) as copier:
            copier.copy(source, scratch, info)
        if replace:
            client.replace(scratch, target)
        else:
            client.rename_exclusive(scratch, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            _remove(client, scratch, info)
        if isinstance(error, OSError):
            rename_in_error(error, scratch, target)
        raise
    _remove(client, source, info)


def _remove(client: Client, path: str, info: os.stat_result) -> None:
    if stat.S_ISDIR(info.st_mode):
        client.rmtree(path)
    else:
        client.remove(path)


def rename_in_error(error: OSError, scratch: str, target: str) -> None:
    """The copy's hidden name, and those below it, are nothing that people have seen: the target's instead."""
    for name in ("filename", "filename2"):
        path = getattr(error, name)
        text = os.fsdecode(path) if isinstance(path, str | bytes) else ""
        if text == scratch or text.startswith(scratch + "/"):
            setattr(error, name, target + text[len(scratch) :])


def _scratch_name(name: str) -> str:
    while len(os.fsencode(name)) > 200:
        name = name[:-1]
    return f".{name}.{os.getpid()}.{os.urandom(4).hex()}.ffs-part"


def _check(client: Client, source: str, target: str, info: os.stat_result, replace: bool) -> None:
    """What the rename at the end would refuse, before the work is done."""
    parent, name = split(target)
    if not name or name in (".", ".."):
        raise errors.Busy("a directory that is in use can't be replaced: give another name", target)
    is_directory = stat.S_ISDIR(info.st_mode)
    above = parent
    while is_directory:
        there = client.stat(above)
        if there.st_ino == info.st_ino:
            raise errors.InvalidArgument("a directory can't be moved into itself", source, target)
        if above == "/":
            break
        above = split(above)[0]
    try:
        there = client.lstat(target)
    except FileNotFoundError:
        return
    if not replace:
        raise errors.Exists("is there already", target)
    if stat.S_ISDIR(there.st_mode) != is_directory:
        if is_directory:
            raise errors.NotADirectory("a directory doesn't replace what isn't one", target)
        raise errors.IsADirectory("what isn't a directory doesn't replace one", target)
    if is_directory and client.listdir(target):
        raise errors.NotEmpty("a directory that isn't empty isn't replaced", target)


def check_quotas(client: Client, source: str) -> None:
    """No directory at or below `source` has a quota: a copy would be without it. Blocking, a request for each
    directory unless the one above is counted: quotas don't nest. Raises InvalidArgument."""
    if client.quota(split(source)[0]) is not None:
        return
    stack = [source]
    while stack:
        path = stack.pop()
        if client.quota(path) is not None:
            raise errors.InvalidArgument(
                "this directory has a quota, which a copy into another quota would drop: take it away first "
                "(ffs quota clear)",
                path,
            )
        for entry in client.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                stack.append(entry.path)


class _Copier:
    """Copies trees. One thread walks, others copy files; the first error ends it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="ffs-move")
        self._pending: deque[Future[None]] = deque()
        self._linked: dict[int, str] = {}  # of files with several names: where the first one is copied to
        self._owners = client.core.creds.uid == 0

    def __enter__(self) -> _Copier:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def copy(self, source: str, target: str, info: os.stat_result) -> None:
        """All of it; whole when this returns."""
        directories: list[tuple[str, str, os.stat_result]] = []
        links: list[tuple[str, str]] = []
        for path, place, entry in self._walk(source, target, info):
            if stat.S_ISDIR(entry.st_mode):
                self._client.mkdir(place, 0o700)
                directories.append((path, place, entry))
            elif stat.S_ISLNK(entry.st_mode):
                self._client.symlink(self._client.readlink(path), place)
                self._apply(path, place, entry)
            elif not stat.S_ISREG(entry.st_mode):
                raise errors.InvalidArgument("a KV space can't be copied: move it by a rename", path)
            elif entry.st_nlink > 1 and entry.st_ino in self._linked:
                links.append((self._linked[entry.st_ino], place))
            else:
                if entry.st_nlink > 1:
                    self._linked[entry.st_ino] = place
                self._hand_out(path, place, entry)
        self._drain(0)
        for first, place in links:
            self._client.link(first, place)
        for path, place, entry in reversed(directories):
            self._apply(path, place, entry)

    def _walk(
        self, source: str, target: str, info: os.stat_result
    ) -> Iterator[tuple[str, str, os.stat_result]]:
        """(where it is, where it goes, lstat), a directory before what is in it. Without recursion: trees may
        be deeper than Python's stack."""
        stack = [(source, target, info)]
        while stack:
            path, place, entry = stack.pop()
            yield path, place, entry
            if stat.S_ISDIR(entry.st_mode):
                for below in self._client.scandir(path):
                    inner = below.stat(follow_symlinks=False)
                    stack.append((below.path, join(place, below.name), inner))

    def _hand_out(self, path: str, place: str, entry: os.stat_result) -> None:
        self._pending.append(self._pool.submit(self._file, path, place, entry))
        if len(self._pending) >= 2 * _AHEAD:
            self._drain(_AHEAD)

    def _drain(self, keep: int) -> None:
        """Wait for all but the last `keep`, and raise what failed."""
        while len(self._pending) > keep:
            self._pending.popleft().result()

    def _file(self, path: str, place: str, entry: os.stat_result) -> None:
        client = self._client
        with client.open(path, "rb", 0) as reader, client.open(place, "xb", 0, permissions=0o600) as writer:
            writer.ensure_room(reader.size)
            buffer = bytearray(min(_PIECE_BYTES, max(1, reader.size)))
            view = memoryview(buffer)
            while count := reader.readinto(buffer):
                writer.write(view[:count])
        self._apply(path, place, entry)

    def _apply(self, path: str, place: str, entry: os.stat_result) -> None:
        client = self._client
        if self._owners:
            client.chown(place, entry.st_uid, entry.st_gid, follow_symlinks=False)
        if stat.S_ISLNK(entry.st_mode):
            return
        for name in client.listxattr(path):
            client.setxattr(place, name, client.getxattr(path, name))
        client.chmod(place, stat.S_IMODE(entry.st_mode))
        client.utime(place, ns=(entry.st_mtime_ns, entry.st_mtime_ns))

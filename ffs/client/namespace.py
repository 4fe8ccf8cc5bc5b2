"""The calls on names that change something, named as in os and shutil. docs/client.md, Namespace.

All block; all are thread-safe; all raise OSErrors of ffs.errors with the path in them. Each takes
effect once, also when its answer is lost and it is sent again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from ffs import errors
from ffs.client.attributes import stat_result
from ffs.client.locks import DirectoryLock
from ffs.client.lookups import Lookups, pages
from ffs.client.paths import PathLike, check_path, encode_text, split, wire_path
from ffs.client.routing import check_layout_options
from ffs.proto import locking, meta, records
from ffs.proto.common import ErrorReply, OkReply, to_error
from ffs.proto.locking import LockHolder


class Namespace(Lookups):
    """Mixed into Client."""

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

    def link(
        self, source: PathLike, target: PathLike, *, follow_symlinks: bool = False, replace: bool = False
    ) -> None:
        """As os.link: a further name for a file. `replace`: a file that has it loses it, in the same
        transaction."""
        request = meta.Link(
            source=wire_path(source), target=wire_path(target), follow=follow_symlinks, replace=replace
        )
        self.core.change(request, meta.StatReply)

    def symlink(self, source: str | os.PathLike[str], target: PathLike) -> None:
        """As os.symlink(src, dst): `target` becomes a link to `source`, which needn't exist."""
        text = os.fspath(source)
        if not text or "\0" in text:
            raise errors.InvalidArgument("the target of a symbolic link can't be empty or have a NUL", text)
        self.core.change(meta.SymLink(path=wire_path(target), target=encode_text(text)), meta.StatReply)

    # --- locks ---

    def lock_directory(self, path: PathLike, *, timeout: float | None = None) -> DirectoryLock:
        """Lock a directory's entries: while it is held, only this process makes, renames and removes names
        in it; others get Busy, which names this one. `with client.lock_directory(path): ...`

        timeout: seconds to wait for who has it, 0 not at all, None as long as it takes; then Busy. The lock
        ends by `release`, at the end of `with`, and with this process's session; a child of fork doesn't have
        it. Needs write and search permission. Blocking."""
        ino, ticket = self.ticket(path)
        return DirectoryLock(self.core_of_process, ino, check_path(path), ticket, timeout)

    def locks(self, path: PathLike) -> list[LockHolder]:
        """Who holds locks of what is at `path`. Blocking."""
        return self.core.ask(locking.GetLocks(path=wire_path(path)), locking.LocksReply).holders

    def break_locks(self, path: PathLike, *, entries: bool = False) -> list[LockHolder]:
        """End the locks that others hold of what is at `path` (`entries`: of a directory's entries), as its
        owner or root; returns them. Their holders aren't told: only `ffs flock` asks, every two seconds."""
        kind = locking.LOCK_ENTRIES if entries else locking.LOCK_FLOCK
        request = locking.Unlock(path=wire_path(path), kind=kind, force=True)
        return self.core.change(request, locking.LocksReply).holders

    # --- attributes -------------------------------------------------------------------------

    def truncate(self, path: PathLike, length: int) -> None:
        """As os.truncate: cut, or extended by a hole that reads as zeros."""
        if length < 0:
            raise errors.InvalidArgument(f"length {length} is negative", check_path(path))
        core, ino = self.core, None
        try:
            request = meta.Truncate(path=wire_path(path), length=length)
            ino = core.change(request, meta.TruncateReply).ino or None
        finally:
            core.changed(ino)

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

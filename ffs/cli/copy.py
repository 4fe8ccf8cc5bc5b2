"""`ffs cp`, `ffs put`, `ffs get`: copies between this machine and the cluster.

A copy appears under its name when it is whole: in the cluster by an unnamed file that is linked at the
end, here by a file beside it that is renamed. What was there before stays until then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from ffs import errors
from ffs.cli.location import Location, one_address, parse_location, parse_remote
from ffs.cli.parsing import Commands, command, connect
from ffs.cli.progress import Progress

if TYPE_CHECKING:
    from ffs.client.client import Client

_PIECE_BYTES = 16 << 20


def add_commands(commands: Commands) -> None:
    for name, run, text in (
        ("cp", run_cp, "copy files; names in the cluster begin with ffs:"),
        ("put", run_put, "copy local files into the cluster"),
        ("get", run_get, "copy files of the cluster to this machine"),
    ):
        parser = command(commands, name, run, text)
        parser.add_argument("sources", nargs="+", metavar="SOURCE")
        parser.add_argument("target", metavar="TARGET")
        parser.add_argument("-r", "-R", "--recursive", action="store_true", help="directories too")
        parser.add_argument("-n", "--no-clobber", action="store_true", help="fail if a target is there")
        parser.add_argument("-q", "--quiet", action="store_true", help="no progress")


def run_cp(args: argparse.Namespace) -> int:
    sources = [parse_location(path) for path in args.sources]
    target = parse_location(args.target)
    if not target.remote and not any(source.remote for source in sources):
        raise errors.InvalidArgument(
            f"{args.sources[0]} and {args.target} are both local: write ffs:/path for the one in the cluster"
        )
    return _copy(args, sources, target)


def run_put(args: argparse.Namespace) -> int:
    sources = [parse_location(path) for path in args.sources]
    for source in sources:
        if source.remote:
            raise errors.InvalidArgument(
                f"{source} isn't local: put copies into the cluster; see ffs get, ffs cp"
            )
    return _copy(args, sources, parse_remote(args.target))


def run_get(args: argparse.Namespace) -> int:
    target = parse_location(args.target)
    if target.remote:
        raise errors.InvalidArgument(
            f"{target} isn't local: get copies from the cluster; see ffs put, ffs cp"
        )
    return _copy(args, [parse_remote(path) for path in args.sources], target)


def _copy(args: argparse.Namespace, sources: list[Location], target: Location) -> int:
    with connect(args, one_address([*sources, target], args.cluster)) as client:
        copier = Copier(client, show=None if not args.quiet else False, clobber=not args.no_clobber)
        into = copier.is_directory(target)
        if not into and (len(sources) > 1 or target.path.endswith("/")):
            raise errors.NotADirectory("isn't a directory that is there: make it first", str(target))
        for source in sources:
            copier.copy(source, target.child(source.name) if into else target, recursive=args.recursive)
    return 0


class Copier:
    """Copies files and trees either way. Blocking; one thread."""

    def __init__(self, client: Client, *, show: bool | None = None, clobber: bool = True) -> None:
        """`show`: progress on stderr; None: only on a terminal."""
        self._client = client
        self._show = show
        self._clobber = clobber
        self._buffer = memoryview(bytearray(_PIECE_BYTES))

    def is_directory(self, place: Location) -> bool:
        try:
            return stat.S_ISDIR(self._stat(place).st_mode)
        except FileNotFoundError:
            return False

    def copy(self, source: Location, target: Location, *, recursive: bool = False) -> None:
        self._copy(source, target, self._stat(source), recursive)

    def _copy(self, source: Location, target: Location, info: Any, recursive: bool) -> None:
        if stat.S_ISREG(info.st_mode):
            self._copy_file(source, target, info)
            return
        if stat.S_ISLNK(info.st_mode):
            self._copy_link(source, target)
            return
        if not stat.S_ISDIR(info.st_mode):
            raise errors.InvalidArgument("isn't a file, directory or symlink: leave it out", str(source))
        if not recursive:
            raise errors.IsADirectory("is a directory: add -r to copy it", str(source))
        if source.remote == target.remote and f"{target.path}/".startswith(source.path.rstrip("/") + "/"):
            raise errors.InvalidArgument("can't be copied into itself", str(source), str(target))
        self._make_directory(target)
        for name in self._names(source):
            below = source.child(name)
            # Links in a tree stay links: they may lead out of it, or round in circles.
            self._copy(below, target.child(name), self._stat(below, follow=False), True)

    def _stat(self, place: Location, *, follow: bool = True) -> Any:
        look = self._client.stat if place.remote else os.stat
        return look(place.path, follow_symlinks=follow)

    def _copy_link(self, source: Location, target: Location) -> None:
        leads_to = self._client.readlink(source.path) if source.remote else os.readlink(source.path)
        if self._exists(target):
            raise errors.Exists("is there already: a symlink replaces nothing", str(target))
        if target.remote:
            self._client.symlink(leads_to, target.path)
        else:
            os.symlink(leads_to, target.path)

    def _names(self, place: Location) -> list[str]:
        return sorted(self._client.listdir(place.path) if place.remote else os.listdir(place.path))

    def _make_directory(self, place: Location) -> None:
        if place.remote:
            self._client.makedirs(place.path, exist_ok=True)
        else:
            os.makedirs(place.path, exist_ok=True)

    def _exists(self, place: Location) -> bool:
        return bool(self._client.lexists(place.path)) if place.remote else os.path.lexists(place.path)

    def _copy_file(self, source: Location, target: Location, info: Any) -> None:
        if self.is_directory(target):
            raise errors.IsADirectory("is a directory, the source is a file", str(target))
        if not self._clobber and self._exists(target):
            raise errors.Exists("is there already: take another name, or leave out -n", str(target))
        if source.remote == target.remote and self._exists(target):
            other = self._stat(target)
            if (other.st_ino, other.st_dev) == (info.st_ino, info.st_dev):
                raise errors.InvalidArgument("source and target are the same file", str(source), str(target))
        with (
            self._open_source(source) as reader,
            self._open_target(target, stat.S_IMODE(info.st_mode)) as writer,
            Progress(sys.stderr, source.name, info.st_size, show=self._show) as bar,
        ):
            self._pump(reader, writer, bar)

    def _pump(self, reader: IO[bytes], writer: IO[bytes], bar: Progress) -> None:
        while count := reader.readinto(self._buffer):  # type: ignore[attr-defined]
            view = self._buffer[:count]
            while view:
                written = writer.write(view)
                bar.advance(written)
                view = view[written:]

    def _open_source(self, place: Location) -> contextlib.AbstractContextManager[IO[bytes]]:
        if place.remote:
            remote: contextlib.AbstractContextManager[IO[bytes]] = self._client.open(
                place.path, "rb", buffering=0
            )
            return remote
        return open(place.path, "rb", buffering=0)

    @contextlib.contextmanager
    def _open_target(self, place: Location, mode: int) -> Iterator[IO[bytes]]:
        if place.remote:
            with self._client.open(place.path, "wb", buffering=0, atomic=True) as file:
                yield file
            self._client.chmod(place.path, mode)
            return
        scratch = f"{place.path}.ffs-{os.getpid()}.part"
        try:
            with open(scratch, "xb", buffering=0) as local:
                yield local
                local.flush()
                os.fsync(local.fileno())
            os.chmod(scratch, mode)
            os.replace(scratch, place.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch)
            raise

"""`ffs cp`, `ffs put`, `ffs get`: copies between this machine and clusters, and within one
(docs/guides/command_line.md, Copying).

A copy appears under its name when it is whole, with its attributes, and what was there before stays
until then.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from ffs import errors
from ffs.cli.copying.mover import COPIED, ENDS_ALL, Item, Mover
from ffs.cli.copying.sides import (
    ClusterSide,
    Entry,
    Meta,
    Side,
    Sides,
    is_directory,
    lstat_or_none,
    umask_mode,
)
from ffs.cli.location import Location, parse_location, parse_remote
from ffs.cli.names import plain
from ffs.cli.operands import Tally, confirm, expand_places, literal_option
from ffs.cli.parsing import Commands, command, print_json
from ffs.cli.progress import Meter
from ffs.cli.text import format_bytes, format_rate, plural


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How to copy."""

    recursive: bool = False
    preserve: bool = False  # mode, mtime, and the owner where one may
    follow: str = "P"  # symlinks: P never, H those named, L all
    no_clobber: bool = False
    interactive: bool = False
    update: bool = False  # only what is newer than the target
    resume: bool = False  # go on where a run that was stopped ended
    dry_run: bool = False
    verbose: bool = False


def add_commands(commands: Commands) -> None:
    for name, run, text in (
        ("cp", run_cp, "copy files; names in the cluster begin with ffs:"),
        ("put", run_put, "copy local files into the cluster ('-': stdin)"),
        ("get", run_get, "copy files of the cluster to this machine ('-': stdout)"),
    ):
        parser = command(commands, name, run, text, json_option=True)
        parser.add_argument("sources", nargs="+", metavar="SOURCE")
        parser.add_argument("target", metavar="TARGET")
        parser.add_argument("-r", "-R", "--recursive", action="store_true", help="directories too")
        parser.add_argument("-p", "--preserve", action="store_true", help="keep mode, time, owner if allowed")
        parser.add_argument("-a", "--archive", action="store_true", help="the same as -r -p -P")
        links = parser.add_mutually_exclusive_group()
        links.add_argument("-P", "--no-dereference", action="store_const", dest="follow", const="P",
                           help="copy symlinks as symlinks (default with -r)")  # fmt: skip
        links.add_argument("-L", "--dereference", action="store_const", dest="follow", const="L",
                           help="copy what symlinks lead to (default without -r)")  # fmt: skip
        links.add_argument("-H", action="store_const", dest="follow", const="H",
                           help="follow symlinks that are named, copy the others as symlinks")  # fmt: skip
        over = parser.add_mutually_exclusive_group()
        over.add_argument("-n", "--no-clobber", action="store_true", help="never replace: that is an error")
        over.add_argument("-i", "--interactive", action="store_true", help="ask before replacing")
        over.add_argument("-f", "--force", action="store_true", help="replace without asking (the default)")
        parser.add_argument("-u", "--update", action="store_true", help="only files newer than their target")
        parser.add_argument("--resume", action="store_true",
                            help="go on after a run that was stopped: skip what has the same size and time, "
                            "continue large files (implies -p)")  # fmt: skip
        parser.add_argument("-T", "--no-target-directory", action="store_true",
                            help="TARGET is the name of the copy, also if it is a directory")  # fmt: skip
        parser.add_argument("--dry-run", action="store_true", help="say what would be copied")
        parser.add_argument("-v", "--verbose", action="store_true", help="say what is copied")
        parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
        literal_option(parser)


def options_of(args: argparse.Namespace) -> CopyOptions:
    recursive = args.recursive or args.archive
    return CopyOptions(
        recursive=recursive,
        preserve=args.preserve or args.archive or args.resume,
        follow=args.follow or ("P" if recursive else "L"),
        no_clobber=args.no_clobber,
        interactive=args.interactive,
        update=args.update,
        resume=args.resume,
        dry_run=args.dry_run,
        verbose=args.verbose or args.dry_run,
    )


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
    tally = Tally(args)
    with Sides(args) as sides:
        if not target.remote and target.path == "-":
            return _to_stdout(sides, sources, args, tally)
        target_side = sides.of(target)
        expanded: list[Location] = []
        for source in sources:
            side = sides.of(source)
            if isinstance(side, ClusterSide):
                expanded += expand_places(side.client, [source], literal=args.literal, tally=tally)
            else:
                expanded.append(source)
        into = not args.no_target_directory and is_directory(target_side, target.path)
        if not into and (len(expanded) > 1 or target.path.endswith("/")):
            raise errors.NotADirectory("isn't a directory that is there: make it first", str(target))
        with Meter(sys.stderr, show=False if args.quiet else None) as meter:
            report, options = Report(args, tally, meter), options_of(args)
            for origin, group in itertools.groupby(expanded, lambda place: replace(place, path="/")):
                with Copier(sides.of(origin), target_side, origin, target, options, report) as copier:
                    for source in group:
                        with tally.guard():
                            if source == Location("-", False):
                                _from_stdin(target_side, target, into, args, report)
                            else:
                                copier.copy(source.path, target.child(source.name) if into else target)
                    copier.finish()
            report.summary()
    return tally.status


class Report:
    """What a run of copies says. Called by one thread at a time."""

    def __init__(self, args: argparse.Namespace, tally: Tally, meter: Meter) -> None:
        self._json = args.json
        self._verbose = getattr(args, "verbose", False) or args.dry_run
        self._dry_run = args.dry_run
        self._tally = tally
        self.meter = meter
        self.counts: dict[str, int] = {}
        self.bytes = 0
        self._start = time.monotonic()

    def action(self, action: str, source: Location | None, target: Location, size: int = 0) -> None:
        """Something was done, or would be."""
        self.counts[action] = self.counts.get(action, 0) + 1
        self.bytes += size
        if self._json:
            fields: dict[str, object] = {"action": action}
            if source is not None:
                fields["source"] = str(source)
            fields |= {"target": str(target), "bytes": size}
            if self._dry_run:
                fields["dry_run"] = True
            print_json(fields)
        elif self._verbose:
            words = f"{source} -> {target}" if source is not None else f"{action} {target}"
            self.meter.write(plain(f"{'would: ' if self._dry_run else ''}{words}"), sys.stdout)

    def failed(self, error: BaseException) -> None:
        """One file failed."""
        self.meter.clear()
        self._tally.failed(error)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around the work on one file: its errors don't stop the rest."""
        try:
            yield
        except ENDS_ALL:
            raise
        except OSError as error:
            self.failed(error)

    def summary(self) -> None:
        """For programs: the last line."""
        if self._json:
            print_json(
                {
                    "action": "summary",
                    **{
                        f"{name.replace(' ', '_')}_count": count
                        for name, count in sorted(self.counts.items())
                    },
                    "bytes": self.bytes,
                    "failed": self._tally.failures,
                    "seconds": round(time.monotonic() - self._start, 3),
                }
            )

    def sentence(self) -> str:
        """For people: what was done."""
        elapsed = time.monotonic() - self._start
        parts = [f"{count} {name}" for name, count in sorted(self.counts.items())] or ["nothing to do"]
        if self._tally.failures:
            parts.append(plural(self._tally.failures, "failure"))
        moved = format_bytes(self.bytes) if self.bytes else ""
        if moved and not self._dry_run:  # else nothing has moved
            moved += f", {format_rate(self.bytes, elapsed)}"
        return ", ".join(parts) + (f" ({moved})" if moved else "")


class Copier:
    """Copies files and trees from one side to another. One thread plans, the mover's threads move.

    `with Copier(...) as copier: copier.copy(path, target); copier.finish()`.
    """

    def __init__(
        self,
        source_side: Side,
        target_side: Side,
        origin: Location,
        target: Location,
        options: CopyOptions,
        report: Report,
    ) -> None:
        """`origin`, `target`: any locations of the two sides, for what is said of others there."""
        self._from, self._to = source_side, target_side
        self._source, self._target = origin, target
        self._options, self._report = options, report
        self._directories: list[tuple[str, Meta]] = []
        self._mover = Mover(
            source_side, target_side, report.meter, self._done, self._failed, resumable=options.resume
        )

    def __enter__(self) -> Self:
        self._mover.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mover.__exit__(kind, error, trace)

    def copy(self, source: str, target: Location) -> None:
        """Copy one file or tree. Raises what concerns it itself; what is inside is reported."""
        self._source, self._target = replace(self._source, path=source), target
        info = self._from.stat(source, follow=self._options.follow in "HL")
        there = lstat_or_none(self._to, target.path)
        if stat.S_ISDIR(info.st_mode):
            self._check_tree(info)
            self._tree(info, there)
        else:
            self._one(source, target.path, info, there)

    def finish(self) -> None:
        """Wait for all that is on its way, then give directories their attributes."""
        self._report.meter.complete = True
        self._mover.finish()
        for path, meta in reversed(self._directories):
            with self._report.guard():
                self._to.apply(path, meta)
        self._directories = []

    def _check_tree(self, info: os.stat_result) -> None:
        if not self._options.recursive:
            raise errors.IsADirectory("is a directory: add -r to copy it", str(self._source))
        if self._from is not self._to:
            return
        inside = f"{self._target.path}/".startswith(self._source.path.rstrip("/") + "/")
        parent = self._target.path.rstrip("/")
        while parent and not inside:  # by another name: through a link or ".."
            there = self._stat_or_none(parent)
            inside = there is not None and (there.st_ino, there.st_dev) == (info.st_ino, info.st_dev)
            parent = parent.rpartition("/")[0]
        if inside:
            raise errors.InvalidArgument("can't be copied into itself", str(self._source), str(self._target))

    def _stat_or_none(self, path: str) -> os.stat_result | None:
        try:
            return self._to.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _tree(self, info: os.stat_result, there: os.stat_result | None) -> None:
        stack = [(self._source.path, self._target.path, info, there, frozenset[tuple[int, int]]())]
        while stack:
            source, target, info, there, above = stack.pop()
            with self._report.guard():
                key = (info.st_dev, info.st_ino)
                if key in above:
                    raise errors.SymlinkLoop("leads back to a directory above it: leave it out", source)
                entries = self._from.entries(source)
                before = self._enter(target, info, there)
                inner = []
                for name, below in entries:
                    from_path, to_path = os.path.join(source, name), os.path.join(target, name)
                    with self._report.guard():
                        if self._options.follow == "L" and stat.S_ISLNK(below.st_mode):
                            below = self._from.stat(from_path)
                        if stat.S_ISDIR(below.st_mode):
                            inner.append((from_path, to_path, below, before.get(name), above | {key}))
                        else:
                            self._one(from_path, to_path, below, before.get(name))
                stack += reversed(inner)

    def _enter(
        self, target: str, info: os.stat_result, there: os.stat_result | None
    ) -> dict[str, os.stat_result]:
        """Make a target directory; returns what is in it already."""
        options = self._options
        # Where the copy goes may be named by a link. Below that a link was put there by a copy, or by others:
        # through it files would be written outside of the tree.
        if there is not None and stat.S_ISLNK(there.st_mode) and target == self._target.path:
            there = self._stat_or_none(target) or there
        if there is not None and not stat.S_ISDIR(there.st_mode):
            raise errors.NotADirectory("is in the way: it isn't a directory", self._place(target))
        if there is None and not options.dry_run:
            mode = umask_mode(info.st_mode)
            self._to.mkdir(target, mode | 0o700)
            if options.preserve:
                self._directories.append((target, self._meta(info)))
            elif mode & 0o700 != 0o700:
                self._directories.append((target, Meta(mode=mode)))
        elif options.preserve and not options.dry_run:
            self._directories.append((target, self._meta(info)))
        if there is None:
            return {}
        found: list[Entry] = self._to.entries(target)
        return dict(found)

    def _meta(self, info: os.stat_result) -> Meta:
        owner = (info.st_uid, info.st_gid) if os.geteuid() == 0 else None
        return Meta(stat.S_IMODE(info.st_mode), info.st_mtime_ns, owner)

    def _place(self, path: str) -> str:
        return str(replace(self._target, path=path))

    def _one(self, source: str, target: str, info: os.stat_result, there: os.stat_result | None) -> None:
        """A file or symlink."""
        options = self._options
        is_link = stat.S_ISLNK(info.st_mode)
        if not is_link and not stat.S_ISREG(info.st_mode):
            raise errors.InvalidArgument(
                "isn't a file, directory or symlink: leave it out", str(replace(self._source, path=source))
            )
        if there is not None:
            if stat.S_ISDIR(there.st_mode):
                raise errors.IsADirectory("is a directory, the source isn't", self._place(target))
            if self._from is self._to and (there.st_ino, there.st_dev) == (info.st_ino, info.st_dev):
                raise errors.InvalidArgument("source and target are the same file", source, target)
            if not self._replaces(target, info, there):
                return
        places = replace(self._source, path=source), replace(self._target, path=target)
        if options.dry_run:
            self._report.action(COPIED, *places, info.st_size)
            return
        if is_link:
            self._to.symlink(self._from.readlink(source), target)
            self._report.action(COPIED, *places)
            return
        meta = Meta()
        if options.preserve:
            meta = self._meta(info)
        elif there is not None and stat.S_ISREG(there.st_mode):
            meta = Meta(mode=stat.S_IMODE(there.st_mode))  # what is replaced keeps its mode
        self._report.meter.expect(info.st_size)
        self._mover.add(Item(source, target, info.st_size, info.st_mtime_ns, meta, umask_mode(info.st_mode)))

    def _replaces(self, target: str, info: os.stat_result, there: os.stat_result) -> bool:
        options = self._options
        if options.resume and (there.st_size, there.st_mtime_ns) == (info.st_size, info.st_mtime_ns):
            return False
        if options.update and there.st_mtime_ns >= info.st_mtime_ns:
            return False
        if options.no_clobber:
            raise errors.Exists("is there already: take another name, or leave out -n", self._place(target))
        if not options.interactive or options.dry_run:
            return True
        self._report.meter.clear()
        return confirm(f"replace {self._place(target)}?")

    def _done(self, item: Item, outcome: str) -> None:
        self._report.action(
            outcome,
            replace(self._source, path=item.source),
            replace(self._target, path=item.target),
            item.size,
        )

    def _failed(self, item: Item, error: BaseException) -> None:
        self._report.failed(named(error, self._place(item.target)))


def named(error: BaseException, name: str) -> BaseException:
    """The error with a name in it, if it has none."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = name
    return error


def _from_stdin(side: Side, target: Location, into: bool, args: argparse.Namespace, report: Report) -> None:
    """stdin, to its end, as a file."""
    if into:
        raise errors.IsADirectory("give stdin a name: it has none of its own", str(target))
    there = lstat_or_none(side, target.path)
    if there is not None and args.no_clobber:
        raise errors.Exists("is there already: take another name, or leave out -n", str(target))
    if args.dry_run:
        report.action(COPIED, None, target)
        return
    writer = side.open_writers([(target.path, 0o666)])[0]
    if isinstance(writer, OSError):
        raise writer
    buffer = memoryview(bytearray(8 << 20))
    size = 0
    try:
        while count := sys.stdin.buffer.readinto(buffer):  # type: ignore[union-attr]
            writer.write_at(size, buffer[:count])
            size += count
            report.meter.advance(count)
        writer.commit(size, Meta(mode=stat.S_IMODE(there.st_mode) if there is not None else None))
    finally:
        writer.abandon()
    report.action(COPIED, None, target, size)


def _to_stdout(sides: Sides, sources: list[Location], args: argparse.Namespace, tally: Tally) -> int:
    from ffs.cli.reading import pour

    for source in sources:
        side = sides.of(source)
        if isinstance(side, ClusterSide):
            for place in expand_places(side.client, [source], literal=args.literal, tally=tally):
                with tally.guard():
                    pour(side.client, place.path)
    return tally.status

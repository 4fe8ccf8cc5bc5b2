"""`ffs sync`: make one directory the same as another, either way (docs/guides/command_line.md, Sync).

A file that has the source's size and time is taken for the same; each gets its time together with its
name, so a run that was killed is gone on with by the next one. Deletions come last, and only if
nothing failed before; after them directories get their times, which all that changes in them changes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import stat
import sys
from dataclasses import replace

from ffs import errors
from ffs.cli.copy import Report, named
from ffs.cli.copying import plan
from ffs.cli.copying.mover import COPIED, PART_BYTES, Item, Mover, is_part, part_name
from ffs.cli.copying.sides import LocalSide, Meta, Side, Sides, lstat_or_none, umask_mode
from ffs.cli.globs import Excludes
from ffs.cli.location import Location, parse_location
from ffs.cli.names import plain
from ffs.cli.operands import Tally
from ffs.cli.parsing import Commands, command
from ffs.cli.progress import Meter

_SCRATCH = re.compile(r"\..*\.(\d+)\.[0-9a-f]{8}\.ffs-part\Z", re.DOTALL)


def add_commands(commands: Commands) -> None:
    sync = command(
        commands, "sync", run_sync, "make the directory TARGET the same as SOURCE", json_option=True
    )
    sync.add_argument("source", metavar="SOURCE", help="a directory, here or (ffs:/path) in a cluster")
    sync.add_argument("target", metavar="TARGET", help="a directory; made if it isn't there")
    sync.add_argument("--delete", action="store_true", help="remove from TARGET what isn't in SOURCE")
    sync.add_argument("--checksum", action="store_true", help="compare contents where sizes are the same")
    sync.add_argument("--exclude", action="append", default=[], metavar="GLOB",
                      help="leave it alone on both sides: a name at any depth, or a path from the top; "
                      "may be repeated")  # fmt: skip
    sync.add_argument("--allow-empty", action="store_true", help="--delete also if SOURCE is empty")
    sync.add_argument("--dry-run", action="store_true", help="say what would be done")
    sync.add_argument("-v", "--verbose", action="store_true", help="say what is done")
    sync.add_argument("-q", "--quiet", action="store_true", help="no progress, no summary")


def run_sync(args: argparse.Namespace) -> int:
    source, target = parse_location(args.source), parse_location(args.target)
    if not source.remote and not target.remote:
        raise errors.InvalidArgument(
            f"{source} and {target} are both local: write ffs:/path for the one in the cluster"
        )
    tally = Tally(args)
    with Sides(args) as sides, Meter(sys.stderr, show=False if args.quiet else None) as meter:
        report = Report(args, tally, meter)
        sync = Sync(sides.of(source), sides.of(target), source, target, args, report, tally)
        sync.run()
        report.summary()
        meter.clear()
    if not args.json and not args.quiet:
        print(f"{'would: ' if args.dry_run else ''}{report.sentence()}")
    return tally.status


class Sync:
    """One run."""

    def __init__(
        self,
        source_side: Side,
        target_side: Side,
        source: Location,
        target: Location,
        args: argparse.Namespace,
        report: Report,
        tally: Tally,
    ) -> None:
        self._from, self._to = source_side, target_side
        self._source, self._target = source, target
        self._delete: bool = args.delete
        self._checksum: bool = args.checksum
        self._dry_run: bool = args.dry_run
        self._allow_empty: bool = args.allow_empty
        self._excludes = Excludes(args.exclude)
        self._report, self._tally = report, tally
        self._deletions: list[tuple[str, bool]] = []  # relative path, is a directory
        self._directories: list[tuple[str, Meta]] = []
        self._times: dict[str, tuple[int, int | None]] = {}  # of a directory: source's, target's at the start
        self._touched: set[str] = set()  # directories of the target in which names were made or removed

    # --- refusals -----------------------------------------------------------------------------

    def _check(self) -> tuple[os.stat_result, os.stat_result | None]:
        info = self._from.stat(self._source.path)
        if not stat.S_ISDIR(info.st_mode):
            raise errors.NotADirectory("isn't a directory: ffs cp copies files", str(self._source))
        there = None
        with contextlib.suppress(FileNotFoundError):
            there = self._to.stat(self._target.path)
        if there is None and lstat_or_none(self._to, self._target.path) is not None:
            raise errors.NotADirectory("is a symlink that leads nowhere", str(self._target))
        if there is not None and not stat.S_ISDIR(there.st_mode):
            raise errors.NotADirectory("isn't a directory: ffs cp copies files", str(self._target))
        if self._from is self._to:
            self._check_apart()
        if self._delete:
            self._check_deletion(there)
        return info, there

    def _check_apart(self) -> None:
        """Neither lies in the other: the run would copy its own copies, or delete its source."""
        for inner, outer in ((self._source, self._target), (self._target, self._source)):
            top = self._stat_or_none(self._from, outer.path)
            path = inner.path.rstrip("/")
            above = [path]
            while path:
                path = path.rpartition("/")[0]
                above.append(path or "/")
            for path in above:
                here = self._stat_or_none(self._from, path or "/")
                if top is not None and here is not None and _key(here) == _key(top):
                    raise errors.InvalidArgument(
                        "is the same as, or lies in, the other: sync takes separate directories",
                        str(inner),
                        str(outer),
                    )

    def _check_deletion(self, there: os.stat_result | None) -> None:
        if there is None:
            return
        root = self._stat_or_none(self._to, "/")
        if root is not None and _key(root) == _key(there):
            raise errors.InvalidArgument(
                "--delete would clear all that isn't in SOURCE from the root: name a directory below it",
                str(self._target),
            )
        if self._allow_empty or self._from.entries(self._source.path):
            return
        if self._to.entries(self._target.path):
            raise errors.InvalidArgument(
                f"is empty: --delete would clear {self._target}; if it is meant, add --allow-empty",
                str(self._source),
            )

    @staticmethod
    def _stat_or_none(side: Side, path: str) -> os.stat_result | None:
        try:
            return side.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    # --- the run --------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises what concerns the two directories; the rest is reported."""
        info, there = self._check()
        if there is None and not self._dry_run:
            self._to.makedirs(self._target.path)
            self._directories.append(("", Meta(stat.S_IMODE(info.st_mode), None, _owner(info))))
        self._times[""] = info.st_mtime_ns, there.st_mtime_ns if there is not None else None
        with Mover(
            self._from, self._to, self._report.meter, self._done, self._failed, resumable=True
        ) as mover:
            self._walk(mover, there is not None)
            self._report.meter.complete = True
            mover.finish()
        for relative, meta in reversed(self._directories):
            with self._report.guard():
                self._to.apply(self._to_path(relative), meta)
        self._delete_all()
        if not self._dry_run:
            self._set_times()

    def _walk(self, mover: Mover, there: bool) -> None:
        stack = [("", there)]
        while stack:
            relative, there = stack.pop()
            with self._report.guard():
                ours = dict(self._from.entries(self._from_path(relative)))
                theirs = dict(self._to.entries(self._to_path(relative))) if there else {}
                inner: list[tuple[str, bool]] = []
                for step in self._plan(relative, ours, theirs):
                    with self._report.guard():
                        path = os.path.join(relative, step.name)
                        self._carry_out(mover, step, path, ours.get(step.name), theirs.get(step.name), inner)
                stack += reversed(inner)

    def _plan(
        self, relative: str, ours: dict[str, os.stat_result], theirs: dict[str, os.stat_result]
    ) -> list[plan.Step]:
        source = {name: plan.node_of(info) for name, info in ours.items()}
        parts = {
            part_name(name, node.size, node.mtime_ns)
            for name, node in source.items()
            if node.kind == plan.FILE and node.size >= PART_BYTES
        }

        def excluded(name: str, is_directory: bool) -> bool:
            return self._excludes.match(os.path.join(relative, name), is_directory)

        return plan.plan_directory(
            source,
            {name: plan.node_of(info) for name, info in theirs.items()},
            delete=self._delete,
            checksum=self._checksum,
            excluded=excluded,
            leftover=self._is_leftover,
            kept=frozenset(parts),
        )

    def _is_leftover(self, name: str) -> bool:
        """A part of another state of a source, or of a process of this machine that is gone."""
        if is_part(name):
            return True
        match = _SCRATCH.match(name)
        if match is None or not isinstance(self._to, LocalSide):
            return False
        return not os.path.exists(f"/proc/{match[1]}")

    def _carry_out(
        self,
        mover: Mover,
        step: plan.Step,
        path: str,
        ours: os.stat_result | None,
        theirs: os.stat_result | None,
        inner: list[tuple[str, bool]],
    ) -> None:
        if step.action == plan.DELETE and theirs is not None:
            self._deletions.append((path, stat.S_ISDIR(theirs.st_mode)))
            return
        if step.action == plan.CONFLICT:
            raise errors.Exists(
                "is of another type than in SOURCE: --delete replaces it", str(self._at_target(path))
            )
        if ours is None or step.action == plan.SKIP:
            where = self._at_source(path) if ours is not None else self._at_target(path)
            self._report.meter.clear()
            words = f"ffs sync: {where} is left out: no file, directory or symlink"
            print(plain(words, sys.stderr), file=sys.stderr)
            self._count("left out")
            return
        if step.replaces and theirs is not None and not self._dry_run:
            self._touch(path)
            self._remove(path, stat.S_ISDIR(theirs.st_mode))
        if step.action in (plan.COPY, plan.COMPARE):
            self._copy(mover, path, ours, compare=step.action == plan.COMPARE)
        elif step.action == plan.MAKE:
            self._make(path, ours)
            inner.append((path, False))
        elif step.action == plan.ENTER:
            if theirs is not None and _mode(ours) != _mode(theirs):
                self._update(path, ours)
            self._times[path] = ours.st_mtime_ns, theirs.st_mtime_ns if theirs is not None else None
            inner.append((path, True))
        elif step.action in (plan.LINK, plan.COMPARE_LINK):
            self._link(path, ours, theirs if step.action == plan.COMPARE_LINK else None)
        elif step.action == plan.ATTRIBUTES:
            self._update(path, ours)
        else:
            self._count("unchanged")

    def _copy(self, mover: Mover, path: str, ours: os.stat_result, *, compare: bool) -> None:
        if self._dry_run:
            action = "compared" if compare else COPIED
            self._report.action(action, self._at_source(path), self._at_target(path), ours.st_size)
            return
        self._touch(path)
        meta = Meta(_mode(ours), ours.st_mtime_ns, _owner(ours))
        self._report.meter.expect(ours.st_size)
        mover.add(
            Item(
                self._from_path(path),
                self._to_path(path),
                ours.st_size,
                ours.st_mtime_ns,
                meta,
                umask_mode(ours.st_mode),
                compare,
            )
        )

    def _make(self, path: str, ours: os.stat_result) -> None:
        if not self._dry_run:
            self._touch(path)
            self._to.mkdir(self._to_path(path), umask_mode(ours.st_mode) | 0o700)
            self._times[path] = ours.st_mtime_ns, None
            self._directories.append((path, Meta(_mode(ours), None, _owner(ours))))
        self._report.action("made", None, self._at_target(path))

    def _link(self, path: str, ours: os.stat_result, there: os.stat_result | None) -> None:
        """`there`: a link that may say the same."""
        text = self._from.readlink(self._from_path(path))
        if there is not None and self._to.readlink(self._to_path(path)) == text:
            if ours.st_mtime_ns != there.st_mtime_ns and not self._dry_run:
                self._set_time(path, ours.st_mtime_ns, made=False)
            self._count("unchanged")
            return
        if not self._dry_run:
            self._touch(path)
            self._to.symlink(text, self._to_path(path))
            self._set_time(path, ours.st_mtime_ns, made=True)
        self._report.action("linked", self._at_source(path), self._at_target(path))

    def _update(self, path: str, ours: os.stat_result) -> None:
        if not self._dry_run:
            self._to.apply(self._to_path(path), Meta(_mode(ours)))
        self._report.action("updated", None, self._at_target(path))

    # --- times --------------------------------------------------------------------------------

    def _touch(self, path: str) -> None:
        """Something changes that changes the time of the directory above."""
        self._touched.add(os.path.dirname(path))

    def _set_times(self) -> None:
        """Of all directories; a run that finds nothing to do asks for nothing here."""
        for path, (wanted, known) in self._times.items():
            if wanted != known or path in self._touched:
                with self._report.guard():
                    self._set_time(path, wanted, made=known is None)

    def _set_time(self, path: str, mtime_ns: int, *, made: bool) -> None:
        """What was there may be somebody else's, who alone may set its time: then it has the one it has."""
        try:
            self._to.apply(self._to_path(path), Meta(mtime_ns=mtime_ns))
        except PermissionError:
            if made:
                raise

    # --- deleting -------------------------------------------------------------------------------

    def _delete_all(self) -> None:
        if self._deletions and self._tally.failures:
            self._report.meter.clear()
            print("ffs sync: nothing was deleted, since not all went well", file=sys.stderr)
            return
        files = [path for path, is_directory in self._deletions if not is_directory]
        results: list[OSError | None] = [None] * len(files)
        if not self._dry_run:
            results = self._to.remove_many([self._to_path(path) for path in files])
        for path, error in zip(files, results, strict=True):
            self._touch(path)
            if error is None or isinstance(error, FileNotFoundError):
                self._report.action("deleted", None, self._at_target(path))
            else:
                self._report.failed(named(error, str(self._at_target(path))))
        for path, is_directory in self._deletions:
            if is_directory:
                self._touch(path)
                with self._report.guard():
                    self._remove(path, True)
                    self._report.action("deleted", None, self._at_target(path))

    def _remove(self, top: str, is_directory: bool) -> None:
        """A tree of the target, except what is excluded or is no file, directory or symlink."""
        if not is_directory:
            self._to.remove(self._to_path(top))
            return
        order, files, kept = [top], [], set[str]()
        for folder in order:
            for name, info in self._to.entries(self._to_path(folder)):
                path = os.path.join(folder, name)
                kind = plan.node_of(info).kind
                if kind == plan.OTHER or self._excludes.match(path, kind == plan.DIRECTORY):
                    above = folder
                    while above and above not in kept:
                        kept.add(above)
                        above = os.path.dirname(above)
                elif kind == plan.DIRECTORY:
                    order.append(path)
                else:
                    files.append(path)
        if self._dry_run:
            return
        if top not in kept:
            self._to.rmtree(self._to_path(top))
            return
        for path, error in zip(files, self._to.remove_many([self._to_path(p) for p in files]), strict=True):
            if error is not None and not isinstance(error, FileNotFoundError):
                raise named(error, str(self._at_target(path)))
        for folder in reversed(order):
            if folder not in kept:
                self._to.rmdir(self._to_path(folder))

    # --- words ------------------------------------------------------------------------------------

    def _from_path(self, relative: str) -> str:
        return os.path.join(self._source.path, relative) if relative else self._source.path

    def _to_path(self, relative: str) -> str:
        return os.path.join(self._target.path, relative) if relative else self._target.path

    def _at_source(self, relative: str) -> Location:
        return replace(self._source, path=self._from_path(relative))

    def _at_target(self, relative: str) -> Location:
        return replace(self._target, path=self._to_path(relative))

    def _count(self, action: str) -> None:
        self._report.counts[action] = self._report.counts.get(action, 0) + 1

    def _done(self, item: Item, outcome: str) -> None:
        if outcome != COPIED:
            self._count("unchanged")
            return
        source = replace(self._source, path=item.source)
        self._report.action(outcome, source, replace(self._target, path=item.target), item.size)

    def _failed(self, item: Item, error: BaseException) -> None:
        self._report.failed(named(error, item.target))


def _key(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _mode(info: os.stat_result) -> int:
    return stat.S_IMODE(info.st_mode)


def _owner(info: os.stat_result) -> tuple[int, int] | None:
    return (info.st_uid, info.st_gid) if os.geteuid() == 0 else None

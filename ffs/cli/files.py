"""`ffs mkdir`, `ffs rmdir`, `ffs mv`, `ffs rm`: names that come and go."""

from __future__ import annotations

import argparse
import stat
import sys
from typing import TYPE_CHECKING

from ffs import errors
from ffs.cli.location import Location, parse_remote
from ffs.cli.modes import parse_mode_argument
from ffs.cli.names import plain
from ffs.cli.operands import Tally, confirm, expand_places, literal_option, remote_operands
from ffs.cli.parsing import Commands, command, connect

if TYPE_CHECKING:
    from ffs.client.client import Client


def add_commands(commands: Commands) -> None:
    mkdir = command(commands, "mkdir", run_mkdir, "make directories")
    mkdir.add_argument("paths", nargs="+", metavar="PATH")
    mkdir.add_argument("-p", "--parents", action="store_true", help="parents too; no error if it is there")
    mkdir.add_argument("-m", "--mode", metavar="MODE", help="as of chmod, whatever the umask is")
    rmdir = command(commands, "rmdir", run_rmdir, "remove empty directories")
    rmdir.add_argument("paths", nargs="+", metavar="PATH")
    rmdir.add_argument("-p", "--parents", action="store_true", help="then its parents, while they are empty")
    move = command(commands, "mv", run_mv, "rename within the cluster; by a copy where a quota is between")
    move.add_argument("sources", nargs="+", metavar="SOURCE")
    move.add_argument("target", metavar="TARGET")
    over = move.add_mutually_exclusive_group()
    over.add_argument("-n", "--no-clobber", action="store_true", help="never replace: that is an error")
    over.add_argument("-i", "--interactive", action="store_true", help="ask before replacing")
    over.add_argument("-f", "--force", action="store_true", help="replace without asking (the default)")
    over.add_argument("--exchange", action="store_true", help="swap the two names in one step")
    move.add_argument("-T", "--no-target-directory", action="store_true",
                      help="TARGET is the new name, also if it is a directory")  # fmt: skip
    remove = command(commands, "rm", run_rm, "remove files, or with -r trees")
    remove.add_argument("paths", nargs="+", metavar="PATH")
    remove.add_argument("-r", "-R", "--recursive", action="store_true", help="directories and all in them")
    remove.add_argument("-f", "--force", action="store_true", help="no error if it isn't there; never ask")
    remove.add_argument("-i", "--interactive", action="store_true", help="ask before each PATH")
    remove.add_argument("-d", "--dir", action="store_true", help="empty directories too")
    for parser in (mkdir, rmdir, move, remove):
        parser.add_argument("-v", "--verbose", action="store_true", help="say what is done")
        parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    for parser in (rmdir, move, remove):
        literal_option(parser)


def say(args: argparse.Namespace, words: str) -> None:
    """What was done with -v, what would be with --dry-run."""
    if args.dry_run:
        print(plain(f"would: {words}"))
    elif args.verbose:
        print(plain(words))


def run_mkdir(args: argparse.Namespace) -> int:
    tally = Tally(args)
    change = parse_mode_argument(args.mode) if args.mode is not None else None
    args.literal = True
    with remote_operands(args, args.paths) as (client, places):
        for place in places:
            with tally.guard():
                if args.dry_run:
                    if client.lexists(place.path) and not (args.parents and client.isdir(place.path)):
                        raise errors.Exists("is there already", place.path)
                else:
                    _make(client, place.path, args.parents, change.apply(0o777, True) if change else None)
                say(args, f"mkdir {place.path}")
    return tally.status


def _make(client: Client, path: str, parents: bool, mode: int | None) -> None:
    there = parents and mode is not None and client.isdir(path)
    if parents:
        client.makedirs(path, exist_ok=True)
    else:
        client.mkdir(path)
    if mode is not None and not there:
        client.chmod(path, mode)


def run_rmdir(args: argparse.Namespace) -> int:
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                path = place.path.rstrip("/")
                while path:
                    if args.dry_run:
                        if client.listdir(path):
                            raise errors.NotEmpty("isn't empty", path)
                        say(args, f"rmdir {path}")
                        break
                    client.rmdir(path)
                    say(args, f"rmdir {path}")
                    if not args.parents:
                        break
                    path = path.rpartition("/")[0]
                    if path and client.listdir(path):
                        break
    return tally.status


def run_mv(args: argparse.Namespace) -> int:
    from ffs.cli.location import one_address

    tally = Tally(args)
    named = [parse_remote(path) for path in args.sources]
    target = parse_remote(args.target)
    with connect(args, one_address([*named, target], args.cluster)) as client:
        sources = expand_places(client, named, literal=args.literal, tally=tally)
        into = not (args.no_target_directory or args.exchange) and is_directory(client, target)
        if len(sources) > 1 and not into:
            raise errors.NotADirectory("several sources need a directory as their target", target.path)
        for source in sources:
            with tally.guard():
                _move(args, client, source, target.child(source.name) if into else target)
    return tally.status


def _move(args: argparse.Namespace, client: Client, source: Location, goal: Location) -> None:
    from ffs.client.moving import move

    words = f"{source.path} -> {goal.path}"
    if args.exchange:
        if not args.dry_run:
            client.exchange(source.path, goal.path)
        say(args, f"{source.path} <-> {goal.path}")
        return
    if args.dry_run or args.interactive:
        client.lstat(source.path)
    there = (args.dry_run or args.interactive) and client.lexists(goal.path)
    if args.dry_run and args.no_clobber and there:
        raise errors.Exists("is there already: take another name, or leave out -n", goal.path)
    if args.interactive and there and not args.dry_run and not confirm(f"replace {goal.path}?"):
        return
    if not args.dry_run:
        try:
            move(client, source.path, goal.path, replace=not args.no_clobber)
        except errors.Exists as error:
            raise errors.Exists("is there already: take another name, or leave out -n", goal.path) from error
    say(args, words)


def run_rm(args: argparse.Namespace) -> int:
    tally = Tally(args)
    named = args.paths
    with remote_operands(args, named, None if args.force else tally) as (client, places):
        plain: list[str] = []
        for place in places:
            with tally.guard():
                _remove(args, client, place, plain)
        _remove_files(args, client, plain, tally)
    return tally.status


def _remove(args: argparse.Namespace, client: Client, place: Location, plain: list[str]) -> None:
    """Directories at once; files are gathered, to go in few requests."""
    path = place.path
    if path.rstrip("/") == "":
        raise errors.Busy("the root can't be removed: name what is in it", "/")
    if path.rstrip("/").rpartition("/")[2] in (".", ".."):
        raise errors.InvalidArgument("'.' and '..' can't be removed: name the directory", path)
    try:
        info = client.lstat(path)
    except FileNotFoundError:
        if args.force:
            return
        raise
    is_tree = stat.S_ISDIR(info.st_mode)
    if is_tree and not args.recursive and not args.dir:
        raise errors.IsADirectory("is a directory: add -r to remove it and all in it", path)
    if args.interactive and not args.force and not args.dry_run:
        what = "the directory and all in it" if is_tree and args.recursive else "the file"
        if not confirm(f"remove {path} ({what})?"):
            return
    if not is_tree:
        plain.append(path)
        return
    if not args.dry_run:
        client.rmtree(path) if args.recursive else client.rmdir(path)
    say(args, f"remove {path}{'/ and all in it' if args.recursive else ''}")


def _remove_files(args: argparse.Namespace, client: Client, paths: list[str], tally: Tally) -> None:
    results = [None] * len(paths) if args.dry_run else client.unlink_many(paths)
    for path, error in zip(paths, results, strict=True):
        if error is None:
            say(args, f"remove {path}")
        elif not (args.force and isinstance(error, FileNotFoundError)):
            if error.filename is None:
                error.filename = path
            tally.failed(error)
    sys.stdout.flush()


def is_directory(client: Client, place: Location) -> bool:
    """Whether it is a directory or leads to one."""
    try:
        return stat.S_ISDIR(client.stat(place.path).st_mode)
    except FileNotFoundError:
        return False

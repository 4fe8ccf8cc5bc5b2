"""`ffs cat`, `ffs mkdir`, `ffs mv`, `ffs rm`: one name at a time."""

from __future__ import annotations

import argparse
import stat
import sys
from typing import TYPE_CHECKING

from ffs import errors
from ffs.cli.location import Location, one_address, parse_remote
from ffs.cli.parsing import Commands, command, connect

if TYPE_CHECKING:
    from ffs.client.client import Client

_PIECE_BYTES = 8 << 20


def add_commands(commands: Commands) -> None:
    cat = command(commands, "cat", run_cat, "write files to stdout")
    cat.add_argument("paths", nargs="+", metavar="PATH")
    mkdir = command(commands, "mkdir", run_mkdir, "make directories")
    mkdir.add_argument("paths", nargs="+", metavar="PATH")
    mkdir.add_argument("-p", "--parents", action="store_true", help="parents too; no error if it is there")
    move = command(commands, "mv", run_mv, "rename within the cluster, as one transaction")
    move.add_argument("sources", nargs="+", metavar="SOURCE")
    move.add_argument("target", metavar="TARGET")
    move.add_argument("-n", "--no-clobber", action="store_true", help="fail if the target is there")
    remove = command(commands, "rm", run_rm, "remove files, or with -r trees")
    remove.add_argument("paths", nargs="+", metavar="PATH")
    remove.add_argument("-r", "-R", "--recursive", action="store_true", help="directories and all in them")
    remove.add_argument("-f", "--force", action="store_true", help="no error if it isn't there")


def run_cat(args: argparse.Namespace) -> int:
    places = [parse_remote(path) for path in args.paths]
    with connect(args, one_address(places, args.cluster)) as client:
        for place in places:
            with client.open(place.path, "rb", buffering=0) as file:
                while piece := file.read(_PIECE_BYTES):
                    sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    return 0


def run_mkdir(args: argparse.Namespace) -> int:
    places = [parse_remote(path) for path in args.paths]
    with connect(args, one_address(places, args.cluster)) as client:
        for place in places:
            if args.parents:
                client.makedirs(place.path, exist_ok=True)
            else:
                client.mkdir(place.path)
    return 0


def run_mv(args: argparse.Namespace) -> int:
    sources = [parse_remote(path) for path in args.sources]
    target = parse_remote(args.target)
    with connect(args, one_address([*sources, target], args.cluster)) as client:
        into = is_directory(client, target)
        if len(sources) > 1 and not into:
            raise errors.NotADirectory("several sources need a directory as their target", target.path)
        for source in sources:
            goal = target.child(source.name) if into else target
            if args.no_clobber and client.lexists(goal.path):
                raise errors.Exists("is there already: take another name, or leave out -n", goal.path)
            client.replace(source.path, goal.path)
    return 0


def run_rm(args: argparse.Namespace) -> int:
    places = [parse_remote(path) for path in args.paths]
    with connect(args, one_address(places, args.cluster)) as client:
        for place in places:
            try:
                _remove(client, place, args.recursive)
            except FileNotFoundError:
                if not args.force:
                    raise
    return 0


def _remove(client: Client, place: Location, recursive: bool) -> None:
    if place.path.rstrip("/") == "":
        raise errors.Busy("the root can't be removed: name what is in it", "/")
    if not stat.S_ISDIR(client.lstat(place.path).st_mode):
        client.remove(place.path)
    elif recursive:
        client.rmtree(place.path)
    else:
        raise errors.IsADirectory("is a directory: add -r to remove it and all in it", place.path)


def is_directory(client: Client, place: Location) -> bool:
    try:
        return stat.S_ISDIR(client.stat(place.path).st_mode)
    except FileNotFoundError:
        return False

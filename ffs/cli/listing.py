"""`ffs ls`, `ffs stat`: what is there."""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import sys
import time
from typing import TYPE_CHECKING, Any

from ffs.cli.location import Location, one_address, parse_remote
from ffs.cli.parsing import Commands, command, connect, print_json
from ffs.cli.text import format_bytes, table

if TYPE_CHECKING:
    from ffs.client.client import Client


def add_commands(commands: Commands) -> None:
    ls = command(commands, "ls", run_ls, "list a directory or name files", json_option=True)
    ls.add_argument("paths", nargs="*", default=["/"], metavar="PATH")
    ls.add_argument("-l", "--long", action="store_true", help="mode, owner, size and time too")
    ls.add_argument(
        "-d", "--directory", action="store_true", help="directories themselves, not what is in them"
    )
    ls.add_argument("-R", "--recursive", action="store_true", help="directories below too")
    show = command(commands, "stat", run_stat, "show all attributes of files", json_option=True)
    show.add_argument("paths", nargs="+", metavar="PATH")


def kind_of(mode: int) -> str:
    for test, name in ((stat.S_ISDIR, "directory"), (stat.S_ISLNK, "symlink"), (stat.S_ISREG, "file")):
        if test(mode):
            return name
    return "kv-space"


def as_json(path: str, info: Any) -> dict[str, object]:
    """The attributes as a program reads them: bytes, nanoseconds, octal mode as a string."""
    return {
        "path": path,
        "type": kind_of(info.st_mode),
        "size": info.st_size,
        "mode": f"{stat.S_IMODE(info.st_mode):04o}",
        "uid": info.st_uid,
        "gid": info.st_gid,
        "links": info.st_nlink,
        "inode": info.st_ino,
        "mtime_ns": info.st_mtime_ns,
        "ctime_ns": info.st_ctime_ns,
    }


def mode_string(mode: int) -> str:
    text = stat.filemode(mode)
    return "k" + text[1:] if text.startswith("?") else text


def run_ls(args: argparse.Namespace) -> int:
    places = [parse_remote(path) for path in args.paths]
    failed = False
    with connect(args, one_address(places, args.cluster)) as client:
        for number, place in enumerate(places):
            try:
                _list(client, place, args, heading=len(places) > 1, first=number == 0)
            except FileNotFoundError as error:
                failed = True
                print(f"ffs ls: {place.path}: {error.strerror}", file=sys.stderr)
    return 1 if failed else 0


def _list(client: Client, place: Location, args: argparse.Namespace, *, heading: bool, first: bool) -> None:
    info = client.stat(place.path)
    if not stat.S_ISDIR(info.st_mode) or args.directory:
        _show([(place.path, info)], args, place.path)
        return
    rows = sorted(
        ((entry.name, entry.stat(follow_symlinks=False)) for entry in client.scandir(place.path)),
        key=lambda row: row[0],
    )
    if (heading or args.recursive) and not args.json:
        print(("" if first else "\n") + f"{place.path}:")
    _show(rows, args, place.path)
    if args.recursive:
        for name, below in rows:
            if stat.S_ISDIR(below.st_mode):
                _list(client, place.child(name), args, heading=True, first=False)


def _show(rows: list[tuple[str, Any]], args: argparse.Namespace, parent: str) -> None:
    if args.json:
        for name, info in rows:
            print_json(as_json(os.path.join(parent, name), info))
    elif args.long:
        cells = [
            (
                mode_string(info.st_mode),
                str(info.st_nlink),
                str(info.st_uid),
                str(info.st_gid),
                format_bytes(info.st_size) if sys.stdout.isatty() else str(info.st_size),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.st_mtime)),
                name,
            )
            for name, info in rows
        ]
        if cells:
            head = ("mode", "links", "uid", "gid", "size", "modified", "name")
            print(table(head, cells, right=(1, 2, 3, 4)))
    elif sys.stdout.isatty():
        _columns([name + ("/" if stat.S_ISDIR(info.st_mode) else "") for name, info in rows])
    else:
        for name, _ in rows:
            print(name)


def _columns(names: list[str]) -> None:
    if not names:
        return
    width = max(map(len, names)) + 2
    across = max(1, shutil.get_terminal_size().columns // width)
    down = -(-len(names) // across)
    for row in range(down):
        print("".join(name.ljust(width) for name in names[row::down]).rstrip())


def run_stat(args: argparse.Namespace) -> int:
    places = [parse_remote(path) for path in args.paths]
    with connect(args, one_address(places, args.cluster)) as client:
        for number, place in enumerate(places):
            info = client.lstat(place.path)
            if args.json:
                print_json(as_json(place.path, info))
                continue
            if number:
                print()
            _print_stat(place, info)
    return 0


def _print_stat(place: Location, info: Any) -> None:
    print(f"path      {place.path}")
    print(f"type      {kind_of(info.st_mode)}")
    print(f"size      {info.st_size} bytes ({format_bytes(info.st_size)})")
    print(f"mode      {stat.S_IMODE(info.st_mode):04o} ({mode_string(info.st_mode)})")
    print(f"owner     uid {info.st_uid}, gid {info.st_gid}")
    print(f"links     {info.st_nlink}")
    print(f"inode     {info.st_ino}")
    for label, when in (("modified", info.st_mtime), ("changed", info.st_ctime)):
        print(f"{label:<9} {time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(when))}")

"""`ffs ls`, `ffs stat`: what is there."""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ffs.cli.location import Location
from ffs.cli.names import aligned, shown
from ffs.cli.operands import Tally, literal_option, remote_operands
from ffs.cli.parsing import Commands, command, print_json
from ffs.cli.text import format_bytes, table

if TYPE_CHECKING:
    from ffs.client.client import Client


def add_commands(commands: Commands) -> None:
    ls = command(commands, "ls", run_ls, "list a directory or name files", json_option=True)
    ls.add_argument("paths", nargs="*", default=["."], metavar="PATH")
    ls.add_argument("-l", "--long", action="store_true", help="mode, owner, size and time too")
    ls.add_argument(
        "-d", "--directory", action="store_true", help="directories themselves, not what is in them"
    )
    ls.add_argument("-R", "--recursive", action="store_true", help="directories below too")
    ls.add_argument(
        "-H", "--human", action="store_true", help="sizes as KiB, MiB (a terminal has them anyway)"
    )
    ls.add_argument("-1", action="store_true", dest="one", help="one name a line (as when no terminal reads)")
    ls.add_argument("-a", "-A", "--all", action="store_true", help=argparse.SUPPRESS)  # all are shown anyway
    order = ls.add_mutually_exclusive_group()
    order.add_argument("-t", action="store_const", dest="sort", const="time", help="newest first")
    order.add_argument("-S", action="store_const", dest="sort", const="size", help="largest first")
    ls.add_argument("-r", "--reverse", action="store_true", help="in reverse order")
    literal_option(ls)
    show = command(commands, "stat", run_stat, "show all attributes of files", json_option=True)
    show.add_argument("paths", nargs="+", metavar="PATH")
    show.add_argument("-L", "--dereference", action="store_true", help="of what symlinks lead to")
    literal_option(show)


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
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        many = len(places) > 1 or args.recursive
        directories: list[str] = []
        files: list[tuple[str, Any]] = []
        for place in places:
            with tally.guard():
                try:
                    info = client.stat(place.path)
                except FileNotFoundError:
                    info = client.lstat(place.path)  # a symlink that leads nowhere
                if args.directory:
                    info = client.lstat(place.path)
                if stat.S_ISDIR(info.st_mode) and not args.directory:
                    directories.append(place.path)
                else:
                    files.append((place.path, info))
        _show(client, sorted_rows(files, args), args, "")
        said = bool(files)
        for path in directories:
            with tally.guard():
                for folder in _tree(client, path, args, tally):
                    rows = sorted_rows(folder[1], args)
                    if many and not args.json:
                        print(("\n" if said else "") + f"{shown(folder[0])}:")
                    said = True
                    _show(client, rows, args, folder[0])
    return tally.status


def _tree(
    client: Client, top: str, args: argparse.Namespace, tally: Tally
) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """(path, (name, lstat) of its entries) of a directory, and with -R of those below it."""
    stack = [top]
    while stack:
        path = stack.pop()
        with tally.guard():
            rows = [(entry.name, entry.stat(follow_symlinks=False)) for entry in client.scandir(path)]
            yield path, rows
            if args.recursive:
                inner = [row for row in sorted_rows(rows, args) if stat.S_ISDIR(row[1].st_mode)]
                stack += [os.path.join(path, name) for name, _ in reversed(inner)]


def sorted_rows(rows: list[tuple[str, Any]], args: argparse.Namespace) -> list[tuple[str, Any]]:
    """By name, or as -t and -S say; -r turns it round."""
    rows = sorted(rows, key=lambda row: row[0])
    if args.sort == "time":
        rows.sort(key=lambda row: -row[1].st_mtime_ns)
    elif args.sort == "size":
        rows.sort(key=lambda row: -row[1].st_size)
    return rows[::-1] if args.reverse else rows


def _show(client: Client, rows: list[tuple[str, Any]], args: argparse.Namespace, parent: str) -> None:
    if args.json:
        for name, info in rows:
            print_json(as_json(os.path.join(parent, name), info))
    elif args.long:
        labels = aligned([name for name, _ in rows])
        cells = [
            (
                mode_string(info.st_mode),
                str(info.st_nlink),
                str(info.st_uid),
                str(info.st_gid),
                format_bytes(info.st_size) if args.human or sys.stdout.isatty() else str(info.st_size),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.st_mtime)),
                label + _target(client, parent, name, info),
            )
            for label, (name, info) in zip(labels, rows, strict=True)
        ]
        if cells:
            head = ("mode", "links", "uid", "gid", "size", "modified", "name")
            print(table(head, cells, right=(1, 2, 3, 4)))
    elif sys.stdout.isatty() and not args.one:
        labels = aligned([name for name, _ in rows])
        ends = ["/" if stat.S_ISDIR(info.st_mode) else "" for _, info in rows]
        _columns([label + end for label, end in zip(labels, ends, strict=True)])
    else:
        for name, _ in rows:
            print(shown(name))


def _target(client: Client, parent: str, name: str, info: Any) -> str:
    if not stat.S_ISLNK(info.st_mode):
        return ""
    try:
        return f" -> {shown(client.readlink(os.path.join(parent, name)))}"
    except FileNotFoundError:
        return ""  # it went meanwhile


def _columns(names: list[str]) -> None:
    if not names:
        return
    width = max(map(len, names)) + 2
    across = max(1, shutil.get_terminal_size().columns // width)
    down = -(-len(names) // across)
    for row in range(down):
        print("".join(name.ljust(width) for name in names[row::down]).rstrip())


def run_stat(args: argparse.Namespace) -> int:
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for number, place in enumerate(places):
            with tally.guard():
                info = client.stat(place.path, follow_symlinks=args.dereference)
                target = client.readlink(place.path) if stat.S_ISLNK(info.st_mode) else None
                if args.json:
                    fields = as_json(place.path, info)
                    print_json(fields if target is None else fields | {"target": target})
                    continue
                if number:
                    print()
                _print_stat(place, info)
                if target is not None:
                    print(f"leads to  {shown(target)}")
    return tally.status


def _print_stat(place: Location, info: Any) -> None:
    print(f"path      {shown(place.path)}")
    print(f"type      {kind_of(info.st_mode)}")
    print(f"size      {info.st_size} bytes ({format_bytes(info.st_size)})")
    print(f"mode      {stat.S_IMODE(info.st_mode):04o} ({mode_string(info.st_mode)})")
    print(f"owner     uid {info.st_uid}, gid {info.st_gid}")
    print(f"links     {info.st_nlink}")
    print(f"inode     {info.st_ino}")
    for label, when in (("modified", info.st_mtime), ("changed", info.st_ctime)):
        print(f"{label:<9} {time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(when))}")

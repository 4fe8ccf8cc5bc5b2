"""`ffs find`, `ffs tree`: what is below directories."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ffs import errors
from ffs.cli.attributes import parse_time
from ffs.cli.globs import Excludes, name_regex
from ffs.cli.listing import as_json
from ffs.cli.location import parse_remote
from ffs.cli.modes import parse_owner
from ffs.cli.names import shown
from ffs.cli.operands import Tally, literal_option, remote_operands
from ffs.cli.parsing import Commands, command, print_json
from ffs.cli.predicates import (
    Query,
    parse_age,
    parse_number,
    parse_perm,
    parse_size,
    parse_types,
    path_pattern,
)
from ffs.cli.text import format_bytes, plural

if TYPE_CHECKING:
    from ffs.client.client import Client


def add_commands(commands: Commands) -> None:
    find = command(
        commands, "find", run_find, "find files by name, type, size, time and more", json_option=True
    )
    find.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="where to begin (default: /)")
    add = find.add_argument
    add("-name", action="append", default=[], metavar="GLOB", help="the name matches; all tests must hold")
    add("-iname", action="append", default=[], metavar="GLOB", help="the same, without regard to case")
    add("-path", action="append", default=[], metavar="GLOB", help="the whole path matches; * matches / too")
    add("-type", metavar="T", help="f file, d directory, l symlink, k KV space; several as f,l")
    add("-size", action="append", default=[], metavar="N", help="as 0, +100M (more), -4k (less), 17c (bytes)")
    add("-mtime", action="append", default=[], metavar="N", help="changed N, +N (more), -N (less) days ago")
    add("-mmin", action="append", default=[], metavar="N", help="the same in minutes")
    add("-newer", metavar="PATH", help="changed after this one, in the cluster")
    add("-newermt", metavar="TIME", help="changed after 2026-03-01T12:30")
    add("-empty", action="store_true", help="files without bytes, directories without entries")
    add("-perm", metavar="MODE", help="644 exactly, -022 all of these bits, /022 any of them")
    add("-user", metavar="USER", help="of this owner")
    add("-group", metavar="GROUP", help="of this group")
    add("-links", metavar="N", help="with so many names")
    add("-mindepth", type=int, default=0, metavar="N", help="only N levels below PATH, and deeper")
    add("-maxdepth", type=int, metavar="N", help="no deeper than N levels below PATH")
    add("-depth", action="store_true", help="a directory after what is in it")
    add("-prune", action="append", default=[], metavar="GLOB", help="don't enter directories of this name")
    add("-print0", action="store_true", help="paths end in NUL, for xargs -0")
    add("-ls", action="store_true", help="with mode, owner, size and time")
    add("-delete", action="store_true", help="remove what is found (implies -depth)")
    add("--dry-run", action="store_true", help="with -delete: only say what would be removed")
    literal_option(find)
    tree = command(commands, "tree", run_tree, "draw what is below directories", json_option=True)
    tree.add_argument("paths", nargs="*", default=["."], metavar="PATH")
    tree.add_argument("-L", "--level", type=int, metavar="N", help="only N levels down")
    tree.add_argument("-d", "--directories", action="store_true", help="directories only")
    tree.add_argument("-s", "--size", action="store_true", help="sizes too")
    tree.add_argument("-I", "--exclude", action="append", default=[], metavar="GLOB", help="leave these out")
    literal_option(tree)


# --- find -----------------------------------------------------------------------------------------------


def query_of(args: argparse.Namespace, client: Client) -> Query:
    """The tests of a command line. InvalidArgument, NotFound (-newer)."""
    query = Query(
        names=[name_regex(glob) for glob in args.name] + [name_regex(glob, True) for glob in args.iname],
        paths=[path_pattern(glob) for glob in args.path],
        types=parse_types(args.type) if args.type else (),
        sizes=[parse_size(text) for text in args.size],
        ages=[parse_age(text, days=True) for text in args.mtime]
        + [parse_age(text, days=False) for text in args.mmin],
        empty=args.empty,
        perm=parse_perm(args.perm) if args.perm else None,
        uid=parse_owner(args.user)[0] if args.user else None,
        gid=parse_owner(":" + args.group)[1] if args.group else None,
        links=parse_number(args.links, "-links") if args.links else None,
        now_ns=time.time_ns(),
    )
    if args.newermt:
        query.newer_ns = parse_time(args.newermt)
    if args.newer:
        newer = client.stat(parse_remote(args.newer).path).st_mtime_ns
        query.newer_ns = max(newer, query.newer_ns or newer)
    return query


def run_find(args: argparse.Namespace) -> int:
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        query = query_of(args, client)
        for place in places:
            with tally.guard():
                for path, info in _walk(client, place.path, args, tally):
                    if query.fits(path, info):
                        with tally.guard():
                            _found(args, client, path, info)
    return tally.status


def _walk(
    client: Client, top: str, args: argparse.Namespace, tally: Tally
) -> Iterator[tuple[str, os.stat_result]]:
    """In order of names; a directory before what is in it, or after with -depth and -delete."""
    after = args.depth or args.delete
    prune = [name_regex(glob) for glob in args.prune]
    stack = [(top, client.lstat(top), 0, False)]
    while stack:
        path, info, depth, entered = stack.pop()
        shown = depth >= args.mindepth
        if entered or not stat.S_ISDIR(info.st_mode):
            if shown:
                yield path, info
            continue
        name = path.rstrip("/").rpartition("/")[2]
        if depth and any(regex.match(name) for regex in prune):
            continue
        if after:
            stack.append((path, info, depth, True))
        elif shown:
            yield path, info
        if args.maxdepth is not None and depth >= args.maxdepth:
            continue
        with tally.guard():
            inner = [
                (os.path.join(path, entry.name), entry.stat(follow_symlinks=False), depth + 1, False)
                for entry in client.scandir(path)
            ]
            stack += sorted(inner, key=lambda entry: entry[0], reverse=True)


def _found(args: argparse.Namespace, client: Client, path: str, info: os.stat_result) -> None:
    if args.delete:
        if path.rstrip("/") == "":
            return  # the root stays, as find has it with "."
        is_directory = stat.S_ISDIR(info.st_mode)
        if not args.dry_run:
            if is_directory:
                client.rmdir(path)
            else:
                client.remove(path)
        elif not args.json and not args.print0:
            print(f"would: remove {shown(path)}")
            return
    if args.json:
        print_json(as_json(path, info))
    elif args.print0:
        sys.stdout.write(path + "\0")
    elif args.ls:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.st_mtime))
        mode = stat.filemode(info.st_mode).replace("?", "k")
        numbers = f"{info.st_nlink:3} {info.st_uid:5} {info.st_gid:5} {info.st_size:13}"
        print(f"{mode} {numbers} {when} {shown(path)}")
    elif not args.delete:
        print(shown(path))


# --- tree -------------------------------------------------------------------------------------------------


def run_tree(args: argparse.Namespace) -> int:
    tally = Tally(args)
    if args.level is not None and args.level < 1:
        raise errors.InvalidArgument(f"-L {args.level}: give at least 1")
    excludes = Excludes(args.exclude)
    counts = {"directories": 0, "files": 0}
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                if args.json:
                    print_json(_as_object(client, place.path, args, excludes, tally))
                    continue
                print(shown(place.path))
                for line in _draw(client, place.path, args, excludes, counts, tally):
                    print(line)
    if not args.json:
        directories = (
            f"{counts['directories']} {'directory' if counts['directories'] == 1 else 'directories'}"
        )
        print(f"\n{directories}" + ("" if args.directories else f", {plural(counts['files'], 'file')}"))
    return tally.status


def _children(
    client: Client, path: str, relative: str, args: argparse.Namespace, excludes: Excludes
) -> list[tuple[str, Any]]:
    rows = [(entry.name, entry.stat(follow_symlinks=False)) for entry in client.scandir(path)]
    return sorted(
        (name, info)
        for name, info in rows
        if not excludes.match(os.path.join(relative, name), stat.S_ISDIR(info.st_mode))
        and (not args.directories or stat.S_ISDIR(info.st_mode))
    )


def _draw(
    client: Client,
    top: str,
    args: argparse.Namespace,
    excludes: Excludes,
    counts: dict[str, int],
    tally: Tally,
) -> Iterator[str]:
    stack: list[tuple[str, str, Any, str, bool]] = []

    def push(relative: str, prefix: str) -> None:
        rows = _children(client, os.path.join(top, relative), relative, args, excludes)
        for number, (name, info) in reversed(list(enumerate(rows))):
            stack.append((os.path.join(relative, name), name, info, prefix, number == len(rows) - 1))

    push("", "")
    while stack:
        relative, name, info, prefix, last = stack.pop()
        is_directory = stat.S_ISDIR(info.st_mode)
        counts["directories" if is_directory else "files"] += 1
        label = shown(name)
        if args.size and not is_directory:
            label = f"[{format_bytes(info.st_size):>10}]  {label}"
        if stat.S_ISLNK(info.st_mode):
            with tally.guard():
                label += f" -> {shown(client.readlink(os.path.join(top, relative)))}"
        yield f"{prefix}{'└── ' if last else '├── '}{label}{'/' if is_directory else ''}"
        if is_directory and (args.level is None or relative.count("/") + 1 < args.level):
            with tally.guard():
                push(relative, prefix + ("    " if last else "│   "))


def _as_object(
    client: Client, top: str, args: argparse.Namespace, excludes: Excludes, tally: Tally
) -> dict[str, object]:
    """Nested objects, each with "children" where it is a directory."""
    root: dict[str, object] = as_json(top, client.stat(top))
    stack: list[tuple[str, dict[str, object], int]] = [("", root, 1)]
    while stack:
        relative, node, level = stack.pop()
        children: list[dict[str, object]] = []
        node["children"] = children
        with tally.guard():
            for name, info in _children(client, os.path.join(top, relative), relative, args, excludes):
                below = os.path.join(relative, name)
                child = as_json(os.path.join(top, below), info)
                children.append(child)
                if stat.S_ISDIR(info.st_mode) and (args.level is None or level < args.level):
                    stack.append((below, child, level + 1))
    return root

"""`ffs df`, `ffs du`: how much is taken."""

from __future__ import annotations

import argparse
import os
import posixpath
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

from ffs import errors
from ffs.cli.location import one_address, parse_remote
from ffs.cli.names import shown
from ffs.cli.operands import Tally, literal_option, remote_operands
from ffs.cli.parsing import Commands, command, connect, print_json
from ffs.cli.text import format_bytes, table
from ffs.client.paths import wire_path
from ffs.proto import meta

if TYPE_CHECKING:
    from ffs.client.client import Client

Measure = Callable[[str, os.stat_result], int]
"""Of a path and its attributes: the bytes that count."""


def add_commands(commands: Commands) -> None:
    df = command(commands, "df", run_df, "space of the cluster", json_option=True)
    df.add_argument(
        "path",
        nargs="?",
        default="/",
        metavar="PATH",
        help="of its chain table, and of a quota that counts it (default: /)",
    )
    du = command(commands, "du", run_du, "bytes below directories", json_option=True)
    du.add_argument("paths", nargs="*", default=["."], metavar="PATH")
    du.add_argument("-d", "--max-depth", type=int, dest="depth", metavar="N", help="only N levels down")
    du.add_argument("-c", "--total", action="store_true", help="a total at the end")
    literal_option(du)
    du.add_argument("-s", "--summarize", action="store_true", help="one line for each PATH")
    du.add_argument(
        "--allocated",
        action="store_true",
        help="without holes: every file's chunks are asked for, which is slow",
    )
    du.add_argument("-b", "--bytes", action="store_true", help="whole bytes instead of KiB, MiB...")


def run_df(args: argparse.Namespace) -> int:
    place = parse_remote(args.path)
    with connect(args, one_address([place], args.cluster)) as client:
        space = client.core.ask(meta.StatFs(path=wire_path(place.path)), meta.StatFsReply)
    if args.json:
        print_json(space_fields(space))
    else:
        print(space_table(space))
    return 0


def space_fields(space: meta.StatFsReply) -> dict[str, object]:
    """For programs: bytes. Pure."""
    total, free = space.total_bytes, space.free_bytes
    fields: dict[str, object] = {"total": total, "used": total - free, "free": free}
    if space.quota_bytes:
        fields |= {"quota": space.quota_bytes, "quota_free": space.quota_free_bytes}
    return fields


def space_table(space: meta.StatFsReply) -> str:
    """For people: of the chain table, and of the quota if there is one. Pure."""
    rows = [("table", space.total_bytes, space.free_bytes)]
    if space.quota_bytes:
        rows.append(("quota", space.quota_bytes, space.quota_free_bytes))
    cells = [
        (
            name,
            format_bytes(total),
            format_bytes(total - free),
            format_bytes(free),
            f"{(total - free) / total:.0%}" if total else "-",
        )
        for name, total, free in rows
    ]
    head = ("of", "size", "used", "free", "use")
    if len(rows) == 1:
        return table(head[1:], [row[1:] for row in cells], right=(0, 1, 2, 3))
    return table(head, cells, right=(1, 2, 3, 4))


def run_du(args: argparse.Namespace) -> int:
    tally = Tally(args)
    seen: set[int] = set()
    total = 0
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                sizes: list[tuple[str, int]] = []
                size = _sum(client, place.path, sizes, seen, measure(client, args.allocated, tally))
                total += size
                _show(
                    args, [(place.path, size)] if args.summarize else _shallow(sizes, place.path, args.depth)
                )
    if args.total:
        _show(args, [("total", total)])
    return tally.status


def measure(client: Client, allocated: bool, tally: Tally) -> Measure:
    """What counts of a file: its length, or what of it is stored, where that can be had."""

    def length(path: str, info: os.stat_result) -> int:
        return int(info.st_size)

    def stored(path: str, info: os.stat_result) -> int:
        if not stat.S_ISREG(info.st_mode) or not info.st_size:
            return length(path, info)
        try:
            with client.open(path, "rb", buffering=0) as file:
                return int(file.held_bytes())
        except (errors.NotPermitted, errors.AccessDenied) as error:
            tally.failed(error)
            return length(path, info)

    return stored if allocated else length


def _show(args: argparse.Namespace, rows: list[tuple[str, int]]) -> None:
    for path, size in rows:
        if args.json:
            print_json({"path": path, "bytes": size})
        else:
            print(f"{size if args.bytes else format_bytes(size)}\t{shown(path)}")


def _shallow(sizes: list[tuple[str, int]], top: str, depth: int | None) -> list[tuple[str, int]]:
    if depth is None:
        return sizes
    base = len([name for name in top.split("/") if name])
    return [row for row in sizes if len([name for name in row[0].split("/") if name]) - base <= depth]


def _sum(client: Client, top: str, sizes: list[tuple[str, int]], seen: set[int], counted: Measure) -> int:
    """Bytes of the files below `top`; each directory's sum is appended, deepest first. A file with
    several names counts once, over all operands. Without recursion: trees may be deeper than Python's
    stack."""
    info = client.lstat(top)
    if not stat.S_ISDIR(info.st_mode):
        size = counted(top, info)
        sizes.append((top, size))
        return size
    own: dict[str, int] = {}
    order = [top]
    for path in order:
        own[path] = 0
        for entry in client.scandir(path):
            below = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(below.st_mode):
                order.append(posixpath.join(path, entry.name))
            elif below.st_nlink < 2 or below.st_ino not in seen:
                seen.add(below.st_ino)
                own[path] += counted(posixpath.join(path, entry.name), below)
    for path in reversed(order):
        sizes.append((path, own[path]))
        if path != top:
            own[posixpath.dirname(path)] += own[path]
    return own[top]

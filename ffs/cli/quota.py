"""`ffs quota`: how many bytes and entries may stand in a directory. docs/guides/quota.md."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from ffs.cli.names import shown
from ffs.cli.operands import Tally, literal_option, remote_operands
from ffs.cli.parsing import Commands, command, connect, print_json
from ffs.cli.text import format_bytes, parse_bytes, parse_count, table
from ffs.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.quota import Quota

_POLL_S = 0.25
NONE = "none"


def add_commands(commands: Commands) -> None:
    quota = commands.add_parser(
        "quota",
        help="how many bytes and entries may stand in a directory",
        description="Quotas of directories: how many bytes and entries may stand in one, with all below it.",
    )
    quota.set_defaults(run=lambda args: _usage(quota))
    verbs = quota.add_subparsers(dest="verb", metavar="VERB")
    change = command(verbs, "set", run_set, "give directories a quota, or change it", json_option=True)
    change.add_argument("paths", nargs="+", metavar="PATH")
    change.add_argument(
        "-b", "--bytes", type=_size, metavar="SIZE", help="at most so many bytes: 10G, or none (only counted)"
    )
    change.add_argument(
        "-e", "--entries", type=_count, metavar="N", help="at most so many entries: 1000000, 1M, or none"
    )
    change.add_argument("--wait", action="store_true", help="until what is there already is counted")
    look = command(verbs, "get", run_get, "show the quota that counts a path", json_option=True)
    look.add_argument("paths", nargs="+", metavar="PATH")
    look.add_argument("--wait", action="store_true", help="until what was there before is counted")
    command(verbs, "ls", run_ls, "list all quotas", json_option=True)
    clear = command(verbs, "clear", run_clear, "take the quota of directories away")
    clear.add_argument("paths", nargs="+", metavar="PATH")
    for parser in (change, look, clear):
        literal_option(parser)


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def _size(text: str) -> int:
    """Bytes; 0 for "none"."""
    if text == NONE:
        return 0
    return _limit(parse_bytes, text)


def _count(text: str) -> int:
    if text == NONE:
        return 0
    return _limit(parse_count, text)


def _limit(parse: Callable[[str], int], text: str) -> int:
    try:
        value = parse(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.message) from error
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a limit is 1 at least; write {NONE} for no limit")
    return value


# --- verbs ------------------------------------------------------------------------------------------


def run_set(args: argparse.Namespace) -> int:
    tally = Tally(args)
    if args.bytes is None and args.entries is None:
        raise InvalidArgument("give --bytes SIZE, --entries N, or both; none: only count", args.paths[0])
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                quota = client.set_quota(place.path, args.bytes, args.entries)
                if args.wait:
                    quota = _counted(client, place.path, quota)
                _tell(args, place.path, quota)
                if quota.counting and not args.json:
                    words = (
                        "what is there already is being counted: ffs quota get --wait tells when it is done"
                    )
                    print(f"ffs quota: {words}", file=sys.stderr)
    return tally.status


def run_get(args: argparse.Namespace) -> int:
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for number, place in enumerate(places):
            with tally.guard():
                quota = client.quota(place.path)
                if quota is None:
                    raise NotFound("no quota counts it", place.path)
                if args.wait:
                    quota = _counted(client, place.path, quota)
                if number and not args.json:
                    print()
                _tell(args, place.path, quota)
    return tally.status


def run_ls(args: argparse.Namespace) -> int:
    with connect(args) as client:
        quotas = client.quotas()
    if args.json:
        for quota in quotas:
            print_json(as_json(quota))
    elif quotas:
        print(listing_table(quotas))
    return 0


def run_clear(args: argparse.Namespace) -> int:
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                client.clear_quota(place.path)
    return tally.status


def _counted(client: Client, path: str, quota: Quota) -> Quota:
    """Once all that was there before is counted. Blocking; shows how far it is on a terminal."""
    line = _Line(sys.stderr)
    try:
        while quota.counting:
            line.show(f"counting: {quota.used_entries:,} entries, {format_bytes(quota.used_bytes)}")
            time.sleep(_POLL_S)
            now = client.quota(path)
            if now is None or now.inode != quota.inode:
                raise NotFound("its quota was taken away while it was counted", path)
            quota = now
    finally:
        line.clear()
    return quota


class _Line:
    """One line that is drawn over, on a terminal only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._columns = shutil.get_terminal_size().columns - 1 if stream.isatty() else 0

    def show(self, text: str) -> None:
        if self._columns:
            self._stream.write("\r" + text[: self._columns].ljust(self._columns))
            self._stream.flush()

    def clear(self) -> None:
        if self._columns:
            self.show("")
            self._stream.write("\r")
            self._stream.flush()


# --- words ------------------------------------------------------------------------------------------


def _tell(args: argparse.Namespace, path: str, quota: Quota) -> None:
    if args.json:
        print_json(as_json(quota) | {"asked": path})
    else:
        print("\n".join(lines(path, quota)))


def lines(path: str, quota: Quota) -> list[str]:
    """For people. Pure but for the terminal's look."""
    out = [f"quota    {where(quota)}"]
    if quota.path and path.rstrip("/") != quota.path.rstrip("/"):
        out.append(f"counts   {shown(path)}")
    out.append(f"bytes    {_use(format_bytes, quota.used_bytes, quota.limit_bytes, quota.free_bytes)}")
    out.append(f"entries  {_use(_number, quota.used_entries, quota.limit_entries, quota.free_entries)}")
    if quota.counting:
        out.append("state    counting what was there before: it uses more than this")
    return out


def where(quota: Quota) -> str:
    """The directory's path, or its inode where the path can't be told."""
    return shown(quota.path) if quota.path else f"inode {quota.inode}"


def _number(count: int) -> str:
    return f"{count:,}"


def _use(say: Callable[[int], str], used: int, limit: int, free: int | None) -> str:
    if not limit or free is None:
        return f"{say(used)}, no limit"
    return f"{say(used)} of {say(limit)} ({used / limit:.0%}), {say(free)} free"


def listing_table(quotas: list[Quota]) -> str:
    rows = [
        (
            where(quota),
            format_bytes(quota.used_bytes),
            format_bytes(quota.limit_bytes) if quota.limit_bytes else "-",
            f"{quota.used_bytes / quota.limit_bytes:.0%}" if quota.limit_bytes else "-",
            _number(quota.used_entries),
            _number(quota.limit_entries) if quota.limit_entries else "-",
            f"{quota.used_entries / quota.limit_entries:.0%}" if quota.limit_entries else "-",
            "counting" if quota.counting else "ready",
        )
        for quota in quotas
    ]
    head = ("directory", "bytes", "limit", "use", "entries", "limit", "use", "state")
    return table(head, rows, right=(1, 2, 3, 4, 5, 6))


def as_json(quota: Quota) -> dict[str, object]:
    """For programs. Limits of null: none. Pure."""
    return {
        "path": quota.path or None,
        "inode": quota.inode,
        "limit_bytes": quota.limit_bytes or None,
        "used_bytes": quota.used_bytes,
        "limit_entries": quota.limit_entries or None,
        "used_entries": quota.used_entries,
        "counting": quota.counting,
    }

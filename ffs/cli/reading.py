"""`ffs cat`, `ffs head`, `ffs tail`, `ffs checksum`: what is in files."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ffs import errors
from ffs.cli.names import plain, shown
from ffs.cli.operands import Tally, literal_option, remote_operands
from ffs.cli.parsing import Commands, command, print_json
from ffs.cli.text import parse_bytes

if TYPE_CHECKING:
    from ffs.client.client import Client

_PIECE_BYTES = 8 << 20
_BACK_BYTES = 64 << 10
_POLL_S = 0.25


def add_commands(commands: Commands) -> None:
    cat = command(commands, "cat", run_cat, "write files to stdout")
    cat.add_argument("paths", nargs="+", metavar="PATH")
    literal_option(cat)
    for name, run, text, what in (
        ("head", run_head, "write the beginnings of files to stdout", "-N: all but the last N"),
        ("tail", run_tail, "write the ends of files to stdout", "+N: from the Nth on"),
    ):
        parser = command(commands, name, run, text)
        parser.add_argument("paths", nargs="+", metavar="PATH")
        amount = parser.add_mutually_exclusive_group()
        amount.add_argument("-n", "--lines", default=None, metavar="N", help=f"lines (default: 10); {what}")
        amount.add_argument("-c", "--bytes", default=None, metavar="N", help=f"bytes, also as 4k; {what}")
        parser.add_argument("-q", "--quiet", action="store_true", help="no headings between files")
        parser.add_argument("-v", "--verbose", action="store_true", help="a heading for one file too")
        if name == "tail":
            parser.add_argument("-f", "--follow", action="store_true",
                                help="go on with what is appended, until Ctrl-C")  # fmt: skip
        literal_option(parser)
    checksum = command(commands, "checksum", run_checksum, "checksums of files, as sha256sum prints them",
                       json_option=True)  # fmt: skip
    checksum.add_argument("paths", nargs="+", metavar="PATH")
    checksum.add_argument("--algorithm", choices=("sha256", "blake3", "md5"), default="sha256",
                          help="default: sha256")  # fmt: skip
    literal_option(checksum)


def pour(client: Client, path: str) -> None:
    """A whole file to stdout. Blocking."""
    with client.open(path, "rb", buffering=0) as file:
        for piece in _pieces(file):
            sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece


def run_cat(args: argparse.Namespace) -> int:
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                pour(client, place.path)
    return tally.status


# --- head and tail ----------------------------------------------------------------------------------


def amount_of(args: argparse.Namespace) -> tuple[str, int, bool]:
    """("" or "+" or "-" as it was written, the number, whether it counts bytes)."""
    in_bytes = args.bytes is not None
    text = args.bytes if in_bytes else args.lines if args.lines is not None else "10"
    match = re.fullmatch(r"([+-]?)(\d.*)", text.strip())
    if match is None:
        raise errors.InvalidArgument(f"{text!r} isn't a number of {'bytes' if in_bytes else 'lines'}")
    if not in_bytes and not match[2].isdigit():
        raise errors.InvalidArgument(f"{text!r} isn't a number of lines")
    return match[1], parse_bytes(match[2]) if in_bytes else int(match[2]), in_bytes


def run_head(args: argparse.Namespace) -> int:
    sign, count, in_bytes = amount_of(args)
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for number, place in enumerate(places):
            with tally.guard(), client.open(place.path, "rb", buffering=0) as file:
                _heading(args, place.path, number, len(places))
                if sign == "-":
                    _copy_range(file, 0, _from_end(file, count, in_bytes))
                elif in_bytes:
                    _copy_range(file, 0, count)
                else:
                    _head_lines(file, count)
                sys.stdout.buffer.flush()
    return tally.status


def _heading(args: argparse.Namespace, path: str, number: int, count: int) -> None:
    if args.verbose or (count > 1 and not args.quiet):
        # Into the buffer that the content goes through too, or the two would change places.
        text = ("\n" if number else "") + f"==> {shown(path)} <==\n"
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))


def _copy_range(file: Any, start: int, end: int | None) -> int:
    """Bytes from `start` to `end` (None: as far as it goes); returns where it ended."""
    offset = start
    while end is None or offset < end:
        piece = file.pread(_PIECE_BYTES if end is None else min(_PIECE_BYTES, end - offset), offset)
        if not piece:
            break
        sys.stdout.buffer.write(piece)
        offset += len(piece)
    return offset


def _head_lines(file: Any, count: int) -> None:
    offset, left = 0, count
    while left > 0 and (piece := file.pread(_BACK_BYTES, offset)):
        offset += len(piece)
        end = -1
        for _ in range(left):
            found = piece.find(b"\n", end + 1)
            if found < 0:
                break
            end, left = found, left - 1
        sys.stdout.buffer.write(piece if left else piece[: end + 1])


def _from_end(file: Any, count: int, in_bytes: bool) -> int:
    """Where the last `count` bytes or lines begin. What follows the last newline is a line."""
    size: int = file.seek(0, 2)
    if in_bytes:
        return max(0, size - count)
    if count == 0:
        return size
    offset: int = size
    left = count
    first = True
    while offset > 0:
        start = max(0, offset - _BACK_BYTES)
        piece = file.pread(offset - start, start)
        end = len(piece)
        if first and piece.endswith(b"\n"):
            end -= 1  # it ends the last line, rather than beginning one
        first = False
        while (found := piece.rfind(b"\n", 0, end)) >= 0:
            left -= 1
            if left == 0:
                return int(start + found + 1)
            end = found
        offset = start
    return 0


def _from_start(file: Any, count: int, in_bytes: bool) -> int:
    """Where the `count`th byte or line begins, counted from 1."""
    skip = max(0, count - 1)
    if in_bytes:
        return skip
    offset = 0
    while skip and (piece := file.pread(_BACK_BYTES, offset)):
        end = -1
        while skip and (found := piece.find(b"\n", end + 1)) >= 0:
            end, skip = found, skip - 1
        offset += end + 1 if skip == 0 else len(piece)
    return offset


def run_tail(args: argparse.Namespace) -> int:
    sign, count, in_bytes = amount_of(args)
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        ends: dict[str, int] = {}
        for number, place in enumerate(places):
            with tally.guard(), client.open(place.path, "rb", buffering=0) as file:
                _heading(args, place.path, number, len(places))
                begin = _from_start if sign == "+" else _from_end
                ends[place.path] = _copy_range(file, begin(file, count, in_bytes), None)
                sys.stdout.buffer.flush()
        if args.follow and ends:
            _follow(args, client, ends)
    return tally.status


def _follow(args: argparse.Namespace, client: Client, ends: dict[str, int]) -> None:
    """Until Ctrl-C, by name: a file that was replaced or cut is read from its beginning."""
    inodes: dict[str, int] = {}
    last = list(ends)[-1]
    while True:
        time.sleep(_POLL_S)
        for path, info in zip(ends, client.stat_many(ends), strict=True):
            if isinstance(info, OSError):
                if not isinstance(info, FileNotFoundError):
                    raise info
                continue  # it may come back, as a rotated log does
            known = inodes.setdefault(path, info.st_ino)
            if known != info.st_ino or info.st_size < ends[path]:
                why = "was replaced" if known != info.st_ino else "was cut"
                print(f"ffs tail: {shown(path, sys.stderr)} {why}: from its beginning on", file=sys.stderr)
                inodes[path], ends[path] = info.st_ino, 0
            if info.st_size == ends[path]:
                continue
            if path != last and len(ends) > 1:
                _heading(args, path, 1, len(ends))
            last = path
            with client.open(path, "rb", buffering=0) as file:
                ends[path] = _copy_range(file, ends[path], None)
            sys.stdout.buffer.flush()


# --- checksum -----------------------------------------------------------------------------------------


def run_checksum(args: argparse.Namespace) -> int:
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard(), client.open(place.path, "rb", buffering=0) as file:
                digest = _hasher(args.algorithm)
                size = 0
                for piece in _pieces(file):
                    digest.update(piece)
                    size += len(piece)
                if args.json:
                    fields = {"path": place.path, "algorithm": args.algorithm}
                    print_json(fields | {"checksum": digest.hexdigest(), "bytes": size})
                else:
                    print(plain(_checksum_line(digest.hexdigest(), place.path)))
    return tally.status


def _checksum_line(digest: str, path: str) -> str:
    """As sha256sum writes and checks it: a line break or backslash in the name is escaped and marked."""
    safe = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if safe == path else chr(92)}{digest}  {safe}"


def _hasher(algorithm: str) -> Any:
    if algorithm == "blake3":
        from blake3 import blake3

        return blake3()
    return hashlib.new(algorithm)

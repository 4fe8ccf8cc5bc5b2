"""`ffs kv create|ls|stats|pin|purge`: KV spaces and the blocks in them. docs/guides/kv.md."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ffs.cli.location import Location, one_address, parse_remote
from ffs.cli.names import shown
from ffs.cli.parsing import Commands, command, connect, count_argument, print_json, seconds_argument
from ffs.cli.space import add_create, add_ls, spaces_below
from ffs.cli.text import format_bytes, plural
from ffs.errors import InvalidArgument, NotFound
from ffs.kv.keys import KEY_BYTES

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.kv.bounds import Usage

_AT_A_TIME = 1024  # keys


def add_verbs(verbs: Commands) -> None:
    add_create(verbs)
    add_ls(verbs)
    words = "what KV spaces hold, and with --every how that changes"
    stats = command(verbs, "stats", run_stats, words, json_option=True)
    stats.add_argument(
        "paths", metavar="PATH", nargs="+", help="spaces, or directories for all spaces below them"
    )
    stats.add_argument(
        "--every", type=seconds_argument, metavar="SECONDS", help="again and again, with rates"
    )
    stats.add_argument("--count", type=count_argument, metavar="N", help="with --every: so many times")
    pin = command(verbs, "pin", run_pin, "keep blocks from being dropped to make room", json_option=True)
    pin.add_argument("path", metavar="PATH")
    pin.add_argument("keys", metavar="KEY", nargs="*", help=f"of a block, {2 * KEY_BYTES} hex digits")
    pin.add_argument("--keys", dest="file", metavar="FILE", help="keys, one a line (-: from stdin)")
    pin.add_argument("--undo", action="store_true", help="let them go again")
    words = "take every block away; the spaces stay"
    purge = command(verbs, "purge", run_purge, words, json_option=True)
    purge.add_argument(
        "paths", metavar="PATH", nargs="+", help="spaces, or directories for all spaces below them"
    )


# --- stats --------------------------------------------------------------------------------------------


def run_stats(args: argparse.Namespace) -> int:
    places = [parse_remote(path) for path in args.paths]
    if args.count is not None and args.every is None:
        raise InvalidArgument("--count goes with --every")
    with connect(args, one_address(places, args.cluster)) as client:
        paths = _named(client, places)
        inodes = {path: client.attributes(path).ino for path in paths}
        show = _show_json if args.json else _show_line
        if not args.json:
            print(_HEAD)
        for before, after, seconds in _looks(client, inodes, args.every, args.count):
            for path in paths:
                if (usage := after.get(inodes[path])) is not None:
                    show(path, before.get(inodes[path]), usage, seconds)
            sys.stdout.flush()
    return 0


def _looks(
    client: Client, inodes: Mapping[str, int], every_ms: int | None, count: int | None
) -> Iterator[tuple[dict[int, Usage], dict[int, Usage], float]]:
    """What all spaces hold, with what they held at the look before (at first: nothing) and the time
    between. One that was made just now may not be among all of them yet: it is asked for by itself."""
    from ffs.kv.bounds import usage_of, usage_of_all

    before: dict[int, Usage] = {}
    looked, number = time.monotonic(), 0
    while True:
        after = usage_of_all(client)
        for inode in inodes.values():
            if inode not in after:
                with contextlib.suppress(NotFound):  # removed meanwhile
                    after[inode] = usage_of(client, inode)
        now = time.monotonic()
        yield before, after, now - looked
        number += 1
        if every_ms is None or number == count:
            return
        before, looked = after, now
        time.sleep(every_ms / 1000)


_COLUMNS = ("used", "quota", "blocks", "hits", "evicted", "expired", "saved")
_HEAD = " ".join(f"{name:>10}" for name in _COLUMNS) + "  space"


def rates(before: Usage | None, after: Usage, seconds: float) -> dict[str, float]:
    """Blocks a second since the look before. Counters begin anew with their servers: what went back tells
    nothing."""
    if before is None or seconds <= 0:
        return {}
    pairs = {
        "hits_per_s": (before.hits, after.hits),
        "evicted_per_s": (before.evicted_blocks, after.evicted_blocks),
        "expired_per_s": (before.expired_blocks, after.expired_blocks),
    }
    return {name: round(max(0, new - old) / seconds, 1) for name, (old, new) in pairs.items()}


def _show_line(path: str, before: Usage | None, after: Usage, seconds: float) -> None:
    rate = rates(before, after, seconds)

    def counted(name: str, total: int) -> str:
        return f"{rate[name]:,.0f}/s" if name in rate else f"{total:,}"

    quota = format_bytes(after.quota_bytes) if after.quota_bytes else "none"
    print(
        f"{format_bytes(after.bytes):>10} {quota:>10} {after.blocks:>10,}"
        f" {counted('hits_per_s', after.hits):>10}"
        f" {counted('evicted_per_s', after.evicted_blocks):>10}"
        f" {counted('expired_per_s', after.expired_blocks):>10}"
        f" {format_bytes(after.saved_bytes) if after.saved_bytes else '-':>10}  {shown(path)}"
    )


def _show_json(path: str, before: Usage | None, after: Usage, seconds: float) -> None:
    print_json(
        {
            "path": path,
            "bytes": after.bytes,
            "blocks": after.blocks,
            "quota_bytes": after.quota_bytes,
            "hits": after.hits,
            "evicted_blocks": after.evicted_blocks,
            "evicted_bytes": after.evicted_bytes,
            "expired_blocks": after.expired_blocks,
            "shared_blocks": after.shared_blocks,
            "saved_bytes": after.saved_bytes,
            "chains": after.chains,
            "chains_reported": after.reported,
            **rates(before, after, seconds),
        }
    )


# --- pin and purge ------------------------------------------------------------------------------------


def run_pin(args: argparse.Namespace) -> int:
    from ffs.kv.space import Space

    keys = [key_of(text) for text in args.keys]
    if args.file is not None:
        keys += _keys_in(args.file)
    if not keys:
        raise InvalidArgument(f"no key: give keys of {2 * KEY_BYTES} hex digits, or --keys FILE", args.path)
    place = parse_remote(args.path)
    done = missing = 0
    with connect(args, one_address([place], args.cluster)) as client, Space.open(client, place.path) as space:
        for begin in range(0, len(keys), _AT_A_TIME):
            mark = space.unpin if args.undo else space.pin
            results = mark(keys[begin : begin + _AT_A_TIME])
            results.raise_errors()
            done += int(results.hits.sum())
            missing += len(results) - int(results.hits.sum())
    if args.json:
        print_json({"path": place.path, "unpinned" if args.undo else "pinned": done, "missing": missing})
    else:
        lost = f", {plural(missing, 'block')} not there" if missing else ""
        print(f"{shown(place.path)}: {plural(done, 'block')} {'unpinned' if args.undo else 'pinned'}{lost}")
    return 1 if missing else 0


def key_of(text: str) -> bytes:
    """Of hex digits. InvalidArgument."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidArgument(f"{text!r} isn't the key of a block: give {2 * KEY_BYTES} hex digits")
    return key


def _keys_in(name: str) -> list[bytes]:
    def read(file: TextIO) -> list[bytes]:
        return [key_of(line.strip()) for line in file if line.strip()]

    if name == "-":
        return read(sys.stdin)
    with Path(name).open(encoding="utf-8") as file:
        return read(file)


def run_purge(args: argparse.Namespace) -> int:
    from ffs.kv.space import Space

    places = [parse_remote(path) for path in args.paths]
    with connect(args, one_address(places, args.cluster)) as client:
        for path in _named(client, places):
            with Space.open(client, path) as space:
                removed = space.purge()
            if args.json:
                print_json({"path": path, "removed": removed})
            else:
                print(f"{shown(path)}: {plural(removed, 'block' if space.parts == 1 else 'part')} removed")
    return 0


def _named(client: Client, places: Sequence[Location]) -> list[str]:
    """The spaces at and below these places, each once. InvalidArgument: there is none."""
    found = dict.fromkeys(path for place in places for path in spaces_below(client, place.path))
    if not found:
        raise InvalidArgument("no KV space is there: ffs kv create makes one", places[0].path)
    return list(found)

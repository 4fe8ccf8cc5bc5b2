"""`ffs trash`, `ffs restore`: removal that can be undone (docs/guides/command_line.md, Trash).

Laid out as the freedesktop.org trash: /.trash/<uid>/files/NAME is what was removed, by a rename that keeps
everything of it; /.trash/<uid>/info/NAME.trashinfo says where it was and since when, in plain text, and is
written first. Nothing else is known of it anywhere.
"""

from __future__ import annotations

import argparse
import datetime
import posixpath
import stat
import sys
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffs import errors
from ffs.cli.globs import escape, has_magic, path_regex, unescape
from ffs.cli.location import one_address, parse_remote
from ffs.cli.names import shown
from ffs.cli.operands import Tally, confirm, literal_option, remote_operands
from ffs.cli.parsing import Commands, command, connect, print_json
from ffs.cli.text import format_bytes, parse_duration, plural, table

if TYPE_CHECKING:
    import os

    from ffs.client.client import Client

ROOT = "/.trash"
_SUFFIX = ".trashinfo"
_TRIES = 1000


def add_commands(commands: Commands) -> None:
    trash = command(commands, "trash", run_trash, "move files and trees to the trash; list it, empty it",
                    json_option=True)  # fmt: skip
    trash.add_argument("words", nargs="+", metavar="PATH|list|empty",
                       help="what to remove; or list, or empty, with PATTERNs of what it was")  # fmt: skip
    trash.add_argument(
        "--older-than", metavar="TIME", help="list, empty: only what was removed 7d, 12h... ago"
    )
    trash.add_argument("--all", action="store_true", help="list, empty: of all users (for root)")
    trash.add_argument("-f", "--force", action="store_true",
                       help="no error if PATH isn't there; empty: don't ask")  # fmt: skip
    trash.add_argument("--dry-run", action="store_true", help="say what would be done")
    trash.add_argument("-v", "--verbose", action="store_true", help="say what is done")
    literal_option(trash)
    restore = command(commands, "restore", run_restore, "bring back what is in the trash", json_option=True)
    restore.add_argument("paths", nargs="+", metavar="PATH",
                         help="where it was (of several the newest), or its NAME in the trash")  # fmt: skip
    restore.add_argument("--to", metavar="PATH", help="bring it back under this name, or into this directory")
    restore.add_argument("-p", "--parents", action="store_true", help="make directories that are gone")
    restore.add_argument("--dry-run", action="store_true", help="say what would be done")
    restore.add_argument("-v", "--verbose", action="store_true", help="say what is done")


@dataclass(frozen=True, slots=True)
class Removed:
    """One thing in the trash."""

    folder: str  # /.trash/<uid>
    name: str
    origin: str
    removed_s: float  # since 1970

    @property
    def file(self) -> str:
        return f"{self.folder}/files/{self.name}"

    @property
    def info(self) -> str:
        return f"{self.folder}/info/{self.name}{_SUFFIX}"


# --- the sidecar ----------------------------------------------------------------------------------------


def info_text(origin: str, when_s: float) -> str:
    """What stands in a .trashinfo. Pure."""
    date = datetime.datetime.fromtimestamp(int(when_s), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    quoted = urllib.parse.quote(origin.encode("utf-8", "surrogateescape"), safe="/")
    return f"[Trash Info]\nPath={quoted}\nDeletionDate={date}\n"


def parse_info(text: str) -> tuple[str, float]:
    """(origin, seconds since 1970). InvalidArgument for what isn't one. Pure."""
    lines = text.splitlines()
    fields = dict(line.split("=", 1) for line in lines[1:] if "=" in line)
    try:
        if lines[0] != "[Trash Info]":
            raise ValueError
        origin = urllib.parse.unquote_to_bytes(fields["Path"]).decode("utf-8", "surrogateescape")
        date = datetime.datetime.fromisoformat(fields["DeletionDate"])
    except (IndexError, KeyError, ValueError):
        raise errors.InvalidArgument("isn't a .trashinfo: it has no Path and DeletionDate") from None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    return origin, date.timestamp()


def nth_name(name: str, number: int) -> str:
    """The `number`th name to try for something called `name`: it fits, also with the suffix of its
    sidecar. Pure."""
    tail = "" if number == 1 else f".{number}"
    while len((name + tail + _SUFFIX).encode("utf-8", "surrogateescape")) > 255:
        name = name[:-1]
    return name + tail


# --- in -------------------------------------------------------------------------------------------------


def run_trash(args: argparse.Namespace) -> int:
    verb = args.words[0]
    if verb == "list":
        return _list(args, args.words[1:])
    if verb == "empty":
        return _empty(args, args.words[1:])
    if args.older_than or args.all:
        raise errors.InvalidArgument("--older-than and --all belong to 'trash list' and 'trash empty'")
    tally = Tally(args)
    with remote_operands(args, args.words, None if args.force else tally) as (client, places):
        folder = ""
        for place in places:
            with tally.guard():
                try:
                    client.lstat(place.path)
                except FileNotFoundError:
                    if args.force:
                        continue
                    raise
                origin = _origin(client, place.path)
                if args.dry_run:
                    print(f"would: move {shown(origin)} to the trash")
                    continue
                folder = folder or own_folder(client)
                name = put_away(client, folder, origin)
                if args.json:
                    print_json({"path": origin, "name": name})
                elif args.verbose:
                    print(f"{shown(origin)} -> {shown(f'{folder}/files/{name}')}")
    return tally.status


def _origin(client: Client, path: str) -> str:
    """The path by which it can be brought back: its directory without symlinks and '..'."""
    from ffs.cli.attributes import canonical

    name = posixpath.basename(path.rstrip("/"))
    if name in ("", ".", ".."):
        raise errors.InvalidArgument("has no name of its own: name the directory from above", path)
    origin = posixpath.join(canonical(client, posixpath.dirname(path.rstrip("/"))), name)
    if origin == ROOT or origin.startswith(ROOT + "/"):
        raise errors.InvalidArgument("is the trash itself: ffs trash empty, or ffs rm", path)
    return origin


def own_folder(client: Client) -> str:
    """/.trash/<uid> with files and info, made if it isn't there."""
    uid = client.core.creds.uid
    folder = f"{ROOT}/{uid}"
    if not client.lexists(ROOT):
        try:
            client.mkdir(ROOT)
            client.chmod(ROOT, 0o1777)
        except errors.Exists:
            pass
        except PermissionError as error:
            raise errors.AccessDenied(
                f"there is no {ROOT} yet, and only root may make it: ffs mkdir -m 1777 {ROOT}", ROOT
            ) from error
    try:
        client.mkdir(folder, 0o700)
    except errors.Exists:
        info = client.lstat(folder)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != uid:
            raise errors.NotPermitted(
                "isn't a directory of yours: its owner is to remove it", folder
            ) from None
    for name in ("files", "info"):
        client.makedirs(f"{folder}/{name}", exist_ok=True)
    return folder


def put_away(client: Client, folder: str, origin: str) -> str:
    """Moves it into the trash; returns its name there. The sidecar reserves the name."""
    text = info_text(origin, time.time())
    base = posixpath.basename(origin)
    for number in range(1, _TRIES):
        name = nth_name(base, number)
        entry = Removed(folder, name, origin, 0)
        try:
            with client.open(entry.info, "x", atomic=True) as file:
                file.write(text)
        except errors.Exists:
            continue
        try:
            client.rename_exclusive(origin, entry.file)
        except errors.Exists:  # what a lost sidecar belonged to: it stays
            client.remove(entry.info)
            continue
        except errors.CrossDevice as error:
            client.remove(entry.info)
            raise errors.CrossDevice(
                "lies in a quota directory, which nothing leaves by a rename: remove it with ffs rm, or copy "
                "it out first (ffs cp -r -p)",
                origin,
            ) from error
        except BaseException:
            client.remove(entry.info)
            raise
        return name
    raise errors.Exists(f"the trash has {_TRIES} things of that name: empty it", origin)


# --- list, empty ------------------------------------------------------------------------------------------


def removed_things(client: Client, folder: str, tally: Tally) -> Iterator[Removed]:
    """What is in one user's trash, oldest first; sidecars without a file too.

    Only what that user's own directories hold: a link, or a directory that somebody else has put there,
    would have root remove what they name.
    """
    owned = False
    with tally.guard():
        owned = _is_owned(client, folder)
    if not owned:
        return
    try:
        names = client.listdir(f"{folder}/info")
    except FileNotFoundError:
        return
    found = []
    paths = [f"{folder}/info/{name}" for name in names if name.endswith(_SUFFIX)]
    for path, opened in zip(paths, client.open_many(paths), strict=True):
        with tally.guard():
            if isinstance(opened, OSError):
                raise opened
            with opened as file:
                text = file.read().decode("utf-8", "surrogateescape")
            try:
                origin, when = parse_info(text)
            except errors.InvalidArgument as error:
                raise errors.InvalidArgument(error.message, path) from None
            found.append(Removed(folder, posixpath.basename(path).removesuffix(_SUFFIX), origin, when))
    yield from sorted(found, key=lambda thing: (thing.removed_s, thing.name))


def _is_owned(client: Client, folder: str) -> bool:
    """Whether there is a trash. NotPermitted: a part of it is a link, or isn't its user's."""
    for path in (folder, f"{folder}/info", f"{folder}/files"):
        try:
            found = client.lstat(path)
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(found.st_mode) or str(found.st_uid) != posixpath.basename(folder):
            raise errors.NotPermitted("isn't a directory of the user whose trash this is: left alone", path)
    return True


def _folders(args: argparse.Namespace, client: Client) -> list[str]:
    if not args.all:
        return [f"{ROOT}/{client.core.creds.uid}"]
    try:
        return [f"{ROOT}/{name}" for name in client.listdir(ROOT)]
    except FileNotFoundError:
        return []


def _chosen(
    args: argparse.Namespace, client: Client, patterns: list[str], tally: Tally
) -> list[tuple[Removed, os.stat_result | None]]:
    before = time.time() - parse_duration(args.older_than) if args.older_than else None
    places = [parse_remote(pattern).path for pattern in patterns]
    rules = [path_regex(path if not args.literal and has_magic(path) else _exact(path)) for path in places]
    things = [
        thing
        for folder in _folders(args, client)
        for thing in removed_things(client, folder, tally)
        if (before is None or thing.removed_s <= before)
        and (not rules or any(rule.match(thing.origin.strip("/")) for rule in rules))
    ]
    infos = client.stat_many([thing.file for thing in things], follow_symlinks=False)
    return [
        (thing, info if not isinstance(info, OSError) else None)
        for thing, info in zip(things, infos, strict=True)
    ]


def _exact(path: str) -> str:
    return escape(unescape(path))


def _list(args: argparse.Namespace, patterns: list[str]) -> int:
    tally = Tally(args)
    rows = []
    with connect(args, one_address([parse_remote(p) for p in patterns], args.cluster)) as client:
        for thing, info in _chosen(args, client, patterns, tally):
            if info is None:
                continue
            is_directory = stat.S_ISDIR(info.st_mode)
            if args.json:
                print_json(
                    {
                        "name": thing.name,
                        "path": thing.origin,
                        "removed": int(thing.removed_s),
                        "type": "directory" if is_directory else "file",
                        "size": info.st_size,
                        "trash": thing.file,
                    }
                )
                continue
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(thing.removed_s))
            entries = f"{info.st_size} {'entry' if info.st_size == 1 else 'entries'}"
            size = entries if is_directory else format_bytes(info.st_size)
            rows.append((when, size, shown(thing.name), shown(thing.origin)))
    if rows:
        print(table(("removed", "size", "name", "was"), rows, right=(1,)))
    return tally.status


def _empty(args: argparse.Namespace, patterns: list[str]) -> int:
    tally = Tally(args)
    with connect(args, one_address([parse_remote(p) for p in patterns], args.cluster)) as client:
        chosen = _chosen(args, client, patterns, tally)
        if chosen and not (args.force or args.dry_run) and sys.stdin.isatty():
            what = plural(len(chosen), "thing")
            if not confirm(f"remove {what} from the trash for good?"):
                return tally.status
        count = 0
        for thing, info in chosen:
            with tally.guard():
                if not args.dry_run:
                    _erase(client, thing, info)
                count += 1
                if args.json:
                    print_json({"name": thing.name, "path": thing.origin})
                elif args.verbose or args.dry_run:
                    words = f"remove {shown(thing.origin)} ({shown(thing.name)})"
                    print(f"would: {words}" if args.dry_run else words)
    if not args.json and not args.dry_run:
        print(f"{plural(count, 'thing')} removed for good")
    return tally.status


def _erase(client: Client, thing: Removed, info: os.stat_result | None) -> None:
    """The sidecar last: as long as anything is left, it says what it is."""
    if info is not None:
        if stat.S_ISDIR(info.st_mode):
            client.rmtree(thing.file)
        else:
            client.remove(thing.file)
    client.remove(thing.info)


# --- out --------------------------------------------------------------------------------------------------


def run_restore(args: argparse.Namespace) -> int:
    tally = Tally(args)
    named = [parse_remote(path) for path in args.paths if path.startswith(("/", "ffs:"))]
    goal = [parse_remote(args.to)] if args.to else []
    with connect(args, one_address([*named, *goal], args.cluster)) as client:
        folder = f"{ROOT}/{client.core.creds.uid}"
        things = [thing for thing in removed_things(client, folder, tally) if client.lexists(thing.file)]
        into = bool(goal) and client.isdir(goal[0].path)
        if goal and not into and len(args.paths) > 1:
            raise errors.NotADirectory("several things need a directory to come back to", goal[0].path)
        for word in args.paths:
            with tally.guard():
                thing = _find(things, word)
                target = thing.origin
                if goal:
                    target = goal[0].path
                    target = posixpath.join(target, posixpath.basename(thing.origin)) if into else target
                _bring_back(args, client, thing, target)
                things.remove(thing)
    return tally.status


def _find(things: list[Removed], word: str) -> Removed:
    if word.startswith(("/", "ffs:")):
        path = parse_remote(word).path
        path = posixpath.normpath(path)
        fits = [thing for thing in things if path in (thing.origin, thing.file)]
    else:
        fits = [thing for thing in things if thing.name == word]
    if not fits:
        raise errors.NotFound("isn't in the trash: ffs trash list shows what is", word)
    return fits[-1]


def _bring_back(args: argparse.Namespace, client: Client, thing: Removed, target: str) -> None:
    parent = posixpath.dirname(target)
    if not client.isdir(parent):
        if not args.parents:
            raise errors.NotFound("its directory is gone: -p makes it, or --to names another place", target)
        if not args.dry_run:
            client.makedirs(parent, exist_ok=True)
    if args.dry_run:
        if client.lexists(target):
            raise _taken(target)
        print(f"would: restore {shown(target)}")
        return
    try:
        client.rename_exclusive(thing.file, target)
    except errors.Exists:
        raise _taken(target) from None
    except errors.CrossDevice as error:
        raise errors.CrossDevice(
            f"lies in a quota directory now, which nothing enters by a rename: ffs cp -r -p ffs:{thing.file} "
            f"ffs:{target}, then ffs trash empty",
            target,
        ) from error
    client.remove(thing.info)
    if args.json:
        print_json({"path": target, "name": thing.name})
    elif args.verbose:
        print(f"{shown(thing.name)} -> {shown(target)}")


def _taken(target: str) -> errors.FfsError:
    return errors.Exists("something else is there now: --to names another place", target)

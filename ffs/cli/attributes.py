"""`ffs chmod`, `chown`, `touch`, `truncate`, `ln`, `readlink`: what names are and lead to."""

from __future__ import annotations

import argparse
import posixpath
import stat
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ffs import errors
from ffs.cli.files import is_directory, say
from ffs.cli.location import one_address, parse_remote
from ffs.cli.modes import parse_mode_argument, parse_owner
from ffs.cli.names import shown
from ffs.cli.operands import Tally, confirm, expand_places, literal_option, remote_operands
from ffs.cli.parsing import Commands, command, connect
from ffs.cli.text import parse_bytes

if TYPE_CHECKING:
    import os

    from ffs.client.client import Client


def add_commands(commands: Commands) -> None:
    chmod = command(commands, "chmod", run_chmod, "change permissions: 644, u+rw, go-w, a+X")
    chmod.add_argument("mode", metavar="MODE")
    chown = command(commands, "chown", run_chown, "change owner and group: user, user:group, :group")
    chown.add_argument("owner", metavar="OWNER")
    chown.add_argument("-n", "--no-dereference", action="store_true", help="symlinks themselves")
    for parser in (chmod, chown):
        parser.add_argument("paths", nargs="+", metavar="PATH")
        parser.add_argument("-R", "--recursive", action="store_true", help="all in directories too")
        parser.add_argument("-v", "--verbose", action="store_true", help="say what is changed")
        parser.add_argument("--dry-run", action="store_true", help="say what would be changed")
        literal_option(parser)
    touch = command(commands, "touch", run_touch, "make empty files, or set the time of what is there to now")
    touch.add_argument("paths", nargs="+", metavar="PATH")
    touch.add_argument("-c", "--no-create", action="store_true", help="make nothing")
    when = touch.add_mutually_exclusive_group()
    when.add_argument("-d", "--date", metavar="TIME", help="as 2026-03-01T12:30, or @seconds since 1970")
    when.add_argument("-r", "--reference", metavar="PATH", help="the time of this one, in the cluster")
    literal_option(touch)
    truncate = command(commands, "truncate", run_truncate, "cut or lengthen files")
    truncate.add_argument("paths", nargs="+", metavar="PATH")
    truncate.add_argument("-s", "--size", required=True, metavar="[+-]SIZE",
                          help="bytes, or 4KiB, 1M...; + and - from the present length")  # fmt: skip
    truncate.add_argument("-c", "--no-create", action="store_true", help="make nothing")
    literal_option(truncate)
    ln = command(commands, "ln", run_ln, "further names for files, or symlinks")
    ln.add_argument("targets", nargs="+", metavar="TARGET", help="what it leads to")
    ln.add_argument("link", metavar="LINK", help="the new name, or a directory for it")
    ln.add_argument("-s", "--symbolic", action="store_true", help="symlinks")
    ln.add_argument("-f", "--force", action="store_true", help="replace a file or symlink at LINK")
    ln.add_argument("-i", "--interactive", action="store_true", help="ask before replacing")
    ln.add_argument("-n", "--no-dereference", action="store_true",
                    help="LINK that is a symlink to a directory is the name itself")  # fmt: skip
    ln.add_argument("-v", "--verbose", action="store_true", help="say what is made")
    ln.add_argument("--dry-run", action="store_true", help="say what would be made")
    readlink = command(commands, "readlink", run_readlink, "show where symlinks lead")
    readlink.add_argument("paths", nargs="+", metavar="PATH")
    readlink.add_argument("-f", "--canonicalize", action="store_true",
                          help="the whole path without symlinks, . and ..")  # fmt: skip
    literal_option(readlink)


# --- chmod, chown -------------------------------------------------------------------------------------


def walk(client: Client, path: str, recursive: bool) -> Iterator[tuple[str, os.stat_result]]:
    """(path, lstat) of it and, if wanted, all below it; a directory after what is in it, so that one may
    be closed behind oneself. Symlinks aren't followed."""
    info = client.lstat(path)
    if not recursive or not stat.S_ISDIR(info.st_mode):
        yield path, info
        return
    stack = [(path, info, False)]
    while stack:
        path, info, entered = stack.pop()
        if entered or not stat.S_ISDIR(info.st_mode):
            yield path, info
            continue
        stack.append((path, info, True))
        stack += [(entry.path, entry.stat(follow_symlinks=False), False) for entry in client.scandir(path)]


def run_chmod(args: argparse.Namespace) -> int:
    change = parse_mode_argument(args.mode)

    def apply(client: Client, path: str, info: os.stat_result, named: bool) -> None:
        if stat.S_ISLNK(info.st_mode):
            if not named:
                return  # a symlink's own mode means nothing
            info = client.stat(path)
        old = stat.S_IMODE(info.st_mode)
        new = change.apply(old, stat.S_ISDIR(info.st_mode))
        if new != old:
            if not args.dry_run:
                client.chmod(path, new)
            say(args, f"{path}: {old:04o} -> {new:04o}")

    return _change(args, apply)


def run_chown(args: argparse.Namespace) -> int:
    uid, gid = parse_owner(args.owner)

    def apply(client: Client, path: str, info: os.stat_result, named: bool) -> None:
        follow = named and not args.no_dereference
        if follow and stat.S_ISLNK(info.st_mode):
            info = client.stat(path)
        new = (info.st_uid if uid == -1 else uid, info.st_gid if gid == -1 else gid)
        if new != (info.st_uid, info.st_gid):
            if not args.dry_run:
                client.chown(path, uid, gid, follow_symlinks=follow)
            say(args, f"{path}: {info.st_uid}:{info.st_gid} -> {new[0]}:{new[1]}")

    return _change(args, apply)


def _change(args: argparse.Namespace, apply: Callable[[Client, str, os.stat_result, bool], None]) -> int:
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                for path, info in walk(client, place.path, args.recursive):
                    with tally.guard():
                        apply(client, path, info, path == place.path)
    return tally.status


# --- touch, truncate ------------------------------------------------------------------------------------


def parse_time(text: str) -> int:
    """ISO 8601 in local time if it names no zone, or '@seconds': ns since 1970. InvalidArgument."""
    import datetime

    try:
        if text.startswith("@"):
            return int(float(text[1:]) * 1e9)
        if text == "now":
            return time.time_ns()
        return int(datetime.datetime.fromisoformat(text).timestamp() * 1_000_000) * 1000
    except (ValueError, OverflowError):
        raise errors.InvalidArgument(
            f"{text!r} isn't a time: write it as 2026-03-01, 2026-03-01T12:30 or @1772366400"
        ) from None


def run_touch(args: argparse.Namespace) -> int:
    tally = Tally(args)
    when = parse_time(args.date) if args.date is not None else None
    with remote_operands(args, args.paths, tally) as (client, places):
        if args.reference is not None:
            when = client.stat(parse_remote(args.reference).path).st_mtime_ns
        times = None if when is None else (when, when)
        for place in places:
            with tally.guard():
                try:
                    client.utime(place.path, ns=times)
                except FileNotFoundError:
                    if args.no_create:
                        continue
                    client.open(place.path, "ab", 0).close()
                    if times is not None:
                        client.utime(place.path, ns=times)
    return tally.status


def run_truncate(args: argparse.Namespace) -> int:
    tally = Tally(args)
    sign = args.size[:1] if args.size[:1] in "+-" else ""
    size = parse_bytes(args.size[len(sign) :])
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                if not client.exists(place.path):
                    if args.no_create:
                        continue
                    client.open(place.path, "ab", 0).close()
                length = size
                if sign:
                    now = client.stat(place.path).st_size
                    length = now + size if sign == "+" else max(0, now - size)
                client.truncate(place.path, length)
    return tally.status


# --- ln, readlink -----------------------------------------------------------------------------------------


def run_ln(args: argparse.Namespace) -> int:
    tally = Tally(args)
    link = parse_remote(args.link)
    # The text of a symlink is kept as it is written, also if it is relative.
    named = [] if args.symbolic else [parse_remote(target) for target in args.targets]
    with connect(args, one_address([*named, link], args.cluster)) as client:
        if args.symbolic:
            targets = [target.removeprefix("ffs:") if target.startswith("ffs:/") else target
                       for target in args.targets]  # fmt: skip
        else:
            targets = [place.path for place in expand_places(client, named, literal=True)]
        itself = args.no_dereference and client.islink(link.path)
        into = not itself and is_directory(client, link)
        if len(targets) > 1 and not into:
            raise errors.NotADirectory("several targets need a directory for their links", link.path)
        for target in targets:
            with tally.guard():
                name = posixpath.basename(target.rstrip("/"))
                _link(args, client, target, link.child(name).path if into else link.path)
    return tally.status


def _link(args: argparse.Namespace, client: Client, target: str, path: str) -> None:
    from ffs.cli.copying.sides import scratch_name

    there = client.lexists(path)
    replace = args.force or (args.interactive and there and not args.dry_run and confirm(f"replace {path}?"))
    if there and not replace:
        if args.interactive and not args.dry_run:
            return
        raise errors.Exists("is there already: -f replaces it", path)
    if there and not client.islink(path) and client.isdir(path):
        raise errors.IsADirectory("is a directory: a link doesn't replace it", path)
    if not args.dry_run:
        # Under another name first, so that the old one stays until the new is there.
        name = scratch_name(path) if there else path
        if args.symbolic:
            client.symlink(target, name)
        else:
            if there and client.lstat(path).st_ino == client.lstat(target).st_ino:
                return
            client.link(target, name)
        if there:
            try:
                client.replace(name, path)
            except OSError:
                client.remove(name)
                raise
    say(args, f"{path} -> {target}" if args.symbolic else f"{path} = {target}")


def run_readlink(args: argparse.Namespace) -> int:
    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                leads_to = canonical if args.canonicalize else type(client).readlink
                print(shown(leads_to(client, place.path)))
    return tally.status


def canonical(client: Client, path: str) -> str:
    """The absolute path without symlinks, '.' and '..'; the last component needn't be there."""
    done = "/"
    parts = [part for part in path.split("/") if part][::-1]
    links = 0
    while parts:
        part = parts.pop()
        if part == ".":
            continue
        if part == "..":
            done = posixpath.dirname(done)
            continue
        here = posixpath.join(done, part)
        try:
            info = client.lstat(here)
        except FileNotFoundError:
            if parts:
                raise
            return here
        if not stat.S_ISLNK(info.st_mode):
            done = here
            continue
        links += 1
        if links > 40:
            raise errors.SymlinkLoop("more than 40 symlinks on the way", path)
        target = client.readlink(here)
        if target.startswith("/"):
            done = "/"
        parts += [name for name in target.split("/") if name][::-1]
    return done

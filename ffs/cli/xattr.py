"""`ffs xattr`: extended attributes of files and directories. docs/client.md, Extended attributes."""

from __future__ import annotations

import argparse
import base64
import os
import sys

from ffs.cli.location import one_address, parse_remote
from ffs.cli.names import shown
from ffs.cli.parsing import Commands, command, connect, print_json
from ffs.errors import InvalidArgument


def add_commands(commands: Commands) -> None:
    xattr = commands.add_parser(
        "xattr",
        help="extended attributes: user.* values of files and directories",
        description="Extended attributes: small values under names user.*, kept with a file or directory.",
    )
    xattr.set_defaults(run=lambda args: _usage_line(xattr))
    verbs = xattr.add_subparsers(dest="verb", metavar="VERB")
    get = command(verbs, "get", run_get, "print an attribute's value", json_option=True)
    _add_place(get, name=True)
    change = command(verbs, "set", run_set, "set an attribute")
    _add_place(change, name=True)
    change.add_argument("value", metavar="VALUE", nargs="?", help="the value; - reads it from stdin")
    change.add_argument("--from", dest="source", metavar="FILE", help="take the value from a local file")
    how = change.add_mutually_exclusive_group()
    how.add_argument("--create", action="store_true", help="fail if there is one of that name")
    how.add_argument("--replace", action="store_true", help="fail if there is none of that name")
    listing = command(verbs, "ls", run_ls, "names (and values) of a file's attributes", json_option=True)
    _add_place(listing)
    listing.add_argument("-l", "--long", action="store_true", help="and their values")
    remove = command(verbs, "rm", run_rm, "remove an attribute")
    _add_place(remove, name=True)


def _add_place(parser: argparse.ArgumentParser, *, name: bool = False) -> None:
    parser.add_argument("path", metavar="PATH")
    if name:
        parser.add_argument("name", metavar="NAME", help="user.something")
    parser.add_argument(
        "-P", "--no-follow", action="store_true", help="of a symbolic link itself, not of what it leads to"
    )


def _usage_line(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def _fields(name: str, value: bytes) -> dict[str, str]:
    """For --json: the value as text where it is UTF-8, else base64."""
    try:
        return {"name": name, "value": value.decode()}
    except UnicodeDecodeError:
        return {"name": name, "base64": base64.b64encode(value).decode()}


def run_get(args: argparse.Namespace) -> int:
    place = parse_remote(args.path)
    with connect(args, one_address([place], args.cluster)) as client:
        value = client.getxattr(place.path, args.name, follow_symlinks=not args.no_follow)
    if args.json:
        print_json({"path": place.path, **_fields(args.name, value)})
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(value + (b"\n" if sys.stdout.isatty() else b""))
    return 0


def run_set(args: argparse.Namespace) -> int:
    place = parse_remote(args.path)
    value = _value(args)
    flags = os.XATTR_CREATE if args.create else os.XATTR_REPLACE if args.replace else 0
    with connect(args, one_address([place], args.cluster)) as client:
        client.setxattr(place.path, args.name, value, flags, follow_symlinks=not args.no_follow)
    return 0


def _value(args: argparse.Namespace) -> bytes:
    if (args.value is None) == (args.source is None):
        raise InvalidArgument("give a VALUE, - for stdin, or --from FILE", args.path)
    if args.source is not None:
        with open(args.source, "rb") as file:
            return file.read()
    if args.value == "-":
        return sys.stdin.buffer.read()
    return os.fsencode(args.value)


def run_ls(args: argparse.Namespace) -> int:
    place = parse_remote(args.path)
    follow = not args.no_follow
    with connect(args, one_address([place], args.cluster)) as client:
        for name in client.listxattr(place.path, follow_symlinks=follow):
            if not args.long:
                print_json({"name": name}) if args.json else print(shown(name))
                continue
            value = client.getxattr(place.path, name, follow_symlinks=follow)
            if args.json:
                print_json(_fields(name, value))
            else:
                print(f"{shown(name)}={_quoted_value(value)}")
    return 0


def _quoted_value(value: bytes) -> str:
    """As getfattr shows it: quoted text, or base64 after 0s."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = ""
    if value and not (text and text.isprintable()):
        return "0s" + base64.b64encode(value).decode()
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def run_rm(args: argparse.Namespace) -> int:
    place = parse_remote(args.path)
    with connect(args, one_address([place], args.cluster)) as client:
        client.removexattr(place.path, args.name, follow_symlinks=not args.no_follow)
    return 0

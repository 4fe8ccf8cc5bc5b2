"""`ffs user add|change|list|remove|token|revoke`: who may use a cluster. docs/guides/security.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from ffs.cli.parsing import Commands, command, connect, print_json
from ffs.cli.text import table
from ffs.errors import InvalidArgument
from ffs.proto.auth import (
    KEY_BYTES,
    SALT_BYTES,
    TOKEN_ID_BYTES,
    AddToken,
    ListUsers,
    RemoveUser,
    RevokeToken,
    SetUser,
    Token,
    UsersReply,
    UserView,
    verifier_of,
)
from ffs.proto.common import Creds, Message, OkReply

if TYPE_CHECKING:
    from ffs.client.client import Client


def add_commands(commands: Commands) -> None:
    user = commands.add_parser(
        "user",
        help="users of the cluster and their tokens",
        description="Users of the cluster and their tokens. For administrators, who have the cluster secret.",
    )
    user.set_defaults(run=lambda args: _usage(user))
    verbs = user.add_subparsers(dest="verb", metavar="VERB")
    for verb, run, text in (
        ("add", run_add, "make a user"),
        ("change", run_change, "give a user other ids, all anew (--uid, --gid, --groups); tokens stay"),
    ):
        parser = command(verbs, verb, run, text)
        parser.add_argument("name", metavar="NAME")
        parser.add_argument("--uid", type=int, required=True)
        parser.add_argument("--gid", type=int, required=True)
        parser.add_argument("--groups", default="", metavar="GID,...", help="more groups")
    command(verbs, "list", run_list, "users, their ids and the ids of their tokens", json_option=True)
    remove = command(verbs, "remove", run_remove, "take a user and all tokens away; sessions end")
    remove.add_argument("name", metavar="NAME")
    token = command(verbs, "token", run_token, "make a token: it is shown once")
    token.add_argument("name", metavar="NAME")
    token.add_argument("--label", default="", help="for people: what it is for")
    token.add_argument("--output", metavar="FILE", help="write it there (mode 0600) instead of showing it")
    revoke = command(verbs, "revoke", run_revoke, "take a token away; sessions under it end")
    revoke.add_argument("name", metavar="NAME")
    revoke.add_argument("token", nargs="?", metavar="TOKEN-ID", help="16 digits, as ffs user list shows")
    revoke.add_argument("--all", action="store_true", help="all tokens of this user")


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def _users(client: Client, request: Message) -> tuple[UserView, ...]:
    return client.core.caller.call(request, UsersReply).users


def _creds(args: argparse.Namespace) -> Creds:
    try:
        groups = tuple(int(part) for part in args.groups.split(",") if part)
    except ValueError:
        raise InvalidArgument(f"--groups {args.groups}: give numbers with commas between them") from None
    return Creds(args.uid, args.gid, groups)


def run_add(args: argparse.Namespace) -> int:
    with connect(args) as client:
        _users(client, SetUser(name=args.name, creds=_creds(args)))
    print(f"user {args.name}; now make a token: ffs user token {args.name}")
    return 0


def run_change(args: argparse.Namespace) -> int:
    with connect(args) as client:
        _users(client, SetUser(name=args.name, creds=_creds(args), exists=True))
    return 0


def run_list(args: argparse.Namespace) -> int:
    with connect(args) as client:
        users = _users(client, ListUsers())
    if args.json:
        for user in users:
            print_json(_fields(user))
        return 0
    rows = []
    for user in users:
        creds = user.creds
        groups = ",".join(map(str, creds.groups))
        rows.append((user.name, str(creds.uid), str(creds.gid), groups, "", "", ""))
        for token in user.tokens:
            made = time.strftime("%Y-%m-%d %H:%M", time.localtime(token.made_ns / 1e9))
            rows.append(("", "", "", "", token.id.hex(), made, token.label))
    print(table(("user", "uid", "gid", "groups", "token", "made", "label"), rows, right=(1, 2)))
    return 0


def _fields(user: UserView) -> dict[str, object]:
    return {
        "name": user.name,
        "uid": user.creds.uid,
        "gid": user.creds.gid,
        "groups": list(user.creds.groups),
        "tokens": [{"id": t.id.hex(), "made_ns": t.made_ns, "label": t.label} for t in user.tokens],
    }


def run_remove(args: argparse.Namespace) -> int:
    with connect(args) as client:
        client.core.caller.call(RemoveUser(name=args.name), OkReply)
    return 0


def run_token(args: argparse.Namespace) -> int:
    """The token is drawn here: the service never has it."""
    token = Token(os.urandom(TOKEN_ID_BYTES), os.urandom(KEY_BYTES))
    if args.output:
        # The file first: a token that nobody has seen would be valid for nothing.
        with open(os.open(args.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token.text() + "\n")
    try:
        with connect(args) as client:
            verifier = verifier_of(os.urandom(SALT_BYTES), token.secret)
            _users(client, AddToken(name=args.name, id=token.id, verifier=verifier, label=args.label))
    except BaseException:
        if args.output:
            os.unlink(args.output)
        raise
    if args.output:
        print(f"token {token.id.hex()} is in {args.output}: export FFS_TOKEN_FILE={args.output}")
    else:
        print(token.text())
        print("this token isn't shown again", file=sys.stderr)
    return 0


def run_revoke(args: argparse.Namespace) -> int:
    if bool(args.token) == args.all:
        raise InvalidArgument("give the id of a token (ffs user list), or --all")
    try:
        which = b"" if args.all else bytes.fromhex(args.token)
    except ValueError:
        raise InvalidArgument(f"token id {args.token!r}: give 16 digits, as ffs user list shows") from None
    with connect(args) as client:
        _users(client, RevokeToken(name=args.name, id=which))
    return 0

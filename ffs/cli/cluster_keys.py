"""`ffs cluster rotate-keys`: another key signs capabilities. docs/guides/security.md."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Final

from ffs.cli.parsing import Commands, command, connect, print_json
from ffs.cli.text import format_seconds
from ffs.errors import Unsupported
from ffs.proto.auth import KeysReply, RotateKeys

if TYPE_CHECKING:
    from ffs.client.client import Client

POLL_S: Final = 0.2


def add_verbs(verbs: Commands) -> None:
    rotate = command(
        verbs, "rotate-keys", run_rotate, "let another key sign clients' capabilities", json_option=True
    )
    rotate.add_argument("--look", action="store_true", help="only show the keys that are valid")
    rotate.add_argument("--no-wait", action="store_true", help="don't wait until the new key signs")


def run_rotate(args: argparse.Namespace) -> int:
    with connect(args) as client:
        reply = _ask(client, look=args.look)
        if not reply.signed and not args.look:
            raise Unsupported(
                "this cluster has no secret, so its capabilities aren't signed: start its servers with "
                "--cluster-secret-file"
            )
        said: tuple[str, ...] = ()
        while reply.rotating and not args.look and not args.no_wait:
            if reply.waiting_for and reply.waiting_for != said and not args.json:
                said = reply.waiting_for
                print(f"waiting for {', '.join(said)} to take the new key", file=sys.stderr)
            time.sleep(POLL_S)
            reply = _ask(client, look=True)
        now_ms = client.cluster_status().manager_ms
    _show(args, reply, now_ms)
    return 0


def _ask(client: Client, *, look: bool) -> KeysReply:
    return client.core.caller.call(RotateKeys(look=look), KeysReply)


def _show(args: argparse.Namespace, reply: KeysReply, now_ms: int) -> None:
    if args.json:
        keys = [
            {"id": k.id, "made_ms": k.made_ms, "signing_ms": k.signing_ms, "retired_ms": k.retired_ms}
            for k in reply.keys
        ]
        print_json({"signed": reply.signed, "rotating": reply.rotating, "keys": keys})
        return
    if not reply.signed:
        print("capabilities aren't signed: this cluster has no secret")
    for key in reply.keys:
        if not key.signing_ms:
            print(f"key {key.id}: announced, signs once all nodes have it")
        elif key.retired_ms:
            since = format_seconds(max(0, now_ms - key.retired_ms) / 1000)
            print(f"key {key.id}: valid, signs nothing more since {since} ago")
        else:
            print(f"key {key.id}: signs since {format_seconds(max(0, now_ms - key.signing_ms) / 1000)} ago")

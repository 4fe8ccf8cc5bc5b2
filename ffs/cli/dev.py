"""`ffs dev`: single servers of the development cluster that `ffs up` runs: to add, kill, stop, start one."""

from __future__ import annotations

import argparse

from ffs.cli.cluster import DEFAULT_DIR
from ffs.cli.devcluster.control import ask
from ffs.cli.devcluster.state import Directory
from ffs.cli.parsing import Commands, command, print_json

_DONE = {
    "add": "{node} started: ffs cluster add {node} moves data to it",
    "kill": "{node} killed",
    "stop": "{node} stopped",
    "start": "{node} started",
    "fresh": "{node} started with an empty device",
}


def add_commands(commands: Commands) -> None:
    dev = commands.add_parser(
        "dev",
        help="single servers of a development cluster",
        description="Single servers of the development cluster that ffs up runs.",
    )
    dev.set_defaults(run=lambda args: _usage(dev))
    verbs = dev.add_subparsers(dest="verb", metavar="VERB")
    command(verbs, "add", run_dev, "start one more storage server", json_option=True)
    for verb, help_line in (
        ("kill", "kill a storage server (SIGKILL)"),
        ("stop", "stop a storage server cleanly"),
        ("start", "start a storage server that was killed or stopped"),
    ):
        parser = command(verbs, verb, run_dev, help_line, json_option=True)
        parser.add_argument("node", metavar="NODE", help="node0, node1, ...")
    start = verbs.choices["start"]
    start.add_argument("--fresh", action="store_true", help="with an empty device, as after a dead disk")
    for parser in verbs.choices.values():
        parser.add_argument("--dir", default=DEFAULT_DIR, help=f"as given to up (default: ./{DEFAULT_DIR})")


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def run_dev(args: argparse.Namespace) -> int:
    verb = "fresh" if args.verb == "start" and args.fresh else args.verb
    node = ask(Directory(args.dir), verb, getattr(args, "node", ""))
    if args.json:
        print_json({"node": node, "done": verb})
    else:
        print(_DONE[verb].format(node=node))
    return 0

"""`ffs cluster table create|ls`: the chain tables of a cluster. docs/operations.md, Tables and roles."""

from __future__ import annotations

import argparse
from collections import Counter

from ffs.cli.cluster_view import View, condition
from ffs.cli.parsing import Commands, command, connect, count_argument, print_json
from ffs.cli.text import plural, table
from ffs.errors import Exists, InvalidArgument
from ffs.proto.cluster import DEFAULT_CHAINS_PER_DEVICE, ROLES, CreateTable, CreateTableReply
from ffs.proto.commands import ClusterReply, GetCluster


def add_verbs(verbs: Commands) -> None:
    tables = verbs.add_parser(
        "table",
        help="chain tables: make one, list them",
        description="Chain tables: the chains that files and KV spaces use, with their replicas and devices.",
    )
    tables.set_defaults(run=lambda args: _usage(tables))
    below = tables.add_subparsers(dest="what", metavar="VERB")
    create = command(
        below, "create", run_create, "make a table over free targets of the live nodes", json_option=True
    )
    create.add_argument("name", metavar="NAME")
    create.add_argument("--replicas", type=count_argument, required=True, help="copies of each chunk, 1 to 8")
    create.add_argument(
        "--role",
        choices=[role for role in ROLES if role],
        default="",
        help="only devices of this role (default: only those without one)",
    )
    create.add_argument(
        "--chains-per-device",
        type=count_argument,
        metavar="N",
        help=f"targets of each device that it takes (default: up to {DEFAULT_CHAINS_PER_DEVICE})",
    )
    command(below, "ls", run_ls, "the tables, their replicas, roles and chains", json_option=True)


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def run_create(args: argparse.Namespace) -> int:
    request = CreateTable(
        name=args.name,
        replicas=args.replicas,
        chains_per_device=args.chains_per_device or DEFAULT_CHAINS_PER_DEVICE,
        role=args.role,
    )
    with connect(args) as client:
        view = View(client.core.caller.call(GetCluster(), ClusterReply))
        if args.chains_per_device:
            check_size(view, args.name, args.role, args.chains_per_device)
        made = client.core.caller.call(request, CreateTableReply)
    if args.json:
        print_json({"table": made.table, "version": made.version, "chains": made.chains})
    else:
        there = " already" if args.name in view.tables.values() else ""
        print(f"table {args.name} has {plural(made.chains, 'chain')}{there}")
    return 0


def check_size(view: View, name: str, role: str, wanted: int) -> None:
    """Whether a table can take so many targets of each device of its role. InvalidArgument; Exists if it is
    there and takes others."""
    for entry in view.reply.tables:
        if entry.name == name:
            taken = Counter(
                view.targets[t].device for c in view.reply.chains if c.table == entry.id for t in c.wanted
            )
            most = max(taken.values(), default=wanted)
            if most != wanted:
                raise Exists(
                    f"table {name} exists with {plural(most, 'target')} of a device, not {wanted}: "
                    "choose another name, or leave --chains-per-device out"
                )
            return
    for node in view.reply.nodes:
        for device in node.devices:
            if node.alive and not node.draining and device.role == role and device.free_targets < wanted:
                raise InvalidArgument(
                    f"--chains-per-device {wanted}: device {device.path} of {node.name} has "
                    f"{plural(device.free_targets, 'free target')} "
                    "(ffs cluster nodes); leave some for moves"
                )


def run_ls(args: argparse.Namespace) -> int:
    with connect(args) as client:
        view = View(client.core.caller.call(GetCluster(), ClusterReply))
    if args.json:
        for fields in table_fields(view):
            print_json(fields)
    elif view.reply.tables:
        print(table_table(view))
    return 0


def table_fields(view: View) -> list[dict[str, object]]:
    """Of the last version of each table."""
    last = {entry.id: entry for entry in view.reply.tables}  # versions come in order
    return [
        {
            "id": entry.id,
            "name": entry.name,
            "version": entry.version,
            "role": entry.role,
            "replicas": entry.replicas,
            "chains": len(entry.chains),
            "states": dict(Counter(condition(c) for c in view.reply.chains if c.table == entry.id)),
            "devices": len(_devices(view, entry.id)),
        }
        for entry in last.values()
    ]


def _devices(view: View, table_id: int) -> set[bytes]:
    wanted = {t for chain in view.reply.chains if chain.table == table_id for t in chain.wanted}
    return {target.device for target in view.reply.targets if target.id in wanted}


def table_table(view: View) -> str:
    rows = []
    for fields in table_fields(view):
        states = fields["states"]
        shown = ", ".join(f"{n} {word}" for word, n in states.items()) if isinstance(states, dict) else ""
        rows.append(
            (
                str(fields["id"]),
                str(fields["name"]),
                str(fields["role"] or "-"),
                str(fields["replicas"]),
                str(fields["devices"]),
                str(fields["chains"]),
                shown,
            )
        )
    return table(("table", "name", "role", "replicas", "devices", "chains", ""), rows, right=(0, 3, 4, 5))

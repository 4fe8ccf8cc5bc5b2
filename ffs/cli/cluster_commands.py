"""`ffs cluster ...`: looking at a cluster (status, nodes, chains, targets), and changing it (drain, add,
forget, replace, rebalance, force-lead: ffs/cli/cluster_moves.py; table: cluster_tables.py).
docs/operations.md."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ffs.cli import cluster_keys, cluster_moves, cluster_tables
from ffs.cli.cluster_view import (
    View,
    chain_fields,
    chain_table,
    node_fields,
    node_table,
    status_fields,
    status_lines,
    target_fields,
    target_table,
)
from ffs.cli.parsing import Commands, command, connect, print_json
from ffs.errors import NotFound
from ffs.proto.commands import ClusterReply, GetCluster

if TYPE_CHECKING:
    from ffs.client.client import Client


def add_commands(commands: Commands) -> None:
    cluster = commands.add_parser(
        "cluster",
        help="look at a cluster, move its data between nodes",
        description="What the cluster's manager knows, and what it can be told to do.",
    )
    cluster.set_defaults(run=lambda args: _usage(cluster))
    verbs = cluster.add_subparsers(dest="verb", metavar="VERB")
    command(verbs, "status", run_status, "how the cluster is, and why a chain isn't whole", json_option=True)
    command(verbs, "nodes", run_nodes, "storage nodes and their devices", json_option=True)
    chains = command(verbs, "chains", run_chains, "chains, their members and states", json_option=True)
    chains.add_argument("--unhealthy", action="store_true", help="only those that aren't whole")
    targets = command(verbs, "targets", run_targets, "replicas' homes that are in use", json_option=True)
    targets.add_argument("--node", metavar="NODE", help="only those of this node")
    cluster_moves.add_verbs(verbs)
    cluster_tables.add_verbs(verbs)
    cluster_keys.add_verbs(verbs)


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def look(client: Client) -> View:
    """The cluster as its manager knows it now. Blocking."""
    return View(client.core.caller.call(GetCluster(), ClusterReply))


def run_status(args: argparse.Namespace) -> int:
    with connect(args) as client:
        view = look(client)
    if args.json:
        print_json(status_fields(view))
    else:
        print("\n".join(status_lines(view)))
    return 0 if all(chain.whole for chain in view.reply.chains) else 1


def run_nodes(args: argparse.Namespace) -> int:
    with connect(args) as client:
        view = look(client)
    if args.json:
        for node in view.reply.nodes:
            print_json(node_fields(node))
    else:
        print(node_table(view))
    return 0


def run_chains(args: argparse.Namespace) -> int:
    with connect(args) as client:
        view = look(client)
    chains = [chain for chain in view.reply.chains if not (args.unhealthy and chain.whole)]
    if args.json:
        for chain in chains:
            print_json(chain_fields(view, chain))
    elif chains:
        print(chain_table(view, chains))
    return 0


def run_targets(args: argparse.Namespace) -> int:
    with connect(args) as client:
        view = look(client)
    names = {name for node in view.reply.nodes for name in (node.name, str(node.id))}
    if args.node is not None and args.node not in names:
        known = ", ".join(sorted(node.name for node in view.reply.nodes))
        raise NotFound(f"there is no node {args.node!r}; there are: {known}")
    targets = [
        target
        for target in view.reply.targets
        if args.node in (None, view.nodes[target.node].name, str(target.node))
    ]
    if args.json:
        for target in targets:
            print_json(target_fields(view, target))
    elif targets:
        print(target_table(view, targets))
    return 0

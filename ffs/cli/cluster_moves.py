"""`ffs cluster drain|add|forget|replace|rebalance|force-lead`: told to the manager, then watched until done.

The manager does the work, and goes on with it whatever becomes of this process. docs/operations.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ffs.cli.cluster_view import View, arrived, condition, fold, on_its_way, share
from ffs.cli.parsing import Commands, command, connect, print_json
from ffs.cli.text import format_bytes, plural
from ffs.errors import FfsError, InvalidArgument
from ffs.proto.cluster import TargetState
from ffs.proto.commands import (
    ChainView,
    ClusterReply,
    DrainNode,
    ForceLead,
    ForceLeadReply,
    ForgetNode,
    GetCluster,
    MoveReply,
    Rebalance,
    ReplaceTarget,
)

if TYPE_CHECKING:
    from ffs.client.client import Client

POLL_S: Final = 0.3
STUCK_S: Final = 15.0  # without a change: say what is waited for
INTERRUPTED: Final = 130


def add_verbs(verbs: Commands) -> None:
    drain = command(
        verbs,
        "drain",
        run_drain,
        "move all data off a node, so that it may be switched off",
        json_option=True,
    )
    drain.add_argument("node", metavar="NODE", help="name or id")
    drain.add_argument("--undo", action="store_true", help="stop it: what hasn't moved yet stays")
    _add_wait(drain)
    add = command(verbs, "add", run_add, "move a share of the data to a node that is new", json_option=True)
    add.add_argument("node", metavar="NODE", help="name or id of a storage node that runs")
    _add_wait(add)
    forget = command(
        verbs,
        "forget",
        run_forget,
        "take a node that is off, and that nothing needs, off the list",
        json_option=True,
    )
    forget.add_argument("node", metavar="NODE", help="name or id")
    replace = command(
        verbs, "replace", run_replace, "rebuild replicas elsewhere, as those of a dead disk", json_option=True
    )
    replace.add_argument(
        "what", metavar="TARGET", help="id of a target; or a device, all of it: its uuid, or PATH@NODE"
    )
    replace.add_argument(
        "--device", metavar="DEVICE", default="", help="where to (uuid or PATH@NODE; default: by the rules)"
    )
    _add_wait(replace)
    rebalance = command(
        verbs, "rebalance", run_rebalance, "even out replicas over nodes and devices", json_option=True
    )
    rebalance.add_argument("--dry-run", action="store_true", help="only say what would move")
    _add_wait(rebalance)
    force = command(
        verbs,
        "force-lead",
        run_force_lead,
        "let a replica lead a chain whose better ones are lost: DATA MAY BE LOST",
        json_option=True,
    )
    force.add_argument(
        "targets", metavar="TARGET", nargs="+", type=int, help="id (ffs cluster chains --unhealthy)"
    )
    force.add_argument(
        "--yes", action="store_true", help="don't ask: the other members' hosts are off for good"
    )


def _add_wait(parser: argparse.ArgumentParser) -> None:
    wait = parser.add_mutually_exclusive_group()
    wait.add_argument(
        "--wait", dest="wait", action="store_true", default=True, help="until it is done (default)"
    )
    wait.add_argument("--no-wait", dest="wait", action="store_false", help="only begin it")


# --- commands -------------------------------------------------------------------------------------


def run_drain(args: argparse.Namespace) -> int:
    with connect(args) as client:
        begun = _tell(client, args, DrainNode(node=args.node, undo=args.undo))
        node = begun.node

        def left(view: View) -> list[ChainView]:
            return [chain for chain in view.reply.chains if view.of_node(chain, node)]

        if args.undo:
            watched = set(begun.chains)
            return _finish(
                args,
                client,
                lambda view: [
                    view.chains[c] for c in watched if c in view.chains and on_its_way(view.chains[c])
                ],
                begun,
                f"node {args.node} isn't drained any more",
            )
        return _finish(
            args,
            client,
            left,
            begun,
            f"node {args.node} is drained: nothing needs it any more, it may be switched off",
            stuck=lambda view: view.nodes[node].note,
        )


def run_forget(args: argparse.Namespace) -> int:
    with connect(args) as client:
        done = client.core.caller.call(ForgetNode(node=args.node), MoveReply)
    if args.json:
        print_json({"node": done.node, "forgotten": True})
    else:
        print(f"node {args.node} is forgotten: its devices must be formatted before they can be used again")
    return 0


def run_add(args: argparse.Namespace) -> int:
    with connect(args) as client:
        begun = _tell(client, args, Rebalance(onto=args.node))
        done = f"node {args.node} has its share of the targets"
        return _finish(args, client, _rebalancing, begun, done)


def run_rebalance(args: argparse.Namespace) -> int:
    with connect(args) as client:
        begun = _tell(client, args, Rebalance(only_plan=args.dry_run))
        if args.dry_run:
            if args.json:
                print_json(_begun_fields(begun))
            return 0
        return _finish(args, client, _rebalancing, begun, "targets and heads are even")


def _rebalancing(view: View) -> list[ChainView] | None:
    """None: the manager may have more to move, though nothing moves now."""
    moving = [chain for chain in view.reply.chains if on_its_way(chain)]
    return moving if moving or not view.reply.rebalancing else None


def run_replace(args: argparse.Namespace) -> int:
    with connect(args) as client:
        begun = _tell(client, args, ReplaceTarget(what=args.what, device=args.device))
        watched = set(begun.chains)

        def left(view: View) -> list[ChainView]:
            return [
                view.chains[c] for c in sorted(watched) if c in view.chains and not arrived(view.chains[c])
            ]

        return _finish(args, client, left, begun, f"{args.what} is replaced")


def run_force_lead(args: argparse.Namespace) -> int:
    with connect(args) as client:
        call = client.core.caller.call
        asked = {target: call(ForceLead(target=target), ForceLeadReply) for target in args.targets}
        if not args.json:
            print("\n".join(line for item in asked.items() for line in warning(*item)), file=sys.stderr)
        if not args.yes and not _confirmed():
            raise InvalidArgument("not confirmed: nothing was done")
        for target in args.targets:
            done = call(ForceLead(target=target, confirmed=True), ForceLeadReply)
            while not _look(client).chains[done.chain].writable:
                time.sleep(POLL_S)
            if args.json:
                print_json({"target": target, "chain": done.chain, "writable": True})
            else:
                print(f"chain {done.chain} is led by target {target}", flush=True)
    return 0


def warning(target: int, asked: ForceLeadReply) -> list[str]:
    """What is at stake."""
    lines = [f"target {target} would lead chain {asked.chain} alone; what only others know is LOST for good."]
    lines += [f"  target {member} of node {node} may know more: {why}" for member, node, why in asked.absent]
    lines += [f"  {note}" for note in asked.notes]
    if asked.silent:
        names = ", ".join(asked.silent)
        lines.append(f"Make sure first that the storage servers of {names} are off, and stay off meanwhile.")
    return lines


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise InvalidArgument("force-lead asks for a confirmation on a terminal: in a script give --yes")
    return input("Type 'lead' to go on: ").strip() == "lead"


# --- telling and watching -------------------------------------------------------------------------


def _tell(
    client: Client, args: argparse.Namespace, request: DrainNode | Rebalance | ReplaceTarget
) -> MoveReply:
    """What was begun. From here on it goes on by itself: a Ctrl-C has to say so."""
    try:
        begun = client.core.caller.call(request, MoveReply)
        if not args.json:
            for note in begun.notes:
                print(f"note: {note}", file=sys.stderr)
            heads = f", {plural(begun.reordered, 'chain')} only get another head" if begun.reordered else ""
            print(f"{plural(begun.targets, 'target')} to fill{heads}", flush=True)
        return begun
    except KeyboardInterrupt:
        _say_interrupted(args)
        raise


def _say_interrupted(args: argparse.Namespace) -> None:
    words = f"\nffs cluster {args.verb}: it goes on in the cluster: ffs cluster status shows it"
    print(words, file=sys.stderr)


def _begun_fields(begun: MoveReply) -> dict[str, object]:
    return {
        "chains": list(begun.chains),
        "targets": begun.targets,
        "reordered": begun.reordered,
        "notes": list(begun.notes),
    }


def _finish(
    args: argparse.Namespace,
    client: Client,
    left: Callable[[View], list[ChainView] | None],
    begun: MoveReply,
    done: str,
    stuck: Callable[[View], str] = lambda view: "",
) -> int:
    if not args.wait:
        if args.json:
            print_json(_begun_fields(begun))
        else:
            print("it goes on in the cluster: ffs cluster status shows it")
        return 0
    try:
        Watch(args.json).until_done(lambda: _look(client), left, stuck)
    except KeyboardInterrupt:
        _say_interrupted(args)
        return INTERRUPTED
    if args.json:
        print_json(_begun_fields(begun))
    else:
        print(done)
    return 0


def _look(client: Client) -> View:
    return View(client.core.caller.call(GetCluster(), ClusterReply))


class Watch:
    """Shows what is left to do: one line that is drawn over on a terminal, else a line for each change."""

    def __init__(self, quiet: bool) -> None:
        self._live = sys.stderr.isatty() and not quiet
        self._quiet = quiet
        self._said: dict[int, str] = {}
        self._most = 0
        self._width = 0

    def until_done(
        self,
        look: Callable[[], View],
        left: Callable[[View], list[ChainView] | None],
        stuck: Callable[[View], str],
    ) -> None:
        """Blocking until `left` gives []. Raises FfsError with what `stuck` says when nothing moves."""
        changed_s = time.monotonic()
        before: object = None
        while True:
            looked_s = time.monotonic()
            view = look()
            pause_s = max(
                POLL_S, 5 * (time.monotonic() - looked_s)
            )  # a large cluster's manager has other work
            chains = left(view)
            if chains == []:
                self._finished(view)
                self._clear()
                return
            chains = chains or []
            now = [(c.id, c.term, c.counter, c.members, c.states, c.sync) for c in chains]
            if now != before:
                before, changed_s = now, time.monotonic()
            self._show(view, chains)
            if time.monotonic() - changed_s > STUCK_S:
                changed_s = time.monotonic()
                self._clear()
                if reason := stuck(view):
                    raise FfsError(reason)
                self._say_what_is_waited_for(view, chains)
            time.sleep(pause_s)

    def _show(self, view: View, chains: list[ChainView]) -> None:
        self._most = max(self._most, len(chains))
        if self._live:
            self._draw(progress(view, chains, self._most))
        elif not self._quiet:
            for chain in chains:
                words = step(view, chain)
                if self._said.get(chain.id) != words:
                    self._said[chain.id] = words
                    print(f"chain {chain.id}: {words}", flush=True)
            self._finished(view, but={chain.id for chain in chains})

    def _finished(self, view: View, but: set[int] | None = None) -> None:
        for number in sorted(set(self._said) - (but or set())):
            del self._said[number]
            print(f"chain {number}: done", flush=True)

    def _say_what_is_waited_for(self, view: View, chains: list[ChainView]) -> None:
        if not self._quiet and chains:
            first = chains[0]
            line = f"chain {first.id} waits: {fold(view, first.reason) or 'the manager'}"
            if not first.writable:
                line += " (if that can't be, see ffs cluster force-lead)"
            print(f"{plural(len(chains), 'chain')} left; {line}", file=sys.stderr)

    def _draw(self, line: str) -> None:
        self._width = shutil.get_terminal_size().columns - 1
        sys.stderr.write("\r" + line[: self._width].ljust(self._width))
        sys.stderr.flush()

    def _clear(self) -> None:
        if self._live and self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()


def progress(view: View, chains: list[ChainView], most: int) -> str:
    """One line: how many chains are done, and what is copied now."""
    syncs = [chain.sync for chain in chains if chain.sync is not None]
    rate = sum(sync.bytes_per_s for sync in syncs)
    line = f"{most - len(chains)} of {plural(most, 'chain')} done"
    if syncs:
        line += f", {len(syncs)} being filled ({min(map(share, syncs)):.0%} to {max(map(share, syncs)):.0%})"
    return line + (f", {format_bytes(rate)}/s" if rate else "")


def step(view: View, chain: ChainView) -> str:
    """Where a chain is on its way, without what changes all the time."""
    coming = [t for t in chain.wanted if t not in chain.members]
    syncing = [t for t, s in zip(chain.members, chain.states, strict=True) if s == TargetState.SYNCING]
    leaving = [t for t in chain.members if t not in chain.wanted]
    parts = [f"target {t} of {view.node_name(t)} is filled" for t in syncing]
    parts += [f"target {t} of {view.node_name(t)} is to come" for t in coming]
    parts += [f"target {t} of {view.node_name(t)} is to leave" for t in leaving]
    return ", ".join(parts) or condition(chain)

"""`ffs up`, `ffs down`, `ffs status`: a development cluster, and the state of any cluster."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ffs.cli.devcluster.handle import launch, take_down
from ffs.cli.devcluster.secret import choose_secret
from ffs.cli.devcluster.state import DEFAULT_FAILURE_TIMEOUT_MS, Directory, Shape
from ffs.cli.devcluster.supervisor import READY_TIMEOUT_S, Supervisor
from ffs.cli.parsing import (
    Commands,
    command,
    connect,
    count_argument,
    print_json,
    seconds_argument,
    size_argument,
)
from ffs.cli.text import format_bytes, format_seconds, plural, table
from ffs.errors import FfsError, InvalidArgument, from_os_error
from ffs.proto.cluster import NodeStatus, StatusReply, TargetState
from ffs.rpc.secret_file import SECRET_VARIABLE

DEFAULT_DIR = "ffs-cluster"
DEFAULT_DEVICE = "4GiB"


def add_commands(commands: Commands) -> None:
    up = command(commands, "up", run_up, "start a development cluster on this machine", json_option=True)
    up.add_argument(
        "--dir", default=DEFAULT_DIR, help=f"where its data lies (default: ./{DEFAULT_DIR}); kept by down"
    )
    up.add_argument("--nodes", type=count_argument, help="storage servers (default: 3)")
    up.add_argument(
        "--replicas", type=count_argument, help="copies of each chunk (default: 3, or all nodes if fewer)"
    )
    up.add_argument(
        "--device-size",
        type=size_argument,
        metavar="SIZE",
        help=f"of each server's device file, which grows as it fills (default: {DEFAULT_DEVICE})",
    )
    up.add_argument(
        "--failure-timeout",
        type=seconds_argument,
        metavar="SECONDS",
        help="a server that is silent for so long is left out of its chains (default: 1)",
    )
    up.add_argument("--domains", type=count_argument, help="spread the servers over so many failure domains")
    up.add_argument(
        "--roles",
        action="store_true",
        default=None,
        help="two devices a server, for KV blocks and for files, with a chain table each",
    )
    up.add_argument(
        "--metas", type=count_argument, help="metadata services, over one store on this machine (default: 1)"
    )
    up.add_argument(
        "--secret-file",
        metavar="FILE",
        help="the cluster secret: who connects must prove it (default: FFS_CLUSTER_SECRET_FILE, or none)",
    )
    up.add_argument(
        "--timeout",
        type=seconds_argument,
        default=int(READY_TIMEOUT_S * 1000),
        metavar="SECONDS",
        help=f"give up if it doesn't serve after so long (default: {READY_TIMEOUT_S:.0f})",
    )
    up.add_argument("--detach", action="store_true", help="return once it serves; ffs down stops it")
    up.add_argument("--null-devices", action="store_true", help=argparse.SUPPRESS)
    up.add_argument("--supervise", action="store_true", help=argparse.SUPPRESS)
    up.add_argument("--until-eof", action="store_true", help=argparse.SUPPRESS)
    down = command(commands, "down", run_down, "stop a development cluster; its data stays", json_option=True)
    down.add_argument("--dir", default=DEFAULT_DIR, help=f"as given to up (default: ./{DEFAULT_DIR})")
    command(commands, "status", run_status, "nodes, devices and chains of the cluster", json_option=True)


# --- up -----------------------------------------------------------------------------------------


def run_up(args: argparse.Namespace) -> int:
    shape = _shape(args)
    if args.supervise:
        return _supervise(args, shape)
    if args.detach:
        return _detach(args, shape)
    return _foreground(args, shape)


def _shape(args: argparse.Namespace) -> Shape:
    """What was asked for, or what is there: a cluster keeps the shape that it was made with."""
    known = Directory(args.dir).read_cluster()
    timeout_ms = args.failure_timeout or DEFAULT_FAILURE_TIMEOUT_MS
    if known is None:
        nodes = args.nodes or 3
        replicas = args.replicas or min(3, nodes)
        device_bytes = args.device_size or size_argument(DEFAULT_DEVICE)
        return Shape(
            nodes,
            replicas,
            device_bytes,
            args.domains or 0,
            timeout_ms,
            bool(args.roles),
            args.metas or 1,
            choose_secret(args.secret_file, ""),
            args.null_devices,
        )
    for option, asked, made in (
        ("--nodes", args.nodes, known.shape.nodes),
        ("--replicas", args.replicas, known.shape.replicas),
        ("--device-size", args.device_size, known.shape.device_bytes),
        ("--domains", args.domains, known.shape.domains),
    ):
        if asked not in (None, made):
            raise InvalidArgument(
                f"was made with {option} {made}: leave the option out, or give another --dir", args.dir
            )
    if args.roles and not known.shape.roles:
        raise InvalidArgument(
            "was made without --roles: leave the option out, or give another --dir", args.dir
        )
    if known.shape.null_devices and not args.null_devices:
        raise InvalidArgument(
            "was made with --null-devices, which store nothing: give that option again, or another --dir",
            args.dir,
        )
    if args.null_devices and not known.shape.null_devices:
        raise InvalidArgument(
            "was made without --null-devices: leave the option out, or give another --dir", args.dir
        )
    return msgspec.structs.replace(
        known.shape,
        failure_timeout_ms=args.failure_timeout or known.shape.failure_timeout_ms,
        metas=args.metas or known.shape.metas,
        secret_file=choose_secret(args.secret_file, known.shape.secret_file),
    )


def _detach(args: argparse.Namespace, shape: Shape) -> int:
    live = _Line()
    _, address = launch(
        args.dir,
        nodes=shape.nodes,
        replicas=shape.replicas,
        device_bytes=shape.device_bytes,
        domains=shape.domains,
        failure_timeout_s=shape.failure_timeout_ms / 1000,
        roles=shape.roles,
        metas=shape.metas,
        secret_file=shape.secret_file,
        null_devices=shape.null_devices,
        timeout_s=args.timeout / 1000,
        until_eof=False,
        say=live.show,
    )
    live.clear()
    where = str(Path(args.dir).absolute())
    if args.json:
        print_json({"address": address, "dir": where})
    else:
        print(f"cluster up at {address}\n  export FFS_CLUSTER={address}\n  stop: ffs down --dir {where}")
        print(f"  {_authentication(shape)}")
        if shape.null_devices:
            print(f"  {_STORES_NOTHING}")
    return 0


def _supervise(args: argparse.Namespace, shape: Shape) -> int:
    """The detached supervisor: JSON lines on stdout until it is ready (devcluster/handle.py)."""

    def tell(message: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), flush=True)

    directory = Directory(args.dir)
    supervisor = Supervisor(directory, shape, lambda line: tell({"say": line}), args.timeout / 1000)
    with _Stop() as stop:
        try:
            with supervisor.hold():
                supervisor.start(stop.requested)
                if supervisor.unserved:
                    print(f"ffs up: {supervisor.unserved}", file=sys.stderr, flush=True)
                tell({"ready": {"address": supervisor.address, "dir": str(directory.path)}})
                _let_go_of_terminal(directory.log / "supervisor.log", keep_stdin=args.until_eof)
                watched = [0] if args.until_eof else []
                while not stop.requested():
                    supervisor.serve_requests()
                    for line in supervisor.newly_dead():
                        print(f"ffs up: {line}", file=sys.stderr, flush=True)
                    readable, _, _ = select.select(watched, [], [], 0.2)
                    if readable and not os.read(0, 4096):
                        break
        except KeyboardInterrupt:
            tell({"error": "stopped while it started", "errno": 4})
            return 130
        except OSError as error:
            known = from_os_error(error)
            tell({"error": known.message, "errno": known.errno, "name": known.filename})
            return 1
    return 0


def _let_go_of_terminal(log: Path, *, keep_stdin: bool) -> None:
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if not keep_stdin:
        os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(sink, 2)
    os.close(null)
    os.close(sink)


def _foreground(args: argparse.Namespace, shape: Shape) -> int:
    directory = Directory(args.dir)
    live = _Line()
    supervisor = Supervisor(directory, shape, live.show, args.timeout / 1000)
    with _Stop() as stop, supervisor.hold():
        supervisor.start(stop.requested)
        live.clear()
        if args.json:
            print_json({"address": supervisor.address, "dir": str(directory.path)})
            sys.stdout.flush()
        else:
            print(f"cluster up at {supervisor.address} in {directory.path}")
            print(f"  in another terminal: export FFS_CLUSTER={supervisor.address}")
            print(f"  {_authentication(shape)}")
            if shape.null_devices:
                print(f"  {_STORES_NOTHING}")
            print("  Ctrl-C stops it; the data stays", flush=True)
        if supervisor.unserved:
            print(f"ffs up: {supervisor.unserved}", file=sys.stderr)
        begun = time.monotonic()
        next_look = 0.0
        while not stop.requested():
            supervisor.serve_requests()
            for line in supervisor.newly_dead():
                live.clear()
                print(f"ffs up: {line}", file=sys.stderr)
            if time.monotonic() >= next_look and live.visible:
                next_look = time.monotonic() + 1
                live.show(_live_status(supervisor, time.monotonic() - begun))
            stop.wait(0.2)
        live.show("stopping")
    live.clear()
    print("cluster stopped; its data stays in " + str(directory.path), file=sys.stderr)
    return 0


_STORES_NOTHING = "null devices: this cluster stores nothing, files hold zeros (for measuring)"


def _authentication(shape: Shape) -> str:
    return f"export {SECRET_VARIABLE}={shape.secret_file}" if shape.secret_file else UNSIGNED


def _live_status(supervisor: Supervisor, up_s: float) -> str:
    try:
        return f"up {up_s:.0f} s  {summary(supervisor.status())}"
    except FfsError as error:
        return f"up {up_s:.0f} s  no status: {error.message}"


class _Line:
    """One line on a terminal's stderr that is drawn over; nothing elsewhere."""

    def __init__(self) -> None:
        self.visible = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self.visible:
            columns = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r" + text[:columns].ljust(columns))
            sys.stderr.flush()

    def clear(self) -> None:
        if self.visible:
            sys.stderr.write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
            sys.stderr.flush()


class _Stop:
    """SIGINT, SIGTERM and SIGHUP ask to stop, instead of interrupting wherever the program is."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True

    def requested(self) -> bool:
        return self._asked

    def wait(self, seconds: float) -> None:
        """Sleeps, but not past a request (a signal handler that returns lets sleep go on)."""
        end = time.monotonic() + seconds
        while not self._asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))


# --- down ---------------------------------------------------------------------------------------


def run_down(args: argparse.Namespace) -> int:
    take_down(args.dir)
    where = str(Path(args.dir).absolute())
    if args.json:
        print_json({"dir": where, "stopped": True})
    else:
        print(f"cluster stopped; its data stays in {where}")
    return 0


# --- status -------------------------------------------------------------------------------------


def run_status(args: argparse.Namespace) -> int:
    with connect(args) as client:
        status = client.cluster_status()
    if args.json:
        print_json(status_fields(status))
    else:
        print("\n".join(_status_lines(status)))
    return 0 if all(chain.writable for chain in status.chains) else 1


UNSIGNED = "authentication is OFF: no cluster secret, unsigned capabilities (development on this host only)"


def summary(status: StatusReply) -> str:
    """The cluster in one line."""
    alive = sum(node.alive for node in status.nodes)
    serving = sum(chain.writable for chain in status.chains)
    devices = [device for node in status.nodes for device in node.devices]
    capacity = sum(device.capacity_bytes for device in devices)
    used = capacity - sum(device.free_bytes for device in devices)
    return (
        f"{alive} of {plural(len(status.nodes), 'node')} alive, "
        f"{serving} of {plural(len(status.chains), 'chain')} serving, "
        f"{format_bytes(used)} of {format_bytes(capacity)} used"
    )


def _state_of(node: NodeStatus) -> str:
    if node.alive:
        return "alive"
    return "silent" if node.silent_ms < 0 else "silent " + format_seconds(node.silent_ms / 1000)


def _status_lines(status: StatusReply) -> Iterator[str]:
    yield f"cluster {status.cluster.hex()}  routing epoch {status.epoch}  manager {status.primary}"
    yield summary(status)
    if not status.signed:
        yield UNSIGNED
    yield ""
    rows = []
    for node in status.nodes:
        for device in node.devices:
            rows.append(
                (
                    str(node.id),
                    node.name,
                    _state_of(node),
                    node.host,
                    device.path,
                    format_bytes(device.capacity_bytes),
                    format_bytes(device.free_bytes),
                    "FAILED: restart its server" if device.poisoned else "",
                )
            )
    yield table(("node", "name", "state", "host", "device", "size", "free", ""), rows, right=(5, 6))
    yield ""
    for entry in status.tables:
        mine = [chain for chain in status.chains if chain.table == entry.id]
        good = sum(chain.writable for chain in mine)
        chains = f"{good} of {plural(len(mine), 'chain')} serving"
        role = f"role {entry.role}, " if entry.role else ""
        yield f"table {entry.name}: {role}{plural(entry.replicas, 'replica')}, {chains}"
    reasons = Counter(chain.reason for chain in status.chains if not chain.writable)
    for reason, count in reasons.most_common(5):
        yield f"  {plural(count, 'chain')}: {reason}"


def status_fields(status: StatusReply) -> dict[str, object]:
    """The whole status as JSON has it: ids as numbers, states by name, bytes."""
    return {
        "cluster": status.cluster.hex(),
        "epoch": status.epoch,
        "manager": status.primary,
        "signed": status.signed,
        "nodes": [
            {
                "id": node.id,
                "name": node.name,
                "alive": node.alive,
                "incarnation": node.incarnation,
                "host": node.host,
                "control": node.control,
                "silent_ms": node.silent_ms,
                "devices": [
                    {
                        "path": device.path,
                        "uuid": device.uuid.hex(),
                        "size": device.size_bytes,
                        "capacity": device.capacity_bytes,
                        "free": device.free_bytes,
                        "targets": device.targets,
                        "failed": device.poisoned,
                    }
                    for device in node.devices
                ],
            }
            for node in status.nodes
        ],
        "tables": [
            {
                "id": entry.id,
                "name": entry.name,
                "version": entry.version,
                "replicas": entry.replicas,
                "role": entry.role,
            }
            for entry in status.tables
        ],
        "chains": [
            {
                "id": chain.id,
                "table": chain.table,
                "version": [chain.term, chain.counter],
                "members": list(chain.members),
                "nodes": list(chain.nodes),
                "states": [TargetState(state).name.lower() for state in chain.states],
                "writable": chain.writable,
                "readable": chain.readable,
                "reason": chain.reason,
            }
            for chain in status.chains
        ],
    }

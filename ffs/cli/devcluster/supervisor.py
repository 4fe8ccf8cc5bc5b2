"""The process that owns a development cluster's servers (state.py has the directory's files).

Starts the metadata service, then the storage servers, makes the chain tables, and waits until every
chain serves. What can't be brought up is taken down again, and of a directory that this attempt made only
the logs are kept. Not thread-safe; belongs to the main thread of its process.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ffs.cli.devcluster import commands
from ffs.cli.devcluster.control import Control
from ffs.cli.devcluster.process import (
    Child,
    is_alive,
    last_line,
    spawn,
    start_ticks,
    stop_children,
    wait_file,
)
from ffs.cli.devcluster.state import FORMAT, ClusterFile, Directory, ProcessRecord, RunFile, Shape, write_file
from ffs.cli.text import format_bytes, plural
from ffs.errors import Busy, FfsError, InvalidArgument, NoSpace, NotFound, Overloaded
from ffs.proto.cluster import (
    DEFAULT_CHAINS_PER_DEVICE,
    ROLE_BULK,
    ROLE_KV,
    CreateTable,
    CreateTableReply,
    StatusReply,
)
from ffs.rpc.secret_file import read_secret

if TYPE_CHECKING:
    from ffs.client.client import Client

Say = Callable[[str], None]
READY_TIMEOUT_S = 60.0
SETTLED_S = 10.0
STOP_TIMEOUT_S = 20.0
MIN_DEVICE_BYTES = 256 << 20
SINGLE_CHAINS_PER_DEVICE = 10
_POLL_S = 0.1


def check_shape(shape: Shape) -> None:
    """InvalidArgument if no cluster can look like this."""
    if not 1 <= shape.replicas <= 8:
        raise InvalidArgument(f"--replicas {shape.replicas}: give 1 to 8")
    if shape.nodes < shape.replicas:
        raise InvalidArgument(
            f"--nodes {shape.nodes} can't hold --replicas {shape.replicas}: "
            "each replica needs a node of its own"
        )
    if shape.nodes > 64:
        raise InvalidArgument(f"--nodes {shape.nodes}: a development cluster has at most 64")
    if not 1 <= shape.metas <= 8:
        raise InvalidArgument(f"--metas {shape.metas}: give 1 to 8")
    if not 0 <= shape.domains <= shape.nodes:
        raise InvalidArgument(f"--domains {shape.domains}: give at most --nodes {shape.nodes}")
    if not 200 <= shape.failure_timeout_ms <= 600_000:
        raise InvalidArgument(
            f"--failure-timeout {shape.failure_timeout_ms / 1000:g}: give 0.2 to 600 seconds"
        )
    if shape.device_bytes < MIN_DEVICE_BYTES:
        raise InvalidArgument(
            f"--device-size {format_bytes(shape.device_bytes)}: "
            f"give at least {format_bytes(MIN_DEVICE_BYTES)}"
        )


class Supervisor:
    """One run of a cluster. `start`, then `newly_dead` and `serve_requests` now and then, then `stop`, all
    within `hold`."""

    def __init__(
        self,
        directory: Directory,
        shape: Shape,
        say: Say,
        ready_timeout_s: float = READY_TIMEOUT_S,
        store: str = "",
    ) -> None:
        """`shape` counts for a new directory only; `say` gets one line a step; `ready_timeout_s`: how long
        `start` waits for all chains to serve; `store`: URL of the metadata store, "": LMDB in the
        directory."""
        self._store = store or f"lmdb://{directory.meta}"
        self._ready_timeout_s = ready_timeout_s
        self.directory = directory
        self._shape = shape
        self._say = say
        self._children: list[Child] = []
        self._dead: set[str] = set()
        self._control: Control | None = None
        self._client: Client | None = None
        self._cluster = ""
        self.address = ""
        self.unserved = ""  # which chains of an old cluster don't serve, once it is up

    @property
    def shape(self) -> Shape:
        return self._shape

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Owns the directory. A directory that wasn't a cluster before and isn't one after a failure
        goes away again, but for the logs of servers; if it was only stopped, they go too."""
        directory = self.directory
        directory.check_usable()
        existed = directory.path.exists()
        was_cluster = directory.cluster_file.exists()
        if not was_cluster:
            check_shape(self._shape)
            self._check_space()
        directory.path.mkdir(parents=True, exist_ok=True)
        with directory.hold():
            self._refuse_leftovers()
            try:
                yield
            except BaseException as error:
                self.stop()
                if not was_cluster:
                    logs = isinstance(error, Exception) and any(directory.log.glob("*"))
                    _undo(directory.path, keep_itself=existed, keep=directory.log if logs else None)
                raise
            self.stop()

    def _refuse_leftovers(self) -> None:
        """Servers outlive a supervisor that was killed, and hold the devices."""
        run = self.directory.read_run()
        left = [r.name for r in run.processes if is_alive(r.pid, r.started)] if run is not None else []
        if left:
            raise Busy(
                f"{', '.join(left)} of an earlier run still {'runs' if len(left) == 1 else 'run'} here: "
                f"end {'it' if len(left) == 1 else 'them'} with ffs down --dir {self.directory.path}",
                str(self.directory.path),
            )

    def _check_space(self) -> None:
        parent = self.directory.path
        while not parent.exists():
            parent = parent.parent
        free = shutil.disk_usage(parent).free
        # Device files are sparse: they take what is stored in them. The journals are written at once.
        devices = self._shape.nodes * (2 if self._shape.roles else 1)
        need = devices * (64 << 20)
        if free < need:
            raise NoSpace(
                f"has {format_bytes(free)} free, {plural(devices, 'device')} need "
                f"{format_bytes(need)} to begin with: give another --dir",
                str(parent),
            )

    # --- starting ---------------------------------------------------------------------------------

    def start(self, should_stop: Callable[[], bool]) -> None:
        """Brings all up and waits until all chains serve. Blocking; raises FfsError with the reason."""
        directory = self.directory
        known = directory.read_cluster()
        if known is not None:
            if known.format > FORMAT:
                raise InvalidArgument("was made by a newer ffs: update this one", str(directory.path))
            self._shape = msgspec.structs.replace(
                known.shape,
                failure_timeout_ms=self._shape.failure_timeout_ms,
                metas=self._shape.metas,
                secret_file=self._shape.secret_file,
            )
        directory.log.mkdir(exist_ok=True)
        deadline = time.monotonic() + self._ready_timeout_s
        metas = self._shape.metas
        self._say("starting " + ("the metadata service" if metas == 1 else f"{metas} metadata services"))
        self._start_metadata(known.address if known else "", deadline)
        self._say(f"starting {plural(self._shape.nodes, 'storage server')}")
        for index in range(self._shape.nodes):
            self._start_storage(index)
        for index in range(self._shape.nodes):
            wait_file(self._children[metas + index], self._ready_file(f"node{index}"), deadline)
        self._make_tables(deadline)
        status = self._wait_serving(deadline, should_stop, old=known is not None)
        self._cluster = status.cluster.hex()
        self._control = Control(directory)
        self._write_files()

    def _write_files(self) -> None:
        write_file(self.directory.cluster_file, ClusterFile(FORMAT, self._shape, self.address, self._cluster))
        mine = ProcessRecord("supervisor", os.getpid(), start_ticks(os.getpid()) or 0)
        processes = tuple(
            ProcessRecord(child.name, child.pid, start_ticks(child.pid) or 0)
            for child in self._children
            if child.popen.poll() is None
        )
        write_file(self.directory.run_file, RunFile(mine, self.address, processes))

    def _ready_file(self, name: str) -> Path:
        return self.directory.path / f"{name}.ready"

    def _spawn(self, name: str, command: list[str]) -> Child:
        with contextlib.suppress(FileNotFoundError):
            self._ready_file(name).unlink()
        child = spawn(name, command, self.directory.log / f"{name}.log", os.environ)
        self._children.append(child)
        return child

    def _start_metadata(self, last_address: str, deadline: float) -> None:
        """All metadata services, at the addresses of last time where those are free. The first makes the
        store what it is before the others come."""
        self.directory.meta.mkdir(exist_ok=True)
        last = last_address.split(",")
        addresses = []
        for index in range(self._shape.metas):
            listen = commands.free_address(last[index] if index < len(last) else "")
            addresses.append(self._start_meta(index, listen, deadline))
        self.address = ",".join(addresses)

    def _start_meta(self, index: int, listen: str, deadline: float) -> str:
        """One metadata service; its address. Blocking until it serves."""
        name = Directory.meta_name(index)
        ready = self._ready_file(name)
        shape = self._shape
        command = commands.metadata(self._store, listen, ready, shape.failure_timeout_ms, shape.secret_file)
        child = self._spawn(name, command)
        return commands.ready_address(wait_file(child, ready, deadline))

    def _start_storage(self, index: int) -> Child:
        home = self.directory.node(index)
        home.mkdir(exist_ok=True)
        name = f"node{index}"
        shape = self._shape
        domain = f"domain{index % shape.domains}" if shape.domains else ""
        ready = self._ready_file(name)
        command = commands.storage(
            home,
            name,
            self.address,
            shape.device_bytes,
            ready,
            domain,
            roles=shape.roles,
            secret_file=shape.secret_file,
            null_devices=shape.null_devices,
        )
        return self._spawn(name, command)

    @property
    def client(self) -> Client:
        if self._client is None:
            from ffs.client.address import resolve_address
            from ffs.client.client import Client
            from ffs.client.core import ClientOptions

            # Not by `connect`, which proves what the environment names: that may be for another cluster.
            path = self._shape.secret_file
            secret = read_secret(path, refuse_exposed=True) if path else None
            self._client = Client(resolve_address(self.address), ClientOptions(secret=secret))
        return self._client

    def _make_tables(self, deadline: float) -> None:
        """`default` with the replicas asked for, and `single` for what one copy is enough for. A third of
        each device's targets stays free: room for those of a node that is drained or replaced. With roles:
        `bulk` with the replicas asked for, and `kv` with one copy, since what is in it can be computed
        again."""
        replicas = self._shape.replicas
        tables = [("default", replicas, DEFAULT_CHAINS_PER_DEVICE, "")]
        if replicas != 1:
            tables.append(("single", 1, SINGLE_CHAINS_PER_DEVICE, ""))
        if self._shape.roles:
            tables = [
                ("bulk", replicas, DEFAULT_CHAINS_PER_DEVICE, ROLE_BULK),
                ("kv", 1, SINGLE_CHAINS_PER_DEVICE, ROLE_KV),
            ]
        self._say("making the chain tables")
        for name, copies, chains, role in tables:
            request = CreateTable(
                name=name,
                replicas=copies,
                chains_per_device=chains,
                wait_nodes=self._shape.nodes,
                role=role,
            )
            while True:
                self._check_children()
                try:
                    self.client.core.caller.call(request, CreateTableReply)
                    break
                except Overloaded:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_POLL_S)

    def status(self) -> StatusReply:
        return self.client.cluster_status()

    def _wait_serving(self, deadline: float, should_stop: Callable[[], bool], *, old: bool) -> StatusReply:
        """Until all chains serve. An `old` cluster is up without those that wait for what isn't there: only
        a cluster that is up can be mended."""
        said = ""
        changed_s = time.monotonic()
        while True:
            self._check_children()
            status = self.status()
            waiting = [chain for chain in status.chains if not chain.writable]
            if status.chains and not waiting:
                return status
            why = f": chain {waiting[0].id}: {waiting[0].reason}" if waiting else ""
            line = f"waiting for {plural(len(waiting), 'chain')} of {len(status.chains)} to serve{why}"
            if line != said:
                changed_s = time.monotonic()
            settled = all(node.alive for node in status.nodes) and time.monotonic() > changed_s + SETTLED_S
            if old and (settled or time.monotonic() > deadline):
                self.unserved = line
                return status
            if time.monotonic() > deadline:
                raise FfsError(
                    f"not all chains serve after {self._ready_timeout_s:g} s (--timeout); still {line}; "
                    f"logs: {self.directory.log}"
                )
            if should_stop():
                raise KeyboardInterrupt
            if line != said:
                said = line
                self._say(line)
            time.sleep(_POLL_S)

    def _check_children(self) -> None:
        for child in self._children:
            status = child.popen.poll()
            if status is not None:
                words = last_line(child.log) or "it said nothing"
                raise FfsError(f"{child.name} ended with status {status}: {words} (log: {child.log})")

    # --- running ------------------------------------------------------------------------------------

    def serve_requests(self) -> None:
        """Does what `ffs dev` asks for (control.py), if it does."""
        if self._control is not None:
            self._control.serve(self._do)

    def _do(self, verb: str, node: str) -> str:
        if verb == "add":
            return self.add_node()
        metas = [Directory.meta_name(index) for index in range(self._shape.metas)]
        if node in metas and len(metas) > 1:
            self._do_meta(verb, metas.index(node))
            return node
        match = re.fullmatch(r"node([0-9]+)", node)
        if match is None or int(match[1]) >= self._shape.nodes:
            raise NotFound(f"no node {node} here: there are node0 to node{self._shape.nodes - 1}")
        index = int(match[1])
        if verb == "kill":
            self.kill_node(index)
        elif verb == "stop":
            self.stop_node(index)
        elif verb in ("start", "fresh"):
            self.start_node(index, fresh=verb == "fresh")
        else:
            raise InvalidArgument(f"the supervisor can't {verb}")
        return node

    def _do_meta(self, verb: str, index: int) -> None:
        if verb == "kill":
            self.kill_meta(index)
        elif verb == "stop":
            self._end(Directory.meta_name(index), lambda child: stop_children([child], STOP_TIMEOUT_S))
        elif verb == "start":
            self.start_meta(index)
        else:
            raise InvalidArgument("a metadata service has no device: start it without --fresh")

    def kill_meta(self, index: int) -> None:
        """SIGKILL to a metadata service. Blocking until it is gone; Busy if it doesn't run."""
        self._end(Directory.meta_name(index), lambda child: child.popen.kill())

    def start_meta(self, index: int) -> None:
        """Starts a metadata service that was killed or stopped, at its address. Blocking until it serves;
        Busy if it runs."""
        name = Directory.meta_name(index)
        if self._running(name) is not None:
            raise Busy(f"{name} runs: stop it first")
        self._children = [child for child in self._children if child.name != name]
        self._dead.discard(name)
        self._start_meta(index, self.address.split(",")[index], time.monotonic() + READY_TIMEOUT_S)
        self._write_files()

    def kill_node(self, index: int) -> None:
        """SIGKILL to a storage server. Blocking until it is gone; Busy if it doesn't run."""
        self._end(f"node{index}", lambda child: child.popen.kill())

    def stop_node(self, index: int) -> None:
        """SIGTERM: a clean stop. Blocking until it is gone; Busy if it doesn't run."""
        self._end(f"node{index}", lambda child: stop_children([child], STOP_TIMEOUT_S))

    def _end(self, name: str, end: Callable[[Child], object]) -> None:
        child = self._running(name)
        if child is None:
            raise Busy(f"{name} doesn't run: start it with ffs dev start {name}")
        self._dead.add(child.name)  # it isn't news
        end(child)
        child.popen.wait()
        self._children.remove(child)
        self._write_files()

    def start_node(self, index: int, *, fresh: bool = False) -> None:
        """Starts a storage server that was killed or stopped; `fresh`: with an empty device in the old one's
        place, its identity kept. Blocking until it is ready; Busy if it runs."""
        if self._running(f"node{index}") is not None:
            raise Busy(f"node{index} runs: stop it first")
        self._children = [child for child in self._children if child.name != f"node{index}"]
        if fresh:
            for device in commands.devices(self.directory.node(index), roles=self._shape.roles).values():
                device.unlink(missing_ok=True)
        self._dead.discard(f"node{index}")
        self._await_storage(index)

    def add_node(self) -> str:
        """One more storage server; its name. Blocking until it is ready. The cluster keeps it."""
        index = self._shape.nodes
        self._await_storage(index)
        self._shape = msgspec.structs.replace(self._shape, nodes=index + 1)
        self._write_files()
        return f"node{index}"

    def _await_storage(self, index: int) -> None:
        child = self._start_storage(index)
        try:
            wait_file(child, self._ready_file(child.name), time.monotonic() + READY_TIMEOUT_S)
        except BaseException:
            stop_children([child], STOP_TIMEOUT_S)
            self._children.remove(child)
            raise
        self._write_files()

    def _running(self, name: str) -> Child | None:
        for child in self._children:
            if child.name == name and child.popen.poll() is None:
                return child
        return None

    def newly_dead(self) -> list[str]:
        """One line for each server that has ended since the last call."""
        lines = []
        for child in self._children:
            status = child.popen.poll()
            if status is not None and child.name not in self._dead:
                self._dead.add(child.name)
                lines.append(
                    f"{child.name} ended with status {status}: {last_line(child.log)} (log: {child.log})"
                )
        return lines

    def stop(self) -> None:
        """Stops storage servers, then metadata. Repeatable; blocking, bounded."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._client is not None:
            self._client.close()
            self._client = None
        if not self._children:
            return
        children, self._children = self._children, []
        running = [child for child in children if child.popen.poll() is None]
        metas = [child for child in children if child.name.startswith("meta")]
        nodes = [child for child in children if child not in metas]
        killed = stop_children(nodes, STOP_TIMEOUT_S) + stop_children(metas, STOP_TIMEOUT_S)
        for child in running:
            if child.name in killed:
                self._say(f"{child.name} didn't end within {STOP_TIMEOUT_S:.0f} s and was killed")
            elif child.popen.returncode != 0:
                self._say(f"{child.name} ended with status {child.popen.returncode}: {child.last_line()}")
        with contextlib.suppress(FileNotFoundError):
            self.directory.run_file.unlink()


def _undo(path: Path, *, keep_itself: bool, keep: Path | None) -> None:
    """Removes what a first `up` that failed has made, but `keep`."""
    for entry in path.iterdir():
        if entry == keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    if not keep_itself and keep is None:
        path.rmdir()

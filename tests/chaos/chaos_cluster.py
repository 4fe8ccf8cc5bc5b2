"""A cluster of real processes on hosts, each of which can be killed, stopped, cut off and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from chaos_hosts import Hosts

from ffs.errors import FfsError, Overloaded
from ffs.proto import cluster as proto
from ffs.rpc.address import parse_addresses
from ffs.rpc.pool import Pool

LIMIT_S = 120.0  # only for a broken program
META_PORT, CONTROL_PORT = 7550, 7560
NEXT_VERSION = str(Path(__file__).with_name("next_version.py"))


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    limit = time.monotonic() + limit_s
    while not (result := condition()):
        assert time.monotonic() < limit, f"never came: {what}"
        time.sleep(0.02)
    return result


def _port(hosts: Hosts, port: int) -> int:
    """A host of its own has all ports; on loopback others may run."""
    if hosts.can_cut:
        return port
    with socket.socket() as probe:
        probe.bind((hosts.address(""), 0))
        return int(probe.getsockname()[1])


class Process:
    """A server that may be started several times, as this build or as one that reports the next version.
    Its log grows over all of them."""

    def __init__(self, name: str, prefix: list[str], module: str, arguments: list[str], root: Path) -> None:
        self.name = name
        self._prefix = prefix
        self._module = module
        self._arguments = arguments
        self._ready = root / f"{name}.ready"
        self.log = root / f"{name}.log"
        self._popen: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def start(self, *, next_version: bool = False) -> None:
        self._ready.unlink(missing_ok=True)
        build = [NEXT_VERSION, self._module] if next_version else ["-m", self._module]
        with open(self.log, "ab") as log:
            self._popen = subprocess.Popen(
                [*self._prefix, sys.executable, *build, *self._arguments, f"--ready-file={self._ready}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self.stopped = False

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def status(self) -> str:
        code = None if self._popen is None else self._popen.poll()
        return f"ended by itself with status {code}"

    def is_ready(self) -> dict[str, Any] | None:
        if self._ready.exists() and (text := self._ready.read_text(encoding="utf-8")):
            return cast(dict[str, Any], json.loads(text))
        assert self.running, f"{self.name} ended: {self.tail()}"
        return None

    def ready(self) -> dict[str, Any]:
        return cast(dict[str, Any], until(self.is_ready, f"{self.name} is ready"))

    def set_device(self, text: str) -> None:
        """What it starts with from then on, as --device takes it."""
        at = next(at for at, option in enumerate(self._arguments) if option.startswith("--device="))
        self._arguments[at] = f"--device={text}"

    def move_device(self, to: Path) -> None:
        at = next(at for at, option in enumerate(self._arguments) if option.startswith("--device="))
        path, size = self._arguments[at].removeprefix("--device=").rsplit(":", 1)
        Path(path).rename(to)
        self._arguments[at] = f"--device={to}:{size}"

    def kill(self) -> None:
        """As a power cut does: at once, with its children."""
        if self._popen is not None and self.running:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def end(self) -> None:
        """As an operator does it: it stops by itself."""
        assert self._popen is not None
        self._popen.terminate()
        assert self._popen.wait(LIMIT_S) == 0, self.tail()

    def pause(self) -> None:
        if self._popen is not None and self.running:
            os.killpg(self._popen.pid, signal.SIGSTOP)
            self.stopped = True

    def resume(self) -> None:
        if self._popen is not None and self.running and self.stopped:
            os.killpg(self._popen.pid, signal.SIGCONT)
        self.stopped = False

    def tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]


class Cluster:
    """`meta0`, `meta1`, ... share one store; `node0`, ... have a device file each, or one of `devices`."""

    def __init__(
        self,
        root: Path,
        hosts: Hosts,
        *,
        nodes: int,
        metas: int = 2,
        failure_timeout_ms: int = 2000,
        device_bytes: int = 512 << 20,
        environment: dict[str, str] | None = None,
        devices: Sequence[str] = (),
        node_options: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.hosts = hosts
        self.metas = [f"meta{at}" for at in range(metas)]
        self.nodes = [f"node{at}" for at in range(nodes)]
        secret = root / "secret"
        secret.write_text("chaos is a fair teacher\n")
        secret.chmod(0o600)
        self._secret = secret.read_bytes().strip()
        secret_option = f"--cluster-secret-file={secret}"
        self.secret_file = secret
        self.processes: dict[str, Process] = {}
        env = ["env", *(f"{key}={value}" for key, value in (environment or {}).items())]
        addresses = [
            f"{hosts.address(name)}:{_port(hosts, META_PORT + at)}" for at, name in enumerate(self.metas)
        ]
        self.address = ",".join(addresses)
        for at, name in enumerate(self.metas):
            arguments = [
                f"--store=lmdb://{root}/meta", f"--listen={addresses[at]}",
                "--lease-ms=1000", f"--failure-timeout-ms={failure_timeout_ms}", secret_option,
            ]  # fmt: skip
            prefix = [*hosts.command(name), *env]
            self.processes[name] = Process(name, prefix, "metadata.server", arguments, root)
        for at, name in enumerate(self.nodes):
            device = devices[at] if devices else f"{root}/{name}.device:{device_bytes}"
            arguments = [
                f"--metadata={self.address}", f"--name={name}", f"--dir={root}/{name}",
                f"--listen={hosts.address(name)}:{CONTROL_PORT + at if hosts.can_cut else 0}",
                f"--device={device}", "--pool-size=48M", "--targets-per-device=16",
                "--start-timeout-s=60", "--log-level=info", secret_option,
                *(["--no-local"] if hosts.can_cut else []), *(["--format-if-new"] if devices else []),
                *node_options,
            ]  # fmt: skip
            prefix = [*hosts.command(name), *env]
            self.processes[name] = Process(name, prefix, "storage_server.server", arguments, root)

    def form(self, *, replicas: int = 3, chains_per_device: int = 4) -> None:
        for name in (*self.metas, *self.nodes):
            self.processes[name].start()
            if name in self.metas:
                self.processes[name].ready()
        for name in self.nodes:
            self.processes[name].ready()
        table = proto.CreateTable(
            name="default", replicas=replicas, chains_per_device=chains_per_device, wait_nodes=len(self.nodes)
        )

        def created() -> bool:
            try:
                pool.call(table)
            except Overloaded:  # a node that is held up counts as away for a while
                return False
            return True

        with self.pool() as pool:
            until(created, "all nodes are alive at once")
        self.until_whole()

    def move_device(self, name: str, to: Path) -> None:
        """Renames the device file of a node that isn't running; it starts with that from then on."""
        self.processes[name].move_device(to)

    def pool(self) -> Pool:
        return Pool(parse_addresses(self.address), role="admin", secret=self._secret, timeout_s=LIMIT_S)

    def status(self) -> proto.StatusReply:
        with self.pool() as pool:
            return cast(proto.StatusReply, pool.call(proto.GetStatus(), timeout_s=5.0))

    def broken(self) -> list[str]:
        """Why chains aren't whole; empty when every member of each serves. A line if nobody answers."""
        try:
            status = self.status()
        except FfsError as error:
            return [f"no status: {error}"]
        serving = int(proto.TargetState.SERVING)
        return [
            f"chain {chain.id} {chain.members} {chain.states}: {chain.reason}"
            for chain in status.chains
            if not chain.writable or set(chain.states) != {serving}
        ]

    def until_whole(self, limit_s: float = LIMIT_S) -> float:
        """Waits until every target of every chain serves; seconds that it took."""
        began = time.monotonic()
        limit = began + limit_s
        while broken := self.broken():
            for process in self.processes.values():
                assert process.running, f"{process.name} {process.status()}: {process.tail()}"
            assert time.monotonic() < limit, "\n".join(["never whole again:", *broken, *self.words()])
            time.sleep(0.05)
        return time.monotonic() - began

    def words(self) -> list[str]:
        return [f"--- {name}\n{process.tail()}" for name, process in self.processes.items()]

    def close(self) -> None:
        for process in self.processes.values():
            process.resume()
            process.kill()

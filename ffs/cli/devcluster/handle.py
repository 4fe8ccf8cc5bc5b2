"""Starting and stopping a development cluster from another program: demo, bench, tests, `up --detach`.

The supervisor is a process of its own. Over its stdout it tells in JSON lines what it does
({"say"}, then {"ready"} or {"error"}); with `until_eof` it ends when its stdin closes, so that the
cluster goes with the program that started it, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ffs.cli.devcluster.control import ask
from ffs.cli.devcluster.process import is_alive, signal_and_wait
from ffs.cli.devcluster.state import DEFAULT_FAILURE_TIMEOUT_MS, Directory, ProcessRecord, Shape
from ffs.errors import FfsError, NotFound, error_of

STOP_TIMEOUT_S = 60.0


def launch(
    directory: str | os.PathLike[str],
    *,
    nodes: int = 3,
    replicas: int = 3,
    device_bytes: int = 4 << 30,
    domains: int = 0,
    failure_timeout_s: float = DEFAULT_FAILURE_TIMEOUT_MS / 1000,
    roles: bool = False,
    metas: int = 1,
    secret_file: str = "",
    null_devices: bool = False,
    timeout_s: float | None = None,
    until_eof: bool,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a supervisor and waits until all chains serve (so long; None: READY_TIMEOUT_S of supervisor.py):
    (process, address). Raises the FfsError that it ended with."""
    command = [
        sys.executable,
        "-m",
        "ffs",
        "up",
        f"--dir={os.fspath(directory)}",
        f"--nodes={nodes}",
        f"--replicas={replicas}",
        f"--device-size={device_bytes}",
        f"--failure-timeout={failure_timeout_s}",
        "--supervise",
    ]
    if domains:
        command.append(f"--domains={domains}")
    if roles:
        command.append("--roles")
    if metas != 1:
        command.append(f"--metas={metas}")
    if secret_file:
        command.append(f"--secret-file={secret_file}")
    if null_devices:
        command.append("--null-devices")
    if timeout_s is not None:
        command.append(f"--timeout={timeout_s}")
    if until_eof:
        command.append("--until-eof")
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if until_eof else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        return process, _await_ready(process, say)
    except BaseException:
        process.terminate()
        process.wait()
        raise


def _await_ready(process: subprocess.Popen[bytes], say: Callable[[str], None]) -> str:
    if process.stdout is None:
        raise AssertionError("the supervisor has no stdout")
    for line in process.stdout:
        message = json.loads(line)
        if "say" in message:
            say(message["say"])
        elif "error" in message:
            raise error_of(message["errno"], message["error"], message.get("name"))
        elif "ready" in message:
            return str(message["ready"]["address"])
    raise FfsError(f"the supervisor ended with status {process.wait()} before the cluster was ready")


class DevCluster:
    """A cluster for the time of a `with`. It ends with this process, however that ends."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        nodes: int = 3,
        replicas: int = 3,
        device_bytes: int = 4 << 30,
        domains: int = 0,
        failure_timeout_s: float = DEFAULT_FAILURE_TIMEOUT_MS / 1000,
        roles: bool = False,
        metas: int = 1,
        secret_file: str = "",
        null_devices: bool = False,
    ) -> None:
        self.directory = Directory(directory)
        self._shape = Shape(
            nodes,
            replicas,
            device_bytes,
            domains,
            roles=roles,
            metas=metas,
            secret_file=secret_file,
            null_devices=null_devices,
        )
        self._failure_timeout_s = failure_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def start(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Blocking until every chain serves. Raises FfsError."""
        self._process, self.address = launch(
            self.directory.path,
            nodes=self._shape.nodes,
            replicas=self._shape.replicas,
            device_bytes=self._shape.device_bytes,
            domains=self._shape.domains,
            failure_timeout_s=self._failure_timeout_s,
            roles=self._shape.roles,
            metas=self._shape.metas,
            secret_file=self._shape.secret_file,
            null_devices=self._shape.null_devices,
            until_eof=True,
            say=say,
        )

    def stop(self) -> None:
        """Blocking; repeatable. Data stays in the directory."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def processes(self) -> dict[str, int]:
        """pid by name: "meta", "meta1", ..., "node0", ..."""
        run = self.directory.read_run()
        if run is None:
            raise NotFound("no cluster runs here", str(self.directory.path))
        return {record.name: record.pid for record in run.processes}

    def kill_node(self, index: int) -> None:
        """SIGKILL to a storage server. Blocking until it is gone."""
        ask(self.directory, "kill", f"node{index}")

    def stop_node(self, index: int) -> None:
        """SIGTERM. Blocking until it is gone."""
        ask(self.directory, "stop", f"node{index}")

    def start_node(self, index: int, *, fresh: bool = False) -> None:
        """Starts a storage server that was killed or stopped; `fresh`: with an empty device, its identity
        kept. Blocking until it is ready."""
        ask(self.directory, "fresh" if fresh else "start", f"node{index}")

    def kill_meta(self, index: int) -> None:
        """SIGKILL to one of several metadata services. Blocking until it is gone."""
        ask(self.directory, "kill", Directory.meta_name(index))

    def start_meta(self, index: int) -> None:
        """Starts a metadata service that was killed, at its address. Blocking until it serves."""
        ask(self.directory, "start", Directory.meta_name(index))

    def add_node(self) -> str:
        """One more storage server; its name. Blocking until it is ready."""
        return ask(self.directory, "add")

    def __enter__(self) -> DevCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def take_down(path: str | os.PathLike[str]) -> int:
    """Stops the cluster that runs in `path`; returns its supervisor's pid. Blocking.

    NotFound if there is no cluster or it is down. Servers whose supervisor was killed are stopped too.
    """
    directory = Directory(path)
    known = directory.read_cluster()
    run = directory.read_run()
    if known is None and run is None and not directory.is_held():
        raise NotFound("holds no cluster: name the directory that was given to ffs up", str(Path(path)))
    if run is None:
        raise NotFound("the cluster here is down already", str(Path(path)))
    owner = run.supervisor
    if is_alive(owner.pid, owner.started):
        _end(owner)
    for record in reversed(run.processes):
        if is_alive(record.pid, record.started):
            _end(record)
    directory.run_file.unlink(missing_ok=True)
    return owner.pid


def _end(record: ProcessRecord) -> None:
    if not signal_and_wait(record.pid, record.started, signal.SIGTERM, STOP_TIMEOUT_S):
        raise FfsError(
            f"{record.name} (pid {record.pid}) doesn't end: "
            f"look at its log, or end it with kill -9 {record.pid}"
        )

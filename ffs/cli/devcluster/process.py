"""Child processes and their identity: a pid alone may be another process by now."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ffs.errors import FfsError


def start_ticks(pid: int) -> int | None:
    """When the process started (clock ticks since boot), or None if there is none (or only its zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Whether the process with this pid and start still runs."""
    return pid > 0 and start_ticks(pid) == started


def signal_and_wait(pid: int, started: int, number: int, timeout_s: float) -> bool:
    """Signals exactly that process and waits for its end. True once it is gone. Blocking."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # The descriptor pins the process: if its start matches now, the signal can't hit another.
        if not is_alive(pid, started):
            return True
        signal.pidfd_send_signal(handle, number)
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000)) or not is_alive(pid, started)
    finally:
        os.close(handle)


@dataclass(slots=True)
class Child:
    """One server of the cluster. `log` holds its stderr."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def last_line(self) -> str:
        """The last line of its log: what it said when it ended."""
        return last_line(self.log)


def last_line(log: Path) -> str:
    try:
        lines = log.read_bytes()[-8192:].decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def spawn(name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
    """Starts a server in a session of its own, so that Ctrl-C reaches only the supervisor."""
    with log.open("ab") as sink:
        popen = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=dict(environment),
            start_new_session=True,
        )
    return Child(name, popen, log)


def wait_file(child: Child, path: Path, deadline: float) -> bytes:
    """Waits until the child has written `path`. FfsError with the child's last words if it ends first,
    or if it isn't there by `deadline` (time.monotonic)."""
    while True:
        if path.exists():
            return path.read_bytes()
        status = child.popen.poll()
        if status is not None:
            raise FfsError(f"{child.name} ended with status {status}: {child.last_line()} (log: {child.log})")
        if time.monotonic() > deadline:
            raise FfsError(f"{child.name} isn't ready in time (ffs up --timeout): see its log {child.log}")
        time.sleep(0.02)


def stop_children(children: Sequence[Child], timeout_s: float) -> list[str]:
    """SIGTERM to all, SIGKILL to those that don't end in time; names of the killed. Blocking."""
    for child in children:
        if child.popen.poll() is None:
            child.popen.send_signal(signal.SIGCONT)  # a stopped one couldn't end
            child.popen.terminate()
    deadline = time.monotonic() + timeout_s
    killed = []
    for child in children:
        try:
            child.popen.wait(max(0.05, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.popen.kill()
            child.popen.wait()
            killed.append(child.name)
    return killed

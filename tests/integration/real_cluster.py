"""ffs-meta and ffs-storage as real processes, for tests that start and kill them themselves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ffs.proto import cluster as proto
from ffs.rpc.address import parse_addresses
from ffs.rpc.pool import Pool

LIMIT_S = 120.0  # only for a broken program
DEVICE_BYTES = 512 << 20


def until(condition: Callable[[], Any], what: str) -> Any:
    limit = time.monotonic() + LIMIT_S
    while not (result := condition()):
        assert time.monotonic() < limit, f"never came: {what}"
        time.sleep(0.02)
    return result


class Process:
    """One server process and its ready file."""

    def __init__(self, module: str, arguments: list[str], ready: Path, log: Path) -> None:
        ready.unlink(missing_ok=True)
        self._ready = ready
        self._log = log
        with open(log, "ab") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, f"--ready-file={ready}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def ready(self) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            if self._ready.exists():
                return cast(dict[str, Any], json.loads(self._ready.read_text(encoding="utf-8")))
            assert self.popen.poll() is None, f"ended with {self.popen.returncode}: {self.stderr()}"
            return None

        return cast(dict[str, Any], until(look, f"{self._ready.name}: {self.stderr()}"))

    def stderr(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def refused(self) -> str:
        """Waits for the end of a start that must fail; its one line."""
        assert self.popen.wait(LIMIT_S) == 1, self.stderr()
        assert not self._ready.exists()
        assert "Traceback" not in self.stderr()
        return self.stderr().strip().splitlines()[-1]

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def stop(self) -> None:
        self.popen.terminate()
        assert self.popen.wait(LIMIT_S) == 0, self.stderr()


class Cluster:
    """Processes under one directory."""

    def __init__(self, root: Path, secret: Path | None = None) -> None:
        self.root = root
        self.metas: list[Process] = []
        self.nodes: dict[int, Process] = {}
        self.all: list[Process] = []
        self.addresses: list[str] = []
        self._secret = [] if secret is None else [f"--cluster-secret-file={secret}"]
        self._secret_bytes = None if secret is None else secret.read_bytes().strip()

    @property
    def address(self) -> str:
        return ",".join(self.addresses)

    def start_meta(self, at: int = 0, *extra: str) -> Process:
        known = self.addresses[at] if at < len(self.addresses) else "127.0.0.1:0"
        process = Process(
            "metadata.server",
            [
                f"--store=lmdb://{self.root}/meta",
                f"--listen={known}",
                "--lease-ms=1000",
                *self._secret,
                *extra,
            ],
            self.root / f"meta{at}.ready",
            self.root / f"meta{at}.log",
        )
        self.all.append(process)
        self.metas[at : at + 1] = [process]
        address = process.ready()["address"]
        self.addresses[at : at + 1] = [address]
        return process

    def start_node(
        self, at: int, *, name: str = "", device: str = "", extra: tuple[str, ...] = ()
    ) -> Process:
        process = Process(
            "storage_server.server",
            [
                f"--metadata={self.address}",
                f"--name={name or f'node{at}'}",
                f"--dir={self.root}/node{at}",
                f"--device={device or f'{self.root}/device{at}:{DEVICE_BYTES}'}",
                "--pool-size=32M",
                *self._secret,
                *extra,
            ],
            self.root / f"node{at}.ready",
            self.root / f"node{at}.log",
        )
        self.all.append(process)
        self.nodes[at] = process
        return process

    def start_nodes(self, *which: int) -> None:
        for at in which:
            self.start_node(at)
        for at in which:
            self.nodes[at].ready()

    def pool(self) -> Pool:
        return Pool(parse_addresses(self.address), role="admin", secret=self._secret_bytes, timeout_s=LIMIT_S)

    def status(self) -> proto.StatusReply:
        with self.pool() as pool:
            return cast(proto.StatusReply, pool.call(proto.GetStatus()))

    def create_table(self, name: str, replicas: int, wait_nodes: int) -> None:
        with self.pool() as pool:
            pool.call(
                proto.CreateTable(name=name, replicas=replicas, chains_per_device=8, wait_nodes=wait_nodes)
            )

    def until_serving(self) -> proto.StatusReply:
        def serving() -> proto.StatusReply | None:
            status = self.status()
            return status if status.chains and all(chain.writable for chain in status.chains) else None

        return cast(proto.StatusReply, until(serving, "all chains serve"))

    def end(self) -> None:
        for process in self.all:
            if process.popen.poll() is None:
                process.kill()


def form(cluster: Cluster, nodes: int = 3) -> None:
    cluster.start_meta()
    cluster.start_nodes(*range(nodes))
    cluster.create_table("default", nodes, nodes)
    cluster.until_serving()

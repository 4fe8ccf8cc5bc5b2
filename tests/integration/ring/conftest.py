"""Storage nodes as processes with hand-made chains, and a native client of them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ffs._native.lib import host_id
from ffs._native.ring import CQE_DTYPE, WAIT_NEEDS_ROUTING, NativeClient, Ring
from ffs._native.routes import SERVING, ChainRoute, TargetRoute

CLUSTER = bytes(range(16))
SPACE = 9
_sessions = iter(range(1000, 1 << 30))


class Node:
    """A node's process, which `await_start` waits for. Kill it, stop it, let it go on."""

    def __init__(self, directory: Path, node: int, targets: list[int]) -> None:
        self.node = node
        self.targets = targets
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "node.py"), str(directory), str(node), CLUSTER.hex()]
            + [str(t) for t in targets],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.shard: Any = None

    def await_start(self) -> None:
        self.shard = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"node {self.node} has ended with status {self.process.wait()}"
        return json.loads(line)

    def tell(self, do: str, **rest: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **rest}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def begin_end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.signal_quietly(signal.SIGCONT)

    def end(self) -> None:
        """Behind begin_end."""
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def signal_quietly(self, number: int) -> None:
        if self.process.poll() is None:
            self.signal(number)


class Nodes:
    """`count` nodes; chain c (from 1) has its replicas on all of them, head on node c % count."""

    def __init__(self, directory: Path, count: int, chains: int) -> None:
        self.members = {
            c: tuple(100 * c + (c + i) % count for i in range(count)) for c in range(1, chains + 1)
        }
        self.nodes = [
            Node(directory, n + 1, [t for ts in self.members.values() for t in ts if t % 100 == n])
            for n in range(count)
        ]
        for node in self.nodes:  # they start all at once
            node.await_start()
        self.places = [
            TargetRoute(t, n.node, "127.0.0.1", n.shard["port"], host_id(), n.shard["socket_path"])
            for n in self.nodes
            for t in n.targets
        ]
        self.lead()

    def chains(self, counter: int = 1, proposed: bool = False) -> list[ChainRoute]:
        return [
            ChainRoute(c, 1, counter, m, (SERVING,) * len(m), proposed, incarnations=(1,) * len(m))
            for c, m in self.members.items()
        ]

    def configure(self, epoch: int, proposed: bool) -> None:
        for node in self.nodes:
            node.tell(
                "configure",
                epoch=epoch,
                manager_ms=1000,
                chains=[dataclasses.asdict(c) for c in self.chains(1, proposed)],
                targets=[dataclasses.asdict(p) for p in self.places],
            )

    def reports(self) -> list[dict[str, Any]]:
        return [report for node in self.nodes for report in node.tell("report")]

    def lead(self) -> None:
        """As the manager does: propose, see it persisted, record, see it served."""
        self.configure(1, proposed=True)
        until(lambda: all(r["persisted_counter"] == 1 and r["persisted_here"] for r in self.reports()))
        self.configure(2, proposed=False)
        until(lambda: all(r["state"] == SERVING for r in self.reports()))

    def lease(self, for_ms: int = 600_000) -> None:
        """The manager's: without it members serve only while all of them answer each other."""
        for node in self.nodes:
            node.tell("lease", for_ms=for_ms)

    def client(self, transport: str = "auto", **options: Any) -> NativeClient:
        native = NativeClient(next(_sessions), CLUSTER, transport=transport, **options)
        native.set_routing(2, self.chains(), self.places)
        return native

    def head(self, chain: int) -> Node:
        return self.nodes[self.members[chain][0] % 100]

    def end(self) -> None:
        for node in self.nodes:
            node.begin_end()
        for node in self.nodes:
            node.end()


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't come to that"
        time.sleep(0.01)


def capability(client: NativeClient, space: int = SPACE, rights: int = 7, kind: int = 2) -> bytes:
    """Unsigned, as of a loopback development cluster (wire.h, Capability); kind 2: the whole cluster."""
    return struct.pack(
        "<BBHIQQQQQII32s", 1, kind, 0, rights, client.client_id, space, 0, 1 << 60, 1, 0, 0, bytes(32)
    )


def key(index: int, space: int = SPACE) -> bytes:
    return space.to_bytes(8, "big") + index.to_bytes(16, "big")


def finish(ring: Ring, count: int, seconds: float = 60) -> NDArray[Any]:
    """The completions of `count` requests; there is no newer routing to be had."""
    parts: list[NDArray[Any]] = []
    end = time.monotonic() + seconds
    while (have := sum(map(len, parts))) < count:
        left = end - time.monotonic()
        assert left > 0, f"{have} of {count} requests are complete"
        cqes, events = ring.wait(count - have, left)
        parts.append(cqes)
        assert len(cqes) or events & WAIT_NEEDS_ROUTING or left < 1
    return np.concatenate(parts) if parts else np.zeros(0, dtype=CQE_DTYPE)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, 3, 3)
    yield nodes
    nodes.end()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, 1, 1)
    yield nodes
    nodes.end()

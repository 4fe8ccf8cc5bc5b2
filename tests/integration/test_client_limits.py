"""Clients that are killed, come and go by the thousand, or have few descriptors: FAULTS S4, S6, S15.

A share of each; tests/soak.sh runs them whole (FFS_KILLS=100 FFS_CONNECTS=10000 FFS_OPEN_FILES=100000).
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import in_child, start

import ffs
from ffs.client.client import Client

KILLS = int(os.environ.get("FFS_KILLS", "15"))
CONNECTS = int(os.environ.get("FFS_CONNECTS", "80"))
OPEN_FILES = int(os.environ.get("FFS_OPEN_FILES", "10000"))

CHUNK = 65536
OWN_SESSIONS = 9  # of the servers with each other, which they make as needed
GAUGES = ("ffs_sessions", "ffs_regions", "ffs_region_bytes", "ffs_pool_used_bytes", "ffs_ops_waiting")


def until(condition: Callable[[], bool], told: Callable[[], object]) -> None:
    limit = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < limit, told()
        time.sleep(0.05)


class Servers:
    """What the processes of the cluster have in hand."""

    def __init__(self, cluster: Any) -> None:
        self.pids = {child.name: int(child.pid) for child in cluster._children}
        ready = [json.loads(path.read_text()) for path in Path(cluster.directory.path).glob("node*.ready")]
        assert len(ready) == 3
        self._metrics = [each["metrics"] for each in ready]

    def gauges(self) -> dict[str, float]:
        """Of all storage servers together."""
        out = dict.fromkeys(GAUGES, 0.0)
        for address in self._metrics:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
                for line in reply.read().decode().splitlines():
                    name = line.split("{")[0].split(" ")[0]
                    if name in out:
                        out[name] += float(line.rsplit(" ", 1)[1])
        return out

    def descriptors(self) -> dict[str, int]:
        return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in self.pids.items()}

    def memory(self) -> int:
        """Resident bytes that are theirs alone, of all processes together."""
        total = 0
        for pid in self.pids.values():
            fields = Path(f"/proc/{pid}/statm").read_text().split()
            total += (int(fields[1]) - int(fields[2])) * resource.getpagesize()
        return total


@pytest.fixture
def servers(cluster: Any) -> Servers:
    return Servers(cluster)


def busy(address: str, home: str, number: int, started: int) -> None:
    """A client that reads and writes by files, by a ring, and ahead and behind, until it is killed."""
    client = ffs.connect(address, session_ttl=1.0)
    data = np.random.default_rng(number).integers(0, 256, 40 * CHUNK, np.uint8).tobytes()
    iov = ffs.Iov(16 * CHUNK)
    with (
        client.open(f"{home}/{number}", "w+b", 0, chunk_size=CHUNK) as raw,
        ffs.Ior(client, 64, kind="read") as reads,
        ffs.Ior(client, 64, kind="write") as writes,
    ):
        raw.write(data)
        raw.flush()
        while True:
            with client.open(f"{home}/{number}.buffered", "wb", chunk_size=CHUNK) as behind:
                behind.write(data)
            with client.open(f"{home}/{number}", "rb") as ahead:
                assert ahead.read(10 * CHUNK) == data[: 10 * CHUNK]
                places = np.arange(16) * CHUNK
                for ring in (reads, writes):
                    assert ring.prepare_many(raw, places, iov, places, np.full(16, CHUNK)) == 16
                    ring.submit()
                os.write(started, b".")
                assert ahead.read() == data[10 * CHUNK :]
            assert all(len(ring.wait(16)) == 16 for ring in (reads, writes))


def _shared_memory() -> set[str]:
    """What is in /dev/shm, but for semaphores of other tests' processes."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def test_s4_killed_clients_leave_nothing(address: str, client: Client, home: str, servers: Servers) -> None:
    """kill -9 under I/O, again and again: connections, memory, descriptors and /dev/shm are as before."""
    shared = _shared_memory()
    with client.open(f"{home}/warm", "wb") as file:  # servers connect to each other
        file.write(b"x" * CHUNK)
    source = random.Random(4)

    def kill_some(count: int, first: int) -> None:
        for number in range(first, first + count):
            begun, started = os.pipe()
            pid = start(lambda number=number, started=started: busy(address, home, number, started))  # type: ignore[misc]
            os.close(started)
            try:
                assert os.read(begun, 1) == b"."
                time.sleep(source.random() * 0.05)
            finally:
                os.kill(pid, signal.SIGKILL)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
                os.close(begun)

    kill_some(2, 0)
    client.close()
    limit = time.monotonic() + 90
    gauges, descriptors = servers.gauges(), servers.descriptors()
    while gauges["ffs_pool_used_bytes"] + gauges["ffs_ops_waiting"] or gauges != servers.gauges():
        assert time.monotonic() < limit, gauges
        time.sleep(0.2)
        gauges, descriptors = servers.gauges(), servers.descriptors()
    kill_some(KILLS, 2)
    # Servers connect to each other when they first need to: fewer than two clients would leave.
    until(
        lambda: all(
            servers.gauges()[name] <= gauges[name] + OWN_SESSIONS * (name == "ffs_sessions")
            for name in GAUGES
        ),
        lambda: (gauges, servers.gauges()),
    )
    until(
        lambda: all(
            count <= descriptors[name] + OWN_SESSIONS for name, count in servers.descriptors().items()
        ),
        lambda: (descriptors, servers.descriptors()),
    )
    assert _shared_memory() <= shared
    with ffs.connect(address) as after:
        for number in range(KILLS + 2):
            # Its write session is over: the length was asked of the chains.
            def settled(number: int = number) -> bool:
                with after.open(f"{home}/{number}", "r+b", 0) as file:
                    return bool(file.seek(0, os.SEEK_END) == 40 * CHUNK)

            until(settled, lambda number=number: f"file {number}")  # type: ignore[misc]


def test_s6_many_files_need_few_descriptors(address: str, client: Client, home: str) -> None:
    """More files than a hundred times the descriptors: open together, read by one ring and by calls."""
    names = [f"{home}/{number}" for number in range(OPEN_FILES)]
    for begin in range(0, OPEN_FILES, 10_000):
        made = client.create_many(names[begin : begin + 10_000])
        assert not [each for each in made if isinstance(each, Exception)]
    some = range(0, OPEN_FILES, max(1, OPEN_FILES // 50))
    for number in some:
        with client.open(names[number], "r+b", 0) as file:
            file.write(b"%09d" % number)

    def work() -> None:
        signal.alarm(1200)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        before = len(os.listdir("/proc/self/fd"))
        own = ffs.connect(address)
        files: list[Any] = []
        for begin in range(0, OPEN_FILES, 10_000):
            files += own.open_many(names[begin : begin + 10_000])
        assert not [each for each in files if isinstance(each, Exception)]
        with ffs.Ior(own, 64) as ring, ffs.Iov(16 * len(some)) as iov:
            places = np.arange(len(some)) * 16
            zeros, nines = np.zeros(len(some), np.int64), np.full(len(some), 9)
            assert ring.prepare_many([files[n] for n in some], zeros, iov, places, nines) == len(some)
            assert {done.result for done in ring.wait(len(some))} == {9}
            for place, number in zip(places.tolist(), some, strict=True):
                assert bytes(iov.buffer()[place : place + 9]) == b"%09d" % number
        for number in some:
            assert files[number].pread(20, 0) == b"%09d" % number
        assert files[1].pread(20, 0) == b""
        assert len(os.listdir("/proc/self/fd")) < before + 40
        for file in files:
            file.close()
        own.close()

    assert in_child(work)


def test_s15_clients_that_come_and_go_leave_nothing(
    address: str, client: Client, home: str, servers: Servers
) -> None:
    """Connect, read, write, disconnect: memory and descriptors here and at the servers stay flat."""
    with client.open(f"{home}/f", "wb") as file:
        file.write(b"content")

    def once() -> None:
        with ffs.connect(address, connect_timeout=60) as brief:  # a busy machine is late, not silent
            with brief.open(f"{home}/f", "rb") as file:
                assert file.read() == b"content"
            with brief.open(f"{home}/g", "wb", 0) as file:
                file.write(b"x")

    def own_memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    warm = max(10, CONNECTS // 10)
    for _ in range(warm):
        once()
    mine, at_servers = len(os.listdir("/proc/self/fd")), servers.descriptors()
    memory, own = servers.memory(), own_memory()
    for _ in range(CONNECTS):
        once()
    assert len(os.listdir("/proc/self/fd")) <= mine
    until(
        lambda: all(
            count <= at_servers[name] + OWN_SESSIONS for name, count in servers.descriptors().items()
        ),
        lambda: (at_servers, servers.descriptors()),
    )
    # A leaked connection costs more than this a client; a journal's or an index's growth less.
    allowed = (16 << 20) + CONNECTS * 2048
    assert own_memory() - own < allowed
    assert servers.memory() - memory < 4 * allowed
    assert servers.gauges()["ffs_pool_used_bytes"] == 0


def test_a_client_without_descriptors_says_so_and_goes_on(address: str, client: Client, home: str) -> None:
    """S5 for files: rings of a transfer, of reading ahead and of writing behind can't be made."""
    data = random.Random(6).randbytes(30 * CHUNK)
    with client.open(f"{home}/f", "wb", chunk_size=CHUNK) as file:
        file.write(data)

    def work() -> None:
        signal.alarm(100)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        while os.dup(0) < highest:
            pass
        own = ffs.connect(address, request_timeout=0.3)
        with own.open(f"{home}/f", "rb") as reader:

            def reads() -> bool:
                reader.seek(0)
                try:
                    parts = [reader.read(2 * CHUNK) for _ in range(15)]
                except ffs.FfsError:
                    return False
                assert b"".join(parts) == data
                return True

            assert reader.read(10) == data[:10]
            count = len(os.listdir("/proc/self/fd")) - 1
            for room in (0, 1, 2, 3, 4):
                resource.setrlimit(resource.RLIMIT_NOFILE, (count + room, hard))
                reads()  # or says that it can't; either way
            resource.setrlimit(resource.RLIMIT_NOFILE, (count + 12, hard))
            assert any(reads() for _ in range(20))  # a busy machine may need longer than the timeout
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            assert any(reads() for _ in range(20))
        own.close()

    assert in_child(work)

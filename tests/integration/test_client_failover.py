"""Files and KV spaces while servers and metadata stop, die and come back. FAULTS S8, cases 24 and 25.

A cluster of its own: what is done to it here would disturb the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import ffs
from ffs import errors
from ffs._native.ring import RingStats
from ffs.cli.devcluster.state import Directory, Shape
from ffs.cli.devcluster.supervisor import Supervisor
from ffs.client.client import Client
from ffs.kv import Space
from ffs.proto.cluster import TargetState

CHUNK = 65536
NODES = 3
OUTAGE_S = float(os.environ.get("FFS_OUTAGE_S", "8"))
"""How long metadata stands still; `make soak` may give a minute."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    said: list[str] = []
    shape = Shape(nodes=NODES, replicas=3, device_bytes=2 << 30, failure_timeout_ms=2500)
    supervisor = Supervisor(Directory(tmp_path_factory.mktemp("failover") / "dir"), shape, said.append)
    with supervisor.hold():
        supervisor.start(lambda: False)
        yield supervisor


@pytest.fixture
def client(cluster: Supervisor) -> Iterator[Client]:
    # On a machine that is busy with other things even the manager may not hear of a server for long.
    with ffs.connect(cluster.address, request_timeout=120, unavailable_timeout=60) as connected:
        yield connected


@pytest.fixture
def home(client: Client) -> str:
    path = f"/failover-{time.monotonic_ns()}"
    client.mkdir(path)
    return path


@pytest.fixture
def data() -> bytes:
    return random.Random(3).randbytes(40 * CHUNK + 123)


@pytest.fixture
def path(client: Client, home: str, data: bytes) -> str:
    with client.open(f"{home}/f", "wb", chunk_size=CHUNK) as file:
        file.write(data)
    return f"{home}/f"


def pid_of(cluster: Supervisor, name: str) -> int:
    return int(next(child.pid for child in cluster._children if child.name == name))


@contextlib.contextmanager
def standing_still(cluster: Supervisor, *names: str) -> Iterator[None]:
    pids = [pid_of(cluster, name) for name in names]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def until(condition: Callable[[], bool], cluster: Supervisor | None = None, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            chains = cluster.status().chains if cluster else ()
            pytest.fail("\n".join(["it didn't come to that", *sorted({c.reason for c in chains})]))
        time.sleep(0.05)


def all_serve(cluster: Supervisor) -> bool:
    """Every replica of every chain, which takes a sync where one was left out."""
    return all(set(chain.states) == {TargetState.SERVING} for chain in cluster.status().chains)


def others_serve(cluster: Supervisor, name: str) -> bool:
    """Every chain has a serving replica on another node: else its reads wait for this one, as they must."""
    status = cluster.status()
    node = next(n.id for n in status.nodes if n.name == name)
    wide = [chain for chain in status.chains if len(chain.members) > 1]
    return all(
        any(
            state == TargetState.SERVING and on != node
            for state, on in zip(chain.states, chain.nodes, strict=True)
        )
        for chain in wide
    )


def stats_of(client: Client) -> list[RingStats]:
    return [staged.ring.stats() for staged in client.core.session().rings._idle]


def test_reads_around_a_stopped_server_ask_a_second_replica(
    cluster: Supervisor, client: Client, path: str, data: bytes
) -> None:
    """A read of a clean chunk doesn't wait for the try timeout, nor for the manager.

    Each server in turn: a client may have its reasons to ask one of them nothing, but not all three.
    """
    slowest = 0.0
    with client.open(path, "rb", 0) as file:
        for victim in range(NODES):
            until(lambda: all_serve(cluster), cluster)
            assert file.pread(len(data), 0) == data
            with standing_still(cluster, f"node{victim}"):
                for at in range(0, len(data), CHUNK):
                    began = time.monotonic()
                    assert file.pread(CHUNK, at) == data[at : at + CHUNK]
                    slowest = max(slowest, time.monotonic() - began)
    print(f"slowest read around a stopped server: {slowest * 1000:.0f} ms")
    assert sum(s.hedge_wins for s in stats_of(client)) > 0
    until(lambda: all_serve(cluster), cluster)


def test_writes_go_on_when_a_server_stops_and_nothing_is_applied_twice(
    cluster: Supervisor, client: Client, home: str
) -> None:
    path = f"{home}/counted"
    with client.open(path, "w+b", 0, chunk_size=CHUNK) as file:
        file.pwrite(b"a" * 40 * CHUNK, 0)
        for victim in range(NODES):
            value = bytes([ord("b") + victim])
            with standing_still(cluster, f"node{victim}"):
                file.pwrite(value * 40 * CHUNK, 0)  # ends when the chains go on without it
                assert file.pread(40 * CHUNK, 0) == value * 40 * CHUNK
            until(lambda: all_serve(cluster), cluster)
            assert file.pread(40 * CHUNK, 0) == value * 40 * CHUNK


def test_writes_go_on_when_a_server_is_killed(cluster: Supervisor, client: Client, home: str) -> None:
    with client.open(f"{home}/f", "w+b", 0, chunk_size=CHUNK) as file:
        file.pwrite(b"a" * 40 * CHUNK, 0)
        cluster.kill_node(0)
        file.pwrite(b"b" * 40 * CHUNK, 0)
        assert file.pread(40 * CHUNK, 0) == b"b" * 40 * CHUNK
        cluster.start_node(0)
        until(lambda: all_serve(cluster), cluster)
        assert file.pread(40 * CHUNK, 0) == b"b" * 40 * CHUNK


def test_a_chain_that_is_down_is_a_distinct_error_and_works_again(
    cluster: Supervisor, home: str, path: str, data: bytes
) -> None:
    """S8: a file was created although its chain was down, then data calls hung."""
    blocks = [bytes([n]) * 4096 for n in range(4)]
    keys = [hashlib.sha256(b"%d" % n).digest() for n in range(4)]
    with (
        ffs.connect(cluster.address, unavailable_timeout=1) as client,
        client.open(path, "r+b", 0) as file,
        Space.create(client, f"{home}/space", block_bytes=4096) as space,
    ):
        assert file.pread(len(data), 0) == data
        assert space.put(keys, blocks).hits.all()
        for node in range(NODES):
            cluster.kill_node(node)
        with pytest.raises(
            errors.ChainUnavailable, match=r"no replica serves chain \d+ .*target \d+"
        ) as caught:
            file.pread(10, 0)
        assert caught.value.filename == path
        with pytest.raises(errors.ChainUnavailable):
            file.pwrite(b"x", 0)
        found = space.exists(keys)
        assert {type(error) for error in found.errors.values()} == {errors.ChainUnavailable}
        made = client.open(f"{home}/made-while-down", "wb", 0)
        with pytest.raises(errors.ChainUnavailable):
            made.write(b"first")
        for node in range(NODES):
            cluster.start_node(node)
        until(lambda: all_serve(cluster), cluster)
        # Nothing is opened again.
        until(lambda: _works(lambda: file.pread(10, 0) == data[:10]))
        file.pwrite(data[:1], 0)
        made.write(b"second")
        made.close()
        assert space.exists(keys).hits.all()
        assert file.pread(len(data), 0) == data
        with client.open(f"{home}/made-while-down", "rb") as back:
            assert back.read() == b"second"


def _works(work: Callable[[], bool]) -> bool:
    try:
        return work()
    except errors.ChainUnavailable:
        return False  # the routing that brings it back is on its way


def test_data_goes_on_while_all_metadata_stands_still(cluster: Supervisor, home: str) -> None:
    """Case 24's first half: files and KV spaces are read and written for longer than the session lives."""
    with ffs.connect(cluster.address, session_ttl=2.0) as client:
        block = np.random.default_rng(1).integers(0, 256, 4 * CHUNK, np.uint8)
        with (
            client.open(f"{home}/w", "w+b", 0, chunk_size=CHUNK) as file,
            Space.create(client, f"{home}/kv", block_bytes=4096) as space,
        ):
            file.write(block)
            turns = 0
            with standing_still(cluster, "meta"):
                end = time.monotonic() + OUTAGE_S
                while time.monotonic() < end or turns < 3:
                    turns += 1
                    content = np.roll(block, turns).tobytes()
                    file.pwrite(content, turns % 8 * len(content))
                    assert file.pread(len(content), turns % 8 * len(content)) == content
                    key = hashlib.sha256(b"%d" % turns).digest()
                    stored = space.put([key], [content[:4096]])
                    stored.raise_errors()
                    assert stored.hits.all()
                    out = bytearray(4096)
                    got = space.get([key], [memoryview(out)])
                    got.raise_errors()
                    assert got.hits.all()
                    assert bytes(out) == content[:4096]
                    time.sleep(0.02)
                # The end of the file is the known one.
                assert file.pread(1, 1 << 40) == b""
            file.flush()
            size = client.getsize(f"{home}/w")
            assert size >= len(block)
        assert client.getsize(f"{home}/w") == size


def test_case_25_a_stopped_server_cannot_touch_a_buffer_that_was_used_again(
    cluster: Supervisor, client: Client, path: str, data: bytes
) -> None:
    """Reads straight into an Iov, a server stopped meanwhile, the memory used again, the server goes on."""
    iov = ffs.Iov(64 * CHUNK)
    with client.open(path, "rb", 0) as file, ffs.Ior(client, entries=64, kind="read") as ior:
        memory = iov.numpy()
        for turn in range(6):
            victim = f"node{turn % NODES}"
            pid = pid_of(cluster, victim)
            until(lambda: others_serve(cluster, victim), cluster)  # noqa: B023 - called at once
            for i in range(40):
                ior.prepare(file, i * CHUNK, iov[i * CHUNK : (i + 1) * CHUNK], userdata=i)
            ior.submit()
            os.kill(pid, signal.SIGSTOP)
            try:
                done = []
                while len(done) < 40:
                    done += ior.wait(40 - len(done))
                assert [d.error for d in done] == [None] * 40
                assert memory[: 40 * CHUNK].tobytes() == data[: 40 * CHUNK]
                memory[:] = 0xA5  # it is ours
            finally:
                os.kill(pid, signal.SIGCONT)
            with client.open(path, "rb", 0) as again:  # the server works off what it was asked
                for _ in range(5):
                    assert again.pread(len(data), 0) == data
            assert (memory == 0xA5).all()
        del memory
    iov.close()
    until(lambda: all_serve(cluster), cluster)

"""Replicas that go away and come back, on real processes: what others' users have reported (FAULTS.md)."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from chaos_cluster import Cluster, until
from chaos_hosts import Loopback
from chaos_replicas import differences

import ffs
from ffs.errors import ChainUnavailable, FfsError
from ffs.proto.cluster import TargetState

CHUNK = 64 << 10
SEED = 5
LIMIT_S = 60.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three storage servers with three-way chains, one metadata process, all on loopback."""
    made = Cluster(tmp_path, Loopback(), nodes=3, metas=1, failure_timeout_ms=1000)
    try:
        made.form(chains_per_device=4)
        yield made
    finally:
        made.close()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[ffs.Client]:
    with ffs.connect(cluster.address, secret=cluster.secret_file) as connected:
        yield connected


def without(cluster: Cluster, name: str) -> None:
    """Waits until the chains go on without a node."""

    def left_out() -> bool:
        status = cluster.status()
        node = next(node.id for node in status.nodes if node.name == name)
        return all(
            chain.writable and state != TargetState.SERVING
            for chain in status.chains
            for at, state in zip(chain.nodes, chain.states, strict=True)
            if at == node
        )

    until(left_out, f"the chains go on without {name}")


def test_everything_that_changes_a_chunk_while_a_replica_is_synced(
    cluster: Cluster, client: ffs.Client
) -> None:
    """S3: truncate and extend were sent wrongly to a syncing successor. All kinds of updates, at sizes around
    the borders of chunks, before, during and after the sync; replicas compared byte by byte."""
    rng = random.Random(SEED)
    files = 24
    content: dict[str, bytearray] = {}
    client.makedirs("/s3", exist_ok=True)
    for number in range(files):
        path = f"/s3/f{number}"
        data = rng.randbytes(rng.choice([1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5]))
        with client.open(path, "wb", chunk_size=CHUNK) as file:
            file.write(data)
        content[path] = bytearray(data)
    sizes = [0, 1, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7]

    def change(path: str) -> None:
        kind = rng.choice(["truncate", "write", "append", "replace", "remove"])
        model = content[path]
        if kind == "truncate":
            size = rng.choice(sizes)
            client.truncate(path, size)
            model[:] = model[:size].ljust(size, b"\0")
            return
        if kind == "remove":
            client.remove(path)
            model.clear()
        if kind in ("remove", "replace"):
            data = rng.randbytes(rng.choice(sizes))
            with client.open(path, "wb", chunk_size=CHUNK) as file:
                file.write(data)
            model[:] = data
            return
        offset = len(model) if kind == "append" else rng.randint(0, 3 * CHUNK)
        data = rng.randbytes(rng.choice([1, 100, 4096, CHUNK]))
        with client.open(path, "r+b", 0) as file:
            file.pwrite(data, offset)
        if len(model) < offset:
            model.extend(bytes(offset - len(model)))
        model[offset : offset + len(data)] = data

    for round_ in range(3):
        name = f"node{round_}"
        cluster.processes[name].kill()
        without(cluster, name)
        for path in content:
            change(path)
        cluster.processes[name].start()
        changed = 0
        while cluster.broken():
            change(rng.choice(list(content)))
            changed += 1
        print(f"round {round_}: {changed} changes while {name} was synced")
        for path in rng.sample(list(content), 8):
            change(path)
        for path, model in content.items():
            with client.open(path, "rb") as file:
                assert file.read() == model, (round_, path)
            chunks = -(-len(model) // CHUNK) + 1
            assert differences(client, path, chunks, 3) == [], round_


def test_a_chain_that_is_down_says_so_at_once_and_works_again(cluster: Cluster, client: ffs.Client) -> None:
    """S8: a file was created although its chain was down, then data calls hung."""
    with client.open("/a", "wb") as file:
        file.write(b"before")
    for name in cluster.nodes:
        cluster.processes[name].kill()
    until(lambda: not any(node.alive for node in cluster.status().nodes), "all nodes are marked")
    with pytest.raises(ChainUnavailable) as caught, client.open("/a", "rb", 0) as reader:
        reader.read()
    assert "chain" in str(caught.value)
    with pytest.raises(ChainUnavailable), client.open("/b", "wb", 0) as writer:
        writer.write(b"new")
    for name in cluster.nodes:
        cluster.processes[name].start()
    cluster.until_whole()
    with client.open("/a", "rb", 0) as reader:
        assert reader.read() == b"before"
    with client.open("/b", "wb", 0) as writer:
        writer.write(b"new")
    with client.open("/b", "rb", 0) as reader:
        assert reader.read() == b"new"


def test_all_replicas_go_in_every_order_and_come_back_in_every_order(
    cluster: Cluster, client: ffs.Client
) -> None:
    """S9: all targets of a chain were offline and there was no way back."""
    orders = list(itertools.permutations(cluster.nodes))
    random.Random(SEED).shuffle(orders)
    data = os.urandom(200_000)
    with client.open("/s9", "wb", chunk_size=CHUNK) as file:
        file.write(data)
    for number, (going, coming) in enumerate(zip(orders[:4], orders[2:6], strict=True)):
        for name in going:
            cluster.processes[name].kill()
            if number % 2:  # step by step: the chain shrinks in between
                time.sleep(1.5)
        for name in coming:
            cluster.processes[name].start()
            if number % 2:
                time.sleep(0.5)
        cluster.until_whole()
        with client.open("/s9", "rb", 0) as file:
            assert file.read() == data, (going, coming)
        with client.open("/s9", "r+b", 0) as file:
            piece = os.urandom(1000)
            file.pwrite(piece, number * 40_000)
        data = data[: number * 40_000] + piece + data[number * 40_000 + 1000 :]
        assert differences(client, "/s9", 4, 3) == [], (going, coming)


def test_reads_go_on_while_the_chain_changes(cluster: Cluster, client: ffs.Client) -> None:
    """S16: reads were refused needlessly while the chain changed. Three nodes go and come in turn under two
    readers; nothing may fail, and nothing stale may be read."""
    with client.open("/s16", "wb", chunk_size=CHUNK) as file:
        file.write(bytes(8 * CHUNK))
    stop = threading.Event()
    failures: list[str] = []
    reads = [0, 0]
    longest = [0.0, 0.0]

    def read(worker: int) -> None:
        rng = random.Random(worker)
        try:
            with client.open("/s16", "rb", 0) as file:
                while not stop.is_set():
                    begun = time.monotonic()
                    data = file.pread(4096, rng.randrange(8) * CHUNK)
                    longest[worker] = max(longest[worker], time.monotonic() - begun)
                    assert data == bytes(4096)
                    reads[worker] += 1
        except (FfsError, AssertionError) as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=read, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    try:
        for name in cluster.nodes:
            cluster.processes[name].kill()
            without(cluster, name)
            cluster.processes[name].start()
            cluster.until_whole()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    print(f"longest read {max(longest) * 1000:.0f} ms of {sum(reads)}")
    assert failures == []
    assert min(reads) > 100


def test_a_device_that_comes_back_as_it_was_long_ago(cluster: Cluster, client: ffs.Client) -> None:
    """Case 15: somebody restored a backup of the device under a target that the record calls serving. Nothing
    of it may be served; it is synced."""
    rng = random.Random(SEED)

    def write(data: bytes) -> None:
        with client.open("/old", "wb", chunk_size=CHUNK) as file:
            file.write(data)

    write(rng.randbytes(3 * CHUNK + 11))
    process, device = cluster.processes["node1"], cluster.root / "node1.device"
    process.kill()
    backup = device.with_suffix(".backup")
    subprocess.run(["cp", "--sparse=always", device, backup], check=True)
    process.start()
    cluster.until_whole()
    data = rng.randbytes(2 * CHUNK + 5)
    write(data)
    process.kill()
    backup.replace(device)
    process.start()
    process.ready()
    deadline = time.monotonic() + LIMIT_S
    while True:  # while it is synced, too
        with client.open("/old", "rb", 0) as file:
            assert file.read() == data
        if not cluster.broken():
            break
        assert time.monotonic() < deadline, cluster.broken()
    assert differences(client, "/old", 4, 3) == []

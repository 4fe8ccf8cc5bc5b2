"""With every metadata process stopped, open files and KV spaces are read and written (CRAQ case 24)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from chaos_cluster import Cluster
from chaos_hosts import hosts
from chaos_load import Load
from lin_history import Operation

import ffs
from ffs.client.file import File

# A minute under `make soak`; long enough for every lease to end always.
AWAY_S = float(os.environ.get("FFS_METADATA_AWAY_S", "60" if "FFS_SOAK_SECONDS" in os.environ else "20"))
CHUNK, CHUNKS, BLOCK, ROUNDS = 64 << 10, 64, 4096, 20
SETTLED_S = 6.0  # the manager's leases are over by then: three failure timeouts


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with hosts(["meta0", "meta1", *(f"node{at}" for at in range(4))]) as where:
        made = Cluster(tmp_path, where, nodes=4, failure_timeout_ms=2000)
        try:
            made.form()
            yield made
        finally:
            made.close()


def _between(operations: list[Operation], begin_ns: int, end_ns: int) -> dict[str, int]:
    """Successful operations by kind that were called and answered in between."""
    counts = dict.fromkeys(("read", "write", "get", "create"), 0)
    for op in operations:
        if op.called_ns >= begin_ns and op.returned_ns is not None and op.returned_ns <= end_ns:
            counts[op.kind] += 1
    return counts


def _chunks_without(client: ffs.Client, file: File, name: str) -> list[int]:
    """The chunks of a file of CHUNKS chunks that no target of a node holds."""
    status = client.cluster_status()
    node = next(node.id for node in status.nodes if node.name == name)
    apart = {chain.id for chain in status.chains if node not in chain.nodes}
    return [at for at in range(CHUNKS) if file.placement.chain_of_index(at) in apart]


def _rounds(file: File, chunks: list[int]) -> None:
    """Writes and reads each of these chunks many times: none may fail, none may be stale."""
    for number in range(1, ROUNDS + 1):
        for chunk in chunks:
            data = (number << 32 | chunk).to_bytes(8, "little") * (BLOCK // 8)
            assert file.pwrite(data, chunk * CHUNK) == BLOCK
            assert file.pread(BLOCK, chunk * CHUNK) == data


def test_without_metadata_and_then_without_a_server(cluster: Cluster) -> None:
    load = Load(cluster.root, cluster.address, cluster.secret_file, seed=2)
    client = ffs.connect(cluster.address, secret=cluster.secret_file)
    try:
        load.prepare(client)
        file = client.open("/chaos/others", "w+b", 0, chunk_size=CHUNK)
        file.write(bytes(CHUNK * CHUNKS))
        others = _chunks_without(client, file, "node3")
        assert others, [chain.nodes for chain in client.cluster_status().chains]
        load.start()
        time.sleep(2.0)
        for name in cluster.metas:
            cluster.processes[name].pause()
        time.sleep(SETTLED_S)
        settled_ns = time.monotonic_ns()
        time.sleep(AWAY_S - SETTLED_S)
        dies_ns = time.monotonic_ns()
        # One storage server dies as well: its chains wait for the manager, the others go on. The load's
        # threads soon all wait, each for a chain of that server.
        cluster.processes["node3"].kill()
        time.sleep(SETTLED_S)
        _rounds(file, others)
        for name in cluster.metas:
            cluster.processes[name].resume()
        cluster.processes["node3"].start()
        cluster.until_whole()
        time.sleep(1.0)
        outcome = load.finish()
        file.close()
    finally:
        load.close()
        client.close()
    wrong = outcome.judge()
    assert wrong == [], "\n".join([*wrong, *cluster.words()])
    alone = _between(outcome.operations, settled_ns, dies_ns)
    assert min(alone.values()) > 20, (alone, outcome.errors)

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

# A minute under `make soak`; long enough for every lease to end always.
AWAY_S = float(os.environ.get("FFS_METADATA_AWAY_S", "60" if "FFS_SOAK_SECONDS" in os.environ else "20"))
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


def test_without_metadata_and_then_without_a_server(cluster: Cluster) -> None:
    load = Load(cluster.root, cluster.address, cluster.secret_file, seed=2)
    try:
        with ffs.connect(cluster.address, secret=cluster.secret_file) as client:
            load.prepare(client)
        load.start()
        time.sleep(2.0)
        for name in cluster.metas:
            cluster.processes[name].pause()
        time.sleep(SETTLED_S)
        settled_ns = time.monotonic_ns()
        time.sleep(AWAY_S - SETTLED_S)
        dies_ns = time.monotonic_ns()
        # One storage server dies as well: its chains wait for the manager, the others go on.
        cluster.processes["node3"].kill()
        time.sleep(5.0)
        back_ns = time.monotonic_ns()
        for name in cluster.metas:
            cluster.processes[name].resume()
        cluster.processes["node3"].start()
        cluster.until_whole()
        time.sleep(1.0)
        outcome = load.finish()
    finally:
        load.close()
    wrong = outcome.judge()
    assert wrong == [], "\n".join([*wrong, *cluster.words()])
    alone = _between(outcome.operations, settled_ns, dies_ns)
    assert min(alone.values()) > 20, (alone, outcome.errors)
    fewer = _between(outcome.operations, dies_ns, back_ns)
    assert fewer["read"] > 0, (fewer, outcome.errors)

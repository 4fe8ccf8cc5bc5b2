"""A rolling upgrade under load: processes of this build and of one that reports the next version agree."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from chaos_cluster import NEXT_VERSION, Cluster
from chaos_hosts import Loopback
from chaos_load import Load

import ffs


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, Loopback(), nodes=3, failure_timeout_ms=3000)
    try:
        made.form()
        yield made
    finally:
        made.close()


def _only_next(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line of a build that speaks the next version and no other."""
    return subprocess.run(
        [sys.executable, NEXT_VERSION, "ffs.cli", *words],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
        env={
            **os.environ,
            "FFS_ONLY_NEXT_VERSION": "1",
            "FFS_CLUSTER": cluster.address,
            "FFS_CLUSTER_SECRET_FILE": str(cluster.secret_file),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
    )


def test_a_rolling_upgrade_under_load(cluster: Cluster) -> None:
    load = Load(cluster.root, cluster.address, cluster.secret_file, seed=3, workers=2)
    try:
        with ffs.connect(cluster.address, secret=cluster.secret_file) as client:
            load.prepare(client)
        refused = _only_next(cluster, "ls", "/")
        assert refused.returncode != 0
        assert "speaks protocol 1 to 1" in refused.stderr, refused
        load.start()
        time.sleep(1.0)
        for name in (*cluster.metas, *cluster.nodes):
            process = cluster.processes[name]
            process.end()
            process.start(next_version=True)
            process.ready()
            cluster.until_whole()
        time.sleep(1.0)
        done = _only_next(cluster, "cat", "/chaos/f0")
        assert done.returncode == 0, done.stderr
        # And back: the old build takes the new one's place.
        cluster.processes["node0"].end()
        cluster.processes["node0"].start()
        cluster.until_whole()
        outcome = load.finish()
    finally:
        load.close()
    wrong = outcome.judge()
    assert wrong == [], "\n".join([*wrong, *cluster.words()])
    kinds = {kind: sum(op.kind == kind for op in outcome.operations) for kind in ("read", "write", "get")}
    assert min(kinds.values()) > 50, (kinds, outcome.errors)

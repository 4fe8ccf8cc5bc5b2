"""Real clusters under real faults: acknowledged data stays, reads are linearizable, everything serves again.

A short run is a part of `make test`; FFS_SOAK_SECONDS makes it one of that length from a new seed. A failure
prints the seed, the faults in order and where the histories lie. docs/faults.md.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from chaos_cluster import Cluster
from chaos_hosts import hosts
from chaos_load import Load, Outcome
from chaos_nemesis import Nemesis

import ffs

SOAK_S = float(os.environ.get("FFS_SOAK_SECONDS", "0"))
FAULTS_S = SOAK_S or 30.0
SEED = int(os.environ.get("FFS_CHAOS_SEED", "0")) or (time.time_ns() % 2**32 if SOAK_S else 1)
FAILURE_TIMEOUT_MS = 2000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Five storage servers and two metadata processes, with three-way chains."""
    names = ["meta0", "meta1", *(f"node{at}" for at in range(5))]
    with hosts(names) as where:
        made = Cluster(tmp_path, where, nodes=5, failure_timeout_ms=FAILURE_TIMEOUT_MS)
        try:
            made.form()
            yield made
        finally:
            made.close()


def judge(outcome: Outcome, nemesis: Nemesis, cluster: Cluster) -> None:
    wrong = outcome.judge()
    if wrong:
        text = "\n".join([*wrong, f"seed {SEED}; faults:", *nemesis.log, f"histories: {cluster.root}"])
        pytest.fail(text)


def test_a_fault_every_second(cluster: Cluster) -> None:
    nemesis = Nemesis(cluster, SEED)
    load = Load(cluster.root, cluster.address, cluster.secret_file, seed=SEED)
    try:
        with ffs.connect(cluster.address, secret=cluster.secret_file) as client:
            load.prepare(client)
            load.start()
            time.sleep(1.0)
            nemesis.run(FAULTS_S)
            healed_s = cluster.until_whole()
            time.sleep(1.0)
            outcome = load.finish()
    finally:
        load.close()
    judge(outcome, nemesis, cluster)
    kinds = {kind: sum(op.kind == kind for op in outcome.operations) for kind in ("read", "write", "get")}
    assert min(kinds.values()) > 50, kinds  # the load was one
    print(
        json.dumps(
            {
                "case": "chaos",
                "seed": SEED,
                "faults": len(nemesis.log),
                "seconds": FAULTS_S,
                "operations": len(outcome.operations),
                "errors": outcome.errors,
                "healed_s": round(healed_s, 2),
                "longest_read_ms": round(outcome.longest_ms(("read", "get"))),
                "longest_write_ms": round(outcome.longest_ms(("write", "create"))),
                "failure_timeout_ms": FAILURE_TIMEOUT_MS,
            }
        )
    )

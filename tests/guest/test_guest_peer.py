"""A node on a host of its own (the second guest) dies as by a power cut: no packet says that it is gone."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_cluster import Cluster, until
from chaos_hosts import Loopback

import ffs
from ffs.proto import cluster as proto
from ffs.proto.commands import ChainView

SHARED = Path("/mnt/guest")  # of both guests
HERE, THERE = "10.98.0.1", "10.98.0.2"
CHUNK = 64 << 10
SLOTS = 40
SEED = 13

pytestmark = pytest.mark.skipif(not Path("/sys/class/net/eth0").exists(), reason="there is no second guest")


class ThisGuest(Loopback):
    def address(self, host: str) -> str:
        return HERE


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, ThisGuest(), nodes=1, metas=1, failure_timeout_ms=4000)
    try:
        for name in ("meta0", "node0"):
            made.processes[name].start()
            made.processes[name].ready()
        shutil.copy(made.secret_file, SHARED / "secret")
        (SHARED / "secret").chmod(0o600)
        ready = SHARED / "node1.ready"
        order = SHARED / "peer-order.new"
        order.write_text(
            f"exec {sys.executable} -m storage_server.server --metadata={made.address} --name=node1"
            f" --dir=/scratch/node1 --listen={THERE} --device=/scratch/node1.device:512M --pool-size=48M"
            f" --targets-per-device=16 --no-local --start-timeout-s=60 --ready-file={ready}"
            f" --cluster-secret-file={SHARED}/secret\n"
        )
        order.rename(SHARED / "peer-order")
        until(lambda: ready.exists() and json.loads(ready.read_text() or "null"), "the other guest's node")
        with made.pool() as pool:
            pool.call(proto.CreateTable(name="default", replicas=2, chains_per_device=2, wait_nodes=2))
        made.until_whole()
        yield made
    finally:
        made.close()


def test_what_was_acknowledged_outlives_a_host(cluster: Cluster) -> None:
    rng = random.Random(SEED)
    wanted = bytearray(SLOTS * CHUNK)
    with (
        ffs.connect(cluster.address, secret=cluster.secret_file, request_timeout=120) as client,
        client.open("/file", "w+b", 0, chunk_size=CHUNK) as file,
    ):
        for number in range(SLOTS):
            if number == SLOTS // 2:
                (SHARED / "kill-peer").touch()
            data = rng.randbytes(CHUNK)
            file.pwrite(data, number * CHUNK)
            wanted[number * CHUNK : (number + 1) * CHUNK] = data
        assert file.pread(len(wanted), 0) == wanted
        until(lambda: all(len(serving(chain)) == 1 for chain in client.cluster_status().chains), "it is gone")
        assert file.pread(len(wanted), 0) == wanted
        for number in range(0, SLOTS, 7):
            file.pwrite(b"after" * 100, number * CHUNK)
            wanted[number * CHUNK : number * CHUNK + 500] = b"after" * 100
        assert file.pread(len(wanted), 0) == wanted


def serving(chain: ChainView) -> list[int]:
    states = zip(chain.members, chain.states, strict=True)
    return [member for member, state in states if state == proto.TargetState.SERVING]

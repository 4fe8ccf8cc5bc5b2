"""The real processes: ffs-meta and ffs-storage on file devices, started, killed, started again.

Needs the native library (make build). Times are only waited for, never asserted.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from real_cluster import DEVICE_BYTES, LIMIT_S, Cluster, Process, form, until

import ffs
from ffs.errors import NotPrimary, Unauthenticated, Unreachable
from ffs.proto import cluster as proto
from ffs.rpc.address import parse_addresses
from ffs.rpc.pool import Pool


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


def put(cluster: Cluster, path: str, data: bytes) -> None:
    with ffs.connect(cluster.address) as client, client.open(path, "wb") as file:
        file.write(data)


def get(cluster: Cluster, path: str) -> bytes:
    with ffs.connect(cluster.address) as client, client.open(path, "rb") as file:
        return cast(bytes, file.read())


def test_forms_serves_and_survives_every_kind_of_end(cluster: Cluster) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    data = random.Random(seed).randbytes(5_000_003)
    form(cluster)
    ready = cluster.nodes[0].ready()
    assert ready["incarnation"] == 1
    with urllib.request.urlopen(f"http://{ready['metrics']}/metrics") as reply:
        text = reply.read().decode()
    assert 'ffs_reads_total{shard="0"} ' in text
    assert text.count("ffs_target_state{") == 64
    put(cluster, "/a", data)
    assert get(cluster, "/a") == data
    before = {chain.id: (chain.term, chain.counter) for chain in cluster.status().chains}

    cluster.nodes[1].kill()
    cluster.start_nodes(1)
    after = {chain.id: (chain.term, chain.counter) for chain in cluster.until_serving().chains}
    assert all(after[chain] > before[chain] for chain in before)
    assert get(cluster, "/a") == data
    put(cluster, "/b", data[::-1])

    for node in cluster.nodes.values():
        node.kill()
    cluster.start_nodes(2, 0, 1)
    cluster.until_serving()
    assert get(cluster, "/a") == data
    assert get(cluster, "/b") == data[::-1]

    for process in [*cluster.nodes.values(), *cluster.metas]:
        process.kill()
    cluster.start_meta()
    cluster.start_nodes(0, 1, 2)
    status = cluster.until_serving()
    assert {node.name: node.incarnation for node in status.nodes} == {"node0": 3, "node1": 4, "node2": 3}
    assert get(cluster, "/b") == data[::-1]

    for process in [*cluster.nodes.values(), *cluster.metas]:
        process.stop()
    cluster.start_meta()
    cluster.start_nodes(0, 1, 2)
    cluster.until_serving()
    assert get(cluster, "/a") == data


def test_one_node_away_is_named_and_reads_go_on(cluster: Cluster) -> None:
    form(cluster)
    put(cluster, "/a", b"x" * 3_000_000)
    cluster.nodes[2].kill()

    def noticed() -> bool:
        return [node.name for node in cluster.status().nodes if not node.alive] == ["node2"]

    until(noticed, "the node is marked")
    status = cluster.status()
    assert all(chain.readable for chain in status.chains)
    assert all("isn't there" in chain.reason for chain in status.chains)
    assert get(cluster, "/a") == b"x" * 3_000_000
    put(cluster, "/while-away", b"z" * 3_000_000)  # the chains go on without it
    cluster.start_nodes(2)
    cluster.until_serving()
    put(cluster, "/b", b"y" * 3_000_000)


def test_space_comes_back_and_truncation_cuts(cluster: Cluster) -> None:
    form(cluster)
    data = os.urandom(9_000_001)

    def used() -> int:
        return sum(
            device.capacity_bytes - device.free_bytes
            for node in cluster.status().nodes
            for device in node.devices
        )

    empty = used()
    put(cluster, "/a", data)
    until(lambda: used() >= empty + 3 * len(data), "space is used")
    with ffs.connect(cluster.address) as client:
        client.truncate("/a", 1_000_001)
    assert get(cluster, "/a") == data[:1_000_001]
    until(lambda: used() <= empty + 3 * (2 << 20), "cut chunks are given back")
    with ffs.connect(cluster.address) as client:
        client.remove("/a")
    until(lambda: used() <= empty, "space is back")


def test_a_second_metadata_process_takes_over(cluster: Cluster) -> None:
    cluster.start_meta(0)
    cluster.start_meta(1)
    cluster.start_nodes(0, 1)
    cluster.create_table("default", 2, 2)
    cluster.until_serving()
    put(cluster, "/a", b"one")
    primary = cluster.status().primary
    at = cluster.addresses.index(primary)
    cluster.metas[at].kill()
    cluster.until_serving()
    assert cluster.status().primary == cluster.addresses[1 - at]
    assert get(cluster, "/a") == b"one"
    put(cluster, "/b", b"two")
    cluster.start_meta(at)
    with (
        Pool(parse_addresses(cluster.addresses[at]), role="admin") as pool,
        pytest.raises(NotPrimary, match=cluster.addresses[1 - at]),
    ):
        pool.call(proto.GetStatus(), timeout_s=0.2)
    cluster.metas[1 - at].stop()  # hands the lease over
    cluster.until_serving()
    assert get(cluster, "/b") == b"two"


def test_a_stopped_manager_is_replaced_and_can_do_nothing_when_it_goes_on(cluster: Cluster) -> None:
    """SIGSTOP looks like a hung host: connections stay open, nothing answers."""
    cluster.start_meta(0)
    cluster.start_meta(1)
    cluster.start_nodes(0, 1)
    cluster.create_table("default", 2, 2)
    status = cluster.until_serving()
    at = cluster.addresses.index(status.primary)
    stopped = cluster.metas[at].popen
    stopped.send_signal(signal.SIGSTOP)
    other = cluster.addresses[1 - at]
    with Pool(parse_addresses(other), role="admin", timeout_s=LIMIT_S) as pool:

        def taken_over() -> bool:
            reply = cast(proto.StatusReply, pool.call(proto.GetStatus()))
            return reply.primary == other and all(chain.writable for chain in reply.chains)

        until(taken_over, "the other one manages, and nodes report to it")
        term = cast(proto.StatusReply, pool.call(proto.GetStatus())).term
        assert term > status.term
        stopped.send_signal(signal.SIGCONT)
        with Pool(parse_addresses(cluster.addresses[at]), role="admin") as old:

            def deposed() -> bool:
                if stopped.poll() is not None:
                    return True  # it held the store's writer lock, and was killed for it
                try:
                    old.call(proto.GetStatus(), timeout_s=0.2)
                except (NotPrimary, Unreachable):
                    return True
                return False

            until(deposed, "the old one knows")
        assert cast(proto.StatusReply, pool.call(proto.GetStatus())).term == term


def test_storage_goes_on_without_metadata(cluster: Cluster) -> None:
    form(cluster)
    with ffs.connect(cluster.address) as client:
        with client.open("/a", "wb") as file:
            file.write(b"z" * 4_000_000)
        with client.open("/a", "rb", buffering=0) as file:
            assert file.read(10) == b"z" * 10
            cluster.metas[0].kill()
            assert file.read(3_000_000) == b"z" * 3_000_000
            cluster.start_meta()
            cluster.until_serving()
            assert file.read(100) == b"z" * 100
    assert all(node.popen.poll() is None for node in cluster.nodes.values())


def test_secret_cluster(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"correct horse battery staple\n")
    secret.chmod(0o600)
    made = Cluster(tmp_path, secret)
    try:
        form(made, 1)
        with Pool(parse_addresses(made.address)) as pool, pytest.raises(Unauthenticated):
            pool.call(proto.GetStatus())
        wrong = tmp_path / "wrong"
        wrong.write_bytes(b"incorrect horse battery staple\n")
        wrong.chmod(0o600)
        made._secret = [f"--cluster-secret-file={wrong}"]
        assert "cluster secret" in made.start_node(5).refused()
        made._secret = []
        assert "--cluster-secret-file" in made.start_node(6).refused()
        secret.chmod(0o640)
        made._secret = [f"--cluster-secret-file={secret}"]
        assert f"chmod 600 {secret}" in made.start_node(7).refused()
        refused = Process(
            "metadata.server",
            [f"--store=lmdb://{tmp_path}/no", "--listen=127.0.0.1:0", *made._secret],
            tmp_path / "no.ready",
            tmp_path / "no.log",
        )
        assert f"chmod 600 {secret}" in refused.refused()
    finally:
        made.end()


def test_metadata_refusals(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_meta()

    def meta(*arguments: str) -> str:
        return Process("metadata.server", list(arguments), tmp_path / "r", tmp_path / "other.log").refused()

    store = f"--store=lmdb://{tmp_path}/other"
    assert f"can't listen on {cluster.address}" in meta(store, f"--listen={cluster.address}")
    assert "cluster secret file" in meta(store, "--listen=0.0.0.0:0")
    assert "isn't host:port" in meta(store, "--listen=nonsense")
    assert "lmdb://DIRECTORY" in meta("--store=sqlite://x", "--listen=127.0.0.1:0")
    assert "nowhere" in meta(store, "--listen=127.0.0.1:0", f"--cluster-secret-file={tmp_path}/nowhere")


def test_storage_refusals(cluster: Cluster, tmp_path: Path) -> None:
    form(cluster, 1)
    (tmp_path / "foreign").write_bytes(os.urandom(1 << 20) * 64)
    (tmp_path / "damaged").write_bytes((tmp_path / "device0").read_bytes()[: 64 << 20])
    with open(tmp_path / "blank", "wb") as file:
        file.truncate(DEVICE_BYTES)

    def node(device: str, *extra: str, at: int = 7) -> str:
        return cluster.start_node(at, device=device, extra=extra).refused()

    assert "give PATH:SIZE" in node(f"{tmp_path}/none")
    assert "doesn't exist" in node(f"{tmp_path}/no/where:1G")
    assert "a block device or a file" in node(str(tmp_path))
    assert "--format-if-new" in node(f"{tmp_path}/blank")
    small = node(f"{tmp_path}/small:4M")
    assert "small" in small
    assert not (tmp_path / "small").exists()
    assert not (tmp_path / "small.new").exists()
    before = (tmp_path / "foreign").read_bytes()
    assert f"{tmp_path}/foreign" in node(f"{tmp_path}/foreign")
    assert f"{tmp_path}/foreign" in node(f"{tmp_path}/foreign", "--format-if-new")
    assert (tmp_path / "foreign").read_bytes() == before
    in_use = node(f"{tmp_path}/device0")
    assert "use" in in_use or "belongs to node node0, which is alive" in in_use
    assert "already runs" in cluster.start_node(0).refused()
    assert [seen.name for seen in cluster.status().nodes] == ["node0"]  # none of them has left a node behind
    cluster.start_node(8, device=f"{tmp_path}/blank", extra=("--format-if-new",)).ready()
    assert "another --name" in cluster.start_node(9, name="node8").refused()
    assert all(chain.writable for chain in cluster.status().chains)


def test_foreign_clusters_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    """S11: neither a node's directory nor a device joins another cluster."""
    form(cluster, 1)
    cluster.nodes[0].stop()
    other_root = tmp_path / "other"
    other_root.mkdir()
    other = Cluster(other_root)
    try:
        other.start_meta()
        mine, theirs = cluster.metas[0].ready()["cluster"], other.metas[0].ready()["cluster"]
        cluster.addresses, addresses = other.addresses, cluster.addresses
        line = cluster.start_node(0).refused()
        assert mine in line
        assert theirs in line
        line = cluster.start_node(3, device=f"{tmp_path}/device0").refused()
        assert f"{tmp_path}/device0" in line
        assert mine in line
        cluster.addresses = addresses
        cluster.start_nodes(0)
        cluster.until_serving()
    finally:
        other.end()


def test_unreachable_metadata(cluster: Cluster) -> None:
    cluster.addresses = ["127.0.0.1:1"]
    line = cluster.start_node(0, extra=("--start-timeout-s=0.5",)).refused()
    assert "127.0.0.1:1" in line
    assert "check the address" in line
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        ffs.connect("127.0.0.1:1")


def test_a_replaced_process_ends_itself(cluster: Cluster) -> None:
    """A node whose directory was copied: two processes as one node. The older one ends, it doesn't fight."""
    form(cluster, 1)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(Pool(parse_addresses(cluster.address), role="storage"))
        uuid = bytes.fromhex(json.loads((cluster.root / "node0" / "node.json").read_text())["uuid"])
        pool.call(proto.RegisterNode(name="node0", uuid=uuid, host_id="x", devices=()))
    assert cluster.nodes[0].popen.wait(LIMIT_S) == 1
    assert "isn't the registered one" in cluster.nodes[0].stderr()


def test_stopping_metadata_twice_is_the_same_as_once(cluster: Cluster) -> None:
    process = cluster.start_meta()
    process.popen.send_signal(signal.SIGTERM)
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.wait(LIMIT_S) == 0, process.stderr()

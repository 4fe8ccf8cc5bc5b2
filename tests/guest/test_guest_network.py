"""A cluster on raw NVMe devices whose cables lose packets and one of whose devices is slow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_cluster import Cluster, until
from chaos_hosts import Namespaces
from chaos_replicas import differences
from guest_links import Links
from guest_mapper import SECTOR, Mapped, linear, run, until_free

import ffs
from ffs._native.device import device_check, device_survey

HOSTS = ["meta0", "node0", "node1"]
DEVICES = ["/dev/mapper/slow", "/dev/disk-block4096"]
SIZE = 1 << 30
CHUNK = 64 << 10
CHUNKS = 24
SEED = 7


@pytest.fixture(scope="module")
def slow() -> Iterator[Mapped]:
    for path in ("/dev/disk-block512", "/dev/disk-block4096"):
        until_free(path)
        run("blkdiscard", path)
    with Mapped("slow", linear("/dev/disk-block512", 0, SIZE)) as device:
        yield device


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    made = Namespaces(HOSTS)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def cluster(slow: Mapped, hosts: Namespaces, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root: Path = tmp_path_factory.mktemp("cluster")
    made = Cluster(root, hosts, nodes=2, metas=1, failure_timeout_ms=20000, devices=DEVICES)
    try:
        made.form(replicas=2, chains_per_device=2)
        yield made
    finally:
        made.close()
        # The kernel takes the rings of the dead apart in the background, and their files with them.
        until(lambda: all(device_survey(path).recovered for path in DEVICES), "the devices are free")


@pytest.fixture
def client(cluster: Cluster) -> Iterator[ffs.Client]:
    with ffs.connect(cluster.address, secret=cluster.secret_file, request_timeout=120) as connected:
        yield connected


def hedge_wins(client: ffs.Client) -> int:
    return sum(staged.ring.stats().hedge_wins for staged in client.core.session().rings._idle)


def test_writes_and_reads_are_right_while_one_packet_in_twenty_is_lost(
    client: ffs.Client, hosts: Namespaces
) -> None:
    rng = random.Random(SEED)
    wanted = bytearray(rng.randbytes(CHUNKS * CHUNK))
    links = Links(hosts, HOSTS)
    links.worsen("delay", "2ms", "1ms", "loss", "5%")
    try:
        with client.open("/lossy", "w+b", 0, chunk_size=CHUNK) as file:
            file.pwrite(bytes(wanted), 0)
            for _ in range(20):
                at, size = rng.randrange(len(wanted) - CHUNK), rng.randrange(1, CHUNK)
                if rng.random() < 0.5:
                    data = rng.randbytes(size)
                    file.pwrite(data, at)
                    wanted[at : at + size] = data
                assert file.pread(size, at) == wanted[at : at + size]
            assert file.pread(len(wanted), 0) == wanted
        assert links.dropped() > 10
    finally:
        links.mend()
    assert differences(client, "/lossy", CHUNKS, 2) == []


def test_reads_around_a_slow_device_are_hedged(client: ffs.Client, slow: Mapped) -> None:
    data = random.Random(SEED).randbytes(CHUNKS * CHUNK)
    with client.open("/hedged", "w+b", 0, chunk_size=CHUNK) as file:
        file.pwrite(data, 0)
        below = "/dev/disk-block512 0"
        slow.load(f"0 {SIZE // SECTOR} delay {below} 2000 {below} 0")
        try:
            for at in range(0, len(data), CHUNK):
                assert file.pread(CHUNK, at) == data[at : at + CHUNK]
        finally:
            slow.load(linear("/dev/disk-block512", 0, SIZE))
    assert hedge_wins(client) > 0


def test_what_is_on_the_devices_afterwards_is_whole(cluster: Cluster) -> None:
    for process in cluster.processes.values():
        process.kill()
    until(lambda: all(device_survey(path).recovered for path in DEVICES), "the devices are free")
    for path in DEVICES:
        until_free(path)
        report = device_check(path, data=True)
        assert (report.verdict, report.problems) == ("clean", ()), report.reason
        assert report.state.chunks > 0

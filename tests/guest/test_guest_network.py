"""A cluster on raw NVMe devices: what the tests of all transports do over RDMA, cables that lose packets, a
device that is slow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_transports
from chaos_cluster import Cluster, until
from chaos_hosts import Namespaces
from chaos_replicas import differences
from guest_links import Links
from guest_mapper import SECTOR, Mapped, linear, run, until_free

import ffs
from ffs._native.device import device_check, device_survey
from ffs.rpc.secret_file import SECRET_VARIABLE

HOSTS = ["meta0", "node0", "node1"]
DEVICES = ["/dev/mapper/slow", "/dev/disk-cluster4096"]
SIZE = 1 << 30
CHUNK = 64 << 10
CHUNKS = 24
SEED = 7


@pytest.fixture(scope="module")
def slow() -> Iterator[Mapped]:
    for path in ("/dev/disk-cluster512", "/dev/disk-cluster4096"):
        until_free(path)
        run("blkdiscard", path)
    with Mapped("slow", linear("/dev/disk-cluster512", 0, SIZE)) as device:
        yield device


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    made = Namespaces(HOSTS)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def hosted(slow: Mapped, hosts: Namespaces, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root: Path = tmp_path_factory.mktemp("cluster")
    made = Cluster(root, hosts, nodes=2, metas=1, failure_timeout_ms=10000, devices=DEVICES)
    try:
        made.form(replicas=2, chains_per_device=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SECRET_VARIABLE, str(made.secret_file))
            yield made
    finally:
        made.close()
        # The kernel takes the rings of the dead apart in the background, and their files with them.
        until(lambda: all(device_survey(path).recovered for path in DEVICES), "the devices are free")


@pytest.fixture
def client(hosted: Cluster) -> Iterator[ffs.Client]:
    # Over the cables: rxe0 goes around them.
    with ffs.connect(hosted.address, request_timeout=120, transport="tcp") as connected:
        yield connected


# --- the tests of all transports, over RDMA ---------------------------------------------------------


class Nodes:
    """What they want of a cluster."""

    def __init__(self, hosted: Cluster) -> None:
        self._hosted = hosted

    def kill_node(self, index: int) -> None:
        self._hosted.processes[f"node{index}"].kill()

    def start_node(self, index: int) -> None:
        until_free(DEVICES[index])
        self._hosted.processes[f"node{index}"].start()
        self._hosted.until_whole()


@pytest.fixture
def cluster(hosted: Cluster) -> Nodes:
    return Nodes(hosted)


@pytest.fixture
def address(hosted: Cluster) -> str:
    return hosted.address


@pytest.fixture
def home(client: ffs.Client) -> str:
    path = f"/{next(_numbers)}"
    client.mkdir(path)
    return path


_numbers = itertools.count()
over = test_transports.over
test_files_and_rings = test_transports.test_files_and_rings
test_a_server_is_killed_in_the_middle = test_transports.test_a_server_is_killed_in_the_middle
test_a_child_of_fork_has_connections_of_its_own = (
    test_transports.test_a_child_of_fork_has_connections_of_its_own
)

# --- cables and devices that are worse ---------------------------------------------------------------


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
        below = "/dev/disk-cluster512 0"
        slow.load(f"0 {SIZE // SECTOR} delay {below} 2000 {below} 0")
        try:
            for at in range(0, len(data), CHUNK):
                assert file.pread(CHUNK, at) == data[at : at + CHUNK]
        finally:
            slow.load(linear("/dev/disk-cluster512", 0, SIZE))
    assert hedge_wins(client) > 0


def test_what_is_on_the_devices_afterwards_is_whole(hosted: Cluster) -> None:
    for process in hosted.processes.values():
        process.kill()
    until(lambda: all(device_survey(path).recovered for path in DEVICES), "the devices are free")
    for path in DEVICES:
        until_free(path)
        report = device_check(path, data=True)
        assert (report.verdict, report.problems) == ("clean", ()), report.reason
        assert report.state.chunks > 0

"""A node on a host of its own (the second guest) dies as by a power cut: no packet says that it is gone.

It dies once: a client over TCP and one over RDMA are in the middle of reads and writes then, and each test
looks at what became of one of them.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from chaos_cluster import Cluster, until
from chaos_hosts import Loopback
from guest_mapper import run
from numpy.typing import NDArray

import ffs
from ffs._native.ring import RingStats
from ffs.proto import cluster as proto

SHARED = Path("/mnt/guest")  # of both guests
HERE, THERE = "10.98.0.1", "10.98.0.2"
RXE1 = "rdma link add rxe1 type rxe netdev eth0"  # over the cable between them
CHUNK = 64 << 10
SLOTS = 40
POKES = 8  # chunks of all chains
SEED = 13

pytestmark = pytest.mark.skipif(not Path("/sys/class/net/eth0").exists(), reason="there is no second guest")


class ThisGuest(Loopback):
    def address(self, host: str) -> str:
        return HERE


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Table "default": two copies of everything, one on each guest. Table "single": one, here or there."""
    run(*RXE1.split())  # for good: who has opened a device keeps it
    root = tmp_path_factory.mktemp("cluster")
    made = Cluster(
        root, ThisGuest(), nodes=1, metas=1, failure_timeout_ms=15000, node_options=["--rdma=rxe1"]
    )
    try:
        for name in ("meta0", "node0"):
            made.processes[name].start()
        made.processes["meta0"].ready()
        shutil.copy(made.secret_file, SHARED / "secret")
        (SHARED / "secret").chmod(0o600)
        ready = SHARED / "node1.ready"
        order = SHARED / "peer-order.new"
        order.write_text(
            f"{RXE1}\n"
            f"exec {sys.executable} -m storage_server.server --metadata={made.address} --name=node1"
            f" --dir=/scratch/node1 --listen={THERE} --device=/scratch/node1.device:512M --pool-size=48M"
            f" --targets-per-device=16 --no-local --rdma=rxe1 --start-timeout-s=60 --ready-file={ready}"
            f" --cluster-secret-file={SHARED}/secret\n"
        )
        order.rename(SHARED / "peer-order")
        made.processes["node0"].ready()
        until(lambda: ready.exists() and json.loads(ready.read_text() or "null"), "the other guest's node")
        with made.pool() as pool:
            for name, replicas in (("default", 2), ("single", 1)):
                pool.call(proto.CreateTable(name=name, replicas=replicas, chains_per_device=2, wait_nodes=2))
        made.until_whole()
        yield made
    finally:
        made.close()


class Moved(NamedTuple):
    """What a client did. Counters are those of its ring of reads and of that of writes."""

    wanted: NDArray[Any]  # a row a chunk: what it had acknowledged
    before: tuple[RingStats, RingStats]  # the death
    after: tuple[RingStats, RingStats]


class Mover:
    """A file of SLOTS chunks, and what it must hold. Every request must end well: elsewhere, if need be."""

    def __init__(self, file: Any, iov: ffs.Iov, reads: ffs.Ior, writes: ffs.Ior) -> None:
        self._file, self._iov, self._reads, self._writes = file, iov, reads, writes
        self._rng = np.random.default_rng(SEED)
        self.wanted = np.zeros((SLOTS, CHUNK), np.uint8)
        self._poked = 0  # extra writes under way

    def stats(self) -> tuple[RingStats, RingStats]:
        return self._reads.stats(), self._writes.stats()

    def turn(self, written: NDArray[Any], read: NDArray[Any]) -> None:
        """Both together make all chunks; all of them are in flight at once."""
        self.wanted[written] = self._rng.integers(0, 256, (len(written), CHUNK), np.uint8)
        memory = self._iov.numpy()[: SLOTS * CHUNK].reshape(SLOTS, CHUNK)
        memory[written] = self.wanted[written]
        memory[read] = 0
        for ring, slots in ((self._writes, written), (self._reads, read)):
            at = slots * CHUNK
            assert ring.prepare_many(self._file, at, self._iov, at, np.full(len(slots), CHUNK)) == len(slots)
            ring.submit()
        for ring, slots in ((self._writes, written), (self._reads, read)):
            count = 0
            while count < len(slots):
                completed = ring.wait(1, 0.2)
                for done in completed:
                    assert (done.result, done.error) == (CHUNK, None)
                    count += done.userdata < SLOTS
                    self._poked -= done.userdata >= SLOTS
                if not completed and not self._poked:
                    self._poke()
        while self._poked:
            for done in self._writes.wait(1):
                assert (done.result, done.error) == (CHUNK, None)
                self._poked -= 1
        assert np.array_equal(memory, self.wanted)

    def _poke(self) -> None:
        """Everybody is silent: a write more for each chain, of what is there already. By what it sends alone
        does a queue pair learn that the other side is gone."""
        self._poked = POKES
        at = np.arange(POKES) * CHUNK
        self._iov.numpy()[SLOTS * CHUNK :] = self.wanted[:POKES].reshape(-1)
        rows, sizes = np.arange(POKES) + SLOTS, np.full(POKES, CHUNK)
        assert self._writes.prepare_many(self._file, at, self._iov, rows * CHUNK, sizes, rows) == POKES
        self._writes.submit()

    def mixed_turn(self) -> None:
        order = self._rng.permutation(SLOTS)
        self.turn(order[: SLOTS // 4], order[SLOTS // 4 :])


def move(client: ffs.Client, path: str, begun: threading.Event, gone: threading.Event) -> Moved:
    """Writes and reads until the other host has been `gone` for a whole turn."""
    with (
        client.open(path, "w+b", 0, chunk_size=CHUNK) as file,
        ffs.Iov((SLOTS + POKES) * CHUNK) as iov,
        ffs.Ior(client, 64, "read") as reads,
        ffs.Ior(client, 64, "write") as writes,
    ):
        mover = Mover(file, iov, reads, writes)
        mover.turn(np.arange(SLOTS), np.arange(0))
        mover.turn(np.arange(0), np.arange(SLOTS))
        before = mover.stats()
        begun.set()
        while not gone.is_set():
            mover.mixed_turn()
        mover.mixed_turn()
        return Moved(mover.wanted, before, mover.stats())


class Both:
    """The clients of both transports, and the death in the middle."""

    def __init__(self, cluster: Cluster) -> None:
        self.clients = {
            name: ffs.connect(
                cluster.address, secret=cluster.secret_file, transport=name, rdma="rxe1", hedge_percent=0
            )
            for name in ("tcp", "rdma")
        }
        # Not the time limit of a try but the queue pair is to notice.
        self.clients["rdma"].core.session()._native_options["try_timeout_ms"] = 60_000
        self.results: dict[str, Future[Moved]] = {}

    def work(self) -> None:
        gone = threading.Event()
        begun = {name: threading.Event() for name in self.clients}
        with ThreadPoolExecutor(len(self.clients)) as threads:
            for name, client in self.clients.items():
                with client.open(f"/{name}-single", "wb", 0, chunk_size=CHUNK, table="single") as file:
                    file.write(bytes([7]) * (SLOTS * CHUNK))
                self.results[name] = threads.submit(move, client, f"/{name}", begun[name], gone)
            try:
                until(lambda: all(each.is_set() for each in begun.values()) or self.failed(), "they work")
                (SHARED / "kill-peer").touch()
                until(self.one_is_left, "the manager knows that it is gone")
            finally:
                gone.set()
            wait(self.results.values())

    def failed(self) -> bool:
        return any(result.done() for result in self.results.values())

    def one_is_left(self) -> bool:
        return all(len(serving(chain)) < 2 for chain in self.clients["tcp"].cluster_status().chains)


@pytest.fixture(scope="module")
def both(cluster: Cluster) -> Iterator[Both]:
    made = Both(cluster)
    try:
        made.work()
        yield made
    finally:
        for client in made.clients.values():
            client.close()


@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_what_was_acknowledged_outlives_a_host(both: Both, transport: str) -> None:
    moved = both.results[transport].result()
    for stats in moved.before:
        links = {"tcp": stats.tcp_links, "local": stats.local_links, "rdma": stats.rdma_links}
        assert links == {"tcp": 0, "local": 0, "rdma": 0} | {transport: 2}
    # What was under way had to be asked of somebody else.
    assert all(
        after.retries > before.retries for before, after in zip(moved.before, moved.after, strict=True)
    )
    if transport == "rdma":
        assert moved.before[0].bytes_copied == 0, "data came through messages instead of RDMA WRITE"
        assert sum(stats.rdma_breaks for stats in moved.after) > 0  # before the manager knew
    whole = moved.wanted.tobytes()
    with both.clients[transport].open(f"/{transport}", "r+b", 0) as file:
        assert file.pread(len(whole), 0) == whole
        file.pwrite(b"after" * 100, 5)
        assert file.pread(507, 0) == whole[:5] + b"after" * 100 + whole[505:507]


@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_what_had_one_copy_there_is_said_to_be_unavailable(both: Both, transport: str) -> None:
    both.results[transport].result()
    kept = lost = 0
    with both.clients[transport].open(f"/{transport}-single", "r+b", 0) as file:
        for number in range(SLOTS):
            if kept and lost:
                break
            try:
                assert file.pread(CHUNK, number * CHUNK) == bytes([7]) * CHUNK
                kept += 1
            except ffs.ChainUnavailable:
                with pytest.raises(ffs.ChainUnavailable):
                    file.pwrite(b"x", number * CHUNK)
                lost += 1
    assert kept > 0
    assert lost > 0


def serving(chain: proto.ChainStatus) -> list[int]:
    states = zip(chain.members, chain.states, strict=True)
    return [member for member, state in states if state == proto.TargetState.SERVING]

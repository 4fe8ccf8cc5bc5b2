"""What devices do to replicas, on real processes: power cuts, files that move, bits that flip."""

from __future__ import annotations

import os
import random
import threading
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from chaos_cluster import Cluster, until
from chaos_hosts import Loopback
from chaos_replicas import differences, replicas

import ffs
from ffs.errors import FfsError
from ffs.proto.commands import ClusterReply, GetCluster, TargetView

CHUNK = 64 << 10
BLOCK = 16 << 10
SLOTS = 24
SEED = 11


class Writer(threading.Thread):
    """Overwrites slots of its own file until the store is gone; knows what was acknowledged."""

    def __init__(self, cluster: Cluster, path: str, seed: int, first: int) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self.path = path
        self._random = random.Random(seed)
        self.tried = first
        self.ended: Exception | None = None
        self.acknowledged = dict.fromkeys(range(SLOTS), 0)
        self.open: dict[int, set[int]] = {slot: set() for slot in range(SLOTS)}

    def run(self) -> None:
        try:
            with (
                ffs.connect(
                    self._cluster.address, secret=self._cluster.secret_file, request_timeout=5.0
                ) as client,
                client.open(self.path, "r+b", 0) as file,
            ):
                while True:
                    slot = self._random.randrange(SLOTS)
                    self.tried += 1
                    self.open[slot].add(self.tried)
                    file.pwrite(content(self.tried), slot * BLOCK)
                    self.acknowledged[slot] = self.tried
                    self.open[slot].clear()
        except (FfsError, OSError) as error:
            self.ended = error  # all of it was killed

    def has_written(self, least: int) -> bool:
        assert self.is_alive(), self.ended
        return self.tried > least

    def wrong(self, client: ffs.Client) -> list[str]:
        """Slots that hold neither what was acknowledged last nor what was under way since."""
        found = []
        with client.open(self.path, "rb", 0) as file:
            for slot in range(SLOTS):
                held = file.pread(BLOCK, slot * BLOCK)
                version = int.from_bytes(held[:8], "little")
                possible = {self.acknowledged[slot], *self.open[slot]}
                if held != content(version) or version not in possible:
                    found.append(f"{self.path} slot {slot}: {version} instead of {sorted(possible)}")
                self.acknowledged[slot], self.open[slot] = version, set()
        return found


def content(version: int) -> bytes:
    return version.to_bytes(8, "little") * (BLOCK // 8)


def test_all_processes_are_killed_in_the_middle_of_writes_and_the_devices_have_moved(tmp_path: Path) -> None:
    """S17: storage would not start after a power cut. kill -9 of everything, every device file gets another
    name, all start: nothing that was acknowledged is missing, replicas are equal, and writes go on."""
    cluster = Cluster(tmp_path, Loopback(), nodes=3, metas=1, failure_timeout_ms=1000)
    try:
        cluster.form(chains_per_device=4)
        paths = [f"/s17-{number}" for number in range(3)]
        with ffs.connect(cluster.address, secret=cluster.secret_file) as client:
            for path in paths:
                with client.open(path, "wb", chunk_size=CHUNK) as file:
                    file.write(content(0) * SLOTS)
        writers = [Writer(cluster, path, SEED + at, 0) for at, path in enumerate(paths)]
        for round_ in range(3):
            for writer in writers:
                writer.start()
            for writer in writers:
                until(partial(writer.has_written, writer.tried + 50), "it has written")
            for process in cluster.processes.values():
                process.kill()
            for writer in writers:
                writer.join(60)
                assert not writer.is_alive()
            for name in cluster.nodes:
                cluster.move_device(name, tmp_path / f"{name}.moved{round_}")
            for process in cluster.processes.values():
                process.start()
            cluster.until_whole()
            with ffs.connect(cluster.address, secret=cluster.secret_file) as client:
                assert [line for writer in writers for line in writer.wrong(client)] == []
                for path in paths:
                    assert differences(client, path, SLOTS * BLOCK // CHUNK, 3) == []
            following = []
            for at, old in enumerate(writers):
                writer = Writer(cluster, old.path, SEED + 10 * round_ + at, old.tried)
                writer.acknowledged = old.acknowledged
                following.append(writer)
            writers = following
    finally:
        cluster.close()


def targets(cluster: Cluster) -> tuple[TargetView, ...]:
    with cluster.pool() as pool:
        reply = pool.call(GetCluster())
    assert isinstance(reply, ClusterReply)
    return reply.targets


def flip(path: Path, data: bytes) -> int:
    """Flips one bit of each place on the device where `data` begins at a multiple of 4096; how many."""
    flipped = 0
    with open(path, "r+b", buffering=0) as file:
        at = 0
        while True:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                os.fsync(file.fileno())
                return flipped
            hole = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            for block in range(at // 4096 * 4096, hole, 4096):
                if os.pread(file.fileno(), 4096, block) == data[:4096]:
                    os.pwrite(file.fileno(), bytes([data[1000] ^ 4]), block + 1000)
                    flipped += 1
            at = hole


def test_flipped_bits_that_nobody_reads_are_found_and_repaired(tmp_path: Path) -> None:
    """S22: replicas drifted apart unnoticed. One replica of each chunk rots on its device; the scrubber finds
    it, a good replica repairs it, the count is shown."""
    cluster = Cluster(tmp_path, Loopback(), nodes=3, metas=1, failure_timeout_ms=1000)
    try:
        cluster.form(chains_per_device=4)
        rng = random.Random(SEED)
        chunks = [rng.randbytes(CHUNK) for _ in range(9)]
        with ffs.connect(cluster.address, secret=cluster.secret_file) as client:
            with client.open("/s22", "wb", chunk_size=CHUNK) as file:
                file.write(b"".join(chunks))
            for at, data in enumerate(chunks):
                name = cluster.nodes[at % len(cluster.nodes)]
                assert flip(tmp_path / f"{name}.device", data[8192:]) == 1

            def repaired() -> bool:
                seen = targets(cluster)
                return sum(t.repaired for t in seen) >= len(chunks) and not any(t.damaged for t in seen)

            until(repaired, "every chunk is repaired")
            assert sum(t.scrubbed_bytes for t in targets(cluster)) > 0
            held = replicas(client, "/s22", len(chunks))
            assert [set(of_chunk.values()) for of_chunk in held] == [{data} for data in chunks]
            assert [len(of_chunk) for of_chunk in held] == [3] * len(chunks)
        # And they are right on the devices: started anew, everything is read once more.
        for name in cluster.nodes:
            cluster.processes[name].kill()
        for name in cluster.nodes:
            cluster.processes[name].start()
        cluster.until_whole()

        def sound() -> bool:
            held = [t for t in targets(cluster) if t.chunks > 0]
            return all(t.here and t.scrubbed_bytes > 0 and not t.damaged and not t.repaired for t in held)

        until(sound, "all is scrubbed again, and nothing found")
    finally:
        cluster.close()

"""Files under several processes at once: appenders and tail readers while a server dies, close-to-open,
atomic files whose writers are killed. FAULTS S18, S19, S29. A cluster of its own, since a server dies."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from children import ends_well, start

import ffs
from ffs.cli.devcluster.state import Directory, Shape
from ffs.cli.devcluster.supervisor import Supervisor
from ffs.client.client import Client

CHUNK = 65536
RECORD = 1000  # doesn't divide a chunk: records lie across the borders of chunks
WRITERS = 3
READERS = 2
LEAST = 60
MOST = 4000  # records of a writer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    said: list[str] = []
    shape = Shape(nodes=3, replicas=3, device_bytes=2 << 30, failure_timeout_ms=2500)
    supervisor = Supervisor(Directory(tmp_path_factory.mktemp("tail") / "dir"), shape, said.append)
    with supervisor.hold():
        supervisor.start(lambda: False)
        yield supervisor


@pytest.fixture
def client(cluster: Supervisor) -> Iterator[Client]:
    with ffs.connect(cluster.address, request_timeout=120, unavailable_timeout=60) as connected:
        yield connected


def record(writer: int, number: int) -> bytes:
    return (f"<{writer}:{number}>".encode() * RECORD)[: RECORD - 1] + b"\n"


class Acknowledged:
    """Where the records lie of which a writer was told that they are there, in memory of all processes."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * (1 + WRITERS * (1 + MOST)))
        cells = np.frombuffer(self._memory, dtype=np.int64)
        self.stop = cells[:1]
        self.counts = cells[1 : 1 + WRITERS]
        self.offsets = cells[1 + WRITERS :].reshape(WRITERS, MOST)


def append(client: Client, path: str, told: Acknowledged, writer: int) -> None:
    with client.open(path, "ab", 0) as file:
        for number in range(MOST):
            assert file.write(record(writer, number)) == RECORD
            file.fsync()
            told.offsets[writer, number] = file.tell() - RECORD
            told.counts[writer] = number + 1  # after the offset: who sees the count sees it
            if told.stop[0] and number >= LEAST:
                return


def follow(client: Client, path: str, told: Acknowledged) -> None:
    """Whatever had been acknowledged before a read is in it, to the byte."""
    seen = np.zeros(WRITERS, dtype=np.int64)
    with client.open(path, "rb", 0) as file:
        while True:
            last = bool(told.stop[0]) and bool(np.all(told.counts > LEAST))
            counts = told.counts.copy()
            for writer in range(WRITERS):
                for number in range(int(seen[writer]), int(counts[writer])):
                    offset = int(told.offsets[writer, number])
                    found = file.pread(RECORD, offset)
                    assert found == record(writer, number), (writer, number, offset, found[:40])
            begin = max(0, file.size - 20 * RECORD)
            tail = file.pread(40 * RECORD, begin)
            for writer in range(WRITERS):
                for number in range(max(0, int(counts[writer]) - 5), int(counts[writer])):
                    at = int(told.offsets[writer, number]) - begin
                    if at >= 0:
                        assert tail[at : at + RECORD] == record(writer, number), (writer, number)
            seen = counts
            if last:
                return


def test_appenders_and_tail_readers_while_a_server_dies(cluster: Supervisor, client: Client) -> None:
    """S18, with O_APPEND and fsync in several processes; every record is there once and whole."""
    path = "/log"
    client.open(path, "xb", chunk_size=CHUNK).close()
    told = Acknowledged()
    workers = [start(lambda w=w: append(client, path, told, w)) for w in range(WRITERS)]  # type: ignore[misc]
    workers += [start(lambda: follow(client, path, told)) for _ in range(READERS)]
    try:
        end = time.monotonic() + 60
        while int(told.counts.min()) < LEAST // 2:
            assert time.monotonic() < end, "no writer gets on"
            time.sleep(0.01)
        before = told.counts.copy()
        cluster.kill_node(1)
        while int((told.counts - before).min()) < LEAST // 2:  # all write on without it
            assert time.monotonic() < end, "writers don't go on without the server"
            time.sleep(0.01)
    finally:
        told.stop[0] = 1
        results = [ends_well(pid) for pid in workers]
    assert results == [True] * len(workers)
    total = int(told.counts.sum())
    with client.open(path, "rb") as file:
        whole = file.read()
    print(f"{total} records of {WRITERS} processes")
    assert len(whole) == total * RECORD
    found = sorted(whole[at : at + RECORD] for at in range(0, len(whole), RECORD))
    expected = sorted(
        record(writer, number) for writer in range(WRITERS) for number in range(int(told.counts[writer]))
    )
    assert found == expected
    cluster.start_node(1)


def test_a_tail_reader_of_one_appender_never_sees_a_zero(client: Client) -> None:
    """S18: there is one writer, so nothing that isn't written lies before anything that is."""
    client.open("/tail", "xb", chunk_size=4096).close()
    told = Acknowledged()

    def read() -> None:
        with client.open("/tail", "rb", 0) as file:
            read = 0
            while read < 200 * RECORD:
                data = file.read(64 * RECORD)
                assert b"\0" not in data, (read, data.index(b"\0"))
                read += len(data)
            told.stop[0] = 1

    pid = start(read)
    with client.open("/tail", "ab", 0) as file:
        for number in range(200):
            file.write(record(0, number))
            file.flush()
    assert ends_well(pid)
    assert told.stop[0] == 1


def test_close_in_one_process_then_open_in_another(client: Client) -> None:
    """S19: the other process opens the moment that it hears of the close."""
    client.mkdir("/turns")
    here, there = os.pipe(), os.pipe()
    turns = 60

    def other() -> None:
        for turn in range(turns):
            assert os.read(here[0], 1) == b"c"
            with client.open("/turns/f", "rb") as file:
                assert file.read() == b"x" * (turn + 1) * 777
            with client.open("/turns/g", "ab") as file:
                file.write(b"y" * 555)
            os.write(there[1], b"c")

    pid = start(other)
    for turn in range(turns):
        with client.open("/turns/f", "ab") as file:
            file.write(b"x" * 777)
        os.write(here[1], b"c")
        assert os.read(there[0], 1) == b"c"
        with client.open("/turns/g", "rb") as file:
            assert file.read() == b"y" * (turn + 1) * 555
    assert ends_well(pid)
    for descriptor in (*here, *there):
        os.close(descriptor)


def test_a_writer_whose_file_was_cut_in_another_process(client: Client) -> None:
    """Truncate epochs: what was written before the cut doesn't come back, what is written after it counts."""
    client.mkdir("/cut")
    path = "/cut/f"
    with client.open(path, "w+b", 0, chunk_size=4096) as file:
        for turn in range(20):
            file.pwrite(b"old" * 10_000, 0)
            if turn % 2:
                file.flush()
            assert ends_well(start(lambda: client.truncate(path, 5000)))
            assert client.getsize(path) == 5000
            file.pwrite(b"new", 9000)
            file.flush()
            assert client.getsize(path) == 9003
            assert file.pread(20_000, 0) == (b"old" * 10_000)[:5000] + bytes(4000) + b"new"


@pytest.mark.parametrize("old", [True, False])
def test_an_atomic_file_whose_writer_is_killed_is_never_seen(client: Client, old: bool) -> None:
    """S29: whatever the writer had done; and the next one publishes as if nothing had been."""
    home = f"/killed-{old}"
    client.mkdir(home)
    path = f"{home}/f"
    if old:
        with client.open(path, "wb") as file:
            file.write(b"old")
    for point in range(3):
        read, write = os.pipe()

        def work(point: int = point, write: int = write) -> None:
            file = client.open(path, "wb", atomic=True, chunk_size=4096)
            if point:
                file.write(b"cut off" * 10_000)
            if point == 2:
                file.fsync()
            os.write(write, b"k")
            signal.pause()

        pid = start(work)
        assert os.read(read, 1) == b"k"
        os.kill(pid, signal.SIGKILL)
        assert not ends_well(pid)
        os.close(read)
        os.close(write)
        assert client.listdir(home) == (["f"] if old else [])
        if old:
            with client.open(path, "rb") as file:
                assert file.read() == b"old"
    with client.open(path, "wb", atomic=True) as file:
        file.write(b"new")
    with client.open(path, "rb") as file:
        assert file.read() == b"new"

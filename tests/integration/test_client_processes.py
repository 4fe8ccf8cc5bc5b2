"""Clients and files across fork, spawn, forkserver and threads, and under metadata that is away."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ffs
from ffs import errors
from ffs.client.client import Client

CHUNK = 65536


def in_child(work: Callable[[], bool]) -> bool:
    """Whether `work` returned True in a child of fork, within a minute."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(60)
            code = 0 if work() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


@pytest.fixture
def data() -> bytes:
    return random.Random(3).randbytes(20 * CHUNK + 123)


@pytest.fixture
def path(client: Client, home: str, data: bytes) -> str:
    with client.open(f"{home}/f", "wb", chunk_size=CHUNK) as file:
        file.write(data)
    return f"{home}/f"


def test_a_child_of_fork_reads_and_writes(client: Client, home: str, path: str, data: bytes) -> None:
    """S26: a child of fork hung. The parent has used everything: connections, rings, a session."""
    with client.open(path, "rb", 0) as reader, client.open(f"{home}/w", "w+b", 0) as writer:
        assert reader.read(1000) == data[:1000]
        writer.write(b"parent")

        def child() -> bool:
            if reader.read() != data[1000:]:
                return False
            writer.pwrite(b"child", 100)
            writer.flush()
            with client.open(f"{home}/own", "wb") as own:
                own.write(data)
            writer.close()
            return client.listdir(home) != []

        assert in_child(child)
        assert in_child(child) is True
        assert reader.read() == data[1000:]
        writer.pwrite(b"again", 200)
    with client.open(f"{home}/w", "rb") as file:
        assert file.read() == b"parent".ljust(100, b"\0") + b"child".ljust(100, b"\0") + b"again"
    with client.open(f"{home}/own", "rb") as file:
        assert file.read() == data


def test_fork_while_threads_transfer(client: Client, path: str, data: bytes) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                with client.open(path, "rb", 0) as file:
                    assert file.read() == data
                client.stat(path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()

    def child() -> bool:
        with client.open(path, "rb") as file:
            return bool(file.read() == data)

    results = [in_child(child) for _ in range(10)]
    stop.set()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 10
    assert failures == []


def test_an_atomic_file_is_published_by_its_own_process_only(client: Client, home: str) -> None:
    file = client.open(f"{home}/f", "wb", atomic=True)
    file.write(b"whole")
    file.flush()

    def child() -> bool:
        file.close()
        return True

    assert in_child(child)
    assert client.listdir(home) == []
    file.close()
    assert client.getsize(f"{home}/f") == 5


def _read_part(file: Any, offset: int, size: int) -> bytes:
    return bytes(file.pread(size, offset))


def _read_path(client: Client, path: str) -> bytes:
    with client.open(path, "rb") as file:
        return bytes(file.read())


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools_of_processes(client: Client, path: str, data: bytes, method: str) -> None:
    context = multiprocessing.get_context(method)
    with client.open(path, "rb", 0) as file, context.Pool(3) as pool:
        parts = pool.starmap(_read_part, [(file, at, CHUNK) for at in range(0, len(data), CHUNK)])
        assert b"".join(parts) == data
        assert pool.starmap(_read_path, [(client, path)] * 6) == [data] * 6


def test_threads_share_a_client_and_a_file(client: Client, home: str) -> None:
    """32 threads read and write ranges of one file, which don't overlap."""
    with client.open(f"{home}/f", "w+b", 0, chunk_size=CHUNK) as file:
        failures: list[BaseException] = []
        pieces = 8

        def work(number: int) -> None:
            try:
                source = random.Random(number)
                for turn in range(pieces):
                    offset = (turn * 32 + number) * 30_001
                    piece = source.randbytes(30_001)
                    assert file.pwrite(piece, offset) == len(piece)
                    assert file.pread(len(piece), offset) == piece
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert failures == []
    sources = [random.Random(number) for number in range(32)]
    expected = b"".join(sources[number].randbytes(30_001) for _ in range(pieces) for number in range(32))
    with client.open(f"{home}/f", "rb") as file:
        assert file.read() == expected


def test_many_writers_get_back_pressure_not_errors(client: Client, home: str) -> None:
    """S7: heavy oversubscription became EIO."""
    failures: list[BaseException] = []
    block = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)

    def write(number: int) -> None:
        try:
            with client.open(f"{home}/{number}", "wb", 0, table="single", chunk_size=CHUNK) as file:
                for turn in range(4):
                    file.write(np.roll(block, number + turn))
            with client.open(f"{home}/{number}", "rb", 0) as file:
                for turn in range(4):
                    assert np.array_equal(
                        np.frombuffer(file.read(1 << 20), np.uint8), np.roll(block, number + turn)
                    )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert failures == []


def test_descriptors_and_memory_stay_flat(client: Client, path: str, data: bytes) -> None:
    """S6, S15: opening and closing leaves nothing."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    for turn in range(200):
        with client.open(path, "rb", 0) as file:
            file.read(10)
        if turn == 20:
            before = descriptors()
    assert descriptors() <= before
    assert len(client.core.session()._capabilities) == 0


def _pids(cluster: Any, name: str) -> int:
    return int(next(child.pid for child in cluster._children if child.name == name))


def test_open_files_go_on_while_metadata_is_stopped(
    cluster: Any, client: Client, home: str, path: str, data: bytes
) -> None:
    """C24's first half: reads and writes of open files need no metadata service."""
    pid = _pids(cluster, "meta")
    with client.open(path, "rb", 0) as reader, client.open(f"{home}/w", "w+b", 0, chunk_size=CHUNK) as writer:
        reader.read(10)
        writer.write(data)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert reader.pread(len(data), 0) == data
            writer.pwrite(data, 0)
            assert writer.pread(len(data), 0) == data
        finally:
            os.kill(pid, signal.SIGCONT)
    assert client.getsize(f"{home}/w") == len(data)


def test_requests_wait_out_a_stopped_metadata_service(cluster: Any, client: Client, home: str) -> None:
    pid = _pids(cluster, "meta")
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
    timer.start()
    try:
        client.mkdir(f"{home}/d")
    finally:
        timer.join()
    assert client.isdir(f"{home}/d")


def test_reads_go_on_with_one_storage_server_stopped(
    cluster: Any, address: str, path: str, data: bytes
) -> None:
    pid = _pids(cluster, "node1")
    os.kill(pid, signal.SIGSTOP)
    try:
        with ffs.connect(address) as fresh, fresh.open(path, "rb", 0) as file:
            assert file.read() == data
    finally:
        os.kill(pid, signal.SIGCONT)


def test_writes_to_a_chain_that_is_down(
    cluster: Any, address: str, home: str, path: str, data: bytes
) -> None:
    """S8: data calls hung on a chain that was down. They end by the deadline, tell, and work again."""
    pid = _pids(cluster, "node2")
    with ffs.connect(address, request_timeout=2) as hasty, hasty.open(path, "r+b", 0) as file:
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(
                (errors.OutcomeUnknown, errors.DeadlineExceeded, errors.ChainUnavailable)
            ) as caught:
                file.pwrite(b"w" * len(data), 0)
            assert caught.value.filename == path
        finally:
            os.kill(pid, signal.SIGCONT)
    with ffs.connect(address) as patient, patient.open(path, "r+b", 0) as file:
        file.pwrite(data, 0)
        assert file.pread(len(data), 0) == data


def test_a_client_that_gave_up_leaves_its_chains_working(cluster: Any, address: str, home: str) -> None:
    """A fence that overtook the forwards of a stopped server left the chain waiting for ever."""
    pid = _pids(cluster, "node1")
    path = f"{home}/f"
    with ffs.connect(address, request_timeout=1) as hasty:
        with hasty.open(path, "wb", chunk_size=CHUNK) as file:
            file.write(b"x" * 40 * CHUNK)
        file = hasty.open(path, "r+b", 0)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(errors.FfsError):
                file.pwrite(b"y" * 40 * CHUNK, 0)
            file.close()
            hasty.close()  # ends the session: the metadata service fences it at the servers
            time.sleep(2)  # as long as heartbeats need to bring the fence; too short proves nothing, no more
        finally:
            os.kill(pid, signal.SIGCONT)
    with ffs.connect(address) as patient, patient.open(path, "r+b", 0) as file:
        file.pwrite(b"z" * 40 * CHUNK, 0)
        assert file.pread(40 * CHUNK, 0) == b"z" * 40 * CHUNK


def test_a_session_that_was_lost(address: str, client: Client, home: str, path: str, data: bytes) -> None:
    """A client that stood still for longer than its session lives: reading goes on, writing says so."""
    with ffs.connect(address, session_ttl=1.0) as sleeper:
        reader = sleeper.open(path, "rb", 0)
        assert reader.read(10) == data[:10]
        writer = sleeper.open(f"{home}/w", "wb", 0)
        writer.write(b"written")
        session = sleeper.core.session()
        renewer = sleeper.core._renewer
        assert renewer is not None
        renewer.stop()
        deadline = time.monotonic() + 60
        while client.getsize(f"{home}/w") != 7:  # the service has closed it and asked its chains
            assert time.monotonic() < deadline
            time.sleep(0.05)

        def write_and_flush() -> None:
            writer.write(b"more")
            writer.flush()

        with pytest.raises(errors.Fenced, match="session"):
            write_and_flush()
        sleeper.mkdir(f"{home}/under-a-new-session")
        assert sleeper.core.session() is not session
        assert reader.read() == data[10:]
        reader.close()
        with pytest.raises(errors.Fenced):
            writer.close()
    assert client.getsize(f"{home}/w") >= 7


def test_capabilities_are_renewed_under_open_files(client: Client, path: str, data: bytes) -> None:
    with client.open(path, "r+b", 0) as file:
        file.pwrite(data, 0)
        session = client.core.session()
        entry = session._capabilities[file.capability]
        entry.renew_at = 0.0
        session.renew()
        assert entry.renew_at > time.monotonic()
        assert file.pread(len(data), 0) == data
        file.pwrite(data, 0)
    assert session._capabilities == {}


def test_a_session_outlives_its_time_to_live_by_renewal(address: str, path: str, data: bytes) -> None:
    with ffs.connect(address, session_ttl=1.0) as brief, brief.open(path, "r+b", 0) as file:
        session = brief.core.session()
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            file.pwrite(data[:100], 0)
            file.flush()
            time.sleep(0.05)
        assert brief.core.session() is session

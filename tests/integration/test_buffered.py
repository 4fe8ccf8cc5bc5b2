"""Buffered files: reading ahead and writing behind on real servers. docs/client.md, Files."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import ffs
from ffs import errors
from ffs.client.client import Client

CHUNK = 65536


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(5).randbytes(150 * CHUNK + 1234)


def lanes_in_use(client: Client) -> int:
    lanes = client.core.session().lanes
    return sum(size for size in (lanes._bytes,)) - sum(len(lane.memory) for lane in lanes._idle)


@pytest.mark.parametrize("chunk_size", [CHUNK, 1 << 20])
@pytest.mark.parametrize("mode", ["wb", "w+b"])
def test_what_is_written_is_what_is_read(
    client: Client, home: str, data: bytes, chunk_size: int, mode: str
) -> None:
    source = random.Random(chunk_size)
    at = 0
    with client.open(f"{home}/f", mode, chunk_size=chunk_size) as file:
        while at < len(data):
            size = source.choice([1, 1000, 30_000, 100_000, chunk_size, 2 << 20])
            file.write(data[at : at + size])
            at += size
        assert file.tell() == len(data)
        if mode == "wb":
            assert file.raw_file._behind._wrote
        file.seek(12_345)
        file.write(b"again")
        assert file.seek(0, os.SEEK_END) == len(data)
    expected = data[:12_345] + b"again" + data[12_350:]
    with client.open(f"{home}/f", "rb") as file:
        parts = []
        while part := file.read(source.choice([10_000, 100_000, 1 << 20])):
            parts.append(part)
        assert b"".join(parts) == expected
        assert file.raw_file._ahead._pattern.window > 0
        for _ in range(50):
            offset = source.randrange(len(data))
            file.seek(offset)
            assert file.read(5000) == expected[offset : offset + 5000]
    assert lanes_in_use(client) == 0


def test_several_readers_and_writers_at_once(client: Client, home: str, data: bytes) -> None:
    """More than there are lanes for: who gets none does without."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with client.open(f"{home}/{number}", "wb", chunk_size=CHUNK) as file:
                for at in range(0, len(data), 50_000):
                    file.write(data[at : at + 50_000])
            with client.open(f"{home}/{number}", "rb") as file:
                for at in range(0, len(data), 70_000):
                    assert file.read(70_000) == data[at : at + 70_000]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    lanes = client.core.session().lanes
    assert lanes_in_use(client) == 0
    assert lanes._bytes <= 128 << 20


def in_a_row(file: Any, count: int) -> bytes:
    """Reads that open the window."""
    return b"".join(file.read(CHUNK * 4) for _ in range(count))


def test_a_change_by_the_same_client_is_seen_at_once(client: Client, home: str, data: bytes) -> None:
    path = f"{home}/f"
    with client.open(path, "wb", chunk_size=CHUNK) as file:
        file.write(data)
    with client.open(path, "rb") as reader, client.open(path, "r+b", 0) as writer:
        assert in_a_row(reader, 4) == data[: CHUNK * 16]
        assert reader.raw_file._ahead._held  # it is ahead
        writer.pwrite(b"new" * 1000, CHUNK * 20)
        assert reader.read(CHUNK * 4) == data[CHUNK * 16 : CHUNK * 20]
        assert reader.read(3000) == b"new" * 1000
        assert reader.read(CHUNK * 4 - 3000) == data[CHUNK * 20 + 3000 : CHUNK * 24]
        assert in_a_row(reader, 3) == data[CHUNK * 24 : CHUNK * 36]
        assert reader.raw_file._ahead._held
        writer.truncate(CHUNK * 50)
        writer.truncate(CHUNK * 60)
        rest = reader.read()
        assert rest == data[CHUNK * 36 : CHUNK * 50] + bytes(10 * CHUNK)
        assert reader.read(1) == b""
        writer.pwrite(data[:100], CHUNK * 60)
        writer.flush()
        assert reader.read(200) == data[:100]  # the end is looked for again


def test_a_change_by_another_client_is_seen_by_opening_again_and_soon_by_who_goes_on(
    address: str, client: Client, home: str, data: bytes
) -> None:
    path = f"{home}/f"
    with client.open(path, "wb", chunk_size=CHUNK) as file:
        file.write(data)
    with ffs.connect(address) as other, other.open(path, "rb") as reader:
        assert in_a_row(reader, 4) == data[: CHUNK * 16]
        with client.open(path, "wb") as file:  # truncated, and written anew
            file.write(data[::-1])
        with other.open(path, "rb") as file:
            assert file.read() == data[::-1]
        time.sleep(1.2)  # what was fetched ahead is too old by now; the layer's own buffer is empty
        assert reader.read(CHUNK * 20) == data[::-1][CHUNK * 16 : CHUNK * 36]


def test_the_holder_of_a_lock_sees_what_the_last_one_wrote(
    address: str, client: Client, home: str, data: bytes
) -> None:
    path = f"{home}/f"
    with client.open(path, "wb", chunk_size=CHUNK) as file:
        file.write(data)
    with (
        ffs.connect(address) as other,
        other.open(path, "r+b", 0) as writer,
        client.open(path, "rb") as reader,
    ):
        assert in_a_row(reader, 4) == data[: CHUNK * 16]
        writer.flock(fcntl.LOCK_EX)
        writer.pwrite(b"n" * CHUNK * 40, CHUNK * 16)
        writer.flush()
        writer.flock(fcntl.LOCK_UN)
        reader.flock(fcntl.LOCK_SH)
        assert reader.read(CHUNK * 40) == b"n" * CHUNK * 40
        reader.flock(fcntl.LOCK_UN)
        assert reader.read(10) == data[CHUNK * 56 : CHUNK * 56 + 10]  # and more of it is in the buffer
        writer.pwrite(b"m" * 10, CHUNK * 56 + 10)
        reader.flock(fcntl.LOCK_SH)
        assert reader.read(20) == b"m" * 10 + data[CHUNK * 56 + 20 : CHUNK * 56 + 30]


def test_nothing_is_published_before_a_flush_and_all_after(
    address: str, client: Client, home: str, data: bytes
) -> None:
    path = f"{home}/f"
    with ffs.connect(address) as other, client.open(path, "wb", chunk_size=CHUNK) as file:
        file.write(data)
        assert other.getsize(path) == 0
        assert file.raw_file.size == len(data)  # what is under way too
        file.flush()
        with other.open(path, "rb") as reader:
            assert reader.read() == data
        file.write(b"more")
        assert file.raw_file.stat().st_size == len(data)  # the layer's buffer isn't the file's
        file.truncate()
        assert other.getsize(path) == len(data) + 4


class Failing:
    """Makes writes of a file fail, those behind and those at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Any) -> None:
        handle, behind = file.raw_file._open_file, file.raw_file._behind
        self.failing = True
        write_at, receive = handle.write_at, behind._receive

        def fail(offset: int, piece: Any) -> None:
            if self.failing:
                raise errors.NoSpace("the chain is full", handle.path)
            write_at(offset, piece)

        def fail_behind(least: int) -> None:
            sent = list(behind._flying.values())  # before any of it is known to be written
            receive(least)
            if self.failing:
                while behind._flying:
                    receive(1)
                behind._again += sent

        monkeypatch.setattr(handle, "write_at", fail)
        monkeypatch.setattr(behind, "_receive", fail_behind)


def test_what_failed_is_written_when_there_is_room_again(
    client: Client, home: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.open(f"{home}/f", "wb", chunk_size=CHUNK) as file:
        file.write(data[: CHUNK * 4])
        failing = Failing(monkeypatch, file)
        with contextlib.suppress(errors.NoSpace):  # not at once, perhaps, but surely
            file.write(data[CHUNK * 4 : CHUNK * 40])
        with pytest.raises(errors.NoSpace):
            file.flush()
        with pytest.raises(errors.NoSpace):
            file.flush()
        failing.failing = False
        file.seek(CHUNK * 4)
        file.write(data[CHUNK * 4 :])
    with client.open(f"{home}/f", "rb") as file:
        assert file.read() == data


def test_an_error_at_the_end_never_vanishes(
    client: Client, home: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(path: str) -> Any:
        file = client.open(path, "wb", chunk_size=CHUNK)
        file.write(data[: CHUNK * 4])
        Failing(monkeypatch, file)
        file.write(data[: CHUNK // 2])  # fits what is gathered
        return file

    file = begun(f"{home}/closed")
    with pytest.raises(errors.NoSpace):
        file.close()
    assert file.closed
    file.close()  # told once

    with pytest.raises(errors.NoSpace) as caught, begun(f"{home}/left"):
        raise KeyError("the reason to leave")
    assert isinstance(caught.value.__context__, KeyError)

    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with pytest.warns(ResourceWarning, match="unclosed"):
        begun(f"{home}/dropped")
    gc.collect()
    assert [each.exc_type for each in told] == [errors.NoSpace]

    files = [begun(f"{home}/{number}") for number in range(2)]
    with pytest.raises(errors.NoSpace) as caught:
        client.close()
    assert len(caught.value.__notes__) == 1  # the other one's
    assert all(file.closed for file in files)


def test_an_error_at_the_end_of_the_process_is_told(address: str, home: str) -> None:
    code = """
import sys, ffs
client = ffs.connect(sys.argv[1])
file = client.open(sys.argv[2], "wb")
file.write(b"x" * 100_000)
def fail(offset, data):
    raise ffs.NoSpace("the chain is full", sys.argv[2])
file.raw_file._open_file.write_at = fail
"""
    done = subprocess.run(
        [sys.executable, "-c", code, address, f"{home}/f"], capture_output=True, text=True, check=True
    )
    assert "NoSpace" in done.stderr
    assert "the chain is full" in done.stderr


def test_an_atomic_file_that_failed_behind_isnt_published(
    client: Client, home: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = client.open(f"{home}/f", "wb", atomic=True, chunk_size=CHUNK)
    file.write(data[: CHUNK * 10])
    Failing(monkeypatch, file)
    file.write(data[: CHUNK // 2])
    with pytest.raises(errors.NoSpace, match="nothing was published"):
        file.close()
    with client.open(f"{home}/f", "wb", atomic=True, chunk_size=CHUNK) as file:
        file.write(data)
        file.discard()
    assert client.listdir(home) == []
    assert lanes_in_use(client) == 0


def test_a_child_of_fork_while_files_are_ahead_and_behind(client: Client, home: str, data: bytes) -> None:
    """S26 again: rings, their memory and their thread are in use when the process forks."""
    path = f"{home}/f"
    with client.open(path, "wb", chunk_size=CHUNK) as file:
        file.write(data)
    with client.open(path, "rb") as reader, client.open(f"{home}/w", "wb", chunk_size=CHUNK) as writer:
        begin = in_a_row(reader, 5)
        writer.write(data[: CHUNK * 100])
        children = []
        for number in range(3):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    threading.Timer(60, os._exit, (3,)).start()
                    assert begin + reader.read() == data
                    with client.open(f"{home}/own{number}", "wb") as own:
                        own.write(data)
                    code = 0
                finally:
                    os._exit(code)
            children.append(pid)
        writer.write(data[CHUNK * 100 :])
        assert begin + reader.read() == data
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
    for name in ("w", "own0", "own1", "own2"):
        with client.open(f"{home}/{name}", "rb") as file:
            assert file.read() == data


def test_who_does_nothing_keeps_no_lane(client: Client, home: str, data: bytes) -> None:
    path = f"{home}/f"
    with client.open(path, "wb", chunk_size=CHUNK) as writer:
        writer.write(data)
        with client.open(path, "rb") as reader:
            writer.flush()
            in_a_row(reader, 5)
            writer.write(b"x" * CHUNK * 3)
            assert lanes_in_use(client) > 0
            limit = time.monotonic() + 60
            while lanes_in_use(client) > 0:
                assert time.monotonic() < limit
                time.sleep(0.05)
            assert in_a_row(reader, 5) == data[CHUNK * 20 : CHUNK * 40]
            writer.write(b"y" * CHUNK * 3)
    assert client.getsize(path) == len(data) + 6 * CHUNK

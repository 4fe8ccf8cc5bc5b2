"""Quotas of directories on the real processes: what is refused, what is given back, and that usage is exact.

A cluster of its own with two metadata services, since they are killed here. The judge of usage is a walk over
the tree, which knows nothing of quotas.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ffs
from ffs import errors
from ffs.cli.devcluster.state import Directory, Shape
from ffs.cli.devcluster.supervisor import Supervisor
from ffs.client.client import Client
from ffs.client.quota import Quota

Run = Callable[..., tuple[int, str, str]]

MIB = 1 << 20
CHUNK = 65536
LIMIT_S = 60.0  # only for a broken program
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    shape = Shape(nodes=1, replicas=1, device_bytes=2 << 30, failure_timeout_ms=2500, metas=2)
    supervisor = Supervisor(Directory(tmp_path_factory.mktemp("quota") / "dir"), shape, lambda line: None)
    with supervisor.hold():
        supervisor.start(lambda: False)
        yield supervisor


@pytest.fixture(scope="module")
def address(cluster: Supervisor) -> str:
    return cluster.address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with ffs.connect(address, request_timeout=60) as connected:
        yield connected


def walked(client: Client, top: str) -> tuple[int, int]:
    """(bytes, entries) below a directory: of each inode once."""
    seen: dict[int, int] = {}
    for folder, folders, names in client.walk(top):
        for name in folders + names:
            info = client.lstat(f"{folder}/{name}")
            seen[info.st_ino] = info.st_size if stat.S_ISREG(info.st_mode) else 0
    return sum(seen.values()), len(seen)


def used(client: Client, top: str) -> tuple[int, int]:
    quota = client.quota(top)
    assert quota is not None
    return quota.used_bytes, quota.used_entries


def until(condition: Callable[[], Any], what: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, what()
        time.sleep(0.02)


def settled(client: Client, top: str) -> None:
    """What is given back in the background - by collections, the end of dead sessions - has been."""
    until(lambda: used(client, top) == walked(client, top), lambda: (used(client, top), walked(client, top)))


def counted(client: Client, top: str) -> Quota:
    def ready() -> bool:
        quota = client.quota(top)
        return quota is not None and not quota.counting

    until(ready, lambda: client.quota(top))
    quota = client.quota(top)
    assert quota is not None
    return quota


@pytest.fixture
def full(client: Client, home: str) -> Iterator[str]:
    """A directory with a quota of 4 MiB and 10 entries; afterwards its usage is what is there."""
    path = f"{home}/q"
    client.mkdir(path)
    client.set_quota(path, bytes=4 * MIB, entries=10)
    yield path
    settled(client, path)


# --- bytes ----------------------------------------------------------------------------------------


def test_what_goes_beyond_is_refused_at_its_write_and_the_rest_stays(client: Client, full: str) -> None:
    data = random.Random(1).randbytes(4 * MIB)
    piece = 300_000
    with client.open(f"{full}/a", "wb", 0, chunk_size=CHUNK) as file:
        for offset in range(0, 4 * MIB - piece, piece):
            file.write(data[offset : offset + piece])  # nothing is refused that has room
        offset += piece
        with pytest.raises(errors.QuotaExceeded, match="quota") as refused:
            file.write(data[offset:] + b"x")
        assert refused.value.errno == errno.EDQUOT
        assert refused.value.filename == f"{full}/a"
        assert file.tell() == offset
        file.write(data[offset:])  # exactly what is left
        with pytest.raises(errors.QuotaExceeded):
            file.write(b"x")
        file.pwrite(data[:100], 0)  # what has room already
    with client.open(f"{full}/a", "rb") as file:
        assert file.read() == data
    assert used(client, full) == (4 * MIB, 1)
    with pytest.raises(errors.QuotaExceeded):
        client.truncate(f"{full}/a", 4 * MIB + 1)


def _write_much(file: Any) -> None:
    for _ in range(100):
        file.write(bytes(100_000))
    file.flush()


def test_buffered_writers_are_told_too(client: Client, full: str) -> None:
    file = client.open(f"{full}/a", "wb")
    with pytest.raises(errors.QuotaExceeded):
        _write_much(file)
    with contextlib.suppress(errors.QuotaExceeded):
        file.close()  # of what it still has in its buffer
    size = client.stat(f"{full}/a").st_size
    assert 2 * MIB < size <= 4 * MIB
    settled(client, full)


def test_room_comes_back_by_truncation_and_removal(client: Client, full: str) -> None:
    with client.open(f"{full}/a", "wb", 0) as file:
        file.write(bytes(4 * MIB))
        file.truncate(MIB)
        assert used(client, full) == (MIB, 1)
        with client.open(f"{full}/b", "wb", 0) as other:
            other.write(bytes(3 * MIB))
            with pytest.raises(errors.QuotaExceeded):
                file.pwrite(b"x", MIB)  # reserved before the truncation
        client.unlink(f"{full}/b")
        file.pwrite(bytes(3 * MIB), MIB)
    client.truncate(f"{full}/a", 0)
    assert used(client, full) == (0, 1)
    client.unlink(f"{full}/a")
    assert used(client, full) == (0, 0)


def test_a_truncation_elsewhere_takes_what_was_reserved(client: Client, address: str, full: str) -> None:
    with client.open(f"{full}/a", "wb", 0) as file, ffs.connect(address) as other:
        file.write(bytes(2 * MIB))
        file.ensure_room(4 * MIB)
        assert file.has_room(4 * MIB)
        other.truncate(f"{full}/a", 0)
        with other.open(f"{full}/b", "wb", 0) as taking:
            taking.write(bytes(3 * MIB))
        with pytest.raises(errors.QuotaExceeded):
            file.pwrite(bytes(2 * MIB), 0)  # asks again, under the new epoch
        file.pwrite(bytes(MIB), 0)
    assert used(client, full) == (4 * MIB, 2)


def test_appends_are_charged_as_they_are_reserved(client: Client, full: str) -> None:
    with client.open(f"{full}/a", "ab", 0) as first, client.open(f"{full}/a", "ab", 0) as second:
        for _ in range(2):
            first.write(bytes(MIB))
            second.write(bytes(MIB))
        with pytest.raises(errors.QuotaExceeded):
            first.write(b"x")
    assert client.stat(f"{full}/a").st_size == 4 * MIB


def test_atomic_files_publish_nothing_that_had_no_room(client: Client, full: str) -> None:
    with client.open(f"{full}/a", "wb") as file:
        file.write(b"old")
    with pytest.raises(errors.QuotaExceeded), client.open(f"{full}/a", "wb", atomic=True) as file:
        _write_much(file)
    with client.open(f"{full}/a", "rb") as file:
        assert file.read() == b"old"
    settled(client, full)
    with client.open(f"{full}/a", "wb", atomic=True) as file:
        file.write(bytes(3 * MIB))
    settled(client, full)
    assert used(client, full) == (3 * MIB, 1)


def test_room_beforehand(client: Client, full: str) -> None:
    with client.open(f"{full}/a", "wb", 0) as file:
        with pytest.raises(errors.QuotaExceeded):
            file.allocate(0, 5 * MIB)
        assert file.size == 0
        file.allocate(0, 3 * MIB)
        with pytest.raises(errors.QuotaExceeded):
            file.ensure_room(5 * MIB)
        file.ensure_room(4 * MIB)
        with client.open(f"{full}/b", "wb", 0) as other, pytest.raises(errors.QuotaExceeded):
            other.write(bytes(2))
    assert used(client, full) == (3 * MIB, 2)  # what was reserved and not written came back


def test_writes_of_rings(client: Client, full: str) -> None:
    with (
        ffs.Iov(MIB) as iov,
        client.open(f"{full}/a", "wb", 0, chunk_size=CHUNK) as file,
        ffs.Ior(client, entries=256, kind="write") as ring,
    ):
        offsets = np.arange(0, 4 * MIB, CHUNK)
        places = offsets % MIB
        lengths = np.full(len(offsets), CHUNK)
        with pytest.raises(errors.QuotaExceeded):
            ring.prepare_many(file, offsets + 1, iov, places, lengths)
        assert ring.wait(0, 0) == []
        assert ring.prepare_many(file, offsets, iov, places, lengths) == len(offsets)
        done = ring.wait(len(offsets), LIMIT_S)
        assert {one.result for one in done} == {CHUNK}
        with pytest.raises(errors.QuotaExceeded):
            ring.prepare(file, 4 * MIB, iov[0:1])
        file.flush()
    assert used(client, full) == (4 * MIB, 1)


def test_writes_of_fsspec_publish_nothing_without_room(address: str, client: Client, full: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("ffs", address=address)
    with pytest.raises(OSError, match="quota") as refused, store.open(f"{full}/a", "wb") as file:
        _write_much(file)
    assert refused.value.errno == errno.EDQUOT
    assert not store.exists(f"{full}/a")
    store.pipe_file(f"{full}/b", bytes(4 * MIB))
    with pytest.raises(OSError, match="quota"):
        store.pipe_file(f"{full}/c", b"x")
    assert client.listdir(full) == ["b"]


# --- entries --------------------------------------------------------------------------------------


def test_entries(client: Client, full: str) -> None:
    client.makedirs(f"{full}/d/e")
    client.symlink("nowhere", f"{full}/l")
    for number in range(7):
        client.mknod(f"{full}/d/{number}")
    for make in (
        lambda: client.mknod(f"{full}/d/x"),
        lambda: client.mkdir(f"{full}/d/x"),
        lambda: client.symlink("a", f"{full}/d/x"),
        lambda: client.open(f"{full}/d/x", "wb"),
        lambda: client.open(f"{full}/d/x", "wb", atomic=True),
    ):
        with pytest.raises(errors.QuotaExceeded, match="entries"):
            make()
    refused = client.create_many([f"{full}/d/6", f"{full}/d/x"], exist_ok=True)
    assert isinstance(refused[1], errors.QuotaExceeded)
    assert not isinstance(refused[0], OSError)
    client.link(f"{full}/d/0", f"{full}/d/again")  # another name is no other entry
    client.unlink(f"{full}/d/0")
    assert used(client, full) == (0, 10)
    client.rename(f"{full}/d", f"{full}/f")
    client.rmtree(f"{full}/f")
    settled(client, full)
    assert used(client, full) == (0, 1)


# --- processes ------------------------------------------------------------------------------------


def _fill_up(address: str, path: str, piece: int) -> None:
    """Writes files of several pieces until there is no room."""
    with ffs.connect(address) as client:
        number = 0
        while True:
            try:
                with client.open(f"{path}.{number}", "wb", 0) as file:
                    for _ in range(5):
                        file.write(bytes(piece))
            except errors.QuotaExceeded:
                return
            number += 1


def test_many_writers_overshoot_by_what_is_on_its_way_at_most(
    address: str, client: Client, home: str
) -> None:
    limit, piece, writers = 8 * MIB, 200_000, 3
    client.set_quota(home, bytes=limit)
    processes = [SPAWN.Process(target=_fill_up, args=(address, f"{home}/{i}", piece)) for i in range(writers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
    settled(client, home)
    total, _ = used(client, home)
    # One request each on its way, for what is written and, with room, at most a 64th of it ahead.
    assert limit - writers * piece < total <= limit + writers * (piece + limit // 64)


def _write_and_die(address: str, path: str) -> None:
    client = ffs.connect(address, session_ttl=1)
    file = client.open(path, "wb", 0)
    file.write(bytes(MIB))
    file.ensure_room(3 * MIB)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_writer_gives_back_what_it_didnt_write(address: str, client: Client, full: str) -> None:
    process = SPAWN.Process(target=_write_and_die, args=(address, f"{full}/a"))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL
    until(lambda: used(client, full) == (MIB, 1), lambda: used(client, full))
    assert client.stat(f"{full}/a").st_size == MIB


def test_a_child_of_fork_asks_for_itself(client: Client, full: str) -> None:
    with client.open(f"{full}/a", "wb", 0) as file:
        file.write(bytes(MIB))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(int(LIMIT_S))
                file.pwrite(bytes(2 * MIB), MIB)
                try:
                    file.pwrite(bytes(2 * MIB), 3 * MIB)
                except errors.QuotaExceeded:
                    code = 0
                file.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        file.pwrite(bytes(MIB), 3 * MIB)
        with pytest.raises(errors.QuotaExceeded):
            file.pwrite(b"x", 4 * MIB)
    assert used(client, full) == (4 * MIB, 1)


def test_kills_of_metadata_services_lose_and_invent_nothing(
    cluster: Supervisor, client: Client, home: str, run: Run
) -> None:
    client.set_quota(home, bytes=100 * MIB, entries=10_000)
    stop = threading.Event()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            while not stop.is_set():
                path = f"{home}/{number}-{rng.randrange(6)}"
                action = rng.randrange(5)
                if action < 3:
                    with client.open(path, "ab" if action else "wb", 0) as file:
                        file.write(bytes(rng.randrange(1, 200_000)))
                        file.write(bytes(rng.randrange(1, 200_000)))
                elif action == 3:
                    client.truncate(path, rng.randrange(300_000))
                else:
                    client.unlink(path)
        except FileNotFoundError:
            work(number + 100)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for index in (0, 1):
        time.sleep(0.5)
        cluster.kill_meta(index)
        cluster.start_meta(index)
    stop.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert failures == []
    settled(client, home)
    until(lambda: run("fsck")[0] == 0, lambda: run("fsck"))  # chunks of what was removed go in the background


# --- setting and clearing -------------------------------------------------------------------------


def _tree(client: Client, top: str) -> None:
    client.makedirs(f"{top}/a/b/c")
    client.create_many([f"{top}/a/b/{number}" for number in range(10)])
    for number in range(10):
        with client.open(f"{top}/a/{number}", "wb") as file:
            file.write(bytes(number * 1000))
    client.link(f"{top}/a/7", f"{top}/a/b/seven")
    client.symlink("a", f"{top}/link")
    client.setxattr(f"{top}/a/7", "user.n", b"v")


def test_what_is_there_already_is_counted(client: Client, home: str, run: Run) -> None:
    _tree(client, home)
    status, out, _ = run("quota", "set", home, "--bytes", "1G", "--entries", "none", "--wait")
    assert status == 0
    assert "of 1.0 GiB" in out
    assert "no limit" in out
    assert used(client, home) == walked(client, home) == (45_000, 24)
    with client.open(f"{home}/a/b/3", "wb") as file:
        file.write(bytes(12345))
    client.rename(f"{home}/a", f"{home}/z")
    client.rmtree(f"{home}/z/b/c")
    settled(client, home)
    client.clear_quota(home)
    assert client.quota(f"{home}/z") is None
    with pytest.raises(errors.InvalidArgument):
        client.clear_quota(home)
    client.set_quota(home, entries=1)  # less than there is: only what is new is refused
    assert counted(client, home).used_entries == walked(client, home)[1]
    client.unlink(f"{home}/z/9")
    with pytest.raises(errors.QuotaExceeded):
        client.mknod(f"{home}/z/9")
    client.set_quota(home, entries=1000)
    client.mknod(f"{home}/z/9")
    settled(client, home)


def test_a_quota_that_is_set_on_an_open_file_counts_from_its_next_flush(client: Client, home: str) -> None:
    with client.open(f"{home}/a", "wb", 0) as file:
        file.write(bytes(MIB))
        client.set_quota(home, bytes=2 * MIB)
        counted(client, home)
        file.write(bytes(MIB // 2))
        file.flush()
        file.write(bytes(MIB // 2))
        with pytest.raises(errors.QuotaExceeded):
            file.write(bytes(MIB))
    settled(client, home)
    assert used(client, home) == (2 * MIB, 1)


def test_commands(client: Client, home: str, run: Run) -> None:
    client.makedirs(f"{home}/a/b")
    assert run("quota", "get", f"{home}/a")[0] == 1
    status, out, _ = run("quota", "set", f"{home}/a", "-b", "2M", "-e", "5", "--wait")
    assert (status, out.splitlines()[1]) == (0, "bytes    0 B of 2.0 MiB (0%), 2.0 MiB free")
    status, out, _ = run("quota", "get", f"{home}/a/b", "--wait")
    assert out.splitlines()[:2] == [f"quota    {home}/a", f"counts   {home}/a/b"]
    status, out, said = run("quota", "set", f"{home}/a/b", "-b", "1M")
    assert status == 1
    assert "nest" in said
    assert any(line.startswith(f"{home}/a ") for line in run("quota", "ls")[1].splitlines())
    status, out, _ = run("df", f"{home}/a")
    assert out.splitlines()[2].split()[:3] == ["quota", "2.0", "MiB"]
    space = client.statvfs(f"{home}/a")
    assert (space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize) == (2 * MIB, 2 * MIB)
    assert client.disk_usage(f"{home}/a").free == 2 * MIB
    assert client.disk_usage(home).free > 2 * MIB
    assert run("quota", "clear", f"{home}/a") == (0, "", "")
    assert run("quota", "get", f"{home}/a")[0] == 1


def test_a_copy_that_finds_no_room_ends_and_leaves_no_scraps(
    client: Client, full: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "t").mkdir()
    for number in range(6):
        (tmp_path / "t" / str(number)).write_bytes(bytes(MIB))
    status, _, said = run("cp", "-r", str(tmp_path / "t"), f"ffs:{full}")
    assert status == 1
    assert "quota" in said
    assert all(client.stat(f"{full}/t/{name}").st_size == MIB for name in client.listdir(f"{full}/t"))


def test_a_file_beyond_the_entries_is_named(client: Client, home: str, run: Run, tmp_path: Path) -> None:
    client.mkdir(f"{home}/one")
    client.set_quota(f"{home}/one", entries=1)
    client.mkdir(f"{home}/one/a")
    (tmp_path / "f").write_bytes(b"x")
    status, _, said = run("put", str(tmp_path / "f"), f"{home}/one/zz")
    assert status == 1
    assert f"{home}/one/zz: 1 of the 1 entries" in said


# --- across the border ----------------------------------------------------------------------------


def test_mv_copies_across_and_a_rename_doesnt(client: Client, home: str, full: str, run: Run) -> None:
    client.set_quota(full, bytes=4 * MIB, entries=100)
    _tree(client, f"{home}/t")
    client.chmod(f"{home}/t/a/5", 0o640)
    client.chmod(f"{home}/t/a/b", 0o2751)
    client.utime(f"{home}/t/a/5", ns=(0, 10**18))
    with pytest.raises(errors.CrossDevice):
        client.rename(f"{home}/t", f"{full}/t")
    with pytest.raises(errors.CrossDevice):
        client.link(f"{home}/t/a/7", f"{full}/seven")
    shape = walked(client, f"{home}/t")
    assert run("mv", f"{home}/t", full) == (0, "", "")
    assert not client.lexists(f"{home}/t")
    assert walked(client, f"{full}/t") == shape
    assert used(client, full) == (shape[0], shape[1] + 1)
    assert client.lstat(f"{full}/t/a/7").st_ino == client.lstat(f"{full}/t/a/b/seven").st_ino
    assert client.getxattr(f"{full}/t/a/7", "user.n") == b"v"
    assert client.readlink(f"{full}/t/link") == "a"
    moved = client.stat(f"{full}/t/a/5")
    assert (stat.S_IMODE(moved.st_mode), moved.st_mtime_ns, moved.st_size) == (0o640, 10**18, 5000)
    assert stat.S_IMODE(client.stat(f"{full}/t/a/b").st_mode) == 0o2751
    # and out again: a file, over another one; -n doesn't
    client.mknod(f"{home}/5")
    assert run("mv", "-n", f"{full}/t/a/5", f"{home}/5")[0] == 1
    assert client.move(f"{full}/t/a/5", f"{home}/5") == f"{home}/5"
    assert client.stat(f"{home}/5").st_size == 5000
    assert not client.lexists(f"{full}/t/a/5")
    store = pytest.importorskip("fsspec").filesystem("ffs", address=client.address)
    store.mv(f"{full}/t", f"{home}/back")
    assert walked(client, f"{home}/back")[1] == shape[1] - 1
    settled(client, full)
    assert used(client, full) == (0, 0)


def test_a_move_that_cant_be_changes_nothing(client: Client, home: str, full: str, run: Run) -> None:
    _tree(client, f"{home}/t")
    before = walked(client, home)
    status, _, said = run("mv", f"{home}/t", f"{full}/t")  # ten entries are allowed
    assert status == 1
    assert "entries" in said
    assert ".ffs-part" not in said
    settled(client, full)
    client.makedirs(f"{full}/u/v")
    for source, target, refusal in (
        (f"{home}/t", f"{full}/u", errors.NotEmpty),
        (f"{home}/t/a/5", f"{full}/u", errors.IsADirectory),
        (home, f"{full}/u/v/w", errors.InvalidArgument),
    ):
        from ffs.client.moving import move_by_copy

        with pytest.raises(refusal):
            move_by_copy(client, source, target)
    from ffs.kv import Space

    Space.create(client, f"{home}/t/kv", block_bytes=4096)
    with pytest.raises(errors.InvalidArgument, match="KV space"):
        client.move(f"{home}/t/kv", f"{full}/kv")
    client.remove(f"{home}/t/kv")
    client.set_quota(f"{home}/t/a/b", entries=50)
    with pytest.raises(errors.InvalidArgument, match="has a quota"):
        client.move(f"{home}/t", f"{full}/t")
    assert client.quota(f"{home}/t/a/b") is not None
    client.clear_quota(f"{home}/t/a/b")
    until(lambda: client.listdir(full) == ["u"], lambda: client.listdir(full))
    settled(client, full)
    assert walked(client, home)[0] == before[0]

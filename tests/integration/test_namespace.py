"""Namespace calls, side by side with os and shutil on a local directory: same results, same errnos."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ffs
from ffs import errors
from ffs.client.client import Client


class Both:
    """Carries out a call on the store and on a local directory and compares what comes out."""

    def __init__(self, client: Client, home: str, local: Path) -> None:
        self.client = client
        self.home = home
        self.local = str(local)

    def __call__(self, name: str, *paths: str, local: Callable[..., Any] | None = None, **words: Any) -> Any:
        """The result of the store's call; AssertionError where the local one differs."""
        function = local or getattr(os, name, None) or getattr(os.path, name, None) or getattr(shutil, name)
        expected = outcome(function, *[self.local + path for path in paths], **words)
        found = outcome(getattr(self.client, name), *[self.home + path for path in paths], **words)
        assert found == expected, f"{name}{paths}: store {found}, local {expected}"
        return found

    def text(self, path: str, content: str) -> None:
        with self.client.open(self.home + path, "w") as file:
            file.write(content)
        with open(self.local + path, "w") as file:
            file.write(content)

    def same_tree(self) -> None:
        """Both hold the same names, types, link counts of files, and modes."""

        def tree(walk: Any, lstat: Any, top: str) -> list[tuple[str, int, int]]:
            found = []
            for directory, folders, others in walk(top):
                for name in folders + others:
                    status = lstat(f"{directory}/{name}")
                    links = 0 if stat.S_ISDIR(status.st_mode) else status.st_nlink
                    # Symbolic links have no mode to speak of.
                    mode = stat.S_IFMT(status.st_mode) if stat.S_ISLNK(status.st_mode) else status.st_mode
                    found.append((f"{directory}/{name}"[len(top) :], mode, links))
            return sorted(found)

        assert tree(self.client.walk, self.client.lstat, self.home) == tree(os.walk, os.lstat, self.local)


def outcome(call: Callable[..., Any], *args: Any, **words: Any) -> Any:
    try:
        result = call(*args, **words)
    except OSError as error:
        return ("error", errno.errorcode[error.errno or 0])
    if isinstance(result, os.stat_result):
        return (stat.filemode(result.st_mode), result.st_size if stat.S_ISREG(result.st_mode) else 0)
    return sorted(result) if isinstance(result, list) else result


@pytest.fixture
def both(client: Client, home: str, tmp_path: Path) -> Both:
    local = tmp_path / "local"
    local.mkdir()
    return Both(client, home, local)


def test_directories(both: Both) -> None:
    both("mkdir", "/a")
    both("mkdir", "/a")
    both("mkdir", "/no/b")
    both("mkdir", "/a/b")
    both("rmdir", "/a")
    both("listdir", "/a")
    both("listdir", "/no")
    both("rmdir", "/a/b")
    both("rmdir", "/a")
    both("rmdir", "/a")
    both.text("/f", "x")
    both("mkdir", "/f/g")
    both("rmdir", "/f")
    both("listdir", "/f")
    both.same_tree()


def test_makedirs(both: Both) -> None:
    both("makedirs", "/a/b/c")
    both("makedirs", "/a/b/c")
    both("makedirs", "/a/b/c", exist_ok=True)
    both("makedirs", "/a/b/c/d/e/f", exist_ok=True)
    both.text("/f", "x")
    both("makedirs", "/f", exist_ok=True)
    both("makedirs", "/f/g", exist_ok=True)
    both.same_tree()


def test_files_and_links(both: Both) -> None:
    both.text("/f", "four")
    both("mknod", "/f")
    both("mknod", "/empty", mode=0o644)
    both("stat", "/f")
    both("link", "/f", "/g")
    both("link", "/f", "/g")
    both("link", "/no", "/h")
    both("mkdir", "/d")
    both("link", "/d", "/h")
    both("remove", "/d")
    both("remove", "/f")
    both("remove", "/f")
    both("stat", "/g")
    both("getsize", "/g")
    both.same_tree()


def test_symbolic_links(both: Both) -> None:
    both.text("/f", "four")
    both.client.symlink("f", both.home + "/good")
    both.client.symlink("no", both.home + "/dangling")
    both.client.symlink("loop", both.home + "/loop")
    both.client.symlink(".", both.home + "/here")
    for source, name in (("f", "good"), ("no", "dangling"), ("loop", "loop"), (".", "here")):
        os.symlink(source, f"{both.local}/{name}")
    for name in ("/good", "/dangling", "/loop", "/here", "/here/here/good", "/f", "/no", "/f/x"):
        for call in ("stat", "lstat", "readlink", "exists", "lexists", "isfile", "isdir", "islink"):
            if name == "/loop" and call in ("exists", "isfile", "isdir"):
                continue  # os.path hides ELOOP, the store tells
            both(call, name)
    both("remove", "/dangling")
    with pytest.raises(errors.NotADirectory, match="not a link"):
        both.client.rmtree(both.home + "/good")
    both("rmtree", "/f")
    both.same_tree()


def test_renames(both: Both) -> None:
    both.text("/f", "one")
    both.text("/g", "three")
    both("mkdir", "/d")
    both("mkdir", "/d/sub")
    both("mkdir", "/empty")
    both("rename", "/no", "/x")
    both("rename", "/f", "/g")
    both("stat", "/g")
    both("rename", "/g", "/d")
    both("rename", "/d", "/g")
    both("rename", "/d", "/d/sub/inside")
    both("rename", "/d", "/d")
    both("rename", "/empty", "/d")
    both("rename", "/d", "/empty")
    both("replace", "/empty/sub", "/moved")
    both("rename", "/g", "/no/x")
    both.same_tree()


def test_rename_of_two_names_of_one_file_does_nothing(both: Both) -> None:
    both.text("/f", "x")
    both("link", "/f", "/g")
    both("rename", "/f", "/g")
    both.same_tree()


def test_exclusive_rename_and_exchange(client: Client, home: str) -> None:
    for name in ("a", "b"):
        with client.open(f"{home}/{name}", "w") as file:
            file.write(name)
    with pytest.raises(errors.Exists):
        client.rename_exclusive(f"{home}/a", f"{home}/b")
    client.exchange(f"{home}/a", f"{home}/b")
    with client.open(f"{home}/a") as file:
        assert file.read() == "b"
    with pytest.raises(errors.NotFound):
        client.exchange(f"{home}/a", f"{home}/c")
    client.rename_exclusive(f"{home}/a", f"{home}/c")
    assert sorted(client.listdir(home)) == ["b", "c"]


def test_attributes(client: Client, home: str) -> None:
    path = f"{home}/f"
    client.create_many([path])
    client.chmod(path, 0o640)
    assert stat.filemode(client.stat(path).st_mode) == "-rw-r-----"
    client.chown(path, 12, -1)
    client.chown(path, -1, 34)
    assert (client.stat(path).st_uid, client.stat(path).st_gid) == (12, 34)
    client.utime(path, ns=(1, 1_234_567_890_123_456_789))
    assert client.stat(path).st_mtime_ns == 1_234_567_890_123_456_789
    client.utime(path, (0, 1.5))
    assert client.stat(path).st_mtime == 1.5
    client.utime(path)
    assert abs(client.stat(path).st_mtime - time.time()) < 600
    with pytest.raises(ValueError, match="both"):
        client.utime(path, (0, 0), ns=(0, 0))
    client.truncate(path, 100)
    assert client.stat(path).st_size == 100
    with pytest.raises(errors.InvalidArgument):
        client.truncate(path, -1)
    with pytest.raises(errors.NotFound):
        client.chmod(f"{home}/no", 0o600)


def test_umask_and_modes(both: Both) -> None:
    for mode in (0o777, 0o700, 0o1777):
        name = f"/d{mode:o}"
        both.client.mkdir(both.home + name, mode)
        os.mkdir(both.local + name, mode)
    both.text("/f", "x")
    both.same_tree()


def test_scandir(client: Client, home: str) -> None:
    client.mkdir(f"{home}/d")
    client.symlink("d", f"{home}/to-d")
    client.symlink("no", f"{home}/dangling")
    with client.open(f"{home}/f", "wb") as file:
        file.write(b"12345")
    with client.scandir(home) as entries:
        found = {entry.name: entry for entry in entries}
    assert sorted(found) == ["d", "dangling", "f", "to-d"]
    assert found["f"].path == os.fspath(found["f"]) == f"{home}/f"
    assert found["f"].is_file()
    assert not found["f"].is_dir()
    assert found["f"].stat().st_size == 5
    assert found["f"].inode() == client.stat(f"{home}/f").st_ino
    assert found["d"].is_dir()
    assert found["to-d"].is_symlink()
    assert found["to-d"].is_dir()
    assert not found["to-d"].is_dir(follow_symlinks=False)
    assert stat.S_ISLNK(found["to-d"].stat(follow_symlinks=False).st_mode)
    assert stat.S_ISDIR(found["to-d"].stat().st_mode)
    assert not found["dangling"].is_file()
    with pytest.raises(errors.NotFound):
        client.scandir(f"{home}/no")


def test_listing_over_many_pages(client: Client, home: str) -> None:
    names = [f"{number:05}" for number in range(2500)]
    results = client.create_many(f"{home}/{name}" for name in names)
    assert all(isinstance(result, os.stat_result) for result in results)
    assert sorted(client.listdir(home)) == names
    assert sorted(entry.name for entry in client.scandir(home)) == names
    assert client.unlink_many(f"{home}/{name}" for name in names) == [None] * 2500
    assert client.listdir(home) == []


def test_batches_give_results_and_errors_by_entry(client: Client, home: str) -> None:
    paths = [f"{home}/a", f"{home}/no/b", f"{home}/a", f"{home}/c"]
    created = client.create_many(paths)
    assert [type(result) for result in created] == [
        os.stat_result,
        errors.NotFound,
        errors.Exists,
        os.stat_result,
    ]
    found = client.stat_many([f"{home}/a", f"{home}/b", f"{home}/c"])
    assert [type(result) for result in found] == [os.stat_result, errors.NotFound, os.stat_result]
    removed = client.unlink_many([f"{home}/a", f"{home}/a", f"{home}/c"])
    assert [type(result) for result in removed] == [type(None), errors.NotFound, type(None)]
    assert [client.stat_many([]), client.create_many([]), client.unlink_many([])] == [[], [], []]


def test_removing_a_tree(client: Client, home: str) -> None:
    client.makedirs(f"{home}/t/a/b/c")
    client.create_many(f"{home}/t/a/{number}" for number in range(50))
    client.symlink("/", f"{home}/t/root")
    client.rmtree(f"{home}/t")
    assert client.listdir(home) == []
    with pytest.raises(errors.NotFound):
        client.rmtree(f"{home}/t")
    client.rmtree(f"{home}/t", ignore_errors=True)
    assert client.isdir("/")
    client.mkdir(f"{home}/t")
    assert client.listdir(f"{home}/t") == []


def test_walk_is_as_of_os(both: Both) -> None:
    both("makedirs", "/a/b/c")
    both("makedirs", "/d")
    both.text("/a/x", "")
    both.text("/a/b/y", "")
    for topdown in (True, False):

        def steps(walk: Any, top: str, topdown: bool = topdown) -> list[Any]:
            found = [(d[len(top) :], sorted(f), sorted(o)) for d, f, o in walk(top, topdown)]
            return sorted(found)

        assert steps(both.client.walk, both.home) == steps(os.walk, both.local)
    pruned = []
    for directory, folders, _ in both.client.walk(both.home):
        pruned.append(directory[len(both.home) :])
        folders[:] = [name for name in folders if name != "b"]
    assert sorted(pruned) == ["", "/a", "/d"]
    assert list(both.client.walk(both.home + "/no")) == []


def test_access(client: Client, home: str) -> None:
    assert client.access(home, os.R_OK | os.W_OK | os.X_OK)
    assert not client.access(f"{home}/no")


def test_copies_and_moves(client: Client, home: str) -> None:
    with client.open(f"{home}/f", "wb", chunk_size=4096) as file:
        file.write(bytes(range(256)) * 100)
    client.chmod(f"{home}/f", 0o600)
    client.mkdir(f"{home}/d")
    assert client.copyfile(f"{home}/f", f"{home}/g") == f"{home}/g"
    assert client.copy(f"{home}/f", f"{home}/d") == f"{home}/d/f"
    assert stat.S_IMODE(client.stat(f"{home}/d/f").st_mode) == 0o600
    with client.open(f"{home}/d/f", "rb") as file:
        assert file.read() == bytes(range(256)) * 100
    with pytest.raises(errors.InvalidArgument, match="same file"):
        client.copyfile(f"{home}/f", f"{home}/f")
    with pytest.raises(errors.Exists):
        client.move(f"{home}/f", f"{home}/d")
    client.move(f"{home}/g", f"{home}/d")
    assert sorted(client.listdir(f"{home}/d")) == ["f", "g"]


def test_space(client: Client) -> None:
    usage = client.disk_usage("/")
    assert usage.total == usage.used + usage.free
    assert usage.total > 0
    status = client.statvfs("/")
    assert abs(status.f_blocks * status.f_frsize - usage.total) < 4096
    assert status.f_namemax == 255


def test_layouts_are_inherited(client: Client, home: str) -> None:
    client.mkdir(f"{home}/d", chunk_size=65536, table="single")
    client.makedirs(f"{home}/d/e", exist_ok=True)
    with client.open(f"{home}/d/e/f", "wb") as file:
        layout = file.raw_file.placement.layout
    assert layout.chunk_size == 65536
    assert client.attributes(f"{home}/d/e/f").layout == layout
    with client.open(f"{home}/d/g", "wb", chunk_size=4096, stripe=2, table="default") as file:
        placement = file.raw_file.placement
    assert (placement.layout.chunk_size, placement.stripe) == (4096, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_size": 5000}, "chunk size 5000: give a power of two"),
        ({"chunk_size": 2048}, "chunk size 2048"),
        ({"chunk_size": 32 << 20}, "chunk size"),
        ({"stripe": 100_000}, "stripe 100000"),
        ({"stripe": -1}, "stripe -1"),
        ({"table": "nothing"}, "no chain table 'nothing'; there are: default, single"),
    ],
)
def test_bad_layouts_leave_nothing(client: Client, home: str, options: dict[str, Any], words: str) -> None:
    """S12: a stripe larger than the table surfaced as EIO on write."""
    for make in (client.mkdir, client.makedirs, lambda path, **given: client.open(path, "wb", **given)):
        with pytest.raises(OSError, match=words):
            make(f"{home}/x", **options)
    assert client.listdir(home) == []


@pytest.mark.parametrize("call", ["stat", "listdir", "mkdir", "remove", "rmtree", "readlink", "open"])
def test_bad_paths(client: Client, call: str) -> None:
    for path, code in (("a", errno.EINVAL), ("/a\0", errno.EINVAL), ("/" + "n" * 256, errno.ENAMETOOLONG)):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - judged by its errno below
            getattr(client, call)(path)
        assert caught.value.errno == code


def test_odd_names(client: Client, home: str) -> None:
    names = ["a b", "é", "日本", "n" * 255, "\udcff\udc80", "new\nline", "...", "-", "*"]
    for name in names:
        client.create_many([f"{home}/{name}"])
    assert sorted(client.listdir(home)) == sorted(names)
    assert client.unlink_many(f"{home}/{name}" for name in names) == [None] * len(names)


def _make_one_path(address: str, path: str, results: Any) -> None:
    try:
        with ffs.connect(address) as client:
            client.makedirs(path, exist_ok=True)
        results.put("")
    except BaseException as error:
        results.put(repr(error))


def test_many_processes_make_one_path(address: str, home: str, client: Client) -> None:
    """S28: 64 processes making one deep path got FileExistsError."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    path = f"{home}/" + "/".join("abcdefgh")
    processes = [context.Process(target=_make_one_path, args=(address, path, results)) for _ in range(16)]
    for process in processes:
        process.start()
    failures = [results.get() for _ in processes]
    for process in processes:
        process.join(60)
    assert failures == [""] * len(processes)
    assert client.isdir(path)


def test_many_threads_make_one_path(client: Client, home: str) -> None:
    path = f"{home}/" + "/".join("abcdefgh")
    failures: list[BaseException] = []

    def make() -> None:
        try:
            client.makedirs(path, exist_ok=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert client.isdir(path)


def test_exactly_one_of_many_creates(client: Client, home: str) -> None:
    won: list[int] = []

    def create(number: int) -> None:
        try:
            client.open(f"{home}/lock", "xb").close()
            won.append(number)
        except errors.Exists:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 1


def test_another_client_sees_at_once(address: str, client: Client, home: str) -> None:
    """S27: stale listings after a copy."""
    with ffs.connect(address) as other:
        for number in range(20):
            client.mkdir(f"{home}/{number}")
            assert str(number) in other.listdir(home)
            other.rmdir(f"{home}/{number}")
            assert not client.exists(f"{home}/{number}")


def test_status_names_nodes_and_chains(client: Client) -> None:
    status = client.cluster_status()
    assert len(status.nodes) == 3
    assert {table.name for table in status.tables} == {"default", "single"}
    assert all(chain.writable for chain in status.chains)

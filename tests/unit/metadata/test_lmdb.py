"""The embedded store: group commit, several processes, durability under kills, a stopped writer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ffs import errors
from metadata.kv import lmdb_store
from metadata.kv.contract import Snapshot, Store, Transaction
from metadata.kv.lmdb_holder import Holder, HolderFile, boot_id, start_ticks
from metadata.kv.lmdb_store import LmdbStore

ROOT = Path(__file__).parents[3]

HEAD = """
import asyncio, os, signal, sys, time
from metadata.kv.lmdb_store import LmdbStore

async def add(store, key):
    async def body(txn):
        value = int(await txn.get(key) or b"0")
        txn.set(key, b"%d" % (value + 1))
        return value + 1
    return await store.run(body)
"""


@pytest.fixture
def spawn() -> Iterator[object]:
    """Runs Python code in a process of its own that has a store's path as argument."""
    children: list[subprocess.Popen[str]] = []

    def start(code: str, path: Path) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", HEAD + textwrap.dedent(code), str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


async def add(store: Store, key: bytes) -> int:
    async def body(txn: Transaction) -> int:
        value = int(await txn.get(key) or b"0")
        txn.set(key, b"%d" % (value + 1))
        return value + 1

    return await store.run(body)


async def get(store: Store, key: bytes) -> int:
    async def body(snap: Snapshot) -> int:
        return int(await snap.get(key) or b"0")

    return await store.read(body)


def test_many_transactions_share_a_commit(tmp_path: Path) -> None:
    async def main() -> None:
        store = LmdbStore(tmp_path / "s")

        async def put(i: int) -> None:
            async def body(txn: Transaction) -> None:
                txn.set(b"%d" % i, b"x")

            await store.run(body)

        await asyncio.gather(*(put(i) for i in range(500)))
        assert store.commits < 50
        await store.close()

    asyncio.run(main())


def test_urgent_transactions_go_first(tmp_path: Path) -> None:
    async def main() -> None:
        store = LmdbStore(tmp_path / "s")
        order: list[str] = []

        async def put(name: str, urgent: bool) -> None:
            async def body(txn: Transaction) -> None:
                txn.set_stamped(b"log", b"", name.encode())

            await store.run(body, urgent=urgent)

        await asyncio.gather(*(put(f"n{i}", False) for i in range(5)), put("urgent", True))
        order = [v.decode() for _, v in await store.read(lambda snap: snap.range(b"log", b"loh"))]
        assert order[0] == "urgent"
        await store.close()

    asyncio.run(main())


def test_processes_share_a_store(tmp_path: Path, spawn: object) -> None:
    """Four processes add to one number at once: nothing is lost, nothing conflicts for ever."""
    # Where a commit takes long, an addition may run out of its time before its turn comes.
    code = """
        from ffs.errors import DeadlineExceeded

        async def persist(store):
            while True:
                try:
                    return await add(store, b"n")
                except DeadlineExceeded:
                    pass

        async def main():
            store = LmdbStore(sys.argv[1])
            await asyncio.gather(*(persist(store) for _ in range(20)))
            await store.close()
        asyncio.run(main())
    """
    make_store(tmp_path / "s")
    children = [spawn(code, tmp_path / "s") for _ in range(4)]  # type: ignore[operator]
    assert [child.wait(120) for child in children] == [0] * 4

    async def main() -> None:
        store = LmdbStore(tmp_path / "s")
        assert await get(store, b"n") == 80
        await store.close()

    asyncio.run(main())


def test_reader_slots_of_killed_processes_are_taken_back(
    tmp_path: Path, spawn: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a process that has had the store open all the time."""
    slots = 4
    monkeypatch.setattr(lmdb_store, "MAX_READERS", slots)
    code = """
        store = LmdbStore(sys.argv[1])
        reader = store.begin()
        print("reading", flush=True)
        time.sleep(600)
    """

    async def main() -> None:
        store = LmdbStore(tmp_path / "s")
        children = [spawn(code, tmp_path / "s") for _ in range(slots)]  # type: ignore[operator]
        assert [child.stdout.readline() for child in children] == ["reading\n"] * slots
        for child in children:
            child.kill()
            child.wait()
        assert await add(store, b"n") == 1
        assert await get(store, b"n") == 1
        await store.close()

    asyncio.run(main())


def test_the_snapshot_of_a_killed_process_goes(
    tmp_path: Path, spawn: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no page that it might read could be used again, and the file would grow."""
    monkeypatch.setattr(lmdb_store, "READER_CHECK_S", 0.0)
    code = """
        store = LmdbStore(sys.argv[1])
        reader = store.begin()
        print("reading", flush=True)
        time.sleep(600)
    """

    async def main() -> None:
        store = LmdbStore(tmp_path / "s")
        child = spawn(code, tmp_path / "s")  # type: ignore[operator]
        assert child.stdout.readline() == "reading\n"
        assert await add(store, b"n") == 1
        assert str(child.pid) in store._env.readers()
        child.kill()
        child.wait()
        assert await add(store, b"n") == 2
        assert str(child.pid) not in store._env.readers()
        await store.close()

    asyncio.run(main())


def make_store(path: Path) -> None:
    """Makes an empty store."""

    async def main() -> None:
        await LmdbStore(path).close()

    asyncio.run(main())


def test_acknowledged_commits_survive_kill_9(tmp_path: Path, spawn: object) -> None:
    """A process that prints each number after its commit is killed, ten times; what it printed is there."""
    code = """
        async def main():
            store = LmdbStore(sys.argv[1])
            while True:
                print(await add(store, b"n"), flush=True)
        asyncio.run(main())
    """
    make_store(tmp_path / "s")
    for round_ in range(10):
        child = spawn(code, tmp_path / "s")  # type: ignore[operator]
        for _ in range(3 + round_):
            line = child.stdout.readline()
        child.kill()
        child.wait()
        last = int((line + child.stdout.read()).split("\n")[-2])

        async def main(last: int = last) -> None:
            store = LmdbStore(tmp_path / "s")
            assert await get(store, b"n") in (last, last + 1)
            await store.close()

        asyncio.run(main())


def test_a_stopped_writer_is_killed(tmp_path: Path, spawn: object) -> None:
    """A peer that stands still with the writer lock in its hands is killed, and the store goes on."""
    code = """
        async def main():
            store = LmdbStore(sys.argv[1])
            await add(store, b"n")
            apply = store._apply_group
            def stop(txn, group):
                print("holding", flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(60)  # another thread may take the signal: this one mustn't go on meanwhile
                return apply(txn, group)
            store._apply_group = stop
            await add(store, b"n")
        asyncio.run(main())
    """
    make_store(tmp_path / "s")
    child = spawn(code, tmp_path / "s")  # type: ignore[operator]
    assert child.stdout.readline() == "holding\n"

    async def main() -> None:
        store = LmdbStore(tmp_path / "s", holder_limit_s=0.3)
        assert await asyncio.wait_for(add(store, b"n"), 60) == 2
        await store.close()

    asyncio.run(main())
    assert child.wait(60) == -signal.SIGKILL


def test_a_slow_writer_that_goes_on_is_not_killed(tmp_path: Path, spawn: object) -> None:
    """Holding the lock again and again isn't standing still."""
    code = """
        async def main():
            store = LmdbStore(sys.argv[1])
            apply = store._apply_group
            def slow(txn, group):
                time.sleep(0.1)
                return apply(txn, group)
            store._apply_group = slow
            print("ready", flush=True)
            for _ in range(30):
                await add(store, b"slow")
            await store.close()
        asyncio.run(main())
    """
    make_store(tmp_path / "s")
    child = spawn(code, tmp_path / "s")  # type: ignore[operator]
    assert child.stdout.readline() == "ready\n"

    async def main() -> None:
        store = LmdbStore(tmp_path / "s", holder_limit_s=2)
        for _ in range(5):
            await add(store, b"n")
        await store.close()

    asyncio.run(main())
    assert child.wait(60) == 0


def test_the_holder_record_is_exact(tmp_path: Path) -> None:
    """Nobody is killed on a record of another boot, of a process that ended, of a pid used anew, of a hold
    that is over, or of oneself."""
    mine = HolderFile(tmp_path / "writer")
    hold = mine.take()
    assert mine.read() == Holder(os.getpid(), start_ticks(os.getpid()) or 0, hold, boot_id())
    assert not mine.kill(mine.read())
    mine.drop(hold + 1)
    assert mine.read().pid
    mine.drop(hold)
    assert mine.read().pid == 0
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        started = start_ticks(child.pid)
        assert started is not None
        theirs = HolderFile(tmp_path / "writer")
        theirs._pid, theirs._start = child.pid, started
        seen = Holder(child.pid, started, theirs.take(), boot_id())
        for wrong in (
            seen._replace(boot=bytes(16)),
            seen._replace(start_ticks=started + 1),
            seen._replace(hold=seen.hold + 1),
            seen._replace(pid=2**22 - 1),
        ):
            assert not mine.kill(wrong)
        assert child.poll() is None
        assert mine.kill(seen)
        assert child.wait(60) == -signal.SIGKILL
        assert not mine.kill(seen)
    finally:
        child.kill()
        child.wait()
        mine.close()


def test_bad_places(tmp_path: Path) -> None:
    with pytest.raises(errors.NotFound):
        LmdbStore(tmp_path / "none" / "s")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.FfsError):
        LmdbStore(tmp_path / "file")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "data.mdb").write_bytes(b"no store" * 1024)
    with pytest.raises(errors.Damaged, match="can't open"):
        LmdbStore(tmp_path / "bad")


def test_a_full_store_is_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metadata.kv.lmdb_store.MAP_BYTES", 1 << 20)

    async def main() -> None:
        store = LmdbStore(tmp_path / "s")

        async def fill(i: int) -> None:
            async def body(txn: Transaction) -> None:
                txn.set(b"%d" % i, bytes(50_000))

            await store.run(body)

        async def fill_all() -> None:
            for i in range(100):
                await fill(i)

        with pytest.raises(errors.NoSpace, match="full"):
            await fill_all()
        assert await add(store, b"n") == 1  # small things still go
        await store.close()

    asyncio.run(main())


def test_reads_go_on_during_a_commit(tmp_path: Path) -> None:
    """The loop isn't held while the committer flushes."""

    async def main() -> None:
        store = LmdbStore(tmp_path / "s")
        await add(store, b"n")
        task = asyncio.ensure_future(add(store, b"n"))
        reads = 0
        while not task.done():
            assert store.read_now(lambda snap: snap.get(b"n")) in (b"1", b"2")
            reads += 1
            await asyncio.sleep(0)
        assert reads > 1
        assert store.read_now(lambda snap: snap.get(b"n")) == b"2"
        await store.close()

    asyncio.run(main())


def test_read_now_refuses_to_wait(tmp_path: Path) -> None:
    async def body(snap: Snapshot) -> None:
        await asyncio.sleep(0)

    async def main() -> None:
        store = LmdbStore(tmp_path / "s")
        with pytest.raises(AssertionError):
            store.read_now(body)
        await store.close()

    asyncio.run(main())

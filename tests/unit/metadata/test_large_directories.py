"""Directories of many entries: listed, counted and removed in pages, within the limits of transactions
(FAULTS.md, S24); and collection that is killed anywhere and goes on, without touching what was made anew.

The store is LMDB, under a wrapper that holds the limits of 5 s and 8 MiB. FFS_LARGE_ENTRIES=1000000 runs it
at full size (tests/soak.sh)."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ffs.proto import meta
from metadata.fs.collect_files import FORGET, PER_CHAIN
from metadata.fs.collector import ENTRIES as ENTRIES_OF_PAGE
from metadata.fs.collector import Collector
from metadata.fs.core import Core
from metadata.fs.namespace import Namespace
from metadata.fs.schema import inode_key
from metadata.kv.contract import Store, Transaction
from metadata.kv.faults import Died, FaultyStore, Rates
from metadata.kv.lmdb_store import LmdbStore
from metadata.kv.memory import MemoryStore

sys.path.insert(0, str(Path(__file__).parents[2] / "model"))

from namespace_fakes import CLUSTER, Caller, FakeChains, FakeCluster, make_namespace

ENTRIES = int(os.environ.get("FFS_LARGE_ENTRIES", "10000"))
CREATE = meta.OPEN_READ | meta.OPEN_CREATE | meta.OPEN_EXCL


async def fill(me: Caller, directory: bytes, count: int) -> None:
    for begin in range(0, count, meta.MAX_BATCH):
        page = range(begin, min(begin + meta.MAX_BATCH, count))
        entries = tuple(meta.OpenEntry(directory + b"/f%07d" % at, CREATE) for at in page)
        reply = await me(meta.OpenMany(entries=entries))
        assert all(isinstance(result, meta.Opened) for result in reply.results)


async def write(me: Caller, chains: FakeChains, path: bytes, length: int) -> int:
    """A file with chunks; its inode."""
    opened = await me(meta.Open(path=path, flags=meta.OPEN_WRITE | meta.OPEN_CREATE))
    assert opened.attributes.layout is not None
    chains.write(
        opened.ino,
        opened.attributes.layout,
        opened.attributes.epoch,
        0,
        length,
        FakeCluster().tables[1].chains,
    )
    await me(meta.Close(ino=opened.ino, handle=opened.handle, length=length, written=True))
    return int(opened.ino)


async def leftovers(store: Store) -> dict[bytes, int]:
    """Inodes, entries and records of collection, by kind."""
    counts: dict[bytes, int] = {}
    for begin, end in ((b"d", b"e"), (b"g", b"h"), (b"i", b"j")):
        after = begin
        while True:
            start = after
            pairs = await store.read(lambda snap, start=start, end=end: snap.range(start, end, 5000))
            whole = [key for key, _ in pairs if begin != b"i" or len(key) == 11]
            counts[begin] = counts.get(begin, 0) + len(whole)
            if len(pairs) < 5000:
                break
            after = pairs[-1][0] + b"\0"
    return counts


# Collects in a process of its own until nothing is left, or until it is killed.
COLLECT = f"""
import asyncio, random, resource, sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "model")!r})
from namespace_fakes import CLUSTER, FakeChains, FakeCluster
from metadata.fs.collector import Collector
from metadata.fs.core import Core
from metadata.kv.faults import FaultyStore, Rates
from metadata.kv.lmdb_store import LmdbStore

async def main():
    store = FaultyStore(LmdbStore(sys.argv[1]), Rates(), random.Random(0))
    collector = Collector(Core(store, FakeCluster(), FakeChains(), cluster_id=CLUSTER))
    print("begins", flush=True)
    while await collector.step():
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"collector: {{collector.collected}} collected, at most {{store.largest[0]:.2f}} s and "
          f"{{store.largest[1]}} bytes a transaction, {{peak >> 10}} MiB")
    await store.close()

asyncio.run(main())
"""


def collect_and_kill(store: Path, rng: random.Random) -> int:
    """Collects all, in processes of which the first four are killed. How many were."""
    kills = 0
    while True:
        with subprocess.Popen(
            [sys.executable, "-c", COLLECT, str(store)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "begins\n"
            try:
                child.wait(rng.uniform(0.0, 0.4) if kills < 4 else 3600)
            except subprocess.TimeoutExpired:
                kills += 1
                child.send_signal(signal.SIGKILL)
                continue
            assert child.returncode == 0
            print(child.stdout.read(), end="")
            return kills


def test_a_large_directory(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)

    async def main() -> None:
        store = FaultyStore(LmdbStore(tmp_path / "store"), Rates(), rng)
        namespace, _, _ = await make_namespace(store)
        me = await Caller.connect(namespace)
        began = time.monotonic()
        await me(meta.MkDir(path=b"/big/sub", parents=True))
        await fill(me, b"/big", ENTRIES)
        made = time.monotonic()
        assert (await me(meta.Stat(path=b"/big"))).attributes.length == ENTRIES + 1
        names, after = 0, b""
        while True:
            page = await me(meta.ReadDir(path=b"/big", after=after, limit=meta.MAX_PAGE))
            assert page.entries[0].name > after
            names += len(page.entries)
            after = page.entries[-1].name
            if not page.more:
                break
        assert names == ENTRIES + 1
        listed = time.monotonic()
        commits = store.commits
        await me(meta.RemoveTree(path=b"/big"))
        assert store.commits == commits + 1
        gone = time.monotonic()
        await me(meta.MkDir(path=b"/big/sub", parents=True))
        await fill(me, b"/big", 100)
        kills = await asyncio.to_thread(collect_and_kill, tmp_path / "store", rng)
        removed = time.monotonic()
        assert await leftovers(store) == {b"d": 102, b"g": 0, b"i": 103}
        assert len((await me(meta.ReadDir(path=b"/big", limit=200))).entries) == 101
        await store.close()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{ENTRIES} entries: made in {made - began:.1f} s ({ENTRIES / (made - began):.0f}/s), listed in "
            f"{listed - made:.1f} s ({ENTRIES / (listed - made):.0f}/s), rmtree in {gone - listed:.3f} s, "
            f"collected in {removed - gone:.1f} s ({ENTRIES / (removed - gone):.0f}/s) with {kills} kills; "
            f"at most {store.largest[0]:.2f} s and {store.largest[1]} bytes a transaction, {peak >> 10} MiB"
        )

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["died_applied", "died_lost", "unknown_lost", "unknown_applied"])
def test_collection_that_is_cut_off_at_any_commit(fault: str) -> None:
    """Another process goes on from the records; what got the old names meanwhile stays."""

    async def story(cut_at: int) -> bool:
        store = FaultyStore(MemoryStore(), Rates(), random.Random(0))
        namespace, cluster, chains = await make_namespace(store)
        me = await Caller.connect(namespace)
        await me(meta.MkDir(path=b"/d/e/f", parents=True))
        await fill(me, b"/d/e", ENTRIES_OF_PAGE + 50)
        await fill(me, b"/d/e/f", 3)
        await write(me, chains, b"/d/e/f/data", 3 * 4096)
        await me(meta.Link(source=b"/d/e/f0000001", target=b"/kept"))
        await me(meta.RemoveTree(path=b"/d"))
        await me(meta.MkDir(path=b"/d/e", parents=True))
        await fill(me, b"/d/e", 2)
        store.script[store.commits + cut_at] = fault
        try:
            while await Collector(namespace.core).step():
                pass
        except Died:
            pass
        met = not store.script
        store.script.clear()
        other = Collector(Core(store, cluster, chains, cluster_id=CLUSTER))
        while await other.step():
            pass
        assert await leftovers(store) == {b"d": 5, b"g": 0, b"i": 6}, f"cut at commit {cut_at}"
        assert not chains.spaces()
        assert (await me(meta.Stat(path=b"/kept"))).attributes.nlink == 1
        return met

    async def main() -> None:
        cut_at = 0
        while await story(cut_at):
            cut_at += 1
        assert cut_at >= 6  # three directories, two of which take two pages, and two batches of files

    asyncio.run(main())


def test_collectors_side_by_side() -> None:
    """Any number may run, over a store with faults: the counts come out the same."""
    seed = random.randrange(2**32)
    print("seed", seed)

    async def main() -> None:
        rates = Rates(conflict=0.1, unknown_applied=0.1, unknown_lost=0.1, twice=0.2)
        store = FaultyStore(MemoryStore(), Rates(), random.Random(seed))
        namespace, _, _ = await make_namespace(store)
        me = await Caller.connect(namespace)
        await me(meta.MkDir(path=b"/d/e", parents=True))
        await fill(me, b"/d/e", ENTRIES_OF_PAGE + FORGET)
        await me(meta.RemoveTree(path=b"/d"))
        store.rates = rates

        async def collect() -> None:
            collector = Collector(Core(store, FakeCluster(), FakeChains(), cluster_id=CLUSTER))
            while await collector.step():
                pass

        await asyncio.gather(*(collect() for _ in range(3)))
        store.rates = Rates()
        await collect()
        assert await leftovers(store) == {b"d": 0, b"g": 0, b"i": 1}
        assert isinstance(namespace, Namespace)

    asyncio.run(main())


def test_what_cant_be_collected_holds_up_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """A chain that is away, a file that somebody writes, one whose record can't be read: the others of their
    batch go, and they when they can. A chain that is away is asked for a few files only in a pass."""

    async def main() -> None:
        store = MemoryStore()
        namespace, _, chains = await make_namespace(store)
        me = await Caller.connect(namespace)
        await me(meta.MkDir(path=b"/d", parents=True))
        inos = [await write(me, chains, b"/d/f%d" % at, 4096) for at in range(150)]
        held = await me(meta.Open(path=b"/d/f0", flags=meta.OPEN_WRITE))
        away = 101
        there = {space for space, _ in chains.chunks[away]} - {inos[0]}
        damaged = next(ino for ino in inos[1:] if ino not in there)
        assert 16 < len(there) < 50
        await me(meta.RemoveTree(path=b"/d"))
        collector = Collector(namespace.core)
        chains.away.add(away)
        await collector.step()  # the directory
        whole = await store.read(lambda snap: snap.get(inode_key(damaged)))
        assert whole is not None
        await put(store, inode_key(damaged), b"no inode")
        chains.refused = 0
        assert await collector.step() == 150 - 2 - len(there)
        assert chains.refused <= PER_CHAIN
        assert chains.spaces() == there | {damaged, inos[0]}
        assert f"inode {damaged} can't be collected" in caplog.text
        assert "chain 101" in caplog.text
        chains.away.clear()
        assert await collector.step() == len(there)
        await me(meta.Close(ino=held.ino, handle=held.handle))
        assert await collector.step() == 1
        assert await collector.step() == 0
        await put(store, inode_key(damaged), whole)
        assert await collector.step() == 1
        assert not chains.spaces()
        assert await leftovers(store) == {b"d": 0, b"g": 0, b"i": 1}

    asyncio.run(main())


async def put(store: Store, key: bytes, value: bytes) -> None:
    async def body(txn: Transaction) -> None:
        txn.set(key, value)

    await store.run(body)

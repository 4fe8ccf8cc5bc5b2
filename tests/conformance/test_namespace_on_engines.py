"""The namespace works on every engine: one story, told on each, with faults and without."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import fake_fdb
import pytest

from ffs import errors
from ffs.proto import meta
from ffs.proto.records import KvParams
from metadata.fs.collector import Collector
from metadata.fs.sessions import SessionSweeper
from metadata.fs.spaces import SpaceIndex, read_index
from metadata.kv import open_store
from metadata.kv.contract import Store
from metadata.kv.faults import FaultyStore, Rates
from metadata.kv.fdb_store import FdbStore

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from namespace_fakes import Caller, make_namespace

RATES = Rates(conflict=0.1, unknown_applied=0.1, unknown_lost=0.1, too_old=0.05, twice=0.3)

ENGINES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda path: open_store("memory://"),
    "lmdb": lambda path: open_store(f"lmdb://{path}/s"),
    "fdb stand-in": lambda path: FdbStore(None, prefix=b"p/", binding=fake_fdb.Binding()),
}
if "FFS_TEST_FDB_CLUSTER" in os.environ:
    ENGINES["fdb"] = lambda path: open_store(
        f"fdb://{os.environ['FFS_TEST_FDB_CLUSTER']}?prefix=ffs-test-{uuid.uuid4().hex}/"
    )


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_one_story(engine: str, faulty: bool, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)

    async def main() -> None:
        store = FaultyStore(ENGINES[engine](tmp_path), RATES if faulty else Rates(), random.Random(seed))
        namespace, _, chains = await make_namespace(store, seed=seed)
        me = await Caller.connect(namespace)
        await me(meta.MkDir(path=b"/a/b/c", parents=True))
        opened = await me(meta.Open(path=b"/a/b/f", flags=meta.OPEN_WRITE | meta.OPEN_CREATE))
        layout = opened.attributes.layout
        chains.write(opened.ino, layout, 0, 0, 10_000, range(100, 105))
        closed = await me(meta.Close(ino=opened.ino, handle=opened.handle, length=10_000, written=True))
        assert closed.length == 10_000
        await me(meta.Truncate(path=b"/a/b/f", length=100))
        assert chains.end(opened.ino, 4096) == 100
        await me(meta.Rename(source=b"/a/b/f", target=b"/g"))
        await me(meta.Link(source=b"/g", target=b"/h"))
        await me(meta.SymLink(path=b"/l", target=b"a/b"))
        entries = tuple(
            meta.OpenEntry(b"/l/m%03d" % i, meta.OPEN_READ | meta.OPEN_CREATE) for i in range(130)
        )
        made = await me(meta.OpenMany(entries=entries))
        assert len({entry.ino for entry in made.results}) == 130
        page = await me(meta.ReadDir(path=b"/a/b", after=b"m100", limit=10, attributes=True))
        assert [e.name for e in page.entries] == [b"m%03d" % i for i in range(101, 111)]
        assert page.more
        with pytest.raises(errors.NotEmpty):
            await me(meta.RmDir(path=b"/a/b"))
        await me(meta.RemoveTree(path=b"/a"))
        await me(meta.Unlink(path=b"/g"))
        assert (await me(meta.Stat(path=b"/h"))).attributes.nlink == 1
        await me(meta.Unlink(path=b"/h"))
        spaces = [
            (await me(meta.KvCreate(path=b"/kv%d" % i, params=KvParams(4096, quota_bytes=1 << 20)))).ino
            for i in range(4)
        ]
        await me(meta.SetKvSpace(path=b"/kv1", what=meta.SET_QUOTA, quota_bytes=2 << 20))
        await me(meta.Rename(source=b"/kv1", target=b"/kv2"))  # the one of that name goes
        await me(meta.Unlink(path=b"/kv3"))
        index = await store.read(lambda snap: read_index(snap, SpaceIndex()))
        assert {ino: entry.kv.quota_bytes for ino, entry in index.spaces.items()} == {
            spaces[0]: 1 << 20,
            spaces[1]: 2 << 20,
        }
        await me(meta.UnlinkMany(paths=(b"/kv0", b"/kv2")))
        dead = await Caller.connect(namespace)
        late = await dead(meta.Open(path=b"/late", flags=meta.OPEN_WRITE | meta.OPEN_CREATE))
        chains.write(late.ino, late.attributes.layout, 0, 0, 5000, range(100, 105))
        await dead(meta.SessionClose())
        await SessionSweeper(namespace.core).step()
        assert (await me(meta.Stat(path=b"/late"))).attributes.length == 5000
        collector = Collector(namespace.core)
        while await collector.step():
            pass
        listed = await me(meta.ReadDir(path=b"/"))
        assert [e.name for e in listed.entries] == [b"l", b"late"]
        assert chains.spaces() == {late.ino}
        assert (await store.read(lambda snap: read_index(snap, index))).spaces == {}
        await store.close()

    asyncio.run(main())

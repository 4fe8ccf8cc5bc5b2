"""Removal and collection: what outlives its name, and what is found beyond a length."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from namespace_fakes import Caller, unwrap
from namespace_world import W, World, run

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import Creds
from ffs.proto.meta import OPEN_CREATE, OPEN_READ, OPEN_WRITE
from ffs.proto.records import KvParams
from metadata.fs.chunks import EPOCH_MAX
from metadata.fs.sessions import SessionSweeper
from metadata.kv import open_store


def test_an_open_file_outlives_its_name() -> None:
    async def test(w: World) -> None:
        opened = await w.me(meta.Open(path=b"/f", flags=W))
        await w.write(w.me, opened, 0, 5000)
        await w.me(meta.Unlink(path=b"/f"))
        await w.collect()
        assert w.chains.end(opened.ino, 4096) == 5000
        await w.write(w.me, opened, 5000, 5000)
        again = await w.me(meta.Open(ino=opened.ino, flags=OPEN_WRITE))
        stranger = await Caller.connect(w.namespace)
        with pytest.raises(errors.NotFound):
            await stranger(meta.Open(ino=opened.ino, flags=OPEN_WRITE))
        await w.close(w.me, again, 0)
        assert (await w.me(meta.Stat(ino=opened.ino))).attributes.nlink == 0
        await w.close(w.me, opened, 10_000)
        await w.collect()
        assert w.chains.spaces() == set()
        assert await w.keys(b"g") == []
        assert EPOCH_MAX in [e for (_, space), e in w.chains.epochs.items() if space == opened.ino]
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(ino=opened.ino))

    run(test)


def test_collection_finds_what_lies_beyond_the_length() -> None:
    """Chunks that no length tells of go too: of a write that was given up, of a truncation that isn't
    finished, of a writer that died when the file had no name. Else only the file's chains are asked."""

    async def test(w: World) -> None:
        doubtful = await w.me(meta.Open(path=b"/doubtful", flags=W))
        await w.write(w.me, doubtful, 0, 30_000)
        await w.me(meta.Close(ino=doubtful.ino, handle=doubtful.handle, doubtful=True))
        await w.make(b"/cut", 30_000)
        w.chains.away = set(range(100, 105))
        with pytest.raises(errors.ChainUnavailable):
            await w.me(meta.Truncate(path=b"/cut", length=5))
        w.chains.away = set()
        dead = await Caller.connect(w.namespace)
        opened = await dead(meta.Open(path=b"/dead", flags=W))
        await w.write(dead, opened, 0, 30_000)
        for path in (b"/doubtful", b"/cut", b"/dead"):
            await w.me(meta.Unlink(path=path))
        await dead(meta.SessionClose())
        await SessionSweeper(w.namespace.core).step()
        await w.collect()
        assert w.chains.spaces() == set()
        await w.make(b"/small", 5000)
        await w.me(meta.Unlink(path=b"/small"))
        w.chains.calls = 0
        await w.collect()
        assert w.chains.spaces() == set()
        assert w.chains.calls == 4  # two chunks, on two of the five chains: close and remove
        await w.make(b"/empty", 0)
        await w.me(meta.Unlink(path=b"/empty"))
        w.chains.calls = 0
        await w.collect()
        assert w.chains.calls == 0
        assert await w.keys(b"g") == []

    run(test)


def test_a_truncation_cuts_what_lies_beyond_the_length() -> None:
    async def test(w: World) -> None:
        opened = await w.me(meta.Open(path=b"/f", flags=W))
        await w.write(w.me, opened, 0, 30_000)
        await w.me(meta.Close(ino=opened.ino, handle=opened.handle, length=10, written=True, doubtful=True))
        await w.me(meta.Truncate(path=b"/f", length=20_000))
        assert w.chains.end(opened.ino, 4096) <= 20_000

    run(test)


def test_collection_waits_for_chains() -> None:
    async def test(w: World) -> None:
        await w.make(b"/f", 5000)
        await w.me(meta.Unlink(path=b"/f"))
        w.chains.away = set(range(100, 105))
        await w.collect()
        assert len(await w.keys(b"g")) == 1
        w.chains.away = set()
        await w.collect()
        assert await w.keys(b"g") == []
        assert w.chains.spaces() == set()

    run(test)


def test_remove_tree_detaches_at_once_and_collects_all() -> None:
    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d/e/f", parents=True))
        for i in range(450):
            unwrap(await w.me(meta.Open(path=b"/d/e/%d" % i, flags=OPEN_READ | OPEN_CREATE)))
        await w.make(b"/d/e/f/data", 50_000)
        await w.me(meta.Link(source=b"/d/e/f/data", target=b"/kept"))
        await w.me(meta.SymLink(path=b"/d/l", target=b"x"))
        await w.me(meta.KvCreate(path=b"/d/kv", params=KvParams(4096)))
        await w.me(meta.RemoveTree(path=b"/d"))
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(path=b"/d"))
        await w.me(meta.MkDir(path=b"/d"))
        await w.collect()
        listed = await w.me(meta.ReadDir(path=b"/", attributes=True))
        assert [e.name for e in listed.entries] == [b"d", b"kept"]
        assert listed.entries[1].attributes.nlink == 1
        assert len(await w.keys(b"d")) == 2
        assert len({k[3:11] for k in await w.keys(b"i")}) == 3
        assert (await w.me(meta.Stat(path=b"/"))).attributes.nlink == 3

    run(test)


def test_s24_many_entries_are_listed_and_removed(tmp_path: Path) -> None:
    """A directory far beyond one transaction: listed in pages, removed at once, collected in pages.
    FFS_TEST_SCALE=100 makes it a million."""
    count = 10_000 * int(os.environ.get("FFS_TEST_SCALE", "1"))

    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d"))
        for begin in range(0, count, 4000):
            names = [b"/d/%07d" % i for i in range(begin, min(begin + 4000, count))]
            entries = tuple(meta.OpenEntry(name, OPEN_READ | OPEN_CREATE) for name in names)
            reply = await w.me(meta.OpenMany(entries=entries))
            assert all(isinstance(r, meta.Opened) for r in reply.results)
        seen = 0
        after = b""
        more = True
        while more:
            page = await w.me(meta.ReadDir(path=b"/d", after=after, limit=4000, attributes=True))
            seen += len(page.entries)
            after, more = page.entries[-1].name, page.more
        assert seen == count == (await w.me(meta.Stat(path=b"/d"))).attributes.length
        await w.me(meta.RemoveTree(path=b"/d"))
        await w.collect()
        assert await w.keys(b"d") == []
        assert len(await w.keys(b"i")) <= 5  # the root with its counters

    run(test, open_store(f"lmdb://{tmp_path}/store"))


def test_remove_tree_of_others_is_looked_through_first() -> None:
    async def test(w: World) -> None:
        user = await Caller.connect(w.namespace, Creds(1000, 1000))
        await w.me(meta.MkDir(path=b"/d", mode=0o777))
        await w.me(meta.MkDir(path=b"/d/open", mode=0o777))
        await w.make(b"/d/open/f", 0)
        await w.me(meta.MkDir(path=b"/d/empty", mode=0o700))
        await w.me(meta.MkDir(path=b"/d/shut", mode=0o755))
        await w.make(b"/d/shut/f", 0)
        with pytest.raises(errors.AccessDenied):
            await user(meta.RemoveTree(path=b"/d"))
        assert (await w.me(meta.Stat(path=b"/d/open/f"))).attributes.nlink == 1
        await w.me(meta.Unlink(path=b"/d/shut/f"))
        await user(meta.RemoveTree(path=b"/d"))
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(path=b"/d"))

    run(test)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (b"/", errors.Busy),
        (b"/none", errors.NotFound),
        (b"/f/", errors.NotADirectory),
        (b"/d/.", errors.InvalidArgument),
    ],
)
def test_remove_tree_refuses(path: bytes, error: type[errors.FfsError]) -> None:
    async def test(w: World) -> None:
        await w.make(b"/f", 0)
        await w.me(meta.MkDir(path=b"/d"))
        with pytest.raises(error):
            await w.me(meta.RemoveTree(path=path))

    run(test)


def test_nothing_is_made_in_a_directory_that_is_being_removed() -> None:
    """A create that read the tree before the removal is a conflict with it, and then finds nothing."""

    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d"))
        txn = w.store.begin()
        from metadata.fs.ops.open import open_write

        request = w.me.prepare(meta.Open(path=b"/d/f", flags=W))
        await open_write(w.namespace.core, txn, request, 1)
        await w.me(meta.RemoveTree(path=b"/d"))
        from metadata.kv.contract import Conflict

        with pytest.raises(Conflict):
            await txn.commit()

    run(test)

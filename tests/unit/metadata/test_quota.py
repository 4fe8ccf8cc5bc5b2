"""Quotas of directories, behaviour by behaviour; after each step of each test what is counted is checked
against a recount from all keys (quota_count.py). Interleavings are tried by test_quota_interleaved.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import quota_count
from namespace_fakes import Caller, FakeChains, make_namespace
from quota_count import Counted

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import Creds
from ffs.proto.meta import OPEN_CREATE, OPEN_TMPFILE, OPEN_TRUNC, OPEN_WRITE
from ffs.proto.quota import (
    COUNTING,
    NO_QUOTA,
    READY,
    GetQuota,
    ListQuotas,
    QuotaView,
    Reserve,
    SetQuota,
)
from ffs.proto.records import KvParams
from metadata.fs.collector import Collector
from metadata.fs.namespace import Namespace
from metadata.fs.quota import MIB, ahead_of
from metadata.fs.quota_sweep import QuotaSweeper, count_page
from metadata.fs.schema import QUOTA_WORK, inode_key, split_quota_work
from metadata.fs.sessions import SessionSweeper
from metadata.kv import open_store
from metadata.kv.contract import Store, Transaction
from metadata.kv.memory import MemoryStore

W = OPEN_WRITE | OPEN_CREATE
USER = Creds(1000, 1000)


class World:
    """A namespace with a directory /q. Every request checks what is counted."""

    def __init__(self, store: Store, namespace: Namespace, chains: FakeChains, me: Caller) -> None:
        self.store = store
        self.namespace = namespace
        self.chains = chains
        self.me = me

    async def __call__(self, request: meta.Request, caller: Caller | None = None) -> Any:
        try:
            return await (caller or self.me)(request)
        finally:
            await self.check()

    async def check(self) -> None:
        quota_count.check(await self.pairs())

    async def pairs(self) -> list[tuple[bytes, bytes]]:
        return await self.store.read(lambda snap: snap.range(b"\0", b"\xff"))

    async def limit(self, path: bytes = b"/q", **limits: Any) -> QuotaView:
        reply = await self(SetQuota(path=path, **limits))
        view: QuotaView = reply.quota
        return view

    async def view(self, path: bytes = b"/q") -> QuotaView | None:
        view: QuotaView | None = (await self.me(GetQuota(path=path))).quota
        return view

    async def used(self, path: bytes = b"/q") -> Counted:
        view = await self.view(path)
        assert view is not None
        return Counted(view.used_bytes, view.used_entries)

    async def open(self, path: bytes, flags: int = W, caller: Caller | None = None) -> meta.Opened:
        opened: meta.Opened = await self(meta.Open(path=path, flags=flags), caller)
        return opened

    async def fsync(self, opened: meta.Opened, length: int) -> meta.LengthReply:
        layout = opened.attributes.layout
        assert layout is not None
        self.chains.write(opened.ino, layout, opened.attributes.epoch, 0, length, range(100, 105))
        request = meta.Fsync(
            ino=opened.ino, handle=opened.handle, epoch=opened.attributes.epoch, length=length
        )
        reply: meta.LengthReply = await self(request)
        return reply

    async def close(self, opened: meta.Opened, caller: Caller | None = None) -> None:
        await self(meta.Close(ino=opened.ino, handle=opened.handle), caller)

    async def reserve(self, opened: meta.Opened, end: int) -> int:
        request = Reserve(ino=opened.ino, handle=opened.handle, epoch=opened.attributes.epoch, end=end)
        reserved: int = (await self(request)).reserved
        return reserved

    async def make(self, path: bytes, length: int = 0) -> meta.Opened:
        """A file of that length, as a client makes it that knows of quotas."""
        opened = await self.open(path)
        if length:
            await self.reserve(opened, length)
            await self.fsync(opened, length)
        await self.close(opened)
        return opened

    async def count(self) -> None:
        """Until nothing is left to be counted."""
        sweeper = QuotaSweeper(self.store)
        while await sweeper.step():
            await self.check()

    async def collect(self) -> None:
        collector = Collector(self.namespace.core)
        while await collector.step():
            await self.check()

    async def end(self, caller: Caller) -> None:
        """The client is gone, and what it had open settled."""
        await self.namespace.handle(meta.SessionClose(client=caller.client))
        await SessionSweeper(self.namespace.core).step()
        await self.check()

    async def settled(self) -> dict[int, Counted]:
        await self.count()
        await self.collect()
        return quota_count.check_settled(await self.pairs())


def run(test: Callable[[World], Awaitable[None]], store: Store | None = None) -> None:
    async def main() -> None:
        used = store or MemoryStore()
        namespace, _, chains = await make_namespace(used)
        world = World(used, namespace, chains, await Caller.connect(namespace))
        await world(meta.MkDir(path=b"/q"))
        try:
            await test(world)
            await world.end(world.me)  # with what it has open
            await world.settled()
        finally:
            await used.close()

    asyncio.run(main())


@contextmanager
def over(match: str = "remove") -> Iterator[None]:
    with pytest.raises(errors.QuotaExceeded, match=match):
        yield


# --- entries --------------------------------------------------------------------------------

MAKING: dict[str, Callable[[bytes], meta.Request]] = {
    "file": lambda path: meta.Open(path=path, flags=W),
    "file for reading": lambda path: meta.Open(path=path, flags=meta.OPEN_READ | OPEN_CREATE),
    "directory": lambda path: meta.MkDir(path=path),
    "symlink": lambda path: meta.SymLink(path=path, target=b"x"),
    "KV space": lambda path: meta.KvCreate(path=path, params=KvParams(4096)),
    "nameless": lambda path: meta.Open(
        path=path.rpartition(b"/")[0] or b"/", flags=OPEN_WRITE | OPEN_TMPFILE
    ),
}


@pytest.mark.parametrize("what", list(MAKING))
def test_what_is_made_counts_and_the_last_that_fits_is_the_last(what: str) -> None:
    async def test(w: World) -> None:
        await w.limit(limit_entries=3)
        await w(meta.MkDir(path=b"/q/d"))
        for name in (b"/q/1", b"/q/d/2"):
            await w(MAKING[what](name))
        assert (await w.used()).entries == 3
        with over(r"3 of the 3 entries that the quota of /q has are there: remove some"):
            await w(MAKING[what](b"/q/d/3"))
        assert (await w.used()).entries == 3
        await w(MAKING[what](b"/outside"))

    run(test)


def test_entries_on_the_way_and_of_batches_count_one_by_one(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.limit(limit_entries=5)
        with over():
            await w(meta.MkDir(path=b"/q/a/b/c/d/e/f", parents=True))
        assert (await w.used()).entries == 0  # nothing of what was made on the way stays
        await w(meta.MkDir(path=b"/q/a/b", parents=True))
        entries = tuple(meta.OpenEntry(b"/q/%d" % i, W) for i in range(100))
        results = (await w(meta.OpenMany(entries=entries))).results
        assert [type(each).__name__ for each in results] == ["Opened"] * 3 + ["ErrorReply"] * 97
        assert (await w.used()).entries == 5

    run(test, open_store(f"lmdb://{tmp_path}/s"))


def test_a_file_with_several_names_is_one_entry() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_entries=1)
        await w.make(b"/q/f", 5000)
        await w(meta.Link(source=b"/q/f", target=b"/q/g"))
        assert await w.used() == (5000, 1)
        await w(meta.Unlink(path=b"/q/f"))
        assert await w.used() == (5000, 1)
        await w(meta.Unlink(path=b"/q/g"))
        assert await w.used() == (0, 0)

    run(test)


# --- bytes ----------------------------------------------------------------------------------


def test_room_is_reserved_before_the_data_and_goes_back_with_the_last_writer(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=1 << 30)
        a = await w.open(b"/q/f")
        assert (await w.used()).bytes == a.reserved > 0
        end = await w.reserve(a, 10 * MIB)
        assert 11 * MIB <= end <= 13 * MIB
        assert (await w.used()).bytes == end
        b = await w.open(b"/q/f", OPEN_WRITE)
        assert b.reserved == end  # nothing more for the second one
        assert (await w.fsync(a, 5000)).reserved == end
        await w.close(a)
        assert (await w.used()).bytes == end
        await w.close(b)
        assert await w.used() == (5000, 1)

    run(test, open_store(f"lmdb://{tmp_path}/s"))


def test_a_quota_can_be_filled_to_the_last_byte_and_not_beyond() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=100_000)
        opened = await w.open(b"/q/f")
        assert 0 < opened.reserved < 100
        assert await w.reserve(opened, 100_000) == 100_000
        with over(r"100000 of the 100000 bytes that the quota of /q has are used or reserved, and 1 more"):
            await w.reserve(opened, 100_001)
        await w.fsync(opened, 100_000)
        await w.close(opened)
        full = await w.open(b"/q/g")  # an entry is still allowed
        assert full.reserved == 0
        with over():
            await w.reserve(full, 1)
        await w(meta.Truncate(path=b"/q/f", length=99_990))
        assert await w.reserve(full, 10) == 10

    run(test)


def test_what_is_refused_leaves_what_was_reserved() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=100_000)
        opened = await w.open(b"/q/f")
        had = await w.reserve(opened, 50_000)
        with over():
            await w.reserve(opened, 200_000)
        assert await w.reserve(opened, 10) == had  # what one has needs no room

    run(test)


def test_nothing_is_counted_outside() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=1)
        opened = await w.open(b"/f")
        assert opened.reserved == NO_QUOTA
        assert await w.reserve(opened, 1 << 40) == NO_QUOTA
        assert (await w.fsync(opened, 5000)).reserved == NO_QUOTA
        assert (await w(meta.Append(ino=opened.ino, handle=opened.handle, length=9))).reserved == NO_QUOTA
        assert await w.view(b"/f") is None

    run(test)


def test_a_quota_without_limits_counts_only() -> None:
    async def test(w: World) -> None:
        await w.limit()
        opened = await w.open(b"/q/f")
        assert opened.reserved == MIB
        assert await w.reserve(opened, 1 << 40) == (1 << 40) + 64 * MIB
        await w.close(opened)
        assert await w.used() == (0, 1)

    run(test)


def test_what_is_reserved_ahead() -> None:
    assert ahead_of(0, None) == ahead_of(4 * MIB, None) == MIB
    assert ahead_of(40 * MIB, None) == 10 * MIB
    assert ahead_of(1 << 40, None) == ahead_of(1 << 40, 1 << 50) == 64 * MIB
    assert ahead_of(1 << 40, 64 * MIB) == MIB
    assert ahead_of(1 << 40, 63) == ahead_of(0, -5) == 0


def test_appends_charge_what_they_reserve() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=1000)
        opened = await w.open(b"/q/f", W | meta.OPEN_APPEND)
        append = {"ino": opened.ino, "handle": opened.handle}
        first = await w(meta.Append(**append, length=900))
        assert (first.offset, first.reserved) == (0, 900)
        with over():
            await w(meta.Append(**append, length=101))
        second = await w(meta.Append(**append, length=100))
        assert (second.offset, second.reserved) == (900, 1000)
        await w.fsync(opened, 950)
        await w.close(opened)
        assert (await w.used()).bytes == 950

    run(test)


def test_truncation_charges_and_gives_back() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=10_000)
        await w.make(b"/q/f", 4000)
        reply = await w(meta.Truncate(path=b"/q/f", length=9000))
        assert (reply.reserved, await w.used()) == (9000, (9000, 1))
        with over():
            await w(meta.Truncate(path=b"/q/f", length=10_001))
        await w(meta.Truncate(path=b"/q/f", length=100))
        assert await w.used() == (100, 1)
        opened = await w.open(b"/q/f", W)
        await w.reserve(opened, 8000)
        reply = await w(meta.Truncate(ino=opened.ino, handle=opened.handle, length=50))
        assert (reply.reserved, (await w.used()).bytes) == (50, 50)
        # The epoch is another: what was reserved under the old one is no more.
        old = await w(Reserve(ino=opened.ino, handle=opened.handle, epoch=0, end=60))
        assert (old.reserved, old.epoch) == (NO_QUOTA, reply.epoch)
        assert (await w.used()).bytes == 50
        await w.close(opened)
        emptied = await w.open(b"/q/f", OPEN_WRITE | OPEN_TRUNC)
        assert (await w.used()).bytes == emptied.reserved < 50
        await w.close(emptied)
        assert await w.used() == (0, 1)
        assert (await w(meta.Truncate(path=b"/q/f", length=0))).reserved == 0
        await w(meta.Open(path=b"/f", flags=W))
        assert (await w(meta.Truncate(path=b"/f", length=50_000))).reserved == NO_QUOTA

    run(test)


def test_who_knows_nothing_of_quotas_is_charged_nevertheless() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=10_000)
        opened = await w.open(b"/q/f")
        assert (await w.fsync(opened, 30_000)).reserved == 30_000
        assert (await w.used()).bytes == 30_000
        view = await w.view()
        assert view is not None
        assert view.used_bytes > view.limit_bytes
        again = await w.open(b"/q/g")
        assert again.reserved == 0
        with over():
            await w.reserve(again, 1)
        await w.close(opened)
        assert (await w.used()).bytes == 30_000

    run(test)


# --- giving back ----------------------------------------------------------------------------


def test_an_unlinked_file_counts_until_its_last_writer_closes() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=1 << 20)
        other = await Caller.connect(w.namespace)
        a, b = await w.open(b"/q/f"), await w.open(b"/q/f", OPEN_WRITE, other)
        await w.fsync(a, 5000)
        await w(meta.Unlink(path=b"/q/f"))
        assert (await w.used()).entries == 1
        await w.reserve(a, 6000)
        await w.close(a)
        assert (await w.used()).entries == 1
        await w.close(b, other)
        assert await w.used() == (0, 0)
        await w.collect()
        assert await w.used() == (0, 0)

    run(test)


@pytest.mark.parametrize("name", [b"/q/f", b""])
def test_a_dead_writer_leaves_what_it_wrote(name: bytes) -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=1 << 20)
        other = await Caller.connect(w.namespace)
        opened = await w.open(name or b"/q", W if name else OPEN_WRITE | OPEN_TMPFILE, other)
        layout = opened.attributes.layout
        assert layout is not None
        w.chains.write(opened.ino, layout, 0, 0, 7000, range(100, 105))
        assert (await w.used()).bytes == opened.reserved
        await w.end(other)
        assert await w.used() == ((7000, 1) if name else (0, 0))

    run(test)


def test_a_dead_writer_beside_a_living_one() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=1 << 20)
        other = await Caller.connect(w.namespace)
        mine, theirs = await w.open(b"/q/f"), await w.open(b"/q/f", OPEN_WRITE, other)
        layout = theirs.attributes.layout
        assert layout is not None
        w.chains.write(theirs.ino, layout, 0, 0, 7000, range(100, 105))
        await w.end(other)
        assert (await w.used()).bytes >= 7000
        await w.close(mine)
        assert await w.used() == (7000, 1)

    run(test)


def test_a_nameless_file_counts_while_it_is_open_and_stays_counted_with_a_name() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=1 << 20)
        gone = await w.open(b"/q", OPEN_WRITE | OPEN_TMPFILE)
        await w.fsync(gone, 100)
        await w.close(gone)
        assert await w.used() == (0, 0)
        kept = await w.open(b"/q", OPEN_WRITE | OPEN_TMPFILE)
        await w.fsync(kept, 300)
        await w(meta.Link(ino=kept.ino, handle=kept.handle, target=b"/q/f"))
        await w.close(kept)
        assert await w.used() == (300, 1)

    run(test)


def test_what_a_name_replaces_goes() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=1 << 20, limit_entries=4)
        for name in (b"a", b"b", b"c"):
            await w.make(b"/q/" + name, 1000)
        await w(meta.Rename(source=b"/q/a", target=b"/q/b"))
        assert await w.used() == (2000, 2)
        new = await w.open(b"/q", OPEN_WRITE | OPEN_TMPFILE)
        await w.fsync(new, 300)
        await w(meta.Link(ino=new.ino, handle=new.handle, target=b"/q/b", replace=True))
        await w.close(new)
        assert await w.used() == (1300, 2)
        await w(meta.SymLink(path=b"/q/s", target=b"x"))
        await w(meta.Rename(source=b"/q/c", target=b"/q/s"))
        assert await w.used() == (1300, 2)
        await w(meta.MkDir(path=b"/q/d"))
        await w(meta.MkDir(path=b"/q/e"))
        await w(meta.Rename(source=b"/q/d", target=b"/q/e"))
        await w(meta.RmDir(path=b"/q/e"))
        await w(meta.UnlinkMany(paths=(b"/q/b", b"/q/s")))
        assert await w.used() == (0, 0)

    run(test)


def test_a_removed_tree_goes_back_as_it_is_collected(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=1 << 20)
        await w(meta.MkDir(path=b"/q/a/b", parents=True))
        for name in (b"/q/a/1", b"/q/a/b/2", b"/q/a/b/3", b"/q/kept"):
            await w.make(name, 1000)
        await w(meta.SymLink(path=b"/q/a/b/s", target=b"x"))
        await w(meta.KvCreate(path=b"/q/a/kv", params=KvParams(4096)))
        assert await w.used() == (4000, 8)
        await w(meta.RemoveTree(path=b"/q/a"))
        await w.collect()
        assert await w.used() == (1000, 1)

    run(test, open_store(f"lmdb://{tmp_path}/s"))


@pytest.mark.parametrize("how", ["rmdir", "tree", "tree above", "rename over"])
def test_with_its_directory_a_quota_goes(how: str) -> None:
    async def test(w: World) -> None:
        await w(meta.MkDir(path=b"/top/q", parents=True))
        await w.limit(b"/top/q", limit_entries=10)
        await w(meta.MkDir(path=b"/top/q/d"))
        late = await w.open(b"/top/q/d/f")
        await w(meta.Unlink(path=b"/top/q/d/f"))
        if how in ("rmdir", "rename over"):
            await w(meta.RmDir(path=b"/top/q/d"))
        if how == "rmdir":
            await w(meta.RmDir(path=b"/top/q"))
        elif how == "rename over":
            await w(meta.Rename(source=b"/q", target=b"/top/q"))
            await w(meta.MkDir(path=b"/q"))
        else:
            await w(meta.RemoveTree(path=b"/top/q" if how == "tree" else b"/top"))
            await w.collect()
        await w.close(late)
        await w.collect()
        assert not [key for key, _ in await w.pairs() if key[:2] in (b"Ql", b"Qb", b"Qe", b"Qs")]

    run(test)


# --- borders --------------------------------------------------------------------------------


def test_no_rename_and_no_link_across_a_border() -> None:
    async def test(w: World) -> None:
        await w(meta.MkDir(path=b"/p"))
        await w.limit()
        await w.limit(b"/p")
        await w.make(b"/q/f", 1000)
        await w.make(b"/x", 1000)
        await w(meta.MkDir(path=b"/q/d"))
        crossing: list[meta.Request] = [
            meta.Rename(source=b"/q/f", target=b"/y"),
            meta.Rename(source=b"/q/d", target=b"/p/d"),
            meta.Rename(source=b"/x", target=b"/q/x"),
            meta.Rename(source=b"/x", target=b"/q/f"),
            meta.Rename(source=b"/q/f", target=b"/x", flags=meta.RENAME_EXCHANGE),
            meta.Link(source=b"/q/f", target=b"/y"),
            meta.Link(source=b"/q/f", target=b"/p/f"),
            meta.Link(source=b"/x", target=b"/q/d/x"),
        ]
        for request in crossing:
            with pytest.raises(errors.CrossDevice, match="copy"):
                await w(request)
        await w(meta.Rename(source=b"/q/f", target=b"/q/d/g"))
        await w(meta.Link(source=b"/q/d/g", target=b"/q/h"))
        await w(meta.Rename(source=b"/q", target=b"/r"))
        assert await w.used(b"/r") == (1000, 2)
        with over("of /r has"):
            await w.limit(b"/r", limit_bytes=1001)
            await w(meta.Truncate(path=b"/r/d/g", length=1002))
        await w(meta.Rename(source=b"/r", target=b"/p", flags=meta.RENAME_EXCHANGE))
        assert [each.path for each in (await w(ListQuotas())).quotas] == [b"/p", b"/r"]
        await w(meta.Rename(source=b"/p", target=b"/r", flags=meta.RENAME_EXCHANGE))
        view = await w.view(b"/r/d/g")
        assert view is not None
        assert view.path == b"/r"

    run(test)


def test_a_nameless_file_from_outside_needs_room() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=1000, limit_entries=1)
        big = await w.open(b"/", OPEN_WRITE | OPEN_TMPFILE)
        await w.fsync(big, 1001)
        with over("bytes"):
            await w(meta.Link(ino=big.ino, handle=big.handle, target=b"/q/f"))
        small = await w.open(b"/", OPEN_WRITE | OPEN_TMPFILE)
        await w.fsync(small, 1000)
        await w(meta.Link(ino=small.ino, handle=small.handle, target=b"/q/f"))
        await w.close(small)
        assert await w.used() == (1000, 1)
        with over("entries"):
            await w(meta.Link(ino=big.ino, handle=big.handle, target=b"/q/g"))
        await w.close(big)

    run(test)


def test_quotas_dont_nest() -> None:
    async def test(w: World) -> None:
        await w(meta.MkDir(path=b"/q/a/b", parents=True))
        await w(meta.MkDir(path=b"/q/old/a", parents=True))
        await w.limit(b"/q/a")
        for path, match in (
            (b"/q", "/q/a below it has a quota"),
            (b"/", "below it"),
            (b"/q/a/b", "of /q/a counts"),
        ):
            with pytest.raises(errors.InvalidArgument, match=match):
                await w.limit(path)
        await w(meta.RemoveTree(path=b"/q/a"))  # not collected yet, and no hindrance
        await w.limit(b"/q")
        with pytest.raises(errors.InvalidArgument, match="of /q counts this directory"):
            await w.limit(b"/q/old/a")  # which isn't labelled yet

    run(test)


# --- setting and clearing -------------------------------------------------------------------


async def _tree(w: World) -> None:
    await w(meta.MkDir(path=b"/q/a/b", parents=True))
    await w(meta.MkDir(path=b"/q/z"))
    for index in range(7):
        await w.make(b"/q/a/b/%d" % index, 1000 + index)
    await w.make(b"/q/m", 50)
    await w(meta.SymLink(path=b"/q/z/s", target=b"x"))


def test_what_was_there_before_is_counted(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        await _tree(w)
        view = await w.limit(limit_bytes=5000, limit_entries=3)
        assert (view.state, view.used_bytes, view.used_entries) == (COUNTING, 0, 0)
        await w.count()
        view = await w.view()  # type: ignore[assignment]
        assert (view.state, view.used_bytes, view.used_entries) == (READY, 7071, 12)
        with over():
            await w.open(b"/q/new")
        assert (await w.limit(limit_entries=13)).limit_bytes == 5000
        await w.open(b"/q/new")
        assert (await w.limit(b"/q/z/..", limit_bytes=0, limit_entries=0)).used_entries == 13

    run(test, open_store(f"lmdb://{tmp_path}/s"))


async def page(w: World, limit: int = 1) -> bool:
    """One small page of what is to be counted, by somebody who does nothing after it. False: all is done."""
    pairs = await w.store.read(lambda snap: snap.range(QUOTA_WORK, QUOTA_WORK + b"\xff", 1))
    if not pairs:
        return False
    label, ino = split_quota_work(pairs[0][0])
    await w.store.run(lambda txn: count_page(txn, label, ino, limit))
    await w.check()
    return True


def test_what_cant_be_read_holds_up_nothing_else() -> None:
    async def main() -> None:
        store = MemoryStore()
        namespace, _, chains = await make_namespace(store)
        w = World(store, namespace, chains, await Caller.connect(namespace))
        for name in (b"/p", b"/q"):
            await w(meta.MkDir(path=name + b"/d", parents=True))
            for index in range(3):
                await w.make(name + b"/d/%d" % index, 1000)
            await w.limit(name)
        bad = (await w(meta.Stat(path=b"/p/d/1"))).attributes.ino
        entry = next(key for key, _ in await w.pairs() if key[:1] == b"d" and key[9:] == b"2")

        async def damage(txn: Transaction) -> None:
            txn.set(inode_key(bad), b"\xc1")
            txn.set(entry, b"\xc1")  # the directory itself can't be counted to its end

        await store.run(damage)
        sweeper = QuotaSweeper(store)
        while await sweeper.step():
            pass
        views = [await w.view(path) for path in (b"/p", b"/q")]
        assert [view and (view.used_entries, view.state) for view in views] == [(1, COUNTING), (4, READY)]

    asyncio.run(main())


def test_counting_goes_on_where_it_was_cut_off() -> None:
    async def test(w: World) -> None:
        await _tree(w)
        await w.limit()
        while await page(w):
            pass
        assert await w.used() == (7071, 12)

    run(test)


def _changes(w: World) -> list[Callable[[], Awaitable[Any]]]:
    """What may happen in a tree at any moment while it is counted."""
    return [
        lambda: w(meta.Rename(source=b"/q/z", target=b"/q/A")),  # behind the sweep
        lambda: w(meta.Rename(source=b"/q/a/b", target=b"/q/z/b")),
        lambda: w(meta.Rename(source=b"/q/a/b/6", target=b"/q/0")),
        lambda: w(meta.Rename(source=b"/q/m", target=b"/q/z", flags=meta.RENAME_EXCHANGE)),
        lambda: w(meta.Rename(source=b"/q/a", target=b"/q/z", flags=meta.RENAME_EXCHANGE)),
        lambda: w(meta.Link(source=b"/q/a/b/6", target=b"/q/0")),
        lambda: w(meta.Link(source=b"/q/m", target=b"/q/a/b/99")),
        lambda: w.make(b"/q/0", 70),
        lambda: w.make(b"/q/a/b/99", 70),
        lambda: w(meta.Unlink(path=b"/q/a/b/3")),
        lambda: w(meta.RemoveTree(path=b"/q/a")),
        lambda: w(meta.Truncate(path=b"/q/m", length=7)),
        lambda: w.open(b"/q/a/b/5", OPEN_WRITE),
        lambda: w(SetQuota(path=b"/q", clear=True)),
    ]


@pytest.mark.parametrize("which", range(14))
def test_changes_while_it_is_counted(which: int) -> None:
    """After each number of pages: what is counted in the end is what is there."""

    async def after(pages: int) -> bool:
        used = MemoryStore()
        namespace, _, chains = await make_namespace(used)
        w = World(used, namespace, chains, await Caller.connect(namespace))
        await w(meta.MkDir(path=b"/q"))
        await _tree(w)
        await w.limit()
        more = True
        for _ in range(pages):
            more = await page(w)
        changes = _changes(w)
        assert len(changes) == 14
        await changes[which]()
        while await page(w, 2):
            pass
        await w.end(w.me)
        await w.settled()
        return more

    async def main() -> None:
        pages = 0
        while await after(pages):
            pages += 1
        assert pages > 10

    asyncio.run(main())


def test_borders_while_it_is_counted() -> None:
    """A directory that has no label yet lies in the quota nevertheless."""

    async def test(w: World) -> None:
        await _tree(w)
        await w.make(b"/q/a/f", 10)
        await w(meta.MkDir(path=b"/out"))
        await w.limit()
        view = await w.view(b"/q/a/b/1")
        assert view is not None
        assert view.path == b"/q"
        for source, target in ((b"/q/a/f", b"/out/f"), (b"/q/a/b", b"/b"), (b"/out", b"/q/a/out")):
            with pytest.raises(errors.CrossDevice):
                await w(meta.Rename(source=source, target=target))
        await w(meta.Rename(source=b"/q/a/f", target=b"/q/a/b/f"))
        await w(meta.Rename(source=b"/out", target=b"/out2"))
        await w(meta.MkDir(path=b"/elsewhere"))
        await w(meta.Rename(source=b"/out2", target=b"/elsewhere/out"))

    run(test)


def test_a_file_with_names_on_both_sides_counts_where_it_was_found() -> None:
    async def test(w: World) -> None:
        await w(meta.MkDir(path=b"/p"))
        await w.make(b"/q/f", 1000)
        await w(meta.Link(source=b"/q/f", target=b"/p/f"))
        await w(meta.Link(source=b"/q/f", target=b"/f"))
        await w.limit(b"/q")
        await w.count()
        await w.limit(b"/p")
        await w.count()
        assert (await w.used(b"/q"), await w.used(b"/p")) == ((1000, 1), (0, 0))
        await w(meta.Rename(source=b"/p/f", target=b"/p/g"))
        await w(meta.Rename(source=b"/f", target=b"/g"))
        await w(meta.Unlink(path=b"/q/f"))
        assert (await w.used(b"/q"), await w.used(b"/p")) == ((1000, 1), (0, 0))
        await w(meta.Unlink(path=b"/p/g"))
        await w(meta.Unlink(path=b"/g"))
        assert (await w.used(b"/q"), await w.used(b"/p")) == ((0, 0), (0, 0))

    run(test)


def test_files_open_since_before_are_enforced_from_their_next_report_on() -> None:
    async def test(w: World) -> None:
        opened = await w.open(b"/q/f")
        assert opened.reserved == NO_QUOTA
        await w.fsync(opened, 1000)
        await w.limit(limit_bytes=5000)
        assert (await w.fsync(opened, 2000)).reserved == NO_QUOTA
        await w.count()
        assert await w.used() == (2000, 1)
        assert (await w.fsync(opened, 3000)).reserved == 3000
        with over():
            await w.reserve(opened, 5001)
        await w.close(opened)
        assert await w.used() == (3000, 1)

    run(test)


def test_clearing_and_setting_again_counts_anew() -> None:
    """Files that are open, with a name or without, keep nothing of the first count."""

    async def test(w: World) -> None:
        await _tree(w)
        first = await w.limit(limit_bytes=1 << 30)
        await w.count()
        named, nameless = await w.open(b"/q/open"), await w.open(b"/q", OPEN_WRITE | OPEN_TMPFILE)
        await w.reserve(named, 5 * MIB)
        assert (await w(SetQuota(path=b"/q", clear=True))).quota is None
        assert await w.view() is None
        assert (await w.fsync(named, 100)).reserved == NO_QUOTA
        await w.make(b"/q/between", 11)
        with pytest.raises(errors.InvalidArgument, match="no quota is set"):
            await w(SetQuota(path=b"/q", clear=True))
        again = await w.limit(limit_bytes=1 << 30)
        assert again.quota != first.quota
        await w.close(nameless)
        await w.count()
        assert (await w.used()).entries == 14
        await w.close(named)
        assert await w.used() == (7071 + 100 + 11, 14)

    run(test)


def test_who_may_set_and_list() -> None:
    async def test(w: World) -> None:
        user = await Caller.connect(w.namespace, USER)
        for request in (SetQuota(path=b"/q", limit_bytes=1), SetQuota(path=b"/q", clear=True), ListQuotas()):
            with pytest.raises(errors.NotPermitted, match="only root and the owner of /"):
                await w(request, user)
        await w.limit(limit_bytes=1000)
        assert (await w(GetQuota(path=b"/q"), user)).quota.limit_bytes == 1000
        await w(meta.SetAttr(path=b"/q", what=meta.SET_MODE, mode=0o700))
        with pytest.raises(errors.AccessDenied):
            await w(GetQuota(path=b"/q/d"), user)
        await w(meta.SetAttr(path=b"/", what=meta.SET_UID, uid=USER.uid))
        assert (await w(SetQuota(path=b"/q", limit_bytes=7), user)).quota.limit_bytes == 7

    run(test)


def test_what_cant_be_set() -> None:
    async def test(w: World) -> None:
        await w.make(b"/f")
        for request, cls in (
            (SetQuota(path=b"/f"), errors.NotADirectory),
            (SetQuota(path=b"/no"), errors.NotFound),
            (SetQuota(path=b"/q", limit_bytes=-2), errors.InvalidArgument),
            (SetQuota(path=b"/q", limit_entries=1 << 62), errors.InvalidArgument),
            (SetQuota(path=b"/q", clear=True), errors.InvalidArgument),
            (GetQuota(path=b"/no"), errors.NotFound),
        ):
            with pytest.raises(cls):
                await w(request)
        opened = await w.open(b"/q/f")
        good = {"ino": opened.ino, "handle": opened.handle, "epoch": 0, "end": 1}
        for bad, cls in (
            ({"end": -1}, errors.TooLarge),
            ({"end": (1 << 62) + 1}, errors.TooLarge),
            ({"epoch": 7}, errors.InvalidArgument),
            ({"handle": 7}, errors.BadHandle),
        ):
            with pytest.raises(cls):
                await w(Reserve(**(good | bad)))

    run(test)


def test_quotas_are_listed_by_pages_with_their_paths() -> None:
    async def test(w: World) -> None:
        for index in range(5):
            await w(meta.MkDir(path=b"/q/%d" % index))
            await w.limit(b"/q/%d" % index, limit_entries=index)
        await w(meta.Rename(source=b"/q/3", target=b"/q/x"))
        await w(meta.RemoveTree(path=b"/q/4"))
        found: list[QuotaView] = []
        more = True
        while more:
            reply = await w(ListQuotas(after=found[-1].quota if found else 0, limit=2))
            found += reply.quotas
            more = reply.more
        assert [(view.path, view.limit_entries) for view in found] == [
            (b"/q/0", 0),
            (b"/q/1", 1),
            (b"/q/2", 2),
            (b"/q/x", 3),
        ]

    run(test)


def test_statfs_tells_the_limit() -> None:
    async def test(w: World) -> None:
        await w.limit(limit_bytes=10_000)
        await w.make(b"/q/f", 4000)
        reply = await w(meta.StatFs(path=b"/q/f"))
        assert (reply.quota_bytes, reply.quota_free_bytes, reply.total_bytes) == (10_000, 6000, 1 << 40)
        await w.limit(limit_bytes=1000)
        assert (await w(meta.StatFs(path=b"/q"))).quota_free_bytes == 0
        reply = await w(meta.StatFs(path=b"/"))
        assert (reply.quota_bytes, reply.quota_free_bytes) == (0, 0)

    run(test)


# --- one between the body of another and its commit ------------------------------------------


class Between(MemoryStore):
    """`between` is done once, when the next transaction is about to be committed."""

    between: Callable[[], Awaitable[Any]] | None = None

    def begin(self, urgent: bool = False) -> Transaction:
        txn = super().begin(urgent)
        commit = txn.commit

        async def later() -> None:
            if self.between is not None:
                between, self.between = self.between, None
                await between()
            await commit()

        txn.commit = later  # type: ignore[method-assign]
        return txn


Step = Callable[[World, Caller], Awaitable[Any]]


def ask(request: Callable[[], meta.Request]) -> Step:
    return lambda w, caller: caller(request())


async def count_all(w: World, _: Caller) -> None:
    while await page(w, 100):
        pass


async def close_all(w: World, _: Caller) -> None:
    for key, _ in await w.store.read(lambda snap: snap.range(b"w", b"x")):
        ino, client, handle = (int.from_bytes(key[at : at + 8], "big") for at in (1, 9, 17))
        assert client == w.me.client
        await w.me(meta.Close(ino=ino, handle=handle))


CLEAR = ask(lambda: SetQuota(path=b"/q", clear=True))
SET = ask(lambda: SetQuota(path=b"/q", limit_bytes=1 << 40))
CREATE = ask(lambda: meta.Open(path=b"/q/new", flags=W))
# Name: what is before, and two that happen at once; each is tried in the middle of the other.
RACES: dict[str, tuple[list[meta.Request], Step, Step]] = {
    "creation and the end of the quota": ([SetQuota(path=b"/q")], CREATE, CLEAR),
    "removal and the end of the quota": (
        [SetQuota(path=b"/q"), meta.MkDir(path=b"/q/d")],
        ask(lambda: meta.RmDir(path=b"/q/d")),
        CLEAR,
    ),
    "a close and the end of the quota": (
        [SetQuota(path=b"/q"), meta.Open(path=b"/q/f", flags=W)],
        close_all,
        CLEAR,
    ),
    "creation and a new quota": ([], CREATE, SET),
    "a nameless file and a new quota": (
        [],
        ask(lambda: meta.Open(path=b"/q", flags=OPEN_WRITE | OPEN_TMPFILE)),
        SET,
    ),
    "creation and counting": (
        [meta.MkDir(path=b"/q/d/e", parents=True), SetQuota(path=b"/q")],
        ask(lambda: meta.MkDir(path=b"/q/d/new")),
        count_all,
    ),
    "lengthening and counting": (
        [meta.Open(path=b"/q/f", flags=meta.OPEN_READ | OPEN_CREATE), SetQuota(path=b"/q")],
        ask(lambda: meta.Truncate(path=b"/q/f", length=70_000)),
        count_all,
    ),
    "opening and counting": (
        [meta.Open(path=b"/q/f", flags=meta.OPEN_READ | OPEN_CREATE), SetQuota(path=b"/q")],
        ask(lambda: meta.Open(path=b"/q/f", flags=OPEN_WRITE)),
        count_all,
    ),
    "a quota that is moved into another": (
        [meta.MkDir(path=b"/q/a"), meta.MkDir(path=b"/p/r", parents=True), SetQuota(path=b"/p/r")],
        ask(lambda: meta.Rename(source=b"/p", target=b"/q/p")),
        SET,
    ),
    "two quotas that would nest": (
        [meta.MkDir(path=b"/q/a/b", parents=True)],
        ask(lambda: SetQuota(path=b"/q/a/b")),
        SET,
    ),
    "a move and counting": (
        [meta.MkDir(path=b"/q/a/b/c", parents=True), meta.MkDir(path=b"/q/z"), SetQuota(path=b"/q")],
        ask(lambda: meta.Rename(source=b"/q/z", target=b"/q/a/b/z")),
        count_all,
    ),
    "a move to outside and a new quota": (
        [meta.MkDir(path=b"/q/a"), meta.MkDir(path=b"/p")],
        ask(lambda: meta.Rename(source=b"/q/a", target=b"/p/a")),
        SET,
    ),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", list(RACES))
def test_in_the_middle_of_another(name: str, turned: bool) -> None:
    async def main() -> None:
        store = Between()
        namespace, _, chains = await make_namespace(store)
        w = World(store, namespace, chains, await Caller.connect(namespace))
        other = await Caller.connect(namespace)
        before, first, second = RACES[name]
        for request in (meta.MkDir(path=b"/q"), *before):
            await w(msgspec.structs.replace(request))
        await w.me(meta.Stat(path=b"/"))
        await namespace.core.inos.take()  # so that no transaction for ids comes between
        await namespace.core.capabilities.take()
        if turned:
            first, second = second, first

        async def tolerant(step: Step, caller: Caller) -> None:
            with contextlib.suppress(errors.CrossDevice, errors.InvalidArgument):
                await step(w, caller)

        store.between = lambda: tolerant(second, other)
        await tolerant(first, w.me)
        assert store.between is None
        await w.check()
        await w.end(w.me)
        await w.end(other)
        await w.settled()

    asyncio.run(main())


# --- what it costs --------------------------------------------------------------------------


class Spy(MemoryStore):
    """Notes the keys of quotas that transactions read."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: set[bytes] = set()
        self.commits = 0

    def begin(self, urgent: bool = False) -> Transaction:
        txn = super().begin(urgent)
        get, commit = txn.get, txn.commit

        async def spy(key: bytes) -> bytes | None:
            if key[:1] == b"Q":
                self.looked.add(key)
            return await get(key)

        async def count() -> None:
            self.commits += 1
            await asyncio.sleep(0)  # others run between the body and its commit
            await commit()

        txn.get, txn.commit = spy, count  # type: ignore[method-assign]
        return txn


def test_creators_in_a_quota_dont_conflict() -> None:
    async def main() -> None:
        store = Spy()
        namespace, _, _ = await make_namespace(store)
        first = await Caller.connect(namespace)
        await first(meta.MkDir(path=b"/q"))
        await first(SetQuota(path=b"/q", limit_bytes=1 << 30, limit_entries=10_000))
        await first(meta.Open(path=b"/q/warm", flags=W))  # ids are in memory now
        callers = [await Caller.connect(namespace) for _ in range(10)]
        before = store.commits

        async def work(index: int, caller: Caller) -> None:
            for step in range(10):
                path = b"/q/%d-%d" % (index, step)
                opened = await caller(meta.Open(path=path, flags=W))
                await caller(Reserve(ino=opened.ino, handle=opened.handle, epoch=0, end=3 * MIB))
                await caller(meta.Close(ino=opened.ino, handle=opened.handle, length=9, written=True))

        await asyncio.gather(*(work(index, caller) for index, caller in enumerate(callers)))
        conflicts = store.commits - before - 300
        assert conflicts == 0, f"{conflicts} of 300 had to be repeated"
        pairs = await store.read(lambda snap: snap.range(b"\0", b"\xff"))
        quota_count.check(pairs)

    asyncio.run(main())


def test_outside_of_quotas_nothing_of_them_is_read() -> None:
    async def main() -> None:
        store = Spy()
        namespace, _, _ = await make_namespace(store)
        me = await Caller.connect(namespace)
        opened = await me(meta.Open(path=b"/f", flags=W))
        await me(meta.Fsync(ino=opened.ino, handle=opened.handle, length=9))
        await me(meta.Close(ino=opened.ino, handle=opened.handle))
        await me(meta.MkDir(path=b"/d"))
        await me(meta.Link(source=b"/f", target=b"/g"))
        await me(meta.Truncate(path=b"/f", length=5))
        await me(meta.Unlink(path=b"/f"))
        assert not store.looked

    asyncio.run(main())

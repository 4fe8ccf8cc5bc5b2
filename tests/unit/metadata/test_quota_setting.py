"""Quotas of directories: borders, setting one on what is there, clearing, asking."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from namespace_fakes import Caller, make_namespace
from quota_world import USER, World, over, page, run

from ffs import errors
from ffs.proto import meta
from ffs.proto.meta import OPEN_TMPFILE, OPEN_WRITE
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
from metadata.fs.quota import MIB
from metadata.fs.quota_sweep import QuotaSweeper
from metadata.fs.schema import inode_key
from metadata.kv import open_store
from metadata.kv.contract import Transaction
from metadata.kv.memory import MemoryStore


async def _tree(w: World) -> None:
    await w(meta.MkDir(path=b"/q/a/b", parents=True))
    await w(meta.MkDir(path=b"/q/z"))
    for index in range(7):
        await w.make(b"/q/a/b/%d" % index, 1000 + index)
    await w.make(b"/q/m", 50)
    await w(meta.SymLink(path=b"/q/z/s", target=b"x"))


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
        stuck, whole = [await w.view(path) for path in (b"/p", b"/q")]
        # d, and its first file if a slow machine made the sweep take fewer at once
        assert stuck
        assert stuck.state == COUNTING
        assert stuck.used_entries in (1, 2)
        assert whole
        assert (whole.used_entries, whole.state) == (4, READY)

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

"""Quotas of directories: what counts, what is refused, and what is given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from namespace_fakes import Caller
from quota_world import W, World, over, run

from ffs.proto import meta
from ffs.proto.meta import OPEN_CREATE, OPEN_TMPFILE, OPEN_TRUNC, OPEN_WRITE
from ffs.proto.quota import (
    NO_QUOTA,
    Reserve,
)
from ffs.proto.records import KvParams
from metadata.fs.quota import MIB, ahead_of
from metadata.kv import open_store

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

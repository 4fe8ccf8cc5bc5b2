"""Locks in the namespace: who gets one, who waits, who is refused, and how they end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ffs import errors
from ffs.proto import locking, meta
from ffs.proto.common import Creds
from ffs.proto.records import FLAG_LOCKED, KvParams
from metadata.fs.namespace import Namespace
from metadata.fs.ops.lock import lock
from metadata.fs.ops.unlink import remove_tree
from metadata.fs.schema import find_inode
from metadata.fs.sessions import SessionSweeper
from metadata.kv.contract import Conflict, after
from metadata.kv.memory import MemoryStore

sys.path.insert(0, str(Path(__file__).parents[2] / "model"))

from namespace_fakes import Caller, make_namespace

ENTRIES = locking.LOCK_ENTRIES


def go(test: Callable[[Namespace, Caller, Caller], Awaitable[None]]) -> None:
    async def main() -> None:
        namespace, _, _ = await make_namespace(MemoryStore())
        await test(namespace, await Caller.connect(namespace), await Caller.connect(namespace))

    asyncio.run(main())


async def lock_keys(namespace: Namespace) -> int:
    async def count(snap: Any) -> int:
        return len(await snap.range(b"L", b"N"))

    return await namespace.core.store.read(count)


def test_shared_and_exclusive() -> None:
    async def test(namespace: Namespace, a: Caller, b: Caller) -> None:
        await a(meta.MkDir(path=b"/d"))
        for caller, owner in ((a, 1), (a, 2), (b, 1)):
            assert (await caller(locking.Lock(path=b"/d", owner=owner, exclusive=False))).granted
        refused = await b(locking.Lock(path=b"/d", owner=1))
        assert not refused.granted
        assert [(h.client, h.owner, h.label) for h in refused.holders] == [
            (a.client, 1, "test"),
            (a.client, 2, "test"),
        ]
        for owner in (1, 2):
            assert (await a(locking.Unlock(path=b"/d", owner=owner))).holders
        assert (await b(locking.Lock(path=b"/d", owner=1))).granted  # its own shared one becomes exclusive
        assert not (await b(locking.Lock(path=b"/d", owner=2, exclusive=False))).granted
        assert [h.exclusive for h in (await a(locking.GetLocks(path=b"/d"))).holders] == [True]
        assert not (await a(locking.Unlock(path=b"/d", owner=1))).holders  # it has none
        await b(locking.Unlock(path=b"/d", owner=1))
        assert await lock_keys(namespace) == 0

    go(test)


def test_waiting_until_it_is_released() -> None:
    async def test(namespace: Namespace, a: Caller, b: Caller) -> None:
        await a(meta.MkDir(path=b"/d"))
        await a(locking.Lock(path=b"/d"))
        waiting = asyncio.ensure_future(b(locking.Lock(path=b"/d", wait_ms=10_000)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await a(locking.Unlock(path=b"/d"))
        assert (await waiting).granted
        assert not namespace.core.lock_waiters._events

    go(test)


def test_waiting_ends_with_the_time_and_the_late_copy_stays_refused() -> None:
    async def test(namespace: Namespace, a: Caller, b: Caller) -> None:
        await a(meta.MkDir(path=b"/d"))
        await a(locking.Lock(path=b"/d"))
        assert not (await b(locking.Lock(path=b"/d", wait_ms=20))).granted
        await a(locking.Unlock(path=b"/d"))
        again = await b.resend()
        assert isinstance(again, locking.LockReply)
        assert not again.granted
        assert await lock_keys(namespace) == 0

    go(test)


def test_two_who_make_shared_locks_exclusive_dont_wait_for_each_other() -> None:
    async def test(namespace: Namespace, a: Caller, b: Caller) -> None:
        await a(meta.MkDir(path=b"/d"))
        for caller in (a, b):
            await caller(locking.Lock(path=b"/d", exclusive=False))
        first = asyncio.ensure_future(a(locking.Lock(path=b"/d", wait_ms=10_000)))
        second = asyncio.ensure_future(b(locking.Lock(path=b"/d", wait_ms=10_000)))
        done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        winner = a if first in done else b
        await winner(locking.Unlock(path=b"/d"))
        assert (await first).granted
        assert (await second).granted

    go(test)


@pytest.mark.parametrize("kind", [locking.LOCK_FLOCK, ENTRIES])
def test_a_session_that_ends_lets_go(kind: int) -> None:
    async def test(namespace: Namespace, a: Caller, b: Caller) -> None:
        await a(meta.MkDir(path=b"/d"))
        await a(locking.Lock(path=b"/d", kind=kind))
        waiting = asyncio.ensure_future(b(locking.Lock(path=b"/d", kind=kind, wait_ms=10_000)))
        await asyncio.sleep(0)
        await a(meta.SessionClose())
        assert (await waiting).granted
        await b(meta.SessionClose())
        assert await lock_keys(namespace) == 0

    go(test)


def test_more_locks_than_one_transaction_ends() -> None:
    async def test(namespace: Namespace, a: Caller, b: Caller) -> None:
        await a(meta.MkDir(path=b"/d"))
        for owner in range(450):
            assert (await a(locking.Lock(path=b"/d", owner=owner, exclusive=False))).granted
        await a(meta.SessionClose())
        assert await lock_keys(namespace) > 0
        assert (await b(locking.Lock(path=b"/d"))).granted  # what is left doesn't count
        await b(locking.Unlock(path=b"/d"))
        await SessionSweeper(namespace.core).step()
        assert await lock_keys(namespace) == 0

    go(test)


CHANGES: dict[str, meta.Request] = {
    "create": meta.Open(path=b"/d/new", flags=meta.OPEN_WRITE | meta.OPEN_CREATE),
    "mkdir": meta.MkDir(path=b"/d/new"),
    "mkdir -p": meta.MkDir(path=b"/d/new/er", parents=True),
    "symlink": meta.SymLink(path=b"/d/new", target=b"x"),
    "link": meta.Link(source=b"/f", target=b"/d/new"),
    "kv": meta.KvCreate(path=b"/d/new", params=KvParams(4096)),
    "unlink": meta.Unlink(path=b"/d/f"),
    "rmdir inside": meta.RmDir(path=b"/d/e"),
    "remove_tree inside": meta.RemoveTree(path=b"/d/e"),
    "remove_tree": meta.RemoveTree(path=b"/d"),
    "rename out": meta.Rename(source=b"/d/f", target=b"/g"),
    "rename in": meta.Rename(source=b"/f", target=b"/d/g"),
    "exchange": meta.Rename(source=b"/f", target=b"/d/f", flags=meta.RENAME_EXCHANGE),
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_entries_that_are_locked_are_changed_by_the_holder_only(what: str) -> None:
    async def test(namespace: Namespace, a: Caller, b: Caller) -> None:
        await a(meta.MkDir(path=b"/d/e", parents=True))
        for path in (b"/f", b"/d/f"):
            await a(meta.Open(path=path, flags=meta.OPEN_READ | meta.OPEN_CREATE))
        assert (await a(locking.Lock(path=b"/d", kind=ENTRIES, owner=1))).granted
        assert not (
            await a(locking.Lock(path=b"/d", kind=ENTRIES, owner=2))
        ).granted  # by another thread, say
        import msgspec

        with pytest.raises(errors.Busy, match="locked by test"):
            await b(msgspec.structs.replace(CHANGES[what]))
        await b(meta.Open(path=b"/d/f", flags=meta.OPEN_WRITE))  # its files may be written
        await b(meta.MkDir(path=b"/elsewhere"))
        await a(msgspec.structs.replace(CHANGES[what]))

    go(test)


def test_after_the_lock_everybody_may() -> None:
    async def test(namespace: Namespace, a: Caller, b: Caller) -> None:
        await a(meta.MkDir(path=b"/d"))
        reply = await a(locking.Lock(path=b"/d", kind=ENTRIES))
        store = namespace.core.store
        inode = await store.read(lambda snap: find_inode(snap, reply.ino))
        assert inode is not None
        assert inode.flags & FLAG_LOCKED
        await a(locking.Unlock(path=b"/d", kind=ENTRIES))
        inode = await store.read(lambda snap: find_inode(snap, reply.ino))
        assert inode is not None
        assert not inode.flags & FLAG_LOCKED
        await b(meta.MkDir(path=b"/d/x"))

    go(test)


def test_who_may() -> None:
    async def test(namespace: Namespace, a: Caller, b: Caller) -> None:
        await a(meta.MkDir(path=b"/d", mode=0o755))
        await a(meta.MkDir(path=b"/secret", mode=0o700))
        await a(meta.Open(path=b"/f", flags=meta.OPEN_READ | meta.OPEN_CREATE))
        b.creds = Creds(1000, 1000)
        assert (await b(locking.Lock(path=b"/d", owner=1, exclusive=False))).granted
        with pytest.raises(errors.AccessDenied):
            await b(locking.Lock(path=b"/secret"))
        with pytest.raises(errors.AccessDenied):
            await b(locking.Lock(path=b"/d", kind=ENTRIES))
        with pytest.raises(errors.NotADirectory):
            await a(locking.Lock(path=b"/f", kind=ENTRIES))
        with pytest.raises(errors.NotFound):
            await a(locking.Lock(path=b"/nothing"))
        with pytest.raises(errors.InvalidArgument):
            await a(locking.Lock(path=b"/d", kind=7))
        await a(locking.Lock(path=b"/d", owner=1, exclusive=False))
        with pytest.raises(errors.NotPermitted):
            await b(locking.Unlock(path=b"/d", force=True))
        ended = await a(locking.Unlock(path=b"/d", force=True))
        assert {holder.client for holder in ended.holders} == {a.client, b.client}

    go(test)


def test_a_tree_with_a_locked_directory_in_it_stays() -> None:
    """Unless the holder removes it; and a lock elsewhere, or of a session that is over, holds nothing up."""

    async def test(namespace: Namespace, a: Caller, b: Caller) -> None:
        for path in (b"/t/x/locked", b"/t/y", b"/elsewhere/d"):
            await a(meta.MkDir(path=path, parents=True))
        for path in (b"/t/x/locked", b"/elsewhere/d"):
            assert (await a(locking.Lock(path=path, kind=ENTRIES, owner=1))).granted
        for path in (b"/t", b"/t/x", b"/t/x/locked"):
            with pytest.raises(errors.Busy, match="locked by test"):
                await b(meta.RemoveTree(path=path))
        await b(meta.RemoveTree(path=b"/t/y"))
        await b(meta.Rename(source=b"/t", target=b"/u"))  # takes the lock along
        with pytest.raises(errors.Busy):
            await b(meta.RemoveTree(path=b"/u"))
        await a(locking.Unlock(path=b"/u/x/locked", kind=ENTRIES, owner=1))
        await b(meta.RemoveTree(path=b"/u"))

        await a(meta.MkDir(path=b"/own/d", parents=True))
        assert (await a(locking.Lock(path=b"/own/d", kind=ENTRIES, owner=2))).granted
        # Its own tree goes, and isn't where it was for whoever looks at the lock afterwards.
        await b(meta.MkDir(path=b"/above"))
        await b(meta.Rename(source=b"/own", target=b"/above/own"))
        await a(meta.RemoveTree(path=b"/above/own"))
        await b(meta.RemoveTree(path=b"/above"))

        with pytest.raises(errors.Busy):
            await b(meta.RemoveTree(path=b"/elsewhere"))
        await a(meta.SessionClose())
        await b(meta.RemoveTree(path=b"/elsewhere"))
        assert await left(namespace, b"l") == 0

    go(test)


async def left(namespace: Namespace, prefix: bytes) -> int:
    async def count(snap: Any) -> int:
        return len(await snap.range(prefix, after(prefix)))

    return await namespace.core.store.read(count)


@pytest.mark.parametrize("first", ["lock", "removal"])
def test_a_lock_and_the_removal_of_its_tree_conflict(first: str) -> None:
    """Whichever commits second runs again, and sees the other."""

    async def test(namespace: Namespace, a: Caller, b: Caller) -> None:
        core = namespace.core
        await a(meta.MkDir(path=b"/t/d", parents=True))
        removal = b.prepare(meta.RemoveTree(path=b"/t"))
        request = a.prepare(locking.Lock(path=b"/t/d", kind=ENTRIES, owner=1))
        assert isinstance(removal, meta.RemoveTree)
        assert isinstance(request, locking.Lock)
        one, two = core.store.begin(), core.store.begin()
        if first == "removal":
            one, two = two, one
        assert (await lock(core, one, request, wait=False)).granted
        await remove_tree(core, two, removal, 0)
        earlier, later = (one, two) if first == "lock" else (two, one)
        await earlier.commit()
        with pytest.raises(Conflict):
            await later.commit()

    go(test)

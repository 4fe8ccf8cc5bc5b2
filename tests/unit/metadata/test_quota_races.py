"""Quotas of directories: one request in the middle of another, and what they cost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import quota_count
from namespace_fakes import Caller, make_namespace
from quota_world import W, World, page

from ffs import errors
from ffs.proto import meta
from ffs.proto.meta import OPEN_CREATE, OPEN_TMPFILE, OPEN_WRITE
from ffs.proto.quota import (
    Reserve,
    SetQuota,
)
from metadata.fs.quota import MIB
from metadata.kv.contract import Transaction
from metadata.kv.memory import MemoryStore

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

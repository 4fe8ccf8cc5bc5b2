"""A namespace with a directory /q for tests of quotas: after every request what is counted is checked against
a recount from all keys (quota_count.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import quota_count
from namespace_fakes import Caller, FakeChains, make_namespace
from quota_count import Counted

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import Creds
from ffs.proto.meta import OPEN_CREATE, OPEN_WRITE
from ffs.proto.quota import (
    GetQuota,
    QuotaView,
    Reserve,
    SetQuota,
)
from metadata.fs.collector import Collector
from metadata.fs.namespace import Namespace
from metadata.fs.quota_sweep import QuotaSweeper, count_page
from metadata.fs.schema import QUOTA_WORK, split_quota_work
from metadata.fs.sessions import SessionSweeper
from metadata.kv.contract import Store
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


async def page(w: World, limit: int = 1) -> bool:
    """One small page of what is to be counted, by somebody who does nothing after it. False: all is done."""
    pairs = await w.store.read(lambda snap: snap.range(QUOTA_WORK, QUOTA_WORK + b"\xff", 1))
    if not pairs:
        return False
    label, ino = split_quota_work(pairs[0][0])
    await w.store.run(lambda txn: count_page(txn, label, ino, limit))
    await w.check()
    return True

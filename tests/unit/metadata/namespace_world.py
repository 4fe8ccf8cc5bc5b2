"""A namespace over an engine with its fakes, for test_namespace*.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from namespace_fakes import Caller, FakeChains, FakeCluster, make_namespace

from ffs.proto import meta
from ffs.proto.common import decode_capability
from ffs.proto.meta import OPEN_CREATE, OPEN_WRITE
from metadata.fs.collector import Collector
from metadata.fs.namespace import Namespace
from metadata.kv.contract import Store
from metadata.kv.memory import MemoryStore

W = OPEN_WRITE | OPEN_CREATE


class World:
    """A namespace over an engine, with its fakes and a first client."""

    store: Store
    namespace: Namespace
    cluster: FakeCluster
    chains: FakeChains
    me: Caller

    async def start(self, store: Store) -> World:
        self.store = store
        self.namespace, self.cluster, self.chains = await make_namespace(store)
        self.me = await Caller.connect(self.namespace)
        return self

    async def write(self, caller: Caller, opened: meta.Opened, offset: int, length: int) -> None:
        layout = opened.attributes.layout
        assert layout is not None
        view = self.cluster.table(layout.table)
        assert view is not None
        epoch = decode_capability(opened.capability).epoch
        self.chains.write(opened.ino, layout, epoch, offset, length, view.chains)

    async def close(self, caller: Caller, opened: meta.Opened, length: int) -> meta.LengthReply:
        reply: meta.LengthReply = await caller(
            meta.Close(
                ino=opened.ino,
                handle=opened.handle,
                epoch=decode_capability(opened.capability).epoch,
                length=length,
                written=length > 0,
            )
        )
        return reply

    async def make(self, path: bytes, length: int) -> meta.Opened:
        opened: meta.Opened = await self.me(meta.Open(path=path, flags=W))
        await self.write(self.me, opened, 0, length)
        await self.close(self.me, opened, length)
        return opened

    async def collect(self) -> None:
        collector = Collector(self.namespace.core)
        while await collector.step():
            pass

    async def keys(self, prefix: bytes = b"") -> list[bytes]:
        async def body(snap: Any) -> list[bytes]:
            return [key for key, _ in await snap.range(b"\0", b"\xff") if key.startswith(prefix)]

        return await self.store.read(body)


def run(test: Callable[[World], Awaitable[None]], store: Store | None = None) -> None:
    async def main() -> None:
        world = await World().start(store or MemoryStore())
        try:
            await test(world)
        finally:
            await world.store.close()

    asyncio.run(main())

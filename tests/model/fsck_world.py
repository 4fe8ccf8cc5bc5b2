"""A namespace with something in it, for tests of fsck: damage is made by hand, checked, mended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from namespace_fakes import Caller, FakeChains, FakeCluster, make_namespace, unwrap

from ffs import errors
from ffs.client.fsck import Report, check
from ffs.proto import meta, xattrs
from ffs.proto.common import decode_capability
from ffs.proto.records import KvParams
from metadata.fs.collector import Collector
from metadata.fs.namespace import Namespace
from metadata.fs.ops import fsck_pages as ops
from metadata.fs.ops import fsck_quota
from metadata.fs.quota_sweep import QuotaSweeper
from metadata.fs.schema import inode_key
from metadata.fs.sessions import SessionSweeper
from metadata.kv.contract import Store, Transaction
from metadata.kv.memory import MemoryStore

W = meta.OPEN_WRITE | meta.OPEN_CREATE
CHAINS = [(100, 1), (101, 1), (102, 1), (103, 1), (104, 1)]


@dataclass
class World:
    """A namespace with something in it."""

    store: Store
    namespace: Namespace
    cluster: FakeCluster
    chains: FakeChains
    me: Caller
    gone: int = 0  # an id of a block that the store has given out, and nobody has

    async def make(self, path: bytes, length: int = 0) -> int:
        opened = await self.me(meta.Open(path=path, flags=W))
        epoch = decode_capability(opened.capability).epoch
        if length:
            view = self.cluster.table(1)
            assert view is not None
            self.chains.write(opened.ino, opened.attributes.layout, epoch, 0, length, view.chains)
        await self.me(
            meta.Close(ino=opened.ino, handle=opened.handle, epoch=epoch, length=length, written=length > 0)
        )
        return int(opened.ino)

    async def mkdir(self, path: bytes) -> int:
        return int((await self.me(meta.MkDir(path=path))).attributes.ino)

    async def ino(self, path: bytes) -> int:
        return int((await self.me(meta.Stat(path=path))).attributes.ino)

    async def write(self, *pairs: tuple[bytes, bytes | None]) -> None:
        """By hand, past the namespace."""

        async def body(txn: Transaction) -> None:
            for key, value in pairs:
                if value is None:
                    txn.clear(key)
                else:
                    txn.set(key, value)

        await self.store.run(body)

    async def get(self, key: bytes) -> bytes | None:
        return await self.store.read(lambda snap: snap.get(key))

    async def inodes(self) -> list[bytes]:
        pairs = await self.store.read(lambda snap: snap.range(b"i", b"j"))
        return [key for key, _ in pairs if len(key) == len(inode_key(1))]

    async def check(
        self,
        *,
        repair: bool = False,
        tree: int = 0,
        pause: bool = False,
        meanwhile: Callable[[meta.Request], Awaitable[None]] | None = None,
    ) -> Report:
        steps = check(CHAINS, repair=repair, tree=tree)
        request = next(steps)
        while True:
            if meanwhile is not None:
                await meanwhile(request)
            if pause:
                await asyncio.sleep(0)
            try:
                reply = unwrap(await self.namespace.handle(self.me.prepare(request)))
            except errors.FfsError as error:
                reply = error
            try:
                request = steps.send(reply)
            except StopIteration as done:
                report: Report = done.value
                return report

    async def settle(self) -> None:
        """The background work of a primary."""
        sweeper, collector = SessionSweeper(self.namespace.core), Collector(self.namespace.core)
        counting = QuotaSweeper(self.store)
        while await sweeper.step() + await collector.step() + await counting.step():
            pass

    async def expect(self, kinds: set[str], *, after: set[str] | None = None) -> Report:
        """A check finds just these; a repair mends all; then all is well (or `after` is left)."""
        report = await self.check()
        assert {each.kind for each in report.findings} == kinds, report.findings
        assert not report.clean
        assert report.repairs == []
        mended = await self.check(repair=True)
        assert mended.findings == report.findings
        assert [each.text for each in mended.repairs if not each.mended] == []
        assert mended.clean
        await self.settle()
        again = await self.check()
        assert {each.kind for each in again.findings} == (after or set()), again.findings
        assert again.clean
        return mended


def run(test: Callable[[World], Awaitable[None]], *, pages: int = 5) -> None:
    """In small pages, so that everything goes over several."""

    async def body() -> None:
        store = MemoryStore()
        namespace, cluster, chains = await make_namespace(store)
        world = World(store, namespace, cluster, chains, await Caller.connect(namespace))
        world.gone = await world.mkdir(b"/d") | 1023
        await world.mkdir(b"/d/inside")
        await world.mkdir(b"/empty")
        for number in range(8):
            await world.make(b"/d/f%d" % number, 10_000 * number)
        await world.me(meta.Link(source=b"/d/f1", target=b"/d/inside/again"))
        await world.me(meta.SymLink(path=b"/link", target=b"/d"))
        await world.me(meta.KvCreate(path=b"/kv", params=KvParams(65536)))
        await world.me(xattrs.SetXattr(path=b"/d/f2", name=b"user.n", value=b"v"))
        try:
            await test(world)
        finally:
            await store.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "PAGE", pages)
        patch.setattr(ops, "NAMES_PAGE", pages)
        patch.setattr(ops, "INODE_PAGE", max(9, pages))
        patch.setattr(ops, "SKIP_PAGE", pages)
        patch.setattr(fsck_quota, "PAGE", pages)
        patch.setattr(fsck_quota, "INODES", max(9, 6 * pages))
        asyncio.run(asyncio.wait_for(body(), 20))

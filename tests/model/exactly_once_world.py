"""The world in which a request is made twice, and where its cases are kept (exactly_once.py)."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

from namespace_fakes import CLUSTER, Caller, FakeChains, FakeCluster

from ffs.proto import meta
from ffs.proto.common import Creds
from metadata.fs.core import Core
from metadata.fs.namespace import Namespace, format_store
from metadata.kv.faults import Died, FaultyStore, Rates
from metadata.kv.memory import MemoryStore

NOW_NS = 10**18
USER = Creds(1000, 1000)
BATCH = 140  # three pages


class DyingChains(FakeChains):
    """The process ends at call `die_at`, before or after it was carried out."""

    die_at = -1

    def _check(self, chain: int, space: int, epoch: int | None = None) -> dict[tuple[int, bytes], int]:
        if self.calls == self.die_at:
            self.calls += 1
            raise Died("at a chain")
        return super()._check(chain, space, epoch)


class World:
    """A store, its chains, and two metadata processes."""

    store: FaultyStore
    chains: DyingChains
    first: Namespace
    second: Namespace
    me: Caller
    other: Caller  # another client

    @classmethod
    async def make(cls) -> World:
        world = cls()
        world.store = FaultyStore(MemoryStore(), Rates(), random.Random(0))
        world.chains = DyingChains()
        cluster = FakeCluster()
        await format_store(world.store, CLUSTER, now_ns=NOW_NS, root_mode=0o777)
        world.first, world.second = (
            Namespace(
                Core(
                    world.store,
                    cluster,
                    world.chains,
                    cluster_id=CLUSTER,
                    clock_ns=lambda: NOW_NS,
                    rng=random.Random(seed),
                )
            )
            for seed in (1, 2)
        )
        world.me = await Caller.connect(world.first)
        world.other = await Caller.connect(world.first)
        world.other.slot = 1
        return world

    async def file(self, path: bytes, length: int = 0, *, flags: int = 0, keep: bool = False) -> meta.Opened:
        """A file with so many bytes; open still if `keep`."""
        flags |= meta.OPEN_WRITE | (0 if flags & meta.OPEN_TMPFILE else meta.OPEN_CREATE)
        opened: meta.Opened = await self.me(meta.Open(path=path, flags=flags))
        if length:
            self.put(opened, length)
            await self.me(meta.Fsync(ino=opened.ino, handle=opened.handle, length=length))
        if not keep:
            await self.me(meta.Close(ino=opened.ino, handle=opened.handle))
        return opened

    def put(self, opened: meta.Opened, length: int) -> None:
        layout = opened.attributes.layout
        assert layout is not None
        self.chains.write(opened.ino, layout, opened.attributes.epoch, 0, length, range(100, 105))


Case = Callable[[World], Awaitable[meta.Request]]
CASES: dict[type[meta.Request], list[Case]] = {}


def case(kind: type[meta.Request]) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES.setdefault(kind, []).append(function)
        return function

    return add

"""Quotas under everything at once: clients that make, write, rename, link, remove and die, quotas set and
cleared, counting by small pages, collection, over a store that fails, runs bodies twice and lets others
commit in between. After every round what is counted is compared with a recount, in the end with a walk."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import quota_count
from namespace_fakes import CLUSTER, Caller, FakeChains, FakeCluster

from ffs import errors
from ffs.layout import Layout
from ffs.proto import meta
from ffs.proto.meta import OPEN_CREATE, OPEN_TMPFILE, OPEN_TRUNC, OPEN_WRITE
from ffs.proto.quota import NO_QUOTA, Reserve, SetQuota
from ffs.proto.records import KvParams
from metadata.fs.collector import Collector
from metadata.fs.core import Core
from metadata.fs.namespace import Namespace, format_store
from metadata.fs.quota_sweep import QuotaSweeper, count_page
from metadata.fs.schema import QUOTA_WORK, split_quota_work
from metadata.fs.sessions import SessionSweeper
from metadata.kv import open_store
from metadata.kv.contract import Store
from metadata.kv.faults import FaultyStore, Rates
from metadata.kv.memory import MemoryStore

SCALE = int(os.environ.get("FFS_TEST_SCALE", "1"))
DIRECTORIES = [b"/q", b"/q/a", b"/q/a/b", b"/q/c", b"/p", b"/p/a", b"/x", b"/x/y"]
NAMES = [b"f", b"g", b"h", b"a", b"b"]
LENGTHS = [1, 700, 5000, 60_000, 300_000]
CHAINS = range(100, 105)

# What a client may be told.
EXPECTED = (
    errors.NotFound,
    errors.Exists,
    errors.NotEmpty,
    errors.IsADirectory,
    errors.NotADirectory,
    errors.CrossDevice,
    errors.QuotaExceeded,
    errors.InvalidArgument,
    errors.SymlinkLoop,
    errors.NotPermitted,  # a directory has one name only
    errors.BadHandle,
    errors.Fenced,
)


class Shuffled(FaultyStore):
    """Lets others commit between a body and its commit."""

    async def delay(self) -> None:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)


class NoWait(random.Random):
    def random(self) -> float:
        return 0.0


@dataclass
class Handle:
    ino: int
    handle: int
    layout: Layout
    epoch: int
    reserved: int
    nameless: bool
    end: int = 0  # written and not reported yet


@dataclass
class Client:
    caller: Caller
    knows: bool  # of quotas: it reserves before it writes
    open: list[Handle] = field(default_factory=list)


class Story:
    def __init__(self, seed: int, store: Store | None = None) -> None:
        self.rng = random.Random(seed)
        rates = Rates(conflict=0.05, unknown_applied=0.1, unknown_lost=0.05, too_old=0.02, twice=0.2)
        self.store = Shuffled(store or MemoryStore(), rates if seed % 3 else Rates(), self.rng)
        self.store._backoff_rng = NoWait()
        self.chains = FakeChains()
        self.links = seed % 2 == 1  # several names of a file, on both sides of borders
        self.clients: list[Client] = []
        self.told: Counter[str] = Counter()

    async def start(self) -> None:
        await format_store(self.store, CLUSTER, now_ns=1, root_mode=0o777)
        cluster = FakeCluster()
        self.core = Core(self.store, cluster, self.chains, cluster_id=CLUSTER, rng=self.rng)
        self.namespace = Namespace(self.core)
        for knows in (True, True, False):
            await self.connect(knows)
        for path in DIRECTORIES:
            await self.clients[0].caller(meta.MkDir(path=path, parents=True))

    async def connect(self, knows: bool) -> None:
        self.clients.append(Client(await Caller.connect(self.namespace), knows))

    def path(self) -> bytes:
        return self.rng.choice(DIRECTORIES) + b"/" + self.rng.choice(NAMES)

    # --- what clients do ---

    async def ask(self, client: Client, request: meta.Request) -> None:
        """Twice now and then: a retry."""
        reply = await client.caller(request)
        if self.rng.random() < 0.2:
            await client.caller.resend()
        if isinstance(reply, meta.Opened) and reply.handle:
            layout = reply.attributes.layout
            assert layout is not None
            client.open.append(
                Handle(
                    reply.ino,
                    reply.handle,
                    layout,
                    reply.attributes.epoch,
                    reply.reserved,
                    reply.attributes.nlink == 0,
                )
            )

    async def names(self, client: Client) -> None:
        rng, a, b = self.rng, self.path(), self.path()
        request: meta.Request = rng.choice(
            [
                meta.Open(path=a, flags=meta.OPEN_READ | OPEN_CREATE),
                meta.OpenMany(entries=tuple(meta.OpenEntry(a + b"%d" % i, 5) for i in range(3))),
                meta.MkDir(path=a, parents=rng.random() < 0.3),
                meta.SymLink(path=a, target=b"x"),
                meta.KvCreate(path=a, params=KvParams(4096)),
                meta.Rename(source=a, target=b),
                meta.Rename(source=a, target=b),
                meta.Rename(source=rng.choice(DIRECTORIES), target=b),
                meta.Rename(source=a, target=b, flags=meta.RENAME_EXCHANGE),
                meta.Rename(
                    source=rng.choice(DIRECTORIES),
                    target=rng.choice(DIRECTORIES),
                    flags=meta.RENAME_EXCHANGE,
                ),
                meta.Unlink(path=a),
                meta.Unlink(path=a),
                meta.UnlinkMany(paths=(a, b)),
                meta.RmDir(path=a),
                meta.RemoveTree(path=a if rng.random() < 0.8 else rng.choice(DIRECTORIES)),
                meta.Truncate(path=a, length=rng.choice(LENGTHS)),
                meta.MkDir(path=rng.choice(DIRECTORIES), parents=True),
                meta.Link(source=a, target=b, replace=rng.random() < 0.5)
                if self.links
                else meta.Unlink(path=b),
            ]
        )
        await self.ask(client, request)

    async def opens(self, client: Client) -> None:
        flags = OPEN_WRITE | self.rng.choice([OPEN_CREATE, OPEN_CREATE, OPEN_TMPFILE, OPEN_TRUNC, 0])
        path = self.rng.choice(DIRECTORIES) if flags & OPEN_TMPFILE else self.path()
        await self.ask(client, meta.Open(path=path, flags=flags))

    async def writes(self, client: Client) -> None:
        rng = self.rng
        if not client.open:
            return await self.opens(client)
        h = rng.choice(client.open)
        what = rng.choice(["write", "write", "write", "append", "cut", "close", "close", "publish"])
        head = {"ino": h.ino, "handle": h.handle}
        if what == "append":
            await client.caller(meta.Append(**head, length=rng.choice(LENGTHS)))
        elif what == "cut":
            reply = await client.caller(meta.Truncate(**head, length=rng.choice([0, *LENGTHS])))
            h.epoch, h.reserved, h.end = reply.epoch, reply.reserved, 0
        elif what == "publish" and (h.nameless or self.links):
            h.nameless = False
            await client.caller(meta.Link(**head, target=self.path(), replace=True))
        elif what == "write":
            await self.write(client, h, rng.choice(LENGTHS))
        if what == "close" or (what == "write" and rng.random() < 0.5):
            kind = meta.Close if what == "close" else meta.Fsync
            length = await client.caller(kind(**head, epoch=h.epoch, length=h.end, written=h.end > 0))
            if what == "close":
                client.open.remove(h)
            elif not length.merged:
                await self.new_epoch(client, h)
            else:
                h.reserved = max(h.reserved, length.reserved) if length.reserved >= 0 else NO_QUOTA

    async def write(self, client: Client, h: Handle, end: int) -> None:
        if client.knows and NO_QUOTA != h.reserved < end:
            request = Reserve(ino=h.ino, handle=h.handle, epoch=h.epoch, end=end)
            reply = await client.caller(request)
            if reply.epoch != h.epoch:
                return await self.new_epoch(client, h)
            assert reply.reserved == NO_QUOTA or reply.reserved >= end
            h.reserved = reply.reserved
        try:
            self.chains.write(h.ino, h.layout, h.epoch, 0, end, CHAINS)
        except errors.StaleEpoch:
            return await self.new_epoch(client, h)
        h.end = max(h.end, end)

    async def new_epoch(self, client: Client, h: Handle) -> None:
        reply = await client.caller(meta.CapabilityRenew(ino=h.ino, handle=h.handle, rights=2))
        h.epoch, h.reserved, h.end = reply.epoch, min(h.reserved, 0), 0

    # --- what others do ---

    async def dies(self) -> None:
        client = self.clients.pop(self.rng.randrange(len(self.clients)))
        await self.namespace.handle(meta.SessionClose(client=client.caller.client))
        await self.connect(client.knows)

    async def sets(self) -> None:
        rng = self.rng
        limits = rng.choice([(0, 0), (80_000, 0), (0, 6), (2_000_000, 100)])
        path = rng.choice([b"/q", b"/q", b"/p", b"/q/a", b"/x/y"])
        request = SetQuota(path=path, limit_bytes=limits[0], limit_entries=limits[1])
        if rng.random() < 0.3:
            request = SetQuota(path=path, clear=True)
        caller = await Caller.connect(self.namespace)
        await caller(request)

    async def counts(self) -> None:
        span = (QUOTA_WORK, QUOTA_WORK + b"\xff")
        pairs = await self.store.read(lambda snap: snap.range(*span))
        if pairs:
            label, ino = split_quota_work(self.rng.choice(pairs)[0])
            await self.store.run(lambda txn: count_page(txn, label, ino, 2))

    async def collects(self) -> None:
        await Collector(self.core).step()

    async def settles(self) -> None:
        await SessionSweeper(self.core).step()

    # --- rounds ---

    async def round(self) -> None:
        rng = self.rng
        work: list[Callable[[], Awaitable[None]]] = []
        for client in self.clients:
            what = rng.choice([self.names, self.names, self.opens, self.writes, self.writes, self.writes])
            work.append(lambda what=what, client=client: what(client))
        work += rng.sample([self.counts, self.counts, self.collects, self.settles], rng.randrange(4))
        if rng.random() < 0.25:
            work.append(rng.choice([self.dies, self.sets, self.sets, self.sets]))
        rng.shuffle(work)
        await asyncio.gather(*(self.tolerant(each()) for each in work))
        await self.check()

    async def tolerant(self, work: Awaitable[None]) -> None:
        try:
            await work
            self.told["ok"] += 1
        except EXPECTED as error:
            self.told[type(error).__name__] += 1

    async def pairs(self) -> quota_count.Pairs:
        return await self.store.read(lambda snap: snap.range(b"\0", b"\xff"))

    async def check(self) -> None:
        quota_count.check(await self.pairs())

    async def end(self) -> None:
        """Half of the clients close, the others die; then everything is worked off."""
        for client in self.clients[:2]:
            for h in client.open:
                await self.tolerant(client.caller(meta.Close(ino=h.ino, handle=h.handle)))
        for client in self.clients:
            await self.namespace.handle(meta.SessionClose(client=client.caller.client))
        sweeper, settler = QuotaSweeper(self.store), SessionSweeper(self.core)
        while await settler.step() or await sweeper.step():
            await self.check()
        while await Collector(self.core).step():
            await self.check()
        quota_count.check_settled(await self.pairs(), links=self.links)


async def tell(story: Story, rounds: int) -> Counter[str]:
    await story.start()
    for _ in range(rounds):
        await story.round()
    await story.end()
    await story.store.close()
    return story.told


@pytest.mark.parametrize("seed", range(24 * SCALE))
def test_what_is_counted_is_what_is_there(seed: int) -> None:
    told = asyncio.run(tell(Story(seed), 60))
    assert told["ok"] > 100, told


def test_the_same_over_lmdb(tmp_path: Path) -> None:
    async def main() -> None:
        await tell(Story(1001, open_store(f"lmdb://{tmp_path}/s")), 30)

    asyncio.run(main())

"""Single behaviours of the namespace, each by name."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from namespace_fakes import CLUSTER, Caller, FakeChains, FakeCluster, make_namespace, unwrap

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import (
    RIGHT_READ,
    RIGHT_WRITE,
    Creds,
    ErrorReply,
    Message,
    OkReply,
    decode_capability,
)
from ffs.proto.meta import (
    OPEN_CREATE,
    OPEN_EXCL,
    OPEN_READ,
    OPEN_TMPFILE,
    OPEN_TRUNC,
    OPEN_WRITE,
)
from ffs.proto.records import KV_EVICTABLE, KvParams
from metadata.fs.chunks import EPOCH_MAX
from metadata.fs.collector import Collector
from metadata.fs.core import Core
from metadata.fs.namespace import Namespace, format_store, read_header
from metadata.fs.schema import inode_key
from metadata.fs.sessions import SessionSweeper, fenced_clients, settle_writer
from metadata.kv import open_store
from metadata.kv.contract import Store, Transaction
from metadata.kv.faults import FaultyStore, Rates
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


# --- retries --------------------------------------------------------------------------------


def test_the_same_request_gets_its_first_answer() -> None:
    async def test(w: World) -> None:
        request = w.me.prepare(meta.MkDir(path=b"/d"))
        first = await w.namespace.handle(request)
        w.me.slot = 5
        await w.me(meta.RmDir(path=b"/d"))
        assert await w.namespace.handle(request) == first
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(path=b"/d"))

    run(test)


def test_an_old_sequence_is_refused() -> None:
    async def test(w: World) -> None:
        old = w.me.prepare(meta.MkDir(path=b"/a"))
        await w.me(meta.MkDir(path=b"/b"))
        with pytest.raises(errors.InvalidArgument, match="was given up"):
            unwrap(await w.namespace.handle(old))
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(path=b"/a"))

    run(test)


def test_a_sequence_is_not_used_for_two_requests() -> None:
    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/a"))
        other = meta.RmDir(path=b"/a", client=w.me.client, sequence=w.me.sequences[0])
        with pytest.raises(errors.ProtocolError):
            unwrap(await w.namespace.handle(other))

    run(test)


@pytest.mark.parametrize(("field", "value"), [("client", 0), ("slot", 1024), ("slot", -1), ("sequence", 0)])
def test_bad_identities(field: str, value: int) -> None:
    async def test(w: World) -> None:
        request = w.me.prepare(meta.MkDir(path=b"/a"))
        setattr(request, field, value)
        with pytest.raises(errors.InvalidArgument):
            unwrap(await w.namespace.handle(request))

    run(test)


EVERY_OPERATION: list[Callable[[meta.Opened, meta.Opened], meta.Request]] = [
    lambda f, s: meta.Open(path=b"/new", flags=W),
    lambda f, s: meta.Open(path=b"/new", flags=W | OPEN_EXCL),
    lambda f, s: meta.Open(path=b"/d/full", flags=OPEN_WRITE | OPEN_TRUNC),
    lambda f, s: meta.Open(path=b"/d", flags=OPEN_WRITE | OPEN_TMPFILE),
    lambda f, s: meta.OpenMany(entries=tuple(meta.OpenEntry(b"/m%d" % i, W | OPEN_EXCL) for i in range(150))),
    lambda f, s: meta.Close(ino=f.ino, handle=f.handle, length=100, written=True),
    lambda f, s: meta.CloseMany(entries=(meta.CloseEntry(f.ino, f.handle, 0, 5, True),)),
    lambda f, s: meta.Fsync(ino=f.ino, handle=f.handle, length=100),
    lambda f, s: meta.Append(ino=f.ino, handle=f.handle, length=10),
    lambda f, s: meta.Truncate(ino=f.ino, handle=f.handle, length=7),
    lambda f, s: meta.Truncate(path=b"/d/full", length=1),
    lambda f, s: meta.SetAttr(path=b"/d", what=meta.SET_MODE, mode=0o700),
    lambda f, s: meta.MkDir(path=b"/new"),
    lambda f, s: meta.MkDir(path=b"/d/x/y/z", parents=True),
    lambda f, s: meta.Rename(source=b"/d/full", target=b"/moved"),
    lambda f, s: meta.Rename(source=b"/d/full", target=b"/d/sub", flags=meta.RENAME_EXCHANGE),
    lambda f, s: meta.Link(source=b"/d/full", target=b"/again"),
    lambda f, s: meta.Link(ino=s.ino, handle=s.handle, target=b"/d/full", replace=True),
    lambda f, s: meta.SymLink(path=b"/new", target=b"x"),
    lambda f, s: meta.Unlink(path=b"/d/full"),
    lambda f, s: meta.UnlinkMany(paths=(b"/d/full", b"/none", b"/d/link")),
    lambda f, s: meta.RmDir(path=b"/d/sub"),
    lambda f, s: meta.RemoveTree(path=b"/d"),
    lambda f, s: meta.KvCreate(path=b"/new", params=KvParams(4096)),
]


@pytest.mark.parametrize("rates", [Rates(unknown_applied=0.5), Rates(unknown_applied=0.3, unknown_lost=0.3)])
@pytest.mark.parametrize("operation", EVERY_OPERATION)
def test_s23_unknown_outcomes_of_every_operation(
    operation: Callable[[meta.Opened, meta.Opened], meta.Request], rates: Rates
) -> None:
    """A commit whose outcome is unknown is tried again and takes effect once: the answer and the whole
    store are those of a run without faults."""

    async def outcome(store: FaultyStore, rates: Rates) -> tuple[Message, list[tuple[bytes, bytes]]]:
        w = await World().start(store)
        w.namespace.core.now_ns = lambda: 10**18
        await w.me(meta.MkDir(path=b"/d"))
        await w.me(meta.MkDir(path=b"/d/sub"))
        await w.make(b"/d/full", 10_000)
        await w.me(meta.Link(source=b"/d/full", target=b"/d/link"))
        opened = await w.me(meta.Open(path=b"/d/open", flags=W))
        spare = await w.me(meta.Open(path=b"/d", flags=OPEN_WRITE | OPEN_TMPFILE))
        await w.namespace.core.inos.take()  # blocks of ids are fetched before the faults begin
        request = w.me.prepare(operation(opened, spare))
        store.rates = rates
        reply = await w.namespace.handle(request)
        again = await w.namespace.handle(request)
        store.rates = Rates()
        assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(reply)

        async def body(snap: Any) -> list[tuple[bytes, bytes]]:
            return [p for p in await snap.range(b"\0", b"\xff") if p[0][:1] != b"k"]

        pairs = await store.read(body)
        await store.close()
        return reply, pairs

    seed = random.randrange(2**32)
    print("seed", seed)
    clean, clean_store = asyncio.run(
        outcome(FaultyStore(MemoryStore(), Rates(), random.Random(seed)), Rates())
    )
    assert not isinstance(clean, ErrorReply), clean
    faulty, faulty_store = asyncio.run(
        outcome(FaultyStore(MemoryStore(), Rates(), random.Random(seed)), rates)
    )
    assert without_ids(faulty) == without_ids(clean)
    assert [k for k, _ in faulty_store] == [k for k, _ in clean_store] or ids_differ(faulty, clean)
    assert len(faulty_store) == len(clean_store)


def without_ids(reply: Message) -> Any:
    """A reply without what may differ when a body ran twice: fresh inode and capability ids."""
    plain = msgspec.to_builtins(reply)
    return _strip(plain)


def _strip(value: Any) -> Any:
    if isinstance(value, list):
        return [_strip(v) for v in value]
    if isinstance(value, bytes | str) and len(value) > 80:
        return "capability"
    if isinstance(value, int) and value > 4096 and value < 10**17:
        return "id"
    return value


def ids_differ(a: Message, b: Message) -> bool:
    return msgspec.msgpack.encode(a) != msgspec.msgpack.encode(b)


def test_s28_many_makedirs_at_once(tmp_path: Path) -> None:
    """64 clients make one deep path with exist_ok: all succeed, on one inode."""

    async def test(w: World) -> None:
        callers = [await Caller.connect(w.namespace) for _ in range(64)]
        path = b"/a/b/c/d/e/f"
        replies = await asyncio.gather(*(c(meta.MkDir(path=path, parents=True)) for c in callers))
        assert len({reply.attributes.ino for reply in replies}) == 1
        assert (await w.me(meta.Stat(path=b"/a"))).attributes.nlink == 3

    run(test)
    run(test, open_store(f"lmdb://{tmp_path}/store"))


def test_exclusive_creation_has_one_winner(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        callers = [await Caller.connect(w.namespace) for _ in range(32)]
        requests = [c.prepare(meta.Open(path=b"/f", flags=W | OPEN_EXCL)) for c in callers]
        replies = await asyncio.gather(*(w.namespace.handle(r) for r in requests))
        opened = [r for r in replies if isinstance(r, meta.Opened)]
        assert len(opened) == 1
        assert all(isinstance(r, ErrorReply) and r.code == 17 for r in replies if r is not opened[0])

    run(test, open_store(f"lmdb://{tmp_path}/store"))


def test_creating_in_one_directory_never_conflicts(tmp_path: Path) -> None:
    """No hot keys: 200 files at once in one directory, each body run once."""

    async def test(w: World) -> None:
        core = w.namespace.core
        await core.inos.take()
        await core.capabilities.take()
        ran = 0
        original = core.add_entry

        def counted(*args: Any, **kwargs: Any) -> None:
            nonlocal ran
            ran += 1
            original(*args, **kwargs)

        core.add_entry = counted  # type: ignore[method-assign]
        requests = []
        for i in range(200):
            w.me.slot = i
            requests.append(w.me.prepare(meta.Open(path=b"/f%d" % i, flags=W)))
        replies = await asyncio.gather(*(w.namespace.handle(r) for r in requests))
        assert all(isinstance(r, meta.Opened) for r in replies)
        assert ran == 200

    run(test, open_store(f"lmdb://{tmp_path}/store"))


# --- sessions -------------------------------------------------------------------------------


def test_a_session_that_is_over_is_fenced() -> None:
    async def test(w: World) -> None:
        await w.me(meta.SessionRenew())
        assert await w.me(meta.SessionClose()) == OkReply()
        for request in (meta.MkDir(path=b"/x"), meta.SessionRenew()):
            with pytest.raises(errors.Fenced):
                await w.me(request)
        assert await w.me(meta.SessionClose()) == OkReply()
        other = await Caller.connect(w.namespace)
        assert other.client != w.me.client
        with pytest.raises(errors.NotFound):
            await other(meta.Stat(path=b"/x"))

    run(test)


def test_a_dead_client_is_swept_and_its_length_found() -> None:
    """It wrote 10,000 bytes and died before close: the length is asked of the chains, late writes of it are
    refused, its session and slots are gone, storage servers get a fence."""

    async def test(w: World) -> None:
        clock = [0.0]
        sweeper = SessionSweeper(w.namespace.core, clock_s=lambda: clock[0])
        dead = await Caller.connect(w.namespace)
        opened = await dead(meta.Open(path=b"/f", flags=W))
        await w.write(dead, opened, 0, 10_000)
        assert (await w.me(meta.Stat(path=b"/f"))).attributes.length == 0
        for clock[0] in range(60):
            await w.me(meta.SessionRenew())
            await sweeper.step()
        assert (await w.me(meta.Stat(path=b"/f"))).attributes.length == 10_000
        await w.me(meta.MkDir(path=b"/alive"))
        with pytest.raises(errors.Fenced):
            await dead(meta.MkDir(path=b"/dead"))
        with pytest.raises(errors.StaleEpoch):
            await w.write(dead, opened, 10_000, 1)
        assert await w.keys(b"w") == await w.keys(b"W") == await w.keys(b"e") == []
        assert not [k for k in await w.keys(b"r") if k[1:9] == dead.client.to_bytes(8, "big")]
        fences = await w.store.read(lambda snap: fenced_clients(snap))
        assert [client for client, _ in fences] == [dead.client]
        assert fences[0][1].capability_expiry_ms > w.cluster.time_ms

    run(test)


def test_time_in_which_the_service_was_stopped_ends_no_session() -> None:
    """All metadata processes stood still for a minute: clients had nobody to renew with. After that, silence
    counts as before."""

    async def test(w: World) -> None:
        clock = [0.0]
        sweeper = SessionSweeper(w.namespace.core, clock_s=lambda: clock[0])
        dead = await Caller.connect(w.namespace)
        await sweeper.step()
        for clock[0] in (10.0, 70.0):  # two stops
            await sweeper.step()
        for clock[0] in (71.0, 72.0):
            await sweeper.step()
        await dead(meta.MkDir(path=b"/alive-after-all"))
        for clock[0] in range(73, 120):
            await sweeper.step()
        with pytest.raises(errors.Fenced):
            await dead(meta.MkDir(path=b"/dead"))

    run(test)


def test_a_session_whose_chains_are_away_is_settled_later() -> None:
    async def test(w: World) -> None:
        sweeper = SessionSweeper(w.namespace.core)
        dead = await Caller.connect(w.namespace)
        opened = await dead(meta.Open(path=b"/f", flags=W))
        await w.write(dead, opened, 0, 5000)
        await dead(meta.SessionClose())
        w.chains.away = set(range(100, 105))
        await sweeper.step()
        assert len(await w.keys(b"w")) == 1
        w.chains.away = set()
        await sweeper.step()
        assert await w.keys(b"w") == []
        assert (await w.me(meta.Stat(path=b"/f"))).attributes.length == 5000

    run(test)


def test_a_truncation_meets_a_dead_writer() -> None:
    """Cut to 100 after the dead one's writes: the length found is 100, not what it had written."""

    async def test(w: World) -> None:
        dead = await Caller.connect(w.namespace)
        opened = await dead(meta.Open(path=b"/f", flags=W))
        await w.write(dead, opened, 0, 5000)
        await w.me(meta.Truncate(path=b"/f", length=100))
        await dead(meta.SessionClose())
        await SessionSweeper(w.namespace.core).step()
        assert (await w.me(meta.Stat(path=b"/f"))).attributes.length == 100

    run(test)


@pytest.mark.parametrize("kind", [meta.Fsync, meta.Close])
def test_the_length_of_a_writer_counts_while_another_is_settled(kind: type[meta.Fsync | meta.Close]) -> None:
    """It was written before the settling raised the epoch, and nothing was cut. The settling itself stands
    still: a chain doesn't answer, say."""

    async def test(w: World) -> None:
        dead = await Caller.connect(w.namespace)
        left = await dead(meta.Open(path=b"/f", flags=W))
        mine = await w.me(meta.Open(path=b"/f", flags=W))
        await w.write(w.me, mine, 0, 5000)
        await dead(meta.SessionClose())
        core = Core(w.store, w.cluster, Standing(), cluster_id=CLUSTER)
        with pytest.raises(errors.ChainUnavailable):
            await settle_writer(core, dead.client, left.ino, left.handle)
        epoch = mine.attributes.epoch
        reply = await w.me(kind(ino=mine.ino, handle=mine.handle, epoch=epoch, length=5000, written=True))
        assert (reply.merged, reply.length, reply.epoch) == (True, 5000, epoch + 1)
        assert (await w.me(meta.Stat(path=b"/f"))).attributes.length == 5000

    run(test)


class Standing(FakeChains):
    """Chains that take a raised epoch and don't answer then."""

    async def raise_space_epoch(self, chain: int, space: int, epoch: int) -> None:
        pass

    async def last_chunk(self, chain: int, space: int) -> tuple[bytes, int] | None:
        raise errors.ChainUnavailable("no replica is there")


def test_a_dead_client_gets_no_capability_while_it_is_settled() -> None:
    """Under the raised epoch it could write until the storage servers hear of its fence: beyond the length
    that the chains were asked for."""

    async def test(w: World) -> None:
        dead = await Caller.connect(w.namespace)
        left = await dead(meta.Open(path=b"/f", flags=W))
        assert await dead(meta.CapabilityRenew(ino=left.ino, handle=left.handle, rights=2))
        await dead(meta.SessionClose())
        core = Core(w.store, w.cluster, Standing(), cluster_id=CLUSTER)
        with pytest.raises(errors.ChainUnavailable):
            await settle_writer(core, dead.client, left.ino, left.handle)
        with pytest.raises(errors.Fenced):
            await dead(meta.CapabilityRenew(ino=left.ino, handle=left.handle, rights=2))

    run(test)


class InStep(FakeChains):
    """Chains as one of two settlers sees them, who are in step all the time: each asks for the length only
    when the other has raised the epoch after it, or is done."""

    def __init__(self, chains: FakeChains, raised: list[int], mine: int) -> None:
        super().__init__()
        self._inner, self._raised, self._mine = chains, raised, mine

    async def raise_space_epoch(self, chain: int, space: int, epoch: int) -> None:
        self._raised[self._mine] += 1
        assert self._raised[self._mine] < 20, "they raise the epoch over each other"
        await self._inner.raise_space_epoch(chain, space, epoch)

    async def last_chunk(self, chain: int, space: int) -> tuple[bytes, int] | None:
        other = 1 - self._mine
        while self._raised[other] < self._raised[self._mine] + self._mine:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return await self._inner.last_chunk(chain, space)


@pytest.mark.parametrize("dead_clients", [1, 2])
def test_two_who_settle_one_file_in_step_come_to_an_end(dead_clients: int) -> None:
    """Of one dead writer, or of one each: the epoch goes up once a writer, and the length is found."""

    async def test(w: World) -> None:
        single = meta.LayoutChoice(table=2)
        work = []
        for at in range(dead_clients):
            dead = await Caller.connect(w.namespace)
            opened = await dead(meta.Open(path=b"/f", flags=W, layout=single))
            w.chains.write(opened.ino, opened.attributes.layout, 0, 70_000 * at, 5000, (7,))
            await dead(meta.SessionClose())
            work.append((dead.client, opened.ino, opened.handle))
        raised = [0, 0]

        async def settle(mine: int) -> None:
            chains = InStep(w.chains, raised, mine)
            core = Core(w.store, w.cluster, chains, cluster_id=CLUSTER)
            await settle_writer(core, *work[mine % dead_clients])
            raised[mine] = 1 << 30

        await asyncio.gather(settle(0), settle(1))
        told = (await w.me(meta.Stat(path=b"/f"))).attributes
        assert told.length == 70_000 * (dead_clients - 1) + 5000
        assert told.epoch == dead_clients
        assert await w.keys(b"w") == []

    run(test)


# --- length and truncation --------------------------------------------------------------------


def test_length_is_a_maximum() -> None:
    async def test(w: World) -> None:
        one = await w.me(meta.Open(path=b"/f", flags=W))
        two = await w.me(meta.Open(path=b"/f", flags=W))
        assert one.handle != two.handle
        assert (await w.close(w.me, one, 900)).length == 900
        assert (await w.close(w.me, two, 500)).length == 900
        assert (await w.me(meta.Stat(path=b"/f"))).attributes.length == 900
        with pytest.raises(errors.BadHandle):
            await w.close(w.me, one, 1)

    run(test)


def test_a_length_of_an_older_epoch_is_not_taken() -> None:
    async def test(w: World) -> None:
        opened = await w.me(meta.Open(path=b"/f", flags=W))
        await w.write(w.me, opened, 0, 9000)
        cut = await w.me(meta.Truncate(path=b"/f", length=10))
        reply = await w.me(
            meta.Fsync(ino=opened.ino, handle=opened.handle, epoch=0, length=9000, written=True)
        )
        assert (reply.merged, reply.length, reply.epoch) == (False, 10, cut.epoch)
        with pytest.raises(errors.StaleEpoch):
            await w.write(w.me, opened, 0, 1)
        renewed = await w.me(meta.CapabilityRenew(ino=opened.ino, handle=opened.handle, rights=3))
        opened.capability = renewed.capability
        await w.write(w.me, opened, 10, 5)
        assert (await w.close(w.me, opened, 15)).merged

    run(test)


def test_a_write_session_renews_no_right_to_read() -> None:
    async def test(w: World) -> None:
        await w.make(b"/f", 100)
        await w.me(meta.SetAttr(path=b"/f", what=meta.SET_MODE, mode=0o622))
        writer = await Caller.connect(w.namespace, Creds(1000, 1000))
        opened = await writer(meta.Open(path=b"/f", flags=OPEN_WRITE))
        with pytest.raises(errors.AccessDenied):
            await writer(
                meta.CapabilityRenew(ino=opened.ino, handle=opened.handle, rights=3, ticket=opened.ticket)
            )
        await writer(
            meta.CapabilityRenew(ino=opened.ino, handle=opened.handle, rights=2, ticket=opened.ticket)
        )

    run(test)


def test_an_epoch_that_was_never_given_is_refused() -> None:
    async def test(w: World) -> None:
        opened = await w.me(meta.Open(path=b"/f", flags=W))
        with pytest.raises(errors.InvalidArgument, match="never given"):
            await w.me(meta.Close(ino=opened.ino, handle=opened.handle, epoch=5, length=1, written=True))

    run(test)


@pytest.mark.parametrize("length", [0, 1, 4096, 4097, 8192, 20479, 20480])
def test_truncation_cuts_chunks(length: int) -> None:
    async def test(w: World) -> None:
        opened = await w.make(b"/f", 20480)
        await w.me(meta.Truncate(path=b"/f", length=length))
        assert w.chains.end(opened.ino, 4096) == length
        assert (await w.me(meta.Stat(path=b"/f"))).attributes.length == length
        await w.me(meta.Truncate(path=b"/f", length=30_000))
        assert w.chains.end(opened.ino, 4096) == length

    run(test)


def test_a_truncation_whose_chains_are_away_is_finished_later() -> None:
    """The length is set, nobody may write before the chunks are cut; a retry or the collector cuts them."""

    async def test(w: World) -> None:
        opened = await w.make(b"/f", 20480)
        w.chains.away = set(range(100, 105))
        with pytest.raises(errors.ChainUnavailable):
            await w.me(meta.Truncate(path=b"/f", length=5))
        request = w.me.last
        other = await Caller.connect(w.namespace)
        with pytest.raises(errors.ChainUnavailable):
            await other(meta.Open(path=b"/f", flags=OPEN_WRITE))
        assert (await other(meta.Open(path=b"/f", flags=OPEN_READ))).attributes.length == 5
        w.chains.away = set()
        assert request is not None
        reply = unwrap(await w.namespace.handle(request))
        assert (reply.length, w.chains.end(opened.ino, 4096)) == (5, 5)
        w.chains.away = set(range(100, 105))
        with pytest.raises(errors.ChainUnavailable):
            await w.me(meta.Open(path=b"/f", flags=OPEN_WRITE | OPEN_TRUNC))
        w.chains.away = set()
        await w.collect()
        assert w.chains.end(opened.ino, 4096) == 0
        assert await w.keys(b"t") == []

    run(test)


def test_a_late_second_cut_is_refused() -> None:
    """Two processes finish one truncation; a writer extends in between; the slower one removes nothing."""

    async def test(w: World) -> None:
        opened = await w.make(b"/f", 20480)
        layout = opened.attributes.layout
        assert layout is not None
        reply = await w.me(meta.Truncate(path=b"/f", length=5))
        again = await w.me(meta.Open(path=b"/f", flags=OPEN_WRITE))
        await w.write(w.me, again, 0, 12_000)
        await w.namespace.core.chunks.cut(opened.ino, layout, 20480, 5, reply.epoch - 1)
        assert w.chains.end(opened.ino, 4096) == 12_000

    run(test)


def test_append_reserves_without_showing_zeros() -> None:
    async def test(w: World) -> None:
        await w.make(b"/f", 100)
        one = await w.me(meta.Open(path=b"/f", flags=OPEN_WRITE | meta.OPEN_APPEND))
        two = await w.me(meta.Open(path=b"/f", flags=OPEN_WRITE | meta.OPEN_APPEND))
        offsets = [
            (await w.me(meta.Append(ino=o.ino, handle=o.handle, length=n))).offset
            for o, n in ((one, 10), (two, 20), (one, 5))
        ]
        assert offsets == [100, 110, 130]
        assert (await w.me(meta.Stat(path=b"/f"))).attributes.length == 100
        assert (await w.me.resend()) == (await w.me.resend())

    run(test)


# --- removal --------------------------------------------------------------------------------


def test_an_open_file_outlives_its_name() -> None:
    async def test(w: World) -> None:
        opened = await w.me(meta.Open(path=b"/f", flags=W))
        await w.write(w.me, opened, 0, 5000)
        await w.me(meta.Unlink(path=b"/f"))
        await w.collect()
        assert w.chains.end(opened.ino, 4096) == 5000
        await w.write(w.me, opened, 5000, 5000)
        again = await w.me(meta.Open(ino=opened.ino, flags=OPEN_WRITE))
        stranger = await Caller.connect(w.namespace)
        with pytest.raises(errors.NotFound):
            await stranger(meta.Open(ino=opened.ino, flags=OPEN_WRITE))
        await w.close(w.me, again, 0)
        assert (await w.me(meta.Stat(ino=opened.ino))).attributes.nlink == 0
        await w.close(w.me, opened, 10_000)
        await w.collect()
        assert w.chains.spaces() == set()
        assert await w.keys(b"g") == []
        assert EPOCH_MAX in [e for (_, space), e in w.chains.epochs.items() if space == opened.ino]
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(ino=opened.ino))

    run(test)


def test_collection_finds_what_lies_beyond_the_length() -> None:
    """Chunks that no length tells of go too: of a write that was given up, of a truncation that isn't
    finished, of a writer that died when the file had no name. Else only the file's chains are asked."""

    async def test(w: World) -> None:
        doubtful = await w.me(meta.Open(path=b"/doubtful", flags=W))
        await w.write(w.me, doubtful, 0, 30_000)
        await w.me(meta.Close(ino=doubtful.ino, handle=doubtful.handle, doubtful=True))
        await w.make(b"/cut", 30_000)
        w.chains.away = set(range(100, 105))
        with pytest.raises(errors.ChainUnavailable):
            await w.me(meta.Truncate(path=b"/cut", length=5))
        w.chains.away = set()
        dead = await Caller.connect(w.namespace)
        opened = await dead(meta.Open(path=b"/dead", flags=W))
        await w.write(dead, opened, 0, 30_000)
        for path in (b"/doubtful", b"/cut", b"/dead"):
            await w.me(meta.Unlink(path=path))
        await dead(meta.SessionClose())
        await SessionSweeper(w.namespace.core).step()
        await w.collect()
        assert w.chains.spaces() == set()
        await w.make(b"/small", 5000)
        await w.me(meta.Unlink(path=b"/small"))
        w.chains.calls = 0
        await w.collect()
        assert w.chains.spaces() == set()
        assert w.chains.calls == 4  # two chunks, on two of the five chains: close and remove
        await w.make(b"/empty", 0)
        await w.me(meta.Unlink(path=b"/empty"))
        w.chains.calls = 0
        await w.collect()
        assert w.chains.calls == 0
        assert await w.keys(b"g") == []

    run(test)


def test_a_truncation_cuts_what_lies_beyond_the_length() -> None:
    async def test(w: World) -> None:
        opened = await w.me(meta.Open(path=b"/f", flags=W))
        await w.write(w.me, opened, 0, 30_000)
        await w.me(meta.Close(ino=opened.ino, handle=opened.handle, length=10, written=True, doubtful=True))
        await w.me(meta.Truncate(path=b"/f", length=20_000))
        assert w.chains.end(opened.ino, 4096) <= 20_000

    run(test)


def test_collection_waits_for_chains() -> None:
    async def test(w: World) -> None:
        await w.make(b"/f", 5000)
        await w.me(meta.Unlink(path=b"/f"))
        w.chains.away = set(range(100, 105))
        await w.collect()
        assert len(await w.keys(b"g")) == 1
        w.chains.away = set()
        await w.collect()
        assert await w.keys(b"g") == []
        assert w.chains.spaces() == set()

    run(test)


def test_remove_tree_detaches_at_once_and_collects_all() -> None:
    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d/e/f", parents=True))
        for i in range(450):
            unwrap(await w.me(meta.Open(path=b"/d/e/%d" % i, flags=OPEN_READ | OPEN_CREATE)))
        await w.make(b"/d/e/f/data", 50_000)
        await w.me(meta.Link(source=b"/d/e/f/data", target=b"/kept"))
        await w.me(meta.SymLink(path=b"/d/l", target=b"x"))
        await w.me(meta.KvCreate(path=b"/d/kv", params=KvParams(4096)))
        await w.me(meta.RemoveTree(path=b"/d"))
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(path=b"/d"))
        await w.me(meta.MkDir(path=b"/d"))
        await w.collect()
        listed = await w.me(meta.ReadDir(path=b"/", attributes=True))
        assert [e.name for e in listed.entries] == [b"d", b"kept"]
        assert listed.entries[1].attributes.nlink == 1
        assert len(await w.keys(b"d")) == 2
        assert len({k[3:11] for k in await w.keys(b"i")}) == 3
        assert (await w.me(meta.Stat(path=b"/"))).attributes.nlink == 3

    run(test)


def test_s24_many_entries_are_listed_and_removed(tmp_path: Path) -> None:
    """A directory far beyond one transaction: listed in pages, removed at once, collected in pages.
    FFS_TEST_SCALE=100 makes it a million."""
    count = 10_000 * int(os.environ.get("FFS_TEST_SCALE", "1"))

    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d"))
        for begin in range(0, count, 4000):
            names = [b"/d/%07d" % i for i in range(begin, min(begin + 4000, count))]
            entries = tuple(meta.OpenEntry(name, OPEN_READ | OPEN_CREATE) for name in names)
            reply = await w.me(meta.OpenMany(entries=entries))
            assert all(isinstance(r, meta.Opened) for r in reply.results)
        seen = 0
        after = b""
        more = True
        while more:
            page = await w.me(meta.ReadDir(path=b"/d", after=after, limit=4000, attributes=True))
            seen += len(page.entries)
            after, more = page.entries[-1].name, page.more
        assert seen == count == (await w.me(meta.Stat(path=b"/d"))).attributes.length
        await w.me(meta.RemoveTree(path=b"/d"))
        await w.collect()
        assert await w.keys(b"d") == []
        assert len(await w.keys(b"i")) <= 5  # the root with its counters

    run(test, open_store(f"lmdb://{tmp_path}/store"))


def test_remove_tree_of_others_is_looked_through_first() -> None:
    async def test(w: World) -> None:
        user = await Caller.connect(w.namespace, Creds(1000, 1000))
        await w.me(meta.MkDir(path=b"/d", mode=0o777))
        await w.me(meta.MkDir(path=b"/d/open", mode=0o777))
        await w.make(b"/d/open/f", 0)
        await w.me(meta.MkDir(path=b"/d/empty", mode=0o700))
        await w.me(meta.MkDir(path=b"/d/shut", mode=0o755))
        await w.make(b"/d/shut/f", 0)
        with pytest.raises(errors.AccessDenied):
            await user(meta.RemoveTree(path=b"/d"))
        assert (await w.me(meta.Stat(path=b"/d/open/f"))).attributes.nlink == 1
        await w.me(meta.Unlink(path=b"/d/shut/f"))
        await user(meta.RemoveTree(path=b"/d"))
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(path=b"/d"))

    run(test)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (b"/", errors.Busy),
        (b"/none", errors.NotFound),
        (b"/f/", errors.NotADirectory),
        (b"/d/.", errors.InvalidArgument),
    ],
)
def test_remove_tree_refuses(path: bytes, error: type[errors.FfsError]) -> None:
    async def test(w: World) -> None:
        await w.make(b"/f", 0)
        await w.me(meta.MkDir(path=b"/d"))
        with pytest.raises(error):
            await w.me(meta.RemoveTree(path=path))

    run(test)


def test_nothing_is_made_in_a_directory_that_is_being_removed() -> None:
    """A create that read the tree before the removal is a conflict with it, and then finds nothing."""

    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d"))
        txn = w.store.begin()
        from metadata.fs.ops.open import open_write

        request = w.me.prepare(meta.Open(path=b"/d/f", flags=W))
        await open_write(w.namespace.core, txn, request, 1)
        await w.me(meta.RemoveTree(path=b"/d"))
        from metadata.kv.contract import Conflict

        with pytest.raises(Conflict):
            await txn.commit()

    run(test)


# --- publication, batches, KV spaces ------------------------------------------------------------


def test_atomic_publication_replaces() -> None:
    async def test(w: World) -> None:
        old = await w.make(b"/f", 100)
        opened = await w.me(meta.Open(path=b"/", flags=OPEN_WRITE | OPEN_TMPFILE))
        assert opened.attributes.nlink == 0
        await w.write(w.me, opened, 0, 9000)
        await w.collect()  # it has no name, but a writer
        await w.me(meta.Fsync(ino=opened.ino, handle=opened.handle, length=9000))
        with pytest.raises(errors.Exists):
            await w.me(meta.Link(ino=opened.ino, handle=opened.handle, target=b"/f"))
        linked = await w.me(meta.Link(ino=opened.ino, handle=opened.handle, target=b"/f", replace=True))
        assert (linked.attributes.nlink, linked.attributes.length) == (1, 9000)
        await w.close(w.me, opened, 9000)
        await w.collect()
        assert w.chains.spaces() == {opened.ino}
        assert (await w.me(meta.Stat(path=b"/f"))).attributes.ino == opened.ino != old.ino
        assert (await w.me(meta.Stat(path=b"/"))).attributes.length == 1

    run(test)


def test_a_temporary_file_goes_with_its_session() -> None:
    async def test(w: World) -> None:
        opened = await w.me(meta.Open(path=b"/", flags=OPEN_WRITE | OPEN_TMPFILE))
        await w.write(w.me, opened, 0, 9000)
        await w.close(w.me, opened, 9000)
        with pytest.raises(errors.NotFound):
            await w.me(meta.Link(ino=opened.ino, handle=opened.handle, target=b"/f"))
        await w.collect()
        assert w.chains.spaces() == set()
        assert len({k[3:11] for k in await w.keys(b"i")}) == 1

    run(test)


def test_batches_answer_by_entry() -> None:
    async def test(w: World) -> None:
        await w.make(b"/has", 10)
        entries = tuple(meta.OpenEntry(b"/%d" % i, W | OPEN_EXCL, 0o600) for i in range(200))
        entries += (meta.OpenEntry(b"/has", W | OPEN_EXCL), meta.OpenEntry(b"/none/x", W))
        reply = await w.me(meta.OpenMany(entries=entries))
        assert all(isinstance(r, meta.Opened) and r.created for r in reply.results[:200])
        assert [r.code for r in reply.results[200:]] == [17, 2]
        assert len({r.handle for r in reply.results[:200]}) == 200
        ends = tuple(meta.CloseEntry(r.ino, r.handle, 0, i, True) for i, r in enumerate(reply.results[:200]))
        closed = await w.me(meta.CloseMany(entries=(*ends, meta.CloseEntry(5, 5))))
        assert [r.length for r in closed.results[:200]] == list(range(200))
        assert closed.results[200].code == errors.BadHandle.code
        stats = await w.me(meta.StatMany(paths=(b"/7", b"/none", b"/has")))
        assert [getattr(r, "code", None) for r in stats.results] == [None, 2, None]
        read = await w.me(meta.OpenMany(entries=(meta.OpenEntry(b"/7"), meta.OpenEntry(b"/none"))))
        assert (read.results[0].handle, read.results[1].code) == (0, 2)
        paths = [b"/%d" % i for i in range(200)]
        gone = await w.me(meta.UnlinkMany(paths=(*paths, b"/none", b"/7")))
        assert [getattr(r, "code", None) for r in gone.results] == [None] * 200 + [2, 2]
        pages = [k for k in await w.keys(b"r") if len(k) > 13]
        await w.me(meta.MkDir(path=b"/next"))
        assert pages
        assert not [k for k in await w.keys(b"r") if len(k) > 13]

    run(test)


def test_a_batch_that_was_cut_off_goes_on() -> None:
    """The first page committed, then the process died: sent again, the batch does the rest only."""

    async def test(w: World) -> None:
        entries = tuple(meta.OpenEntry(b"/%d" % i, W | OPEN_EXCL) for i in range(100))
        request = w.me.prepare(meta.OpenMany(entries=entries))
        original = w.store.run
        calls = 0

        async def dying(body: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise errors.ConnectionLost("the process died here")
            return await original(body, **kwargs)

        await w.namespace.core.inos.take()
        await w.namespace.core.capabilities.take()
        w.store.run = dying  # type: ignore[method-assign]
        assert isinstance(await w.namespace.handle(request), ErrorReply)
        w.store.run = original  # type: ignore[method-assign]
        reply = unwrap(await w.namespace.handle(request))
        assert all(isinstance(r, meta.Opened) for r in reply.results)
        assert (await w.me(meta.Stat(path=b"/"))).attributes.length == 100

    run(test)


def test_kv_spaces() -> None:
    async def test(w: World) -> None:
        params = KvParams(1 << 20, 32, 1 << 30, 60_000, b"identity", KV_EVICTABLE)
        made = await w.me(meta.KvCreate(path=b"/kv", params=params, layout=meta.LayoutChoice(table=2)))
        assert made.created
        assert made.attributes.kv == params
        assert made.attributes.layout.table == 2
        capability = decode_capability(made.capability)
        assert (capability.kind, capability.space, capability.rights) == (
            1,
            made.ino,
            RIGHT_READ | RIGHT_WRITE,
        )
        with pytest.raises(errors.Exists):
            await w.me(meta.KvCreate(path=b"/kv", params=params))
        again = await w.me(meta.KvCreate(path=b"/kv", params=params, exist_ok=True))
        assert (again.ino, again.created) == (made.ino, False)
        with pytest.raises(errors.Exists, match="block_bytes"):
            await w.me(meta.KvCreate(path=b"/kv", params=KvParams(4096), exist_ok=True))
        opened = await w.me(meta.KvOpen(path=b"/kv", write=False))
        assert decode_capability(opened.capability).rights == RIGHT_READ
        with pytest.raises(errors.InvalidArgument):
            await w.me(meta.Open(path=b"/kv"))
        renewed = await w.me(meta.CapabilityRenew(ino=made.ino, rights=3))
        assert decode_capability(renewed.capability).id != capability.id

    run(test)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (KvParams(0), "block size"),
        (KvParams(1 << 31), "block size"),
        (KvParams(1 << 25), "parts"),
        (KvParams(1 << 27, 4), "a part of 33554432 bytes"),
        (KvParams(4096, 3), "parts"),
        (KvParams(4096, 0), "parts"),
        (KvParams(4096, 1, -1), "quota"),
        (KvParams(4096, identity=bytes(65)), "identity"),
    ],
)
def test_bad_kv_parameters(params: KvParams, match: str) -> None:
    async def test(w: World) -> None:
        with pytest.raises(errors.InvalidArgument, match=match):
            await w.me(meta.KvCreate(path=b"/kv", params=params))

    run(test)


# --- paths, permissions, layouts --------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "error", "match"),
    [
        (b"relative", errors.InvalidArgument, "begin it with /"),
        (b"", errors.NotFound, "empty"),
        (b"/a\0b", errors.InvalidArgument, "NUL"),
        (b"/" + b"n" * 256, errors.NameTooLong, "255"),
        (b"/a" * 2048, errors.NameTooLong, "4096"),
    ],
)
def test_bad_paths(path: bytes, error: type[errors.FfsError], match: str) -> None:
    async def test(w: World) -> None:
        requests = [
            meta.Stat(path=path),
            meta.Open(path=path, flags=W),
            meta.MkDir(path=path),
            meta.Rename(source=path, target=b"/x"),
            meta.Link(source=b"/x", target=path),
            meta.RemoveTree(path=path),
            meta.KvCreate(path=path, params=KvParams(4096)),
        ]
        await w.make(b"/x", 0)
        for request in requests:
            with pytest.raises(error, match=match):
                await w.me(request)
        assert len(await w.keys(b"d")) == 1

    run(test)


def test_names_of_any_bytes() -> None:
    async def test(w: World) -> None:
        names = [b"\xff\xfe", b"a b", b"n" * 255, "ü".encode(), b"\n", b"-", b"a\x01"]
        for name in names:
            await w.make(b"/" + name, 0)
        page = await w.me(meta.ReadDir(path=b"/"))
        assert [e.name for e in page.entries] == sorted(names)

    run(test)


@pytest.mark.parametrize(
    "flags",
    [0, OPEN_CREATE, OPEN_READ | OPEN_TRUNC, OPEN_READ | OPEN_EXCL, W | OPEN_TMPFILE, 256 | OPEN_READ],
)
def test_flags_that_contradict_themselves(flags: int) -> None:
    async def test(w: World) -> None:
        with pytest.raises(errors.InvalidArgument):
            await w.me(meta.Open(path=b"/f", flags=flags))
        assert await w.keys(b"d") == []

    run(test)


def test_reading_makes_no_state() -> None:
    async def test(w: World) -> None:
        await w.make(b"/f", 10)
        before = await w.keys()
        opened = await w.me(meta.Open(path=b"/f"))
        assert opened.handle == 0
        assert decode_capability(opened.capability).rights == RIGHT_READ
        await w.me(meta.Stat(path=b"/f"))
        await w.me(meta.ReadDir(path=b"/"))
        assert await w.keys() == before

    run(test)


def test_layouts() -> None:
    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d", layout=meta.LayoutChoice(2, 1 << 16, 1)))
        await w.me(meta.MkDir(path=b"/d/e"))
        inherited = (await w.make(b"/d/e/f", 0)).attributes.layout
        assert (inherited.table, inherited.chunk_size, inherited.stripe) == (2, 1 << 16, 1)
        default = (await w.make(b"/f", 0)).attributes.layout
        assert (default.table, default.chunk_size, default.stripe) == (1, 4096, 0)
        chosen = await w.me(meta.Open(path=b"/g", flags=W, layout=meta.LayoutChoice(1, 8192, 3)))
        assert chosen.attributes.layout.stripe == 3
        for choice, match in [
            (meta.LayoutChoice(9), "no chain table 9"),
            (meta.LayoutChoice(0, 5000), "power of two"),
            (meta.LayoutChoice(0, 0, 6), "has 5 chains"),
            (meta.LayoutChoice(0, 1 << 25), "power of two"),
        ]:
            for request in (
                meta.Open(path=b"/bad", flags=W, layout=choice),
                meta.MkDir(path=b"/bad", layout=choice),
                meta.KvCreate(path=b"/bad", params=KvParams(1), layout=choice),
            ):
                with pytest.raises(errors.InvalidArgument, match=match):
                    await w.me(request)
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(path=b"/bad"))

    run(test)


def test_no_storage_yet() -> None:
    async def test(w: World) -> None:
        w.cluster.tables.clear()
        with pytest.raises(errors.ChainUnavailable, match="start storage servers"):
            await w.me(meta.Open(path=b"/f", flags=W))
        with pytest.raises(errors.ChainUnavailable):
            await w.me(meta.StatFs())
        await w.me(meta.MkDir(path=b"/d"))

    run(test)


def test_times() -> None:
    async def test(w: World) -> None:
        now = 10**18
        w.namespace.core.now_ns = lambda: now
        await w.me(meta.MkDir(path=b"/d"))
        now += 5
        opened = await w.make(b"/d/f", 10)
        directory = (await w.me(meta.Stat(path=b"/d"))).attributes
        assert (directory.btime_ns, directory.mtime_ns, directory.ctime_ns) == (10**18, now, now)
        now += 5
        set_to = await w.me(meta.SetAttr(path=b"/d/f", what=meta.SET_MTIME, mtime_ns=77))
        assert (set_to.attributes.mtime_ns, set_to.attributes.ctime_ns) == (77, now)
        now += 5
        again = await w.me(meta.Open(path=b"/d/f", flags=OPEN_WRITE))
        await w.close(w.me, again, 20)
        file = (await w.me(meta.Stat(path=b"/d/f"))).attributes
        assert (file.mtime_ns, file.ctime_ns) == (now, now)
        now += 5
        await w.me(meta.Link(source=b"/d/f", target=b"/g"))
        file = (await w.me(meta.Stat(path=b"/d/f"))).attributes
        assert (file.mtime_ns, file.ctime_ns, file.nlink) == (now - 5, now, 2)
        with pytest.raises(errors.InvalidArgument):
            await w.me(meta.SetAttr(path=b"/d/f", what=meta.SET_MTIME, mtime_ns=-1))
        assert opened.ino == file.ino

    run(test)


def test_access() -> None:
    async def test(w: World) -> None:
        user = await Caller.connect(w.namespace, Creds(1000, 1000))
        await w.me(meta.Open(path=b"/f", flags=W, mode=0o604))
        assert await user(meta.Access(path=b"/f", want=4)) == OkReply()
        for want in (2, 6, 1):
            with pytest.raises(errors.AccessDenied):
                await user(meta.Access(path=b"/f", want=want))
        with pytest.raises(errors.AccessDenied):
            await w.me(meta.Access(path=b"/f", want=1))  # root, but nobody may execute it
        with pytest.raises(errors.NotFound):
            await user(meta.Access(path=b"/none"))

    run(test)


def test_listing_pages_and_hidden_attributes() -> None:
    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d", mode=0o744))
        for i in range(25):
            await w.make(b"/d/%02d" % i, 0)
        seen: list[bytes] = []
        more = True
        while more:
            page = await w.me(meta.ReadDir(path=b"/d", after=seen[-1] if seen else b"", limit=7))
            seen += [e.name for e in page.entries]
            more = page.more
        assert seen == [b"%02d" % i for i in range(25)]
        user = await Caller.connect(w.namespace, Creds(1000, 1000))
        page = await user(meta.ReadDir(path=b"/d", attributes=True))
        assert [e.attributes for e in page.entries] == [None] * 25  # no search permission
        for limit in (0, meta.MAX_PAGE + 1):
            with pytest.raises(errors.InvalidArgument):
                await w.me(meta.ReadDir(path=b"/d", limit=limit))

    run(test)


def test_an_unknown_message_is_refused() -> None:
    async def test(w: World) -> None:
        reply = await w.namespace.handle(OkReply())
        assert isinstance(reply, ErrorReply)
        assert reply.code == errors.ProtocolError.code

    run(test)


def test_any_request_is_answered() -> None:
    """Requests of every kind with fields drawn at random, odd numbers among them: an answer to each, nothing
    raised, and the namespace works on."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    numbers = [0, 1, 2, 5, 63, 64, 17409, -1, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
    paths = [
        b"",
        b"/",
        b"/d",
        b"/d/f",
        b"/l",
        b"/l/f",
        b"/kv",
        b"x",
        b"/\0",
        b"/d/",
        b"/d/..",
        b"/" + b"n" * 300,
    ]

    def draw(kind: Any) -> Any:
        if kind is int:
            return rng.choice(numbers)
        if kind is bytes:
            return rng.choice(paths)
        if kind is bool:
            return rng.random() < 0.5
        if kind is str:
            return rng.choice(["", "x" * 1000])
        args = getattr(kind, "__args__", ())
        if getattr(kind, "__origin__", None) is tuple:
            return tuple(draw(args[0]) for _ in range(rng.randrange(4)))
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return kind(**{f.name: draw(f.type) for f in msgspec.structs.fields(kind) if f.name != "v"})
        return draw(rng.choice([a for a in args if a is not type(None)])) if rng.random() < 0.7 else None

    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d"))
        await w.make(b"/d/f", 5000)
        await w.me(meta.SymLink(path=b"/l", target=b"d"))
        await w.me(meta.KvCreate(path=b"/kv", params=KvParams(4096)))
        for _ in range(3000):
            kind = rng.choice(list(meta.REPLY_OF))
            request = draw(kind)
            if kind is meta.SessionClose:
                continue
            if rng.random() < 0.8:
                request = w.me.prepare(request)
            reply = await w.me.send(request)
            assert isinstance(reply, ErrorReply | meta.REPLY_OF[kind]), (request, reply)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=meta.REPLIES) == reply
        w.me.slot = 7
        await w.me(meta.MkDir(path=b"/afterwards"))

    run(test)


def test_a_damaged_record_is_said_to_be_one() -> None:
    async def test(w: World) -> None:
        opened = await w.make(b"/f", 10)

        async def body(txn: Transaction) -> None:
            txn.set(inode_key(opened.ino), b"\xc1")

        await w.store.run(body)
        for request in (meta.Stat(path=b"/f"), meta.Unlink(path=b"/f"), meta.UnlinkMany(paths=(b"/f",))):
            reply = await w.me.send(w.me.prepare(request))
            if isinstance(reply, meta.UnlinkManyReply):
                reply = reply.results[0]
            assert isinstance(reply, ErrorReply)
            assert reply.code == errors.Damaged.code

    run(test)


# --- the store ------------------------------------------------------------------------------


def test_a_store_of_another_cluster_is_refused() -> None:
    async def test(w: World) -> None:
        with pytest.raises(errors.WrongCluster, match="0001"):
            await format_store(w.store, bytes(16), now_ns=1)
        again = await format_store(w.store, CLUSTER, now_ns=2)
        assert again.created_ns == 1
        assert await read_header(w.store) == again

    run(test)


def test_a_store_of_a_newer_version_is_refused() -> None:
    async def test(w: World) -> None:
        header = await read_header(w.store)
        assert header is not None
        header.incompat = 4
        header.created_by = "ffs 9"

        async def body(txn: Transaction) -> None:
            txn.set(b"z", msgspec.msgpack.encode(header))

        await w.store.run(body)
        with pytest.raises(errors.VersionMismatch, match="ffs 9"):
            await read_header(w.store)

    run(test)


def test_all_survives_a_restart(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store"

    async def first(w: World) -> None:
        await w.me(meta.MkDir(path=b"/a/b", parents=True))
        await w.make(b"/a/b/f", 777)

    async def second(w: World) -> None:
        attrs = (await w.me(meta.Stat(path=b"/a/b/f"))).attributes
        assert attrs.length == 777
        new = await w.make(b"/a/g", 0)
        assert new.ino > attrs.ino or new.ino < attrs.ino

    run(first, open_store(url))
    run(second, open_store(url))

"""Clients that end: fences, sweeps, and how the lengths of their files are found."""

from __future__ import annotations

import asyncio

import pytest
from namespace_fakes import CLUSTER, Caller, FakeChains
from namespace_world import W, World, run

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import OkReply
from metadata.fs.core import Core
from metadata.fs.sessions import SessionSweeper, fenced_clients, settle_writer


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

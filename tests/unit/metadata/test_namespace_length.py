"""Lengths, epochs, truncation and appends."""

from __future__ import annotations

import pytest
from namespace_fakes import Caller, unwrap
from namespace_world import W, World, run

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import Creds
from ffs.proto.meta import OPEN_READ, OPEN_TRUNC, OPEN_WRITE


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

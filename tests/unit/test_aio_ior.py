"""AsyncIor without a server: what it refuses, and what becomes of calls that nobody serves."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from test_ior import CHUNK, PlainClient, PlainFile

from ffs import errors
from ffs._native.entries import FileRing
from ffs._native.iov import Iov
from ffs._native.ring import OP_READ, OP_WRITE, NativeClient
from ffs._native.routes import SERVING, ChainRoute, TargetRoute
from ffs.client.aio_ior import AsyncIor


@pytest.fixture
def client() -> Iterator[PlainClient]:
    """Its chains have a server that nobody can connect to: requests go on until their deadline."""
    native = NativeClient(9, bytes(16), request_timeout_ms=60_000)
    native.set_routing(
        1,
        [ChainRoute(c, 1, 1, (c,), (SERVING,)) for c in (4, 5, 6)],
        [TargetRoute(c, 1, "127.0.0.1", 1, "another-host", "") for c in (4, 5, 6)],
    )
    yield PlainClient(native)
    native.close()


@pytest.fixture
def file(client: PlainClient) -> PlainFile:
    return PlainFile(client.native.add_capability(bytes(88)))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_nothing_and_reads_beyond_the_end_are_done_at_once(client: PlainClient, file: PlainFile) -> None:
    async def work() -> None:
        iov = Iov(CHUNK)
        async with AsyncIor(client, 16) as ring:  # type: ignore[arg-type]
            assert (await ring.read_many(file, [], iov, [], [])).tolist() == []  # type: ignore[arg-type]
            many = 100  # more than the ring holds
            moved = await ring.read_many(file, [file.size] * many, iov, [0] * many, [10] * many)  # type: ignore[arg-type]
            assert moved.tolist() == [0] * many

    run(work())


def test_what_cannot_be_is_refused_and_the_ring_goes_on(client: PlainClient, file: PlainFile) -> None:
    async def work() -> None:
        iov = Iov(CHUNK)
        with pytest.raises(errors.InvalidArgument, match="power of two"):
            AsyncIor(client, 3)  # type: ignore[arg-type]
        ring: Any = AsyncIor(client, 16)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgument, match="as many of each"):
            await ring.read_many(file, [], iov, [1], [1])
        with pytest.raises(errors.InvalidArgument, match="request 1"):
            await ring.read_many(file, [0, 0], iov, [0, CHUNK], [1, 1])
        file.writes = False
        with pytest.raises(errors.InvalidArgument, match="isn't open"):
            await ring.write_many(file, [0], iov, [0], [1])
        assert await ring.read(file, file.size, iov) == 0
        await ring.aclose()
        await ring.aclose()
        with pytest.raises(errors.ShutDown):
            await ring.read(file, 0, iov)
        iov.close()

    run(work())


def test_a_call_that_was_refused_leaves_the_loop_in_peace(client: PlainClient, file: PlainFile) -> None:
    async def work() -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        with Iov(CHUNK) as iov:
            async with AsyncIor(client, 16) as ring:  # type: ignore[arg-type]
                with pytest.raises(errors.InvalidArgument, match="request 0"):
                    await ring.read_many(file, [-5], iov, [0], [4096])  # type: ignore[arg-type]
            await asyncio.sleep(0)  # what is on the loop by now runs
            await asyncio.sleep(0)
        assert told == []

    run(work())


def test_the_priority_is_that_of_both_its_rings(
    client: PlainClient, file: PlainFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(ring: Any, iov: Iov) -> None:
        async with ring:
            both = asyncio.gather(ring.read(file, 0, iov[0:10]), ring.write(file, 0, iov[10:20]))
            while len(seen) < 2:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)
            both.cancel()
            with pytest.raises(asyncio.CancelledError):
                await both

    async def main() -> None:
        with pytest.raises(errors.InvalidArgument, match="priority 256"):
            AsyncIor(client, 16, priority=256)  # type: ignore[arg-type]
        with Iov(CHUNK) as iov:
            await work(AsyncIor(client, 16, priority=7), iov)  # type: ignore[arg-type]

    seen: list[tuple[int, int]] = []
    prepare = FileRing.prepare_inside

    def see(ring: FileRing, *requests: Any) -> int | None:
        taken = prepare(ring, *requests)
        seen.append((ring.entries_raw[0].op, ring.entries_raw[0].priority))
        return taken

    monkeypatch.setattr(FileRing, "prepare_inside", see)
    run(main())
    assert sorted(seen) == sorted([(OP_READ, 7), (OP_WRITE, 7)])


def test_room_is_asked_for_in_a_thread(client: PlainClient, file: PlainFile) -> None:
    async def main() -> None:
        async with AsyncIor(client, 16) as ring:
            with pytest.raises(errors.QuotaExceeded):
                await ring.write_many([file, file], [11 * CHUNK, 0], iov, [0, 0], [1, 1])
            with pytest.raises(errors.InvalidArgument, match="give one, or as many"):
                await ring.write_many([file, file, file], [0, 0], iov, [0, 0], [1, 1])

    file.room = CHUNK
    with Iov(4096) as iov:
        asyncio.run(main())
    assert file.asked == [(11 * CHUNK + 1, False)]


def test_cancelling_ends_the_calls_requests_only(client: PlainClient, file: PlainFile) -> None:
    async def work() -> None:
        iov = Iov(4 * CHUNK)
        ring: Any = AsyncIor(client, 16)  # type: ignore[arg-type]

        async def read(count: int, at: int) -> Any:
            return await ring.read_many(file, [0] * count, iov, [at] * count, [4096] * count)

        first, second, third = (asyncio.create_task(read(n, at)) for n, at in ((10, 0), (20, CHUNK), (3, 0)))
        await asyncio.sleep(0.05)  # first is in flight, second partly, third waits
        side = ring._sides["read"]
        assert [call.flying for call in side.calls] == [10, 6, 0]
        second.cancel()
        second.cancel()  # a second one changes nothing
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not first.done()
        assert not third.done()
        assert [call.flying for call in side.calls] == [10, 3]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await read(5, 0)
        third.cancel()
        await asyncio.wait({third})
        await ring.aclose()
        with pytest.raises(errors.Cancelled, match="closed"):
            await first
        assert side.calls == []
        iov.close()  # nothing uses it any more

    run(work())


def test_failures_are_raised_or_given_as_numbers(file: PlainFile) -> None:
    async def work() -> None:
        native = NativeClient(9, bytes(16), request_timeout_ms=100)
        client: Any = PlainClient(native)
        given = PlainFile(native.add_capability(bytes(88)), size=10 * CHUNK)
        iov = Iov(CHUNK)
        async with AsyncIor(client, 16) as ring:
            with pytest.raises(errors.StaleRouting):
                await ring.read_many(given, [0, 10 * CHUNK], iov, [0, 0], [10, 10])  # type: ignore[arg-type]
            moved = await ring.read_many(
                given,  # type: ignore[arg-type]
                np.array([0, 10 * CHUNK]),
                iov,
                np.array([0, 0]),
                np.array([10, 10]),
                return_errors=True,
            )
            assert moved.tolist() == [-errno.ETIMEDOUT, 0]
        assert client.refreshes > 0  # no chain is known: it asked for routing
        native.close()

    run(work())

"""The internal asynchronous client: many namespace calls in flight on one connection."""

from __future__ import annotations

import asyncio

import pytest

from ffs import errors
from ffs.client.aio import AsyncClient
from ffs.client.client import Client
from ffs.proto import meta


def test_calls_in_flight(address: str, client: Client, home: str) -> None:
    async def work() -> None:
        async with await AsyncClient.connect(address) as fast:
            await fast.mkdir(f"{home}/d/e", parents=True)
            await asyncio.gather(*(fast.create(f"{home}/d/{number}") for number in range(500)))
            with pytest.raises(errors.Exists):
                await fast.create(f"{home}/d/7")
            assert (await fast.create(f"{home}/d/7", exist_ok=True)).length == 0
            found = await fast.stat_all([f"{home}/d/{number}" for number in range(501)])
            assert isinstance(found[500], errors.NotFound)
            assert all(not isinstance(one, OSError) for one in found[:500])
            await asyncio.gather(
                *(fast.rename(f"{home}/d/{number}", f"{home}/d/e/{number}") for number in range(500))
            )
            assert await fast.listdir(f"{home}/d") == [b"e"]
            assert len(await fast.listdir(f"{home}/d/e")) == 500
            await asyncio.gather(*(fast.unlink(f"{home}/d/e/{number}") for number in range(500)))

    asyncio.run(work())
    assert client.listdir(f"{home}/d/e") == []


def test_a_lost_connection_is_made_anew(address: str, client: Client, home: str) -> None:
    """Requests that were in flight take effect once."""

    async def work() -> None:
        async with await AsyncClient.connect(address) as fast:
            for turn in range(5):
                tasks = [asyncio.create_task(fast.create(f"{home}/{turn}-{number}")) for number in range(50)]
                await asyncio.sleep(0)
                connection = fast._connection
                assert connection is not None
                assert connection._transport is not None
                connection._transport.abort()
                await asyncio.gather(*tasks)

    asyncio.run(work())
    assert len(client.listdir(home)) == 250


def test_nobody_there() -> None:
    with pytest.raises(errors.Unreachable):
        asyncio.run(AsyncClient.connect("127.0.0.1:1"))


def test_looking_at_many(address: str, client: Client, home: str) -> None:
    client.makedirs(f"{home}/d")
    names = [f"{home}/d/{number:03d}" for number in range(250)]
    for name in names[:3]:
        client.mknod(name)
    client.create_many(names[3:])

    async def work() -> None:
        async with await AsyncClient.connect(address) as fast:
            found = await fast.stat_many([*names, f"{home}/none"])
            assert isinstance(found[-1], errors.NotFound)
            assert [one.ino for one in found[:-1] if isinstance(one, meta.Attributes)] == [
                client.stat(name).st_ino for name in names
            ]
            pages = [page async for page in fast.pages(f"{home}/d", attributes=True, limit=100)]
            assert [len(page) for page in pages] == [100, 100, 50]
            assert [entry.attributes for page in pages for entry in page] == found[:-1]
            assert [entry.attributes async for page in fast.pages(f"{home}/d") for entry in page] == [
                None
            ] * 250

    asyncio.run(work())


def test_small_reads_in_flight(address: str, client: Client, home: str) -> None:
    """More than the ring holds at once; lengths at the borders of pages; a file that changes meanwhile."""
    sizes = (0, 1, 4095, 4096, 4097, 65535, 65536)
    content = {size: bytes(number % 251 for number in range(size)) for size in sizes}
    for size in sizes:
        with client.open(f"{home}/{size}", "wb") as file:
            file.write(content[size])
    with client.open(f"{home}/large", "wb") as file:
        file.write(bytes(65537))

    async def work() -> None:
        async with await AsyncClient.connect(address) as fast:
            for _ in range(2):  # the second time with capabilities that are held
                wanted = [size for size in sizes for _ in range(30)]
                found = await asyncio.gather(*(fast.read_small(f"{home}/{size}") for size in wanted))
                assert found == [content[size] for size in wanted]
            with pytest.raises(errors.TooLarge):
                await fast.read_small(f"{home}/large")
            with pytest.raises(errors.NotFound):
                await fast.read_small(f"{home}/none")
            reads = [asyncio.create_task(fast.read_small(f"{home}/65536")) for _ in range(100)]
            await asyncio.sleep(0.001)
            for read in reads[::2]:
                read.cancel()
            ended = await asyncio.gather(*reads, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in ended[::2])
            assert ended[1::2] == [content[65536]] * 50
            with client.open(f"{home}/4096", "wb") as file:  # truncates: another epoch
                file.write(b"new")
            assert await fast.read_small(f"{home}/4096") == b"new"

    asyncio.run(work())

"""The internal asynchronous client: many namespace calls in flight on one connection."""

from __future__ import annotations

import asyncio

import pytest

from ffs import errors
from ffs.client.aio import AsyncClient
from ffs.client.client import Client


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

"""AsyncIor on real servers: several tasks on one ring, and what cancelling leaves of buffers."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest

import ffs
from ffs.client.client import Client

CHUNK = 65536
CHUNKS = 64


@pytest.fixture
def data() -> np.ndarray[Any, Any]:
    return np.random.default_rng(11).integers(0, 256, CHUNKS * CHUNK, np.uint8)


@pytest.fixture
def path(client: Client, home: str, data: np.ndarray[Any, Any]) -> str:
    with client.open(f"{home}/f", "wb", 0, chunk_size=CHUNK) as file:
        file.write(data)
    return f"{home}/f"


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_tasks_share_a_ring(address: str, home: str, path: str, data: Any, transport: str) -> None:
    """Eight tasks read and write through a ring that is smaller than any call of theirs."""
    tasks, part = 8, CHUNKS * CHUNK // 8

    async def copy(ring: ffs.AsyncIor, source: Any, target: Any, iov: ffs.Iov, number: int) -> None:
        random = np.random.default_rng(number)
        cuts = np.sort(random.choice(part, 40, replace=False))
        starts = np.concatenate([[0], cuts])
        lengths = np.diff(np.concatenate([starts, [part]]))
        places = number * part + starts
        order = random.permutation(np.flatnonzero(lengths))
        for method, file in ((ring.read_many, source), (ring.write_many, target)):
            moved = await method(file, places[order], iov, places[order], lengths[order])
            assert np.array_equal(moved, lengths[order])

    async def work(client: Client) -> None:
        with (
            client.open(path, "rb", 0) as source,
            client.open(f"{home}/copy", "wb", 0, chunk_size=CHUNK) as target,
            ffs.Iov(len(data)) as iov,
        ):
            async with ffs.AsyncIor(client, 16, inflight=5 if transport == "tcp" else 0) as ring:
                await asyncio.gather(*(copy(ring, source, target, iov, n) for n in range(tasks)))
                assert await ring.read(source, len(data) - 5, iov[0:10]) == 5
                closed = client.open(path, "rb", 0)
                closed.close()
                with pytest.raises(ValueError, match="closed"):
                    await ring.read(closed, 0, iov[0:10])

    with ffs.connect(address, transport=transport) as client:
        asyncio.run(work(client))
        with client.open(f"{home}/copy", "rb", 0) as file:
            assert file.read() == data.tobytes()


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_cancelled_read_never_writes_its_buffer_later(
    cluster: Any, address: str, path: str, data: Any, transport: str
) -> None:
    """The servers stand still with the reads in hand, and go on when the buffer has another use."""
    pids = [int(child.pid) for child in cluster._children if child.name.startswith("node")]
    offsets = np.arange(CHUNKS) * CHUNK

    async def work(client: Client, file: Any, iov: ffs.Iov) -> None:
        memory = iov.numpy()
        async with ffs.AsyncIor(client, 256) as ring:

            async def read() -> Any:
                return await ring.read_many(file, offsets, iov, offsets, np.full(CHUNKS, CHUNK))

            for _ in range(2):  # the second goes straight into the memory, over local
                await read()
                assert np.array_equal(memory, data)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                reading = asyncio.create_task(read())
                await asyncio.sleep(0.05)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await read()
                memory[:] = 0xC3
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            # Behind these the servers have worked off what was cancelled.
            other = ffs.Iov(CHUNK)
            for offset in offsets.tolist():
                assert await ring.read(file, offset, other) == CHUNK
                assert np.array_equal(other.numpy(), data[offset : offset + CHUNK])
            assert (memory == 0xC3).all()
            await read()
            assert np.array_equal(memory, data)

    with (
        ffs.connect(address, transport=transport) as client,
        client.open(path, "rb", 0) as file,
        ffs.Iov(len(data)) as iov,
    ):
        asyncio.run(work(client, file, iov))

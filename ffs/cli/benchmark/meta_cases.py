"""The cases of the namespace: creates and stats in flight on one connection, and from threads.

Floor of creates: LMDB alone, two records of the sizes that a file has, in groups of the in-flight count,
each group durable, in this process. Floor of stats: the two reads that a path of one component needs,
from LMDB in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from ffs.cli.benchmark.protocol import Contestant, Slice
from ffs.client.aio import AsyncClient
from ffs.client.client import Client

IN_FLIGHT = 32
_FILES = 2048
_INODE_BYTES = 120
_ENTRY_BYTES = 24


def _inode_key(number: int) -> bytes:
    """Spread, as hashed prefixes spread them."""
    return b"i" + (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big")


class LmdbFloor:
    """The floors of both cases over one environment."""

    def __init__(self, directory: Path) -> None:
        self._environment = lmdb.open(str(directory), map_size=4 << 30, subdir=True, max_dbs=0)
        self._next = itertools.count()
        self._put_group(_FILES)

    def _put_group(self, count: int) -> None:
        with self._environment.begin(write=True) as transaction:
            for number in itertools.islice(self._next, count):
                transaction.put(_inode_key(number), bytes(_INODE_BYTES))
                transaction.put(b"d" + number.to_bytes(8, "big"), bytes(_ENTRY_BYTES))

    def create(self, seconds: float) -> Slice:
        begun = time.perf_counter()
        done = 0
        while time.perf_counter() - begun < seconds:
            self._put_group(IN_FLIGHT)
            done += IN_FLIGHT
        return Slice(done, time.perf_counter() - begun)

    def stat(self, seconds: float) -> Slice:
        begun = time.perf_counter()
        done = 0
        while time.perf_counter() - begun < seconds:
            with self._environment.begin(buffers=True) as transaction:
                for number in range(IN_FLIGHT):
                    transaction.get(b"d" + number.to_bytes(8, "big"))
                    transaction.get(_inode_key(number))
            done += IN_FLIGHT
        return Slice(done, time.perf_counter() - begun)

    def close(self) -> None:
        self._environment.close()


# --- in flight ----------------------------------------------------------------------------------


@contextmanager
def in_flight(address: str) -> Iterator[tuple[Contestant, Contestant]]:
    """(create, stat) with 32 requests in flight by the internal asynchronous client."""
    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(AsyncClient.connect(address))
    numbers = itertools.count()

    async def create_one() -> None:
        await client.create(f"/bench/flight/f{next(numbers)}")

    async def stat_one() -> None:
        await client.stat(f"/bench/flight/f{next(numbers) % _FILES}")

    try:
        loop.run_until_complete(client.mkdir("/bench/flight", parents=True))
        loop.run_until_complete(_count(create_one, _FILES))
        yield _of_loop(loop, create_one), _of_loop(loop, stat_one)
    finally:
        loop.run_until_complete(client.close())
        loop.close()


async def _count(one: Callable[[], object], count: int) -> None:
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await one()  # type: ignore[misc]

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))


def _of_loop(loop: asyncio.AbstractEventLoop, one: Callable[[], object]) -> Contestant:
    async def for_some_time(seconds: float) -> int:
        done = 0
        end = time.perf_counter() + seconds

        async def worker() -> None:
            nonlocal done
            while time.perf_counter() < end:
                await one()  # type: ignore[misc]
                done += 1

        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
        return done

    def run(seconds: float) -> Slice:
        begun = time.perf_counter()
        done = loop.run_until_complete(for_some_time(seconds))
        return Slice(done, time.perf_counter() - begun)

    return run


# --- from threads -------------------------------------------------------------------------------


class Threads:
    """32 threads that wait for a slice, run one call again and again until it ends, and wait again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._numbers = itertools.count()
        self._work: Callable[[], None] = self.stat_one
        self._end = 0.0
        self._done = [0] * IN_FLIGHT
        self._failure: OSError | None = None
        self._closing = False
        self._start = threading.Barrier(IN_FLIGHT + 1)
        self._finish = threading.Barrier(IN_FLIGHT + 1)
        client.makedirs("/bench/threads", exist_ok=True)
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"bench-{index}", daemon=True)
            for index in range(IN_FLIGHT)
        ]
        for thread in self._threads:
            thread.start()

    def create_one(self) -> None:
        """One file through the public API, one request."""
        self._client.mknod(f"/bench/threads/f{next(self._numbers)}")

    def stat_one(self) -> None:
        self._client.stat(f"/bench/flight/f{next(self._numbers) % _FILES}")

    def _run(self, index: int) -> None:
        while True:
            self._start.wait()
            if self._closing:
                return
            try:
                while time.perf_counter() < self._end:
                    self._work()
                    self._done[index] += 1
            except OSError as error:
                self._failure = error
            self._finish.wait()

    def contestant(self, work: Callable[[], None]) -> Contestant:
        def run(seconds: float) -> Slice:
            self._work = work
            self._done = [0] * IN_FLIGHT
            begun = time.perf_counter()
            self._end = begun + seconds
            self._start.wait()
            self._finish.wait()
            if self._failure is not None:
                raise self._failure
            return Slice(sum(self._done), time.perf_counter() - begun)

        return run

    def close(self) -> None:
        self._closing = True
        self._start.wait()
        for thread in self._threads:
            thread.join()

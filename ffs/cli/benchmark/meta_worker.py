"""A client process of `ffs bench meta`: `python -m ffs.cli.benchmark.meta_worker NUMBER IN_FLIGHT ADDRESS`.

It does what it is told by lines of JSON on stdin, and answers each by one on stdout:

    {"do": CASE, "seconds": S, "trace": BOOL}   run CASE with IN_FLIGHT requests in flight
    {"do": "make", "first": A, "count": N}      make /bench/files/f<A>... and so on
    {"do": "refill", "count": N}                have N files of its own for `unlink`
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from ffs.client.aio import AsyncClient
from ffs.errors import FfsError
from ffs.proto import meta

BATCH: Final = 256  # entries of a stat_many
PAGE: Final = 1000  # entries of a page of a directory
SMALL_BYTES: Final = 4096

One = Callable[[], Awaitable[int]]


def file_path(number: int) -> str:
    """One of the files that are looked at."""
    return f"/bench/files/f{number:07d}"


def small_path(number: int) -> str:
    """One of the files with 4 KiB in it."""
    return f"/bench/small/f{number:05d}"


@dataclass(slots=True)
class Worker:
    """One asynchronous client and its cases. `files`, `small`: how many of those there are."""

    number: int
    in_flight: int
    client: AsyncClient
    files: int = 0
    small: int = 0
    made: int = 0
    rng: random.Random = field(default_factory=random.Random)
    own: list[str] = field(default_factory=list)  # to unlink

    # --- cases: each does one operation, and returns how many units that was ---

    async def create(self) -> int:
        self.made += 1
        await self.client.create(f"/bench/made/{self.number}-{self.made}")
        return 1

    async def stat(self) -> int:
        await self.client.stat(file_path(self.rng.randrange(self.files)))
        return 1

    async def stat_many(self) -> int:
        first = self.rng.randrange(max(1, self.files - BATCH))
        paths = [file_path(number) for number in range(first, min(first + BATCH, self.files))]
        found = await self.client.stat_many(paths)
        for entry in found:
            if not isinstance(entry, meta.Attributes):
                raise entry
        return len(found)

    async def open_read(self) -> int:
        data = await self.client.read_small(small_path(self.rng.randrange(self.small)))
        if len(data) != SMALL_BYTES:
            raise FfsError(f"{len(data)} bytes were read, not {SMALL_BYTES}")
        return 1

    async def unlink(self) -> int:
        if not self.own:
            return 0
        await self.client.unlink(self.own.pop())
        return 1

    async def mixed(self) -> int:
        """Two stats a creation."""
        return await (self.stat() if self.rng.randrange(3) else self.create())

    def listing(self, attributes: bool) -> Callable[[], One]:
        def start() -> One:
            pages: AsyncIterator[list[meta.DirEntry]] | None = None

            async def page() -> int:
                nonlocal pages
                while True:
                    if pages is None:
                        pages = self.client.pages("/bench/files", attributes=attributes, limit=PAGE)
                    async for entries in pages:
                        return len(entries)
                    pages = None

            return page

        return start

    # --- running ---

    def starter(self, case: str) -> Callable[[], One]:
        """Makes the function of one of the requests in flight."""
        if case in ("readdir", "readdir_attributes"):
            return self.listing(case == "readdir_attributes")
        one: One = getattr(self, case)
        return lambda: one

    async def run(self, case: str, seconds: float, trace: bool) -> dict[str, Any]:
        """For so many seconds; ends with nothing in flight."""
        start = self.starter(case)
        cpu = time.process_time_ns()
        begun = time.perf_counter()
        end = begun + seconds
        done = 0
        latencies: list[float] = []

        async def plain(one: One) -> None:
            nonlocal done
            while time.perf_counter() < end:
                units = await one()
                if not units:
                    return
                done += units

        async def traced(one: One) -> None:
            nonlocal done
            while (sent := time.perf_counter()) < end:
                done += await one()
                latencies.append(time.perf_counter() - sent)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.in_flight):
                group.create_task((traced if trace else plain)(start()))
        answer = {
            "done": done,
            "seconds": time.perf_counter() - begun,
            "cpu_ns": time.process_time_ns() - cpu,
        }
        return answer | {"latencies": latencies} if trace else answer

    async def make(self, first: int, count: int) -> None:
        """Files to look at."""
        await self._each([file_path(number) for number in range(first, first + count)])

    async def refill(self, count: int) -> None:
        names = [f"/bench/gone/{self.number}-{self.made + n}" for n in range(count - len(self.own))]
        self.made += len(names)
        await self._each(names)
        self.own += names

    async def _each(self, names: list[str]) -> None:
        left = iter(names)

        async def some() -> None:
            for name in left:
                await self.client.create(name)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.in_flight):
                group.create_task(some())


async def serve(number: int, in_flight: int, address: str) -> None:
    loop = asyncio.get_running_loop()
    async with await AsyncClient.connect(address) as client:
        worker = Worker(number, in_flight, client, rng=random.Random(number))
        print(json.dumps({"ready": number}), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            told = json.loads(line)
            what = told.pop("do")
            answer: dict[str, Any] = {}
            if what == "make":
                await worker.make(**told)
            elif what == "refill":
                await worker.refill(**told)
            elif what == "know":
                worker.files, worker.small = told["files"], told["small"]
            else:
                answer = await worker.run(what, told["seconds"], told.get("trace", False))
            print(json.dumps(answer), flush=True)


def main() -> int:
    number, in_flight, address = sys.argv[1:]
    failures: list[str] = []
    try:
        asyncio.run(serve(int(number), int(in_flight), address))
    except* OSError as group:
        failures = [str(error) for error in group.exceptions]
    if failures:
        print(json.dumps({"error": failures[0]}), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

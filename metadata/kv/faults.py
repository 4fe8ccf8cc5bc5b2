"""A store that fails in all the ways that a distributed one may, over any engine. For tests.

It draws from one seeded generator at each commit: a conflict (the attempt is thrown away), a result that is
unknown though the commit took effect, the same though it didn't, a transaction too old; latency before and
after. A script may name single commits instead, and let the process end there (`Died`). And before an
attempt it may run the body once on a transaction that is thrown away, since a body that keeps something
outside its transaction would show it.

It holds the limits of the contract too, which an engine may be lax about: no transaction and no snapshot is
older than 5 s when it ends, none writes more than 8 MiB. Beyond them it fails as FoundationDB would, and
`largest` tells how near the work came. The seconds are those of this process on a processor, so that a busy
machine makes no test fail.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from metadata.kv.contract import (
    MAX_AGE_S,
    MAX_WRITE_BYTES,
    STAMP_BYTES,
    Conflict,
    Pairs,
    Snapshot,
    Store,
    TooMuch,
    TooOld,
    Transaction,
    UnknownResult,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rates:
    """Probabilities, 0 to 1, a commit (`twice`: a body)."""

    conflict: float = 0.0
    unknown_applied: float = 0.0
    unknown_lost: float = 0.0
    too_old: float = 0.0
    twice: float = 0.0
    latency_s: float = 0.0  # at most, uniform, before and after a commit


class Died(Exception):
    """The process ended at this commit: nothing of what it had in memory is left, and nobody answers."""


class _FaultyTransaction(Transaction):
    def __init__(self, inner: Transaction, store: FaultyStore) -> None:
        self._inner = inner
        self._store = store
        self._born = time.process_time()
        self._written = 0  # bytes of keys and values

    def _count(self, size: int) -> None:
        self._written += size
        if self._written > MAX_WRITE_BYTES:
            raise TooMuch(f"a transaction writes at most {MAX_WRITE_BYTES} bytes: page the work")

    async def get(self, key: bytes) -> bytes | None:
        return await self._inner.get(key)

    async def range(self, begin: bytes, end: bytes, limit: int = 0, reverse: bool = False) -> Pairs:
        return await self._inner.range(begin, end, limit, reverse)

    async def peek(self, key: bytes) -> bytes | None:
        return await self._inner.peek(key)

    def set(self, key: bytes, value: bytes) -> None:
        self._count(len(key) + len(value))
        self._inner.set(key, value)

    def clear(self, key: bytes) -> None:
        self._count(len(key))
        self._inner.clear(key)

    def clear_range(self, begin: bytes, end: bytes) -> None:
        self._count(len(begin) + len(end))
        self._inner.clear_range(begin, end)

    def add(self, key: bytes, delta: int) -> None:
        self._count(len(key) + 8)
        self._inner.add(key, delta)

    def max(self, key: bytes, value: int) -> None:
        self._count(len(key) + 8)
        self._inner.max(key, value)

    def set_stamped(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        self._count(len(prefix) + STAMP_BYTES + len(suffix) + len(value))
        self._inner.set_stamped(prefix, suffix, value)

    async def commit(self) -> None:
        rates, rng = self._store.rates, self._store.rng
        await self._store.delay()
        draw = rng.random()
        scripted = self._store.script.pop(self._store.commits, None)
        self._store.commits += 1
        if scripted is not None:
            await self._fail(scripted)
        for name, rate in (
            ("conflict", rates.conflict),
            ("too_old", rates.too_old),
            ("unknown_lost", rates.unknown_lost),
            ("unknown_applied", rates.unknown_applied),
        ):
            if draw < rate:
                await self._fail(name)
            draw -= rate
        self._store.note(self._born, self._written)
        await self._inner.commit()
        await self._store.delay()

    async def _fail(self, name: str) -> None:
        self._store.injected[name] = self._store.injected.get(name, 0) + 1
        if name == "conflict":
            raise Conflict("injected")
        if name == "too_old":
            raise TooOld("injected")
        if name in ("unknown_applied", "died_applied"):
            await self._inner.commit()
        if name in ("died_applied", "died_lost"):
            raise Died(name)
        raise UnknownResult(f"injected: {name}")

    def release(self) -> None:
        self._inner.release()

    @property
    def stamp(self) -> bytes:
        return self._inner.stamp


class FaultyStore(Store):
    """Wraps `inner`; `rates` may be changed between operations. `injected` counts what was done."""

    def __init__(self, inner: Store, rates: Rates, rng: random.Random) -> None:
        super().__init__(rng)
        self._inner = inner
        self.rates = rates
        self.rng = rng
        self.injected: dict[str, int] = {}
        self.commits = 0
        self.script: dict[int, str] = {}  # number of a commit, from 0 -> how it fails, once
        self.largest = (0.0, 0)  # age in seconds of the oldest transaction or snapshot, bytes of the largest

    def begin(self, urgent: bool = False) -> Transaction:
        return _FaultyTransaction(self._inner.begin(urgent), self)

    def note(self, born: float, written: int = 0) -> None:
        """Something ends that began at `born` (process_time). TooOld."""
        age = time.process_time() - born
        self.largest = (max(self.largest[0], age), max(self.largest[1], written))
        if age > MAX_AGE_S:
            raise TooOld(f"a transaction lasts at most {MAX_AGE_S:g} s")

    async def delay(self) -> None:
        if self.rates.latency_s:
            await asyncio.sleep(self.rng.random() * self.rates.latency_s)

    async def run(
        self,
        body: Callable[[Transaction], Awaitable[T]],
        *,
        urgent: bool = False,
        timeout_s: float = 30.0,
    ) -> T:
        async def maybe_twice(txn: Transaction) -> T:
            if self.rng.random() < self.rates.twice:
                self.injected["twice"] = self.injected.get("twice", 0) + 1
                rehearsal = self._inner.begin(urgent)
                try:
                    await body(rehearsal)
                except OSError:
                    pass  # what the rehearsal raised, the real run will too, or it saw another state
                finally:
                    rehearsal.release()
            return await body(txn)

        return await super().run(maybe_twice, urgent=urgent, timeout_s=timeout_s)

    async def read(self, body: Callable[[Snapshot], Awaitable[T]]) -> T:
        if self.rng.random() < self.rates.twice:
            await self._inner.read(body)
        await self.delay()
        born = time.process_time()
        result = await self._inner.read(body)
        self.note(born)
        return result

    async def close(self) -> None:
        await self._inner.close()

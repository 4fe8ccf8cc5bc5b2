"""The transactional key-value store under the metadata service: what every engine gives.

Ordered byte keys. A *body* is `async def body(txn) -> result`: it reads a snapshot and writes into a
buffer; commit makes all of it visible at once if nothing that it read has changed since (serialisable,
optimistic), else the body runs again. A body therefore may run several times, must touch nothing but its
transaction, and - since the outcome of a commit can be lost - must be harmless when it runs again after
having taken effect: operations note their outcome under (client, slot) in the same transaction.

    key            1 .. 511 bytes
    value          up to 100,000 bytes
    transaction    5 s from begin to commit, 8 MiB of writes
    counters       8 bytes, little-endian: add wraps as i64, max compares as u64, a missing one is 0

One store belongs to one event loop; nothing here blocks it. docs/metadata.md, Store.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

from ffs import errors

T = TypeVar("T")
Pairs = list[tuple[bytes, bytes]]

MAX_KEY_BYTES: Final = 511
MAX_VALUE_BYTES: Final = 100_000
MAX_WRITE_BYTES: Final = 8 * 1024 * 1024
MAX_AGE_S: Final = 5.0

STAMP_BYTES: Final = 10  # of a versionstamp: grows with every commit


class Conflict(errors.Overloaded):
    """Something that the body read has changed: nothing was applied. `run` tries again."""


class TooOld(errors.Overloaded):
    """The transaction lasted longer than MAX_AGE_S: nothing was applied. `run` tries again."""


class UnknownResult(errors.OutcomeUnknown):
    """The commit may have been applied or not. `run` tries again: bodies are idempotent."""


class TooMuch(errors.TooLarge):
    """A key, value or transaction over the limits: a fault of the body; page the work."""


class Snapshot(Protocol):
    """Reads of one moment."""

    async def get(self, key: bytes) -> bytes | None:
        """The value, None if there is none."""

    async def range(self, begin: bytes, end: bytes, limit: int = 0, reverse: bool = False) -> Pairs:
        """Pairs of begin <= key < end in order (from the end if `reverse`), at most `limit` if it isn't 0."""

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """`get` of each key, in about the time of one where a store is far away."""

    async def ranges(self, spans: Sequence[tuple[bytes, bytes]]) -> list[Pairs]:
        """`range(begin, end)` of each span, likewise. For spans of few pairs."""


class Transaction(ABC):
    """One attempt of a body. Reads see the snapshot and the transaction's own writes."""

    @abstractmethod
    async def get(self, key: bytes) -> bytes | None:
        """As Snapshot.get; a change of it by others before commit is a conflict."""

    @abstractmethod
    async def range(self, begin: bytes, end: bytes, limit: int = 0, reverse: bool = False) -> Pairs:
        """As Snapshot.range; a change in the part that was read is a conflict."""

    @abstractmethod
    async def peek(self, key: bytes) -> bytes | None:
        """As get, without conflict (quota usage, statistics)."""

    @abstractmethod
    def set(self, key: bytes, value: bytes) -> None: ...

    @abstractmethod
    def clear(self, key: bytes) -> None: ...

    @abstractmethod
    def clear_range(self, begin: bytes, end: bytes) -> None: ...

    @abstractmethod
    def add(self, key: bytes, delta: int) -> None:
        """Adds to a counter without reading it: never a conflict with other adds."""

    @abstractmethod
    def max(self, key: bytes, value: int) -> None:
        """Raises a counter to at least `value` (a u64) without reading it."""

    @abstractmethod
    def set_stamped(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        """Sets prefix + versionstamp + suffix; the stamp is known after commit (`stamp`)."""

    @abstractmethod
    async def commit(self) -> None:
        """Durable and visible on return. Raises Conflict, TooOld, UnknownResult, NoSpace, DeviceFailed."""

    @abstractmethod
    def release(self) -> None:
        """Drops the snapshot; repeatable."""

    @property
    @abstractmethod
    def stamp(self) -> bytes:
        """The versionstamp of a committed transaction that wrote something."""


class Store(ABC):
    """An engine, or a wrapper of one."""

    reads_now: bool = False  # whether `read_now` works

    def __init__(self, rng: random.Random | None = None) -> None:
        self._backoff_rng = rng or random.Random()

    @abstractmethod
    def begin(self, urgent: bool = False) -> Transaction:
        """One attempt; the caller commits and releases it. Most code wants `run`."""

    @abstractmethod
    async def read(self, body: Callable[[Snapshot], Awaitable[T]]) -> T:
        """Runs a body that only reads, on a snapshot that holds every acknowledged commit."""

    def read_now(self, body: Callable[[Snapshot], Awaitable[T]]) -> T:
        """`read` without an event loop's help, where `reads_now`. Microseconds; doesn't block on others."""
        raise errors.Unsupported("this store can't read without waiting")

    @abstractmethod
    async def close(self) -> None:
        """Waits for commits on their way, then refuses everything. Repeatable."""

    async def run(
        self,
        body: Callable[[Transaction], Awaitable[T]],
        *,
        urgent: bool = False,
        timeout_s: float = 30.0,
    ) -> T:
        """Runs the body until it commits; returns what the committed run returned.

        What the body raises ends it, with nothing applied. `urgent` goes before what is queued (leases,
        membership). After `timeout_s` of retries: OutcomeUnknown if an attempt's result was unknown,
        else DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        attempt = 0
        unknown = False
        while True:
            txn = self.begin(urgent)
            try:
                result = await body(txn)
                await txn.commit()
                return result
            except UnknownResult:
                unknown = True
            except (Conflict, TooOld):
                pass
            finally:
                txn.release()
            attempt += 1
            if loop.time() - started > timeout_s:
                if unknown:
                    raise errors.OutcomeUnknown("the metadata store did not tell whether it committed")
                raise errors.DeadlineExceeded(f"gave up after {attempt} conflicting attempts: try again")
            await asyncio.sleep(backoff_s(attempt, self._backoff_rng))


def backoff_s(attempt: int, rng: random.Random) -> float:
    """How long to wait before attempt + 1: at once the first time, then up to 0.5 ms doubling to 250 ms."""
    if attempt <= 1:
        return 0.0
    return rng.random() * min(0.25, 0.0005 * 2.0 ** min(attempt, 16))


def check_key(key: bytes) -> None:
    """Raises TooMuch for a key over the limit."""
    if len(key) > MAX_KEY_BYTES or not key:
        raise TooMuch(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")


def after(prefix: bytes) -> bytes:
    """The first key beyond all that begin with `prefix` (which isn't all 0xff)."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1])


def drive(coroutine: Awaitable[T]) -> T:
    """Runs a coroutine that never waits, and returns its result."""
    steps = coroutine.__await__()
    try:
        next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a body of read_now waited for something that isn't its snapshot")

"""An engine in memory, for tests: every version of every key is kept. No threads, nothing blocks."""

from __future__ import annotations

import bisect
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ffs import errors
from metadata.kv.buffer import BufferedTransaction, Counter
from metadata.kv.contract import Conflict, Pairs, Snapshot, Store, Transaction, drive

T = TypeVar("T")


class _Versions:
    """Keys in order, each with its history of (version, value), oldest first."""

    def __init__(self) -> None:
        self.version = 0
        self.keys: list[bytes] = []
        self.history: dict[bytes, list[tuple[int, bytes | None]]] = {}

    def get(self, key: bytes, version: int) -> bytes | None:
        for at, value in reversed(self.history.get(key, ())):
            if at <= version:
                return value
        return None

    def changed(self, key: bytes, since: int) -> bool:
        entries = self.history.get(key)
        return bool(entries) and entries[-1][0] > since  # type: ignore[index]

    def span(self, begin: bytes, end: bytes) -> list[bytes]:
        return self.keys[bisect.bisect_left(self.keys, begin) : bisect.bisect_left(self.keys, end)]

    def put(self, key: bytes, value: bytes | None) -> None:
        entries = self.history.get(key)
        if entries is None:
            bisect.insort(self.keys, key)
            entries = self.history[key] = []
        entries.append((self.version, value))


class _Reader:
    """Snapshot of one version."""

    def __init__(self, data: _Versions) -> None:
        self.data = data
        self.version = data.version

    def base_get(self, key: bytes) -> bytes | None:
        return self.data.get(key, self.version)

    def base_range(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> Pairs:
        keys = self.data.span(begin, end)
        if reverse:
            keys.reverse()
        pairs: Pairs = []
        for key in keys:
            value = self.data.get(key, self.version)
            if value is not None:
                pairs.append((key, value))
                if len(pairs) == limit:
                    break
        return pairs

    async def get(self, key: bytes) -> bytes | None:
        return self.base_get(key)

    async def range(self, begin: bytes, end: bytes, limit: int = 0, reverse: bool = False) -> Pairs:
        return self.base_range(begin, end, limit, reverse)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.base_get(key) for key in keys]

    async def ranges(self, spans: Sequence[tuple[bytes, bytes]]) -> list[Pairs]:
        return [self.base_range(begin, end, 0, False) for begin, end in spans]


class _MemoryTransaction(BufferedTransaction):
    def __init__(self, data: _Versions) -> None:
        super().__init__()
        self._data = data
        self._reader = _Reader(data)
        self._stamp = b""

    def base_get(self, key: bytes) -> bytes | None:
        return self._reader.base_get(key)

    def base_range(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> Pairs:
        return self._reader.base_range(begin, end, limit, reverse)

    async def commit(self) -> None:
        self.check_age()
        if not self.dirty:
            return
        data, since = self._data, self._reader.version
        if any(data.changed(key, since) for key in self.reads):
            raise Conflict("a key that was read has changed")
        for begin, end, _ in self.ranges:
            if any(data.changed(key, since) for key in data.span(begin, end)):
                raise Conflict("a range that was read has changed")
        now = _Reader(data)
        data.version += 1
        self._stamp = data.version.to_bytes(8, "big") + b"\0\0"
        for begin, end in self.cleared:
            for key in data.span(begin, end):
                if now.base_get(key) is not None:
                    data.put(key, None)
        for key, write in self.writes.items():
            if isinstance(write, Counter):
                base = None if self._is_cleared(key) else now.base_get(key)
                data.put(key, write.apply(base))
            else:
                data.put(key, write)
        for prefix, suffix, value in self.stamped:
            data.put(prefix + self._stamp + suffix, value)

    def release(self) -> None:
        pass

    @property
    def stamp(self) -> bytes:
        return self._stamp


class MemoryStore(Store):
    """Everything is gone with the object."""

    reads_now = True

    def __init__(self, rng: random.Random | None = None) -> None:
        super().__init__(rng)
        self._data = _Versions()
        self._closed = False

    def begin(self, urgent: bool = False) -> Transaction:
        if self._closed:
            raise errors.ShutDown("the metadata store is closed")
        return _MemoryTransaction(self._data)

    async def read(self, body: Callable[[Snapshot], Awaitable[T]]) -> T:
        if self._closed:
            raise errors.ShutDown("the metadata store is closed")
        return await body(_Reader(self._data))

    def read_now(self, body: Callable[[Snapshot], Awaitable[T]]) -> T:
        if self._closed:
            raise errors.ShutDown("the metadata store is closed")
        return drive(body(_Reader(self._data)))

    async def close(self) -> None:
        self._closed = True

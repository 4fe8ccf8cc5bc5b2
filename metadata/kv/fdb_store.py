"""The engine for production: FoundationDB, by its official binding (`pip install ffs[fdb]`, and libfdb_c).

The network thread of the binding completes futures; a callback hands each to the event loop by
call_soon_threadsafe, and a future's value is taken only when it is ready, so the loop never blocks.
Conflicts, read-your-own-writes and the limits are FoundationDB's own. Keys stand under a prefix, so that
several clusters may share a database.

docs/metadata.md, Store.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from ffs import errors
from metadata.kv.contract import (
    MAX_AGE_S,
    MAX_VALUE_BYTES,
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
    backoff_s,
    check_key,
)

T = TypeVar("T")

API_VERSION: Final = 710

# Error codes of FoundationDB that need a class of their own here.
_TOO_OLD: Final = 1007
_NOT_COMMITTED: Final = 1020
_TIMED_OUT: Final = 1031
_TOO_LARGE: Final = {2101, 2102, 2103}
_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF


def load_binding() -> Any:
    """The module `fdb` with its API version chosen. Unsupported, with what to install, if that fails."""
    try:
        import fdb
    except ImportError as error:
        raise errors.Unsupported("fdb:// needs the FoundationDB binding: pip install 'ffs[fdb]'") from error
    try:
        fdb.api_version(API_VERSION)
    except Exception as error:  # whatever loading a foreign library raises
        raise errors.Unsupported(f"fdb:// needs FoundationDB's client library libfdb_c: {error}") from error
    return fdb


async def ready(future: Any) -> Any:
    """Waits for a future of the binding without blocking; returns it. Cancelling the wait cancels it."""
    if future.is_ready():
        return future
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not done.done():
            done.set_result(None)

    def called(_: Any) -> None:  # in the network thread
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(finish)

    future.on_ready(called)
    try:
        await done
    except asyncio.CancelledError:
        future.cancel()
        raise
    return future


class _FdbReader:
    """Reads of one transaction; `peek` reads without conflict."""

    def __init__(self, store: FdbStore) -> None:
        self._store = store
        self._tr = store.new_transaction()
        self._prefix = store.prefix
        self._cut = len(store.prefix)

    async def get(self, key: bytes) -> bytes | None:
        return await self._get(self._tr, key)

    async def _get(self, source: Any, key: bytes) -> bytes | None:
        try:
            value = (await ready(source.get(self._prefix + key))).value
        except self._store.error as error:
            raise self._store.convert(error, committing=False) from error
        return None if value is None else bytes(value)

    async def range(self, begin: bytes, end: bytes, limit: int = 0, reverse: bool = False) -> Pairs:
        if begin >= end:
            return []
        first, last = self._prefix + begin, self._prefix + end
        mode = self._store.fdb.StreamingMode.exact if limit else self._store.fdb.StreamingMode.want_all
        pairs: Pairs = []
        while True:
            left = limit - len(pairs) if limit else 0
            found = self._tr.get_range(first, last, left, reverse, mode)
            try:
                rows, _, more = (await ready(found._future)).wait()
            except self._store.error as error:
                raise self._store.convert(error, committing=False) from error
            pairs += [(row.key[self._cut :], row.value) for row in rows]
            if not more or not rows or (limit and len(pairs) >= limit):
                return pairs
            if reverse:
                last = rows[-1].key
            else:
                first = rows[-1].key + b"\0"

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(await asyncio.gather(*(self.get(key) for key in keys)))

    async def ranges(self, spans: Sequence[tuple[bytes, bytes]]) -> list[Pairs]:
        return list(await asyncio.gather(*(self.range(begin, end) for begin, end in spans)))


class _FdbTransaction(_FdbReader, Transaction):
    def __init__(self, store: FdbStore) -> None:
        super().__init__(store)
        self._write_bytes = 0
        self._stamp = b""

    async def peek(self, key: bytes) -> bytes | None:
        return await self._get(self._tr.snapshot, key)

    def set(self, key: bytes, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise TooMuch(f"a value has at most {MAX_VALUE_BYTES} bytes, not {len(value)}")
        self._count(key, len(value))
        self._tr.set(self._prefix + key, value)

    def clear(self, key: bytes) -> None:
        self._count(key, 0)
        self._tr.clear(self._prefix + key)

    def clear_range(self, begin: bytes, end: bytes) -> None:
        if begin < end:
            self._count(begin, len(end))
            self._tr.clear_range(self._prefix + begin, self._prefix + end)

    def add(self, key: bytes, delta: int) -> None:
        self._count(key, 8)
        self._tr.add(self._prefix + key, (delta & _MASK).to_bytes(8, "little"))

    def max(self, key: bytes, value: int) -> None:
        self._count(key, 8)
        self._tr.max(self._prefix + key, value.to_bytes(8, "little"))

    def set_stamped(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        head = self._prefix + prefix
        key = head + bytes(STAMP_BYTES) + suffix
        self._count(key[len(self._prefix) :], len(value))
        self._tr.set_versionstamped_key(key + len(head).to_bytes(4, "little"), value)

    def _count(self, key: bytes, size: int) -> None:
        check_key(key)
        self._write_bytes += len(key) + size
        if self._write_bytes > MAX_WRITE_BYTES:
            raise TooMuch(f"a transaction writes at most {MAX_WRITE_BYTES} bytes: page the work")

    async def commit(self) -> None:
        stamp = self._tr.get_versionstamp() if self._write_bytes else None
        try:
            (await ready(self._tr.commit())).wait()
            if stamp is not None:
                self._stamp = bytes((await ready(stamp)).value)
        except self._store.error as error:
            raise self._store.convert(error, committing=True) from error

    def release(self) -> None:
        self._tr.cancel()

    @property
    def stamp(self) -> bytes:
        return self._stamp


class FdbStore(Store):
    """`fdb://CLUSTER-FILE?prefix=TEXT`; no file: the binding's default one."""

    def __init__(
        self,
        cluster_file: str | None,
        *,
        prefix: bytes = b"",
        rng: random.Random | None = None,
        binding: Any = None,
    ) -> None:
        super().__init__(rng)
        self.fdb = binding if binding is not None else load_binding()
        self.prefix = prefix
        self.error: type[Exception] = self.fdb.FDBError
        self._closed = False
        try:
            self._db = self.fdb.open(cluster_file)
        except self.error as error:
            raise errors.Unreachable(f"can't open the FoundationDB cluster: {error}", cluster_file) from error

    def new_transaction(self) -> Any:
        if self._closed:
            raise errors.ShutDown("the metadata store is closed")
        tr = self._db.create_transaction()
        tr.options.set_timeout(int(MAX_AGE_S * 1000))
        return tr

    def convert(self, error: Any, *, committing: bool) -> errors.FfsError:
        """FoundationDB's error as the contract's."""
        code = error.code
        if code == _NOT_COMMITTED:
            return Conflict("something that was read has changed")
        if code in _TOO_LARGE:
            return TooMuch(f"over a limit of FoundationDB: {error}")
        if committing and (code == _TIMED_OUT or self.fdb.predicates.is_maybe_committed(error)):
            return UnknownResult(f"FoundationDB doesn't know whether it committed: {error}")
        if code in (_TOO_OLD, _TIMED_OUT) or self.fdb.predicates.is_retryable(error):
            return TooOld(f"FoundationDB asks to try again: {error}")
        return errors.FfsError(f"FoundationDB: {error}")

    def begin(self, urgent: bool = False) -> Transaction:
        return _FdbTransaction(self)

    async def read(self, body: Callable[[Snapshot], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        started = loop.time()
        attempt = 0
        while True:
            try:
                return await body(_FdbReader(self))
            except TooOld as error:
                attempt += 1
                if loop.time() - started > 6 * MAX_AGE_S:
                    raise errors.DeadlineExceeded(f"FoundationDB doesn't answer: {error}") from error
            await asyncio.sleep(backoff_s(attempt, self._backoff_rng))

    async def close(self) -> None:
        """The binding's network thread lives as long as the process; transactions are refused from now on."""
        self._closed = True

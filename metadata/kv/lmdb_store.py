"""The embedded engine: one LMDB file tree, several processes of one host, one durable commit for many.

Bodies run on read transactions and queue what they did. A committer - one thread - takes LMDB's writer
lock, and the queue with it: each queued transaction is validated against the state before it (values and
ranges that it read, unless nothing was committed since its snapshot), applied, and all of them become durable
by one commit. No body ever holds the lock.

Threads. The committer thread does all that needs the lock, since LMDB ties a writer to its thread. While
it validates and applies (Python code), the event loop stands still on purpose: with both running, every LMDB
call of the committer would queue for the interpreter lock behind the loop. During the wait for the lock and
during the flush, which take the time, the loop is free and gathers the next group.

docs/metadata.md, Store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast

import lmdb

from ffs import errors
from metadata.kv.buffer import BufferedTransaction, Counter
from metadata.kv.contract import (
    MAX_WRITE_BYTES,
    Conflict,
    Pairs,
    Snapshot,
    Store,
    TooOld,
    Transaction,
    UnknownResult,
    drive,
)
from metadata.kv.lmdb_holder import Holder, HolderFile

T = TypeVar("T")
Get = Callable[[bytes], bytes | None]
_log = logging.getLogger(__name__)

MAP_BYTES: Final = 1 << 38  # address space, not memory: the file grows as it is used
MAX_READERS: Final = 1024
MAX_GROUP: Final = 1024
READER_CHECK_S: Final = 10.0  # how often reader slots of processes that were killed are looked for


class _Queued(NamedTuple):
    txn: _LmdbTransaction
    done: asyncio.Future[None]


class _LmdbSnapshot:
    """A read transaction as the contract's Snapshot."""

    __slots__ = ("_txn", "base_get")

    def __init__(self, txn: lmdb.Transaction) -> None:
        self._txn = txn
        self.base_get = cast(Get, txn.get)

    async def get(self, key: bytes) -> bytes | None:
        return self.base_get(key)

    async def range(self, begin: bytes, end: bytes, limit: int = 0, reverse: bool = False) -> Pairs:
        return read_range(self._txn, begin, end, limit, reverse)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(map(self.base_get, keys))

    async def ranges(self, spans: Sequence[tuple[bytes, bytes]]) -> list[Pairs]:
        found: list[Pairs] = []
        with self._txn.cursor() as cursor:
            for begin, end in spans:
                pairs: Pairs = []
                if begin < end and cursor.set_range(begin):
                    for pair in cast(Iterator[tuple[bytes, bytes]], cursor.iternext()):
                        if pair[0] >= end:
                            break
                        pairs.append(pair)
                found.append(pairs)
        return found


def read_range(txn: lmdb.Transaction, begin: bytes, end: bytes, limit: int, reverse: bool) -> Pairs:
    """The contract's range over an LMDB transaction."""
    pairs: Pairs = []
    if begin >= end:
        return pairs
    with txn.cursor() as cursor:
        if reverse:
            # set_range finds the first key >= end; the one before it is the last inside.
            found = cursor.prev() if cursor.set_range(end) else cursor.last()
            if not found:
                return pairs
            for key, value in cast(Iterator[tuple[bytes, bytes]], cursor.iterprev()):
                if key < begin:
                    break
                pairs.append((key, value))
                if len(pairs) == limit:
                    break
        elif cursor.set_range(begin):
            for key, value in cast(Iterator[tuple[bytes, bytes]], cursor.iternext()):
                if key >= end:
                    break
                pairs.append((key, value))
                if len(pairs) == limit:
                    break
    return pairs


class _LmdbTransaction(BufferedTransaction):
    __slots__ = ("_snapshot", "_stamp", "_store", "base_get", "since", "urgent")

    base_get: Get  # type: ignore[assignment]

    def __init__(self, store: LmdbStore, snapshot: lmdb.Transaction, urgent: bool) -> None:
        super().__init__()
        self._store = store
        self._snapshot: lmdb.Transaction | None = snapshot
        self.base_get = cast(Get, snapshot.get)
        self.since = snapshot.id()
        self.urgent = urgent
        self._stamp = b""

    def base_range(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> Pairs:
        if self._snapshot is None:
            raise errors.BadHandle("the transaction is over")
        return read_range(self._snapshot, begin, end, limit, reverse)

    async def commit(self) -> None:
        self.check_age()
        self.release()
        if self.dirty:
            await self._store.enqueue(self)

    def release(self) -> None:
        if self._snapshot is not None:
            self._snapshot.abort()
            self._snapshot = None

    @property
    def stamp(self) -> bytes:
        return self._stamp

    # --- in the committer, under the writer lock ---

    def validate(self, txn: lmdb.Transaction) -> None:
        """Raises Conflict or TooOld unless all that was read reads the same now."""
        self.check_age()
        get = txn.get
        for key, value in self.reads.items():
            if get(key) != value:
                raise Conflict("a key that was read has changed")
        for begin, end, pairs in self.ranges:
            if read_range(txn, begin, end, len(pairs) + 1, False) != pairs:
                raise Conflict("a range that was read has changed")

    def apply(self, txn: lmdb.Transaction, order: int) -> None:
        for begin, end in self.cleared:
            with txn.cursor() as cursor:
                if cursor.set_range(begin):
                    while (key := bytes(cursor.key())) and key < end and cursor.delete():
                        pass
        put = txn.put
        for key, write in self.writes.items():
            if write is None:
                txn.delete(key)
            elif isinstance(write, Counter):
                put(key, write.apply(cast(Get, txn.get)(key)))
            else:
                put(key, write)
        if self.stamped:
            self._stamp = txn.id().to_bytes(8, "big") + order.to_bytes(2, "big")
            for prefix, suffix, value in self.stamped:
                put(prefix + self._stamp + suffix, value)
        elif not self._stamp:
            self._stamp = txn.id().to_bytes(8, "big") + order.to_bytes(2, "big")


class LmdbStore(Store):
    """`lmdb://DIRECTORY`. Open it once a process. `holder_limit_s`: how long a peer may hold the writer lock
    before it counts as stopped and is killed (half of the manager's lease)."""

    reads_now = True

    def __init__(
        self, path: str | Path, *, holder_limit_s: float = 5.0, rng: random.Random | None = None
    ) -> None:
        """Makes the store if there is none. NotFound if the directory above is missing, AccessDenied."""
        super().__init__(rng)
        self._path = Path(path)
        try:
            self._path.mkdir(exist_ok=True)
            self._env = lmdb.open(
                str(self._path), map_size=MAP_BYTES, max_readers=MAX_READERS, max_dbs=0, max_spare_txns=16
            )
        except OSError as error:
            raise errors.from_os_error(error) from error
        except lmdb.Error as error:
            raise errors.Damaged(f"can't open this store: {error}", str(self._path)) from error
        self._env.reader_check()  # slots of processes that were killed
        self._holder = HolderFile(self._path / "writer")
        self._holder_limit_s = holder_limit_s
        self._queue: deque[_Queued] = deque()
        self._urgent: deque[_Queued] = deque()
        self._wake = threading.Semaphore(0)
        self._awake = False  # the committer has been woken and hasn't taken the queue yet
        self._go = threading.Semaphore(0)
        self._applied = threading.Semaphore(0)
        self._closed = False
        self._poison: str | None = None
        self._waits_for_lock = False
        self._watched: asyncio.TimerHandle | None = None
        self._idle: asyncio.Event | None = None
        self._pending = 0
        self._readers_checked_s = time.monotonic()
        self.commits = 0  # groups made durable, for metrics
        self._thread = threading.Thread(target=self._committer, name="lmdb-committer", daemon=True)
        self._thread.start()

    # --- reading ---

    def begin(self, urgent: bool = False) -> Transaction:
        self._check_open()
        return _LmdbTransaction(self, self._snapshot(), urgent)

    async def read(self, body: Callable[[Snapshot], Awaitable[T]]) -> T:
        self._check_open()
        with self._snapshot() as txn:
            return await body(_LmdbSnapshot(txn))

    def read_now(self, body: Callable[[Snapshot], Awaitable[T]]) -> T:
        self._check_open()
        txn = self._snapshot()  # a spare one, renewed: well under a microsecond
        try:
            return drive(body(_LmdbSnapshot(txn)))
        finally:
            txn.abort()

    def _snapshot(self) -> lmdb.Transaction:
        try:
            return self._env.begin()
        except lmdb.ReadersFullError:
            self._env.reader_check()  # processes that were killed since the store was opened hold slots
            return self._env.begin()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.ShutDown("the metadata store is closed", str(self._path))

    # --- queueing, in the loop ---

    async def enqueue(self, txn: _LmdbTransaction) -> None:
        """Waits until `txn` is durable. As Transaction.commit."""
        self._check_open()
        if self._poison:
            raise errors.DeviceFailed(self._poison, str(self._path))
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        (self._urgent if txn.urgent else self._queue).append(_Queued(txn, done))
        self._pending += 1
        if not self._awake:
            self._awake = True
            self._wake.release()
            if self._watched is None:
                self._watched = loop.call_later(
                    self._holder_limit_s, self._watch_lock, loop, self._holder.read()
                )
        await done

    def _watch_lock(self, loop: asyncio.AbstractEventLoop, seen: Holder) -> None:
        """Kills a peer that has held the lock ever since the committer last began to wait for it."""
        self._watched = None
        if not self._pending:
            return
        now = self._holder.read()
        if self._waits_for_lock and now == seen and self._holder.kill(seen):
            _log.warning("killed process %d: it held the writer lock of %s too long", seen.pid, self._path)
        self._watched = loop.call_later(self._holder_limit_s, self._watch_lock, loop, now)

    def _settle(self, group: list[_Queued], outcomes: list[BaseException | None]) -> None:
        for queued, outcome in zip(group, outcomes, strict=True):
            if not queued.done.done():  # its waiter may have been cancelled
                if outcome is None:
                    queued.done.set_result(None)
                else:
                    queued.done.set_exception(outcome)
        self._pending -= len(group)
        if self._pending == 0 and self._idle is not None:
            self._idle.set()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._pending:
            self._idle = asyncio.Event()
            await self._idle.wait()
        if self._watched is not None:
            self._watched.cancel()
        self._wake.release()
        self._thread.join()
        self._holder.close()
        self._env.close()

    # --- the committer's thread ---

    def _committer(self) -> None:
        while True:
            self._wake.acquire()
            if not (self._queue or self._urgent):
                if self._closed:
                    return
                continue
            self._check_readers()
            loop = (self._urgent or self._queue)[0].done.get_loop()
            try:
                self._commit_group(loop)
            except RuntimeError as error:  # the loop is closed: nobody is left to tell
                if not loop.is_closed():
                    raise
                _log.error("event loop closed with commits on their way: %s", error)
                self._queue.clear()
                self._urgent.clear()
                self._awake = False

    def _check_readers(self) -> None:
        """A snapshot of a process that was killed keeps its pages from being used again: the file would grow
        with every commit."""
        now = time.monotonic()
        if now - self._readers_checked_s >= READER_CHECK_S:
            self._readers_checked_s = now
            self._env.reader_check()

    def _commit_group(self, loop: asyncio.AbstractEventLoop) -> None:
        group: list[_Queued] = []
        outcomes: list[BaseException | None] = []
        txn: lmdb.Transaction | None = None
        self._waits_for_lock = True
        try:
            txn = self._env.begin(write=True)
        except lmdb.Error as error:
            group, outcomes = self._fail_all(loop, errors.FfsError(f"can't write to the store: {error}"))
        self._waits_for_lock = False
        if txn is not None:
            hold = self._holder.take()
            committed = False
            try:
                group = self._stand_still(loop)
                try:
                    outcomes = self._apply_group(txn, group)
                finally:
                    self._applied.release()
                if None in outcomes:
                    txn.commit()
                    committed = True
                    self.commits += 1
            except lmdb.MapFullError:
                outcomes = [
                    o or errors.NoSpace("the metadata store is full", str(self._path)) for o in outcomes
                ]
            except lmdb.Error as error:
                # After a failed flush the kernel may call the pages clean: nothing may be promised any more.
                self._poison = f"a commit failed, restart to recover: {error}"
                _log.error("%s: %s", self._path, self._poison)
                outcomes = [o or UnknownResult(self._poison) for o in outcomes]
            finally:
                if not committed:
                    with contextlib.suppress(lmdb.Error):
                        txn.abort()
                self._holder.drop(hold)
        loop.call_soon_threadsafe(self._settle, group, outcomes)

    def _stand_still(self, loop: asyncio.AbstractEventLoop) -> list[_Queued]:
        """Stops the loop at its next turn and takes the queue; `_applied.release` lets it go on."""
        loop.call_soon_threadsafe(self._hold_loop)
        self._go.acquire()
        return self._take_group()

    def _hold_loop(self) -> None:
        self._awake = False
        self._go.release()
        self._applied.acquire()

    def _take_group(self) -> list[_Queued]:
        group: list[_Queued] = []
        size = 0
        for queue in (self._urgent, self._queue):
            while queue and len(group) < MAX_GROUP and size < MAX_WRITE_BYTES:
                group.append(queue.popleft())
                size += group[-1].txn.write_bytes
        if (self._queue or self._urgent) and not self._awake:
            self._awake = True
            self._wake.release()
        return group

    def _fail_all(
        self, loop: asyncio.AbstractEventLoop, error: errors.FfsError
    ) -> tuple[list[_Queued], list[BaseException | None]]:
        group = self._stand_still(loop)
        self._applied.release()
        return group, [error] * len(group)

    def _apply_group(self, txn: lmdb.Transaction, group: list[_Queued]) -> list[BaseException | None]:
        """Validates and applies in order; an outcome for each. MapFullError ends it all."""
        outcomes: list[BaseException | None] = []
        untouched = True
        for order, queued in enumerate(group):
            try:
                if not (untouched and txn.id() == queued.txn.since + 1):
                    queued.txn.validate(txn)
                queued.txn.apply(txn, order)
                untouched = False
                outcomes.append(None)
            except (Conflict, TooOld) as error:
                outcomes.append(error)
            except lmdb.MapFullError:
                outcomes[:] = [errors.NoSpace("the metadata store is full", str(self._path))] * len(group)
                return outcomes
        return outcomes

"""AsyncIor: rings for asyncio. docs/ring.md, In an event loop.

    async with ffs.AsyncIor(client, entries=256) as ring:
        moved = await ring.read_many(file, offsets, iov, iov_offsets, lengths)

Any number of tasks of one event loop share it. The loop watches the rings' descriptors; there is no thread.
A cancelled await returns when its requests are over, so its part of the Iov is the caller's again.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ffs._native.iov import Iov, IovSlice
from ffs.client.ior import Ior, _distinct, _raw, _whole_numbers, furthest, part_of
from ffs.client.transfer import error_of_completion
from ffs.errors import Cancelled, FfsError, InvalidArgument, ShutDown

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

__all__ = ["AsyncIor"]

Ints = NDArray[np.int64]

# A request's userdata: which call it belongs to, and its place there.
_INDEX_BITS: Final = 32
_INDEX_MASK: Final = np.uint64((1 << _INDEX_BITS) - 1)


class _Call:
    """One read_many or write_many: what isn't prepared yet waits in its side's queue."""

    def __init__(
        self, number: int, files: File | Sequence[File], at: Ints, iov: Iov, to: Ints, size: Ints, over: Any
    ) -> None:
        self.number = number
        self.files = files
        self.at = at
        self.iov = iov
        self.to = to
        self.size = size
        self.prepared = 0
        self.flying = 0
        self.results = np.zeros(len(at), dtype=np.int64)
        self.failure: FfsError | None = None
        """Of the request that failed first."""
        self.refusal: BaseException | None = None
        """Why its requests couldn't be prepared: raised in any case."""
        self.given_up = False
        self.over: asyncio.Future[None] = over

    @property
    def waits(self) -> bool:
        """Whether some of it isn't prepared yet."""
        return self.prepared < len(self.at) and not self.given_up and self.refusal is None

    def settle(self) -> None:
        """Tells whoever awaits it, once nothing of it is in flight or to be prepared."""
        if self.flying == 0 and not self.waits and not self.over.done():
            self.over.set_result(None)


class _Side:
    """One ring, driven by the loop; the calls whose requests are in it, and those that wait for room."""

    def __init__(
        self,
        client: Client,
        entries: int,
        kind: str,
        priority: int,
        inflight: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._client = client
        self.ior = Ior(client, entries, kind, priority=priority, inflight=inflight)
        self._loop = loop
        self._calls: dict[int, _Call] = {}  # with requests in flight
        self._queue: deque[_Call] = deque()
        self._turn_comes: asyncio.Handle | None = None
        loop.add_reader(self.ior.fileno(), self._turn)

    @property
    def calls(self) -> list[_Call]:
        """All that aren't over."""
        return list({id(call): call for call in (*self._calls.values(), *self._queue)}.values())

    def add(self, call: _Call) -> None:
        """In order of arrival. What is prepared in one turn of the loop goes out together."""
        self._queue.append(call)
        self._feed()

    def give_up(self, call: _Call) -> None:
        """Nothing more of it is prepared; what is in flight is cancelled and ends soon."""
        call.given_up = True
        self._cancel(call)
        self._feed()
        self._settle(call)

    def close(self) -> None:
        """Blocks until no server can touch a buffer; at once if nothing is in flight."""
        self._loop.remove_reader(self.ior.fileno())
        self._turn_is_here()  # it may still come for a call that was refused, which nothing waits for
        self.ior.close()

    def _cancel(self, call: _Call) -> None:
        if call.flying:
            first = call.number << _INDEX_BITS
            self.ior.cancel_range(first, first + call.prepared)
            self._come()

    def _feed(self) -> None:
        while self._queue:
            call = self._queue[0]
            if call.waits:
                self._prepare(call)
                if call.waits:
                    break  # the ring is full
            self._queue.popleft()
            self._settle(call)
        self._come()

    def _prepare(self, call: _Call) -> None:
        rest = slice(call.prepared, None)
        userdata = (call.number << _INDEX_BITS) + np.arange(call.prepared, len(call.at), dtype=np.int64)
        files = call.files[rest] if isinstance(call.files, Sequence) else call.files
        try:
            taken = self.ior.prepare_many(
                files, call.at[rest], call.iov, call.to[rest], call.size[rest], userdata
            )
        except Exception as error:  # of the caller's arguments or of a file: raised where the call is awaited
            call.refusal = error
            self._cancel(call)
            return
        if taken:
            call.prepared += taken
            call.flying += taken
            self._calls[call.number] = call

    def _come(self) -> None:
        if self._turn_comes is None:
            self._turn_comes = self._loop.call_soon(self._turn)

    def _turn_is_here(self) -> None:
        if self._turn_comes is not None:
            self._turn_comes.cancel()
            self._turn_comes = None

    def _turn(self) -> None:
        """Submits what is prepared and takes what is complete; never waits."""
        self._turn_is_here()  # perhaps by the descriptor, before the one that was to come
        try:
            count = self.ior._wait(0, 0.0)
        except FfsError as error:  # of the ring itself: in a child of fork, say
            self._fail(error)
            return
        empty = self.ior._empty
        users, results = self.ior._ring.columns(count)
        self.ior._kept.have, self.ior._empty = 0, []
        if count:
            self._take(users, results, self.ior._ring.completions(count))
        if empty:
            self._take(np.array(empty, dtype=np.uint64), np.zeros(len(empty), dtype=np.int64), None)
        if (count or empty) and self._queue:
            self._feed()

    def _fail(self, error: FfsError) -> None:
        self._loop.remove_reader(self.ior.fileno())
        self._queue.clear()
        for call in self.calls:
            call.refusal, call.flying = error, 0
            self._settle(call)

    def _take(self, userdata: NDArray[Any], results: Ints, cqes: NDArray[Any] | None) -> None:
        numbers = userdata >> np.uint64(_INDEX_BITS)
        for number in np.unique(numbers).tolist():
            mine = np.flatnonzero(numbers == np.uint64(number))
            call = self._calls[number]
            call.results[(userdata[mine] & _INDEX_MASK).astype(np.int64)] = results[mine]
            call.flying -= len(mine)
            if cqes is not None and call.failure is None and not call.given_up:
                failed = mine[results[mine] < 0]
                if len(failed):
                    call.failure = error_of_completion(cqes[failed[0]], self._client)
            self._settle(call)

    def _settle(self, call: _Call) -> None:
        if call.flying == 0 and not call.waits:
            self._calls.pop(call.number, None)
        call.settle()


class AsyncIor:
    """A ring of reads and a ring of writes for the tasks of the running event loop.

    entries: pieces (a request's chunks) in flight in each of the two, a power of two up to 65536; calls of
    any size wait their turn. priority, inflight: as of `Ior`, of each of the two. Made and used in one event
    loop's thread. `aclose`, or `async with`, before the loop ends. In a child of fork: make a fresh one.
    docs/ring.md, In an event loop.
    """

    def __init__(self, client: Client, entries: int = 256, priority: int = 0, inflight: int = 0) -> None:
        self.client = client
        self.priority = priority
        self.inflight = inflight
        self.entries = entries
        self._loop = asyncio.get_running_loop()
        self._sides: dict[str, _Side] = {}
        self._numbers = 0
        self._known: weakref.WeakSet[File] = weakref.WeakSet()
        self._closed = False
        Ior(client, entries, priority=priority, inflight=inflight).close()  # what it refuses is refused here

    async def read_many(
        self,
        files: File | Sequence[File],
        offsets: ArrayLike,
        iov: Iov,
        iov_offsets: ArrayLike,
        lengths: ArrayLike,
        *,
        return_errors: bool = False,
    ) -> Ints:
        """Reads by arrays, as of `Ior.prepare_many`, of any number; returns when all are over.

        Returns the bytes moved of each, int64: fewer than asked for only at the file's end. The error of the
        request that failed first is raised when all are over; with return_errors the failed ones have -errno
        instead. When cancelled it cancels its requests, and ends (CancelledError) when no server can touch
        the Iov for them any more. Raises as prepare_many; ShutDown after aclose."""
        return await self._move("read", files, offsets, iov, iov_offsets, lengths, return_errors)

    async def write_many(
        self,
        files: File | Sequence[File],
        offsets: ArrayLike,
        iov: Iov,
        iov_offsets: ArrayLike,
        lengths: ArrayLike,
        *,
        return_errors: bool = False,
    ) -> Ints:
        """Writes by arrays; each is durable on all replicas when this returns. As read_many otherwise.

        When cancelled, each of its writes may have been carried out or not. The length is published by the
        file's flush or close (both block: give them to asyncio.to_thread)."""
        return await self._move("write", files, offsets, iov, iov_offsets, lengths, return_errors)

    async def read(self, file: File, offset: int, data: IovSlice | Iov) -> int:
        """One read of len(data) bytes; the bytes moved. As read_many."""
        part = part_of(data)
        return int((await self.read_many(file, [offset], part.iov, [part.offset], [part.length]))[0])

    async def write(self, file: File, offset: int, data: IovSlice | Iov) -> int:
        """One write of len(data) bytes. As write_many."""
        part = part_of(data)
        return int((await self.write_many(file, [offset], part.iov, [part.offset], [part.length]))[0])

    async def aclose(self) -> None:
        """Cancels what is in flight: those calls raise Cancelled. Returns when no server can touch a buffer
        any more. Repeatable."""
        self._closed = True
        cancelled = False
        for side in list(self._sides.values()):
            for call in side.calls:
                call.refusal = call.refusal or Cancelled("the ring was closed while this was in flight")
                side.give_up(call)
                cancelled |= await _outlast(call.over)
        while self._sides:
            self._sides.popitem()[1].close()
        if cancelled:
            raise asyncio.CancelledError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _move(
        self,
        kind: str,
        files: File | Sequence[File],
        offsets: ArrayLike,
        iov: Iov,
        iov_offsets: ArrayLike,
        lengths: ArrayLike,
        return_errors: bool,
    ) -> Ints:
        at = _whole_numbers(offsets, "offsets")
        to = _whole_numbers(iov_offsets, "iov_offsets")
        size = _whole_numbers(lengths, "lengths")
        if not len(at) == len(to) == len(size):
            raise InvalidArgument(
                f"{len(at)} offsets, {len(to)} iov_offsets, {len(size)} lengths: give as many of each"
            )
        await self._meet(list(files) if isinstance(files, Sequence) else [files])
        if kind == "write" and len(at):
            await _make_room(files, at + size)
        side = self._side(kind)
        self._numbers += 1
        call = _Call(self._numbers, files, at, iov, to, size, self._loop.create_future())
        side.add(call)
        try:
            await asyncio.shield(call.over)
        except asyncio.CancelledError:
            side.give_up(call)
            await _outlast(call.over)
            raise
        if call.refusal is not None:
            raise call.refusal
        if call.failure is not None and not return_errors:
            raise call.failure
        return call.results

    def _side(self, kind: str) -> _Side:
        if self._closed:
            raise ShutDown("this AsyncIor is closed")
        side = self._sides.get(kind)
        if side is None:
            side = self._sides[kind] = _Side(
                self.client, self.entries, kind, self.priority, self.inflight, self._loop
            )
        return side

    async def _meet(self, files: Sequence[Any]) -> None:
        """A file's routing and capability are fetched on first use: in a thread, not in the loop's."""
        fresh = [
            file for file in {id(file): _raw(file) for file in files}.values() if file not in self._known
        ]
        for file in fresh:
            file.readable()  # ValueError: it is closed
        if fresh:
            await asyncio.to_thread(_warm, fresh)
            self._known.update(fresh)


def _warm(files: Sequence[File]) -> None:
    for file in files:
        file.placement  # noqa: B018 - fetches routing
        file.capability  # noqa: B018 - hands it to native


async def _make_room(files: File | Sequence[File], ends: Ints) -> None:
    """Room, where a quota counts files, is asked for in a thread: prepare_many finds it there."""
    if not isinstance(files, Sequence):
        known, which = [_raw(files)], ends[:0]
    elif len(files) == len(ends):
        known, which = _distinct(files)
    else:
        return  # prepare_many refuses it
    reach = zip(known, furthest(ends, which, len(known)), strict=True)
    lacking = [(file, end) for file, end in reach if not file.has_room(end)]
    if lacking:
        await asyncio.to_thread(_ensure_room, lacking)


def _ensure_room(reach: list[tuple[File, int]]) -> None:
    for file, end in reach:
        file.ensure_room(end)


async def _outlast(over: asyncio.Future[None]) -> bool:
    """Waits for it also when cancelled meanwhile, since buffers are in use until then. Whether it was."""
    cancelled = False
    while not over.done():
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled

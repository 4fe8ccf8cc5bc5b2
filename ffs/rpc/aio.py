"""The asking side for event loops: many requests in flight on one connection.

Used by the servers among themselves, by batches and by the bench. One event loop, its thread only.
docs/control_plane.md, Askers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, cast

from ffs.errors import ConnectionLost, DeadlineExceeded, FfsError, ProtocolError, ShutDown, Unreachable
from ffs.proto.common import Message
from ffs.rpc.address import Address, format_address
from ffs.rpc.codec import encode_message, result_of
from ffs.rpc.frame import CANCEL, REPLY, REQUEST, FrameDecoder, encode_frame
from ffs.rpc.handshake import AskerHandshake

CONNECT_TIMEOUT_S: Final = 3.0
SWEEP_S: Final = 0.25  # how late a timeout may come


class _Waiting:
    """A request without its reply yet."""

    __slots__ = ("deadline", "future")

    def __init__(self, future: asyncio.Future[bytes], deadline: float) -> None:
        self.future = future
        self.deadline = deadline


class Connection(asyncio.Protocol):
    """One connection. `await Connection.open(...)`; then `call` from any task of the loop."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.cluster = b""
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._out: list[bytes] = []
        self._next = 1
        self._lost: FfsError | None = None
        self._loop = asyncio.get_running_loop()
        self._sweeper: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls, address: Address, handshake: AskerHandshake, *, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> Connection:
        """Connects and greets. Raises Unreachable, WrongCluster, Unauthenticated, VersionMismatch."""
        loop = asyncio.get_running_loop()
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(lambda: cls(address), *address)
                await connection._greet(handshake)
        except TimeoutError:
            if connection is not None:
                connection.close()
            raise Unreachable(f"no answer from {format_address(address)} within {timeout_s:g} s") from None
        except FfsError:
            if connection is not None:
                connection.close()
            raise
        except OSError as error:
            raise unreachable(address, error) from None
        return connection

    async def _greet(self, handshake: AskerHandshake) -> None:
        body: bytes | None = handshake.hello
        while body is not None:
            reply = await self._send(body, float("inf"))
            body = handshake.receive(result_of(reply))
        assert handshake.reply is not None
        self.cluster = handshake.reply.cluster

    @property
    def closed(self) -> bool:
        return self._lost is not None

    async def call(self, request: Message, timeout_s: float = 30.0) -> Message:
        """The reply. Raises the peer's error, ConnectionLost (sending again is safe for requests with
        an identity), DeadlineExceeded (what happened is unknown until it is sent again)."""
        request_id = self._next
        future = self._send(encode_message(request), self._loop.time() + timeout_s)
        try:
            return result_of(await future)
        except asyncio.CancelledError:
            self._drop(request_id)
            raise

    async def call_many(
        self, requests: Iterable[Message], timeout_s: float = 30.0
    ) -> list[Message | OSError]:
        """All replies in the order of the requests, errors in place of replies."""
        deadline = self._loop.time() + timeout_s
        first = self._next
        futures = [self._send(encode_message(request), deadline) for request in requests]
        results: list[Message | OSError] = []
        try:
            for future in futures:
                try:
                    results.append(result_of(await future))
                except OSError as error:
                    results.append(error)
        except asyncio.CancelledError:
            for request_id in range(first, first + len(futures)):
                self._drop(request_id)
            raise
        return results

    def close(self) -> None:
        """Ends it; what waits gets ShutDown. Repeatable."""
        self._fail(ShutDown(f"the connection to {format_address(self.address)} was closed"))
        if self._transport is not None:
            self._transport.close()

    # inside

    def _send(self, body: bytes, deadline: float) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = self._loop.create_future()
        if self._lost is not None:
            future.set_exception(type(self._lost)(self._lost.message))
            return future
        request_id = self._next
        frame = encode_frame(REQUEST, request_id, body)
        self._next = request_id + 1
        self._waiting[request_id] = _Waiting(future, deadline)
        if not self._out:
            self._loop.call_soon(self._flush)
            if self._sweeper is None:
                self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        self._out.append(frame)
        return future

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _drop(self, request_id: int) -> None:
        """Tells the server of a request that nobody waits for any more."""
        if self._waiting.pop(request_id, None) is not None and self._transport is not None:
            self._flush()
            self._transport.write(encode_frame(CANCEL, request_id, b""))

    def _sweep(self) -> None:
        """Ends requests whose deadline has passed."""
        self._sweeper = None
        now = self._loop.time()
        late = [ident for ident, waiting in self._waiting.items() if waiting.deadline <= now]
        for request_id in late:
            future = self._waiting[request_id].future
            self._drop(request_id)
            if not future.done():
                future.set_exception(
                    DeadlineExceeded(f"no reply from {format_address(self.address)} by the deadline")
                )
        if self._waiting:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def _fail(self, error: FfsError) -> None:
        if self._lost is None:
            self._lost = error
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.future.done():
                each.future.set_exception(type(self._lost)(self._lost.message))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        why = f": {exc}" if exc is not None else ""
        self._fail(ConnectionLost(f"{format_address(self.address)} closed the connection{why}"))

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._decoder.feed(data)
        except ProtocolError as error:
            self._fail(error)
            assert self._transport is not None
            self._transport.abort()
            return
        take = self._waiting.pop
        for kind, request_id, body in frames:
            if kind != REPLY:
                continue
            waiting = take(request_id, None)
            if waiting is not None:
                if not waiting.future.done():
                    waiting.future.set_result(body)
            elif request_id == 0:  # the connection as a whole is refused
                try:
                    result_of(body)
                except FfsError as error:
                    self._fail(error)


def unreachable(address: Address, error: OSError) -> Unreachable:
    """The error for an address that can't be connected to."""
    return Unreachable(
        f"can't reach {format_address(address)}: {error.strerror or error}: "
        "check the address and that the server runs"
    )

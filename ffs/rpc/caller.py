"""The asking side for event loops, over several addresses: failover as ffs.rpc.pool, without threads.

One event loop. docs/control_plane.md, Askers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from ffs.errors import (
    ConnectionLost,
    DeadlineExceeded,
    FfsError,
    InvalidArgument,
    NotPrimary,
    ShutDown,
    Unreachable,
)
from ffs.proto.common import Message
from ffs.rpc.address import Address, format_address
from ffs.rpc.aio import CONNECT_TIMEOUT_S, Connection
from ffs.rpc.handshake import AskerHandshake

TRY_S: Final = 2.0  # with several addresses: another one is tried when one hasn't answered for so long
PAUSE_S: Final = 0.05  # between two rounds over all addresses; doubles
PAUSE_MAX_S: Final = 0.5


class Caller:
    """Keeps one connection, to the address that answered last."""

    def __init__(self, addresses: Sequence[Address], handshake: Callable[[bytes], AskerHandshake]) -> None:
        """`handshake` makes one for a cluster id (b"": any; later the first server's). Doesn't connect."""
        if not addresses:
            raise InvalidArgument("no address of a metadata server")
        self.addresses = tuple(addresses)
        self.cluster = b""
        self._handshake = handshake
        self._at = 0
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    async def call(self, request: Message, timeout_s: float) -> Message:
        """The reply. The same request goes to other addresses when one is lost or isn't the manager.
        Raises the server's error; Unreachable or NotPrimary when none answered by the deadline;
        DeadlineExceeded when one was reached and didn't."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        failures = 0
        while True:
            at = self._at
            left_s = max(0.05, deadline - loop.time())
            try:
                connection = await self._connected()
                return await connection.call(request, left_s if self._alone else min(left_s, TRY_S))
            except DeadlineExceeded as caught:  # it hangs: a stopped process looks like this
                if self._alone or loop.time() >= deadline:
                    self._turn(at)
                    raise
                error: FfsError = caught
            except (Unreachable, ConnectionLost, NotPrimary, ShutDown) as caught:
                error = caught
            if self._closed:
                raise ShutDown("this caller is closed")
            self._turn(at)
            failures += 1
            pause_s = 0.0
            if failures % len(self.addresses) == 0:
                pause_s = min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(10, failures // len(self.addresses) - 1))
            if loop.time() + pause_s >= deadline:
                raise self._nobody(error)
            await asyncio.sleep(pause_s)

    def close(self) -> None:
        """Repeatable."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _connected(self) -> Connection:
        async with self._lock:
            connection = self._connection
            if connection is None or connection.closed:
                address = self.addresses[self._at]
                connection = await Connection.open(
                    address, self._handshake(self.cluster), timeout_s=CONNECT_TIMEOUT_S
                )
                if self._closed:
                    connection.close()
                    raise ShutDown("this caller is closed")
                self.cluster = connection.cluster
                self._connection = connection
            return connection

    @property
    def _alone(self) -> bool:
        return len(self.addresses) == 1

    def _turn(self, at: int) -> None:
        if self._at == at and len(self.addresses) > 1:
            self._at = (at + 1) % len(self.addresses)
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _nobody(self, error: FfsError) -> FfsError:
        if len(self.addresses) == 1 or isinstance(error, NotPrimary):
            return error
        tried = ", ".join(format_address(address) for address in self.addresses)
        return Unreachable(f"no metadata server at {tried} answers; the last one said: {error.message}")

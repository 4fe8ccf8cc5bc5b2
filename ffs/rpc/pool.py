"""Calls from threads to one service at several addresses. docs/control_plane.md, Askers.

A Pool has one connection at a time, shared by all threads (ffs.rpc.blocking). When it goes, or
the server isn't the one that may answer (NotPrimary), the same request bytes, so the same
identity, go to the next address, round and round until the deadline.

A request that the server answers late (a long poll) makes other threads' replies pass through
the waiting thread: give it a Pool of its own.

Fork: a child finds every Pool empty and connects anew; inherited descriptors are closed without a
word to the server, so the parent's connection isn't disturbed.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Final

from ffs.errors import (
    ConnectionLost,
    DeadlineExceeded,
    FfsError,
    InvalidArgument,
    NotPrimary,
    OutcomeUnknown,
    ShutDown,
    Unreachable,
)
from ffs.proto.common import ErrorReply, Message, to_error
from ffs.rpc.address import Address, format_address
from ffs.rpc.blocking import BlockingConnection
from ffs.rpc.codec import decode_message, encode_message
from ffs.rpc.handshake import AskerHandshake, Credential

CONNECT_TIMEOUT_S: Final = 3.0
TRY_S: Final = 10.0  # with several addresses: another one is tried when one hasn't answered for so long
PAUSE_S: Final = 0.02  # between two rounds over all addresses; doubles
PAUSE_MAX_S: Final = 0.5
WINDOW_BYTES: Final = 64 * 1024  # requests of call_many that are sent before their replies are read
WINDOW_REQUESTS: Final = 1024

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """Safe for threads and fork. All methods may block up to their timeout."""

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        role: str = "client",
        name: str = "",
        cluster: bytes = b"",
        secret: Credential | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """`cluster` b"" takes the first server's, and holds all others to it. Doesn't connect."""
        if not addresses:
            raise InvalidArgument("no address of a metadata server")
        self.addresses = tuple(addresses)
        self.cluster = cluster
        self._role = role
        self._name = name
        self._secret = secret
        self._timeout_s = timeout_s
        self._at = 0  # index of the address in use
        self._closed = False
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # one thread at a time connects
        self._connection: BlockingConnection | None = None

    def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> bytes:
        """Tries each address once. The cluster id. Raises Unreachable naming them all, or WrongCluster,
        Unauthenticated, VersionMismatch, ProtocolError at once."""
        last: FfsError | None = None
        for _ in self.addresses:
            try:
                self._connected(time.monotonic() + timeout_s)
                return self.cluster
            except (Unreachable, ConnectionLost) as error:
                last = error
                self._turn(self._at)
        assert last is not None
        raise self._nobody(last)

    def call(self, request: Message, timeout_s: float | None = None) -> Message:
        """The reply. Raises the error that the server answered; Unreachable when no server could be
        reached by the deadline; OutcomeUnknown (requests with a sequence) or DeadlineExceeded when
        one was reached and didn't answer."""
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        reply = self._exchange(request, [encode_message(request)], deadline)[0]
        if type(reply) is ErrorReply:
            raise to_error(reply)
        return reply

    def call_many(
        self, requests: Sequence[Message], timeout_s: float | None = None
    ) -> list[Message | FfsError]:
        """The replies in order, an error in place of a reply where the server answered by one. Many
        requests travel together. Raises as `call` does for what concerns them all."""
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        results: list[Message | FfsError] = []
        bodies = [encode_message(request) for request in requests]
        at = 0
        while at < len(bodies):
            stop, size = at, 0
            while stop < len(bodies) and stop - at < WINDOW_REQUESTS and size < WINDOW_BYTES:
                size += len(bodies[stop])
                stop += 1
            for reply in self._exchange(requests[at], bodies[at:stop], deadline):
                results.append(to_error(reply) if type(reply) is ErrorReply else reply)
            at = stop
        return results

    def close(self) -> None:
        """Ends the connection; calls that wait, and later ones, get ShutDown. Repeatable."""
        self._closed = True
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # inside

    def _exchange(self, request: Message, bodies: list[bytes], deadline: float) -> list[Message]:
        """Decoded replies of one window, whatever address gives them."""
        sent = False
        failures = 0
        while True:
            at = self._at
            try:
                connection = self._connection
                if connection is None or connection.lost is not None:
                    connection = self._connected(deadline)
                sent = True
                until = deadline
                if len(self.addresses) > 1:
                    until = min(deadline, time.monotonic() + TRY_S + getattr(request, "wait_ms", 0) / 1000.0)
                replies = [decode_message(body) for body in connection.exchange(bodies, until)]
                if not _elsewhere(replies[0]):
                    return replies
                error: FfsError = to_error(replies[0])  # type: ignore[arg-type]
            except (Unreachable, ConnectionLost, ShutDown) as caught:
                error = caught
            except DeadlineExceeded as caught:  # it hangs: a stopped process looks like this
                if time.monotonic() >= deadline:
                    self._turn(at)
                    raise self._late(request, caught) from None
                error = caught
            if self._closed:
                raise ShutDown("this client is closed") from None
            failures += 1
            self._turn(at)
            pause = 0.0
            if failures % len(self.addresses) == 0:
                pause = min(PAUSE_MAX_S, PAUSE_S * 2 ** (failures // len(self.addresses) - 1))
            if time.monotonic() + pause >= deadline:
                if sent and isinstance(error, (ConnectionLost, DeadlineExceeded)):
                    raise self._late(request, error) from None
                raise self._nobody(error) from None
            time.sleep(pause)

    def _connected(self, deadline: float) -> BlockingConnection:
        with self._lock:
            connection = self._connection
            if connection is not None and connection.lost is None:
                return connection
            if self._closed:
                raise ShutDown("this client is closed")
            self._connection = None
            timeout_s = min(CONNECT_TIMEOUT_S, max(0.05, deadline - time.monotonic()))
            handshake = AskerHandshake(
                role=self._role, cluster=self.cluster, secret=self._secret, name=self._name
            )
            connection = BlockingConnection(self.addresses[self._at], handshake, timeout_s)
            self.cluster = connection.cluster
            self._connection = connection
            return connection

    def _turn(self, at: int) -> None:
        """Goes on to the next address, unless another thread already did."""
        with self._lock:
            if self._at != at or len(self.addresses) == 1:
                return
            self._at = (at + 1) % len(self.addresses)
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _late(self, request: Message, error: FfsError) -> FfsError:
        if getattr(request, "sequence", 0):
            return OutcomeUnknown(f"{error.message}: it may have happened or not")
        return error if isinstance(error, DeadlineExceeded) else DeadlineExceeded(error.message)

    def _nobody(self, error: FfsError) -> FfsError:
        if len(self.addresses) == 1 or not isinstance(error, (Unreachable, ConnectionLost)):
            return error
        tried = ", ".join(format_address(address) for address in self.addresses)
        return Unreachable(
            f"no metadata server can be reached at {tried}: the last one said: {error.message}"
        )


def _elsewhere(reply: Message) -> bool:
    return type(reply) is ErrorReply and reply.code in (NotPrimary.code, ShutDown.code)


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        connection = pool._connection
        pool._reset()
        if connection is not None:
            connection.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)

"""Blocking control connections to the metadata services, pooled. docs/client.md, Connections.

A connection carries one request at a time; a thread takes one from the pool for each call, so
N threads use N connections. Nothing here retries: `ffs.client.caller` decides.

After a fork the child calls `ConnectionPool.abandon`: descriptors are closed without a word to
the server, which goes on talking to the parent.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from dataclasses import dataclass, replace

from ffs.errors import ConnectionLost, FfsError, ProtocolError, Unreachable
from ffs.proto.common import HelloReply, Message
from ffs.rpc.address import Address, format_address
from ffs.rpc.codec import decode_message, result_of
from ffs.rpc.frame import REPLY, REQUEST, FrameDecoder, encode_frame
from ffs.rpc.handshake import AskerHandshake

_RECEIVE_BYTES = 256 * 1024
_MAX_IDLE = 64


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """What each connection of a client is made with. Times in seconds."""

    cluster: bytes = b""
    secret: bytes | None = None
    name: str = ""
    connect_timeout_s: float = 3.0
    reply_timeout_s: float = 15.0


class Connection:
    """One control connection after its handshake. One thread at a time."""

    __slots__ = ("_decoder", "_next_id", "_socket", "hello", "server")

    def __init__(self, server: Address, options: ConnectionOptions) -> None:
        """Connects and says hello. Blocking, at most connect + reply timeout.

        Raises Unreachable (nobody there), ConnectionLost, WrongCluster, Unauthenticated,
        VersionMismatch, ProtocolError.
        """
        self.server = server
        self._decoder = FrameDecoder()
        self._next_id = 1
        try:
            self._socket = socket.create_connection(server, timeout=options.connect_timeout_s)
        except OSError as error:
            raise Unreachable(
                f"no metadata service at {format_address(server)}: {error.strerror or error}"
            ) from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(None)  # a blocking socket with kernel timeouts needs no poll() a call
            self.set_reply_timeout(options.reply_timeout_s)
            self.hello = self._shake_hands(options)
        except BaseException:
            self._socket.close()
            raise

    def set_reply_timeout(self, seconds: float) -> None:
        """How long `call` waits for its reply before ConnectionLost."""
        value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def _shake_hands(self, options: ConnectionOptions) -> HelloReply:
        shake = AskerHandshake(
            role="client", cluster=options.cluster, secret=options.secret, name=options.name
        )
        body: bytes | None = shake.hello
        while body is not None:
            body = shake.receive(result_of(self._exchange(body)))
        if not shake.done or shake.reply is None:
            raise ProtocolError(f"{format_address(self.server)} didn't answer hello")
        return shake.reply

    def call(self, body: bytes) -> Message:
        """Send one request and wait for its reply, which may be an ErrorReply.

        Raises ConnectionLost (it may have been carried out or not) and ProtocolError; after
        either the connection must be closed.
        """
        return decode_message(self._exchange(body))

    def _exchange(self, body: bytes) -> bytes:
        request_id = self._next_id
        self._next_id = request_id + 1
        try:
            self._socket.sendall(encode_frame(REQUEST, request_id, body))
            return self._receive(request_id)
        except FfsError:
            raise
        except OSError as error:
            raise self._lost(
                "no answer in time" if isinstance(error, BlockingIOError) else str(error)
            ) from error

    def _receive(self, request_id: int) -> bytes:
        while True:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise self._lost("it closed the connection")
            for kind, got_id, reply in self._decoder.feed(data):
                if kind == REPLY and got_id == request_id:
                    return reply
                raise ProtocolError(f"{format_address(self.server)} answered what wasn't asked")

    def _lost(self, reason: str) -> ConnectionLost:
        return ConnectionLost(f"connection to metadata service {format_address(self.server)}: {reason}")

    def close(self) -> None:
        """Release the descriptor. In a child of fork this says nothing to the server."""
        self._socket.close()


class ConnectionPool:
    """Idle connections, the latest used first (its thread's memory is warm). Thread-safe."""

    def __init__(self, servers: tuple[Address, ...], options: ConnectionOptions) -> None:
        self.servers = servers
        self.options = options
        self._idle: deque[Connection] = deque()
        self._preferred = 0  # index of the server that answered last
        self._closed = False

    def take(self) -> Connection:
        """An idle connection, or a new one to the preferred server. Raises as Connection does."""
        try:
            return self._idle.pop()
        except IndexError:
            return self.connect()

    def connect(self) -> Connection:
        """A new connection to the preferred server, outside the idle ones."""
        return Connection(self.servers[self._preferred % len(self.servers)], self.options)

    def give(self, connection: Connection) -> None:
        """Take back a healthy connection."""
        if self._closed or len(self._idle) >= _MAX_IDLE:
            connection.close()
        else:
            self._idle.append(connection)

    def turn_away_from(self, server: Address) -> None:
        """Prefer the next server, and drop idle connections to `server`: they are likely as broken."""
        if self.servers[self._preferred % len(self.servers)] == server:
            self._preferred = (self._preferred + 1) % len(self.servers)
        for _ in range(len(self._idle)):
            with contextlib.suppress(IndexError):
                connection = self._idle.popleft()
                if connection.server == server:
                    connection.close()
                else:
                    self._idle.append(connection)

    def demand_cluster(self, cluster: bytes) -> None:
        """From now on refuse services of another cluster."""
        self.options = replace(self.options, cluster=cluster)

    @property
    def preferred(self) -> Address:
        """The server that new connections go to."""
        return self.servers[self._preferred % len(self.servers)]

    def close(self) -> None:
        """Close what is idle; what is taken is closed when it is given back."""
        self._closed = True
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors of idle connections without a word (also in a child of fork)."""
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()

"""The control connection to one of the metadata services. docs/client.md, Connections.

One connection at a time, shared by all threads of the process (ffs.rpc.blocking combines their
requests). Nothing here retries: `ffs.client.caller` decides.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from ffs.errors import ConnectionLost, FfsError, Unauthenticated, Unreachable
from ffs.proto.common import Message
from ffs.rpc.address import Address, format_address
from ffs.rpc.blocking import BlockingConnection
from ffs.rpc.codec import decode_message
from ffs.rpc.handshake import AskerHandshake, Credential


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """What each connection of a client is made with. Times in seconds."""

    secret: Credential | None = None
    name: str = ""
    connect_timeout_s: float = 3.0
    reply_timeout_s: float = 10.0
    """After which an unanswered request is sent again, to another service if there is one."""


class Link:
    """A connection to the service that is preferred now, made when it is needed. Thread-safe."""

    def __init__(self, servers: tuple[Address, ...], cluster: bytes, options: ConnectionOptions) -> None:
        """`cluster` b"" takes the first service's id, and holds all others to it. Doesn't connect."""
        self.servers = servers
        self.cluster = cluster
        self.options = options
        self._lock = threading.Lock()
        self._at = 0
        self._connection: BlockingConnection | None = None
        self._closed = False

    def exchange(self, body: bytes, reply_timeout_s: float | None = None) -> Message:
        """Send one request and wait for its reply, which may be an ErrorReply. Blocking.

        `reply_timeout_s`: how long; None: as the options say.

        Raises Unreachable (it wasn't sent); ConnectionLost, DeadlineExceeded, ShutDown (perhaps it was);
        WrongCluster, Unauthenticated, VersionMismatch, ProtocolError.
        """
        connection = self._connection
        if connection is None or connection.lost is not None:
            connection = self.connect()
        timeout_s = self.options.reply_timeout_s if reply_timeout_s is None else reply_timeout_s
        bodies = connection.exchange((body,), time.monotonic() + timeout_s)
        return decode_message(bodies[0])

    def connect(self) -> BlockingConnection:
        """The connection, made if there is none. Blocking, at most the connect timeout."""
        with self._lock:
            connection = self._connection
            if connection is not None and connection.lost is None:
                return connection
            if self._closed:
                raise Unreachable("this client is closed")
            options = self.options
            shake = AskerHandshake(
                role="client", cluster=self.cluster, secret=options.secret, name=options.name
            )
            connection = BlockingConnection(self.servers[self._at], shake, options.connect_timeout_s)
            self.cluster = connection.cluster
            self._connection = connection
            if self._closed:  # meanwhile, by who found none to close
                self._connection = None
                connection.close()
                raise Unreachable("this client is closed")
            return connection

    def connect_any(self) -> None:
        """Connect to some service; each is tried once. Blocking.

        Raises Unreachable, naming all that failed, or what the only service refused us with; Unauthenticated
        if each refused us so.
        """
        failures: list[str] = []
        refused = 0
        for _ in self.servers:
            at = self._at
            try:
                self.connect()
                return
            except (Unreachable, ConnectionLost) as error:
                failures.append(error.message)
            except FfsError as error:
                if len(self.servers) == 1:
                    raise
                refused += isinstance(error, Unauthenticated)
                failures.append(f"{format_address(self.servers[at])}: {error.message}")
            self.turn_from(at)
        kind = Unauthenticated if refused == len(self.servers) else Unreachable
        raise kind("; ".join(failures))

    @property
    def at(self) -> int:
        """The index of the preferred service: for `turn_from`."""
        return self._at

    def turn_from(self, at: int) -> None:
        """Go on to the next service, unless another thread already did."""
        with self._lock:
            if self._at != at or len(self.servers) == 1:
                return
            self._at = (at + 1) % len(self.servers)
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """End the connection; who waits gets ShutDown. Repeatable."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abandon(self) -> None:
        """In a child of fork: close the inherited descriptor without a word to the server."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.forget()

"""What a client is in one process: connections, routing, session. docs/client.md, Fork.

A `Client` holds one core and gets a fresh one in a child of fork. Thread-safe.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ffs.client.address import ClusterAddress
from ffs.client.caller import Caller
from ffs.client.connection import ConnectionOptions, Link
from ffs.client.retry import Policy
from ffs.client.routing import Routing
from ffs.client.session import Renewer, Session, open_session
from ffs.client.watch import Watch
from ffs.errors import ConnectionLost, DeadlineExceeded, Fenced, ShutDown, Unreachable
from ffs.proto import meta
from ffs.proto.common import Creds, Message
from ffs.rpc.handshake import Credential

if TYPE_CHECKING:
    from ffs.client.ahead import Ahead

M = TypeVar("M", bound=Message)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client behaves. The same for all processes that a client or file is pickled to."""

    transport: str = "auto"
    """How data travels: "auto" (local where both ends share a host, else rdma where both have it, else tcp),
    or one of "tcp", "local", "rdma"."""
    secret: Credential | None = field(default=None, repr=False)
    """The cluster secret, or a user's token, where the cluster wants one."""
    connect_timeout_s: float = 3.0
    """Of one connection to a metadata service."""
    request_timeout_s: float = 30.0
    """After which a request that finds no answer raises; it is retried until then."""
    session_ttl_ms: int = 30_000
    """How long a session lives without renewal, 1 s to 10 min."""
    checksum: bool = True
    """Whether data is checked from end to end."""
    unavailable_timeout_ms: int = 3000
    """After which data requests of a chain that is down raise ChainUnavailable."""
    hedge_percent: int = 5
    """Reads that may be sent to a second replica when they are late, in a hundred; 0: none."""
    tcp_congestion: str | None = None
    """Congestion control of data connections (docs/ring.md, Connections); None: cubic where it is allowed."""
    rdma: str | None = None
    """Devices for RDMA: "NAME[:PORT[:GID INDEX]]" with commas between them, None: all, "off": none."""
    rdma_traffic_class: int = 0
    """Of what goes out over RDMA, 0 to 255: DSCP << 2 (docs/rdma.md)."""


class Core:
    """Connections, routing and session of one client in one process."""

    def __init__(self, address: ClusterAddress, options: ClientOptions) -> None:
        """Makes no connection."""
        self.options = options
        label = f"{socket.gethostname()} {os.path.basename(sys.argv[0] or 'python')} {os.getpid()}"
        self._label = label
        self.link = Link(
            address.servers,
            address.cluster,
            ConnectionOptions(
                secret=options.secret,
                name=label,
                connect_timeout_s=options.connect_timeout_s,
                reply_timeout_s=min(10.0, options.request_timeout_s),
            ),
        )
        self.caller = Caller(self.link, Policy(deadline_s=options.request_timeout_s))
        self.routing = Routing(self.caller)
        self.watch = Watch(address.servers, self.routing, self.link.options)
        self.creds = Creds(os.geteuid(), os.getegid(), tuple(os.getgroups()))
        self.umask = read_umask()
        self.closed = False
        self.readers: dict[int, Ahead] = {}
        """Who holds data that was read ahead (handle.py)."""
        self._away_until = 0.0
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._renewer: Renewer | None = None

    def greet(self) -> bytes:
        """Connect to some metadata service and return the cluster's id. Blocking.

        Each service is tried once. Raises Unreachable that names all of them, or what the only service
        refused us with (WrongCluster, Unauthenticated, VersionMismatch).
        """
        try:
            self.link.connect_any()
        except Unreachable as error:
            raise Unreachable(
                f"{error.message}. Is the cluster up (`ffs up`), and the address right (FFS_CLUSTER)?"
            ) from error
        return self.link.cluster

    # --- requests ---------------------------------------------------------------------------

    def ask(self, request: meta.Request, reply: type[M], policy: Policy | None = None) -> M:
        """Carry out a request that changes nothing. Blocking; raises as Caller.call."""
        if self.closed:
            raise ShutDown(_CLOSED)
        request.creds = self.creds
        return self.caller.call(request, reply, policy=policy)

    def ask_if_there(self, request: meta.Request, reply: type[M]) -> M | None:
        """`ask` for what one can do without: None if no metadata service answers soon, and at once for a
        while after that. Blocking, a few seconds at most."""
        if time.monotonic() < self._away_until:
            return None
        try:
            return self.ask(request, reply, _SOON)
        except (Unreachable, ConnectionLost, DeadlineExceeded) as error:
            self._away_until = time.monotonic() + _AWAY_S
            _log.info("no metadata service answers: %s", error)
            return None

    def change(self, request: meta.Request, reply: type[M]) -> M:
        """Carry out a mutation that no open file is part of, under a new session if ours is over."""
        return self.change_under_session(request, reply)[1]

    def change_under_session(self, request: meta.Request, reply: type[M]) -> tuple[Session, M]:
        """`change`, with the session under which it was done."""
        for _ in range(3):
            session = self.session()
            try:
                return session, session.call(request, reply)
            except Fenced:
                continue
        session = self.session()
        return session, session.call(request, reply)

    def session(self) -> Session:
        """The session, opened on first use and when the last is over. Blocking then."""
        session = self._session
        if session is not None and not session.over:
            return session
        with self._lock:
            if self.closed:
                raise ShutDown(_CLOSED)
            if self._session is None or self._session.over:
                old, self._session = self._session, None
                if self._renewer is not None:
                    self._renewer.stop()
                if old is not None:
                    old.close()
                self._session = open_session(
                    self.caller,
                    self.routing,
                    self.watch,
                    self.creds,
                    self._label,
                    self.options.session_ttl_ms,
                    self._native_options(),
                )
                self._renewer = Renewer(self._session)
                self._renewer.start()
            return self._session

    def _native_options(self) -> dict[str, Any]:
        options = self.options
        return {
            "transport": options.transport,
            "request_timeout_ms": int(options.request_timeout_s * 1000),
            "checksum": options.checksum,
            "unavailable_timeout_ms": options.unavailable_timeout_ms,
            "hedge_percent": options.hedge_percent,
            "tcp_congestion": options.tcp_congestion,
            "rdma": options.rdma,
            "rdma_traffic_class": options.rdma_traffic_class,
        }

    def changed(self, ino: int | None) -> None:
        """A file's content was changed, or may have been (None: of any): what this process has read ahead of
        it is old. Any thread."""
        if self.readers:
            for ahead in list(self.readers.values()):
                if ino is None or ahead.ino == ino:
                    ahead.changed()

    # --- ending -------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session and close the connections. Repeatable. Blocking, bounded."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            if self._renewer is not None:
                self._renewer.stop()
            if self._session is not None:
                self._session.close()
            self.watch.close()
            self.link.close()

    def abandon(self) -> None:
        """In a child of fork: let go of the parent's descriptors without a word to any server."""
        self.closed = True
        if self._session is not None:
            self._session.abandon()
        self.watch.abandon()
        self.link.abandon()


_SOON = Policy(deadline_s=3.0, reply_timeout_s=3.0)
_AWAY_S = 5.0

_CLOSED = "the client is closed; connect again"


def read_umask() -> int:
    """This process's umask, without changing it (os.umask would, for all threads)."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    return 0o022

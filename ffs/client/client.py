"""`Client`: what `ffs.connect` returns. docs/client.md, Connecting.

A client belongs to no thread and to no process: a child of fork that inherits it, or a process
that it is pickled to, gets connections and a session of its own on first use.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ffs import errors
from ffs.client.address import ClusterAddress, resolve_address
from ffs.client.core import ClientOptions, Core
from ffs.client.dropped import hand_over, settle, watch
from ffs.client.files import FileCalls
from ffs.client.quota import QuotaCalls
from ffs.client.unraisable import tell
from ffs.client.xattr import XattrCalls
from ffs.proto.auth import Token, parse_token
from ffs.proto.cluster import GetStatus, StatusReply
from ffs.rpc.congestion import check_congestion
from ffs.rpc.handshake import Credential
from ffs.rpc.secret_file import environment_credential, environment_origin, read_secret, secret_origin

if TYPE_CHECKING:
    from ffs._native.ring import NativeClient

_TRANSPORTS = ("auto", "tcp", "local", "rdma")


class Client(FileCalls, QuotaCalls, XattrCalls):
    """A cluster, as one process sees it: names, files, KV spaces. Thread-safe.

    Use it as a context manager, or close it; files that are still open are closed with it.
    """

    def __init__(self, address: ClusterAddress, options: ClientOptions) -> None:
        """Made by `connect`; makes no connection yet."""
        self._key = (address, options)
        self._token = os.urandom(16)  # by which a pickle finds its way back to this object
        self._address = address
        self._options = options
        self._core: Core | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._files: weakref.WeakSet[Any] = weakref.WeakSet()
        watch()
        self._device = 0
        _clients.add(self)

    def __repr__(self) -> str:
        return f"<ffs.Client {self._address}{' closed' if self._closed else ''}>"

    @property
    def address(self) -> str:
        """Where the metadata services are: what `connect` took."""
        return str(self._address)

    @property
    def closed(self) -> bool:
        """Whether `close` was called in this process."""
        return self._closed

    @property
    def core(self) -> Core:
        """Connections, routing and session of this process."""
        core = self._core
        return core if core is not None else self._make_core()

    def core_of_process(self) -> Core:
        """`core`, as a function."""
        core = self._core
        return core if core is not None else self._make_core()

    def _make_core(self) -> Core:
        with self._lock:
            if self._closed:
                raise errors.ShutDown(f"the client of {self._address} is closed; connect again")
            if self._core is None:
                core = Core(self._address, self._options)
                cluster = core.greet()
                if self._address.cluster == b"":
                    # From now on another cluster at this address is refused.
                    self._address = ClusterAddress(self._address.servers, cluster)
                    self._device = zlib.crc32(cluster)
                self._core = core
            return self._core

    @property
    def cluster(self) -> bytes:
        """The cluster's id, 16 bytes."""
        self._make_core()
        return self._address.cluster

    @property
    def device(self) -> int:
        """st_dev of everything in this cluster: the same in all clients."""
        return self._device

    def cluster_status(self) -> StatusReply:
        """Nodes, devices, chains and tables, as the manager knows them. Blocking."""
        return self.core.caller.call(GetStatus(), StatusReply)

    # --- for rings --------------------------------------------------------------------------

    @property
    def native(self) -> NativeClient:
        """The native client of this process's session: for rings of one's own. Blocking on first use."""
        return self.core.session().native

    @property
    def session_id(self) -> int:
        """The id of this process's session. Blocking on first use."""
        return self.core.session().client_id

    def refresh_routing(self) -> bool:
        """Fetch newer routing for the native client, in one attempt; False if none came. Blocking."""
        return self.core.session().refresh_routing()

    def want_routing(self) -> None:
        """Requests of a ring wait for newer routing: it is given to native as soon as there is some."""
        self.core.session().want_routing()

    def want_renewal(self, native_id: int) -> None:
        """Requests of a ring wait for a capability: it is renewed in the background."""
        self.core.session().want_renewal(native_id)

    def describe_chain(self, chain: int) -> str:
        """A chain's members and their states, as far as this client knows."""
        return self.core.routing.describe_chain(chain)

    def describe_target(self, target: int) -> str:
        """A target's server and its address, as far as this client knows."""
        return self.core.routing.describe_target(target)

    def renew_capability(self, native_id: int) -> None:
        """Renew a capability now, under the same native id. Blocking; raises if it is refused."""
        self.core.session().renew_capability(native_id)

    # --- ending -----------------------------------------------------------------------------

    def _opened(self, top: Any) -> None:
        self._files.add(top)

    def close(self) -> None:
        """Close the files that are open, end the session, close the connections. Repeatable. Blocking.

        Raises the first error of a file that can't be closed, after all else is done.
        """
        if self._closed:
            return
        failure: OSError | None = None
        settle()
        for file in list(self._files):
            try:
                if not file.closed:
                    file.close()
            except OSError as error:
                if failure is None:
                    failure = error
                else:
                    failure.add_note(f"and: {error}")
            except ValueError:
                continue  # detached: its layers are somebody else's
        with self._lock:
            self._closed = True
            core, self._core = self._core, None
        if core is not None:
            core.close()
        _forget(self)
        if failure is not None:
            raise failure

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not self._closed:
            warnings.warn(f"unclosed client {self!r}", ResourceWarning, stacklevel=2, source=self)
            self._closed = True
            if not hand_over(core.close, late=True):
                core.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (*self._key, self._token)

    def _after_fork_in_child(self) -> None:
        """Locks may be held by threads that don't exist here: everything is made anew."""
        self._lock = threading.RLock()
        core, self._core = self._core, None
        if core is not None:
            core.abandon()
        for file in list(self._files):
            with contextlib.suppress(ValueError):  # detached
                raw = getattr(file, "raw_file", file)
                raw.after_fork_in_child()


def connect(
    address: str | None = None,
    *,
    transport: str = "auto",
    secret: bytes | str | os.PathLike[str] | None = None,
    token: str | None = None,
    connect_timeout: float = 3.0,
    request_timeout: float = 30.0,
    session_ttl: float = 30.0,
    checksum: bool = True,
    unavailable_timeout: float = 3.0,
    hedge_percent: int = 5,
    tcp_congestion: str | None = None,
    rdma: str | None = None,
    rdma_traffic_class: int = 0,
) -> Client:
    """Connect to a cluster. Blocking until a metadata service has answered, or all have failed.

    address: "host:port[,host:port...]" of the metadata services, perhaps with "ffs://" before it and
    "?cluster=<hex id>" after it; None takes FFS_CLUSTER. transport: "auto", "tcp", "local" or "rdma" (a
    request raises where that can't be had). secret: the cluster secret (bytes), or the path of its file;
    token: a user's token, instead. Neither: what the file says that FFS_TOKEN_FILE, or else
    FFS_CLUSTER_SECRET_FILE names, if one is set. Times in seconds;
    session_ttl is how long what this client has open for writing outlives it. checksum: check data from end
    to end. unavailable_timeout: data requests of a chain that has no replica for so long raise
    ChainUnavailable. hedge_percent: how many late reads in a hundred may go to a second replica (0: none).
    tcp_congestion: the congestion control of data connections over TCP (docs/ring.md, Connections).
    rdma: the devices to use for RDMA, "NAME[:PORT[:GID INDEX]]" with commas between them, or "off";
    rdma_traffic_class: of what goes out over them, DSCP << 2 (docs/rdma.md).

    Raises Unreachable (nobody answers; all that was tried is named), WrongCluster, Unauthenticated,
    InvalidArgument (the address or an option is wrong). docs/client.md, Connecting.
    """
    options = _options(transport, secret, connect_timeout, request_timeout, session_ttl, checksum)
    options = _with_data_options(options, unavailable_timeout, hedge_percent)
    if tcp_congestion is not None:
        check_congestion(tcp_congestion)
        options = replace(options, tcp_congestion=tcp_congestion)
    if not 0 <= rdma_traffic_class <= 255:
        raise errors.InvalidArgument(f"rdma_traffic_class {rdma_traffic_class}: give 0 to 255")
    options = replace(options, rdma=rdma, rdma_traffic_class=rdma_traffic_class)
    if token is not None:
        if secret is not None:
            raise errors.InvalidArgument("both a secret and a token: give one of them")
        options = replace(options, secret=_token_itself(token))
    client = Client(resolve_address(address), options)
    origin = "the token given as token=" if token is not None else _origin(secret)
    try:
        with _saying(origin):
            client.core  # noqa: B018 - connects
    except BaseException:
        client._closed = True
        raise
    return client


def _token_itself(token: str) -> Token:
    try:
        return parse_token(token)
    except errors.InvalidArgument as error:
        error.strerror = (
            f"{error.message}. token= takes the token itself: for a file's, give its content"
            ' (Path("alice.token").read_text()) or name it in FFS_TOKEN_FILE'
        )
        raise


def _origin(secret: bytes | str | os.PathLike[str] | None) -> str:
    return environment_origin() if secret is None else secret_origin(secret)


@contextlib.contextmanager
def _saying(origin: str) -> Iterator[None]:
    """Whoever is refused hears which secret or token that was with."""
    try:
        yield
    except errors.Unauthenticated as error:
        if origin:
            error.strerror = f"{error.message} (asked with {origin})"
        raise


def _options(
    transport: str,
    secret: bytes | str | os.PathLike[str] | None,
    connect_timeout: float,
    request_timeout: float,
    session_ttl: float,
    checksum: bool,
) -> ClientOptions:
    if transport not in _TRANSPORTS:
        raise errors.InvalidArgument(f"transport {transport!r}: give one of {', '.join(_TRANSPORTS)}")
    for name, value, least, most in (
        ("connect_timeout", connect_timeout, 0.001, 3600.0),
        ("request_timeout", request_timeout, 0.001, 86400.0),
        ("session_ttl", session_ttl, 1.0, 600.0),
    ):
        if not least <= value <= most:
            raise errors.InvalidArgument(f"{name} {value}: give {least:g} to {most:g} seconds")
    proved: Credential | None
    if secret is None:
        proved = environment_credential()
    elif isinstance(secret, bytes):
        proved = secret
    else:
        proved = read_secret(os.fspath(secret))
    return ClientOptions(
        transport=transport,
        secret=proved,
        connect_timeout_s=connect_timeout,
        request_timeout_s=request_timeout,
        session_ttl_ms=int(session_ttl * 1000),
        checksum=checksum,
    )


def _with_data_options(
    options: ClientOptions, unavailable_timeout: float, hedge_percent: int
) -> ClientOptions:
    if not 0.001 <= unavailable_timeout <= 86400.0:
        raise errors.InvalidArgument(
            f"unavailable_timeout {unavailable_timeout}: give 0.001 to 86400 seconds"
        )
    if isinstance(hedge_percent, bool) or not isinstance(hedge_percent, int) or not 0 <= hedge_percent <= 100:
        raise errors.InvalidArgument(f"hedge_percent {hedge_percent!r}: give 0 to 100")
    return replace(
        options, unavailable_timeout_ms=int(unavailable_timeout * 1000), hedge_percent=hedge_percent
    )


# --- the clients of this process ----------------------------------------------------------------

_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_shared: dict[tuple[ClusterAddress, ClientOptions], Client] = {}
_shared_lock = threading.Lock()


def default_client() -> Client:
    """The client of FFS_CLUSTER that this process shares: what `ffs.open` uses. Blocking at first."""
    client = _client_for(resolve_address(None), ClientOptions(secret=environment_credential()))
    with _saying(environment_origin()):
        client.core  # noqa: B018 - connects
    return client


def _client_for(address: ClusterAddress, options: ClientOptions) -> Client:
    """The client that this process shares for an address and options; kept until it is closed."""
    with _shared_lock:
        key = (address, options)
        client = _shared.get(key)
        if client is None:
            client = _shared[key] = Client(address, options)
        return client


def _unpickle(address: ClusterAddress, options: ClientOptions, token: bytes) -> Client:
    for client in list(_clients):
        if client._token == token and not client._closed:
            return client  # pickled in this process, or in the parent that it was forked from
    return _client_for(address, options)


def _forget(client: Client) -> None:
    with _shared_lock:
        for key in [key for key, shared in _shared.items() if shared is client]:
            del _shared[key]


def _close_all() -> None:
    """At the end of the process: what is open for writing is flushed and closed, as files of io are."""
    for client in list(_clients):
        if not client._closed:
            try:
                client.close()
            except OSError as error:  # nobody is left to raise it to, but it is told
                tell(error)


def _after_fork_in_child() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    for client in list(_clients):
        client._after_fork_in_child()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)

"""The serving side of control connections: an asyncio Protocol. docs/control_plane.md, Server.

All requests that one read brings are parsed and answered together, by one write. A request that
the service can answer at once (`Service.handle_now`) costs no task; any other one runs as a task
of the server's own group, and what finishes in one turn of the loop is written together. A peer
that doesn't read its replies, or has too many requests open, isn't read from until it does.

One event loop, its thread only. Nothing here blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from ffs.errors import FfsError, InvalidArgument, ProtocolError, Unreachable, error_of
from ffs.proto.common import Message, error_reply
from ffs.rpc.address import Address, format_address, is_loopback
from ffs.rpc.codec import decode_message, encode_reply
from ffs.rpc.frame import CANCEL, REQUEST, FrameDecoder
from ffs.rpc.handshake import Grant, Peer, ServerHandshake

log = logging.getLogger("ffs.rpc")

MAX_OPEN_REQUESTS: Final = 4096  # a connection
HANDSHAKE_TIMEOUT_S: Final = 10.0


class Service(Protocol):
    """What a server serves. Both may raise OSError: the peer gets it as an error of the same class."""

    def handle_now(self, peer: Peer, request: Message) -> Message | None:
        """The reply if it takes no waiting, else None. Must not block."""

    async def handle(self, peer: Peer, request: Message) -> Message:
        """The reply, in the end. Cancelled only for requests that `cancellable` says so of."""

    def cancellable(self, request: Message) -> bool:
        """May the work on it be dropped when the asker gives up or its connection goes (a long poll)?"""


class _Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._handshake: ServerHandshake | None = ServerHandshake(
            cluster=server.cluster, secret=server.secret, name=server.name, users=server.users
        )
        self._peer: Peer | None = None
        self._out: list[bytes] = []  # replies of tasks, written at the end of this turn of the loop
        self._tasks: dict[int, tuple[asyncio.Task[None], bool]] = {}
        self._paused = 0  # reasons not to read
        self._timer: asyncio.TimerHandle | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server._connections.add(self)
        if self._server._stopping:  # accepted in the moment of the end: nobody else would close it
            cast(asyncio.Transport, transport).abort()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HANDSHAKE_TIMEOUT_S, self._handshake_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server._connections.discard(self)
        self._transport = None
        self._out.clear()
        if self._timer is not None:
            self._timer.cancel()
        for task, cancellable in list(self._tasks.values()):
            if cancellable:
                task.cancel()

    def pause_writing(self) -> None:
        self._pause()

    def resume_writing(self) -> None:
        self._resume()

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._decoder.feed(data)
        except ProtocolError as error:
            self._refuse(0, error)
            return
        replies: list[bytes] = []
        handle_now = self._server.service.handle_now
        for kind, request_id, body in frames:
            if kind != REQUEST:
                if kind == CANCEL:
                    self._cancel(request_id)
                    continue
                self._refuse(request_id, ProtocolError(f"frame of kind {kind} from an asker"))
                return
            try:
                request = decode_message(body)
                peer = self._peer
                if peer is None:
                    reply = self._greet(body, request)
                else:
                    now = handle_now(peer, request)
                    if now is None:
                        self._start(peer, request_id, request)
                        continue
                    reply = now
            except OSError as error:
                if self._peer is None:
                    self._refuse(request_id, error)
                    return
                reply = error_reply(error)
            except Exception as error:
                reply = error_reply(_internal(error))
            replies.append(encode_reply(request_id, reply))
        if replies and self._transport is not None:
            self._transport.write(replies[0] if len(replies) == 1 else b"".join(replies))

    # inside

    def _greet(self, body: bytes, request: Message) -> Message:
        handshake = self._handshake
        assert handshake is not None
        reply = handshake.receive(body, request)
        if handshake.peer is not None:
            self._peer = handshake.peer
            self._handshake = None
            if self._timer is not None:
                self._timer.cancel()
        return reply

    def _handshake_late(self) -> None:
        if self._peer is None and self._transport is not None:
            self._transport.abort()

    def _refuse(self, request_id: int, error: OSError) -> None:
        """Says why and closes: nothing more of this peer is read."""
        if self._transport is None:
            return
        log.warning("connection of %s refused: %s", self._transport.get_extra_info("peername"), error)
        self._transport.write(encode_reply(request_id, error_reply(error)))
        self._transport.close()

    def _start(self, peer: Peer, request_id: int, request: Message) -> None:
        if request_id in self._tasks:
            raise ProtocolError(f"request id {request_id} is in use on this connection")
        cancellable = self._server.service.cancellable(request)
        task = self._server._group.create_task(self._run(peer, request_id, request))
        self._tasks[request_id] = (task, cancellable)
        self._server._running.add(task)  # it may outlast this connection
        task.add_done_callback(lambda done: self._ended(request_id, done))
        if len(self._tasks) == MAX_OPEN_REQUESTS:
            self._pause()

    def _ended(self, request_id: int, task: asyncio.Task[None]) -> None:
        """Also for a task that was cancelled before it ran."""
        if len(self._tasks) == MAX_OPEN_REQUESTS:
            self._resume()
        del self._tasks[request_id]
        self._server._running.discard(task)

    async def _run(self, peer: Peer, request_id: int, request: Message) -> None:
        """Never raises but CancelledError: one request must not end the others."""
        try:
            reply = encode_reply(request_id, await self._server.service.handle(peer, request))
        except OSError as error:
            reply = encode_reply(request_id, error_reply(error))
        except Exception as error:
            reply = encode_reply(request_id, error_reply(_internal(error)))
        if self._transport is None:
            return
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(reply)

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _cancel(self, request_id: int) -> None:
        task, cancellable = self._tasks.get(request_id, (None, False))
        if task is not None and cancellable:
            task.cancel()

    def _pause(self) -> None:
        self._paused += 1
        if self._paused == 1 and self._transport is not None:
            self._transport.pause_reading()

    def _resume(self) -> None:
        self._paused -= 1
        if self._paused == 0 and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


def _internal(error: Exception) -> FfsError:
    log.error("a request failed by an error of this program", exc_info=error)
    return FfsError(f"internal error of the server: {type(error).__name__}: {error}")


class Server:
    """Listens and serves until stopped. `async with Server(...) as server:` then `server.address`.

    Raises at entry: InvalidArgument (no secret and not loopback), Unreachable-like OSError when the
    address can't be bound. Leaving the block stops listening, ends connections and running requests.
    """

    def __init__(
        self,
        service: Service,
        listen: Address,
        *,
        cluster: bytes,
        secret: bytes | None,
        name: str,
        users: Callable[[bytes], Grant | None] | None = None,
    ) -> None:
        if secret is None and not is_loopback(listen[0]):
            raise InvalidArgument(
                f"{format_address(listen)} can be reached from other machines: "
                "give a cluster secret file, or listen on 127.0.0.1"
            )
        self.service = service
        self.cluster = cluster
        self.secret = secret
        self.users = users  # ffs.rpc.handshake.ServerHandshake
        self.name = name
        self._listen = listen
        self._connections: set[_Connection] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._server: asyncio.Server | None = None
        self._group: Any = asyncio.TaskGroup()

    @property
    def address(self) -> Address:
        """Where it listens; the port that was chosen for port 0."""
        assert self._server is not None
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    async def __aenter__(self) -> Server:
        loop = asyncio.get_running_loop()
        host, port = self._listen
        try:
            self._server = await loop.create_server(
                lambda: _Connection(self), host, port, backlog=1024, reuse_address=True
            )
        except OSError as error:
            if error.errno is None or error.errno < 0:  # a name that doesn't resolve
                raise Unreachable(f"can't listen on {format_address(self._listen)}: {error}") from None
            raise error_of(
                error.errno, f"can't listen on {format_address(self._listen)}: {error.strerror}"
            ) from None
        try:
            await self._group.__aenter__()
        except BaseException:
            self._server.close()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._stopping = True
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            if connection._transport is not None:
                connection._transport.close()
        for task in list(self._running):
            task.cancel()
        await self._group.__aexit__(None, None, None)

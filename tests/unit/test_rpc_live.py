"""Server and both askers over real sockets: many in flight, loss, failover, fork, bad peers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ffs.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    FfsError,
    InvalidArgument,
    NotFound,
    NotPrimary,
    OutcomeUnknown,
    ProtocolError,
    Unauthenticated,
    Unreachable,
    WrongCluster,
)
from ffs.proto.cluster import GetRouting, Ping, RoutingReply
from ffs.proto.common import Message, OkReply
from ffs.proto.meta import MkDir, Stat, StatMany
from ffs.rpc import caller as caller_module
from ffs.rpc import frame
from ffs.rpc import pool as pool_module
from ffs.rpc.aio import Connection
from ffs.rpc.caller import Caller
from ffs.rpc.codec import encode_message, result_of
from ffs.rpc.handshake import AskerHandshake, Peer
from ffs.rpc.pool import Pool
from ffs.rpc.server import Server

CLUSTER = b"c" * 16
SECRET = b"s" * 32


class Echo:
    """Ping: at once. GetRouting: after wait_ms. MkDir: a task. Stat: an error. StatMany: a fault."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.seen: list[Message] = []
        self.primary = True
        self.hung = False

    def handle_now(self, peer: Peer, request: Message) -> Message | None:
        self.seen.append(request)
        if not self.primary:
            raise NotPrimary("not me")
        if isinstance(request, Ping):
            return request
        if isinstance(request, Stat):
            raise NotFound("no such file", "/x")
        if isinstance(request, StatMany):
            raise ZeroDivisionError("a fault of the service")
        return None

    async def handle(self, peer: Peer, request: Message) -> Message:
        if isinstance(request, GetRouting):
            try:
                await asyncio.sleep(3600 if self.hung else request.wait_ms / 1000)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return RoutingReply(epoch=request.known_epoch, changed=False)
        await asyncio.sleep(3600 if self.hung else 0)
        return OkReply()

    def cancellable(self, request: Message) -> bool:
        return isinstance(request, GetRouting)


class Running:
    """A server on a thread of its own."""

    def __init__(self, secret: bytes | None = None, port: int = 0, cluster: bytes = CLUSTER) -> None:
        self.service = Echo()
        self.address = ("127.0.0.1", port)
        self._secret = secret
        self._cluster = cluster
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._started.wait(10)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with Server(
            self.service, self.address, cluster=self._cluster, secret=self._secret, name="echo"
        ) as server:
            self.server = server
            self.address = server.address
            self._started.set()
            await self._stop.wait()

    @property
    def connections(self) -> int:
        return len(self.server._connections)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
            assert not self._thread.is_alive()


@pytest.fixture
def echo() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


def until(condition) -> None:  # type: ignore[no-untyped-def]
    """Waits for what must come to be; the limit is only for a broken program."""
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_threads_share_one_connection(echo: Running) -> None:
    with Pool([echo.address]) as pool:
        wrong = []

        def work(number: int) -> None:
            for count in range(200):
                payload = b"%d/%d" % (number, count)
                if pool.call(Ping(payload=payload)) != Ping(payload=payload):
                    wrong.append(payload)
                if count % 10 == 0:
                    many = pool.call_many([Ping(payload=b"%d" % at) for at in range(7)])
                    if [reply.payload for reply in many] != [b"%d" % at for at in range(7)]:  # type: ignore[union-attr]
                        wrong.append(payload)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert echo.connections == 1


def test_errors_and_faults(echo: Running) -> None:
    with Pool([echo.address]) as pool:
        with pytest.raises(NotFound) as caught:
            pool.call(Stat(path=b"/x"))
        assert caught.value.filename == "/x"
        with pytest.raises(FfsError, match="internal error of the server: ZeroDivisionError"):
            pool.call(StatMany(paths=()))
        replies = pool.call_many([Ping(), Stat(path=b"/x"), MkDir(path=b"/y")])
        assert [type(reply) for reply in replies] == [Ping, NotFound, OkReply]


def test_batches_larger_than_a_window(echo: Running) -> None:
    with Pool([echo.address]) as pool:
        replies = pool.call_many([Ping(payload=bytes([at % 256]) * 3000) for at in range(3000)])
        assert [reply.payload[:1] for reply in replies] == [bytes([at % 256]) for at in range(3000)]  # type: ignore[union-attr]


def test_deadline_says_what_is_known(echo: Running) -> None:
    with Pool([echo.address]) as pool:
        pool.connect()
        with pytest.raises(DeadlineExceeded):
            pool.call(GetRouting(known_epoch=1, wait_ms=60_000), timeout_s=0.2)
        until(lambda: echo.service.cancelled == 1)  # the server was told
        assert pool.call(Ping()) == Ping()  # the connection goes on


def test_a_late_reply_to_a_mutation_is_outcome_unknown() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(listener), Pool([listener.getsockname()]) as pool:
        server = Running()
        try:
            # Hello is answered by relaying it to a real server; nothing after it is.
            def relay() -> None:
                peer, _ = listener.accept()
                with contextlib.closing(peer), socket.create_connection(server.address) as real:
                    real.sendall(peer.recv(65536))
                    peer.sendall(real.recv(65536))
                    while peer.recv(65536):
                        pass

            thread = threading.Thread(target=relay)
            thread.start()
            with pytest.raises(OutcomeUnknown):
                pool.call(MkDir(path=b"/a", client=1, slot=1, sequence=1), timeout_s=0.3)
            pool.close()
            thread.join()
        finally:
            server.stop()


def test_a_long_poll_doesnt_stop_others(echo: Running) -> None:
    with Pool([echo.address]) as pool:
        pool.connect()
        poll = threading.Thread(target=lambda: pool.call(GetRouting(known_epoch=1, wait_ms=700)))
        poll.start()
        until(lambda: any(isinstance(request, GetRouting) for request in echo.service.seen))
        for _ in range(50):
            pool.call(Ping())
        assert poll.is_alive()
        poll.join()


def test_failover_carries_the_same_bytes() -> None:
    first, second = Running(), Running()
    try:
        with Pool([first.address, second.address], timeout_s=20) as pool:
            pool.call(MkDir(path=b"/1", client=5, slot=1, sequence=1))
            first.stop()
            pool.call(MkDir(path=b"/2", client=5, slot=1, sequence=2))
            assert [request.path for request in second.service.seen] == [b"/2"]  # type: ignore[attr-defined]
    finally:
        first.stop()
        second.stop()


def test_not_primary_turns_to_the_next() -> None:
    first, second = Running(), Running()
    first.service.primary = False
    try:
        with Pool([first.address, second.address], timeout_s=20) as pool:
            assert pool.call(Ping(payload=b"x")) == Ping(payload=b"x")
            assert len(first.service.seen) == 1
            pool.call(Ping())
            assert len(first.service.seen) == 1  # it stays with the one that answers
    finally:
        first.stop()
        second.stop()


def test_a_hung_server_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped processes keep their connections open and answer nothing."""
    monkeypatch.setattr(pool_module, "TRY_S", 0.1)
    monkeypatch.setattr(caller_module, "TRY_S", 0.1)
    first, second = Running(), Running()
    slow = GetRouting(known_epoch=1)
    try:
        with Pool([first.address, second.address], timeout_s=20) as pool:
            pool.connect()
            first.service.hung = True
            assert isinstance(pool.call(MkDir(path=b"/1", client=5, slot=1, sequence=1)), OkReply)
            assert second.service.seen[-1] == first.service.seen[-1]  # the same identity

            async def ask() -> None:
                caller = Caller([first.address, second.address], lambda _: AskerHandshake(role="client"))
                assert isinstance(await caller.call(slow, 20.0), RoutingReply)
                caller.close()

            asyncio.run(ask())
    finally:
        first.stop()
        second.stop()


def test_reconnects_to_a_restarted_server() -> None:
    server = Running()
    port = server.address[1]
    with Pool([server.address], timeout_s=20) as pool:
        pool.call(Ping())
        server.stop()
        again = threading.Timer(0.3, lambda: started.append(Running(port=port)))
        started: list[Running] = []
        again.start()
        assert pool.call(Ping(payload=b"back")) == Ping(payload=b"back")
        again.join()
        started[0].stop()


def test_another_cluster_at_a_later_connection_is_refused() -> None:
    server = Running()
    port = server.address[1]
    with Pool([server.address], timeout_s=20) as pool:
        assert pool.connect() == CLUSTER
        server.stop()
        other = Running(port=port, cluster=b"d" * 16)
        try:
            with pytest.raises(WrongCluster, match=(b"d" * 16).hex()):
                pool.call(Ping())
        finally:
            other.stop()


def test_unreachable_names_the_address_and_the_way_out() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        closed = listener.getsockname()
    with Pool([closed]) as pool, pytest.raises(Unreachable, match=f"{closed[1]}.*check the address"):
        pool.connect()
    with Pool([closed, ("127.0.0.1", 1)]) as pool, pytest.raises(Unreachable, match="no metadata server"):
        pool.connect()


def test_something_else_listens_there() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            peer.recv(1000)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            peer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with Pool([listener.getsockname()]) as pool, pytest.raises(ProtocolError, match="not ffs's"):
            pool.connect()
        thread.join()


def test_garbage_is_refused_and_the_server_goes_on(echo: Running) -> None:
    with socket.create_connection(echo.address) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
        assert b"not ffs's control protocol" in peer.recv(65536)
        assert peer.recv(1) == b""
    with Pool([echo.address]) as pool:
        assert pool.call(Ping()) == Ping()


def test_odd_askers_harm_nobody(echo: Running) -> None:
    """One request id twice; a cancel that comes with its request, before it began; cancels of nothing."""
    echo.service.hung = True
    mkdir = encode_message(MkDir(path=b"/"))
    poll = encode_message(GetRouting(known_epoch=1))
    with socket.create_connection(echo.address) as peer:
        peer.sendall(frame.encode_frame(frame.REQUEST, 1, AskerHandshake(role="client").hello))
        peer.recv(65536)
        peer.sendall(
            frame.encode_frame(frame.REQUEST, 2, mkdir) * 2
            + frame.encode_frame(frame.REQUEST, 3, poll)
            + frame.encode_frame(frame.CANCEL, 3, b"")
            + frame.encode_frame(frame.CANCEL, 99, b"")
        )
        ((_, request_id, body),) = frame.FrameDecoder().feed(peer.recv(65536))
        assert request_id == 2
        with pytest.raises(ProtocolError, match="in use"):
            result_of(body)
    with Pool([echo.address]) as pool:
        assert pool.call(Ping()) == Ping()
    until(lambda: len(echo.server._running) == 1)  # the mkdir, which may not be dropped


def test_secret_is_wanted_and_given() -> None:
    server = Running(SECRET)
    try:
        with Pool([server.address], secret=SECRET) as pool:
            assert pool.call(Ping()) == Ping()
        with Pool([server.address]) as pool, pytest.raises(Unauthenticated, match="wants its secret"):
            pool.call(Ping())
        with Pool([server.address], secret=b"x" * 32) as pool, pytest.raises(Unauthenticated):
            pool.call(Ping())
    finally:
        server.stop()


def test_open_servers_listen_on_loopback_only() -> None:
    with pytest.raises(InvalidArgument, match="cluster secret file"):
        Server(Echo(), ("0.0.0.0", 0), cluster=CLUSTER, secret=None, name="x")
    Server(Echo(), ("0.0.0.0", 0), cluster=CLUSTER, secret=SECRET, name="x")


def test_port_in_use_is_named(echo: Running) -> None:
    async def second() -> None:
        async with Server(Echo(), echo.address, cluster=CLUSTER, secret=None, name="x"):
            raise AssertionError("two servers on one port")

    with pytest.raises(OSError, match=f"can't listen on 127.0.0.1:{echo.address[1]}"):
        asyncio.run(second())


def test_fork(echo: Running) -> None:
    """The child works by a connection of its own; the parent's goes on undisturbed."""
    with Pool([echo.address]) as pool:
        pool.call(Ping())
        before = pool._connection
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                if pool.call(Ping(payload=b"child")) == Ping(payload=b"child"):
                    status = 0
            os._exit(status)
        for _ in range(100):
            pool.call(Ping())
        assert os.waitpid(child, 0)[1] == 0
        assert pool._connection is before
        assert before is not None
        assert before.lost is None


def test_ten_thousand_clients_leave_nothing(echo: Running) -> None:
    """S15: one-shot clients. Fewer here than there; descriptors and server connections are back."""
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(500):
        with Pool([echo.address]) as pool:
            pool.call(Ping())
    until(lambda: echo.connections == 0)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_aio_in_flight_and_timeouts(echo: Running) -> None:
    async def main() -> None:
        asker = await Connection.open(echo.address, AskerHandshake(role="client"))
        assert asker.cluster == CLUSTER
        many = await asyncio.gather(*(asker.call(Ping(payload=b"%d" % at)) for at in range(500)))
        assert [reply.payload for reply in many] == [b"%d" % at for at in range(500)]  # type: ignore[attr-defined]
        mixed = await asker.call_many([Ping(), Stat(path=b"/x"), MkDir(path=b"/")])
        assert [type(each) for each in mixed] == [Ping, NotFound, OkReply]
        with pytest.raises(DeadlineExceeded):
            await asker.call(GetRouting(known_epoch=1, wait_ms=60_000), timeout_s=0.1)
        poll = asyncio.ensure_future(asker.call(GetRouting(known_epoch=1, wait_ms=60_000)))
        await asyncio.sleep(0.01)
        poll.cancel()
        with pytest.raises(asyncio.CancelledError):
            await poll
        assert await asker.call(Ping()) == Ping()
        lost = asyncio.ensure_future(asker.call(GetRouting(known_epoch=1, wait_ms=60_000)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(echo.stop)
        with pytest.raises((ConnectionLost, Cancelled)):
            await lost
        with pytest.raises(ConnectionLost):
            await asker.call(Ping())
        asker.close()

    asyncio.run(main())
    assert echo.service.cancelled >= 2

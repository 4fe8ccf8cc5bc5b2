"""Connecting, failover and resending, against servers that misbehave on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ffs
from ffs import errors
from ffs.client.connection import ConnectionOptions, Link
from ffs.client.core import Core
from ffs.proto import meta
from ffs.proto.common import Message, OkReply
from ffs.rpc.handshake import Peer
from ffs.rpc.server import Server

CLUSTER = bytes(range(16))
OTHER = bytes(range(1, 17))

Answer = Callable[[Message], Message | None]


class Scripted:
    """A service whose answers a test writes; None from the script ends the connection instead."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.seen: list[Message] = []
        self.server: Server | None = None

    def handle_now(self, peer: Peer, request: Message) -> Message | None:
        self.seen.append(request)
        reply = self.answer(request)
        if reply is None and self.server is not None:
            for connection in list(self.server._connections):
                if connection._transport is not None:
                    connection._transport.abort()
            return OkReply()
        return reply

    async def handle(self, peer: Peer, request: Message) -> Message:
        raise AssertionError("handle_now answers all")

    def cancellable(self, request: Message) -> bool:
        return False


@contextlib.contextmanager
def serving(
    answer: Answer, cluster: bytes = CLUSTER, secret: bytes | None = None
) -> Iterator[tuple[str, Scripted]]:
    """A scripted server on a thread of its own; its address and what it saw."""
    service = Scripted(answer)
    started = threading.Event()
    box: dict[str, object] = {}

    async def run() -> None:
        stop = asyncio.Event()
        box["stop"] = stop
        box["loop"] = asyncio.get_running_loop()
        async with Server(
            service, ("127.0.0.1", 0), cluster=cluster, secret=secret, name="scripted"
        ) as server:
            service.server = server
            box["port"] = server.address[1]
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(30)
    try:
        yield f"127.0.0.1:{box['port']}", service
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)  # type: ignore[attr-defined]
        thread.join(30)


def namespace(request: Message) -> Message | None:
    """Enough of a metadata service to carry a session and one mutation."""
    if isinstance(request, meta.SessionOpen):
        return meta.SessionOpened(client=77, ttl_ms=30_000, slots=8, cluster=CLUSTER)
    return OkReply()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nobody_there_names_the_address_and_the_way_out() -> None:
    port = free_port()
    with pytest.raises(errors.Unreachable, match=rf"127\.0\.0\.1:{port}.*ffs up.*FFS_CLUSTER") as caught:
        ffs.connect(f"127.0.0.1:{port}")
    assert isinstance(caught.value, ConnectionError)


def test_all_addresses_that_failed_are_named() -> None:
    first, second = free_port(), free_port()
    with pytest.raises(errors.Unreachable, match=rf"{first}.*{second}"):
        ffs.connect(f"127.0.0.1:{first},127.0.0.1:{second}")


def test_no_address_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FFS_CLUSTER", raising=False)
    with pytest.raises(errors.InvalidArgument, match="FFS_CLUSTER"):
        ffs.connect()
    with pytest.raises(errors.InvalidArgument, match="FFS_CLUSTER"):
        ffs.open("/a")


def test_a_server_that_says_nothing_is_unreachable() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(errors.Unreachable, match="no answer"):
            ffs.connect(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.3)


def test_a_server_of_another_kind_is_a_protocol_error() -> None:
    with socket.socket() as web:
        web.bind(("127.0.0.1", 0))
        web.listen()

        def answer() -> None:
            peer, _ = web.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
                peer.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(errors.ProtocolError, match="not ffs"):
            ffs.connect(f"127.0.0.1:{web.getsockname()[1]}")
        thread.join(30)


def test_another_cluster_is_refused() -> None:
    with serving(namespace, OTHER) as (address, _), pytest.raises(errors.WrongCluster, match=OTHER.hex()):
        ffs.connect(f"{address}?cluster={CLUSTER.hex()}")


def test_a_secret_that_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = b"s" * 32
    (tmp_path / "secret").write_bytes(secret + b"\n")
    (tmp_path / "secret").chmod(0o600)
    with serving(namespace, secret=secret) as (address, _):
        with pytest.raises(errors.Unauthenticated):
            ffs.connect(address)
        with pytest.raises(errors.Unauthenticated):
            ffs.connect(address, secret=b"t" * 32)
        with ffs.connect(address, secret=secret) as client:
            assert client.cluster == CLUSTER
        assert "sss" not in repr(client._options)
        monkeypatch.setenv("FFS_CLUSTER_SECRET_FILE", str(tmp_path / "secret"))
        with ffs.connect(address) as client:
            assert client.cluster == CLUSTER
        monkeypatch.setenv("FFS_CLUSTER_SECRET_FILE", str(tmp_path / "none"))
        with pytest.raises(FileNotFoundError, match="none"):
            ffs.connect(address)


def test_who_is_refused_hears_which_secret_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"t" * 32)
    wrong.chmod(0o600)
    with serving(namespace, secret=b"s" * 32) as (address, _):

        def refusal(**given: Any) -> str:
            with pytest.raises(errors.Unauthenticated, match="another cluster secret") as caught:
                ffs.connect(address, **given)
            assert "ttt" not in str(caught.value)
            return str(caught.value)

        assert refusal(secret=wrong).endswith(f"(asked with {wrong}, which secret= names)")
        assert refusal(secret=b"t" * 32).endswith("(asked with the bytes given as secret=)")
        assert "strip() them" in refusal(secret=b"s" * 32 + b"\n")
        with pytest.raises(errors.Unauthenticated, match="the bytes given as secret="):
            ffs.connect(f"{address},{address}", secret=b"t" * 32)
        monkeypatch.setenv("FFS_CLUSTER_SECRET_FILE", str(wrong))
        assert refusal().endswith(f"(asked with {wrong}, which FFS_CLUSTER_SECRET_FILE names)")
        monkeypatch.setenv("FFS_CLUSTER", address)
        with pytest.raises(errors.Unauthenticated, match="which FFS_CLUSTER_SECRET_FILE names"):
            ffs.open("/a")


def test_the_name_of_a_tokens_file_is_no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"takes the token itself.*FFS_TOKEN_FILE") as caught:
        ffs.connect("127.0.0.1:1", token="alice.token-of-mine")
    assert "of-mine" not in str(caught.value)  # it may be one, with a slip
    bad = tmp_path / "bad.token"
    bad.write_text("ffs1-00")
    bad.chmod(0o600)
    monkeypatch.setenv("FFS_TOKEN_FILE", str(bad))
    with pytest.raises(errors.InvalidArgument, match=r"no token of ffs.*bad\.token"):
        ffs.connect("127.0.0.1:1")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("transport", "udp"),
        ("connect_timeout", 0),
        ("request_timeout", -1),
        ("session_ttl", 0.5),
        ("session_ttl", 601),
    ],
)
def test_options_out_of_range(option: str, value: object) -> None:
    with pytest.raises(errors.InvalidArgument, match=option):
        ffs.connect("127.0.0.1:1", **{option: value})  # type: ignore[arg-type]


def test_the_next_server_takes_over_with_the_same_identity() -> None:
    """The answer of the first is lost after it acted: the second gets the same (client, slot, sequence)."""

    def lossy(request: Message) -> Message | None:
        return None if isinstance(request, meta.Unlink) else namespace(request)

    with (
        serving(lossy) as (first, seen_first),
        serving(namespace) as (second, seen_second),
        ffs.connect(f"{first},{second}") as client,
    ):
        client.unlink("/a")
        lost = [request for request in seen_first.seen if isinstance(request, meta.Unlink)]
        done = [request for request in seen_second.seen if isinstance(request, meta.Unlink)]
    assert len(lost) == len(done) == 1
    assert (lost[0].client, lost[0].slot, lost[0].sequence) == (77, 0, 1)
    assert lost[0] == done[0]


def test_an_outcome_that_stays_unknown_says_so() -> None:
    def lossy(request: Message) -> Message | None:
        return None if isinstance(request, meta.Unlink | meta.Stat) else namespace(request)

    with serving(lossy) as (address, _), ffs.connect(address, request_timeout=0.5) as client:
        with pytest.raises(errors.OutcomeUnknown):
            client.unlink("/a")
        with pytest.raises(errors.ConnectionLost):
            client.stat("/a")


def test_a_session_that_is_over_is_replaced_once_it_is_safe() -> None:
    sessions: list[int] = []

    def expiring(request: Message) -> Message | None:
        if isinstance(request, meta.SessionOpen):
            sessions.append(100 + len(sessions))
            return meta.SessionOpened(client=sessions[-1], ttl_ms=30_000, slots=8, cluster=CLUSTER)
        if isinstance(request, meta.Unlink) and request.client == 100:
            raise errors.Fenced("the session is over")
        return OkReply()

    with serving(expiring) as (address, seen), ffs.connect(address) as client:
        client.unlink("/a")
        tried = [request.client for request in seen.seen if isinstance(request, meta.Unlink)]
    assert tried == [100, 101]


def test_a_lost_answer_then_a_lost_session_is_an_unknown_outcome() -> None:
    """Sending it again under another session could do it twice."""
    count = 0

    def treacherous(request: Message) -> Message | None:
        nonlocal count
        if not isinstance(request, meta.Unlink):
            return namespace(request)
        count += 1
        if count == 1:
            return None
        raise errors.Fenced("the session is over")

    with (
        serving(treacherous) as (address, _),
        ffs.connect(address) as client,
        pytest.raises(errors.OutcomeUnknown),
    ):
        client.unlink("/a")
    assert count == 2


def test_a_busy_server_is_asked_again() -> None:
    left = 3

    def busy(request: Message) -> Message | None:
        nonlocal left
        if isinstance(request, meta.Unlink) and left:
            left -= 1
            raise errors.Overloaded("full")
        return namespace(request)

    with serving(busy) as (address, _), ffs.connect(address) as client:
        client.unlink("/a")
    assert left == 0


def test_a_closed_client_says_so() -> None:
    with serving(namespace) as (address, seen):
        client = ffs.connect(address)
        client.unlink("/a")
        client.close()
        client.close()
        assert any(isinstance(request, meta.SessionClose) for request in seen.seen)
        with pytest.raises(errors.ShutDown, match="closed"):
            client.unlink("/a")


def test_a_client_that_is_dropped_says_so() -> None:
    with serving(namespace) as (address, _):
        client = ffs.connect(address)
        with pytest.warns(ResourceWarning, match="unclosed client"):
            del client


def test_thousands_of_clients_leave_nothing_behind() -> None:
    """S15: one-shot clients leaked connections."""
    with serving(namespace) as (address, _):

        def count() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        for round_number in range(3):
            for _ in range(100):
                with ffs.connect(address) as client:
                    client.unlink("/a")
            if round_number == 0:
                before = count()
        descriptors, threads = count()
        assert descriptors <= before[0] + 2
        assert threads <= before[1] + 2


def test_the_child_of_fork_has_a_session_of_its_own() -> None:
    """S26: a child of fork hung."""
    sessions = iter(range(1, 100))

    def counting(request: Message) -> Message | None:
        if isinstance(request, meta.SessionOpen):
            return meta.SessionOpened(client=next(sessions), ttl_ms=30_000, slots=8, cluster=CLUSTER)
        return OkReply()

    with serving(counting) as (address, seen), ffs.connect(address) as client:
        client.unlink("/parent")
        core: Core = client.core
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                client.unlink("/child")
                code = 0 if client.core is not core and client.session_id == 2 else 2
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        client.unlink("/parent")
        tried = [(bytes(r.path), r.client) for r in seen.seen if isinstance(r, meta.Unlink)]
    assert tried == [(b"/parent", 1), (b"/child", 2), (b"/parent", 1)]


@pytest.mark.parametrize("how", ["hangs", "ends connections"])
def test_an_idle_client_renews_its_session_elsewhere(how: str) -> None:
    """The service that it is connected to doesn't answer renewals, and nothing else is asked: a lock would be
    lost with the session. The next service gets the renewal well before the time to live is over."""
    silent = threading.Event()

    def answer(request: Message) -> Message | None:
        if isinstance(request, meta.SessionOpen):
            return meta.SessionOpened(client=77, ttl_ms=request.ttl_ms, cluster=CLUSTER)
        if isinstance(request, meta.SessionRenew):
            return meta.SessionRenewed(ttl_ms=3000)
        return OkReply()

    def ill(request: Message) -> Message | None:
        if isinstance(request, meta.SessionRenew):
            if how == "hangs":
                silent.wait(20)  # and with it the whole service
            return None
        return answer(request)

    renewed = threading.Event()

    def well(request: Message) -> Message | None:
        if isinstance(request, meta.SessionRenew):
            renewed.set()
        return answer(request)

    with serving(ill) as (first, _), serving(well) as (second, _):
        try:
            with ffs.connect(f"{first},{second}", session_ttl=3.0) as client:
                client.core.session()
                assert renewed.wait(10)
        finally:
            silent.set()


def test_a_connection_that_is_made_while_its_link_is_closed_is_closed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S15: one client in thousands left its routing thread's connection behind."""
    made: list[Any] = []

    class Slow:
        """Connects while another thread closes the link."""

        cluster = bytes(16)
        lost = None
        closed = False

        def __init__(self, *_: Any) -> None:
            made.append(self)
            link.close()

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("ffs.client.connection.BlockingConnection", Slow)
    link = Link((("127.0.0.1", 1),), b"", ConnectionOptions())
    with pytest.raises(errors.Unreachable, match="closed"):
        link.connect()
    assert [each.closed for each in made] == [True]

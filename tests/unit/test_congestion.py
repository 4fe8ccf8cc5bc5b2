"""The congestion control of data connections, as clients and servers are given it. docs/ring.md."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import ffs
from ffs.client.core import ClientOptions, Core
from ffs.errors import InvalidArgument
from ffs.rpc.congestion import check_congestion

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()


@pytest.mark.parametrize("name", ["", "no-such?", "cubic?", ALLOWED[0]])
def test_what_may_be_given(name: str) -> None:
    check_congestion(name)


def test_what_the_kernel_lacks_is_refused_with_what_it_has() -> None:
    with pytest.raises(InvalidArgument, match=rf"'no-such'.*allows everybody {ALLOWED[0]}.*'no-such\?'"):
        ffs.connect("127.0.0.1:1", tcp_congestion="no-such")


def test_it_reaches_the_rings_client() -> None:
    given = {"tcp_congestion": "reno"}
    core = Core.__new__(Core)
    core.options = ClientOptions(**given)  # type: ignore[arg-type]
    assert core._native_options().items() >= given.items()


def test_a_server_is_told(tmp_path: Path) -> None:
    from storage_server.config import parse_config

    words = ["--metadata=h:1", f"--dir={tmp_path}", "--device=/dev/x:1G"]
    assert parse_config(words).tcp_congestion is None
    assert parse_config([*words, "--tcp-congestion=reno"]).tcp_congestion == "reno"
    with pytest.raises(InvalidArgument, match="no-such"):
        parse_config([*words, "--tcp-congestion=no-such"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set any for this test's socket")
def test_the_floors_peer_takes_a_wish() -> None:
    from ffs._native import floor

    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        with pytest.raises(FileNotFoundError):
            floor._set_congestion(listener, "no-such")
        floor._set_congestion(listener, "no-such?")
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) == before
        floor._set_congestion(listener, "reno?")
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"reno\0")

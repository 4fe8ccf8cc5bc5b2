"""A connection of threads, when a signal comes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ffs.errors import ConnectionLost
from ffs.rpc.blocking import BlockingConnection


def test_a_signal_in_a_send_gives_the_connection_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next requests would wait in a list that nobody sends, until their deadline."""

    class Interrupted:
        def sendall(self, data: Any) -> None:
            raise KeyboardInterrupt

        def shutdown(self, how: int) -> None: ...

        def close(self) -> None:
            closed.append(True)

    closed: list[bool] = []
    handshake: Any = type("Done", (), {"hello": None, "reply": type("R", (), {"cluster": b""})})
    monkeypatch.setattr("ffs.rpc.blocking._connect", lambda *_: Interrupted())
    connection = BlockingConnection(("127.0.0.1", 1), handshake, 1.0)
    with pytest.raises(KeyboardInterrupt):
        connection.exchange([b"one"], time.monotonic() + 60)
    with pytest.raises(ConnectionLost, match="interrupted"):
        connection.exchange([b"two"], time.monotonic() + 60)
    assert closed

"""`ffs flock`: the command that runs under a lock, and what becomes of it when the lock is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any, cast

import pytest

from ffs import errors
from ffs.cli import flock
from ffs.client.core import Core
from ffs.client.locks import Lock
from ffs.proto import locking, meta

# Says that it runs, and how it was told to end.
COMMAND = """
import signal, sys, time
def ended(number, _):
    print("told", number, flush=True)
    sys.exit({status})
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, ended)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def line(path: os.PathLike[str], status: int) -> list[str]:
    return [sys.executable, "-c", COMMAND.format(status=status), os.fspath(path)]


@pytest.mark.parametrize(("status", "expected"), [(0, 1), (5, 5)])
def test_a_command_whose_lock_is_lost_is_told_to_end(
    tmp_path: os.PathLike[str], capfd: pytest.CaptureFixture[str], status: int, expected: int
) -> None:
    """And isn't taken for one that went well."""
    runs = os.path.join(tmp_path, "runs")
    assert (
        flock.run_command(line(runs, status), lambda: "is gone" if os.path.exists(runs) else "", "/lock")
        == expected
    )
    said = capfd.readouterr()
    assert f"told {int(signal.SIGTERM)}" in said.out
    assert "/lock: the lock is gone, the command is told" in said.err


def test_a_command_that_keeps_its_lock_is_left_alone() -> None:
    assert flock.run_command([sys.executable, "-c", "raise SystemExit(7)"], lambda: "", "/lock") == 7
    assert flock.run_command(["/no/such/command"], lambda: "", "/lock") == flock.NOT_FOUND
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert flock.run_command([sys.executable, "-c", code], lambda: "", "/lock") == 128 + 9


@pytest.mark.parametrize("number", flock.PASSED_ON)
def test_signals_go_to_the_command(
    tmp_path: os.PathLike[str], capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """It would outlive its lock if they ended the one that holds it."""
    runs = os.path.join(tmp_path, "runs")

    def send() -> None:
        while not os.path.exists(runs):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    sender = threading.Thread(target=send)
    sender.start()
    assert flock.run_command(line(runs, 3), lambda: "", "/lock") == 3
    sender.join()
    assert signal.getsignal(number) is before
    assert f"told {int(number)}" in capfd.readouterr().out


class Service:
    """A core with a session, and the locks that the service has."""

    client_id = 7
    over = False

    def __init__(self) -> None:
        self.held: list[locking.LockHolder] = []
        self.fails: errors.FfsError | None = None
        self.options = type("Options", (), {"request_timeout_s": 30.0})

    def session(self) -> Service:
        return self

    def call(self, request: meta.Request, reply: type, undo: object = None) -> Any:
        if self.fails:
            raise self.fails
        if isinstance(request, locking.Lock):
            self.held.append(locking.LockHolder(7, request.owner, request.kind, request.exclusive, 0))
            return locking.LockReply(ino=3, granted=True, holders=[])
        self.held.clear()
        return locking.LocksReply(ino=3, holders=[])

    def ask_if_there(self, request: meta.Request, reply: type) -> locking.LocksReply:
        if self.fails:
            raise self.fails
        return locking.LocksReply(ino=3, holders=list(self.held))


def taken(service: Service) -> Lock:
    lock = Lock(lambda: cast(Core, service), 3, "/lock", b"")
    assert lock.acquire() is None
    return lock


def test_a_lock_that_others_ended_is_noticed_once_the_service_is_asked() -> None:
    service = Service()
    lock = taken(service)
    why = flock.why_lost(lock, ask_s=0)
    seldom = flock.why_lost(lock, ask_s=1000)
    assert why() == ""
    mine = service.held[0]
    # Somebody else's, and another one of this process.
    service.held = [
        locking.LockHolder(8, mine.owner, 0, True, 0),
        locking.LockHolder(7, mine.owner + 1, 0, True, 0),
    ]
    service.fails = errors.NotFound("gone")
    assert why() == ""  # nobody can tell
    service.fails = None
    assert "--break" in why()
    assert seldom() == ""
    service.over = True
    assert "session" in seldom()


def test_a_lock_that_cant_be_let_go_of_is_told_and_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    """The command has run: its status counts."""
    service = Service()
    lock = taken(service)
    service.fails = errors.Unreachable("nobody answers")
    flock._release(lock, "/lock")
    said = capfd.readouterr().err
    assert "warning: /lock" in said
    assert "nobody answers" in said

"""`ffs flock`: the command that runs under a lock, and what becomes of it when the lock is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from ffs.cli import flock

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
    assert flock.run_command(line(runs, status), lambda: os.path.exists(runs), "/lock") == expected
    said = capfd.readouterr()
    assert f"told {int(signal.SIGTERM)}" in said.out
    assert "/lock: the lock was lost" in said.err


def test_a_command_that_keeps_its_lock_is_left_alone() -> None:
    assert flock.run_command([sys.executable, "-c", "raise SystemExit(7)"], lambda: False, "/lock") == 7
    assert flock.run_command(["/no/such/command"], lambda: False, "/lock") == flock.NOT_FOUND
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert flock.run_command([sys.executable, "-c", code], lambda: False, "/lock") == 128 + 9


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
    assert flock.run_command(line(runs, 3), lambda: False, "/lock") == 3
    sender.join()
    assert signal.getsignal(number) is before
    assert f"told {int(number)}" in capfd.readouterr().out

"""`ffs flock`: run a command while a file or directory is locked, as flock(1); see and end locks."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ffs import errors
from ffs.cli.location import parse_remote
from ffs.cli.names import plain
from ffs.cli.parsing import Commands, command, connect, print_json, seconds_argument
from ffs.cli.text import table

if TYPE_CHECKING:
    from ffs.client.locks import Lock
    from ffs.proto.locking import LockHolder

NOT_FOUND = 127  # as a shell has it
SIGNALLED = 128
LOOK_S = 0.5  # how often it's looked whether the lock is still there
ASK_S = 2.0  # how often the service is asked
PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def add_commands(commands: Commands) -> None:
    flock = command(
        commands, "flock", run_flock, "run a command while a lock is held, as flock(1)", json_option=True
    )
    flock.add_argument("-s", "--shared", action="store_true", help="a shared lock, not an exclusive one")
    flock.add_argument("-n", "--nonblock", action="store_true", help="fail at once if somebody has it")
    flock.add_argument(
        "-w", "--wait", type=seconds_argument, metavar="SECONDS", help="fail if it isn't free after so long"
    )
    flock.add_argument(
        "-E", "--conflict-exit-code", type=int, default=1, metavar="N", help="of -n and -w (default: 1)"
    )
    flock.add_argument("--list", action="store_true", help="show who holds locks of it; no command")
    flock.add_argument(
        "--break",
        action="store_true",
        dest="force",
        help="end all locks of it, as its owner or root; commands of ffs flock that run under them are told "
        "to end (SIGTERM) soon after; no command",
    )
    flock.add_argument("path", metavar="PATH", help="of a file, made if it isn't there, or a directory")
    flock.add_argument("line", nargs=argparse.REMAINDER, metavar="COMMAND", help="with its arguments")


def run_flock(args: argparse.Namespace) -> int:
    from ffs.client.locks import Lock, describe_holders

    place = parse_remote(args.path)
    line = args.line[1:] if args.line[:1] == ["--"] else args.line
    if bool(line) == (args.list or args.force):
        raise errors.InvalidArgument("give a command to run, or one of --list and --break", args.path)
    with connect(args, place.address) as client:
        if args.list:
            return _show(args, client.locks(place.path))
        if args.force:
            ended = client.break_locks(place.path)
            if client.isdir(place.path):
                ended += client.break_locks(place.path, entries=True)
            return _show(args, ended)
        try:
            ino, ticket = client.ticket(place.path)
        except FileNotFoundError:
            with client.open(place.path, "ab"):  # two that come at once make one file
                ino, ticket = client.ticket(place.path)
        lock = Lock(client.core_of_process, ino, place.path, ticket)
        timeout = 0.0 if args.nonblock else None if args.wait is None else args.wait / 1000
        holders = lock.acquire(exclusive=not args.shared, timeout=timeout)
        if holders is not None:
            said = f"ffs flock: {place.path}: locked by {describe_holders(holders)}"
            print(plain(said, sys.stderr), file=sys.stderr)
            return int(args.conflict_exit_code)
        try:
            return run_command(line, why_lost(lock), place.path)
        finally:
            _release(lock, place.path)


def why_lost(lock: Lock, ask_s: float = ASK_S) -> Callable[[], str]:
    """What `run_command` asks: why the lock isn't ours any more, "" while it is. The service is asked too,
    every `ask_s` seconds: who ends locks of others doesn't tell their holders."""
    asked = time.monotonic()

    def why() -> str:
        nonlocal asked
        if lock.lost:
            return "was lost with its session"
        if time.monotonic() - asked < ask_s:
            return ""
        ended = lock.ended()
        asked = time.monotonic()
        return "was ended by somebody else (ffs flock --break)" if ended else ""

    return why


def _release(lock: Lock, path: str) -> None:
    """The command has run, and its status is what counts: a lock that can't be let go of is only told."""
    try:
        lock.release()
    except errors.FfsError as error:
        said = (
            f"ffs flock: warning: {path}: the command has ended, but its lock couldn't be let go of: it ends "
            f"with the session, a little later: {error.message}"
        )
        print(plain(said, sys.stderr), file=sys.stderr)


def run_command(line: list[str], lost: Callable[[], str], path: str) -> int:
    """Runs it to its end, and tells it to end (SIGTERM) when `lost` says why the lock is gone: others may
    have it. SIGTERM and SIGHUP go to the command, since it would outlive its lock if they ended this
    process. Returns the status that a shell gives; never 0 after the lock was lost."""
    try:
        process = subprocess.Popen(line)
    except FileNotFoundError:
        print(f"ffs flock: {line[0]}: no such command", file=sys.stderr)
        return NOT_FOUND
    over = threading.Event()
    gone = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            if why := lost():
                gone.set()
                said = f"ffs flock: {path}: the lock {why}, the command is told to end"
                print(plain(said, sys.stderr), file=sys.stderr, flush=True)
                process.terminate()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        with _passing_on(process):
            status = _wait(process)
    finally:
        over.set()
        watcher.join()
    code = status if status >= 0 else SIGNALLED - status
    return code or int(gone.is_set())


def _wait(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the terminal has told the command too, whose decision it is


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the business of whoever runs this in a thread
        return
    before = {number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(args: argparse.Namespace, holders: list[LockHolder]) -> int:
    rows: list[dict[str, Any]] = [
        {
            "client": holder.client,
            "label": holder.label,
            "lock": "entries" if holder.kind else "exclusive" if holder.exclusive else "shared",
        }
        for holder in holders
    ]
    if args.json:
        print_json({"locks": rows})
    elif rows:
        cells = [(str(row["client"]), row["lock"], plain(row["label"])) for row in rows]
        print(table(["CLIENT", "LOCK", "HOLDER"], cells))
    else:
        print("no locks")
    return 0

"""flock and directory locks between clients, threads and processes; many processes on one tree at once."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

import ffs
from ffs.client.client import Client

Run = Callable[..., tuple[int, str, str]]


def _child(address: str, code: str, *args: str) -> subprocess.Popen[str]:
    head = "import sys, fcntl, time, ffs; client = ffs.connect(sys.argv[1], session_ttl=1.0)\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code, address, *args],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def test_flock_between_two_clients(client: Client, address: str, home: str) -> None:
    with client.open(f"{home}/f", "wb") as mine, ffs.connect(address) as second:
        mine.flock(fcntl.LOCK_EX)
        with second.open(f"{home}/f", "rb") as theirs:
            with pytest.raises(BlockingIOError, match="locked by"):
                theirs.flock(fcntl.LOCK_SH | fcntl.LOCK_NB)
            got = threading.Event()

            def wait() -> None:
                theirs.flock(fcntl.LOCK_SH)
                got.set()

            waiter = threading.Thread(target=wait)
            waiter.start()
            assert not got.wait(0.2)
            mine.flock(fcntl.LOCK_SH)  # from exclusive to shared: both have it
            assert got.wait(10)
            waiter.join()
        assert [holder.exclusive for holder in client.locks(f"{home}/f")] == [False]  # close let go of theirs
        mine.flock(fcntl.LOCK_UN)
        assert client.locks(f"{home}/f") == []
        with pytest.raises(OSError, match="give one of"):
            mine.flock(0)


def test_a_killed_holder_lets_go(client: Client, address: str, home: str) -> None:
    client.mkdir(f"{home}/d")
    code = (
        "f = client.open(sys.argv[2] + '/f', 'wb'); f.write(b'x' * 100); f.flush(); f.write(b'y' * 50); "
        "f.raw_file.pwrite(b'z' * 5000, 100); f.flock(fcntl.LOCK_EX); "
        "lock = client.lock_directory(sys.argv[2] + '/d'); print('held', flush=True); time.sleep(100)"
    )
    with _child(address, code, home) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(ffs.errors.Busy, match=r"locked by .* \d+"):
            client.mkdir(f"{home}/d/x")
        with pytest.raises(ffs.errors.Busy, match="locked by"):
            client.lock_directory(f"{home}/d", timeout=0)
        child.send_signal(signal.SIGKILL)
    with client.open(f"{home}/f", "rb") as file:
        file.flock(fcntl.LOCK_EX)  # waits for the session's end
    with client.lock_directory(f"{home}/d", timeout=20) as lock:
        client.mkdir(f"{home}/d/x")
        assert lock.held
    end = time.monotonic() + 20
    while client.getsize(f"{home}/f") != 5100 and time.monotonic() < end:
        time.sleep(0.05)  # the chains are asked for what wasn't published
    assert client.getsize(f"{home}/f") in (5100, 5150)


def test_a_child_of_fork_doesnt_have_the_lock(client: Client, home: str) -> None:
    with client.lock_directory(home), client.open(f"{home}/f", "wb") as file:
        file.flock(fcntl.LOCK_EX)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                file.flock(fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                try:
                    client.mkdir(f"{home}/x")
                except ffs.errors.Busy:
                    status = 0
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        client.mkdir(f"{home}/x")
        assert len(client.locks(f"{home}/f")) == 1


def test_an_interrupted_wait_takes_nothing(client: Client, address: str, home: str) -> None:
    with client.open(f"{home}/f", "wb") as file:
        file.flock(fcntl.LOCK_EX)
        code = (
            "f = client.open(sys.argv[2], 'rb'); print('waits', flush=True)\n"
            "try: f.flock(fcntl.LOCK_EX)\n"
            "except KeyboardInterrupt: print('stopped', flush=True); sys.stdin.read()"
        )
        with _child(address, code, f"{home}/f") as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "waits\n"
            time.sleep(0.3)
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "stopped\n"
            file.flock(fcntl.LOCK_UN)
            time.sleep(0.3)
            assert client.locks(f"{home}/f") == []
            child.communicate()


def test_the_command(client: Client, home: str, run: Run, tmp_path: Path) -> None:
    path = f"ffs:{home}/lock"
    assert run("flock", path, "touch", str(tmp_path / "ran"))[0] == 0
    assert (tmp_path / "ran").exists()
    assert run("flock", path, "sh", "-c", "exit 7")[0] == 7
    with client.open(f"{home}/lock", "rb") as file:
        file.flock(fcntl.LOCK_EX)
        status, _, said = run("flock", "-n", "-E", "9", path, "true")
        assert status == 9
        assert "locked by" in said
        assert run("flock", "-w", "0.1", path, "true")[0] == 1
        assert "exclusive" in run("flock", "--list", path)[1]
        assert run("flock", "--break", path)[0] == 0
        assert run("flock", "-n", path, "true")[0] == 0
    assert run("flock", "--list", path)[1] == "no locks\n"
    assert run("flock", path)[0] == 1


def _make_path(address: str, path: str, at: int, failed: multiprocessing.SimpleQueue[str]) -> None:
    try:
        with ffs.connect(address) as client:
            client.makedirs(path, exist_ok=True)
            client.makedirs(f"{path}/of-{at}", exist_ok=True)
    except BaseException as error:
        failed.put(f"{at}: {error!r}")


def test_64_processes_make_one_deep_path(client: Client, address: str, home: str) -> None:
    """FAULTS.md, S28."""
    path = f"{home}/" + "/".join(f"level-{depth}" for depth in range(12))
    context = multiprocessing.get_context("fork")
    failed: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    workers = [context.Process(target=_make_path, args=(address, path, at, failed)) for at in range(64)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert failed.empty(), failed.get()
    assert [worker.exitcode for worker in workers] == [0] * 64
    assert len(client.listdir(path)) == 64
    assert client.listdir(home) == ["level-0"]


def test_what_one_process_has_written_another_lists_at_once(client: Client, address: str, home: str) -> None:
    """FAULTS.md, S27: a name is listed as soon as the call that made it has returned."""
    code = (
        "for at, _ in enumerate(sys.stdin):\n"
        " with client.open(f'{sys.argv[2]}/f{at}', 'wb') as f: f.write(b'x' * at)\n"
        " client.rename(f'{sys.argv[2]}/f{at}', f'{sys.argv[2]}/g{at}')\n"
        " if at: client.remove(f'{sys.argv[2]}/g{at - 1}')\n"
        " print(at, flush=True)"
    )
    with _child(address, code, home) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for at in range(60):
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == f"{at}\n"
            assert client.listdir(home) == [f"g{at}"]
            assert [entry.stat().st_size for entry in client.scandir(home)] == [at]
        child.communicate()

"""Files that garbage collection finds unclosed: closed by another thread, with all that they held."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest

import ffs
from ffs.client import dropped
from ffs.client.client import Client
from ffs.client.handle import OpenFile


def in_a_circle(*things: Any) -> None:
    circle: list[Any] = [*things]
    circle.append(circle)


@pytest.fixture
def closers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads in which files are closed."""
    seen: list[str] = []
    original = OpenFile.close

    def close(self: OpenFile) -> None:
        seen.append(threading.current_thread().name)
        original(self)

    monkeypatch.setattr(OpenFile, "close", close)
    return seen


@pytest.mark.parametrize("mode", ["w", "wb", "r+", "a", "raw"])
def test_what_a_collection_finds_is_closed_by_a_thread_and_whole(
    client: Client, home: str, closers: list[str], mode: str
) -> None:
    """Also what was in the buffers of a layer that is found after the file below it."""
    path = f"{home}/f"
    client.open(path, "xb").close()
    closers.clear()
    gc.collect()
    gc.disable()
    try:
        file: Any = client.open(path, "wb", buffering=0) if mode == "raw" else client.open(path, mode)
        file.write("data" if mode in ("w", "r+", "a") else b"data")
        in_a_circle(file)
        del file
        with pytest.warns(ResourceWarning, match="unclosed file"):
            gc.collect()
    finally:
        gc.enable()
    dropped.settle()
    assert closers == ["ffs-dropped"]
    with client.open(path, "rb") as again:
        assert again.read() == b"data"


def test_an_atomic_file_isnt_published_and_the_last_reference_closes_at_once(
    client: Client, home: str, closers: list[str]
) -> None:
    file = client.open(f"{home}/f", "wb", atomic=True)
    file.write(b"data")
    in_a_circle(file)
    del file
    with pytest.warns(ResourceWarning, match="unclosed file"):
        gc.collect()
    dropped.settle()
    assert client.listdir(home) == []
    file = client.open(f"{home}/g", "wb")
    file.write(b"data")
    with pytest.warns(ResourceWarning, match="unclosed file"):
        del file
    assert closers[-1] == threading.current_thread().name
    assert client.getsize(f"{home}/g") == 4


def test_a_collection_inside_of_the_clients_lock_waits_for_nothing(client: Client, home: str) -> None:
    """What made this: a file found while its client's own lock was held."""
    file = client.open(f"{home}/f", "wb")
    file.write(b"data")
    in_a_circle(file)
    with warnings.catch_warnings(), file.raw_file._position_lock, file.raw_file._open_file._lock:
        warnings.simplefilter("ignore")
        del file
        gc.collect()
    dropped.settle()
    assert client.getsize(f"{home}/f") == 4


def test_a_client_in_the_same_circle_ends_after_its_files(address: str, client: Client, home: str) -> None:
    other = ffs.connect(address)
    file = other.open(f"{home}/f", "wb")
    file.write(b"data")
    in_a_circle(other, file)
    del other, file
    with pytest.warns(ResourceWarning):
        gc.collect()
    dropped.settle()
    dropped.settle()  # the client's end was put behind what the collection found
    assert client.getsize(f"{home}/f") == 4


def test_a_child_of_fork_and_the_end_of_the_process(address: str, client: Client, home: str) -> None:
    code = """
import gc, os, sys, warnings, ffs
warnings.simplefilter("ignore")
client = ffs.connect(sys.argv[1])
def drop(name):
    file = client.open(sys.argv[2] + name, "wb")
    file.write(b"data")
    circle = [file]; circle.append(circle)
drop("/parent"); gc.collect()
child = os.fork()
if not child:
    drop("/child"); gc.collect()
    client.close()
    os._exit(0)
os.waitpid(child, 0)
drop("/last"); gc.collect()
"""
    subprocess.run([sys.executable, "-c", code, address, home], check=True, timeout=100)
    assert {name: client.getsize(f"{home}/{name}") for name in client.listdir(home)} == {
        "parent": 4, "child": 4, "last": 4,
    }  # fmt: skip

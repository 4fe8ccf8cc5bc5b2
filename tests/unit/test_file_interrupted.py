"""A signal in a call of a file that had done its work already: io's buffers do it again."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ffs import errors
from ffs.client.appending import Appending, Reserved
from ffs.client.file import File
from ffs.client.layers import FileRandom, FileReader, FileWriter
from ffs.layout import Layout

BUFFER = 4096


@dataclass
class Handle:
    """Of a file on no server; its next `reserve` or `write_at` raises what `failures` has."""

    path: str = "/f"
    ino: int = 5
    epoch: int = 1
    writing: bool = True
    layout: Layout = field(
        default_factory=lambda: Layout(table=1, table_version=1, chunk_size=1 << 16, stripe=0, seed=5)
    )
    stored: bytearray = field(default_factory=bytearray)
    failures: list[BaseException] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.stored)

    def ensure_room(self, end: int) -> None: ...

    def live_session(self) -> Handle:
        return self

    @property
    def lanes(self) -> Handle:
        return self

    def take(self, size: int, tenant: Any) -> None:
        """No lane is to be had."""

    def look_beyond(self) -> None: ...

    def read_at(self, offset: int, out: Any) -> int:
        part = self.stored[offset : offset + len(out)]
        out[: len(part)] = list(part)
        return len(part)

    def write_at(self, offset: int, data: Any) -> None:
        if self.failures:
            raise self.failures.pop()
        assert offset <= len(self.stored)
        self.stored[offset : offset + len(data)] = bytes(data)

    def reserve(self, length: int) -> int:
        offset = len(self.stored)
        self.stored += bytes(length)
        return offset

    def cut_since(self, epoch: int) -> bool:
        return epoch != self.epoch

    def report(self) -> None: ...

    def close(self) -> None: ...


class Lock:
    """Of the position. A signal comes when it was let go of for the `at`-th time."""

    def __init__(self, at: int) -> None:
        self.left = at
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def opened(layer: Any, mode: str, at: int, stored: bytes = b"") -> tuple[Handle, Lock, Any]:
    handle, lock = Handle(stored=bytearray(stored)), Lock(at)
    raw = File(None, handle, mode)  # type: ignore[arg-type]
    raw._position_lock = lock  # type: ignore[assignment]
    return handle, lock, layer(raw, BUFFER)


SIZES = [1, 3000, 3000, 100, BUFFER, 9000, 2 * BUFFER, 700, 3000]


@pytest.mark.parametrize(("layer", "mode"), [(FileWriter, "wb"), (FileWriter, "ab"), (FileRandom, "w+b")])
@pytest.mark.parametrize("at", range(1, 12))
def test_what_a_write_raised_for_is_stored_once_when_it_is_written_again(
    layer: Any, mode: str, at: int
) -> None:
    handle, lock, file = opened(layer, mode, at)
    source, whole, raised = random.Random(at), b"", 0
    for size in SIZES * 3:
        piece = source.randbytes(size)
        while True:
            try:
                file.write(piece)
            except KeyboardInterrupt:
                raised += 1
                if mode != "ab" and (taken := file.tell() - len(whole)):
                    assert taken == len(piece)
                    break
                continue
            break
        whole += piece
    lock.left = 0  # no more
    file.close()
    assert raised == 1
    assert bytes(handle.stored) == whole


@pytest.mark.parametrize("layer", [FileReader, FileRandom])
@pytest.mark.parametrize("at", range(1, 10))
def test_no_byte_is_left_out_by_a_read_that_raised(layer: Any, at: int) -> None:
    data = random.Random(at).randbytes(50_000)
    _, lock, file = opened(layer, "rb" if layer is FileReader else "r+b", 0, data)
    got = file.read(10)
    lock.left = at
    raised = 0
    while len(got) < len(data):
        try:
            got += file.read(2500)
        except KeyboardInterrupt:
            raised += 1
            got = data[: file.tell()]  # io gives up what its buffer had
    assert got == data
    assert raised == 1
    file.close()


@pytest.mark.parametrize("call", ["read", "readall", "readinto", "seek", "write"])
def test_a_raw_call_that_raised_has_not_moved(call: str) -> None:
    _, lock, raw = opened(lambda raw, size: raw, "r+b", 0, bytes(5000))
    raw.seek(100)
    lock.left = 1
    calls = {
        "read": lambda: raw.read(10),
        "readall": raw.readall,
        "readinto": lambda: raw.readinto(bytearray(10)),
        "seek": lambda: raw.seek(50, 1),
        "write": lambda: raw.write(b"x"),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert raw.tell() == 100
    raw.close()


def test_an_append_that_failed_keeps_its_place_for_the_same_bytes_only() -> None:
    handle, _, raw = opened(lambda raw, size: raw, "ab", 0, b"begin.")
    handle.failures = [errors.NoSpace("for now")]
    with pytest.raises(errors.NoSpace):
        raw.write(b"one.")
    raw.write(b"one.and more.")  # as a buffer does, which took more meanwhile
    raw.write(b"one.")  # a second, this time meant
    assert bytes(handle.stored) == b"begin.one.and more.one."
    handle.failures = [errors.NoSpace("for now")]
    with pytest.raises(errors.NoSpace):
        raw.write(b"two.")
    raw.write(b"other.")
    assert bytes(handle.stored) == b"begin.one.and more.one." + bytes(4) + b"other."
    raw.close()


def test_the_place_of_an_append_is_gone_with_a_truncation() -> None:
    handle, _, raw = opened(lambda raw, size: raw, "ab", 0, b"begin.")
    handle.failures = [errors.NoSpace("for now")]
    with pytest.raises(errors.NoSpace):
        raw.write(b"one.")
    handle.epoch, handle.stored = 3, bytearray(b"cut.")
    raw.write(b"one.")
    assert bytes(handle.stored) == b"cut.one."
    raw.close()


def test_an_append_of_several_places_is_made_again_at_all_of_them() -> None:
    handle = Handle()
    appending = Appending(handle)  # type: ignore[arg-type]
    data = np.arange(10, dtype=np.uint8)
    for size in (3, 7, 10):
        places: list[Reserved] = []
        appending.write(data[:size], places, handle.write_at)
        appending.keep(data[:size], places)  # each time a signal comes when all is done
    assert bytes(handle.stored) == bytes(data)

"""Closing an atomic file whose last bytes can't be written: what is published is whole, or nothing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from ffs import errors
from ffs.client.deferred import DeferredText, DeferredWriter
from ffs.client.file import File
from ffs.client.layers import FileRandom, FileText, FileWriter
from ffs.layout import MAX_FILE_BYTES, Layout

BUFFER = 4096


@dataclass
class Handle:
    """Of an unnamed file on no server. `failures`: what its next writes raise."""

    path: str = "/f"
    ino: int = 5
    ticket: bytes = b""
    epoch: int = 1
    writing: bool = True
    layout: Layout = field(
        default_factory=lambda: Layout(table=1, table_version=1, chunk_size=1 << 16, stripe=0, seed=5)
    )
    stored: bytearray = field(default_factory=bytearray)
    failures: list[BaseException] = field(default_factory=list)
    published: bytes | None = None
    closed: bool = False

    @property
    def length(self) -> int:
        return len(self.stored)

    def ensure_room(self, end: int) -> None:
        if self.failures:
            raise self.failures.pop()

    def write_at(self, offset: int, data: Any) -> None:
        self.ensure_room(offset + len(data))
        self.stored[offset : offset + len(data)] = bytes(data)

    def publish(self, target: bytes, *, replace: bool) -> None:
        self.published = bytes(self.stored)

    def report(self) -> None: ...

    def note_failed(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def writer(raw: File) -> Any:
    return FileWriter(raw, BUFFER)


def both(raw: File) -> Any:
    return FileRandom(raw, BUFFER)


def text(raw: File) -> Any:
    return FileText(FileWriter(raw, BUFFER), encoding="ascii")


def deferred(raw: File) -> Any:
    file = DeferredWriter(raw, BUFFER)
    file.begin(commit_at_close=True)
    return file


def deferred_text(raw: File) -> Any:
    return DeferredText(deferred(raw), encoding="ascii")


def uncommitted_text(raw: File) -> Any:
    file = DeferredWriter(raw, BUFFER)
    file.begin(commit_at_close=False)
    return DeferredText(file, encoding="ascii")


LAYERS = [writer, both, text, deferred, deferred_text, uncommitted_text]


def opened(layer: Callable[[File], Any]) -> tuple[Handle, File, Any]:
    handle = Handle()
    raw = File(None, handle, "w+b" if layer is both else "wb", publish_as="/f")  # type: ignore[arg-type]
    return handle, raw, layer(raw)


def fill(file: Any) -> None:
    whole = "x" * (BUFFER + 1000)
    as_text = isinstance(file, FileText | DeferredText)
    file.write(whole if as_text else whole.encode())
    file.write("tail" if as_text else b"tail")  # stays in the buffers


@pytest.mark.parametrize("layer", LAYERS)
def test_without_failures_all_is_published(layer: Callable[[File], Any]) -> None:
    handle, raw, file = opened(layer)
    fill(file)
    file.close()
    if layer is uncommitted_text:
        assert handle.published is None
        file.buffer.commit()
    assert handle.published == b"x" * (BUFFER + 1000) + b"tail"
    assert raw.closed
    assert handle.closed


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), errors.TooLarge("no end", "/f")])
def test_what_interrupts_the_flush_of_a_close_publishes_nothing(
    layer: Callable[[File], Any], error: BaseException
) -> None:
    handle, raw, file = opened(layer)
    fill(file)
    handle.failures = [error]
    with pytest.raises(type(error)):
        file.close()
    assert handle.published is None
    assert file.closed
    if layer is uncommitted_text:
        file.buffer.commit()
    assert raw.closed
    assert handle.closed
    assert handle.published is None
    file.close()  # again: nothing


@pytest.mark.parametrize("layer", [writer, both, deferred])
def test_a_tail_beyond_the_end_of_all_files_publishes_nothing(layer: Callable[[File], Any]) -> None:
    handle, _, file = opened(layer)
    file.write(b"begin")
    file.seek(MAX_FILE_BYTES - 1)
    file.write(b"tail")
    with pytest.raises(errors.TooLarge, match="nothing was published"):
        file.close()
    assert handle.published is None
    assert handle.closed

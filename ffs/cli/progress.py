"""One line of progress on a terminal, and nothing anywhere else.

Bytes done, rate and time left, redrawn at most ten times a second. Not thread-safe: the thread that
moves the bytes calls `advance`. `Meter` is for many threads and many files.
"""

from __future__ import annotations

import shutil
import threading
import time
from types import TracebackType
from typing import TextIO

from ffs.cli.text import format_bytes, format_rate, format_seconds

_INTERVAL_S = 0.1


def draw(label: str, done: int, total: int | None, elapsed_s: float, columns: int) -> str:
    """The line for this state, at most `columns` wide. Pure."""
    rate = format_rate(done, elapsed_s)
    if not total:
        tail = f" {format_bytes(done)}  {rate}"
        return (label[: max(8, columns - len(tail))] + tail)[:columns]
    share = min(1.0, done / total)
    left = ""
    if 0 < done < total and elapsed_s > 0.5:
        left = f"  {format_seconds(elapsed_s * (total - done) / done)} left"
    tail = f" {share:4.0%}  {format_bytes(done)} of {format_bytes(total)}  {rate}{left}"
    width = min(30, columns - len(tail) - 24)
    if width >= 8:
        filled = int(share * width)
        tail = f" [{'#' * filled}{'.' * (width - filled)}]" + tail
    room = columns - len(tail)
    name = label if len(label) <= room else "..." + label[-(room - 3) :] if room > 6 else ""
    return (name + tail)[:columns]


class Progress:
    """`with Progress(stream, "name", total) as bar: bar.advance(n)`."""

    def __init__(self, stream: TextIO, label: str, total: int | None, *, show: bool | None = None) -> None:
        """`total` None where the length isn't known. `show` None: only if the stream is a terminal."""
        self._stream = stream
        self._label = label
        self._total = total
        self._show = stream.isatty() if show is None else show
        self._done = 0
        self._start = time.monotonic()
        self._drawn = 0.0

    def expect(self, total: int) -> None:
        """The length, where it is known only now."""
        self._total = total

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._show and now - self._drawn >= _INTERVAL_S:
            self._drawn = now
            self._draw(now)

    def _draw(self, now: float) -> None:
        columns = shutil.get_terminal_size().columns - 1
        line = draw(self._label, self._done, self._total, now - self._start, columns)
        self._stream.write("\r" + line.ljust(columns))
        self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._show:
            self._draw(time.monotonic())
            self._stream.write("\n")
            self._stream.flush()


class Meter:
    """One line for a run over many files, of which more are found while it goes on. Thread-safe."""

    def __init__(self, stream: TextIO, *, show: bool | None = None) -> None:
        """`show` None: only if the stream is a terminal."""
        self._stream = stream
        self._show = stream.isatty() if show is None else show
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._drawn = 0.0
        self._shown = False
        self.files = 0
        self.files_total = 0
        self.bytes = 0
        self.bytes_total = 0
        self.complete = False
        """Whether the totals are final: all has been found."""

    def expect(self, count: int) -> None:
        """One more file, of `count` bytes."""
        with self._lock:
            self.files_total += 1
            self.bytes_total += count

    def advance(self, count: int) -> None:
        """Bytes were moved, or found to be there."""
        with self._lock:
            self.bytes += count
            now = time.monotonic()
            if self._show and now - self._drawn >= _INTERVAL_S:
                self._drawn = now
                self._draw(now)

    def file_done(self) -> None:
        """A file is whole."""
        with self._lock:
            self.files += 1

    def write(self, line: str, stream: TextIO) -> None:
        """A line of output, with the line of progress out of its way."""
        with self._lock:
            self._clear()
            stream.write(line + "\n")

    def clear(self) -> None:
        """Take the line of progress away, until it is drawn again."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._shown:
            self._stream.write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
            self._stream.flush()
            self._shown = False
            self._drawn = 0.0

    def _draw(self, now: float) -> None:
        columns = shutil.get_terminal_size().columns - 1
        plus = "" if self.complete else "+"
        label = f"{self.files}/{self.files_total}{plus} files"
        line = draw(label, self.bytes, max(self.bytes_total, self.bytes), now - self._start, max(columns, 20))
        self._stream.write("\r" + line.ljust(columns))
        self._stream.flush()
        self._shown = True

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._show and self.files_total:
                self._draw(time.monotonic())
                self._stream.write("\n")
                self._stream.flush()
                self._shown = False

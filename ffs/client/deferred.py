"""Files that are written as a whole or not at all, under libraries that know nothing of it.

`with ffs.open(path, "wb", atomic=True)` publishes nothing when its body raises. But a library that is
given an open file closes it itself, also when an exception is on its way: in a `finally`, or in a context
manager of its own. So a file of this page looks, when it is closed, for an exception that is being handled
then and wasn't when the file was opened: with one, it publishes nothing, and raises that exception again, so
that nobody takes the file for written who caught the exception and went on. docs/guides/fsspec.md, Writing.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ffs.client.dropped import hand_over
from ffs.client.file import GATHER_BUFFER_BYTES, READ_BUFFER_BYTES, WRITE_BUFFER_BYTES
from ffs.client.layers import FileRandom, FileReader, FileWriter

if TYPE_CHECKING:
    from ffs.client.file import File

_NOTE = (
    "ffs: {name} was closed while this exception was being handled, so nothing was published;"
    " close it outside of the handler, or call its commit()"
)


class _Deferred:
    """Mixed in before a layer over an atomic file."""

    def begin(self, commit_at_close: bool) -> None:
        """Notes what is being handled already."""
        self._commit_at_close = commit_at_close
        self._handled = sys.exc_info()[1]
        self._over = False

    @property
    def closed(self) -> bool:
        return self._over or super().closed  # type: ignore[misc]

    def write(self, data: Any, /) -> int:
        if self._over:
            raise ValueError("write to closed file")
        return super().write(data)  # type: ignore[misc, no-any-return]

    def close(self) -> None:
        """Publish, or keep what was written for `commit`. Raises what is being handled, if that is new."""
        if self.closed:
            return
        cause = sys.exc_info()[1]
        if cause is not None and cause is not self._handled and not isinstance(cause, StopIteration):
            self.discard()
            cause.add_note(_NOTE.format(name=repr(self.name)))  # type: ignore[attr-defined]
            raise cause
        if self._commit_at_close:
            super().close()  # type: ignore[misc]
        else:
            self.flush()  # type: ignore[attr-defined]
        self._over = True

    def commit(self) -> None:
        """Publish. Nothing if it was published, or discarded. Blocking."""
        self._over = True
        super().close()  # type: ignore[misc]

    def discard(self) -> None:
        """Close, and publish nothing. Repeatable."""
        self.mute()
        self._over = True
        super().close()  # type: ignore[misc]

    def mute(self) -> None:
        """What is written from now on goes nowhere, and nothing will be published."""
        self.raw_file._discarded = True  # type: ignore[attr-defined]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class DeferredWriter(_Deferred, FileWriter):
    """Modes w and x."""


class DeferredRandom(_Deferred, FileRandom):
    """Modes w+ and x+."""


def defer(raw: File, buffer_bytes: int, commit_at_close: bool) -> DeferredWriter | DeferredRandom:
    """The buffered file over a raw file that was opened with atomic=True; the caller's to close."""
    both = raw.readable()
    usual = max(WRITE_BUFFER_BYTES, raw.placement.layout.chunk_size) if both else GATHER_BUFFER_BYTES
    file = (DeferredRandom if both else DeferredWriter)(raw, buffer_bytes if buffer_bytes > 0 else usual)
    file.begin(commit_at_close)
    return file


class QuietReader(FileReader):
    """For libraries that leave what they have read to the garbage collector: reading loses nothing by it."""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, ValueError):  # never made, or detached
            self.close()


def quiet_reader(raw: File, buffer_bytes: int) -> QuietReader:
    """The buffered file over a raw file that is open for reading."""
    return QuietReader(raw, buffer_bytes if buffer_bytes > 0 else READ_BUFFER_BYTES)


class _Stacked:
    """Over a binary file of ours: an exception in its `with`, or being dropped, publishes nothing."""

    _pid: int

    def discard(self) -> None:
        """Close, and publish nothing of what was opened for writing. Repeatable."""
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()  # type: ignore[attr-defined]
        else:
            self.discard()

    def __del__(self) -> None:
        try:
            unclosed = not self.closed and self.writable()  # type: ignore[attr-defined]
        except (AttributeError, ValueError):
            return  # never made, or detached
        if unclosed:
            if os.getpid() == self._pid:
                warnings.warn(f"unclosed file {self!r}", ResourceWarning, stacklevel=2, source=self)
            if not hand_over(self.discard):
                self.discard()


class Compressed(_Stacked, io.BufferedIOBase):
    """A compressor over a binary file: closing it closes both."""

    def __init__(self, codec: Any, binary: Any) -> None:
        super().__init__()
        self._codec = codec
        self._binary = binary
        self._ending = False
        self._pid = os.getpid()

    def readable(self) -> bool:
        return bool(self._codec.readable())

    def writable(self) -> bool:
        return bool(self._codec.writable())

    def seekable(self) -> bool:
        return bool(self._codec.seekable())

    def read(self, size: int | None = -1, /) -> bytes:
        data: bytes = self._codec.read(-1 if size is None else size)
        return data

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(size if size >= 0 else io.DEFAULT_BUFFER_SIZE)

    def write(self, data: Any, /) -> int:
        return int(self._codec.write(data))

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return int(self._codec.seek(offset, whence))

    def tell(self) -> int:
        return int(self._codec.tell())

    def flush(self) -> None:
        # io's close calls this too, when the codec is closed already.
        if not self._ending and self.writable():
            self._codec.flush()

    def close(self) -> None:
        """Write the end of the compressed stream, then close the file. Both are closed when this raises."""
        if self.closed:
            return
        self._ending = True
        try:
            self._codec.close()
        except BaseException:
            _discard(self._binary)
            raise
        finally:
            super().close()
        self._binary.close()

    def discard(self) -> None:
        """Close both, and publish nothing of what was opened for writing. Repeatable."""
        if self.closed:
            return
        if isinstance(self._binary, _Deferred):
            self._binary.mute()  # the end of the stream goes nowhere
        self._ending = True
        try:
            self._codec.close()
        finally:
            super().close()
            _discard(self._binary)


class DeferredText(_Stacked, io.TextIOWrapper):
    """Text over a binary file of ours, compressed or not."""

    def __init__(self, binary: Any, **options: Any) -> None:
        super().__init__(binary, **options)
        self._pid = os.getpid()

    def close(self) -> None:
        """Flush and close the file below. If the flush raises, that publishes nothing, then or later: text
        that wasn't written yet is lost."""
        if not self.closed:
            try:
                self.flush()
            except BaseException as error:
                try:
                    self.discard()
                finally:
                    raise error
        super().close()

    def discard(self) -> None:
        """Close, and publish nothing of what was opened for writing. Repeatable."""
        _discard(self.buffer)  # closed, it makes this closed too, without a flush


def _discard(file: Any) -> None:
    getattr(file, "discard", file.close)()

"""The layers over `File`: io's buffered and text layers, with what ffs adds. docs/client.md, Files."""

from __future__ import annotations

import io
from fcntl import LOCK_EX, LOCK_SH, LOCK_UN
from types import TracebackType
from typing import Any

from ffs.client.file import File, reopen


class _Layer:
    """What all layers add. Mixed in before io's class."""

    _closing = False
    layered = False
    """Whether another layer of ffs stands over it."""

    @property
    def raw_file(self) -> File:
        """The raw file at the bottom: its inode, placement, pread and pwrite."""
        raise NotImplementedError

    def fsync(self) -> None:
        """Flush; then data and length are durable and seen by all who open the file. Blocking."""
        self.flush()  # type: ignore[attr-defined]

    def flock(self, operation: int) -> None:
        """As fcntl.flock: `File.flock`. What is buffered is written before a lock ends; what a binary file
        had in its buffer is forgotten when it has one."""
        if operation & LOCK_UN:
            self.flush()  # type: ignore[attr-defined]
        self.raw_file.flock(operation)
        if operation & (LOCK_SH | LOCK_EX):
            self._forget_read()

    def detach(self) -> Any:
        """As of io: this layer can't be used any more."""
        below = super().detach()  # type: ignore[misc]
        below.layered = False
        return below

    def _forget_read(self) -> None:
        """Empty the buffer of what was read."""

    def discard(self) -> None:
        """Close without publishing an atomic file; other files are closed as by `close`."""
        raw = self.raw_file
        if raw._publish_as is not None:
            raw._discarded = True
        self.close()

    def close(self) -> None:
        """Flush, publish and close. It is closed also when this raises."""
        self._closing = True  # the raw file's own close publishes: flush needn't
        raw = self.raw_file
        if raw._publish_as is not None and not (raw.closed or raw._discarded):
            self._flush_or_discard(raw)
        super().close()  # type: ignore[misc]

    def _flush_or_discard(self, raw: File) -> None:
        """Before an atomic file is closed. io's own close goes on to the raw file's, which publishes,
        whatever came out of its flush; what is still in a buffer would lack."""
        try:
            self.flush()  # type: ignore[attr-defined]
        except OSError as error:
            raw._failure = raw._failure or error  # its close raises it, and publishes nothing
        except BaseException as error:
            raw._discarded = True
            try:
                super().close()  # type: ignore[misc]
            finally:
                raise error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        # Dropped without a close: as io does, but an atomic file isn't published by accident.
        try:
            unclosed = not (self.closed or self.layered)  # type: ignore[attr-defined]
        except (AttributeError, ValueError):
            return  # never made, or detached
        if unclosed:
            raw = self.raw_file
            raw._dealloc_warn(self)
            if not raw.hand_over(self.discard):
                self.discard()


def _seek_afresh(file: io.BufferedReader | io.BufferedRandom) -> None:
    """Within its buffer, io's seek keeps it; from the end it doesn't."""
    position = file.tell()
    file.seek(0, io.SEEK_END)
    file.seek(position)


class FileReader(_Layer, io.BufferedReader):
    """`ffs.open(path, "rb")`."""

    def __init__(self, raw: File, buffer_size: int) -> None:
        super().__init__(raw, buffer_size)
        raw.layered = True
        raw.read_ahead(buffer_size)

    @property
    def raw_file(self) -> File:
        return self.raw  # type: ignore[return-value]

    def _forget_read(self) -> None:
        _seek_afresh(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        raw = self.raw_file
        raw._check_open()
        return reopen, (
            raw.client,
            raw.name,
            raw.inode,
            "rb",
            -1,
            None,
            None,
            None,
            self.tell(),
            raw.ticket,
        )


class FileWriter(_Layer, io.BufferedWriter):
    """`ffs.open(path, "wb")`, "ab", "xb"."""

    def __init__(self, raw: File, buffer_size: int) -> None:
        super().__init__(raw, buffer_size)
        raw.layered = True
        raw.write_behind()

    @property
    def raw_file(self) -> File:
        return self.raw  # type: ignore[return-value]

    def flush(self) -> None:
        """Write what is buffered and publish the length. Blocking."""
        super().flush()
        if not self._closing:
            self.raw.flush()


class FileRandom(_Layer, io.BufferedRandom):
    """`ffs.open(path, "r+b")`, "w+b", "a+b", "x+b"."""

    def __init__(self, raw: File, buffer_size: int) -> None:
        super().__init__(raw, buffer_size)
        raw.layered = True
        raw.read_ahead(buffer_size)

    @property
    def raw_file(self) -> File:
        return self.raw  # type: ignore[return-value]

    def flush(self) -> None:
        """Write what is buffered and publish the length. Blocking."""
        super().flush()
        if not self._closing:
            self.raw.flush()

    def _forget_read(self) -> None:
        _seek_afresh(self)


class FileText(_Layer, io.TextIOWrapper):
    """`ffs.open(path)`, and every mode without b."""

    newline: str | None = None

    @property
    def raw_file(self) -> File:
        return self.buffer.raw  # type: ignore[attr-defined, no-any-return]

    def close(self) -> None:
        """Flush, publish and close. It is closed also when this raises."""
        if isinstance(self.buffer, _Layer):
            self.buffer._closing = True
        super().close()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        raw = self.raw_file
        raw._check_open()
        if raw._open_file.writing:
            raise TypeError(f"cannot pickle {self!r}: it is open for writing")
        return reopen, (
            raw.client,
            raw.name,
            raw.inode,
            "r",
            -1,
            self.encoding,
            self.errors,
            self.newline,
            self.tell(),
            raw.ticket,
        )

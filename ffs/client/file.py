"""File objects: a raw file of io, and the usual layers over it. docs/client.md, Files.

`File` is an io.RawIOBase. `ffs.open` puts one of the four layers below over it, which are io's own
with three things added: `fsync()`, a flush that publishes the length, and, for atomic files, an
exception inside `with` that publishes nothing.
"""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ffs import errors
from ffs.client.appending import Appending, Reserved
from ffs.client.attributes import stat_result
from ffs.client.dropped import hand_over, watch
from ffs.client.file_holes import HoleCalls
from ffs.client.handle import OpenFile
from ffs.client.locks import Lock
from ffs.client.paths import encode_path
from ffs.layout import MAX_FILE_BYTES, Placement

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from ffs.client.ahead import Ahead
    from ffs.client.behind import Behind
    from ffs.client.client import Client

READ_BUFFER_BYTES = 256 * 1024
"""Of a BufferedReader: what a small read fetches, unless such reads are found to be at random places."""

GATHER_BUFFER_BYTES = 32 * 1024
"""Of a BufferedWriter: larger writes go past it, to where whole chunks are gathered (behind.py)."""

WRITE_BUFFER_BYTES = 1024 * 1024
"""Of a buffer whose content goes out at once (modes a and +), at least; a chunk where that is larger."""


class File(HoleCalls, io.RawIOBase):
    """A raw file. Methods of the position aren't atomic against each other but for each by itself;
    `pread` and `pwrite` may be called from many threads at once."""

    layered = False
    """Whether a layer of ffs stands over it."""

    def __init__(
        self,
        client: Client,
        handle: OpenFile,
        mode: str,
        *,
        publish_as: str | None = None,
        replace: bool = True,
    ) -> None:
        """Made by `ffs.open`. `publish_as`: the path that an unnamed file gets at close."""
        super().__init__()
        watch()
        self.client = client
        self.name = handle.path
        self.mode = mode
        self._open_file = handle
        self._reads = "r" in mode or "+" in mode
        self._appends = "a" in mode
        self._appending = Appending(handle)
        self._publish_as = publish_as
        self._replace = replace
        self._position = handle.length if self._appends else 0
        self._position_lock = threading.Lock()
        self._failure: OSError | None = None
        self._lock: Lock | None = None
        self._discarded = False
        self._pid = os.getpid()
        self._ahead: Ahead | None = None
        self._behind: Behind | None = None

    def read_ahead(self, buffer_bytes: int) -> None:
        """For the layer above: have `readinto` look for reads in a row. docs/client.md, Reading ahead."""
        from ffs.client.ahead import Ahead

        self._ahead = Ahead(self._open_file, self._position_lock, buffer_bytes)

    def write_behind(self) -> None:
        """For the layer above: have `write` gather chunks, which go out behind it. docs/client.md, Writing
        behind. What appends keeps its writes as they are."""
        from ffs.client.behind import Behind

        if not self._appends:
            self._behind = Behind(self._open_file, self._position_lock)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"mode={self.mode!r}"
        return f"<ffs.File name={self.name!r} {state}>"

    # --- what it is -------------------------------------------------------------------------

    def readable(self) -> bool:
        self._check_open()
        return self._reads

    def writable(self) -> bool:
        self._check_open()
        return self._open_file.writing

    def seekable(self) -> bool:
        self._check_open()
        return True

    def fileno(self) -> int:
        """There is no descriptor: always UnsupportedOperation."""
        raise errors.Unsupported("a file of ffs has no file descriptor", self.name)

    def isatty(self) -> bool:
        self._check_open()
        return False

    @property
    def inode(self) -> int:
        """The inode id: the space of the file's chunks."""
        return self._open_file.ino

    @property
    def ticket(self) -> bytes:
        """What requests carry that name the inode by its id (docs/metadata.md, Tickets)."""
        return self._open_file.ticket

    @property
    def placement(self) -> Placement:
        """Layout and chains: `placement.layout.chunk_size`, `placement.chain_of_index(i)`. May block."""
        return self._open_file.placement

    @property
    def capability(self) -> int:
        """Native's id of the capability under which this process uses the file. May block."""
        return self._open_file.capability

    @property
    def epoch(self) -> int:
        """The truncate epoch under which this file writes."""
        return self._open_file.epoch

    @property
    def size(self) -> int:
        """The length as far as is known here, in bytes; `stat` asks."""
        behind = self._behind
        return self._open_file.length if behind is None else max(self._open_file.length, behind.end)

    def stat(self) -> os.stat_result:
        """As os.fstat; the size includes what was written here and isn't published. Blocking."""
        self._check_open()
        self._settle()
        attributes = self._open_file.look()
        attributes.length = self._open_file.length
        return stat_result(attributes, self.client.device)

    # --- position ---------------------------------------------------------------------------

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """As of io. SEEK_END asks the service for the length. Beyond the end is allowed.

        SEEK_DATA, SEEK_HOLE: as of lseek, by chunks; they ask the service and the chains. ENXIO at and beyond
        the end, and for SEEK_DATA where only a hole follows. docs/client.md, Holes. Blocking, these three."""
        self._check_open()
        start = end = -1
        try:
            with self._position_lock:
                start = self._position
                target = self._target(offset, whence)
                end = self._position = target
            return target
        except BaseException:
            self._move_back(start, end)
            raise

    def _target(self, offset: int, whence: int) -> int:
        """Of a seek. Under the lock."""
        if whence == os.SEEK_SET:
            target = offset
        elif whence == os.SEEK_CUR:
            target = self._position + offset
        elif whence == os.SEEK_END:
            self._settle_under_lock()
            self._open_file.look()
            target = self._open_file.length + offset
        elif whence in (os.SEEK_DATA, os.SEEK_HOLE):
            target = self._seek_in_chunks(offset, whence)
        else:
            raise ValueError(f"invalid whence ({whence}, should be 0, 1, 2, SEEK_DATA or SEEK_HOLE)")
        if target < 0:
            raise errors.InvalidArgument(f"seek to {target}, before the beginning of the file", self.name)
        if target > MAX_FILE_BYTES:
            raise errors.InvalidArgument(f"seek to {target}, a file ends at {MAX_FILE_BYTES}", self.name)
        return target

    def _move_back(self, start: int, end: int) -> None:
        """After a call that raised, perhaps by a signal when all was done, which moved the position to `end`
        (-1: it didn't). io's buffers take what raises for not done: they do it again, from where it began."""
        if self._position == end:
            self._position = start

    # --- reading ----------------------------------------------------------------------------

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer`, over all chunks that it takes; 0 at the end. Blocking."""
        self._check_readable()
        out = _writable_bytes(buffer)
        start = end = -1
        try:
            with self._position_lock:
                start = self._position
                reader = self._open_file.read_at if self._ahead is None else self._ahead.read
                count = reader(start, out) if len(out) else 0
                end = self._position = start + count
            return count
        except BaseException:
            self._move_back(start, end)
            raise

    def readall(self) -> bytes:
        """All from the position to the end. Blocking."""
        self._check_readable()
        return self._read_on(None)

    def read(self, size: int | None = -1, /) -> bytes:
        """As of io.RawIOBase: at most `size` bytes; all that is left for -1."""
        if size is None or size < 0:
            return self.readall()
        self._check_readable()
        return self._read_on(size)

    def _read_on(self, size: int | None) -> bytes:
        start = end = -1
        try:
            with self._position_lock:
                start = self._position
                data = self._read_from(start, size)
                end = self._position = start + len(data)
            return data
        except BaseException:
            self._move_back(start, end)
            raise

    def pread(self, size: int, offset: int) -> bytes:
        """As os.pread: at most `size` bytes from `offset`; fewer only at the end, as far as it is known here:
        a call that begins there asks for it. Blocking."""
        self._check_readable()
        _check_offset(offset, self.name)
        return self._read_from(offset, size)

    def pread_into(self, buffer: WriteableBuffer, offset: int) -> int:
        """Fill `buffer` from `offset`; returns the bytes read, fewer only at the end. Blocking."""
        self._check_readable()
        _check_offset(offset, self.name)
        out = _writable_bytes(buffer)
        done = 0
        while done < len(out):
            count = self._open_file.read_at(offset + done, out[done:])
            if count == 0:
                break
            done += count
        return done

    def preadv(self, buffers: Sequence[WriteableBuffer], offset: int) -> int:
        """As os.preadv: fill the buffers in order from `offset`. Blocking."""
        done = 0
        for buffer in buffers:
            count = self.pread_into(buffer, offset + done)
            done += count
            if count < memoryview(buffer).nbytes:
                break
        return done

    def _read_from(self, offset: int, size: int | None) -> bytes:
        """`size` bytes (None: to the end), fewer only at the end."""
        handle = self._open_file
        if offset >= handle.length:
            handle.look_beyond()
        left = max(handle.length - offset, 0)
        whole = self._read_exactly(offset, left if size is None else min(left, size))
        if size is not None or len(whole) < left or not whole:
            return whole
        parts = [whole]
        while True:  # what was appended meanwhile
            offset += len(parts[-1])
            more = bytearray(READ_BUFFER_BYTES)
            count = handle.read_at(offset, _writable_bytes(more))
            if count == 0:
                return whole if len(parts) == 1 else b"".join(parts)
            parts.append(bytes(more[:count]))

    def _read_exactly(self, offset: int, size: int) -> bytes:
        """`size` bytes, fewer if the file was truncated meanwhile."""
        # BytesIO gives up the bytes object that it was filled in without a copy.
        whole = io.BytesIO(bytes(size))
        view = whole.getbuffer()
        done = self.pread_into(view, offset)  # if it raises, its frames still hold the view: no `with`
        view.release()
        # No truncate(): after a retry the traceback of the first error may still hold slices of the view.
        return whole.getvalue() if done == size else whole.getvalue()[:done]

    # --- writing ----------------------------------------------------------------------------

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of `data`, over all chunks that it touches; durable when it returns. Blocking.

        The length becomes visible to others at flush, fsync or close.
        """
        self._check_writable()
        whole = _readable_bytes(data)
        count = len(whole)
        if self._discarded or count == 0:
            return count
        start = end = -1
        reserved: list[Reserved] = []
        try:
            with self._position_lock:
                start = self._position
                if self._appends:
                    end = self._position = self._appending.write(whole, reserved, self._write_at)
                else:
                    if self._behind is not None:
                        self._write_behind(self._behind, start, whole)
                    else:
                        self._write_at(start, whole)
                    end = self._position = start + count
            return count
        except BaseException:
            self._move_back(start, end)
            self._appending.keep(whole, reserved)
            raise

    def pwrite(self, data: ReadableBuffer, offset: int) -> int:
        """As os.pwrite: all of `data` at `offset`. Blocking."""
        self._check_writable()
        _check_offset(offset, self.name)
        if self._appends:
            raise errors.Unsupported("a file that is open for appending writes at its end only", self.name)
        whole = _readable_bytes(data)
        if len(whole) and not self._discarded:
            self._settle()
            self._write_at(offset, whole)
        return len(whole)

    def _write_at(self, offset: int, whole: NDArray[np.uint8]) -> None:
        self._check_end(offset + len(whole))
        try:
            self._open_file.write_at(offset, whole)
        except OSError as error:
            self._failure = error
            raise

    def _write_behind(self, behind: Behind, offset: int, whole: NDArray[np.uint8]) -> None:
        self._check_end(offset + len(whole))
        try:
            behind.write(offset, whole)
        except OSError as error:
            self._failure = error
            raise

    def _check_end(self, end: int) -> None:
        if end > MAX_FILE_BYTES:
            raise errors.TooLarge(f"a file ends at {MAX_FILE_BYTES} bytes", self.name)

    def _settle(self) -> None:
        """Write what is gathered, for whatever looks at or changes the file by another way. Blocking."""
        if self._behind is not None:
            with self._position_lock:
                self._settle_under_lock()

    def _settle_under_lock(self) -> None:
        if self._behind is None or self._discarded:
            return
        try:
            self._behind.settle()
        except OSError as error:
            self._failure = error
            raise

    def note_written(self, end: int, epoch: int | None = None) -> None:
        """Ring requests have written up to byte `end`: the next flush publishes it."""
        self._open_file.note_written(end, self._open_file.epoch if epoch is None else epoch)

    def has_room(self, end: int) -> bool:
        """Whether a write up to byte `end` needn't ask for room. Never blocks."""
        return self._open_file.has_room(end)

    def ensure_room(self, end: int) -> None:
        """Reserve room for writes up to byte `end` now, where a quota counts the file: they need no further
        request then. What isn't written is given back at close. QuotaExceeded if there isn't so much; nothing
        is reserved then. Blocking, if it isn't reserved yet. docs/client.md, Quotas."""
        self._check_writable()
        if not self._discarded:
            self._open_file.ensure_room(end)

    def note_failed(self) -> None:
        """A ring request that writes has failed or was given up: the service is told at close."""
        self._open_file.note_failed()

    def truncate(self, size: int | None = None, /) -> int:
        """Set the length (None: the position), published at once. The position stays. Blocking."""
        self._check_writable()
        length = self._position if size is None else size
        if length < 0:
            raise errors.InvalidArgument(f"length {length} is negative", self.name)
        if not self._discarded:
            self._settle()
            self._open_file.truncate(length)
        return length

    def flush(self) -> None:
        """Publish the length of what was written. Blocking if there is something to publish."""
        super().flush()
        if not self._discarded:
            self._settle()
            self._open_file.report()

    def fsync(self) -> None:
        """As flush: what was written is durable already, and its length is when this returns."""
        self._check_open()
        self.flush()

    def flock(self, operation: int) -> None:
        """As fcntl.flock, with its constants: an advisory lock against other opens of the file, anywhere. It
        ends by LOCK_UN, at close, and with this process's session. Blocking, unless LOCK_NB: then
        BlockingIOError. docs/client.md, Locks."""
        self._check_open()
        lock = self._lock
        if lock is None:
            lock = self._lock = Lock(self.client.core_of_process, self.inode, self.name, self.ticket)
        lock.flock(operation)
        self._open_file.changed()  # what others wrote under it is to be seen

    # --- ending -----------------------------------------------------------------------------

    def discard(self) -> None:
        """Close without publishing an atomic file; what is still in buffers goes nowhere. Other files
        are closed as by `close`."""
        if self._publish_as is not None:
            self._discarded = True
        self.close()

    def close(self) -> None:
        """Publish (length, and the name of an atomic file) and close. Repeatable. Blocking.

        It is closed also when this raises: then what wasn't published before isn't.
        """
        if self.closed:
            return
        try:
            self._finish()
        finally:
            self._discarded = True
            super().close()

    def bare_handle(self) -> OpenFile | None:
        """What is to be closed where nothing stands above it that must be seen to before: no buffer, no lock,
        no name to be given. Else None: then `close` alone does it."""
        plain = self._ahead is None and self._behind is None and self._publish_as is None
        return self._open_file if plain and self._lock is None else None

    @property
    def open_handle(self) -> OpenFile:
        return self._open_file

    def note_closed(self) -> None:
        """It was closed with others (closing.py)."""
        self._discarded = True
        super().close()

    def _finish(self) -> None:
        handle = self._open_file
        try:
            if self._ahead is not None:
                self._ahead.close()
            self._end_behind()
            if self._publish_as is not None and not self._discarded and os.getpid() == self._pid:
                if self._failure is not None:
                    raise errors.error_of(
                        self._failure.errno or 0,
                        f"nothing was published, since a write failed: {self._failure.strerror}",
                        self._publish_as,
                    )
                handle.publish(encode_path(self._publish_as), replace=self._replace)
        finally:
            try:
                handle.close()
            finally:
                if self._lock is not None and os.getpid() == self._pid:
                    self._lock.release()

    def _end_behind(self) -> None:
        if self._behind is None:
            return
        with self._position_lock:
            if self._discarded or (self._publish_as is not None and self._failure is not None):
                self._behind.discard()  # nothing will be published
                return
            try:
                self._behind.finish()
            except OSError as error:
                self._failure = error
                if self._publish_as is None:
                    raise

    def hand_over(self, work: Callable[[], None]) -> bool:
        """For __del__: whether `work` must wait until this thread has left the file's lock, and will be done
        then (lanes.py), or will be done by another thread, since garbage is collected (dropped.py)."""
        tenants = (self._ahead, self._behind)
        if any(tenant is not None and tenant.hand_over(work) for tenant in tenants):
            return True
        return hand_over(work)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if getattr(self, "_open_file", None) is None or self.closed or self.layered:
            return  # a layer that was dropped with it closes it, when what it holds is written
        self._dealloc_warn(self)
        if not self.hand_over(self.discard):
            self.discard()

    def _dealloc_warn(self, source: object) -> None:
        """Called by io's layers too when they are dropped without a close."""
        if not self.closed and os.getpid() == self._pid:
            warnings.warn(f"unclosed file {source!r}", ResourceWarning, stacklevel=2, source=source)

    def after_fork_in_child(self) -> None:
        """Locks may be held by threads that don't exist here."""
        self._position_lock = threading.Lock()
        self._lock = None  # the parent's
        for tenant in (self._ahead, self._behind):
            if tenant is not None:
                tenant.after_fork_in_child(self._position_lock)
        self._open_file.after_fork_in_child()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._check_open()
        if self._open_file.writing:
            raise TypeError(f"cannot pickle {self!r}: it is open for writing")
        return reopen, (
            self.client,
            self.name,
            self._open_file.ino,
            "rb",
            0,
            None,
            None,
            None,
            self._position,
            self.ticket,
        )

    # --- checks -----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def _check_readable(self) -> None:
        self._check_open()
        if not self._reads:
            raise errors.Unsupported("not open for reading", self.name)

    def _check_writable(self) -> None:
        self._check_open()
        if not self._open_file.writing:
            raise errors.Unsupported("not open for writing", self.name)


def _writable_bytes(buffer: WriteableBuffer) -> NDArray[np.uint8]:
    view = memoryview(buffer)
    if view.readonly:
        raise TypeError("readinto() needs a writable buffer")
    return np.frombuffer(view.cast("B"), dtype=np.uint8) if view.nbytes else np.zeros(0, np.uint8)


def _readable_bytes(buffer: ReadableBuffer) -> NDArray[np.uint8]:
    view = memoryview(buffer)
    return np.frombuffer(view.cast("B"), dtype=np.uint8) if view.nbytes else np.zeros(0, np.uint8)


def _check_offset(offset: int, name: str) -> None:
    if offset < 0:
        raise errors.InvalidArgument(f"offset {offset} is negative", name)


def reopen(
    client: Client,
    path: str,
    ino: int,
    mode: str,
    buffering: int,
    encoding: str | None,
    errors_: str | None,
    newline: str | None,
    position: int,
    ticket: bytes,
) -> Any:
    """Make again a file that was open for reading, in the process that unpickles it."""
    from ffs.client.opening import open_file

    file = open_file(client, path, mode, buffering, encoding, errors_, newline, ino=ino, ticket=ticket)
    file.seek(position)
    return file

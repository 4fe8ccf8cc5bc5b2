"""Moves the content of many files at once: small ones in batches, large ones in pieces.

The thread that plans calls `add` and `finish`; a pool of workers does the rest and reports through the
two callbacks, one at a time. A target gets its name when it is whole, with its attributes. With
`resumable`, large targets grow in a part file beside them, and a later run goes on from it: pieces are
handed out in order and at most WINDOW are unfinished, so all but the last WINDOW pieces of what is
there is whole.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from ffs import errors
from ffs.cli.copying.sides import Meta, Reader, Side, Writer
from ffs.cli.progress import Meter

E = TypeVar("E")

SMALL_BYTES = 1 << 20
PIECE_BYTES = 8 << 20
PART_BYTES = 64 << 20
"""From which size on a resumable copy keeps what it has."""
WINDOW = 4
_BATCH_FILES = 64
_BATCH_BYTES = 16 << 20
_WORKERS = 24  # small files wait for durable writes and commits, which go together
_CHECKPOINT_PIECES = 16

COPIED, SAME = "copied", "same"


@dataclass(frozen=True, slots=True)
class Item:
    """One file to move. `compare`: only if its content differs from the target's, which has its size."""

    source: str
    target: str
    size: int
    mtime_ns: int
    meta: Meta
    new_mode: int = 0o666
    compare: bool = False


ENDS_ALL = (errors.Unreachable, errors.ShutDown, errors.Cancelled)
"""Errors that aren't one file's: nothing more can be done."""

_NO_ROOM = (errors.NoSpace, errors.QuotaExceeded)


class Stopped(Exception):
    """The run is being given up."""


class Mover:
    """`with Mover(...) as mover: mover.add(item); ...; mover.finish()`."""

    def __init__(
        self,
        source: Side,
        target: Side,
        meter: Meter,
        done: Callable[[Item, str], None],
        failed: Callable[[Item, BaseException], None],
        *,
        resumable: bool = False,
    ) -> None:
        """`done(item, COPIED or SAME)`, `failed(item, error)`: called from any thread, one at a time."""
        self._source, self._target, self._meter = source, target, meter
        self._done, self._failed = done, failed
        self._resumable = resumable
        self._workers = ThreadPoolExecutor(_WORKERS, "ffs-copy")
        self._lanes = ThreadPoolExecutor(WINDOW, "ffs-lane")
        self._room = threading.BoundedSemaphore(2 * _WORKERS)
        self._local = threading.local()
        self._telling = threading.Lock()
        self._stop = threading.Event()
        self._fatal: BaseException | None = None
        self._pending: list[Item] = []
        self._pending_bytes = 0
        self._tasks: set[Future[None]] = set()

    # --- the planning thread ----------------------------------------------------------------

    def add(self, item: Item) -> None:
        """Have it moved. Blocks while much is on its way; raises what ends the run."""
        if item.compare or item.size > SMALL_BYTES:
            self._submit(self._move_one, item)
            return
        self._pending.append(item)
        self._pending_bytes += item.size
        if len(self._pending) >= _BATCH_FILES or self._pending_bytes >= _BATCH_BYTES:
            self._flush(_BATCH_FILES)

    def finish(self) -> None:
        """Wait until all is moved or has failed; raises what ended the run."""
        # The rest is spread over the workers rather than sent as one batch.
        self._flush(max(4, -(-len(self._pending) // _WORKERS)))
        for task in list(self._tasks):
            task.result()
        self._check()

    def _flush(self, step: int) -> None:
        batch, self._pending, self._pending_bytes = self._pending, [], 0
        for start in range(0, len(batch), step):
            self._submit(self._move_batch, batch[start : start + step])

    def _submit(self, work: Callable[..., None], argument: object) -> None:
        self._check()
        self._room.acquire()

        def task() -> None:
            try:
                work(argument)
            except Stopped:
                pass
            except BaseException as error:
                self._fatal = self._fatal or error
                self._stop.set()
            finally:
                self._room.release()

        future = self._workers.submit(task)
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)

    def _check(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stop.set()
        self._workers.shutdown(wait=True)
        self._lanes.shutdown(wait=True)

    # --- workers ----------------------------------------------------------------------------

    def _tell(self, item: Item, outcome: str) -> None:
        with self._telling:
            self._done(item, outcome)

    def _report(self, item: Item, error: BaseException) -> None:
        """An OSError is the file's own, unless it says that nobody is there; the rest ends the run. So does
        the first that finds no room: thousands would follow."""
        if isinstance(error, ENDS_ALL) or not isinstance(error, OSError):
            raise error
        with self._telling:
            if self._stop.is_set():
                return
            self._failed(item, error)
            if isinstance(error, _NO_ROOM) or error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._stop.set()
                self._fatal = errors.Cancelled(
                    "given up, since there is no room; what was copied stays: sync, or --resume, goes on"
                )

    def _move_batch(self, batch: list[Item]) -> None:
        self._check_stop()
        readers = self._source.open_readers([item.source for item in batch])
        writers: list[Writer | OSError] = []
        try:
            wanted = [i for i, reader in enumerate(readers) if not isinstance(reader, OSError)]
            writers = self._target.open_writers([(batch[i].target, batch[i].new_mode) for i in wanted])
            by_item = dict(zip(wanted, writers, strict=True))
            for i, (item, reader) in enumerate(zip(batch, readers, strict=True)):
                self._check_stop()
                opened = by_item.get(i)
                if isinstance(reader, OSError):
                    self._report(item, reader)
                elif isinstance(opened, OSError):
                    self._report(item, opened)
                elif opened is not None:
                    self._move_small(item, reader, opened)
        finally:
            for reader in readers:
                if not isinstance(reader, OSError):
                    reader.close()
            for writer in writers:
                if not isinstance(writer, OSError):
                    writer.abandon()

    def _move_small(self, item: Item, reader: Reader, writer: Writer) -> None:
        try:
            size = self._stream(reader, writer, 0)
            writer.commit(size, item.meta)
        except OSError as error:
            with contextlib.suppress(OSError):
                writer.abandon()
            self._report(item, error)
            return
        self._meter.file_done()
        self._tell(item, COPIED)

    def _stream(self, reader: Reader, writer: Writer, offset: int) -> int:
        """From `offset` to the source's end, whatever its size was said to be; returns the end."""
        buffer = self._buffer()
        while count := reader.read_at(offset, buffer):
            self._check_stop()
            writer.write_at(offset, buffer[:count])
            offset += count
            self._meter.advance(count)
            if count < len(buffer):
                break
        return offset

    def _move_one(self, item: Item) -> None:
        self._check_stop()
        try:
            if item.compare and self._same(item):
                self._target.apply(item.target, item.meta)
                self._meter.file_done()
                self._tell(item, SAME)
                return
            self._move_large(item)
        except OSError as error:
            self._report(item, error)
            return
        self._meter.file_done()
        self._tell(item, COPIED)

    def _move_large(self, item: Item) -> None:
        reader = _opened(self._source.open_readers([item.source])[0])
        try:
            if self._resumable and item.size >= PART_BYTES:
                part = part_name(item.target, item.size, item.mtime_ns)
                writer = self._target.open_part(item.target, part, item.new_mode, item.size)
            else:
                writer = _opened(self._target.open_writers([(item.target, item.new_mode)])[0])
            try:
                end = self._pieces(item, reader, writer)
                writer.commit(end, item.meta)
            finally:
                writer.abandon()
        finally:
            reader.close()

    def _pieces(self, item: Item, reader: Reader, writer: Writer) -> int:
        start = max(0, writer.kept // PIECE_BYTES - WINDOW) * PIECE_BYTES
        if start > item.size:
            start = 0
        self._meter.advance(start)
        flying: collections.deque[Future[int]] = collections.deque()
        short = False
        end, offset, count = start, start, 0
        try:
            while flying or offset < item.size:
                while len(flying) < WINDOW and offset < item.size and not short:
                    size = min(PIECE_BYTES, item.size - offset)
                    flying.append(self._lanes.submit(self._piece, reader, writer, offset, size))
                    offset += size
                if not flying:
                    break
                moved = flying.popleft().result()
                expected = min(PIECE_BYTES, item.size - end)
                if not short:
                    end += moved
                short = short or moved < expected  # the source was cut meanwhile
                count += 1
                if count % _CHECKPOINT_PIECES == 0:
                    writer.checkpoint()
        finally:
            for future in flying:
                future.cancel()
            for future in flying:
                if not future.cancelled():
                    future.exception()
        return end if short else self._stream(reader, writer, end)

    def _piece(self, reader: Reader, writer: Writer, offset: int, size: int) -> int:
        self._check_stop()
        view = self._buffer()[:size]
        count = reader.read_at(offset, view)
        writer.write_at(offset, view[:count])
        self._meter.advance(count)
        return count

    def _same(self, item: Item) -> bool:
        """Whether both have the same content; the target is known to have the source's size."""
        readers = [
            _opened(self._source.open_readers([item.source])[0]),
        ]
        try:
            readers.append(_opened(self._target.open_readers([item.target])[0]))
            ours = self._buffer()
            theirs = self._buffer(1)
            offset = 0
            while True:
                self._check_stop()
                count = readers[0].read_at(offset, ours)
                if readers[1].read_at(offset, theirs) != count or ours[:count] != theirs[:count]:
                    return False
                offset += count
                if count < len(ours):
                    return True
        finally:
            for reader in readers:
                reader.close()

    def _buffer(self, which: int = 0) -> memoryview:
        buffers: dict[int, memoryview] = self._local.__dict__.setdefault("buffers", {})
        if which not in buffers:
            buffers[which] = memoryview(bytearray(PIECE_BYTES))
        return buffers[which]

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopped


def _opened(result: E | OSError) -> E:
    if isinstance(result, OSError):
        raise result
    return result


_PART = re.compile(r"\..*\.[0-9a-f]{16}\.ffs-part\Z", re.DOTALL)


def part_name(target: str, size: int, mtime_ns: int) -> str:
    """Where a large target grows: beside it, hidden, and another one for another state of the source."""
    folder, name = os.path.split(target.rstrip("/"))
    text = f"{size} {mtime_ns} ".encode() + os.fsencode(name)
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    while len(os.fsencode(name)) > 200:
        name = name[:-1]
    return os.path.join(folder, f".{name}.{digest}.ffs-part")


def is_part(name: str) -> bool:
    """Whether it is the name of a part file."""
    return _PART.match(name) is not None

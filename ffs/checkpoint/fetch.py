"""Reading many ranges of many files through one ring: large requests in file order, many in flight
(docs/guides/checkpoint.md, Loading; FAULTS C16).

Bytes go straight to where they belong if that is an Iov, else through places of the ring's own memory. Blocks
its thread; nothing is in flight when a function returns or raises, and the first failure is raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ffs import Iov
from ffs.checkpoint.spans import cut
from ffs.checkpoint.stream import MAX_PIECE_BYTES
from ffs.checkpoint.tensors import Bytes
from ffs.client.ior import Ior
from ffs.errors import FfsError, ProtocolError

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

ENTRIES: Final = 256
IN_FLIGHT_BYTES: Final = 128 << 20
PLACES: Final = 16
_SMALL_BYTES: Final = 256 << 10
_GATHERED: Final = 4  # ranges that are put together in memory of their own, at once


@dataclass(slots=True, eq=False)
class Want:
    """Bytes [offset, offset + length) of a file: straight into `iov` at `at`; else copied to `into` as they
    come; or, with neither, put together in memory of their own. `done` is called when all have come, with
    that memory if there is any. `into` may be there beside `iov`: the same bytes."""

    path: str
    offset: int
    length: int
    iov: Iov | None = None
    at: int = 0
    into: Bytes | None = None
    done: Callable[[Bytes | None], None] = lambda memory: None
    left: int = 0


@dataclass(slots=True)
class _Piece:
    want: Want
    file: File
    offset: int
    length: int
    place: int = -1  # of the ring's own memory, for `into`


class _Files:
    """Opened when first needed, closed when the last range that was asked of it has come."""

    def __init__(self, client: Client, opened: Callable[[File, str], None]) -> None:
        self._client = client
        self._opened = opened
        self._open: dict[str, File] = {}
        self._users: dict[str, int] = {}

    def use(self, path: str) -> File:
        file = self._open.get(path)
        if file is None:
            for other in [p for p, users in self._users.items() if not users]:
                self._close(other)
            file = self._open[path] = self._client.open(path, "rb", buffering=0)
            self._users[path] = 0
            self._opened(file, path)
        self._users[path] += 1
        return file

    def leave(self, path: str) -> None:
        self._users[path] -= 1

    def _close(self, path: str) -> None:
        del self._users[path]
        self._open.pop(path).close()

    def close(self) -> None:
        for path in list(self._open):
            self._close(path)


def merged(wants: Sequence[Want]) -> Iterator[Want]:
    """Small neighbours of one file as one request each, put together and handed on. `wants` in file order."""
    group: list[Want] = []
    for want in wants:
        if group and not _joins(group, want):
            yield _together(group)
            group = []
        group.append(want)
    if group:
        yield _together(group)


def _joins(group: Sequence[Want], want: Want) -> bool:
    first, last = group[0], group[-1]
    gap = want.offset - last.offset - last.length
    return (
        want.path == first.path
        and 0 <= gap <= 4096
        and max(want.length, last.length) < _SMALL_BYTES
        and want.offset + want.length - first.offset <= MAX_PIECE_BYTES
    )


def _together(group: list[Want]) -> Want:
    if len(group) == 1:
        return group[0]
    first, last = group[0], group[-1]

    def hand_on(memory: Bytes | None) -> None:
        assert memory is not None
        for want in group:
            data = memory[want.offset - first.offset :][: want.length]
            if want.into is not None:
                want.into[:] = data
            want.done(None if want.into is not None else data)

    return Want(first.path, first.offset, last.offset + last.length - first.offset, done=hand_on)


def fetch(
    client: Client, wants: Iterable[Want], opened: Callable[[File, str], None], priority: int = 0
) -> int:
    """Reads all; bytes that were read. `opened` is shown each file once it is open, and may refuse it."""
    files = _Files(client, opened)
    ring = Ior(client, ENTRIES, kind="read", priority=priority)
    try:
        return _Run(ring, files).run(wants)
    finally:
        ring.close()
        files.close()


class _Run:
    def __init__(self, ring: Ior, files: _Files) -> None:
        self._ring = ring
        self._files = files
        self._pieces: dict[int, _Piece] = {}
        self._next = 0
        self._bytes = 0  # in flight
        self._own: Iov | None = None  # PLACES places
        self._free: list[int] = list(range(PLACES))
        self._gathered: dict[int, Iov] = {}  # by id of Want
        self._read = 0

    def run(self, wants: Iterable[Want]) -> int:
        waiting: deque[_Piece] = deque()
        source = iter(wants)
        more = True
        while more or waiting or self._pieces:
            while more and not waiting:
                more = self._cut_next(source, waiting)
            while waiting and self._start(waiting[0]):
                waiting.popleft()
            if self._pieces:
                self._finish()
        return self._read

    def _cut_next(self, source: Iterator[Want], waiting: deque[_Piece]) -> bool:
        want = next(source, None)
        if want is None:
            return False
        if not want.length:
            want.done(None)
            return True
        file = self._files.use(want.path)
        want.left = want.length
        piece_bytes = min(file.placement.layout.chunk_size, MAX_PIECE_BYTES)
        for offset, length in cut(want.offset, want.offset + want.length, piece_bytes):
            waiting.append(_Piece(want, file, offset, length))
        return True

    def _start(self, piece: _Piece) -> bool:
        """Whether it is in flight now."""
        want = piece.want
        if len(self._pieces) >= ENTRIES or self._bytes + piece.length > max(IN_FLIGHT_BYTES, piece.length):
            return False
        ahead = piece.offset - want.offset
        if want.iov is not None:
            memory = want.iov[want.at + ahead : want.at + ahead + piece.length]
        elif want.into is not None:
            if not self._free:
                return False
            if self._own is None:
                self._own = Iov(PLACES * MAX_PIECE_BYTES)
            piece.place = self._free.pop()
            begin = piece.place * MAX_PIECE_BYTES
            memory = self._own[begin : begin + piece.length]
        else:
            iov = self._gathered.get(id(want))
            if iov is None:
                if len(self._gathered) >= _GATHERED:
                    return False
                iov = self._gathered[id(want)] = Iov(want.length)
            memory = iov[ahead : ahead + piece.length]
        self._ring.prepare(piece.file, piece.offset, memory, self._next)
        self._pieces[self._next] = piece
        self._next += 1
        self._bytes += piece.length
        return True

    def _finish(self) -> None:
        """At least one piece."""
        for completion in self._ring.wait(1):
            piece = self._pieces.pop(completion.userdata)
            self._bytes -= piece.length
            if completion.error is not None:
                raise completion.error
            if completion.result != piece.length:
                raise _too_short(piece, completion.result)
            self._read += piece.length
            self._arrived(piece)

    def _arrived(self, piece: _Piece) -> None:
        want = piece.want
        if piece.place >= 0:
            assert self._own is not None
            assert want.into is not None
            begin = piece.place * MAX_PIECE_BYTES
            ahead = piece.offset - want.offset
            whole = self._own.numpy()
            want.into[ahead : ahead + piece.length] = whole[begin : begin + piece.length]
            del whole
            self._free.append(piece.place)
        want.left -= piece.length
        if want.left:
            return
        self._files.leave(want.path)
        iov = self._gathered.pop(id(want), None)
        want.done(None if iov is None else np.frombuffer(iov[: want.length].view, np.uint8))


def _too_short(piece: _Piece, moved: int) -> FfsError:
    return ProtocolError(
        f"{moved} of {piece.length} bytes at {piece.offset} were read: the file is shorter than it should be",
        piece.file.name,
    )

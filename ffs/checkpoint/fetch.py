"""Reading many ranges of many files through one ring: large requests in file order, many in flight
(docs/guides/checkpoint.md, Loading; FAULTS C16).

Bytes go straight to where they belong if that is an Iov, else through places of the ring's own memory. Blocks
its thread; nothing is in flight when a function returns or raises, and the first failure is raised.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ffs import Iov
from ffs.checkpoint.snapshot import ranks_here
from ffs.checkpoint.spans import cut
from ffs.checkpoint.stream import MAX_PIECE_BYTES
from ffs.checkpoint.tensors import Bytes, Place, memory_at
from ffs.client.copying import IovSlice
from ffs.client.ior import Ior
from ffs.errors import FfsError, ProtocolError

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

ENTRIES: Final = 256
_OF_HOST: Final = 64  # pieces of a chunk in flight, of all ranks of a host together
_OF_RANK: Final = 8  # at least
_GAP_BYTES: Final = 4096
_GATHERED: Final = 4  # ranges that are put together in memory of their own, at once
_AHEAD: Final = 64  # files that are opened before they are needed
_TOGETHER: Final = 32  # by one request


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
    into: Place | None = None
    done: Callable[[Bytes | None], None] = lambda memory: None
    left: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    """Bytes [begin, end) of a file, which are read as one: neighbours that go to many places, or one want
    that has memory for itself. `ends`: where each want ends, for finding those that a piece is of."""

    path: str
    begin: int
    end: int
    wants: list[Want]
    ends: list[int]
    file: File | None = None
    left: int = 0


@dataclass(slots=True)
class _Piece:
    run: _Run
    offset: int
    length: int
    place: int = -1  # of the ring's own memory


def runs(wants: Iterable[Want]) -> Iterator[_Run]:
    """`wants` in file order. Those that are copied as they come are read with their neighbours. Pure."""
    run: _Run | None = None
    for want in wants:
        end = want.offset + want.length
        alone = want.iov is not None or want.into is None
        if run is not None and (
            alone
            or run.path != want.path
            or run.wants[-1].into is None
            or run.wants[-1].iov is not None
            or not 0 <= want.offset - run.end <= _GAP_BYTES
        ):
            yield run
            run = None
        if run is None:
            run = _Run(want.path, want.offset, end, [], [])
        run.end = end
        run.wants.append(want)
        run.ends.append(end)
    if run is not None:
        yield run


def in_flight(ranks: int) -> int:
    """How many pieces a rank reads at once where so many share the host: a disk or a link has enough to do
    with fewer than it could take, and what it gets too much waits there, in front of what others need soon (a
    flush of the metadata service, say), and comes when caches have forgotten the rest. Pure."""
    return max(_OF_RANK, _OF_HOST // ranks)


class _Files:
    """Opened ahead and closed when the last range of one has come, many by one request."""

    def __init__(self, client: Client, paths: list[str], opened: Callable[[File, str], None]) -> None:
        self._client = client
        self._opened = opened
        self._names = ThreadPoolExecutor(2, thread_name_prefix="ffs-fetch")
        self._paths = deque(paths)
        self._opening: dict[str, tuple[Future[list[File | FfsError]], int]] = {}  # and its place in there
        self._users: dict[str, int] = {}
        self._over: list[File] = []
        self._look_ahead()

    def use(self, path: str) -> File:
        """Raises what opening raised, and what `opened` raises."""
        first = path not in self._users
        while path not in self._opening:  # more files at once than are opened ahead
            self._open_some()
        file = self._opened_file(path)
        if first:
            self._users[path] = 0
            self._opened(file, path)
        self._users[path] += 1
        return file

    def leave(self, path: str, last: bool) -> None:
        """A range of it has come; `last`: there are no more."""
        self._users[path] -= 1
        if last and not self._users[path]:
            self._over.append(self._opened_file(path))
            del self._opening[path]
            if len(self._over) >= _TOGETHER:
                self._close_some()
            self._look_ahead()

    def _opened_file(self, path: str) -> File:
        opening, at = self._opening[path]
        file = opening.result()[at]
        if isinstance(file, FfsError):
            raise file
        return file

    def _look_ahead(self) -> None:
        while self._paths and len(self._opening) <= _AHEAD - _TOGETHER:
            self._open_some()

    def _open_some(self) -> None:
        paths = [self._paths.popleft() for _ in range(min(_TOGETHER, len(self._paths)))]
        opening = self._names.submit(self._client.open_many, paths)
        self._opening.update({path: (opening, at) for at, path in enumerate(paths)})

    def _close_some(self) -> None:
        over, self._over = self._over, []
        self._names.submit(self._client.close_many, over)

    def close(self) -> None:
        self._paths.clear()
        for opening, at in self._opening.values():
            if opening.exception() is None and not isinstance(file := opening.result()[at], FfsError):
                self._over.append(file)
        self._close_some()
        self._names.shutdown()


def fetch(
    client: Client,
    wants: Iterable[Want],
    opened: Callable[[File, str], None],
    priority: int = 0,
    places: IovSlice | None = None,
) -> int:
    """Reads all of `wants`, which are in file order, a file's together; bytes that were read. `opened` is
    shown each file once it is open, and may refuse it. `places`: memory for what goes through the ring's
    own."""
    found = [run for run in runs(want for want in wants if _is_something(want))]
    if not found:
        return 0
    files = _Files(client, list(dict.fromkeys(run.path for run in found)), opened)
    ring = Ior(client, ENTRIES, kind="read", priority=priority)
    try:
        return _Fetch(ring, files, found, places).run()
    finally:
        ring.close()
        files.close()


def _is_something(want: Want) -> bool:
    if not want.length:
        want.done(None)
    return bool(want.length)


class _Fetch:
    def __init__(self, ring: Ior, files: _Files, found: list[_Run], places: IovSlice | None) -> None:
        self._ring = ring
        self._files = files
        self._runs = deque(found)
        self._last = {run.path: run for run in found}  # the last of each file
        self._waiting: deque[_Piece] = deque()
        self._pieces: dict[int, _Piece] = {}
        self._next = 0
        self._places = places
        self._free: list[int] = []
        self._place_bytes = 0
        self._gathered: dict[int, Iov] = {}  # by id of _Run
        self._read = 0
        self._most = in_flight(ranks_here())
        self._flying = self._most_flying = 0  # bytes

    def run(self) -> int:
        while self._runs or self._waiting or self._pieces:
            while len(self._pieces) < ENTRIES and self._flying <= self._most_flying:
                if not self._waiting and not self._cut_next():
                    break
                if not self._start(self._waiting[0]):
                    break
                self._waiting.popleft()
            if self._pieces:
                self._finish()
        return self._read

    def _cut_next(self) -> bool:
        if not self._runs:
            return False
        run = self._runs.popleft()
        run.file = self._files.use(run.path)
        run.left = run.end - run.begin
        for want in run.wants:
            want.left = want.length
        size = _piece_bytes(run.file)
        self._most_flying = (self._most - 1) * size
        self._waiting.extend(_Piece(run, at, length) for at, length in cut(run.begin, run.end, size))
        return True

    def _start(self, piece: _Piece) -> bool:
        """Whether it is in flight now."""
        memory = self._memory(piece)
        if memory is None:
            return False
        assert piece.run.file is not None
        self._ring.prepare(piece.run.file, piece.offset, memory, self._next)
        self._pieces[self._next] = piece
        self._next += 1
        self._flying += piece.length
        return True

    def _memory(self, piece: _Piece) -> IovSlice | None:
        want = piece.run.wants[0]
        ahead = piece.offset - piece.run.begin
        if want.iov is not None:
            return want.iov[want.at + ahead : want.at + ahead + piece.length]
        if want.into is None:
            iov = self._gathered.get(id(piece.run))
            if iov is None:
                if len(self._gathered) >= _GATHERED:
                    return None
                iov = self._gathered[id(piece.run)] = Iov(want.length)
            return iov[ahead : ahead + piece.length]
        if not self._place_bytes:
            self._make_places(piece)
        if not self._free:
            return None
        piece.place = self._free.pop()
        return self._place(piece)

    def _make_places(self, piece: _Piece) -> None:
        assert piece.run.file is not None
        self._place_bytes = _piece_bytes(piece.run.file)
        if self._places is None or len(self._places) < self._place_bytes:
            self._places = Iov(self._most * self._place_bytes)[:]
        self._free = list(range(min(self._most, len(self._places) // self._place_bytes)))

    def _place(self, piece: _Piece) -> IovSlice:
        assert self._places is not None
        begin = piece.place * self._place_bytes
        return self._places[begin : begin + piece.length]

    def _finish(self) -> None:
        """At least one piece."""
        for completion in self._ring.wait(1):
            piece = self._pieces.pop(completion.userdata)
            self._flying -= piece.length
            if completion.error is not None:
                raise completion.error
            if completion.result != piece.length:
                raise _too_short(piece, completion.result)
            self._read += piece.length
            self._arrived(piece)

    def _arrived(self, piece: _Piece) -> None:
        run = piece.run
        if piece.place >= 0:
            self._copy_out(piece)
            self._free.append(piece.place)
        elif len(run.wants) == 1:
            run.wants[0].left -= piece.length
        run.left -= piece.length
        if run.left:
            return
        self._files.leave(run.path, self._last[run.path] is run)
        if piece.place < 0:
            iov = self._gathered.pop(id(run), None)
            want = run.wants[0]
            want.done(None if iov is None else np.frombuffer(iov[: want.length].view, np.uint8))

    def _copy_out(self, piece: _Piece) -> None:
        """To all that want bytes of it."""
        wants, end = piece.run.wants, piece.offset + piece.length
        data = np.frombuffer(self._place(piece).view, np.uint8)
        at = bisect.bisect_right(piece.run.ends, piece.offset)
        while at < len(wants) and wants[at].offset < end:
            want = wants[at]
            begin, stop = max(want.offset, piece.offset), min(want.offset + want.length, end)
            assert want.into is not None
            into = want.into = memory_at(want.into)
            into[begin - want.offset : stop - want.offset] = data[begin - piece.offset : stop - piece.offset]
            want.left -= stop - begin
            if not want.left:
                want.done(None)
            at += 1


def _piece_bytes(file: File) -> int:
    return min(file.placement.layout.chunk_size, MAX_PIECE_BYTES)


def _too_short(piece: _Piece, moved: int) -> FfsError:
    return ProtocolError(
        f"{moved} of {piece.length} bytes at {piece.offset} were read: the file is shorter than it should be",
        piece.run.path,
    )

"""Reading ahead of a buffered file: the I/O to the decisions of readahead.py. docs/client.md, Reading ahead.

Errors of what was fetched ahead never surface: the reader then reads by itself, and has its own.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ffs.client.lanes import LANE_BYTES, Tenant
from ffs.client.readahead import OLDEST_S, PIECE_BYTES, Pattern, Piece, next_piece
from ffs.errors import FfsError

if TYPE_CHECKING:
    from threading import Lock

    from ffs.client.handle import OpenFile
    from ffs.client.lanes import Lane, LanePool

_MAX_PIECES: Final = 32

_log = logging.getLogger(__name__)


class _Held:
    """A piece in its place of the lane's memory, under way or there."""

    __slots__ = ("asked_at", "failed", "piece", "place", "ready")

    def __init__(self, piece: Piece, place: int, asked_at: float) -> None:
        self.piece = piece
        self.place = place
        self.asked_at = asked_at
        self.ready = False
        self.failed = False


class Ahead(Tenant):
    """Of one file. All but `changed` and `close` under `lock`, the file's."""

    def __init__(self, handle: OpenFile, lock: Lock, buffer_bytes: int) -> None:
        super().__init__(lock)
        self._handle = handle
        self._pattern = Pattern(buffer_bytes)
        self._lane: Lane | None = None
        self._pool: LanePool | None = None
        self._place_bytes = PIECE_BYTES
        self._free: list[int] = []
        self._flying: dict[int, _Held] = {}  # by place; also what nobody wants any more
        self._held: deque[_Held] = deque()  # in the file's order, without gaps
        self._stale = False
        self._used_at = 0.0
        self._over = False

    @property
    def ino(self) -> int:
        return self._handle.ino

    def changed(self) -> None:
        """The file was written or cut: what was fetched before isn't served any more. Any thread."""
        self._stale = True

    def read(self, offset: int, out: NDArray[np.uint8]) -> int:
        """As OpenFile.read_at, perhaps fewer bytes: 0 only at the file's end. Blocking."""
        handle = self._handle
        if self._stale:
            self._stale = False
            self._forget_held()
        count = 0
        if offset < handle.length:
            serve, window = self._pattern.ask(offset, len(out))
            if window == 0:
                self.leave()
            elif self._enter():
                count = self._stream(offset, out[:serve], window)
            out = out[:serve]
        if count == 0:
            count = handle.read_at(offset, out)
        self._pattern.served(offset + count)
        if self._over:
            self.leave()
        return count

    def leave(self) -> None:
        """Give the lane back. Never blocks on a server."""
        if self._lane is None:
            return
        lane, pool = self._lane, self._pool
        assert pool is not None
        self._lane = self._pool = None
        self._held.clear()
        self._flying = {}
        self._handle.forget_reader(self)
        pool.give(lane, self)

    def close(self) -> None:
        """Give the lane back, at once or when whoever reads just now is done. Any thread; never blocks."""
        self._over = True
        if self._lock.acquire(blocking=False):
            try:
                self.leave()
            finally:
                self._lock.release()

    def after_fork_in_child(self, lock: Lock) -> None:
        """The lane is the parent's."""
        self._lock = lock
        self._lane = self._pool = None
        self._held.clear()
        self._flying = {}
        self._pattern.forget()

    def _look_after(self, now: float) -> None:
        if self._lane is None:
            return
        try:
            if self._over or now - self._used_at > OLDEST_S:
                self._pattern.outlived()
                self.leave()
            elif self._flying:
                self._receive(0)
        except FfsError:
            self._break()
            raise

    # inside

    def _enter(self) -> bool:
        """Have a lane of the session that lives; False: there is none to be had."""
        self._used_at = time.monotonic()
        try:
            pool = self._handle.live_session().lanes
        except FfsError:
            return False  # whoever reads now is told why
        if self._lane is not None and self._pool is pool:
            return True
        self.leave()
        lane = pool.take(LANE_BYTES, self)
        if lane is None:
            return False
        layout = self._handle.layout
        assert layout is not None
        self._lane, self._pool = lane, pool
        self._place_bytes = min(PIECE_BYTES, layout.chunk_size)
        self._free = list(range(min(len(lane.memory) // self._place_bytes, _MAX_PIECES)))
        self._handle.note_reader(self)
        return True

    def _stream(self, offset: int, out: NDArray[np.uint8], window: int) -> int:
        """Give what is held from `offset` on, waiting for what is under way, and have more fetched. 0: it
        can't be had that way."""
        try:
            self._skip_to(offset)
            done = 0
            while done < len(out):
                self._fetch(offset + done, offset + len(out) + window)
                if not self._held or not self._await_first():
                    break
                done += self._give(offset + done, out[done:])
            return done
        except FfsError as error:
            _log.info("nothing is read ahead of %s for now: %s", self._handle.path, error)
            self._break()
            return 0
        except BaseException:
            self._break()
            raise

    def _skip_to(self, offset: int) -> None:
        held = self._held
        while held and held[0].piece.start + held[0].piece.length <= offset:
            self._let_go(held.popleft())
        if held and held[0].piece.start > offset:
            self._forget_held()

    def _fetch(self, start: int, until: int) -> None:
        """Have pieces under way up to `until`, as far as there are places."""
        handle, lane = self._handle, self._lane
        assert lane is not None
        assert handle.layout is not None
        if self._held:
            last = self._held[-1].piece
            start = last.start + last.length
        asked = False
        while self._free:
            piece = next_piece(start, until, handle.length, handle.layout.chunk_size)
            if piece is None:
                break
            extent = handle.extent(handle.live_session())
            place = self._free.pop()
            held = self._flying[place] = _Held(piece, place, time.monotonic())
            lane.prepare(
                extent, piece.chunk, piece.low, piece.size, place * self._place_bytes, place, writing=False
            )
            self._held.append(held)
            start += piece.length
            asked = True
        if asked:
            self._receive(0)

    def _await_first(self) -> bool:
        """Wait for the first piece; False: it can't be had, or is too old."""
        first = self._held[0]
        waited = not first.ready
        while not (first.ready or first.failed):
            self._receive(1)
        if first.failed:
            self._forget_held()
            return False
        if not waited and time.monotonic() - first.asked_at > OLDEST_S:
            self._pattern.outlived()
            self._forget_held()
            return False
        return True

    def _give(self, offset: int, out: NDArray[np.uint8]) -> int:
        first = self._held[0]
        piece = first.piece
        begin = offset - piece.start
        count = min(len(out), piece.length - begin)
        at = first.place * self._place_bytes + piece.skip + begin
        lane = self._lane
        assert lane is not None
        out[:count] = lane.memory[at : at + count]
        if begin + count == piece.length:
            self._let_go(self._held.popleft())
        return count

    def _receive(self, least: int) -> None:
        assert self._lane is not None
        try:
            completions = self._lane.take(least)
            for place, result in zip(
                completions["userdata"].tolist(), completions["result"].tolist(), strict=True
            ):
                held = self._flying.pop(place)
                held.ready = result == held.piece.size
                held.failed = not held.ready
                if held not in self._held:
                    self._free.append(place)
        except BaseException:
            self._break()  # interrupted: nobody knows what of it is done
            raise

    def _let_go(self, held: _Held) -> None:
        if held.place not in self._flying:
            self._free.append(held.place)

    def _forget_held(self) -> None:
        while self._held:
            self._let_go(self._held.popleft())

    def _break(self) -> None:
        """The ring is in disorder."""
        lane, pool = self._lane, self._pool
        if lane is None:
            return
        assert pool is not None
        self._lane = self._pool = None
        self._held.clear()
        self._flying = {}
        self._handle.forget_reader(self)
        pool.drop(lane, self)

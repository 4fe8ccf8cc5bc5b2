"""Writing behind: writes are gathered into whole chunks, which go out while the writer goes on.
docs/client.md, Writing behind.

What couldn't be written is kept, and written again by the next write, flush or close, which raises if that
fails too: no error is lost, and none is final as long as the file is open.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffs.client.gather import Part, pour
from ffs.client.lanes import Tenant, lane_bytes

if TYPE_CHECKING:
    from threading import Lock

    from ffs.client.handle import OpenFile
    from ffs.client.lanes import Lane, LanePool

Bytes = NDArray[np.uint8]

IDLE_S = 1.0
"""A writer that did nothing for so long gives its lane back, and what it has gathered there goes out."""


_MAX_PLACES: Final = 32


class _Sent(NamedTuple):
    """A part that is on its way, or couldn't be written."""

    offset: int  # in the file
    chunk: int
    data: Bytes
    epoch: int


class Behind(Tenant):
    """Of one file. All under `lock`, the file's."""

    def __init__(self, handle: OpenFile, lock: Lock) -> None:
        super().__init__(lock)
        self._handle = handle
        self._part: Part | None = None
        self._memory: Bytes = np.zeros(0, np.uint8)  # where the part is gathered, from its chunk's begin on
        self._own: Bytes | None = None  # a chunk of memory for what goes without a lane
        self._place = -1  # of _memory in the lane; -1: it is `_own`
        self._lane: Lane | None = None
        self._pool: LanePool | None = None
        self._places = 0  # of the lane, of a chunk each
        self._flying: dict[int, _Sent] = {}  # by place
        self._again: list[_Sent] = []
        self._wrote = False  # a whole chunk: the file isn't small
        self._used_at = 0.0

    @property
    def end(self) -> int:
        """Where what was taken and isn't known to be written ends; 0: there is none."""
        sent = [one.offset + len(one.data) for one in (*list(self._flying.values()), *self._again)]
        if self._part is not None:
            sent.append(self._part.chunk * self._chunk_size + self._part.high)
        return max(sent, default=0)

    @property
    def _chunk_size(self) -> int:
        layout = self._handle.layout
        assert layout is not None
        return layout.chunk_size

    def write(self, offset: int, data: Bytes) -> None:
        """Take all of `data`. Blocking while the memory is full, and on what failed before.

        If it raises, any part of `data` may be taken: writing it again at the same offset is right."""
        self._used_at = time.monotonic()
        self._mend()
        self._handle.ensure_room(offset + len(data))
        size = self._chunk_size
        if len(data) >= lane_bytes(size):
            self.settle()
            self._handle.write_at(offset, data)  # as wide as it gets, without a copy
            self._wrote = True
            return
        done = 0
        while done < len(data):
            step = pour(self._part, offset + done, len(data) - done, size)
            if step.leave:
                self._send()
            if self._part is None:
                self._begin(step.part.chunk)
            part = step.part
            self._memory[part.high - step.take : part.high] = data[done : done + step.take]
            self._part = part
            done += step.take
            if step.full:
                self._send()

    def settle(self) -> None:
        """Write all that was taken; it is durable when this returns. Blocking; raises what fails."""
        if self._part is not None:
            self._send()
        self._await_all()
        self._mend()

    def finish(self) -> None:
        """Settle and give the lane back, which is done also when this raises: then what failed is lost."""
        try:
            self.settle()
        finally:
            self.discard()

    def discard(self) -> None:
        """What was taken goes nowhere, or is on its way. Never blocks on a server."""
        if self._flying or self._again:
            self._handle.note_failed()  # there may be chunks that nobody reports: whoever collects must look
        self._part = None
        self._again.clear()
        self._flying.clear()
        self._leave()

    def after_fork_in_child(self, lock: Lock) -> None:
        """What was taken is the parent's to write."""
        self._lock = lock
        self._lane = self._pool = None
        self._part = None
        self._again.clear()
        self._flying.clear()

    def _look_after(self, now: float) -> None:
        if self._lane is None:
            return
        if self._flying:
            self._receive(0)
        if now - self._used_at > IDLE_S:
            if self._part is not None and self._place >= 0:
                end = self._part.chunk * self._chunk_size + self._part.high
                if self._handle.has_room(end):  # else the file's next call asks: here all lanes would wait
                    self._post()
            elif not self._flying and not self._again:
                self._leave()

    # inside

    def _begin(self, chunk: int) -> None:
        """Have memory for a part of this chunk, which nothing is on its way to."""
        while any(one.chunk == chunk for one in self._flying.values()):
            self._receive(1)
        if self._again:
            self._mend()
        if self._wrote and self._enter():
            while (place := self._vacant_place()) is None:
                self._receive(1)
                self._mend()  # what failed keeps its place: if all did, none would ever be vacant
            self._place = place
            start = self._place * self._chunk_size
            assert self._lane is not None
            self._memory = self._lane.memory[start : start + self._chunk_size]
            return
        if self._own is None:
            self._own = np.empty(self._chunk_size, np.uint8)
        self._place, self._memory = -1, self._own

    def _enter(self) -> bool:
        if self._lane is not None:
            return True
        pool = self._handle.live_session().lanes
        size = lane_bytes(self._chunk_size)
        places = min(size // self._chunk_size, _MAX_PLACES)
        lane = pool.take(size, self)
        if lane is None:
            return False
        # No call from here on, where a signal may raise: a lane that nobody has is lost, and who has one
        # without places waits for ever.
        self._places, self._own, self._pool, self._lane = places, None, pool, lane
        return True

    def _vacant_place(self) -> int | None:
        """While no part is gathered and nothing that failed is left."""
        return next((place for place in range(self._places) if place not in self._flying), None)

    def _send(self) -> None:
        """What is gathered goes: behind, or, without a lane, now."""
        part = self._part
        assert part is not None
        self._wrote = self._wrote or part.high == self._chunk_size
        if self._place >= 0:
            self._post()
            return
        self._handle.write_at(part.chunk * self._chunk_size + part.low, self._memory[part.low : part.high])
        self._part = None

    def _post(self) -> None:
        part, lane, place = self._part, self._lane, self._place
        assert part is not None
        assert lane is not None
        begin = part.chunk * self._chunk_size
        extent = self._handle.extent_to_write(self._handle.live_session(), begin + part.high)
        sent = _Sent(begin + part.low, part.chunk, self._memory[part.low : part.high], extent.epoch)
        start = place * self._chunk_size + part.low
        try:
            self._flying[place] = sent
            self._part = None
            lane.prepare(extent, part.chunk, part.low, len(sent.data), start, place, writing=True)
        except BaseException:
            self._break()
            raise
        self._receive(0)

    def _receive(self, least: int) -> None:
        assert self._lane is not None
        try:
            completions = self._lane.take(least)
            for place, result in zip(
                completions["userdata"].tolist(), completions["result"].tolist(), strict=True
            ):
                sent = self._flying[place]
                if result == len(sent.data):
                    self._handle.note_written(sent.offset + len(sent.data), sent.epoch)
                else:
                    self._handle.note_failed()
                    self._again.append(sent)  # its place isn't vacant until it is written
                # Last: a signal may raise at each call above, and what is still noted here is written again.
                del self._flying[place]
        except BaseException:
            self._break()
            raise

    def _await_all(self) -> None:
        while self._flying:
            self._receive(1)

    def _mend(self) -> None:
        """Write again what failed, by the way that knows what to do about it, or says what is wrong."""
        while self._again:
            self._await_all()  # of the same chunk, say
            sent = self._again[0]
            self._handle.write_at(sent.offset, sent.data)
            self._again.pop(0)

    def _leave(self) -> None:
        if self._lane is None:
            return
        lane, pool = self._lane, self._pool
        assert pool is not None
        self._lane = self._pool = None
        self._place = -1
        pool.give(lane, self)

    def _break(self) -> None:
        """The ring was interrupted: nobody knows what of it is done. All of it is written again."""
        lane, pool = self._lane, self._pool
        if lane is None:
            return
        assert pool is not None
        self._again += self._flying.values()
        self._flying.clear()
        self._lane = self._pool = None
        self._place = -1  # what is gathered stays where it is, and goes without a lane
        pool.drop(lane, self)

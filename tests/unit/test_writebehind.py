"""Writing behind: how writes are gathered, and that nothing is lost, whatever the servers do."""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffs import errors
from ffs.client.behind import Behind
from ffs.client.gather import Part, pour
from ffs.client.lanes import lane_bytes
from ffs.layout import Layout

CHUNK = 1 << 16


@given(
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 1 << 18), st.booleans()), max_size=30),
    st.sampled_from([4096, 1 << 16, 1 << 20]),
)
def test_parts_lie_in_one_chunk_each_and_hold_all_in_order(
    writes: list[tuple[int, int, bool]], chunk_size: int
) -> None:
    part: Part | None = None
    at = 0
    sent: list[tuple[int, int]] = []
    asked: list[tuple[int, int]] = []
    for offset, size, in_a_row in writes:
        at = at if in_a_row else offset
        asked.append((at, size))
        while size:
            step = pour(part, at, size, chunk_size)
            if step.leave:
                assert part is not None
                assert part.chunk * chunk_size + part.high != at  # else it could have gone on
                sent.append((part.chunk * chunk_size + part.low, part.high - part.low))
            part = step.part
            assert 0 <= part.low < part.high <= chunk_size
            assert step.take > 0
            at, size = at + step.take, size - step.take
            assert part.chunk * chunk_size + part.high == at
            if step.full:
                assert part.high == chunk_size
                sent.append((part.chunk * chunk_size + part.low, part.high - part.low))
                part = None
    if part is not None:
        sent.append((part.chunk * chunk_size + part.low, part.high - part.low))
    assert _joined(sent) == _joined(asked)


def _joined(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for begin, size in pieces:
        if out and sum(out[-1]) == begin:
            out[-1] = (out[-1][0], out[-1][1] + size)
        else:
            out.append((begin, size))
    return out


class FakeLane:
    """Requests complete in any order, some with an error; data is taken when they do."""

    def __init__(self, world: World, size: int) -> None:
        self.world = world
        self.memory = np.full(size, 0xEE, np.uint8)
        self.requests: list[tuple[int, int, int, int, int]] = []

    @property
    def flying(self) -> int:
        return len(self.requests)

    def prepare(
        self, extent: Any, chunk: int, low: int, size: int, start: int, userdata: int, *, writing: bool
    ) -> None:
        assert writing
        assert 0 < size <= CHUNK - low
        assert chunk not in [request[0] for request in self.requests], "two writes of a chunk at once"
        assert userdata not in [request[4] for request in self.requests], "memory is used twice"
        self.requests.append((chunk, low, size, start, userdata))

    def take(self, least: int) -> Any:
        world = self.world
        assert self.requests or not least, "waits for what nobody sent"  # for ever, with the ring itself
        if world.chance(world.interrupting):
            world.random.shuffle(self.requests)
            for request in self.requests[: self.flying // 2]:
                self._carry_out(request)
            raise KeyboardInterrupt
        world.random.shuffle(self.requests)
        count = world.random.randint(min(least, self.flying), self.flying)
        rows = np.zeros(count, dtype=[("userdata", "<u8"), ("result", "<i8")])
        for row in rows:
            request = self.requests.pop()
            row["userdata"], row["result"] = request[4], request[2]
            if world.chance(world.failing):
                row["result"] = -28
                if world.chance(0.5):
                    self._carry_out(request)  # and nobody heard of it
            else:
                self._carry_out(request)
        return rows

    def _carry_out(self, request: tuple[int, int, int, int, int]) -> None:
        chunk, low, size, start, _ = request
        begin = chunk * CHUNK + low
        self.world.stored[begin : begin + size] = self.memory[start : start + size]


@dataclass
class Extent:
    epoch: int = 3


@dataclass
class World:
    """A file of zeros, its handle, its session and the session's pool."""

    random: random.Random
    failing: float = 0.0
    interrupting: float = 0.0
    stored: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(64 * CHUNK, np.uint8))
    layout: Layout = field(
        default_factory=lambda: Layout(table=1, table_version=1, chunk_size=CHUNK, stripe=0, seed=5)
    )
    path: str = "/f"
    ino: int = 7
    reported: int = 0
    doubtful: bool = False
    roomy: bool = True
    lent: list[FakeLane] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def live_session(self) -> World:
        return self

    @property
    def lanes(self) -> World:
        return self

    def ensure_room(self, end: int) -> None:
        self.roomy = True

    def has_room(self, end: int) -> bool:
        return self.roomy

    def extent_to_write(self, session: World, end: int) -> Extent:
        self.roomy = True
        if self.chance(self.failing / 3):
            raise errors.Fenced("the session is over, say")
        return Extent()

    def take(self, size: int, tenant: Behind) -> FakeLane | None:
        if self.chance(0.2):
            return None
        self.lent.append(FakeLane(self, size))
        return self.lent[-1]

    def give(self, lane: FakeLane, tenant: Behind) -> None:
        self.lent.remove(lane)

    drop = give

    def write_at(self, offset: int, data: np.ndarray[Any, Any]) -> None:
        if self.chance(self.failing):
            self.stored[offset : offset + len(data) // 2] = data[: len(data) // 2]
            raise errors.NoSpace("no space, for now")
        self.stored[offset : offset + len(data)] = data
        self.reported = max(self.reported, offset + len(data))

    def note_written(self, end: int, epoch: int) -> None:
        assert epoch == 3
        self._may_be_interrupted()
        self.reported = max(self.reported, end)

    def note_failed(self) -> None:
        self._may_be_interrupted()
        self.doubtful = True

    def _may_be_interrupted(self) -> None:
        """By a signal, which the interpreter looks for at every call."""
        if self.chance(self.interrupting):
            raise KeyboardInterrupt


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 0.03]))
def test_what_settles_is_stored(seed: int, failing: float, interrupting: float) -> None:
    """Writes in a row and elsewhere, of all sizes. A call that raises is made again, as io's buffers do; once
    `settle` returns, all that was taken is stored, in the order in which it was written."""
    source = random.Random(seed)
    world = World(source, failing, interrupting)
    behind = Behind(world, threading.Lock())  # type: ignore[arg-type]
    model = np.zeros(len(world.stored), np.uint8)
    position = end = raised = 0

    def insist(work: Any) -> None:
        nonlocal raised
        while True:
            try:
                work()
                return
            except (OSError, KeyboardInterrupt):
                raised += 1

    for turn in range(80):
        if source.random() < 0.15:
            position = source.randrange(40 * CHUNK)
        size = source.choice([1, 100, 5000, CHUNK, CHUNK + 1, 5 * CHUNK])
        size = min(size, len(model) - position)
        data = np.full(size, turn % 255 + 1, np.uint8)
        insist(lambda data=data, at=position: behind.write(at, data))
        model[position : position + size] = data
        position += size
        end = max(end, position)
        assert max(world.reported, behind.end) >= end
        if source.random() < 0.1:
            insist(behind.settle)
            assert np.array_equal(world.stored, model)
        if source.random() < 0.1:
            insist(lambda: behind.tend(1e9))
        if position == len(model):
            position = 0
    insist(behind.settle)
    assert np.array_equal(world.stored, model)
    assert world.reported == end
    assert not behind._flying
    behind.finish()
    assert not world.lent
    assert not raised or failing + interrupting  # no error comes of nothing


def test_an_error_stays_until_the_data_is_stored() -> None:
    world = World(random.Random(1))
    behind = Behind(world, threading.Lock())  # type: ignore[arg-type]
    data = np.full(CHUNK, 5, np.uint8)
    for turn in range(4):
        behind.write(turn * CHUNK, data)
    world.failing = 1.0
    for turn in range(4, 12):  # sooner or later a write says so; those that don't say so keep what failed
        with contextlib.suppress(errors.FfsError):
            behind.write(turn * CHUNK, data)
    for work in (behind.settle, behind.settle, behind.finish):
        with pytest.raises(errors.FfsError):
            work()
    assert not world.lent  # given up with the file


def test_all_that_is_on_its_way_fails_at_once() -> None:
    """As after a truncation elsewhere, or without space: no place of the lane is vacant, nor will be."""
    world = World(random.Random(1))
    world.random.randint = lambda a, b: a  # type: ignore[method-assign]
    behind = Behind(world, threading.Lock())  # type: ignore[arg-type]
    turn = 0
    while len(behind._flying) < 32:
        behind.write(turn * CHUNK, np.full(CHUNK, turn + 1, np.uint8))
        turn += 1
    extent_to_write = world.extent_to_write
    world.extent_to_write = lambda session, end: Extent()  # type: ignore[method-assign]
    world.failing = 1.0
    with pytest.raises(errors.NoSpace):
        behind.write(turn * CHUNK, np.full(CHUNK, turn + 1, np.uint8))
    world.failing, world.extent_to_write = 0.0, extent_to_write  # type: ignore[method-assign]
    behind.write(turn * CHUNK, np.full(CHUNK, turn + 1, np.uint8))
    behind.finish()
    for at in range(turn + 1):
        assert (world.stored[at * CHUNK : (at + 1) * CHUNK] == at + 1).all()


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_while_it_is_noted_what_became_of_a_write(fails: bool) -> None:
    world = World(random.Random(1))
    world.random.randint = lambda a, b: a  # type: ignore[method-assign]
    world.chance = lambda probability: probability == 1.0  # type: ignore[method-assign]
    behind = Behind(world, threading.Lock())  # type: ignore[arg-type]
    for turn in range(3):
        behind.write(turn * CHUNK, np.full(CHUNK, 5, np.uint8))
    assert behind._flying
    world.failing = float(fails)

    def signal(*_: Any) -> None:
        del world.note_written, world.note_failed  # the next is let through
        world.failing = 0.0
        raise KeyboardInterrupt

    world.note_written = world.note_failed = signal  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        behind.settle()
    behind.settle()
    assert (world.stored[: 3 * CHUNK] == 5).all()
    assert world.reported == 3 * CHUNK
    behind.finish()
    assert not world.lent


def test_what_is_on_its_way_when_a_file_is_discarded_is_told_at_its_close() -> None:
    """Else its chunks outlive it: nobody looks for them beyond the reported length."""
    for turns in (0, 1, 8):
        world = World(random.Random(1))
        world.random.randint = lambda a, b: a  # type: ignore[method-assign]
        behind = Behind(world, threading.Lock())  # type: ignore[arg-type]
        for turn in range(turns):
            behind.write(turn * CHUNK, np.full(CHUNK, 5, np.uint8))
        flying = bool(behind._flying)
        behind.discard()
        assert world.doubtful == flying == (turns == 8)


def test_an_idle_part_asks_for_no_room() -> None:
    """That would be a question to a service, for which the lanes of all files would wait."""
    world = World(random.Random(1))
    world.random.randint = lambda a, b: a  # type: ignore[method-assign]
    world.chance = lambda probability: False  # type: ignore[method-assign]
    behind = Behind(world, threading.Lock())  # type: ignore[arg-type]
    for turn in range(2):
        behind.write(turn * CHUNK, np.full(CHUNK, 5, np.uint8))
    behind.write(2 * CHUNK, np.full(100, 5, np.uint8))
    behind._await_all()
    world.roomy = False  # the file's epoch was raised meanwhile, say
    behind.tend(1e9)
    assert not world.roomy
    assert behind._part is not None
    world.roomy = True
    behind.tend(1e9)
    assert behind._part is None
    behind.finish()
    assert (world.stored[: 2 * CHUNK + 100] == 5).all()


def test_memory_is_bounded() -> None:
    world = World(random.Random(1))
    world.random.randint = lambda a, b: a  # type: ignore[method-assign]
    behind = Behind(world, threading.Lock())  # type: ignore[arg-type]
    for turn in range(60):
        behind.write(turn * CHUNK, np.full(CHUNK, 5, np.uint8))
        assert len(world.lent) <= 1
        assert sum(len(lane.memory) for lane in world.lent) <= lane_bytes(CHUNK)
        assert len(behind._flying) <= 32
    behind.finish()
    assert (world.stored[: 60 * CHUNK] == 5).all()


@pytest.mark.parametrize("at", range(1, 30))
def test_a_signal_while_a_lane_is_taken(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any of the calls there: no lane is lost, and nobody waits for a place that will never be."""
    world = World(random.Random(1))
    world.random.randint = lambda a, b: a  # type: ignore[method-assign]
    world.chance = lambda probability: False  # type: ignore[method-assign]
    behind = Behind(world, threading.Lock())  # type: ignore[arg-type]
    left = [at]

    def chunk_size(self: Behind) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return CHUNK

    monkeypatch.setattr(Behind, "_chunk_size", property(chunk_size))
    for turn in range(8):
        try:
            behind.write(turn * CHUNK, np.full(CHUNK, turn + 1, np.uint8))
        except KeyboardInterrupt:
            behind.write(turn * CHUNK, np.full(CHUNK, turn + 1, np.uint8))
    assert left[0] <= 0
    behind.finish()
    for turn in range(8):
        assert (world.stored[turn * CHUNK : (turn + 1) * CHUNK] == turn + 1).all()
    assert not world.lent

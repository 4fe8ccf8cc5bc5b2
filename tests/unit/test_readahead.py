"""Reading ahead: the decisions, and that what is delivered is the file's, whatever the servers do."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffs.client.ahead import Ahead
from ffs.client.lanes import LANE_BYTES
from ffs.client.readahead import (
    FIRST_BYTES,
    LEAST_FILL_BYTES,
    MOST_BYTES,
    PAGE_BYTES,
    PIECE_BYTES,
    Pattern,
    next_piece,
)
from ffs.errors import CapabilityExpired
from ffs.layout import Layout

BUFFER = 256 << 10


def test_reads_in_a_row_open_a_window_that_doubles_up_to_its_bound() -> None:
    pattern, at, windows = Pattern(BUFFER), 0, []
    for _ in range(8):
        decision = pattern.ask(at, BUFFER)
        assert decision.serve == BUFFER
        windows.append(decision.window)
        at += BUFFER
        pattern.served(at)
    assert windows[:4] == [0, FIRST_BYTES, 2 * FIRST_BYTES, 4 * FIRST_BYTES]
    assert windows[-1] == MOST_BYTES


def test_a_read_elsewhere_closes_it_and_small_reads_shrink() -> None:
    pattern = Pattern(BUFFER)
    for turn in range(4):
        pattern.ask(turn * BUFFER, BUFFER)
        pattern.served((turn + 1) * BUFFER)
    fills = []
    for turn in range(6):
        decision = pattern.ask((turn + 1) << 30, BUFFER)
        assert decision.window == 0
        fills.append(decision.serve)
        pattern.served(((turn + 1) << 30) + decision.serve)
    assert fills == [128 << 10, 64 << 10, 32 << 10, LEAST_FILL_BYTES, LEAST_FILL_BYTES, LEAST_FILL_BYTES]
    assert pattern.ask(9 << 30, 10 * BUFFER).serve == 10 * BUFFER  # past the buffer: what is wanted
    pattern.served((9 << 30) + 10 * BUFFER)
    assert pattern.ask((9 << 30) + 10 * BUFFER, BUFFER).window == FIRST_BYTES


def test_a_step_forward_inside_the_window_keeps_it() -> None:
    pattern = Pattern(BUFFER)
    for turn in range(3):
        pattern.ask(turn * BUFFER, BUFFER)
        pattern.served((turn + 1) * BUFFER)
    window = pattern.window
    assert pattern.ask(3 * BUFFER + window, BUFFER).window == window
    pattern.served(4 * BUFFER + window)
    assert pattern.ask(4 * BUFFER + 2 * window + 1, BUFFER).window == 0


def test_a_reader_that_is_slower_than_its_window_lasts_gets_a_smaller_one() -> None:
    pattern = Pattern(BUFFER)
    for turn in range(4):
        pattern.ask(turn * BUFFER, BUFFER)
        pattern.served((turn + 1) * BUFFER)
    seen = []
    for _ in range(5):
        pattern.outlived()
        seen.append(pattern.window)
    assert seen == [2 * FIRST_BYTES, FIRST_BYTES, 0, 0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 1 << 24), st.booleans()), max_size=30),
    st.integers(1, 1 << 22),
)
def test_a_decision_never_leaves_its_bounds(reads: list[tuple[int, int, bool]], buffer: int) -> None:
    pattern, at = Pattern(buffer), 0
    for offset, size, in_a_row in reads:
        begin = at if in_a_row else offset
        decision = pattern.ask(begin, size)
        assert 0 < decision.serve <= size
        assert decision.serve >= min(size, LEAST_FILL_BYTES, buffer)
        assert 0 <= decision.window <= MOST_BYTES
        at = begin + decision.serve
        pattern.served(at)


@given(
    st.integers(0, 1 << 44),
    st.integers(0, 1 << 26),
    st.integers(0, 1 << 45),
    st.sampled_from([1 << shift for shift in range(12, 25)]),
)
def test_pieces_cover_what_is_asked_and_no_more_than_the_file(
    start: int, more: int, length: int, chunk_size: int
) -> None:
    until, at = start + more, start
    for _ in range(40):
        piece = next_piece(at, until, length, chunk_size)
        if piece is None:
            assert at >= min(until, length)
            return
        assert piece.start == at
        assert 0 < piece.length <= min(PIECE_BYTES, chunk_size)
        assert piece.start + piece.length <= length
        assert piece.low % PAGE_BYTES == piece.size % PAGE_BYTES == 0
        assert piece.low + piece.size <= chunk_size
        assert piece.size <= min(PIECE_BYTES, chunk_size)
        assert piece.chunk * chunk_size + piece.low + piece.skip == piece.start
        assert piece.skip + piece.length <= piece.size
        at += piece.length


# --- with servers that answer in any order, late, or not ------------------------------------------


class FakeLane:
    """A ring whose requests complete in any order; some fail. `content` is read when they do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.memory = np.full(LANE_BYTES, 0xEE, np.uint8)
        self.requests: list[tuple[int, int, int, int]] = []

    @property
    def flying(self) -> int:
        return len(self.requests)

    def prepare(
        self, extent: Any, chunk: int, low: int, size: int, start: int, userdata: int, *, writing: bool
    ) -> None:
        assert not writing
        assert low % PAGE_BYTES == size % PAGE_BYTES == start % PAGE_BYTES == 0
        assert userdata not in [request[3] for request in self.requests]
        assert not any(
            start < other + length and other < start + size for _, length, other, _ in self.requests
        ), "two requests share memory"
        self.requests.append((chunk * self.world.layout.chunk_size + low, size, start, userdata))
        self.world.most = max(self.world.most, sum(request[1] for request in self.requests))

    def take(self, least: int) -> Any:
        random_ = self.world.random
        random_.shuffle(self.requests)
        count = random_.randint(min(least, self.flying), self.flying) if self.requests else 0
        rows = np.zeros(count, dtype=[("userdata", "<u8"), ("result", "<i8")])
        for row in rows:
            offset, size, start, row["userdata"] = self.requests.pop()
            if random_.random() < self.world.failing:
                row["result"] = -5
                continue
            data = self.world.content[offset : offset + size]
            self.memory[start : start + size] = 0
            self.memory[start : start + len(data)] = data
            row["result"] = size
        return rows

    def close(self) -> None:
        self.requests.clear()


@dataclass
class World:
    """A file, its handle, its session and the session's pool."""

    content: np.ndarray[Any, Any]
    random: random.Random
    layout: Layout
    failing: float = 0.0
    most: int = 0
    path: str = "/f"
    ino: int = 7
    readers: list[Ahead] = field(default_factory=list)
    lent: list[FakeLane] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.content)

    def live_session(self) -> World:
        return self

    @property
    def lanes(self) -> World:
        return self

    def extent(self, session: World) -> None:
        if self.random.random() < self.failing / 4:
            raise CapabilityExpired("so it goes")

    def take(self, size: int, tenant: Ahead) -> FakeLane | None:
        if self.random.random() < 0.1:
            return None
        self.lent.append(FakeLane(self))
        return self.lent[-1]

    def give(self, lane: FakeLane, tenant: Ahead) -> None:
        self.lent.remove(lane)

    drop = give

    def note_reader(self, ahead: Ahead) -> None:
        self.readers.append(ahead)

    def forget_reader(self, ahead: Ahead) -> None:
        self.readers.remove(ahead)

    def read_at(self, offset: int, out: np.ndarray[Any, Any]) -> int:
        part = self.content[offset : offset + len(out)]
        out[: len(part)] = part
        return len(part)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([4096, 1 << 16, 1 << 20, 1 << 22]), st.sampled_from([0, 0.2]))
def test_what_is_delivered_is_what_the_file_holds(seed: int, chunk_size: int, failing: float) -> None:
    """Reads in a row, steps, jumps, growth, truncation and changes by this client; data of before a change
    is never given after it."""
    source = random.Random(seed)
    generator = np.random.default_rng(seed)
    layout = Layout(table=1, table_version=1, chunk_size=chunk_size, stripe=0, seed=5)
    length = source.choice([1, 5000, chunk_size * 3 + 17, 9 << 20])
    world = World(generator.integers(0, 256, length, np.uint8), source, layout, failing)
    ahead = Ahead(world, threading.Lock(), BUFFER)  # type: ignore[arg-type]
    position = 0
    for _ in range(60):
        action = source.random()
        if action < 0.1:
            position = source.randrange(world.length + 5)
        elif action < 0.2:
            position += source.randrange(1 << 20)
        elif action < 0.25:
            more = generator.integers(0, 256, source.randrange(1, 1 << 18), np.uint8)
            world.content = np.concatenate([world.content, more])  # grown by anyone: nothing was held there
        elif action < 0.3 and world.length > 1:
            world.content = world.content[: source.randrange(1, world.length)].copy()
            ahead.changed()
        elif action < 0.4:
            world.content = generator.integers(0, 256, world.length, np.uint8)
            ahead.changed()
        elif action < 0.45:
            ahead.tend(0.0)
        out = np.full(source.choice([1, 100, BUFFER, BUFFER, BUFFER, 1 << 20, 3 << 20]), 0xDD, np.uint8)
        count = ahead.read(position, out)
        expected = world.content[position : position + len(out)]
        assert (count > 0) == (len(expected) > 0)
        assert np.array_equal(out[:count], expected[:count])
        assert (out[count:] == 0xDD).all()
        position += count
    assert world.most <= LANE_BYTES
    if ahead._lane is not None:  # no place of its memory was lost on the way
        while ahead._flying:
            ahead._receive(1)
        places = sorted([*ahead._free, *(held.place for held in ahead._held)])
        assert places == list(range(len(places)))
        assert len(places) == min(LANE_BYTES // ahead._place_bytes, 32)
    ahead.close()
    assert not world.lent
    assert not world.readers


def test_what_was_fetched_too_long_ago_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ffs.client.ahead.time.monotonic", lambda: now[0])
    layout = Layout(table=1, table_version=1, chunk_size=1 << 20, stripe=0, seed=5)
    world = World(np.zeros(8 << 20, np.uint8), random.Random(2), layout)
    world.random.random = lambda: 0.5  # type: ignore[method-assign]
    ahead = Ahead(world, threading.Lock(), BUFFER)  # type: ignore[arg-type]
    out = np.zeros(BUFFER, np.uint8)
    for turn in range(4):
        assert ahead.read(turn * BUFFER, out) == BUFFER
    while ahead._flying:
        ahead._receive(1)
    world.content = np.ones(8 << 20, np.uint8)  # by another client, so nobody tells
    assert ahead.read(4 * BUFFER, out) == BUFFER
    assert out.sum() == 0
    now[0] += 2.0
    assert ahead.read(5 * BUFFER, out) == BUFFER
    assert out.sum() == BUFFER
    ahead.tend(now[0] + 5)  # a reader that does nothing gives its lane back
    assert world.lent == []


def test_garbage_that_is_collected_while_its_lane_is_tended() -> None:
    """The lock is held by the very thread whose garbage collection closes the file."""
    layout = Layout(table=1, table_version=1, chunk_size=1 << 20, stripe=0, seed=5)
    world = World(np.zeros(8 << 20, np.uint8), random.Random(2), layout)
    lock = threading.Lock()
    ahead = Ahead(world, lock, BUFFER)  # type: ignore[arg-type]
    closed: list[bool] = []

    def close() -> None:
        with lock:
            closed.append(True)

    assert not ahead.hand_over(close)

    def look_after(now: float) -> None:
        assert ahead.hand_over(close)

    ahead._look_after = look_after  # type: ignore[method-assign]
    ahead.tend(0.0)
    assert closed == [True]

"""The pool of lanes: garbage that is collected inside it, and machines without threads or room."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ffs.client.file import File
from ffs.client.lanes import LanePool, Tenant
from ffs.client.layers import FileReader, FileWriter

SIZE = 8 << 20


class FakeLane:
    def __init__(self, size: int = SIZE) -> None:
        self.memory = bytes(size)
        self.flying = 0
        self.closed = False

    def take(self, least: int) -> list[Any]:
        return []

    def close(self) -> None:
        self.closed = True


class Idler(Tenant):
    """A file that does nothing."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def _look_after(self, now: float) -> None:
        pass


class Handle:
    """Of an open file that has a lane. `pool`: its session's."""

    path, ino, ticket, epoch, length, writing = "/f", 5, b"", 1, 0, True

    def __init__(self, pool: LanePool) -> None:
        self.lanes = pool
        self.closed = False

    def live_session(self) -> Handle:
        return self

    def forget_reader(self, ahead: object) -> None: ...

    def report(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def pool_of(*lanes: FakeLane) -> LanePool:
    pool = LanePool(None, None)  # type: ignore[arg-type]
    pool._idle += lanes  # type: ignore[arg-type]
    pool._bytes = sum(len(lane.memory) for lane in lanes)
    return pool


@pytest.mark.parametrize("layer", [FileReader, FileWriter])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_garbage_that_is_collected_inside_the_pool(layer: type[FileReader | FileWriter]) -> None:
    """A dropped file gives its lane back: to the pool whose lock its own thread holds just now."""
    pool = pool_of(FakeLane(), FakeLane())
    handle = Handle(pool)
    file = layer(File(None, handle, "rb" if layer is FileReader else "wb"), 4096)  # type: ignore[arg-type]
    raw = file.raw_file
    tenant = raw._ahead or raw._behind
    assert tenant is not None
    tenant._lane, tenant._pool = pool.take(SIZE, tenant), pool
    file.cycle = file  # type: ignore[union-attr]
    see_to_thread = pool._see_to_thread
    found: list[int] = []

    def collect() -> Any:
        if not found:
            found.append(gc.collect())
        return see_to_thread()

    pool._see_to_thread = collect  # type: ignore[method-assign]

    def work() -> None:
        nonlocal file, raw, tenant
        del file, raw, tenant
        lane = pool.take(SIZE, idler)
        assert lane is not None
        pool.give(lane, idler)

    idler = Idler()
    gc.disable()
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "it waits for itself"
    finally:
        gc.enable()
    assert found
    assert handle.closed
    assert len(pool._idle) == 2
    pool.close()


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine at its limit of threads, until it is undone."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield patch


def test_without_a_thread_there_are_no_lanes_until_there_can_be_one(no_thread: pytest.MonkeyPatch) -> None:
    pool, tenant = pool_of(FakeLane()), Idler()
    assert pool.take(SIZE, tenant) is None
    assert (len(pool._idle), pool._bytes, len(pool._tenants)) == (1, SIZE, 0)
    no_thread.undo()
    assert pool.take(SIZE, tenant) is not None
    assert pool._thread is not None
    assert pool._thread.is_alive()
    pool.close()


def test_what_is_in_flight_is_waited_for_without_a_thread(no_thread: pytest.MonkeyPatch) -> None:
    pool, lane = pool_of(), FakeLane()
    pool._bytes, lane.flying = SIZE, 1
    pool.give(lane, Idler())  # type: ignore[arg-type]
    assert lane.closed
    assert pool._bytes == 0


def test_what_comes_back_to_a_closed_pool_is_closed() -> None:
    pool, lane = pool_of(), FakeLane()
    pool._bytes, lane.flying = SIZE, 1
    pool.close()
    pool.give(lane, Idler())  # type: ignore[arg-type]
    assert lane.closed
    assert pool._bytes == 0


def test_what_goes_wrong_with_one_lane_leaves_the_others_their_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Wrong(Idler):
        def _look_after(self, now: float) -> None:
            raise ZeroDivisionError

    class Broken(FakeLane):
        def take(self, least: int) -> list[Any]:
            raise ZeroDivisionError

        def close(self) -> None:
            super().close()
            raise ZeroDivisionError

    class Right(Idler):
        def __init__(self) -> None:
            super().__init__()
            self.turns = 0
            self.seen = threading.Event()

        def _look_after(self, now: float) -> None:
            self.turns += 1
            if self.turns == 5:  # turns after those with the wrong ones
                self.seen.set()

    pool = pool_of(FakeLane(), FakeLane())
    broken, wrong, right = Broken(), Wrong(), Right()
    broken.flying = 1
    pool._bytes += SIZE
    assert pool.take(SIZE, wrong)
    pool.give(broken, Idler())  # type: ignore[arg-type]
    assert pool.take(SIZE, right)
    assert right.seen.wait(30)
    assert broken.closed
    assert pool._bytes == 2 * SIZE
    assert caplog.text.count("in _look_after") == 1  # not at each turn again
    pool.close()

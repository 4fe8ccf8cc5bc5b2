"""The pool of lanes: garbage that is collected inside it, and machines without threads or room."""

from __future__ import annotations

import gc
import threading
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

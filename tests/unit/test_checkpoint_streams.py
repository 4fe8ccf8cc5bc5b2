"""Copies on side streams: the order in which things are begun and waited for, with a stream that a test holds
back; and on a real GPU where there is one."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from ffs.checkpoint.guard import Guard, Untouched
from ffs.checkpoint.snapshot import plan_state, stage, versions
from ffs.checkpoint.staging import Pool
from ffs.checkpoint.streams import Copies, CudaSide, End, PlainSide, Sides, flat_bytes, side_for


class HeldSide:
    """A stream whose copies take place when somebody waits for their end; `log` has what was asked."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._line: list[Any] = []
        self._mutex = threading.Lock()

    def mark(self) -> None:
        self.log.append("mark")

    def flat(self, tensor: Any) -> Any:
        return flat_bytes(tensor)

    def copy(self, target: Any, source: Any) -> None:
        self.log.append("copy")
        self._line.append((target, source))

    def end(self) -> End:
        self.log.append("end")
        return HeldEnd(self)

    def run(self, how: str) -> None:
        with self._mutex:
            self.log.append(how)
            while self._line:
                target, source = self._line.pop(0)
                target.copy_(source)


class HeldEnd:
    """`let`: `block` waits for that first, as for a device that is slow."""

    let = threading.Event()

    def __init__(self, side: HeldSide) -> None:
        self._side = side

    def wait_here(self) -> None:
        self._side.run("wait_here")

    def block(self) -> None:
        assert self.let.wait(30)
        self._side.run("block")


@pytest.fixture
def side() -> Any:
    HeldEnd.let.set()
    yield HeldSide()
    HeldEnd.let.set()


def strided(count: int) -> dict[str, torch.Tensor]:
    """Of 8 MiB each, so that each has its file; not as they lie in memory, so that torch copies them."""
    return {f"w{n}": torch.full((1024, 2048), float(n)).t() for n in range(count)}


def test_files_are_given_out_when_their_copies_are_over(side: HeldSide) -> None:
    plan = plan_state(strided(3), 0, 1, 64 << 20)
    assert [device.type for device in plan.devices] == ["cpu"]
    pool = Pool(64 << 20)
    launched: list[int] = []
    sides = Sides(lambda device: side)
    found = stage(plan, pool, sides=sides, launched=lambda end: launched.append(side.log.count("copy")))
    first = next(found)
    assert side.log == ["copy"] * 3 + ["end", "block"]
    assert launched == [3]
    for staged in [first, *found]:
        (part,) = staged.plan.parts
        at = len(staged.shard.header)
        data = np.frombuffer(staged.region.memory()[at : at + part.nbytes], np.float32)
        assert (data == float(part.name[1])).all()
        staged.region.release()
    assert pool.used == 0


def test_memory_is_given_on_and_back_only_when_nothing_is_copied_there(side: HeldSide) -> None:
    """In waves, and where it ends early."""
    plan = plan_state(strided(4), 0, 1, 64 << 20)
    pool = Pool(18 << 20)  # two files
    seen = []
    for staged in stage(plan, pool, sides=Sides(lambda device: side)):
        seen.append(list(side.log))
        staged.region.release()
    assert seen[0] == ["copy", "copy", "end", "block"]
    assert seen[2] == [*seen[0], "copy", "copy", "end", "block"]
    side.log.clear()

    copy = side.copy

    def fails(target: Any, source: Any) -> None:
        if len(side.log) == 2:
            raise RuntimeError("no more")
        copy(target, source)

    side.copy = fails  # type: ignore[method-assign]
    pool = Pool(64 << 20)
    released: list[list[str]] = []
    release = pool._release
    pool._release = lambda region: (released.append(list(side.log)), release(region))  # type: ignore
    with pytest.raises(RuntimeError, match="no more"):
        next(stage(plan, pool, sides=Sides(lambda device: side)))
    assert released == [["copy", "copy", "end", "block"]] * 3
    assert pool.used == 0


def test_an_update_waits_on_the_device_not_here(side: HeldSide) -> None:
    stepped: list[str] = []
    guard = Guard(lambda: stepped.append("step"), lambda: stepped.append("waited"))
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    guard.add(optimizer)
    looked: list[int] = []
    copied = torch.zeros(4)
    HeldEnd.let.clear()  # the device is slow
    guard.begin()
    side.copy(copied, weight.detach())
    guard.launched(side.end(), lambda: looked.append(weight._version))
    weight.grad = torch.ones(4)
    optimizer.step()  # doesn't block
    assert side.log == ["copy", "end", "wait_here"]
    assert looked == [0]  # before the update
    assert (copied == 1).all()
    assert (weight == 0).all()
    assert stepped == ["step"]
    waiting = threading.Thread(target=guard.wait)  # who wants to change anything else waits
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    HeldEnd.let.set()
    waiting.join(30)
    assert side.log[-1] == "block"
    guard.end()
    optimizer.step()
    assert side.log.count("wait_here") == 1
    guard.remove_all()


def test_what_changed_is_asked_once_and_before_the_update() -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    plan = plan_state(state, 0, 1, 1 << 20)
    untouched = Untouched(lambda: versions(plan))
    state["b"].add_(1)
    assert untouched.changed() == ["b"]
    state["a"].add_(1)
    assert untouched.changed() == ["b"]
    assert Untouched(lambda: versions(plan)).changed() == []


def test_on_a_cpu_all_is_over_at_once() -> None:
    copies = Copies(Sides())
    target = np.zeros(16, np.uint8)
    copies.copy(target, copies.flat(torch.arange(16, dtype=torch.uint8).reshape(4, 4).t()))
    assert target.tolist() == torch.arange(16).reshape(4, 4).t().reshape(-1).tolist()
    assert copies.end() is None
    assert isinstance(side_for(torch.device("cpu")), PlainSide)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu() -> None:
    """What was launched before is in it, what is launched after `wait_here` isn't."""
    device = torch.device("cuda", torch.cuda.current_device())
    sides = Sides()
    assert isinstance(sides.of(device), CudaSide)
    pool = Pool(256 << 20)
    pool.pin()
    assert pool._pinned
    state = {f"w{n}": torch.zeros(4 << 20, device=device) for n in range(4)}
    state["t"] = torch.zeros(1024, 2048, device=device).t()
    for turn in range(20):
        for tensor in state.values():
            torch.cuda._sleep(1_000_000)
            tensor.fill_(float(turn))
        plan = plan_state(state, 0, 1, pool.nbytes)
        sides.mark(plan.devices)
        found = stage(plan, pool, sides=sides, launched=lambda end: change(state, end))
        for staged in found:
            for part, placed in staged.placed():
                data = np.frombuffer(staged.region.memory()[placed.begin : placed.end], np.float32)
                assert (data == turn).all(), part.name
            staged.region.release()
    pool.close()


def change(state: dict[str, torch.Tensor], end: End) -> None:
    end.wait_here()
    for tensor in state.values():
        tensor.fill_(-1.0)

"""A load whose checkpoint is removed meanwhile, and the lock of one that takes longer (FAULTS C8, C19)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ffs import checkpoint, errors
from ffs.checkpoint import fetch as fetching
from ffs.checkpoint import goals, hold, retention
from ffs.client.client import Client
from ffs.client.file import File
from ffs.client.ior import Ior


class Counter:
    """An object that loads its own state."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((3,), value)
        self.loaded: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(float(state["value"][0]))


@pytest.fixture
def run(client: Client, home: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With checkpoints 1 and 2. However slow the machine is, no load takes long."""
    monkeypatch.setattr(hold, "GRACE_S", 600.0)
    with checkpoint.Manager(client, f"{home}/run", host_bytes=64 << 20) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((300_000,), float(step)), "c": Counter(step)}, block=True)
        yield manager


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were locked."""
    names: list[str] = []
    original = File.flock

    def flock(self: File, operation: int) -> None:
        original(self, operation)
        names.append(self.name)

    monkeypatch.setattr(File, "flock", flock)
    return names


def while_read(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], after: bool) -> None:
    """`act`, once, when a load has planned what it reads, or has read it."""
    original = goals.fetch
    left = [act]

    def fetch(*args: Any, **options: Any) -> int:
        if left and not after:
            left.pop()()
        count = original(*args, **options)
        if left:
            left.pop()()
        return count

    monkeypatch.setattr(goals, "fetch", fetch)


@pytest.mark.parametrize("after", [False, True])
def test_a_load_of_what_is_removed_meanwhile_takes_what_is_latest_then(
    run: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch, locked: list[str], after: bool
) -> None:
    counter = Counter(0)
    into = {"w": torch.zeros(300_000), "c": counter}
    while_read(monkeypatch, lambda: _remove(run, 2), after)
    locked.clear()
    run.load(into=into)
    assert (into["w"] == 1).all()  # type: ignore[attr-defined]
    assert counter.loaded == [1.0]  # it never saw what doesn't count
    assert locked == [f"{run.path_of(2)}/manifest.json"]  # of the removal: short loads need none


@pytest.mark.parametrize("after", [False, True])
def test_a_load_of_a_step_that_is_removed_meanwhile_says_so(
    client: Client, run: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    while_read(monkeypatch, lambda: _remove(run, 2), after)
    with pytest.raises(errors.NotFound, match="step-2"):
        run.load(2)
    while_read(monkeypatch, lambda: _remove(run, 1), after)
    with pytest.raises(errors.NotFound, match="step-1"):
        checkpoint.load(client, run.path_of(1))


def test_a_load_takes_what_has_got_the_name_meanwhile(
    client: Client, run: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace() -> None:
        _remove(run, 2)
        client.rename(run.path_of(1), run.path_of(2))

    while_read(monkeypatch, replace, after=False)
    assert (checkpoint.load(client, run.path_of(2))["w"] == 1).all()


def test_what_fails_otherwise_is_raised(client: Client, run: checkpoint.Manager) -> None:
    shard = run.manifest(2).shards[0].file
    client.remove(f"{run.path_of(2)}/{shard}")
    with pytest.raises(errors.NotFound, match=shard):
        run.load(2)


def test_a_load_that_takes_longer_is_left_alone(
    client: Client, run: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at its end the lock has gone, though it came late."""
    monkeypatch.setattr(hold, "GRACE_S", 0.0)
    asked, had = threading.Event(), threading.Event()
    late: list[float] = [0.0]
    original = File.flock

    def flock(self: File, operation: int) -> None:
        if threading.current_thread().name != "ffs-hold":
            return original(self, operation)
        asked.set()
        threading.Event().wait(late[0])
        original(self, operation)
        had.set()

    monkeypatch.setattr(File, "flock", flock)
    removed: list[bool] = []

    def remove() -> None:
        assert had.wait(30)
        removed.append(retention.remove(client, run.path_of(2)))

    while_read(monkeypatch, remove, after=False)
    assert (run.load()["w"] == 2).all()
    assert removed == [False]
    late[0] = 0.3
    asked.clear()
    had.clear()
    while_read(monkeypatch, lambda: _wait(asked), after=True)
    assert (run.load()["w"] == 2).all()
    assert had.is_set()
    assert retention.remove(client, run.path_of(2))


def test_a_lock_that_is_refused_fails_no_load(
    run: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file has at most so many locks, and a job may have more ranks."""
    monkeypatch.setattr(hold, "GRACE_S", 0.0)
    asked = threading.Event()

    def flock(self: File, operation: int) -> None:
        asked.set()
        raise errors.Busy("1000 locks are held already")

    monkeypatch.setattr(File, "flock", flock)
    while_read(monkeypatch, lambda: _wait(asked), after=False)
    assert (run.load()["w"] == 2).all()
    assert "step-2 is read without a lock" in caplog.text
    assert "1000 locks" in caplog.text


@pytest.mark.parametrize("given", [False, True])
def test_ranks_of_a_host_share_what_is_in_flight(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    most: list[int] = []
    original = Ior.close

    def close(self: Ior) -> None:
        most.append(self.stats().max_inflight)
        original(self)

    state = {f"t{n}": torch.full((1 << 20,), n, dtype=torch.int32) for n in range(16)}
    checkpoint.save(client, f"{home}/c", state)
    monkeypatch.setattr(Ior, "close", close)
    monkeypatch.setattr(fetching, "ranks_here", lambda: 8)
    into = {name: torch.zeros_like(each) for name, each in state.items()} if given else None
    loaded = checkpoint.load(client, f"{home}/c", into)
    assert all(torch.equal(loaded[name], each) for name, each in state.items())
    assert fetching.in_flight(8) == 8
    # Of all there are 32: tensors lie a page behind the start of a chunk, and end with a piece of a page.
    assert 4 < most[0] <= (8 if given else 16)


def _remove(run: checkpoint.Manager, step: int) -> None:
    assert retention.remove(run.client, run.path_of(step))


def _wait(event: threading.Event) -> None:
    assert event.wait(30)

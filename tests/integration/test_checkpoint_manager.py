"""checkpoint.Manager on a real cluster: saves while training goes on, nothing half made (FAULTS C1-C10)."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ffs import checkpoint, errors
from ffs.checkpoint import alive, commit, persist, retention
from ffs.checkpoint.pace import Step
from ffs.checkpoint.report import RankReport
from ffs.checkpoint.streams import PlainSide, Sides
from ffs.checkpoint.verify import verify
from ffs.cli import main
from ffs.client.client import Client


def net(width: int = 256) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 8)
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, width: int = 256) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, width)).square().mean().backward()
    optimizer.step()


def bits(state: Any) -> Any:
    """A deep copy that compares by bits."""
    if isinstance(state, torch.Tensor):
        return (str(state.dtype), tuple(state.shape), state.detach().clone().contiguous().numpy().tobytes())
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [bits(value) for value in state]
    return state


@pytest.fixture
def manager(client: Client, home: str) -> Any:
    with checkpoint.Manager(client, f"{home}/run", host_bytes=64 << 20) as made:
        yield made


def test_a_whole_training_state_comes_back(client: Client, home: str) -> None:
    """Module, optimizer, scheduler, counters and random numbers in one commit; a job that goes on from it
    does what the first one did."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        train(model, optimizer)
        scheduler.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3, "loss": float("inf")}
    own = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    with checkpoint.Manager(client, f"{home}/run") as manager:
        manager.save(3, state, per_rank=own, block=True)
        train(model, optimizer)
        wanted = bits(model.state_dict()), bits(optimizer.state_dict()["state"])

        again = net()
        fresh = torch.optim.AdamW(again.parameters(), lr=5.0)
        after = {
            "model": again,
            "optimizer": fresh,
            "scheduler": torch.optim.lr_scheduler.StepLR(fresh, 2),
            "step": 0,
            "loss": 0.0,
        }
        mine: dict[str, Any] = {"torch": torch.zeros_like(own["torch"]), "python": None, "numpy": None}
        manager.load(into=after, per_rank=mine)
        assert (after["step"], after["loss"]) == (3, float("inf"))
        assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert mine["python"] == own["python"]
        assert (mine["numpy"][1] == own["numpy"][1]).all()
        torch.set_rng_state(mine["torch"])
        train(again, fresh)
        assert (bits(again.state_dict()), bits(fresh.state_dict()["state"])) == wanted

        plain = manager.load()
        assert plain["step"] == 3
        assert set(plain) == set(state)
        assert set(plain["model"]) == set(model.state_dict())


def test_what_changes_right_after_save_isnt_saved(manager: checkpoint.Manager) -> None:
    """C1."""
    state = {"w": torch.arange(1 << 20, dtype=torch.float32), "n": np.arange(1000)}
    handle = manager.save(1, state)
    wanted = torch.arange(1 << 20, dtype=torch.float32)
    state["w"].zero_()
    state["n"][:] = 0
    handle.wait()
    loaded = manager.load(1)
    assert torch.equal(loaded["w"], wanted)
    assert (loaded["n"] == np.arange(1000)).all()


def slow_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes wait for this event."""
    go = threading.Event()
    original = persist.ClusterWriter.start

    def start(self: persist.ClusterWriter, directory: str, staged: Any, *told: Any) -> None:
        assert go.wait(30)
        original(self, directory, staged, *told)

    monkeypatch.setattr(persist.ClusterWriter, "start", start)
    return go


def test_a_third_save_waits_and_none_overwrites_another(
    manager: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4."""
    go = slow_writes(monkeypatch)
    value = torch.zeros(1 << 20)
    handles = []
    for step in range(2):
        value.fill_(step)
        handles.append(manager.save(step, {"w": value}))
    value.fill_(2)
    third = threading.Thread(target=lambda: handles.append(manager.save(2, {"w": value})))
    third.start()
    time.sleep(0.2)
    assert len(handles) == 2
    go.set()
    third.join()
    for step in range(3):
        handles[step].wait()
        assert (manager.load(step)["w"] == step).all()


def test_a_state_larger_than_the_memory_goes_in_waves(client: Client, home: str) -> None:
    state = {f"t{n}": torch.full((1 << 20,), float(n)) for n in range(12)}
    with checkpoint.Manager(client, f"{home}/run", host_bytes=8 << 20) as manager:
        manager.save(1, state, block=True)
        loaded = manager.load()
        assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_an_update_waits_for_what_is_being_copied(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard; C2: buffers that forward changes are copied before save returns."""
    go = slow_writes(monkeypatch)
    model = net(1024)
    optimizer = torch.optim.AdamW(model.parameters())
    # The first step's copy waits for memory, which the writes hold: forward and backward run meanwhile.
    with checkpoint.Manager(client, f"{home}/run", host_bytes=5 << 20, part_bytes=1 << 20) as manager:
        manager.guard(optimizer)
        train(model, optimizer, 1024)
        wanted = bits(model.state_dict()), bits(optimizer.state_dict()["state"])
        handle = manager.save(1, {"model": model, "optimizer": optimizer})
        assert not handle.staged.done()
        optimizer.zero_grad()
        model(torch.randn(16, 1024)).square().mean().backward()  # changes the running statistics
        timer = threading.Timer(0.2, go.set)
        timer.start()
        optimizer.step()
        assert handle.staged.done()
        handle.wait()
        loaded = manager.load(1)
        assert (bits(loaded["model"]), bits(loaded["optimizer"]["state"])) == wanted
        timer.join()


def test_what_changes_under_the_guard_fails_the_save(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = slow_writes(monkeypatch)
    model = net(1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = checkpoint.Manager(client, f"{home}/run", host_bytes=2 << 20, part_bytes=1 << 20)
    manager.guard(optimizer)
    handle = manager.save(1, {"model": model})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    go.set()
    with pytest.raises(checkpoint.TornSnapshot, match=r"wait_copied"):
        handle.wait()
    assert manager.steps() == []
    with pytest.raises(checkpoint.TornSnapshot):
        manager.close()
    assert client.listdir(f"{home}/run") == []


class SlowDevice(PlainSide):
    """A device whose copies take place where something that is launched on it waits for them, or when it is
    let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.marks = 0
        self.line: list[tuple[Any, Any]] = []
        self.mutex = threading.Lock()

    def mark(self) -> None:
        self.marks += 1

    def copy(self, target: Any, source: Any) -> None:
        self.line.append((target, source))

    def end(self) -> Any:
        return self

    def wait_here(self) -> None:
        with self.mutex:
            while self.line:
                target, source = self.line.pop()
                target.copy_(source)

    def block(self) -> None:
        assert self.let.wait(30)
        self.wait_here()


def test_an_update_doesnt_wait_here_for_a_device_that_copies(client: Client, home: str) -> None:
    """It waits there, and what is saved is of before it; something else that changes it fails the save."""
    weight = torch.nn.Parameter(torch.ones(512, 1024).t())  # as torch copies it, not as it lies there
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with checkpoint.Manager(client, f"{home}/run", host_bytes=64 << 20) as manager:
        manager.guard(optimizer)
        device = SlowDevice()
        manager._sides = Sides(lambda _: device)
        weight.grad = torch.ones_like(weight)
        for torn in (False, True):
            device.let.clear()
            handle = manager.save(int(torn), {"w": weight})
            if torn:
                with torch.no_grad():
                    weight.add_(1.0)
            optimizer.step()
            assert not handle.staged.done()
            device.let.set()
            if torn:
                with pytest.raises(checkpoint.TornSnapshot, match="'w'"):
                    handle.wait(60)
                with pytest.raises(checkpoint.TornSnapshot):
                    manager.wait()
            else:
                handle.wait(60)
                assert (manager.load(0)["w"] == 1.0).all()
                assert (weight == 0.0).all()
        assert device.marks == 2
        assert manager.steps() == [0]


def test_a_fixed_bandwidth_is_kept(client: Client, home: str, tmp_path: Path) -> None:
    """To the cluster and to local scratch."""
    state = {f"w{n}": torch.zeros(2 << 20) for n in range(4)}  # in files of 8 MiB
    for local in (None, tmp_path):
        path = f"{home}/run{local is None}"
        with checkpoint.Manager(client, path, bandwidth=64 << 20, local=local) as manager:
            begun = time.monotonic()
            handle = manager.save(1, state)
            assert handle.wait().limit == 64 << 20
            handle.local.result(30)
            # The last file's own bytes needn't be waited for.
            assert time.monotonic() - begun > 24 / 64 - 0.1
    with pytest.raises(errors.InvalidArgument, match="bandwidth"):
        checkpoint.Manager(client, f"{home}/run", bandwidth=-1)


def test_an_adaptive_bandwidth_holds_saves_back_between_steps_only(client: Client, home: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with checkpoint.Manager(client, f"{home}/run") as manager:
        manager.guard(optimizer)
        seen: list[Step] = []
        pace = manager._limiter._pace
        assert pace is not None
        pace.stepped = lambda step, floor: seen.append(step)  # type: ignore[method-assign]
        for _ in range(4):
            train(model, optimizer)
        assert [step.busy_s for step in seen] == [0.0] * 3
        pace.limit = 1.0  # a byte a second, as if the floor weren't there
        handle = manager.save(1, {"model": model, "more": torch.zeros(1 << 20)})
        train(model, optimizer)
        assert len(seen) == 3  # the step that met the save
        for _ in range(3):
            train(model, optimizer)
        assert len(seen) == 6
        assert all(step.busy_s > 0 for step in seen[3:])
        with pytest.raises(TimeoutError):
            handle.replicated.result(0.5)
        assert handle.wait(60).limit == 1.0  # who waits for a save isn't kept
        handle = manager.save(2, {"model": model, "more": torch.ones(1 << 20)}, block=True)
        assert handle.staged.done()
        pace.limit = None
        assert manager.save(3, {"model": model}).wait().limit is None


def test_what_hasnt_changed_is_linked(client: Client, home: str) -> None:
    frozen = {f"frozen.{n}": torch.randn(3 << 20) for n in range(3)}
    hot = torch.randn(3 << 20)
    with checkpoint.Manager(client, f"{home}/run", keep=1) as manager:
        manager.save(1, {**frozen, "hot": hot}, block=True)
        hot.add_(1)
        report = manager.save(2, {**frozen, "hot": hot}).wait()
        assert report.bytes_written < 13 << 20
        assert report.by_class["frozen"] == (36 << 20, 36 << 20)
        assert report.by_class["hot"] == (12 << 20, 0)
        manager.wait()
        assert manager.steps() == [2]
        loaded = manager.load()
        assert torch.equal(loaded["hot"], hot)
        assert all(torch.equal(loaded[name], frozen[name]) for name in frozen)
    with checkpoint.Manager(client, f"{home}/run") as later:  # another process links to it, too
        report = later.save(3, {**frozen, "hot": hot}).wait()
        assert report.bytes_written == 0


def test_another_hash_writes_all_once_and_then_links_again(client: Client, home: str) -> None:
    state = {"a": torch.randn(3 << 20), "b": torch.arange(5)}
    with checkpoint.Manager(client, f"{home}/run", hash="blake3") as manager:
        manager.save(1, state, block=True)
    with checkpoint.Manager(client, f"{home}/run") as manager:
        assert manager.manifest(1).hash == "blake3"
        report = manager.save(2, state).wait()
        assert report.bytes_linked == 0
        assert report.manifest.hash == "xxh3-128"
        assert manager.save(3, state).wait().bytes_written == 0
        for step in (1, 2, 3):
            loaded = manager.load(step)
            assert all(torch.equal(loaded[name], state[name]) for name in state)
            assert verify(client, manager.path_of(step)) == []
    with pytest.raises(errors.InvalidArgument, match="give 'xxh3-128' or 'blake3'"):
        checkpoint.Manager(client, f"{home}/run", hash="md5")  # type: ignore[arg-type]


def test_retention_keeps_what_is_newest_pinned_or_read(client: Client, home: str) -> None:
    """C8, C19."""
    with checkpoint.Manager(client, f"{home}/run", keep=2, keep_every=5) as manager:
        for step in range(1, 4):
            manager.save(step, {"w": torch.full((100,), float(step))}, block=True)
        manager.wait()
        assert manager.steps() == [2, 3]
        manager.pin(2)
        from ffs.checkpoint.hold import held

        with held(client, manager.path_of(3)):
            for step in range(4, 8):
                manager.save(step, {"w": torch.full((100,), float(step))}, block=True)
            manager.wait()
            assert manager.steps() == [2, 3, 5, 6, 7]
            assert (manager.load(3)["w"] == 3).all()
        manager.save(8, {"w": torch.full((100,), 8.0)}, block=True)
        manager.unpin(2)
        manager.save(9, {"w": torch.full((100,), 9.0)}, block=True)
        manager.wait()
        assert manager.steps() == [5, 8, 9]
        assert manager.latest() == 9


def test_a_failed_save_is_raised_once_more_and_the_next_one_works(
    manager: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3, C10."""

    def start(self: persist.ClusterWriter, directory: str, staged: Any, *told: Any) -> None:
        raise errors.NoSpace("no space left on the device")

    monkeypatch.setattr(persist.ClusterWriter, "start", start)
    handle = manager.save(1, {"w": torch.ones(10)})
    with pytest.raises(errors.NoSpace):
        handle.wait()
    monkeypatch.undo()
    with pytest.raises(errors.NoSpace):
        manager.wait()
    assert [name for name in manager.client.listdir(manager.path) if ".saving-" in name] == []
    manager.save(1, {"w": torch.ones(10)}, block=True)
    assert manager.steps() == [1]


def test_a_step_that_is_there_is_replaced_only_by_force(manager: checkpoint.Manager) -> None:
    manager.save(1, {"w": torch.zeros(3)}, block=True)
    with pytest.raises(errors.Exists):
        manager.save(1, {"w": torch.ones(3)})
    assert (manager.load()["w"] == 0).all()
    manager.save(1, {"w": torch.ones(3)}, force=True, block=True)
    assert (manager.load()["w"] == 1).all()


def test_many_ranks_make_one_checkpoint(client: Client, home: str) -> None:
    """Threads for ranks: plain tensors are shared out, per_rank stays apart, nobody coordinates."""
    count = 4
    shared = {f"t{n}": torch.full((1000 * (n + 1),), float(n)) for n in range(10)}
    managers = [
        checkpoint.Manager(client, f"{home}/run", ranks=checkpoint.Ranks(rank, count, run="ab"))
        for rank in range(count)
    ]
    handles = [
        each.save(1, {"model": shared}, per_rank={"seed": torch.tensor(each.ranks.rank)}) for each in managers
    ]
    reports = [handle.wait(60) for handle in handles]
    assert len({len(report.manifest.tensors) for report in reports}) == 1
    assert sum(report.bytes_written > 0 for report in reports) == count
    for each in managers:
        mine = {"seed": torch.tensor(-1)}
        loaded = each.load(per_rank=mine)
        assert int(mine["seed"]) == each.ranks.rank
        assert all(torch.equal(loaded["model"][name], shared[name]) for name in shared)
        each.close()
    assert client.listdir(f"{home}/run") == ["step-1"]


def test_one_rank_that_fails_fails_all_and_leaves_the_last_one(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C10."""
    managers = [
        checkpoint.Manager(client, f"{home}/run", ranks=checkpoint.Ranks(rank, 2, run="cd"))
        for rank in range(2)
    ]
    state = {"a": torch.ones(100), "b": torch.ones(200)}
    for handle in [each.save(1, state) for each in managers]:
        handle.wait(60)
    state = {"a": torch.zeros(100), "b": torch.zeros(200)}
    original = persist.ClusterWriter.start

    def start(self: persist.ClusterWriter, directory: str, staged: Any, *told: Any) -> None:
        if staged.plan.file.endswith(".r1.safetensors"):
            raise errors.NoSpace("no space left on the device")
        original(self, directory, staged, *told)

    monkeypatch.setattr(persist.ClusterWriter, "start", start)
    handles = [each.save(2, state) for each in managers]
    with pytest.raises(errors.NoSpace):
        handles[1].wait(60)
    with pytest.raises(checkpoint.RankFailed, match=r"rank 1 failed.*no space"):
        handles[0].wait(60)
    for each in managers:
        with pytest.raises((checkpoint.RankFailed, errors.NoSpace)):
            each.close()
    # The last one to see it has taken the remains away.
    assert client.listdir(f"{home}/run") == ["step-1"]


@pytest.mark.parametrize("publishes", [False, True])
def test_a_rank_that_reports_while_others_look_at_it_isnt_taken_for_dead(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch, publishes: bool
) -> None:
    """Its lock was free, since it had reported - and published - after the reports were listed."""
    one, other = (commit.Attempt(client, f"{home}/c", "ab12", rank, 2) for rank in range(2))
    for attempt in (one, other):
        attempt.begin()
    empty = {"ranks": 2, "shards": (), "tensors": {}, "tied": {}, "tree": {"dict": []}, "declared": {}}
    one.report(RankReport(rank=0, **empty))
    original = alive.is_free
    looked: list[str] = []

    def is_free(client: Client, path: str) -> bool:
        looked.append(path)
        other.report(RankReport(rank=1, **empty))
        if publishes:
            assert other.try_publish() is not None
        other.close()
        free = original(client, path)
        if publishes:
            other.tidy()
        return free

    monkeypatch.setattr(alive, "is_free", is_free)
    assert one.try_publish() is None
    assert looked == [f"{one.hidden}/alive-00001"]
    published = one.try_publish()
    assert published is not None
    assert published.here is not publishes
    assert published.manifest.ranks == 2
    one.tidy()
    assert client.listdir(home) == ["c"]


def test_a_rank_that_ended_before_it_reported_fails_the_save(client: Client, home: str) -> None:
    one, other = (commit.Attempt(client, f"{home}/c", "ab12", rank, 2) for rank in range(2))
    for attempt in (one, other):
        attempt.begin()
    assert one.try_publish() is None
    other.close()
    with pytest.raises(checkpoint.RankFailed, match="rank 1 failed: it ended before"):
        one.try_publish()
    one.tidy()


def test_whatever_fails_in_retention_the_next_saves_go_on(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> list[int]:
        raise RuntimeError("a fault of retention")

    with checkpoint.Manager(client, f"{home}/run", host_bytes=1 << 20, keep=1) as manager:
        manager.save(1, {"w": torch.ones(10)}).wait(60)
        manager.wait()
        monkeypatch.setattr(retention, "to_remove", fails)
        manager.save(2, {"w": torch.ones(10)}).wait(60)
        manager.wait()
        monkeypatch.undo()
        manager.save(3, {"w": torch.ones(10)}).wait(60)
        manager.wait()
        assert manager.steps() == [3]
    assert "a fault of retention" in caplog.text


def test_the_command_line(
    client: Client, home: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def ffs(*words: str) -> tuple[int, str, str]:
        status = main(["--cluster", address, "ckpt", *words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    run = f"{home}/run"
    with checkpoint.Manager(client, run) as manager:
        for step in (9, 10):
            state = {"w": torch.full((3 << 20,), 1.0), "b": torch.full((10,), float(step)), "n": step}
            manager.save(step, state, block=True)
    status, out, _ = ffs("ls", run)
    assert status == 0
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["9", "10"]
    assert ffs("ls", f"{run}/step-9")[1].splitlines()[1:] == out.splitlines()[1:2]
    assert "2 tensors" in ffs("show", f"{run}/step-10")[1]
    status, out, _ = ffs("diff", f"{run}/step-9", f"{run}/step-10")
    assert (status, out.splitlines()) == (0, ["changed   b", "1 tensor the same, 1 not"])
    assert ffs("verify", run)[0] == 0
    assert ffs("pin", "--reason", "paper", f"{run}/step-10")[0] == 0
    assert "paper" in ffs("show", f"{run}/step-10")[1]
    status, _, error = ffs("rm", f"{run}/step-10")
    assert (status, "unpin" in error) == (1, True)
    assert ffs("unpin", f"{run}/step-10")[0] == 0
    assert ffs("rm", run)[0] == 1  # a run is no checkpoint
    assert ffs("rm", f"{run}/step-10")[0] == 0
    assert client.listdir(run) == ["step-9"]

    manifest = checkpoint.read_manifest(client, f"{run}/step-9")
    (part,) = manifest.tensors["b"].parts
    with client.open(f"{run}/step-9/{manifest.shards[part.shard].file}", "r+b") as file:
        file.seek(part.offset)
        file.write(b"\x01")
    status, _, error = ffs("verify", run)
    assert status == 1
    assert "small-b" in error
    assert "aren't those that were saved" in error
    client.remove(f"{run}/step-9/{manifest.shards[1 - part.shard].file}")
    status, out, error = ffs("verify", "--json", run)
    assert (status, len(json.loads(out)["damages"])) == (1, 2)
    assert "isn't there" in error

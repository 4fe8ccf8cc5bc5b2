"""Local scratch of a Manager: copies that are whole or not there, and loads that take them only for what they
are (docs/guides/checkpoint.md, Local scratch)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ffs import checkpoint, errors
from ffs.checkpoint import goals, scratch
from ffs.checkpoint.commit import Attempt
from ffs.checkpoint.goals import Goal, Sources, read_goals
from ffs.checkpoint.hold import held
from ffs.checkpoint.near import near_files
from ffs.checkpoint.report import RankReport
from ffs.client.client import Client


def state(number: int = 0) -> dict[str, Any]:
    return {
        "frozen": torch.arange(2 << 20, dtype=torch.float32),
        "hot": torch.full((2 << 20,), float(number)),
        "small": torch.full((77,), number, dtype=torch.int16),
        "none": torch.empty(0, 3),
        "step": number,
    }


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(other[name], value) if isinstance(value, torch.Tensor) else other[name] == value


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each load has read from the cluster."""
    counts: list[int] = []
    original = goals.fetch

    def fetch(*args: Any, **options: Any) -> int:
        counts.append(original(*args, **options))
        return counts[-1]

    monkeypatch.setattr(goals, "fetch", fetch)
    return counts


@pytest.fixture
def managers(client: Client, home: str, tmp_path: Path) -> Iterator[Callable[..., checkpoint.Manager]]:
    made: list[checkpoint.Manager] = []

    def make(run: str = "run", **options: Any) -> checkpoint.Manager:
        options = {"local": tmp_path, "host_bytes": 64 << 20} | options
        made.append(checkpoint.Manager(client, f"{home}/{run}", **options))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def one_file(directory: str, part: str) -> Path:
    (found,) = Path(directory).glob(f"*{part}*")
    return found


def test_a_copy_has_the_bytes_and_is_loaded_instead(
    client: Client, managers: Callable[..., checkpoint.Manager], fetched: list[int]
) -> None:
    manager = managers()
    handle = manager.save(1, state(1))
    where = handle.local.result(60)
    assert where is not None
    handle.wait()
    for name in client.listdir(manager.path_of(1)):
        if name.endswith(".safetensors"):
            with client.open(f"{manager.path_of(1)}/{name}", "rb") as file:
                assert Path(where, name).read_bytes() == file.read()
    same(state(1), manager.load())
    into = {name: torch.zeros_like(t) if isinstance(t, torch.Tensor) else 0 for name, t in state().items()}
    manager.load(into=into)
    same(state(1), into)
    assert fetched == []


def test_two_copies_stay_and_what_hasnt_changed_is_linked(
    managers: Callable[..., checkpoint.Manager], fetched: list[int]
) -> None:
    manager = managers(keep_local=2)
    places = [manager.save(step, state(step)).local.result(60) for step in range(1, 4)]
    manager.wait()
    assert manager.local_steps() == [2, 3]
    assert sorted(os.listdir(os.path.dirname(places[2]))) == ["lock", "step-2", "step-3"]
    frozen = [one_file(place, "frozen").stat().st_ino for place in places[1:]]
    hot = [one_file(place, "hot").stat().st_ino for place in places[1:]]
    assert frozen[0] == frozen[1]
    assert hot[0] != hot[1]
    same(state(2), manager.load(2))
    assert fetched == []
    same(state(1), manager.load(1))  # of which the cluster alone has a copy
    assert sum(fetched) > 15 << 20
    manager.save(3, state(30), force=True, block=True)
    manager.wait()
    same(state(30), manager.load(3))
    assert manager.local_steps() == [2, 3]


@pytest.mark.parametrize("damage", ["bit", "short", "gone", "unreadable", "list"])
def test_a_damaged_copy_isnt_loaded(
    managers: Callable[..., checkpoint.Manager],
    fetched: list[int],
    caplog: pytest.LogCaptureFixture,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = managers()
    where = manager.save(1, state(1)).local.result(60)
    assert where is not None
    manager.wait()
    file = one_file(where, "hot")
    if damage == "bit":
        with file.open("r+b") as raw:
            raw.seek(-5, os.SEEK_END)
            raw.write(b"\x01")
    elif damage == "short":
        os.truncate(file, file.stat().st_size - 4096)
    elif damage == "gone":
        file.unlink()
    elif damage == "list":
        Path(where, scratch.FILE_NAME).write_bytes(b"{}")
    else:

        def preadv(*_: object) -> int:
            raise OSError(5, "input/output error")

        monkeypatch.setattr(os, "preadv", preadv)
    same(state(1), manager.load())
    assert fetched
    if damage in ("bit", "unreadable"):
        assert "the cluster is" in caplog.text


def test_a_piece_is_read_near_if_half_of_its_part_is_wanted(
    client: Client, managers: Callable[..., checkpoint.Manager], fetched: list[int]
) -> None:
    """And verified, though only a piece of it is wanted."""
    manager = managers()
    value = torch.arange(512 * 512, dtype=torch.float32).reshape(512, 512)
    where = manager.save(1, {"w": value}).local.result(60)
    assert where is not None
    manager.wait()

    def piece(rows: int, columns: int) -> tuple[np.ndarray[Any, Any], int]:
        out = np.zeros((rows, columns), np.float32)
        with held(client, manager.path_of(1)) as manifest:
            near = near_files(os.path.dirname(os.path.dirname(os.path.dirname(where))), run, 1, manifest)
            goal = Goal("w", ((0, 0), (rows, columns)), out.reshape(-1).view(np.uint8))
            read_goals(client, manager.path_of(1), manifest, [goal], Sources(near))
        return out, near.served

    run = scratch.run_of(client, manager.path)
    for rows, columns in ((400, 512), (512, 400)):
        found, served = piece(rows, columns)
        assert (found == value[:rows, :columns].numpy()).all()
        assert served == 1 << 20
    assert fetched == []
    found, served = piece(100, 512)
    assert (found == value[:100].numpy()).all()
    assert (served, fetched) == (0, [100 * 2048])
    file = one_file(where, "w")
    with file.open("r+b") as raw:
        raw.seek(4096)
        raw.write(b"\xff")
    found, _ = piece(400, 512)
    assert (found == value[:400].numpy()).all()


def test_a_scratch_that_fails_fails_no_save(
    managers: Callable[..., checkpoint.Manager], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manager = managers()
    original = scratch.write_direct
    full = [False, True]

    def write(path: str, memory: memoryview, nbytes: int) -> None:
        if full and full.pop(0):
            with open(path, "wb") as file:
                file.write(memory[:4096])
            raise OSError(28, "No space left on device", path)
        original(path, memory, nbytes)

    monkeypatch.setattr(scratch, "write_direct", write)
    handle = manager.save(1, state(1))
    handle.wait()
    with pytest.raises(OSError, match="No space left"):
        handle.local.result(60)
    manager.wait()
    assert manager.local_steps() == []
    assert os.listdir(Path(manager.save(2, state(2)).local.result(60) or "").parent) == ["lock", "step-2"]
    same(state(1), manager.load(1))
    (tmp_path / "file").write_bytes(b"")
    other = managers("other", local=tmp_path / "file")
    handle = other.save(1, state(1))
    handle.wait()
    with pytest.raises(NotADirectoryError):
        handle.local.result(60)
    same(state(1), other.load())


def test_a_save_that_fails_in_the_cluster_can_be_whole_here(
    managers: Callable[..., checkpoint.Manager], monkeypatch: pytest.MonkeyPatch, fetched: list[int]
) -> None:
    """Loaded when it is asked for by number; the latest is what the cluster has."""
    manager = managers(host_bytes=64 << 20)
    manager.save(1, state(1), block=True)

    original = Attempt.tell

    def tell(self: Attempt, report: RankReport) -> None:
        raise errors.NoSpace("no space left on the device")

    monkeypatch.setattr(Attempt, "tell", tell)
    handle = manager.save(2, state(2))
    assert handle.local.result(60)
    with pytest.raises(errors.NoSpace):
        handle.wait()
    with pytest.raises(errors.NoSpace):
        manager.wait()
    monkeypatch.setattr(Attempt, "tell", original)
    assert manager.local_steps() == [1, 2]
    assert manager.latest() == 1
    same(state(1), manager.load())
    same(state(2), manager.load(2))
    assert fetched == []
    with pytest.raises(errors.NotFound):
        manager.load(3)


def test_what_was_torn_leaves_no_copy(
    client: Client, managers: Callable[..., checkpoint.Manager], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = managers()
    manager.guard(optimizer)
    from ffs.checkpoint import manager as managing

    original = managing.versions
    changed: list[object] = []

    def versions(plan: Any) -> dict[str, int]:
        found = original(plan)
        if not changed:
            changed.append(plan)
            with torch.no_grad():
                model.weight.add_(1)
        return found

    monkeypatch.setattr(managing, "versions", versions)
    handle = manager.save(1, {"model": model})
    for future in (handle.local, handle.replicated):
        with pytest.raises(checkpoint.TornSnapshot):
            future.result(60)
    with pytest.raises(checkpoint.TornSnapshot):
        manager.wait()
    assert manager.local_steps() == []


def test_neither_ranks_nor_jobs_are_taken_for_one_another(
    client: Client, managers: Callable[..., checkpoint.Manager], fetched: list[int], tmp_path: Path
) -> None:
    one, other = managers("one"), managers("other")
    for manager, number in ((one, 1), (other, 2)):
        manager.save(7, state(number), block=True)
        manager.wait()
    same(state(1), one.load(7))
    same(state(2), other.load(7))
    assert fetched == []
    # Somebody's copy under another run's name: its list says whose it is.
    runs = [scratch.run_of(client, each.path) for each in (one, other)]
    assert runs[0] != runs[1]
    rank = "rank-00000-of-00001"
    os.rename(tmp_path / runs[0] / rank, tmp_path / "kept")
    os.rename(tmp_path / runs[1] / rank, tmp_path / runs[0] / rank)
    same(state(1), one.load(7))
    assert fetched
    handle = managers("one").save(8, state(8))  # where `other` still holds its lock
    assert isinstance(handle.local.exception(60), errors.Busy)
    handle.wait()


def test_ranks_of_one_host_read_each_others_copies(
    client: Client, managers: Callable[..., checkpoint.Manager], fetched: list[int]
) -> None:
    ranks = [managers(ranks=checkpoint.Ranks(rank, 3, run="ab"), keep_local=1) for rank in range(3)]
    for step in (1, 2):
        handles = [each.save(step, state(step), per_rank={"n": each.ranks.rank}) for each in ranks]
        for handle in handles:
            handle.wait(60)
            handle.local.result(60)
    for each in ranks:
        own = {"n": -1}
        same(state(2), each.load(per_rank=own))
        assert own == {"n": each.ranks.rank}
    assert fetched == []
    alone = managers(ranks=checkpoint.Ranks(0, 1))  # another number of ranks
    same(state(2), alone.load())
    assert fetched == []

"""Whose memory is whose (FAULTS C17), large requests in order (C16), and many workers at once (C18)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from ffs import checkpoint
from ffs.checkpoint import fetch as fetching
from ffs.client.client import Client

TENSORS = 16


def tensor(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(64 + 37 * number, 97, generator=generator)


def sample(client: Client, path: str, number: int) -> tuple[int, torch.Tensor]:
    into = {f"t{number}": torch.zeros_like(tensor(number))}
    checkpoint.load(client, path, into, strict=False)
    return number, into[f"t{number}"]


def test_eight_workers_get_every_sample_right(client: Client, home: str) -> None:
    """C18: threads that share a client, each sample a tensor that is loaded by itself, twice."""
    checkpoint.save(client, f"{home}/c", {f"t{n}": tensor(n) for n in range(TENSORS)})
    with ThreadPoolExecutor(8) as workers:
        seen = []
        for number, value in workers.map(
            lambda n: sample(client, f"{home}/c", n), [*range(TENSORS), *range(TENSORS)]
        ):
            assert torch.equal(value, tensor(number)), number
            seen.append(number)
    assert sorted(seen) == sorted([*range(TENSORS), *range(TENSORS)])


class Samples(torch.utils.data.Dataset[tuple[int, int, torch.Tensor]]):
    """Tensors of one checkpoint; and who has read each."""

    def __init__(self, client: Client, path: str) -> None:
        self.client, self.path = client, path

    def __len__(self) -> int:
        return 4 * TENSORS

    def __getitem__(self, index: int) -> tuple[int, int, torch.Tensor]:
        return os.getpid(), *sample(self.client, self.path, index % TENSORS)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 8 worker processes")
def test_eight_worker_processes_get_every_sample_right(client: Client, home: str) -> None:
    """C18, with the processes of torch's DataLoader, while this one saves and loads, too: its connections and
    rings were there before they were forked."""
    checkpoint.save(client, f"{home}/c", {f"t{n}": tensor(n) for n in range(TENSORS)})
    assert torch.equal(sample(client, f"{home}/c", 3)[1], tensor(3))
    loader = torch.utils.data.DataLoader(
        Samples(client, f"{home}/c"),
        batch_size=None,
        num_workers=8,
        multiprocessing_context="fork",
        worker_init_fn=_one_thread,
    )
    processes, seen = set(), []
    for turn, (pid, number, value) in enumerate(loader):
        assert torch.equal(value, tensor(number)), number
        processes.add(pid)
        seen.append(number)
        if turn % TENSORS == 0:
            checkpoint.save(client, f"{home}/c{turn}", {"t": tensor(turn)})
            assert torch.equal(checkpoint.load(client, f"{home}/c{turn}")["t"], tensor(turn))
    assert len(processes) == 8
    assert sorted(seen) == sorted([*range(TENSORS)] * 4)


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)


def test_memory_that_is_lent_is_given_back_and_memory_that_is_given_stays(client: Client, home: str) -> None:
    """C17. Borrowed: what `into` names is written while the load runs and never again; what a save was given
    is read until it is staged and never again. Owned: tensors of a load without `into`."""
    lent = torch.zeros(3 << 18)
    with checkpoint.Manager(client, f"{home}/run", host_bytes=8 << 20) as manager:
        for step in range(6):  # each save's memory is that of an earlier one
            lent.fill_(step)
            manager.save(step, {"w": lent, "s": torch.full((10,), step)})
        lent.fill_(-1)
        manager.wait()
        owned = [manager.load(step) for step in range(6)]
        into = {"w": lent, "s": torch.zeros(10, dtype=torch.int64)}
        manager.load(0, into=into)
        assert (lent == 0).all()
        lent.fill_(77)
        manager.load(1, into={"w": torch.zeros(3 << 18), "s": torch.zeros(10, dtype=torch.int64)})
        manager.save(9, {"w": torch.ones(3 << 18), "s": torch.zeros(10)}, block=True)
        assert (lent == 77).all()
        owned[0]["w"].fill_(5)
    for step in range(1, 6):
        assert (owned[step]["w"] == step).all()
        assert (owned[step]["s"] == step).all()
    assert (owned[0]["s"] == 0).all()


def test_a_load_asks_in_file_order_for_large_pieces(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C16."""
    state = {f"t{n}": np.full(3 << 20, n, np.uint8) for n in range(8)}
    state |= {f"s{n}": np.full(1000, n, np.uint8) for n in range(200)}
    checkpoint.save(client, f"{home}/c", state)
    asked: list[tuple[str, int, int]] = []
    original = fetching.Ior.prepare

    def prepare(self: Any, file: Any, offset: int, memory: Any, number: int) -> None:
        asked.append((file.name, offset, len(memory)))
        original(self, file, offset, memory, number)

    monkeypatch.setattr(fetching.Ior, "prepare", prepare)
    loaded = checkpoint.load(client, f"{home}/c")
    assert all((loaded[name] == value).all() for name, value in state.items())
    assert asked == sorted(asked)
    total = sum(length for _, _, length in asked)
    assert total <= sum(value.nbytes for value in state.values()) + 200 * 64
    files = {name for name, _, _ in asked}
    assert len(asked) <= total // (4 << 20) + 2 * len(files) + len(state) // 100

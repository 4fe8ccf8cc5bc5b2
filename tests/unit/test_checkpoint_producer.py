"""A whole shard as `save` makes it, piece by piece, read by the safetensors library (FAULTS C12, C13)."""

from __future__ import annotations

from pathlib import Path

import blake3
import pytest
import safetensors.torch
import torch

from ffs.checkpoint.dtypes import TORCH_NAMES
from ffs.checkpoint.save import _groups, _Producer, _sources
from ffs.checkpoint.shard import plan_shard
from ffs.checkpoint.spans import cut


def _state() -> dict[str, torch.Tensor]:
    state = {
        name: torch.arange(48, dtype=torch.int64)
        .remainder(2)
        .to(torch.uint8)
        .view(getattr(torch, dtype))
        .reshape(-1)[:3]
        .clone()
        for name, dtype in TORCH_NAMES.items()
    }
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.empty(0, 4)
    state["pages"] = torch.arange(3 * 1024, dtype=torch.float32)
    state["large"] = torch.arange(5000, dtype=torch.float64).reshape(50, 100).T
    state["tied"] = state["pages"]
    return state


@pytest.mark.parametrize("piece", [4096, 65536, 1 << 22, 1000])
def test_the_safetensors_library_reads_every_piece_size(piece: int, tmp_path: Path) -> None:
    state = _state()
    sources, tied = _sources(state)
    assert tied == {"tied": "pages"}
    plan = plan_shard((source.spec for source in sources), tied)
    producer = _Producer(plan, sources)
    file = bytearray(plan.nbytes)
    for offset, length in cut(0, plan.nbytes, piece):
        producer.fill(offset, memoryview(file)[offset : offset + length])
    path = tmp_path / "model.safetensors"
    path.write_bytes(file)
    read = safetensors.torch.load_file(path)
    assert set(read) == set(state) - {"tied"}
    for name, tensor in read.items():
        assert tensor.dtype == state[name].dtype
        assert tensor.shape == state[name].shape
        mine = state[name].contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), mine)
        assert producer.hashes[name] == blake3.blake3(mine.numpy().tobytes()).hexdigest()


def test_shards_end_before_they_get_too_large() -> None:
    sources, _ = _sources({str(i): torch.full((size,), i) for i, size in enumerate([10, 10, 100, 1, 1])})
    groups = _groups(sources, 160)
    assert [[s.spec.name for s in group] for group in groups] == [["0", "1"], ["2"], ["3", "4"]]
    assert _groups([], 10) == [[]]

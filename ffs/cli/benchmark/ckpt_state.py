"""The state that `ffs bench ckpt` saves: a real model's weights, tiled, each rank with its piece of every
tensor as FSDP has it (docs/guides/bench.md). Imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

BYTES_A_PARAMETER: Final = 14  # bf16 weights, fp32 copies of them, two moments


@dataclass(slots=True)
class State:
    """`tensors`: what is saved, DTensors over all ranks; `local`: this rank's pieces of them, the same
    memory."""

    tensors: dict[str, Any] = field(default_factory=dict)
    local: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def local_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.local.values())

    @property
    def whole_bytes(self) -> int:
        return sum(math.prod(t.shape) * t.element_size() for t in self.tensors.values())


def tiled(model: Path, size_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors again and again, under names of their own, until there are about so many bytes."""
    from safetensors.torch import load_file

    weights = {name: tensor for name, tensor in load_file(model).items() if tensor.dim() > 0}
    total = turn = 0
    while True:
        for name, tensor in weights.items():
            if total + tensor.nbytes > size_bytes:
                if total >= 0.97 * size_bytes or tensor.nbytes < 1 << 20:
                    return
                continue  # a smaller one may fit
            total += tensor.nbytes
            yield f"copy{turn}.{name}", tensor
        turn += 1


def weights(model: Path, size_bytes: int, rank: int, mesh: DeviceMesh) -> State:
    """float32 weights, split along their first dimension."""
    state = State()
    for name, tensor in tiled(model, size_bytes):
        _add(state, name, tensor, rank, mesh)
    return state


def training_state(model: Path, size_bytes: int, rank: int, mesh: DeviceMesh) -> State:
    """Fourteen bytes a parameter, as the accepted benchmark of checkpoints counts."""
    state = State()
    floats = size_bytes * 4 // BYTES_A_PARAMETER
    for name, tensor in tiled(model, floats):
        if tensor.is_floating_point():
            _add(state, f"model.{name}", tensor.bfloat16(), rank, mesh)
            _add(state, f"master.{name}", tensor.float(), rank, mesh)
            _add(state, f"optimizer.{name}.exp_avg", tensor.float() / 16, rank, mesh)
            _add(state, f"optimizer.{name}.exp_avg_sq", tensor.float().square(), rank, mesh)
    return state


def _add(state: State, name: str, tensor: torch.Tensor, rank: int, mesh: DeviceMesh) -> None:
    world = mesh.size()
    rows = -(-tensor.shape[0] // world)
    piece = tensor[rank * rows : (rank + 1) * rows].clone()
    state.local[name] = piece
    state.tensors[name] = DTensor.from_local(
        piece, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def change(pieces: Iterator[torch.Tensor] | list[torch.Tensor]) -> None:
    """Other bits in every element, whatever its type."""
    for piece in pieces:
        flat = piece.reshape(-1)
        if flat.numel():
            flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[piece.element_size()]).bitwise_xor_(1)

"""Training beside which `ffs bench ckpt` saves: forward, backward and update over the weights that are saved,
in step with all ranks. Imports torch.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch
import torch.distributed as dist

from ffs.checkpoint import Manager

_TOKENS: Final = 4


class Training:
    """SGD over all matrices: each is applied to an activation of its own. `waited`: seconds for which the
    last update was kept waiting by a copy."""

    def __init__(self, pieces: list[torch.Tensor], manager: Manager) -> None:
        self._parameters = [
            torch.nn.Parameter(piece) for piece in pieces if piece.is_floating_point() and piece.numel()
        ]
        self._optimizer = torch.optim.SGD(self._parameters, lr=1e-6)
        self._manager = manager
        self.waited = 0.0
        self._optimizer.register_step_pre_hook(self._wait)  # before guard's own: this one waits, and is timed
        manager.guard(self._optimizer)
        self._inputs: dict[int, torch.Tensor] = {}

    def _wait(self, *_: Any) -> None:
        begun = time.perf_counter()
        self._manager.wait_copied()
        self.waited = time.perf_counter() - begun

    def step(self) -> float:
        """Seconds, of the slowest rank: all wait for each other."""
        begun = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=False)
        loss = torch.zeros(())
        for parameter in self._parameters:
            matrix = parameter.reshape(-1, parameter.shape[-1]) if parameter.dim() > 1 else parameter
            loss = loss + (self._input(matrix.shape[-1]) @ matrix.t()).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        dist.all_reduce(loss.detach())
        self._optimizer.step()
        return time.perf_counter() - begun

    def _input(self, width: int) -> torch.Tensor:
        found = self._inputs.get(width)
        if found is None:
            found = self._inputs[width] = torch.full((_TOKENS, width), 1e-3)
        return found

    def close(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._parameters.clear()

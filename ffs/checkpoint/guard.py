"""`guard(optimizer)`: an update waits for the tensors that a save is still copying
(docs/guides/checkpoint.md, Guard).

A save under guard copies parameters and optimizer state while forward and backward run: these only read them.
What else the state has - buffers that forward changes, counters - is copied before `save` returns. The
versions of the tensors tell whether something changed them all the same; then the save fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ffs.errors import FfsError, InvalidArgument


class TornSnapshot(FfsError):
    """A tensor was changed while it was copied: the checkpoint would have mixed two steps."""


class Guard:
    """Of one optimizer, or several. Any thread may wait."""

    def __init__(self) -> None:
        self._optimizers: list[Any] = []
        self._handles: list[Any] = []
        self._idle = threading.Event()
        self._idle.set()

    @property
    def active(self) -> bool:
        return bool(self._optimizers)

    def add(self, optimizer: Any) -> None:
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is None:
            raise InvalidArgument(
                f"guard: {type(optimizer).__name__} has no register_step_pre_hook: give a torch optimizer, "
                "or call manager.wait_copied() before each update"
            )
        self._optimizers.append(optimizer)
        self._handles.append(register(lambda *_: self.wait()))

    def remove_all(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._optimizers.clear()

    def begin(self) -> None:
        self._idle.clear()

    def end(self) -> None:
        self._idle.set()

    def wait(self) -> None:
        """Until nothing is being copied."""
        self._idle.wait()

    def covers(self) -> Callable[[Any], bool]:
        """Tells of a tensor whether only an update changes it."""
        found: set[int] = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found.update(map(_storage, filter(_is_torch, group["params"])))
            for state in optimizer.state.values():
                values = state.values() if isinstance(state, Mapping) else ()
                found.update(map(_storage, filter(_is_torch, values)))
        return lambda tensor: _is_torch(tensor) and _storage(tensor) in found


def _is_torch(value: Any) -> bool:
    return hasattr(value, "untyped_storage") and bool(value.numel())


def _storage(tensor: Any) -> int:
    """The address of the memory that a torch tensor is a view of."""
    local = tensor.to_local() if type(tensor).__name__ == "DTensor" else tensor
    return int(local.untyped_storage().data_ptr())

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

from ffs.checkpoint.streams import End
from ffs.errors import FfsError, InvalidArgument


class TornSnapshot(FfsError):
    """A tensor was changed while it was copied: the checkpoint would have mixed two steps."""


class Untouched:
    """Tells whether tensors were changed in place since this was made, up to the first time it is asked. Any
    thread."""

    def __init__(self, versions: Callable[[], Mapping[str, int]]) -> None:
        self._versions = versions
        self._before = versions()
        self._mutex = threading.Lock()
        self._changed: list[str] | None = None

    def changed(self) -> list[str]:
        """Their names."""
        with self._mutex:
            if self._changed is None:
                now = self._versions()
                self._changed = sorted(name for name, count in self._before.items() if count != now[name])
            return self._changed


class Guard:
    """Of one optimizer, or several. Any thread may wait."""

    def __init__(
        self, stepped: Callable[[], None] = lambda: None, waited: Callable[[], None] = lambda: None
    ) -> None:
        """`stepped`: called after each update of the first optimizer; `waited`: where one is kept waiting."""
        self._stepped, self._waited = stepped, waited
        self._optimizers: list[Any] = []
        self._handles: list[Any] = []
        self._end: tuple[End, Callable[[], object]] | None = None
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
        self._handles.append(register(lambda *_: self.wait_here()))
        after = getattr(optimizer, "register_step_post_hook", None)
        if after is not None and len(self._optimizers) == 1:  # several make one step of training together
            self._handles.append(after(lambda *_: self._stepped()))

    def remove_all(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._optimizers.clear()

    def begin(self) -> None:
        self._end = None
        self._idle.clear()

    def launched(self, end: End, last_look: Callable[[], object]) -> None:
        """All copies have begun; those of devices go on until `end`. `last_look`: called before an update,
        which changes what it looks at."""
        self._end = end, last_look
        self._idle.set()

    def end(self) -> None:
        self._end = None
        self._idle.set()

    def wait(self) -> None:
        """Until nothing is being copied."""
        end = self._wait_launched()
        if end is not None:
            end.block()

    def wait_here(self) -> None:
        """As `wait`, for what this thread launches from now on; copies of devices aren't waited for here, but
        there."""
        end = self._wait_launched()
        if end is not None:
            end.wait_here()

    def _wait_launched(self) -> End | None:
        if not self._idle.is_set():
            self._waited()
        self._idle.wait()
        going = self._end
        if going is None:
            return None
        end, last_look = going
        last_look()
        return end

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

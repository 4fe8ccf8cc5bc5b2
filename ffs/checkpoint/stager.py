"""An AsyncStager for torch.distributed.checkpoint on the memory that a Manager stages in
(docs/guides/checkpoint.md, DCP).

    stager = FfsStager(host_bytes=4 << 30)
    dcp.async_save(state, storage_writer=FfsStorageWriter(client, path), async_stager=stager)

A state is copied into one region of memory that is allocated once, and given on as tensors of that memory.
The region is given back when the last of them goes, which is when DCP has written them: a third save waits
until then, and nothing that is still being written is overwritten (FAULTS C4). Works with any StorageWriter.
"""

from __future__ import annotations

import copy
import gc
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.staging import AsyncStager

from ffs.checkpoint.guard import Guard, TornSnapshot
from ffs.checkpoint.plan import Part
from ffs.checkpoint.snapshot import Flat
from ffs.checkpoint.staging import PAGE, Pool, Region, host_bytes_for
from ffs.checkpoint.tensors import Source, describe
from ffs.errors import Busy, InvalidArgument

_ALIGN: Final = 64


@dataclass(slots=True)
class _Copy:
    """One piece of memory of the state, once however often it stands there."""

    source: Source
    at: int


@dataclass(slots=True)
class _Plan:
    copies: dict[Hashable, _Copy] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> _Copy:
        source = describe(name, tensor)
        found = self.copies.get(source.identity)
        if found is None:
            step = PAGE if source.spec.nbytes >= PAGE else _ALIGN
            at = -(-self.nbytes // step) * step
            found = self.copies[source.identity] = _Copy(source, at)
            self.nbytes = at + source.spec.nbytes
        return found


class FfsStager(AsyncStager):
    """`host_bytes`: memory for states on their way, allocated once; None: as much as two saves of the first
    state take, at most a quarter of what is free, and anew for a larger one. A state must fit. `patience_s`:
    how long `stage` waits for an earlier state to be written. One thread; `close` it after the last save.

    With `guard(optimizer)` `stage` returns a future: what the optimizer alone changes is copied while
    forward and backward run, its next step waits for that, the rest is copied before `stage` returns."""

    _synchronize_after_execute = False  # stage() returns when the state may be changed, or guarded

    def __init__(self, host_bytes: int | None = None, patience_s: float = 600.0) -> None:
        self._host_bytes = host_bytes
        self._patience_s = patience_s
        self._pool = Pool(host_bytes) if host_bytes is not None else None
        self._guard = Guard()
        self._thread: ThreadPoolExecutor | None = None
        self._dropped: deque[Region] = deque()
        self._closed = False

    def guard(self, optimizer: Any) -> None:
        self._guard.add(optimizer)

    def stage(self, state_dict: Mapping[str, Any]) -> Any:
        """The state as tensors of the stager's memory: each costs its own bytes, not its storage's; DTensors
        stay what they are; what isn't a tensor is deep-copied. Blocking.

        TypeError, InvalidArgument: a tensor that can't be stored, or a state that doesn't fit; Busy: earlier
        states are still held after `patience_s`."""
        if self._closed:
            raise InvalidArgument("this stager is closed")
        self._guard.wait()
        plan = _Plan()
        found: dict[int, tuple[torch.Tensor, _Copy]] = {}
        _walk(state_dict, (), lambda name, t: found.setdefault(id(t), (t, plan.add(name, t))))
        region, whole = self._take(plan.nbytes)
        memory = region.memory()
        views: dict[int, torch.Tensor] = {}

        def view(tensor: torch.Tensor) -> torch.Tensor:
            there, copied = found[id(tensor)]
            if id(copied) not in views:
                views[id(copied)] = self._view(region, whole, there, copied)
            return views[id(copied)]

        staged = _rebuilt(state_dict, view)
        covered = self._guard.covers() if self._guard.active else lambda tensor: False
        now = [each for each in plan.copies.values() if not covered(each.source.tensor)]
        later = [each for each in plan.copies.values() if covered(each.source.tensor)]
        _copy(now, memory)
        if not self._guard.active:
            return staged
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ffs-stager")
        versions = [_version(each) for each in later]
        self._guard.begin()
        try:
            coming: Future[Any] = self._thread.submit(self._copy_later, later, versions, memory, staged)
        except BaseException:
            self._guard.end()
            raise
        return coming

    def synchronize_staging(self) -> None:
        """Until what `stage` took may be changed."""
        self._guard.wait()

    def close(self) -> None:
        """Idempotent. Memory that DCP still holds lives on until it is done."""
        self._closed = True
        self._guard.wait()
        self._guard.remove_all()
        if self._thread is not None:
            self._thread.shutdown()
        if self._pool is not None:
            self._pool.close()

    # inside

    def _copy_later(self, copies: list[_Copy], before: list[int], memory: memoryview, staged: Any) -> Any:
        try:
            _copy(copies, memory)
            for each, version in zip(copies, before, strict=True):
                if _version(each) != version:
                    raise TornSnapshot(
                        f"{each.source.spec.name!r} was changed while it was copied, by something else than "
                        "the guarded optimizer: guard that too, or call synchronize_staging() before it"
                    )
            return staged
        finally:
            self._guard.end()

    def _take(self, nbytes: int) -> tuple[Region, torch.Tensor]:
        """Memory, and a tensor of it as torch shares it between processes: it is given back when the storages
        of that tensor and of `_view` go, with the last views of them."""
        size = max(PAGE, nbytes)
        if self._host_bytes is None:
            wanted = max(host_bytes_for(size), size + 2 * PAGE)
            if self._pool is None or self._pool.nbytes < wanted // PAGE * PAGE:
                if self._pool is not None:
                    self._pool.close()  # what is in use lives on
                self._pool = Pool(wanted)
        assert self._pool is not None
        end = time.monotonic() + self._patience_s

        def held() -> BaseException | None:
            gc.collect()  # what DCP dropped may be in circles
            self._give_back()
            if time.monotonic() < end:
                return None
            return Busy(
                f"staged states are held for more than {self._patience_s:g} s: their saves hang, or a "
                "planner or future that is kept refers to them; drop these, or give more host_bytes"
            )

        self._give_back()
        region = self._pool.take(size, held)
        try:
            # Of a descriptor, so that a process that writes gets that instead of a copy.
            shared: Any = torch.UntypedStorage
            storage = shared._new_shared_fd_cpu(os.dup(self._pool.iov.fileno()), self._pool.nbytes)
            self._until_dropped(storage, region)
        except BaseException:
            region.release()
            raise
        whole = torch.empty(0, dtype=torch.uint8).set_(storage, region.begin, (size,), (1,))
        return region, whole

    def _until_dropped(self, storage: Any, region: Region) -> None:
        # Garbage is collected anywhere, perhaps inside of the pool: noted there, given back by `_give_back`.
        weakref.finalize(storage, self._dropped.append, region).atexit = False

    def _view(self, region: Region, whole: torch.Tensor, tensor: torch.Tensor, copied: _Copy) -> torch.Tensor:
        """What stands for a tensor of the state."""
        spec = copied.source.spec
        if type(tensor).__name__ != "DTensor":
            return whole[copied.at : copied.at + spec.nbytes].view(tensor.dtype).reshape(spec.shape)
        from torch.distributed.tensor import DTensor

        there: Any = tensor
        piece = torch.empty(spec.shape, dtype=tensor.dtype)
        if spec.nbytes:
            # A storage of its own: torch 2.13 crashes where it sends a DTensor inside of a larger one.
            memory = region.memory()[copied.at : copied.at + spec.nbytes]
            piece = torch.frombuffer(memory, dtype=tensor.dtype).reshape(spec.shape)
            region.holders += 1
            self._until_dropped(piece.untyped_storage(), region)
        stride = torch.empty(there.shape, device="meta").stride()
        mesh, placements = there.device_mesh, there.placements
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=there.shape, stride=stride)

    def _give_back(self) -> None:
        while self._dropped:
            self._dropped.popleft().release()


def _copy(copies: list[_Copy], memory: memoryview) -> None:
    flat = Flat()
    into = np.frombuffer(memory, np.uint8)
    for each in copies:
        source, nbytes = each.source, each.source.spec.nbytes
        if nbytes:
            shape = source.spec.shape
            part = Part(source.spec.name, source.spec.dtype, shape, (0,) * len(shape), shape)
            flat.copy(source, part, into[each.at : each.at + nbytes])


def _walk(value: Any, path: tuple[Any, ...], found: Callable[[str, torch.Tensor], object]) -> None:
    if isinstance(value, torch.Tensor):
        found(".".join(map(str, path)), value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _walk(each, (*path, key), found)
    elif isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            _walk(each, (*path, at), found)


def _rebuilt(value: Any, staged: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return staged(value)
    if isinstance(value, Mapping):
        return {key: _rebuilt(each, staged) for key, each in value.items()}
    if isinstance(value, list):
        return [_rebuilt(each, staged) for each in value]
    if isinstance(value, tuple):
        parts = [_rebuilt(each, staged) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, np.ndarray):
        return value.copy()
    return copy.deepcopy(value)


def _version(each: _Copy) -> int:
    tensor = each.source.tensor
    return 0 if tensor.is_inference() else int(tensor._version)

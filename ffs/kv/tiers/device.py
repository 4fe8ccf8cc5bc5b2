"""Device memory above the tiers: blocks of a torch tensor, copied from and to pinned host memory on a stream
of their own while others are computed with (docs/kv_tiers.md, Device memory). On a CPU tensor the same code
copies at once. torch is needed here only, and only the caller's tensor brings it in.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self

from ffs._native.iov import IovSlice
from ffs.errors import BadHandle, FfsError, InvalidArgument
from ffs.kv.policy import Marks, Pins, Residency, ScanGuard, make_order
from ffs.kv.policy.pins import Lease
from ffs.kv.tiers.manager import TierManager
from ffs.kv.tiers.streams import Stream
from ffs.kv.tiers.words import Outcome

_DEPTH: Final = 4


class Event(Protocol):
    """The end of a copy, or of what computed with a block."""

    def done(self) -> bool: ...

    def wait_here(self) -> None:
        """What is computed from now on begins after it. On a GPU this doesn't block the thread."""
        ...

    def wait_on_side(self) -> None:
        """Copies from now on begin after it."""
        ...

    def block(self) -> None:
        """Blocks the thread until it has come."""
        ...


class _Now:
    """On a CPU everything is over when the call is."""

    def done(self) -> bool:
        return True

    def wait_here(self) -> None: ...

    def wait_on_side(self) -> None: ...

    def block(self) -> None: ...


class CpuCopies:
    """Copies between host and host."""

    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self) -> None: ...

    def copy(self, target: Any, source: Any) -> Event:
        target.copy_(source)
        return _Now()

    def mark(self) -> Event:
        return _Now()


class _CudaEvent:
    def __init__(self, torch: Any, side: Any, event: Any) -> None:
        self._torch, self._side, self._event = torch, side, event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait_here(self) -> None:
        self._torch.cuda.current_stream(self._side.device).wait_event(self._event)

    def wait_on_side(self) -> None:
        self._side.wait_event(self._event)

    def block(self) -> None:
        self._event.synchronize()


class CudaCopies:
    """Copies on a side stream of one GPU. Host memory is registered with CUDA, so that they run by
    themselves."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._registered: int | None = None

    def register(self, address: int, nbytes: int) -> None:
        """Pins the host's memory. FfsError: the driver refuses (docs/kv_tiers.md says what limits it)."""
        code = int(self._torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code:
            raise FfsError(f"CUDA can't register {nbytes} bytes of host memory (error {code})")
        self._registered = address

    def unregister(self) -> None:
        if self._registered is not None:
            self._torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = None

    def copy(self, target: Any, source: Any) -> Event:
        with self._torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            event = self._torch.cuda.Event()
            event.record(self._side)
        return _CudaEvent(self._torch, self._side, event)

    def mark(self) -> Event:
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device))
        return _CudaEvent(self._torch, self._side, event)


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """One position. `memory`: the block's bytes on the device (uint8) if it is a HIT, valid until the stream
    goes on; else None: compute the block. What is launched on the current stream finds it filled."""

    position: int
    key: bytes
    outcome: Outcome
    memory: Any
    error: FfsError | None


class DeviceTier:
    """Blocks in `pool`, a tensor (slots, block bytes) of uint8 on a GPU or CPU, over a TierManager. One
    thread.

    Its blocks are all in a tier below or on their way to one, so a slot is taken again without a copy. Close
    it before the manager."""

    def __init__(
        self, tiers: TierManager, pool: Any, *, policy: str = "adaptive", copies: Any = None
    ) -> None:
        block = tiers.settings.block_bytes
        if pool.ndim != 2 or pool.element_size() != 1 or pool.shape[1] < block or not pool.is_contiguous():
            raise InvalidArgument(
                f"the pool is a contiguous tensor of bytes, a row for each block of {block}, not"
                f" {tuple(pool.shape)} of {pool.dtype}"
            )
        self._tiers = tiers
        self._pool = pool
        self._block = int(pool.shape[1])
        slots = int(pool.shape[0])
        self._free = list(range(slots - 1, -1, -1))
        capacity = slots * self._block
        self._residency = Residency(
            Marks(capacity, capacity, capacity), make_order(policy, capacity), ScanGuard(max(1024, 4 * slots))
        )
        self._pins = Pins(self._residency)
        self._slots: dict[bytes, tuple[int, int]] = {}  # slot, bytes
        self._arriving: dict[bytes, Event] = {}
        self._used: dict[int, Event] = {}  # by slot: what computed with it last
        self._leaving: deque[tuple[bytes, Event, contextlib.ExitStack, Lease]] = deque()
        self._copies = copies if copies is not None else _copies_for(pool)
        memory = tiers.memory.torch()
        self._host = memory
        self._copies.register(memory.data_ptr(), memory.numel())
        self.hits = 0
        """Blocks that were on the device already."""
        self.copied_in = 0
        self.copied_out = 0

    def __contains__(self, key: bytes) -> bool:
        return self._residency.has(key)

    # --- in -------------------------------------------------------------------------------------

    def stream(
        self, keys: Sequence[bytes], *, depth: int = _DEPTH, timeout_s: float | None = None
    ) -> DeviceStream:
        """Blocks in order of need: `depth` copies to the device ahead of the one in use, and loads
        to host memory ahead of those. To be used by `with`."""
        self._check_open()
        most = max(1, min(depth, int(self._pool.shape[0]) - 1))
        return DeviceStream(self, keys, most, timeout_s)

    def _row(self, slot: int, nbytes: int) -> Any:
        return self._pool[slot, :nbytes]

    def _host_row(self, memory: IovSlice) -> Any:
        return self._host[memory.offset : memory.offset + memory.length]

    def _room(self, key: bytes) -> int | None:
        """A slot for a block that comes in; None: all are in use."""
        self.poll()
        if not self._free:
            for victim in self._residency.victims(self._block, most=1):
                self._residency.gone(victim)
                self._arriving.pop(victim, None)
                self._free.append(self._slots.pop(victim)[0])
        if not self._free or not self._residency.reserve(key, self._block):
            return None
        slot = self._free.pop()
        if (used := self._used.pop(slot, None)) is not None:
            used.wait_on_side()
        return slot

    def _bring(self, key: bytes, memory: IovSlice) -> Event | None:
        slot = self._room(key)
        if slot is None:
            return None
        event: Event = self._copies.copy(self._row(slot, memory.length), self._host_row(memory))
        self._slots[key] = (slot, memory.length)
        self._residency.filled(key)
        self._arriving[key] = event
        self.copied_in += 1
        return event

    # --- out ------------------------------------------------------------------------------------

    def put(self, key: bytes, values: Any) -> bool:
        """Takes a block that was computed on the device (a tensor of bytes, contiguous): it is copied to a
        slot here and on to host memory on the side, from where it goes down. False: it isn't kept, for want
        of room."""
        self._check_open()
        flat = values.reshape(-1)
        nbytes = flat.numel()
        self._residency.touch(key)
        if not self._residency.has(key):
            slot = self._room(key)
            if slot is None:
                return False
            computed = self._copies.mark()
            computed.wait_on_side()
            event = self._copies.copy(self._row(slot, nbytes), flat)
            self._slots[key] = (slot, nbytes)
            self._residency.filled(key)
            self._arriving[key] = event
        slot, nbytes = self._slots[key]
        out = contextlib.ExitStack()
        memory = out.enter_context(self._tiers.fill(key, nbytes))
        if memory is None:
            out.close()
            return True  # the host has it, or has no room: then it lives as long as it stays here
        lease = self._pins.lease()
        lease.pin([key])
        event = self._copies.copy(self._host_row(memory), self._row(slot, nbytes))
        self._leaving.append((key, event, out, lease))
        self.copied_out += 1
        self.poll()
        return True

    def poll(self) -> int:
        """Ends copies to host memory that are over; how many are still going on. Never blocks."""
        while self._leaving and self._leaving[0][1].done():
            _, _, out, lease = self._leaving.popleft()
            out.close()
            lease.release()
        return len(self._leaving)

    def drain(self) -> None:
        """Blocks until all blocks that were put are in host memory."""
        while self._leaving:
            self._leaving[0][1].block()
            self.poll()

    def _check_open(self) -> None:
        if self._host is None:
            raise BadHandle("this device tier is closed")

    def close(self) -> None:
        """Waits for its copies. Repeatable."""
        if self._host is None:
            return
        self.drain()
        for event in self._arriving.values():
            event.block()
        self._copies.unregister()
        self._host = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DeviceStream:
    """See DeviceTier.stream. However it ends, nothing stays pinned, on the device or in host memory."""

    def __init__(self, tier: DeviceTier, keys: Sequence[bytes], depth: int, timeout_s: float | None) -> None:
        self._tier = tier
        self._keys = list(keys)
        self._last = {key: position for position, key in enumerate(self._keys)}
        self._depth = depth
        self._lease = tier._pins.lease()
        # So many may stay for sure; of others only those that are needed first are counted on.
        most = max(0, int(tier._pool.shape[0]) - 2 * depth - 1)
        self._there = set([key for key in self._keys if key in tier][:most])
        self._lease.pin(self._there)
        wanted = [key for key in self._keys if key not in self._there]
        ahead = depth + tier._tiers.settings.least_in_flight
        self._stream: Stream = tier._tiers.prefetch(wanted, ahead=ahead, timeout_s=timeout_s)
        self._begun = 0  # positions that were looked at
        self._asked = 0  # of `wanted`
        self._held: deque[Event | None] = deque()  # of `wanted`: copied, host memory not given back yet
        self.failed: list[int] = []
        self.missed: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[DeviceBlock]:
        ready: deque[DeviceBlock] = deque()
        for position, key in enumerate(self._keys):
            while self._begun < len(self._keys) and self._begun - position < self._depth:
                ready.append(self._begin(self._begun))
                self._begun += 1
            block = ready.popleft()
            if (event := self._tier._arriving.get(key)) is not None and block.memory is not None:
                event.wait_here()
            yield block
            self._end(position, key)

    def _begin(self, position: int) -> DeviceBlock:
        tier, key = self._tier, self._keys[position]
        if key in self._there:
            tier.hits += 1
            tier._residency.touch(key)
            return DeviceBlock(position, key, Outcome.HIT, tier._row(*tier._slots[key]), None)
        found = self._stream.block(self._asked)
        self._asked += 1
        event: Event | None = None
        outcome, error = found.outcome, found.error
        if found.memory is not None:
            tier._residency.touch(key)
            if tier._residency.has(key):
                tier.hits += 1
            else:
                event = tier._bring(key, found.memory)
            if tier._residency.has(key):
                self._lease.pin([key])
            else:
                outcome, error = Outcome.FAILED, FfsError("all blocks of the device's memory are in use")
        self._held.append(event)
        self._give_back(wait=False)
        if outcome is not Outcome.HIT:
            (self.failed if outcome is Outcome.FAILED else self.missed).append(position)
            return DeviceBlock(position, key, outcome, None, error)
        return DeviceBlock(position, key, outcome, tier._row(*tier._slots[key]), None)

    def _give_back(self, *, wait: bool) -> None:
        """Host memory whose copy is over."""
        while self._held:
            event = self._held[0]
            if event is not None and not event.done():
                if not wait and len(self._held) <= self._depth:
                    return
                event.block()
            self._held.popleft()
            self._stream.release()

    def _end(self, position: int, key: bytes) -> None:
        tier = self._tier
        if key in tier._slots:
            tier._used[tier._slots[key][0]] = tier._copies.mark()
        if self._last[key] == position:
            self._lease.unpin([key])

    def close(self) -> None:
        """Repeatable."""
        self._give_back(wait=True)
        self._stream.close()
        self._lease.release()


def _copies_for(pool: Any) -> Any:
    if pool.device.type == "cpu":
        return CpuCopies()
    if pool.device.type == "cuda":
        import torch

        return CudaCopies(torch, pool.device)
    raise InvalidArgument(f"memory of a {pool.device.type}: blocks go to cuda and cpu")

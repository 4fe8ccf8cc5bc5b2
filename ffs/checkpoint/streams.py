"""Copies out of a device's memory on a stream of its own, beside what it computes
(docs/guides/checkpoint.md, GPUs). torch is needed only where a tensor of it came in.

On the CPU a copy is over when the call is, and there is nothing to wait for: the same code, without effect.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from ffs.checkpoint.tensors import Bytes

_PORTABLE: Final = 1  # cudaHostRegisterPortable: for all devices


class End(Protocol):
    """The end of all copies that were begun before it was made. Any thread."""

    def wait_here(self) -> None:
        """What this thread launches on the device's current stream from now on begins after it. Doesn't block
        the thread."""
        ...

    def block(self) -> None:
        """Blocks the thread until it has come."""
        ...


class Side(Protocol):
    """One device's stream for copies."""

    def mark(self) -> None:
        """Copies from now on begin after what this thread has launched so far. Doesn't block."""
        ...

    def flat(self, tensor: Any) -> Any:
        """The tensor's bytes in C order, where it is; only to be given to `copy`."""
        ...

    def copy(self, target: Any, source: Any) -> None:
        """Begins to copy bytes into host memory; both stay as they are until its end."""
        ...

    def end(self) -> End | None:
        """None: all is over."""
        ...


class PlainSide:
    """Copies at once, on the current stream."""

    def mark(self) -> None: ...

    def flat(self, tensor: Any) -> Any:
        return flat_bytes(tensor)

    def copy(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def end(self) -> End | None:
        return None


class _CudaEnd:
    def __init__(self, torch: Any, device: Any, event: Any) -> None:
        self._torch, self._device, self._event = torch, device, event

    def wait_here(self) -> None:
        self._torch.cuda.current_stream(self._device).wait_event(self._event)

    def block(self) -> None:
        self._event.synchronize()


class CudaSide:
    """A side stream of one GPU. What it makes contiguous lies in memory of that stream, so it isn't given to
    others before the copy out of it is over."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device = torch, device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> None:
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device))
        self._stream.wait_event(event)

    def flat(self, tensor: Any) -> Any:
        with self._torch.cuda.stream(self._stream):
            return flat_bytes(tensor)

    def copy(self, target: Any, source: Any) -> None:
        with self._torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def end(self) -> End | None:
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return _CudaEnd(self._torch, self._device, event)


class _Ends:
    def __init__(self, ends: Sequence[End]) -> None:
        self._ends = ends

    def wait_here(self) -> None:
        for each in self._ends:
            each.wait_here()

    def block(self) -> None:
        for each in self._ends:
            each.block()


def side_for(device: Any) -> Side:
    if device.type == "cuda":
        return CudaSide(sys.modules["torch"], device)
    return PlainSide()


class Sides:
    """One for each device, made when it is first met. Any thread."""

    def __init__(self, make: Callable[[Any], Side] = side_for) -> None:
        self._make = make
        self._mutex = threading.Lock()
        self._sides: dict[str, Side] = {}

    def mark(self, devices: Sequence[Any]) -> None:
        """As Side.mark, of these devices. In the thread that computes."""
        for device in devices:
            self.of(device).mark()

    def of(self, device: Any) -> Side:
        with self._mutex:
            found = self._sides.get(str(device))
            if found is None:
                found = self._sides[str(device)] = self._make(device)
            return found


class Copies:
    """Copies that end together. One thread."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._used: dict[str, Side] = {}  # since the last `end`

    def flat(self, tensor: Any) -> Any:
        """As Side.flat."""
        return self._sides.of(tensor.device).flat(tensor)

    def copy(self, target: Bytes, source: Any) -> None:
        """As Side.copy."""
        side = self._used.setdefault(str(source.device), self._sides.of(source.device))
        side.copy(sys.modules["torch"].from_numpy(target), source)

    def end(self) -> End | None:
        """Of all since the last one; None: all is over."""
        used, self._used = self._used, {}
        ends = [end for side in used.values() if (end := side.end()) is not None]
        return _Ends(ends) if ends else None


def flat_bytes(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8)


def pin(address: int, nbytes: int) -> bool:
    """Registers host memory with CUDA, so that copies into it run by themselves. False: it refuses. Blocking,
    seconds for many GiB."""
    runtime = sys.modules["torch"].cuda.cudart()
    return not int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))


def unpin(address: int) -> None:
    """Nothing may be under way there."""
    sys.modules["torch"].cuda.cudart().cudaHostUnregister(address)

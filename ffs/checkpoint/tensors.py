"""Tensors of numpy and torch seen as flat bytes. No I/O; torch is touched only where a tensor of it
comes in, or is asked for (docs/guides/checkpoint.md, States).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ffs.checkpoint.dtypes import FROM_NUMPY, FROM_TORCH, NUMPY_NAMES, TORCH_NAMES
from ffs.checkpoint.shard import TensorSpec
from ffs.errors import InvalidArgument

Framework = Literal["numpy", "torch"]
Bytes = npt.NDArray[np.uint8]

Place = Bytes | Callable[[], Bytes]
"""Memory, or what gives it when bytes have come for it, always the same: of thousands of tensors that takes
time, which there is once reads are under way."""


def memory_at(place: Place) -> Bytes:
    return place() if callable(place) else place


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor to be saved, or the piece of it that this rank holds. `identity` is equal for two that are
    the same view of the same memory. `shape`: of the whole tensor, where `spec` has the piece's, which begins
    at `begin`. `copies`: how many ranks hold the same piece, `copy`: which of them this is (0, 0: not said,
    a plain tensor)."""

    spec: TensorSpec
    framework: Framework
    identity: Hashable
    tensor: Any
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    copy: int = 0
    copies: int = 0
    direct: bool = False  # its memory, as it stands, is its bytes

    def flat(self) -> Bytes:
        """The tensor's own bytes in C order: a view where its memory is that already, else a copy of
        just these (a small view of a large storage costs the view). Blocks for a device's copy."""
        if self.framework == "numpy":
            return _flat_numpy(self.tensor)
        return _flat_torch(self.tensor)


def describe(name: str, value: object) -> Source:
    """Looks at one entry of a state dict. TypeError or InvalidArgument names it and says what to do."""
    if not isinstance(name, str):
        raise TypeError(f"the key {name!r} of the state isn't a str: name tensors by strings")
    if _is_torch(value):
        return _describe_torch(name, value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _describe_numpy(name, np.asarray(value))
    if isinstance(value, Mapping):
        raise TypeError(f"{name!r} is a mapping: flatten nested states first, for example to 'outer.inner'")
    raise TypeError(
        f"{name!r} is a {type(value).__name__}, not a tensor: keep numbers and settings as 0-dim tensors"
    )


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _describe_numpy(name: str, array: npt.NDArray[Any]) -> Source:
    dtype = FROM_NUMPY.get(array.dtype.name)
    if dtype is None or array.dtype.hasobject or array.dtype.names is not None:
        raise InvalidArgument(
            f"{name!r} has numpy's dtype {array.dtype}, which safetensors can't hold: "
            f"convert it to one of {', '.join(sorted(FROM_NUMPY))}"
        )
    identity: Hashable = ("alone", id(array))
    if array.size:
        pointer = array.__array_interface__["data"][0]
        identity = ("numpy", pointer, array.shape, array.strides, array.dtype.str)
    shape = tuple(array.shape)
    return Source(TensorSpec(name, dtype, shape), "numpy", identity, array, shape, (0,) * len(shape))


def _describe_torch(name: str, tensor: Any) -> Source:
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    placed = placement_of(tensor)
    if placed is not None:
        tensor = tensor.to_local().detach()
    if tensor.layout is not torch.strided:
        raise InvalidArgument(
            f"{name!r} isn't a plain dense tensor ({type(tensor).__name__}, {tensor.layout}): "
            "save its dense or local parts"
        )
    if tensor.is_meta:
        raise InvalidArgument(f"{name!r} is on the device 'meta' and has no data: materialise it first")
    dtype = FROM_TORCH.get(str(tensor.dtype))
    if dtype is None:
        raise InvalidArgument(
            f"{name!r} has torch's dtype {tensor.dtype}, which safetensors can't hold: "
            f"convert it to one of {', '.join(sorted(FROM_TORCH))}"
        )
    identity: Hashable = ("alone", id(tensor))
    if tensor.numel():
        identity = (
            "torch",
            str(tensor.device),
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
    local = tuple(tensor.shape)
    spec = TensorSpec(name, dtype, local)
    if placed is None:
        return Source(spec, "torch", identity, tensor, local, (0,) * len(local))
    return Source(spec, "torch", identity, tensor, placed.shape, placed.begin, placed.copy, placed.copies)


class Placement(NamedTuple):
    """Where the local piece of a distributed tensor lies in the whole; `copy` of `copies` ranks have it."""

    shape: tuple[int, ...]
    begin: tuple[int, ...]
    copy: int
    copies: int


@functools.cache
def _name_of(dtype: Any) -> str | None:
    """safetensors' name of torch's type."""
    return FROM_TORCH.get(str(dtype))


def _local(tensor: Any) -> Any:
    """The piece of a DTensor that is here, without its history."""
    torch = sys.modules["torch"]
    local = tensor._local_tensor
    if type(local) is torch.Tensor:  # by far the most; to_local makes a node of the graph
        return local
    with torch.no_grad():
        return tensor.to_local()


Lines = dict[int, tuple[int, int]]
"""Meshes of one dimension by id, while they live: ranks, and this one's place."""


def placement_of(tensor: Any, lines: Lines | None = None) -> Placement | None:
    """Of a DTensor; None: a tensor that isn't distributed. `lines`: what was found out for other tensors.
    InvalidArgument: sums that aren't reduced yet."""
    if type(tensor).__name__ != "DTensor":
        return None
    mesh, placements = tensor.device_mesh, tensor.placements
    if len(placements) == 1 and type(placements[0]).__name__ == "Shard":  # by far the most
        line = None if lines is None else lines.get(id(mesh))
        if line is None:
            line = mesh.size(), mesh.get_coordinate()[0]
            if lines is not None:
                lines[id(mesh)] = line
        size, place = line
        shape, along = tuple(tensor.shape), placements[0].dim
        first = min(place * -(-shape[along] // size), shape[along])
        before, behind = (0,) * along, (0,) * (len(shape) - along - 1)
        return Placement(shape, (*before, first, *behind), 0, 1)
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(isinstance(placement, Partial) for placement in placements):
        raise InvalidArgument(f"a DTensor of {placements} isn't reduced yet: redistribute it first")
    _, begin = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    copy, copies = 0, 1
    coordinate = mesh.get_coordinate()
    for at, placement in enumerate(placements):
        if placement.is_replicate():
            copy = copy * mesh.size(at) + coordinate[at]
            copies *= mesh.size(at)
    return Placement(tuple(tensor.shape), tuple(begin), copy, copies)


def _flat_numpy(array: npt.NDArray[Any]) -> Bytes:
    native = array.dtype.newbyteorder("<")
    whole = np.ascontiguousarray(array, dtype=native)
    return whole.reshape(-1).view(np.uint8)


def _flat_torch(tensor: Any) -> Bytes:
    torch = sys.modules["torch"]
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    flat: Bytes = whole.reshape(-1).view(torch.uint8).numpy()
    return flat


class Destination:
    """One tensor to be loaded into. Bytes arrive in `buffer`, then `finish()` puts them in place. `begin` and
    `extent` say which box of the whole it takes: all, unless it is a DTensor."""

    __slots__ = ("_copy_back", "_flat", "_tensor", "begin", "extent", "spec")

    def __init__(self, spec: TensorSpec, tensor: object, lines: Lines | None = None) -> None:
        """`lines`: as placement_of. Raises TypeError or InvalidArgument, which names the tensor, if it can't
        take these bytes."""
        self.spec = spec
        self._copy_back: Any = None
        self._tensor: Any = None  # whose own memory the buffer will be
        self._flat: Bytes | None = None
        self.begin, self.extent = (0,) * len(spec.shape), spec.shape
        if _is_torch(tensor):
            self._into_torch(tensor, lines)
        elif isinstance(tensor, np.ndarray):
            self._flat = self._into_numpy(tensor)
        else:
            raise TypeError(
                f"{spec.name!r}: can load into a numpy array or a torch tensor, not {type(tensor).__name__}"
            )

    @property
    def buffer(self) -> Bytes:
        return self.memory()

    def memory(self) -> Bytes:
        """A Place. Any thread."""
        flat = self._flat
        if flat is None:
            torch = sys.modules["torch"]
            flat = self._flat = self._tensor.detach().reshape(-1).view(torch.uint8).numpy()
        return flat

    def finish(self) -> None:
        if self._copy_back is not None:
            self._copy_back()
            self._copy_back = None

    def _check(self, dtype: str | None, shape: tuple[int, ...], shown: object) -> None:
        if dtype != self.spec.dtype or shape != self.spec.shape:
            raise InvalidArgument(
                f"{self.spec.name!r} was saved as {self.spec.dtype} {list(self.spec.shape)}, "
                f"the destination is {shown} {list(shape)}: they must agree"
            )

    def _into_torch(self, tensor: Any, lines: Lines | None) -> None:
        torch = sys.modules["torch"]
        self._check(_name_of(tensor.dtype), tuple(tensor.shape), tensor.dtype)
        placed = placement_of(tensor, lines)
        if placed is not None:
            tensor = _local(tensor)
            self.begin, self.extent = placed.begin, tuple(tensor.shape)
        direct = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
        if direct and not tensor.is_conj() and not tensor.is_neg():
            self._tensor = tensor
            return
        tensor = tensor.detach()
        staged = torch.empty(self.extent, dtype=tensor.dtype)
        self._copy_back = lambda: tensor.copy_(staged)
        self._flat = staged.reshape(-1).view(torch.uint8).numpy()

    def _into_numpy(self, array: npt.NDArray[Any]) -> Bytes:
        self._check(FROM_NUMPY.get(array.dtype.name), tuple(array.shape), str(array.dtype))
        if not array.flags.writeable:
            raise InvalidArgument(f"{self.spec.name!r}: the destination array is read-only")
        if array.flags.c_contiguous and array.dtype.newbyteorder("<") == array.dtype:
            return array.reshape(-1).view(np.uint8)
        staged = np.empty(self.spec.shape, array.dtype.newbyteorder("<"))
        self._copy_back = lambda: np.copyto(array, staged)
        return staged.reshape(-1).view(np.uint8)


def check_framework(spec: TensorSpec, framework: Framework) -> None:
    """InvalidArgument if the framework has no such type."""
    if framework not in ("torch", "numpy"):
        raise InvalidArgument(f"framework {framework!r}: give 'torch' or 'numpy'")
    if framework == "numpy" and spec.dtype not in NUMPY_NAMES:
        raise InvalidArgument(
            f"{spec.name!r} is {spec.dtype}, which numpy doesn't have: load with framework='torch'"
        )


def as_tensor(spec: TensorSpec, data: memoryview, framework: Framework) -> Any:
    """A tensor over `data` (exactly its bytes, aligned to its element) without a copy. It keeps
    `data` alive. InvalidArgument if the framework has no such type."""
    check_framework(spec, framework)
    if framework == "torch":
        import torch

        dtype = getattr(torch, TORCH_NAMES[spec.dtype])
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(spec.shape)
    name = NUMPY_NAMES[spec.dtype]
    if not spec.nbytes:
        return np.empty(spec.shape, dtype=name)
    return np.frombuffer(data, dtype=np.dtype(name).newbyteorder("<")).reshape(spec.shape)

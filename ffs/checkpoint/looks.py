"""What states look like, seen fast: a plan is made once for states that look the same (snapshot.py).

A save must not keep training waiting for more than its copy, and a state has thousands of tensors: what is
found out of each of them here is what a plan depends on, and where its bytes are. Pure.
docs/guides/checkpoint.md, Memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Look:
    """`key` is equal for states that are planned alike: same names in the same order, types, shapes, strides,
    devices, distribution, and ties. `tensors` and `pointers` have the piece of each that this process holds,
    in the order of names, and the address of its first byte (0: it has none of its own)."""

    key: Hashable
    tensors: list[Any]
    pointers: npt.NDArray[np.uint64]


class Looks:
    """Looks at one state after the other; the same objects over the same memory are known again."""

    def __init__(self) -> None:
        self._last: Look | None = None
        self._names: list[str] = []
        self._seen: list[tuple[Any, Any, Hashable]] = []  # weak: the object, the piece of it; shape

    def look(self, tensors: Mapping[str, Any]) -> Look:
        known = self._again(tensors)
        if known is not None:
            return known
        found = look(tensors)
        self._last, self._names = None, list(tensors)
        try:
            self._seen = [
                (weakref.ref(value), weakref.ref(held), held.shape)
                for value, held in zip(tensors.values(), found.tensors, strict=True)
            ]
        except TypeError:  # numbers of numpy have no weak references
            return found
        self._last = Look(found.key, [], found.pointers)  # it outlives the state
        return found

    def _again(self, tensors: Mapping[str, Any]) -> Look | None:
        if self._last is None or self._names != list(tensors):
            return None
        held = []
        pointers = self._last.pointers.tolist()
        for value, (whole, piece, shape), pointer in zip(tensors.values(), self._seen, pointers, strict=True):
            here = piece()
            if whole() is not value or here is None or here.shape != shape:
                return None
            if value is not here and getattr(value, "_local_tensor", None) is not here:
                return None
            if pointer and (here.data_ptr() if hasattr(here, "data_ptr") else here.ctypes.data) != pointer:
                return None
            held.append(here)
        return Look(self._last.key, held, self._last.pointers)


def look(tensors: Mapping[str, Any]) -> Look:
    """Never raises: what can't be stored is found by whoever makes the plan."""
    torch = sys.modules.get("torch")
    plain = torch.Tensor if torch is not None else ()
    rows: list[Hashable] = []
    held: list[Any] = []
    pointers: list[int] = []
    first: dict[Hashable, int] = {}
    for name, value in tensors.items():
        spec = None
        if type(value).__name__ == "DTensor":
            spec = value._spec
            local = value._local_tensor
            value = local if type(local) is plain else value.to_local()
        shape: Hashable
        if isinstance(value, plain):
            pointer = _pointer(value)
            bits = value.is_neg() or value.is_conj()
            shape = (value.dtype, value.shape, _stride(value), value.device, bits, type(value))
        else:
            value = np.asarray(value)
            pointer = value.__array_interface__["data"][0] if value.size else 0
            shape = (value.dtype.str, value.shape, value.strides)
        rows.append((name, first.setdefault((pointer or id(value), shape), len(rows)), shape, spec))
        held.append(value)
        pointers.append(pointer)
    return Look(tuple(rows), held, np.array(pointers, dtype=np.uint64))


def _pointer(tensor: Any) -> int:
    try:
        return int(tensor.data_ptr())
    except RuntimeError:  # it has no memory of its own: sparse, or only described
        return 0


def _stride(tensor: Any) -> Hashable:
    try:
        strides: Hashable = tensor.stride()
    except RuntimeError:
        strides = None
    return strides

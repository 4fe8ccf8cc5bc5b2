"""The layout of one safetensors shard: pure arithmetic, no I/O (docs/guides/checkpoint.md, Format).

A shard is what the safetensors library reads: eight bytes with the little-endian length of a JSON
header, the header, then the tensors' bytes without a gap. Two things are ours, and both are allowed by
that format: the header is padded with spaces so that the data begins at a multiple of 4 KiB, and
tensors whose size is a multiple of 4 KiB stand first, the largest at the front, so that each of them
begins at such a multiple too and can move between device and memory without a copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ffs.checkpoint.dtypes import DTYPE_BYTES
from ffs.errors import InvalidArgument

ALIGN_BYTES = 4096
# The safetensors library refuses longer headers.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the layout needs to know of a tensor. `dtype` is safetensors' name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor with its place: bytes [begin, end) of the file."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A whole shard: the header's bytes, then the tensors in file order."""

    header: bytes
    tensors: tuple[PlacedTensor, ...]

    @property
    def nbytes(self) -> int:
        return self.tensors[-1].end if self.tensors else len(self.header)


def _order(spec: TensorSpec) -> tuple[object, ...]:
    whole_pages = spec.nbytes % ALIGN_BYTES == 0
    # After the whole pages, wider elements first: each tensor then begins at a multiple of its
    # element, which is what lets a reader use the bytes where they are.
    element = 0 if whole_pages else -DTYPE_BYTES[spec.dtype]
    return (not whole_pages, element, -spec.nbytes, spec.name)


def plan_shard(specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> ShardPlan:
    """Places tensors in a shard. Names must be unique; `metadata` becomes `__metadata__`.

    Raises InvalidArgument for a name that safetensors keeps for itself, a repeated one, or too many to fit
    into a header.
    """
    ordered = sorted(specs, key=_order)
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    offset = 0
    spans: list[tuple[TensorSpec, int]] = []
    for spec in ordered:
        if spec.name == "__metadata__":
            raise InvalidArgument(
                "a tensor can't be named '__metadata__': safetensors keeps that name for itself"
            )
        if spec.name in header:
            raise InvalidArgument(f"the tensor name {spec.name!r} stands twice in one shard")
        end = offset + spec.nbytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        spans.append((spec, offset))
        offset = end
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    padded = -(8 + len(encoded)) % ALIGN_BYTES
    length = len(encoded) + padded
    if length > MAX_HEADER_BYTES:
        raise InvalidArgument(
            f"the header of the shard would take {length} bytes, safetensors allows {MAX_HEADER_BYTES}: "
            "save the state in several checkpoints"
        )
    head = length.to_bytes(8, "little") + encoded + b" " * padded
    base = len(head)
    return ShardPlan(
        header=head,
        tensors=tuple(PlacedTensor(spec, base + at, base + at + spec.nbytes) for spec, at in spans),
    )

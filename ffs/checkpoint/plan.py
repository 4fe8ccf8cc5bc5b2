"""Which rank writes which bytes into which file. Pure. docs/guides/checkpoint.md, Format.

A tensor is stored in parts: boxes of the whole, each a run of bytes of the rank's own piece. A part of 8 MiB
or more has a file of its own, named after it; smaller ones that change together share files. So what hasn't
changed since the last checkpoint is whole files, which needn't be written again, and no file is larger than
the memory that it is staged in.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ffs.checkpoint.dtypes import DTYPE_BYTES
from ffs.checkpoint.shard import TensorSpec

ALONE_BYTES: Final = 8 << 20
PART_BYTES: Final = 256 << 20
GROUP_BYTES: Final = 8 << 20

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(where it begins, how far it extends), in elements along each dimension."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the tensor `name`, whose whole shape is `shape`. Its bytes are contiguous in the piece that
    the rank holds, from byte `at` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    extent: tuple[int, ...]
    at: int = 0

    @property
    def nbytes(self) -> int:
        return volume(self.extent) * DTYPE_BYTES[self.dtype]

    @property
    def whole(self) -> bool:
        return self.extent == self.shape

    @property
    def spec(self) -> TensorSpec:
        """As it stands in the shard's header: a piece of a tensor is named by its box."""
        if self.whole:
            return TensorSpec(self.name, self.dtype, self.extent)
        box = ",".join(f"{b}:{b + e}" for b, e in zip(self.begin, self.extent, strict=True))
        return TensorSpec(f"{self.name}[{box}]", self.dtype, self.extent)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One shard file, without its directory."""

    file: str
    parts: tuple[Part, ...]


def volume(extent: Iterable[int]) -> int:
    return math.prod(extent)


def cut(part: Part, most_bytes: int) -> list[Part]:
    """The part in pieces of at most `most_bytes` (one element at least), each contiguous in it."""
    along = next((d for d, extent in enumerate(part.extent) if extent > 1), None)
    if part.nbytes <= most_bytes or along is None:
        return [part]
    row_bytes = part.nbytes // part.extent[along]
    even = -(-part.extent[along] // -(-part.nbytes // most_bytes))
    rows = max(1, min(most_bytes // row_bytes, even))
    pieces: list[Part] = []
    for first in range(0, part.extent[along], rows):
        count = min(rows, part.extent[along] - first)
        piece = Part(
            part.name,
            part.dtype,
            part.shape,
            _with(part.begin, along, part.begin[along] + first),
            _with(part.extent, along, count),
            part.at + first * row_bytes,
        )
        pieces += cut(piece, most_bytes) if row_bytes > most_bytes else [piece]
    return pieces


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def owners(sizes: Sequence[tuple[str, int]], world: int) -> dict[str, int]:
    """Which rank writes each tensor that all ranks have, by name and bytes: evenly, and the same on every
    rank whose list is the same."""
    load = [0] * world
    owner: dict[str, int] = {}
    for name, nbytes in sorted(sizes, key=lambda item: (-item[1], item[0])):
        rank = min(range(world), key=lambda r: (load[r], r))
        owner[name] = rank
        load[rank] += nbytes
    return owner


def files_of(
    parts: Sequence[Part],
    rank: int,
    world: int,
    part_bytes: int = PART_BYTES,
    still: frozenset[str] = frozenset(),
) -> list[FilePlan]:
    """The files that this rank writes, the largest parts first. Names are the same whenever the parts are.
    `still`: names of tensors that don't change: small ones of them share no file with those that do."""
    suffix = f".r{rank}" if world > 1 else ""
    alone: list[FilePlan] = []
    classes: dict[str, list[Part]] = {}
    used: set[str] = set()
    for part in parts:
        pieces = cut(part, part_bytes)
        for number, piece in enumerate(pieces):
            if piece.nbytes >= ALONE_BYTES:
                ending = f".p{number}" if len(pieces) > 1 else ""
                alone.append(FilePlan(_file_name(part.name, ending + suffix, used), (piece,)))
            else:
                kind = _class_of(part.name) + (".still" if part.name in still else "")
                classes.setdefault(kind, []).append(piece)
    shared: list[FilePlan] = []
    most = min(GROUP_BYTES, part_bytes)
    for kind, members in sorted(classes.items()):
        for number, group in enumerate(_groups(members, most)):
            shared.append(FilePlan(_file_name(f"small-{kind}", f"-{number}{suffix}", used), tuple(group)))
    return sorted(alone, key=lambda plan: (-plan.parts[0].nbytes, plan.file)) + shared


def _class_of(name: str) -> str:
    """What changes together, as far as names tell: one kind of value of one object of the state."""
    steps = name.split(".")
    return steps[0] if len(steps) == 1 else f"{steps[0]}.{steps[-1]}"


def _groups(parts: Sequence[Part], most_bytes: int) -> list[list[Part]]:
    """In their order. Half full a group ends where another layer begins, since layers change together."""
    groups: list[list[Part]] = [[]]
    filled = 0
    for part in parts:
        layer_ends = bool(groups[-1]) and _layer_of(groups[-1][-1].name) != _layer_of(part.name)
        full = filled + part.nbytes > most_bytes or (layer_ends and 2 * filled >= most_bytes)
        if groups[-1] and full:
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += part.nbytes
    return groups


def _layer_of(name: str) -> str:
    """Its name up to the last number: blocks of layers are numbered."""
    steps = name.split(".")
    last = max((at for at, step in enumerate(steps) if step.isdecimal()), default=-1)
    return ".".join(steps[: last + 1])


def _file_name(name: str, ending: str, used: set[str]) -> str:
    """Plain, short and used once: names of tensors may have any characters and any length."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[:160]
    if plain != name:
        plain += "-" + hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
    file = f"{plain}{ending}.safetensors"
    again = 1
    while file in used:
        again += 1
        file = f"{plain}{ending}~{again}.safetensors"
    used.add(file)
    return file


def meets(one: Box, other: Box) -> Box | None:
    """The box that both have; None if they have none, or it is empty."""
    begin, extent = [], []
    for a, x, b, y in zip(one[0], one[1], other[0], other[1], strict=True):
        first = a if a > b else b
        end = a + x if a + x < b + y else b + y
        if end <= first:
            return None  # most pairs, which a load of many parts finds out of thousands
        begin.append(first)
        extent.append(end - first)
    return tuple(begin), tuple(extent)

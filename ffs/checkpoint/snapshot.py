"""Copying tensors into staged files: what a save takes from the training process before it returns.

A staged file is the image of one shard, header and tensors, in a region of the pool, ready to be hashed and
written from there. docs/guides/checkpoint.md, Memory.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ffs.checkpoint.plan import PART_BYTES, FilePlan, Part, files_of, owners
from ffs.checkpoint.shard import PlacedTensor, ShardPlan, plan_shard
from ffs.checkpoint.staging import PAGE, Pool, Region
from ffs.checkpoint.state import is_own
from ffs.checkpoint.tensors import Bytes, Framework, Source, describe


@dataclass(slots=True)
class StatePlan:
    """What this rank does of a save. `sources` by the name of the tensor; `declared` has dtype and whole
    shape of every tensor that this rank knows of, whoever writes it."""

    files: list[tuple[FilePlan, ShardPlan]]
    sources: dict[str, Source]
    tied: dict[str, str]
    declared: dict[str, tuple[str, tuple[int, ...]]]

    @property
    def staged_bytes(self) -> int:
        """Memory that all its files take at once."""
        return sum(-(-max(1, shard.nbytes) // PAGE) * PAGE for _, shard in self.files)


@dataclass(slots=True)
class StagedFile:
    plan: FilePlan
    shard: ShardPlan
    region: Region
    frameworks: dict[str, Framework]
    hashes: list[str] = field(default_factory=list)  # of plan.parts, once they are known

    @property
    def nbytes(self) -> int:
        return self.shard.nbytes

    def image(self) -> Bytes:
        """Its memory, the header written."""
        memory = np.frombuffer(self.region.memory(), np.uint8)
        memory[: len(self.shard.header)] = np.frombuffer(self.shard.header, np.uint8)
        return memory

    def placed(self) -> Iterator[tuple[Part, PlacedTensor]]:
        place = {placed.spec.name: placed for placed in self.shard.tensors}
        for part in self.plan.parts:
            yield part, place[part.spec.name]


def plan_state(
    tensors: Mapping[str, Any], rank: int, world: int, host_bytes: int, part_bytes: int = PART_BYTES
) -> StatePlan:
    """Which tensors, and which boxes of them, this rank writes: what only it has, its own piece of what is
    distributed, and its share of what all have. Raises TypeError or InvalidArgument for an
    entry that can't be stored, which they name."""
    kept: dict[Hashable, Source] = {}
    tied: dict[str, str] = {}
    for name, value in tensors.items():
        source = describe(name, value)
        first = kept.setdefault(source.identity, source)
        if first is not source:
            tied[name] = first.spec.name
    sources = {source.spec.name: source for source in kept.values()}
    plain = [(name, s.spec.nbytes) for name, s in sources.items() if not s.copies and not is_own(name)]
    owner = owners(plain, world)
    parts = []
    for name, source in sources.items():
        # Ranks that hold the same piece take turns.
        turn = zlib.crc32(name.encode()) % max(1, source.copies)
        mine = source.copy == turn if source.copies else owner.get(name, rank) == rank
        if mine:
            parts.append(Part(name, source.spec.dtype, source.shape, source.begin, source.spec.shape))
    room = max(PAGE, min(part_bytes, host_bytes // 4 - 2 * PAGE))
    declared = {name: (source.spec.dtype, source.shape) for name, source in sources.items()}
    parts = [part for part in parts if part.nbytes or part.whole]  # a rank may hold nothing of a tensor
    ties: dict[str, dict[str, str]] = {}
    for alias, first_name in tied.items():
        ties.setdefault(first_name, {})[alias] = first_name
    files = []
    for file in files_of(parts, rank, world, room):
        # Loaders of plain safetensors find the further names of a tensor here.
        aliases = {alias: name for part in file.parts for alias, name in ties.get(part.name, {}).items()}
        files.append((file, plan_shard((part.spec for part in file.parts), {"format": "pt", **aliases})))
    return StatePlan(files, sources, tied, declared)


def halves(plan: StatePlan, guarded: Callable[[Any], bool]) -> tuple[StatePlan, StatePlan]:
    """(what must be copied at once, what may be copied later): a file is later if all that it holds is of
    tensors of which `guarded` says that they don't change meanwhile."""
    later = {
        file.file: all(guarded(plan.sources[part.name].tensor) for part in file.parts)
        for file, _ in plan.files
    }
    one = replace(plan, files=[each for each in plan.files if not later[each[0].file]])
    other = replace(plan, files=[each for each in plan.files if later[each[0].file]])
    return one, other


def versions(plan: StatePlan) -> dict[str, int]:
    """How often each tensor of the plan's files was changed in place, as far as torch counts it."""
    found = {}
    for file, _ in plan.files:
        for part in file.parts:
            tensor = plan.sources[part.name].tensor
            if hasattr(tensor, "_version") and not tensor.is_inference():
                found[part.name] = int(tensor._version)
    return found


def stage(
    plan: StatePlan, pool: Pool, failed: Callable[[], BaseException | None] = lambda: None
) -> Iterator[StagedFile]:
    """Copies one file after the other; waits for memory as `Pool.take`. The state must not change until the
    last one was given out."""
    flat = Flat()
    for file, shard in plan.files:
        region = pool.take(shard.nbytes, failed)
        try:
            frameworks = {part.name: plan.sources[part.name].framework for part in file.parts}
            staged = StagedFile(file, shard, region, frameworks)
            memory = staged.image()
            for part, placed in staged.placed():
                if part.nbytes:
                    flat.copy(plan.sources[part.name], part, memory[placed.begin : placed.end])
            del memory
        except BaseException:
            region.release()
            raise
        yield staged


class Flat:
    """Copies parts; keeps the last tensor that had to be made contiguous, since its parts come in turn."""

    def __init__(self) -> None:
        self._of: Source | None = None
        self._bytes: Bytes | None = None

    def copy(self, source: Source, part: Part, target: Bytes) -> None:
        """The bytes of the part into `target`. A device's copy is waited for."""
        torch = sys.modules.get("torch")
        stop = part.at + part.nbytes
        if source.framework == "torch" and torch is not None:
            tensor = source.tensor
            if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                torch.from_numpy(target).copy_(tensor.reshape(-1).view(torch.uint8)[part.at : stop])
                return
        if self._of is not source:
            self._of, self._bytes = source, source.flat()
        assert self._bytes is not None
        target[:] = self._bytes[part.at : stop]

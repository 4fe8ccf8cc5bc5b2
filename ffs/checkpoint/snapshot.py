"""Copying tensors into staged files: what a save takes from the training process before it returns.

A staged file is the image of one shard, header and tensors, in a region of the pool, ready to be hashed and
written from there. docs/guides/checkpoint.md, Memory.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ffs.checkpoint.looks import Looks
from ffs.checkpoint.plan import PART_BYTES, FilePlan, Part, files_of, owners
from ffs.checkpoint.shard import PlacedTensor, ShardPlan, plan_shard
from ffs.checkpoint.staging import PAGE, Pool, Region
from ffs.checkpoint.state import is_own
from ffs.checkpoint.streams import Copies, End, PlainSide, Sides
from ffs.checkpoint.tensors import Bytes, Framework, Source, describe
from ffs.client.copying import copy_many


@dataclass(frozen=True, slots=True)
class Moves:
    """The copies that fill a file, as far as they are of memory as it stands: the number of each tensor, the
    first byte in it and in the file, and how many. `others`: parts that take more than that."""

    numbers: npt.NDArray[np.int64]
    at: npt.NDArray[np.uint64]
    begin: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]
    others: tuple[tuple[Part, PlacedTensor], ...]


@dataclass(slots=True)
class StatePlan:
    """What this rank does of a save. `sources` by the name of the tensor, without it; `declared` has dtype
    and whole shape of every tensor that this rank knows of, whoever writes it. `tensors` and `pointers` are
    those of one state; `numbers` says which is which."""

    files: list[tuple[FilePlan, ShardPlan, Moves]]
    sources: dict[str, Source]
    tied: dict[str, str]
    declared: dict[str, tuple[str, tuple[int, ...]]]
    numbers: dict[str, int] = field(default_factory=dict)
    tensors: list[Any] = field(default_factory=list)
    pointers: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    frameworks: dict[str, Framework] = field(default_factory=dict)
    devices: tuple[Any, ...] = ()  # torch's, of tensors that take more than a copy of memory

    @property
    def staged_bytes(self) -> int:
        """Memory that all its files take at once."""
        return sum(-(-max(1, shard.nbytes) // PAGE) * PAGE for _, shard, _ in self.files)

    def tensor(self, name: str) -> Any:
        """The piece of it that this rank holds."""
        return self.tensors[self.numbers[name]]


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
        return placed_parts(self.plan, self.shard)


def placed_parts(file: FilePlan, shard: ShardPlan) -> Iterator[tuple[Part, PlacedTensor]]:
    place = {placed.spec.name: placed for placed in shard.tensors}
    for part in file.parts:
        yield part, place[part.spec.name]


class Planner:
    """Plans of one rank's saves: made once for all states that look the same."""

    def __init__(self, rank: int, world: int, part_bytes: int = PART_BYTES) -> None:
        self._rank, self._world, self._part_bytes = rank, world, part_bytes
        self._looks = Looks()
        self._seen: Hashable = None
        self._sources: dict[str, Source] = {}
        self._tied: dict[str, str] = {}
        self._parts: list[Part] = []
        self._devices: tuple[Any, ...] = ()
        self._made: dict[tuple[int, frozenset[str]], StatePlan] = {}

    def plan(
        self, tensors: Mapping[str, Any], host_bytes: int, still: frozenset[str] = frozenset()
    ) -> StatePlan:
        """Which tensors, and which boxes of them, this rank writes: what only it has, its own piece of what
        is distributed, and its share of what all have. `still`: names of tensors that are expected not to
        change; small ones of them share files of their own. Raises TypeError or InvalidArgument for an entry
        that can't be stored, which they name."""
        seen = self._looks.look(tensors)
        if seen.key is not self._seen and (seen.key != self._seen or not self._sources):
            self._describe(tensors)
            self._seen = seen.key
            self._made = {}
        made = self._made.get((host_bytes, still))
        if made is None:
            made = self._plan(host_bytes, still, {name: at for at, name in enumerate(tensors)})
            self._made = {(host_bytes, still): made}
        return replace(made, tensors=seen.tensors, pointers=seen.pointers)

    def _describe(self, tensors: Mapping[str, Any]) -> None:
        kept: dict[Hashable, Source] = {}
        tied: dict[str, str] = {}
        for name, value in tensors.items():
            source = describe(name, value)
            first = kept.setdefault(source.identity, source)
            if first is not source:
                tied[name] = first.spec.name
        plain = [
            (s.spec.name, s.spec.nbytes) for s in kept.values() if not s.copies and not is_own(s.spec.name)
        ]
        owner = owners(plain, self._world)
        parts = []
        for source in kept.values():
            name = source.spec.name
            # Ranks that hold the same piece take turns.
            turn = zlib.crc32(name.encode()) % max(1, source.copies)
            holder = owner.get(name, self._rank) == self._rank
            if source.copy == turn if source.copies else holder:
                parts.append(Part(name, source.spec.dtype, source.shape, source.begin, source.spec.shape))
        self._parts = [part for part in parts if part.nbytes or part.whole]  # a rank may hold nothing of one
        others = [s.tensor.device for s in kept.values() if s.framework == "torch" and not is_direct(s)]
        self._devices = tuple({str(device): device for device in others}.values())
        # Not the tensors: a plan outlives the state that it was made of.
        self._sources = {s.spec.name: replace(s, tensor=None, direct=is_direct(s)) for s in kept.values()}
        self._tied = tied

    def _plan(self, host_bytes: int, still: frozenset[str], numbers: dict[str, int]) -> StatePlan:
        room = max(PAGE, min(self._part_bytes, host_bytes // 4 - 2 * PAGE))
        declared = {name: (s.spec.dtype, s.shape) for name, s in self._sources.items()}
        ties: dict[str, dict[str, str]] = {}
        for alias, first_name in self._tied.items():
            ties.setdefault(first_name, {})[alias] = first_name
        files = []
        for file in files_of(self._parts, self._rank, self._world, room, still):
            # Loaders of plain safetensors find the further names of a tensor here.
            aliases = {alias: name for part in file.parts for alias, name in ties.get(part.name, {}).items()}
            shard = plan_shard((part.spec for part in file.parts), {"format": "pt", **aliases})
            files.append((file, shard, self._moves(file, shard, numbers)))
        frameworks = {name: source.framework for name, source in self._sources.items()}
        return StatePlan(
            files, self._sources, self._tied, declared, numbers, frameworks=frameworks, devices=self._devices
        )

    def _moves(self, file: FilePlan, shard: ShardPlan, numbers: dict[str, int]) -> Moves:
        rows, others = [], []
        for part, placed in placed_parts(file, shard):
            if not part.nbytes:
                continue
            if self._sources[part.name].direct:
                rows.append((numbers[part.name], part.at, placed.begin, part.nbytes))
            else:
                others.append((part, placed))
        return moves_of(rows, others)


def moves_of(
    rows: Sequence[tuple[int, int, int, int]] = (), others: Sequence[tuple[Part, PlacedTensor]] = ()
) -> Moves:
    """`rows`: a copy each, as Moves has them by columns."""
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 4).T.copy()
    return Moves(columns[0].astype(np.int64), columns[1], columns[2], columns[3], tuple(others))


def plan_state(
    tensors: Mapping[str, Any], rank: int, world: int, host_bytes: int, part_bytes: int = PART_BYTES
) -> StatePlan:
    """One plan of one state (Planner.plan)."""
    return Planner(rank, world, part_bytes).plan(tensors, host_bytes)


def is_direct(source: Source) -> bool:
    """Whether the tensor's memory, as it stands, is its bytes in C order, in host memory."""
    tensor = source.tensor
    if source.framework == "numpy":
        return bool(tensor.flags.c_contiguous) and tensor.dtype.newbyteorder("<") == tensor.dtype
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def halves(plan: StatePlan, guarded: Callable[[Any], bool]) -> tuple[StatePlan, StatePlan]:
    """(what must be copied at once, what may be copied later): a file is later if all that it holds is of
    tensors of which `guarded` says that they don't change meanwhile."""
    later = {
        file.file: all(guarded(plan.tensor(part.name)) for part in file.parts) for file, _, _ in plan.files
    }
    one = replace(plan, files=[each for each in plan.files if not later[each[0].file]])
    other = replace(plan, files=[each for each in plan.files if later[each[0].file]])
    return one, other


def versions(plan: StatePlan) -> dict[str, int]:
    """How often each tensor of the plan's files was changed in place, as far as torch counts it."""
    found = {}
    for file, _, _ in plan.files:
        for part in file.parts:
            tensor = plan.tensor(part.name)
            if hasattr(tensor, "_version") and not tensor.is_inference():
                found[part.name] = int(tensor._version)
    return found


def stage(
    plan: StatePlan,
    pool: Pool,
    failed: Callable[[], BaseException | None] = lambda: None,
    waiting: Callable[[], None] = lambda: None,
    sides: Sides | None = None,
    launched: Callable[[End], None] = lambda end: None,
) -> Iterator[StagedFile]:
    """Copies one file after the other; waits for memory as `Pool.take`, after `waiting` was called. The state
    must not change until the last one was given out. `sides`: for tensors of devices. `launched`: called when
    all copies have begun and some go on beside what the device computes: what is launched there after
    `End.wait_here` may change the state. A file is given out when its copies are over."""
    copies = Copies(sides or Sides())
    flat = Flat(copies)
    sources: dict[str, Source] = {}  # of parts that take more than a copy
    batch = _Batch(plan, copies)
    try:
        for file, shard, moves in plan.files:
            region = pool.try_take(shard.nbytes)
            if region is None:
                yield from batch.copied()
                waiting()
                region = pool.take(shard.nbytes, failed)
            staged = StagedFile(file, shard, region, plan.frameworks)
            memory = batch.add(staged, moves)
            for part, placed in moves.others:
                source = sources.get(part.name)
                if source is None:  # its parts come one after the other
                    source = replace(plan.sources[part.name], tensor=plan.tensor(part.name))
                    sources = {part.name: source}
                flat.copy(source, part, memory[placed.begin : placed.end])
            del memory
        yield from batch.copied(launched)
    finally:
        batch.drop()


class _Batch:
    """Files whose copies go together: a call for thousands of pieces, since training waits for it alone."""

    def __init__(self, plan: StatePlan, copies: Copies) -> None:
        self._plan = plan
        self._copies = copies
        self._files: deque[StagedFile] = deque()
        self._moves: list[tuple[np.uint64, Moves]] = []  # and the address of the file's first byte

    def add(self, staged: StagedFile, moves: Moves) -> Bytes:
        """Its memory, the header written."""
        self._files.append(staged)
        memory = staged.image()
        self._moves.append((np.uint64(memory.__array_interface__["data"][0]), moves))
        return memory

    def copied(self, launched: Callable[[End], None] = lambda end: None) -> Iterator[StagedFile]:
        rows, self._moves = self._moves, []
        if rows:
            pieces = np.empty((sum(len(moves.nbytes) for _, moves in rows), 3), np.uint64)
            numbers = np.concatenate([moves.numbers for _, moves in rows])
            np.concatenate([base + moves.begin for base, moves in rows], out=pieces[:, 0])
            np.concatenate([moves.at for _, moves in rows], out=pieces[:, 1])
            pieces[:, 1] += self._plan.pointers[numbers]
            np.concatenate([moves.nbytes for _, moves in rows], out=pieces[:, 2])
            copy_many(pieces, copying_threads())
        end = self._copies.end()
        if end is not None:
            launched(end)
            end.block()
        while self._files:
            yield self._files.popleft()

    def drop(self) -> None:
        """What wasn't given out gives its memory back, when nothing is copied there any more."""
        end = self._copies.end()
        if end is not None:
            end.block()
        while self._files:
            self._files.popleft().region.release()


@functools.cache
def copying_threads() -> int:
    """This process's share of the processors, at most four: they have the memory's bandwidth between them."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // ranks_here()))


@functools.cache
def ranks_here() -> int:
    """How many ranks share this host, as torchrun says; 1 if nobody says."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


class Flat:
    """Copies parts; keeps the last tensor that had to be made contiguous, since its parts come in turn."""

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies = copies or Copies(Sides(lambda device: PlainSide()))
        self._of: Source | None = None
        self._bytes: Any = None

    def copy(self, source: Source, part: Part, target: Bytes) -> None:
        """The bytes of the part into `target`. Of a device's tensor the copy is begun, as its side does it;
        without `copies` it is over."""
        stop = part.at + part.nbytes
        if self._of is not source:
            self._of = source
            self._bytes = self._copies.flat(source.tensor) if source.framework == "torch" else source.flat()
        if source.framework == "torch":
            self._copies.copy(target, self._bytes[part.at : stop])
        else:
            target[:] = self._bytes[part.at : stop]

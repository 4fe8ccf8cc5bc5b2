"""Reading boxes of tensors into memory, every stored part that is read whole verified against its hash
(docs/guides/checkpoint.md, Loading).
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffs import Iov
from ffs.checkpoint.dtypes import DTYPE_BYTES
from ffs.checkpoint.fetch import Want, fetch
from ffs.checkpoint.hold import Hold
from ffs.checkpoint.manifest import Manifest, Part
from ffs.checkpoint.near import Near
from ffs.checkpoint.passing import fetch_shared
from ffs.checkpoint.plan import Box, meets
from ffs.checkpoint.reads import Range, place_in, ranges, scatter
from ffs.checkpoint.tensors import Bytes, Place, memory_at
from ffs.checkpoint.verifier import Verifier
from ffs.client.copying import IovSlice
from ffs.errors import ChecksumMismatch, Damaged

if TYPE_CHECKING:
    from ffs.checkpoint.circle import Circle
    from ffs.client.client import Client
    from ffs.client.file import File

log = logging.getLogger("ffs.checkpoint")


@dataclass(slots=True)
class Goal:
    """Where a tensor, or a piece of it, goes: `buffer` has its bytes in C order; `iov` and `at` say where
    they lie if that is an Iov."""

    name: str
    box: Box
    buffer: Place
    iov: Iov | None = None
    at: int = 0


@dataclass(frozen=True, slots=True)
class Sources:
    """Where bytes come from. `near`: what it serves is read there, the rest from the cluster. `places`:
    memory that bytes may go through (`fetch`). `circle`: ranks that read at the same time, each byte once.
    `hold`: says whether what was read counts; None: the caller has the lock."""

    near: Near | None = None
    places: IovSlice | None = None
    circle: Circle | None = None
    hold: Hold | None = None


def read_goals(
    client: Client,
    path: str,
    manifest: Manifest,
    goals: Sequence[Goal],
    sources: Sources = Sources(),
) -> None:
    """Reads boxes of tensors into their buffers, verified. The caller holds the checkpoint. Blocking; with a
    circle collective. NotFound: `Sources.hold` says that it was removed meanwhile."""
    if sources.hold is None:
        _read_all(client, path, manifest, goals, sources)
        return
    with sources.hold.unless_gone():
        _read_all(client, path, manifest, goals, sources)
    sources.hold.decide()


def _read_all(client: Client, path: str, manifest: Manifest, goals: Sequence[Goal], sources: Sources) -> None:
    served: set[tuple[str, int, int]] = set()
    if sources.near is not None and sources.near.files:
        try:
            served = _read_near(path, manifest, goals, sources.near)
        except ChecksumMismatch as error:
            log.warning("a local copy may be damaged, the cluster is read: %s", error)
    _read_goals(client, path, manifest, goals, served, sources)


def _read_near(path: str, manifest: Manifest, goals: Sequence[Goal], near: Near) -> set[tuple[str, int, int]]:
    """What of it needn't be read elsewhere."""
    paths = _paths(path, manifest)
    with Verifier(manifest.hash) as verifier:
        wants = [want for goal in goals for want in _wants(paths, manifest, goal, verifier)]
        wants.sort(key=_place)
        left = {id(want) for want in near.read(path, manifest, wants)}
        return {_key(want) for want in wants if id(want) not in left}


def _place(want: Want) -> tuple[str, int]:
    return want.path, want.offset


def _key(want: Want) -> tuple[str, int, int]:
    return want.path, want.offset, want.length


def _read_goals(
    client: Client,
    path: str,
    manifest: Manifest,
    goals: Sequence[Goal],
    served: set[tuple[str, int, int]],
    sources: Sources,
) -> None:
    """But for what was `served`."""
    paths = _paths(path, manifest)
    sizes = dict(zip(paths, (shard.bytes for shard in manifest.shards), strict=True))

    def opened(file: File, where: str) -> None:
        if file.size != sizes[where]:
            raise Damaged(
                f"has {file.size} bytes, the manifest says {sizes[where]}: load another checkpoint", where
            )

    with Verifier(manifest.hash) as verifier:
        wants = [want for goal in goals for want in _wants(paths, manifest, goal, verifier)]
        if served:
            wants = [want for want in wants if _key(want) not in served]
        wants.sort(key=_place)
        if sources.circle is not None:
            fetch_shared(client, wants, opened, sources.circle, list(sizes), sources.places)
        elif wants:
            fetch(client, wants, opened, places=sources.places)


def _paths(path: str, manifest: Manifest) -> list[str]:
    """Of the shards."""
    return [posixpath.join(path, shard.file) for shard in manifest.shards]


def _wants(paths: Sequence[str], manifest: Manifest, goal: Goal, verifier: Verifier) -> Iterator[Want]:
    entry = manifest.tensors[goal.name]
    for part in entry.parts:
        if entry.box_of(part) == goal.box and part.bytes:  # then nothing else of it is wanted
            landed = _Landed(paths[part.shard], part, goal.name, goal.buffer, verifier).came
            yield Want(paths[part.shard], part.offset, part.bytes, goal.iov, goal.at, goal.buffer, landed)
            return
    item = DTYPE_BYTES[entry.dtype]
    for part in entry.parts:
        box = entry.box_of(part)
        shared = meets(box, goal.box)
        if shared is None:
            continue
        where = paths[part.shard]
        for wanted in ranges(box, goal.box, shared, item):
            yield _want(where, part, wanted, goal, verifier)


def _want(where: str, part: Part, wanted: Range, goal: Goal, verifier: Verifier) -> Want:
    offset = part.offset + wanted.offset
    whole = verifier if wanted.length == part.bytes else None
    run = place_in(goal.box[1], wanted)
    if run is None:
        scattered = _Scattered(where, part, wanted, goal, whole)
        return Want(where, offset, wanted.length, done=scattered.came)
    begin, nbytes = run
    target = _Slice(goal.buffer, begin, begin + nbytes).memory
    landed = _nothing if whole is None else _Landed(where, part, goal.name, target, whole).came
    if goal.iov is not None:
        return Want(where, offset, nbytes, goal.iov, goal.at + begin, target, landed)
    return Want(where, offset, nbytes, into=target, done=landed)


def _nothing(memory: Bytes | None) -> None:
    """Pieces of a part: the store's checksums cover them."""


@dataclass(slots=True)
class _Slice:
    """Bytes [begin, end) of a place."""

    place: Place
    begin: int
    end: int

    def memory(self) -> Bytes:
        return memory_at(self.place)[self.begin : self.end]


@dataclass(slots=True)
class _Landed:
    """A whole part in its place: to be verified. (Not a closure: of thousands, garbage collection would look
    at ten objects each.)"""

    where: str
    part: Part
    name: str
    target: Place
    verifier: Verifier

    def came(self, memory: Bytes | None) -> None:
        self.verifier.add(self.where, self.name, self.part.hash, memory_at(self.target))


@dataclass(slots=True)
class _Scattered:
    """Bytes that go to many places. `verifier` if they are a whole part."""

    where: str
    part: Part
    wanted: Range
    goal: Goal
    verifier: Verifier | None

    def came(self, memory: Bytes | None) -> None:
        assert memory is not None
        if self.verifier is not None:
            self.verifier.check(self.where, self.goal.name, self.part.hash, memory)
        scatter(memory, self.wanted, memory_at(self.goal.buffer), self.goal.box[1])

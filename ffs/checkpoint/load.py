"""`load`: a checkpoint back into tensors, every stored part that is read whole verified against its hash
(docs/guides/checkpoint.md, Loading).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import blake3
import numpy as np
from msgspec.structs import replace

from ffs import Iov
from ffs.checkpoint import manifest as manifests
from ffs.checkpoint import state as states
from ffs.checkpoint.dtypes import DTYPE_BYTES
from ffs.checkpoint.fetch import Want, fetch
from ffs.checkpoint.manifest import Manifest, Part
from ffs.checkpoint.near import Near
from ffs.checkpoint.plan import Box, meets
from ffs.checkpoint.reads import Range, place_in, ranges, scatter
from ffs.checkpoint.snapshot import copying_threads
from ffs.checkpoint.tensors import Bytes, Destination, Framework, as_tensor, check_framework
from ffs.client.copying import IovSlice
from ffs.errors import ChecksumMismatch, Damaged, InvalidArgument, NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

log = logging.getLogger("ffs.checkpoint")

_PAGE = 4096
_ARENA_BYTES = 1 << 30
_HASHED_BYTES = 4 << 20  # of parts that are hashed in one go


def read_manifest(client: Client, path: str) -> Manifest:
    """The manifest of the checkpoint at `path`. Blocking. NotFound if there is none; Damaged."""
    where = posixpath.join(path, manifests.FILE_NAME)
    try:
        with client.open(where, "rb") as file:
            data = file.read()
    except FileNotFoundError as error:
        raise NotFound("no checkpoint: it has no manifest.json", path) from error
    return manifests.decode(data, where)


@contextlib.contextmanager
def held(client: Client, path: str) -> Iterator[Manifest]:
    """The manifest, while a lock keeps the checkpoint from being removed by retention (FAULTS C8, C19)."""
    where = posixpath.join(path, manifests.FILE_NAME)
    while True:
        try:
            file = client.open(where, "rb", buffering=0)
        except FileNotFoundError as error:
            raise NotFound("no checkpoint: it has no manifest.json", path) from error
        with file:
            file.flock(fcntl.LOCK_SH)
            try:
                present = client.stat(where).st_ino == file.inode
            except NotFound:
                present = False
            if present:  # else it was being removed just now
                yield manifests.decode(file.readall(), where)
                return


def load(
    client: Client,
    path: str,
    into: Any = None,
    *,
    framework: Framework | None = None,
    strict: bool = True,
) -> Any:
    """Loads the checkpoint at `path`; returns the state, in the manifest's order. Blocking.

    Without `into` the tensors are new and whole, whatever ranks saved them. They share blocks of memory of
    up to a GiB, each of which lives as long as any tensor in it; ties are restored, so tied names give the
    same object. `framework`: "torch" or "numpy"; None: what each tensor was saved from.

    With `into` (a state) the bytes go into its tensors, whatever their strides, device and distribution
    (a DTensor takes its own piece), plain values are replaced, and objects get `load_state_dict`. Its
    names must be those of the checkpoint; strict=False allows names of the checkpoint to be absent from
    `into`: they aren't read. Returns `into`.

    Raises NotFound; Damaged, VersionMismatch (the manifest); InvalidArgument, TypeError (a destination
    that can't take a tensor: said by name, before anything is read); ChecksumMismatch names the tensor
    whose bytes aren't those that were saved: then `into` holds anything.
    """
    with held(client, path) as manifest:
        return load_held(client, path, shared_part(manifest), into, framework=framework, strict=strict)


def load_held(
    client: Client,
    path: str,
    manifest: Manifest,
    into: Any = None,
    *,
    framework: Framework | None = None,
    strict: bool = True,
    near: Near | None = None,
    places: IovSlice | None = None,
) -> Any:
    """As `load`, of what `manifest` names, which the caller holds (`held`). `near`: copies, read first.
    `places`: as read_goals."""
    if into is None:
        return _load_new(client, path, manifest, framework, near)
    _load_into(client, path, manifest, into, strict, near, places)
    return into


def shared_part(manifest: Manifest) -> Manifest:
    """What isn't of one rank alone."""
    return replace(
        manifest,
        tensors={name: entry for name, entry in manifest.tensors.items() if not states.is_own(name)},
        tied={alias: kept for alias, kept in manifest.tied.items() if not states.is_own(alias)},
        tree=states.shared_tree(manifest.tree),
    )


def own_part(manifest: Manifest, rank: int, path: str) -> Manifest:
    """What only that rank has, without its prefix. NotFound: it has nothing there."""
    tree = states.own_tree(manifest.tree, rank)
    if tree is None:
        raise NotFound(
            f"the checkpoint has nothing of rank {rank} alone (it was saved by {manifest.ranks} ranks)", path
        )
    prefix = states.own_name(rank) + "."
    tensors = {n: entry for n, entry in manifest.tensors.items() if n.startswith(prefix)}
    return replace(
        manifest,
        tensors={name.removeprefix(prefix): entry for name, entry in tensors.items()},
        tied={
            alias.removeprefix(prefix): kept.removeprefix(prefix)
            for alias, kept in manifest.tied.items()
            if alias.startswith(prefix)
        },
        tree=states.without_prefix(tree, prefix),
    )


@dataclass(slots=True)
class Goal:
    """Where a tensor, or a piece of it, goes: `buffer` are its bytes in C order; `iov` and `at` say where
    they lie if that is an Iov."""

    name: str
    box: Box
    buffer: Bytes
    iov: Iov | None = None
    at: int = 0


def _load_new(
    client: Client, path: str, manifest: Manifest, framework: Framework | None, near: Near | None
) -> Any:
    for name, entry in manifest.tensors.items():
        check_framework(entry.spec(name), framework or entry.framework)
    found = _new_tensors(client, path, manifest, list(manifest.tensors), framework, near)
    found.update({alias: found[kept] for alias, kept in manifest.tied.items()})
    return states.unflatten(manifest.tree, found, path)


def _new_tensors(
    client: Client,
    path: str,
    manifest: Manifest,
    names: Sequence[str],
    framework: Framework | None,
    near: Near | None,
) -> dict[str, Any]:
    goals = []
    found = {}
    for name, iov, at in _arenas([(name, manifest.tensors[name].bytes) for name in names]):
        entry = manifest.tensors[name]
        memory = iov.buffer()[at : at + entry.bytes] if iov is not None else memoryview(b"")
        buffer = np.frombuffer(memory, np.uint8) if entry.bytes else np.zeros(0, np.uint8)
        goals.append(Goal(name, ((0,) * len(entry.shape), entry.shape), buffer, iov, at))
        found[name] = as_tensor(entry.spec(name), memory, framework or entry.framework)
    read_goals(client, path, manifest, goals, near)
    return {name: found[name] for name in names}


def _arenas(sizes: Sequence[tuple[str, int]]) -> Iterator[tuple[str, Iov | None, int]]:
    """A place for each tensor: a page's start for those of a page or more, 64 bytes for smaller ones."""
    groups: list[list[tuple[str, int, int]]] = [[]]
    end = 0
    for name, nbytes in sizes:
        step = _PAGE if nbytes >= _PAGE else 64
        at = -(-end // step) * step
        if groups[-1] and at + nbytes > _ARENA_BYTES:
            groups.append([])
            at = 0
        groups[-1].append((name, nbytes, at))
        end = at + nbytes
    for group in groups:
        total = max((at + nbytes for _, nbytes, at in group), default=0)
        iov = Iov(total) if total else None
        for name, nbytes, at in group:
            yield name, iov if nbytes else None, at


# --- into tensors that are there ------------------------------------------------------------------


def _load_into(
    client: Client,
    path: str,
    manifest: Manifest,
    into: Any,
    strict: bool,
    near: Near | None,
    places: IovSlice | None,
) -> None:
    flat = states.flatten(into)
    known = {*manifest.tensors, *manifest.tied}
    # An optimizer has no state before its first step: what it lacks is made, and given to load_state_dict;
    # what stands where `into` has a plain value is made, too.
    lacking = sorted(known - set(flat.tensors))
    fresh = [name for name in lacking if _under(name, into)] if strict or flat.tree else []
    _check_names(path, known, flat.tensors, [] if not strict else [n for n in lacking if n not in fresh])
    goals: dict[str, list[Destination]] = {}
    seen: dict[str, set[int]] = {}
    for name, tensor in flat.tensors.items():
        kept = manifest.tied.get(name, name)
        if id(tensor) in seen.setdefault(kept, set()):
            continue
        seen[kept].add(id(tensor))
        goals.setdefault(kept, []).append(Destination(manifest.tensors[kept].spec(name), tensor))
    first = [
        Goal(name, (destinations[0].begin, destinations[0].extent), destinations[0].buffer)
        for name, destinations in goals.items()
    ]
    read_goals(client, path, manifest, first, near, places)
    for destinations in goals.values():
        for other in destinations[1:]:
            _copy_between(destinations[0], other)
        for destination in destinations:
            destination.finish()
    found = dict(flat.tensors)
    kept_fresh = list(dict.fromkeys(manifest.tied.get(name, name) for name in fresh))
    made = _new_tensors(client, path, manifest, kept_fresh, None, near) if kept_fresh else {}
    found.update({name: made[manifest.tied.get(name, name)] for name in fresh})
    if manifest.tree is not None:
        states.put_back(into, manifest.tree, _Absent(found), path)


class _Absent(dict[str, Any]):
    """Tensors that `strict=False` left out: a tree may still name them."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name} isn't loaded (strict=False leaves it out, and an object needs it)")


def _copy_between(one: Destination, other: Destination) -> None:
    if (one.begin, one.extent) != (other.begin, other.extent):
        raise InvalidArgument(
            f"{other.spec.name!r} is tied to another tensor, but distributed in another way: untie it"
        )
    other.buffer[:] = one.buffer


def _under(name: str, into: Any) -> bool:
    """Whether a name stands under an object that loads its own state, or where a plain value is replaced."""
    here = into
    rest = name
    while True:
        if states.is_stateful(here):
            return True
        if not isinstance(here, Mapping):
            return not states.is_tensor(here)
        # Keys may have dots: the longest one that fits.
        fitting = [k for k in map(str, here) if rest == k or rest.startswith(k + ".")]
        if not fitting:
            return False
        key = max(fitting, key=len)
        here = next(v for k, v in here.items() if str(k) == key)
        rest = rest[len(key) + 1 :]


def _check_names(path: str, known: set[str], names: Mapping[str, Any], absent: Sequence[str]) -> None:
    unknown = sorted(name for name in names if name not in known)
    if unknown or absent:
        words = [f"lacks {_some(unknown)}"] if unknown else []
        words += (
            [f"has {_some(absent)} too, which `into` lacks (strict=False leaves them out)"] if absent else []
        )
        raise InvalidArgument("the checkpoint " + " and ".join(words), path)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# --- reading --------------------------------------------------------------------------------------


def read_goals(
    client: Client,
    path: str,
    manifest: Manifest,
    goals: Sequence[Goal],
    near: Near | None = None,
    places: IovSlice | None = None,
) -> None:
    """Reads boxes of tensors into their buffers, verified. The caller holds the checkpoint. `near`: what it
    serves is read there, the rest from the cluster. `places`: memory that bytes may go through (`fetch`).
    Blocking."""
    if near is not None and near.files:
        try:
            _read_goals(client, path, manifest, goals, near, places)
            return
        except ChecksumMismatch as error:
            log.warning("a local copy may be damaged, the cluster is read: %s", error)
    _read_goals(client, path, manifest, goals, None, places)


def _read_goals(
    client: Client,
    path: str,
    manifest: Manifest,
    goals: Sequence[Goal],
    near: Near | None,
    places: IovSlice | None,
) -> None:
    sizes = {posixpath.join(path, shard.file): shard.bytes for shard in manifest.shards}

    def opened(file: File, where: str) -> None:
        if file.size != sizes[where]:
            raise Damaged(
                f"has {file.size} bytes, the manifest says {sizes[where]}: load another checkpoint", where
            )

    with _Verifier() as verifier:
        wants = [want for goal in goals for want in _wants(path, manifest, goal, verifier)]
        wants.sort(key=lambda want: (want.path, want.offset))
        if near is not None:
            wants = near.read(path, manifest, wants)
            wants.sort(key=lambda want: (want.path, want.offset))
        if wants:
            fetch(client, wants, opened, places=places)


def _wants(path: str, manifest: Manifest, goal: Goal, verifier: _Verifier) -> Iterator[Want]:
    entry = manifest.tensors[goal.name]
    item = DTYPE_BYTES[entry.dtype]
    for part in entry.parts:
        box = entry.box_of(part)
        shared = meets(box, goal.box)
        if shared is None:
            continue
        where = posixpath.join(path, manifest.shards[part.shard].file)
        for wanted in ranges(box, goal.box, shared, item):
            yield _want(where, part, wanted, goal, verifier)


def _want(where: str, part: Part, wanted: Range, goal: Goal, verifier: _Verifier) -> Want:
    offset = part.offset + wanted.offset
    whole = verifier if wanted.length == part.bytes else None
    run = place_in(goal.box[1], wanted)
    if run is None:
        scattered = _Scattered(where, part, wanted, goal, whole)
        return Want(where, offset, wanted.length, done=scattered.came)
    begin, nbytes = run
    target = goal.buffer[begin : begin + nbytes]
    landed = _nothing if whole is None else _Landed(where, part, goal.name, target, whole).came
    if goal.iov is not None:
        return Want(where, offset, nbytes, goal.iov, goal.at + begin, target, landed)
    return Want(where, offset, nbytes, into=target, done=landed)


def _nothing(memory: Bytes | None) -> None:
    """Pieces of a part: the store's checksums cover them."""


@dataclass(slots=True)
class _Landed:
    """A whole part in its place: to be verified. (Not a closure: of thousands, garbage collection would look
    at ten objects each.)"""

    where: str
    part: Part
    name: str
    target: Bytes
    verifier: _Verifier

    def came(self, memory: Bytes | None) -> None:
        self.verifier.add(self.where, self.name, self.part.hash, self.target)


@dataclass(slots=True)
class _Scattered:
    """Bytes that go to many places. `verifier` if they are a whole part."""

    where: str
    part: Part
    wanted: Range
    goal: Goal
    verifier: _Verifier | None

    def came(self, memory: Bytes | None) -> None:
        assert memory is not None
        if self.verifier is not None:
            self.verifier.check(self.where, self.goal.name, self.part.hash, memory)
        scatter(memory, self.wanted, self.goal.buffer, self.goal.box[1])


class _Verifier:
    """Hashes parts in threads while others are still on their way; small ones together."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(copying_threads(), thread_name_prefix="ffs-verify")
        self._waiting: list[Future[None]] = []
        self._next: list[tuple[str, str, str, Bytes]] = []
        self._bytes = 0

    def add(self, path: str, name: str, wanted: str, data: Bytes) -> None:
        self._next.append((path, name, wanted, data))
        self._bytes += len(data)
        if self._bytes >= _HASHED_BYTES:
            self._go()

    def _go(self) -> None:
        rows, self._next, self._bytes = self._next, [], 0
        if rows:
            self._waiting.append(self._pool.submit(self._check_all, rows))

    def _check_all(self, rows: list[tuple[str, str, str, Bytes]]) -> None:
        for row in rows:
            self.check(*row)

    def check(self, path: str, name: str, wanted: str, data: Bytes) -> None:
        if blake3.blake3(data.data).hexdigest() != wanted:
            raise ChecksumMismatch(
                f"the bytes of {name!r} aren't those that were saved: load another checkpoint", path
            )

    def __enter__(self) -> _Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for all, and raises the first mismatch unless something else went wrong before."""
        if kind is None:
            self._go()
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                future.result()

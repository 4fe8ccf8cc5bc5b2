"""`load`: a checkpoint back into tensors, every stored part that is read whole verified against its hash
(docs/guides/checkpoint.md, Loading).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from ffs import Iov
from ffs.checkpoint import state as states
from ffs.checkpoint.goals import Goal, Sources, read_goals
from ffs.checkpoint.hold import Gone, Hold, held, holding
from ffs.checkpoint.manifest import Manifest
from ffs.checkpoint.near import Near
from ffs.checkpoint.tensors import Destination, Framework, Lines, as_tensor, check_framework
from ffs.client.copying import IovSlice
from ffs.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from ffs.checkpoint.circle import Circle
    from ffs.client.client import Client

_PAGE = 4096
_ARENA_BYTES = 1 << 30


def load(
    client: Client,
    path: str,
    into: Any = None,
    *,
    framework: Framework | None = None,
    strict: bool = True,
    share: bool = False,
) -> Any:
    """Loads the checkpoint at `path`; returns the state, in the manifest's order. Blocking.

    Without `into` the tensors are new and whole, whatever ranks saved them. They share blocks of memory of
    up to a GiB, each of which lives as long as any tensor in it; ties are restored, so tied names give the
    same object. `framework`: "torch" or "numpy"; None: what each tensor was saved from.

    With `into` (a state) the bytes go into its tensors, whatever their strides, device and distribution
    (a DTensor takes its own piece), plain values are replaced, and objects get `load_state_dict`. Its
    names must be those of the checkpoint; strict=False allows names of the checkpoint to be absent from
    `into`: they aren't read. Returns `into`.

    share: all ranks of torch.distributed load this checkpoint, each with an `into` of its own or none, and
    bytes that several of them want are read by one, which hands them to the others. Collective: a rank that
    fails fails all, with RankFailed on the others.

    Raises NotFound; Damaged, VersionMismatch (the manifest); InvalidArgument, TypeError (a destination
    that can't take a tensor: said by name, before anything is read); ChecksumMismatch names the tensor
    whose bytes aren't those that were saved: then `into` holds anything.
    """
    if share:
        with _circle() as circle, held(client, path) as manifest:
            part = shared_part(manifest)
            return load_held(client, path, part, into, framework=framework, strict=strict, circle=circle)
    while True:
        try:
            with holding(client, path) as hold:
                part = shared_part(hold.manifest)
                return load_held(client, path, part, into, framework=framework, strict=strict, hold=hold)
        except Gone:
            continue  # what stands there now, if anything does


def _circle() -> Circle:
    from ffs.checkpoint.circle import Circle  # imports torch

    return Circle()


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
    circle: Circle | None = None,
    hold: Hold | None = None,
) -> Any:
    """As `load`, of what `manifest` names, which the caller holds (`held`, or `hold`, which is asked before
    what was read counts). `near`: copies, read first. `places`, `circle`: as Sources."""
    sources = Sources(near, places, circle, hold)
    if into is None:
        return _load_new(client, path, manifest, framework, sources)
    _load_into(client, path, manifest, into, strict, sources)
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


def _load_new(
    client: Client, path: str, manifest: Manifest, framework: Framework | None, sources: Sources
) -> Any:
    for name, entry in manifest.tensors.items():
        check_framework(entry.spec(name), framework or entry.framework)
    found = _new_tensors(client, path, manifest, list(manifest.tensors), framework, sources)
    if sources.circle is not None:  # as often as ranks that load into what they have
        read_goals(client, path, manifest, [], sources)
    found.update({alias: found[kept] for alias, kept in manifest.tied.items()})
    return states.unflatten(manifest.tree, found, path)


def _new_tensors(
    client: Client,
    path: str,
    manifest: Manifest,
    names: Sequence[str],
    framework: Framework | None,
    sources: Sources,
) -> dict[str, Any]:
    goals = []
    found = {}
    for name, iov, at in _arenas([(name, manifest.tensors[name].bytes) for name in names]):
        entry = manifest.tensors[name]
        memory = iov.buffer()[at : at + entry.bytes] if iov is not None else memoryview(b"")
        buffer = np.frombuffer(memory, np.uint8) if entry.bytes else np.zeros(0, np.uint8)
        goals.append(Goal(name, ((0,) * len(entry.shape), entry.shape), buffer, iov, at))
        found[name] = as_tensor(entry.spec(name), memory, framework or entry.framework)
    read_goals(client, path, manifest, goals, sources)
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
    sources: Sources,
) -> None:
    flat = states.flatten(into)
    known = {*manifest.tensors, *manifest.tied}
    # An optimizer has no state before its first step: what it lacks is made, and given to load_state_dict;
    # what stands where `into` has a plain value is made, too.
    lacking = sorted(known - set(flat.tensors))
    fresh = [name for name in lacking if _under(name, into)] if strict or flat.tree else []
    _check_names(path, known, flat.tensors, [] if not strict else [n for n in lacking if n not in fresh])
    goals: dict[str, list[Destination]] = {}
    lines: Lines = {}
    seen: dict[str, set[int]] = {}
    for name, tensor in flat.tensors.items():
        kept = manifest.tied.get(name, name)
        if id(tensor) in seen.setdefault(kept, set()):
            continue
        seen[kept].add(id(tensor))
        goals.setdefault(kept, []).append(Destination(manifest.tensors[kept].spec(name), tensor, lines))
    first = [
        Goal(name, (destinations[0].begin, destinations[0].extent), destinations[0].memory)
        for name, destinations in goals.items()
    ]
    read_goals(client, path, manifest, first, sources)
    for destinations in goals.values():
        for other in destinations[1:]:
            _copy_between(destinations[0], other)
        for destination in destinations:
            destination.finish()
    found = dict(flat.tensors)
    kept_fresh = list(dict.fromkeys(manifest.tied.get(name, name) for name in fresh))
    made: dict[str, Any] = {}
    if kept_fresh or sources.circle is not None:  # which another rank may lack
        made = _new_tensors(client, path, manifest, kept_fresh, None, sources)
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

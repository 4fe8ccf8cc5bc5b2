"""What each rank says of its part of a save, and the manifest that all parts make. Pure.
docs/guides/checkpoint.md, Commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ffs.checkpoint.manifest import Manifest, Part, Shard, Tensor, check, version_of
from ffs.errors import Damaged, InvalidArgument


class RankReport(msgspec.Struct, frozen=True):
    """One rank has stored its part. `declared`: type and whole shape of every tensor that it knows of,
    whoever stores it; one that nobody has stored makes the save fail. `hash`: the algorithm of its parts'."""

    rank: int
    ranks: int
    shards: tuple[Shard, ...]
    tensors: dict[str, Tensor]
    tied: dict[str, str]
    tree: Any
    declared: dict[str, tuple[str, tuple[int, ...]]]
    hash: str = "blake3"


def merge(reports: Sequence[RankReport], step: int | None, where: str) -> Manifest:
    """The manifest of all ranks' parts, the same whoever computes it. InvalidArgument says which tensor
    nobody stored, or which ranks contradict each other."""
    ordered = sorted(reports, key=lambda report: report.rank)
    shards: list[Shard] = []
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    files: set[str] = set()
    first = ordered[0]
    for report in ordered:
        if report.hash != first.hash:
            raise InvalidArgument(
                f"rank {report.rank} hashes with {report.hash}, rank {first.rank} with {first.hash}: "
                "give all ranks the same hash=",
                where,
            )
        base = len(shards)
        for shard in report.shards:
            if shard.file in files:
                raise InvalidArgument(f"two ranks have written {shard.file}", where)
            files.add(shard.file)
        shards += report.shards
        for name, tensor in report.tensors.items():
            moved = tuple(_moved(part, base) for part in tensor.parts)
            before = tensors.get(name)
            if before is not None and (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
                raise InvalidArgument(
                    f"{name!r} is {tensor.dtype} {list(tensor.shape)} on rank {report.rank}, and "
                    f"{before.dtype} {list(before.shape)} on another",
                    where,
                )
            parts = (*(before.parts if before else ()), *moved)
            tensors[name] = Tensor(tensor.dtype, tensor.shape, parts, tensor.framework)
        for alias, kept in report.tied.items():
            tied.setdefault(alias, kept)
    _check_declared(ordered, tensors, where)
    tree = ordered[0].tree
    for report in ordered[1:]:
        tree = joined(tree, report.tree)
    order = list(dict.fromkeys(name for report in ordered for name in report.declared))
    manifest = Manifest(
        shards=tuple(shards),
        tensors={name: tensors[name] for name in order},
        tied={alias: kept for alias, kept in tied.items() if alias not in tensors},
        tree=tree,
        step=step,
        ranks=len(ordered),
        version=version_of(first.hash),
        hash=first.hash,
    )
    try:
        check(manifest, where)
    except Damaged as error:
        raise InvalidArgument(f"the ranks' parts don't make a whole: {error.message}", where) from None
    return manifest


def _moved(part: Part, base: int) -> Part:
    return msgspec.structs.replace(part, shard=part.shard + base)


def _check_declared(reports: Sequence[RankReport], tensors: dict[str, Tensor], where: str) -> None:
    for report in reports:
        for name, (dtype, shape) in report.declared.items():
            tensor = tensors.get(name)
            if tensor is None:
                raise InvalidArgument(
                    f"{name!r} of rank {report.rank} was stored by no rank: tensors that only some ranks "
                    "have go into per_rank=",
                    where,
                )
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(shape)):
                raise InvalidArgument(
                    f"{name!r} is {dtype} {list(shape)} on rank {report.rank}, and {tensor.dtype} "
                    f"{list(tensor.shape)} where it was stored",
                    where,
                )


def joined(one: Any, other: Any) -> Any:
    """Two ranks' trees: dicts have the keys of both; else what the lower rank says stands."""
    if not (isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys()):
        return one
    ((kind, body),) = one.items()
    if kind == "stateful":
        return {kind: joined(body, other[kind])}
    if kind != "dict":
        return one
    theirs = {msgspec.json.encode(key): node for key, node in other[kind]}
    rows = [[key, joined(node, theirs.pop(msgspec.json.encode(key), node))] for key, node in body]
    mine = {msgspec.json.encode(key) for key, _ in body}
    rows += [[key, node] for key, node in other[kind] if msgspec.json.encode(key) not in mine]
    return {kind: rows}

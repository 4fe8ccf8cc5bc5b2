"""`save`: a state dict as safetensors shards and a manifest, published as one directory
(docs/guides/checkpoint.md).

Everything is written into a directory of its own beside the goal, then one rename makes it visible.
Whatever fails before leaves nothing under the goal's name, and the remains are removed.
"""

from __future__ import annotations

import contextlib
import posixpath
import uuid
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import blake3
import numpy as np

from ffs.checkpoint import manifest as manifests
from ffs.checkpoint import stream
from ffs.checkpoint.manifest import Manifest, Shard, Tensor
from ffs.checkpoint.shard import ShardPlan, plan_shard
from ffs.checkpoint.spans import cut
from ffs.checkpoint.tensors import Bytes, Source, describe
from ffs.errors import Exists, FfsError, InvalidArgument

if TYPE_CHECKING:
    from ffs.client.client import Client

DEFAULT_SHARD_BYTES = 4 << 30


def save(
    client: Client,
    path: str,
    state_dict: Mapping[str, object],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    table: str | int | None = None,
) -> Manifest:
    """Saves tensors (torch or numpy, by name) as a checkpoint: the directory `path`, which must not be
    there yet. Returns its manifest once all replicas hold everything and the name is visible. Blocking.

    The state must not change meanwhile. Tied tensors are stored once; a view costs its own bytes.
    `shard_bytes`: a shard file ends before it gets larger, unless one tensor is. `table`: the chain
    table by name or id; None: as the parent directory has it.

    Raises Exists; NotFound (the parent); TypeError, InvalidArgument (an entry that is no tensor, or
    that safetensors can't hold: its name is said); NoSpace and any other failure of a write. Then
    nothing is visible under `path`. Directories above it are made as needed.
    """
    if shard_bytes < 1:
        raise InvalidArgument(f"shard_bytes is {shard_bytes}: give a positive number of bytes")
    sources, tied = _sources(state_dict)
    groups = _groups(sources, shard_bytes)
    if client.lexists(path):
        raise Exists("is there already: choose another path, or remove it first", path)
    parent, name = posixpath.split(path.rstrip("/"))
    if not name:
        raise InvalidArgument("a checkpoint needs a name of its own", path)
    hidden = posixpath.join(parent, f".{name[:200]}.saving-{uuid.uuid4().hex}")
    client.makedirs(parent, exist_ok=True)
    client.mkdir(hidden, table=table)
    try:
        manifest = _write_all(client, hidden, groups, tied)
        client.rename_exclusive(hidden, path)
    except BaseException as error:
        # The remains are hidden and no reader looks at them: failing to remove them must not hide why.
        with contextlib.suppress(FfsError):
            client.rmtree(hidden)
        if isinstance(error, Exists):
            raise Exists("another checkpoint took this name meanwhile: nothing was saved", path) from error
        raise
    return manifest


def _sources(state_dict: Mapping[str, object]) -> tuple[list[Source], dict[str, str]]:
    """Each tensor once, and the further names of those that are tied."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict maps names to tensors; this is a {type(state_dict).__name__}")
    kept: dict[Hashable, Source] = {}
    tied: dict[str, str] = {}
    for name, value in state_dict.items():
        source = describe(name, value)
        first = kept.setdefault(source.identity, source)
        if first is not source:
            tied[name] = first.spec.name
    return list(kept.values()), tied


def _groups(sources: Sequence[Source], shard_bytes: int) -> list[list[Source]]:
    """Tensors by shard, in the order of the state."""
    groups: list[list[Source]] = [[]]
    filled = 0
    for source in sources:
        if groups[-1] and filled + source.spec.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(source)
        filled += source.spec.nbytes
    return groups


def _write_all(
    client: Client, directory: str, groups: Sequence[Sequence[Source]], tied: Mapping[str, str]
) -> Manifest:
    shards: list[Shard] = []
    tensors: dict[str, Tensor] = {}
    for number, sources in enumerate(groups):
        file_name = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        mine = {alias: kept for alias, kept in tied.items() if any(s.spec.name == kept for s in sources)}
        # Loaders of plain safetensors find the further names of a tensor here.
        plan = plan_shard((source.spec for source in sources), {"format": "pt", **mine})
        hashes = _write_shard(client, posixpath.join(directory, file_name), plan, sources)
        by_name = {source.spec.name: source for source in sources}
        for placed in plan.tensors:
            spec = placed.spec
            tensors[spec.name] = Tensor(
                shard=number,
                dtype=spec.dtype,
                shape=spec.shape,
                offset=placed.begin,
                bytes=spec.nbytes,
                hash=hashes[spec.name],
                framework=by_name[spec.name].framework,
            )
        shards.append(Shard(file_name, plan.nbytes))
    manifest = Manifest(shards=tuple(shards), tensors=tensors, tied=dict(tied))
    with client.open(posixpath.join(directory, manifests.FILE_NAME), "xb") as file:
        file.write(manifests.encode(manifest))
    return manifest


def _write_shard(client: Client, path: str, plan: ShardPlan, sources: Sequence[Source]) -> dict[str, str]:
    """Writes one shard; the hash of each tensor by name."""
    producer = _Producer(plan, sources)
    with client.open(path, "xb", buffering=0) as file:
        ranges = list(cut(0, plan.nbytes, stream.piece_bytes(file)))
        stream.write_through(
            client, file, ranges, lambda index, memory: producer.fill(ranges[index][0], memory)
        )
    return producer.hashes


class _Producer:
    """The bytes of a shard in file order: header, then tensors, each hashed as it goes by."""

    def __init__(self, plan: ShardPlan, sources: Sequence[Source]) -> None:
        by_name = {source.spec.name: source for source in sources}
        self._order = [(placed, by_name[placed.spec.name]) for placed in plan.tensors]
        self._header = plan.header
        self._next = 0
        self._flat: Bytes | None = None
        self._hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
        self.hashes: dict[str, str] = {}
        self._end_empty_ones(len(plan.header))

    def fill(self, offset: int, memory: memoryview) -> None:
        """The bytes of the file from `offset` on. Called in file order, without gaps."""
        at = 0
        if offset < len(self._header):
            at = min(len(memory), len(self._header) - offset)
            memory[:at] = self._header[offset : offset + at]
        target = np.frombuffer(memory, dtype=np.uint8) if len(memory) else np.zeros(0, np.uint8)
        while at < len(memory):
            placed, source = self._order[self._next]
            if self._flat is None:
                self._flat = source.flat()
            begin = offset + at - placed.begin
            count = min(len(memory) - at, placed.spec.nbytes - begin)
            target[at : at + count] = self._flat[begin : begin + count]
            self._hasher.update(memory[at : at + count])
            at += count
            if begin + count == placed.spec.nbytes:
                self._end_tensor()
                self._end_empty_ones(offset + at)
        del target

    def _end_tensor(self) -> None:
        self.hashes[self._order[self._next][0].spec.name] = self._hasher.hexdigest()
        self._hasher.reset()
        self._flat = None
        self._next += 1

    def _end_empty_ones(self, position: int) -> None:
        while self._next < len(self._order) and self._order[self._next][0].end == position:
            self._end_tensor()

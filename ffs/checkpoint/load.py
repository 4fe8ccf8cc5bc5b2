"""`load`: a checkpoint back into tensors, every one verified against its hash
(docs/guides/checkpoint.md).
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

import blake3
import numpy as np

from ffs import Iov
from ffs.checkpoint import manifest as manifests
from ffs.checkpoint import stream
from ffs.checkpoint.manifest import Manifest, Shard, Tensor
from ffs.checkpoint.spans import Piece, pieces_of
from ffs.checkpoint.tensors import Destination, Framework, as_tensor, check_framework
from ffs.errors import ChecksumMismatch, Damaged, InvalidArgument, NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

_PAGE = 4096


def read_manifest(client: Client, path: str) -> Manifest:
    """The manifest of the checkpoint at `path`. Blocking. NotFound if there is none; Damaged."""
    where = posixpath.join(path, manifests.FILE_NAME)
    try:
        with client.open(where, "rb") as file:
            data = file.read()
    except FileNotFoundError as error:
        raise NotFound("no checkpoint: it has no manifest.json", path) from error
    return manifests.decode(data, where)


def load(
    client: Client,
    path: str,
    into: Mapping[str, Any] | None = None,
    *,
    framework: Framework | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Loads the checkpoint at `path`; returns tensors by name, in the manifest's order. Blocking.

    Without `into` the tensors are new. They share one block of memory a shard, which lives as long as
    any of them; ties are restored, so tied names give the same object. `framework`: "torch" or
    "numpy"; None: what each tensor was saved from.

    With `into` (a state dict) the bytes go into its tensors, whatever their strides and device, and it
    is what is returned. Its names must be those of the checkpoint; strict=False allows names of the
    checkpoint to be absent from `into`: they aren't read.

    Raises NotFound; Damaged, VersionMismatch (the manifest); InvalidArgument, TypeError (a destination
    that can't take a tensor: said by name, before anything is read); ChecksumMismatch names the tensor
    whose bytes aren't those that were saved: then `into` holds anything.
    """
    manifest = read_manifest(client, path)
    if into is None:
        return _load_new(client, path, manifest, framework)
    _load_into(client, path, manifest, into, strict)
    return dict(into)


def _load_new(client: Client, path: str, manifest: Manifest, framework: Framework | None) -> dict[str, Any]:
    chosen: dict[str, Framework] = {
        name: framework or entry.framework for name, entry in manifest.tensors.items()
    }
    for name, entry in manifest.tensors.items():
        check_framework(entry.spec(name), chosen[name])
    found: dict[str, Any] = {}
    for number in range(len(manifest.shards)):
        named = _tensors_of(manifest, number)
        for (name, entry), memory in zip(
            named, _read_new(client, path, manifest, named, number), strict=True
        ):
            found[name] = as_tensor(entry.spec(name), memory, chosen[name])
    result = {name: found[name] for name in manifest.tensors}
    result.update({alias: found[kept] for alias, kept in manifest.tied.items()})
    return result


def _tensors_of(manifest: Manifest, shard: int) -> list[tuple[str, Tensor]]:
    """Those of one shard in file order."""
    mine = [(name, entry) for name, entry in manifest.tensors.items() if entry.shard == shard]
    return sorted(mine, key=lambda item: (item[1].offset, item[1].bytes))


def _read_new(
    client: Client, path: str, manifest: Manifest, named: Sequence[tuple[str, Tensor]], number: int
) -> list[memoryview]:
    """The bytes of each tensor of a shard, in one new block of shared memory."""
    base = min((entry.offset for _, entry in named if entry.bytes), default=0) // _PAGE * _PAGE
    end = max((entry.offset + entry.bytes for _, entry in named if entry.bytes), default=0)
    if end == base:
        return [memoryview(b"") for _ in named]
    iov = Iov(end - base)
    whole = iov.buffer()
    parts = [whole[entry.offset - base :][: entry.bytes] for _, entry in named]
    file_name = posixpath.join(path, manifest.shards[number].file)
    with client.open(file_name, "rb", buffering=0) as file, _Verifier(file_name) as verifier:
        pieces = _pieces(file, manifest.shards[number], named)
        left = [entry.bytes for _, entry in named]

        def done(index: int) -> None:
            for part in pieces[index].parts:
                left[part.index] -= part.end - part.begin
                if not left[part.index]:
                    verifier.add(*named[part.index], parts[part.index])

        stream.read_into(client, file, [(p.offset, p.length) for p in pieces], iov, base, done)
    return parts


def _pieces(file: File, shard: Shard, named: Sequence[tuple[str, Tensor]]) -> list[Piece]:
    if file.size != shard.bytes:
        raise Damaged(
            f"has {file.size} bytes, the manifest says {shard.bytes}: load another checkpoint", file.name
        )
    items = [(entry.offset, entry.offset + entry.bytes) for _, entry in named]
    for (name, _), before, item in zip(named[1:], items, items[1:], strict=False):
        if item[0] < before[1]:
            raise Damaged(f"the manifest places {name!r} over another tensor", file.name)
    return pieces_of(items, stream.piece_bytes(file))


# --- into tensors that are there ------------------------------------------------------------------


def _load_into(client: Client, path: str, manifest: Manifest, into: Mapping[str, Any], strict: bool) -> None:
    goals = _destinations(path, manifest, into, strict)
    for number in range(len(manifest.shards)):
        named = [
            (name, entry) for name, entry in _tensors_of(manifest, number) if name in goals and entry.bytes
        ]
        if named:
            _read_shard_into(
                client, posixpath.join(path, manifest.shards[number].file), manifest, number, named, goals
            )
    for destinations in goals.values():
        for destination in destinations:
            destination.finish()


def _destinations(
    path: str, manifest: Manifest, into: Mapping[str, Any], strict: bool
) -> dict[str, list[Destination]]:
    """Where each stored tensor goes: to its own name and to those that are tied to it."""
    known = {*manifest.tensors, *manifest.tied}
    unknown = sorted(name for name in into if name not in known)
    absent = sorted(known - set(into)) if strict else []
    if unknown or absent:
        words = [f"lacks {_some(unknown)}"] if unknown else []
        words += (
            [f"has {_some(absent)} too, which `into` lacks (strict=False leaves them out)"] if absent else []
        )
        raise InvalidArgument("the checkpoint " + " and ".join(words), path)
    goals: dict[str, list[Destination]] = {}
    seen: dict[str, set[int]] = {}
    for name, tensor in into.items():
        kept = manifest.tied.get(name, name)
        if id(tensor) in seen.setdefault(kept, set()):
            continue
        seen[kept].add(id(tensor))
        goals.setdefault(kept, []).append(Destination(manifest.tensors[kept].spec(name), tensor))
    return goals


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _read_shard_into(
    client: Client,
    file_name: str,
    manifest: Manifest,
    number: int,
    named: Sequence[tuple[str, Tensor]],
    goals: Mapping[str, Sequence[Destination]],
) -> None:
    with client.open(file_name, "rb", buffering=0) as file, _Verifier(file_name) as verifier:
        pieces = _pieces(file, manifest.shards[number], named)
        left = [entry.bytes for _, entry in named]

        def take(index: int, memory: memoryview) -> None:
            data = np.frombuffer(memory, dtype=np.uint8)
            for part in pieces[index].parts:
                name, entry = named[part.index]
                piece = data[part.at : part.at + part.end - part.begin]
                for destination in goals[name]:
                    destination.buffer[part.begin : part.end] = piece
                left[part.index] -= part.end - part.begin
                if not left[part.index]:
                    verifier.add(name, entry, goals[name][0].buffer)

        stream.read_through(client, file, [(p.offset, p.length) for p in pieces], take)


class _Verifier:
    """Hashes tensors in a thread while others are still on their way."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ffs-verify")
        self._waiting: list[Future[None]] = []

    def add(self, name: str, entry: Tensor, data: Any) -> None:
        self._waiting.append(self._pool.submit(self._check, name, entry, data))

    def _check(self, name: str, entry: Tensor, data: Any) -> None:
        hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
        hasher.update(data)
        if hasher.hexdigest() != entry.hash:
            raise ChecksumMismatch(
                f"the bytes of {name!r} aren't those that were saved: load another checkpoint", self._path
            )

    def __enter__(self) -> _Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for all, and raises the first mismatch unless something else went wrong before."""
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                future.result()

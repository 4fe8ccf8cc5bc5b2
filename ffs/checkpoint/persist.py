"""Writing staged files into a directory of the cluster: hashed, linked where they haven't changed, else
written straight from the memory that they are staged in (docs/guides/checkpoint.md, Memory; Links).
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import blake3

from ffs.checkpoint import stream
from ffs.checkpoint.manifest import Manifest, Part, Shard, Tensor
from ffs.checkpoint.snapshot import StagedFile
from ffs.checkpoint.spans import cut
from ffs.client.ior import Ior
from ffs.errors import NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client

PRIORITY = 200  # of writes: training reads go first

ContentKey = tuple[tuple[str, str, tuple[int, ...], tuple[int, ...], str], ...]
"""What makes two shard files the same: each tensor's name, type, box and hash, in file order."""


@dataclass(slots=True)
class Written:
    """What one rank has stored: `tensors` maps each name to (dtype, shape, framework, parts)."""

    shards: list[Shard] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    bytes_written: int = 0
    bytes_linked: int = 0
    linked_by_class: dict[str, tuple[int, int]] = field(default_factory=dict)  # class -> bytes, of it linked

    def add(self, staged: StagedFile, linked: bool) -> None:
        number = len(self.shards)
        self.shards.append(Shard(staged.plan.file, staged.nbytes, linked))
        for part, entry in zip(staged.plan.parts, entries(staged, number), strict=True):
            before = self.tensors.get(part.name)
            parts = (*(before.parts if before else ()), entry)
            self.tensors[part.name] = Tensor(part.dtype, part.shape, parts, staged.frameworks[part.name])
            kind = part.name.split(".")[0]
            held, same = self.linked_by_class.get(kind, (0, 0))
            self.linked_by_class[kind] = held + part.nbytes, same + (part.nbytes if linked else 0)
        if linked:
            self.bytes_linked += staged.nbytes
        else:
            self.bytes_written += staged.nbytes


def hash_parts(staged: StagedFile) -> None:
    """BLAKE3 of each part, on all processors that are free."""
    memory = staged.region.memory()
    hashes = []
    for _, placed in staged.placed():
        hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
        hasher.update(memory[placed.begin : placed.end])
        hashes.append(hasher.hexdigest())
    staged.hashes = hashes


def entries(staged: StagedFile, number: int) -> list[Part]:
    """Its parts as the manifest has them, in a file of that number. After hash_parts."""
    return [
        Part(
            number,
            placed.begin,
            part.nbytes,
            digest,
            *((None, None) if part.whole else (part.begin, part.extent)),
        )
        for (part, placed), digest in zip(staged.placed(), staged.hashes, strict=True)
    ]


def key_of(staged: StagedFile) -> ContentKey:
    rows = [
        (part.name, part.dtype, part.begin, part.extent, digest)
        for part, digest in zip(staged.plan.parts, staged.hashes, strict=True)
    ]
    return tuple(sorted(rows))


def known_files(manifest: Manifest) -> Mapping[ContentKey, str]:
    """The shard files of an earlier checkpoint by what they hold."""
    rows: dict[int, list[tuple[str, str, tuple[int, ...], tuple[int, ...], str]]] = {}
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts:
            begin, extent = tensor.box_of(part)
            rows.setdefault(part.shard, []).append((name, tensor.dtype, begin, extent, part.hash))
    return {tuple(sorted(held)): manifest.shards[number].file for number, held in rows.items()}


class ClusterWriter:
    """Writes files from the pool's memory through one ring. One thread. Close it."""

    def __init__(self, client: Client, directory: str) -> None:
        self._client = client
        self._directory = directory
        self._ring = Ior(client, 64, kind="write", priority=PRIORITY)

    def link(self, source: str, file: str) -> bool:
        """The file of an earlier checkpoint, under a name here; False: it has gone meanwhile."""
        try:
            self._client.link(source, posixpath.join(self._directory, file))
        except NotFound:
            return False
        return True

    def write(self, staged: StagedFile) -> None:
        """Durable on all replicas when it returns. Raises the first failure of any piece (FAULTS C3); nothing
        is in flight then."""
        iov, base = staged.region.pool.iov, staged.region.begin
        path = posixpath.join(self._directory, staged.plan.file)
        with self._client.open(path, "xb", buffering=0) as file:
            ranges = list(cut(0, staged.nbytes, stream.piece_bytes(file)))
            stream.write_from(self._ring, file, ranges, iov, base)

    def close(self) -> None:
        self._ring.close()

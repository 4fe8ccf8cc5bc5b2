"""Reading a whole checkpoint against its hashes, and comparing two by what their manifests say
(docs/guides/checkpoint.md, Looking).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffs.checkpoint.fetch import Want, fetch
from ffs.checkpoint.hashing import ANY_THREADS, hash_one
from ffs.checkpoint.hold import held
from ffs.checkpoint.manifest import Manifest, Part, Shard
from ffs.checkpoint.tensors import Bytes
from ffs.errors import FfsError

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with one shard file, or one tensor in it."""

    file: str
    tensor: str
    words: str


def verify(client: Client, path: str, progress: Callable[[int], None] = lambda count: None) -> list[Damage]:
    """Reads every byte of every tensor; what isn't as it was saved, [] if all is. `progress` is told of bytes
    as they were checked. Blocking. Raises what makes the manifest unreadable (`load`), and Unreachable."""
    damages: list[Damage] = []
    with held(client, path) as manifest:
        for number, shard in enumerate(manifest.shards):
            wants = list(_wants(path, manifest, number, damages, progress))
            try:
                fetch(client, wants, lambda file, where, shard=shard: _check_size(file, shard))  # type: ignore[misc]
            except _WrongSize as error:
                damages.append(Damage(shard.file, "", error.message))
            except FileNotFoundError:
                damages.append(Damage(shard.file, "", "isn't there"))
            except FfsError as error:
                damages.append(Damage(shard.file, "", f"can't be read: {error.message}"))
    return damages


class _WrongSize(FfsError):
    pass


def _check_size(file: File, shard: Shard) -> None:
    if file.size != shard.bytes:
        raise _WrongSize(f"has {file.size} bytes, the manifest says {shard.bytes}")


def _wants(
    path: str, manifest: Manifest, number: int, damages: list[Damage], progress: Callable[[int], None]
) -> Iterator[Want]:
    shard = manifest.shards[number]
    held_there = [
        (name, part)
        for name, tensor in manifest.tensors.items()
        for part in tensor.parts
        if part.shard == number and part.bytes
    ]
    for name, part in sorted(held_there, key=lambda item: item[1].offset):

        def check(memory: Bytes | None, name: str = name, part: Part = part) -> None:
            assert memory is not None
            if hash_one(manifest.hash, memory, ANY_THREADS) != part.hash:
                damages.append(Damage(shard.file, name, "its bytes aren't those that were saved"))
            progress(part.bytes)

        yield Want(posixpath.join(path, shard.file), part.offset, part.bytes, done=check)


@dataclass(frozen=True, slots=True)
class Difference:
    """`kind`: "added", "removed", "changed" (bytes), or "reshaped" (type or shape); `words` say more."""

    name: str
    kind: str
    words: str = ""


def differences(one: Manifest, other: Manifest) -> list[Difference]:
    """What the second has other than the first, tensor by tensor, by names and hashes. Pure. Tensors that are
    cut, or hashed, in other ways on both sides can't be compared: they count as changed, and say so."""
    found = []
    for name in dict.fromkeys((*one.tensors, *other.tensors)):
        before, after = one.tensors.get(name), other.tensors.get(name)
        if before is None:
            found.append(Difference(name, "added"))
        elif after is None:
            found.append(Difference(name, "removed"))
        elif (before.dtype, before.shape) != (after.dtype, after.shape):
            words = f"{before.dtype} {list(before.shape)} -> {after.dtype} {list(after.shape)}"
            found.append(Difference(name, "reshaped", words))
        else:
            mine = {before.box_of(part): part.hash for part in before.parts}
            theirs = {after.box_of(part): part.hash for part in after.parts}
            if mine.keys() != theirs.keys():
                found.append(Difference(name, "changed", "or only stored in other pieces"))
            elif one.hash != other.hash:
                found.append(Difference(name, "changed", f"or only hashed with {other.hash}"))
            elif mine != theirs:
                found.append(Difference(name, "changed"))
    return found

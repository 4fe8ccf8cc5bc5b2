"""manifest.json: what a checkpoint holds, and the hashes that prove it (docs/guides/checkpoint.md,
Format). Plain JSON; read strictly, since it may come from anywhere.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ffs.checkpoint.dtypes import DTYPE_BYTES
from ffs.checkpoint.shard import TensorSpec
from ffs.errors import Damaged, VersionMismatch

FILE_NAME = "manifest.json"
FORMAT = "ffs-checkpoint"
VERSION = 1
HASH = "blake3"


class Shard(msgspec.Struct, frozen=True):
    """One safetensors file of the checkpoint. `bytes` is its whole length."""

    file: str
    bytes: int


class Tensor(msgspec.Struct, frozen=True):
    """One tensor. `offset` is in bytes from the start of the file `shards[shard]`; `hash` is the
    BLAKE3 of its bytes as 64 hex digits; `framework` is where it came from ("torch", "numpy")."""

    shard: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    hash: str
    framework: Literal["torch", "numpy"] = "torch"

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, self.dtype, self.shape)


class Manifest(msgspec.Struct, frozen=True):
    """A whole checkpoint. `tied` maps each further name of a tensor to the one that is stored."""

    shards: tuple[Shard, ...]
    tensors: dict[str, Tensor]
    tied: dict[str, str] = {}
    format: str = FORMAT
    version: int = VERSION
    hash: str = HASH

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(tensor.bytes for tensor in self.tensors.values())


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def decode(data: bytes, where: str) -> Manifest:
    """Reads and checks a manifest; `where` is its path, for the message. Raises Damaged, VersionMismatch."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise Damaged(f"{where}: not the manifest of an ffs checkpoint (its format is {head.format!r})")
        if head.version > VERSION:
            raise VersionMismatch(
                f"{where}: written as version {head.version}, this ffs reads up to {VERSION}: update ffs"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise Damaged(f"{where}: not a manifest: {error}") from error
    _check(manifest, where)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    def need(condition: bool, *what: Any) -> None:
        if not condition:
            raise Damaged(f"{where}: damaged: " + " ".join(str(word) for word in what))

    need(manifest.hash == HASH, "unknown hash", repr(manifest.hash))
    for shard in manifest.shards:
        plain = shard.file not in ("", ".", "..") and "/" not in shard.file and "\0" not in shard.file
        need(plain, "shard file", repr(shard.file), "isn't a plain name")
        need(shard.bytes >= 0, "shard", repr(shard.file), "has a negative length")
    for name, tensor in manifest.tensors.items():
        need(0 <= tensor.shard < len(manifest.shards), repr(name), "names a shard that isn't there")
        need(tensor.dtype in DTYPE_BYTES, repr(name), "has the unknown element type", tensor.dtype)
        need(all(extent >= 0 for extent in tensor.shape), repr(name), "has a negative extent")
        need(tensor.spec(name).nbytes == tensor.bytes, repr(name), "has a length that contradicts its shape")
        end = tensor.offset + tensor.bytes
        need(
            tensor.offset >= 0 and end <= manifest.shards[tensor.shard].bytes,
            repr(name),
            "lies outside its shard",
        )
        need(len(tensor.hash) == 64, repr(name), "has no BLAKE3")
    for alias, kept in manifest.tied.items():
        need(kept in manifest.tensors, repr(alias), "is tied to", repr(kept), "which isn't there")
        need(alias not in manifest.tensors, repr(alias), "is both stored and tied")

"""manifest.json: what a checkpoint holds, and the hashes that prove it (docs/guides/checkpoint.md,
Format). Plain JSON; read strictly, since it may come from anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ffs.checkpoint.dtypes import DTYPE_BYTES
from ffs.checkpoint.hashing import DIGITS
from ffs.checkpoint.plan import Box, meets, volume
from ffs.checkpoint.shard import TensorSpec
from ffs.errors import Damaged, VersionMismatch

FILE_NAME = "manifest.json"
FORMAT = "ffs-checkpoint"
VERSION = 2  # since a manifest may name another hash than BLAKE3


class Shard(msgspec.Struct, frozen=True, gc=False):
    """One safetensors file of the checkpoint. `bytes` is its whole length. `linked`: it is the file of an
    earlier checkpoint under a further name."""

    file: str
    bytes: int
    linked: bool = False


class Part(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A box of a tensor. `offset` is in bytes from the start of the file `shards[shard]`; `hash` is that of
    its bytes, by the manifest's algorithm, in hex digits. `begin` and `extent`, in elements along each
    dimension, are absent where the part is the whole tensor."""

    shard: int
    offset: int
    bytes: int
    hash: str
    begin: tuple[int, ...] | None = None
    extent: tuple[int, ...] | None = None


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor, its whole shape, and where its parts are; `framework` is where it came from."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    framework: Literal["torch", "numpy"] = "torch"

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, self.dtype, self.shape)

    def box_of(self, part: Part) -> Box:
        if part.begin is None or part.extent is None:
            return (0,) * len(self.shape), self.shape
        return part.begin, part.extent

    @property
    def bytes(self) -> int:
        return volume(self.shape) * DTYPE_BYTES[self.dtype]


class Manifest(msgspec.Struct, frozen=True):
    """A whole checkpoint. `tied` maps each further name of a tensor to the one that is stored. `tree` is the
    state's structure and plain values (ffs.checkpoint.state); None: a flat dict of tensors."""

    shards: tuple[Shard, ...]
    tensors: dict[str, Tensor]
    tied: dict[str, str] = {}
    tree: Any = None
    step: int | None = None
    ranks: int = 1
    format: str = FORMAT
    version: int = 1
    hash: str = "blake3"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(tensor.bytes for tensor in self.tensors.values())


def version_of(algorithm: str) -> int:
    """Of a manifest with hashes of that algorithm: older programs refuse by it what they can't verify."""
    return 1 if algorithm == "blake3" else 2


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
    check(manifest, where)
    return manifest


def check(manifest: Manifest, where: str) -> None:
    """Raises Damaged, saying what contradicts what."""

    def need(condition: bool, *what: Any) -> None:
        if not condition:
            raise Damaged(f"{where}: damaged: " + " ".join(str(word) for word in what))

    need(manifest.hash in DIGITS, "unknown hash", repr(manifest.hash))
    need(manifest.version >= version_of(manifest.hash), "its version has no hash", repr(manifest.hash))
    for shard in manifest.shards:
        plain = shard.file not in ("", ".", "..") and "/" not in shard.file and "\0" not in shard.file
        need(plain, "shard file", repr(shard.file), "isn't a plain name")
        need(shard.bytes >= 0, "shard", repr(shard.file), "has a negative length")
    digits = DIGITS[manifest.hash]
    sizes = [shard.bytes for shard in manifest.shards]
    for name, tensor in manifest.tensors.items():
        if _in_slices(sizes, tensor, digits):
            continue
        wrong = _wrong_tensor(manifest.shards, tensor, digits)
        if wrong:
            need(False, repr(name), wrong)
    for alias, kept in manifest.tied.items():
        need(kept in manifest.tensors, repr(alias), "is tied to", repr(kept), "which isn't there")
        need(alias not in manifest.tensors, repr(alias), "is both stored and tied")


def _in_slices(sizes: Sequence[int], tensor: Tensor, digits: int) -> bool:
    """Whether its parts are slices along the first dimension, one behind the other, and all is right: so are
    nearly all of those of ranks, thousands of which are looked at while somebody waits for a load."""
    shape, at = tensor.shape, 0
    if not shape or tensor.dtype not in DTYPE_BYTES:
        return False
    rest, zeros = shape[1:], (0,) * (len(shape) - 1)
    row = volume(rest) * DTYPE_BYTES[tensor.dtype]
    if min(shape) < 0:
        return False
    for part in tensor.parts:
        begin, extent, offset, size = part.begin, part.extent, part.offset, part.bytes
        if begin is None and extent is None:
            begin, extent = (0, *zeros), shape
        if begin != (at, *zeros) or not extent or extent[1:] != rest:
            return False
        rows = extent[0]
        if rows < 0 or size != rows * row or len(part.hash) != digits:
            return False
        if offset < 0 or not 0 <= part.shard < len(sizes) or offset + size > sizes[part.shard]:
            return False
        at += rows
    return bool(tensor.parts) and at == shape[0]


def _wrong_tensor(shards: Sequence[Shard], tensor: Tensor, digits: int) -> str:
    """What contradicts what; "" if nothing does. Of thousands of parts, while somebody waits for a load."""
    if tensor.dtype not in DTYPE_BYTES:
        return f"has the unknown element type {tensor.dtype}"
    if any(extent < 0 for extent in tensor.shape):
        return "has a negative extent"
    boxes = []
    for part in tensor.parts:
        wrong = _wrong_part(shards, tensor, part, digits)
        if wrong:
            return wrong
        boxes.append(tensor.box_of(part))
    return covers(tensor.shape, boxes)


def _wrong_part(shards: Sequence[Shard], tensor: Tensor, part: Part, digits: int) -> str:
    if not 0 <= part.shard < len(shards):
        return "names a shard that isn't there"
    begin, extent = part.begin, part.extent
    if (begin is None) != (extent is None):
        return "has half a box"
    shape = tensor.shape
    if begin is None or extent is None:
        extent = shape
    elif not len(begin) == len(extent) == len(shape):
        return "has a part of another number of dimensions"
    else:
        for b, e, s in zip(begin, extent, shape, strict=True):
            if b < 0 or e < 0 or b + e > s:
                return "has a part beyond its shape"
    if volume(extent) * DTYPE_BYTES[tensor.dtype] != part.bytes:
        return "has a length that contradicts its shape"
    if part.offset < 0 or part.offset + part.bytes > shards[part.shard].bytes:
        return "lies outside its shard"
    return "" if len(part.hash) == digits else "has a hash of another length"


def covers(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """What is wrong with these boxes, inside of the shape, as parts of a tensor; "" if each element is in
    exactly one."""
    if sum(volume(extent) for _, extent in boxes) != volume(shape):
        return "lacks some of its elements" if boxes else "has no parts"
    if not boxes:
        return "has no parts"
    if len(boxes) > 1 and shape:
        # Sorted along the first dimension, only those that begin before another ends can overlap it.
        ordered = sorted(boxes)
        for at, box in enumerate(ordered):
            for other in ordered[at + 1 :]:
                if other[0][0] >= box[0][0] + box[1][0]:
                    break
                if meets(box, other) is not None:
                    return "has parts that overlap"
    return ""

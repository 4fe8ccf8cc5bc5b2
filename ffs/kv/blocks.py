"""Where the blocks of a call lie in the caller's memory (docs/guides/kv.md, Memory).

Two ways. *Shared*: slices of an Iov, which the storage servers read and write themselves: nothing is
copied here. *Private*: any other buffers, which are copied through a staging Iov of the ring. Pure but
for those copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ffs._native.iov import Iov, IovSlice
from ffs.errors import InvalidArgument
from ffs.kv.geometry import Piece


@dataclass(frozen=True, slots=True)
class Places:
    """Blocks at these byte offsets of an Iov, for any number of them without Python for each. `lengths`:
    bytes of each, or of all; None: as many as the call takes."""

    iov: Iov
    offsets: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.integer] | int | None = None


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Blocks in Iovs: by block the Iov's handle, the offset in it and the length, all in bytes.
    `keep` holds the Iovs alive for as long as the call lasts. `foreign`: they lie over memory
    that somebody else has made (docs/ring.md, Landing)."""

    handles: npt.NDArray[np.uint64]
    offsets: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int64]
    keep: Sequence[Any]
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class PrivateBlocks:
    """Blocks in memory that only this process sees."""

    views: list[memoryview]
    lengths: npt.NDArray[np.int64]


Blocks = SharedBlocks | PrivateBlocks


def look_at(blocks: object, count: int, block_bytes: int, *, writable: bool) -> Blocks:
    """Understands what the caller gave for `count` blocks of at most `block_bytes`.

    An Iov or IovSlice holds them one after the other, `block_bytes` apart; Places say where in an Iov; a
    sequence holds one slice or buffer a block. InvalidArgument or TypeError says what doesn't fit.
    """
    if isinstance(blocks, SharedBlocks):
        return _given(blocks, count, block_bytes, writable)
    if isinstance(blocks, Places):
        return _placed(blocks, count, block_bytes, writable)
    if isinstance(blocks, Iov):
        blocks = blocks[0 : len(blocks)]
    if isinstance(blocks, IovSlice):
        return _consecutive(blocks, count, block_bytes)
    if not isinstance(blocks, Sequence) or isinstance(blocks, bytes | bytearray | memoryview | str):
        raise TypeError(
            f"blocks are an Iov, a slice of one, Places in one, or a list of slices or buffers, not"
            f" {type(blocks).__name__}"
        )
    if len(blocks) != count:
        raise InvalidArgument(f"{count} keys and {len(blocks)} blocks: give one for each key")
    if blocks and all(isinstance(block, IovSlice) for block in blocks):
        return _shared(blocks, block_bytes, writable)
    return _private(blocks, block_bytes, writable)


def _given(blocks: SharedBlocks, count: int, block_bytes: int, writable: bool) -> SharedBlocks:
    """Of who knows the Iovs already (ffs.kv.serving); bounds of the Iovs are native's to check."""
    if len(blocks.lengths) != count:
        raise InvalidArgument(f"{count} keys and {len(blocks.lengths)} blocks: give one for each key")
    wrong = (
        (blocks.lengths < block_bytes) if writable else (blocks.lengths < 1) | (blocks.lengths > block_bytes)
    )
    if wrong.any():
        position = int(np.flatnonzero(wrong)[0])
        _check_length(position, int(blocks.lengths[position]), block_bytes, writable)
    if not writable or (blocks.lengths == block_bytes).all():
        return blocks
    return SharedBlocks(
        blocks.handles,
        blocks.offsets,
        np.minimum(blocks.lengths, block_bytes),
        blocks.keep,
        blocks.foreign,
    )


def _consecutive(whole: IovSlice, count: int, block_bytes: int) -> SharedBlocks:
    if whole.length < count * block_bytes:
        raise InvalidArgument(
            f"the Iov slice holds {whole.length} bytes, "
            f"{count} blocks of {block_bytes} need {count * block_bytes}"
        )
    offsets = np.uint64(whole.offset) + np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
    return SharedBlocks(
        handles=np.full(count, whole.iov.handle, dtype=np.uint64),
        offsets=offsets,
        lengths=np.full(count, block_bytes, dtype=np.int64),
        keep=(whole,),
    )


def _placed(places: Places, count: int, block_bytes: int, writable: bool) -> SharedBlocks:
    size = len(places.iov)
    offsets = _numbers("offsets", places.offsets, count)
    if places.lengths is None:
        lengths = np.full(count, block_bytes, dtype=np.int64)
    else:
        lengths = _numbers("lengths", places.lengths, count)
        wrong = (lengths < block_bytes) if writable else (lengths < 1) | (lengths > block_bytes)
        if wrong.any():
            position = int(wrong.argmax())
            _check_length(position, int(lengths[position]), block_bytes, writable)
    if count and (offsets.min() < 0 or (offsets + lengths).max() > size):
        position = int(((offsets < 0) | (offsets + lengths > size)).argmax())
        raise InvalidArgument(
            f"place {position}: {lengths[position]} bytes from {offsets[position]} on aren't within the Iov"
            f" of {size} bytes"
        )
    return SharedBlocks(
        handles=np.full(count, places.iov.handle, dtype=np.uint64),
        offsets=offsets.view(np.uint64),
        lengths=np.minimum(lengths, block_bytes) if writable and places.lengths is not None else lengths,
        keep=(places,),
    )


def _numbers(name: str, values: npt.NDArray[np.integer] | int, count: int) -> npt.NDArray[np.int64]:
    """As int64, one for each of `count`. A number is for all."""
    if isinstance(values, int):
        return np.full(count, values, dtype=np.int64)
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or array.shape != (count,):
        raise InvalidArgument(
            f"{name} of Places are integers, one for each of {count} keys, not {array.dtype} {array.shape}"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_length(position: int, length: int, block_bytes: int, writable: bool) -> None:
    if writable and length < block_bytes:
        raise InvalidArgument(f"destination {position} holds {length} bytes, a block may have {block_bytes}")
    if not writable and not 0 < length <= block_bytes:
        raise InvalidArgument(f"block {position} has {length} bytes: the space takes 1 to {block_bytes}")


def _shared(slices: Sequence[IovSlice], block_bytes: int, writable: bool) -> SharedBlocks:
    for position, piece in enumerate(slices):
        _check_length(position, piece.length, block_bytes, writable)
    lengths = np.array([piece.length for piece in slices], dtype=np.int64)
    return SharedBlocks(
        handles=np.array([piece.iov.handle for piece in slices], dtype=np.uint64),
        offsets=np.array([piece.offset for piece in slices], dtype=np.uint64),
        lengths=np.minimum(lengths, block_bytes) if writable else lengths,
        keep=slices,
    )


def _private(buffers: Sequence[Any], block_bytes: int, writable: bool) -> PrivateBlocks:
    views = []
    for position, buffer in enumerate(buffers):
        try:
            view = memoryview(buffer.view if isinstance(buffer, IovSlice) else buffer).cast("B")
        except TypeError as error:
            raise TypeError(
                f"block {position} ({type(buffer).__name__}) isn't contiguous memory: give bytes, "
                f"a numpy array, tensor.numpy() or a slice of an Iov ({error})"
            ) from error
        if writable and view.readonly:
            raise TypeError(f"destination {position} is read-only memory")
        _check_length(position, len(view), block_bytes, writable)
        views.append(view)
    lengths = np.array([len(view) for view in views], dtype=np.int64)
    return PrivateBlocks(views, np.minimum(lengths, block_bytes) if writable else lengths)


def cut(blocks: Blocks, pieces: Sequence[Piece]) -> Blocks:
    """The same memory by piece, in the order of block, then piece; one piece is all of a block."""
    if len(pieces) == 1:
        return blocks
    lengths = np.tile(np.array([piece.length for piece in pieces], dtype=np.int64), len(blocks.lengths))
    if isinstance(blocks, PrivateBlocks):
        views = [view[piece.at : piece.at + piece.length] for view in blocks.views for piece in pieces]
        return PrivateBlocks(views, lengths)
    at = np.tile(np.array([piece.at for piece in pieces], dtype=np.uint64), len(blocks.lengths))
    return SharedBlocks(
        handles=np.repeat(blocks.handles, len(pieces)),
        offsets=np.repeat(blocks.offsets, len(pieces)) + at,
        lengths=lengths,
        keep=blocks.keep,
        foreign=blocks.foreign,
    )

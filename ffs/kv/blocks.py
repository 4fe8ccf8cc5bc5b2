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


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Blocks in Iovs: by block the Iov's handle, the offset in it and the length, all in bytes.
    `keep` holds the Iovs alive for as long as the call lasts."""

    handles: npt.NDArray[np.uint64]
    offsets: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int64]
    keep: Sequence[Any]


@dataclass(frozen=True, slots=True)
class PrivateBlocks:
    """Blocks in memory that only this process sees."""

    views: list[memoryview]
    lengths: npt.NDArray[np.int64]


Blocks = SharedBlocks | PrivateBlocks


def look_at(blocks: object, count: int, block_bytes: int, *, writable: bool) -> Blocks:
    """Understands what the caller gave for `count` blocks of at most `block_bytes`.

    An Iov or IovSlice holds them one after the other, `block_bytes` apart; a sequence holds one slice
    or buffer a block. InvalidArgument or TypeError says what doesn't fit.
    """
    if isinstance(blocks, Iov):
        blocks = blocks[0 : len(blocks)]
    if isinstance(blocks, IovSlice):
        return _consecutive(blocks, count, block_bytes)
    if not isinstance(blocks, Sequence) or isinstance(blocks, bytes | bytearray | memoryview | str):
        raise TypeError(
            f"blocks are an Iov, a slice of one, or a list of slices or buffers, not {type(blocks).__name__}"
        )
    if len(blocks) != count:
        raise InvalidArgument(f"{count} keys and {len(blocks)} blocks: give one for each key")
    if blocks and all(isinstance(block, IovSlice) for block in blocks):
        return _shared(blocks, block_bytes, writable)
    return _private(blocks, block_bytes, writable)


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

"""Where bytes lie: (layout, offset, length) -> slices of chunks, and chunk key -> chain.

Pure arithmetic, no I/O. Everything has a scalar form and, for thousands at once, an array form;
the two are tested against each other, and `tests/golden/placement.json` pins the results for ever:
no release may place a key elsewhere. docs/metadata.md, Placement.

A file's chunk key is 8 zero bytes and the chunk index, big endian. A KV block's chunk key is the first
half of its hash. Both go the same way through `Placement`:

    seed -> start = mix(seed, 1) mod n             n chains in the table, in its order
            step  = 1 + mix(seed, 2) mod (n - 1)   raised, wrapping from n to 1, until gcd(step, n) = 1
    key  -> slot  = (mix64(high 8 bytes) + low 8 bytes mod 2^64) mod stripe     (mix64(0) = 0)
    chain = chains[(start + slot * step) mod n]

so consecutive chunks of a file go round its stripe, distinct slots are distinct chains, and the
chains of a stripe differ from file to file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ffs.errors import InvalidArgument, TooLarge

__all__ = [
    "Layout",
    "Placement",
    "Slice",
    "SliceArrays",
    "check_layout",
    "chunk_slices",
    "chunk_slices_array",
    "file_chunk_key",
    "file_chunk_keys",
    "mix64",
    "splitmix64",
]

_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_GAMMA: Final = 0x9E37_79B9_7F4A_7C15
MAX_FILE_BYTES: Final = 1 << 62  # offsets stay in i64 with room to add
MIN_CHUNK_BYTES: Final = 4096
MAX_CHUNK_BYTES: Final = 16 * 1024 * 1024


class Layout(Struct, array_like=True, frozen=True, gc=False):
    """Where the chunks of a file or KV space lie; part of its inode, fixed at creation.

    Stored and sent as ffs.proto.common says: an array, fields appended only."""

    table: int  # chain table id
    table_version: int
    seed: int  # u64: which chains, and from which one on
    chunk_size: int  # bytes, a power of two, 4 KiB .. 16 MiB
    stripe: int = 0  # how many chains are used; 0: all of the table


def mix64(x: int) -> int:
    """The finaliser of splitmix64: a bijection of u64 that sends 0 to 0."""
    x ^= x >> 30
    x = x * 0xBF58_476D_1CE4_E5B9 & _MASK
    x ^= x >> 27
    x = x * 0x94D0_49BB_1331_11EB & _MASK
    return x ^ (x >> 31)


def splitmix64(seed: int, n: int) -> int:
    """The n-th output (n >= 1) of the generator splitmix64 from `seed`."""
    return mix64((seed + n * _GAMMA) & _MASK)


def check_layout(layout: Layout, chains: int) -> None:
    """Raises InvalidArgument, naming the field and the way out, if no file can have this layout in a
    table of `chains` chains."""
    size = layout.chunk_size
    if not MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES or size & (size - 1):
        raise InvalidArgument(
            f"chunk size {size}: give a power of two from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} bytes"
        )
    if chains < 1:
        raise InvalidArgument(f"chain table {layout.table} has no chains: add storage servers first")
    if not 0 <= layout.stripe <= chains:
        raise InvalidArgument(
            f"stripe {layout.stripe}: chain table {layout.table} has {chains} chains; give 0 (all) or fewer"
        )
    if not 0 <= layout.seed <= _MASK:
        raise InvalidArgument(f"layout seed {layout.seed} isn't a u64")


# --- slices ---------------------------------------------------------------------------------


class Slice(NamedTuple):
    """A piece of a request that lies in one chunk."""

    chunk: int  # its index in the file
    offset: int  # in the chunk, bytes
    length: int  # bytes
    position: int  # in the request's buffer, bytes


def chunk_slices(chunk_size: int, offset: int, length: int) -> list[Slice]:
    """The slices of [offset, offset + length), in order; none for length 0.

    Raises InvalidArgument for negative values, TooLarge for an end above 2^62."""
    if offset < 0 or length < 0:
        raise InvalidArgument(f"offset {offset}, length {length}: neither may be negative")
    if offset + length > MAX_FILE_BYTES:
        raise TooLarge(f"a file ends at {MAX_FILE_BYTES} bytes; {offset} + {length} is beyond")
    slices = []
    position = 0
    index, inside = divmod(offset, chunk_size)
    while position < length:
        piece = min(chunk_size - inside, length - position)
        slices.append(Slice(index, inside, piece, position))
        position += piece
        index += 1
        inside = 0
    return slices


@dataclass(frozen=True, slots=True)
class SliceArrays:
    """Slices of many requests, in order of request, then of offset. All of one length, int64."""

    request: NDArray[np.int64]  # which request
    chunk: NDArray[np.int64]  # its index in the file
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    position: NDArray[np.int64]


def chunk_slices_array(
    chunk_size: int, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> SliceArrays:
    """`chunk_slices` of many requests at once; same errors."""
    offsets = np.asarray(offsets, dtype=np.int64)
    lengths = np.asarray(lengths, dtype=np.int64)
    if offsets.shape != lengths.shape or offsets.ndim != 1:
        raise InvalidArgument(f"offsets {offsets.shape} and lengths {lengths.shape} must be equal vectors")
    if (offsets < 0).any() or (lengths < 0).any():
        raise InvalidArgument("an offset or length is negative")
    if (offsets > MAX_FILE_BYTES - lengths).any():
        raise TooLarge(f"a file ends at {MAX_FILE_BYTES} bytes; a request goes beyond")
    shift = chunk_size.bit_length() - 1
    first = offsets >> shift
    counts = np.where(lengths > 0, ((offsets + lengths - 1) >> shift) - first + 1, 0)
    request = np.repeat(np.arange(len(offsets), dtype=np.int64), counts)
    nth = np.arange(len(request), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    index = first[request] + nth
    begin = np.maximum(index << shift, offsets[request])
    end = np.minimum((index + 1) << shift, (offsets + lengths)[request])
    return SliceArrays(request, index, begin - (index << shift), end - begin, begin - offsets[request])


# --- keys and chains ------------------------------------------------------------------------


def file_chunk_key(index: int) -> bytes:
    """The 16-byte key of chunk `index` of a file."""
    return index.to_bytes(16, "big")


def file_chunk_keys(indexes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The keys of many chunks: uint8 of shape (n, 16)."""
    keys = np.zeros((len(indexes), 2), dtype=">u8")
    keys[:, 1] = indexes
    return keys.view(np.uint8).reshape(len(indexes), 16)


class Placement:
    """A layout over the chains of its table version: which chain has which key. Immutable."""

    __slots__ = ("_order", "_order_array", "layout", "stripe")

    def __init__(self, layout: Layout, chains: Sequence[int]) -> None:
        """`chains`: ids in the table's order. Raises InvalidArgument as check_layout does."""
        check_layout(layout, len(chains))
        n = len(chains)
        self.layout = layout
        self.stripe = layout.stripe or n
        start = splitmix64(layout.seed, 1) % n
        step = _step(splitmix64(layout.seed, 2), n)
        self._order = [chains[(start + slot * step) % n] for slot in range(self.stripe)]
        self._order_array = np.array(self._order, dtype=np.uint32)

    @property
    def chains(self) -> list[int]:
        """The chains in use, by slot."""
        return list(self._order)

    @property
    def order(self) -> NDArray[np.uint32]:
        """The chain of a file's chunk index, modulo the number of slots. Not to be changed."""
        return self._order_array

    def chain_of(self, key: bytes) -> int:
        """The chain of a 16-byte chunk key."""
        high = int.from_bytes(key[:8], "big")
        low = int.from_bytes(key[8:], "big")
        return self._order[((mix64(high) + low) & _MASK) % self.stripe]

    def chain_of_index(self, index: int) -> int:
        """chain_of(file_chunk_key(index))."""
        return self._order[index % self.stripe]

    def chains_of(self, keys: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """The chains of many keys, uint8 of shape (n, 16)."""
        words = np.ascontiguousarray(keys, dtype=np.uint8).reshape(-1, 16).view(">u8").astype(np.uint64)
        slots = (_mix64_array(words[:, 0]) + words[:, 1]) % np.uint64(self.stripe)
        chains: NDArray[np.uint32] = self._order_array[slots]
        return chains

    def chains_of_indexes(self, indexes: NDArray[np.int64]) -> NDArray[np.uint32]:
        """The chains of many chunk indexes of a file."""
        chains: NDArray[np.uint32] = self._order_array[np.asarray(indexes, dtype=np.int64) % self.stripe]
        return chains


def first_chain(layout: Layout, chains: Sequence[int]) -> int:
    """Placement(layout, chains).chain_of_index(0), for who reads no further. The layout was checked."""
    return chains[splitmix64(layout.seed, 1) % len(chains)]


def _step(draw: int, n: int) -> int:
    if n == 1:
        return 1
    step = 1 + draw % (n - 1)
    while math.gcd(step, n) != 1:
        step = step + 1 if step + 1 < n else 1
    return step


def _mix64_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))

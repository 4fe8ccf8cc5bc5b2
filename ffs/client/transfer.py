"""Moving bytes between chunks and a caller's buffer, many chunks at once. docs/client.md, Data path.

A transfer is cut into pieces, one a chunk; as many are in flight as staging memory and ring hold,
and each is copied when it completes, so that copying and moving overlap. The functions block
their thread; several threads transfer at once on rings of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ffs._native.device_memory import device_error, is_device_fault
from ffs._native.file_entries import FileEntries
from ffs._native.ring import (
    OP_READ,
    OP_WRITE,
    SQE_ZERO_FILL,
    WAIT_NEEDS_CAPABILITY,
    WAIT_NEEDS_ROUTING,
    error_of_cqe,
)
from ffs.client.rings import ENTRIES
from ffs.errors import ChainUnavailable, FfsError, ProtocolError
from ffs.layout import Placement, file_chunk_key

if TYPE_CHECKING:
    from ffs.client.rings import RingPool, StagedRing

READ_PIECE_BYTES = 4 << 20
"""The largest piece of a read, a power of two. A write's piece is a whole chunk, which servers like best."""

PAGE_BYTES = 4096
"""Reads are widened to whole pages: on the same host a server can then write into our memory itself."""


class Upkeep(Protocol):
    """What a transfer asks of its session while requests wait."""

    def want_routing(self) -> None:
        """Have newer routing given to native as soon as there is some. Returns at once."""

    def want_renewal(self, native_id: int) -> None:
        """Have a capability renewed and given to native. Returns at once."""

    def renewal_failure(self, native_id: int) -> FfsError | None:
        """Why the service refused to."""

    def describe_chain(self, chain: int) -> str:
        """For an error: the chain's members and their states."""

    def describe_target(self, target: int) -> str:
        """For an error: the target's server and its address."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What one transfer touches: a file's chunks, under which right and epoch."""

    ino: int
    placement: Placement
    capability: int
    epoch: int
    entries: FileEntries
    """The same as C takes it."""


def extent_of(ino: int, placement: Placement, capability: int, epoch: int) -> Extent:
    entries = FileEntries(
        inode=ino,
        capability=capability,
        epoch=epoch,
        chunk_size=placement.layout.chunk_size,
        chains=placement.order,
    )
    return Extent(ino, placement, capability, epoch, entries)


class _Piece(NamedTuple):
    chunk: int
    offset: int  # in the chunk
    length: int
    position: int  # in the caller's buffer


def read(pool: RingPool, upkeep: Upkeep, extent: Extent, offset: int, out: NDArray[np.uint8]) -> None:
    """Fill `out` from byte `offset` of the file; holes read as zeros.

    Raises the first failure of a chunk, after all requests in flight are over.
    """
    chunk_size = extent.placement.layout.chunk_size
    if _is_one_piece(min(chunk_size, READ_PIECE_BYTES), offset, len(out)):
        _raise(_read_one(pool, upkeep, extent, offset, out))
        return
    pieces = _cut(chunk_size, offset, len(out), READ_PIECE_BYTES)
    piece_bytes = min(extent.placement.layout.chunk_size, READ_PIECE_BYTES, len(out) + 2 * PAGE_BYTES)
    _raise(_carry_out(pool, upkeep, extent, out, piece_bytes, pieces, writing=False))


def write(pool: RingPool, upkeep: Upkeep, extent: Extent, offset: int, data: NDArray[np.uint8]) -> None:
    """Write `data` at byte `offset` of the file; on return it is durable on every replica.

    Raises the first failure of a chunk, after all requests in flight are over: other chunks may
    have been written then.
    """
    chunk_size = extent.placement.layout.chunk_size
    pieces = _cut(chunk_size, offset, len(data), chunk_size)
    piece_bytes = min(chunk_size, max(len(data), 1))
    _raise(_carry_out(pool, upkeep, extent, data, piece_bytes, pieces, writing=True))


def _is_one_piece(most: int, offset: int, length: int) -> bool:
    """Whether `_cut` gives one piece. most: of a piece, a power of two."""
    return 0 < length <= most - offset % most


def _read_one(
    pool: RingPool, upkeep: Upkeep, extent: Extent, offset: int, out: NDArray[np.uint8]
) -> FfsError | None:
    """As a transfer of one piece, at a third of its cost."""
    index, inside = divmod(offset, extent.placement.layout.chunk_size)
    low, size = _widen(_Piece(index, inside, len(out), 0))
    refusal: FfsError | None = None

    def see_to(needs: int) -> None:
        nonlocal refusal
        if needs & WAIT_NEEDS_CAPABILITY:
            refusal = refusal or upkeep.renewal_failure(extent.capability)
            upkeep.want_renewal(extent.capability)
        if needs & WAIT_NEEDS_ROUTING:
            upkeep.want_routing()

    staged = pool.lend()
    try:
        staged.reserve(size)
        ring = staged.ring
        moved = ring.move(extent.entries, OP_READ, SQE_ZERO_FILL, index, low, size, staged.iov, see_to)
        if refusal is not None:
            failure = refusal
        elif moved < 0:
            failure = error_of_completion(ring.moved, upkeep)
        elif moved != size:
            failure = _short(index, moved, size)
        else:
            failure = None
            out[:] = staged.memory[inside - low : inside - low + len(out)]
    except BaseException:
        staged.close()  # the request may be in flight still
        raise
    pool.give_back(staged)
    return failure


def _short(chunk: int, moved: int, size: int) -> FfsError:
    return ProtocolError(f"chunk {chunk}: {moved} of {size} bytes were moved without an error")


def _carry_out(
    pool: RingPool,
    upkeep: Upkeep,
    extent: Extent,
    data: NDArray[np.uint8],
    piece_bytes: int,
    pieces: list[_Piece],
    *,
    writing: bool,
) -> FfsError | None:
    place_bytes = -(-piece_bytes // PAGE_BYTES) * PAGE_BYTES
    with pool.take(max(len(data), place_bytes)) as staged:  # a place may be more than all of the data
        return _Transfer(staged, upkeep, extent, data, place_bytes, writing=writing).run(pieces)


class _Describer(Protocol):
    def describe_chain(self, chain: int) -> str: ...

    def describe_target(self, target: int) -> str: ...


def error_of_completion(completion: np.void, describer: _Describer) -> FfsError:
    """The error of a failed completion; of a chain that is down with what its members do, of memory of a
    device with the server and the way to it, both with the way out."""
    if is_device_fault(completion):
        return device_error(completion, describer.describe_target(int(completion["value"])))
    error = error_of_cqe(completion)
    if isinstance(error, ChainUnavailable) and completion["chain"]:
        chain = describer.describe_chain(int(completion["chain"]))
        return ChainUnavailable(
            f"no replica serves {chain}. It works again by itself when one of them is back: start its"
            " storage server; `ffs cluster chains` shows them",
            errno=error.errno,
        )
    return error


def _raise(failure: FfsError | None) -> None:
    # Not where the caller's buffer is a local: frame and error refer to each other, and a buffer that
    # such a ring keeps can't be resized by its owner.
    if failure is not None:
        try:
            raise failure
        finally:
            del failure


def _cut(chunk_size: int, offset: int, length: int, most: int) -> list[_Piece]:
    """The pieces of [offset, offset + length), in order: cut at the borders of chunks and, within them,
    at multiples of `most` bytes."""
    pieces: list[_Piece] = []
    position = 0
    chunk, inside = divmod(offset, chunk_size)
    while position < length:
        size = min(chunk_size - inside, length - position, most - inside % most)
        pieces.append(_Piece(chunk, inside, size, position))
        position += size
        inside += size
        if inside == chunk_size:
            chunk, inside = chunk + 1, 0
    return pieces


def _widen(piece: _Piece) -> tuple[int, int]:
    """Offset and length, in its chunk, of the whole pages that a piece of a read lies in."""
    low = piece.offset - piece.offset % PAGE_BYTES
    high = piece.offset + piece.length
    return low, high + -high % PAGE_BYTES - low


class _Transfer:
    """One transfer on one ring. The staging memory is cut into places of one piece each."""

    def __init__(
        self,
        staged: StagedRing,
        upkeep: Upkeep,
        extent: Extent,
        data: NDArray[np.uint8],
        place_bytes: int,
        *,
        writing: bool,
    ) -> None:
        self._staged = staged
        self._upkeep = upkeep
        self._extent = extent
        self._data = data
        self._writing = writing
        self._place_bytes = place_bytes
        self._failure: FfsError | None = None

    def run(self, pieces: list[_Piece]) -> FfsError | None:
        """Returns the first failure; the ring is quiet then."""
        places = min(len(self._staged.memory) // self._place_bytes, ENTRIES, len(pieces))
        free = list(range(places))
        flying: dict[int, _Piece] = {}
        waiting = iter(pieces)
        piece = next(waiting, None)
        while flying or piece is not None:
            while free and piece is not None:
                place = free.pop()
                flying[place] = piece
                self._prepare(place, piece)
                piece = next(waiting, None)
            for place in self._wait(flying):
                del flying[place]
                free.append(place)
            if self._failure is not None:
                piece = None
        return self._failure

    def _prepare(self, place: int, piece: _Piece) -> None:
        staged, extent = self._staged, self._extent
        start = place * self._place_bytes
        if self._writing:
            low, size = piece.offset, piece.length
            staged.memory[start : start + size] = self._data[piece.position : piece.position + size]
        else:
            low, size = _widen(piece)
        staged.ring.prepare_one(
            OP_WRITE if self._writing else OP_READ,
            extent.placement.chain_of_index(piece.chunk),
            extent.capability,
            extent.ino.to_bytes(8, "big") + file_chunk_key(piece.chunk),
            low,
            size,
            staged.iov[start : start + size],
            place,
            flags=0 if self._writing else SQE_ZERO_FILL,
            space_epoch=extent.epoch,
        )

    def _wait(self, flying: dict[int, _Piece]) -> list[int]:
        """Wait for at least one completion; returns the places that are free again."""
        completions, events = self._staged.ring.wait(1)
        if events & WAIT_NEEDS_CAPABILITY:
            self._renew()
        if events & WAIT_NEEDS_ROUTING:
            self._upkeep.want_routing()
        places: list[int] = []
        for completion in completions:
            place = int(completion["userdata"])
            self._complete(place, flying[place], completion)
            places.append(place)
        return places

    def _complete(self, place: int, piece: _Piece, completion: np.void) -> None:
        result = int(completion["result"])
        if result < 0:
            if self._failure is None:
                self._failure = error_of_completion(completion, self._upkeep)
            return
        low, size = (piece.offset, piece.length) if self._writing else _widen(piece)
        if result != size:
            if self._failure is None:
                self._failure = _short(piece.chunk, result, size)
            return
        if not self._writing:
            start = place * self._place_bytes + piece.offset - low
            out = self._data[piece.position : piece.position + piece.length]
            out[:] = self._staged.memory[start : start + piece.length]

    def _renew(self) -> None:
        # The requests that wait end at their deadline; a refusal is the reason to tell.
        if self._failure is None:
            self._failure = self._upkeep.renewal_failure(self._extent.capability)
        self._upkeep.want_renewal(self._extent.capability)

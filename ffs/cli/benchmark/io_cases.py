"""The cases of the data path: reads and writes of one file through a ring, at a fixed depth."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ffs import Iov
from ffs.cli.benchmark.protocol import Slice
from ffs.client.ior import Ior
from ffs.errors import FfsError, error_of

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

_PIECE = 8 << 20
_HUGE_PAGE = 2 << 20
_MOST_BEHIND_BYTES = 64 << 20
_LEAST_BEHIND = 16


def write_file(client: Client, path: str, size: int, *, table: str, zeros: bool = False) -> None:
    """A file of `size` bytes that don't compress, or `zeros` (null devices have no others), in the chain
    table `table`."""
    rng = np.random.default_rng(3)
    piece = np.zeros(_PIECE, dtype=np.uint8) if zeros else rng.integers(0, 256, _PIECE, dtype=np.uint8)
    with client.open(path, "wb", buffering=0, table=table) as file:
        for _ in range(size // _PIECE):
            file.write(piece.data)


def memory(size: int, *, huge_pages: bool) -> Iov:
    """At least `size` bytes. In huge pages only if asked for: servers aren't lent such an Iov, so that over
    `local` the socket's copy would be measured. FfsError: the machine has too few of them."""
    if not huge_pages:
        return Iov(size)
    return Iov(-(-size // _HUGE_PAGE) * _HUGE_PAGE, hugepages=True)


def held_at(depth: int, block_bytes: int) -> int:
    """Requests that a ring holds of which `depth` are in flight: twice as many, as of a program that works on
    one part of its memory while another part moves, but no more than 64 MiB on top. One at a time is one.
    Pure."""
    if depth == 1:
        return 1
    return depth + min(depth, max(_LEAST_BEHIND, _MOST_BEHIND_BYTES // block_bytes))


class FileLoop:
    """Keeps `depth` requests of `block_bytes` in flight on one file, and goes on when `batch` are over. A
    contestant (protocol.py). The ring bounds what is in flight, and holds more (held_at)."""

    def __init__(
        self,
        ring: Ior,
        file: File,
        block_bytes: int,
        depth: int,
        region_bytes: int,
        *,
        random: bool,
        zeros: bool = False,
        batch: int = 1,
        huge_pages: bool = False,
    ) -> None:
        blocks = np.arange(region_bytes // block_bytes, dtype=np.int64)
        if random:
            np.random.default_rng(4).shuffle(blocks)
        held = held_at(depth, block_bytes)
        self._ring = ring
        self._file = file
        self._block = block_bytes
        self._blocks = len(blocks)
        # Once more from the start, so that what is next is always one slice.
        self._offsets = np.resize(blocks * block_bytes, len(blocks) + held)
        self._lengths = np.full(held, block_bytes, dtype=np.int64)
        self._places: list[int] = self._offsets[: len(blocks)].tolist() if depth == 1 else []
        self._next = 0
        self._iov = memory(held * block_bytes, huge_pages=huge_pages)
        self._batch = batch
        # Touched, so that no page comes into being while something is measured.
        self._iov.numpy()[:] = (
            0 if zeros else np.random.default_rng(5).integers(0, 256, len(self._iov), dtype=np.uint8)
        )
        self._all = np.arange(held, dtype=np.int64)

    def _send(self, places: npt.NDArray[np.int64]) -> None:
        count = len(places)
        offsets = self._offsets[self._next : self._next + count]
        self._next = (self._next + count) % self._blocks
        taken = self._ring.prepare_many(
            self._file, offsets, self._iov, places * self._block, self._lengths[:count], places
        )
        if taken != count:
            raise FfsError(f"the ring took {taken} of {count} requests", errno=errno.ENOBUFS)

    def __call__(self, seconds: float) -> Slice:
        return self._one_by_one(seconds) if len(self._all) == 1 else self._many(seconds)

    def _one_by_one(self, seconds: float) -> Slice:
        """As a program does that has one request at a time: without arrays."""
        begun = time.perf_counter()
        end = begun + seconds
        part = self._iov[0 : self._block]
        done = 0
        while done == 0 or time.perf_counter() < end:
            self._ring.prepare(self._file, self._places[self._next % len(self._places)], part)
            self._next += 1
            for completion in self._ring.wait():
                _check_moved(completion.result, self._block)
            done += 1
        return Slice(done * self._block, time.perf_counter() - begun)

    def _many(self, seconds: float) -> Slice:
        begun = time.perf_counter()
        end = begun + seconds
        self._send(self._all)
        flying = len(self._all)
        done = 0
        while flying:
            places, moved = self._ring.wait_array(min(self._batch, flying))
            _check_moved(int(moved.min()), self._block)
            done += len(places)
            flying -= len(places)
            if time.perf_counter() < end:
                self._send(places.view(np.int64))
                flying += len(places)
        return Slice(done * self._block, time.perf_counter() - begun)


def _check_moved(least: int, block_bytes: int) -> None:
    if least < 0:
        raise error_of(least)
    if least != block_bytes:
        raise FfsError(f"a request moved {least} of {block_bytes} bytes")


@contextmanager
def file_loop(
    client: Client,
    path: str,
    kind: str,
    block_bytes: int,
    depth: int,
    region_bytes: int,
    *,
    random: bool,
    zeros: bool = False,
    batch: int = 1,
    huge_pages: bool = False,
) -> Iterator[FileLoop]:
    """A contestant over the file at `path`, which has at least `region_bytes`."""
    mode = "rb" if kind == "read" else "r+b"
    with client.open(path, mode, buffering=0) as file:
        pieces = max(1, block_bytes // file.placement.layout.chunk_size)  # of a request, one for each chunk
        entries = 1 << (held_at(depth, block_bytes) * pieces - 1).bit_length()
        with Ior(client, entries, kind, inflight=depth * pieces) as ring:
            yield FileLoop(
                ring,
                file,
                block_bytes,
                depth,
                region_bytes,
                random=random,
                zeros=zeros,
                batch=batch,
                huge_pages=huge_pages,
            )

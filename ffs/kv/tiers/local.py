"""The local tier's store: a chunk store on this machine's NVMe, without a server (docs/kv_tiers.md, Local
store). Checksums from memory to device and back, the second half of each key compared; io_uring
underneath."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from ffs._native import local_store as native
from ffs._native.iov import Iov
from ffs.errors import BadHandle, FfsError, InvalidArgument, error_of
from ffs.kv.blocks import Places
from ffs.kv.keys import CHUNK_KEY_BYTES, key_array
from ffs.kv.results import Results, Status

_MISSING: Final = -errno.ENOENT
_MOST_BYTES: Final = 16 << 20


class LocalBlocks:
    """A BlockStore (store.py) on a file of `size_bytes` at `path`, or on a device that was one before. What
    it holds is there again after a restart. Any thread; a put is durable.

    `max_blocks` of a new one, by default as many as fit. `timeout_s` of the calls isn't looked at: a device
    answers or fails. Raises Busy (open elsewhere), InvalidArgument, FfsError."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size_bytes: int,
        block_bytes: int,
        fresh: bool = False,
        sparse: bool = False,
        backend: str = "auto",
    ) -> None:
        if not 0 < block_bytes <= _MOST_BYTES:
            raise InvalidArgument(f"blocks of {block_bytes} bytes: a local store takes 1 to {_MOST_BYTES}")
        self.path = os.fspath(path)
        self.block_bytes = block_bytes
        self._store = native.LocalStore(
            path,
            size_bytes=size_bytes,
            max_chunks=max(1024, 2 * size_bytes // max(4096, block_bytes)),
            backend=backend,
            fresh=fresh,
            sparse=sparse,
        )
        self._gate = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextlib.contextmanager
    def _open(self) -> Iterator[native.LocalStore]:
        """Calls that are under way keep `close` waiting."""
        with self._gate:
            if self._closed:
                raise BadHandle("this local store is closed", self.path)
            self._inside += 1
        try:
            yield self._store
        finally:
            with self._gate:
                self._inside -= 1
                self._gate.notify_all()

    def _entries(self, op: int, keys: Sequence[bytes]) -> npt.NDArray[np.void]:
        hashes = key_array(keys)
        entries = np.zeros(len(hashes), dtype=native.ENTRY_DTYPE)
        entries["op"] = op
        entries["key"] = hashes[:, :CHUNK_KEY_BYTES]
        entries["tag"] = hashes[:, CHUNK_KEY_BYTES:]
        return entries

    def _run(self, entries: npt.NDArray[np.void], well: Status) -> Results:
        with self._open() as store:
            store.run(entries)
        result = entries["result"]
        status = np.full(len(entries), Status.ERROR, dtype=np.uint8)
        status[result >= 0] = well
        status[result == _MISSING] = Status.MISS
        errors: dict[int, FfsError] = {
            at: error_of(int(result[at]), filename=self.path)
            for at in np.flatnonzero(status == Status.ERROR).tolist()
        }
        return Results(status, np.maximum(result, 0).astype(np.int64), errors)

    def _placed(self, op: int, keys: Sequence[bytes], places: Any, well: Status) -> Results:
        if not isinstance(places, Places):
            raise InvalidArgument("a local store takes blocks as ffs.kv.blocks.Places in an Iov")
        entries = self._entries(op, keys)
        memory = np.frombuffer(places.iov.buffer(), dtype=np.uint8)
        try:
            _place(entries, memory, places, self.block_bytes)
            return self._run(entries, well)
        finally:
            del memory  # an exported view would keep the Iov from being closed

    def put_many(self, keys: Sequence[bytes], values: Any, *, timeout_s: float | None = None) -> Results:
        """Stores each block, over whatever is there under its key: STORED or ERROR. Blocking."""
        return self._placed(native.PUT, keys, values, Status.STORED)

    def get_many(self, keys: Sequence[bytes], into: Any, *, timeout_s: float | None = None) -> Results:
        """HIT (verified), MISS or ERROR, as Space.get_many. Blocking."""
        return self._placed(native.READ, keys, into, Status.HIT)

    def exists_many(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        return self._run(self._entries(native.EXISTS, keys), Status.HIT)

    def delete(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """MISS: it isn't there any more, or never was; or ERROR."""
        return self._run(self._entries(native.REMOVE, keys), Status.MISS)

    def blocks(self) -> Iterator[tuple[bytes, int]]:
        """Key and length of each block that it holds."""
        with self._open() as store:
            yield from store.keys()

    def figures(self) -> native.Figures:
        with self._open() as store:
            return store.figures()

    def close(self) -> None:
        """Waits for calls that are under way. Repeatable."""
        with self._gate:
            self._closed = True
            while self._inside:
                self._gate.wait()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _place(
    entries: npt.NDArray[np.void], memory: npt.NDArray[np.uint8], places: Places, block_bytes: int
) -> None:
    """Addresses and lengths, checked: C trusts them."""
    iov: Iov = places.iov
    offsets = np.asarray(places.offsets, dtype=np.int64)
    lengths = np.broadcast_to(
        np.asarray(block_bytes if places.lengths is None else places.lengths, dtype=np.int64), len(entries)
    )
    if len(offsets) != len(entries):
        raise InvalidArgument(f"{len(entries)} keys and {len(offsets)} places: give one for each key")
    if len(entries) and (
        int(offsets.min()) < 0 or int(lengths.min()) < 1 or int((offsets + lengths).max()) > len(iov)
    ):
        raise InvalidArgument(f"places of blocks reach beyond the Iov of {len(iov)} bytes")
    if len(entries) and int(lengths.max()) > _MOST_BYTES:
        raise InvalidArgument(f"a block of {int(lengths.max())} bytes: 1 to {_MOST_BYTES} are taken")
    entries["memory"] = memory.ctypes.data + offsets
    entries["length"] = lengths

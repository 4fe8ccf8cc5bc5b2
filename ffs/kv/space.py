"""A KV space: blocks of a cache by their hash, shared between machines (docs/guides/kv.md).

The space is made once in the namespace. After `open` a get or put of any number of blocks needs no
metadata service: hash -> chain by the layout function, and one round trip to a storage server. Reads
verify checksums and compare the second half of the hash; a put of a block that is there moves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import posixpath
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ffs._native.ring import (
    EXISTS_ENTRY_DTYPE,
    EXISTS_KEY_DTYPE,
    OP_CREATE,
    OP_EXISTS,
    OP_READ,
    SQE_COMPARE_TAG,
    SQE_DTYPE,
    SQE_TOUCH,
    SQE_VERIFY,
    RingStats,
)
from ffs.client.transfer import error_of_completion
from ffs.errors import BadHandle, FfsError, InvalidArgument, NoSpace, QuotaExceeded, TagMismatch
from ffs.kv.batch import BackgroundUpkeep, Batch, Completions, KvRing
from ffs.kv.blocks import PrivateBlocks, SharedBlocks, look_at
from ffs.kv.bounds import Bounds, Usage, bounds_of, set_bounds, ttl_ms, usage_of
from ffs.kv.handle import Handle
from ffs.kv.keys import CHUNK_KEY_BYTES, key_array
from ffs.kv.results import Results, Status

if TYPE_CHECKING:
    from ffs._native.ring import NativeClient
    from ffs.client.client import Client

_EXISTS_PIECE = 4096  # keys in one frame: 48 bytes each, frames hold 256 KiB of them
Keys = Sequence[bytes] | npt.NDArray[np.uint8]


class _Rings:
    """The rings of one generation of the handle: they belong to one session of one process."""

    def __init__(self, native: NativeClient, generation: int) -> None:
        self.generation = generation
        self._native = native
        self._idle: deque[KvRing] = deque()
        self.all: list[KvRing] = []
        self._closed = False

    @contextlib.contextmanager
    def take(self) -> Iterator[KvRing]:
        """A ring of one's own."""
        try:
            kv_ring = self._idle.pop()
        except IndexError:
            kv_ring = KvRing.make(self._native)
            self.all.append(kv_ring)
        try:
            yield kv_ring
        except BaseException:
            # Something may be in flight still: the next call must find a quiet ring.
            self.all.remove(kv_ring)
            kv_ring.close()
            raise
        if self._closed:
            kv_ring.close()
        else:
            self._idle.append(kv_ring)

    def close(self) -> None:
        """Closes what is idle; what is taken is closed when its call ends."""
        self._closed = True
        while self._idle:
            with contextlib.suppress(FfsError):
                self._idle.pop().close()


class Space:
    """An open KV space. Thread-safe: each call that runs at the same time has a ring of its own.
    A child of fork opens it again by itself on first use."""

    def __init__(self, handle: Handle) -> None:
        """For `create` and `open`."""
        self._handle = handle
        self._lock = threading.Lock()
        self._closed = False
        self._upkeep = BackgroundUpkeep(handle)
        self._rings: _Rings | None = None
        self.path = handle.path
        self.inode: int = handle.ino
        self.block_bytes: int = handle.block_bytes

    # --- making and opening ------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        client: Client,
        path: str,
        *,
        block_bytes: int,
        table: str | int | None = None,
        stripe: int | None = None,
        quota_bytes: int | None = None,
        ttl_s: float | None = None,
        evictable: bool | None = None,
        exist_ok: bool = False,
        permissions: int = 0o666,
    ) -> Space:
        """Makes a space at `path` for blocks of 1 to `block_bytes` bytes (at most 16 MiB) and opens it.

        `table`: the chain table by name or id, which decides the number of replicas; None: as the
        directory has it. `stripe`: over how many of its chains; None: as the directory has it, by default
        all. `quota_bytes`, `ttl_s`, `evictable`: see `set_bounds`; None: no quota, no ttl, evictable. With
        `exist_ok` a space that is there is welcome if it has the same `block_bytes` and whatever else is
        given; what isn't given stays as it is. Directories above it are made as needed.
        Blocking. Raises Exists (naming what is otherwise), NotFound (the table), InvalidArgument.
        """
        Bounds(
            quota_bytes=quota_bytes or 0, ttl_s=ttl_s or 0
        )  # refuses what can't be, before a directory is made
        client.makedirs(posixpath.dirname(path), exist_ok=True)
        return cls(
            Handle.create(
                client,
                path,
                block_bytes,
                table=table,
                stripe=stripe,
                quota_bytes=quota_bytes,
                ttl_s=ttl_s,
                evictable=evictable,
                exist_ok=exist_ok,
                permissions=permissions,
            )
        )

    @classmethod
    def open(cls, client: Client, path: str, *, write: bool = True) -> Space:
        """Opens the space at `path`. Blocking. Raises NotFound, AccessDenied, InvalidArgument (it is
        something else)."""
        return cls(Handle.open(client, path, write=write))

    # --- bounds -------------------------------------------------------------------------------

    @property
    def bounds(self) -> Bounds:
        """Quota, time to live, whether it may be evicted from, as they are now. Blocking."""
        return bounds_of(self._handle.client, self.path)

    def set_bounds(
        self, *, quota_bytes: int | None = None, ttl_s: float | None = None, evictable: bool | None = None
    ) -> Bounds:
        """Changes what is given, for all users of the space; its owner or root may. Blocking.

        `quota_bytes`: how much it may hold, as allocated on one replica; 0: as much as there is.
        `ttl_s`: a block is gone so long after it was put; 0: never; it counts for blocks that are put from
        now on. `evictable`: to make room blocks are dropped that weren't used for long; without it a put
        into a full space fails. Servers follow within seconds. Raises NotPermitted, InvalidArgument.
        """
        bounds = set_bounds(
            self._handle.client, self.path, quota_bytes=quota_bytes, ttl_s=ttl_s, evictable=evictable
        )
        self._handle.note_ttl(ttl_ms(bounds.ttl_s))
        return bounds

    def usage(self) -> Usage:
        """What the space holds and has evicted, as its servers said last. Blocking."""
        return usage_of(self._handle.client, self.inode)

    def close(self) -> None:
        """Gives back rings and the capability. Repeatable."""
        with self._lock:
            self._closed = True
            rings, self._rings = self._rings, None
        if rings is not None:
            rings.close()
        self._handle.close()

    def __enter__(self) -> Space:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ffs.kv.Space {self.path} of blocks up to {self.block_bytes} bytes>"

    # --- blocks ---------------------------------------------------------------------------------

    def put(self, keys: Keys, values: Any, *, timeout_s: float | None = None) -> Results:
        """Stores each block unless it is there: STORED, HIT, or ERROR by block. Blocking.

        `values`: an Iov (or slice of one) with the blocks one after the other, or a list of Iov slices
        or buffers. STORED and HIT are durable on every replica of the block's chain. A block whose
        chunk key is taken by other content is an ERROR (TagMismatch). An error may leave the block
        stored or not; putting it again is safe. Raises only for arguments that don't fit.
        """
        hashes = key_array(keys)
        blocks = look_at(values, len(hashes), self.block_bytes, writable=False)
        entries = self._entries(OP_CREATE, hashes, timeout_s)
        entries["length"] = entries["logical_length"] = blocks.lengths
        entries["expiry_ms"] = self._handle.expiry_ms()
        done = self._run(entries, blocks, writing=True)
        result, detail = done["result"], done["detail"]
        status = np.full(len(hashes), Status.ERROR, dtype=np.uint8)
        status[result >= 0] = Status.STORED
        there = (result == -errno.EEXIST) & (detail != _DETAIL_TAG)
        status[there] = Status.HIT
        lengths = np.where(result >= 0, blocks.lengths, np.where(there, done["value"].astype(np.int64), 0))
        return _results(status, lengths, done, self._handle)

    def get(self, keys: Keys, into: Any, *, timeout_s: float | None = None) -> Results:
        """Reads blocks into `into` (as `values` of put): HIT, MISS or ERROR by block. Blocking.

        Every destination must hold `block_bytes`; `lengths` says how many a block has. What isn't a
        HIT may have left anything in its destination. A HIT is verified: checksums, and the tag.
        """
        hashes = key_array(keys)
        blocks = look_at(into, len(hashes), self.block_bytes, writable=True)
        entries = self._entries(OP_READ, hashes, timeout_s)
        entries["flags"] = SQE_COMPARE_TAG | SQE_VERIFY | SQE_TOUCH
        entries["length"] = blocks.lengths
        done = self._run(entries, blocks, writing=False)
        result, detail = done["result"], done["detail"]
        status = np.full(len(hashes), Status.ERROR, dtype=np.uint8)
        status[result >= 0] = Status.HIT
        missing = (
            (result == -errno.ENOENT) | (result == -errno.ENODATA) | ((result < 0) & (detail == _DETAIL_TAG))
        )
        status[missing] = Status.MISS
        return _results(status, np.where(result >= 0, result, 0), done, self._handle)

    def exists(self, keys: Keys, *, timeout_s: float | None = None) -> Results:
        """Which blocks are there: HIT, MISS or ERROR by block, one request a chain. Blocking."""
        hashes = key_array(keys)
        chains = self._chains(hashes)
        order = np.argsort(chains, kind="stable")
        status = np.full(len(hashes), Status.MISS, dtype=np.uint8)
        lengths = np.zeros(len(hashes), dtype=np.int64)
        errors: dict[int, FfsError] = {}
        if not len(hashes):
            return Results(status, lengths, errors)
        asked = np.zeros(len(hashes), dtype=EXISTS_KEY_DTYPE)
        asked["key"] = self._keys(hashes)[order]
        asked["tag"] = hashes[order, CHUNK_KEY_BYTES:]
        asked["tag_bytes"] = CHUNK_KEY_BYTES
        with self._ring() as kv_ring:
            found, failed = self._look(kv_ring, asked, chains[order], timeout_s)
        there = found["state"] == 1
        status[order[there]] = Status.HIT
        lengths[order] = np.where(there, found["length"], 0)
        for position, error in failed.items():
            status[order[position]] = Status.ERROR
            errors[int(order[position])] = error
        return Results(status, lengths, errors)

    def _look(
        self,
        kv_ring: KvRing,
        asked: npt.NDArray[np.void],
        chains: npt.NDArray[np.uint32],
        timeout_s: float | None,
    ) -> tuple[npt.NDArray[np.void], dict[int, FfsError]]:
        """Asks for keys in order of chain: what was found by position, and the errors."""
        pieces = _by_chain(chains)
        staging = kv_ring.reserve(asked.nbytes)
        memory = np.frombuffer(staging.buffer(), dtype=np.uint8)
        found = np.zeros(len(asked), dtype=EXISTS_ENTRY_DTYPE)
        failed: dict[int, FfsError] = {}
        try:
            memory[: asked.nbytes] = asked.view(np.uint8).reshape(-1)
            entries = np.zeros(len(pieces), dtype=SQE_DTYPE)
            entries["op"] = OP_EXISTS
            entries["group"] = 1
            entries["userdata"] = np.arange(len(pieces), dtype=np.uint64)
            entries["timeout_ms"] = _timeout_ms(timeout_s)
            entries["capability"] = self._handle.capability
            entries["space_epoch"] = self._handle.epoch
            entries["chain"] = [int(chains[begin]) for begin, _ in pieces]
            entries["length"] = [end - begin for begin, end in pieces]
            entries["iov"] = staging.handle
            entries["iov_offset"] = [begin * EXISTS_KEY_DTYPE.itemsize for begin, _ in pieces]
            entries["key"][:, :8] = np.frombuffer(self.inode.to_bytes(8, "big"), dtype=np.uint8)
            done = Batch(kv_ring, self._upkeep).run(entries)
            for (begin, end), row in zip(pieces, done, strict=True):
                if row["result"] < 0:
                    failed.update(dict.fromkeys(range(begin, end), error_of_completion(row, self._handle)))
                    continue
                at = begin * EXISTS_KEY_DTYPE.itemsize
                found[begin:end] = memory[at : at + (end - begin) * EXISTS_ENTRY_DTYPE.itemsize].view(
                    EXISTS_ENTRY_DTYPE
                )
        finally:
            del memory  # an exported view would keep the Iov from being closed
        return found, failed

    def stats(self) -> list[RingStats]:
        """Counters of this space's rings, one a ring (sends, receives, bytes, most in flight)."""
        rings = self._rings
        return [] if rings is None else [kv_ring.ring.stats() for kv_ring in rings.all]

    # --- inside ---------------------------------------------------------------------------------

    def _chains(self, hashes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
        return self._handle.placement.chains_of(hashes[:, :CHUNK_KEY_BYTES])

    def _keys(self, hashes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        keys = np.empty((len(hashes), 24), dtype=np.uint8)
        keys[:, :8] = np.frombuffer(self.inode.to_bytes(8, "big"), dtype=np.uint8)
        keys[:, 8:] = hashes[:, :CHUNK_KEY_BYTES]
        return keys

    def _entries(
        self, operation: int, hashes: npt.NDArray[np.uint8], timeout_s: float | None
    ) -> npt.NDArray[np.void]:
        """Entries without their place in memory, capability and epoch; position as userdata."""
        entries = np.zeros(len(hashes), dtype=SQE_DTYPE)
        entries["op"] = operation
        entries["group"] = 1
        entries["userdata"] = np.arange(len(hashes), dtype=np.uint64)
        entries["timeout_ms"] = _timeout_ms(timeout_s)
        if len(hashes):
            entries["chain"] = self._chains(hashes)
            entries["key"] = self._keys(hashes)
            entries["tag"] = hashes[:, CHUNK_KEY_BYTES:]
        entries["tag_bytes"] = CHUNK_KEY_BYTES
        return entries

    def _run(
        self, entries: npt.NDArray[np.void], blocks: SharedBlocks | PrivateBlocks, *, writing: bool
    ) -> Completions:
        with self._ring() as kv_ring:
            entries["capability"] = self._handle.capability
            entries["space_epoch"] = self._handle.epoch
            batch = Batch(kv_ring, self._upkeep)
            if isinstance(blocks, SharedBlocks):
                entries["iov"] = blocks.handles
                entries["iov_offset"] = blocks.offsets
                return batch.run(entries)
            return batch.run_staged(entries, blocks, self.block_bytes, writing=writing)

    @contextlib.contextmanager
    def _ring(self) -> Iterator[KvRing]:
        with self._current_rings().take() as kv_ring:
            yield kv_ring

    def _current_rings(self) -> _Rings:
        """Those of this process's session: new ones after fork, or when the last session is over."""
        if self._closed:
            raise BadHandle("the space is closed: open it again", self.path)
        native = self._handle.native  # opens the space again if need be
        rings = self._rings
        if rings is not None and rings.generation == self._handle.generation:
            return rings
        with self._lock:
            if self._rings is None or self._rings.generation != self._handle.generation:
                self._rings = _Rings(native, self._handle.generation)
            return self._rings


_DETAIL_TAG = 8  # wire.h Detail::kTagMismatch


def _timeout_ms(timeout_s: float | None) -> int:
    if timeout_s is None:
        return 0
    if not 0 < timeout_s < 4_000_000:
        raise InvalidArgument(f"timeout_s is {timeout_s}: give seconds above 0")
    return max(1, round(timeout_s * 1000))


def _by_chain(chains: npt.NDArray[np.uint32]) -> list[tuple[int, int]]:
    """Runs [begin, end) of equal chains, none longer than a frame holds."""
    if not len(chains):
        return []
    borders = np.flatnonzero(np.diff(chains)) + 1
    begins = [0, *borders.tolist()]
    ends = [*borders.tolist(), len(chains)]
    return [
        (at, min(at + _EXISTS_PIECE, end))
        for begin, end in zip(begins, ends, strict=True)
        for at in range(begin, end, _EXISTS_PIECE)
    ]


def _results(
    status: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64], done: Completions, handle: Handle
) -> Results:
    errors: dict[int, FfsError] = {}
    for position in np.flatnonzero(status == Status.ERROR).tolist():
        error = error_of_completion(done[position], handle)
        if isinstance(error, TagMismatch):
            error = TagMismatch("another block has the same first half of its hash: this one can't be stored")
        elif isinstance(error, QuotaExceeded | NoSpace):
            error = _no_room(error, int(done[position]["chain"]), handle.path)
        errors[position] = error
    return Results(status, lengths.astype(np.int64), errors)


def _no_room(error: QuotaExceeded | NoSpace, chain: int, path: str) -> FfsError:
    """Of which space, and what its owner can do."""
    if isinstance(error, QuotaExceeded):
        return QuotaExceeded(
            f"chain {chain} has its share of the space's quota, and nothing on it may go for this block:"
            f" raise the quota (`ffs space set {path} --quota SIZE`), or let blocks that aren't pinned go for"
            f" new ones (`ffs space set {path} --evictable yes`)",
            path,
        )
    return NoSpace(
        f"a device of chain {chain} is full, and nothing on it may go for this block: remove files or spaces"
        " there, add a device (`ffs cluster chains` shows where the chain lies), or let blocks of spaces"
        " there go for new ones (`ffs space set PATH --evictable yes`)",
        path,
    )

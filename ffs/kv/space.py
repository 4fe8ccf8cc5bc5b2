"""A KV space: blocks of a cache by their hash, shared between machines (docs/guides/kv.md).

The space is made once in the namespace. After `open` a get or put of any number of blocks needs no
metadata service: hash -> chain by the layout function, and one round trip to a storage server. Reads
verify checksums and compare the second half of the hash; a put of a block that is there moves nothing.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ffs._native.ring import (
    OP_CREATE,
    OP_READ,
    OP_REMOVE,
    OP_REPLACE,
    SQE_COMPARE_TAG,
    SQE_PIN,
    SQE_TOUCH,
    SQE_VERIFY,
)
from ffs.errors import BadHandle, FfsError, InvalidArgument
from ffs.kv import entries as requests
from ffs.kv.batch import BackgroundUpkeep, Batch, Completions, KvRing
from ffs.kv.blocks import Blocks, Places, PrivateBlocks, cut, look_at
from ffs.kv.bounds import Bounds, Usage, bounds_of, set_bounds, ttl_ms, usage_of
from ffs.kv.counters import Counters, SpaceStats
from ffs.kv.geometry import Geometry
from ffs.kv.handle import Handle
from ffs.kv.keys import key_array
from ffs.kv.lookup import look_up
from ffs.kv.ranges import range_count, read_in_ranges
from ffs.kv.removal import purge
from ffs.kv.results import Results, Status
from ffs.kv.rings import Rings

if TYPE_CHECKING:
    from ffs.client.client import Client

Keys = Sequence[bytes] | npt.NDArray[np.uint8]
_PIN_BYTES = 64 << 20  # moved at a time


class Space:
    """An open KV space. Thread-safe: each call that runs at the same time has a ring of its own.
    A child of fork opens it again by itself on first use.

    `timeout_s`, of a call or else of the space: every block of the call has its answer by then, if only an
    error (DeadlineExceeded, OutcomeUnknown, or why the last try failed); None: the client's
    `request_timeout`, 30 s.
    """

    def __init__(self, handle: Handle, timeout_s: float | None = None) -> None:
        """For `create` and `open`."""
        if timeout_s is not None:
            requests.timeout_ms(timeout_s)
        self._handle = handle
        self._lock = threading.Lock()
        self._closed = False
        self._upkeep = BackgroundUpkeep(handle)
        self._rings: Rings | None = None
        self._counters = Counters()
        self._pid = os.getpid()
        self._id = handle.ino.to_bytes(8, "big")
        self._geometry = handle.geometry
        self._whole = self._geometry.pieces()
        self.timeout_s = timeout_s
        self.path = handle.path
        self.inode: int = handle.ino
        self.block_bytes: int = self._geometry.block_bytes
        self.parts: int = self._geometry.parts
        self.identity: bytes = handle.identity

    # --- making and opening ------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        client: Client,
        path: str,
        *,
        block_bytes: int,
        parts: int = 1,
        replicas: int | None = None,
        table: str | int | None = None,
        stripe: int | None = None,
        quota_bytes: int | None = None,
        ttl_s: float | None = None,
        evictable: bool | None = None,
        dedup: bool | None = None,
        exist_ok: bool = False,
        permissions: int = 0o666,
        identity: bytes = b"",
        timeout_s: float | None = None,
    ) -> Space:
        """Makes a space at `path` for blocks of 1 to `block_bytes` bytes and opens it.

        Blocks of more than 16 MiB are cut in `parts` of equal length, groups of layers (docs/guides/kv.md,
        Large blocks); they have exactly `block_bytes` then. `replicas`: 1 to 3 copies, by the chain table
        that has them; or `table`: that table by name or id; None: as the directory has it. `stripe`: over how
        many of its chains; None: as the directory has it, by default all. `quota_bytes`, `ttl_s`,
        `evictable`: see `set_bounds`; None: no quota, no ttl, evictable. `dedup`: servers keep equal blocks
        once where they meet (docs/guides/kv.md, Equal blocks); None: they don't. `identity`: up to 64 bytes
        that all users must agree on, kept with the space (ffs.kv.int8 has its shape there). With `exist_ok` a
        space that is there is welcome if it has the same geometry and identity and whatever else is given;
        what isn't given stays as it is. Directories above it are made as needed. Blocking. Raises Exists
        (naming what is otherwise), NotFound (the table), InvalidArgument.
        """
        geometry = Geometry(block_bytes, parts)
        Bounds(
            quota_bytes=quota_bytes or 0, ttl_s=ttl_s or 0
        )  # refuses what can't be, before a directory is made
        if timeout_s is not None:
            requests.timeout_ms(timeout_s)
        if replicas is not None and table is not None:
            raise InvalidArgument("give replicas or a table, which has its number of replicas, not both")
        client.makedirs(posixpath.dirname(path), exist_ok=True)
        handle = Handle.create(
            client,
            path,
            geometry,
            table=client.core.routing.kv_table_of(replicas) if replicas is not None else table,
            stripe=stripe,
            quota_bytes=quota_bytes,
            ttl_s=ttl_s,
            evictable=evictable,
            dedup=dedup,
            exist_ok=exist_ok,
            permissions=permissions,
            identity=identity,
        )
        return cls(handle, timeout_s)

    @classmethod
    def open(cls, client: Client, path: str, *, write: bool = True, timeout_s: float | None = None) -> Space:
        """Opens the space at `path`. Blocking. Raises NotFound, AccessDenied, InvalidArgument (it is
        something else)."""
        return cls(Handle.open(client, path, write=write), timeout_s)

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

    # --- bounds -------------------------------------------------------------------------------

    @property
    def bounds(self) -> Bounds:
        """Quota, time to live, eviction, deduplication, as they are now. Blocking."""
        return bounds_of(self._handle.client, self.path)

    def set_bounds(
        self,
        *,
        quota_bytes: int | None = None,
        ttl_s: float | None = None,
        evictable: bool | None = None,
        dedup: bool | None = None,
    ) -> Bounds:
        """Changes what is given, for all users of the space; its owner or root may. Blocking.

        `quota_bytes`: how much it may hold, as allocated on one replica; 0: as much as there is.
        `ttl_s`: a block is gone so long after it was put; 0: never; it counts for blocks that are put from
        now on. `evictable`: to make room blocks are dropped that weren't used for long; without it a put
        into a full space fails. `dedup`: servers look for equal blocks among those that are there and those
        that come; without it they look for no more, and what shares a place goes on sharing it. Servers
        follow within seconds. Raises NotPermitted, InvalidArgument.
        """
        bounds = set_bounds(
            self._handle.client,
            self.path,
            quota_bytes=quota_bytes,
            ttl_s=ttl_s,
            evictable=evictable,
            dedup=dedup,
        )
        self._handle.note_ttl(ttl_ms(bounds.ttl_s))
        return bounds

    def usage(self) -> Usage:
        """What the space holds and has evicted, as its servers said last. Blocking."""
        return usage_of(self._handle.client, self.inode)

    def stats(self) -> SpaceStats:
        """What this process has done with it, and its rings. Asks nobody."""
        rings = self._rings
        return SpaceStats(self._counters.now(), tuple(rings.stats() if rings is not None else ()))

    # --- blocks ---------------------------------------------------------------------------------

    def put_many(
        self, keys: Keys, values: Any, *, pin: bool = False, timeout_s: float | None = None
    ) -> Results:
        """Stores each block unless it is there: STORED, HIT, or ERROR by block. Blocking.

        `keys`: uint8 (n, 32), or a list of 32-byte strings. `values`: an Iov (or slice of one) with the
        blocks one after the other, `Places` in one, or a list of Iov slices or buffers. `pin`: as `pin` does.
        STORED and HIT are durable on every replica of the block's chain. A block whose
        chunk key is taken by other content is an ERROR (TagMismatch). An error may leave the block
        stored or not; putting it again is safe. Raises only for arguments that don't fit.
        """
        hashes = key_array(keys)
        until_s = self._until_s(timeout_s)
        blocks = look_at(values, len(hashes), self.block_bytes, writable=False)
        if self.parts > 1 and (blocks.lengths != self.block_bytes).any():
            raise InvalidArgument(
                f"a block of a space that cuts blocks in {self.parts} parts has all of its"
                f" {self.block_bytes} bytes"
            )
        results = self._store(OP_CREATE, hashes, blocks, SQE_PIN if pin else 0, timeout_s)
        self._counters.put(results)
        if pin and (there := np.flatnonzero(results.status == Status.HIT)).size:
            return _overlay(results, there, self._mark(hashes[there], SQE_PIN, until_s))
        return results

    def replace_many(self, keys: Keys, values: Any, *, timeout_s: float | None = None) -> Results:
        """Stores each block whether it is there or not: STORED or ERROR by block. Blocking.

        For what isn't named by its content: who reads meanwhile gets the old block or the new one, whole
        (in one chunk: InvalidArgument for a space that cuts blocks in parts). Otherwise as put_many."""
        if self.parts > 1:
            raise InvalidArgument("a block in parts can't be replaced at once", self.path)
        hashes = key_array(keys)
        blocks = look_at(values, len(hashes), self.block_bytes, writable=False)
        results = self._store(OP_REPLACE, hashes, blocks, 0, timeout_s)
        self._counters.put(results)
        return results

    def get_many(
        self,
        keys: Keys,
        into: Any,
        *,
        offset: int = 0,
        length: int | None = None,
        timeout_s: float | None = None,
    ) -> Results:
        """Reads blocks into `into` (as `values` of put_many): HIT, MISS or ERROR by block. Blocking.

        `offset`, `length`: only these bytes of each block, such as one layer of it; None: to its end. Every
        destination must hold so much; `lengths` says how many bytes came (fewer at the end of a
        shorter block). What isn't a HIT may have left anything in its destination. A HIT is verified:
        checksums, of whole granules of 64 KiB on the server where a range has a part of one, and the tag.
        """
        results = self._get(key_array(keys), into, offset, length, timeout_s)
        self._counters.got(results)
        return results

    def exists_many(self, keys: Keys, *, touch: bool = False, timeout_s: float | None = None) -> Results:
        """Which blocks are there: HIT, MISS or ERROR by block, one request a chain. Blocking.

        `Results.leading_hits()`: how long the prefix is that can be used. `touch`: it counts as a use of
        each."""
        hashes = key_array(keys)
        timeout = self._timeout(timeout_s)
        chunks = self._geometry.chunk_hashes(hashes, self._whole)
        with self._ring() as kv_ring:
            batch = Batch(kv_ring, self._upkeep)
            results = look_up(
                batch, self._handle, chunks, len(self._whole), SQE_TOUCH if touch else 0, timeout
            )
        self._counters.looked(results)
        return results

    def touch(self, keys: Keys, *, timeout_s: float | None = None) -> Results:
        """Counts as a use of each block, so that it stays longer; as exists_many. Blocking."""
        return self.exists_many(keys, touch=True, timeout_s=timeout_s)

    def delete(self, keys: Keys, *, timeout_s: float | None = None) -> Results:
        """Takes blocks away, pinned ones too: MISS (it isn't there any more, or never was) or ERROR.
        Blocking."""
        hashes = key_array(keys)
        chunks = self._geometry.chunk_hashes(hashes, self._whole)
        entries = self._entries(OP_REMOVE, chunks, timeout_s)
        with self._ring() as kv_ring:
            done = self._batch(kv_ring, entries).run(entries)
        results = requests.of_removals(done, len(self._whole), self._handle)
        self._counters.removed(results)
        return results

    def pin(self, keys: Keys, *, timeout_s: float | None = None) -> Results:
        """From now on these blocks aren't dropped to make room: HIT, MISS or ERROR by block. Blocking.

        Durable, until `unpin` or `delete`. Their time to live begins anew, and ends a pinned block as any
        other. They count against the quota: of pinned blocks alone a chain's share can be full. Each block is
        read and written once again here, so pin what is worth it. Raises only for arguments that don't
        fit."""
        return self._mark(key_array(keys), SQE_PIN, self._until_s(timeout_s))

    def unpin(self, keys: Keys, *, timeout_s: float | None = None) -> Results:
        """Undoes `pin`, in the same way."""
        return self._mark(key_array(keys), 0, self._until_s(timeout_s))

    def purge(self, *, timeout_s: float | None = None) -> int:
        """Takes away every block that is there when this begins; how many chunks that were. Blocking.

        What others put meanwhile may go or stay. Raises the first error; what is left then can be purged
        again."""
        timeout = self._timeout(timeout_s)
        with self._ring() as kv_ring:
            return purge(Batch(kv_ring, self._upkeep), self._handle, timeout)

    put = put_many
    get = get_many
    exists = exists_many

    # --- inside ---------------------------------------------------------------------------------

    def _timeout(self, timeout_s: float | None) -> int:
        """In milliseconds."""
        if timeout_s is None:
            timeout_s = self.timeout_s
        return requests.timeout_ms(self._handle.request_timeout_s if timeout_s is None else timeout_s)

    def _until_s(self, timeout_s: float | None) -> float:
        """When a call that begins now is over, of time.monotonic()."""
        return time.monotonic() + self._timeout(timeout_s) / 1000

    def _entries(
        self, operation: int, hashes: npt.NDArray[np.uint8], timeout_s: float | None
    ) -> requests.Entries:
        timeout = self._timeout(timeout_s)
        return requests.entries_for(operation, self._id, self._handle.placement, hashes, timeout)

    def _get(
        self,
        hashes: npt.NDArray[np.uint8],
        into: Any,
        offset: int,
        length: int | None,
        timeout_s: float | None,
    ) -> Results:
        whole = offset == 0 and length is None
        pieces = self._whole if whole else self._geometry.pieces(offset, length)
        size = self.block_bytes if whole else sum(piece.length for piece in pieces)
        blocks = look_at(into, len(hashes), size, writable=True)
        chunks = self._geometry.chunk_hashes(hashes, pieces)
        entries = self._entries(OP_READ, chunks, timeout_s)
        entries["flags"] = SQE_COMPARE_TAG | SQE_VERIFY | SQE_TOUCH
        if len(pieces) == 1:
            entries["offset"] = pieces[0].offset
        elif not whole:
            entries["offset"] = np.tile([piece.offset for piece in pieces], len(hashes))
        done = self._run(entries, cut(blocks, pieces), writing=False)
        return requests.of_reads(done, len(pieces), self._handle)

    def _store(
        self,
        operation: int,
        hashes: npt.NDArray[np.uint8],
        blocks: Blocks,
        flags: int,
        timeout_s: float | None,
    ) -> Results:
        chunks = self._geometry.chunk_hashes(hashes, self._whole)
        entries = self._entries(operation, chunks, timeout_s)
        entries["flags"] = flags
        entries["expiry_ms"] = self._handle.expiry_ms()
        blocks = cut(blocks, self._whole)
        entries["logical_length"] = blocks.lengths
        done = self._run(entries, blocks, writing=True)
        return requests.of_puts(done, blocks.lengths, len(self._whole), self._handle)

    def _mark(self, hashes: npt.NDArray[np.uint8], flags: int, until_s: float) -> Results:
        """Content doesn't change under a key, so a block may be written once again at any time. `until_s`: of
        time.monotonic(), when all of it is over."""
        status = np.full(len(hashes), Status.MISS, dtype=np.uint8)
        lengths = np.zeros(len(hashes), dtype=np.int64)
        errors: dict[int, FfsError] = {}
        at_a_time = max(1, _PIN_BYTES // self.block_bytes)
        for begin in range(0, len(hashes), at_a_time):
            some = hashes[begin : begin + at_a_time]
            with self._ring() as kv_ring:
                staging = kv_ring.reserve(len(some) * self.block_bytes)
                places = Places(staging, np.arange(len(some)) * self.block_bytes)
                found = self._get(some, places, 0, None, _left_s(until_s))
                there = np.flatnonzero(found.hits)
                blocks = look_at(
                    Places(staging, places.offsets[there], found.lengths[there]),
                    len(there),
                    self.block_bytes,
                    writable=False,
                )
                stored = self._store(OP_REPLACE, some[there], blocks, flags, _left_s(until_s))
            stored = Results(np.where(stored.hits, Status.HIT, stored.status), stored.lengths, stored.errors)
            part = _overlay(found, there, stored)
            status[begin : begin + len(some)] = part.status
            lengths[begin : begin + len(some)] = part.lengths
            errors |= {begin + position: error for position, error in part.errors.items()}
        return Results(status, lengths, errors)

    def _run(self, entries: requests.Entries, blocks: Blocks, *, writing: bool) -> Completions:
        entries["length"] = blocks.lengths
        with self._ring() as kv_ring:
            batch = self._batch(kv_ring, entries)
            if isinstance(blocks, PrivateBlocks):
                return batch.run_staged(entries, blocks, writing=writing)
            entries["iov"] = blocks.handles
            entries["iov_offset"] = blocks.offsets
            ranges = range_count(blocks)
            if ranges > 1 and not writing and kv_ring.ring.stats().local_links:
                return read_in_ranges(batch, entries, ranges)
            return batch.run(entries)

    def _batch(self, kv_ring: KvRing, entries: requests.Entries) -> Batch:
        """On that ring, for entries to which it gives capability and epoch."""
        entries["capability"] = self._handle.capability
        entries["space_epoch"] = self._handle.epoch
        return Batch(kv_ring, self._upkeep)

    @contextlib.contextmanager
    def _ring(self) -> Iterator[KvRing]:
        with self._current_rings().take() as kv_ring:
            yield kv_ring

    def _current_rings(self) -> Rings:
        """Those of this process's session: new ones after fork, or when the last session is over."""
        if self._closed:
            raise BadHandle("the space is closed: open it again", self.path)
        native = self._handle.native  # opens the space again if need be
        rings = self._rings
        if rings is not None and rings.generation == self._handle.generation:
            return rings
        with self._lock:
            if self._rings is None or self._rings.generation != self._handle.generation:
                self._rings = Rings(native, self._handle.generation)
            if self._pid != os.getpid():
                self._counters, self._pid = Counters(), os.getpid()
            return self._rings


def _left_s(until_s: float) -> float:
    """A moment at least: what has none is still asked for, and says why it failed."""
    return max(0.001, until_s - time.monotonic())


def _overlay(whole: Results, places: npt.NDArray[np.intp], part: Results) -> Results:
    """`whole` with what `part` says of the blocks at `places`."""
    status, lengths = whole.status.copy(), whole.lengths.copy()
    status[places] = part.status
    lengths[places] = part.lengths
    errors = {position: error for position, error in whole.errors.items() if position not in places}
    errors |= {int(places[position]): error for position, error in part.errors.items()}
    return Results(status, lengths, errors)

"""A KV space: blocks of a cache by their hash, shared between machines (docs/guides/kv.md).

The space is made once in the namespace. After `open` a get or put of any number of blocks needs no
metadata service: hash -> chain by the layout function, and one round trip to a storage server. Reads
verify checksums and compare the second half of the hash; a put of a block that is there moves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from ffs._native.ring import (
    OP_CREATE,
    OP_EXISTS,
    OP_READ,
    SQE_COMPARE_TAG,
    SQE_DTYPE,
    SQE_VERIFY,
    RingStats,
    error_of_cqe,
)

from ffs.client.paths import wire_path
from ffs.errors import BadHandle, FfsError, InvalidArgument, StaleEpoch, TagMismatch
from ffs.kv.batch import BackgroundUpkeep, Batch, Completions, KvRing
from ffs.kv.blocks import PrivateBlocks, SharedBlocks, look_at
from ffs.kv.keys import CHUNK_KEY_BYTES, key_array
from ffs.kv.results import Results, Status
from ffs.proto import meta
from ffs.proto.records import KvParams

if TYPE_CHECKING:
    from ffs.client import Client
    from ffs.client.session import Session
    from ffs.layout import Placement

MAX_BLOCK_BYTES = 16 << 20
_RIGHTS = 3  # read and write
_EXISTS_PIECE = 4096  # keys in one frame: 48 bytes each, frames hold 256 KiB of them
_EXISTS_KEY = np.dtype(
    [("key", np.uint8, 24), ("tag", np.uint8, 16), ("tag_bytes", "<u4"), ("reserved", "<u4")]
)
_EXISTS_ENTRY = np.dtype([("state", "<u4"), ("length", "<u4")])

Keys = Sequence[bytes] | npt.NDArray[np.uint8]


class _Bound:
    """What belongs to one session of one process: the capability and the rings."""

    def __init__(self, session: Session, opened: meta.KvOpened) -> None:
        self.session = session
        self.epoch = opened.attributes.epoch
        self.capability = session.add_capability(
            opened.ino, 0, _RIGHTS, opened.capability, opened.capability_expiry_ms
        )
        self.idle: deque[KvRing] = deque()
        self.all: list[KvRing] = []

    def release(self) -> None:
        for ring in self.all:
            with contextlib.suppress(FfsError):
                ring.close()
        self.idle.clear()
        self.all.clear()
        self.session.drop_capability(self.capability)


class Space:
    """An open KV space. Thread-safe: each call that runs at the same time has a ring of its own.
    A child of fork opens it again by itself on first use."""

    def __init__(self, client: Client, path: str, opened: meta.KvOpened) -> None:
        """For `create` and `open`."""
        attributes = opened.attributes
        if attributes.kv is None or attributes.layout is None:
            raise InvalidArgument("isn't a KV space: make one with Space.create", path)
        self._client = client
        self._lock = threading.Lock()
        self._closed = False
        self._upkeep = BackgroundUpkeep(self)
        self.path = path
        self.inode: int = opened.ino
        self.block_bytes: int = attributes.kv.block_bytes
        self._placement: Placement = client.core.routing.placement(attributes.layout)
        self._bound: _Bound | None = _Bound(client.core.session(), opened)

    # --- making and opening ------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        client: Client,
        path: str,
        *,
        block_bytes: int,
        table: str | int | None = None,
        exist_ok: bool = False,
        mode: int = 0o666,
    ) -> Space:
        """Makes a space at `path` for blocks of 1 to `block_bytes` bytes (at most 16 MiB) and opens it.

        `table`: the chain table by name or id, which decides the number of replicas; None: as the
        directory has it. With `exist_ok` a space of the same geometry is welcome. Blocking. Raises
        Exists, NotFound (the parent, the table), InvalidArgument.
        """
        if isinstance(block_bytes, bool) or not isinstance(block_bytes, int):
            raise TypeError(f"block_bytes is an int, not {type(block_bytes).__name__}")
        if not 1 <= block_bytes <= MAX_BLOCK_BYTES:
            raise InvalidArgument(f"block_bytes is {block_bytes}: give 1 to {MAX_BLOCK_BYTES} (16 MiB)")
        core = client.core
        layout = None
        if table is not None:
            layout = meta.LayoutChoice(table=core.routing.table_id(table))
        request = meta.KvCreate(
            path=wire_path(path),
            params=KvParams(block_bytes=block_bytes),
            mode=mode & ~core.umask,
            layout=layout,
            exist_ok=exist_ok,
        )
        return cls(client, path, core.change(request, meta.KvOpened))

    @classmethod
    def open(cls, client: Client, path: str) -> Space:
        """Opens the space at `path`. Blocking. Raises NotFound, InvalidArgument (it is something else)."""
        return cls(client, path, cls._ask(client, path))

    @staticmethod
    def _ask(client: Client, path: str) -> meta.KvOpened:
        return client.core.change(meta.KvOpen(path=wire_path(path)), meta.KvOpened)

    def close(self) -> None:
        """Gives back rings and the capability. Repeatable."""
        with self._lock:
            self._closed = True
            bound, self._bound = self._bound, None
        if bound is not None:
            bound.release()

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
        done = self._run(entries, blocks, writing=True)
        result, detail = done["result"], done["detail"]
        status = np.full(len(hashes), Status.ERROR, dtype=np.uint8)
        status[result >= 0] = Status.STORED
        there = (result == -errno.EEXIST) & (detail != _DETAIL_TAG)
        status[there] = Status.HIT
        lengths = np.where(result >= 0, blocks.lengths, np.where(there, done["value"].astype(np.int64), 0))
        return _results(status, lengths, done)

    def get(self, keys: Keys, into: Any, *, timeout_s: float | None = None) -> Results:
        """Reads blocks into `into` (as `values` of put): HIT, MISS or ERROR by block. Blocking.

        Every destination must hold `block_bytes`; `lengths` says how many a block has. What isn't a
        HIT may have left anything in its destination. A HIT is verified: checksums, and the tag.
        """
        hashes = key_array(keys)
        blocks = look_at(into, len(hashes), self.block_bytes, writable=True)
        entries = self._entries(OP_READ, hashes, timeout_s)
        entries["flags"] = SQE_COMPARE_TAG | SQE_VERIFY
        entries["length"] = blocks.lengths
        done = self._run(entries, blocks, writing=False)
        result, detail = done["result"], done["detail"]
        status = np.full(len(hashes), Status.ERROR, dtype=np.uint8)
        status[result >= 0] = Status.HIT
        missing = (
            (result == -errno.ENOENT) | (result == -errno.ENODATA) | ((result < 0) & (detail == _DETAIL_TAG))
        )
        status[missing] = Status.MISS
        return _results(status, np.where(result >= 0, result, 0), done)

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
        asked = np.zeros(len(hashes), dtype=_EXISTS_KEY)
        asked["key"] = self._keys(hashes)[order]
        asked["tag"] = hashes[order, CHUNK_KEY_BYTES:]
        asked["tag_bytes"] = CHUNK_KEY_BYTES
        with self._ring() as (bound, kv_ring):
            found, failed = self._look(kv_ring, bound, asked, chains[order], timeout_s)
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
        bound: _Bound,
        asked: npt.NDArray[np.void],
        chains: npt.NDArray[np.uint32],
        timeout_s: float | None,
    ) -> tuple[npt.NDArray[np.void], dict[int, FfsError]]:
        """Asks for keys in order of chain: what was found by position, and the errors."""
        pieces = _by_chain(chains)
        staging = kv_ring.reserve(asked.nbytes)
        memory = np.frombuffer(staging.buffer(), dtype=np.uint8)
        found = np.zeros(len(asked), dtype=_EXISTS_ENTRY)
        failed: dict[int, FfsError] = {}
        try:
            memory[: asked.nbytes] = asked.view(np.uint8).reshape(-1)
            entries = np.zeros(len(pieces), dtype=SQE_DTYPE)
            entries["op"] = OP_EXISTS
            entries["group"] = 1
            entries["userdata"] = np.arange(len(pieces), dtype=np.uint64)
            entries["timeout_ms"] = _timeout_ms(timeout_s)
            entries["capability"] = bound.capability
            entries["space_epoch"] = bound.epoch
            entries["chain"] = [int(chains[begin]) for begin, _ in pieces]
            entries["length"] = [end - begin for begin, end in pieces]
            entries["iov"] = staging.handle
            entries["iov_offset"] = [begin * _EXISTS_KEY.itemsize for begin, _ in pieces]
            entries["key"][:, :8] = np.frombuffer(self.inode.to_bytes(8, "big"), dtype=np.uint8)
            done = Batch(kv_ring, self._upkeep, bound.capability).run(entries)
            for (begin, end), row in zip(pieces, done, strict=True):
                if row["result"] < 0:
                    failed.update(dict.fromkeys(range(begin, end), error_of_cqe(row)))
                    continue
                at = begin * _EXISTS_KEY.itemsize
                found[begin:end] = memory[at : at + (end - begin) * _EXISTS_ENTRY.itemsize].view(
                    _EXISTS_ENTRY
                )
        finally:
            del memory  # an exported view would keep the Iov from being closed
        return found, failed

    def stats(self) -> list[RingStats]:
        """Counters of this space's rings, one a ring (sends, receives, bytes, most in flight)."""
        bound = self._bound
        return [] if bound is None else [kv_ring.ring.stats() for kv_ring in bound.all]

    # --- inside ---------------------------------------------------------------------------------

    def _chains(self, hashes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
        return self._placement.chains_of(hashes[:, :CHUNK_KEY_BYTES])

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
        with self._ring() as (bound, kv_ring):
            entries["capability"] = bound.capability
            entries["space_epoch"] = bound.epoch
            batch = Batch(kv_ring, self._upkeep, bound.capability)
            if isinstance(blocks, SharedBlocks):
                entries["iov"] = blocks.handles
                entries["iov_offset"] = blocks.offsets
                return batch.run(entries)
            return batch.run_staged(entries, blocks, self.block_bytes, writing=writing)

    @contextlib.contextmanager
    def _ring(self) -> Iterator[tuple[_Bound, KvRing]]:
        bound = self._bind()
        try:
            kv_ring = bound.idle.pop()
        except IndexError:
            kv_ring = KvRing.make(bound.session.native)
            bound.all.append(kv_ring)
        try:
            yield bound, kv_ring
        except BaseException:
            # Something may be in flight still: the next call must find a quiet ring.
            bound.all.remove(kv_ring)
            kv_ring.close()
            raise
        bound.idle.append(kv_ring)

    def _bind(self) -> _Bound:
        """This process's session; opens the space again under a new one (after fork, or when the last
        one is over)."""
        bound = self._bound
        if bound is not None and not bound.session.over and bound.session is self._client.core.session():
            return bound
        with self._lock:
            if self._closed:
                raise BadHandle("the space is closed: open it again", self.path)
            session = self._client.core.session()
            if self._bound is None or self._bound.session is not session:
                opened = self._ask(self._client, self.path)
                if opened.ino != self.inode:
                    raise StaleEpoch(
                        "was removed and made anew since it was opened: open it again", self.path
                    )
                self._bound = _Bound(session, opened)
            return self._bound

    # Upkeep, in a thread of its own (batch.py).

    def refresh_routing(self) -> bool:
        with contextlib.suppress(FfsError):
            return bool(self._client.core.routing.refresh(once=True))
        return False

    def renew_capability(self, native_id: int) -> None:
        bound = self._bound
        if bound is not None:
            with contextlib.suppress(FfsError, KeyError):
                bound.session.renew_capability(native_id, once=True)


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


def _results(status: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64], done: Completions) -> Results:
    errors: dict[int, FfsError] = {}
    for position in np.flatnonzero(status == Status.ERROR).tolist():
        error = error_of_cqe(done[position])
        if isinstance(error, TagMismatch):
            error = TagMismatch("another block has the same first half of its hash: this one can't be stored")
        errors[position] = error
    return Results(status, lengths.astype(np.int64), errors)

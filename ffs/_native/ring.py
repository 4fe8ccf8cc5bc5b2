"""The native client and its ring: requests in as arrays, completions out as arrays.

The layer below ffs.Ior and ffs.client's files; it knows chunks and chains, not files. docs/ring.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from ffs._native.device_memory import device_error, is_device_fault
from ffs._native.file_entries import FileEntries
from ffs._native.iov import Iov, IovSlice
from ffs._native.lib import check, ffi, lib
from ffs._native.routes import ChainRoute, TargetRoute, c_chains, c_targets
from ffs.errors import BadHandle, FfsError, InvalidArgument, RingFull, error_of_status

OP_READ: Final = int(lib.FFS_OP_READ)
OP_WRITE: Final = int(lib.FFS_OP_WRITE)
OP_TRUNCATE: Final = int(lib.FFS_OP_TRUNCATE)
OP_REMOVE: Final = int(lib.FFS_OP_REMOVE)
OP_REPLACE: Final = int(lib.FFS_OP_REPLACE)
OP_CREATE: Final = int(lib.FFS_OP_CREATE)
OP_SPACE_EPOCH: Final = int(lib.FFS_OP_SPACE_EPOCH)
OP_REMOVE_RANGE: Final = int(lib.FFS_OP_REMOVE_RANGE)
OP_TOUCH: Final = int(lib.FFS_OP_TOUCH)
OP_EXISTS: Final = int(lib.FFS_OP_EXISTS)
OP_LAST_CHUNK: Final = int(lib.FFS_OP_LAST_CHUNK)
OP_LIST_CHUNKS: Final = int(lib.FFS_OP_LIST_CHUNKS)

SQE_VERIFY: Final = int(lib.FFS_SQE_VERIFY)
SQE_COMPARE_TAG: Final = int(lib.FFS_SQE_COMPARE_TAG)
SQE_TOUCH: Final = int(lib.FFS_SQE_TOUCH)
SQE_PIN: Final = int(lib.FFS_SQE_PIN)
SQE_UNPIN: Final = int(lib.FFS_SQE_UNPIN)
SQE_ZERO_FILL: Final = int(lib.FFS_SQE_ZERO_FILL)
SQE_NEED_EXISTING: Final = int(lib.FFS_SQE_NEED_EXISTING)
SQE_BEYOND_END: Final = int(lib.FFS_SQE_BEYOND_END)

LIST_ALL_SPACES: Final = int(lib.FFS_LIST_ALL_SPACES)
LIST_SPACES_ONLY: Final = int(lib.FFS_LIST_SPACES_ONLY)
LIST_MAX_ENTRIES: Final = 1024
LIST_PENDING: Final = 1
"""Flag of an entry: nothing of the chunk is committed at the replica that answered."""

WAIT_NEEDS_ROUTING: Final = int(lib.FFS_WAIT_NEEDS_ROUTING)
WAIT_TIMEOUT: Final = int(lib.FFS_WAIT_TIMEOUT)
WAIT_NEEDS_CAPABILITY: Final = int(lib.FFS_WAIT_NEEDS_CAPABILITY)

STEP_MS: Final = 200
"""C waits so long at most, so that signals (Ctrl-C) are seen."""

_NO_HEDGES: Final = 101  # ffs_client_options.hedge_percent

SQE_DTYPE: Final = np.dtype(
    [
        ("op", "u1"),
        ("flags", "u1"),
        ("tag_bytes", "u1"),
        ("codec", "u1"),
        ("chain", "<u4"),
        ("capability", "<u4"),
        ("group", "<u4"),
        ("key", "u1", (24,)),
        ("offset", "<u4"),
        ("length", "<u4"),
        ("logical_length", "<u4"),
        ("timeout_ms", "<u4"),
        ("iov", "<u8"),
        ("iov_offset", "<u8"),
        ("space_epoch", "<u8"),
        ("expiry_ms", "<u8"),
        ("userdata", "<u8"),
        ("target", "<u8"),
        ("tag", "u1", (16,)),
        ("priority", "u1"),
        ("reserved", "u1", (7,)),
    ]
)
CQE_DTYPE: Final = np.dtype(
    [
        ("userdata", "<u8"),
        ("result", "<i8"),
        ("detail", "<u4"),
        ("failed", "<u4"),
        ("chunk_length", "<u4"),
        ("chain", "<u4"),
        ("value", "<u8"),
        ("key", "u1", (24,)),
        ("tag", "u1", (16,)),
        ("tag_bytes", "u1"),
        ("codec", "u1"),
        ("reserved", "u1", (6,)),
    ]
)
EXISTS_KEY_DTYPE: Final = np.dtype(
    [("key", "u1", (24,)), ("tag", "u1", (16,)), ("tag_bytes", "<u4"), ("reserved", "<u4")]
)
EXISTS_ENTRY_DTYPE: Final = np.dtype([("state", "<u4"), ("length", "<u4")])
LIST_ENTRY_DTYPE: Final = np.dtype([("key", "u1", (24,)), ("length", "<u4"), ("flags", "<u4")])

_TRANSPORTS: Final = {
    "auto": lib.FFS_TRANSPORT_AUTO,
    "tcp": lib.FFS_TRANSPORT_TCP,
    "local": lib.FFS_TRANSPORT_LOCAL,
    "rdma": lib.FFS_TRANSPORT_RDMA,
}


def check_layout(dtype: np.dtype[Any], name: str) -> None:
    """Raises ImportError unless the numpy dtype lies in memory as the C struct does."""
    if dtype.itemsize != ffi.sizeof(name):
        raise ImportError(f"{name} has {ffi.sizeof(name)} bytes in C, {dtype.itemsize} in numpy: rebuild ffs")
    assert dtype.names is not None
    assert dtype.fields is not None
    in_c = [field for field, _ in ffi.typeof(name).fields]
    if list(dtype.names) != in_c:
        raise ImportError(f"{name} has other fields in C than in numpy: rebuild ffs")
    for field in dtype.names:
        if dtype.fields[field][1] != ffi.offsetof(name, field):
            raise ImportError(f"{name}.{field} lies elsewhere in C than in numpy: rebuild ffs")


check_layout(SQE_DTYPE, "ffs_sqe")
check_layout(CQE_DTYPE, "ffs_cqe")


def error_of_cqe(cqe: Any) -> FfsError:
    """The error of a completion (a row of CQE_DTYPE) whose result is negative."""
    if is_device_fault(cqe):
        return device_error(cqe, f"the server of target {int(cqe['value'])}")
    text = f" on chain {int(cqe['chain'])}" if cqe["chain"] else ""
    error = error_of_status(-int(cqe["result"]), int(cqe["detail"]))
    return type(error)(f"{error.message}{text}", errno=error.errno)


class NativeClient:
    """What the rings of a client session share: routing, capabilities, identities of updates.

    client_id: the session id from the metadata service; cluster: its 16 bytes. Timeouts in ms, 0 for
    the defaults (connect 1000, a request 30000, a try at one replica 2000). checksum: CRC32C from this
    memory to the device and back. inflight_bytes: a server and ring, 0: 64 MiB. unavailable_timeout_ms:
    0 for 3000. hedge_percent: late reads that go to a second replica too, at most, 0 for none;
    hedge_after_ms: when, 0 for adaptive. Connects nowhere. Any thread.
    """

    _raw: Any = None

    def __init__(
        self,
        client_id: int,
        cluster: bytes,
        *,
        transport: str = "auto",
        connect_timeout_ms: int = 0,
        request_timeout_ms: int = 0,
        try_timeout_ms: int = 0,
        checksum: bool = True,
        inflight_bytes: int = 0,
        tcp_congestion: str | None = None,
        unavailable_timeout_ms: int = 0,
        hedge_percent: int = 5,
        hedge_after_ms: int = 0,
        rdma: str | None = None,
        rdma_traffic_class: int = 0,
    ) -> None:
        self.client_id = client_id
        if transport not in _TRANSPORTS:
            raise InvalidArgument(f"transport {transport!r}: give one of {', '.join(_TRANSPORTS)}")
        if len(cluster) != 16:
            raise InvalidArgument(f"a cluster id has 16 bytes, not {len(cluster)}")
        options = ffi.new("ffs_client_options*")
        options.struct_size = ffi.sizeof("ffs_client_options")
        options.transport = _TRANSPORTS[transport]
        options.client = client_id
        options.cluster = list(cluster)
        options.connect_timeout_ms = connect_timeout_ms
        options.request_timeout_ms = request_timeout_ms
        options.try_timeout_ms = try_timeout_ms
        options.checksum = 0 if checksum else 1
        options.inflight_bytes = inflight_bytes
        options.unavailable_timeout_ms = unavailable_timeout_ms
        options.hedge_percent = hedge_percent or _NO_HEDGES
        options.hedge_after_ms = hedge_after_ms
        congestion = ffi.NULL if tcp_congestion is None else ffi.new("char[]", tcp_congestion.encode())
        options.tcp_congestion = congestion
        devices = ffi.NULL if rdma is None else ffi.new("char[]", rdma.encode())
        options.rdma = devices
        options.rdma_traffic_class = rdma_traffic_class
        out = ffi.new("ffs_client**")
        check(lib.ffs_client_create(options, out))
        self._raw = out[0]

    @property
    def raw(self) -> Any:
        """The C handle. BadHandle after close."""
        if self._raw is None:
            raise BadHandle("this client is closed")
        return self._raw

    def set_routing(self, epoch: int, chains: Sequence[ChainRoute], targets: Sequence[TargetRoute]) -> None:
        """Replaces what is known; an epoch older than that changes nothing."""
        in_c, places = c_chains(chains), c_targets(targets)
        check(lib.ffs_client_set_routing(self.raw, epoch, in_c, len(in_c), places, len(places)))

    def add_capability(self, data: bytes) -> int:
        """Takes a capability's bytes; the id for ffs_sqe.capability."""
        return check(lib.ffs_client_add_capability(self.raw, data, len(data)))

    def renew_capability(self, capability: int, data: bytes) -> None:
        """Puts a newer issue in its place; requests that wait for one go on. NotFound: no such id."""
        check(lib.ffs_client_renew_capability(self.raw, capability, data, len(data)))

    def drop_capability(self, capability: int) -> None:
        """Forgets it; the id may be given again. NotFound: no such id."""
        check(lib.ffs_client_drop_capability(self.raw, capability))

    def close(self) -> None:
        """Idempotent, from any thread. Rings that still exist keep what they need."""
        raw = self.__dict__.pop("_raw", None)  # in one step
        if raw is not None:
            lib.ffs_client_destroy(raw)

    def __del__(self) -> None:
        if getattr(self, "_raw", None) is not None:
            self.close()


@dataclass(frozen=True, slots=True)
class RingStats:
    """Counts since the ring was made.

    bytes_copied: payload that came through a socket; hedges: late reads that a second replica was asked
    for, hedge_wins: which answered first; damaged: answers that didn't match their checksums; budget_waits:
    retries that the retry budget held back; unavailable: requests that ended as ChainUnavailable.
    tcp_links, local_links, rdma_links: connections that stand now. rdma_*: docs/rdma.md, Counters.
    bytes_landed: payload that took the copy of docs/ring.md, Landing."""

    submitted: int
    completed: int
    failed: int
    retries: int
    hedges: int
    send_calls: int
    recv_calls: int
    bytes_read: int
    bytes_written: int
    bytes_copied: int
    connects: int
    max_inflight: int
    hedge_wins: int
    damaged: int
    budget_waits: int
    unavailable: int
    tcp_links: int
    local_links: int
    rdma_links: int
    rdma_doorbells: int
    rdma_sends: int
    rdma_inline_sends: int
    rdma_credit_sends: int
    rdma_completions: int
    rdma_receives: int
    rdma_breaks: int
    bytes_landed: int


class Ring:
    """A submission and completion ring over chunks.

    entries: requests that may be prepared or in flight (a power of two up to 65536); inflight: of these at
    servers at a time, 0: all. The calling thread does the work: submit sends, wait receives. One thread at a
    time (Busy otherwise). In a child of fork every call but close raises FfsError with EOWNERDEAD: make a
    fresh one there.
    """

    _raw: Any = None

    def __init__(self, client: NativeClient, entries: int, inflight: int = 0) -> None:
        options = ffi.new("ffs_ring_options*")
        options.struct_size = ffi.sizeof("ffs_ring_options")
        if not 0 < entries <= 65536:
            raise InvalidArgument(f"a ring has from 1 to 65536 entries, not {entries}")
        options.entries = entries
        options.inflight = inflight
        out = ffi.new("ffs_ring**")
        check(lib.ffs_ring_create(client.raw, options, out))
        self._raw = out[0]
        self.entries = entries
        self._one = ffi.new("ffs_sqe*")
        self._kept = ffi.new("ffs_py_kept*")  # filled by C: a signal may raise before a call's result is seen
        self._cqes = np.zeros(entries, dtype=CQE_DTYPE)
        self._cqes_bytes = self._cqes.view(np.uint8).reshape(entries, CQE_DTYPE.itemsize)
        self._cqes_raw = ffi.from_buffer("ffs_cqe[]", self._cqes, require_writable=True)

    @property
    def raw(self) -> Any:
        if self._raw is None:
            raise BadHandle("this ring is closed")
        return self._raw

    def prepare(self, sqes: NDArray[Any]) -> int:
        """Takes requests (contiguous, SQE_DTYPE), whole groups only; how many entries were taken.

        Fewer than given: the ring is full. InvalidArgument names the first bad one; then none was taken.
        The Iovs must stay open until their requests complete."""
        if sqes.dtype != SQE_DTYPE:
            raise InvalidArgument("requests have the dtype ffs._native.ring.SQE_DTYPE")
        if len(sqes) == 0:
            return 0
        entries = ffi.from_buffer("ffs_sqe[]", sqes)
        return check(lib.ffs_ring_prepare(self.raw, entries, len(sqes)))

    def prepare_one(
        self,
        op: int,
        chain: int,
        capability: int,
        key: bytes,
        offset: int,
        length: int,
        data: IovSlice | None,
        userdata: int,
        *,
        flags: int = 0,
        space_epoch: int = 0,
        logical_length: int = 0,
        timeout_ms: int = 0,
        target: int = 0,
        tag: bytes = b"",
        expiry_ms: int = 0,
        priority: int = 0,
        codec: int = 0,
    ) -> None:
        """One request; key: 24 bytes. `data` holds at least `length` bytes. RingFull, InvalidArgument."""
        if len(key) != 24 or len(tag) > 16:
            raise InvalidArgument(f"a key has 24 bytes and a tag at most 16, not {len(key)} and {len(tag)}")
        sqe = self._one
        sqe.op = op
        sqe.flags = flags
        sqe.tag_bytes = len(tag)
        sqe.codec = codec
        sqe.chain = chain
        sqe.capability = capability
        sqe.group = 1
        ffi.memmove(sqe.key, key, 24)
        sqe.offset = offset
        sqe.length = length
        sqe.logical_length = logical_length
        sqe.timeout_ms = timeout_ms
        if data is None:
            sqe.iov = ffi.NULL
            sqe.iov_offset = 0
        else:
            size = length * LIST_ENTRY_DTYPE.itemsize if op == OP_LIST_CHUNKS else length
            if op != OP_EXISTS and size > data.length:
                raise InvalidArgument(f"{size} bytes don't fit the slice {data!r}")
            sqe.iov = ffi.cast("ffs_iov*", data.iov.handle)
            sqe.iov_offset = data.offset
        sqe.space_epoch = space_epoch
        sqe.expiry_ms = expiry_ms
        sqe.userdata = userdata
        sqe.target = target
        ffi.memmove(sqe.tag, tag.ljust(16, b"\0"), 16)
        sqe.priority = priority
        taken = check(lib.ffs_ring_prepare(self.raw, sqe, 1))
        if taken == 0:
            raise RingFull(f"the ring holds its {self.entries} requests: submit and wait, then go on")

    def submit(self) -> int:
        """Sends what was prepared, or queues it behind a bound; how many. Never waits for a server."""
        return check(lib.ffs_ring_submit(self.raw))

    def wait(self, least: int = 1, timeout: float | None = None) -> tuple[NDArray[Any], int]:
        """Submits, then waits for `least` completions, at most `timeout` seconds (None: no limit).

        Returns (completions, events): an array of CQE_DTYPE of its own, and
        WAIT_TIMEOUT, WAIT_NEEDS_ROUTING (give set_routing newer routing if there is any, then wait again),
        WAIT_NEEDS_CAPABILITY (renew_capability, then wait again). Returns fewer than `least` if that many
        aren't in flight. Blocking, without the GIL; signals are handled: if one raises, what had come is
        returned by the next wait."""
        if least < 0:
            raise InvalidArgument(f"least {least}: give a number that isn't negative")
        kept = self._kept
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left_ms = STEP_MS if until is None else math.ceil((until - time.monotonic()) * 1000)
            step_ms = max(0, min(left_ms, STEP_MS))
            check(lib.ffs_py_wait(self.raw, self._cqes_raw, self.entries, least, step_ms, kept))
            events = kept.events
            if events == WAIT_TIMEOUT and (until is None or left_ms > STEP_MS):
                continue
            # As bytes: numpy copies a structure field by field, thirty times as slowly.
            out = np.frombuffer(bytearray(self._cqes_bytes[: kept.have]), dtype=CQE_DTYPE)
            # Last, and no call after it: signal handlers run at the end of calls.
            kept.have = kept.events = 0
            return out, events

    def move(
        self,
        file: FileEntries,
        op: int,
        flags: int,
        index: int,
        offset: int,
        length: int,
        iov: Iov,
        see_to: Callable[[int], None],
    ) -> int:
        """Moves `length` bytes between `offset` of the file's chunk `index` and the begin of `iov`, alone in
        this ring, which must be quiet; the bytes moved, or -errno: `moved` says more. One call of C.

        see_to: told of WAIT_NEEDS_ROUTING and WAIT_NEEDS_CAPABILITY, as wait's events. Blocking, without the
        GIL; if a signal raises, the request may be in flight still: close the ring then."""
        kept = self._kept
        check(
            lib.ffs_py_move(
                self.raw,
                file.raw,
                op,
                flags,
                index,
                offset,
                length,
                iov.handle,
                0,
                STEP_MS,
                self._cqes_raw,
                kept,
            )
        )
        while True:
            if kept.events & ~WAIT_TIMEOUT:
                see_to(kept.events)
            kept.events = 0
            if kept.have:
                break
            check(lib.ffs_py_wait(self.raw, self._cqes_raw, 1, 1, STEP_MS, kept))
        kept.have = 0
        result: int = self._cqes_raw[0].result
        return result

    @property
    def moved(self) -> Any:
        """The completion of the last `move`, a row of CQE_DTYPE."""
        return self._cqes[0]

    def cancel(self, userdata: int) -> None:
        """Requests with this userdata complete with ECANCELED, or as they would have. NotFound."""
        check(lib.ffs_ring_cancel(self.raw, userdata))

    def fileno(self) -> int:
        """Readable when wait(0) would make progress. The ring's own."""
        return check(lib.ffs_ring_fd(self.raw))

    def stats(self) -> RingStats:
        out = ffi.new("ffs_ring_stats*")
        check(lib.ffs_ring_get_stats(self.raw, out))
        return RingStats(**{name: int(getattr(out, name)) for name in RingStats.__slots__})

    def close(self) -> None:
        """Cancels what is in flight and waits until no server can touch its buffers. Idempotent; of several
        threads that close it at once one does, the others return at once. Busy: another thread is inside."""
        raw = self.__dict__.pop("_raw", None)  # in one step
        if raw is None:
            return
        try:
            check(lib.ffs_ring_destroy(raw))
        except FfsError:
            self._raw = raw
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_raw", None) is not None:
            lib.ffs_ring_destroy(self._raw)

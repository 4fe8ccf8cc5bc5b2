"""The storage server's data plane in this process. docs/architecture.md."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from ffs._native.lib import check, ffi, lib
from ffs._native.routes import ChainRoute, TargetRoute, c_chains, c_targets
from ffs.errors import BadHandle, InvalidArgument

__all__ = [
    "DISCARDS",
    "WRITE_CACHES",
    "ZERO_COPY_SENDS",
    "NativeServer",
    "ShardInfo",
    "ShardMetrics",
    "SpacePolicy",
    "SpaceUse",
    "TargetReport",
    "clock_ms",
]

ZERO_COPY_SENDS: Final = ("auto", "off", "on")  # by the numbers of FFS_ZERO_COPY_* (ffs.h)
WRITE_CACHES: Final = ("auto", "volatile", "protected")  # by the numbers of ffs_device_options (ffs.h)
DISCARDS: Final = ("auto", "off", "on")
_MAX_REPORTS: Final = 8192
KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard: its number, TCP port, Unix socket ("" without) and the targets on its device."""

    shard: int
    port: int
    socket_path: str
    targets: tuple[int, ...]


class TargetReport(NamedTuple):
    """What a target says of itself, as ffs_target_report (ffs.h): same names, same order. A tuple, since a
    heartbeat that is hurried makes one a target."""

    target: int
    chain: int
    recorded_term: int
    recorded_counter: int
    persisted_term: int
    persisted_counter: int
    persisted_here: bool
    state: int
    poisoned: bool
    used_bytes: int
    capacity_bytes: int
    free_bytes: int
    chunks: int
    reason: int
    leased: bool
    suspect: int
    sync_target: int
    sync_done: bool
    sync_failure: int
    sync_chunks_total: int
    sync_chunks_compared: int
    sync_chunks_sent: int
    sync_bytes_sent: int
    damaged: int
    repaired: int
    scrubbed_bytes: int


_FLAGS: Final = frozenset({"persisted_here", "poisoned", "leased", "sync_done"})


def _use(use: Any) -> SpaceUse:
    fields: dict[str, Any] = {n: int(getattr(use, n)) for n in SpaceUse.__slots__}
    return SpaceUse(**fields | {"ready": bool(use.ready)})


def _layout(kind: str, names: Sequence[str], flags: frozenset[str]) -> struct.Struct:
    """Of a C struct of unsigned numbers: one call reads all its fields. AssertionError: it isn't one, or its
    fields aren't `names`."""
    code, at = "<", 0  # as all that ffs runs on; a flag is its first byte
    fields = ffi.typeof(kind).fields
    assert [name for name, _ in fields] == list(names), (kind, names)
    for name, field in fields:
        assert field.type.kind == "primitive", (kind, name)
        size = ffi.sizeof(field.type)
        letter = "?xxx" if name in flags and size == 4 else {4: "I", 8: "Q"}[size]
        code += "x" * (field.offset - at) + letter
        at = field.offset + size
    return struct.Struct(code + "x" * (ffi.sizeof(kind) - at))


_REPORT: Final = _layout("ffs_target_report", TargetReport._fields, _FLAGS)


@dataclass(frozen=True, slots=True)
class ShardMetrics:
    """Counters of a shard, as ffs_shard_metrics (ffs.h)."""

    reads: int
    read_bytes: int
    updates: int
    update_bytes: int
    forwards: int
    refusals: int
    errors: int
    flushes: int
    journal_bytes: int
    long_steps: int
    longest_step_us: int
    sessions: int
    regions: int
    region_bytes: int
    pool_bytes: int
    pool_used_bytes: int
    ops_waiting: int
    bytes_copied: int
    crc_failures: int
    frame_errors: int
    recovery_bytes: int
    compaction_bytes: int
    scrub_bytes: int
    eviction_bytes: int
    background_held_us: int
    background_rate: int
    slow_reads: int
    longest_read_us: int
    scrubbed_bytes: int
    capacity_bytes: int
    free_bytes: int
    max_chunks: int
    chunks: int
    chunk_memory_bytes: int
    journal_used_bytes: int
    journal_size_bytes: int
    snapshots: int
    snapshot_age_us: int
    overlay_bytes: int
    checksum_errors: int
    free_slabs: int
    slabs_emptied: int
    moves: int
    moved_bytes: int
    moves_dropped: int
    waiting_for_room: int
    discards: int
    discarded_bytes: int
    discard_failures: int
    discards_due_bytes: int
    dedup_bytes: int
    dedup_shared: int
    dedup_differ: int
    shared_chunks: int
    saved_bytes: int
    rdma_sessions: int
    rdma_breaks: int
    rdma_sends: int
    rdma_writes: int
    rdma_reads: int
    rdma_credit_sends: int
    rdma_bytes: int
    rdma_doorbells: int
    rdma_completions: int
    rdma_receives: int
    memory_reads: int
    memory_read_copies: int
    memory_lent_bytes: int
    zero_copy_sends: int
    zero_copy_copied: int
    memory_writes: int


@dataclass(frozen=True, slots=True)
class SpacePolicy:
    """How a chain keeps a space, as ffs_space_policy (ffs.h). quota_bytes: as allocated on one replica, 0 for
    none; ttl_ms: the most that blocks get, 0 for none."""

    space: int
    chain: int
    evictable: bool
    quota_bytes: int
    ttl_ms: int
    dedup: bool = False


@dataclass(frozen=True, slots=True)
class SpaceUse:
    """What a target holds of a space, as ffs_space_use (ffs.h). Not `ready`: still being counted."""

    target: int
    space: int
    chunks: int
    bytes: int
    evicted_chunks: int
    evicted_bytes: int
    hits: int
    expired_chunks: int
    ready: bool
    shared_chunks: int = 0
    saved_bytes: int = 0


def clock_ms() -> int:
    """The clock of leases: milliseconds that go on while the machine sleeps. Any thread."""
    return int(lib.ffs_clock_ms())


class NativeServer:
    """Shards, each a native thread with its device. add_device before start; close at the end.

    node, incarnation, cluster: who it is. bind_host: numeric. socket_dir: where the Unix sockets of the
    transport `local` go, None for none. Sizes in bytes, 0 for defaults (ffs.h). failure_timeout_ms: the
    cluster's; sync_share_percent: of the device that background work may take beside clients;
    scrub_bytes_per_s: a device, 0 for no scrub; dedup_bytes_per_s: a device, compared to find equal chunks
    where spaces ask for it, 0 for none; peer_key: what servers prove to each other, then only signed
    capabilities are taken; None for neither. rdma: devices for RDMA, None for all, "off" for none;
    rdma_traffic_class: of what goes out over them (docs/rdma.md). zero_copy_send: one of ZERO_COPY_SENDS, of
    large replies over TCP. Any thread.
    """

    def __init__(
        self,
        node: int,
        incarnation: int,
        cluster: bytes,
        *,
        bind_host: str = "127.0.0.1",
        socket_dir: str | os.PathLike[str] | None = None,
        io_backend: str = "auto",
        pool_bytes: int = 0,
        region_limit_bytes: int = 0,
        max_sessions: int = 0,
        max_ops: int = 0,
        tcp_congestion: str | None = None,
        log_level: int = 0,
        failure_timeout_ms: int = 0,
        sync_share_percent: int = 0,
        scrub_bytes_per_s: int = 0,
        dedup_bytes_per_s: int = 0,
        peer_key: bytes | None = None,
        rdma: str | None = None,
        rdma_traffic_class: int = 0,
        zero_copy_send: str = "auto",
    ) -> None:
        self._raw: Any = None
        if len(cluster) != 16:
            raise InvalidArgument(f"a cluster id has 16 bytes, not {len(cluster)}")
        options = ffi.new("ffs_server_options*")
        options.struct_size = ffi.sizeof("ffs_server_options")
        options.log_level = log_level
        options.node = node
        options.incarnation = incarnation
        options.cluster = list(cluster)
        kept = [  # alive during the call; C copies
            ffi.new("char[]", bind_host.encode()),
            ffi.NULL if socket_dir is None else ffi.new("char[]", os.fsencode(socket_dir)),
            ffi.new("char[]", io_backend.encode()),
            ffi.NULL if tcp_congestion is None else ffi.new("char[]", tcp_congestion.encode()),
        ]
        options.bind_host, options.socket_dir, options.io_backend, options.tcp_congestion = kept
        options.pool_bytes = pool_bytes
        options.region_limit_bytes = region_limit_bytes
        options.max_sessions = max_sessions
        options.max_ops = max_ops
        options.failure_timeout_ms = failure_timeout_ms
        options.sync_share_percent = sync_share_percent
        options.scrub_bytes_per_s = scrub_bytes_per_s
        options.dedup_bytes_per_s = dedup_bytes_per_s
        options.rdma_traffic_class = rdma_traffic_class
        options.zero_copy_send = ZERO_COPY_SENDS.index(zero_copy_send)
        if rdma is not None:
            kept.append(ffi.new("char[]", rdma.encode()))
            options.rdma = kept[-1]
        if peer_key is not None:
            if len(peer_key) != KEY_BYTES:
                raise InvalidArgument(f"a peer key has {KEY_BYTES} bytes, not {len(peer_key)}")
            kept.append(ffi.new("uint8_t[]", peer_key))
            options.peer_key = kept[-1]
        out = ffi.new("ffs_server**")
        check(lib.ffs_server_create(options, out))
        self._raw = out[0]

    @property
    def raw(self) -> Any:
        if self._raw is None:
            raise BadHandle("this server is closed")
        return self._raw

    def add_device(
        self,
        path: str | os.PathLike[str],
        *,
        write_cache: str = "auto",
        discard: str = "auto",
        null_data: bool = False,
    ) -> ShardInfo:
        """Opens and recovers a device, binds the shard's port and socket. Blocking.

        write_cache: one of WRITE_CACHES; discard: one of DISCARDS; null_data: it was formatted so, and keeps
        no bytes (InvalidArgument where the device and this don't agree). Busy; FfsError with ENOMEDIUM (not
        formatted); ChecksumMismatch; Unsupported; ProtocolError (another cluster's); NoSpace (smaller than it
        was)."""
        options = ffi.new("ffs_device_options*")
        options.struct_size = ffi.sizeof("ffs_device_options")
        options.write_cache = WRITE_CACHES.index(write_cache)
        options.discard = DISCARDS.index(discard)
        options.null_data = null_data
        out = ffi.new("ffs_shard_info*")
        check(lib.ffs_server_add_device(self.raw, os.fsencode(path), options, out))
        return ShardInfo(
            shard=out.shard,
            port=out.port,
            socket_path=os.fsdecode(ffi.string(out.socket_path)),
            targets=tuple(out.targets[0 : out.target_count]),
        )

    def start(self) -> None:
        check(lib.ffs_server_start(self.raw))

    def configure(
        self, epoch: int, manager_ms: int, chains: Sequence[ChainRoute], targets: Sequence[TargetRoute]
    ) -> None:
        """Hands chains (recorded and proposed) and places to the shards; manager_ms: manager time.

        Returns when all have taken them. Idempotent; older versions change nothing. The same tuples again
        cost less (routes.py)."""
        in_c, places = c_chains(chains), c_targets(targets)
        check(lib.ffs_server_configure(self.raw, epoch, manager_ms, in_c, len(in_c), places, len(places)))

    def report(self) -> list[TargetReport]:
        """What each target says of itself."""
        capacity = 128
        while True:
            out = ffi.new("ffs_target_report[]", capacity)
            count = check(lib.ffs_server_report(self.raw, out, capacity))
            if count < capacity or capacity >= _MAX_REPORTS:
                break
            capacity *= 4
        said = _REPORT.iter_unpack(ffi.buffer(out)[: count * _REPORT.size])
        return [TargetReport._make(fields) for fields in said]

    def lease(self, until_ms: int) -> None:
        """The manager's lease on this node holds until then, on clock_ms. An earlier time changes nothing.
        Blocking, short."""
        check(lib.ffs_server_lease(self.raw, until_ms))

    def set_keys(self, keys: Sequence[tuple[int, bytes]]) -> None:
        """The keys (id, secret) that sign capabilities from now on, at most 8; what was opened under others
        is refused. Blocking, short."""
        in_c = ffi.new("ffs_signing_key[]", len(keys))
        for to, (number, secret) in zip(in_c, keys, strict=True):
            to.id = number
            to.secret = secret
        check(lib.ffs_server_set_keys(self.raw, in_c, len(keys)))

    def set_spaces(self, policies: Sequence[SpacePolicy]) -> None:
        """Replaces what is known of quotas and times to live; chains that aren't here are ignored.
        Idempotent. Blocking, short."""
        in_c = ffi.new("ffs_space_policy[]", len(policies))
        for to, policy in zip(in_c, policies, strict=True):
            to.space, to.chain = policy.space, policy.chain
            to.flags = lib.FFS_SPACE_EVICTABLE if policy.evictable else 0
            to.flags |= lib.FFS_SPACE_DEDUP if policy.dedup else 0
            to.quota_bytes, to.ttl_ms = policy.quota_bytes, policy.ttl_ms
        check(lib.ffs_server_set_spaces(self.raw, in_c, len(policies)))

    def space_use(self) -> list[SpaceUse]:
        """What each target holds of each space with a policy. Blocking, short."""
        capacity = 256
        while True:
            out = ffi.new("ffs_space_use[]", capacity)
            count = check(lib.ffs_server_space_use(self.raw, out, capacity))
            if count <= capacity:
                return [_use(out[i]) for i in range(count)]
            capacity = count

    def release_target(self, target: int) -> None:
        """The target is in no chain any more: drops what it holds. Returns at once; its reports name chain 0
        when it is done. Idempotent. NotFound: not on a device of this server."""
        check(lib.ffs_server_release_target(self.raw, target))

    @property
    def news_fd(self) -> int:
        """A descriptor that is readable when `report` has news for the manager; `read_news` rearms it. This
        object's: it is closed with it."""
        return check(lib.ffs_server_news_fd(self.raw))

    def read_news(self) -> None:
        """Rearms news_fd. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.news_fd, 8)

    def metrics(self, shard: int) -> ShardMetrics:
        """Counters of a shard. InvalidArgument: no such shard."""
        out = ffi.new("ffs_shard_metrics*")
        check(lib.ffs_server_metrics(self.raw, shard, out))
        return ShardMetrics(**{name: int(getattr(out, name)) for name in ShardMetrics.__slots__})

    def fence(self, client: int) -> None:
        """Refuses all further updates of a client session, on every target. Blocking."""
        check(lib.ffs_server_fence(self.raw, client))

    def stop(self) -> None:
        """Stops listening, ends sessions, snapshots, closes devices. Blocking."""
        check(lib.ffs_server_stop(self.raw))

    def close(self) -> None:
        """Frees it (stopping it first if need be). Idempotent."""
        if self._raw is not None:
            lib.ffs_server_destroy(self._raw)
            self._raw = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""Prometheus metrics over HTTP: `GET /metrics`. docs/operations.md, Metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from ffs._native.server import ShardMetrics, SpaceUse, TargetReport
from ffs.errors import error_of
from ffs.rpc.address import Address, format_address

READ_TIMEOUT_S: Final = 5.0
MAX_HEAD_BYTES: Final = 8192

# Which of ffs_shard_metrics only grow, in the units that Prometheus wants.
COUNTERS: Final = {
    "reads": ("ffs_reads_total", "chunk reads answered", 1.0),
    "read_bytes": ("ffs_read_bytes_total", "bytes read by clients", 1.0),
    "updates": ("ffs_updates_total", "updates answered", 1.0),
    "update_bytes": ("ffs_update_bytes_total", "bytes written by clients", 1.0),
    "forwards": ("ffs_forwards_total", "updates forwarded along chains", 1.0),
    "refusals": ("ffs_refusals_total", "updates refused", 1.0),
    "errors": ("ffs_errors_total", "requests answered with an error", 1.0),
    "flushes": ("ffs_flushes_total", "flushes of the device", 1.0),
    "journal_bytes": ("ffs_journal_bytes_total", "bytes written to the journal", 1.0),
    "long_steps": ("ffs_long_steps_total", "steps of the loop longer than 1 ms", 1.0),
    "bytes_copied": ("ffs_copied_bytes_total", "payload bytes copied by the CPU", 1.0),
    "crc_failures": ("ffs_crc_failures_total", "payloads or chunks that didn't match their checksum", 1.0),
    "frame_errors": ("ffs_frame_errors_total", "frames that were refused", 1.0),
    "recovery_bytes": ("ffs_recovery_bytes_total", "bytes read and written to fill and repair replicas", 1.0),
    "compaction_bytes": ("ffs_compaction_bytes_total", "bytes read and written by compaction", 1.0),
    "scrub_bytes": ("ffs_scrub_bytes_total", "bytes read by the scrubber", 1.0),
    "eviction_bytes": ("ffs_eviction_bytes_total", "share taken by evictions ahead of need", 1.0),
    "background_held_us": (
        "ffs_background_held_seconds_total",
        "background work waited for its share or behind clients",
        1e-6,
    ),
    "slow_reads": ("ffs_slow_reads_total", "client reads slower beside background work than without", 1.0),
    "scrubbed_bytes": ("ffs_scrubbed_bytes_total", "bytes that the scrubber has checked", 1.0),
    "snapshots": ("ffs_snapshots_total", "snapshots of the index written", 1.0),
    "checksum_errors": (
        "ffs_checksum_errors_total",
        "granules on the device that failed their checksum",
        1.0,
    ),
    "slabs_emptied": ("ffs_slabs_emptied_total", "slabs that compaction has emptied", 1.0),
    "moves": ("ffs_moves_total", "chunks moved by compaction", 1.0),
    "moved_bytes": ("ffs_moved_bytes_total", "bytes moved by compaction", 1.0),
    "moves_dropped": ("ffs_moves_dropped_total", "moves given up for an update, or a bad granule", 1.0),
    "discards": ("ffs_discards_total", "ranges given back to the device", 1.0),
    "discarded_bytes": ("ffs_discarded_bytes_total", "bytes given back to the device", 1.0),
    "rdma_sessions": ("ffs_rdma_sessions_total", "data connections that went over to RDMA", 1.0),
    "rdma_breaks": ("ffs_rdma_breaks_total", "RDMA connections that broke", 1.0),
    "rdma_bytes": ("ffs_rdma_bytes_total", "bytes written and read over RDMA", 1.0),
    "rdma_writes": ("ffs_rdma_writes_total", "RDMA WRITE work requests", 1.0),
    "rdma_reads": ("ffs_rdma_reads_total", "RDMA READ work requests", 1.0),
    "rdma_sends": ("ffs_rdma_sends_total", "messages sent over RDMA", 1.0),
    "rdma_credit_sends": ("ffs_rdma_credit_sends_total", "messages that only say what may be sent", 1.0),
    "rdma_receives": ("ffs_rdma_receives_total", "messages received over RDMA", 1.0),
    "rdma_doorbells": ("ffs_rdma_doorbells_total", "posts to RDMA send queues", 1.0),
    "rdma_completions": ("ffs_rdma_completions_total", "reports of RDMA send queues", 1.0),
    "memory_reads": ("ffs_memory_reads_total", "reads sent out of the memory of the device itself", 1.0),
    "memory_read_copies": (
        "ffs_memory_read_copies_total",
        "of them, copied after all: their reader's socket was full for long",
        1.0,
    ),
    "zero_copy_sends": ("ffs_zero_copy_sends_total", "sends over TCP without a copy", 1.0),
    "zero_copy_copied": (
        "ffs_zero_copy_copied_total",
        "of them, those that the kernel copied after all",
        1.0,
    ),
    "memory_writes": (
        "ffs_memory_writes_total",
        "new blocks received straight into the memory of the device",
        1.0,
    ),
    "discard_failures": ("ffs_discard_failures_total", "discards that the device refused", 1.0),
    "dedup_bytes": ("ffs_dedup_bytes_total", "bytes read and compared to find equal blocks", 1.0),
    "dedup_shared": ("ffs_dedup_shared_total", "blocks put into the slot of an equal one", 1.0),
    "dedup_differ": ("ffs_dedup_differ_total", "blocks of equal checksums and other bytes", 1.0),
}
GAUGES: Final = {
    "longest_step_us": ("ffs_longest_step_seconds", "longest step of the loop since the start", 1e-6),
    "sessions": ("ffs_sessions", "data connections", 1.0),
    "regions": ("ffs_regions", "registered regions of client memory", 1.0),
    "region_bytes": ("ffs_region_bytes", "registered client memory", 1.0),
    "pool_bytes": ("ffs_pool_bytes", "buffers of the shard", 1.0),
    "pool_used_bytes": ("ffs_pool_used_bytes", "buffers in use", 1.0),
    "memory_lent_bytes": ("ffs_memory_lent_bytes", "on their way out of the device's memory", 1.0),
    "ops_waiting": ("ffs_ops_waiting", "requests that wait for an op or a buffer", 1.0),
    "background_rate": (
        "ffs_background_rate_bytes_per_second",
        "what background work may take beside clients now",
        1.0,
    ),
    "longest_read_us": ("ffs_longest_read_seconds", "longest read of a client since the start", 1e-6),
    "capacity_bytes": ("ffs_device_capacity_bytes", "room for chunks on the device", 1.0),
    "free_bytes": ("ffs_device_free_bytes", "what new chunks may still take", 1.0),
    "max_chunks": ("ffs_device_max_chunks", "chunks that the device may hold", 1.0),
    "chunks": ("ffs_device_chunks", "chunks on the device", 1.0),
    "chunk_memory_bytes": ("ffs_chunk_memory_bytes", "memory for what is known of chunks", 1.0),
    "journal_used_bytes": ("ffs_journal_used_bytes", "of the journal, since the last snapshot began", 1.0),
    "journal_size_bytes": ("ffs_journal_size_bytes", "size of the journal", 1.0),
    "snapshot_age_us": ("ffs_snapshot_age_seconds", "since the last snapshot, or the start", 1e-6),
    "overlay_bytes": ("ffs_overlay_bytes", "small updates that wait to be applied in place", 1.0),
    "discards_due_bytes": ("ffs_discards_due_bytes", "freed and not given back to the device yet", 1.0),
    "shared_chunks": ("ffs_shared_chunks", "chunks in slots that others have too", 1.0),
    "saved_bytes": ("ffs_dedup_saved_bytes", "space that there would be used without sharing", 1.0),
    "free_slabs": ("ffs_free_slabs", "slabs of 16 MiB that no size class holds", 1.0),
    "waiting_for_room": ("ffs_waiting_for_room", "updates that wait for compaction to make room", 1.0),
}

# Of ffs_target_report.
TARGETS: Final = {
    "state": ("ffs_target_state", "gauge", "0 offline, 1 serving, 2 syncing"),
    "leased": ("ffs_target_leased", "gauge", "1: it has a lease, from the manager or from its peers"),
    "poisoned": ("ffs_target_poisoned", "gauge", "1: its device refuses everything until a restart"),
    "used_bytes": ("ffs_target_used_bytes", "gauge", "space used by a target"),
    "chunks": ("ffs_target_chunks", "gauge", "committed chunks"),
    "damaged": ("ffs_target_damaged_chunks", "gauge", "chunks known to be damaged now"),
    "repaired": ("ffs_target_repaired_total", "counter", "chunks repaired from another replica"),
    "scrubbed_bytes": ("ffs_target_scrubbed_bytes_total", "counter", "bytes that the scrubber has checked"),
    "sync_chunks_sent": ("ffs_target_sync_chunks_sent", "gauge", "of the sync that it is the source of"),
    "sync_bytes_sent": ("ffs_target_sync_bytes_sent", "gauge", "of the sync that it is the source of"),
}


# Of ffs_space_use.
SPACES: Final = {
    "chunks": ("ffs_space_chunks", "gauge", "committed chunks of a space with a policy, on a target"),
    "bytes": ("ffs_space_bytes", "gauge", "space that they take, as allocated"),
    "evicted_chunks": ("ffs_space_evicted_total", "counter", "chunks evicted to make room, by the head"),
    "evicted_bytes": ("ffs_space_evicted_bytes_total", "counter", "space that evictions have given back"),
    "expired_chunks": ("ffs_space_expired_total", "counter", "chunks removed because they had expired"),
    "shared_chunks": ("ffs_space_shared_chunks", "gauge", "of the chunks: in slots that others have too"),
    "saved_bytes": ("ffs_space_saved_bytes", "gauge", "space that there would be used without sharing"),
    "hits": ("ffs_space_hits_total", "counter", "uses of chunks that were there, at this target"),
}


def render(
    shards: Sequence[ShardMetrics],
    reports: Sequence[TargetReport],
    facts: dict[str, float],
    spaces: Sequence[SpaceUse] = (),
) -> str:
    """The text exposition format, version 0.0.4. `facts` are gauges of the process. Pure."""
    lines: list[str] = []
    for kind, table in (("counter", COUNTERS), ("gauge", GAUGES)):
        for field, (name, help_text, unit) in table.items():
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            for number, shard in enumerate(shards):
                value = getattr(shard, field) * unit
                lines.append(f'{name}{{shard="{number}"}} {_number(value)}')
    for field, (name, kind, help_text) in TARGETS.items():
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        lines += [
            f'{name}{{target="{report.target}",chain="{report.chain}"}} {int(getattr(report, field))}'
            for report in reports
        ]
    for field, (name, kind, help_text) in SPACES.items():
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        lines += [
            f'{name}{{target="{use.target}",space="{use.space}"}} {getattr(use, field)}' for use in spaces
        ]
    for name, value in facts.items():
        lines += [f"# TYPE {name} gauge", f"{name} {_number(value)}"]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


class MetricsServer:
    """`async with MetricsServer(address, text)`; `text` is called for each request."""

    def __init__(self, listen: Address, text: Callable[[], str]) -> None:
        self._listen = listen
        self._text = text
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> Address:
        assert self._server is not None
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    async def __aenter__(self) -> MetricsServer:
        try:
            self._server = await asyncio.start_server(self._answer, *self._listen, limit=MAX_HEAD_BYTES)
        except OSError as error:
            where = format_address(self._listen)
            raise error_of(
                error.errno or 5, f"can't serve metrics on {where}: {error.strerror or error}"
            ) from None
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            line = head.split(b"\r\n", 1)[0].split(b" ")
            if len(line) == 3 and line[0] == b"GET" and line[1].split(b"?")[0] == b"/metrics":
                status, body = "200 OK", self._text().encode()
            else:
                status, body = "404 Not Found", b"GET /metrics\n"
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a scraper that went away or doesn't speak HTTP
        finally:
            writer.close()

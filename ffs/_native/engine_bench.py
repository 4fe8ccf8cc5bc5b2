"""The chunk engine without a server, for `ffs bench engine` (native/bench/engine_driver.h)."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Final, Self

from ffs._native.lib import check, ffi, lib
from ffs.errors import BadHandle, InvalidArgument

__all__ = ["EngineBench", "EngineCount", "EngineFacts", "Scale", "measure_scale"]

_WORK: Final = {"read": 0, "write": 1, "overwrite": 2}
_BESIDE: Final = {"": 0, "snapshots": 1, "compaction": 2}


@dataclass(frozen=True, slots=True)
class EngineCount:
    """What one run did. `longest_step_us` is of the store since it was opened; all else of the run."""

    operations: int
    elapsed_ns: int
    flushes: int
    journal_bytes: int
    snapshots: int
    moved_bytes: int
    longest_step_us: int
    longest_operation_us: int
    granules_read: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """`data_offset`: where chunks begin in its file, to within 16 MiB."""

    chunks: int
    data_offset: int


@dataclass(frozen=True, slots=True)
class Scale:
    """A store with many chunks of 1 MiB. `memory_bytes` is the store's own count, `resident_bytes` the
    process's difference to the same store without chunks."""

    chunks: int
    memory_bytes: int
    resident_bytes: int
    open_us: int
    open_cpu_us: int
    snapshot_us: int
    snapshot_bytes: int
    longest_step_us: int
    longest_pass_cpu_us: int


def measure_scale(path: str | os.PathLike[str], chunks: int) -> Scale:
    """In a sparse file at `path`, removed at the end. For a process of its own. Blocks for seconds."""
    report = ffi.new("ffs_engine_bench_scale_report*")
    report.struct_size = ffi.sizeof("ffs_engine_bench_scale_report")
    name = ffi.new("char[]", os.fsencode(path))
    check(lib.ffs_engine_bench_scale(name, chunks, report))
    return Scale(**{item.name: int(getattr(report, item.name)) for item in fields(Scale)})


class EngineBench:
    """A store on a new file at `path`, which is removed at the end. Use it in the thread that made it; all
    calls block. Sizes in bytes; `depth` bounds the operations in flight of all runs."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size_bytes: int,
        depth: int = 64,
        max_chunks: int = 0,
        journal_bytes: int = 0,
        backend: str = "auto",
    ) -> None:
        self._raw: Any = None
        options = ffi.new("ffs_engine_bench_options*")
        options.struct_size = ffi.sizeof("ffs_engine_bench_options")
        name = ffi.new("char[]", os.fsencode(path))
        options.path = name
        io_backend = ffi.new("char[]", backend.encode())
        options.io_backend = io_backend
        options.size_bytes = size_bytes
        options.max_chunks = max_chunks
        options.journal_bytes = journal_bytes
        options.depth = depth
        out = ffi.new("ffs_engine_bench**")
        check(lib.ffs_engine_bench_open(options, out))
        self._raw = out[0]

    def _handle(self) -> Any:
        if self._raw is None:
            raise BadHandle("this engine is closed")
        return self._raw

    def fill(self, first: int, count: int, chunk_bytes: int) -> None:
        """Makes chunks number first .. first + count - 1."""
        check(lib.ffs_engine_bench_fill(self._handle(), first, count, chunk_bytes))

    def thin(self, keep: int) -> None:
        """Removes all chunks but every `keep`-th."""
        check(lib.ffs_engine_bench_thin(self._handle(), keep))

    def run(
        self,
        work: str,
        duration_ms: int,
        *,
        block_bytes: int,
        depth: int,
        random: bool = False,
        working_set: int = 0,
        plain: bool = False,
        beside: str = "",
    ) -> EngineCount:
        """Keeps the depth for about duration_ms, then lets it drain. `working_set`: chunks, 0 for all;
        `plain`: from memory that isn't registered."""
        if work not in _WORK or beside not in _BESIDE:
            known = ", ".join((*_WORK, *filter(None, _BESIDE)))
            raise InvalidArgument(f"work {work!r} beside {beside!r}: there are {known}")
        load = ffi.new("ffs_engine_bench_load*")
        load.struct_size = ffi.sizeof("ffs_engine_bench_load")
        load.work = _WORK[work]
        load.block_bytes = block_bytes
        load.depth = depth
        load.random = random
        load.working_set = working_set
        load.plain = plain
        load.beside = _BESIDE[beside]
        count = ffi.new("ffs_engine_bench_count*")
        count.struct_size = ffi.sizeof("ffs_engine_bench_count")
        check(lib.ffs_engine_bench_run(self._handle(), load, duration_ms, count))
        return EngineCount(
            operations=int(count.operations),
            elapsed_ns=int(count.elapsed_ns),
            flushes=int(count.flushes),
            journal_bytes=int(count.journal_bytes),
            snapshots=int(count.snapshots),
            moved_bytes=int(count.moved_bytes),
            longest_step_us=int(count.longest_step_us),
            longest_operation_us=int(count.longest_operation_us),
            granules_read=int(count.granules_read),
        )

    def reopen(self) -> None:
        """Closes the store and opens it again: its counters start anew."""
        check(lib.ffs_engine_bench_reopen(self._handle()))

    def facts(self) -> EngineFacts:
        facts = ffi.new("ffs_engine_bench_fact_sheet*")
        facts.struct_size = ffi.sizeof("ffs_engine_bench_fact_sheet")
        check(lib.ffs_engine_bench_facts(self._handle(), facts))
        return EngineFacts(int(facts.chunks), int(facts.data_offset))

    def close(self) -> None:
        if self._raw is not None:
            lib.ffs_engine_bench_close(self._raw)
            self._raw = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""Devices: formatting, growing, looking at and checking them. Blocking. docs/disk_format.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ffs._native.lib import check, crc32c, ffi, host_id, lib
from ffs.errors import InvalidArgument

__all__ = [
    "CheckReport",
    "ClassUse",
    "DeviceInfo",
    "DeviceProblem",
    "DeviceState",
    "TargetUse",
    "crc32c",
    "device_check",
    "device_discard",
    "device_format",
    "device_grow",
    "device_inspect",
    "device_survey",
    "host_id",
]

VERDICTS: Final = ("clean", "damaged", "unjudged")  # by ffs_check_report.verdict (ffs.h)
PROBLEM_KINDS: Final = ("recovery", "clash", "accounts", "content")  # by ffs_device_problem.kind


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device's superblock says. Sizes in bytes, created_ms in Unix time."""

    cluster: bytes
    device_uuid: bytes
    size_bytes: int
    max_chunks: int
    journal_bytes: int
    created_ms: int
    features_compat: int
    features_ro_compat: int
    features_incompat: int
    sector_bytes: int
    format_version: int
    targets: tuple[int, ...]


def device_format(
    path: str | os.PathLike[str],
    *,
    cluster: bytes,
    targets: Sequence[int],
    size_bytes: int = 0,
    max_chunks: int = 0,
    journal_bytes: int = 0,
    sector_bytes: int = 0,
    device_uuid: bytes = bytes(16),
    force: bool = False,
    sparse: bool = False,
    only_look: bool = False,
    null_data: bool = False,
) -> None:
    """Makes a device (or a file of size_bytes) ready for `targets` of `cluster` (16 bytes).

    0 and zero bytes: chosen. Busy: in use; FfsError with EROFS: read-only; Exists: it holds something
    (force=True overwrites); NoSpace: too small (the message names the least size); InvalidArgument. Nothing
    half made. only_look: refuses the same, and writes nothing. null_data: a file that keeps records and no
    bytes, for measuring (docs/guides/bench.md, Null devices)."""
    if len(cluster) != 16 or len(device_uuid) != 16:
        raise InvalidArgument("a cluster id and a device uuid have 16 bytes")
    ids = ffi.new("uint64_t[]", list(targets))
    options = ffi.new("ffs_format_options*")
    options.struct_size = ffi.sizeof("ffs_format_options")
    options.sector_bytes = sector_bytes
    options.size_bytes = size_bytes
    options.max_chunks = max_chunks
    options.journal_bytes = journal_bytes
    options.targets = ids
    options.target_count = len(ids)
    options.force = force
    options.sparse = sparse
    options.only_look = only_look
    options.null_data = null_data
    options.cluster = list(cluster)
    options.device_uuid = list(device_uuid)
    check(lib.ffs_device_format(os.fsencode(path), options))


def device_inspect(path: str | os.PathLike[str]) -> DeviceInfo:
    """Reads a device's superblocks. FfsError with ENOMEDIUM: none there; ChecksumMismatch: damaged;
    Unsupported: written by a newer version (the message says which)."""
    out = ffi.new("ffs_device_info*")
    check(lib.ffs_device_inspect(os.fsencode(path), out))
    return _info(out)


def device_grow(path: str | os.PathLike[str], size_bytes: int = 0) -> DeviceInfo:
    """Takes in what a device has beyond its store. size_bytes, if not 0: a file is lengthened to that first.

    Busy: in use; InvalidArgument: nothing to take in (with the numbers); else as device_inspect."""
    out = ffi.new("ffs_device_info*")
    check(lib.ffs_device_grow(os.fsencode(path), size_bytes, out))
    return _info(out)


def device_discard(path: str | os.PathLike[str]) -> int:
    """Gives all free space of a store that isn't open back to its device, or to the disk of its file. Bytes.

    Busy: in use; Unsupported: the device can't; else as device_inspect."""
    out = ffi.new("uint64_t*")
    check(lib.ffs_device_discard(os.fsencode(path), out))
    return int(out[0])


@dataclass(frozen=True, slots=True)
class ClassUse:
    """Slots of one class: slot_bytes each; slabs of 16 MiB that are cut into them."""

    slot_bytes: int
    slabs: int
    slots_used: int
    slots_free: int


@dataclass(frozen=True, slots=True)
class TargetUse:
    """What a target holds; chunks are committed ones."""

    target: int
    chunks: int
    logical_bytes: int
    allocated_bytes: int
    pending_versions: int
    retry_entries: int
    space_epochs: int
    chain_state_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device as a whole, as ffs_device_state (ffs.h): sizes in bytes, times Unix milliseconds.

    `recovered` False: what stands behind it isn't known, `reason` says why (in use, damaged)."""

    info: DeviceInfo
    device_bytes: int
    superblock_sequence: int
    superblock_copies: int
    block_device: bool
    device_sector_bytes: int
    flushes: bool
    cache_reason: str
    discard_bytes: int
    discard_granularity: int
    written_by: str
    snapshot_id: int
    snapshot_ms: int
    snapshot_bytes: int
    snapshot_area_bytes: int
    recovered: bool
    reason: str
    journal_used_bytes: int
    slabs: int
    free_slabs: int
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    chunks: int
    classes: tuple[ClassUse, ...]
    targets: tuple[TargetUse, ...]


def device_survey(path: str | os.PathLike[str]) -> DeviceState:
    """Looks at a device, its superblock and what is stored, without writing. As long as an opening takes.

    Of a device that is in use or damaged only the superblock is told (recovered False); errors as of
    device_inspect."""
    out = ffi.new("ffs_device_state*")
    check(lib.ffs_device_survey(os.fsencode(path), out))
    return _state(out)


@dataclass(frozen=True, slots=True)
class DeviceProblem:
    """Something wrong on a device. kind: one of PROBLEM_KINDS; of a chunk for "clash" and "content", else
    target is 0; version (term, counter, update) for "content"."""

    kind: str
    target: int
    space: int
    key: bytes  # 16 bytes
    version: tuple[int, int, int]
    pending: bool
    text: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found. verdict: one of VERDICTS; reason: why it can't be judged; problem_count: of all,
    `problems` are the first; data_bytes: compared with their checksums; note: harmless, or ""."""

    verdict: str
    reason: str
    note: str
    problem_count: int
    problems: tuple[DeviceProblem, ...]
    chunks: int
    pending_versions: int
    data_bytes: int
    state: DeviceState


def device_check(
    path: str | os.PathLike[str], *, data: bool = False, depth: int = 0, max_problems: int = 1000
) -> CheckReport:
    """Checks a device without writing (ffs.h). data: read all chunks, `depth` at a time. Raises nothing for
    what is wrong with it: see the verdict."""
    options = ffi.new("ffs_check_options*")
    options.struct_size = ffi.sizeof("ffs_check_options")
    options.data = data
    options.depth = depth
    out, state = ffi.new("ffs_check_report*"), ffi.new("ffs_device_state*")
    problems = ffi.new("ffs_device_problem[]", max_problems)
    check(lib.ffs_device_check(os.fsencode(path), options, out, state, problems, max_problems))
    return CheckReport(
        verdict=VERDICTS[out.verdict],
        reason=_text(out.reason),
        note=_text(out.note),
        problem_count=out.problems,
        problems=tuple(_problem(problem) for problem in problems[0 : min(out.problems, max_problems)]),
        chunks=out.chunks,
        pending_versions=out.pending_versions,
        data_bytes=out.data_bytes,
        state=_state(state),
    )


def _text(field: Any) -> str:
    raw: bytes = ffi.string(field)
    return raw.decode(errors="replace")


def _info(out: Any) -> DeviceInfo:
    return DeviceInfo(
        cluster=bytes(out.cluster),
        device_uuid=bytes(out.device_uuid),
        size_bytes=out.size_bytes,
        max_chunks=out.max_chunks,
        journal_bytes=out.journal_bytes,
        created_ms=out.created_ms,
        features_compat=out.features_compat,
        features_ro_compat=out.features_ro_compat,
        features_incompat=out.features_incompat,
        sector_bytes=out.sector_bytes,
        format_version=out.format_version,
        targets=tuple(out.targets[0 : out.target_count]),
    )


def _state(out: Any) -> DeviceState:
    targets = out.targets[0 : out.info.target_count] if out.recovered else ()
    return DeviceState(
        info=_info(out.info),
        device_bytes=out.device_bytes,
        superblock_sequence=out.superblock_sequence,
        superblock_copies=out.superblock_copies,
        block_device=bool(out.block_device),
        device_sector_bytes=out.device_sector_bytes,
        flushes=bool(out.flushes),
        cache_reason=_text(out.cache_reason),
        discard_bytes=out.discard_bytes,
        discard_granularity=out.discard_granularity,
        written_by=_text(out.written_by),
        snapshot_id=out.snapshot_id,
        snapshot_ms=out.snapshot_ms,
        snapshot_bytes=out.snapshot_bytes,
        snapshot_area_bytes=out.snapshot_area_bytes,
        recovered=bool(out.recovered),
        reason=_text(out.reason),
        journal_used_bytes=out.journal_used_bytes,
        slabs=out.slabs,
        free_slabs=out.free_slabs,
        capacity_bytes=out.capacity_bytes,
        used_bytes=out.used_bytes,
        free_bytes=out.free_bytes,
        chunks=out.chunks,
        classes=tuple(
            ClassUse(4096 << number, c.slabs, c.slots_used, c.slots_free)
            for number, c in enumerate(out.classes)
        ),
        targets=tuple(TargetUse(*(int(getattr(t, name)) for name in TargetUse.__slots__)) for t in targets),
    )


def _problem(problem: Any) -> DeviceProblem:
    return DeviceProblem(
        kind=PROBLEM_KINDS[problem.kind],
        target=problem.target,
        space=problem.space,
        key=bytes(problem.key),
        version=(problem.term, problem.counter, problem.update),
        pending=bool(problem.pending),
        text=_text(problem.text),
    )

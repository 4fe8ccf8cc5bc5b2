"""What `ffs device inspect` and `check` say: lines for people, fields for programs. Pure."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from ffs.cli.text import format_bytes, format_seconds, plural, table

if TYPE_CHECKING:
    from ffs._native.device import CheckReport, DeviceProblem, DeviceState

UNLIMITED = 2**64 - 1  # of discard_bytes
SUPERBLOCKS = {
    3: "both copies whole",
    2: "the copy at byte 0 is damaged",
    1: "the copy at byte 65536 is damaged",
}


def state_fields(state: DeviceState) -> dict[str, object]:
    """All of it, for JSON. `stored` is null where recovery wasn't possible; then `reason` says why."""
    info = state.info
    return {
        "cluster": info.cluster.hex(),
        "uuid": info.device_uuid.hex(),
        "size": info.size_bytes,
        "device_size": state.device_bytes,
        "block_device": state.block_device,
        "sector": info.sector_bytes,
        "device_sector": state.device_sector_bytes,
        "format": info.format_version,
        "written_by": state.written_by,
        "created_ms": info.created_ms,
        "journal": info.journal_bytes,
        "max_chunks": info.max_chunks,
        "targets": list(info.targets),
        "features": {
            "compat": info.features_compat,
            "ro_compat": info.features_ro_compat,
            "incompat": info.features_incompat,
        },
        "superblock": {"sequence": state.superblock_sequence, "copies": state.superblock_copies},
        "write_cache": {"flushes": state.flushes, "reason": state.cache_reason},
        "discard": {"bytes": state.discard_bytes, "granularity": state.discard_granularity},
        "snapshot": {
            "id": state.snapshot_id,
            "completed_ms": state.snapshot_ms,
            "bytes": state.snapshot_bytes,
            "area": state.snapshot_area_bytes,
        },
        "recovered": state.recovered,
        "reason": state.reason,
        "stored": _stored_fields(state) if state.recovered else None,
    }


def _stored_fields(state: DeviceState) -> dict[str, object]:
    return {
        "journal_used": state.journal_used_bytes,
        "capacity": state.capacity_bytes,
        "used": state.used_bytes,
        "free": state.free_bytes,
        "chunks": state.chunks,
        "slabs": state.slabs,
        "free_slabs": state.free_slabs,
        "classes": [
            {"slot": c.slot_bytes, "slabs": c.slabs, "used": c.slots_used, "free": c.slots_free}
            for c in state.classes
        ],
        "targets": [
            {
                "target": t.target,
                "chunks": t.chunks,
                "bytes": t.logical_bytes,
                "allocated": t.allocated_bytes,
                "pending": t.pending_versions,
                "retry_entries": t.retry_entries,
                "space_epochs": t.space_epochs,
            }
            for t in state.targets
        ],
    }


def state_lines(path: str, state: DeviceState) -> list[str]:
    info = state.info
    created = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(info.created_ms / 1000))
    kind = "block device" if state.block_device else "file"
    cache = "volatile, flushed" if state.flushes else "protected, not flushed"
    now = f"{format_bytes(state.device_bytes)}, sectors of {state.device_sector_bytes}"
    lines = [
        f"device    {path} ({kind}, {now})",
        f"cluster   {info.cluster.hex()}",
        f"uuid      {uuid.UUID(bytes=bytes(info.device_uuid))}",
        f"size      {info.size_bytes} bytes ({format_bytes(info.size_bytes)}){_unused(state)}",
        f"format    version {info.format_version}, made {created} by {state.written_by}",
        f"features  incompat {info.features_incompat:#x}, ro_compat {info.features_ro_compat:#x}, "
        f"compat {info.features_compat:#x}",
        f"super     number {state.superblock_sequence}, "
        f"{SUPERBLOCKS.get(state.superblock_copies, 'no copy whole')}",
        f"cache     {cache} ({state.cache_reason})",
        f"discard   {_discard(state)}",
        f"snapshot  {_snapshot(state)}",
    ]
    if not state.recovered:
        lines.append(f"journal   {format_bytes(info.journal_bytes)}; at most {info.max_chunks} chunks")
        lines.append(f"targets   {', '.join(str(target) for target in info.targets)}")
        lines.append(f"what is stored isn't known: {state.reason}")
        return lines
    share = 100 * state.used_bytes / state.capacity_bytes if state.capacity_bytes else 0.0
    used, capacity = format_bytes(state.used_bytes), format_bytes(state.capacity_bytes)
    replayed, journal = format_bytes(state.journal_used_bytes), format_bytes(info.journal_bytes)
    lines += [
        f"journal   {replayed} to replay, of {journal}",
        f"fill      {used} of {capacity} in slots ({share:.1f} %), "
        f"room for {format_bytes(state.free_bytes)} more",
        f"chunks    {state.chunks} of at most {info.max_chunks}",
        f"slabs     {state.slabs} of 16 MiB, {state.free_slabs} free",
        "",
        *_class_table(state),
        "",
        *_target_table(state),
    ]
    return lines


def _unused(state: DeviceState) -> str:
    unused = state.device_bytes - state.info.size_bytes
    return f"; {format_bytes(unused)} more than the store uses: ffs device grow" if unused >= 16 << 20 else ""


def _discard(state: DeviceState) -> str:
    if state.discard_bytes == 0:
        return "none"
    limit = "" if state.discard_bytes == UNLIMITED else f"up to {format_bytes(state.discard_bytes)} at once, "
    return f"{limit}in multiples of {state.discard_granularity} bytes"


def _snapshot(state: DeviceState) -> str:
    if state.snapshot_id == 0:
        return "none yet"
    when = "at an unknown time"
    if state.snapshot_ms:
        age = max(time.time() - state.snapshot_ms / 1000, 0.0)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.snapshot_ms / 1000))
        when = f"completed {stamp}, {format_seconds(age)} ago"
    return (
        f"number {state.snapshot_id}, {when}; {format_bytes(state.snapshot_bytes)} of "
        f"{format_bytes(state.snapshot_area_bytes)}"
    )


def _class_table(state: DeviceState) -> list[str]:
    rows = [
        [format_bytes(c.slot_bytes), str(c.slabs), str(c.slots_used), str(c.slots_free)]
        for c in state.classes
        if c.slabs
    ]
    if not rows:
        return ["no slab is in use"]
    return table(["slots of", "slabs", "used", "free"], rows, right=(0, 1, 2, 3)).splitlines()


def _target_table(state: DeviceState) -> list[str]:
    used = [
        t for t in state.targets if t.chunks or t.pending_versions or t.retry_entries or t.chain_state_bytes
    ]
    rows = [
        [
            str(t.target),
            str(t.chunks),
            format_bytes(t.logical_bytes),
            format_bytes(t.allocated_bytes),
            str(t.pending_versions),
            str(t.retry_entries),
            str(t.space_epochs),
        ]
        for t in used
    ]
    head = ["target", "chunks", "bytes", "in slots", "pending", "retry entries", "space epochs"]
    lines = table(head, rows, right=range(len(head))).splitlines() if rows else []
    if rest := len(state.targets) - len(used):
        lines.append(f"{plural(rest, 'target')} without anything")
    return lines


def check_lines(path: str, report: CheckReport, data: bool) -> list[str]:
    if report.verdict == "unjudged":
        return [f"{path}: can't be judged: {report.reason}"]
    lines = [f"{path}: {report.note}"] if report.note else []
    lines += [f"{path}: {_problem_line(problem)}" for problem in report.problems]
    if report.problem_count > len(report.problems):
        lines.append(f"{path}: {report.problem_count - len(report.problems)} more like these")
    read = f", {format_bytes(report.data_bytes)} compared with their checksums" if data else ""
    what = "clean" if report.verdict == "clean" else plural(report.problem_count, "problem")
    pending = plural(report.pending_versions, "pending version")
    lines.append(f"{path}: {what}: {plural(report.chunks, 'chunk')}, {pending}{read}")
    if not data and report.verdict == "clean":
        lines.append("contents weren't read: --data compares them with their checksums")
    return lines


def _problem_line(problem: DeviceProblem) -> str:
    if not problem.target:
        return problem.text
    version = ".".join(str(number) for number in problem.version)
    pending = "pending " if problem.pending else ""
    at = f" {pending}version {version}" if any(problem.version) else ""
    return f"target {problem.target} space {problem.space} chunk {problem.key.hex()}{at}: {problem.text}"


def problem_fields(problem: DeviceProblem) -> dict[str, object]:
    return {
        "kind": problem.kind,
        "target": problem.target,
        "space": problem.space,
        "key": problem.key.hex(),
        "version": list(problem.version),
        "pending": problem.pending,
        "text": problem.text,
    }

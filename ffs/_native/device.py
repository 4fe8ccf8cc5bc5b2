"""Devices: formatting and looking at them. Blocking. docs/disk_format.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ffs._native.lib import check, crc32c, ffi, host_id, lib
from ffs.errors import InvalidArgument

__all__ = ["DeviceInfo", "crc32c", "device_format", "device_inspect", "host_id"]


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
) -> None:
    """Makes a device (or a file of size_bytes) ready for `targets` of `cluster` (16 bytes).

    0 and zero bytes: chosen. Busy: in use; Exists: it holds something (force=True overwrites); NoSpace: too
    small (the message names the least size); InvalidArgument. Nothing half made."""
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
    options.cluster = list(cluster)
    options.device_uuid = list(device_uuid)
    check(lib.ffs_device_format(os.fsencode(path), options))


def device_inspect(path: str | os.PathLike[str]) -> DeviceInfo:
    """Reads a device's superblocks. FfsError with ENOMEDIUM: none there; ChecksumMismatch: damaged;
    Unsupported: written by a newer version (the message says which)."""
    out = ffi.new("ffs_device_info*")
    check(lib.ffs_device_inspect(os.fsencode(path), out))
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

"""Devices that a benchmark writes once before it measures (ffs.cli.benchmark.allocated_cluster)."""

from __future__ import annotations

import os
from pathlib import Path

from ffs.cli.benchmark.allocated_cluster import holes, write_holes

MIB = 1 << 20


def holes_of(path: Path) -> list[tuple[int, int]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return holes(fd)
    finally:
        os.close(fd)


def test_holes_are_filled_with_zeros_and_nothing_else_is_touched(tmp_path: Path) -> None:
    device = tmp_path / "device"
    with device.open("wb") as file:
        file.truncate(20 * MIB)
        for at in (0, 11 * MIB):
            file.seek(at)
            file.write(b"x" * MIB)
    assert holes_of(device) == [(MIB, 11 * MIB), (12 * MIB, 20 * MIB)]
    write_holes(device)
    assert holes_of(device) == []
    expected = b"x" * MIB + bytes(10 * MIB) + b"x" * MIB + bytes(8 * MIB)
    assert device.read_bytes() == expected
    assert device.stat().st_blocks * 512 >= 20 * MIB


def test_room_that_was_only_reserved_is_written_too(tmp_path: Path) -> None:
    device = tmp_path / "device"
    with device.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 4 * MIB)
    write_holes(device)
    assert holes_of(device) == []
    assert device.read_bytes() == bytes(4 * MIB)

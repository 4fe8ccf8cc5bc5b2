"""Clusters whose devices are allocated beforehand, as floors' files and the segments of other stores in
memory are (docs/guides/bench.md)."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ffs.cli.devcluster.handle import DevCluster

_PIECE = 8 << 20


@contextmanager
def allocated_cluster(home: Path, device_bytes: int) -> Iterator[DevCluster]:
    """One server and one copy; running. Blocking."""
    with DevCluster(home, nodes=1, replicas=1, device_bytes=device_bytes):
        pass  # makes the device, sparse
    allocate(home / "node0" / "device")
    with DevCluster(home, nodes=1, replicas=1, device_bytes=device_bytes) as cluster:
        yield cluster


@contextmanager
def written_cluster(home: Path, device_bytes: int, replicas: int = 3) -> Iterator[DevCluster]:
    """Three servers, all of each device written once, as `ffs device format` leaves a file. Blocking."""
    with DevCluster(home, replicas=replicas, device_bytes=device_bytes):
        pass
    for device in sorted(home.glob("node*/device")):
        write_holes(device)
    with DevCluster(home, replicas=replicas, device_bytes=device_bytes) as cluster:
        yield cluster


def allocate(device: Path) -> None:
    """Every block of a device's file. Whose server is started afterwards discards nothing there."""
    fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def write_holes(device: Path) -> None:
    """Zeros wherever a device's file has nothing, so that no write has to find room any more, nor any flush
    to write down where. Its server must not run."""
    fd = os.open(device, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, _PIECE) as zeros:  # aligned, as O_DIRECT needs it
            for begin, end in holes(fd):
                for at in range(begin, end, _PIECE):
                    with memoryview(zeros) as view, view[: min(_PIECE, end - at)] as piece:
                        os.pwrite(fd, piece, at)
        os.fsync(fd)
    finally:
        os.close(fd)


def holes(fd: int) -> list[tuple[int, int]]:
    """(begin, end) of each part of a file that has no blocks, or none that were written."""
    size = os.fstat(fd).st_size
    found = []
    at = os.lseek(fd, 0, os.SEEK_HOLE)
    while at < size:
        try:
            end = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but hole up to the end
            end = size
        found.append((at, end))
        at = os.lseek(fd, end, os.SEEK_HOLE) if end < size else size
    return found

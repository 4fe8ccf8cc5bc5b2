"""A cluster of one server and one copy, all of whose device is allocated beforehand, as a floor's file and
the segments of other stores in memory are (docs/guides/bench.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ffs.cli.devcluster.handle import DevCluster


@contextmanager
def allocated_cluster(home: Path, device_bytes: int) -> Iterator[DevCluster]:
    """Running. Blocking."""
    with DevCluster(home, nodes=1, replicas=1, device_bytes=device_bytes):
        pass  # makes the device, sparse
    allocate(home / "node0" / "device")
    with DevCluster(home, nodes=1, replicas=1, device_bytes=device_bytes) as cluster:
        yield cluster


def allocate(device: Path) -> None:
    """Every block of a device's file. Whose server is started afterwards discards nothing there."""
    fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)

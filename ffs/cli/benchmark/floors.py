"""What ffs is measured against: minimal loops of our own in this process (native/bench), and their peers.

A floor is a contestant (protocol.py) that counts bytes. Its file lies beside the cluster's device files,
on the same file system, and is written through once before it is used.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ffs._native.floor import Floor
from ffs.cli.benchmark.protocol import Contestant, Slice
from ffs.errors import FfsError

_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class FloorSpec:
    """One floor: "read" or "write" on a file, "socket" from an address; sizes in bytes."""

    op: str
    path: str
    block_bytes: int
    depth: int
    region_bytes: int = 0
    region_offset: int = 0
    random: bool = False
    crc: bool = True

    def open(self) -> Floor:
        return Floor(
            self.op,
            self.path,
            block_bytes=self.block_bytes,
            depth=self.depth,
            region_bytes=self.region_bytes,
            region_offset=self.region_offset,
            random=self.random,
            crc=self.crc,
            # A durable write: one fdatasync for each queue-depth's worth.
            fsync_every=self.depth if self.op == "write" else 0,
        )


@contextmanager
def contestant(spec: FloorSpec) -> Iterator[Contestant]:
    floor = spec.open()

    def run(seconds: float) -> Slice:
        blocks, elapsed_ns = floor.run(round(seconds * 1000))
        return Slice(blocks * spec.block_bytes, elapsed_ns / 1e9)

    try:
        yield run
    finally:
        floor.close()


def prepare_region(path: Path, size: int) -> None:
    """A file of `size` bytes, all of it written once with bytes that don't compress, and durable."""
    rng = np.random.default_rng(2)
    piece = rng.integers(0, 256, _PIECE, dtype=np.uint8)
    with path.open("wb", buffering=0) as file:
        for begin in range(0, size, _PIECE):
            file.write(piece[: min(_PIECE, size - begin)].data)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_once(direction: str, path: Path, region_bytes: int, duration_ms: int) -> float:
    """Bytes/s of the raw device: 1 MiB sequential, 16 in flight, checksums."""
    spec = FloorSpec(direction, str(path), 1 << 20, 16, region_bytes=region_bytes)
    with contestant(spec) as run:
        run(0.05)
        return run(duration_ms / 1000).rate


@contextmanager
def socket_peer(path: Path | None = None) -> Iterator[str]:
    """A process that answers the socket and message floors; yields host:port, or `path` (a Unix socket)."""
    code = (
        "import socket, sys\n"
        "from ffs._native.floor import floor_serve\n"
        "where = sys.argv[1]\n"
        "listener = socket.create_server(where, family=socket.AF_UNIX) if where "
        "else socket.create_server(('127.0.0.1', 0))\n"
        "print(where or '127.0.0.1:%d' % listener.getsockname()[1], flush=True)\n"
        "floor_serve(listener, None if where else 'cubic?')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path or "")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = process.stdout.readline().strip() if process.stdout else ""
        if not address:
            raise FfsError("the peer of the socket floor didn't start")
        yield address
    finally:
        process.terminate()
        process.wait()
        if process.stdout:
            process.stdout.close()

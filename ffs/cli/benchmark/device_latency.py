"""What the bare device does to single reads while it copies: the floor of reads during recovery.

Plain O_DIRECT calls, no ring: one 4 KiB read at a time, and beside it a thread that reads 1 MiB of one file
and writes it to another, durably, at a given rate.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np

_BLOCK = 4096
_PIECE = 1 << 20
_SYNC_EVERY = 8  # pieces


def read_p99_s(path: Path, region_bytes: int, seconds: float) -> float:
    """The 99th percentile of random 4 KiB reads, one at a time."""
    rng = np.random.default_rng(7)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    page = mmap.mmap(-1, _BLOCK)
    took: list[float] = []
    try:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(took) < 200:
            offset = int(rng.integers(0, region_bytes // _BLOCK)) * _BLOCK
            begun = time.perf_counter()
            os.preadv(descriptor, [page], offset)
            took.append(time.perf_counter() - begun)
    finally:
        os.close(descriptor)
    return float(np.percentile(took, 99))


class Copier:
    """Copies one file over another, over and over, at `bytes_per_s`, for the time of a `with`."""

    def __init__(self, source: Path, target: Path, region_bytes: int, bytes_per_s: float) -> None:
        self._source, self._target = source, target
        self._pieces = region_bytes // _PIECE
        self._pause_s = _PIECE / bytes_per_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Copier:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        source = os.open(self._source, os.O_RDONLY | os.O_DIRECT)
        target = os.open(self._target, os.O_RDWR | os.O_DIRECT)
        piece = mmap.mmap(-1, _PIECE)
        try:
            begun = time.perf_counter()
            number = 0
            while not self._stop.is_set():
                at = number % self._pieces * _PIECE
                os.preadv(source, [piece], at)
                os.pwritev(target, [piece], at)
                number += 1
                if number % _SYNC_EVERY == 0:
                    os.fdatasync(target)
                late_s = begun + number * self._pause_s - time.perf_counter()
                if late_s > 0:
                    time.sleep(late_s)
        finally:
            os.close(source)
            os.close(target)

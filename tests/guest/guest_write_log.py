"""The log that dm-log-writes keeps of a device, and what a power cut would have left at any place in it.

The format is the kernel's (drivers/md/dm-log-writes.c): a super block, then for each request a header in a
sector of its own and its data. The kernel logs a write when a flush is that it was completed before; FUA
writes at once. So at a cut, all that stands before the last flush is on the device, and of what follows that
flush FUA writes are, and any of the others may be or not.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0x6A736677736872
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
SUPER = struct.Struct("<QQQI")
ENTRY = struct.Struct("<QQQQ")
BLKDISCARD = 0x1277
TORN = 512  # what a device writes whole or not at all


@dataclass(frozen=True, slots=True)
class Entry:
    """One request. `at` and `size`: bytes of the device; `data_at`: in the log, where it has data."""

    flags: int
    at: int
    size: int
    data_at: int
    mark: str


def read_log(path: str | Path) -> list[Entry]:
    """All that is logged by now; ValueError for what isn't such a log."""
    with open(path, "rb") as log:
        magic, version, count, sector = SUPER.unpack(log.read(SUPER.size))
        if magic != MAGIC or version != 1:
            raise ValueError(f"{path}: no write log (magic {magic:#x}, version {version})")
        entries = []
        place = sector
        for _ in range(count):
            log.seek(place)
            at, sectors, flags, data = ENTRY.unpack(log.read(ENTRY.size))
            place += sector
            has_data = not flags & (DISCARD | MARK)
            # A mark's text stands behind its header, in the same sector.
            mark = log.read(data).rstrip(b"\0").decode() if flags & MARK else ""
            size = sectors * TORN
            entries.append(Entry(flags, at * TORN, size, place, mark))
            if has_data:
                place += size
    return entries


def cut(entries: list[Entry], end: int, rng: random.Random) -> list[tuple[Entry, int]]:
    """A power cut after `entries[:end]`: what of them the device has, and how much of each (bytes)."""
    durable = max((at for at in range(end) if entries[at].flags & FLUSH), default=0)
    kept = []
    for number, entry in enumerate(entries[:end]):
        if entry.flags & MARK or entry.size == 0:
            continue
        fate = rng.random()
        if number < durable or entry.flags & FUA or fate < 0.4:
            kept.append((entry, entry.size))
        elif fate < 0.6:
            kept.append((entry, rng.randrange(entry.size // TORN) * TORN))
    return kept


def replay(log_path: str | Path, kept: list[tuple[Entry, int]], image: str | Path) -> int:
    """Writes it to `image`, a block device that holds zeros; bytes written."""
    written = 0
    with open(log_path, "rb") as log, open(image, "r+b") as to:
        for entry, size in kept:
            if entry.flags & DISCARD:
                fcntl.ioctl(to, BLKDISCARD, struct.pack("<QQ", entry.at, size))
                continue
            log.seek(entry.data_at)
            os.pwrite(to.fileno(), log.read(size), entry.at)
            written += size
        os.fsync(to.fileno())
    return written

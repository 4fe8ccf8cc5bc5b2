"""A few large blocks for memory that they are copied to as they land (docs/kv.md, Memory): read in ranges, so
that one is copied while others are read."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ffs.kv.entries import Entries, timeout_ms

if TYPE_CHECKING:
    from ffs.kv.batch import Batch, Completions
    from ffs.kv.blocks import SharedBlocks

_RANGE_BYTES = 1 << 20
_MOST_IN_RANGES = 3  # blocks; with more, one is copied while others are read anyway


def range_count(blocks: SharedBlocks) -> int:
    """In how many ranges each of these blocks is best read."""
    if not blocks.foreign or not 1 <= len(blocks.lengths) <= _MOST_IN_RANGES:
        return 1
    return max(1, -(-int(blocks.lengths.max()) // _RANGE_BYTES))


def in_ranges(entries: Entries, ranges: int) -> Entries:
    """Reads of equal length as groups of so many reads, each of consecutive bytes of the same chunk. The
    ranges are whole granules, but the last; a block of fewer bytes has fewer of them."""
    cut = np.repeat(entries, ranges)
    begins = np.tile(np.arange(ranges, dtype=np.int64) * _RANGE_BYTES, len(entries))
    left = cut["length"].astype(np.int64) - begins
    cut["offset"] += begins.astype(np.uint32)
    cut["iov_offset"] += begins.astype(np.uint64)
    cut["length"] = np.clip(left, 0, _RANGE_BYTES)
    cut = cut[left > 0]
    first = np.flatnonzero(np.diff(cut["userdata"].astype(np.int64), prepend=-1))
    cut["group"] = 0
    cut["group"][first] = np.diff(first, append=len(cut))
    return cut


def of_two_contents(done: Completions) -> npt.NDArray[np.bool_]:
    """Which blocks were put anew while their ranges were read (ffs.h, ffs_sqe.group)."""
    result: npt.NDArray[np.bool_] = done["result"] == -errno.EAGAIN
    return result


def read_in_ranges(batch: Batch, entries: Entries, ranges: int) -> Completions:
    """As batch.run does with entries that have their place in memory. Blocking."""
    until_s = time.monotonic() + int(entries["timeout_ms"][0]) / 1000
    done = batch.run_groups(in_ranges(entries, ranges), len(entries))
    again = np.flatnonzero(of_two_contents(done))
    if again.size:  # at once: then it is of one
        some = entries[again]
        some["userdata"] = np.arange(len(some))
        some["timeout_ms"] = timeout_ms(max(0.001, until_s - time.monotonic()))
        done[again] = batch.run(some)
    return done

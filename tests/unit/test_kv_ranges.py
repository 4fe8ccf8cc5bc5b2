"""Large blocks read in ranges (docs/kv.md, Memory)."""

from __future__ import annotations

import numpy as np

from ffs._native.ring import CQE_DTYPE, OP_READ, SQE_DTYPE
from ffs.kv import ranges
from ffs.kv.blocks import SharedBlocks

MIB = 1 << 20


def blocks(count: int, length: int, foreign: bool = True) -> SharedBlocks:
    numbers = np.arange(count)
    return SharedBlocks(
        numbers.astype(np.uint64),
        numbers.astype(np.uint64),
        np.full(count, length, dtype=np.int64),
        (),
        foreign,
    )


def test_only_a_few_large_blocks_are_cut_in_ranges() -> None:
    assert ranges.range_count(blocks(1, 4 * MIB)) == 4
    assert ranges.range_count(blocks(3, 4 * MIB + 1)) == 5
    assert ranges.range_count(blocks(4, 16 * MIB)) == 1
    assert ranges.range_count(blocks(1, MIB)) == 1
    assert ranges.range_count(blocks(0, MIB)) == 1
    assert ranges.range_count(blocks(1, 4 * MIB, foreign=False)) == 1  # nothing is copied


def test_ranges_cover_each_block_once_as_a_group() -> None:
    entries = np.zeros(3, dtype=SQE_DTYPE)
    entries["op"] = OP_READ
    entries["group"] = 1
    entries["userdata"] = np.arange(3)
    entries["key"][:, 0] = [1, 2, 3]
    entries["offset"] = [0, 4096, 0]
    entries["length"] = [3 * MIB, 2 * MIB + 5, 7]
    entries["iov_offset"] = [100, 200, 300]
    cut = ranges.in_ranges(entries, 3)
    assert cut["group"].tolist() == [3, 0, 0, 3, 0, 0, 1]
    assert cut["userdata"].tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert cut["key"][:, 0].tolist() == [1, 1, 1, 2, 2, 2, 3]
    assert cut["length"].tolist() == [MIB, MIB, MIB, MIB, MIB, 5, 7]
    assert cut["offset"].tolist() == [0, MIB, 2 * MIB, 4096, 4096 + MIB, 4096 + 2 * MIB, 0]
    assert cut["iov_offset"].tolist() == [100, 100 + MIB, 100 + 2 * MIB, 200, 200 + MIB, 200 + 2 * MIB, 300]


def test_what_was_read_of_two_contents_is_told_apart() -> None:
    done = np.zeros(3, dtype=CQE_DTYPE)
    done["result"] = [5, -11, -2]
    assert ranges.of_two_contents(done).tolist() == [False, True, False]

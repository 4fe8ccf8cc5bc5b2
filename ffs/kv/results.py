"""What became of each block of a call: hit, miss and error are three things (docs/guides/kv.md).

A miss is an answer: no replica has the block. An error is no answer: the block may well be there.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ffs.errors import FfsError


class Status(enum.IntEnum):
    MISS = 0
    """get, exists: not there (or under this chunk key lies other content: its tag differs)."""
    HIT = 1
    """get: delivered and verified. exists: there. put: was there already, nothing moved."""
    STORED = 2
    """put: new, and held durably by every replica."""
    ERROR = 3
    """No answer; `Results.errors` says why."""


class Count(NamedTuple):
    """Blocks of a call, by what became of them, in the order of Status."""

    misses: int
    hits: int
    stored: int
    errors: int


class Results:
    """Outcomes by position in the call's keys. Immutable; the arrays are the caller's to keep."""

    __slots__ = ("errors", "lengths", "status")

    def __init__(
        self,
        status: npt.NDArray[np.uint8],
        lengths: npt.NDArray[np.int64],
        errors: Mapping[int, FfsError],
    ) -> None:
        self.status = status
        """Status of each block, as uint8."""
        self.lengths = lengths
        """Bytes of each block that is there; 0 for others."""
        self.errors = errors
        """The error of each block whose status is ERROR."""

    def __len__(self) -> int:
        return len(self.status)

    def __getitem__(self, position: int) -> Status:
        return Status(int(self.status[position]))

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{s.name.lower()}={number}" for s, number in zip(Status, self.count(), strict=True)
        )
        return f"<Results {counts}>"

    def count(self) -> Count:
        """How many blocks have which status."""
        return Count(*np.bincount(self.status, minlength=len(Status)).tolist())

    @property
    def hits(self) -> npt.NDArray[np.bool_]:
        """Which blocks are there: HIT or STORED."""
        there: npt.NDArray[np.bool_] = (self.status == Status.HIT) | (self.status == Status.STORED)
        return there

    def leading_hits(self) -> int:
        """How many blocks from the first on are there without a hole: the prefix that can be used."""
        holes = np.flatnonzero(~self.hits)
        return int(holes[0]) if len(holes) else len(self.status)

    def raise_errors(self) -> None:
        """Raises the first block's error, if there is any. Misses aren't errors."""
        if self.errors:
            raise self.errors[min(self.errors)]

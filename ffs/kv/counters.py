"""What this process has done with a space (Space.stats): counted by call, not by block. docs/guides/kv.md,
Figures."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields

import numpy as np

from ffs._native.ring import RingStats
from ffs.kv.results import Results, Status


@dataclass(slots=True)
class Counts:
    """Blocks, and bytes of them, since the space was opened here."""

    get_hits: int = 0
    get_misses: int = 0
    get_errors: int = 0
    get_bytes: int = 0
    put_stored: int = 0
    put_hits: int = 0
    """Were there: nothing moved."""
    put_errors: int = 0
    put_bytes: int = 0
    """Of those that were stored."""
    exists_hits: int = 0
    exists_misses: int = 0
    exists_errors: int = 0
    deleted: int = 0
    """Asked for and not there any more, whether they had been or not."""
    delete_errors: int = 0


@dataclass(frozen=True, slots=True)
class SpaceStats:
    """`counts` of this open space in this process; `rings`: the traffic of its rings, one a call that ran at
    the same time (most requests in flight, retries, hedged reads, damage found)."""

    counts: Counts
    rings: tuple[RingStats, ...]

    @property
    def hit_ratio(self) -> float:
        """Of gets that got an answer; 0 if there was none."""
        asked = self.counts.get_hits + self.counts.get_misses
        return self.counts.get_hits / asked if asked else 0.0


@dataclass(slots=True)
class Counters:
    """Counts, by any number of threads."""

    _counts: Counts = field(default_factory=Counts)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def got(self, results: Results) -> None:
        hits, misses, errors = _count(results, Status.HIT)
        with self._lock:
            self._counts.get_hits += hits
            self._counts.get_misses += misses
            self._counts.get_errors += errors
            self._counts.get_bytes += int(results.lengths.sum())

    def put(self, results: Results) -> None:
        stored, _, errors = _count(results, Status.STORED)
        whole = stored == len(results)
        lengths = results.lengths if whole else results.lengths[results.status == Status.STORED]
        with self._lock:
            self._counts.put_stored += stored
            self._counts.put_hits += len(results) - stored - errors
            self._counts.put_errors += errors
            self._counts.put_bytes += int(lengths.sum())

    def looked(self, results: Results) -> None:
        hits, misses, errors = _count(results, Status.HIT)
        with self._lock:
            self._counts.exists_hits += hits
            self._counts.exists_misses += misses
            self._counts.exists_errors += errors

    def removed(self, results: Results) -> None:
        with self._lock:
            self._counts.deleted += len(results) - len(results.errors)
            self._counts.delete_errors += len(results.errors)

    def now(self) -> Counts:
        """A copy."""
        with self._lock:
            return Counts(*(getattr(self._counts, each.name) for each in fields(Counts)))


def _count(results: Results, good: Status) -> tuple[int, int, int]:
    """How many are good, misses, errors."""
    errors = len(results.errors)
    hits = int(np.count_nonzero(results.status == good))
    misses = 0 if hits + errors == len(results) else int(np.count_nonzero(results.status == Status.MISS))
    return hits, misses, errors

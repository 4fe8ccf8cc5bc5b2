"""What this process has done with a space (Space.stats): counted by call, not by block. docs/guides/kv.md,
Figures."""

from __future__ import annotations

from dataclasses import dataclass

from ffs._native.ring import RingStats
from ffs.kv.results import Results, Status
from ffs.kv.tally import Tally


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


class Counters:
    """Counts calls, by any number of threads."""

    def __init__(self) -> None:
        self._tally = Tally(Counts())

    def got(self, results: Results) -> None:
        count = results.count()
        self._tally.add(
            get_hits=count.hits,
            get_misses=count.misses,
            get_errors=count.errors,
            get_bytes=int(results.lengths.sum()),
        )

    def put(self, results: Results) -> None:
        count = results.count()
        whole = count.stored == len(results)
        lengths = results.lengths if whole else results.lengths[results.status == Status.STORED]
        self._tally.add(
            put_stored=count.stored,
            put_hits=count.hits,
            put_errors=count.errors,
            put_bytes=int(lengths.sum()),
        )

    def looked(self, results: Results) -> None:
        count = results.count()
        self._tally.add(exists_hits=count.hits, exists_misses=count.misses, exists_errors=count.errors)

    def removed(self, results: Results) -> None:
        count = results.count()
        self._tally.add(deleted=len(results) - count.errors, delete_errors=count.errors)

    def now(self) -> Counts:
        """A copy."""
        return self._tally.now()

"""Counts of ffs.kv: by name, at once, as copies; of results by status."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ffs.errors import FfsError
from ffs.kv.counters import Counters
from ffs.kv.results import Count, Results, Status
from ffs.kv.tally import Tally
from ffs.kv.tiers.words import Counts as TierCounts


def results_of(*status: Status) -> Results:
    lengths = np.array([100 * (each in (Status.HIT, Status.STORED)) for each in status], dtype=np.int64)
    errors = {at: FfsError("no answer") for at, each in enumerate(status) if each is Status.ERROR}
    return Results(np.array(status, dtype=np.uint8), lengths, errors)


def test_copies_share_nothing_with_what_is_counted() -> None:
    tally = Tally(TierCounts())
    tally.add(wanted=2, misses=1)
    before = tally.now()
    before.space.loads = 7
    tally.add(wanted=1)
    assert (before.wanted, before.misses) == (2, 1)
    now = tally.now()
    assert (now.wanted, now.misses, now.space.loads) == (3, 1, 0)
    with pytest.raises(AttributeError):
        tally.add(wnated=1)


def test_no_count_of_many_threads_is_lost() -> None:
    tally = Tally(TierCounts())
    seen: list[bool] = []

    def work() -> None:
        for _ in range(2000):
            tally.add(puts=1, misses=1)
            now = tally.now()
            seen.append(now.puts == now.misses)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.now().puts == 8000
    assert all(seen)


def test_a_call_is_counted_by_what_became_of_its_blocks() -> None:
    assert results_of().count() == Count(0, 0, 0, 0)
    mixed = results_of(Status.MISS, Status.HIT, Status.HIT, Status.STORED, Status.ERROR)
    assert mixed.count() == Count(misses=1, hits=2, stored=1, errors=1)
    assert repr(mixed) == "<Results miss=1, hit=2, stored=1, error=1>"
    counters = Counters()
    counters.put(results_of(Status.STORED, Status.HIT, Status.ERROR))
    counters.put(results_of(Status.STORED))
    counters.got(results_of(Status.HIT, Status.MISS, Status.MISS))
    counters.looked(results_of(Status.HIT, Status.ERROR))
    counters.removed(results_of(Status.MISS, Status.ERROR))
    now = counters.now()
    assert (now.put_stored, now.put_hits, now.put_errors, now.put_bytes) == (2, 1, 1, 200)
    assert (now.get_hits, now.get_misses, now.get_errors, now.get_bytes) == (1, 2, 0, 100)
    assert (now.exists_hits, now.exists_misses, now.exists_errors) == (1, 0, 1)
    assert (now.deleted, now.delete_errors) == (1, 1)

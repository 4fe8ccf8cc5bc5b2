"""A call's requests on one ring: all of them share the call's time, however many go after one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ffs._native.ring import CQE_DTYPE, SQE_DTYPE
from ffs.kv import batch
from ffs.kv.batch import BackgroundUpkeep, Batch, KvRing
from ffs.kv.blocks import PrivateBlocks


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class SlowRing:
    """Takes as many as a ring has entries; each wait takes a second and answers what is in it."""

    def __init__(self, clock: Clock, entries: int) -> None:
        self._clock = clock
        self._entries = entries
        self._inside: list[int] = []
        self.timeouts_ms: dict[int, int] = {}

    def prepare(self, sqes: np.ndarray[Any, Any]) -> int:
        taken = sqes[: self._entries - len(self._inside)]
        for row in taken:
            self._inside.append(int(row["userdata"]))
            self.timeouts_ms[int(row["userdata"])] = int(row["timeout_ms"])
        return len(taken)

    def wait(self, least: int) -> tuple[np.ndarray[Any, Any], int]:
        self._clock.now_s += 1.0
        done = np.zeros(len(self._inside), dtype=CQE_DTYPE)
        done["userdata"] = self._inside
        done["result"] = 4
        self._inside.clear()
        return done, 0


def entries_of(count: int, timeout_ms: int) -> np.ndarray[Any, Any]:
    entries = np.zeros(count, dtype=SQE_DTYPE)
    entries["userdata"] = np.arange(count)
    entries["timeout_ms"] = timeout_ms
    return entries


class NoUpkeep:
    def want_routing(self) -> None:
        raise AssertionError("nothing was asked for")

    renew = want_routing


@pytest.mark.parametrize("staged", [False, True])
def test_what_is_sent_later_has_what_is_left_of_the_calls_time(
    staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(batch.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(batch, "ENTRIES", 4)
    ring = SlowRing(clock, 4)
    run = Batch(KvRing(ring), BackgroundUpkeep(NoUpkeep()))  # type: ignore[arg-type]
    entries = entries_of(14, 2500)
    if staged:
        blocks = PrivateBlocks([memoryview(bytearray(4)) for _ in entries], np.full(14, 4, dtype=np.int64))
        done = run.run_staged(entries, blocks, writing=False)
    else:
        done = run.run(entries)
    assert done["userdata"].tolist() == list(range(14))
    assert [ring.timeouts_ms[at] for at in (0, 3, 4, 7, 8, 11, 12)] == [2500, 2500, 1500, 1500, 500, 500, 1]

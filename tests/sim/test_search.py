"""Seeds drawn at random worlds: sim_world.run checks the invariants at every step, then liveness.

A fixed share runs always. With FFS_SOAK_SECONDS the search goes on for that long, from a seed of the clock.
"""

from __future__ import annotations

import os
import time

import pytest
import sim_world
from sim_model import Violation
from sim_wire import Mutant

SHARES = 8
SEEDS_A_SHARE = 125
MUTANT_SEEDS = 300  # within which each mutant must be seen


@pytest.mark.parametrize("share", range(SHARES))
def test_invariants_hold(share: int) -> None:
    commits = finished = 0
    for seed in range(share * SEEDS_A_SHARE, (share + 1) * SEEDS_A_SHARE):
        world = sim_world.run(seed)
        commits += world.history.commits
        finished += world.clients.finished
    # The worlds do something: most seeds commit tens of updates.
    assert commits > 5 * SEEDS_A_SHARE
    assert finished > 10 * SEEDS_A_SHARE


# The check after a disk read matters only when members change; test_schedules has its mutant.
SEARCHED = [m for m in Mutant if m not in (Mutant.NONE, Mutant.NO_RECHECK_AFTER_READ)]


@pytest.mark.parametrize("mutant", SEARCHED, ids=lambda m: m.name.lower())
def test_mutants_are_caught(mutant: Mutant) -> None:
    for seed in range(MUTANT_SEEDS):
        try:
            sim_world.run(seed, mutant=mutant)
        except Violation:
            return
    pytest.fail(f"{mutant.name} wasn't caught within {MUTANT_SEEDS} seeds")


def test_a_seed_replays_exactly() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        sim_world.run(4, trace=trace.append)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 100


@pytest.mark.skipif("FFS_SOAK_SECONDS" not in os.environ, reason="make soak")
def test_soak() -> None:
    until = time.monotonic() + float(os.environ["FFS_SOAK_SECONDS"])
    seed = int(time.time()) * 1000
    print(f"first seed {seed}")
    while time.monotonic() < until:
        sim_world.run(seed)
        seed += 1

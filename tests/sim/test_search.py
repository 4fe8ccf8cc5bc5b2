"""Seeds drawn at random worlds: sim_world.run checks the invariants at every step, then that all heals.

A fixed share runs always, for at most FFS_SIM_SECONDS (300). With FFS_SOAK_SECONDS the search goes on for
that long, from a seed of the clock.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import sim_world
from sim_model import Violation
from sim_plan import Plan
from sim_wire import Mutant

SHARES = 20
SEEDS_A_SHARE = 150
MUTANT_SEEDS = 400  # within which each of SEARCHED must be seen
BOX_S = float(os.environ.get("FFS_SIM_SECONDS", "300"))  # of the processor's time, all shares together


@pytest.fixture(scope="module")
def box() -> float:
    """When the time of this process is up."""
    return time.process_time() + BOX_S


@pytest.mark.parametrize("share", range(SHARES))
def test_invariants_hold(share: int, box: float) -> None:
    commits = finished = changes = installs = excused = 0
    for seed in range(share * SEEDS_A_SHARE, (share + 1) * SEEDS_A_SHARE):
        if time.process_time() > box:
            pytest.skip(f"out of time at seed {seed}: FFS_SIM_SECONDS gives more")
        world = sim_world.run(seed)
        commits += world.history.commits
        finished += world.clients.finished
        changes += world.managers.changes
        installs += world.history.installs
        excused += world.excused
    # The worlds do something: most seeds commit tens of updates, and change their chain again and again.
    assert commits > 5 * SEEDS_A_SHARE
    assert finished > 10 * SEEDS_A_SHARE
    assert changes > 4 * SEEDS_A_SHARE
    assert installs > SEEDS_A_SHARE // 2
    assert excused <= SEEDS_A_SHARE // 20


# The rest need a moment that random worlds hardly meet: test_schedules_mutants, test_schedules_leases.
SEARCHED = [
    Mutant.COMMIT_BEFORE_SUCCESSOR,
    Mutant.TAIL_COMMITS_WITHOUT_HELD,
    Mutant.IGNORE_RETRY_TABLE,
    Mutant.IGNORE_BASE,
    Mutant.SERVE_BEFORE_RECONCILE,
    Mutant.DIRTY_READ_ANSWERS_LOCAL,
    Mutant.FORGET_REFUSALS,
    Mutant.FORGET_RETRIES_ON_RESTART,
    Mutant.COMMIT_UNKNOWN_PENDINGS,
    Mutant.NO_LEASE_CHECK,
    Mutant.KEEP_SERVING_WHEN_LEFT_OUT,
    Mutant.EARLY_PROMOTION,
    Mutant.NO_WAIT_IN_STEP,
    Mutant.FORGET_BACKLOG,
    Mutant.NO_RETRY_COPY,
    Mutant.NO_ERASE,
    Mutant.SPREAD_CORRUPTION,
    Mutant.REPAIR_ANY_VERSION,
    Mutant.NO_EPOCH_COPY,
]

# Worlds in which a break shows sooner; other worlds draw these values, too.
BIAS: dict[Mutant, dict[str, object]] = {
    Mutant.DIRTY_READ_ANSWERS_LOCAL: {"mix": (4, 1, 1, 1, 1, 20), "disk_ms": 5, "delay_ms": 100, "keys": 1},
    Mutant.FORGET_REFUSALS: {"no_space": 0.3, "members": 3, "fifo": False, "repeat": 0.2, "loss": 0.1},
}


@pytest.mark.parametrize("mutant", SEARCHED, ids=lambda m: m.name.lower())
def test_mutants_are_caught(mutant: Mutant) -> None:
    for seed in range(MUTANT_SEEDS):
        plan = Plan.draw(random.Random(seed))
        plan.mutant = mutant
        for name, value in BIAS.get(mutant, {}).items():
            setattr(plan, name, value)
        try:
            sim_world.run(seed, plan=plan)
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

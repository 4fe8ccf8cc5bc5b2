"""How often to save: Young's and Daly's intervals, and what they cost. Pure.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974); J. T. Daly,
"A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006). When saves
go on in the background the stall takes the place of the dump, and what is lost at a failure grows by the
time until a checkpoint is visible. All times in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ffs.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Advice:
    """`interval_s`: between the beginnings of two saves. `waste`: the share of time that isn't training:
    stalls, lost work, restarts. `mfu`: the effective one, if one was given."""

    young_s: float
    daly_s: float
    interval_s: float
    waste: float
    mfu: float | None


def advise(
    stall_s: float, persist_s: float, mtbf_s: float, restart_s: float = 0.0, mfu: float | None = None
) -> Advice:
    """`stall_s`: how long a save keeps training from going on; `persist_s`: until the checkpoint is visible;
    `mtbf_s`: mean time between failures of the whole job; `restart_s`: from a failure to the first step
    after it. InvalidArgument."""
    for value, what in (
        (stall_s, "the stall"),
        (persist_s, "the time to persist"),
        (restart_s, "the restart"),
    ):
        if not value >= 0 or math.isinf(value):
            raise InvalidArgument(f"{what} is {value} s: give 0 or more")
    if not mtbf_s > 0 or math.isinf(mtbf_s):
        raise InvalidArgument(f"the mean time between failures is {mtbf_s} s: give more than 0")
    if mfu is not None and not 0 < mfu <= 1:
        raise InvalidArgument(f"the MFU is {mfu}: give a share of 1")
    young = math.sqrt(2 * stall_s * mtbf_s)
    interval = max(daly(stall_s, mtbf_s), persist_s, stall_s)
    lost = waste(interval, stall_s, persist_s, mtbf_s, restart_s)
    return Advice(young, daly(stall_s, mtbf_s), interval, lost, None if mfu is None else mfu * (1 - lost))


def daly(stall_s: float, mtbf_s: float) -> float:
    """The interval, stall included."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(stall_s / (2 * mtbf_s))
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9)


def waste(interval_s: float, stall_s: float, persist_s: float, mtbf_s: float, restart_s: float) -> float:
    """The share of time lost when saving every `interval_s`, at most 1."""
    if interval_s <= 0:
        return min(1.0, (persist_s + restart_s) / mtbf_s)
    lost = stall_s / interval_s + (interval_s / 2 + persist_s + restart_s) / mtbf_s
    return min(1.0, lost)

"""How fast a save may persist beside training: bytes a second from the durations of steps. Pure.
docs/guides/checkpoint.md, Bandwidth.

Steps while nothing is persisted say how long one takes. Where steps take longer while a save is on its way,
its rate is halved; where they don't, it grows by a tenth of the fastest that was seen, until there is no
limit any more: additive increase, multiplicative decrease. Ranks that wait for each other in every step see
the same delay, so all of them give way.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final

TOLERANCE: Final = 0.05  # of a step's time: half of what a save may cost (1.10)
DUE_S: Final = 300.0  # a save is given the rate that ends it by then, whatever steps say
_QUIET: Final = 32  # steps that are remembered
_LEAST_QUIET: Final = 3
_WINDOW_STEPS: Final = 3
_WINDOW_S: Final = 0.5
_LONG_WINDOW_S: Final = 10.0
_SURE: Final = 2.5  # standard deviations
_LEAST_BUSY: Final = 0.1  # of a step: less of persisting says nothing
_DECREASE: Final = 0.5
_INCREASE: Final = 0.1  # of the fastest rate
_ROOM: Final = 1.2  # a limit that far above the fastest rate is none
_BURST_S: Final = 0.1
_IDLE_S: Final = 5.0  # without a step: nobody trains
_IDLE_STEPS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Step:
    """From one update to the next: seconds; of them `busy_s` with a save on its way, which moved so many
    bytes."""

    seconds: float
    busy_s: float = 0.0
    moved: int = 0


class Pace:
    """What was seen so far, and the limit that follows. `limit`: bytes a second, None: there is none."""

    def __init__(self) -> None:
        self.limit: float | None = None
        self._quiet: deque[float] = deque(maxlen=_QUIET)
        self._window: list[Step] = []
        self._fastest = 0.0

    def stepped(self, step: Step, floor: float) -> None:
        """`floor`: bytes a second that a save gets at least."""
        if not step.busy_s:
            self._quiet.append(step.seconds)
            return
        if step.busy_s < _LEAST_BUSY * step.seconds or len(self._quiet) < _LEAST_QUIET:
            return
        self._window.append(step)
        took = sum(each.seconds for each in self._window)
        if took < (_LONG_WINDOW_S if len(self._window) < _WINDOW_STEPS else _WINDOW_S):
            return
        slowed, sure = self._judge()
        if not slowed and not sure and took < _LONG_WINDOW_S:
            return
        rate = sum(each.moved for each in self._window) / sum(each.busy_s for each in self._window)
        self._fastest = max(self._fastest, rate)
        self._window.clear()
        if not rate:
            return  # it only waits for other ranks
        if slowed:
            now = rate if self.limit is None else min(rate, self.limit)
            self.limit = max(floor, _DECREASE * now)
        elif self.limit is not None:
            self.limit = max(floor, self.limit + _INCREASE * self._fastest)
            if self.limit > _ROOM * self._fastest:
                self.limit = None

    def idle_after_s(self) -> float:
        """Seconds without a step after which nobody trains, so nothing is kept waiting."""
        return max(_IDLE_S, _IDLE_STEPS * (statistics.median(self._quiet) if self._quiet else 0.0))

    def _judge(self) -> tuple[bool, bool]:
        """(whether steps are slower now, whether they were enough to tell if not). Medians: a step now and
        then is long for reasons of its own. What steps vary by anyway is allowed, and more are watched."""
        usual = statistics.median(self._quiet)
        spread = 1.5 * statistics.median(abs(each - usual) for each in self._quiet)
        now = statistics.median(each.seconds for each in self._window)
        doubt = _SURE * spread * (1 / len(self._window) + 1.5 / len(self._quiet)) ** 0.5
        sure = _SURE * spread / len(self._window) ** 0.5 <= TOLERANCE * usual
        return now > (1 + TOLERANCE) * usual + doubt, sure


def floor_of(nbytes: int, between_s: float | None) -> float:
    """Bytes a second with which a save of so many is over in half the time between two saves, and in DUE_S
    at most. `between_s`: None if that isn't known yet."""
    due_s = DUE_S if between_s is None else min(DUE_S, between_s / 2)
    return nbytes / max(due_s, 1e-3)


class Bucket:
    """Tokens of bytes, which come at the limit's rate. What is taken may be more than there is: the next one
    waits for the debt, so pieces of any size pass. One thread."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at_s: float | None = None  # when they were counted; None: there was no limit

    def wait_s(self, nbytes: int, limit: float | None, now_s: float) -> float:
        """0.0: they are taken. Else seconds after which to ask again, if the limit stays."""
        if limit is None:
            self._at_s = None
            return 0.0
        if self._at_s is None:
            self._tokens = 0.0
        else:
            self._tokens = min(limit * _BURST_S, self._tokens + limit * (now_s - self._at_s))
        self._at_s = now_s
        if self._tokens <= -1.0:  # less than a byte: rounding
            return -self._tokens / limit
        self._tokens -= nbytes
        return 0.0

"""How two things are compared on a noisy machine. Pure but for the clock of the contestants.

ffs and its floor alternate in slices of 50 ms, so that both see the same neighbours and the same mood
of the device; which of them goes first alternates too. The figure is the median of the paired ratios.
Floor against floor, measured the same way, shows how much of a ratio is noise: more than 5 % off 1 and
the run is marked noisy. Figures are never averaged over a run: one hiccup would be in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SLICES = 31
SLICE_S = 0.05
NOISE_LIMIT = 0.05


@dataclass(frozen=True, slots=True)
class Slice:
    """What one contestant did in one slice: `units` (bytes or operations) in `seconds`."""

    units: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.units / self.seconds if self.seconds > 0 else 0.0


Contestant = Callable[[float], Slice]
"""Runs for about so many seconds, and ends with nothing in flight."""


@dataclass(frozen=True, slots=True)
class Round:
    """One slice of each: ours, and those it is compared with in the order given."""

    ours: Slice
    floors: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the rounds. `quartiles` of the ratios say how steady they were."""

    ours: float
    floor: float
    ratio: float
    quartiles: tuple[float, float]


def alternate(
    ours: Contestant, floors: Sequence[Contestant], slices: int = SLICES, slice_s: float = SLICE_S
) -> list[Round]:
    """Runs the rounds, after one of each that doesn't count (caches, connections, page tables)."""
    contestants = [ours, *floors]
    for contestant in contestants:
        contestant(slice_s)
    rounds = []
    for number in range(slices):
        order = range(len(contestants)) if number % 2 == 0 else range(len(contestants) - 1, -1, -1)
        done: dict[int, Slice] = {}
        for index in order:
            done[index] = contestants[index](slice_s)
        rounds.append(Round(done[0], tuple(done[i] for i in range(1, len(contestants)))))
    return rounds


def summarise(rounds: Sequence[Round], share: float = 1.0, only: Sequence[int] | None = None) -> Summary:
    """The ratio of each round is ours over `share` of the slowest of its floors (of those in `only`)."""
    pairs = []
    for entry in rounds:
        chosen = entry.floors if only is None else [entry.floors[i] for i in only]
        floor = min(piece.rate for piece in chosen) * share
        pairs.append((entry.ours.rate, floor, entry.ours.rate / floor if floor else 0.0))
    ratios = sorted(ratio for _, _, ratio in pairs)
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Summary(
        ours=statistics.median(ours for ours, _, _ in pairs),
        floor=statistics.median(floor for _, floor, _ in pairs),
        ratio=statistics.median(ratios),
        quartiles=(quarters[0], quarters[2]),
    )


def is_noisy(noise_ratio: float) -> bool:
    return abs(noise_ratio - 1) > NOISE_LIMIT

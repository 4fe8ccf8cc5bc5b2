"""Load a prefix or compute it again? From measured bandwidth, what is queued, and the speed of prefill. Pure:
times are given; a decision is some arithmetic, microseconds (docs/kv_tiers.md, Load or recompute)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ffs.errors import InvalidArgument
from ffs.kv.tally import copied

_KEEP: Final = 0.9  # of what was believed, when another measurement comes
_LOOK_AGAIN: Final = 64  # decisions to compute, then one loads to see what loading costs now
_HOPELESS: Final = 4.0  # but not where loading would take so many times as long


class Choice(enum.StrEnum):
    LOAD = "load"
    RECOMPUTE = "recompute"


@dataclass(slots=True)
class Speed:
    """Of one source. Bandwidth is in bytes a second while it was busy, latency that of a lone block."""

    bandwidth: float
    latency_s: float
    measured: int = 0

    def observe(self, nbytes: int, seconds: float) -> None:
        """So many bytes came in so many seconds."""
        if nbytes <= 0 or seconds <= 0:
            return
        moving = max(seconds - self.latency_s, seconds / 2)  # latency isn't bandwidth's fault
        rate = nbytes / moving
        self.bandwidth = rate if not self.measured else _KEEP * self.bandwidth + (1 - _KEEP) * rate
        self.measured += 1

    def seconds(self, nbytes: int, queued_bytes: int) -> float:
        return self.latency_s + (nbytes + queued_bytes) / self.bandwidth


@dataclass(frozen=True, slots=True)
class Decision:
    """`load_s`, `recompute_s`: what either was expected to take. `look`: it loads to see what that costs."""

    choice: Choice
    load_s: float
    recompute_s: float
    look: bool = False


@dataclass(slots=True)
class CostCounts:
    """Decisions, and what is known of them afterwards. `regret_s`: seconds lost by those that were wrong;
    `error`: by how much expectations were off, as a share of what it took, on average of late."""

    loads: int = 0
    recomputes: int = 0
    looks: int = 0
    judged: int = 0
    right: int = 0
    regret_s: float = 0.0
    error: float = 0.0


@dataclass(slots=True)
class CostModel:
    """Not thread-safe; the tier manager's lock is around it. `prefill_tokens_per_s`: until it is measured."""

    prefill_tokens_per_s: float
    speeds: dict[str, Speed] = field(default_factory=dict)
    counts: CostCounts = field(default_factory=CostCounts)
    _prefills: int = 0
    _since_load: int = 0

    def __post_init__(self) -> None:
        if not self.prefill_tokens_per_s > 0:
            raise InvalidArgument(
                f"a prefill of {self.prefill_tokens_per_s} tokens/s never ends: give a speed"
            )

    def source(self, name: str, bandwidth: float = 1e9, latency_s: float = 1e-3) -> Speed:
        """The source of that name, made with what is assumed until it is measured."""
        return self.speeds.setdefault(name, Speed(bandwidth, latency_s))

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """So many tokens were computed in so many seconds."""
        if tokens <= 0 or seconds <= 0:
            return
        rate = tokens / seconds
        believed = self.prefill_tokens_per_s
        self.prefill_tokens_per_s = rate if not self._prefills else _KEEP * believed + (1 - _KEEP) * rate
        self._prefills += 1

    def decide(self, nbytes: Mapping[str, int], queued_bytes: Mapping[str, int], tokens: int) -> Decision:
        """`nbytes`: of the blocks, by source; sources load side by side. `queued_bytes`: what each has to do
        before. `tokens`: that are computed otherwise."""
        load_s = max(
            (
                self.source(name).seconds(size, queued_bytes.get(name, 0))
                for name, size in nbytes.items()
                if size
            ),
            default=0.0,
        )
        recompute_s = tokens / self.prefill_tokens_per_s
        if load_s <= recompute_s:
            self.counts.loads += 1
            self._since_load = 0
            return Decision(Choice.LOAD, load_s, recompute_s)
        self._since_load += 1
        if self._since_load >= _LOOK_AGAIN and load_s < _HOPELESS * recompute_s:
            self._since_load = 0
            self.counts.loads += 1
            self.counts.looks += 1
            return Decision(Choice.LOAD, load_s, recompute_s, look=True)
        self.counts.recomputes += 1
        return Decision(Choice.RECOMPUTE, load_s, recompute_s)

    def now(self) -> CostCounts:
        """A copy of the counts."""
        return copied(self.counts)

    def judge(self, decision: Decision, took_s: float) -> bool:
        """What was decided took so long: whether the other would have taken longer, as it was expected."""
        loaded = decision.choice is Choice.LOAD
        expected, other = decision.load_s, decision.recompute_s
        if not loaded:
            expected, other = other, expected
        counts = self.counts
        counts.judged += 1
        right = took_s <= other
        counts.right += right
        if not right:
            counts.regret_s += took_s - other
        if took_s > 0:
            off = abs(expected - took_s) / took_s
            counts.error = off if counts.judged == 1 else _KEEP * counts.error + (1 - _KEEP) * off
        return right

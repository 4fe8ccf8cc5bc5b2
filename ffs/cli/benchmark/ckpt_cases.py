"""The cases of `ffs bench ckpt`, by what a round of them measures. Pure. docs/guides/bench.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from ffs.cli.benchmark.report import Result
from ffs.errors import InvalidArgument

GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class CkptCase:
    """`group`: what is run for it. `ours` and `floor`: names of measures of a round, `ratio` being ours over
    floor, or floor over ours where `times` says so ("so many times shorter"). `bytes_of`: the measures are
    seconds for so many bytes, shown and compared as GB/s."""

    name: str
    group: str
    ours: str
    floor: str
    unit: str
    goal: float | None
    at_most: bool = False
    times: bool = False

    def result(self, rounds: Sequence[Mapping[str, float]], noisy: bool, more: dict[str, object]) -> Result:
        """Medians over the rounds; the ratio is the median of the rounds' own."""
        ours = [row[self.ours] for row in rounds]
        floors = [row[self.floor] for row in rounds]
        pairs = zip(ours, floors, strict=True)
        ratios = [(f / o if self.times else o / f) if o and f else 0.0 for o, f in pairs]
        quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        return Result(
            self.name,
            statistics.median(ours),
            statistics.median(floors),
            statistics.median(ratios),
            self.unit,
            len(rounds),
            self.goal,
            noisy=noisy,
            at_most=self.at_most,
            more={"quartiles": [round(quarters[0], 4), round(quarters[2], 4)], **more},
        )


CASES: Final = (
    CkptCase("stall-copy", "save", "stall", "copy", "s", 1.15, at_most=True),
    CkptCase("stall-torch-save", "save", "stall", "torch_save", "s", 8, times=True),
    CkptCase("persist-device", "save", "persist_rate", "write_rate", "GB/s", 0.85),
    CkptCase("save-dcp", "save", "save_rate", "dcp_save_rate", "GB/s", 2),
    CkptCase("load-device", "save", "load_rate", "read_rate", "GB/s", 0.85),
    CkptCase("load-dcp", "save", "load_rate", "dcp_load_rate", "GB/s", 1.25),
    CkptCase("second-last-tenth", "second", "last_written", "whole", "GB", 0.12, at_most=True),
    CkptCase("fourth-scattered-tenth", "second", "scattered_written", "whole", "GB", 0.12, at_most=True),
    CkptCase("stall-guard", "training", "stall", "dcp_async", "s", 0.2, at_most=True),
    CkptCase("step-persisting", "training", "with", "without", "s", 1.10, at_most=True),
    CkptCase("persist-device-r3", "replicas", "persist_rate", "write_rate", "GB/s", 0.85),
    CkptCase("mlperf-shaped-scaled-save", "mlperf", "save_rate", "write_rate", "GB/s", None),
    CkptCase("mlperf-shaped-scaled-load", "mlperf", "load_rate", "read_rate", "GB/s", None),
)
NAMES: Final = tuple(case.name for case in CASES)


def select(patterns: Sequence[str]) -> list[CkptCase]:
    """Those whose names match one of the patterns; none: all. InvalidArgument: none does."""
    chosen = [
        case for case in CASES if not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns)
    ]
    if not chosen:
        raise InvalidArgument(f"no case matches; there are: {', '.join(NAMES)}")
    return chosen

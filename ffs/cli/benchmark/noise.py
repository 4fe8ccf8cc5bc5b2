"""The floor against itself: how much of a ratio is the machine's mood (docs/guides/bench.md)."""

from __future__ import annotations

from pathlib import Path

from ffs.cli.benchmark.floors import FloorSpec, contestant
from ffs.cli.benchmark.protocol import alternate, is_noisy, summarise
from ffs.cli.benchmark.report import Result

MIB = 1 << 20


def measure_noise(floor: Path, region_bytes: int, slices: int, slice_s: float) -> Result:
    """Reads of the floor's file, 1 MiB and 16 in flight, beside the same: its ratio is the noise. Blocks."""
    spec = FloorSpec("read", str(floor), MIB, 16, region_bytes=region_bytes)
    with contestant(spec) as one, contestant(spec) as other:
        summary = summarise(alternate(one, [other], slices, slice_s))
    return Result(
        "noise",
        summary.ours / 1e9,
        summary.floor / 1e9,
        summary.ratio,
        "GB/s",
        slices,
        None,
        noisy=is_noisy(summary.ratio),
    )

"""Replays one seed with a trace, or searches: sim_replay.py SEED [--mutant N] [--count N] [--quiet]."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

import sim_world  # noqa: E402
from sim_model import Violation  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--mutant", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="that many seeds from SEED on, without a trace")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    begun = time.monotonic()
    steps = 0
    for seed in range(args.seed, args.seed + args.count):
        trace = None if args.quiet or args.count > 1 else print
        try:
            world = sim_world.run(seed, mutant=args.mutant, trace=trace)
        except Violation as v:
            print(v)
            return 1
        steps += world.steps
    print(f"{args.count} seeds, {steps} steps, {time.monotonic() - begun:.1f} s: all invariants hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())

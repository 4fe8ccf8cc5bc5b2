"""A benchmark that a signal ends takes away what it made: its memory, its directories, its cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "number", "begun"),
    [
        (("engine", "--mib", "64", "--slices", "10000"), signal.SIGTERM, "*/*"),
        (("io", "--only", "read-1m-qd16-local-null"), signal.SIGTERM, "*/null"),
        (("engine", "--mib", "64", "--slices", "10000"), signal.SIGHUP, "*/*"),
    ],
)
def test_it_takes_away_what_it_made(
    tmp_path: Path, options: tuple[str, ...], number: signal.Signals, begun: str
) -> None:
    scratch, memory = tmp_path / "scratch", tmp_path / "memory"
    memory.mkdir()
    command = [sys.executable, "-m", "ffs", "bench", *options, "--dir", str(scratch), "--tmpfs", str(memory)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as bench:
        try:
            deadline = time.monotonic() + 60
            while not list(scratch.glob("*")) or not (list(scratch.glob(begun)) + list(memory.glob(begun))):
                assert bench.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            bench.send_signal(number)
            _, said = bench.communicate(timeout=60)
        finally:
            bench.kill()
    assert (bench.returncode, said) == (128 + number, "ffs: stopped\n")
    assert [*scratch.iterdir(), *memory.iterdir()] == []

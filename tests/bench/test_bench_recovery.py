"""`ffs bench recovery` from end to end with little data: the form of its lines, no speeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ffs.cli.benchmark.recovery import NAMES

ROOT = Path(__file__).parents[2]


def test_every_case_prints_its_line(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "ffs", "bench", "recovery", "--json", "--rounds", "1"),
            *("--fill-mib", "32", "--dir", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["name"] for line in lines] == list(NAMES), run.stderr
    for line in lines:
        assert line["ffs"] > 0
        assert line["floor"] > 0
        assert line["runs"] == 1
        assert line["ok"] is (line["ratio"] >= line["goal"])
    assert run.returncode == (0 if all(line["ok"] for line in lines) else 1)
    assert list(tmp_path.iterdir()) == []

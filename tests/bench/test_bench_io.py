"""`ffs bench io` from end to end with few slices: the form of its lines and its exit status, no speeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ffs.cli.benchmark.suite import NAMES

ROOT = Path(__file__).parents[2]


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ffs", "bench", "io", *options],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_every_case_prints_its_line(tmp_path: Path) -> None:
    run = _run("--json", "--slices", "3", "--dir", str(tmp_path))
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["name"] for line in lines] == ["noise", *NAMES], run.stderr
    for line in lines:
        assert {"name", "ffs", "floor", "ratio", "unit", "runs", "goal", "ok", "noisy"} <= set(line)
        assert line["ffs"] > 0
        assert line["floor"] > 0
        assert line["runs"] == 3
    for line in lines[1:]:
        assert line["client_us"] > 0
        assert line["server_us"] > 0
        figure = line["ratio"] if line["goal_of"] == "ratio" else line["ffs"]
        assert line["ok"] is (figure >= line["goal"])
    assert run.returncode == (0 if all(line["ok"] for line in lines) else 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [["--only", "none"], ["--slices", "0"]])
def test_bad_options(options: list[str]) -> None:
    run = _run(*options)
    assert run.returncode in (1, 2)
    assert run.stdout == ""

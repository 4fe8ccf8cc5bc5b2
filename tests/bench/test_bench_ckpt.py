"""`ffs bench ckpt` from end to end, small: lines and exit status; no speeds. And its cases' arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ffs.cli.benchmark.ckpt_cases import CASES, NAMES, select
from ffs.errors import InvalidArgument

ROOT = Path(__file__).parents[2]


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ffs", "bench", "ckpt", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_cases_print_their_lines(tmp_path: Path) -> None:
    wanted = [case.name for case in CASES if case.group in ("save", "second")]
    only = [f"--only={name}" for name in wanted]
    run = _run("--json", "--slices=1", "--size=80M", "--ranks=2", f"--dir={tmp_path}", *only)
    lines = {line["name"]: line for line in map(json.loads, run.stdout.splitlines())}
    assert list(lines) == ["noise", *wanted], run.stderr
    assert run.returncode == (0 if all(line["ok"] for line in lines.values()) else 1)
    for name in wanted:
        assert lines[name]["ffs"] > 0, name
        assert lines[name]["floor"] > 0, name
    # What isn't a speed holds on any machine.
    assert lines["second-last-tenth"]["floor"] == pytest.approx(0.08, rel=0.1)
    assert 0.02 < lines["second-last-tenth"]["ratio"] < 0.5
    assert 0.02 < lines["fourth-scattered-tenth"]["ratio"] < 0.7  # its largest tensor changes too
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_that_nothing_matches() -> None:
    with pytest.raises(InvalidArgument, match=NAMES[0]):
        select(["none"])
    assert [case.name for case in select(["load-*"])] == ["load-device", "load-dcp"]


def test_ratios() -> None:
    by_name = {case.name: case for case in CASES}
    rows = [{"stall": 0.1, "copy": 0.1, "torch_save": 0.9}, {"stall": 0.2, "copy": 0.1, "torch_save": 1.6}]
    shorter = by_name["stall-torch-save"].result(rows, False, {})
    assert shorter.ratio == pytest.approx(8.5)
    assert shorter.ok
    longer = by_name["stall-copy"].result(rows, False, {})
    assert longer.ratio == pytest.approx(1.5)
    assert not longer.ok

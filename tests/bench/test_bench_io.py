"""`ffs bench io` from end to end with few cases and slices: lines, plot, exit status; no speeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

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
    names = ["write-64k-qd16-tcp-null", "read-1m-qd16-local-null", "latency-4k-qd1-local-null", "meta-stat"]
    only = [f"--only={name}" for name in (*names[1:], "write-64k-qd16-t*-null")]
    scratch, plot = tmp_path / "scratch", tmp_path / "plot.svg"
    run = _run("--json", "--slices", "3", "--dir", str(scratch), "--plot", str(plot), *only)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert sorted(line["name"] for line in lines) == sorted(["noise", *names]), run.stderr
    assert ElementTree.fromstring(plot.read_text()).tag == "{http://www.w3.org/2000/svg}svg"
    for line in lines:
        assert {"name", "ffs", "floor", "ratio", "unit", "runs", "goal", "ok", "noisy"} <= set(line)
        assert line["ffs"] > 0
        assert line["floor"] > 0
        assert line["runs"] == 3
    for line in lines[1:]:
        assert line["client_us"] > 0
        assert line["server_us"] > 0
        figure = line["ratio"] if line["goal_of"] == "ratio" else line["ffs"]
        assert line["ok"] is (line["goal"] is None or figure >= line["goal"])
    assert run.returncode == (0 if all(line["ok"] for line in lines) else 1)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("options", [["--only", "none"], ["--slices", "0"], ["--plot", "a.pdf"]])
def test_bad_options(options: list[str]) -> None:
    run = _run(*options)
    assert run.returncode in (1, 2)
    assert run.stdout == ""

"""`ffs bench kv` from end to end with few cases and slices: lines and exit status; no speeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ffs.cli.benchmark.kv_cases import CASES, INT8_NAMES

ROOT = Path(__file__).parents[2]


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ffs", "bench", "kv", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_every_case_prints_its_line(tmp_path: Path) -> None:
    names = ["get-64k-x16-local", "put-1m-x1-tcp", "again-1m-x16-tcp"]
    only = [f"--only={name}" for name in (*names[:2], "again-1m-x16-t*")]
    run = _run("--json", "--slices", "2", "--slice-ms", "5", "--mib", "64", "--tmpfs", str(tmp_path), *only)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["name"] for line in lines] == ["noise", *[c.name for c in CASES if c.name in names]], (
        run.stderr
    )
    assert run.returncode == 0
    for line in lines[1:]:
        assert line["ffs"] > 0
        assert line["floor"] > 0
        assert line["errors"] == 0
        assert line["blocks"] >= 3 * line["batch"]
        assert line["p99_us"] >= line["p50_us"] > 0
        assert line["client_us"] > 0
        assert line["server_us"] > 0
        assert line["max_inflight"] >= line["batch"]
        assert (line["verified_bytes"] > 0) is (line["op"] != "again")
    assert list(tmp_path.iterdir()) == []


def test_int8_values_are_within_their_bound(tmp_path: Path) -> None:
    run = _run(
        "--json", "--slices", "1", "--slice-ms", "5", "--mib", "64", "--tmpfs", str(tmp_path), "--only=int8-*"
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["name"] for line in lines] == ["noise", *INT8_NAMES], run.stderr
    assert run.returncode == 0
    for line in lines[1:]:
        assert line["ffs"] > 0
        assert 1.3 < line["block_ratio"] < 4 / 3
        assert 0 < line["worst_of_bound"] <= 1


def test_a_pattern_that_nothing_matches() -> None:
    run = _run("--only", "none")
    assert run.returncode == 1
    assert "get-64k-x1-local" in run.stderr
    assert run.stdout == ""

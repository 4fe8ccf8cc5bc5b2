"""`ffs bench meta` from end to end with little data: the form of its lines and its exit status, no speeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ffs.cli.benchmark.meta import CASES, KILLED, NAMES, store_of_its_own
from ffs.cli.benchmark.report import Result, json_line

ROOT = Path(__file__).parents[2]


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ffs", "bench", "meta", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_every_case_prints_its_line(tmp_path: Path) -> None:
    tiny = ("--slices", "1", "--slice-ms", "20", "--files", "300", "--small-files", "8", "--kill-ms", "800")
    run = _run("--json", *tiny, "--dir", str(tmp_path))
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["name"] for line in lines] == ["noise", *NAMES], run.stderr
    for line in lines:
        assert {"name", "ffs", "floor", "ratio", "unit", "runs", "goal", "ok", "noisy"} <= set(line)
        assert line["ffs"] > 0
        assert line["floor"] > 0
    for case, line in zip(CASES, lines[1:], strict=False):
        assert line["goal"] == case.goal
        assert line["msgpack_floor"] > 0
        assert line["client_us"] > 0
        assert line["server_us"] > 0
        assert line["ok"] is (case.goal is None or line["ffs"] >= case.goal)
    killed = lines[-1]
    assert killed["name"] == KILLED
    assert killed["operations"] > 0
    assert killed["longest"] >= killed["ffs"]
    assert killed["ok"] is (killed["ffs"] <= killed["goal"])
    assert run.returncode == (0 if all(line["ok"] for line in lines) else 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [["--only", "none"], ["--engine", "memory://"]])
def test_bad_options(options: list[str]) -> None:
    run = _run(*options)
    assert run.returncode in (1, 2)
    assert run.stdout == ""
    assert options[-1] in run.stderr


def test_a_run_on_foundationdb_has_a_prefix_of_its_own() -> None:
    one, other = store_of_its_own("fdb:///c"), store_of_its_own("fdb:///c")
    assert one.startswith("fdb:///c?prefix=ffs-bench-")
    assert one != other
    assert store_of_its_own("fdb:///c?prefix=a-").startswith("fdb:///c?prefix=a-ffs-bench-")


def test_a_limit_is_kept_by_what_is_below_it() -> None:
    for seconds, ok in ((0.5, True), (1.0, True), (1.5, False)):
        result = Result("late", seconds, 0.1, 0.2, "s", 1, 1.0, goal_of="ffs", at_most=True)
        assert result.ok is ok
        assert json.loads(json_line(result))["at_most"] is True

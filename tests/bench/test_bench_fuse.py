"""`ffs bench fuse` where there is bindfs; its refusal where there isn't."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ffs.cli.benchmark.fuse_mounts import check_bindfs
from ffs.errors import FfsError

CASE = "fuse-4k-rand-qd32-bindfs-tmpfs"


def _missing() -> str:
    try:
        check_bindfs()
    except FfsError as error:
        return error.message
    return ""


def test_one_case(tmp_path: Path) -> None:
    options = [f"--only={CASE}", "--slices=2", "--mib=32", f"--dir={tmp_path}", "--json"]
    run = subprocess.run(
        [sys.executable, "-m", "ffs", "bench", "fuse", *options], capture_output=True, text=True, timeout=300
    )
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    if missing := _missing():
        assert run.returncode == 1
        assert missing in run.stderr
        return
    (line,) = map(json.loads, run.stdout.splitlines())
    assert line["name"] == CASE, run.stderr
    assert line["ffs"] > 0
    assert line["floor"] > 0
    assert line["device"] > 0
    assert line["client_us"] > 0
    assert run.returncode == 0

"""kill -9 of a process that writes through the native engine (FAULTS S17).

The process is a case of the native test program (native/test/engine_file.cc, "worker"). What it
acknowledged before it was killed must be there, whole, when the next one opens the same file, which has
another name each time, as devices do after a restart.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def program() -> Path:
    """The native test program: $FFS_TEST_ENGINE, or where `make native-test` builds it."""
    path = Path(os.environ.get("FFS_TEST_ENGINE", ROOT / "build" / "test" / "test_engine"))
    if not path.exists():
        pytest.skip(f"{path} is not built: run `make native-test` first")
    return path


@pytest.mark.parametrize("backend", ["uring", "pread"])
def test_acknowledged_writes_outlive_kill_9(tmp_path: Path, backend: str) -> None:
    """Rounds of write, kill, open and verify; seeds only choose when to kill."""
    device = tmp_path / "device"
    environment = dict(os.environ)
    if backend == "pread":
        environment["FFS_ENGINE_PREAD"] = "1"
    acknowledged: dict[int, int] = {}
    rng = random.Random(17)
    for life in range(5):
        if life > 0:
            device = device.rename(tmp_path / f"device-{life}")
        environment["FFS_ENGINE_WORKER"] = str(device)
        worker = subprocess.Popen(
            [program(), "--test-case=worker"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write("".join(f"{key} {version}\n" for key, version in acknowledged.items()))
        worker.stdin.close()
        verified = False
        said: list[str] = []
        for line in worker.stdout:  # ends with the process, should it refuse
            said.append(line)
            if line.startswith("verified "):
                verified = line == f"verified {len(acknowledged)}\n"
                break
        if not verified:
            worker.kill()
            pytest.fail("".join(said))
        time.sleep(rng.uniform(0.05, 0.5))
        worker.kill()
        for line in worker.stdout.read().splitlines():
            if line.startswith("ack ") and line.count(" ") == 2:
                _, key, version = line.split()
                acknowledged[int(key)] = int(version)
        worker.stdout.close()
        worker.wait()
    assert sum(acknowledged.values()) > 0

"""The transport over software RDMA: rings against servers. The same tests run over tcp and local on every
host; here none may leave rdma out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from guest_port import counters

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("FFS_NATIVE_BUILD", ROOT / "build/test"))


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_rings_against_servers() -> None:
    before = counters()
    said = run(str(BUILD / "test_transport"))
    assert "not over rdma" not in said, said
    after = counters()
    assert after["sent_pkts"] > before["sent_pkts"] + 1000, "nothing went over rxe0"
    # Credits: no message has met an empty receive queue.
    assert after["rcvd_rnr_err"] == before["rcvd_rnr_err"]
    assert after["send_rnr_err"] == before["send_rnr_err"]

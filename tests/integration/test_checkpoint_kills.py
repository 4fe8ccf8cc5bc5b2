"""Savers that are killed: the latest whole checkpoint always loads, and the remains go (FAULTS C6).

Many saves leave nothing behind (C7)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ffs import checkpoint
from ffs.checkpoint.remains import is_remains
from ffs.client.client import Client

ROOT = Path(__file__).parents[2]
POINTS = 20

SAVER = """
import os, signal, sys
import numpy as np
import ffs
from ffs import checkpoint
from ffs.client.caller import Caller
from ffs.client.ior import Ior

address, home, points = sys.argv[1], sys.argv[2], int(sys.argv[3])
left = None  # requests until this process dies
seen = 0

def counted(original):
    def call(self, *args, **options):
        global seen, left
        seen += 1
        if left is not None:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **options)
    return call

Caller.call = counted(Caller.call)
Ior.submit = counted(Ior.submit)
Ior.wait = counted(Ior.wait)

def run(number, dies_after):
    global left, seen
    client = ffs.connect(address, session_ttl=2.0)
    manager = checkpoint.Manager(client, f"{home}/run{number}", keep=1, host_bytes=32 << 20)
    state = {f"t{n}": np.full(3 << 20, n, np.uint8) for n in range(3)} | {"step": 1}
    manager.save(1, state, block=True)
    manager.wait()
    seen, left = 0, dies_after
    state = {f"t{n}": np.full(3 << 20, n if n == 0 else n + 100, np.uint8) for n in range(3)} | {"step": 2}
    manager.save(2, state, block=True)
    manager.wait()
    left = None
    return seen

child = os.fork()
if not child:  # how many requests a save takes
    with open("/dev/fd/1", "w") as out:
        out.write(f"{run(points, None)}\\n")
    os._exit(0)
os.waitpid(child, 0)
total = int(sys.stdin.readline())
for number in range(points):
    child = os.fork()
    if not child:
        run(number, number * total // points)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def test_killed_at_twenty_points_the_latest_always_loads(client: Client, home: str, address: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, address, home, str(POINTS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        total = int(process.stdout.readline())
        assert total > POINTS
        process.stdin.write(f"{total}\n")
        process.stdin.flush()
        ends = [int(line) for line in process.stdout]
        assert process.wait() == 0
    assert len(ends) == POINTS
    assert ends.count(-9) > POINTS // 2  # the rest had fewer requests than the one that was counted
    latest = []
    for number in range(POINTS):
        run = f"{home}/run{number}"
        steps = [name for name in client.listdir(run) if not is_remains(name)]
        assert steps in (["step-1"], ["step-2"], ["step-1", "step-2"])
        for name in sorted(steps):
            state = checkpoint.load(client, f"{run}/{name}")
            more = 0 if name == "step-1" else 100
            assert state["step"] == int(name[-1])
            assert (state["t0"] == 0).all()
            assert all((state[f"t{n}"] == n + more).all() for n in (1, 2))
        latest.append(max(steps))
    assert set(latest) == {"step-1", "step-2"}
    # Their sessions end, and then whoever comes next takes the remains away.
    end = time.monotonic() + 60
    while any(is_remains(name) for number in range(POINTS) for name in client.listdir(f"{home}/run{number}")):
        assert time.monotonic() < end, "remains stay"
        for number in range(POINTS):
            checkpoint.Manager(client, f"{home}/run{number}", host_bytes=1 << 20).close()
        time.sleep(0.5)


def test_fifty_saves_leave_memory_and_descriptors_flat(client: Client, home: str) -> None:
    """C7."""
    state = {f"t{n}": np.full(1 << 20, n, np.uint8) for n in range(4)}

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    with checkpoint.Manager(client, f"{home}/run", host_bytes=16 << 20, keep=2) as manager:
        for step in range(50):
            state["t0"][:] = step
            manager.save(step, state)
            if step == 9:
                manager.wait()
                before, files = resident(), len(os.listdir("/proc/self/fd"))
        manager.wait()
        assert resident() <= before + (16 << 20)
        assert len(os.listdir("/proc/self/fd")) <= files + 2
        assert manager.steps() == [48, 49]
        assert (manager.load()["t0"] == 49).all()
        assert manager._pool is not None
        assert manager._pool.used == 0
    assert client.listdir(f"{home}/run") == ["step-48", "step-49"]

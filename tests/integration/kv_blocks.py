"""Blocks for tests of KV spaces: keys, content that says whose it is, and servers that are stopped
meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from ffs import kv
from ffs.cli.devcluster.supervisor import Supervisor
from ffs.kv import Results, Status

BLOCK = 64 << 10


def keys_of(count: int, salt: str = "") -> list[bytes]:
    return kv.hash_tokens(kv.Identity("m", salt=salt, block_tokens=1), range(count))


def payload(key: bytes, length: int = BLOCK) -> bytes:
    """Bytes that say whose they are, everywhere."""
    return (key * (length // len(key) + 1))[:length]


def statuses(results: Results) -> list[Status]:
    return [results[position] for position in range(len(results))]


@contextlib.contextmanager
def stopped(cluster: Supervisor, *names: str) -> Iterator[None]:
    """SIGSTOP for the time of the block."""
    run = cluster.directory.read_run()
    assert run is not None
    pids = [record.pid for record in run.processes if record.name in names]
    assert len(pids) == len(names)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        # The signal takes effect when a thread next enters the kernel: only then nothing answers.
        for task in (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends rather than stops
                while (task / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                    time.sleep(0.001)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

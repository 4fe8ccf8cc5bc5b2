"""Where the time goes: CPU microseconds an operation, by process, from the scheduler's own count.

/proc/<pid>/task/*/schedstat counts nanoseconds on a CPU for each thread; a thread that ends takes its
count along, so these figures are of threads that live through the measurement.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def cpu_ns(pid: int) -> int:
    """CPU time of all living threads of a process; 0 if it is gone."""
    total = 0
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return 0
    for task in tasks:
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError, ValueError):
            continue
    return total


@dataclass(slots=True)
class CpuMeter:
    """Counts the CPU time of this process and of servers while something runs."""

    servers: tuple[int, ...]
    client_ns: int = 0
    server_ns: int = 0
    operations: float = 0

    def read(self) -> tuple[int, int]:
        return cpu_ns(os.getpid()), sum(map(cpu_ns, self.servers))

    def add(self, before: tuple[int, int], operations: float) -> None:
        """Adds what has passed since `before` (from `read`)."""
        client, server = self.read()
        self.client_ns += client - before[0]
        self.server_ns += server - before[1]
        self.operations += operations

    def as_fields(self) -> dict[str, object]:
        if not self.operations:
            return {}
        return {
            "client_us": round(self.client_ns / self.operations / 1000, 2),
            "server_us": round(self.server_ns / self.operations / 1000, 2),
        }


def meter(pids: Iterable[int]) -> CpuMeter:
    return CpuMeter(tuple(pids))

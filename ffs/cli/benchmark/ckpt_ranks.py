"""The processes of `ffs bench ckpt`: ranks that do the same thing at the same time (ckpt_worker.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ffs.cli.benchmark.workers import Answer, answer_of, end_all


class RankProcesses:
    """`count` ranks with `size_bytes` of state together, joined by gloo. Close it; so does leaving `with`."""

    def __init__(self, count: int, model: Path, size_bytes: int, shape: str, scratch: Path) -> None:
        """Blocking until all have their state. FfsError: one of them ended."""
        self._processes: list[subprocess.Popen[str]] = []
        rendezvous = tempfile.mktemp(prefix="rendezvous-", dir=scratch)
        try:
            for rank in range(count):
                command = [sys.executable, "-m", "ffs.cli.benchmark.ckpt_worker", str(rank), str(count)]
                self._processes.append(
                    subprocess.Popen(
                        [*command, rendezvous, str(model), str(size_bytes), shape],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=None if os.environ.get("FFS_BENCH_VERBOSE") else subprocess.DEVNULL,
                        text=True,
                        env={
                            **os.environ,
                            "OMP_NUM_THREADS": "1",  # as torchrun has it
                            "LOCAL_WORLD_SIZE": str(count),
                            "GLOO_SOCKET_IFNAME": "lo",
                        },
                    )
                )
            for process in self._processes:
                answer_of(process, "a rank of the bench")
        except BaseException:
            self.close()
            raise

    def tell(self, do: str, **told: Any) -> list[Answer]:
        """The same line to all; their answers. Blocking until all are done."""
        line = json.dumps({"do": do, **told}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                break  # what it said last is read below
        return [answer_of(process, "a rank of the bench") for process in self._processes]

    def slowest(self, do: str, field: str = "seconds", **told: Any) -> float:
        """The largest of what the ranks measured."""
        return max(float(answer[field]) for answer in self.tell(do, **told))

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends them. Blocking, bounded."""
        end_all(self._processes)
        self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

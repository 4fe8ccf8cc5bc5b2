"""When a server moves data: from the first to the last moment in which it writes much to its devices, by the
kernel's count of what the process has written (/proc/<pid>/io). docs/guides/bench.md."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

LOOK_S = 0.01
MUCH_BYTES = 1 << 20  # between two looks: more than journals and reports take


def written_bytes(pid: int) -> int:
    """What a process has sent to devices since it started; OSError if it is gone."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "write_bytes":
            return int(value)
    raise OSError(f"/proc/{pid}/io has no write_bytes")


def span_s(looks: list[tuple[float, int]]) -> float:
    """Seconds from the last look before the first step of MUCH_BYTES to the first one after the last such
    step; 0.0 if there is none. `looks`: (time in seconds, bytes so far), in order."""
    steps = [i for i in range(1, len(looks)) if looks[i][1] - looks[i - 1][1] >= MUCH_BYTES]
    return looks[steps[-1]][0] - looks[steps[0] - 1][0] if steps else 0.0


@dataclass(slots=True)
class Watch:
    """Looks at one process from `start` to `end`, on a thread of its own."""

    pid: int
    _looks: list[tuple[float, int]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._look()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> float:
        """Seconds in which it moved data. Blocking, briefly."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._look()
        return span_s(self._looks)

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        self._looks.append((time.perf_counter(), written_bytes(self.pid)))

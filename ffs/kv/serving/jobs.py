"""Jobs whose end is told through a descriptor: what LMCache polls (docs/kv.md, LMCache)."""

from __future__ import annotations

import os
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Finished(Generic[T]):
    """Results by job, and an eventfd that is readable once there is one. Any thread; nothing blocks."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}

    def fileno(self) -> int:
        """The eventfd. This object's; -1 after close."""
        return self._fd

    def put(self, job: int, result: T) -> None:
        """Ends a job. After close it is forgotten."""
        with self._lock:
            self._results[job] = result
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def pop(self, job: int) -> T | None:
        """The result of a job, once; None: not ended."""
        with self._lock:
            return self._results.pop(job, None)

    def pop_all(self) -> dict[int, T]:
        """All results that nobody took yet."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def quiet(self) -> None:
        """Takes the signal away."""
        with self._lock:
            if self._fd >= 0:
                try:
                    os.eventfd_read(self._fd)
                except BlockingIOError:
                    return

    def close(self) -> None:
        """Repeatable."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

"""Threads that wait for ffs so that an engine's scheduler needn't (docs/kv.md, Threads)."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger("ffs.kv")

Work = Callable[[], None]


class Lanes:
    """Lines of work, each with threads of its own: bulk in one doesn't hold up another.

    `submit` puts work in a line and returns at once. Work that raises is logged and its thread goes on, so
    work must tell its own end. A child of fork has no threads: an engine makes adapters after it forks."""

    def __init__(self, name: str, threads: dict[str, int]) -> None:
        self._queues: dict[str, queue.SimpleQueue[Work | None]] = {}
        self._threads: list[threading.Thread] = []
        self._idle = threading.Condition()
        self._unfinished = 0
        self._closed = False
        for lane, count in threads.items():
            self._queues[lane] = queue.SimpleQueue()
            for number in range(count):
                thread = threading.Thread(
                    target=self._run, args=(self._queues[lane],), name=f"{name}-{lane}-{number}", daemon=True
                )
                self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def submit(self, lane: str, work: Work) -> None:
        """Returns at once. RuntimeError after `close`."""
        with self._idle:
            if self._closed:
                raise RuntimeError("the adapter is closed")
            self._unfinished += 1
            self._queues[lane].put(work)

    def drain(self) -> None:
        """Blocks until all that was submitted before is done."""
        with self._idle:
            self._idle.wait_for(lambda: self._unfinished == 0)

    def close(self) -> None:
        """Does what is in the lines and ends the threads. Blocking. Repeatable."""
        with self._idle:
            if not self._closed:
                self._closed = True
                for thread in self._threads:
                    lane = thread.name.rsplit("-", 2)[1]
                    self._queues[lane].put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self, line: queue.SimpleQueue[Work | None]) -> None:
        while (work := line.get()) is not None:
            try:
                work()
            except Exception:
                _log.exception("work of a KV adapter failed")
            finally:
                with self._idle:
                    self._unfinished -= 1
                    if not self._unfinished:
                        self._idle.notify_all()

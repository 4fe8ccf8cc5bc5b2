"""The threads of a tier manager: each does one kind of move, again and again, and outlives whatever goes
wrong in it (K20). docs/kv_tiers.md, Manager."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_BACKOFF_S: Final = (0.01, 0.1, 1.0)


class Workers:
    """Threads that call a step until they are stopped. A step moves something (True), or waits a little and
    finds nothing (False). What it raises is kept and counted, and the thread goes on after a pause."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.failures = 0
        """Steps that raised."""
        self.last_failure: BaseException | None = None

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def start(self, name: str, step: Callable[[], bool]) -> None:
        thread = threading.Thread(target=self._run, args=(step,), name=f"ffs-kv-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self, step: Callable[[], bool]) -> None:
        in_a_row = 0
        while not self._stop.is_set():
            try:
                step()
                in_a_row = 0
            except BaseException as error:
                # A thread that ended here would take its tier with it, in silence: nothing ends it but
                # stop().
                with self._lock:
                    self.failures += 1
                    self.last_failure = error
                self._stop.wait(_BACKOFF_S[min(in_a_row, len(_BACKOFF_S) - 1)])
                in_a_row += 1

    def stop(self) -> None:
        """Asks all to end."""
        self._stop.set()

    def join(self) -> None:
        """Blocks until their last steps are over."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

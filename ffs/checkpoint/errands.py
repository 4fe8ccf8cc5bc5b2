"""A thread for what mustn't keep training waiting, there before it is needed: a thread's start returns only
when that has got a processor, for which it may wait as long as a step of others takes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class Errands:
    """Done one after another, in order, by a daemon thread. Any thread."""

    def __init__(self, name: str, first: Callable[[], None] = lambda: None) -> None:
        """`first`: done before all others."""
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.do(first)

    def do(self, work: Callable[[], None]) -> Future[None]:
        """Doesn't wait. What `work` raises is the future's."""
        future: Future[None] = Future()
        self._queue.put((work, future))
        return future

    def close(self) -> None:
        """After all that was given. Blocking."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del item, work, future  # what they hold isn't kept until there is more to do

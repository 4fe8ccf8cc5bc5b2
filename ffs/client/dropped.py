"""Files and clients that garbage collection finds unclosed: a thread closes them. docs/client.md, Files.

A collection strikes in whatever code its thread is just then, perhaps inside a lock of this client. Closing
asks the services, so it isn't done there. What is dropped by its last reference is closed at once, as by io.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from ffs.client.unraisable import tell

Work = Callable[[], object]

_TURN_S: Final = 0.005

_queue: queue.SimpleQueue[tuple[Work, bool]] = queue.SimpleQueue()  # its put may be called by __del__
_collecting: set[int] = set()
_thread: threading.Thread | None = None
_starting = threading.Lock()


def watch() -> None:
    """From now on there is a thread for what is dropped. Before anything that `hand_over` may be asked about
    is made; never in a collection."""
    global _thread
    if _thread is not None and _thread.is_alive():
        return
    with _starting:
        if _thread is None or not _thread.is_alive():
            thread = threading.Thread(target=_close_all, name="ffs-dropped", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # a limit of threads: what is dropped is closed where it is found
            _thread = thread
            if _phase not in gc.callbacks:
                gc.callbacks.append(_phase)


def hand_over(work: Work, *, late: bool = False) -> bool:
    """For __del__: whether this thread collects garbage just now. Then `work` is done by another soon, and
    its error told as of __del__; if `late`, after all that the collection finds. Never blocks."""
    if threading.get_ident() not in _collecting or _thread is None or not _thread.is_alive():
        return False
    _queue.put((work, late))
    return True


def settle() -> None:
    """Until all that was handed over is done. Blocking."""
    if _thread is None or not _thread.is_alive() or _thread is threading.current_thread():
        return
    done = threading.Event()
    _queue.put((done.set, False))
    while not done.wait(1.0):
        if not _thread.is_alive():
            return


def _phase(phase: str, info: object) -> None:
    if phase == "start":
        _collecting.add(threading.get_ident())
    else:
        _collecting.discard(threading.get_ident())


def _close_all() -> None:
    while True:
        work, late = _queue.get()
        if late:
            while _collecting:
                time.sleep(_TURN_S)
            _queue.put((work, False))
            continue
        try:
            work()
        except Exception as error:
            tell(error)
        del work  # nothing is kept alive by this thread's wait


def _after_fork_in_child() -> None:
    """The thread isn't here, and what was handed over is the parent's."""
    global _thread, _queue, _starting
    _thread = None
    _queue = queue.SimpleQueue()
    _starting = threading.Lock()
    _collecting.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

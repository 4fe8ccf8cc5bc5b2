"""Children of fork for tests: each ends, whatever happens in it, and says how by its status."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable


def start(work: Callable[[], object], seconds: int = 100) -> int:
    """The pid of a child that does `work` and ends with 0, 1 if it raised, or by SIGALRM after `seconds`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(seconds)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ends_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def in_child(work: Callable[[], object], seconds: int = 100) -> bool:
    """Whether a child did `work` to its end."""
    return ends_well(start(work, seconds))

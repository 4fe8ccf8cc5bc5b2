"""A benchmark that is asked to end: it takes away what it made, hundreds of MiB of memory often.

docs/guides/bench.md.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)

Run = Callable[[argparse.Namespace], int]


class Stopped(BaseException):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stopping_cleanly(run: Run) -> Run:
    """`run`, which SIGTERM and SIGHUP end as Ctrl-C does: through its `finally`s, with 128 + the signal as
    its exit status. In the main thread."""

    @functools.wraps(run)
    def wrapped(args: argparse.Namespace) -> int:
        try:
            with _raising():
                return run(args)
        except Stopped as stopped:
            print("ffs: stopped", file=sys.stderr)
            return 128 + stopped.number

    return wrapped


@contextmanager
def _raising() -> Iterator[None]:
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a child of fork: what there is to take away is its parent's
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup
                signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

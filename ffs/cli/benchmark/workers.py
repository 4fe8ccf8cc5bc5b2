"""Worker processes of a bench, asked over a pipe: a line of JSON each way."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from typing import Any

from ffs.errors import FfsError

_END_S = 20.0

Answer = dict[str, Any]


def answer_of(process: subprocess.Popen[str], who: str) -> Answer:
    """What it says next. Blocking. FfsError, which names `who`: it has ended, or it says that it failed."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise FfsError(f"{who} ended with status {process.wait()}")
    answer: Answer = json.loads(line)
    if "error" in answer:
        raise FfsError(f"{who}: {answer['error']}")
    return answer


def end_all(processes: Iterable[subprocess.Popen[str]]) -> None:
    """Closes what they listen to, and kills those that don't end by that. Blocking, bounded."""
    started = list(processes)
    for process in started:
        if process.stdin is not None:
            process.stdin.close()
    for process in started:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

"""A contestant in another environment: a script under that environment's Python, asked over a pipe, a line of
JSON each way. What it prints besides goes to its log."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ffs.errors import FfsError

_TAIL = 2000
_STOP_S = 10.0


class PeerProcess:
    """One process. `answers`: it says `{"ready": true}`, then answers each request. One thread at a time."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        answers: bool = True,
        ready: str | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """Starts it, and waits until it is ready: until its first answer, or a line that begins with `ready`.
        FfsError with the end of its log if it isn't in time."""
        self._name = next((Path(word).name for word in command if word.endswith(".py")), command[0])
        self._log = log
        self._timeout_s = timeout_s
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if answers or ready else errors,
                stderr=errors,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        try:
            if answers:
                self._answer()
            elif ready:
                self._line(ready)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: object) -> dict[str, Any]:
        """Its answer. Blocking. FfsError: it ended, or took longer than it may."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then it says why, below
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line("{"))
        return answer

    def _line(self, begin: str) -> str:
        """The next line that begins so; others are the package's own talk."""
        assert self._process.stdout is not None
        watch = threading.Timer(self._timeout_s, self._process.kill)
        watch.start()
        try:
            for line in self._process.stdout:
                if line.startswith(begin):
                    return line
        finally:
            watch.cancel()
        raise FfsError(f"{self._name} gave no answer: {self._end_of_log()}")

    def _end_of_log(self) -> str:
        text = self._log.read_text(errors="replace").strip()
        return text[-_TAIL:] or f"exit status {self._process.poll()}, and no words"

    def close(self) -> None:
        """Ends it. Repeatable."""
        process = self._process
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

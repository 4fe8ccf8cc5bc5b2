"""What is known of blocks that requests have asked for (docs/kv.md, Threads). Pure but for its lock.

A scheduler asks for one block at a time and must not wait. The first to ask gets no answer yet, and the
block is looked up with all others of that step; later ones get what was found. A verdict lasts as long as a
request that asked: a block that turned out missing stays missing for it, so no load is tried for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Verdict:
    since_s: float
    found: bool | None = None
    requests: set[str] = field(default_factory=set)


class Verdicts:
    """Any thread. `patience_s`: after so long without an answer a block counts as missing."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._lock = threading.Lock()
        self._verdicts: dict[bytes, _Verdict] = {}
        self._of_request: dict[str, set[bytes]] = {}
        self._new: list[bytes] = []
        self.late = 0
        """Blocks given up for want of an answer."""

    def __len__(self) -> int:
        return len(self._verdicts)

    def ask(self, key: bytes, request: str) -> bool | None:
        """Whether the block is there; None: not known yet."""
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is None:
                verdict = self._verdicts[key] = _Verdict(self._clock())
                self._new.append(key)
            elif verdict.found is None and self._clock() - verdict.since_s > self._patience_s:
                verdict.found = False
                self.late += 1
            verdict.requests.add(request)
            self._of_request.setdefault(request, set()).add(key)
            return verdict.found

    def take(self) -> list[bytes]:
        """Blocks to look up now: those asked for since the last call, if anybody still wants them."""
        with self._lock:
            new = [key for key in self._new if key in self._verdicts and self._verdicts[key].found is None]
            self._new = []
            return new

    def answer(self, keys: Sequence[bytes], found: Iterable[bool]) -> None:
        """What a lookup has found. Too late: a block that was given up stays so."""
        with self._lock:
            for key, there in zip(keys, found, strict=True):
                verdict = self._verdicts.get(key)
                if verdict is not None and verdict.found is None:
                    verdict.found = bool(there)

    def missing(self, keys: Iterable[bytes]) -> None:
        """A load of these has failed: who asked computes them."""
        with self._lock:
            for key in keys:
                verdict = self._verdicts.get(key)
                if verdict is not None:
                    verdict.found = False

    def forget(self, request: str) -> None:
        """The request is over. What nobody else asked for is looked up anew next time."""
        with self._lock:
            for key in self._of_request.pop(request, ()):
                verdict = self._verdicts[key]
                verdict.requests.discard(request)
                if not verdict.requests:
                    del self._verdicts[key]

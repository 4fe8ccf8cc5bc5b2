"""Requests that wait in a metadata process for a lock. docs/metadata.md, Locks."""

from __future__ import annotations

import asyncio
from typing import Final

LOOK_S: Final = 0.1  # other processes release too


class Waiters:
    """Requests of this process that wait for locks. They look again when something is released here, and
    now and then, since other processes release too. One event loop."""

    def __init__(self) -> None:
        self._events: dict[int, tuple[asyncio.Event, list[None]]] = {}

    async def wait(self, ino: int, timeout_s: float) -> None:
        """Until something of `ino` is released here, at most LOOK_S or `timeout_s`."""
        event, waiting = self._events.setdefault(ino, (asyncio.Event(), []))
        waiting.append(None)
        try:
            async with asyncio.timeout(min(timeout_s, LOOK_S)):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            waiting.pop()
            if not waiting and self._events.get(ino, (None,))[0] is event:
                del self._events[ino]

    def released(self, ino: int) -> None:
        event, _ = self._events.pop(ino, (None, None))
        if event is not None:
            event.set()

    def all_released(self) -> None:
        """A session is over, with whatever it held."""
        for ino in list(self._events):
            self.released(ino)

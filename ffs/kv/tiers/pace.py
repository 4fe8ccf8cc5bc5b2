"""How many loads a store gets at a time, and whether it gets any: a window that follows the measured latency,
and a breaker. Pure: times are given."""

from __future__ import annotations

from typing import Final

_QUEUED_LEAST: Final = 4.0
_QUEUED_MOST: Final = 16.0
_PROBE_AFTER: Final = 4096  # loads; then the window is small for a moment, to see the unloaded store again


class Window:
    """Loads in flight, from `least` to `most`. Those beyond what fits in the time of an unloaded one stand in
    a line somewhere: the window grows while few do, and shrinks when many do."""

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._base_s = 0.0
        self._size = float(least)
        self._until_probe = _PROBE_AFTER
        self._probing = 0  # loads that are still to come with few in flight

    @property
    def size(self) -> int:
        return self._least if self._probing else int(self._size)

    @property
    def base_s(self) -> float:
        """The latency of an unloaded store, as far as it was seen; 0: not yet."""
        return self._base_s

    def ended(self, latency_s: float, in_flight: int, loads: int = 1) -> None:
        """So many loads took so long, and end one after the other; `in_flight`: before the first of them
        did."""
        if latency_s > 0:
            for left in range(in_flight, in_flight - loads, -1):
                self._ended(latency_s, left)

    def _ended(self, latency_s: float, in_flight: int) -> None:
        if self._probing:
            if in_flight <= self._least:
                self._base_s = min(latency_s, self._base_s) if self._base_s else latency_s
                self._probing -= 1
            return
        self._until_probe -= 1
        if self._until_probe <= 0:
            self._until_probe, self._probing, self._base_s = _PROBE_AFTER, self._least, 0.0
            return
        self._base_s = min(latency_s, self._base_s) if self._base_s else latency_s
        queued = in_flight * (1 - self._base_s / latency_s)
        if queued > _QUEUED_MOST:
            self._size = max(self._least, self._size - 1 / self._size)
        elif queued < _QUEUED_LEAST and in_flight >= self._size / 2:
            self._size = min(self._most, self._size + 1 / self._size)


class Breaker:
    """Lets a store rest that fails again and again: after `most` errors in a row nothing goes there for a
    while, then one batch tries. Each failed try doubles the while."""

    def __init__(self, most: int = 8, first_s: float = 0.5, last_s: float = 30.0) -> None:
        self._most = most
        self._first_s = first_s
        self._last_s = last_s
        self._errors = 0
        self._rest_s = first_s
        self._until: float | None = None
        self.opened = 0
        """How often it said no more."""

    def closed(self, now: float) -> bool:
        """Whether the store may be used now."""
        return self._until is None or now >= self._until

    def well(self) -> None:
        self._errors = 0
        self._rest_s = self._first_s
        self._until = None

    def failed(self, now: float) -> None:
        self._errors += 1
        if self._until is not None and now >= self._until:  # the try
            self._rest_s = min(self._last_s, 2 * self._rest_s)
        elif self._until is not None or self._errors < self._most:
            return
        self._until = now + self._rest_s
        self.opened += 1

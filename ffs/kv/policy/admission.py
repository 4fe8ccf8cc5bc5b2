"""Admission: what was used once doesn't drive out what is used again and again (K22). Pure.

A frequency sketch (four rows of small counters, halved from time to time so that old fame fades) counts
uses of keys, of blocks that aren't there too. Among a newcomer and the block that would go for it, the one
with more uses stays. With as many, the newcomer does: the order of eviction has judged the other already.
"""

from __future__ import annotations

from typing import Final

import numpy as np

_ROWS: Final = 4
_MOST: Final = 15
_FADE_AFTER: Final = 8  # uses for each counter of a row, then all are halved


class Sketch:
    """How often keys were used lately, about: never too low but for the halving. Keys have at least 16 bytes
    that are evenly distributed (hashes). `keys`: how many different ones it tells apart well."""

    def __init__(self, keys: int) -> None:
        width = 1 << max(6, (max(1, keys) - 1).bit_length())
        self._mask = width - 1
        self._rows = np.zeros((_ROWS, width), dtype=np.uint8)
        self._uses = 0
        self._limit = width * _FADE_AFTER

    def _places(self, key: bytes) -> list[int]:
        return [int.from_bytes(key[4 * row : 4 * row + 4], "little") & self._mask for row in range(_ROWS)]

    def add(self, key: bytes) -> None:
        """One use. Only the least of a key's counters grow: so others disturb it less."""
        places = self._places(key)
        counts = [int(self._rows[row, place]) for row, place in enumerate(places)]
        least = min(counts)
        if least < _MOST:
            for row, place in enumerate(places):
                if counts[row] == least:
                    self._rows[row, place] = least + 1
        self._uses += 1
        if self._uses >= self._limit:
            self._rows >>= 1
            self._uses //= 2

    def count(self, key: bytes) -> int:
        """0 to 15."""
        return min(int(self._rows[row, place]) for row, place in enumerate(self._places(key)))


class ScanGuard:
    """Says who stays. `defences`: how many newcomers in a row one block may outlast before it goes all the
    same, so that what was popular and isn't any more can't lock a tier."""

    def __init__(self, keys: int, defences: int = 4096) -> None:
        self._sketch = Sketch(keys)
        self._defences = defences
        self._champion: bytes | None = None
        self._held = 0
        self.refused = 0
        """Newcomers that were turned away, so far."""

    def used(self, key: bytes) -> None:
        self._sketch.add(key)

    def uses(self, key: bytes) -> int:
        """Late uses of a key, about."""
        return self._sketch.count(key)

    def admits(self, newcomer: bytes, victim: bytes) -> bool:
        """Whether `newcomer` is worth more than `victim`, who would have to go."""
        if self._sketch.count(newcomer) >= self._sketch.count(victim):
            return True
        if victim != self._champion:
            self._champion, self._held = victim, 0
        self._held += 1
        if self._held > self._defences:
            self._champion = None
            return True
        self.refused += 1
        return False

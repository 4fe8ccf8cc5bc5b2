"""Admission: what was used once doesn't drive out what is used again and again (K22). Pure.

A frequency sketch (four rows of small counters, halved from time to time so that old fame fades) counts
uses of keys, of blocks that aren't there too. Among a newcomer and the block that would go for it, the one
with more uses stays. With as many, the newcomer does: the order of eviction has judged the other already.
"""

from __future__ import annotations

import struct
from typing import Final

_WORDS: Final = struct.Struct("<4I")
_MOST: Final = 15
_FADE_AFTER: Final = 8  # uses for each counter of a row, then all are halved
_HALF: Final = bytes(count // 2 for count in range(256))


class Sketch:
    """How often keys were used lately, about: never too low but for the halving. Keys have at least 16 bytes
    that are evenly distributed (hashes). `keys`: how many different ones it tells apart well.

    Every block is counted several times on its way through a tier, so nothing here loops or allocates more
    than it must: plain bytes are several times as fast as numpy, one at a time."""

    def __init__(self, keys: int) -> None:
        width = 1 << max(6, (max(1, keys) - 1).bit_length())
        self._mask = width - 1
        self._rows = tuple(bytearray(width) for _ in range(_WORDS.size // 4))
        self._uses = 0
        self._limit = width * _FADE_AFTER

    def add(self, key: bytes) -> None:
        """One use. Only the least of a key's counters grow: so others disturb it less."""
        mask = self._mask
        least = self.count(key)
        if least < _MOST:
            for row, word in zip(self._rows, _WORDS.unpack_from(key), strict=True):
                if row[word & mask] == least:
                    row[word & mask] = least + 1
        self._uses += 1
        if self._uses >= self._limit:
            self._rows = tuple(row.translate(_HALF) for row in self._rows)
            self._uses //= 2

    def count(self, key: bytes) -> int:
        """0 to 15."""
        mask = self._mask
        first, second, third, fourth = _WORDS.unpack_from(key)
        rows = self._rows
        least: int = min(
            rows[0][first & mask], rows[1][second & mask], rows[2][third & mask], rows[3][fourth & mask]
        )
        return least


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

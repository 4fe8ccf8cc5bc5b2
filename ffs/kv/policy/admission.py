"""Admission: what was used once doesn't drive out what is used again and again (K22). Pure.

A frequency sketch (four rows of small counters, halved from time to time so that old fame fades) counts
uses of keys, of blocks that aren't there too. Among a newcomer and the block that would go for it, the one
with more uses stays. With as many, the newcomer does: the order of eviction has judged the other already.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
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
        """One use."""
        self.add_many((key,))

    def add_many(self, keys: Sequence[bytes]) -> None:
        """One use of each. Only the least of a key's counters grow: so others disturb it less."""
        mask, unpack = self._mask, _WORDS.unpack_from
        row_a, row_b, row_c, row_d = self._rows
        for key in keys:
            a, b, c, d = unpack(key)
            a, b, c, d = a & mask, b & mask, c & mask, d & mask
            in_a, in_b, in_c, in_d = row_a[a], row_b[b], row_c[c], row_d[d]
            least = _least(in_a, in_b, in_c, in_d)
            if least == _MOST:
                continue
            if in_a == least:
                row_a[a] = least + 1
            if in_b == least:
                row_b[b] = least + 1
            if in_c == least:
                row_c[c] = least + 1
            if in_d == least:
                row_d[d] = least + 1
        self._uses += len(keys)
        if self._uses >= self._limit:
            self._rows = tuple(row.translate(_HALF) for row in self._rows)
            self._uses //= 2

    def count(self, key: bytes) -> int:
        """0 to 15."""
        mask = self._mask
        a, b, c, d = _WORDS.unpack_from(key)
        row_a, row_b, row_c, row_d = self._rows
        return _least(row_a[a & mask], row_b[b & mask], row_c[c & mask], row_d[d & mask])


def _least(a: int, b: int, c: int, d: int) -> int:
    """As min does, in half the time."""
    low = a if a < b else b
    if c < low:
        low = c
    return d if d < low else low


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

    def used_many(self, keys: Sequence[bytes]) -> None:
        self._sketch.add_many(keys)

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

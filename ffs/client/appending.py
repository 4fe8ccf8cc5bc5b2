"""Appends, each at a place of its own that the service gives; docs/client.md, Appending.

An append that raised, by a signal or an error, is made again by io's buffers, which keep its bytes. It has
its place already: another would store the bytes twice, or leave a hole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ffs.client.handle import OpenFile

Bytes = NDArray[np.uint8]


class Reserved(NamedTuple):
    """A place at what was the file's end."""

    offset: int
    size: int
    epoch: int


class Appending:
    """Of one file, under its lock."""

    def __init__(self, handle: OpenFile) -> None:
        self._handle = handle
        self._again: tuple[list[Reserved], bytes] | None = None
        """Places that an append which raised has, and the digest of the bytes that belong there."""

    def write(self, whole: Bytes, reserved: list[Reserved], write_at: Callable[[int, Bytes], None]) -> int:
        """Append `whole`; returns where it ends. `reserved` receives its places: for `keep`, where this, or
        what the caller does after it, raises. Blocking."""
        reserved += self._places_of(whole)
        done = 0
        for place in reserved:
            write_at(place.offset, whole[done : done + place.size])
            done += place.size
        if done < len(whole):
            size = len(whole) - done
            offset = self._handle.reserve(size)
            reserved.append(Reserved(offset, size, self._handle.epoch))
            write_at(offset, whole[done:])
        self._again = None
        return reserved[-1].offset + reserved[-1].size

    def keep(self, whole: Bytes, reserved: list[Reserved]) -> None:
        """The append of `whole` raised: the next one that begins with the same bytes goes to its places."""
        if reserved:
            self._again = reserved, _digest(whole[: _size(reserved)])

    def _places_of(self, whole: Bytes) -> list[Reserved]:
        if self._again is None:
            return []
        reserved, digest = self._again
        if any(self._handle.cut_since(place.epoch) for place in reserved):
            return []  # the places are gone
        size = _size(reserved)
        return list(reserved) if size <= len(whole) and _digest(whole[:size]) == digest else []


def _size(reserved: list[Reserved]) -> int:
    return sum(place.size for place in reserved)


def _digest(data: Bytes) -> bytes:
    return hashlib.blake2b(data.data).digest()

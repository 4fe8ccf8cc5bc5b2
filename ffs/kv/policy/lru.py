"""Least recently used: the order that wins where a tier holds much of what is in use. Pure."""

from __future__ import annotations

from collections import OrderedDict


class Lru:
    """See order.py."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._sizes: dict[bytes, int] = {}
        self._line: OrderedDict[bytes, None] = OrderedDict()  # of those that may go, the first to go first

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def insert(self, key: bytes, nbytes: int, held: bool = False) -> None:
        assert key not in self._sizes, "inserted twice"
        self._sizes[key] = nbytes
        self.total_bytes += nbytes
        if not held:
            self._line[key] = None

    def touch(self, key: bytes) -> None:
        if key in self._line:
            self._line.move_to_end(key)

    def hold(self, key: bytes) -> None:
        del self._line[key]

    def free(self, key: bytes) -> None:
        """It has been in use until now: it goes last."""
        self._line[key] = None

    def peek(self) -> bytes | None:
        return next(iter(self._line), None)

    def evict(self, key: bytes) -> None:
        self.remove(key)

    def remove(self, key: bytes) -> None:
        self.total_bytes -= self._sizes.pop(key)
        self._line.pop(key, None)

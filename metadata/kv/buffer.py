"""A transaction's memory: what it has read, and what it will write, over any snapshot.

Shared by the engines of this project that validate and apply by themselves (lmdb, memory). Reads see the
transaction's own writes. Not thread-safe; an engine touches it from one thread at a time.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Final

from metadata.kv.contract import (
    MAX_AGE_S,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    MAX_WRITE_BYTES,
    STAMP_BYTES,
    Pairs,
    TooMuch,
    TooOld,
    Transaction,
    check_key,
)

ADD: Final = 1
MAX: Final = 2
_U64: Final = 0xFFFF_FFFF_FFFF_FFFF
_ABSENT: Final = object()


class Counter:
    """Atomic operations on a key whose value isn't known: applied in order at commit."""

    __slots__ = ("ops",)

    def __init__(self) -> None:
        self.ops: list[tuple[int, int]] = []

    def push(self, op: int, operand: int) -> None:
        if self.ops and self.ops[-1][0] == op:
            last = self.ops[-1][1]
            self.ops[-1] = (op, last + operand if op == ADD else max(last, operand))
        else:
            self.ops.append((op, operand))

    def apply(self, value: bytes | None) -> bytes:
        number = 0 if value is None else int.from_bytes(value, "little")
        for op, operand in self.ops:
            number = (number + operand) & _U64 if op == ADD else max(number, operand)
        return number.to_bytes(8, "little")


Write = bytes | Counter | None  # None: cleared


class BufferedTransaction(Transaction):
    """Records reads and writes; a subclass gives the snapshot and the commit."""

    __slots__ = ("born", "cleared", "ranges", "reads", "stamped", "write_bytes", "writes")

    def __init__(self) -> None:
        self.born = time.monotonic()
        self.reads: dict[bytes, bytes | None] = {}
        # (begin, end of the part that was read, its pairs in the snapshot)
        self.ranges: list[tuple[bytes, bytes, Pairs]] = []
        self.writes: dict[bytes, Write] = {}
        self.cleared: list[tuple[bytes, bytes]] = []  # applied before `writes`
        self.stamped: list[tuple[bytes, bytes, bytes]] = []
        self.write_bytes = 0

    # --- the snapshot, by the engine ---

    @abstractmethod
    def base_get(self, key: bytes) -> bytes | None: ...

    @abstractmethod
    def base_range(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> Pairs: ...

    # --- reads ---

    async def get(self, key: bytes) -> bytes | None:
        if self.writes or self.cleared:
            mine = self.writes.get(key, _ABSENT)
            if mine is _ABSENT:
                if self.cleared and self._is_cleared(key):
                    return None
            elif isinstance(mine, Counter):
                return mine.apply(None if self._is_cleared(key) else self._read(key))
            else:
                return mine  # type: ignore[return-value]
        return self._read(key)

    def _read(self, key: bytes) -> bytes | None:
        reads = self.reads
        if key in reads:
            return reads[key]
        value = reads[key] = self.base_get(key)
        return value

    async def peek(self, key: bytes) -> bytes | None:
        mine = self.writes.get(key, _ABSENT)
        base = None if self._is_cleared(key) else self.base_get(key)
        if mine is _ABSENT:
            return base
        return mine.apply(base) if isinstance(mine, Counter) else mine  # type: ignore[return-value]

    async def range(self, begin: bytes, end: bytes, limit: int = 0, reverse: bool = False) -> Pairs:
        self.check_age()
        if begin >= end:
            return []
        own = [key for key in self.writes if begin <= key < end]
        clears = [c for c in self.cleared if c[0] < end and begin < c[1]]
        # My own clears hide pairs of the snapshot: read enough of it to fill the limit all the same.
        want = 0 if clears or not limit else limit + len(own)
        base = self.base_range(begin, end, want, reverse)
        self._note_range(begin, end, base, want, reverse)
        if not own and not clears:
            return base
        merged = {k: v for k, v in base if not any(b <= k < e for b, e in clears)}
        for key in own:
            mine = self.writes[key]
            if mine is None:
                merged.pop(key, None)
            else:
                merged[key] = mine.apply(merged.get(key)) if isinstance(mine, Counter) else mine
        pairs = sorted(merged.items(), reverse=reverse)
        if want and len(base) == want:  # beyond the last pair read the snapshot is unknown
            edge = base[-1][0]
            pairs = [p for p in pairs if (p[0] >= edge if reverse else p[0] <= edge)]
        return pairs[:limit] if limit else pairs

    def _note_range(self, begin: bytes, end: bytes, base: Pairs, want: int, reverse: bool) -> None:
        if want and len(base) == want:
            if reverse:
                begin = base[-1][0]
            else:
                end = base[-1][0] + b"\0"
        self.ranges.append((begin, end, base[::-1] if reverse else base))

    def _is_cleared(self, key: bytes) -> bool:
        return any(begin <= key < end for begin, end in self.cleared)

    # --- writes ---

    def set(self, key: bytes, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise TooMuch(f"a value has at most {MAX_VALUE_BYTES} bytes, not {len(value)}")
        self._count(key, len(value))
        self.writes[key] = value

    def clear(self, key: bytes) -> None:
        self._count(key, 0)
        self.writes[key] = None

    def clear_range(self, begin: bytes, end: bytes) -> None:
        if begin >= end:
            return
        self._count(begin, len(end))
        for key in [key for key in self.writes if begin <= key < end]:
            del self.writes[key]
        self.cleared.append((begin, end))

    def add(self, key: bytes, delta: int) -> None:
        self._atomic(key, ADD, delta)

    def max(self, key: bytes, value: int) -> None:
        self._atomic(key, MAX, value)

    def _atomic(self, key: bytes, op: int, operand: int) -> None:
        mine = self.writes.get(key, _ABSENT)
        if isinstance(mine, Counter):
            mine.push(op, operand)
            return
        self._count(key, 8)
        counter = Counter()
        counter.push(op, operand)
        if mine is _ABSENT:
            self.writes[key] = counter
        else:  # set or cleared by me: the value is known
            self.writes[key] = counter.apply(mine)  # type: ignore[arg-type]

    def set_stamped(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        self._count(prefix + bytes(STAMP_BYTES) + suffix, len(value))
        self.stamped.append((prefix, suffix, value))

    def _count(self, key: bytes, size: int) -> None:
        length = len(key)
        if not 0 < length <= MAX_KEY_BYTES:
            check_key(key)
        self.write_bytes += length + size
        if self.write_bytes > MAX_WRITE_BYTES:
            raise TooMuch(f"a transaction writes at most {MAX_WRITE_BYTES} bytes: page the work")

    # --- for the engine ---

    @property
    def dirty(self) -> bool:
        return bool(self.writes or self.cleared or self.stamped)

    def check_age(self) -> None:
        """Raises TooOld over MAX_AGE_S."""
        if time.monotonic() - self.born > MAX_AGE_S:
            raise TooOld(f"a transaction lasts at most {MAX_AGE_S:g} s")

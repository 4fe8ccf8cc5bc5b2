"""What one tier holds, and who leaves it: water marks in bytes, pins, the residency window, admission. Pure.

A block is *filling* (its bytes are on their way in: it takes room and isn't visible), *here*, or *leaving*
(it is being copied down: readable still, and it may stay after all). Bytes count, not keys (K21).

**Marks.** When what is here passes `high`, blocks leave until `low` is reached: in batches, ahead of need.
**Window.** For the next `window` bytes that come in, a newcomer isn't asked to leave: it was just computed
or fetched for somebody. **Admission.** When it drops out of the window it is compared with the block that the
order would let go next, and the one with more uses stays: a scan passes through the window and no further.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ffs.errors import InvalidArgument
from ffs.kv.policy.admission import ScanGuard
from ffs.kv.policy.order import Order
from ffs.kv.policy.pins import Watcher


@dataclass(frozen=True, slots=True)
class Marks:
    """Of a tier, in bytes. 0 <= window <= low <= high <= capacity."""

    capacity: int
    high: int
    low: int
    window: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.window <= self.low <= self.high <= self.capacity or self.capacity <= 0:
            raise InvalidArgument(
                f"water marks of a tier: 0 <= window {self.window} <= low {self.low} <= high {self.high} "
                f"<= capacity {self.capacity} doesn't hold"
            )

    @classmethod
    def of(cls, capacity: int, high: float = 0.95, low: float = 0.85, window: float = 0.05) -> Marks:
        """From shares of the capacity."""
        return cls(capacity, int(capacity * high), int(capacity * low), int(capacity * window))


class State(enum.IntEnum):
    FILLING = 1
    HERE = 2
    LEAVING = 3


@dataclass(slots=True)
class _Block:
    nbytes: int
    state: State
    pinned: bool = False


class Residency(Watcher):
    """One tier. Not thread-safe: the manager's lock is around it."""

    def __init__(self, marks: Marks, order: Order, guard: ScanGuard | None = None) -> None:
        self.marks = marks
        self._order = order
        self._guard = guard
        self._blocks: dict[bytes, _Block] = {}
        self._young: OrderedDict[bytes, int] = OrderedDict()  # in the window, oldest first
        self._young_bytes = 0
        self._cheap: OrderedDict[bytes, None] = OrderedDict()  # admission turned them away: they go first
        self._pinned: set[bytes] = set()
        self.used = 0
        """Bytes that are taken, in whatever state."""
        self.leaving = 0
        """Bytes of them that leave."""

    def __len__(self) -> int:
        return len(self._blocks)

    def state(self, key: bytes) -> State | None:
        block = self._blocks.get(key)
        return None if block is None else block.state

    def has(self, key: bytes) -> bool:
        """Whether its bytes can be read here."""
        block = self._blocks.get(key)
        return block is not None and block.state is not State.FILLING

    # --- coming in ------------------------------------------------------------------------------

    def reserve(self, key: bytes, nbytes: int) -> bool:
        """Takes room for a block that is on its way. False: there is none now."""
        assert key not in self._blocks, "on its way twice"
        if self.used + nbytes > self.marks.capacity:
            return False
        self._blocks[key] = _Block(nbytes, State.FILLING, pinned=key in self._pinned)
        self.used += nbytes
        return True

    def filled(self, key: bytes) -> None:
        """Its bytes are here."""
        self.filled_many((key,))

    def filled_many(self, keys: Iterable[bytes]) -> None:
        """Their bytes are here."""
        blocks, order, young = self._blocks, self._order, self._young
        for key in keys:
            block = blocks[key]
            assert block.state is State.FILLING
            block.state = State.HERE
            order.insert(key, block.nbytes, block.pinned)
            young[key] = block.nbytes
            self._young_bytes += block.nbytes
        self._close_window()

    def failed(self, key: bytes) -> None:
        """They never came: nothing of it is left."""
        block = self._blocks.pop(key)
        assert block.state is State.FILLING
        self.used -= block.nbytes

    def _close_window(self) -> None:
        while self._young_bytes > self.marks.window:
            key, nbytes = self._young.popitem(last=False)
            self._young_bytes -= nbytes
            block = self._blocks[key]
            if self._guard is None or block.pinned or block.state is not State.HERE:
                continue
            if self.used <= self.marks.low:
                continue  # there is room for both
            victim = self._order.peek()
            if victim is not None and victim != key and not self._guard.admits(key, victim):
                self._cheap[key] = None

    # --- use ------------------------------------------------------------------------------------

    def touch(self, key: bytes) -> bool:
        """A use, whether the block is here or not (what is wanted and absent is used too); whether it is."""
        return self.touch_many((key,))[0]

    def touch_many(self, keys: Sequence[bytes]) -> list[bool]:
        """A use of each; which of them are here."""
        if self._guard is not None:
            self._guard.used_many(keys)
        found = [self._blocks.get(key) for key in keys]
        there = [block is not None and block.state is not State.FILLING for block in found]
        if True in there:
            for key, block in zip(keys, found, strict=True):
                if block is None or block.state is State.FILLING:
                    continue
                self._cheap.pop(key, None)
                if block.state is State.LEAVING:
                    self.stay(key)
                self._order.touch(key)
        return there

    def pinned(self, key: bytes) -> None:
        self._pinned.add(key)
        block = self._blocks.get(key)
        if block is None or block.pinned:
            return
        block.pinned = True
        if block.state is State.LEAVING:
            self.stay(key)
        elif block.state is State.HERE:
            self._order.hold(key)
        self._cheap.pop(key, None)

    def unpinned(self, key: bytes) -> None:
        self._pinned.discard(key)
        block = self._blocks.get(key)
        if block is None or not block.pinned:
            return
        block.pinned = False
        if block.state is State.HERE:
            self._order.free(key)

    # --- going ----------------------------------------------------------------------------------

    def victims(self, need: int = 0, most: int = 64) -> list[bytes]:
        """Who should leave now, at most `most` of them; they are *leaving* from here on.

        None while what stays is below `high`, and below what leaves room for `need` more bytes; else until it
        is at `low` (and leaves that room). Those in the window go only if nobody else can, or by admission.
        """
        stays = self.used - self.leaving
        roof = min(self.marks.high, self.marks.capacity - need)
        if stays <= roof:
            return []
        goal = max(0, min(self.marks.low, roof))
        found: list[bytes] = []
        spared: list[bytes] = []
        guard = self._guard
        rivals = self._rivals() if guard is not None else []
        while stays > goal and len(found) < most:
            key = self._next(spared)
            if key is None:
                break
            if guard is not None and rivals and key not in self._cheap and not guard.admits(rivals[-1], key):
                key = rivals.pop()
            held = key in spared
            if held:
                spared.remove(key)
            stays -= self._leave(key, held)
            found.append(key)
        for key in spared:
            if stays > goal and len(found) < most:  # the window gives way to need, oldest first
                stays -= self._leave(key, held=True)
                found.append(key)
            else:
                self._order.free(key)
        return found

    def _next(self, spared: list[bytes]) -> bytes | None:
        if self._cheap:
            return next(iter(self._cheap))
        while (key := self._order.peek()) is not None:
            if key not in self._young:
                return key
            self._order.hold(key)
            spared.append(key)
        return None

    def _rivals(self) -> list[bytes]:
        """Those of the window that admission may rather have go than the order's victim, the oldest last."""
        blocks = self._blocks
        here = [key for key in self._young if blocks[key].state is State.HERE and not blocks[key].pinned]
        here.reverse()
        return here

    def _leave(self, key: bytes, held: bool = False) -> int:
        block = self._blocks[key]
        block.state = State.LEAVING
        self.leaving += block.nbytes
        if not held:
            self._order.hold(key)
        self._cheap.pop(key, None)
        return block.nbytes

    def stay(self, key: bytes) -> None:
        """What leaves doesn't after all: it was used or pinned, or the copy failed."""
        block = self._blocks[key]
        assert block.state is State.LEAVING
        block.state = State.HERE
        self.leaving -= block.nbytes
        if not block.pinned:
            self._order.free(key)

    def gone(self, key: bytes) -> None:
        """What was leaving has left; its room is free."""
        block = self._blocks[key]
        assert block.state is State.LEAVING, "only what leaves goes"
        self.leaving -= block.nbytes
        self._forget(key, block)
        self._order.evict(key)

    def drop(self, key: bytes) -> None:
        """It ceases to exist here, whatever its state (it was damaged, its space was purged)."""
        block = self._blocks[key]
        if block.state is State.LEAVING:
            self.leaving -= block.nbytes
        self._forget(key, block)
        if block.state is not State.FILLING:
            self._order.remove(key)

    def _forget(self, key: bytes, block: _Block) -> None:
        del self._blocks[key]
        self.used -= block.nbytes
        self._cheap.pop(key, None)
        nbytes = self._young.pop(key, None)
        if nbytes is not None:
            self._young_bytes -= nbytes

    def check(self) -> None:
        """For tests: counters agree with what is listed."""
        blocks = self._blocks.values()
        assert self.used == sum(block.nbytes for block in blocks)
        assert self.leaving == sum(block.nbytes for block in blocks if block.state is State.LEAVING)
        assert self._order.total_bytes == sum(
            block.nbytes for block in blocks if block.state is not State.FILLING
        )
        assert self._young_bytes == sum(self._young.values())
        assert all(key in self._blocks for key in (*self._young, *self._cheap))

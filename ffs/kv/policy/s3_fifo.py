"""S3-FIFO (Yang and others, SOSP 2023): a small queue for what is new, a main queue for what was used again,
and the names of what left the small one, which enter the main queue if they come back. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MOST_USES = 3


@dataclass(slots=True)
class _Block:
    nbytes: int
    uses: int = 0
    main: bool = False


class S3Fifo:
    """See order.py. `small_share`: of the bytes, that the small queue has before it gives up blocks."""

    def __init__(self, capacity_bytes: int, small_share: float = 0.1) -> None:
        self.total_bytes = 0
        self.ghost_bytes = 0
        self._ghost_limit = capacity_bytes
        self._share = small_share
        self._blocks: dict[bytes, _Block] = {}
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._small_bytes = 0  # of blocks that may go
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def insert(self, key: bytes, nbytes: int, held: bool = False) -> None:
        assert key not in self._blocks, "inserted twice"
        ghost = self._ghosts.pop(key, None)
        if ghost is not None:
            self.ghost_bytes -= ghost
        block = self._blocks[key] = _Block(nbytes, main=ghost is not None)
        self.total_bytes += nbytes
        if not held:
            self._line_up(key, block)

    def _line_up(self, key: bytes, block: _Block) -> None:
        if block.main:
            self._main[key] = None
        else:
            self._small[key] = None
            self._small_bytes += block.nbytes

    def _out_of_line(self, key: bytes, block: _Block) -> None:
        if block.main:
            self._main.pop(key, None)
        elif key in self._small:
            del self._small[key]
            self._small_bytes -= block.nbytes

    def touch(self, key: bytes) -> None:
        block = self._blocks[key]
        block.uses = min(block.uses + 1, _MOST_USES)

    def hold(self, key: bytes) -> None:
        self._out_of_line(key, self._blocks[key])

    def free(self, key: bytes) -> None:
        self._line_up(key, self._blocks[key])

    def peek(self) -> bytes | None:
        while self._small or self._main:
            if self._small and (self._small_bytes > self._share * self.total_bytes or not self._main):
                key = next(iter(self._small))
                block = self._blocks[key]
                if not block.uses:
                    return key
                self._out_of_line(key, block)
                block.main = True
                block.uses = 0
                self._line_up(key, block)
            else:
                key = next(iter(self._main))
                block = self._blocks[key]
                if not block.uses:
                    return key
                block.uses -= 1
                self._main.move_to_end(key)
        return None

    def evict(self, key: bytes) -> None:
        block = self._blocks[key]
        self.remove(key)
        if block.main:
            return
        self._ghosts[key] = block.nbytes
        self.ghost_bytes += block.nbytes
        while self.ghost_bytes > self._ghost_limit:
            _, nbytes = self._ghosts.popitem(last=False)
            self.ghost_bytes -= nbytes

    def remove(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        self.total_bytes -= block.nbytes
        self._out_of_line(key, block)

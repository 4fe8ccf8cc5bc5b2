"""LRU-K with ghosts: who goes is whose last use but K-1 is the longest ago; those with fewer uses go
first, among them the longest unused. Blocks that were evicted are remembered for a while, so that one that
comes back is known as used before. Wins in small tiers and against scans. Pure.

Ranks only grow, so an entry of the heap may be too low and is corrected when it comes to the top: a touch
costs no heap operation.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

Rank = tuple[int, int]  # (the last use but K-1, or 0; the last use), as ticks


@dataclass(slots=True)
class _Block:
    nbytes: int
    uses: list[int]  # the last K, oldest first
    ticket: int = 0  # of its entry in the heap; 0: it has none
    held: bool = False


class LruK:
    """See order.py. Ghosts: the keys of at most `ghost_bytes` of blocks; None: of 16 times the capacity,
    since what counts are blocks that come back after long. A name takes some 200 bytes, a block a million."""

    def __init__(self, capacity_bytes: int, k: int = 2, ghost_bytes: int | None = None) -> None:
        assert k >= 1
        self.total_bytes = 0
        self.ghost_bytes = 0
        self._k = k
        self._ghost_limit = 16 * capacity_bytes if ghost_bytes is None else ghost_bytes
        self._blocks: dict[bytes, _Block] = {}
        self._ghosts: OrderedDict[bytes, tuple[int, list[int]]] = OrderedDict()  # size, last uses
        self._heap: list[tuple[Rank, int, bytes]] = []
        self._tick = 0
        self._ticket = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def _rank(self, block: _Block) -> Rank:
        return (block.uses[0] if len(block.uses) == self._k else 0, block.uses[-1])

    def _line_up(self, key: bytes, block: _Block) -> None:
        self._ticket += 1
        block.ticket = self._ticket
        heapq.heappush(self._heap, (self._rank(block), self._ticket, key))

    def _used(self, uses: list[int]) -> None:
        self._tick += 1
        uses.append(self._tick)
        if len(uses) > self._k:
            del uses[0]

    def insert(self, key: bytes, nbytes: int, held: bool = False) -> None:
        assert key not in self._blocks, "inserted twice"
        ghost = self._ghosts.pop(key, None)
        uses: list[int] = []
        if ghost is not None:
            self.ghost_bytes -= ghost[0]
            uses = ghost[1]
        self._used(uses)
        block = self._blocks[key] = _Block(nbytes, uses, held=held)
        self.total_bytes += nbytes
        if not held:
            self._line_up(key, block)

    def touch(self, key: bytes) -> None:
        self._used(self._blocks[key].uses)

    def hold(self, key: bytes) -> None:
        self._blocks[key].held = True

    def free(self, key: bytes) -> None:
        block = self._blocks[key]
        block.held = False
        if not block.ticket:
            self._line_up(key, block)

    def peek(self) -> bytes | None:
        heap = self._heap
        while heap:
            rank, ticket, key = heap[0]
            block = self._blocks.get(key)
            if block is None or block.ticket != ticket:
                heapq.heappop(heap)  # of a block that went
                continue
            if block.held:
                heapq.heappop(heap)
                block.ticket = 0  # free() lines it up again
                continue
            now = self._rank(block)
            if now == rank:
                return key
            heapq.heapreplace(heap, (now, ticket, key))
        return None

    def evict(self, key: bytes) -> None:
        block = self._blocks[key]
        self.remove(key)
        self._ghosts[key] = (block.nbytes, block.uses)
        self.ghost_bytes += block.nbytes
        while self.ghost_bytes > self._ghost_limit:
            _, (nbytes, _) = self._ghosts.popitem(last=False)
            self.ghost_bytes -= nbytes

    def remove(self, key: bytes) -> None:
        self.total_bytes -= self._blocks.pop(key).nbytes
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._blocks):
            self._tidy()

    def _tidy(self) -> None:
        """Entries of blocks that went stay in the heap until they come to the top, or until now."""
        live = []
        for entry in self._heap:
            block = self._blocks.get(entry[2])
            if block is not None and block.ticket == entry[1]:
                live.append(entry)
        heapq.heapify(live)
        self._heap = live

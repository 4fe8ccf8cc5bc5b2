"""What a request reads from a tier manager: blocks in order of need, some ahead (docs/kv_tiers.md, Manager).

Blocks are taken from the manager and given back to it by the dozen: its lock, and a turn for its threads,
cost more than all that is done for one block."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from ffs._native.iov import IovSlice
from ffs.errors import BadHandle, DeadlineExceeded, FfsError, InvalidArgument
from ffs.kv.tiers.words import Outcome, Wish

if TYPE_CHECKING:
    from ffs.kv.tiers.manager import TierManager

_MOST_AT_ONCE: Final = 16


class Block(NamedTuple):
    """One position of a stream. `memory`: its bytes in host memory if it is a HIT, valid until the stream
    goes on or ends; else None: compute the block. `error` says why a FAILED one couldn't be had.

    A tuple, since one is made for each block: a frozen dataclass takes four times as long."""

    position: int
    key: bytes
    outcome: Outcome
    memory: IovSlice | None
    error: FfsError | None


class Stream:
    """Blocks that a request reads, first to last, while the next ones are on their way. To be used by
    `with`; one thread at a time. However it ends, nothing stays pinned.

    What is released goes back to the manager once it is a few blocks, or as soon as there is anything to wait
    for."""

    def __init__(self, manager: TierManager, wish: Wish, timeout_s: float) -> None:
        self._manager = manager
        self._wish = wish
        self._timeout_s = timeout_s
        self._ready: list[Block] = []  # those that came, from _begin on
        self._begin = 0
        self._over = 0  # positions that were released
        self._at_once = max(1, min(_MOST_AT_ONCE, wish.ahead // 4))
        self.failed: list[int] = []
        """Positions that were FAILED so far."""
        self.missed: list[int] = []
        """Positions that were a MISS so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._wish.keys)

    def __iter__(self) -> Iterator[Block]:
        for position in range(len(self._wish.keys)):
            yield self.block(position)
            self.release()

    def release(self) -> None:
        """The first block that wasn't released yet is over; one more is asked for. InvalidArgument: all of
        them are."""
        if self._over == len(self._wish.keys):
            raise InvalidArgument(f"all {self._over} blocks of this stream were released already")
        self._over += 1
        if self._over - self._wish.taken >= self._at_once or self._over == len(self._wish.keys):
            self._manager._take(self._wish, self._over)

    def block(self, position: int) -> Block:
        """Waits for a position, not more than `ahead` after the first that wasn't released yet."""
        at = position - self._begin
        if not 0 <= at < len(self._ready):
            self._ready, self._begin = self._wait(position), position
            at = 0
        block = self._ready[at]
        if block.outcome is Outcome.HIT:
            if not self._wish.live or not self._wish.lease.live:
                raise BadHandle("the lease of these blocks is over: their memory may be others'")
        elif block.outcome is Outcome.FAILED:
            self.failed.append(position)
        else:
            self.missed.append(position)
        return block

    def _wait(self, position: int) -> list[Block]:
        """What has come from there on, at least one."""
        blocks = self._manager._await(self._wish, position, self._over, self._timeout_s)
        if blocks:
            return blocks
        error = DeadlineExceeded(f"block {position} didn't come within {self._timeout_s:g} s")
        return [Block(position, self._wish.keys[position], Outcome.FAILED, None, error)]

    def wait_all(self) -> list[Block]:
        """All at once, each in its memory until the stream is closed. For streams that hold all (`fetch`)."""
        return [self.block(position) for position in range(len(self._wish.keys))]

    def close(self) -> None:
        """Unpins what is left. Repeatable."""
        self._ready = []
        self._manager._cancel(self._wish)

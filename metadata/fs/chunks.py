"""Work on the chunks of a whole file or KV space, over the chains of its layout.

Every function is idempotent and may be cut off anywhere: it is run again from the start. Calls to the chains
go out together, a bounded number at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

from ffs import errors
from ffs.layout import Layout, Placement, file_chunk_key
from metadata.fs.ports import ChainPort, ClusterPort, HeldChunk

T = TypeVar("T")

EPOCH_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF  # no write carries it: nothing more is accepted
PAGE: Final = 1000  # chunks removed by one call
PARALLEL: Final = 16


class Chunks:
    """Composes ChainPort over layouts. Raises what the port raises (ChainUnavailable, Unreachable)."""

    def __init__(self, cluster: ClusterPort, chains: ChainPort) -> None:
        self._cluster = cluster
        self._chains = chains

    def placement(self, layout: Layout) -> Placement:
        view = self._cluster.table(layout.table, layout.table_version)
        if view is None:
            raise errors.ChainUnavailable(
                f"chain table {layout.table} version {layout.table_version} isn't known here yet"
            )
        return Placement(layout, view.chains)

    async def cut(self, ino: int, layout: Layout, old: int, length: int, epoch: int) -> None:
        """Makes a file of at most `old` bytes (-1: unknown) one of `length`: no chunk has bytes beyond it.
        From now on only writes of `epoch` + 1 arrive. Repeating it later does no harm: it is refused."""
        placement = self.placement(layout)
        first, inside = divmod(length, layout.chunk_size)
        if old < 0:
            chains = set(placement.chains)
        else:
            last = (max(old, 1) - 1) // layout.chunk_size
            stop = min(last + 1, first + placement.stripe)
            chains = {placement.chain_of_index(index) for index in range(first, stop)}

        async def one(chain: int) -> None:
            try:
                await self._chains.raise_space_epoch(chain, ino, epoch)
                if inside and placement.chain_of_index(first) == chain:
                    await self._chains.truncate_chunk(chain, ino, file_chunk_key(first), inside, epoch)
                await self._remove_from(chain, ino, file_chunk_key(first + (inside > 0)), epoch)
                await self._chains.raise_space_epoch(chain, ino, epoch + 1)
            except errors.StaleEpoch:
                pass  # the last step was done on this chain, so all of them were

        await _each(one, chains)

    async def fence(self, ino: int, layout: Layout, epoch: int) -> None:
        """Refuses writes of older epochs on every chain."""
        await _each(
            lambda chain: self._chains.raise_space_epoch(chain, ino, epoch), self.placement(layout).chains
        )

    def chains_of(self, layout: Layout, length: int | None) -> Sequence[int]:
        """The chains that may have chunks of a space. `length`: it has none beyond; None: who knows."""
        if length == 0:
            return ()
        placement = self.placement(layout)
        if length is None:
            return placement.chains
        return placement.chains[: min(-(-length // layout.chunk_size), placement.stripe)]

    async def remove_on(self, chain: int, ino: int) -> None:
        """Removes what one chain has of a space, for good."""
        await self._chains.remove_space(chain, ino, EPOCH_MAX)

    async def _remove_from(self, chain: int, ino: int, first: bytes, epoch: int) -> None:
        more = True
        while more:
            _, more = await self._chains.remove_page(chain, ino, first, epoch, PAGE)

    async def length(self, ino: int, layout: Layout) -> int:
        """The end of a file's last byte that the chains have, committed or on its way."""
        ends = await _each(lambda chain: self._chains.last_chunk(chain, ino), self.placement(layout).chains)
        return max(
            (int.from_bytes(end[0], "big") * layout.chunk_size + end[1] for end in ends if end is not None),
            default=0,
        )

    async def list_chunks(self, chain: int, first: bytes, limit: int) -> tuple[list[HeldChunk], bool]:
        """As ChainPort.list_chunks."""
        return await self._chains.list_chunks(chain, first, limit)


async def _each(call: Callable[[int], Awaitable[T]], chains: Iterable[int]) -> list[T]:
    """Calls for all chains, at most PARALLEL at once; every call has ended when this returns or raises."""
    limit = asyncio.Semaphore(PARALLEL)

    async def one(chain: int) -> T:
        async with limit:
            return await call(chain)

    results = await asyncio.gather(*(one(chain) for chain in chains), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]

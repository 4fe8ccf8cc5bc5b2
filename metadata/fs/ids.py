"""Numbers that are never given out twice: inode ids, client sessions, capabilities.

A process takes a block of them from one of a few sharded counters - one small transaction for thousands -
and hands them out from memory. What it doesn't use is lost, which a u64 can bear.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

from metadata.fs.schema import Reader, counter, ids_key, unsigned
from metadata.kv.contract import Store, Transaction

SHARDS: Final = 16
FIRST: Final = 1 << 12  # below: reserved (the root is 1)

INODES: Final = b"i"
CLIENTS: Final = b"c"
CAPABILITIES: Final = b"p"
INODE_BLOCK: Final = 1024


async def given_out(reader: Reader, ino: int) -> bool:
    """Is it an inode id of a block that somebody took from this store?"""
    block, _ = divmod(ino - FIRST, INODE_BLOCK)
    used, shard = divmod(block, SHARDS)
    return ino >= FIRST and used < unsigned(await reader.get(ids_key(INODES, shard)))


class Ids:
    """Ids of one kind, in blocks of `block`. One event loop."""

    def __init__(self, store: Store, kind: bytes, block: int, rng: random.Random) -> None:
        self._store = store
        self._kind = kind
        self._block = block
        self._rng = rng
        self._next = self._end = 0
        self._filling = asyncio.Lock()

    def take_now(self) -> int:
        """An id, 0 if the block is used up (then `take`)."""
        ident = self._next
        if ident == self._end:
            return 0
        self._next = ident + 1
        return ident

    async def take(self) -> int:
        """An id. Errors as Store.run."""
        while not (ident := self.take_now()):
            async with self._filling:
                if self._next == self._end:
                    self._next = await self._reserve()
                    self._end = self._next + self._block
        return ident

    async def _reserve(self) -> int:
        """The first id of a fresh block. A block that an unknown result took is lost."""
        shard = self._rng.randrange(SHARDS)
        key = ids_key(self._kind, shard)

        async def body(txn: Transaction) -> int:
            used = unsigned(await txn.get(key))
            txn.set(key, counter(used + 1))
            return used

        used = await self._store.run(body)
        return FIRST + (used * SHARDS + shard) * self._block

"""Collecting files and KV spaces by the batch: chunks on their chains first, then the records.

A batch is looked at in one snapshot; its chunks go chain by chain, side by side; what is gone from all its
chains loses inode and record in one transaction with others. A chain that can't be asked is left alone until
the pass is over, and a file that fails stays for the next pass: neither holds up the rest. Cut off anywhere,
the records are there still, and to remove chunks again does no harm. docs/metadata.md, Removal and
collection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ffs import errors
from ffs.proto.records import FILE
from metadata.fs.core import Core
from metadata.fs.schema import (
    SUB_DOUBTFUL,
    SUB_LENGTH,
    decode_garbage,
    decode_inode,
    find_inode,
    garbage_key,
    inode_key,
    inode_span,
    trim_key,
    unsigned,
    writers_span,
)
from metadata.kv.contract import Pairs, Snapshot, Transaction

_log = logging.getLogger(__name__)

FORGET: Final = 256  # files whose records go in one transaction: some 25 KB, and a few ms of the event loop
PER_CHAIN: Final = 16  # files at once on one chain
AT_ONCE: Final = 128  # on all chains together

AWAY: Final = (errors.ChainUnavailable, errors.Unreachable, errors.DeadlineExceeded)


@dataclass(slots=True)
class _File:
    ino: int
    chains: Sequence[int]  # where chunks may lie
    left: int = 0  # of them, how many aren't done
    failed: bool = False


class Files:
    """One pass over files. `away`: chains that couldn't be asked in it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._away: set[int] = set()
        self._limit = asyncio.Semaphore(AT_ONCE)

    async def collect(self, inos: Sequence[int]) -> int:
        """How many of these are gone now; the others stay as they are."""
        files = await self._look(inos)
        on_chain: dict[int, list[_File]] = defaultdict(list)
        ready = [file.ino for file in files if not file.chains]
        for file in files:
            file.left = len(file.chains)
            for chain in file.chains:
                on_chain[chain].append(file)
        gone = 0
        running = {asyncio.ensure_future(self._on_chain(*work)) for work in on_chain.items()}
        try:
            while True:
                gone += await self._forget(ready)
                if not running:
                    return gone
                # What a chain that answers has finished doesn't wait for one that doesn't.
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ready = [ino for task in ended for ino in task.result()]
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    # --- looking ---

    async def _look(self, inos: Sequence[int]) -> list[_File]:
        """Those that nobody writes any more."""

        async def body(snap: Snapshot) -> tuple[list[Pairs], list[Pairs], list[bytes | None]]:
            writers = await snap.ranges([writers_span(ino) for ino in inos])
            inodes = await snap.ranges([inode_span(ino) for ino in inos])
            records = await snap.get_many([key(ino) for key in (garbage_key, trim_key) for ino in inos])
            return writers, inodes, records

        writers, inodes, records = await self._core.store.read(body)
        found = []
        for ino, open_, pairs, garbage, trim in zip(
            inos, writers, inodes, records[: len(inos)], records[len(inos) :], strict=True
        ):
            if open_ or garbage is None:
                continue
            try:
                found.append(_File(ino, self._chains(ino, dict(pairs), garbage, trim is not None)))
            except (errors.ChainUnavailable, msgspec.MsgspecError) as error:
                _log.warning("inode %d can't be collected yet: %s", ino, error)
        return found

    def _chains(self, ino: int, pairs: dict[bytes, bytes], garbage: bytes, trimmed: bool) -> Sequence[int]:
        key = inode_key(ino)
        data = pairs.get(key)
        inode = None if data is None else decode_inode(data)
        if inode is None or inode.layout is None:
            return ()
        # Chunks may lie beyond the length, then every chain is asked.
        exact = inode.type == FILE and not (decode_garbage(garbage).doubtful or trimmed)
        if not exact or key + SUB_DOUBTFUL in pairs:
            return self._core.chunks.chains_of(inode.layout, None)
        return self._core.chunks.chains_of(inode.layout, unsigned(pairs.get(key + SUB_LENGTH)))

    # --- chunks ---

    async def _on_chain(self, chain: int, files: Sequence[_File]) -> list[int]:
        """Removes the files' chunks on one chain; which of them are gone from all chains with that."""
        todo = list(reversed(files))
        complete: list[int] = []

        async def work() -> None:
            while todo and chain not in self._away:
                file = todo.pop()
                if file.failed:
                    continue
                async with self._limit:
                    await self._one(chain, file)
                file.left -= 1
                if not file.left and not file.failed:
                    complete.append(file.ino)

        # Each ends by itself: what fails is noted at its file or chain.
        await asyncio.gather(*(work() for _ in range(min(PER_CHAIN, len(files)))))
        return complete

    async def _one(self, chain: int, file: _File) -> None:
        try:
            await self._core.chunks.remove_on(chain, file.ino)
        except AWAY as error:
            file.failed = True
            if chain not in self._away:
                self._away.add(chain)
                _log.warning("what lies on chain %d can't be collected yet: %s", chain, error)
        except errors.FfsError as error:
            file.failed = True
            _log.warning("inode %d can't be collected yet: %s", file.ino, error)

    # --- records ---

    async def _forget(self, inos: Sequence[int]) -> int:
        gone = 0
        for begin in range(0, len(inos), FORGET):
            batch = inos[begin : begin + FORGET]
            try:
                gone += await self._forget_batch(batch)
            except msgspec.MsgspecError:  # a record can't be read: the others' go
                for ino in batch:
                    try:
                        gone += await self._forget_batch((ino,))
                    except msgspec.MsgspecError as error:
                        _log.warning("inode %d can't be collected: its record can't be read: %s", ino, error)
        return gone

    async def _forget_batch(self, inos: Sequence[int]) -> int:
        """In one transaction. Nobody can have opened one since: that takes a name or a write session."""
        core = self._core

        async def body(txn: Transaction) -> int:
            found = []
            for ino in inos:  # all reads first: the transaction's own writes make them slower
                if await txn.get(garbage_key(ino)) is not None and not await txn.range(*writers_span(ino), 1):
                    found.append((ino, await find_inode(txn, ino)))
            for ino, inode in found:
                if inode is not None:
                    await core.erase_inode(txn, ino, inode)
            for ino, _ in found:
                txn.clear(trim_key(ino))
                txn.clear(garbage_key(ino))
            return len(found)

        return await core.store.run(body)

"""Removed things go, and their space comes back: what no name leads to and nobody has open.

A file's write sessions are waited for; its space is then removed on the chains, for good, and its inode last,
so that a collector that is stopped anywhere leaves a record from which another begins again. A directory's
entries are taken out page by page, after it was marked so that nothing is made in it. docs/metadata.md,
Collection.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from ffs import errors
from ffs.layout import Layout
from ffs.proto.records import DIRECTORY, FILE, Garbage
from metadata.fs.core import Core
from metadata.fs.ops.unlink import mark_removed
from metadata.fs.schema import (
    SUB_DOUBTFUL,
    SUB_LENGTH,
    decode_dirent,
    decode_garbage,
    dirent_span,
    encode,
    find_inode,
    garbage_key,
    id_in_key,
    inode_key,
    trim_key,
    unsigned,
    writers_span,
)
from metadata.fs.trim import finish
from metadata.kv.contract import Snapshot, Transaction

_log = logging.getLogger(__name__)

PAGE: Final = 200
PARALLEL: Final = 16


class Collector:
    """A background worker over a Core. Any number may run, in any process."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.collected = 0  # inodes, for metrics

    async def run(self, every_s: float = 5.0) -> None:
        """Until cancelled: works when something was removed, and looks by itself now and then."""
        while True:
            self._core.work.clear()
            try:
                while await self.step():
                    pass
            except OSError as error:
                _log.warning("collection failed, will be repeated: %s", error)
            try:
                await asyncio.wait_for(self._core.work.wait(), every_s)
            except TimeoutError:
                continue
            await asyncio.sleep(0.05)  # removals come in swarms: take them together

    async def step(self) -> int:
        """One pass over all that waits: how many inodes were collected or directories emptied. What can't be
        done now (a writer, a chain that is away) stays for a later pass."""
        done = 0
        after = b"g"
        while True:
            start = after

            async def page(snap: Snapshot, start: bytes = start) -> list[tuple[bytes, bytes]]:
                return await snap.range(start, b"h", PAGE)

            pairs = await self._core.store.read(page)
            done += await self._collect_page(pairs)
            if len(pairs) < PAGE:
                break
            after = pairs[-1][0] + b"\0"
        await self._finish_trims()
        return done

    async def _collect_page(self, pairs: list[tuple[bytes, bytes]]) -> int:
        """Several at a time, so that their transactions share commits. All have ended on return."""
        limit = asyncio.Semaphore(PARALLEL)

        async def one(ino: int, garbage: Garbage) -> int:
            async with limit:
                return await self._collect(ino, garbage)

        work = (one(id_in_key(key), decode_garbage(value)) for key, value in pairs)
        results = await asyncio.gather(*work, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return sum(result for result in results if isinstance(result, int))

    async def _collect(self, ino: int, garbage: Garbage) -> int:
        try:
            if garbage.type == DIRECTORY:
                await self._directory(ino)
                done = 1
            else:
                done = await self._space(ino)
        except (errors.ChainUnavailable, errors.Unreachable, errors.DeadlineExceeded) as error:
            _log.warning("inode %d can't be collected yet: %s", ino, error)
            return 0
        self.collected += done
        return done

    async def _space(self, ino: int) -> int:
        """A file or KV space: 1 if it's gone now."""

        async def look(snap: Snapshot) -> tuple[bool, Layout | None, int | None]:
            """(is it still written, layout, the length beyond which nothing can be)."""
            writers = await snap.range(*writers_span(ino), 1)
            inode = await find_inode(snap, ino)
            data = await snap.get(garbage_key(ino))
            if inode is None or data is None:
                return bool(writers), None, None
            key = inode_key(ino)
            doubtful = (
                decode_garbage(data).doubtful
                or await snap.get(key + SUB_DOUBTFUL) is not None
                or await snap.get(trim_key(ino)) is not None
            )
            exact = inode.type == FILE and not doubtful
            return bool(writers), inode.layout, unsigned(await snap.get(key + SUB_LENGTH)) if exact else None

        async def forget(txn: Transaction) -> int:
            """Nobody can have opened it since: that takes a name or a write session."""
            if await txn.range(*writers_span(ino), 1) or await txn.get(garbage_key(ino)) is None:
                return 0
            inode = await find_inode(txn, ino)
            if inode is not None:
                self._core.erase_inode(txn, ino, inode)
            txn.clear(trim_key(ino))
            txn.clear(garbage_key(ino))
            return 1

        busy, layout, length = await self._core.store.read(look)
        if busy:
            return 0
        if layout is not None:
            await self._core.chunks.remove(ino, layout, length)
        return await self._core.store.run(forget)

    async def _directory(self, ino: int) -> None:
        core = self._core

        async def page(txn: Transaction) -> bool:
            """Takes out one page of entries; True when it was the last and the directory is gone."""
            inode = await find_inode(txn, ino)
            if inode is None:
                txn.clear(garbage_key(ino))
                return True
            mark_removed(txn, ino, inode)
            pairs = await txn.range(*dirent_span(ino), PAGE)
            now = core.now_ns()
            for key, value in pairs:
                dirent = decode_dirent(value)
                child = await find_inode(txn, dirent.ino)
                if child is not None and dirent.type == DIRECTORY:
                    txn.set(garbage_key(dirent.ino), encode(Garbage(type=DIRECTORY, since_ns=now)))
                elif child is not None:
                    await core.drop_link(txn, dirent.ino, child, now)
                txn.clear(key)
            if len(pairs) == PAGE:
                return False
            core.erase_inode(txn, ino, inode)
            txn.clear(garbage_key(ino))
            return True

        while not await core.store.run(page):
            pass

    async def _finish_trims(self) -> None:
        """Truncations whose process died before the chunks were cut."""

        async def page(snap: Snapshot) -> list[int]:
            return [id_in_key(key) for key, _ in await snap.range(b"t", b"u", PAGE)]

        for ino in await self._core.store.read(page):
            try:
                await finish(self._core, ino)
            except (errors.ChainUnavailable, errors.Unreachable, errors.DeadlineExceeded) as error:
                _log.warning("inode %d can't be cut yet: %s", ino, error)

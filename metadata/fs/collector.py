"""Removed things go, and their space comes back: what no name leads to and nobody has open.

A file's write sessions are waited for; its space is then removed on the chains, for good, and its inode last,
so that a collector that is stopped anywhere leaves a record from which another begins again (collect_files.py
does it). A directory's entries are taken out page by page, after it was marked so that nothing is made in
it. docs/metadata.md, Removal and collection.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from ffs import errors
from ffs.proto.records import DIRECTORY, Garbage
from metadata.fs.collect_files import AWAY, Files
from metadata.fs.core import Core
from metadata.fs.ops.unlink import mark_removed
from metadata.fs.schema import (
    decode_dirent,
    decode_garbage,
    dirent_span,
    encode,
    find_inode,
    garbage_key,
    id_in_key,
)
from metadata.fs.trim import finish
from metadata.kv.contract import Snapshot, Transaction

_log = logging.getLogger(__name__)

PAGE: Final = 1000  # records looked at together
ENTRIES: Final = 256  # of a directory, taken out in one transaction: some 30 KB, a few ms of the event loop
PARALLEL: Final = 16  # directories at once


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
        files = Files(self._core)
        done = 0
        after = b"g"
        while True:
            start = after

            async def page(snap: Snapshot, start: bytes = start) -> list[tuple[bytes, bytes]]:
                return await snap.range(start, b"h", PAGE)

            pairs = await self._core.store.read(page)
            done += await self._collect_page(files, pairs)
            if len(pairs) < PAGE:
                break
            after = pairs[-1][0] + b"\0"
        await self._finish_trims()
        return done

    async def _collect_page(self, files: Files, pairs: list[tuple[bytes, bytes]]) -> int:
        directories: list[int] = []
        others: list[int] = []
        for key, value in pairs:
            ino = id_in_key(key)
            try:
                (directories if decode_garbage(value).type == DIRECTORY else others).append(ino)
            except msgspec.MsgspecError as error:
                _log.warning("inode %d can't be collected: its record can't be read: %s", ino, error)
        done = await files.collect(others) + await self._directories(directories)
        self.collected += done
        return done

    async def _directories(self, inos: list[int]) -> int:
        """Several at a time, so that their transactions share commits. All have ended on return."""
        limit = asyncio.Semaphore(PARALLEL)

        async def one(ino: int) -> int:
            async with limit:
                try:
                    await self._directory(ino)
                except (msgspec.MsgspecError, errors.DeadlineExceeded) as error:
                    _log.warning("directory %d can't be collected yet: %s", ino, error)
                    return 0
                return 1

        results = await asyncio.gather(*map(one, inos), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return sum(result for result in results if isinstance(result, int))

    async def _directory(self, ino: int) -> None:
        core = self._core

        async def page(txn: Transaction) -> bool:
            """Takes out one page of entries; True when it was the last and the directory is gone."""
            inode = await find_inode(txn, ino)
            if inode is None:
                txn.clear(garbage_key(ino))
                return True
            mark_removed(txn, ino, inode)
            pairs = await txn.range(*dirent_span(ino), ENTRIES)
            now = core.now_ns()
            for key, value in pairs:
                dirent = decode_dirent(value)
                child = await find_inode(txn, dirent.ino)
                if child is not None and dirent.type == DIRECTORY:
                    txn.set(garbage_key(dirent.ino), encode(Garbage(type=DIRECTORY, since_ns=now)))
                elif child is not None:
                    await core.drop_link(txn, dirent.ino, child, now)
                txn.clear(key)
            if len(pairs) == ENTRIES:
                return False
            await core.erase_inode(txn, ino, inode)
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
            except AWAY as error:
                _log.warning("inode %d can't be cut yet: %s", ino, error)

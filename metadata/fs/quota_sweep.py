"""Counting what was in a directory before it got a quota, page by page, beside everything else.

For each directory that is still to be counted there is a record, with the last name done: stopped anywhere,
the next one goes on there. A page is one transaction: what isn't counted gets the quota's label and is
charged, a directory among it gets a record of its own. That writes the directory's inode, which everybody
reads who makes something in it, so what is made later has the label from birth. docs/metadata.md, Quotas.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec
from msgspec.structs import replace

from ffs import errors
from ffs.proto.quota import READY
from ffs.proto.records import QuotaRecord
from metadata.fs import quota
from metadata.fs.schema import (
    DIRENT_PREFIX_BYTES,
    QUOTA_WORK,
    decode_dirent,
    dirent_span,
    encode,
    find_inode,
    quota_key,
    quota_work_key,
    quota_work_span,
    split_quota_work,
)
from metadata.kv.contract import Snapshot, Store, Transaction, after

_log = logging.getLogger(__name__)

PAGE: Final = 200  # entries of one transaction
RECORDS: Final = 1000  # looked at together
SHORT_S: Final = 5.0  # how long a page may meet conflicts before a shorter one is tried


class QuotaSweeper:
    """A background worker over a store. One task, best on the manager's primary; several do no harm."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.counted = 0  # entries looked at, for metrics

    async def run(self, every_s: float = 1.0) -> None:
        """Until cancelled. A failing store is logged and tried again."""
        while True:
            try:
                while await self.step():
                    pass
            except OSError as error:
                _log.warning("counting for quotas failed, will be repeated: %s", error)
            await asyncio.sleep(every_s)

    async def step(self) -> int:
        """Works off the records that are there now: how many. One that can't be, stays for a later time."""

        async def page(snap: Snapshot) -> list[tuple[bytes, bytes]]:
            return await snap.range(QUOTA_WORK, after(QUOTA_WORK), RECORDS)

        pairs = await self._store.read(page)
        done = 0
        for key, _ in pairs:
            label, ino = split_quota_work(key)
            try:
                await self._directory(label, ino)
                done += 1
            except (msgspec.MsgspecError, errors.DeadlineExceeded, errors.OutcomeUnknown) as error:
                _log.warning("directory %d can't be counted for quota %d yet: %s", ino, label, error)
        return done

    async def _directory(self, label: int, ino: int) -> None:
        limit = PAGE
        while limit:
            size = limit

            async def page(txn: Transaction, size: int = size) -> int:
                return await count_page(txn, label, ino, size)

            try:
                counted = await self._store.run(page, timeout_s=SHORT_S)
            except (errors.DeadlineExceeded, errors.OutcomeUnknown):
                if limit == 1:
                    raise
                limit = max(limit // 8, 1)  # its files are written all the time: fewer at once
                continue
            self.counted += counted
            if counted < size:
                return


async def count_page(txn: Transaction, label: int, ino: int, limit: int) -> int:
    """Counts the next `limit` entries of a directory: how many there were; fewer: that was all, and the
    directory is done. Harmless for a directory that is done, a quota that is gone."""
    key = quota_work_key(label, ino)
    done = await txn.get(key)
    if done is None:
        return 0
    record = await quota.find_quota(txn, label)
    inode = await find_inode(txn, ino)
    if record is None or inode is None or inode.quota != label:
        await _finish(txn, label, ino, record)
        return 0
    pairs = await txn.range(*dirent_span(ino, done), limit)
    for _, value in pairs:
        child = decode_dirent(value).ino
        try:
            found = await find_inode(txn, child)
        except msgspec.MsgspecError as error:  # fsck tells it; the others are counted
            _log.warning("inode %d of directory %d can't be read and isn't counted: %s", child, ino, error)
            continue
        if found is None or found.quota == label or await quota.find_quota(txn, found.quota) is not None:
            continue  # the last: a file that has a name elsewhere, too, and is counted there
        await quota.adopt(txn, child, found, label, record)
    if len(pairs) == limit:
        txn.set(key, pairs[-1][0][DIRENT_PREFIX_BYTES:])
    else:
        await _finish(txn, label, ino, record)
    return len(pairs)


async def _finish(txn: Transaction, label: int, ino: int, record: QuotaRecord | None) -> None:
    """A directory is done; with the last one all is counted."""
    txn.clear(quota_work_key(label, ino))
    if record is not None and not await txn.range(*quota_work_span(label), 1):
        txn.set(quota_key(label), encode(replace(record, state=READY)))

"""Client sessions: opened, renewed, ended; and what a client that is gone leaves behind.

A session is alive while its counter of renewals changes: whoever watches judges by its own monotonic clock
and compares no clocks of two hosts. Ending fences the client (storage servers refuse it), then settles each
file that it had open for writing: the file's epoch goes up, so that nothing of the dead arrives any more, and
its chains are asked for the length. docs/metadata.md, Sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec

from ffs import errors
from ffs.proto import meta
from ffs.proto.records import ClientSession, FencedClient, Inode
from metadata.fs import quota
from metadata.fs.core import CAPABILITY_TTL_MS, Core
from metadata.fs.ops import lock
from metadata.fs.schema import (
    SUB_LENGTH,
    beat_key,
    client_locks_span,
    client_writer_key,
    client_writers_span,
    decode_fence,
    decode_garbage,
    decode_session,
    decode_writer,
    encode,
    ended_key,
    fence_key,
    find_inode,
    garbage_key,
    id_in_key,
    inode_key,
    session_key,
    slots_span,
    split_client_lock,
    split_client_writer,
    trim_key,
    unsigned,
    writer_key,
)
from metadata.fs.trim import finish as finish_trim
from metadata.kv.contract import Snapshot, Transaction

_log = logging.getLogger(__name__)

MIN_TTL_MS: Final = 1_000
MAX_TTL_MS: Final = 600_000
PAGE: Final = 200
LATE_S: Final = 5.0  # a sweeper that looks later than this was held up


# --- requests -------------------------------------------------------------------------------


async def open_session(core: Core, req: meta.SessionOpen) -> meta.SessionOpened:
    if not MIN_TTL_MS <= req.ttl_ms <= MAX_TTL_MS:
        raise errors.InvalidArgument(f"session ttl {req.ttl_ms} ms: give {MIN_TTL_MS} to {MAX_TTL_MS}")
    client = await core.clients.take()
    record = ClientSession(ttl_ms=req.ttl_ms, label=req.label[:200], opened_ns=core.now_ns())

    async def body(txn: Transaction) -> None:
        txn.set(session_key(client), encode(record))

    await core.store.run(body, urgent=True)
    return meta.SessionOpened(
        client=client,
        ttl_ms=req.ttl_ms,
        manager_time_ms=core.cluster.manager_time_ms(),
        cluster=core.cluster_id,
    )


async def renew_session(core: Core, client: int) -> meta.SessionRenewed:
    """Fenced if it is over."""

    async def body(txn: Transaction) -> int:
        data = await txn.get(session_key(client))
        if data is None:
            raise errors.Fenced(f"client session {client} is over: connect again")
        txn.add(beat_key(client), 1)
        return decode_session(data).ttl_ms

    ttl_ms = await core.store.run(body, urgent=True)
    return meta.SessionRenewed(ttl_ms=ttl_ms, manager_time_ms=core.cluster.manager_time_ms())


async def end_session(core: Core, client: int, *, beat: int | None = None) -> bool:
    """Fences a client; with `beat`, only if it hasn't renewed since. Says whether the session is over. What
    it had open is settled afterwards, by `settle_client`."""

    async def body(txn: Transaction) -> bool:
        data = await txn.get(session_key(client))
        if data is None:
            return True
        if beat is not None and unsigned(await txn.get(beat_key(client))) != beat:
            return False
        record = decode_session(data)
        txn.clear(session_key(client))
        txn.clear(beat_key(client))
        locks = await txn.range(*client_locks_span(client), PAGE + 1)
        await _end_locks(txn, locks[:PAGE])
        if len(locks) > PAGE or await txn.range(*client_writers_span(client), 1):
            txn.set(ended_key(client), encode(msgspec.structs.replace(record, ended=True)))
        else:
            txn.clear_range(*slots_span(client))
        expiry = core.cluster.manager_time_ms() + CAPABILITY_TTL_MS  # none of its capabilities lasts longer
        txn.set(fence_key(client), encode(FencedClient(capability_expiry_ms=expiry)))
        return True

    over = await core.store.run(body, urgent=True)
    core.work.set()
    core.lock_waiters.all_released()
    return over


async def _end_locks(txn: Transaction, pairs: list[tuple[bytes, bytes]]) -> None:
    """Of a client that is over: keys of its locks."""
    for key, _ in pairs:
        client, ino, kind, owner = split_client_lock(key)
        await lock.end(txn, ino, kind, client, owner)


# --- fences, for the cluster manager ---------------------------------------------------------


async def fenced_clients(
    reader: Snapshot, after: int = 0, limit: int = 1000
) -> list[tuple[int, FencedClient]]:
    """Clients whose session is over, in order of id, beyond `after`: storage servers must refuse them."""
    pairs = await reader.range(fence_key(after + 1), b"g", limit)
    return [(id_in_key(key), decode_fence(value)) for key, value in pairs]


# --- settling -------------------------------------------------------------------------------


async def settle_client(core: Core, client: int) -> int:
    """Closes what an ended client had open; then forgets its slots. How many files it settled; those whose
    chains can't be asked now stay for the next time."""

    async def locks(txn: Transaction) -> bool:
        pairs = await txn.range(*client_locks_span(client), PAGE)
        await _end_locks(txn, pairs)
        return len(pairs) == PAGE

    while await core.store.run(locks):
        pass
    settled = 0
    after = client_writers_span(client)[0]
    end = client_writers_span(client)[1]
    left = False
    while True:
        start = after

        async def page(snap: Snapshot, start: bytes = start) -> list[tuple[bytes, bytes]]:
            return await snap.range(start, end, PAGE)

        pairs = await core.store.read(page)
        for key, _ in pairs:
            _, ino, handle = split_client_writer(key)
            try:
                await settle_writer(core, client, ino, handle)
                settled += 1
            except (errors.ChainUnavailable, errors.Unreachable, errors.DeadlineExceeded) as error:
                _log.warning("file %d of ended client %d can't be settled yet: %s", ino, client, error)
                left = True
        if len(pairs) < PAGE:
            break
        after = pairs[-1][0] + b"\0"
    if not left:
        await core.store.run(lambda txn: _forget(txn, client))
    return settled


async def _forget(txn: Transaction, client: int) -> None:
    if not await txn.range(*client_writers_span(client), 1):
        txn.clear(ended_key(client))
        txn.clear_range(*slots_span(client))


async def settle_writer(core: Core, client: int, ino: int, handle: int) -> None:
    """Ends one write session of a client that is gone, with the length that its chains have."""

    async def fence(txn: Transaction) -> int | None:
        """The epoch under which nothing of the dead client arrives; None if there is nothing to ask the
        chains for, -1 while a truncation has to be finished."""
        inode = await find_inode(txn, ino)
        garbage = await txn.get(garbage_key(ino))
        if inode is None or inode.layout is None or garbage is not None:
            if garbage is not None:  # its length is nobody's concern: the collector looks everywhere
                doubtful = msgspec.structs.replace(decode_garbage(garbage), doubtful=True)
                txn.set(garbage_key(ino), encode(doubtful))
            await _end_writer(txn, client, ino, handle, inode)
            return None
        data = await txn.get(writer_key(ino, client, handle))
        if data is None:
            await _end_writer(txn, client, ino, handle, inode)
            return None
        if await txn.get(trim_key(ino)) is not None:
            return -1
        session = decode_writer(data)
        if not session.settled_at:
            # Once: who comes second, or again, goes on with the epoch that the file has, or two who do this
            # in step would raise it over each other without end.
            inode = msgspec.structs.replace(inode, epoch=inode.epoch + 1)
            txn.set(inode_key(ino), encode(inode))
            session = msgspec.structs.replace(session, settled_at=inode.epoch)
            txn.set(writer_key(ino, client, handle), encode(session))
        return inode.epoch

    async def merge(txn: Transaction) -> bool:
        """Takes the length, unless the epoch was raised meanwhile: by a truncation, or against another."""
        inode = await find_inode(txn, ino)
        if inode is not None and (inode.epoch < epoch or await txn.get(trim_key(ino)) is not None):
            return False
        if inode is not None and inode.epoch == epoch:
            txn.max(inode_key(ino) + SUB_LENGTH, length)
            core.touch(txn, ino, core.now_ns())
        elif inode is not None:
            return False
        await _end_writer(txn, client, ino, handle, inode)
        return True

    while True:
        raised = await core.store.run(fence)
        if raised is None:
            core.work.set()
            return
        if raised < 0:
            await finish_trim(core, ino)
            continue
        epoch = raised
        inode = await core.store.read(lambda snap: find_inode(snap, ino))
        if inode is None or inode.layout is None:
            continue
        await core.chunks.fence(ino, inode.layout, epoch)
        length = await core.chunks.length(ino, inode.layout)
        if await core.store.run(merge):
            core.work.set()
            return


async def _end_writer(txn: Transaction, client: int, ino: int, handle: int, inode: Inode | None) -> None:
    txn.clear(writer_key(ino, client, handle))
    txn.clear(client_writer_key(client, ino, handle))
    if inode is not None and inode.quota:
        await quota.writer_ends(txn, ino, inode)


# --- the sweeper ----------------------------------------------------------------------------


class SessionSweeper:
    """Watches all sessions; ends those that aren't renewed and settles what they leave. One task, best on the
    manager's primary; several do no harm."""

    def __init__(self, core: Core, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock_s = clock_s
        self._seen: dict[int, tuple[int, float]] = {}  # client -> (beat, since when it hasn't changed)
        self._looked_s: float | None = None

    async def run(self, every_s: float = 1.0) -> None:
        """Until cancelled. A failing store or chain is logged and tried again."""
        while True:
            try:
                await self.step()
            except OSError as error:
                _log.warning("session sweep failed, will be repeated: %s", error)
            await asyncio.sleep(every_s)

    def _forgive(self, now: float) -> None:
        """When this process was stopped or starved, its clients had nobody to renew with: that time doesn't
        count against them."""
        late = 0.0 if self._looked_s is None else now - self._looked_s - LATE_S
        self._looked_s = now
        if late > 0.0:
            self._seen = {
                client: (beat, min(now, since + late + LATE_S))
                for client, (beat, since) in self._seen.items()
            }

    async def step(self) -> int:
        """One look at all sessions: how many were ended or settled."""
        now = self._clock_s()
        self._forgive(now)
        done = 0
        live: dict[int, tuple[int, float]] = {}
        for client, ttl_ms, beat in await self._sessions():
            seen = self._seen.get(client)
            since = seen[1] if seen is not None and seen[0] == beat else now
            if (now - since) * 1000 > ttl_ms:
                if await end_session(self._core, client, beat=beat):
                    _log.warning("client session %d wasn't renewed for %d ms: ended", client, ttl_ms)
                    done += 1
                continue
            live[client] = (beat, since)
        self._seen = live
        for client in await self._ended():
            done += await settle_client(self._core, client)
        return done

    async def _sessions(self) -> list[tuple[int, int, int]]:
        """(client, ttl, beat) of each."""
        found: list[tuple[int, int, int]] = []
        after = b"s"
        while True:
            start = after

            async def page(snap: Snapshot, start: bytes = start) -> list[tuple[int, int, int]]:
                out = []
                for key, value in await snap.range(start, b"t", PAGE):
                    client = id_in_key(key)
                    beat = unsigned(await snap.get(beat_key(client)))
                    out.append((client, decode_session(value).ttl_ms, beat))
                return out

            batch = await self._core.store.read(page)
            found += batch
            if len(batch) < PAGE:
                return found
            after = session_key(batch[-1][0] + 1)

    async def _ended(self) -> list[int]:
        async def body(snap: Snapshot) -> list[int]:
            return [id_in_key(key) for key, _ in await snap.range(b"e", b"f", PAGE)]

        return await self._core.store.read(body)

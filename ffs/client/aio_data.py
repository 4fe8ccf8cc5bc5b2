"""Reads of small files for the asynchronous client: many in flight on one ring that its loop drives.

What is prepared in one turn of the loop is submitted at its end, together. The ring's descriptor tells the
loop of completions. One event loop, its thread only; nothing blocks. docs/client.md, Asynchronous calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from ffs._native.iov import Iov
from ffs._native.ring import (
    OP_READ,
    SQE_ZERO_FILL,
    WAIT_NEEDS_ROUTING,
    NativeClient,
    Ring,
    error_of_cqe,
)
from ffs.client.rings import native_chains, native_targets
from ffs.errors import ProtocolError, StaleRouting, TooLarge
from ffs.layout import Layout, file_chunk_key, first_chain
from ffs.proto import meta
from ffs.proto.cluster import RoutingReply

SMALL_BYTES: Final = 64 << 10
PAGE_BYTES: Final = 4096
ENTRIES: Final = 64
MAX_CAPABILITIES: Final = 4096
_FIRST_CHUNK: Final = file_chunk_key(0)

GetRouting = Callable[[int], Awaitable[RoutingReply]]


class _Held(NamedTuple):
    """A capability that native has, for further opens of the same file."""

    native_id: int
    epoch: int
    fresh_until: float  # on the monotonic clock


class SmallReader:
    """The first chunk of files, up to SMALL_BYTES. `close` before the client's session ends."""

    def __init__(self, session: int, cluster: bytes, clock_ms: int, routing: GetRouting) -> None:
        """`clock_ms`: the manager's time now; `routing`: asks for routing newer than an epoch."""
        self._native = NativeClient(session, cluster)
        self._ring = Ring(self._native, ENTRIES)
        self._iov = Iov(ENTRIES * SMALL_BYTES)
        self._memory = self._iov.buffer()
        self._places = [
            self._iov[at : at + SMALL_BYTES] for at in range(0, ENTRIES * SMALL_BYTES, SMALL_BYTES)
        ]
        self._free = list(range(ENTRIES))
        self._room = asyncio.Semaphore(ENTRIES)
        self._flying: dict[int, tuple[asyncio.Future[bytes], meta.Opened]] = {}  # by place
        self._prepared = False
        self._clock_base = clock_ms / 1000 - time.monotonic()
        self._capabilities: dict[int, _Held] = {}  # the oldest first
        self._ask_routing = routing
        self._routing: RoutingReply | None = None
        self._tables: dict[tuple[int, int], tuple[int, ...]] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ring.fileno(), self._receive)

    async def read(self, opened: meta.Opened) -> bytes:
        """The content of a file that was opened for reading. TooLarge over SMALL_BYTES or one chunk."""
        attributes = opened.attributes
        layout, length = attributes.layout, attributes.length
        if layout is None:
            raise ProtocolError(f"inode {opened.ino} was opened without a layout")
        if length > min(SMALL_BYTES, layout.chunk_size):
            raise TooLarge(f"a file of {length} bytes isn't small: at most {SMALL_BYTES}, in one chunk")
        if length == 0:
            return b""
        chains = self._tables.get((layout.table, layout.table_version))
        if chains is None:
            chains = await self._table(layout)
        await self._room.acquire()
        return await self._start(first_chain(layout, chains), opened)

    def close(self) -> None:
        """Blocks until no server can touch the memory any more. Repeatable."""
        self._loop.remove_reader(self._ring.fileno())
        if self._refreshing is not None:
            self._refreshing.cancel()
        self._ring.close()
        for done, _ in self._flying.values():
            done.cancel()
        self._flying.clear()
        self._native.close()

    # inside

    def _start(self, chain: int, opened: meta.Opened) -> asyncio.Future[bytes]:
        """A read of the whole file. Its place is given back when native is done with it, also when nobody
        waits any more."""
        place = self._free.pop()
        length = opened.attributes.length
        try:
            self._ring.prepare_one(
                OP_READ,
                chain,
                self._capability(opened),
                opened.ino.to_bytes(8, "big") + _FIRST_CHUNK,
                0,
                -(-length // PAGE_BYTES) * PAGE_BYTES,
                self._places[place],
                place,
                flags=SQE_ZERO_FILL,
                space_epoch=opened.attributes.epoch,
            )
        except BaseException:
            self._free.append(place)
            self._room.release()
            raise
        done: asyncio.Future[bytes] = self._loop.create_future()
        self._flying[place] = (done, opened)
        if not self._prepared:
            self._prepared = True
            self._loop.call_soon(self._submit)
        return done

    def _submit(self) -> None:
        self._prepared = False
        self._ring.submit()
        self._receive()

    def _receive(self) -> None:
        completions, events = self._ring.wait(0, 0.0)
        for place, result, row in zip(
            completions["userdata"].tolist(), completions["result"].tolist(), completions, strict=True
        ):
            done, opened = self._flying.pop(place)
            if not done.done():  # else its reader was cancelled
                if result >= 0:
                    start = place * SMALL_BYTES
                    done.set_result(bytes(self._memory[start : start + opened.attributes.length]))
                else:
                    done.set_exception(error_of_cqe(row))
            self._free.append(place)
            self._room.release()
        if events & WAIT_NEEDS_ROUTING and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = self._loop.create_task(self._refresh(), name="ffs-routing")

    def _capability(self, opened: meta.Opened) -> int:
        """Native's id of a capability for this file. One that is held is used for half of its life, so
        that a file that is opened often needs no exchange with the storage servers."""
        held = self._capabilities.get(opened.ino)
        now = time.monotonic()
        if held is not None and held.epoch == opened.attributes.epoch and now < held.fresh_until:
            return held.native_id
        left_s = opened.capability_expiry_ms / 1000 - self._clock_base - now
        fresh_until = now + max(0.0, left_s / 2)
        if held is not None:
            self._native.renew_capability(held.native_id, opened.capability)
            self._capabilities[opened.ino] = held._replace(
                epoch=opened.attributes.epoch, fresh_until=fresh_until
            )
            return held.native_id
        if len(self._capabilities) >= MAX_CAPABILITIES:
            used = {flying.ino for _, flying in self._flying.values()}
            oldest = next(ino for ino in self._capabilities if ino not in used)
            self._native.drop_capability(self._capabilities.pop(oldest).native_id)
        native_id: int = self._native.add_capability(opened.capability)
        self._capabilities[opened.ino] = _Held(native_id, opened.attributes.epoch, fresh_until)
        return native_id

    async def _table(self, layout: Layout) -> tuple[int, ...]:
        await self._refresh()
        chains = self._tables.get((layout.table, layout.table_version))
        if chains is None:
            raise StaleRouting(f"chain table {layout.table} version {layout.table_version} isn't known")
        return chains

    async def _refresh(self) -> None:
        reply = await self._ask_routing(0 if self._routing is None else self._routing.epoch)
        if not reply.changed:
            return
        self._routing = reply
        self._tables = {(table.id, table.version): tuple(table.chains) for table in reply.tables}
        reachable = [target for target in reply.targets if target.port]
        self._native.set_routing(reply.epoch, native_chains(reply.chains), native_targets(reachable))

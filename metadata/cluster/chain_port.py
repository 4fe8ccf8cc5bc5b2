"""The namespace's work on chunks, sent to the storage process of the chain's head.

Implements metadata.fs.ports.ChainPort. A storage process does it through a client ring of its own,
so it goes the way of every update. Each call is idempotent, and goes to the next head when the chain
changes. One connection a node, opened on first use. One event loop. docs/control_plane.md, Storage control.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, TypeVar, cast

from ffs.errors import (
    ChainUnavailable,
    ConnectionLost,
    DeadlineExceeded,
    FfsError,
    ProtocolError,
    ShutDown,
    Unreachable,
)
from ffs.proto.chain_calls import (
    MOST_SPACES,
    LastChunk,
    LastChunkReply,
    ListChunks,
    ListChunksReply,
    RaiseSpaceEpoch,
    RemovePage,
    RemovePageReply,
    RemoveSpaces,
    RemoveSpacesReply,
    TruncateChunk,
)
from ffs.proto.cluster import NodeRecord, TargetState
from ffs.proto.common import Message, to_error
from ffs.rpc.address import parse_address
from ffs.rpc.aio import Connection
from ffs.rpc.handshake import AskerHandshake
from metadata.cluster.routing import RoutingCache
from metadata.fs.ports import HeldChunk

TIMEOUT_S: Final = 20.0
PATIENCE_S: Final = 5.0  # for a chain to have a head; and after the failure timeout, for reaching it
RETRY_S: Final = 0.2

T = TypeVar("T")

_ENTRY: Final = Struct("<24sII")  # wire.h, ListEntry
_PENDING: Final = 1


class _HeadChanged(FfsError):
    """The node that was asked isn't waited for any more."""


@dataclass(slots=True, eq=False)
class _Removal:
    chain: int
    space: int
    gone: asyncio.Future[bool]  # False: it is to be asked for by itself


def _tell(removal: _Removal, how: bool | Exception) -> None:
    if removal.gone.done():  # who asked for it has gone
        return
    if isinstance(how, Exception):
        removal.gone.set_exception(how)
    else:
        removal.gone.set_result(how)


def _stop(removals: Sequence[_Removal]) -> None:
    for removal in removals:
        _tell(removal, ShutDown("this metadata server is stopping"))


class StorageControl:
    """Close it when the event loop ends."""

    def __init__(
        self,
        routing: RoutingCache,
        *,
        cluster: bytes,
        secret: bytes | None,
        name: str,
        failure_timeout_s: float = 10.0,
    ) -> None:
        self._routing = routing
        self._patience_s = failure_timeout_s + PATIENCE_S
        self._cluster = cluster
        self._secret = secret
        self._name = name
        self._connections: dict[int, tuple[str, Connection]] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._closed = False
        self._removals: dict[tuple[int, int], list[_Removal]] = {}  # by node and epoch: to be sent
        self._sending: set[asyncio.Task[None]] = set()
        self._alone: set[tuple[int, int]] = set()  # nodes, by incarnation, that know no RemoveSpaces

    async def raise_space_epoch(self, chain: int, space: int, epoch: int) -> None:
        await self._ask(chain, RaiseSpaceEpoch(chain=chain, space=space, epoch=epoch))

    async def remove_page(
        self, chain: int, space: int, first_key: bytes, epoch: int, limit: int
    ) -> tuple[int, bool]:
        """The storage process's own page bounds it too."""
        request = RemovePage(chain=chain, space=space, epoch=epoch, start=first_key, limit=limit)
        reply = cast(RemovePageReply, await self._ask(chain, request))
        return reply.removed, reply.more

    async def remove_space(self, chain: int, space: int, epoch: int) -> None:
        """With what else is to be removed by that node at this moment, in one request."""
        await self._with_head(chain, lambda node: self._remove_space(node, chain, space, epoch))

    async def truncate_chunk(self, chain: int, space: int, key: bytes, length: int, epoch: int) -> None:
        whole = space.to_bytes(8, "big") + key
        await self._ask(chain, TruncateChunk(chain=chain, key=whole, length_bytes=length, epoch=epoch))

    async def last_chunk(self, chain: int, space: int) -> tuple[bytes, int] | None:
        reply = cast(LastChunkReply, await self._ask(chain, LastChunk(chain=chain, space=space)))
        return (reply.key[8:], reply.length_bytes) if reply.key else None

    async def list_chunks(self, chain: int, first_key: bytes, limit: int) -> tuple[list[HeldChunk], bool]:
        """The storage process has a bound of its own, 1024."""
        request = ListChunks(chain=chain, start=first_key, limit=limit)
        reply = cast(ListChunksReply, await self._ask(chain, request))
        rows = _ENTRY.iter_unpack(reply.entries)
        return [HeldChunk(key, length, bool(flags & _PENDING)) for key, length, flags in rows], reply.more

    def close(self) -> None:
        self._closed = True
        for sending in self._sending:
            sending.cancel()
        for rows in self._removals.values():
            _stop(rows)
        for _, connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # inside

    async def _ask(self, chain: int, request: Message) -> Message:
        return await self._with_head(chain, lambda node: self._ask_node(node, request))

    async def _with_head(self, chain: int, ask: Callable[[NodeRecord], Awaitable[T]]) -> T:
        """By the chain's head, whichever it is by then. Raises ChainUnavailable when none was reached."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while True:
            node = await self._head(chain, deadline)
            try:
                return await ask(node)
            except (ConnectionLost, ShutDown, Unreachable, _HeadChanged) as error:
                if self._closed or loop.time() >= deadline:
                    raise ChainUnavailable(
                        f"chain {chain}: its head's node {node.name} can't be reached: {error.message}"
                    ) from None
            await self._routing.wait_change(RETRY_S)

    async def _ask_node(self, node: NodeRecord, request: Message) -> Message:
        """Doesn't wait for a node that is given up meanwhile: a stopped process keeps its connections."""
        connection = await self._connection(node)
        call = asyncio.ensure_future(connection.call(request, TIMEOUT_S))
        try:
            while not call.done():
                change = asyncio.ensure_future(self._routing.wait_change(TIMEOUT_S))
                await asyncio.wait({call, change}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                now = self._routing.view.nodes[node.id]
                if not call.done() and (now.incarnation != node.incarnation or not now.alive):
                    raise _HeadChanged(f"node {node.name} is gone")
            return call.result()
        finally:
            call.cancel()

    async def _remove_space(self, node: NodeRecord, chain: int, space: int, epoch: int) -> None:
        if (node.id, node.incarnation) not in self._alone:
            removal = _Removal(chain, space, asyncio.get_running_loop().create_future())
            rows = self._removals.setdefault((node.id, epoch), [])
            rows.append(removal)
            if len(rows) == 1:
                sending = asyncio.ensure_future(self._send_removals(node, epoch))
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)
            if await removal.gone:
                return
        await self._ask_node(node, RaiseSpaceEpoch(chain=chain, space=space, epoch=epoch))
        page = RemovePage(chain=chain, space=space, epoch=epoch, start=bytes(16))
        while cast(RemovePageReply, await self._ask_node(node, page)).more:
            pass

    async def _send_removals(self, node: NodeRecord, epoch: int) -> None:
        """What has gathered in this turn of the loop; each is told."""
        await asyncio.sleep(0)
        rows = self._removals.pop((node.id, epoch))
        try:
            for begin in range(0, len(rows), MOST_SPACES):
                await self._send_page(node, epoch, rows[begin : begin + MOST_SPACES])
        finally:
            _stop(rows)

    async def _send_page(self, node: NodeRecord, epoch: int, rows: list[_Removal]) -> None:
        request = RemoveSpaces(pairs=tuple((row.chain, row.space) for row in rows), epoch=epoch)
        failed: dict[int, Exception] = {}
        more: set[int] = set()
        known = True
        try:
            reply = cast(RemoveSpacesReply, await self._ask_node(node, request))
            failed = {at: to_error(error) for at, error in reply.failed}
            more = {at for at, error in failed.items() if isinstance(error, DeadlineExceeded)}
        except ProtocolError:  # a version before
            self._alone.add((node.id, node.incarnation))
            known = False
        except Exception as error:  # of any kind: who waits here is told, and judges it
            failed = dict.fromkeys(range(len(rows)), error)
        for at, row in enumerate(rows):
            if at in more:
                _tell(row, False)
            elif at in failed:
                _tell(row, failed[at])
            else:
                _tell(row, known)

    async def _head(self, chain: int, deadline: float) -> NodeRecord:
        """The node of the chain's first serving member; waits for one that isn't there."""
        loop = asyncio.get_running_loop()
        deadline = min(deadline, loop.time() + PATIENCE_S)
        while True:
            view = self._routing.view
            record = view.chains.get(chain)
            if record is None:
                raise ChainUnavailable(f"chain {chain} isn't known")
            route = view.chain_route(record)
            for member, state in zip(route.members, route.states, strict=True):
                node = view.node_of(member)
                if state == TargetState.SERVING and node.control and node.alive:
                    return node
            left = deadline - loop.time()
            if left <= 0:
                raise ChainUnavailable(f"chain {chain} has no serving replica")
            await self._routing.wait_change(left)

    async def _connection(self, node: NodeRecord) -> Connection:
        async with self._locks.setdefault(node.id, asyncio.Lock()):
            control, connection = self._connections.get(node.id, ("", None))
            if connection is not None and control == node.control and not connection.closed:
                return connection
            if self._closed:
                raise ShutDown("this metadata server is stopping")
            if connection is not None:
                connection.close()
            handshake = AskerHandshake(
                role="meta", cluster=self._cluster, secret=self._secret, name=self._name
            )
            try:
                connection = await Connection.open(parse_address(node.control), handshake)
            except FfsError as error:
                raise Unreachable(f"node {node.name}: {error.message}") from None
            self._connections[node.id] = (node.control, connection)
            return connection

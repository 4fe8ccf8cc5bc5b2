"""The namespace's work on chunks, sent to the storage process of the chain's head.

Implements metadata.fs.ports.ChainPort. A storage process does it through a client ring of its own,
so it goes the way of every update and takes effect at most once in effect: each call is idempotent.
One connection a node, opened on first use. One event loop. docs/control_plane.md, Storage control.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar, cast

from ffs.errors import ChainUnavailable, ConnectionLost, FfsError, ShutDown, Unreachable
from ffs.proto.cluster import (
    LastChunk,
    LastChunkReply,
    NodeRecord,
    RaiseSpaceEpoch,
    RemovePage,
    RemovePageReply,
    TruncateChunk,
)
from ffs.proto.common import Message
from ffs.rpc.address import parse_address
from ffs.rpc.aio import Connection
from ffs.rpc.handshake import AskerHandshake
from metadata.cluster.routing import RoutingCache

TIMEOUT_S: Final = 20.0
PATIENCE_S: Final = 5.0  # for a head's node that is starting again

M = TypeVar("M", bound=Message)


class StorageControl:
    """Close it when the event loop ends."""

    def __init__(self, routing: RoutingCache, *, cluster: bytes, secret: bytes | None, name: str) -> None:
        self._routing = routing
        self._cluster = cluster
        self._secret = secret
        self._name = name
        self._connections: dict[int, tuple[str, Connection]] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._closed = False

    async def raise_space_epoch(self, chain: int, space: int, epoch: int) -> None:
        await self._ask(chain, RaiseSpaceEpoch(chain=chain, space=space, epoch=epoch))

    async def remove_page(
        self, chain: int, space: int, first_key: bytes, epoch: int, limit: int
    ) -> tuple[int, bool]:
        """The storage process's own page bounds it too."""
        request = RemovePage(chain=chain, space=space, epoch=epoch, start=first_key, limit=limit)
        reply = cast(RemovePageReply, await self._ask(chain, request))
        return reply.removed, reply.more

    async def truncate_chunk(self, chain: int, space: int, key: bytes, length: int, epoch: int) -> None:
        whole = space.to_bytes(8, "big") + key
        await self._ask(chain, TruncateChunk(chain=chain, key=whole, length_bytes=length, epoch=epoch))

    async def last_chunk(self, chain: int, space: int) -> tuple[bytes, int] | None:
        reply = cast(LastChunkReply, await self._ask(chain, LastChunk(chain=chain, space=space)))
        return (reply.key[8:], reply.length_bytes) if reply.key else None

    def close(self) -> None:
        self._closed = True
        for _, connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # inside

    async def _ask(self, chain: int, request: Message) -> Message:
        node = await self._head(chain)
        for last in (False, True):
            connection = await self._connection(node)
            try:
                return await connection.call(request, TIMEOUT_S)
            except (ConnectionLost, ShutDown) as error:
                if last or self._closed:
                    raise Unreachable(f"node {node.name}: {error.message}") from None
        raise AssertionError("unreachable")

    async def _head(self, chain: int) -> NodeRecord:
        """The node of the chain's first member; waits a little for one that isn't there."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while True:
            view = self._routing.view
            record = view.chains.get(chain)
            if record is None:
                raise ChainUnavailable(f"chain {chain} isn't known")
            node = view.nodes[view.targets[record.members[0]].node]
            if node.control and node.alive:
                return node
            left = deadline - loop.time()
            if left <= 0:
                raise ChainUnavailable(f"chain {chain}: its head's node {node.name} isn't there")
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

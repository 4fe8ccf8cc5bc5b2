"""Client sessions that are over: every node is told, and each is forgotten when nobody needs it any more.

docs/control_plane.md, Heartbeats. One event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from ffs.proto.cluster import collector_client
from ffs.proto.records import FencedClient
from metadata.cluster.clock import ManagerClock
from metadata.cluster.lease import Lease
from metadata.cluster.routing import View
from metadata.fs.schema import fence_key
from metadata.fs.sessions import fenced_clients
from metadata.kv.contract import Snapshot, Store, Transaction

A_REPLY: Final = 1024


class Fencing(Protocol):
    """A node, as far as fences go."""

    fenced: set[int]  # sessions that it refuses


class Fences:
    """The primary's, of one term."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        clock: ManagerClock,
        nodes: Mapping[int, Fencing],
        news: Callable[[], None],
    ) -> None:
        """`nodes`: those that have spoken, by id. `news`: there are fences that weren't there before."""
        self._store = store
        self._lease = lease
        self._clock = clock
        self._nodes = nodes
        self._news = news
        self._all: frozenset[int] = frozenset()

    def clear(self) -> None:
        """Another term."""
        self._all = frozenset()

    def news_for(self, node: Fencing) -> tuple[int, ...]:
        return tuple(sorted(self._all - node.fenced)[:A_REPLY])

    async def load(self, view: View) -> None:
        """Reads them again. One is forgotten when every node has fenced it and the last of its capabilities
        has expired."""
        found = await self._store.read(_all_fenced)
        now_ms = self._clock.now_ms()
        done = [
            client
            for client, fenced in found.items()
            if fenced.capability_expiry_ms < now_ms and self._everywhere(view, client)
        ]
        if done:

            async def forget(txn: Transaction) -> None:
                await self._lease.guard(txn)
                for client in done:
                    txn.clear(fence_key(client))

            await self._store.run(forget)
        # The collectors of processes that are gone are sessions that are over, too.
        gone = {
            collector_client(node.id, node.previous or node.incarnation - 1)
            for node in view.nodes.values()
            if node.incarnation > 1
        }
        before, self._all = self._all, frozenset(found.keys() - set(done)) | gone
        if self._all - before:
            self._news()
        for state in self._nodes.values():
            state.fenced &= self._all

    def _everywhere(self, view: View, client: int) -> bool:
        states = [self._nodes.get(node) for node in view.nodes]
        return all(state is not None and client in state.fenced for state in states)


async def _all_fenced(snapshot: Snapshot) -> dict[int, FencedClient]:
    found: dict[int, FencedClient] = {}
    while page := await fenced_clients(snapshot, max(found, default=0)):
        found.update(page)
    return found

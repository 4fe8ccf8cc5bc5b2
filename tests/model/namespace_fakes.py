"""The cluster as the namespace sees it, in memory: chains that keep the length of each chunk and the epoch of
each space, and refuse what a storage server would refuse. And a client that speaks the messages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ffs import errors
from ffs.layout import Layout, Placement, chunk_slices, file_chunk_key
from ffs.proto import meta
from ffs.proto.common import Creds, ErrorReply, Message, to_error
from metadata.fs.core import Core
from metadata.fs.namespace import Namespace, format_store
from metadata.fs.ports import HeldChunk, TableView
from metadata.kv.contract import Store

CLUSTER = bytes(range(16))


class FakeCluster:
    """One table of `chains` chains, another (2) of one chain."""

    def __init__(self, chains: int = 5) -> None:
        self.time_ms = 1000
        self.defaults: dict[str, int] = {}  # by role; others take table 1
        self.tables = {
            1: TableView(1, "default", 1, tuple(range(100, 100 + chains)), 3, 4096),
            2: TableView(2, "single", 1, (7,), 1, 65536),
        }

    def manager_time_ms(self) -> int:
        return self.time_ms

    def table(self, table: int, version: int = 0, *, role: str = "") -> TableView | None:
        return self.tables.get(table or self.defaults.get(role, 1))

    def space_bytes(self, table: int) -> tuple[int, int]:
        return 1 << 40, 1 << 39


class FakeChains:
    """ChainPort over dicts. `away` chains can't be asked."""

    def __init__(self) -> None:
        self.chunks: dict[int, dict[tuple[int, bytes], int]] = {}  # chain -> (space, key) -> length
        self.epochs: dict[tuple[int, int], int] = {}  # (chain, space) -> least epoch
        self.away: set[int] = set()
        self.calls = 0
        self.refused = 0  # calls of chains that are away

    def _check(self, chain: int, space: int, epoch: int | None = None) -> dict[tuple[int, bytes], int]:
        self.calls += 1
        if chain in self.away:
            self.refused += 1
            raise errors.ChainUnavailable(f"chain {chain} is away")
        if epoch is not None and epoch < self.epochs.get((chain, space), 0):
            raise errors.StaleEpoch(f"space {space}: {epoch} is old")
        return self.chunks.setdefault(chain, {})

    async def raise_space_epoch(self, chain: int, space: int, epoch: int) -> None:
        self._check(chain, space)
        self.epochs[chain, space] = max(epoch, self.epochs.get((chain, space), 0))

    async def remove_page(
        self, chain: int, space: int, first_key: bytes, epoch: int, limit: int
    ) -> tuple[int, bool]:
        chunks = self._check(chain, space, epoch)
        keys = sorted(k for k in chunks if k[0] == space and k[1] >= first_key)
        for key in keys[: min(limit, 2)]:  # short pages, so that paging is tried
            del chunks[key]
        return min(len(keys), limit, 2), len(keys) > min(limit, 2)

    async def remove_space(self, chain: int, space: int, epoch: int) -> None:
        await self.raise_space_epoch(chain, space, epoch)
        more = True
        while more:
            _, more = await self.remove_page(chain, space, bytes(16), epoch, 1000)

    async def truncate_chunk(self, chain: int, space: int, key: bytes, length: int, epoch: int) -> None:
        chunks = self._check(chain, space, epoch)
        if chunks.get((space, key), 0) > length:
            chunks[space, key] = length

    async def last_chunk(self, chain: int, space: int) -> tuple[bytes, int] | None:
        chunks = self._check(chain, space)
        keys = [k for k in chunks if k[0] == space]
        return (max(keys)[1], chunks[max(keys)]) if keys else None

    async def list_chunks(self, chain: int, first_key: bytes, limit: int) -> tuple[list[HeldChunk], bool]:
        chunks = self._check(chain, 0)
        keys = sorted(k for k in chunks if k[0].to_bytes(8, "big") + k[1] >= first_key)
        page = keys[: min(limit, 3)]
        return [HeldChunk(k[0].to_bytes(8, "big") + k[1], chunks[k], False) for k in page], len(keys) > len(
            page
        )

    def write(
        self, ino: int, layout: Layout, epoch: int, offset: int, length: int, chains: Sequence[int]
    ) -> None:
        """What a client does: data of a file."""
        placement = Placement(layout, chains)
        for piece in chunk_slices(layout.chunk_size, offset, length):
            chunks = self._check(placement.chain_of_index(piece.chunk), ino, epoch)
            key = (ino, file_chunk_key(piece.chunk))
            chunks[key] = max(chunks.get(key, 0), piece.offset + piece.length)

    def spaces(self) -> set[int]:
        return {space for chunks in self.chunks.values() for space, _ in chunks}

    def end(self, ino: int, chunk_size: int) -> int:
        ends = [
            int.from_bytes(key, "big") * chunk_size + length
            for chunks in self.chunks.values()
            for (space, key), length in chunks.items()
            if space == ino
        ]
        return max(ends, default=0)


class Caller:
    """A client session's requests, each under a new sequence of its slot; `resend` repeats the last."""

    def __init__(self, namespace: Namespace, client: int = 0, creds: Creds | None = None) -> None:
        self.namespace = namespace
        self.client = client
        self.creds = creds or Creds()
        self.slot = 0
        self.sequences: dict[int, int] = {}
        self.last: meta.Request | None = None

    @classmethod
    async def connect(cls, namespace: Namespace, creds: Creds | None = None) -> Caller:
        reply = await namespace.handle(meta.SessionOpen(label="test"))
        assert isinstance(reply, meta.SessionOpened), reply
        return cls(namespace, reply.client, creds)

    def prepare(self, request: meta.Request) -> meta.Request:
        sequence = self.sequences[self.slot] = self.sequences.get(self.slot, 0) + 1
        request.client, request.slot, request.sequence = self.client, self.slot, sequence
        request.creds = self.creds
        self.last = request
        return request

    async def __call__(self, request: meta.Request) -> Any:
        """The reply; an ErrorReply is raised."""
        return unwrap(await self.send(self.prepare(request)))

    async def send(self, request: meta.Request) -> Message:
        now = self.namespace.try_handle_now(request)
        slow = await self.namespace.handle(request) if now is None else now
        return slow

    async def resend(self) -> Message:
        assert self.last is not None
        return await self.namespace.handle(self.last)


def unwrap(reply: Message) -> Any:
    if isinstance(reply, ErrorReply):
        raise to_error(reply)
    return reply


async def make_namespace(
    store: Store, *, seed: int = 0, root_mode: int = 0o777
) -> tuple[Namespace, FakeCluster, FakeChains]:
    await format_store(store, CLUSTER, now_ns=1, root_mode=root_mode)
    cluster, chains = FakeCluster(), FakeChains()
    core = Core(store, cluster, chains, cluster_id=CLUSTER, rng=random.Random(seed))
    return Namespace(core), cluster, chains

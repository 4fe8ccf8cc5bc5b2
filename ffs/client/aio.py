"""The internal asynchronous client: namespace calls with many in flight on one connection.

For batches and the bench; not public. One event loop. docs/client.md, Asynchronous calls.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import TypeVar

from ffs.client.address import resolve_address
from ffs.client.aio_data import SmallReader
from ffs.client.core import read_umask
from ffs.client.paths import PathLike, wire_path
from ffs.client.slots import SlotTable
from ffs.errors import ConnectionLost, FfsError, InvalidArgument, ProtocolError, StaleEpoch, Unreachable
from ffs.proto import meta
from ffs.proto.cluster import GetRouting, RoutingReply
from ffs.proto.common import Creds, ErrorReply, Message, OkReply, to_error
from ffs.rpc.aio import Connection
from ffs.rpc.handshake import AskerHandshake, Credential

M = TypeVar("M", bound=Message)

_RESENDS = 3
_REOPENS = 3


class AsyncClient:
    """`async with await AsyncClient.connect(address) as client:`. Its coroutines may run concurrently.

    A lost connection is made anew, and requests are sent again under their identity, so that each
    takes effect once.
    """

    def __init__(
        self, servers: tuple[tuple[str, int], ...], cluster: bytes, secret: Credential | None
    ) -> None:
        """Made by `connect`."""
        self._servers = servers
        self._cluster = cluster
        self._secret = secret
        self._creds = Creds(os.geteuid(), os.getegid(), tuple(os.getgroups()))
        self._umask = read_umask()
        self._connecting = asyncio.Lock()
        self._connection: Connection | None = None
        self._slots = SlotTable(1)
        self._limit = asyncio.Semaphore(1)
        self._session = 0
        self._clock_ms = 0  # the manager's time when the session was opened
        self._reader: SmallReader | None = None
        self._ttl_s = 30.0
        self._renewing: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, address: str | None = None, *, secret: bytes | None = None) -> AsyncClient:
        """Connect and open a session. Raises as `ffs.connect`."""
        resolved = resolve_address(address)
        client = cls(resolved.servers, resolved.cluster, secret)
        label = f"{socket.gethostname()} async {os.getpid()}"
        try:
            opened = await client._send(
                meta.SessionOpen(label=label, creds=client._creds), meta.SessionOpened
            )
        except BaseException:
            await client.close()
            raise
        client._session = opened.client
        client._clock_ms = opened.manager_time_ms
        client._ttl_s = opened.ttl_ms / 1000
        client._slots = SlotTable(opened.slots)
        client._limit = asyncio.Semaphore(opened.slots)
        client._renewing = asyncio.create_task(client._renew(), name="ffs-renew")
        return client

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session and the connection. Repeatable."""
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        session, self._session = self._session, 0
        if session:
            await self._send(meta.SessionClose(client=session, creds=self._creds), OkReply)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            await self._send(meta.SessionRenew(client=self._session, creds=self._creds), meta.SessionRenewed)

    # --- requests ---------------------------------------------------------------------------

    async def _connected(self) -> Connection:
        async with self._connecting:
            connection = self._connection
            if connection is not None and not connection.closed:
                return connection
            failure: FfsError = InvalidArgument("no address")
            for server in self._servers:
                shake = AskerHandshake(
                    role="client", cluster=self._cluster, secret=self._secret, name="async"
                )
                try:
                    connection = await Connection.open(server, shake)
                except (Unreachable, ConnectionLost) as error:
                    failure = error
                    continue
                self._cluster = connection.cluster
                self._connection = connection
                return connection
            raise failure

    async def _send(self, request: Message, reply: type[M]) -> M:
        for resend in range(_RESENDS + 1):
            connection = self._connection
            if connection is None or connection.closed:
                connection = await self._connected()
            try:
                message = await connection.call(request)
            except ConnectionLost:
                if resend == _RESENDS:
                    raise
                continue
            if type(message) is not reply:
                raise ProtocolError(f"{type(request).__name__} is answered by {type(message).__name__}")
            return message
        raise AssertionError("unreachable")

    async def ask(self, request: meta.Request, reply: type[M]) -> M:
        """A request that changes nothing."""
        request.creds = self._creds
        return await self._send(request, reply)

    async def change(self, request: meta.Request, reply: type[M]) -> M:
        """A mutation, which takes effect once. Waits while the session's slots are all in use."""
        async with self._limit:
            with self._slots.hold() as slot:
                request.client = self._session
                request.slot = slot.number
                request.sequence = slot.sequence
                request.creds = self._creds
                return await self._send(request, reply)

    # --- calls ------------------------------------------------------------------------------

    async def stat(self, path: PathLike, *, follow_symlinks: bool = True) -> meta.Attributes:
        """The attributes of what is at `path`."""
        request = meta.Stat(path=wire_path(path), follow=follow_symlinks)
        return (await self.ask(request, meta.StatReply)).attributes

    async def create(self, path: PathLike, mode: int = 0o666, *, exist_ok: bool = False) -> meta.Attributes:
        """Make an empty file."""
        flags = meta.OPEN_READ | meta.OPEN_CREATE | (0 if exist_ok else meta.OPEN_EXCL)
        request = meta.Open(path=wire_path(path), flags=flags, mode=mode & ~self._umask)
        return (await self.change(request, meta.Opened)).attributes

    async def mkdir(self, path: PathLike, mode: int = 0o777, *, parents: bool = False) -> None:
        """Make a directory."""
        request = meta.MkDir(path=wire_path(path), mode=mode & ~self._umask, parents=parents)
        await self.change(request, meta.StatReply)

    async def stat_many(self, paths: Sequence[PathLike]) -> list[meta.Attributes | FfsError]:
        """The attributes of at most MAX_BATCH paths, of one snapshot; errors in place of attributes."""
        request = meta.StatMany(paths=tuple(map(wire_path, paths)))
        reply = await self.ask(request, meta.StatManyReply)
        return [
            to_error(result) if type(result) is ErrorReply else result.attributes  # type: ignore[union-attr]
            for result in reply.results
        ]

    async def read_small(self, path: PathLike) -> bytes:
        """The content of a file of at most 64 KiB, in one chunk: one request to the metadata service, one to
        a storage server. TooLarge."""
        request = meta.Open(path=wire_path(path), flags=meta.OPEN_READ, client=self._session)
        for turn in range(_REOPENS + 1):
            opened = await self.ask(request, meta.Opened)
            if self._reader is None:
                self._reader = SmallReader(self._session, self._cluster, self._clock_ms, self._routing)
            try:
                return await self._reader.read(opened)
            except StaleEpoch:  # truncated after we had opened it
                if turn == _REOPENS:
                    raise
        raise AssertionError("unreachable")

    async def _routing(self, known_epoch: int) -> RoutingReply:
        return await self._send(GetRouting(known_epoch=known_epoch), RoutingReply)

    async def unlink(self, path: PathLike) -> None:
        """Remove a name that isn't a directory's."""
        await self.change(meta.Unlink(path=wire_path(path)), OkReply)

    async def rename(self, source: PathLike, target: PathLike) -> None:
        """Rename, replacing what is at `target`."""
        await self.change(meta.Rename(source=wire_path(source), target=wire_path(target)), OkReply)

    async def listdir(self, path: PathLike) -> list[bytes]:
        """The names in a directory, as bytes, in byte order."""
        return [entry.name async for page in self.pages(path) for entry in page]

    async def pages(
        self, path: PathLike, *, attributes: bool = False, limit: int = 1000
    ) -> AsyncIterator[list[meta.DirEntry]]:
        """The entries of a directory, in byte order of names, by pages of at most `limit`."""
        request = meta.ReadDir(path=wire_path(path), limit=limit, attributes=attributes)
        while True:
            page = await self.ask(request, meta.ReadDirReply)
            yield page.entries
            if not page.more or not page.entries:
                return
            request = meta.ReadDir(
                ino=page.ino,
                after=page.entries[-1].name,
                limit=limit,
                attributes=attributes,
                ticket=page.ticket,
            )

    async def stat_all(
        self, paths: Iterable[PathLike], in_flight: int = 32
    ) -> list[meta.Attributes | OSError]:
        """`stat` of many paths, `in_flight` at a time; errors in place of attributes."""
        limit = asyncio.Semaphore(in_flight)

        async def one(path: PathLike) -> meta.Attributes | OSError:
            async with limit:
                try:
                    return await self.stat(path)
                except OSError as error:
                    return error

        return list(await asyncio.gather(*(one(path) for path in paths)))

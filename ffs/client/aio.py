"""The internal asynchronous client: namespace calls with many in flight on one connection.

For batches and the bench; not public. One event loop. docs/client.md, Asynchronous calls.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from types import TracebackType
from typing import TypeVar

from ffs.client.address import resolve_address
from ffs.client.core import read_umask
from ffs.client.paths import PathLike, wire_path
from ffs.client.slots import SlotTable
from ffs.errors import ConnectionLost, FfsError, InvalidArgument, ProtocolError, Unreachable
from ffs.proto import meta
from ffs.proto.common import Creds, Message, OkReply
from ffs.rpc.aio import Connection
from ffs.rpc.handshake import AskerHandshake

M = TypeVar("M", bound=Message)

_RESENDS = 3


class AsyncClient:
    """`async with await AsyncClient.connect(address) as client:`. Its coroutines may run concurrently.

    A lost connection is made anew, and requests are sent again under their identity, so that each
    takes effect once.
    """

    def __init__(self, servers: tuple[tuple[str, int], ...], cluster: bytes, secret: bytes | None) -> None:
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

    async def unlink(self, path: PathLike) -> None:
        """Remove a name that isn't a directory's."""
        await self.change(meta.Unlink(path=wire_path(path)), OkReply)

    async def rename(self, source: PathLike, target: PathLike) -> None:
        """Rename, replacing what is at `target`."""
        await self.change(meta.Rename(source=wire_path(source), target=wire_path(target)), OkReply)

    async def listdir(self, path: PathLike) -> list[bytes]:
        """The names in a directory, as bytes, in byte order."""
        names: list[bytes] = []
        request = meta.ReadDir(path=wire_path(path))
        while True:
            page = await self.ask(request, meta.ReadDirReply)
            names += [entry.name for entry in page.entries]
            if not page.more or not page.entries:
                return names
            request = meta.ReadDir(ino=page.ino, after=page.entries[-1].name)

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

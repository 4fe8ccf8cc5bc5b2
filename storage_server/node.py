"""The running node: native server, heartbeats, configuration. docs/control_plane.md, Heartbeats.

Native calls may block for as long as a flush takes: they run on one helper thread, in order. A
metadata service that can't be reached changes nothing here: the node goes on with what it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

from ffs._native.routes import ChainRoute, TargetRoute
from ffs._native.server import NativeServer, ShardInfo
from ffs.errors import Fenced, FfsError, NotFound
from ffs.proto import cluster as proto
from ffs.rpc.caller import Caller
from storage_server.collector import Collector

log = logging.getLogger("ffs.storage")

CALL_TIMEOUT_S: Final = 4.0
RETRY_S: Final = 0.25
MAX_BEAT_S: Final = 2.0

T = TypeVar("T")


class Node:
    """Between `start` and `stop` it serves. One event loop."""

    def __init__(self, caller: Caller, native: NativeServer, node: int, incarnation: int) -> None:
        self._caller = caller
        self._native = native
        self.id = node
        self.incarnation = incarnation
        self.manager_ms = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ffs-native")
        self._config = proto.NodeConfig(number=(0, 0), epoch=0, chains=(), targets=())
        self._fenced: set[int] = set()  # since the last heartbeat that was answered
        self._reachable = True
        self.collector: Collector | None = None
        self.heartbeats = 0
        self._started = False

    async def native(self, call: Callable[..., T], *arguments: Any) -> T:
        """A call of the native server on the helper thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)

    async def announce(self, host: str, control: str, shards: list[ShardInfo]) -> None:
        """Tells the manager where this incarnation is. Raises FfsError."""
        endpoints = tuple(
            proto.TargetEndpoint(target, shard.port, shard.socket_path)
            for shard in shards
            for target in shard.targets
        )
        await self._caller.call(
            proto.AnnounceNode(
                node=self.id,
                incarnation=self.incarnation,
                host=host,
                control=control,
                endpoints=endpoints,
            ),
            CALL_TIMEOUT_S,
        )

    async def start(self) -> None:
        """The native server's threads; its devices have been added."""
        await self.native(self._native.start)
        self._started = True

    async def beat_until(self, stop: asyncio.Event) -> None:
        """Heartbeats until `stop`. Raises Fenced or NotFound when the cluster has another process, or
        none, under this node's name: then this one must end."""
        refused: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(self._beat_forever())
                await stop.wait()
                beating.cancel()
        except* FfsError as found:
            refused += found.exceptions
        if refused:
            raise refused[0]

    async def _beat_forever(self) -> None:
        while True:
            try:
                pause_s = await self._beat()
                self._heard()
            except (Fenced, NotFound):
                raise
            except FfsError as error:
                self._unheard(error)
                pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    async def stop(self) -> None:
        """Clean: the native server takes a last snapshot and closes its devices."""
        if self.collector is not None:
            await asyncio.to_thread(self.collector.close)
        try:
            if self._started:
                await self.native(self._native.stop)
        finally:
            await self.native(self._native.close)
            self._executor.shutdown()

    # inside

    async def _beat(self) -> float:
        """One heartbeat and what it asks for; how long to wait for the next, seconds."""
        reports = await self.native(self._native.report)
        fenced = tuple(self._fenced)
        reply = cast(
            proto.HeartbeatReply,
            await self._caller.call(
                proto.Heartbeat(
                    node=self.id,
                    incarnation=self.incarnation,
                    config=self._config.number,
                    reports=tuple(_report(report) for report in reports),
                    fenced=fenced,
                ),
                CALL_TIMEOUT_S,
            ),
        )
        self.heartbeats += 1
        self._fenced.difference_update(fenced)
        self.manager_ms = max(self.manager_ms, reply.manager_ms)
        if reply.config is not None:
            self._config = reply.config
        await self._configure()
        for client in reply.fences:
            await self.native(self._native.fence, client)
            self._fenced.add(client)
        return 0.0 if reply.fences else min(MAX_BEAT_S, reply.next_ms / 1000.0)

    async def _configure(self) -> None:
        config = self._config
        chains = [_chain(route) for route in config.chains]
        targets = [_target(route) for route in config.targets if route.port]
        await self.native(self._native.configure, config.epoch, self.manager_ms, chains, targets)
        if self.collector is not None:
            recorded = [chain for chain in chains if not chain.proposed]
            self.collector.set_routing(config.epoch, recorded, targets)

    def _heard(self) -> None:
        if not self._reachable:
            log.warning("the metadata service answers again")
            self._reachable = True

    def _unheard(self, error: FfsError) -> None:
        if self._reachable:
            log.warning("no heartbeat: %s; going on with the routing that there is", error.message)
            self._reachable = False


def _report(report: Any) -> proto.TargetReport:
    """A report of the native server for the wire: the same names."""
    return proto.TargetReport(**{name: getattr(report, name) for name in _REPORT_FIELDS})


_REPORT_FIELDS: Final = proto.TargetReport.__struct_fields__


def _chain(route: proto.ChainRoute) -> ChainRoute:
    return ChainRoute(route.chain, route.term, route.counter, route.members, route.states, route.proposed)


def _target(route: proto.TargetRoute) -> TargetRoute:
    return TargetRoute(route.target, route.node, route.host, route.port, route.host_id, route.socket_path)

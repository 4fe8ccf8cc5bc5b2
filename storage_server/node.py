"""The running node: native server, heartbeats, configuration, lease. docs/control_plane.md, Heartbeats.

Native calls may block for as long as a flush takes: they run on one helper thread, in order. A
metadata service that can't be reached changes nothing here: the node goes on with what it has, under the
leases that its peers give it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

import msgspec

from ffs._native.routes import ChainRoute, TargetRoute
from ffs._native.server import NativeServer, ShardInfo, SpacePolicy, SpaceUse, clock_ms
from ffs.errors import Fenced, FfsError, NotFound
from ffs.proto import cluster as proto
from ffs.proto import spaces as space_proto
from ffs.proto.auth import KeySet, sign_capability
from ffs.proto.common import Capability, encode_capability
from ffs.rpc.caller import Caller
from storage_server.collector import Collector

log = logging.getLogger("ffs.storage")

ANNOUNCE_TIMEOUT_S: Final = 30.0
CALL_MIN_S: Final = 0.5  # a heartbeat is given up after the failure timeout, within these bounds
CALL_MAX_S: Final = 4.0
RETRY_MAX_S: Final = 0.25
BEAT_MIN_S: Final = 0.005  # between two heartbeats, however much news there is
POLL_MS: Final = 1500  # below ffs.rpc.caller's patience with one of several addresses
USE_S: Final = 1.0  # between two reports of what KV spaces hold,
USES_A_SECOND: Final = 2000  # or longer, so that no more than so many are told
NO_KEYS: Final = KeySet(revision=0, sign=0, keys=())
NO_SPACES: Final = space_proto.SpaceConfig(revision=(0, 0), policies=())
LEASE_PARTS: Final = (15, 16)  # of a lease that are used: the rest is for clocks that run apart

_REPORTS: Final = tuple[proto.TargetReport, ...]

T = TypeVar("T")


class Node:
    """Between `start` and `stop` it serves. One event loop. `poller`: a second way to the manager, for
    the request that waits there."""

    def __init__(
        self,
        caller: Caller,
        poller: Caller,
        native: NativeServer,
        node: int,
        incarnation: int,
        failure_timeout_ms: int,
    ) -> None:
        self._caller = caller
        self._poller = poller
        self._native = native
        self.id = node
        self.incarnation = incarnation
        self.manager_ms = 0
        self._timeout_s = failure_timeout_ms / 1000.0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ffs-native")
        self._config = proto.NodeConfig(number=(0, 0), epoch=0, chains=(), targets=())
        self._spaces = NO_SPACES
        self._keys = NO_KEYS
        self._tell_use_s = 0.0  # when to say again what KV spaces hold, on the loop's clock
        self._term = 0  # the highest that a manager has answered with
        self._fenced: set[int] = set()  # since the last heartbeat that was answered
        self._reachable = True
        self._news = asyncio.Event()
        self._configuring = asyncio.Lock()
        self._routes: tuple[proto.NodeConfig, tuple[ChainRoute, ...], tuple[TargetRoute, ...]] | None = None
        self.collector: Collector | None = None
        self._collector_routed = False  # it has been told where chains are
        self.heartbeats = 0
        self._sequence = 0  # of the last heartbeat that was sent
        self.refused_replies = 0  # of managers of an earlier term
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
            ANNOUNCE_TIMEOUT_S,
        )

    async def start(self) -> None:
        """The native server's threads; its devices have been added."""
        await self.native(self._native.start)
        self._started = True

    async def beat_until(self, stop: asyncio.Event) -> None:
        """Heartbeats until `stop`. Raises Fenced or NotFound when the cluster has another process, or
        none, under this node's name: then this one must end."""
        refused: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.add_reader(self._native.news_fd, self._on_news)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._beat_forever()), group.create_task(self._poll_forever())]
                await stop.wait()
                for task in tasks:
                    task.cancel()
        except* FfsError as found:
            refused += found.exceptions
        finally:
            loop.remove_reader(self._native.news_fd)
        if refused:
            raise refused[0]

    def _on_news(self) -> None:
        self._native.read_news()
        self._news.set()

    async def _beat_forever(self) -> None:
        """A heartbeat when the manager wants one, at least every quarter of the failure timeout, and at once
        when a target has news."""
        while True:
            self._news.clear()
            try:
                pause_s = await self._beat()
                self._heard()
            except (Fenced, NotFound):
                raise
            except FfsError as error:
                self._unheard(error)
                await asyncio.sleep(self._retry_s)
                continue
            await asyncio.sleep(min(pause_s, BEAT_MIN_S))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()

    async def _poll_forever(self) -> None:
        """Waits at the manager for another configuration. Whether this process may go on is for heartbeats
        to learn: here every refusal is only a reason to ask again later."""
        while True:
            request = proto.WaitConfig(
                node=self.id,
                incarnation=self.incarnation,
                config=self._config.number,
                wait_ms=POLL_MS,
                spaces=self._spaces.revision,
                keys=self._keys.revision,
            )
            try:
                reply = cast(
                    proto.WaitConfigReply,
                    await self._poller.call(request, POLL_MS / 1000.0 + self._call_timeout_s),
                )
            except FfsError as error:
                log.debug("no configuration to wait for: %s", error.message)
                await asyncio.sleep(self._retry_s)
                continue
            if not self._accepts(reply.term):
                await asyncio.sleep(self._retry_s)
                continue
            await self._take_keys(reply.keys)
            await self._take_spaces(reply.spaces)
            await self._take(reply.config)
            await self._fence(reply.fences)

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

    @property
    def _call_timeout_s(self) -> float:
        return min(CALL_MAX_S, max(CALL_MIN_S, self._timeout_s))

    @property
    def _retry_s(self) -> float:
        return min(RETRY_MAX_S, self._timeout_s / 8)

    async def _beat(self) -> float:
        """One heartbeat and what it asks for; how long to wait for the next, seconds."""
        reports = await self.native(self._native.report)
        use = await self._space_use()
        self._sequence += 1  # one that is held up on its way must not be taken for the latest
        fenced = tuple(self._fenced)
        asked_ms = clock_ms()  # a lease counts from here: before the manager could have given it
        reply = cast(
            proto.HeartbeatReply,
            await self._caller.call(
                proto.Heartbeat(
                    node=self.id,
                    incarnation=self.incarnation,
                    config=self._config.number,
                    reports=msgspec.convert(reports, _REPORTS),  # the same fields in the same order
                    fenced=fenced,
                    sequence=self._sequence,
                    spaces=self._spaces.revision,
                    space_use=use,
                    keys=self._keys.revision,
                ),
                self._call_timeout_s,
            ),
        )
        self.heartbeats += 1
        if not self._accepts(reply.term):
            return self._retry_s
        self._fenced.difference_update(fenced)
        self.manager_ms = max(self.manager_ms, reply.manager_ms)
        await self._take_keys(reply.keys)  # first: what serves must know which capabilities are genuine
        await self._take_spaces(reply.spaces)  # what serves must know what may be evicted
        if not await self._take(reply.config):
            await self._configure()  # again: manager time, and targets that were on their way out
        used, parts = LEASE_PARTS
        await self.native(self._native.lease, asked_ms + reply.lease_ms * used // parts)
        await self._fence(reply.fences)
        return 0.0 if reply.fences else min(self._timeout_s / 4, reply.next_ms / 1000.0)

    def _accepts(self, term: int) -> bool:
        """False: from a manager that has been followed by another one. Nothing of it counts."""
        if 0 < term < self._term:
            self.refused_replies += 1
            return False
        self._term = max(self._term, term)
        return True

    async def _take(self, config: proto.NodeConfig | None) -> bool:
        """Acts on a newer configuration, and has that reported at once. False: it is none."""
        if config is None or config.number <= self._config.number:
            return False
        self._config = config
        await self._configure()
        self._news.set()
        return True

    async def _take_keys(self, keys: KeySet | None) -> None:
        """Hands over newer signing keys, and has that known at once: the manager waits for it."""
        async with self._configuring:
            if keys is None or keys.revision <= self._keys.revision:
                return
            await self.native(self._native.set_keys, [(key.id, key.secret) for key in keys.keys])
            self._keys = keys
        if self.collector is not None:
            self.collector.renew()
        self._news.set()

    def sign(self, capability: Capability) -> bytes:
        """The bytes of a capability of this process itself; unsigned where there are no keys (yet). Any
        thread."""
        key = self._keys.signing_key()
        return encode_capability(capability) if key is None else sign_capability(capability, key)

    async def _take_spaces(self, spaces: space_proto.SpaceConfig | None) -> None:
        """Hands over newer policies of KV spaces. Until the first, nothing is evicted."""
        async with self._configuring:
            if spaces is None or spaces.revision <= self._spaces.revision:
                return
            await self.native(self._native.set_spaces, [_policy(policy) for policy in spaces.policies])
            self._spaces = spaces

    async def _space_use(self) -> tuple[space_proto.SpaceUse, ...]:
        """What targets hold of KV spaces, once a second, more seldom if there are many: () says nothing. What
        is being counted still isn't told."""
        now_s = asyncio.get_running_loop().time()
        if not self._spaces.policies or now_s < self._tell_use_s:
            return ()
        said = tuple(_use(use) for use in await self.native(self._native.space_use) if use.ready)
        self._tell_use_s = now_s + max(USE_S, len(said) / USES_A_SECOND)
        return said

    async def _fence(self, clients: Iterable[int]) -> None:
        for client in clients:
            if client not in self._fenced:
                await self.native(self._native.fence, client)
                self._fenced.add(client)
                self._news.set()

    async def _configure(self) -> None:
        """Hands over the newest configuration, one at a time: a target that one releases may be taken into a
        chain again by the next."""
        async with self._configuring:
            await self._hand_over(self._config)

    async def _hand_over(self, config: proto.NodeConfig) -> None:
        fresh = self._routes is None or self._routes[0] is not config
        if self._routes is None or fresh:
            chains = tuple(_chain(route) for route in config.chains)
            before = self._routes
            if before is not None and before[0].targets == config.targets:
                targets = before[2]  # places seldom change: what C has of them is kept
            else:
                targets = tuple(_target(route) for route in config.targets if route.port)
            self._routes = (config, chains, targets)
        _, chains, targets = self._routes
        await self.native(self._native.configure, config.epoch, self.manager_ms, chains, targets)
        for target in config.released:
            try:
                await self.native(self._native.release_target, target)
            except NotFound as error:  # its device has gone to another node since
                log.warning("not released here: %s", error.message)
        if self.collector is not None and (fresh or not self._collector_routed):
            recorded = [chain for chain in chains if not chain.proposed]
            self.collector.set_routing(config.epoch, recorded, targets)
            self._collector_routed = True

    def _heard(self) -> None:
        if not self._reachable:
            log.warning("the metadata service answers again")
            self._reachable = True

    def _unheard(self, error: FfsError) -> None:
        if self._reachable:
            log.warning("no heartbeat: %s; going on with the routing that there is", error.message)
            self._reachable = False


def _policy(policy: space_proto.SpacePolicy) -> SpacePolicy:
    return SpacePolicy(
        space=policy.space,
        chain=policy.chain,
        quota_bytes=policy.quota_bytes,
        ttl_ms=policy.ttl_ms,
        evictable=bool(policy.flags & space_proto.SPACE_EVICTABLE),
        dedup=bool(policy.flags & space_proto.SPACE_DEDUP),
    )


def _use(use: SpaceUse) -> space_proto.SpaceUse:
    return space_proto.SpaceUse(
        target=use.target,
        space=use.space,
        chunks=use.chunks,
        bytes=use.bytes,
        evicted_chunks=use.evicted_chunks,
        evicted_bytes=use.evicted_bytes,
        hits=use.hits,
        expired_chunks=use.expired_chunks,
        shared_chunks=use.shared_chunks,
        saved_bytes=use.saved_bytes,
    )


def _chain(route: proto.ChainRoute) -> ChainRoute:
    return ChainRoute(
        route.chain,
        route.term,
        route.counter,
        route.members,
        route.states,
        route.proposed,
        route.incarnations,
    )


def _target(route: proto.TargetRoute) -> TargetRoute:
    return TargetRoute(
        route.target,
        route.node,
        route.host,
        route.port,
        route.host_id,
        route.socket_path,
        away=not route.alive,
    )

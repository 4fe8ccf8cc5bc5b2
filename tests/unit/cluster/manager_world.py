"""A cluster manager over a real store, with nodes that keep what a native server keeps.

Everything but sockets and disks is real: lease, registry, routing, decisions. Nodes persist and
adopt what their NodeConfig says, as docs/control_plane.md has it. A sync is done as soon as it begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ffs.proto import cluster as proto
from ffs.proto.spaces import SpaceConfig, SpaceUse
from ffs.rpc.handshake import Peer
from metadata.cluster.clock import ManagerClock
from metadata.cluster.lease import Lease
from metadata.cluster.manager import Manager
from metadata.cluster.routing import RoutingCache
from metadata.kv.contract import Store
from metadata.kv.memory import MemoryStore

CLUSTER = b"c" * 16
TIMEOUT_S = 5.0
NO_SPACES = SpaceConfig(revision=(0, 0), policies=())
STORAGE = Peer("storage", "n", 0, 0, 1, False)
CLIENT = Peer("client", "c", 0, 0, 1, False)


class Process:
    """A metadata process without its sockets."""

    def __init__(self, store: Store, name: str = "m1:1") -> None:
        self.clock = ManagerClock()
        self.lease = Lease(store, self.clock, name, duration_ms=1000, grants_ms=int(TIMEOUT_S * 1000))
        self.routing = RoutingCache(store, self.clock)
        self.offset_s = 0.0
        self.manager = Manager(
            store,
            self.lease,
            self.clock,
            self.routing,
            cluster=CLUSTER,
            failure_timeout_s=TIMEOUT_S,
            now_s=self.now_s,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Process:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.lease.run()),
            loop.create_task(self.routing.poll()),
            loop.create_task(self.manager.run()),
        ]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
        self._tasks = []

    async def kill(self) -> None:
        """Without releasing the lease."""
        self.lease._release = _nothing  # type: ignore[method-assign]
        await self.stop()

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() + self.offset_s

    async def passes(self, seconds: float, beating: Iterable[SimNode] = ()) -> None:
        """Time goes by, in steps that the manager doesn't take for stalls of its own; these nodes beat."""
        steps = int(seconds / TIMEOUT_S * 10) + 1
        for _ in range(steps):
            self.offset_s += seconds / steps
            self.manager._presences.tick(self.now_s())
            for node in beating:
                await node.beat(self)
            self.manager._judge_presence()
            await self.manager._store_presence()

    async def ask(self, request: Any, peer: Peer = STORAGE) -> Any:
        reply = self.manager.handle_now(peer, request)
        return reply if reply is not None else await self.manager.handle(peer, request)


async def _nothing() -> None:
    pass


@dataclass
class Target:
    chain: int = 0
    persisted: tuple[int, int] = (0, 0)
    here: bool = False
    acts: tuple[int, int] = (0, 0)
    state: int = 0
    reason: int = 0
    suspect: int = 0
    fills: int = 0  # the member that it is the source for
    stuck: bool = False  # its disk doesn't answer

    def restarted(self) -> Target:
        return Target(chain=self.chain, persisted=self.persisted)

    def leave_behind(self) -> None:
        """Its device was formatted anew."""
        self.chain, self.persisted = 0, (0, 0)


@dataclass
class SimNode:
    """A storage process: `targets` is its device and survives a restart; the rest doesn't."""

    name: str
    uuid: bytes
    device: bytes
    targets: dict[int, Target] = field(default_factory=dict)
    id: int = 0
    incarnation: int = 0
    config: tuple[int, int] = (0, 0)
    fenced: tuple[int, ...] = ()
    fences: set[int] = field(default_factory=set)
    poisoned: bool = False
    fills_at_once: bool = True  # a sync is done by the next heartbeat
    sequence: int = 0
    lease_ms: int = -1  # of the last reply
    released: set[int] = field(default_factory=set)  # that it was ever told to drop
    domain: str = ""
    role: str = ""
    free_bytes: int = 1 << 29
    takes_spaces: bool = True  # False: a version before policies
    spaces: SpaceConfig = NO_SPACES
    told: int = 0  # how many SpaceConfigs it was sent in this incarnation
    use: dict[tuple[int, int], SpaceUse] = field(default_factory=dict)  # (target, space)

    async def start(self, process: Process, count: int = 4) -> None:
        if not self.targets:
            reply = await process.ask(
                proto.AllocateTargets(
                    node_uuid=self.uuid, node_name=self.name, device_uuid=self.device, count=count
                )
            )
            self.targets = {target: Target() for target in reply.targets}
        self.targets = {ident: target.restarted() for ident, target in self.targets.items()}
        self.config, self.fenced, self.fences, self.sequence = (0, 0), (), set(), 0
        self.spaces, self.told = NO_SPACES, 0
        registered = await process.ask(
            proto.RegisterNode(
                name=self.name,
                uuid=self.uuid,
                host_id="h",
                devices=(
                    proto.DeviceInfo(
                        uuid=self.device,
                        path="/dev/x",
                        size_bytes=1 << 30,
                        targets=tuple(self.targets),
                        role=self.role,
                    ),
                ),
                domain=self.domain,
            )
        )
        self.id, self.incarnation = registered.node, registered.incarnation
        await process.ask(
            proto.AnnounceNode(
                node=self.id,
                incarnation=self.incarnation,
                host="127.0.0.1",
                control="127.0.0.1:9",
                endpoints=tuple(proto.TargetEndpoint(target, 1000 + target, "") for target in self.targets),
            )
        )

    def heartbeat(self) -> proto.Heartbeat:
        self.sequence += 1
        return proto.Heartbeat(
            node=self.id,
            incarnation=self.incarnation,
            config=self.config,
            reports=tuple(self.report(ident) for ident in self.targets),
            fenced=self.fenced,
            sequence=self.sequence,
            spaces=self.spaces.revision if self.takes_spaces else None,
            space_use=tuple(self.use.values()),
        )

    def report(self, ident: int) -> proto.TargetReport:
        target = self.targets[ident]
        return proto.TargetReport(
            target=ident,
            chain=target.chain,
            recorded_term=target.acts[0],
            recorded_counter=target.acts[1],
            persisted_term=target.persisted[0],
            persisted_counter=target.persisted[1],
            persisted_here=target.here,
            state=target.state,
            reason=target.reason,
            suspect=target.suspect,
            sync_target=target.fills,
            sync_done=bool(target.fills) and self.fills_at_once,
            poisoned=self.poisoned,
            used_bytes=0,
            capacity_bytes=1 << 30,
            free_bytes=self.free_bytes,
            chunks=0,
        )

    async def beat(self, process: Process) -> proto.HeartbeatReply:
        return self.hear(await process.ask(self.heartbeat()))

    def beat_now(self, process: Process) -> None:
        """Before anything else of the process runs."""
        reply = process.manager.handle_now(STORAGE, self.heartbeat())
        assert isinstance(reply, proto.HeartbeatReply), reply
        self.hear(reply)

    def hear(self, reply: proto.HeartbeatReply) -> proto.HeartbeatReply:
        assert isinstance(reply, proto.HeartbeatReply)
        self.fenced = reply.fences
        self.fences.update(reply.fences)
        if reply.spaces is not None:
            self.take_spaces(reply.spaces)
        if reply.config is not None:
            self.act_on(reply.config)
        self.lease_ms = reply.lease_ms
        return reply

    def take_spaces(self, spaces: SpaceConfig) -> None:
        assert spaces.revision > self.spaces.revision
        self.spaces = spaces
        self.told += 1

    def act_on(self, config: proto.NodeConfig) -> None:
        self.config = config.number
        for route in config.chains:
            self.take(route)
        for ident in config.released:
            self.released.add(ident)
            self.targets[ident] = Target()

    def take(self, route: proto.ChainRoute) -> None:
        version = (route.term, route.counter)
        for at, member in enumerate(route.members):
            target = self.targets.get(member)
            if target is None or target.stuck:
                continue
            state = route.states[at]
            if state:
                assert route.incarnations[at] == self.incarnation, route
            target.chain = route.chain
            if route.proposed:
                if version > target.persisted:
                    target.persisted, target.here = version, True
                    if not state:
                        target.state, target.reason = 0, 11  # stands down
            elif version > target.acts and (not state or (target.here and target.persisted >= version)):
                target.acts, target.state, target.reason, target.suspect = version, state, 0, 0
                target.fills = route.members[at + 1] if route.states[at : at + 2] == (1, 2) else 0


def nodes(count: int) -> list[SimNode]:
    return [SimNode(f"n{at}", bytes([at + 1]) * 16, bytes([at + 101]) * 16) for at in range(count)]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 - heartbeats are sent in it
            await asyncio.sleep(0.005)


async def until_serving(process: Process, alive: list[SimNode]) -> None:
    async def serving() -> bool:
        for node in alive:
            await node.beat(process)
        status = await process.ask(proto.GetStatus())
        return bool(status.chains) and all(chain.writable for chain in status.chains)

    await until(serving)


async def until_primary(process: Process) -> None:
    async def primary() -> bool:
        return process.lease.primary

    await until(primary)


@contextlib.asynccontextmanager
async def cluster(count: int = 3, replicas: int = 3) -> AsyncIterator[tuple[Process, list[SimNode], Store]]:
    store = MemoryStore()
    async with Process(store) as process:
        await until_primary(process)
        all_nodes = nodes(count)
        for node in all_nodes:
            await node.start(process)
        await process.ask(proto.CreateTable(name="default", replicas=replicas, chains_per_device=4), CLIENT)
        await until_serving(process, all_nodes)
        yield process, all_nodes, store
    await store.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_coroutine(test), 60))


async def _coroutine(test: Callable[[], Awaitable[None]]) -> None:
    await test()

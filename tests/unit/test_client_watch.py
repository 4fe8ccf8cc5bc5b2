"""Routing that is pushed: a scripted metadata service, and what a client makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest

from ffs.client.caller import Caller
from ffs.client.connection import ConnectionOptions, Link
from ffs.client.retry import Policy
from ffs.client.routing import Routing
from ffs.client.watch import Watch
from ffs.errors import ShutDown
from ffs.proto.cluster import ChainRoute, GetRouting, RoutingReply, TargetRoute
from ffs.proto.common import Message
from ffs.rpc.address import Address
from ffs.rpc.handshake import Peer
from ffs.rpc.server import Server

CLUSTER = bytes(range(16))


def reply(epoch: int, states: tuple[int, ...] = (1, 1), alive: bool = True) -> RoutingReply:
    chain = ChainRoute(chain=3, table=1, term=1, counter=epoch, members=(31, 32), states=states)
    targets = tuple(
        TargetRoute(target=t, node=t - 30, host="127.0.0.1", host_id="", socket_path="", port=1, alive=alive)
        for t in chain.members
    )
    return RoutingReply(epoch=epoch, changed=True, chains=(chain,), targets=targets)


class Service:
    """Answers GetRouting as a metadata service does: a change at once, else after wait_ms."""

    def __init__(self) -> None:
        self.now = reply(1)
        self.asked = 0
        self.patient = True
        self.hung = False
        self.changed = asyncio.Event()
        self.resumed = asyncio.Event()

    def handle_now(self, peer: Peer, request: Message) -> Message | None:
        return None

    async def handle(self, peer: Peer, request: Message) -> Message:
        assert isinstance(request, GetRouting)
        self.asked += 1
        while self.hung:
            await asyncio.wait_for(self.resumed.wait(), 60)
        if self.now.epoch == request.known_epoch and self.patient:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), request.wait_ms / 1000)
        if self.now.epoch == request.known_epoch:
            return RoutingReply(epoch=request.known_epoch, changed=False)
        return self.now

    def cancellable(self, request: Message) -> bool:
        return True

    def set(self, new: RoutingReply) -> None:
        self.now = new
        self.changed.set()
        self.changed = asyncio.Event()


class Running:
    """A service on a thread of its own."""

    def __init__(self) -> None:
        self.service = Service()
        self.links: list[Link] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._started.wait(5)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with Server(
            self.service, ("127.0.0.1", 0), cluster=CLUSTER, secret=None, name="scripted"
        ) as server:
            self.address: Address = ("127.0.0.1", server.address[1])
            self._started.set()
            await self._stop.wait()
        for _ in range(500):  # its transports end in turns of the loop to come
            if not server._connections:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    def call(self, work: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(work)

    def end(self) -> None:
        for link in self.links:
            link.close()
        if self._thread.is_alive():
            self.call(self._stop.set)
            self._thread.join(30)
            # asyncio drops a connection that it accepts in the moment of its end.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()


@pytest.fixture
def services() -> Iterator[list[Running]]:
    running = [Running(), Running()]
    try:
        yield running
    finally:
        for one in running:
            one.service.hung = False
            if one._thread.is_alive():
                one.call(one.service.resumed.set)
            one.end()


def watching(*services: Running) -> tuple[Routing, Watch, list[int]]:
    options = ConnectionOptions(name="test")
    servers = tuple(one.address for one in services)
    link = Link(servers, CLUSTER, options)
    services[0].links.append(link)
    routing = Routing(Caller(link, Policy()))
    told: list[int] = []
    routing.subscribe(lambda epoch, chains, targets: told.append(epoch))
    watch = Watch(servers, routing, options)
    watch.start(CLUSTER)
    return routing, watch, told


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't come to that"
        time.sleep(0.005)


def threads() -> int:
    return sum(thread.name == "ffs-routing" for thread in threading.enumerate())


def test_a_change_is_pushed_and_nobody_asks_in_between(services: list[Running]) -> None:
    routing, watch, told = watching(services[0])
    until(lambda: services[0].service.asked >= 2)  # the first fetch, then it waits
    for epoch in (2, 3, 7):
        services[0].call(lambda epoch=epoch: services[0].service.set(reply(epoch)))  # type: ignore[misc]
        until(lambda epoch=epoch: routing.epoch == epoch)  # type: ignore[misc]
    until(lambda: services[0].service.asked == 5)
    assert told == [1, 2, 3, 7]
    watch.close()
    assert threads() == 0
    services[0].call(lambda: services[0].service.set(reply(8)))
    assert told == [1, 2, 3, 7]


def test_a_service_that_stands_still_holds_up_nothing(services: list[Running]) -> None:
    """A stopped metadata process is connected and silent; the other one's news come through."""
    first, second = services
    routing, watch, _told = watching(first, second)
    until(lambda: first.service.asked + second.service.asked >= 3)
    first.service.hung = True
    second.call(lambda: second.service.set(reply(2)))
    until(lambda: routing.epoch == 2)
    assert watch.in_contact
    watch.close()
    assert threads() == 0


def test_older_news_change_nothing_and_make_nobody_spin(services: list[Running]) -> None:
    first, second = services
    first.service.now = reply(5)
    routing, watch, told = watching(first, second)  # the second service lags: it knows epoch 1
    until(lambda: second.service.asked >= 1)
    before = second.service.asked
    time.sleep(0.5)
    assert second.service.asked - before < 20
    assert routing.epoch == 5
    second.service.patient = False  # answers at once that nothing is new
    second.service.now = reply(5)
    before = second.service.asked
    time.sleep(0.5)
    assert second.service.asked - before < 20
    watch.close()
    assert told == [5]


def test_it_comes_back_when_the_service_does(services: list[Running]) -> None:
    routing, watch, _told = watching(services[0])
    services[0].end()
    until(lambda: not watch.in_contact)
    for _ in range(1000):
        watch.hurry()  # many requests wait: that makes no storm
    assert threads() == 1
    assert routing.epoch == 1
    watch.close()
    assert threads() == 0


def test_a_watch_that_is_closed_before_it_began(services: list[Running]) -> None:
    watch = Watch(
        (services[0].address,),
        Routing(Caller(Link((), CLUSTER, ConnectionOptions()), Policy())),
        ConnectionOptions(),
    )
    watch.close()
    watch.start(CLUSTER)
    assert threads() == 0


def test_after_unsubscribing_nothing_is_told(services: list[Running]) -> None:
    routing, watch, told = watching(services[0])
    routing.unsubscribe()
    services[0].call(lambda: services[0].service.set(reply(2)))
    until(lambda: routing.epoch == 2)
    assert told == [1]
    watch.close()


def test_a_child_of_fork_closes_its_copy_quietly(services: list[Running]) -> None:
    routing, watch, _told = watching(services[0])
    until(lambda: services[0].service.asked >= 2)
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            watch.abandon()
            code = 0
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    services[0].call(lambda: services[0].service.set(reply(2)))
    until(lambda: routing.epoch == 2)  # the parent's connection is what it was
    assert services[0].service.asked == 3 or watch.in_contact
    watch.close()


def test_a_chain_is_described(services: list[Running]) -> None:
    services[0].service.now = reply(4, states=(1, 0), alive=False)
    routing, watch, _told = watching(services[0])
    text = routing.describe_chain(3)
    assert "chain 3 (version 1.4" in text
    assert "target 31 on node id 1: serving, its node isn't there" in text
    assert "target 32 on node id 2: offline" in text
    assert "unknown" in routing.describe_chain(99)
    watch.close()


def test_a_subscriber_that_is_gone_is_an_error_of_its_own(services: list[Running]) -> None:
    """Session.close unsubscribes before it frees the native client; nothing hides if it didn't."""
    routing, watch, _told = watching(services[0])
    watch.close()

    def gone(epoch: int, chains: object, targets: object) -> None:
        raise ShutDown("gone")

    with pytest.raises(ShutDown):
        routing.subscribe(gone)

"""storage_server.node against a manager and a native server that are played here: what a heartbeat says, when
the next one comes, and what is taken from which manager."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, cast

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from ffs._native.server import NativeServer, SpacePolicy, SpaceUse, TargetReport, clock_ms
from ffs.errors import Fenced, NotFound, Unreachable
from ffs.proto import cluster as proto
from ffs.proto import spaces as space_proto
from ffs.proto.common import Message
from ffs.rpc.caller import Caller
from storage_server.node import Node

TIMEOUT_MS = 1000


class FakeNative:
    """The calls that a node makes, in order; `calls` holds them but for report."""

    def __init__(self) -> None:
        self.news_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.calls: list[tuple[Any, ...]] = []
        self.unknown: set[int] = set()
        self.use: list[SpaceUse] = []

    def report(self) -> list[TargetReport]:
        flags = ("persisted_here", "poisoned", "leased", "sync_done")
        zeros: dict[str, Any] = {name: False if name in flags else 0 for name in TargetReport._fields}
        return [TargetReport(**zeros | {"target": 7, "leased": True})]

    def read_news(self) -> None:
        os.eventfd_read(self.news_fd)

    def lease(self, until_ms: int) -> None:
        self.calls.append(("lease", until_ms))

    def configure(self, epoch: int, manager_ms: int, chains: Any, targets: Any) -> None:
        self.calls.append(("configure", epoch, manager_ms, chains, targets))

    def release_target(self, target: int) -> None:
        if target in self.unknown:
            raise NotFound(f"target {target}")
        self.calls.append(("release", target))

    def set_spaces(self, policies: list[SpacePolicy]) -> None:
        self.calls.append(("spaces", policies))

    def space_use(self) -> list[SpaceUse]:
        return self.use

    def fence(self, client: int) -> None:
        self.calls.append(("fence", client))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]


Answer = Callable[[Any], Message]


class FakeManager:
    """Both callers of a node. `heartbeat` and `wait` are the answers; a WaitConfig without one waits."""

    def __init__(self) -> None:
        self.beats: list[proto.Heartbeat] = []
        self.polls: list[proto.WaitConfig] = []
        self.heartbeat: Answer = lambda _: reply()
        self.wait: Answer | None = None

    async def call(self, request: Message, timeout_s: float) -> Message:
        if isinstance(request, proto.Heartbeat):
            self.beats.append(request)
            return self.heartbeat(request)
        assert isinstance(request, proto.WaitConfig)
        self.polls.append(request)
        if self.wait is None:
            await asyncio.Event().wait()
        assert self.wait is not None
        await asyncio.sleep(0.001)
        return self.wait(request)


def reply(**fields: Any) -> proto.HeartbeatReply:
    values: dict[str, Any] = {"manager_ms": 5, "next_ms": 60_000, "lease_ms": 0}
    return proto.HeartbeatReply(**values | fields)


def config(number: tuple[int, int], **fields: Any) -> proto.NodeConfig:
    chain = proto.ChainRoute(
        chain=3, table=1, term=2, counter=9, members=(7, 8), states=(1, 2), incarnations=(4, 5)
    )
    values: dict[str, Any] = {"number": number, "epoch": 11, "chains": (chain,), "targets": ()}
    return proto.NodeConfig(**values | fields)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.002)


def drive(body: Callable[[FakeManager, FakeNative], Any], *, before: Callable[[FakeManager], None]) -> None:
    """Runs a node's heartbeats with `body` beside them, which ends the test."""

    async def main() -> None:
        manager, native = FakeManager(), FakeNative()
        before(manager)
        caller = cast(Caller, manager)
        node = Node(caller, caller, cast(NativeServer, native), 2, 6, TIMEOUT_MS)
        stop = asyncio.Event()
        beating = asyncio.create_task(node.beat_until(stop))
        acting = asyncio.create_task(body(manager, native))
        done, _ = await asyncio.wait([beating, acting], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
        stop.set()
        await beating
        await acting
        os.close(native.news_fd)
        # One that is held up on its way can be told from the latest.
        assert [beat.sequence for beat in manager.beats] == list(range(1, len(manager.beats) + 1))

    asyncio.run(main())


def test_a_lease_counts_from_before_it_was_asked_for_less_a_margin() -> None:
    before_ms = clock_ms()

    async def body(manager: FakeManager, native: FakeNative) -> None:
        await until(lambda: bool(native.of("lease")))
        (until_ms,) = native.of("lease")[0]
        assert before_ms + 1500 <= until_ms <= clock_ms() + 1500

    drive(body, before=lambda m: setattr(m, "heartbeat", lambda _: reply(lease_ms=1600)))


def test_heartbeats_come_every_quarter_of_the_timeout_whatever_the_manager_says() -> None:
    async def body(manager: FakeManager, native: FakeNative) -> None:
        await until(lambda: len(manager.beats) >= 4)
        assert manager.beats[0].reports[0].target == 7
        assert manager.beats[0].reports[0].leased is True

    drive(body, before=lambda m: setattr(m, "heartbeat", lambda _: reply(next_ms=3_600_000)))


def test_news_is_told_at_once() -> None:
    async def main() -> None:
        manager, native = FakeManager(), FakeNative()
        caller = cast(Caller, manager)
        node = Node(caller, caller, cast(NativeServer, native), 2, 6, 4 * 3600 * 1000)  # next one in an hour
        manager.heartbeat = lambda _: reply(next_ms=3_600_000)
        stop = asyncio.Event()
        beating = asyncio.create_task(node.beat_until(stop))
        await until(lambda: len(manager.beats) == 1)
        os.eventfd_write(native.news_fd, 1)
        await until(lambda: len(manager.beats) == 2)
        stop.set()
        await beating
        os.close(native.news_fd)

    asyncio.run(main())


def test_a_configuration_that_is_waited_for_is_applied_and_reported() -> None:
    def answer(request: proto.WaitConfig) -> Message:
        if request.config == (3, 1):
            raise Unreachable("gone")
        return proto.WaitConfigReply(config=config((3, 1), released=(7, 9)), fences=(44,), term=3)

    def before(manager: FakeManager) -> None:
        manager.wait = answer
        manager.heartbeat = lambda _: reply(next_ms=3_600_000)

    async def body(manager: FakeManager, native: FakeNative) -> None:
        native.unknown.add(9)
        await until(lambda: bool(manager.beats) and manager.beats[-1].config == (3, 1))
        chains = next(call[2] for call in native.of("configure") if call[2])
        assert (chains[0].chain, chains[0].members, chains[0].incarnations) == (3, (7, 8), (4, 5))
        assert (7,) in native.of("release")
        await until(lambda: any(44 in beat.fenced for beat in manager.beats))
        assert native.of("fence") == [(44,)]

    drive(body, before=before)


def test_nothing_is_taken_from_a_manager_that_was_followed_by_another() -> None:
    def answer(beat: proto.Heartbeat) -> Message:
        if beat.config == (0, 0):
            return reply(term=5, config=config((5, 1)), next_ms=20)
        return reply(term=4, config=config((4, 99)), lease_ms=99_999_000, fences=(1,), next_ms=20)

    async def body(manager: FakeManager, native: FakeNative) -> None:
        await until(lambda: len(manager.beats) >= 4)
        assert manager.beats[-1].config == (5, 1)
        assert all(until_ms < clock_ms() + 60_000 for (until_ms,) in native.of("lease"))
        assert native.of("fence") == []

    drive(body, before=lambda m: setattr(m, "heartbeat", answer))


def test_an_older_configuration_of_the_same_manager_changes_nothing() -> None:
    answers = iter([config((5, 2)), config((5, 1), epoch=77), None])

    async def body(manager: FakeManager, native: FakeNative) -> None:
        await until(lambda: len(manager.beats) >= 3)
        assert manager.beats[-1].config == (5, 2)
        assert all(call[0] == 11 for call in native.of("configure"))

    drive(
        body,
        before=lambda m: setattr(
            m, "heartbeat", lambda _: reply(term=5, config=next(answers, None), next_ms=20)
        ),
    )


def test_a_node_goes_on_without_a_manager_and_comes_back() -> None:
    down = [True]

    def answer(_: proto.Heartbeat) -> Message:
        if down[0]:
            raise Unreachable("no manager")
        return reply(lease_ms=1600)

    async def body(manager: FakeManager, native: FakeNative) -> None:
        await until(lambda: len(manager.beats) >= 3)
        assert native.calls == []
        down[0] = False
        await until(lambda: bool(native.of("lease")))

    drive(body, before=lambda m: setattr(m, "heartbeat", answer))


def test_a_process_that_was_replaced_ends() -> None:
    def answer(_: proto.Heartbeat) -> Message:
        raise Fenced("incarnation 6 of node 2 is over")

    async def body(manager: FakeManager, native: FakeNative) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Fenced):
        drive(body, before=lambda m: setattr(m, "heartbeat", answer))


# --- KV spaces -----------------------------------------------------------------------------------------


def spaces(revision: tuple[int, int], quota: int = 100) -> space_proto.SpaceConfig:
    policy = space_proto.SpacePolicy(
        space=50, chain=3, quota_bytes=quota, ttl_ms=9, flags=space_proto.SPACE_EVICTABLE
    )
    kept = space_proto.SpacePolicy(space=51, chain=3)
    return space_proto.SpaceConfig(revision=revision, policies=(policy, kept))


def test_policies_are_taken_up_before_the_configuration_and_the_lease() -> None:
    async def body(manager: FakeManager, native: FakeNative) -> None:
        await until(lambda: bool(native.of("lease")))
        assert [call[0] for call in native.calls] == ["spaces", "configure", "lease"]
        evictable, kept = native.of("spaces")[0][0]
        assert (evictable.space, evictable.chain, evictable.quota_bytes, evictable.ttl_ms) == (50, 3, 100, 9)
        assert (evictable.evictable, kept.evictable) == (True, False)
        assert manager.beats[0].spaces == (0, 0)  # a started process knows none

    first = reply(spaces=spaces((1, 4)), config=config((1, 1)), lease_ms=1600)
    drive(body, before=lambda m: setattr(m, "heartbeat", lambda _: first))


def test_newer_policies_replace_older_ones_and_never_the_other_way() -> None:
    replies = [spaces((1, 4)), spaces((1, 3), quota=1), None, spaces((1, 4)), spaces((2, 1), quota=7)]

    async def body(manager: FakeManager, native: FakeNative) -> None:
        await until(lambda: len(manager.beats) > len(replies) + 1)
        taken = [policies[0].quota_bytes for (policies,) in native.of("spaces")]
        assert taken == [100, 7]
        assert manager.beats[-1].spaces == (2, 1)

    def answer(beat: proto.Heartbeat) -> proto.HeartbeatReply:
        at = beat.sequence - 1
        return reply(spaces=replies[at] if at < len(replies) else None, fences=(beat.sequence,))

    drive(body, before=lambda m: setattr(m, "heartbeat", answer))


def test_the_long_poll_brings_policies_and_names_those_that_it_has() -> None:
    async def body(manager: FakeManager, native: FakeNative) -> None:
        await until(lambda: len(manager.polls) > 3)
        assert [poll.spaces for poll in manager.polls[:2]] == [(0, 0), (1, 8)]
        assert len(native.of("spaces")) == 1

    answer = proto.WaitConfigReply(term=1, spaces=spaces((1, 8)))
    drive(body, before=lambda m: setattr(m, "wait", lambda _: answer))


def test_a_deposed_managers_policies_are_not_taken() -> None:
    async def body(manager: FakeManager, native: FakeNative) -> None:
        await until(lambda: len(manager.beats) >= 3)
        assert [policies[0].quota_bytes for (policies,) in native.of("spaces")] == [100]

    def answer(beat: proto.Heartbeat) -> proto.HeartbeatReply:
        if beat.sequence == 1:
            return reply(term=5, spaces=spaces((5, 1)), fences=(1,))
        return reply(term=4, spaces=spaces((9, 1), quota=1), fences=(2,))

    drive(body, before=lambda m: setattr(m, "heartbeat", answer))


def test_use_is_told_of_what_has_been_counted_once_a_second_at_most() -> None:
    def use(space: int, *, ready: bool) -> SpaceUse:
        return SpaceUse(7, space, 3, 300, 2, 200, 9, 5, ready, 2, 128)

    async def body(manager: FakeManager, native: FakeNative) -> None:
        native.use = [use(50, ready=True), use(51, ready=False)]
        await until(lambda: len(manager.beats) >= 8)
        told = [beat.space_use for beat in manager.beats if beat.space_use]
        assert manager.beats[0].space_use == ()  # no policy, nothing to tell
        assert told[0] == (
            space_proto.SpaceUse(
                target=7,
                space=50,
                chunks=3,
                bytes=300,
                evicted_chunks=2,
                evicted_bytes=200,
                hits=9,
                expired_chunks=5,
                shared_chunks=2,
                saved_bytes=128,
            ),
        )
        assert len(told) < len(manager.beats) - 1

    def answer(beat: proto.Heartbeat) -> proto.HeartbeatReply:
        return reply(spaces=spaces((1, 4)) if beat.sequence == 1 else None, fences=(beat.sequence,))

    drive(body, before=lambda m: setattr(m, "heartbeat", answer))

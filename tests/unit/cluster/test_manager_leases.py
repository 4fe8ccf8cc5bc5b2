"""The cluster manager's leases: who has one, who must wait, takeovers, stalls and clocks."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from chain_states import until_states
from manager_world import STORAGE, TIMEOUT_S, Process, cluster, run, until, until_primary

from ffs.errors import NotPrimary, OutcomeUnknown
from ffs.proto import cluster as proto
from metadata.cluster.members import serving_of


def test_heartbeats_give_leases_and_say_when_to_come_again() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):

            async def steady() -> bool:
                reply = await all_nodes[0].beat(process)
                return (reply.next_ms, reply.lease_ms, reply.term) == (1250, 5000, process.lease.term)

            await until(steady)
            registered = await process.ask(
                proto.RegisterNode(name="new", uuid=b"n" * 16, host_id="", devices=(), domain="rack 1")
            )
            assert registered.failure_timeout_ms == 5000
            assert process.routing.view.nodes[registered.node].domain == "rack 1"

    run(body)


def test_a_registration_that_is_sent_again_is_one_start() -> None:
    """Its first answer was lost, or it was held up in a stopped manager. A second incarnation would refuse
    the process that has the first."""

    async def body() -> None:
        async with cluster() as (process, _, _):
            request = proto.RegisterNode(
                name="new", uuid=b"n" * 16, host_id="", devices=(), start=b"first".ljust(16, b"-")
            )
            first = await process.ask(request)
            again = await process.ask(request)
            assert (again.node, again.incarnation) == (first.node, first.incarnation)
            request.start = b"second".ljust(16, b"-")
            second = await process.ask(request)
            assert (second.node, second.incarnation) == (first.node, first.incarnation + 1)

    run(body)


def test_no_lease_while_another_may_be_the_manager() -> None:
    """It was stopped, and goes on before it has noticed. It has nothing to say, and counts nobody as told."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            ahead = process.lease._now_s

            async def steady() -> bool:
                return (await all_nodes[0].beat(process)).config is None and all_nodes[0].lease_ms > 0

            await until(steady)

            async def stopped() -> None:
                pass

            process.lease._renew = stopped  # type: ignore[method-assign]
            process.lease._now_s = lambda: ahead() + 0.95
            reply = await all_nodes[0].beat(process)
            assert (reply.lease_ms, reply.config, reply.fences) == (0, None, ())
            one = all_nodes[0]
            wait = proto.WaitConfig(node=one.id, incarnation=one.incarnation, config=one.config, wait_ms=50)
            with pytest.raises(NotPrimary):
                await process.ask(wait)

    run(body)


def test_no_lease_for_what_is_being_left_out() -> None:
    """A node is heard again while the record that leaves it out is on its way to the store."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _store):
            gate = asyncio.Event()
            made = process.manager._registry.record_chains

            async def slow(batch: Any) -> Any:
                await gate.wait()
                return await made(batch)

            process.manager._registry.record_chains = slow  # type: ignore[method-assign]
            await process.passes(TIMEOUT_S * 1.2, all_nodes[:2])

            async def under_way() -> bool:
                for node in all_nodes[:2]:
                    await node.beat(process)
                return bool(process.manager._chains.in_flight)

            await until(under_way)
            late = all_nodes[2]
            reply = await late.beat(process)
            assert reply.lease_ms == 0
            assert all(t.acts == (1, 1) for t in late.targets.values() if t.chain)  # it acts in what was
            gate.set()

            async def told() -> bool:
                for node in all_nodes:
                    await node.beat(process)
                return late.lease_ms > 0

            await until(told)
            flown = [t.acts for t in late.targets.values() if t.chain]
            assert all(version > (1, 1) for version in flown), flown  # the lease came with the news

    run(body)


def test_a_record_of_unknown_outcome_is_waited_for_until_it_cant_happen_any_more() -> None:
    """The store loses the answer of a commit. Nobody that it leaves out has a lease until the manager's
    own has been renewed: then it has been committed, or never will be."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            made = process.manager._registry.record_chains
            lost: list[int] = []

            async def loses(batch: Any) -> Any:
                done = await made(batch)
                if not lost:
                    lost.append(len(done))
                    raise OutcomeUnknown("the store's answer was lost")
                return done

            process.manager._registry.record_chains = loses  # type: ignore[method-assign]
            await process.passes(TIMEOUT_S * 1.2, all_nodes[:2])

            async def doubtful() -> bool:
                for node in all_nodes[:2]:
                    await node.beat(process)
                return bool(lost)

            await until(doubtful)
            renewals = process.lease.renewals
            if process.manager._chains.in_flight:
                assert (await all_nodes[2].beat(process)).lease_ms == 0
            await until_states(process, all_nodes[:2], "sso", "ssy", "sss")
            assert process.lease.renewals > renewals - 1
            await until_states(process, all_nodes, "sss")

    run(body)


def test_a_new_manager_counts_from_its_takeover() -> None:
    """Whom the old one answered last isn't known: all are waited for, for the longer of both timeouts."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, store):
            await process.kill()
            async with Process(store, "m2:1") as second:
                second.lease._dead = lambda record: False  # type: ignore[method-assign,assignment]
                await until_primary(second)
                assert second.lease.earlier_grants_ms == TIMEOUT_S * 1000
                for node in all_nodes[:2]:
                    await node.beat(second)
                before = {c.id: serving_of(c) for c in second.routing.view.chains.values()}
                await second.passes(TIMEOUT_S * 0.7, all_nodes[:2])
                assert {c.id: serving_of(c) for c in second.routing.view.chains.values()} == before
                assert second.routing.view.nodes[all_nodes[2].id].alive
                await second.passes(TIMEOUT_S * 0.7, all_nodes[:2])
                await until_states(second, all_nodes[:2], "sso")

    run(body)


def test_a_new_manager_reads_the_store_before_it_answers() -> None:
    """Its view may be older than the last record of the manager before it: what it would hand out, with a
    lease, is a version that is no more."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, store):
            second = Process(store, "m2:1")
            await second.routing.refresh()
            stale = second.routing.view
            await process.passes(TIMEOUT_S * 1.2, all_nodes[:2])
            await until_states(process, all_nodes[:2], "sso")
            await process.stop()
            await second.lease._step()  # the lease was released
            assert second.lease.primary
            assert second.routing.view is stale
            late = all_nodes[2]
            assert second.manager.handle_now(STORAGE, late.heartbeat()) is None  # not without waiting
            reply = await late.beat(second)
            assert reply.config is not None
            assert all(route.states != (1, 1, 1) for route in reply.config.chains)
            assert {t.state for t in late.targets.values() if t.chain} <= {0, 2}

    run(body)


def test_a_stall_of_the_manager_isnt_silence_of_nodes() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            before = dict(process.routing.view.chains)
            process.offset_s += 10 * TIMEOUT_S  # SIGSTOP, swap, a debugger
            await asyncio.sleep(0.6)
            for node in all_nodes:
                await node.beat(process)
            await asyncio.sleep(0.3)
            assert process.routing.view.chains == before
            assert all(node.alive for node in process.routing.view.nodes.values())

    run(body)


def test_what_is_asked_first_after_a_stall_finds_nobody_gone() -> None:
    """A heartbeat is handled before the watch notices the stall. Chains that it looked at with the others
    gone stayed so for ever: to those who came next nothing had changed."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            process.offset_s += 10 * TIMEOUT_S
            first = all_nodes[0]
            for target in first.targets.values():
                target.suspect = next(iter(all_nodes[1].targets))  # news: decisions are made at once
            first.beat_now(process)
            assert not any("isn't there" in d.reason for d in process.manager.decisions.values())

    run(body)


def test_steps_of_the_wall_clock_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """S10: the only manager lost its lease after a clock step."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            term, chains = process.lease.term, dict(process.routing.view.chains)
            real = time.time, time.time_ns
            for step_s in (-86400 * 400, 86400 * 400):
                monkeypatch.setattr(time, "time", lambda s=step_s: real[0]() + s)
                monkeypatch.setattr(time, "time_ns", lambda s=step_s: real[1]() + s * 10**9)
                before = process.clock.now_ms()
                renewals = process.lease.renewals

                async def renewed(than: int = renewals) -> bool:
                    for node in all_nodes:
                        assert (await node.beat(process)).manager_ms >= 0
                    return process.lease.renewals > than + 2

                await until(renewed)
                assert 0 <= process.clock.now_ms() - before < 60_000
            assert process.lease.term == term
            assert process.routing.view.chains == chains

    run(body)

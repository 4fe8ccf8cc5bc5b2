"""The cluster manager changes chains: nodes go, return, lose their data, move; leases; pushes; limits."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from manager_world import (
    CLIENT,
    STORAGE,
    TIMEOUT_S,
    Process,
    SimNode,
    cluster,
    nodes,
    run,
    until,
    until_primary,
    until_serving,
)
from msgspec.structs import replace

from ffs.errors import Busy, Fenced, NotPermitted, NotPrimary, OutcomeUnknown
from ffs.proto import cluster as proto
from ffs.proto.records import FencedClient
from ffs.rpc.handshake import Peer
from metadata.cluster.chain import Proposal, version_of
from metadata.cluster.members import serving_of
from metadata.cluster.moves import Moves
from metadata.cluster.node_config import chain_routes
from metadata.cluster.plan import Change
from metadata.fs.schema import encode, fence_key
from metadata.kv.contract import Transaction
from metadata.kv.memory import MemoryStore


async def until_states(process: Process, beating: Iterable[SimNode], *letters: str) -> None:
    """Until the members' states of every chain, sorted, are one of these: s serving, y syncing, o offline."""
    beating = list(beating)

    async def there() -> bool:
        for node in beating:
            await node.beat(process)
        states = {"".join("osy"[s] for s in c.states) for c in process.routing.view.chains.values()}
        return states <= set(letters)

    await until(there)


def serving_nodes(process: Process, chain: int) -> set[int]:
    view = process.routing.view
    return {view.targets[target].node for target in serving_of(view.chains[chain])}


# --- going and coming back -----------------------------------------------------------------------------


def test_a_silent_node_is_left_out_and_filled_when_it_is_back() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            first = dict(process.routing.view.chains)
            await process.passes(TIMEOUT_S * 0.8, all_nodes[:2])
            assert process.routing.view.chains == first  # its lease may hold
            await process.passes(TIMEOUT_S * 0.4, all_nodes[:2])
            await until_states(process, all_nodes[:2], "sso")
            assert not process.routing.view.nodes[all_nodes[2].id].alive
            await until_serving(process, all_nodes[:2])
            routing = await process.ask(proto.GetRouting(), CLIENT)
            assert {r.alive for r in routing.targets if r.node == all_nodes[2].id} == {False}
            assert all(set(route.states) == {1, 0} for route in routing.chains)
            status = await process.ask(proto.GetStatus())
            assert all(chain.writable and "isn't there" in chain.reason for chain in status.chains)
            await until_states(process, all_nodes, "sss")  # it was only paused: still it must be filled
            await until_serving(process, all_nodes)

            async def alive() -> bool:
                await all_nodes[2].beat(process)
                return process.routing.view.nodes[all_nodes[2].id].alive

            await until(alive)
            await process.passes(3 * TIMEOUT_S, all_nodes)  # then the order is put right

            async def as_wanted() -> bool:
                for node in all_nodes:
                    await node.beat(process)
                return all(c.members == c.wanted for c in process.routing.view.chains.values())

            await until(as_wanted)
            assert process.manager._chains.impossible == set()

    run(body)


def test_a_wiped_device_is_filled_and_never_serves_empty() -> None:
    """Case 15."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            lost = all_nodes[2]
            for target in lost.targets.values():
                target.leave_behind()
            lost.fills_at_once = False
            for node in all_nodes:
                node.fills_at_once = False
            await lost.start(process)
            await until_states(process, all_nodes, "ssy")
            assert all(lost.id not in serving_nodes(process, c) for c in process.routing.view.chains)

            async def filling() -> bool:
                for node in all_nodes:
                    await node.beat(process)
                status = await process.ask(proto.GetStatus())
                return all(chain.writable and "being filled" in chain.reason for chain in status.chains)

            await until(filling)
            for node in all_nodes:
                node.fills_at_once = True
            await until_states(process, all_nodes, "sss")

    run(body)


def orders() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    every = list(itertools.permutations(range(3)))
    return random.sample(list(itertools.product(every, every)), 8)


@pytest.mark.parametrize("at_once", [False, True])
def test_all_die_in_any_order_and_come_back_in_any_order(at_once: bool) -> None:
    """S9, case 13. One after another: only the last one may lead back. At once: any one may."""

    async def one(died: tuple[int, ...], back: tuple[int, ...]) -> None:
        async with cluster() as (process, all_nodes, _):
            for count in range(1, 4):
                alive = [all_nodes[at] for at in died[count:]]
                if alive and not at_once:
                    await process.passes(TIMEOUT_S * 1.2, alive)
                    await until_states(process, alive, "s" * len(alive) + "o" * count)
            await process.passes(TIMEOUT_S * 1.2)
            assert not any(node.alive for node in process.routing.view.nodes.values())
            status = await process.ask(proto.GetStatus())
            assert all(not c.writable and "must come back" in c.reason for c in status.chains)
            there: list[SimNode] = []
            for at in back:
                await all_nodes[at].start(process)
                there.append(all_nodes[at])
                if at_once or all_nodes[died[2]] in there:
                    await until_serving(process, there)
                else:
                    await process.passes(TIMEOUT_S * 1.2, there)
                    assert not any(d.serving for d in process.manager.decisions.values())
            await until_states(process, all_nodes, "sss")
            await until_serving(process, all_nodes)
            assert process.manager._chains.impossible == set()

    async def body() -> None:
        for died, back in orders()[: 3 if at_once else 5]:
            print("died", died, "back", back)
            await one(died, back)

    run(body)


def test_the_last_one_is_lost_and_another_is_forced_to_lead() -> None:
    async def body() -> None:
        async with cluster(count=2, replicas=2) as (process, all_nodes, store):
            first, second = all_nodes
            await process.passes(TIMEOUT_S * 1.2, [first])
            await until_states(process, [first], "so")
            await process.passes(TIMEOUT_S * 1.2)
            await second.start(process)  # the first never returns
            await process.passes(TIMEOUT_S * 1.2, [second])
            assert not any(d.serving for d in process.manager.decisions.values())
            moves = Moves(store, process.lease)
            for chain in list(process.routing.view.chains.values()):
                target = next(t for t in chain.members if t in second.targets)
                await moves.force(chain, target)
            await process.manager.records_changed()
            await until_states(process, [second], "so")
            await until_serving(process, [second])
            assert all(chain.forced == 0 for chain in process.routing.view.chains.values())
            assert all(serving_nodes(process, c) == {second.id} for c in process.routing.view.chains)
            await first.start(process)  # it had more, and is overwritten: that is what force means
            await until_states(process, all_nodes, "ss")

    run(body)


def test_a_suspect_is_left_out_once_it_stands_down_and_filled_after_a_pause() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            chain = process.routing.view.chains[1]
            nodes_of = [next(n for n in all_nodes if m in n.targets) for m in chain.members]
            accuser, accused = chain.members[0], chain.members[1]
            nodes_of[0].targets[accuser].suspect = accused
            nodes_of[1].targets[accused].stuck = True
            for _ in range(5):
                for node in all_nodes:
                    await node.beat(process)
            assert process.routing.view.chains[1] == chain  # it hasn't stood down
            assert nodes_of[1].lease_ms == 0
            await process.passes(TIMEOUT_S * 1.2, all_nodes)  # it has got no lease: so it is over

            async def left_out() -> bool:
                for node in all_nodes:
                    await node.beat(process)
                return accused not in serving_of(process.routing.view.chains[1])

            await until(left_out)
            nodes_of[0].targets[accuser].suspect = 0
            nodes_of[1].targets[accused].stuck = False
            for _ in range(5):
                for node in all_nodes:
                    await node.beat(process)
            assert nodes_of[1].lease_ms > 0
            assert 2 not in process.routing.view.chains[1].states  # not at once again
            await process.passes(TIMEOUT_S * 2.5, all_nodes)
            process.manager._chains.look_again(process.routing.view, process.now_s())
            process.manager._hand_out()
            await until_states(process, all_nodes, "sss")

    run(body)


def test_a_disk_that_doesnt_answer_holds_nothing_up_for_ever() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            chain = process.routing.view.chains[1]
            stuck = next(n for n in all_nodes if chain.members[1] in n.targets)
            stuck.targets[chain.members[1]].stuck = True
            back = next(n for n in all_nodes if chain.members[2] in n.targets)
            await back.start(process)

            async def without_it() -> bool:
                await process.passes(TIMEOUT_S * 0.6, all_nodes)
                process.manager._chains.look_again(process.routing.view, process.now_s())
                process.manager._hand_out()
                return serving_of(process.routing.view.chains[1]) == (chain.members[0], chain.members[2])

            await until(without_it)

    run(body)


def test_a_failed_device_is_left_out_at_once() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            bad = all_nodes[1]
            bad.poisoned = True
            for target in bad.targets.values():
                target.state, target.reason, target.stuck = 0, 8, True
            await until_states(process, all_nodes, "sso")
            assert all(bad.id not in serving_nodes(process, c) for c in process.routing.view.chains)
            bad.poisoned = False
            await bad.start(process)
            await until_states(process, all_nodes, "sss")

    run(body)


# --- leases -----------------------------------------------------------------------------------------------


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


# --- what nodes are told ------------------------------------------------------------------------------------


def test_who_is_told_what() -> None:
    """One that restarted isn't told the recorded version; one that lost its data isn't told a proposal that
    leaves it out: it would persist it, and then look as if it had kept its data."""
    record = proto.ChainRecord(
        id=9,
        table=1,
        term=1,
        counter=5,
        members=(11, 12, 13, 14),
        states=(1, 1, 2, 0),
        incarnations=(1, 1, 1, 0),
    )
    after = replace(
        record, counter=6, members=(11, 14, 12, 13), states=(1, 2, 0, 0), incarnations=(1, 3, 0, 0)
    )
    proposal = Proposal(after, (1, 5))

    def told(target: int, incarnation: int, given: Proposal | None = proposal) -> list[bool]:
        return [route.proposed for route in chain_routes(record, given, target, incarnation)]

    assert told(11, 1) == [False, True]
    assert told(11, 2) == []
    assert told(12, 1) == [False, True]  # it serves: it shall stand down
    assert told(12, 2) == []  # it restarted: it doesn't serve
    assert told(13, 1) == [False]  # the syncing one needn't agree
    assert told(14, 3) == [False, True]
    assert told(14, 2) == [False]
    assert told(15, 1) == []
    assert told(11, 1, None) == [False]
    assert told(11, 1, Proposal(after, (1, 4))) == [False]  # made after another version
    (_, route) = chain_routes(record, proposal, 11, 1)
    assert (route.term, route.counter, route.members) == (1, 6, (11, 14, 12, 13))
    assert (route.states, route.incarnations) == ((1, 2, 0, 0), (1, 3, 0, 0))


def test_configurations_are_pushed_to_nodes_that_wait() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, store):
            one = all_nodes[0]

            def wait(wait_ms: int = 30_000) -> asyncio.Task[Any]:
                request = proto.WaitConfig(
                    node=one.id, incarnation=one.incarnation, config=one.config, wait_ms=wait_ms
                )
                return asyncio.ensure_future(process.ask(request))

            while (await one.beat(process)).config is not None or (await one.beat(process)).fences:
                pass
            nothing = await wait(1)
            assert (nothing.config, nothing.fences, nothing.term) == (None, (), process.lease.term)
            waiting = wait()
            await asyncio.sleep(0.01)
            assert not waiting.done()
            assert (await one.beat(process)).next_ms == 1250
            await all_nodes[1].start(process)
            await all_nodes[1].beat(process)  # a proposal is made, which `one` must persist
            reply = await waiting
            while not any(route.proposed for route in reply.config.chains):
                one.act_on(reply.config)
                reply = await wait()
            one.act_on(reply.config)
            await until_serving(process, all_nodes)

            async def end_session(txn: Transaction) -> None:
                txn.set(fence_key(42), encode(FencedClient(capability_expiry_ms=10**15)))

            await one.beat(process)
            waiting = wait()
            await store.run(end_session)
            while 42 not in (reply := await waiting).fences:
                if reply.config is not None:
                    one.act_on(reply.config)
                one.fenced = reply.fences
                await one.beat(process)
                waiting = wait()
            with pytest.raises(NotPermitted):
                await process.ask(
                    proto.WaitConfig(node=one.id, incarnation=1, config=(0, 0), wait_ms=1), CLIENT
                )
            request = proto.WaitConfig(node=one.id, incarnation=99, config=(0, 0), wait_ms=1)
            with pytest.raises(Fenced):
                await process.ask(request)

    run(body)


def test_waiting_ends_with_the_term() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            one = all_nodes[0]
            while (await one.beat(process)).config is not None:
                pass
            request = proto.WaitConfig(
                node=one.id, incarnation=one.incarnation, config=one.config, wait_ms=30_000
            )
            waiting = asyncio.ensure_future(process.ask(request))
            await asyncio.sleep(0.01)
            process.lease._lose()
            process.manager._configs.changed([one.id])
            with pytest.raises(NotPrimary):
                await waiting

    run(body)


def test_impossible_and_late_reports_change_nothing() -> None:
    """S2: ids and versions of every report are looked at."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            one = all_nodes[0]
            before = dict(process.routing.view.chains)
            old = one.heartbeat()
            await one.beat(process)
            known = dict(process.manager.nodes[one.id].reports)
            ident, report = next((i, r) for i, r in known.items() if r.chain)
            late = replace(
                old, reports=tuple(replace(r, persisted_counter=0, recorded_counter=0) for r in old.reports)
            )
            await process.ask(late)  # it was sent before the last one
            assert process.manager.nodes[one.id].reports == known

            async def says(**changes: Any) -> None:
                beat = one.heartbeat()
                odd = replace(report, **changes)
                others = tuple(r for r in beat.reports if r.target != ident)
                await process.ask(replace(beat, reports=(odd, *others)))

            await says(persisted_counter=0, persisted_term=0, recorded_term=0, recorded_counter=0)
            assert process.manager.nodes[one.id].reports[ident] == report  # a version never goes back
            await says(recorded_counter=99)
            assert process.manager.nodes[one.id].reports[ident] == report  # it acts above what it persisted
            await says(target=next(iter(all_nodes[1].targets)))
            assert next(iter(all_nodes[1].targets)) not in process.manager.nodes[one.id].reports
            await says(target=77777)
            assert 77777 not in process.manager.nodes[one.id].reports
            assert process.routing.view.chains == before
            await one.beat(process)
            await until_serving(process, all_nodes)

    run(body)


def test_another_role_sends_no_heartbeats() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            for peer in (CLIENT, Peer("admin", "a", 0, 0, 1, False)):
                with pytest.raises(NotPermitted):
                    await process.ask(all_nodes[0].heartbeat(), peer)

    run(body)


# --- moves, limits --------------------------------------------------------------------------------------


def test_a_replica_moves_and_its_old_place_is_dropped() -> None:
    async def body() -> None:
        async with cluster(count=3, replicas=2) as (process, all_nodes, store):
            spare = SimNode("spare", b"s" * 16, b"d" * 16)
            await spare.start(process)
            everybody = [*all_nodes, spare]
            await spare.beat(process)
            chain = process.routing.view.chains[1]
            leaving, joining = chain.members[0], next(iter(spare.targets))
            goal = (joining, *chain.members[1:])
            change = Change(chain=1, before=chain.members, goal=goal, fill=(joining,))
            assert await Moves(store, process.lease).apply([change]) == [1]
            await process.manager.records_changed()

            async def moved() -> bool:
                for node in everybody:
                    await node.beat(process)
                now = process.routing.view.chains[1]
                return set(serving_of(now)) == set(goal) == set(now.members)

            await until(moved)
            old = next(node for node in all_nodes if leaving in node.targets)

            async def dropped() -> bool:
                for node in everybody:
                    await node.beat(process)
                return leaving in old.released

            await until(dropped)
            assert old.targets[leaving].chain == 0

            async def free() -> bool:
                for node in everybody:
                    await node.beat(process)
                return process.routing.view.targets[leaving].chain == 0

            await until(free)
            await process.passes(3 * TIMEOUT_S, everybody)

            async def in_order() -> bool:
                for node in everybody:
                    await node.beat(process)
                return process.routing.view.chains[1].members == goal

            await until(in_order)

    run(body)


def test_so_many_syncs_at_once() -> None:
    """A node takes part in a few at a time, as a source and as a target; all come to their turn."""

    async def body() -> None:
        store = MemoryStore()
        async with Process(store) as process:
            process.manager._chains._syncs_of_node = 2
            await until_primary(process)
            all_nodes = nodes(3)
            for node in all_nodes:
                await node.start(process, count=12)
                node.fills_at_once = False
            await process.ask(proto.CreateTable(name="default", replicas=2, chains_per_device=12), CLIENT)
            await until_serving(process, all_nodes)
            lost = all_nodes[2]
            for target in lost.targets.values():
                target.leave_behind()
            await lost.start(process)
            most = 0

            async def all_filled() -> bool:
                nonlocal most
                for node in all_nodes:
                    await node.beat(process)
                view = process.routing.view
                syncing = [c for c in view.chains.values() if 2 in c.states]
                most = max(most, len(syncing))
                for node in (0, 1, 2):
                    as_source = [c for c in syncing if serving_of(c)[-1] in all_nodes[node].targets]
                    assert len(as_source) <= 2
                assert len(syncing) <= 2
                if len(syncing) == 2 or not process.manager._chains._waiting:
                    for node in all_nodes:
                        node.fills_at_once = True
                        await node.beat(process)
                        node.fills_at_once = False
                return most > 0 and all(c.states == (1, 1) for c in view.chains.values())

            await until(all_filled)
            assert most == 2

            async def none_held() -> bool:
                for node in all_nodes:
                    await node.beat(process)
                held = process.manager._chains
                return held._sources.total() == 0 and held._targets.total() == 0

            await until(none_held)
        await store.close()

    run(body)


def test_a_device_moves_to_another_node_when_its_old_one_is_gone() -> None:
    """Its targets' incarnations go on from those of the old node: one never means two processes."""

    async def body() -> None:
        async with cluster(count=3, replicas=2) as (process, all_nodes, _):
            old = all_nodes[0]
            for _ in range(3):
                await old.start(process)
                await old.beat(process)
            await until_serving(process, all_nodes)
            heir = SimNode(
                "heir", b"h" * 16, old.device, targets={t: s.restarted() for t, s in old.targets.items()}
            )
            with pytest.raises(Busy, match="which is alive"):
                await heir.start(process)
            await process.passes(TIMEOUT_S * 1.2, all_nodes[1:])
            await heir.start(process)
            assert heir.incarnation > old.incarnation
            rest = [heir, *all_nodes[1:]]
            await until_serving(process, rest)
            await until_states(process, rest, "ss")
            assert old.id not in {r.node for r in (await process.ask(proto.GetRouting(), CLIENT)).targets}

    run(body)


def test_only_chains_with_news_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager is one loop: a heartbeat of a node with hundreds of targets must cost little."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            for _ in range(3):
                for node in all_nodes:
                    await node.beat(process)
            looked: list[int] = []
            decisions: Callable[..., Awaitable[None]] | Any = process.manager._chains._look_at

            def counts(view: Any, chain: int, now_s: float) -> bool:
                looked.append(chain)
                return bool(decisions(view, chain, now_s))

            monkeypatch.setattr(process.manager._chains, "_look_at", counts)
            for _ in range(3):
                for node in all_nodes:
                    await node.beat(process)
            assert looked == []
            ident = next(i for i, t in all_nodes[0].targets.items() if t.chain)
            all_nodes[0].targets[ident].suspect = 1234
            await all_nodes[0].beat(process)
            assert set(looked) == {all_nodes[0].targets[ident].chain}

    run(body)


def test_versions_stay_with_their_chain() -> None:
    """I8: over a history of faults no version of a chain has two memberships, and versions only grow."""

    async def body() -> None:
        rng = random.Random(seed := random.randrange(2**32))
        print("seed", seed)
        async with cluster() as (process, all_nodes, _):
            seen: dict[tuple[int, tuple[int, int]], Any] = {}
            last: dict[int, tuple[int, int]] = {}
            for _ in range(60):
                roll = rng.random()
                if roll < 0.2:
                    await rng.choice(all_nodes).start(process)
                elif roll < 0.35:
                    await process.passes(TIMEOUT_S * 1.1, rng.sample(all_nodes, 2))
                for node in rng.sample(all_nodes, 3):
                    reply = await node.beat(process)
                    for route in reply.config.chains if reply.config is not None else ():
                        key = route.chain, (route.term, route.counter)
                        assert seen.setdefault(key, (route.members, route.states)) == (
                            route.members,
                            route.states,
                        )
                for chain in process.routing.view.chains.values():
                    assert version_of(chain) >= last.get(chain.id, (0, 0))
                    last[chain.id] = version_of(chain)
                await asyncio.sleep(0)
            await until_states(process, all_nodes, "sss")
            assert process.manager._chains.impossible == set()

    run(body)

"""The cluster manager changes chains: nodes go, return, lose their data, move; limits."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from chain_states import serving_nodes, until_states
from manager_world import (
    CLIENT,
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

from ffs.errors import Busy
from ffs.proto import cluster as proto
from metadata.cluster.chain import version_of
from metadata.cluster.members import serving_of
from metadata.cluster.moves import Moves
from metadata.cluster.plan import Change
from metadata.kv.memory import MemoryStore

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

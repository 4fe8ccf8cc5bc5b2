"""metadata.cluster.plan and .balance: what must hold for any cluster, refusals, and golden vectors.

plan_world.obeys states the rules anew. Clusters are random; a failure prints its seed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from plan_world import after, any_cluster, build, domain, domain_of_node, draining, grown, load, obeys, uuid

from ffs.errors import InvalidArgument, NoSpace
from metadata.cluster import plan as plans
from metadata.cluster.balance import rebalance
from metadata.cluster.placement import FreeDevice, place
from metadata.cluster.plan import Chain, Cluster, Device, Node, Plan

GOLDEN = Path(__file__).parents[2] / "golden" / "placement"


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


# --- drain ------------------------------------------------------------------------------------------


def test_drain_of_any_cluster(rng: random.Random) -> None:
    done = 0
    for _ in range(150):
        cluster = any_cluster(rng)
        node = rng.choice(sorted(cluster.nodes))
        try:
            plan = plans.drain(cluster, {node})
        except (InvalidArgument, NoSpace):
            _must_refuse(cluster, node)
            continue
        done += 1
        obeys(draining(cluster, node), plan)
        assert load(after(cluster, plan))[node] == 0
        assert {c.chain for c in plan.changes} == {
            c.id for c in cluster.chains.values() if node in map(cluster.node_of, c.goal)
        }
    assert done > 50


def _must_refuse(cluster: Cluster, node: int) -> None:
    """An independent look: a matching of leaving targets to free ones (by augmenting paths over targets)."""
    rest = draining(cluster, node)
    slots: dict[int, tuple[int, int]] = {}

    def legal(chain: Chain, leaving: int) -> list[int]:
        others = [t for t in chain.goal if t != leaving]
        there = {cluster.node_of(t) for t in others}
        able = [d for d in rest.devices.values() if d.node not in there and not rest.nodes[d.node].draining]
        share = {d.uuid: sum(domain_of_node(rest, d.node) == domain(rest, t) for t in others) for d in able}
        least = min(share.values(), default=0)
        return [t for d in able if share[d.uuid] == least for t in d.free]

    def augment(who: tuple[int, int], seen: set[int]) -> bool:
        for slot in legal(cluster.chains[who[0]], who[1]):
            if slot not in seen:
                seen.add(slot)
                if slot not in slots or augment(slots[slot], seen):
                    slots[slot] = who
                    return True
        return False

    for chain in cluster.chains.values():
        for target in chain.goal:
            if cluster.node_of(target) == node and not augment((chain.id, target), set()):
                return
    raise AssertionError("refused, and there is a way")


def test_load_of_a_drained_node_falls_on_all_others_alike() -> None:
    cluster = build(9, devices=2)
    plan = plans.drain(cluster, {4})
    before = load(cluster)
    gained = load(after(cluster, plan)) - before
    assert sum(gained.values()) == before[4] == 64
    assert set(gained) == set(cluster.nodes) - {4}
    assert max(gained.values()) - min(gained.values()) <= 2
    # What a new replica is filled from is spread, too: the chains' other nodes.
    sources = Counter(
        cluster.node_of(t) for change in plan.changes for t in set(change.goal) - set(change.fill)
    )
    assert max(sources.values()) <= 2 * min(sources.values())


def test_drain_keeps_two_nodes_for_two_replicas() -> None:
    cluster = build(3, tables=((2, 8),))
    plan = plans.drain(cluster, {1})
    obeys(draining(cluster, 1), plan)
    assert load(after(cluster, plan)) == {2: 12, 3: 12}


def test_refusals_name_what_is_missing() -> None:
    with pytest.raises(
        InvalidArgument, match=r"3 replicas on distinct nodes, and 2 nodes would be left.*start"
    ):
        plans.drain(build(3), {1})
    with pytest.raises(NoSpace, match=r"8 of 8 targets to move find no room: .* lack 8 free targets.*add"):
        plans.drain(build(3, targets=8, tables=((1, 8),)), {2})
    tight = build(4, targets=10, tables=((2, 8),))
    with pytest.raises(NoSpace, match=r"of 8 targets to move find no room"):
        plans.drain(tight, {2})
    assert plans.drain(tight, {2}, partly=True).unplaced == 2
    with pytest.raises(NoSpace, match=r"holds up to 2199023255552 bytes.*1099511627776 left"):
        plans.drain(build(3, tables=((1, 4),), used_bytes=2 << 40), {1})


def test_a_tight_drain_finds_the_only_way() -> None:
    """Chain 1 may go to nodes 3 and 4, chain 2 only to 3, and 3 has one place: chain 1 must make room."""
    homes = {
        1: uuid(1, 0),
        2: uuid(1, 0),
        3: uuid(2, 0),
        4: uuid(4, 0),
        5: uuid(3, 0),
        6: uuid(4, 0),
        7: uuid(2, 0),
    }
    devices = {
        uuid(n, 0): Device(uuid(n, 0), n, "/d", 1 << 40, 1 << 40, free)
        for n, free in ((1, ()), (2, ()), (3, (5,)), (4, (6,)))
    }
    chains = {
        1: Chain(1, 1, (1, 3), frozenset({1, 3}), (1, 3)),
        2: Chain(2, 1, (2, 4), frozenset({2, 4}), (2, 4)),
    }
    for first, second in ((1, 2), (2, 1)):
        named = {
            first: dataclasses.replace(chains[1], id=first),
            second: dataclasses.replace(chains[2], id=second),
        }
        cluster = Cluster({n: Node(n, f"n{n}") for n in range(1, 5)}, devices, homes, named)
        plan = plans.drain(cluster, {1})
        obeys(draining(cluster, 1), plan)
        assert {change.chain: change.goal[0] for change in plan.changes} == {first: 6, second: 5}


def test_undo_takes_back_what_has_not_left() -> None:
    cluster = build(5, tables=((3, 8),))
    plan = plans.drain(cluster, {2})
    chains = dict(cluster.chains)
    arrived = plan.changes[0].chain
    for change in plan.changes:
        old = chains[change.chain]
        fresh = change.fill[0]
        serving = old.serving | ({fresh} if change.chain == arrived else set())
        chains[change.chain] = dataclasses.replace(
            old, goal=change.goal, members=(*old.members, fresh), serving=serving
        )
    under_way = Cluster(cluster.nodes, cluster.devices, cluster.homes, chains)
    undone = plans.undo_drain(under_way, 2)
    assert {c.chain for c in undone.changes} == {c.chain for c in plan.changes} - {arrived}
    for change in undone.changes:
        assert change.goal == cluster.chains[change.chain].goal


def test_undo_gives_up_what_has_not_begun_before_what_is_ill() -> None:
    cluster = build(5, tables=((3, 8),))
    change = plans.drain(cluster, {2}).changes[0]
    old = cluster.chains[change.chain]
    ill = next(t for t in old.goal if t in change.goal)
    chains = {
        **cluster.chains,
        old.id: dataclasses.replace(old, goal=change.goal, serving=old.serving - {ill}),
    }
    undone = plans.undo_drain(Cluster(cluster.nodes, cluster.devices, cluster.homes, chains), 2)
    assert [c.goal for c in undone.changes] == [old.goal]


# --- replace ------------------------------------------------------------------------------------------


def test_replace_prefers_the_old_place_then_spreads() -> None:
    cluster = build(5, devices=2)
    old = uuid(3, 0)
    fresh = uuid(3, 9)
    homes = {**cluster.homes, **dict.fromkeys(range(1000, 1064), fresh)}
    devices = {
        **cluster.devices,
        old: dataclasses.replace(cluster.devices[old], usable=False, free=()),
        fresh: Device(fresh, 3, "/dev/0", 1 << 40, 1 << 40, tuple(range(1000, 1064))),
    }
    cluster = Cluster(cluster.nodes, devices, homes, cluster.chains)
    targets = {t for c in cluster.chains.values() for t in c.goal if homes[t] == old}
    assert len(targets) == 32
    plan = plans.replace(cluster, targets, None, [fresh])
    obeys(cluster, plan)
    assert {homes[t] for c in plan.changes for t in c.fill} == {fresh}
    for change in plan.changes:  # the new target stands where the old one stood
        assert [at for at, t in enumerate(change.before) if t in targets] == [
            at for at, t in enumerate(change.goal) if t in change.fill
        ]
    without = {u: d for u, d in devices.items() if u != fresh}
    spread = plans.replace(Cluster(cluster.nodes, without, cluster.homes, cluster.chains), targets, None)
    assert len({cluster.node_of(t) for c in spread.changes for t in c.fill}) == 5


def test_replace_onto_a_device() -> None:
    cluster = build(5, tables=((3, 8),))
    chain = next(c for c in cluster.chains.values() if 1 in map(cluster.node_of, c.goal))
    target = next(t for t in chain.goal if cluster.node_of(t) == 1)
    other = next(n for n in (2, 3, 4, 5) if n not in map(cluster.node_of, chain.goal))
    there = next(n for n in (2, 3, 4, 5) if n in map(cluster.node_of, chain.goal))
    plan = plans.replace(cluster, {target}, uuid(other, 0))
    obeys(cluster, plan)
    assert [cluster.node_of(t) for c in plan.changes for t in c.fill] == [other]
    with pytest.raises(InvalidArgument, match="another replica on that node"):
        plans.replace(cluster, {target}, uuid(there, 0))
    with pytest.raises(InvalidArgument, match="being drained"):
        plans.replace(draining(cluster, other), {target}, uuid(other, 0))
    failed = {
        **cluster.devices,
        uuid(other, 0): dataclasses.replace(cluster.devices[uuid(other, 0)], usable=False),
    }
    with pytest.raises(InvalidArgument, match="isn't there, or has failed"):
        plans.replace(Cluster(cluster.nodes, failed, cluster.homes, cluster.chains), {target}, uuid(other, 0))


def test_eight_replicas_have_no_room_for_a_ninth() -> None:
    cluster = build(9, tables=((8, 2),))
    chain = cluster.chains[1]
    target = chain.goal[3]
    with pytest.raises(InvalidArgument, match="more than 8 replicas"):
        plans.replace(cluster, {target}, None)
    gone = {**cluster.chains, 1: dataclasses.replace(chain, serving=chain.serving - {target})}
    plan = plans.replace(Cluster(cluster.nodes, cluster.devices, cluster.homes, gone), {target}, None)
    assert len(plan.changes) == 1


# --- rebalance --------------------------------------------------------------------------------------


def evenness(cluster: Cluster) -> None:
    """Of every table, no device is two targets above another one that could take one (of equal size)."""
    for table in {c.table for c in cluster.chains.values()}:
        mine = [c for c in cluster.chains.values() if c.table == table]
        count = Counter({u: 0 for u in cluster.devices})
        count.update(cluster.homes[t] for c in mine for t in c.goal)
        for a, b in itertools.permutations(cluster.devices.values(), 2):
            if count[a.uuid] < count[b.uuid] + 2 or not b.free:
                continue
            for chain in mine:
                others = [t for t in chain.goal if cluster.homes[t] != a.uuid]
                if len(others) == len(chain.goal) or b.node in map(cluster.node_of, others):
                    continue
                share = [
                    sum(domain_of_node(cluster, d.node) == domain(cluster, t) for t in others) for d in (a, b)
                ]
                assert share[1] > share[0], f"chain {chain.id} could have gone"


def test_rebalance_of_any_cluster(rng: random.Random) -> None:
    for _ in range(60):
        cluster = any_cluster(rng)
        for extra in range(rng.randrange(1, 3)):
            label = f"rack{rng.randrange(4)}" if cluster.nodes[1].domain else ""
            cluster = grown(cluster, 20 + extra, devices=rng.randrange(1, 3), domain=label)
        once = rebalance(cluster)
        obeys(cluster, once, evening_out=True)
        settled = after(cluster, once)
        for _ in range(20):  # targets that moves have set free allow others
            more = rebalance(settled)
            if not more.changes:
                break
            obeys(settled, more, evening_out=True)
            settled = after(settled, more)
        else:
            raise AssertionError("doesn't settle")
        evenness(settled)


def test_growing_evens_out_targets_pairs_and_heads() -> None:
    cluster = grown(build(4, devices=2), 5, devices=2)
    plan = rebalance(cluster)
    obeys(cluster, plan, evening_out=True)
    assert all(cluster.node_of(t) == 5 for change in plan.changes for t in change.fill)
    then = after(cluster, plan)
    counts = Counter(then.homes[t] for c in then.chains.values() for t in c.goal)
    assert max(counts.values()) - min(counts.values()) <= 1
    heads = Counter(then.homes[c.goal[0]] for c in then.chains.values())
    assert len(heads) == 10
    assert max(heads.values()) - min(heads.values()) <= 1
    pairs = Counter(
        pair
        for c in then.chains.values()
        for pair in itertools.combinations(sorted(map(then.node_of, c.goal)), 2)
    )
    assert len(pairs) == 10
    assert max(pairs.values()) <= 1.5 * min(pairs.values())


def test_add_moves_only_onto_the_node() -> None:
    cluster = grown(grown(build(4), 5), 6)
    plan = rebalance(cluster, onto=6)
    obeys(cluster, plan, evening_out=True)
    filled = Counter(cluster.node_of(t) for change in plan.changes for t in change.fill)
    assert set(filled) == {6}
    assert filled[6] >= 126 // 6


def test_capacity_weighs() -> None:
    cluster = build(6, tables=((2, 20),))
    devices = dict(cluster.devices)
    devices[uuid(6, 0)] = dataclasses.replace(devices[uuid(6, 0)], capacity_bytes=2 << 40)
    cluster = Cluster(cluster.nodes, devices, cluster.homes, cluster.chains)
    counts = load(after(cluster, rebalance(cluster)))
    assert counts[6] in (34, 35)  # two shares of seven of 120
    assert all(counts[n] in (17, 18) for n in range(1, 6))


def test_an_even_cluster_is_left_alone() -> None:
    for cluster in (build(3), build(7, devices=3), build(6, domains=3), build(5, tables=((3, 32), (1, 8)))):
        assert [c for c in rebalance(cluster).changes if c.fill] == []


def test_domains_that_came_later_are_respected() -> None:
    cluster = build(6, tables=((3, 16),))
    nodes = {n: dataclasses.replace(node, domain=f"rack{n % 3}") for n, node in cluster.nodes.items()}
    labelled = Cluster(nodes, cluster.devices, cluster.homes, cluster.chains)
    settled = labelled
    for _ in range(5):
        settled = after(settled, rebalance(settled))
    for chain in settled.chains.values():
        assert len({domain(settled, t) for t in chain.goal}) == 3


def test_too_few_domains_are_said() -> None:
    cluster = build(6, domains=2)
    plan = plans.drain(cluster, {1})
    obeys(draining(cluster, 1), plan)
    assert any("two replicas in failure domain rack" in note for note in plan.notes)


def test_chains_on_their_way_are_left_alone() -> None:
    cluster = grown(build(4), 5)
    syncing = {n: dataclasses.replace(c, serving=frozenset(c.goal[:2])) for n, c in cluster.chains.items()}
    cluster = Cluster(cluster.nodes, cluster.devices, cluster.homes, syncing)
    assert [c for c in rebalance(cluster).changes if c.fill] == []


# --- golden -----------------------------------------------------------------------------------------

CASES = {
    "drain": lambda: plans.drain(build(5, tables=((3, 6),)), {2}),
    "drain_domains": lambda: plans.drain(build(8, tables=((3, 4),), domains=4), {3}),
    "replace": lambda: plans.replace(build(4, tables=((2, 4),)), {1, 2, 3}, None),
    "add": lambda: rebalance(grown(build(3, tables=((3, 8),)), 4), onto=4),
    "rebalance": lambda: rebalance(grown(grown(build(4, tables=((2, 6), (1, 3))), 5), 6)),
}


def as_json(plan: Plan) -> list[list[object]]:
    return [[c.chain, list(c.before), list(c.goal)] for c in plan.changes]


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    kept = json.loads((GOLDEN / "plans.json").read_text(encoding="utf-8"))
    assert as_json(CASES[name]()) == kept[name]


def test_golden_placements_with_domains() -> None:
    kept = json.loads((GOLDEN / "domains.json").read_text(encoding="utf-8"))
    for case in kept["cases"]:
        devices = [
            FreeDevice(d["node"], d["device"], tuple(d["targets"]), d["domain"]) for d in case["devices"]
        ]
        placed = place(case["replicas"], devices, case["targets_per_device"])
        assert [list(chain) for chain in placed] == case["chains"]
        labels = {t: d["domain"] for d in case["devices"] for t in d["targets"]}
        for chain in placed:
            assert len({labels[t] for t in chain}) == min(case["replicas"], len(set(labels.values())))

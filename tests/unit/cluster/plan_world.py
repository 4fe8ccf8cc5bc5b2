"""Clusters for plans, and the rules of a plan stated anew, from records alone."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

from metadata.cluster.placement import FreeDevice, place
from metadata.cluster.plan import Chain, Cluster, Device, Node, Plan


def build(
    nodes: int,
    *,
    devices: int = 1,
    targets: int = 64,
    tables: tuple[tuple[int, int], ...] = ((3, 32),),
    domains: int = 0,
    capacity: int = 1 << 40,
    used_bytes: int = 0,
) -> Cluster:
    """Tables (replicas, chains a device) placed by metadata.cluster.placement, all serving."""
    ids = itertools.count(1)
    known = {n: Node(n, f"n{n}", f"rack{n % domains}" if domains else "") for n in range(1, nodes + 1)}
    slots = {(n, d): [next(ids) for _ in range(targets)] for n in known for d in range(devices)}
    homes = {t: uuid(*key) for key, all_of in slots.items() for t in all_of}
    chains: dict[int, Chain] = {}
    for table, (replicas, each) in enumerate(tables, 1):
        free = [FreeDevice(n, d, tuple(s), known[n].domain) for (n, d), s in slots.items() if s]
        for members in place(replicas, free, each):
            number = len(chains) + 1
            chains[number] = Chain(number, table, members, frozenset(members), members, used_bytes)
            for target in members:
                next(s for s in slots.values() if target in s).remove(target)
    made = {
        uuid(n, d): Device(uuid(n, d), n, f"/dev/{d}", capacity, capacity, tuple(s))
        for (n, d), s in slots.items()
    }
    return Cluster(known, made, homes, chains)


def uuid(node: int, device: int) -> bytes:
    return bytes([node, device]) + b"\x01" * 14


def grown(cluster: Cluster, node: int, *, devices: int = 1, targets: int = 64, domain: str = "") -> Cluster:
    """One more node with empty devices."""
    ids = itertools.count(max(cluster.homes) + 1)
    nodes = {**cluster.nodes, node: Node(node, f"n{node}", domain)}
    made, homes = dict(cluster.devices), dict(cluster.homes)
    for d in range(devices):
        free = tuple(next(ids) for _ in range(targets))
        made[uuid(node, d)] = Device(uuid(node, d), node, f"/dev/{d}", 1 << 40, 1 << 40, free)
        homes.update(dict.fromkeys(free, uuid(node, d)))
    return Cluster(nodes, made, homes, cluster.chains)


def after(cluster: Cluster, plan: Plan) -> Cluster:
    """All moves done: what left is free again, what came serves."""
    chains, free = dict(cluster.chains), {u: set(d.free) for u, d in cluster.devices.items()}
    for change in plan.changes:
        old = chains[change.chain]
        chains[change.chain] = dataclasses.replace(
            old, members=change.goal, goal=change.goal, serving=frozenset(change.goal)
        )
        for target in set(change.before) - set(change.goal):
            free[cluster.homes[target]].add(target)
        for target in change.fill:
            free[cluster.homes[target]].remove(target)
    devices = {u: dataclasses.replace(d, free=tuple(sorted(free[u]))) for u, d in cluster.devices.items()}
    return Cluster(cluster.nodes, devices, cluster.homes, chains)


def domain(cluster: Cluster, target: int) -> tuple[str, int]:
    node = cluster.nodes[cluster.node_of(target)]
    return (node.domain, 0) if node.domain else ("", node.id)


def obeys(cluster: Cluster, plan: Plan, *, evening_out: bool = False) -> None:
    """The rules of a plan. Evening out takes no place that shares a domain more than the one that it leaves;
    the others take one that shares as little as any."""
    given: list[int] = []
    for change in plan.changes:
        chain = cluster.chains[change.chain]
        assert change.before == chain.goal != change.goal
        assert len(change.goal) == len(chain.goal) == len(set(change.goal))
        assert set(change.fill) == set(change.goal) - set(change.before)
        nodes = [cluster.node_of(t) for t in change.goal]
        assert len(set(nodes)) == len(nodes), "two replicas on a node"
        for target in change.fill:
            if target in chain.members:
                continue  # a drain undone
            device = cluster.devices[cluster.homes[target]]
            node = cluster.nodes[device.node]
            assert target in device.free
            assert device.usable
            assert node.alive
            assert not node.draining
            given.append(target)
            others = [t for t in change.goal if t != target]
            if not evening_out and len(change.fill) == 1:
                _shares_least(cluster, target, others)
        if evening_out:
            assert _shared(cluster, change.goal) <= _shared(cluster, change.before)
        assert len(chain.serving | set(change.goal)) <= 8
    assert len(set(given)) == len(given), "a target given twice"


def _shares_least(cluster: Cluster, target: int, others: list[int]) -> None:
    able = {
        d.node
        for d in cluster.devices.values()
        if d.usable
        and cluster.nodes[d.node].alive
        and not cluster.nodes[d.node].draining
        and d.node not in [cluster.node_of(t) for t in others]
    }
    least = min(sum(domain(cluster, t) == domain_of_node(cluster, n) for t in others) for n in able)
    assert sum(domain(cluster, target) == domain(cluster, t) for t in others) == least


def _shared(cluster: Cluster, goal: tuple[int, ...]) -> int:
    return sum(domain(cluster, a) == domain(cluster, b) for a, b in itertools.combinations(goal, 2))


def domain_of_node(cluster: Cluster, node: int) -> tuple[str, int]:
    label = cluster.nodes[node].domain
    return (label, 0) if label else ("", node)


def load(cluster: Cluster) -> Counter[int]:
    return Counter(cluster.node_of(t) for chain in cluster.chains.values() for t in chain.goal)


def draining(cluster: Cluster, node: int) -> Cluster:
    nodes = {**cluster.nodes, node: dataclasses.replace(cluster.nodes[node], draining=True)}
    return Cluster(nodes, cluster.devices, cluster.homes, cluster.chains)


def any_cluster(rng: random.Random) -> Cluster:
    replicas = rng.randrange(1, 5)
    nodes = rng.randrange(replicas, 10)
    tables = tuple((rng.randrange(1, replicas + 1), rng.randrange(1, 12)) for _ in range(rng.randrange(1, 3)))
    return build(
        nodes,
        devices=rng.randrange(1, 4),
        targets=rng.randrange(12, 32),
        tables=tables,
        domains=rng.choice([0, 0, 2, 3, 4]),
    )

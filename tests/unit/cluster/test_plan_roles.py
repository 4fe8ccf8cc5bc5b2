"""Roles of devices in plans: what a table of one role has never goes to a device of another."""

from __future__ import annotations

import dataclasses
import random

import pytest
from plan_world import after, build, grown, obeys, uuid

from ffs.errors import InvalidArgument, NoSpace
from metadata.cluster import plan as plans
from metadata.cluster.balance import rebalance
from metadata.cluster.placement import FreeDevice, place
from metadata.cluster.plan import Chain, Cluster, Device, Node, Plan

KV, BULK, PLAIN = 1, 2, 3  # tables


def with_roles(cluster: Cluster, roles: dict[int, str]) -> Cluster:
    """Device d of every node gets roles[d]."""
    devices = {
        ident: dataclasses.replace(device, role=roles.get(ident[1], ""))
        for ident, device in cluster.devices.items()
    }
    return Cluster(cluster.nodes, devices, cluster.homes, cluster.chains, cluster.roles)


def mixed(nodes: int, *, each: int = 6, targets: int = 16, domains: int = 0) -> Cluster:
    """Every node has a kv, a bulk and a plain device; a table of two replicas lies on each kind."""
    bare = build(nodes, devices=3, targets=targets, tables=(), domains=domains)
    bare = with_roles(bare, {0: "kv", 1: "bulk"})
    chains: dict[int, Chain] = {}
    free = {ident: list(device.free) for ident, device in bare.devices.items()}
    for table in (KV, BULK, PLAIN):
        places = [
            FreeDevice(device.node, 0, tuple(free[ident]), bare.nodes[device.node].domain)
            for ident, device in bare.devices.items()
            if ident[1] == table - 1
        ]
        for members in place(2, places, each):
            number = len(chains) + 1
            chains[number] = Chain(number, table, members, frozenset(members), members)
            for target in members:
                free[bare.homes[target]].remove(target)
    devices = {i: dataclasses.replace(d, free=tuple(free[i])) for i, d in bare.devices.items()}
    return Cluster(bare.nodes, devices, bare.homes, chains, {KV: "kv", BULK: "bulk"})


def done(cluster: Cluster, plan: Plan) -> Cluster:
    made = after(cluster, plan)
    return Cluster(made.nodes, made.devices, made.homes, made.chains, cluster.roles)


def keeps_roles(cluster: Cluster, plan: Plan) -> None:
    for change in plan.changes:
        for target in change.fill:
            assert cluster.devices[cluster.homes[target]].role == cluster.role_of(change.chain), change


@pytest.mark.parametrize("seed", range(8))
def test_drains_rebalances_and_replacements_keep_to_the_role(seed: int) -> None:
    rng = random.Random(seed)
    cluster = mixed(rng.randrange(4, 7), each=rng.randrange(3, 7), domains=rng.choice([0, 3]))
    leaving = rng.choice(sorted(cluster.nodes))
    plan = plans.drain(cluster, {leaving})
    obeys(cluster, plan)
    keeps_roles(cluster, plan)
    moved = done(cluster, plan)
    assert not any(moved.node_of(target) == leaving for c in moved.chains.values() for target in c.goal), seed
    one = rng.choice(sorted(cluster.devices))
    targets = {t for c in cluster.chains.values() for t in c.goal if cluster.homes[t] == one}
    plan = plans.replace(cluster, targets, None)
    obeys(cluster, plan)
    keeps_roles(cluster, plan)
    bigger = grown(cluster, 90, devices=3)
    bigger = Cluster(
        bigger.nodes,
        with_roles(bigger, {0: "kv", 1: "bulk"}).devices,
        bigger.homes,
        bigger.chains,
        cluster.roles,
    )
    plan = rebalance(bigger)
    obeys(bigger, plan, evening_out=True)
    keeps_roles(bigger, plan)
    assert {bigger.devices[bigger.homes[t]].role for c in plan.changes for t in c.fill} == {"kv", "bulk", ""}
    assert rebalance(done(bigger, plan)).changes == ()


def test_a_drain_is_refused_when_only_devices_of_other_roles_have_room() -> None:
    cluster = mixed(3)
    others = {
        ident: dataclasses.replace(
            device, role="bulk" if device.role == "kv" and device.node == 3 else device.role
        )
        for ident, device in cluster.devices.items()
    }
    only_two = Cluster(cluster.nodes, others, cluster.homes, cluster.chains, cluster.roles)
    with pytest.raises(InvalidArgument, match="with devices of role kv would be left"):
        plans.drain(only_two, {1})
    full = {
        i: dataclasses.replace(d, free=() if d.role == "kv" else d.free) for i, d in cluster.devices.items()
    }
    with pytest.raises(NoSpace):
        plans.drain(Cluster(cluster.nodes, full, cluster.homes, cluster.chains, cluster.roles), {1})


def test_a_person_is_refused_a_device_of_another_role() -> None:
    cluster = mixed(4)
    chain = next(c for c in cluster.chains.values() if c.table == KV)
    free = next(n for n in cluster.nodes if n not in {cluster.node_of(t) for t in chain.goal})
    with pytest.raises(
        InvalidArgument, match=r"has role bulk, and chain \d+ belongs on devices with role kv"
    ):
        plans.replace(cluster, {chain.goal[0]}, uuid(free, 1))
    with pytest.raises(InvalidArgument, match="has no role"):
        plans.replace(cluster, {chain.goal[0]}, uuid(free, 2))
    keeps_roles(cluster, plans.replace(cluster, {chain.goal[0]}, uuid(free, 0)))


def test_a_rebalance_takes_targets_off_devices_whose_role_has_changed() -> None:
    """As when roles are given to a cluster that had none: its table has none, so it leaves the kv devices."""
    plain = build(4, devices=2, targets=32, tables=((2, 8),))
    cluster = with_roles(plain, {0: "kv"})
    moved = cluster
    while (plan := rebalance(moved)).changes:  # a chain moves one target at a time
        obeys(moved, plan, evening_out=True)
        keeps_roles(moved, plan)
        moved = done(moved, plan)
    assert all(moved.devices[moved.homes[t]].role == "" for c in moved.chains.values() for t in c.goal)
    nowhere = with_roles(plain, {0: "kv", 1: "kv"})
    assert rebalance(nowhere).changes == ()  # no device without a role: all stays where it is


def test_without_roles_nothing_is_different() -> None:
    cluster = build(5, devices=2, targets=32, tables=((3, 8),))
    assert plans.drain(cluster, {1}) == plans.drain(with_roles(cluster, {}), {1})
    assert isinstance(next(iter(cluster.devices.values())), Device)
    assert isinstance(cluster.nodes[1], Node)

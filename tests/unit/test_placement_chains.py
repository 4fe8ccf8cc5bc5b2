"""metadata.cluster.placement: golden vectors, and what must hold for any cluster."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from ffs.errors import InvalidArgument
from metadata.cluster.placement import FreeDevice, place

GOLDEN = Path(__file__).parents[1] / "golden" / "control" / "chains.json"


def cluster(nodes: int, devices: int = 1, targets: int = 64) -> list[FreeDevice]:
    ids = itertools.count(1)
    return [
        FreeDevice(node, device, tuple(next(ids) for _ in range(targets)))
        for node in range(1, nodes + 1)
        for device in range(devices)
    ]


def node_of(devices: list[FreeDevice]) -> dict[int, int]:
    return {target: device.node for device in devices for target in device.targets}


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"])
def test_golden(case) -> None:  # type: ignore[no-untyped-def]
    devices = [FreeDevice(d["node"], d["device"], tuple(d["targets"])) for d in case["devices"]]
    placed = place(case["replicas"], devices, case["targets_per_device"])
    assert [list(chain) for chain in placed] == case["chains"]
    assert place(case["replicas"], devices[::-1], case["targets_per_device"]) == placed


def test_development_cluster() -> None:
    """Three nodes of one device: 32 three-way chains, then 96 of one replica from the other half."""
    devices = cluster(3)
    chains = place(3, devices, 32)
    assert len(chains) == 32
    homes = node_of(devices)
    assert all(len({homes[t] for t in chain}) == 3 for chain in chains)
    heads = Counter(homes[chain[0]] for chain in chains)
    assert max(heads.values()) - min(heads.values()) <= 1
    rest = [FreeDevice(d.node, d.device, d.targets[32:]) for d in devices]
    assert len(place(1, rest, 32)) == 96


def test_pairs_are_spread() -> None:
    devices = cluster(8, 2, 32)
    homes = node_of(devices)
    pairs = Counter(
        tuple(sorted(pair))
        for chain in place(3, devices, 32)
        for pair in itertools.combinations((homes[t] for t in chain), 2)
    )
    assert len(pairs) == 28
    assert max(pairs.values()) <= 1.5 * min(pairs.values())


def test_any_cluster() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        ids = itertools.count(1)
        devices = [
            FreeDevice(node, device, tuple(next(ids) for _ in range(rng.randrange(0, 20))))
            for node in range(1, rng.randrange(2, 9))
            for device in range(rng.randrange(1, 4))
        ]
        replicas = rng.randrange(1, 5)
        limit = rng.randrange(1, 24)
        free = Counter()  # type: ignore[var-annotated]
        for device in devices:
            free[device.node] += min(limit, len(device.targets))
        try:
            chains = place(replicas, devices, limit)
        except InvalidArgument:
            assert sum(1 for count in free.values() if count) < replicas
            continue
        homes = node_of(devices)
        used = [target for chain in chains for target in chain]
        assert len(set(used)) == len(used)
        for chain in chains:
            assert len({homes[target] for target in chain}) == replicas
        n = len(chains)  # one more would not fit
        assert sum(min(count, n + 1) for count in free.values()) < (n + 1) * replicas


def test_any_cluster_with_domains() -> None:
    """Distinct domains and as many chains as they allow; with too few domains, as evenly as they allow."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        ids = itertools.count(1)
        labels = rng.randrange(1, 6)
        devices = [
            FreeDevice(node, 0, tuple(next(ids) for _ in range(rng.randrange(1, 20))), f"r{node % labels}")
            for node in range(1, rng.randrange(4, 12))
        ]
        replicas = rng.randrange(1, 4)
        homes = node_of(devices)
        domains = {device.node: device.domain for device in devices}
        free = Counter()  # type: ignore[var-annotated]
        for device in devices:
            free[device.domain] += len(device.targets)
        chains = place(replicas, devices, 64)
        for chain in chains:
            assert len({homes[target] for target in chain}) == replicas
            if len(free) >= replicas:
                assert len({domains[homes[target]] for target in chain}) == replicas
        if len(free) >= replicas:
            n = len(chains)
            assert sum(min(count, n + 1) for count in free.values()) < (n + 1) * replicas
        else:
            most = Counter(domains[homes[target]] for target in chains[0])
            assert max(most.values()) - min(most.values()) <= 1


def test_refusals_say_why() -> None:
    with pytest.raises(InvalidArgument, match=r"3 replicas on distinct nodes, and 2 nodes have.*start more"):
        place(3, cluster(2), 32, name="default")
    with pytest.raises(InvalidArgument, match="1 node has"):
        place(2, cluster(1, 4), 32)
    with pytest.raises(InvalidArgument, match="1 to 8"):
        place(0, cluster(3), 32)
    with pytest.raises(InvalidArgument, match="1 to 8"):
        place(9, cluster(9), 32)
    with pytest.raises(InvalidArgument, match="1 or more"):
        place(1, cluster(1), 0)

"""Which targets form the chains of a new table. Pure, and the same in every release: what this
gives is stored once, and golden vectors pin it (tests/golden/control/chains.json, tests/golden/placement).
docs/control_plane.md, Tables. Changing the chains of an existing table is metadata.cluster.plan.

Rules, in order of weight:
1. the replicas of a chain lie on distinct nodes, and in distinct failure domains where there are as many
   domains as replicas; else as evenly over domains as they allow. A node without a label is its own domain;
2. as many chains as the free targets allow, so none is stranded by an unlucky order;
3. every pair of nodes shares about the same number of chains, so that a lost node's load falls on
   all others alike;
4. every device heads about the same number of chains;
ties are broken by a published integer mixing (ffs.layout.mix64), never by the order of a dict or
by a random number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ffs.errors import InvalidArgument
from ffs.layout import mix64
from ffs.proto.cluster import MAX_REPLICAS

_GAMMA = 0x9E37_79B9_7F4A_7C15
_MASK = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class FreeDevice:
    """A device with targets that no chain has yet, ascending."""

    node: int
    device: int  # any number that orders the devices of a node; only compared
    targets: tuple[int, ...]
    domain: str = ""  # failure domain of the node


Domain = tuple[str, int]


def domain_of(node: int, label: str) -> Domain:
    """The failure domain of a node: its label, or itself."""
    return (label, 0) if label else ("", node)


def place(
    replicas: int, devices: Sequence[FreeDevice], targets_per_device: int, *, name: str = "table"
) -> list[tuple[int, ...]]:
    """The chains: tuples of target ids, head first. Uses at most `targets_per_device` of each device.

    Raises InvalidArgument, with the reason and the way out, when not one chain can be made."""
    if not 1 <= replicas <= MAX_REPLICAS:
        raise InvalidArgument(f"table {name}: {replicas} replicas: give 1 to {MAX_REPLICAS}")
    if targets_per_device < 1:
        raise InvalidArgument(f"table {name}: {targets_per_device} chains a device: give 1 or more")
    slots = {
        (device.node, device.device): list(device.targets[:targets_per_device])
        for device in sorted(devices, key=lambda d: (d.node, d.device))
    }
    nodes = sorted({node for (node, _), free in slots.items() if free})
    if len(nodes) < replicas:
        raise InvalidArgument(
            f"table {name} wants {replicas} replicas on distinct nodes, and {len(nodes)} "
            f"{'node has' if len(nodes) == 1 else 'nodes have'} free targets: start more storage nodes, "
            "or ask for fewer replicas"
        )
    domains = {device.node: domain_of(device.node, device.domain) for device in devices}
    placing = _Placing(slots, replicas, domains)
    if len({domains[node] for node in nodes}) >= replicas:
        return [placing.next_chain(number) for number in range(_chain_count(placing.of_domain, replicas))]
    chains: list[tuple[int, ...]] = []
    while sum(1 for free in placing.of_node.values() if free) >= replicas:
        chains.append(placing.next_chain(len(chains)))
    return chains


def _chain_count(free: Mapping[Domain, int], replicas: int) -> int:
    """The most that distinct domains allow: n such that sum(min(free of domain, n)) >= n * replicas."""
    low, high = 0, sum(free.values()) // replicas
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(count, middle) for count in free.values()) >= middle * replicas:
            low = middle
        else:
            high = middle - 1
    return low


class _Placing:
    """The greedy's memory."""

    def __init__(
        self, slots: dict[tuple[int, int], list[int]], replicas: int, domains: Mapping[int, Domain]
    ) -> None:
        self._slots = slots
        self._replicas = replicas
        self._domains = domains
        self.of_node: dict[int, int] = {}  # free targets
        self.of_domain: dict[Domain, int] = {}
        for (node, _), targets in slots.items():
            self._count(node, len(targets))
        self._pairs: dict[tuple[int, int], int] = {}
        self._heads: dict[tuple[int, int], int] = {}

    def _count(self, node: int, change: int) -> None:
        domain = self._domains[node]
        self.of_node[node] = self.of_node.get(node, 0) + change
        self.of_domain[domain] = self.of_domain.get(domain, 0) + change

    def next_chain(self, number: int) -> tuple[int, ...]:
        nodes = self._pick_nodes(number)
        places = [self._pick_device(node) for node in nodes]
        head = min(
            range(len(places)),
            key=lambda at: (self._heads.get(places[at], 0), _tie(number, places[at][0], 3)),
        )
        places = [*places[head:], *places[:head]]
        self._heads[places[0]] = self._heads.get(places[0], 0) + 1
        for a in nodes:
            self._count(a, -1)
            for b in nodes:
                if a != b:
                    self._pairs[a, b] = self._pairs.get((a, b), 0) + 1
        return tuple(self._slots[place].pop(0) for place in places)

    def _pick_nodes(self, number: int) -> list[int]:
        """Another domain (rule 1), the fullest stock (rule 2), then the least shared chains (rule 3)."""
        chosen: list[int] = []
        for turn in range(self._replicas):
            taken = Counter(self._domains[node] for node in chosen)
            chosen.append(
                min(
                    (node for node, free in self.of_node.items() if free and node not in chosen),
                    key=lambda node: (
                        taken[self._domains[node]],
                        -self.of_domain[self._domains[node]],
                        -self.of_node[node],
                        sum(self._pairs.get((node, other), 0) for other in chosen),
                        _tie(number, node, turn),
                    ),
                )
            )
        return chosen

    def _pick_device(self, node: int) -> tuple[int, int]:
        return min(
            (place for place, targets in self._slots.items() if place[0] == node and targets),
            key=lambda place: (-len(self._slots[place]), place),
        )


def _tie(number: int, node: int, turn: int) -> int:
    return mix64((mix64((number * _GAMMA + turn + 1) & _MASK) ^ node) & _MASK)

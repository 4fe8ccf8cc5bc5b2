"""Which targets chains shall end with, when nodes come, go or fill unevenly. Pure. docs/operations.md.

A plan is a list of changes of chains' *goals* (ChainRecord.wanted, or the members where it is empty): what
is planned is stored at once, and the manager makes chains follow one sync at a time, so nothing of a plan
must be remembered. Rules, for each target that is given a new place:

1. another node than the chain's other targets; never one that is draining, silent, or whose device failed;
   and a device of the role of the chain's table (one without a role where the table has none);
2. a failure domain with as few of the chain's other targets as any such node has: none, where there are
   enough domains. Room elsewhere is no reason to break this; too few domains are, and the plan says so;
3. the device that is the least full of this table's targets for its capacity, then of all targets;
4. the node that shares the fewest chains with the chain's other nodes, so that the load of a lost one falls
   on all others alike; then ffs.layout.mix64 of chain and device.

Where room is tight, places that this plan gave are given again (augmenting paths), so a drain is refused only
if there is no way. Nothing depends on the order of a dict; tests/golden/placement pins results.
metadata.cluster.balance has the evening out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ffs.errors import InvalidArgument, NoSpace
from ffs.layout import mix64
from ffs.proto.cluster import MAX_REPLICAS
from metadata.cluster.placement import Domain, domain_of

_MASK = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Node:
    id: int
    name: str
    domain: str = ""
    alive: bool = True
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """`free`: targets that no chain has or wants, ascending. `usable`: here, and it hasn't failed."""

    uuid: bytes
    node: int
    path: str
    capacity_bytes: int
    free_bytes: int
    free: tuple[int, ...]
    usable: bool = True
    role: str = ""

    @property
    def weight(self) -> int:
        """Its share of targets. Coarse (five binary digits), so that disks of one kind weigh the same."""
        size = max(1, self.capacity_bytes >> 20)
        drop = max(0, size.bit_length() - 5)
        return size >> drop << drop


@dataclass(frozen=True, slots=True)
class Chain:
    id: int
    table: int
    members: tuple[int, ...]
    serving: frozenset[int]
    goal: tuple[int, ...]  # never empty
    used_bytes: int = 0  # what a new replica has to hold


@dataclass(frozen=True, slots=True)
class Cluster:
    nodes: Mapping[int, Node]
    devices: Mapping[bytes, Device]
    homes: Mapping[int, bytes]  # target -> device
    chains: Mapping[int, Chain]
    roles: Mapping[int, str] = field(default_factory=dict)  # by table; without an entry: none

    def role_of(self, chain: int) -> str:
        """Of the devices that the chain's targets belong on."""
        return self.roles.get(self.chains[chain].table, "")

    def node_of(self, target: int) -> int:
        return self.devices[self.homes[target]].node


@dataclass(frozen=True, slots=True)
class Change:
    """A chain's goal, before and after. `fill`: targets that are new in it."""

    chain: int
    before: tuple[int, ...]
    goal: tuple[int, ...]
    fill: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    unplaced: int = 0  # targets that found no place


@dataclass(slots=True)
class Draft:
    """Goals and counts as they would be. Starts as the cluster is."""

    cluster: Cluster
    goals: dict[int, tuple[int, ...]] = field(init=False)
    free: dict[bytes, list[int]] = field(init=False)
    room: dict[bytes, int] = field(init=False)  # bytes
    on_device: Counter[bytes] = field(init=False)  # targets in goals
    of_table: Counter[tuple[int, bytes]] = field(init=False)
    heads: Counter[tuple[int, bytes]] = field(init=False)
    pairs: Counter[tuple[int, int]] = field(init=False)
    lying: dict[tuple[int, bytes], set[int]] = field(init=False)  # (table, device) -> chains

    def __post_init__(self) -> None:
        self.goals = {}
        self.free = {uuid: sorted(device.free) for uuid, device in self.cluster.devices.items()}
        self.room = {uuid: device.free_bytes for uuid, device in self.cluster.devices.items()}
        self.on_device, self.of_table, self.heads = Counter(), Counter(), Counter()
        self.pairs, self.lying = Counter(), {}
        for number in sorted(self.cluster.chains):
            self._count(number, self.cluster.chains[number].goal, 1)
            self.goals[number] = self.cluster.chains[number].goal

    def set_goal(self, chain: int, goal: tuple[int, ...]) -> None:
        before = self.goals[chain]
        used = self.cluster.chains[chain].used_bytes
        held = set(self.cluster.chains[chain].members)
        for target in set(before) - set(goal) - held - set(self.cluster.chains[chain].goal):
            home = self.cluster.homes[target]
            self.free[home] = sorted([*self.free[home], target])
            self.room[home] += used
        for target in set(goal) - set(before):
            home = self.cluster.homes[target]
            if target in self.free[home]:
                self.free[home].remove(target)
                self.room[home] -= used
        self._count(chain, before, -1)
        self._count(chain, goal, 1)
        self.goals[chain] = goal

    def _count(self, chain: int, goal: Sequence[int], by: int) -> None:
        table = self.cluster.chains[chain].table
        homes = [self.cluster.homes[target] for target in goal]
        self.heads[table, homes[0]] += by
        nodes = [self.cluster.devices[home].node for home in homes]
        for at, home in enumerate(homes):
            self.on_device[home] += by
            self.of_table[table, home] += by
            lying = self.lying.setdefault((table, home), set())
            lying.add(chain) if by > 0 else lying.discard(chain)
            for other, node in enumerate(nodes):
                if other != at:
                    self.pairs[nodes[at], node] += by

    # where a target may go

    def domain(self, node: int) -> Domain:
        return domain_of(node, self.cluster.nodes[node].domain)

    def others(self, chain: int, leaving: int) -> list[int]:
        """Nodes of the goal's other targets."""
        return [self.cluster.node_of(target) for target in self.goals[chain] if target != leaving]

    def shares_domain(self, node: int, others: Collection[int]) -> int:
        return sum(self.domain(node) == self.domain(other) for other in others)

    def legal_nodes(self, chain: int, leaving: int) -> set[int]:
        """Rules 1 and 2, without regard to room."""
        others = self.others(chain, leaving)
        role = self.cluster.role_of(chain)
        able = {d.node for d in self.cluster.devices.values() if d.usable and d.role == role}
        shares = {
            node: self.shares_domain(node, others)
            for node in able
            if node not in others and self.takes(self.cluster.nodes[node])
        }
        least = min(shares.values(), default=0)
        return {node for node, count in shares.items() if count == least}

    @staticmethod
    def takes(node: Node) -> bool:
        return node.alive and not node.draining

    def fits(self, chain: int, leaving: int) -> bool:
        """Whether the chain's record can name all that serve now and all of the goal, and one more."""
        staying = set(self.goals[chain]) - {leaving}
        return len(self.cluster.chains[chain].serving | staying) < MAX_REPLICAS

    def has_room(self, chain: int, device: Device) -> bool:
        used = self.cluster.chains[chain].used_bytes
        return self.suits(chain, device) and bool(self.free[device.uuid]) and self.room[device.uuid] >= used

    def suits(self, chain: int, device: Device) -> bool:
        """Whether it may hold a target of the chain at all."""
        return device.usable and device.role == self.cluster.role_of(chain)

    def score(self, chain: int, device: Device, others: Iterable[int]) -> tuple[int, int, int, int]:
        """Rules 3 and 4: the least is the best."""
        table = self.cluster.chains[chain].table
        uuid = device.uuid
        return (
            ((self.of_table[table, uuid] + 1) << 32) // device.weight,
            ((self.on_device[uuid] + 1) << 32) // device.weight,
            sum(self.pairs[device.node, other] for other in others),
            tie(chain, uuid),
        )

    def put(self, chain: int, leaving: int, device: bytes) -> None:
        """Gives the leaving target's place in the goal to the first free target of the device."""
        target = self.free[device][0]
        self.set_goal(chain, tuple(target if t == leaving else t for t in self.goals[chain]))

    def plan(self, notes: Sequence[str] = (), unplaced: int = 0) -> Plan:
        changes = []
        for number, goal in sorted(self.goals.items()):
            before = self.cluster.chains[number].goal
            if goal != before:
                fill = tuple(target for target in goal if target not in before)
                changes.append(Change(number, before, goal, fill))
        notes = (*notes, *self.domain_notes(change.chain for change in changes))
        return Plan(tuple(changes), notes, unplaced)

    def shared_domain(self, chain: int) -> str:
        """The label of a failure domain that holds two of the goal's targets; ""."""
        counts = Counter(self.domain(self.cluster.node_of(target)) for target in self.goals[chain])
        return min((label for (label, _), count in counts.items() if count > 1), default="")

    def domain_notes(self, chains: Iterable[int]) -> tuple[str, ...]:
        shared = Counter(label for chain in chains if (label := self.shared_domain(chain)))
        return tuple(
            f"{some(count, 'chain')} will have two replicas in failure domain {label}: too few domains"
            for label, count in sorted(shared.items())
        )


def tie(chain: int, device: bytes) -> int:
    """An order of devices that differs from chain to chain."""
    return mix64((mix64(chain) ^ int.from_bytes(device[:8], "big")) & _MASK)


# --- giving places ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seeking:
    """Targets that leave, and where this plan has put each."""

    draft: Draft
    banned: frozenset[bytes] = frozenset()  # devices that get nothing
    placed: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (chain, leaving) -> device
    legal: dict[tuple[int, ...], list[Device]] = field(default_factory=dict)  # by chain and its other nodes

    def seek(self, chain: int, leaving: int, only: Collection[bytes] | None = None) -> bool:
        """Finds a place, moving others that this plan has placed if need be (unless `only` there)."""
        if not self.draft.fits(chain, leaving):
            return False
        return self._try(chain, leaving, only, set())

    def _try(self, chain: int, leaving: int, only: Collection[bytes] | None, seen: set[bytes]) -> bool:
        draft = self.draft
        others = draft.others(chain, leaving)
        devices = self._devices(chain, leaving, others)
        able = [d for d in devices if (only is None or d.uuid in only) and draft.has_room(chain, d)]
        if able:
            best = min(able, key=lambda device: draft.score(chain, device, others))
            self._place(chain, leaving, best.uuid)
            return True
        if only is not None:
            return False
        for device in devices:
            if device.uuid in seen:
                continue
            seen.add(device.uuid)
            for key in sorted(key for key, place in self.placed.items() if place == device.uuid):
                self._take_back(*key)
                if draft.has_room(chain, device):
                    self._place(chain, leaving, device.uuid)
                    if self._try(*key, None, seen):
                        return True
                    self._take_back(chain, leaving)
                self._place(*key, device.uuid)
        return False

    def _devices(self, chain: int, leaving: int, others: Sequence[int]) -> list[Device]:
        """Where it may go by rules 1 and 2, with or without room."""
        found = self.legal.get((chain, *others))
        if found is None:
            nodes = self.draft.legal_nodes(chain, leaving)
            found = [
                device
                for _, device in sorted(self.draft.cluster.devices.items())
                if self.draft.suits(chain, device) and device.node in nodes and device.uuid not in self.banned
            ]
            self.legal[chain, *others] = found
        return found

    def _place(self, chain: int, leaving: int, device: bytes) -> None:
        self.draft.put(chain, leaving, device)
        self.placed[chain, leaving] = device

    def _take_back(self, chain: int, leaving: int) -> None:
        device = self.placed.pop((chain, leaving))
        draft = self.draft
        before = draft.cluster.chains[chain].goal
        goal = tuple(
            leaving if draft.cluster.homes[t] == device and t not in before else t for t in draft.goals[chain]
        )
        draft.set_goal(chain, goal)


def drain(cluster: Cluster, nodes: Collection[int], *, partly: bool = False) -> Plan:
    """New places for all targets of these nodes. Refuses (InvalidArgument, NoSpace) when one finds none;
    `partly` places what it can and counts the rest."""
    leaving = [
        (number, target)
        for number, chain in sorted(cluster.chains.items())
        for target in chain.goal
        if cluster.node_of(target) in nodes
    ]
    draft = Draft(_draining(cluster, nodes))
    seeking = _Seeking(draft)
    unplaced = [place for place in leaving if not seeking.seek(*place)]
    notes = []
    if unplaced:
        refusal = _refusal(draft, unplaced, len(leaving))
        if not partly:
            raise refusal
        notes.append(refusal.message)
    return draft.plan(notes, len(unplaced))


def _draining(cluster: Cluster, nodes: Collection[int]) -> Cluster:
    changed = {
        number: Node(node.id, node.name, node.domain, node.alive, node.draining or number in nodes)
        for number, node in cluster.nodes.items()
    }
    return Cluster(changed, cluster.devices, cluster.homes, cluster.chains, cluster.roles)


def undo_drain(cluster: Cluster, node: int) -> Plan:
    """What hasn't left yet stays: a target of the node that is still a member takes its place back from one
    that doesn't serve yet."""
    draft = Draft(cluster)
    for number, chain in sorted(cluster.chains.items()):
        for target in chain.members:
            if cluster.node_of(target) == node and target not in draft.goals[number]:
                goal = draft.goals[number]
                late = [t for t in goal if t not in chain.members]
                late = late or [t for t in goal if t not in chain.serving]
                if late:
                    draft.set_goal(number, tuple(target if t == late[0] else t for t in goal))
    return draft.plan()


def replace(
    cluster: Cluster, targets: Collection[int], device: bytes | None, prefer: Collection[bytes] = ()
) -> Plan:
    """Other targets in the place of these: on `device`, else on one of `prefer` where the rules allow it,
    else where there is room, but on none of the devices that are left."""
    draft = Draft(cluster)
    seeking = _Seeking(draft, frozenset(cluster.homes[target] for target in targets))
    leaving = [
        (number, target)
        for number, chain in sorted(cluster.chains.items())
        for target in chain.goal
        if target in targets
    ]
    unplaced = []
    for chain, target in leaving:
        if device is not None:
            _put_there(draft, chain, target, cluster.devices[device])
        elif not seeking.seek(chain, target, prefer) and not seeking.seek(chain, target):
            unplaced.append((chain, target))
    if unplaced:
        raise _refusal(draft, unplaced, len(leaving))
    return draft.plan()


def _put_there(draft: Draft, chain: int, leaving: int, device: Device) -> None:
    """On this device, as a person wishes, or InvalidArgument or NoSpace."""
    cluster = draft.cluster
    node = cluster.nodes[device.node]
    where = f"{device.path} of node {node.name}"
    if device.node in draft.others(chain, leaving):
        raise InvalidArgument(f"chain {chain} has another replica on that node: choose another one", where)
    if not device.usable or not node.alive:
        raise InvalidArgument("isn't there, or has failed: start its node with it first", where)
    if node.draining:
        raise InvalidArgument("its node is being drained: choose another, or undo the drain", where)
    role = cluster.role_of(chain)
    if device.role != role:
        raise InvalidArgument(
            f"has {role_words(device.role)}, and chain {chain} belongs on devices with {role_words(role)}: "
            "choose another device",
            where,
        )
    if not draft.fits(chain, leaving):
        raise _refusal(draft, [(chain, leaving)], 1)
    if not draft.has_room(chain, device):
        free, room = some(len(draft.free[device.uuid]), "free target"), draft.room[device.uuid]
        raise NoSpace(f"has {free} and {room} bytes free: too little for chain {chain}", where)
    draft.put(chain, leaving, device.uuid)


def _refusal(draft: Draft, unplaced: Sequence[tuple[int, int]], total: int) -> InvalidArgument | NoSpace:
    """Why these find no place, and the way out."""
    cluster = draft.cluster
    begin = f"{len(unplaced)} of {some(total, 'target')} to move"
    verb = "finds" if len(unplaced) == 1 else "find"
    lone = [chain for chain, target in unplaced if not draft.legal_nodes(chain, target)]
    if lone:
        replicas = len(draft.goals[lone[0]])
        role = cluster.role_of(lone[0])
        nodes = {d.node for d in cluster.devices.values() if d.usable and d.role == role}
        able = sum(Draft.takes(node) for node in cluster.nodes.values() if not role or node.id in nodes)
        of_role, another = (
            (f" with devices of role {role}", "another such node") if role else ("", "another node")
        )
        return InvalidArgument(
            f"{begin} {verb} no node: chain {lone[0]} keeps {some(replicas, 'replica')} on distinct nodes, "
            f"and {some(able, 'node')}{of_role} would be left to take them: start {another} first"
        )
    full = [chain for chain, target in unplaced if not draft.fits(chain, target)]
    if full:
        return InvalidArgument(
            f"chain {full[0]} would have more than {MAX_REPLICAS} replicas while a new one is filled: "
            "stop the server of the one that is to go first"
        )
    nodes = set[int]().union(*(draft.legal_nodes(chain, target) for chain, target in unplaced))
    roles = {cluster.role_of(chain) for chain, _ in unplaced}
    places = [d for d in cluster.devices.values() if d.usable and d.node in nodes and d.role in roles]
    slots = sum(len(draft.free[device.uuid]) for device in places)
    if slots == 0:
        return NoSpace(
            f"{begin} {verb} no room: the nodes that may take them lack {some(len(unplaced), 'free target')} "
            "(a device has a fixed number of targets): add a node or a device"
        )
    most = max(cluster.chains[chain].used_bytes for chain, _ in unplaced)
    room = max(draft.room[device.uuid] for device in places)
    return NoSpace(
        f"{begin} {verb} no room: {some(slots, 'target')} would be free where the same chains have no other "
        f"replica, a target holds up to {most} bytes, and the emptiest device has {room} left: "
        "add a node or a device"
    )


def role_words(role: str) -> str:
    return f"role {role}" if role else "no role"


def some(count: int, noun: str) -> str:
    """'1 chain', '2 chains'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

"""Evening out: targets over devices, heads over devices. Pure. docs/operations.md, Growing.

Steps, each of which makes the whole more even (so it ends, and a second plan right after is empty):

0. a target on a device of another role than its table's goes to one of that role, where there is one;
1. a target that shares its failure domain with another one of its chain goes to where it shares less;
2. a target of a table goes from the device that is the fullest of that table's targets for its capacity to
   the least full one that may take it, while one of the two is a whole target away from its share; of the
   fullest one's chains that goes whose other nodes share the fewest chains with the new node;
3. heads are turned (no data moves), along a path of chains where no single turn helps.

Devices of draining or silent nodes, failed ones, and those of another role than the table's neither give nor
take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from metadata.cluster.plan import Cluster, Device, Draft, Plan, tie


def rebalance(cluster: Cluster, onto: int = 0, most: int = 2000) -> Plan:
    """At most about `most` targets move; `onto` not 0: only to devices of that node."""
    draft = Draft(cluster)
    devices = [
        d for _, d in sorted(cluster.devices.items()) if d.usable and Draft.takes(cluster.nodes[d.node])
    ]
    takers = [device for device in devices if onto in (0, device.node)]
    left = most - _leave_other_roles(draft, devices, takers, most)
    left -= _leave_shared_domains(draft, takers, left)
    tables = sorted({chain.table for chain in cluster.chains.values()})
    for table in tables:
        role = cluster.roles.get(table, "")
        mine = [device for device in devices if device.role == role]
        while left > 0 and _even_out(draft, table, mine, [d for d in takers if d.role == role]):
            left -= 1
    for table in tables:
        spread_heads(draft, [number for number, chain in cluster.chains.items() if chain.table == table])
    return draft.plan()


def _may_move(draft: Draft, chain: int, target: int) -> bool:
    """A chain on its way already is left to arrive: one thing at a time."""
    known = draft.cluster.chains[chain]
    return draft.goals[chain] == known.goal and set(known.goal) == known.serving and draft.fits(chain, target)


def _leave_other_roles(draft: Draft, devices: Sequence[Device], takers: Sequence[Device], most: int) -> int:
    moved = 0
    able = {device.uuid: device for device in devices}
    for number in sorted(draft.goals):
        for target in reversed(draft.goals[number]):
            home = able.get(draft.cluster.homes[target])
            if moved == most or home is None or draft.suits(number, home):
                continue
            if not _may_move(draft, number, target):
                continue
            nodes = draft.legal_nodes(number, target)
            places = [d for d in takers if d.node in nodes and draft.has_room(number, d)]
            if places:
                others = draft.others(number, target)
                draft.put(number, target, _least(draft, number, places, others).uuid)
                moved += 1
    return moved


def _leave_shared_domains(draft: Draft, takers: Sequence[Device], most: int) -> int:
    moved = 0
    for number in sorted(draft.goals):
        for target in reversed(draft.goals[number]):
            others = draft.others(number, target)
            shares = draft.shares_domain(draft.cluster.node_of(target), others)
            if moved == most or not shares or not _may_move(draft, number, target):
                continue
            nodes = draft.legal_nodes(number, target)
            places = [d for d in takers if d.node in nodes and draft.has_room(number, d)]
            better = [d for d in places if draft.shares_domain(d.node, others) < shares]
            if better:
                draft.put(number, target, _least(draft, number, better, others).uuid)
                moved += 1
    return moved


def _least(draft: Draft, chain: int, devices: Sequence[Device], others: Sequence[int]) -> Device:
    return min(devices, key=lambda device: draft.score(chain, device, others))


def _even_out(draft: Draft, table: int, devices: Sequence[Device], takers: Sequence[Device]) -> bool:
    """One move of step 2; False when none is left."""
    count = {device.uuid: draft.of_table[table, device.uuid] for device in devices}
    total, weights = sum(count.values()), sum(device.weight for device in devices)

    def fill(device: Device) -> int:
        return (count[device.uuid] << 32) // device.weight

    fullest = sorted((d for d in devices if count[d.uuid]), key=lambda d: (-fill(d), d.uuid))
    emptiest = sorted((d for d in takers if draft.free[d.uuid]), key=lambda d: (fill(d), d.uuid))
    for a in fullest:
        over = count[a.uuid] * weights - total * a.weight >= weights
        for b in emptiest:
            if fill(b) >= fill(a):
                break
            if (2 * count[a.uuid] - 1) * b.weight <= (2 * count[b.uuid] + 1) * a.weight:
                continue  # no gain
            under = total * b.weight - count[b.uuid] * weights >= weights
            if (over or under) and _move_one(draft, table, a, b):
                return True
    return False


def _move_one(draft: Draft, table: int, a: Device, b: Device) -> bool:
    """The best chain of the table that has a target on `a` and may have it on `b` instead."""
    best: tuple[tuple[int, int], int, int] | None = None
    for number, target in _on(draft, table, a.uuid):
        if not _may_move(draft, number, target) or not draft.has_room(number, b):
            continue
        others = draft.others(number, target)
        if b.node in others or draft.shares_domain(b.node, others) > draft.shares_domain(a.node, others):
            continue
        shared = sum(draft.pairs[b.node, other] - draft.pairs[a.node, other] for other in others)
        key = (shared, tie(number, b.uuid))
        if best is None or key < best[0]:
            best = (key, number, target)
    if best is None:
        return False
    draft.put(best[1], best[2], b.uuid)
    return True


def _on(draft: Draft, table: int, device: bytes) -> Iterator[tuple[int, int]]:
    homes = draft.cluster.homes
    for number in sorted(draft.lying.get((table, device), ())):
        yield from ((number, target) for target in draft.goals[number] if homes[target] == device)


# --- heads ---------------------------------------------------------------------------------------


def spread_heads(draft: Draft, chains: Collection[int]) -> None:
    """Turns the goals of these chains so that devices head about the same number of chains of a table.

    A head is handed on along a path of chains where no single turn helps: from a device that heads too many
    to one that heads too few."""
    for table in sorted({draft.cluster.chains[number].table for number in chains}):
        mine = sorted(number for number in chains if draft.cluster.chains[number].table == table)
        while path := _path_of_turns(draft, table, mine):
            for number, device in path:
                turn(draft, number, device)


def turn(draft: Draft, chain: int, device: bytes) -> None:
    """Makes the goal's target on the device its head."""
    goal = draft.goals[chain]
    at = next(at for at, target in enumerate(goal) if draft.cluster.homes[target] == device)
    draft.set_goal(chain, (*goal[at:], *goal[:at]))


def _path_of_turns(draft: Draft, table: int, chains: Sequence[int]) -> list[tuple[int, bytes]]:
    """(chain, its new head's device)...; []: as even as these chains allow."""
    homes, devices = draft.cluster.homes, draft.cluster.devices
    headed: dict[bytes, list[int]] = {}
    for number in chains:
        headed.setdefault(homes[draft.goals[number][0]], []).append(number)

    def gains(a: bytes, b: bytes) -> bool:
        """Whether one head fewer at a and one more at b is more even."""
        return (2 * draft.heads[table, a] - 1) * devices[b].weight > (
            2 * draft.heads[table, b] + 1
        ) * devices[a].weight

    for start in sorted(headed, key=lambda u: (-(draft.heads[table, u] << 32) // devices[u].weight, u)):
        came: dict[bytes, tuple[bytes, int]] = {start: (start, 0)}
        queue = [start]
        for at in queue:
            for number in headed.get(at, ()):
                for target in draft.goals[number]:
                    home = homes[target]
                    if home in came:
                        continue
                    came[home] = (at, number)
                    if gains(start, home):
                        return _walk_back(came, start, home)
                    queue.append(home)
    return []


def _walk_back(came: Mapping[bytes, tuple[bytes, int]], start: bytes, end: bytes) -> list[tuple[int, bytes]]:
    path = []
    at = end
    while at != start:
        before, number = came[at]
        path.append((number, at))
        at = before
    return path

"""What a storage node must know of the cluster: its chains, and where their members are. Pure but for
`Configs`, which keeps what was made and tells who waits for another. docs/control_plane.md, Heartbeats.

A recorded version is told to members that take part in it in their present incarnation, and to offline
ones, so that they know that they are out. One that restarted has lost its memory: it is told only the
proposal that takes it back. A proposal is told to those that it names as serving or syncing, and to those
that serve now and shall not any more, so that they stand down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ffs.proto.cluster import ChainRecord, ChainRoute, NodeConfig, TargetState
from metadata.cluster.members import Proposal, incarnation_in, serving_of, version_of
from metadata.cluster.moves import is_released, released
from metadata.cluster.routing import View

KEPT = 4  # configurations of a node whose numbers are still known


def chain_routes(
    record: ChainRecord, proposal: Proposal | None, target: int, incarnation: int
) -> list[ChainRoute]:
    """What a target, in that incarnation of its node, is told of its chain: recorded before proposed."""
    routes = []
    if record.counter and target in record.members:
        offline = record.states[record.members.index(target)] == TargetState.OFFLINE
        if offline or incarnation_in(record, target) == incarnation:
            routes.append(_route(record, proposed=False))
    if proposal is None or proposal.base != version_of(record):
        return routes
    named = incarnation_in(proposal.next, target)
    stands_down = (
        target in serving_of(record) and target not in serving_of(proposal.next) and not named
    ) and incarnation_in(record, target) == incarnation
    if named == incarnation or stands_down:
        routes.append(_route(proposal.next, proposed=True))
    return routes


def _route(record: ChainRecord, *, proposed: bool) -> ChainRoute:
    return ChainRoute(
        chain=record.id,
        table=record.table,
        term=record.term,
        counter=record.counter,
        members=record.members,
        states=record.states,
        proposed=proposed,
        incarnations=record.incarnations,
    )


def node_config(view: View, node_id: int, proposals: Mapping[int, Proposal]) -> NodeConfig:
    """All of it, under no number yet."""
    node = view.nodes[node_id]
    routes: dict[tuple[int, bool], ChainRoute] = {}  # two targets of a chain may share a node for a while
    members: set[int] = set()
    mine = sorted(target for device in node.devices for target in device.targets)
    for target_id in mine:
        target = view.targets.get(target_id)
        if target is None or target.chain == 0 or is_released(view, target):
            continue
        record = view.chains[target.chain]
        told = chain_routes(record, proposals.get(record.id), target_id, node.incarnation)
        routes.update(((route.chain, route.proposed), route) for route in told)
        members.update(member for route in told for member in route.members)
    return NodeConfig(
        number=(0, 0),
        epoch=view.epoch,
        chains=tuple(routes.values()),
        targets=tuple(view.target_route(view.targets[member]) for member in sorted(members)),
        released=released(view, node_id),
    )


@dataclass(slots=True)
class _Told:
    config: NodeConfig | None = None
    dirty: bool = True
    numbers: dict[tuple[int, int], NodeConfig] = field(default_factory=dict)  # the last KEPT
    waiters: set[asyncio.Future[None]] = field(default_factory=set)


class Configs:
    """The configurations of all nodes. One event loop."""

    def __init__(self, make: Callable[[int], NodeConfig]) -> None:
        """`make`: node_config of what is known now."""
        self._make = make
        self._told: dict[int, _Told] = {}
        self._count = 0  # never starts anew: a node knows its configuration by term and number

    def forget(self) -> None:
        """Another term begins."""
        for told in self._told.values():
            told.config, told.dirty = None, True
            _wake(told)

    def changed(self, nodes: Iterable[int]) -> None:
        """Something that these nodes are told may have changed: those that wait look again."""
        for node in nodes:
            told = self._told.get(node)
            if told is not None:
                told.dirty = True
                _wake(told)

    def of(self, node: int, term: int) -> NodeConfig:
        """The configuration now; a new number only if it differs from the last one."""
        told = self._told.setdefault(node, _Told())
        if told.config is not None and not told.dirty:
            return told.config
        made = self._make(node)
        last = told.config
        if last is None or _content(last) != _content(made):
            self._count += 1
            last = NodeConfig(
                number=(term, self._count),
                epoch=made.epoch,
                chains=made.chains,
                targets=made.targets,
                released=made.released,
            )
            told.numbers[last.number] = last
            while len(told.numbers) > KEPT:
                del told.numbers[next(iter(told.numbers))]
        told.config, told.dirty = last, False
        return last

    def numbered(self, node: int, number: tuple[int, int]) -> NodeConfig | None:
        """One that was given lately."""
        told = self._told.get(node)
        return None if told is None else told.numbers.get(number)

    async def wait(self, node: int, timeout_s: float) -> None:
        """Returns when `changed` names the node, or after timeout_s."""
        told = self._told.setdefault(node, _Told())
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        told.waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            told.waiters.discard(waiter)


def _wake(told: _Told) -> None:
    for waiter in told.waiters:
        if not waiter.done():
            waiter.set_result(None)


def _content(config: NodeConfig) -> object:
    return config.chains, config.targets, config.released

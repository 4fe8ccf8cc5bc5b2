"""What a storage node must know of the cluster: its chains, and where their members are. Pure.

docs/control_plane.md, Heartbeats. A member that restarted since its chain's version was recorded has
lost its memory: it isn't given that version, only the live proposal.
"""

from __future__ import annotations

from collections.abc import Mapping

from ffs.proto.cluster import ChainRecord, ChainRoute, TargetRoute, TargetState
from metadata.cluster.chain import Proposal, Version
from metadata.cluster.routing import View


def node_routes(
    view: View, node_id: int, proposals: Mapping[int, Proposal]
) -> tuple[tuple[ChainRoute, ...], tuple[TargetRoute, ...]]:
    """The chains of the node's targets, recorded before proposed, and the places of all their members."""
    mine = {target for device in view.nodes[node_id].devices for target in device.targets}
    routes: list[ChainRoute] = []
    members: set[int] = set()
    for chain_id in sorted({view.targets[target].chain for target in mine if target in view.targets}):
        if chain_id:
            record = view.chains[chain_id]
            routes += _chain_routes(view, record, mine, proposals.get(chain_id))
            members.update(record.members)
    return tuple(routes), tuple(view.target_route(view.targets[member]) for member in sorted(members))


def _chain_routes(
    view: View, record: ChainRecord, mine: set[int], proposal: Proposal | None
) -> list[ChainRoute]:
    routes = []
    now = view.incarnations(record)
    at = next(at for at, member in enumerate(record.members) if member in mine)
    recorded = (record.term, record.counter)
    if record.counter and record.incarnations[at] == now[at]:
        routes.append(_route(record, recorded, proposed=False))
    if proposal is not None and proposal.incarnations == now and proposal.version > recorded:
        routes.append(_route(record, proposal.version, proposed=True))
    return routes


def _route(record: ChainRecord, version: Version, *, proposed: bool) -> ChainRoute:
    return ChainRoute(
        chain=record.id,
        table=record.table,
        term=version[0],
        counter=version[1],
        members=record.members,
        states=(int(TargetState.SERVING),) * len(record.members),
        proposed=proposed,
    )

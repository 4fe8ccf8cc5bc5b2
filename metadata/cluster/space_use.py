"""What targets said last of the KV spaces that they hold, and what is shown of a space. One event loop.

docs/control_plane.md, Space policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ffs.proto.cluster import Heartbeat
from ffs.proto.records import KV_DEDUP, KV_EVICTABLE, KvIndexEntry
from ffs.proto.spaces import SpaceChainView, SpaceUse, SpaceView
from metadata.cluster.members import serving_of
from metadata.cluster.routing import View


@dataclass(slots=True)
class _Use:
    """What the present incarnation of a node said last."""

    incarnation: int
    of: dict[tuple[int, int], SpaceUse] = field(default_factory=dict)  # (target, space)


class SpaceUses:
    """Of the nodes' present incarnations; `view`: of now."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view
        self._of_nodes: dict[int, _Use] = {}

    def clear(self) -> None:
        """Another term."""
        self._of_nodes.clear()

    def heard(self, beat: Heartbeat) -> None:
        """A heartbeat that isn't late. One without use says nothing of it."""
        use = self._of_nodes.get(beat.node)
        if use is None or use.incarnation != beat.incarnation:
            use = self._of_nodes[beat.node] = _Use(beat.incarnation)
        if beat.space_use:
            use.of = {(said.target, said.space): said for said in beat.space_use}

    def of(self, space: int, chains: Iterable[int]) -> dict[int, SpaceUse]:
        """target -> what it said of the space, for members of these chains."""
        view = self._view()
        found: dict[int, SpaceUse] = {}
        for chain in chains:
            record = view.chains.get(chain)
            for member in record.members if record is not None else ():
                node = view.node_of(member)
                use = self._of_nodes.get(node.id)
                if use is not None and use.incarnation == node.incarnation:
                    said = use.of.get((member, space))
                    if said is not None:
                        found[member] = said
        return found

    def head(self, chain: int, of_targets: Mapping[int, SpaceUse]) -> SpaceUse | None:
        """What the chain holds: its first serving member that has said it."""
        record = self._view().chains.get(chain)
        if record is None:
            return None
        return next((of_targets[member] for member in serving_of(record) if member in of_targets), None)

    def evicted_bytes(self, chain: int, of_targets: Mapping[int, SpaceUse]) -> int:
        """By all that were its head."""
        record = self._view().chains.get(chain)
        members = record.members if record is not None else ()
        return sum(of_targets[member].evicted_bytes for member in members if member in of_targets)


def space_view(
    space: int, entry: KvIndexEntry, shares: Mapping[int, int], uses: SpaceUses | None, chains: bool
) -> SpaceView:
    """`uses` None: its bounds only; `chains`: with its chains one by one."""
    kv, layout = entry.kv, entry.layout
    of_targets = uses.of(space, shares) if uses is not None else {}
    heads = {chain: uses.head(chain, of_targets) for chain in shares} if uses is not None else {}
    known = [head for head in heads.values() if head is not None]
    said = of_targets.values()
    of_chains: tuple[SpaceChainView, ...] = ()
    if chains and uses is not None:
        of_chains = tuple(
            SpaceChainView(
                chain=chain,
                quota_bytes=shares[chain],
                known=head is not None,
                chunks=head.chunks if head is not None else 0,
                bytes=head.bytes if head is not None else 0,
                evicted_bytes=uses.evicted_bytes(chain, of_targets),
            )
            for chain, head in heads.items()
        )
    return SpaceView(
        space=space,
        table=layout.table,
        table_version=layout.table_version,
        block_bytes=kv.block_bytes,
        quota_bytes=kv.quota_bytes,
        ttl_ms=kv.ttl_ms,
        evictable=bool(kv.flags & KV_EVICTABLE),
        chunks=sum(head.chunks for head in known),
        bytes=sum(head.bytes for head in known),
        evicted_chunks=sum(use.evicted_chunks for use in said),
        evicted_bytes=sum(use.evicted_bytes for use in said),
        hits=sum(use.hits for use in said),
        expired_chunks=sum(use.expired_chunks for use in said),
        chains=len(shares),
        reported=len(known),
        shares=of_chains,
        dedup=bool(kv.flags & KV_DEDUP),
        shared_chunks=sum(head.shared_chunks for head in known),
        saved_bytes=sum(head.saved_bytes for head in known),
    )

"""KV spaces as the cluster's messages name them: policies for storage processes, their use, views.
docs/control_plane.md, Space policies."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

SPACE_EVICTABLE: Final = 1  # SpacePolicy.flags; ffs_space_policy.flags
SPACE_DEDUP: Final = 2


class SpacePolicy(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """How a chain keeps a KV space (ffs_space_policy): `quota_bytes` is the chain's share of the space's
    quota, 0: no bound but the device; `ttl_ms` in manager time, 0: none."""

    space: int
    chain: int
    quota_bytes: int = 0
    ttl_ms: int = 0
    flags: int = 0  # SPACE_EVICTABLE, SPACE_DEDUP


class SpaceConfig(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """The policies of all KV spaces on the chains of a node: they replace those before. A space that isn't in
    it is never evicted from."""

    revision: tuple[int, int]  # manager's term, number in it
    policies: tuple[SpacePolicy, ...]


class SpaceUse(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """What a target holds of a KV space (ffs_space_use). The counters begin at 0 with each incarnation, and
    only the head that orders an eviction counts it."""

    target: int
    space: int
    chunks: int
    bytes: int  # as allocated
    evicted_chunks: int = 0
    evicted_bytes: int = 0
    hits: int = 0
    expired_chunks: int = 0  # removed since they had outlived their TTL; not among the evicted
    shared_chunks: int = 0  # of the chunks: in a slot that others of the space have too
    saved_bytes: int = 0  # slots that there would be without


class SpaceChainView(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """A chain of a KV space: its share of the quota, and what its head says (`known`: it has said it)."""

    chain: int
    quota_bytes: int
    known: bool
    chunks: int
    bytes: int
    evicted_bytes: int


class SpaceView(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """A KV space: its bounds, and its use as the heads of its chains say; `reported` of its `chains` have
    said it. Evictions and hits are counted since the servers started."""

    space: int  # inode id
    table: int
    table_version: int
    block_bytes: int
    quota_bytes: int  # 0: none
    ttl_ms: int  # 0: none
    evictable: bool
    chunks: int
    bytes: int  # as allocated, on one replica
    evicted_chunks: int
    evicted_bytes: int
    hits: int
    chains: int
    reported: int
    shares: tuple[SpaceChainView, ...] = ()  # where one space was asked for
    expired_chunks: int = 0
    dedup: bool = False
    shared_chunks: int = 0  # on the heads of its chains, as `chunks`
    saved_bytes: int = 0

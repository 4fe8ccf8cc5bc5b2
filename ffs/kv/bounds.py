"""Bounds of a KV space - quota, time to live, eviction - and what it holds. docs/guides/kv.md, Bounds.

Everything here asks the metadata service; none of it needs the space to be open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ffs.client.paths import wire_path
from ffs.errors import InvalidArgument
from ffs.kv.geometry import Geometry
from ffs.proto import meta
from ffs.proto.commands import GetSpaces, SpacesReply
from ffs.proto.records import KV_DEDUP, KV_EVICTABLE, KvParams
from ffs.proto.spaces import SpaceView

if TYPE_CHECKING:
    from ffs.client.client import Client

MAX_TTL_S: Final = 100 * 365 * 86400


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a space. InvalidArgument or TypeError for what can't be one."""

    quota_bytes: int = 0
    """How much it may hold, as allocated on one replica; 0: as much as there is."""
    ttl_s: float = 0
    """Seconds from a put until its block is gone; 0: it stays."""
    evictable: bool = True
    """Blocks are dropped to make room; without it a full space refuses new ones."""
    dedup: bool = False
    """Each target keeps equal blocks once (docs/guides/kv.md, Equal blocks)."""

    def __post_init__(self) -> None:
        check_quota(self.quota_bytes)
        ttl_ms(self.ttl_s)

    def params(self, geometry: Geometry, identity: bytes = b"") -> KvParams:
        """For the creation of a space of such blocks. `identity`: what all of its users must agree on."""
        return KvParams(
            block_bytes=geometry.block_bytes,
            parts=geometry.parts,
            quota_bytes=self.quota_bytes,
            ttl_ms=ttl_ms(self.ttl_s),
            identity=identity,
            flags=(KV_EVICTABLE if self.evictable else 0) | (KV_DEDUP if self.dedup else 0),
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """What a space holds, as the heads of its chains said last; `reported` of its `chains` have said it.
    Evictions, hits and what has outlived its time to live are counted since the servers started."""

    bytes: int
    blocks: int
    quota_bytes: int
    evicted_bytes: int
    evicted_blocks: int
    hits: int
    chains: int
    reported: int
    shares: tuple[Share, ...] = ()
    expired_blocks: int = 0
    shared_blocks: int = 0
    """Of `blocks`: those that lie in one place with others of equal content."""
    saved_bytes: int = 0
    """What they would take besides, each in a place of its own; `bytes` counts each so."""


@dataclass(frozen=True, slots=True)
class Share:
    """A chain's part of the quota, and what it holds of it."""

    chain: int
    quota_bytes: int
    bytes: int
    blocks: int
    evicted_bytes: int


def bounds_of(client: Client, path: str) -> Bounds:
    """As they are now. Blocking. NotFound, InvalidArgument if it isn't a KV space."""
    return _bounds(client.attributes(path), path)


def set_bounds(
    client: Client,
    path: str,
    *,
    quota_bytes: int | None = None,
    ttl_s: float | None = None,
    evictable: bool | None = None,
    dedup: bool | None = None,
) -> Bounds:
    """Changes what is given; the bounds after it. Blocking. NotPermitted unless one owns it or is root;
    InvalidArgument, for `dedup`, of metadata services that knew it at creation only: update them."""
    what = 0
    if quota_bytes is not None:
        what |= meta.SET_QUOTA
        check_quota(quota_bytes)
    if ttl_s is not None:
        what |= meta.SET_TTL
    if evictable is not None:
        what |= meta.SET_EVICTABLE
    if dedup is not None:
        what |= meta.SET_DEDUP
    request = meta.SetKvSpace(
        path=wire_path(path),
        what=what,
        quota_bytes=quota_bytes or 0,
        ttl_ms=ttl_ms(ttl_s or 0),
        evictable=evictable is not False,
        dedup=bool(dedup),
    )
    return _bounds(client.core.change(request, meta.StatReply).attributes, path)


def differences(
    kv: KvParams,
    quota_bytes: int | None,
    ttl_s: float | None,
    evictable: bool | None,
    dedup: bool | None = None,
) -> list[str]:
    """What a space has otherwise than asked for, in words; None asks for nothing."""
    found = []
    if quota_bytes is not None and quota_bytes != kv.quota_bytes:
        found.append(f"a quota of {kv.quota_bytes} bytes, not {quota_bytes}")
    if ttl_s is not None and ttl_ms(ttl_s) != kv.ttl_ms:
        found.append(f"a ttl of {kv.ttl_ms / 1000:g} s, not {ttl_s:g}")
    if evictable is not None and evictable != bool(kv.flags & KV_EVICTABLE):
        found.append(f"evictable {'no' if evictable else 'yes'}, not {'yes' if evictable else 'no'}")
    if dedup is not None and dedup != bool(kv.flags & KV_DEDUP):
        found.append(f"dedup {'no' if dedup else 'yes'}, not {'yes' if dedup else 'no'}")
    return found


def usage_of(client: Client, inode: int) -> Usage:
    """Of the space of that inode id. Blocking. NotFound if it is gone."""
    (view,) = client.core.caller.call(GetSpaces(space=inode), SpacesReply).spaces
    return _usage(view)


def usage_of_all(client: Client) -> dict[int, Usage]:
    """Of every space of the cluster by inode id, without their shares. Blocking."""
    reply = client.core.caller.call(GetSpaces(), SpacesReply)
    return {view.space: _usage(view) for view in reply.spaces}


def check_quota(quota_bytes: int) -> None:
    if isinstance(quota_bytes, bool) or not isinstance(quota_bytes, int):
        raise TypeError(f"quota_bytes is an int, not {type(quota_bytes).__name__}")
    if not 0 <= quota_bytes <= meta.MAX_BOUND:
        raise InvalidArgument(f"quota_bytes is {quota_bytes}: give 0 (none) to {meta.MAX_BOUND}")


def ttl_ms(ttl_s: float) -> int:
    """In whole milliseconds, at least 1 where there is any."""
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float):
        raise TypeError(f"ttl_s is a number of seconds, not {type(ttl_s).__name__}")
    if not (math.isfinite(ttl_s) and 0 <= ttl_s <= MAX_TTL_S):
        raise InvalidArgument(f"ttl_s is {ttl_s}: give 0 (none) to {MAX_TTL_S} seconds")
    return max(1, round(ttl_s * 1000)) if ttl_s else 0


def _bounds(attributes: meta.Attributes, path: str) -> Bounds:
    kv = attributes.kv
    if kv is None:
        raise InvalidArgument("isn't a KV space", path)
    return Bounds(
        quota_bytes=kv.quota_bytes,
        ttl_s=kv.ttl_ms / 1000,
        evictable=bool(kv.flags & KV_EVICTABLE),
        dedup=bool(kv.flags & KV_DEDUP),
    )


def _usage(view: SpaceView) -> Usage:
    return Usage(
        bytes=view.bytes,
        blocks=view.chunks,
        quota_bytes=view.quota_bytes,
        evicted_bytes=view.evicted_bytes,
        evicted_blocks=view.evicted_chunks,
        hits=view.hits,
        chains=view.chains,
        reported=view.reported,
        shares=tuple(
            Share(share.chain, share.quota_bytes, share.bytes, share.chunks, share.evicted_bytes)
            for share in view.shares
        ),
        expired_blocks=view.expired_chunks,
        shared_blocks=view.shared_chunks,
        saved_bytes=view.saved_bytes,
    )

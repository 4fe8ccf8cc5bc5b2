"""What the metadata service asks of the storage process of a chain's head. docs/control_plane.md.

Form and rules of change as in ffs.proto.common, ids as in ffs.proto.cluster; tags 150-179. No I/O.
"""

from __future__ import annotations

from ffs.proto.common import ErrorReply, Message

MOST_SPACES = 1024  # of one RemoveSpaces


class RaiseSpaceEpoch(Message, tag=150, kw_only=True):
    """Raise the least epoch that the chain's targets accept for the space. Answered by OkReply."""

    chain: int
    space: int
    epoch: int


class RemovePage(Message, tag=151, kw_only=True):
    """Remove chunks of the space from key `start` (16 bytes) on, at most `limit` (0: the server's bound)."""

    chain: int
    space: int
    epoch: int
    start: bytes
    limit: int = 0  # a wish: the chain has a bound of its own


class RemovePageReply(Message, tag=152, kw_only=True):
    removed: int
    more: bool  # there may be more from `start` on


class TruncateChunk(Message, tag=153, kw_only=True):
    """The chunk's length becomes length_bytes if it is longer; absent: nothing. Answered by OkReply."""

    chain: int
    key: bytes  # 24 bytes
    length_bytes: int
    epoch: int


class LastChunk(Message, tag=154, kw_only=True):
    """The highest chunk of the space on the chain."""

    chain: int
    space: int


class LastChunkReply(Message, tag=155, kw_only=True):
    key: bytes  # 24 bytes; b"": none
    length_bytes: int
    chunks: int  # how many of the space the chain has


class ListChunks(Message, tag=156, kw_only=True):
    """Chunks of all spaces on the chain, as one of its replicas has them, from key `start` (24 bytes) on."""

    chain: int
    start: bytes
    limit: int = 0  # 0, and more than the server's bound: that bound


class ListChunksReply(Message, tag=157, kw_only=True):
    entries: bytes  # 32 bytes each: key 24, length u32, flags u32 (1: nothing of it is committed there)
    more: bool


class RemoveSpaces(Message, tag=158, kw_only=True):
    """Of each pair (chain, space): RaiseSpaceEpoch, then RemovePage until nothing of the space is left there.
    The chains are those that the node heads, at most MOST_SPACES pairs. A node of a version before doesn't
    know it: ProtocolError, then the two are asked for one by one."""

    pairs: tuple[tuple[int, int], ...]
    epoch: int


class RemoveSpacesReply(Message, tag=159, kw_only=True):
    """All are gone but these: (place in `pairs`, why). DeadlineExceeded: there was more than one request
    removes; RemovePage gets the rest."""

    failed: tuple[tuple[int, ErrorReply], ...] = ()

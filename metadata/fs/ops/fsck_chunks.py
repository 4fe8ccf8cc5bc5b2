"""fsck: what chains hold, against the inodes that it should belong to. docs/guides/fsck.md."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ffs import errors
from ffs.proto import checks
from ffs.proto.checks import FsckFinding, FsckPage
from ffs.proto.records import FILE, Inode
from metadata.fs import fsck
from metadata.fs.core import Core
from metadata.fs.ids import given_out
from metadata.fs.schema import (
    SUB_DOUBTFUL,
    SUB_LENGTH,
    Reader,
    find_inode,
    garbage_key,
    inode_key,
    trim_key,
    unsigned,
    writers_span,
)
from metadata.kv.contract import Snapshot

CHUNK_PAGE: Final = 1024


async def owner_of(core: Core, reader: Reader, ino: int, chain: int) -> fsck.Owner | None:
    inode = await find_inode(reader, ino)
    if inode is None:
        return None
    key = inode_key(ino)
    reasons = bool(
        await reader.range(*writers_span(ino), 1)
        or await reader.get(trim_key(ino)) is not None
        or await reader.get(garbage_key(ino)) is not None
        or await reader.get(key + SUB_DOUBTFUL) is not None
    )
    length = unsigned(await reader.get(key + SUB_LENGTH))
    return fsck.Owner(inode, length, _is_placed(core, inode, chain), reasons)


def _is_placed(core: Core, inode: Inode, chain: int) -> bool:
    """Whether its chunks may lie on the chain. A table that isn't known here says nothing against it."""
    if inode.layout is None:
        return False
    try:
        return chain in core.chunks.placement(inode.layout).chains
    except errors.ChainUnavailable:
        return True


async def _judge_chunks(
    core: Core, snap: Snapshot, held: fsck.Held, chain: int, table: int
) -> FsckFinding | None:
    owner = await owner_of(core, snap, held.space, chain)
    known = owner is not None or await given_out(snap, held.space)
    return fsck.judge_chunks(held, owner, chain, table, known)


async def _list(core: Core, chain: int, first: bytes, limit: int) -> tuple[list[fsck.Held], bytes, int]:
    """(spaces, where to go on, chunks). What isn't committed at the replica that answers doesn't count."""
    chunks, more = await core.chunks.list_chunks(chain, first, limit)
    following = _next_key(chunks[-1].key) if more and chunks else b""
    held = fsck.held_spaces((chunk.key, chunk.length) for chunk in chunks if not chunk.pending)
    return held, following, len(chunks)


def _next_key(key: bytes) -> bytes:
    return ((int.from_bytes(key, "big") + 1) & ((1 << 192) - 1)).to_bytes(24, "big")


_UNKNOWN: Final = (errors.ChainUnavailable, errors.Unreachable, errors.DeadlineExceeded, errors.ProtocolError)


async def chunks_of(core: Core, req: checks.FsckScan) -> FsckPage:
    """What a chain holds, against inodes that are read afterwards. Of a space that isn't a file's the
    first chunks are enough."""
    try:
        held, following, count = await _list(core, req.chain, req.after or bytes(24), CHUNK_PAGE)
    except _UNKNOWN as error:
        return FsckPage(findings=[], unknown=error.message or type(error).__name__)

    async def judge(snap: Snapshot) -> tuple[list[FsckFinding], bool]:
        judged = [await _judge_chunks(core, snap, each, req.chain, req.table) for each in held]
        last = await find_inode(snap, held[-1].space) if held else None
        skip = bool(held) and (last is None or last.type != FILE)
        return [finding for finding in judged if finding is not None], skip

    findings, skip = await core.store.read(judge)
    if skip and following and held[-1].space == int.from_bytes(following[:8], "big"):
        following = (held[-1].space + 1).to_bytes(8, "big") + bytes(16)
    return FsckPage(findings=findings, next=following, looked=count)


async def chunks_again(core: Core, finding: FsckFinding) -> FsckFinding | None:
    """The chunks are still there after the inode was found as it is, and it is still so afterwards. A
    chain that doesn't answer says nothing: no finding."""
    key = finding.key
    if finding.kind == fsck.CHUNKS_BEYOND:  # the chunk that holds the furthest byte on that chain
        owner = await core.store.read(lambda snap: owner_of(core, snap, finding.ino, finding.chain))
        if owner is None or owner.inode.layout is None:
            return None
        index = (finding.found - 1) // owner.inode.layout.chunk_size
        key = finding.ino.to_bytes(8, "big") + index.to_bytes(16, "big")
    try:
        held, _, _ = await _list(core, finding.chain, key, 1)
    except _UNKNOWN:
        return None
    if not held or held[0].space != finding.ino:
        return None
    now = await core.store.read(lambda snap: _judge_chunks(core, snap, held[0], finding.chain, finding.table))
    same = now is not None and (now.kind, now.stamp) == (finding.kind, finding.stamp)
    return replace(now, key=finding.key) if now is not None and same else None

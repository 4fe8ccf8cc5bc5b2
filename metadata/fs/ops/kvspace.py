"""KV spaces: made, opened and bounded in the namespace; get and put never come here."""

from __future__ import annotations

import msgspec

from ffs import errors
from ffs.layout import MAX_CHUNK_BYTES, Layout
from ffs.proto import meta
from ffs.proto.cluster import ROLE_KV
from ffs.proto.common import RIGHT_READ, RIGHT_WRITE, Creds
from ffs.proto.records import KV_DEDUP, KV_EVICTABLE, KV_SPACE, Inode, KvParams
from metadata.fs import quota
from metadata.fs.core import Core, attributes
from metadata.fs.ops.lock import need_unlocked
from metadata.fs.ops.open import check_alive
from metadata.fs.ops.stat import resolve
from metadata.fs.schema import SUB_CTIME, Reader, encode, garbage_key, get_inode, inode_key
from metadata.fs.spaces import note_space, slot_of
from metadata.fs.walk import R, W, X, need, need_name, owns, walk
from metadata.kv.contract import Transaction

MAX_BLOCK_BYTES = 1 << 30


def check_params(params: KvParams, path: bytes) -> None:
    """Raises InvalidArgument, naming the field and the way out."""
    size = params.block_bytes
    if not 1 <= size <= MAX_BLOCK_BYTES:
        raise errors.InvalidArgument(f"block size {size}: give 1 to {MAX_BLOCK_BYTES} bytes", path)
    if not 1 <= params.parts <= size or size % params.parts:
        raise errors.InvalidArgument(f"{params.parts} parts don't divide a block of {size} bytes", path)
    if size // params.parts > MAX_CHUNK_BYTES:
        raise errors.InvalidArgument(
            f"a part of {size // params.parts} bytes: more than a chunk holds; give parts of at most"
            f" {MAX_CHUNK_BYTES} bytes",
            path,
        )
    check_bounds(params, path)
    if len(params.identity) > 64:
        raise errors.InvalidArgument("identity: give a hash of at most 64 bytes", path)


def check_bounds(params: KvParams, path: bytes) -> None:
    """What may change. Raises InvalidArgument."""
    for name, value in (("quota", params.quota_bytes), ("TTL", params.ttl_ms)):
        if not 0 <= value <= meta.MAX_BOUND:
            raise errors.InvalidArgument(f"{name} {value}: give 0 (none) to {meta.MAX_BOUND}", path)
    if params.flags & ~(KV_EVICTABLE | KV_DEDUP):
        raise errors.InvalidArgument(f"flags {params.flags:#x} aren't known to this version", path)


def check_quota(core: Core, layout: Layout, params: KvParams, path: bytes) -> None:
    """Every chain must be able to hold one block at least. Raises InvalidArgument."""
    view = core.cluster.table(layout.table, layout.table_version)
    chains = layout.stripe or (len(view.chains) if view is not None else 1)
    slot = slot_of(params)
    if params.quota_bytes and params.quota_bytes < chains * slot:
        raise errors.InvalidArgument(
            f"a quota of {params.quota_bytes} bytes leaves less than a block of {slot} for each of {chains} "
            f"chains: give at least {chains * slot}, or make the space with fewer chains (a stripe)",
            path,
        )


async def create(core: Core, txn: Transaction, req: meta.KvCreate, capability: int) -> meta.KvOpened:
    check_params(req.params, req.path)
    found = await walk(txn, req.creds, req.path, follow=req.exist_ok, entry=True)
    need_name(found, req.path)
    if found.ino:
        if not req.exist_ok:
            raise errors.Exists(None, req.path)
        inode = await get_inode(txn, found.ino)
        _check_same(inode, req)
        return await _opened(core, txn, req.client, req.creds, found.ino, inode, True, capability, req.path)
    if found.slash:
        raise errors.NotFound("a KV space's name doesn't end in /", req.path)
    need(found.parent_inode, req.creds, W | X, req.path)
    check_alive(found.parent_inode, req.path)
    await need_unlocked(txn, req.client, found.parent, found.parent_inode, req.path)
    ino = await core.inos.take()
    now = core.now_ns()
    layout = core.choose_layout(found.parent_inode.layout, req.layout, ino, ROLE_KV)
    check_quota(core, layout, req.params, req.path)
    parent = found.parent_inode
    label = await quota.admit(txn, parent, ino, req.path)
    inode = core.new_inode(
        KV_SPACE, req.mode & 0o777, req.creds, parent, now, layout=layout, kv=req.params, quota=label
    )
    proof, expiry = core.capability(capability, req.client, ino, inode, RIGHT_READ | RIGHT_WRITE)
    txn.set(inode_key(ino), encode(inode))
    note_space(txn, ino, inode)
    core.add_entry(txn, found.parent, found.name, ino, KV_SPACE, now)
    return meta.KvOpened(
        ino=ino,
        attributes=await attributes(txn.peek, ino, inode),
        capability=proof,
        capability_expiry_ms=expiry,
        created=True,
    )


def _check_same(inode: Inode, req: meta.KvCreate) -> None:
    if inode.type != KV_SPACE or inode.kv is None:
        raise errors.Exists("something else than a KV space has that name", req.path)
    have, want = inode.kv, req.params
    for field in ("block_bytes", "parts", "identity"):
        if getattr(have, field) != getattr(want, field):
            raise errors.Exists(
                f"a KV space of other geometry has that name: {field} is {getattr(have, field)!r}, "
                f"not {getattr(want, field)!r}",
                req.path,
            )


async def open_space(core: Core, reader: Reader, req: meta.KvOpen, capability: int) -> meta.KvOpened:
    ino, inode = await resolve(reader, req.creds, req.path, 0)
    if inode.type != KV_SPACE:
        raise errors.InvalidArgument("not a KV space", req.path)
    return await _opened(core, reader, req.client, req.creds, ino, inode, req.write, capability, req.path)


async def _opened(
    core: Core,
    reader: Reader,
    client: int,
    creds: Creds,
    ino: int,
    inode: Inode,
    write: bool,
    capability: int,
    path: bytes,
) -> meta.KvOpened:
    need(inode, creds, R | (W if write else 0), path)
    rights = RIGHT_READ | (RIGHT_WRITE if write else 0)
    proof, expiry = core.capability(capability, client, ino, inode, rights)
    return meta.KvOpened(
        ino=ino,
        attributes=await attributes(reader.get, ino, inode),
        capability=proof,
        capability_expiry_ms=expiry,
    )


async def set_space(core: Core, txn: Transaction, req: meta.SetKvSpace) -> meta.StatReply:
    """Quota, TTL, whether it may be evicted from, whether equal blocks are kept once. Permission as for
    chmod: the owner, or root."""
    ino, inode = await resolve(txn, req.creds, req.path, req.ino)
    if inode.type != KV_SPACE or inode.kv is None:
        raise errors.InvalidArgument("not a KV space", req.path)
    if req.what & ~(meta.SET_QUOTA | meta.SET_TTL | meta.SET_EVICTABLE | meta.SET_DEDUP):
        raise errors.InvalidArgument(f"bounds {req.what:#x} aren't known to this version", req.path)
    if not owns(inode, req.creds):
        raise errors.NotPermitted("only the owner may change the bounds of a KV space", req.path)
    kv = inode.kv
    if req.what & meta.SET_QUOTA:
        kv = msgspec.structs.replace(kv, quota_bytes=req.quota_bytes)
    if req.what & meta.SET_TTL:
        kv = msgspec.structs.replace(kv, ttl_ms=req.ttl_ms)
    if req.what & meta.SET_EVICTABLE:
        flags = kv.flags & ~KV_EVICTABLE | (KV_EVICTABLE if req.evictable else 0)
        kv = msgspec.structs.replace(kv, flags=flags)
    if req.what & meta.SET_DEDUP:
        flags = kv.flags & ~KV_DEDUP | (KV_DEDUP if req.dedup else 0)
        kv = msgspec.structs.replace(kv, flags=flags)
    check_bounds(kv, req.path)
    if req.what & meta.SET_QUOTA and inode.layout is not None:
        check_quota(core, inode.layout, kv, req.path)
    if req.what:
        inode = msgspec.structs.replace(inode, kv=kv)
        txn.set(inode_key(ino), encode(inode))
        txn.max(inode_key(ino) + SUB_CTIME, core.now_ns())
        if await txn.get(garbage_key(ino)) is None:  # open still, but no name leads to it
            note_space(txn, ino, inode)
    return meta.StatReply(attributes=await attributes(txn.peek, ino, inode))

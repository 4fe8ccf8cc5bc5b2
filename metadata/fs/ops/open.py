"""open, open_many: find or make a file, give a capability and - for writing - a session."""

from __future__ import annotations

import msgspec

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import RIGHT_READ, RIGHT_WRITE
from ffs.proto.meta import (
    OPEN_APPEND,
    OPEN_CREATE,
    OPEN_EXCL,
    OPEN_NOFOLLOW,
    OPEN_READ,
    OPEN_TMPFILE,
    OPEN_TRUNC,
    OPEN_WRITE,
)
from ffs.proto.quota import NO_QUOTA
from ffs.proto.records import (
    DIRECTORY,
    FILE,
    FLAG_REMOVED,
    SYMLINK,
    Garbage,
    Inode,
    Trim,
    WriteSession,
)
from metadata.fs import quota
from metadata.fs.core import Core, TrimPending, attributes, fresh_attributes
from metadata.fs.ops.lock import need_unlocked
from metadata.fs.schema import (
    SUB_APPEND,
    SUB_DOUBTFUL,
    SUB_LENGTH,
    SUB_LINKS,
    Reader,
    client_writer_key,
    counter,
    decode_inode,
    encode,
    garbage_key,
    get_inode,
    inode_key,
    trim_key,
    unsigned,
    writer_key,
    writers_span,
)
from metadata.fs.walk import Found, R, W, X, need, need_name, walk
from metadata.kv.contract import Transaction

MUTATING = OPEN_WRITE | OPEN_CREATE | OPEN_TRUNC | OPEN_TMPFILE | OPEN_APPEND


def check_flags(flags: int, path: bytes) -> None:
    """Raises InvalidArgument for flags that contradict each other."""
    if not flags & (OPEN_READ | OPEN_WRITE):
        raise errors.InvalidArgument("open for reading, writing or both", path)
    if flags & (OPEN_TRUNC | OPEN_APPEND | OPEN_TMPFILE) and not flags & OPEN_WRITE:
        raise errors.InvalidArgument("truncating, appending and a temporary file need writing", path)
    if flags & OPEN_EXCL and not flags & OPEN_CREATE:
        raise errors.InvalidArgument("exclusive creation needs creation", path)
    if flags & OPEN_TMPFILE and flags & (OPEN_CREATE | OPEN_TRUNC):
        raise errors.InvalidArgument("a temporary file is always new: drop create and truncate", path)
    if flags >> 8:
        raise errors.InvalidArgument(f"open flags {flags:#x} aren't known to this version", path)


def handle_of(req: meta.Request, index: int) -> int:
    """A write session's handle: unique for the client, the same when the request is sent again."""
    return (req.sequence * meta.MAX_SLOTS + req.slot) * meta.MAX_BATCH + index & 0xFFFF_FFFF_FFFF_FFFF


# --- for reading ----------------------------------------------------------------------------


async def open_read(core: Core, reader: Reader, req: meta.Open, capability: int) -> meta.Opened:
    """Opens what is there, for reading only: no state is made."""
    check_flags(req.flags, req.path)
    if req.ino:
        ino = req.ino
    else:
        found = await walk(reader, req.creds, req.path, not req.flags & OPEN_NOFOLLOW)
        ino = found.ino
        if not ino:
            raise errors.NotFound(None, req.path)
    data = await reader.get(inode_key(ino))
    if data is None:
        raise errors.NotFound(f"inode {ino} is gone", req.path or None)
    inode = decode_inode(data)
    if inode.type == DIRECTORY:
        need(inode, req.creds, R, req.path)
    check_type(inode, req.path)
    need(inode, req.creds, R, req.path)
    proof, expiry = core.capability(capability, req.client, ino, inode, RIGHT_READ)
    return meta.Opened(
        ino=ino,
        attributes=await attributes(reader.get, ino, inode),
        capability=proof,
        capability_expiry_ms=expiry,
    )


def check_type(inode: Inode, path: bytes) -> None:
    if inode.type == FILE:
        return
    if inode.type == DIRECTORY:
        raise errors.IsADirectory(None, path)
    if inode.type == SYMLINK:
        raise errors.SymlinkLoop("a symbolic link, which wasn't to be followed", path)
    raise errors.InvalidArgument("a KV space, not a file: open it with ffs.kv", path)


# --- for writing ----------------------------------------------------------------------------


async def open_write(
    core: Core, txn: Transaction, req: meta.Open, capability: int, index: int = 0
) -> meta.Opened:
    """Opens, makes or truncates. A truncation leaves a Trim record that must be worked off before the
    answer is sent."""
    flags, path = req.flags, req.path
    check_flags(flags, path)
    if flags & OPEN_TMPFILE:
        return await _make_tmpfile(core, txn, req, capability, index)
    if req.ino:
        ino, inode = req.ino, await get_inode(txn, req.ino)
        await _need_held(txn, req.client, ino)
    else:
        exclusive = flags & OPEN_CREATE and flags & OPEN_EXCL
        create = bool(flags & OPEN_CREATE)
        follow = not (exclusive or flags & OPEN_NOFOLLOW)
        found = await walk(txn, req.creds, path, follow, entry=create)
        if create:
            if found.slash and not found.special:
                raise errors.IsADirectory("a file's name doesn't end in /", path)
            need_name(found, path)
            if found.ino and exclusive:
                raise errors.Exists(None, path)
            if found.special:
                raise errors.IsADirectory(None, path)
        if not found.ino:
            if not flags & OPEN_CREATE:
                raise errors.NotFound(None, path)
            return await _make(core, txn, req, found, capability, index)
        ino, inode = found.ino, await get_inode(txn, found.ino)
    check_type(inode, path)
    await need_trimmed(txn, ino)
    need(inode, req.creds, (R if flags & OPEN_READ else 0) | (W if flags & OPEN_WRITE else 0), path)
    if flags & OPEN_TRUNC:
        inode = await cut(core, txn, ino, inode, 0, path)
    attrs = await attributes(txn.peek, ino, inode)
    return await _opened(core, txn, req, inode, attrs, capability, index, created=False)


async def _need_held(txn: Transaction, client: int, ino: int) -> None:
    """What has no name any more is opened only by who has it open."""
    if await txn.get(garbage_key(ino)) is None:
        return
    first, _ = writers_span(ino)
    mine = client.to_bytes(8, "big")
    if not await txn.range(first + mine, first + mine + b"\xff" * 9, 1):
        raise errors.NotFound(f"inode {ino} has no name and isn't open here")


async def cut(core: Core, txn: Transaction, ino: int, inode: Inode, length: int, path: bytes = b"") -> Inode:
    """Sets a file's length; QuotaExceeded if there is no room for it. If there may be chunks to cut, or a
    writer whose length isn't known, a Trim is left for after the commit, and the epoch goes up by two: the
    chunks are cut under the lower one, and the higher is raised last, so that a cut that somebody repeats too
    late is refused. Returns the inode as it is then."""
    old = unsigned(await txn.get(inode_key(ino) + SUB_LENGTH))
    writers = await txn.range(*writers_span(ino), 1)
    doubtful = await txn.get(inode_key(ino) + SUB_DOUBTFUL) is not None
    if length < old or writers or doubtful:
        inode = msgspec.structs.replace(inode, epoch=inode.epoch + 2)
        txn.set(inode_key(ino), encode(inode))
        everywhere = writers or doubtful
        trim = Trim(epoch=inode.epoch - 1, length=length, old=-1 if everywhere else old)
        txn.set(trim_key(ino), encode(trim))
        txn.clear(inode_key(ino) + SUB_DOUBTFUL)
    if inode.quota:
        await quota.resize(txn, ino, inode, length, path)
    txn.set(inode_key(ino) + SUB_LENGTH, counter(length))
    txn.clear(inode_key(ino) + SUB_APPEND)
    core.touch(txn, ino, core.now_ns())
    return inode


async def need_trimmed(reader: Reader, ino: int) -> None:
    """Raises TrimPending while the chunks of an earlier truncation aren't cut."""
    if await reader.get(trim_key(ino)) is not None:
        raise TrimPending(ino)


async def _make(
    core: Core, txn: Transaction, req: meta.Open, found: Found, capability: int, index: int
) -> meta.Opened:
    need(found.parent_inode, req.creds, W | X, req.path)
    check_alive(found.parent_inode, req.path)
    await need_unlocked(txn, req.client, found.parent, found.parent_inode, req.path)
    ino = await core.inos.take()
    now = core.now_ns()
    layout = core.choose_layout(found.parent_inode.layout, req.layout, ino)
    label = await quota.admit(txn, found.parent_inode, ino, req.path)
    inode = core.new_inode(
        FILE, req.mode & 0o7777, req.creds, found.parent_inode, now, layout=layout, quota=label
    )
    txn.set(inode_key(ino), encode(inode))
    core.add_entry(txn, found.parent, found.name, ino, FILE, now)
    attrs = fresh_attributes(ino, inode)
    return await _opened(core, txn, req, inode, attrs, capability, index, created=True)


def check_alive(parent: Inode, path: bytes) -> None:
    """Nothing is made in a directory that is out of the tree, though its inode isn't collected yet."""
    if parent.flags & FLAG_REMOVED:
        raise errors.NotFound("the directory is being removed", path)


async def _make_tmpfile(
    core: Core, txn: Transaction, req: meta.Open, capability: int, index: int
) -> meta.Opened:
    """A file without a name: garbage from birth, unless Link comes before its session ends."""
    found = await walk(txn, req.creds, req.path)
    if not found.ino:
        raise errors.NotFound(None, req.path)
    parent = await get_inode(txn, found.ino)
    if parent.type != DIRECTORY:
        raise errors.NotADirectory("a temporary file is made in a directory", req.path)
    need(parent, req.creds, W | X, req.path)
    check_alive(parent, req.path)
    ino = await core.inos.take()
    now = core.now_ns()
    layout = core.choose_layout(parent.layout, req.layout, ino)
    label = await quota.admit(txn, parent, ino, req.path)
    inode = core.new_inode(FILE, req.mode & 0o7777, req.creds, parent, now, layout=layout, quota=label)
    txn.set(inode_key(ino), encode(inode))
    txn.set(inode_key(ino) + SUB_LINKS, counter(-1))
    txn.set(garbage_key(ino), encode(Garbage(type=FILE, since_ns=now)))
    attrs = fresh_attributes(ino, inode, links=0)
    return await _opened(core, txn, req, inode, attrs, capability, index, created=True)


async def _opened(
    core: Core,
    txn: Transaction,
    req: meta.Open,
    inode: Inode,
    attrs: meta.Attributes,
    capability: int,
    index: int,
    created: bool,
) -> meta.Opened:
    ino, handle, reserved = attrs.ino, 0, NO_QUOTA
    rights = RIGHT_READ if req.flags & OPEN_READ else 0
    if req.flags & OPEN_WRITE:
        rights |= RIGHT_WRITE
        handle = handle_of(req, index)
        session = WriteSession(opened_ns=core.now_ns(), capability=capability)
        txn.set(writer_key(ino, req.client, handle), encode(session))
        txn.set(client_writer_key(req.client, ino, handle), b"")
        if inode.quota:
            reserved = await quota.grant(txn, ino, inode, attrs.length)
    proof, expiry = core.capability(capability, req.client, ino, inode, rights)
    return meta.Opened(
        ino=ino,
        attributes=attrs,
        handle=handle,
        created=created,
        capability=proof,
        capability_expiry_ms=expiry,
        reserved=reserved,
    )

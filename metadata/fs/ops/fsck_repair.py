"""fsck: mending findings, each in one transaction, in which it is looked at again. docs/guides/fsck.md."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ffs import errors
from ffs.layout import Layout
from ffs.proto import checks
from ffs.proto.checks import FsckFinding, FsckRepaired
from ffs.proto.records import DIRECTORY, FILE, FLAG_REMOVED, KV_SPACE, ROOT_INO, ClientSession, Garbage, Inode
from metadata.fs import fsck
from metadata.fs.core import Core
from metadata.fs.fsck import Entry
from metadata.fs.ops import fsck as look
from metadata.fs.ops import fsck_pages, fsck_quota
from metadata.fs.ops import open as open_op
from metadata.fs.schema import (
    SUB_CTIME,
    SUB_DOUBTFUL,
    SUB_ENTRIES,
    SUB_LINKS,
    counter,
    decode_dirent,
    dirent_key,
    dirent_span,
    encode,
    ended_key,
    find_inode,
    garbage_key,
    id_in_key,
    inode_key,
    inode_span,
    signed,
    xattr_names_key,
    xattrs_span,
)
from metadata.fs.spaces import forget_space, note_space
from metadata.kv.contract import Transaction

LOST_FOUND: Final = b"lost+found"


async def repair(core: Core, txn: Transaction, req: checks.FsckRepair) -> FsckRepaired:
    """Mends one finding, if it holds in this transaction. NotPermitted; InvalidArgument if it can't be."""
    await look.need_administrator(txn, req)
    finding = await look.still(core, txn, req.finding)
    if finding is None:
        return FsckRepaired(done=False, text="it isn't so any more")
    kind = finding.kind
    if not finding.repair:
        raise errors.InvalidArgument(f"{kind} can't be repaired here: {finding.text}")
    if kind in look.OF_ENTRIES:
        text = await _repair_entry(core, txn, finding)
    elif kind in (fsck.ENTRIES, fsck.SUBDIRECTORIES):
        sub = SUB_ENTRIES if kind == fsck.ENTRIES else SUB_LINKS
        txn.add(inode_key(finding.ino) + sub, finding.expected - finding.found)
        text = f"corrected to {finding.expected}"
    elif kind == fsck.ORPHAN:
        text = await _attach(core, txn, finding.ino)
    elif kind == fsck.LINKS:
        text = await _repair_links(core, txn, finding)
    elif kind in (fsck.COUNTERS, fsck.LEFT):
        _remove_left(txn, finding)
        text = "removed"
    elif kind == fsck.SESSIONLESS:
        text = _end_again(core, txn, finding.key)
    elif kind == fsck.UNPAIRED:
        text = _pair(txn, finding.key)
    elif kind in (fsck.SPACE_MISSING, fsck.SPACE_DIFFERS):
        inode = await find_inode(txn, finding.ino)
        assert inode is not None, finding
        note_space(txn, finding.ino, inode)
        text = "written into the index"
    elif kind == fsck.SPACE_LEFT:
        forget_space(txn, finding.ino)
        text = "taken out of the index"
    elif kind in fsck_quota.KINDS:
        text = await fsck_quota.repair(core, txn, finding)
    elif kind == fsck.ORPHAN_CHUNKS:
        text = _collect(core, txn, finding)
    else:
        text = await _cut(core, txn, finding)
    core.work.set()
    return FsckRepaired(done=True, text=text)


async def _repair_entry(core: Core, txn: Transaction, finding: FsckFinding) -> str:
    parent, name, now = finding.parent, finding.name, core.now_ns()
    entry = decode_dirent(await txn.get(finding.key) or b"")
    inode = await find_inode(txn, entry.ino)
    if finding.kind == fsck.DANGLING:
        core.remove_entry(txn, parent, name, entry.type, now)
        return f"removed the entry {fsck.show(name)} of directory {parent}"
    if finding.kind == fsck.NO_DIRECTORY:
        txn.clear(finding.key)
        return "removed the entry" if inode is None else await _attach(core, txn, entry.ino, another=False)
    assert inode is not None, finding
    if finding.kind == fsck.PARENT:
        await _need_one_place(txn, entry.ino, inode.parent, parent)
        txn.set(inode_key(entry.ino), encode(replace(inode, parent=parent)))
        return f"the directory's parent is {parent} now"
    txn.set(finding.key, encode(replace(entry, type=inode.type)))
    change = (inode.type == DIRECTORY) - (entry.type == DIRECTORY)
    if change:
        txn.add(inode_key(parent) + SUB_LINKS, change)
    return f"the entry says {fsck.WORDS.get(inode.type, inode.type)} now"


async def _need_one_place(txn: Transaction, ino: int, old: int, new: int) -> None:
    """A directory becomes its entry's, unless it is where it says, too, or would be its own ancestor."""
    pairs = await txn.range(*dirent_span(old), fsck_pages.IN_ONE)
    parsed = (fsck_pages.parse_entry(key, value) for key, value in pairs)
    if any(isinstance(each, Entry) and each.ino == ino for each in parsed):
        raise errors.InvalidArgument(f"directory {ino} has two names, in directories {old} and {new}")
    seen = {ROOT_INO}
    above = new
    while above not in seen:
        seen.add(above)
        inode = await find_inode(txn, above)
        above = ROOT_INO if inode is None else inode.parent
    if ino in seen:
        raise errors.InvalidArgument(f"directory {new} lies in directory {ino} itself")


async def _attach(core: Core, txn: Transaction, ino: int, *, another: bool = True) -> str:
    """A name in /lost+found. `another`: it has none, so it is to count one from now on."""
    inode = await find_inode(txn, ino)
    assert inode is not None, ino
    folder = await _lost_found(core, txn)
    name = str(ino).encode()
    while await txn.get(dirent_key(folder, name)) is not None:
        name += b"+"
    core.add_entry(txn, folder, name, ino, inode.type, core.now_ns())
    if inode.type == DIRECTORY:
        flags = inode.flags & ~FLAG_REMOVED
        txn.set(inode_key(ino), encode(replace(inode, parent=folder, flags=flags)))
    elif another:
        txn.set(inode_key(ino) + SUB_LINKS, counter(0))
        if inode.type == KV_SPACE:
            note_space(txn, ino, inode)
    return f"attached as /lost+found/{name.decode()}"


async def _lost_found(core: Core, txn: Transaction) -> int:
    """The directory, made if it isn't there: only its owner, who owns /, may look into it."""
    data = await txn.get(dirent_key(ROOT_INO, LOST_FOUND))
    if data is not None:
        entry = decode_dirent(data)
        inode = await find_inode(txn, entry.ino)
        if inode is None or inode.type != DIRECTORY:
            raise errors.Exists("something else than a directory has that name: rename it", b"/lost+found")
        open_op.check_alive(inode, b"/lost+found")
        return entry.ino
    root = await find_inode(txn, ROOT_INO)
    if root is None:
        raise errors.Damaged("the store has no root directory")
    ino, now = await core.inos.take(), core.now_ns()
    inode = Inode(
        type=DIRECTORY, mode=0o700, uid=root.uid, gid=root.gid, btime_ns=now, ctime_ns=now, parent=ROOT_INO
    )
    txn.set(inode_key(ino), encode(inode))
    core.add_entry(txn, ROOT_INO, LOST_FOUND, ino, DIRECTORY, now)
    return ino


async def _repair_links(core: Core, txn: Transaction, finding: FsckFinding) -> str:
    """By the names that were counted; the stamp says that none came or went since."""
    ino, names = finding.ino, finding.expected
    inode = await find_inode(txn, ino)
    assert inode is not None, finding
    text = f"corrected to {names}"
    if inode.type == DIRECTORY:
        if names != 1:
            raise errors.InvalidArgument(f"directory {ino} has {names} names")
        txn.set(inode_key(ino), encode(replace(inode, flags=inode.flags & ~FLAG_REMOVED)))
    else:
        key = inode_key(ino) + SUB_LINKS
        txn.add(key, names - 1 - signed(await txn.get(key)))
    if await txn.get(garbage_key(ino)) is not None:
        txn.clear(garbage_key(ino))
        text += ", and taken out of collection"
        if inode.type == KV_SPACE:
            note_space(txn, ino, inode)
    txn.max(inode_key(ino) + SUB_CTIME, core.now_ns())
    return text


def _remove_left(txn: Transaction, finding: FsckFinding) -> None:
    key, ino = finding.key, finding.ino
    if key[:1] == b"i":
        txn.clear_range(*inode_span(ino))
    elif key[:1] == b"u":
        txn.clear_range(*xattrs_span(ino))
        txn.clear(xattr_names_key(ino))
    else:
        txn.clear(key)
        if key[:1] in b"wW":
            txn.clear(fsck_pages.parse_held(key)[3])


def _end_again(core: Core, txn: Transaction, key: bytes) -> str:
    """The client's session becomes one that is over and to be settled, as if it had just ended."""
    client = id_in_key(key) if key[:1] == b"r" else fsck_pages.parse_held(key)[2]
    if key[:1] in b"wL":
        txn.set(fsck_pages.parse_held(key)[3], b"")  # it is found by client
    record = ClientSession(ttl_ms=1000, label="found by fsck", opened_ns=core.now_ns(), ended=True)
    txn.set(ended_key(client), encode(record))
    return f"client {client} is being settled"


def _pair(txn: Transaction, key: bytes) -> str:
    """The record by inode says what there is."""
    if key[:1] in b"wL":
        txn.set(fsck_pages.parse_held(key)[3], b"")
        return "the missing record was written"
    txn.clear(key)
    return "the record was removed"


def _collect(core: Core, txn: Transaction, finding: FsckFinding) -> str:
    """Gives the space an inode again that is waiting for collection, so that the collector removes its chunks
    on all chains of the table and shuts them for it."""
    view = core.cluster.table(finding.table)
    if view is None or finding.chain not in view.chains:
        raise errors.InvalidArgument(f"chain {finding.chain} isn't of chain table {finding.table}")
    now = core.now_ns()
    layout = Layout(view.id, view.version, finding.ino, view.chunk_size, 0)
    inode = Inode(type=FILE, mode=0, uid=0, gid=0, btime_ns=now, ctime_ns=now, layout=layout)
    txn.set(inode_key(finding.ino), encode(inode))
    txn.set(inode_key(finding.ino) + SUB_LINKS, counter(-1))
    txn.set(garbage_key(finding.ino), encode(Garbage(type=FILE, since_ns=now, doubtful=True)))
    return "the chunks are being collected"


async def _cut(core: Core, txn: Transaction, finding: FsckFinding) -> str:
    """As a truncation to the length that the file has, which finds chunks wherever they are."""
    inode = await find_inode(txn, finding.ino)
    assert inode is not None, finding
    txn.max(inode_key(finding.ino) + SUB_DOUBTFUL, 1)
    await open_op.cut(core, txn, finding.ino, inode, finding.expected)
    return f"is being cut to {finding.expected} bytes"

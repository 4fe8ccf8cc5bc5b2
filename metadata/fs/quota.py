"""What quotas of directories count: whose an inode is, what it is charged, and whether there is room.

An inode carries a label, the id of the quota that counts it. Each operation that makes, grows, shrinks or
removes something calls one of these in its own transaction. Usage is exact and has no hot key: it is added to
under a few keys and looked at without conflict, so a limit may be overshot by the transactions that are on
their way. docs/metadata.md, Quotas.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec.structs import replace

from ffs import errors
from ffs.layout import MAX_FILE_BYTES
from ffs.proto.quota import COUNTING, NO_QUOTA, READY
from ffs.proto.records import DIRECTORY, FILE, ROOT_INO, Inode, QuotaRecord
from metadata.fs.schema import (
    QUOTA_SHARDS,
    QUOTA_WORK,
    SUB_CHARGED,
    SUB_LENGTH,
    Reader,
    counter,
    decode_quota,
    dirent_span,
    encode,
    garbage_key,
    get_inode,
    inode_key,
    quota_bytes_key,
    quota_entries_key,
    quota_key,
    quota_work_key,
    quota_work_span,
    signed,
    unsigned,
    writers_span,
)
from metadata.kv.contract import Transaction, after

MIB: Final = 1 << 20
LEAST_AHEAD: Final = MIB  # what is reserved beyond what was asked for, bytes
MOST_AHEAD: Final = 64 * MIB
# Of the room that is left, no more than this part is reserved ahead: others may need it.
SHARE: Final = 64
OPEN_SHARE: Final = 1024  # at open, when nobody has said that anything will be written

Get = Callable[[bytes], Awaitable[bytes | None]]


# --- whose ----------------------------------------------------------------------------------


async def find_quota(reader: Reader, label: int) -> QuotaRecord | None:
    """The quota of a label; None if there is no label, or the quota is gone: such a label says nothing."""
    if not label:
        return None
    data = await reader.get(quota_key(label))
    return None if data is None else decode_quota(data)


async def is_counting(reader: Reader) -> bool:
    """Is there a quota that hasn't counted yet all that was there before it?"""
    return bool(await reader.range(QUOTA_WORK, after(QUOTA_WORK), 1))


async def quota_of(reader: Reader, ino: int, inode: Inode) -> int:
    """The quota that counts, or will count, what is in directory `ino`; 0: none. While something is being
    counted, an ancestor may have a label that hasn't come down to here."""
    if await find_quota(reader, inode.quota) is not None:
        return inode.quota
    if not await is_counting(reader):
        return 0
    return await quota_above(reader, ino, inode)


async def quota_above(reader: Reader, ino: int, inode: Inode) -> int:
    """The first label on the way from directory `ino` to the root; 0: none."""
    while True:
        if await find_quota(reader, inode.quota) is not None:
            return inode.quota
        if ino == ROOT_INO:
            return 0
        ino = inode.parent
        inode = await get_inode(reader, ino)


async def usage(get: Get, quota: int) -> tuple[int, int]:
    """(bytes, entries) that it counts. `get`: a snapshot's, or a transaction's `peek`."""
    used_bytes = [signed(await get(quota_bytes_key(quota, shard))) for shard in range(QUOTA_SHARDS)]
    return sum(used_bytes), await _used_entries(get, quota)


async def _used_entries(get: Get, quota: int) -> int:
    return sum([signed(await get(quota_entries_key(quota, shard))) for shard in range(QUOTA_SHARDS)])


async def _used_bytes(get: Get, quota: int) -> int:
    return sum([signed(await get(quota_bytes_key(quota, shard))) for shard in range(QUOTA_SHARDS)])


async def start(txn: Transaction, label: int, ino: int, inode: Inode, record: QuotaRecord) -> QuotaRecord:
    """Directory `ino` gets quota `label`, which is new and hasn't counted anything; what is in it is left to
    the sweep. Returns the record, written."""
    counting = bool(await txn.range(*dirent_span(ino), 1))
    record = replace(record, state=COUNTING if counting else READY)
    if counting:
        txn.set(quota_work_key(label, ino), b"")
    txn.set(quota_key(label), encode(record))
    txn.set(inode_key(ino), encode(replace(inode, quota=label)))
    return record


# --- entries --------------------------------------------------------------------------------


async def admit(txn: Transaction, parent: Inode, ino: int, path: bytes) -> int:
    """Counts the new inode `ino` in directory `parent`; returns its label. QuotaExceeded."""
    quota = parent.quota
    record = await find_quota(txn, quota)
    if record is None:
        return 0
    await _need_entry(txn, quota, record, path)
    txn.add(quota_entries_key(quota, ino % QUOTA_SHARDS), 1)
    return quota


async def _need_entry(txn: Transaction, quota: int, record: QuotaRecord, path: bytes) -> None:
    limit = record.limit_entries
    if limit and (used := await _used_entries(txn.peek, quota)) >= limit:
        raise errors.QuotaExceeded(
            f"{used} of the {limit} entries that the quota of {show(record)} has are there: remove some, or "
            "have it raised",
            path or None,
        )


def show(record: QuotaRecord) -> str:
    return record.path.decode(errors="backslashreplace") or f"directory {record.ino}"


async def adopt(txn: Transaction, ino: int, inode: Inode, quota: int, record: QuotaRecord) -> Inode:
    """Counts what none has counted so far, whatever the limits; of a directory the content will follow.
    Returns the inode as it is then."""
    inode = replace(inode, quota=quota)
    txn.set(inode_key(ino), encode(inode))
    txn.add(quota_entries_key(quota, ino % QUOTA_SHARDS), 1)
    if inode.type == FILE:
        charged = await _to_charge(txn, ino)
        txn.set(inode_key(ino) + SUB_CHARGED, counter(charged))
        txn.add(quota_bytes_key(quota, ino % QUOTA_SHARDS), charged)
    elif inode.type == DIRECTORY:
        txn.set(quota_work_key(quota, ino), b"")
        if record.state != COUNTING:
            txn.set(quota_key(quota), encode(replace(record, state=COUNTING)))
    return inode


async def _to_charge(txn: Transaction, ino: int) -> int:
    """Of a file that becomes counted: its length; what is still charged by an earlier count too while
    somebody writes it, who may rely on that. Writers' reports are no conflict: the last one to close sets it
    right."""
    if await txn.range(*writers_span(ino), 1):
        key = inode_key(ino)
        return max(unsigned(await txn.peek(key + SUB_LENGTH)), unsigned(await txn.get(key + SUB_CHARGED)))
    return unsigned(await txn.get(inode_key(ino) + SUB_LENGTH))


async def adopt_in(txn: Transaction, ino: int, inode: Inode, parent: Inode) -> Inode:
    """`adopt` by the quota of directory `parent`, in which a name of it is put, if none counts it."""
    if not parent.quota or inode.quota == parent.quota:
        return inode
    record = await find_quota(txn, parent.quota)
    if record is None or await find_quota(txn, inode.quota) is not None:
        return inode
    return await adopt(txn, ino, inode, parent.quota, record)


async def admit_file(txn: Transaction, ino: int, inode: Inode, parent: Inode, path: bytes) -> Inode:
    """`adopt_in` of a file from elsewhere, for which there must be room. QuotaExceeded."""
    record = await find_quota(txn, parent.quota)
    if record is not None and await find_quota(txn, inode.quota) is None:
        await _need_entry(txn, parent.quota, record, path)
        await _room(txn, parent.quota, record, await _to_charge(txn, ino), path)
    return await adopt_in(txn, ino, inode, parent)


async def release(txn: Transaction, ino: int, inode: Inode) -> None:
    """An inode goes: what it was charged goes back, and with its directory a quota. The inode itself is the
    caller's."""
    record = await find_quota(txn, inode.quota)
    if record is None:
        return
    if record.ino == ino:
        forget(txn, inode.quota)
        return
    charged = unsigned(await txn.get(inode_key(ino) + SUB_CHARGED))
    if charged:
        txn.add(quota_bytes_key(inode.quota, ino % QUOTA_SHARDS), -charged)
    txn.add(quota_entries_key(inode.quota, ino % QUOTA_SHARDS), -1)


async def release_nameless(txn: Transaction, ino: int, inode: Inode) -> None:
    """The inode stays until it is collected, and isn't counted any more."""
    if inode.quota:
        await release(txn, ino, inode)
        txn.set(inode_key(ino), encode(replace(inode, quota=0)))
        txn.clear(inode_key(ino) + SUB_CHARGED)


async def note_path(txn: Transaction, ino: int, inode: Inode, path: bytes) -> None:
    """Directory `ino` is at `path` now: what is told of its quota, if it has one, names that."""
    record = await find_quota(txn, inode.quota)
    if record is not None and record.ino == ino:
        txn.set(quota_key(inode.quota), encode(replace(record, path=path)))


async def forget_with(txn: Transaction, ino: int, inode: Inode) -> None:
    """`forget` the quota that directory `ino` has, if it has one."""
    record = await find_quota(txn, inode.quota)
    if record is not None and record.ino == ino:
        forget(txn, inode.quota)


def forget(txn: Transaction, quota: int) -> None:
    """The quota is gone, with all that it counted; inodes keep the label, which says nothing from now on."""
    txn.clear(quota_key(quota))
    for shard in range(QUOTA_SHARDS):
        txn.clear(quota_bytes_key(quota, shard))
        txn.clear(quota_entries_key(quota, shard))
    txn.clear_range(*quota_work_span(quota))


# --- bytes ----------------------------------------------------------------------------------


def ahead_of(end: int, left: int | None, share: int = SHARE) -> int:
    """How much to reserve beyond `end`, so that a writer asks seldom: a quarter of what there is, and little
    when little is left of the quota (None: it has no limit)."""
    wanted = min(max(end // 4, LEAST_AHEAD), MOST_AHEAD)
    return wanted if left is None else min(wanted, max(left, 0) // share)


async def _room(txn: Transaction, quota: int, record: QuotaRecord, more: int, path: bytes) -> int | None:
    """What is left when `more` bytes are charged; None: there is no limit. QuotaExceeded."""
    limit = record.limit_bytes
    if not limit:
        return None
    used = await _used_bytes(txn.peek, quota)
    if more > 0 and used + more > limit:
        raise errors.QuotaExceeded(
            f"{used} of the {limit} bytes that the quota of {show(record)} has are used or reserved, and "
            f"{more} more are wanted: remove files, or have it raised",
            path or None,
        )
    return limit - used - more


def _charge(txn: Transaction, ino: int, quota: int, old: int, new: int) -> None:
    if new != old:
        txn.set(inode_key(ino) + SUB_CHARGED, counter(new))
        txn.add(quota_bytes_key(quota, ino % QUOTA_SHARDS), new - old)


async def _charged(txn: Transaction, ino: int) -> int:
    return unsigned(await txn.get(inode_key(ino) + SUB_CHARGED))


async def reserve(
    txn: Transaction, ino: int, inode: Inode, end: int, *, ahead: bool = True, path: bytes = b""
) -> int:
    """Charges a file that is being written up to `end` at least, and says up to where; NO_QUOTA. `ahead`: for
    what may follow, too. QuotaExceeded."""
    record = await find_quota(txn, inode.quota)
    if record is None:
        return NO_QUOTA
    old = await _charged(txn, ino)
    if end <= old:
        return old
    left = await _room(txn, inode.quota, record, end - old, path)
    new = min(end + ahead_of(end, left), MAX_FILE_BYTES) if ahead else end
    _charge(txn, ino, inode.quota, old, new)
    return new


async def grant(txn: Transaction, ino: int, inode: Inode, length: int) -> int:
    """To who opens a file of that length for writing: a little ahead, if there is room. NO_QUOTA."""
    record = await find_quota(txn, inode.quota)
    if record is None:
        return NO_QUOTA
    old = await _charged(txn, ino)
    left = await _room(txn, inode.quota, record, 0, b"")
    new = max(old, min(length + ahead_of(0, left, OPEN_SHARE), MAX_FILE_BYTES))
    _charge(txn, ino, inode.quota, old, new)
    return new


async def report(txn: Transaction, ino: int, inode: Inode, end: int) -> int:
    """A writer has written up to `end`. It has room for that, unless the file wasn't counted when it asked,
    or it knows nothing of quotas: it is charged then, whatever the limit. NO_QUOTA, or what is reserved."""
    if await find_quota(txn, inode.quota) is None:
        return NO_QUOTA
    old = await _charged(txn, ino)
    new = max(old, end)
    _charge(txn, ino, inode.quota, old, new)
    return new


async def settle(txn: Transaction, ino: int, inode: Inode, length: int) -> int:
    """The file has that length exactly, and nobody writes it: what was reserved beyond goes back. NO_QUOTA,
    or what is charged."""
    if await find_quota(txn, inode.quota) is None:
        return NO_QUOTA
    _charge(txn, ino, inode.quota, await _charged(txn, ino), length)
    return length


async def resize(txn: Transaction, ino: int, inode: Inode, length: int, path: bytes) -> int:
    """The file is given that length, under an epoch by which its writers forget what they had reserved.
    NO_QUOTA, or what is charged. QuotaExceeded."""
    record = await find_quota(txn, inode.quota)
    if record is None:
        return NO_QUOTA
    old = await _charged(txn, ino)
    if length > old:
        await _room(txn, inode.quota, record, length - old, path)
    _charge(txn, ino, inode.quota, old, length)
    return length


async def writer_ends(txn: Transaction, ino: int, inode: Inode) -> None:
    """A write session is over, its record gone and its length taken. With the last one what was reserved
    and not written goes back; a file without a name isn't counted any more."""
    if await txn.range(*writers_span(ino), 1):
        await report(txn, ino, inode, unsigned(await txn.peek(inode_key(ino) + SUB_LENGTH)))
    elif await txn.get(garbage_key(ino)) is not None:
        await release_nameless(txn, ino, inode)
    else:
        await settle(txn, ino, inode, unsigned(await txn.get(inode_key(ino) + SUB_LENGTH)))

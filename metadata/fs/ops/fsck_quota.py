"""fsck: what quotas count, against what they should; looked at again, and repaired. docs/guides/fsck.md.

What an inode is charged and what label it has is judged where it stands. The sum of all is added up by the
asker, over pages; it counts if the quota's usage is the same before and afterwards (the stamp). A wrong sum
is mended by counting the directory anew under a new id, beside its users, as when the quota was set.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from struct import Struct
from typing import Final

import msgspec

from ffs.proto.checks import FsckFinding, FsckPage
from ffs.proto.quota import READY
from ffs.proto.records import DIRECTORY, FILE, Inode, QuotaRecord
from metadata.fs import fsck, quota
from metadata.fs.core import Core
from metadata.fs.fsck import Entry
from metadata.fs.schema import (
    DIRENT_PREFIX_BYTES,
    QUOTA_SHARDS,
    SUB_CHARGED,
    SUB_LENGTH,
    Reader,
    decode_dirent,
    decode_inode,
    decode_quota,
    find_inode,
    garbage_key,
    get_inode,
    id_in_key,
    inode_key,
    quota_bytes_key,
    quota_entries_key,
    quota_in_key,
    quota_key,
    unsigned,
    writers_span,
)
from metadata.kv.contract import Snapshot, Transaction

USAGE: Final = "wrong-quota-usage"
CHARGE: Final = "wrong-quota-charge"
UNCOUNTED: Final = "not-counted-by-quota"
LEFT: Final = "quota-without-directory"
KINDS: Final = (USAGE, CHARGE, UNCOUNTED, LEFT)

PAGE: Final = 1000  # keys of quotas
INODES: Final = 1000  # keys of inodes

_USAGE: Final = Struct("<QQqqQ")  # checks.FSCK_USAGE
_SUM: Final = Struct("<Qqq")  # checks.FSCK_SUM
_INODE_KEY_BYTES: Final = len(inode_key(0))


# --- quotas ---------------------------------------------------------------------------------


async def quotas(snap: Snapshot, after: bytes) -> FsckPage:
    """FSCK_USAGE of each - also while it counts what was there before -, and what is left of those that are
    gone."""
    pairs = await snap.range(after or b"Qb", b"Qt", PAGE)
    page = FsckPage(findings=[], looked=len(pairs), next=pairs[-1][0] + b"\0" if len(pairs) == PAGE else b"")
    rows = []
    judged: set[int] = set()
    for key, _ in pairs:
        label = quota_in_key(key)
        if key[:2] not in (b"Qb", b"Qe", b"Ql", b"Qs") or label in judged:
            continue
        judged.add(label)
        with contextlib.suppress(msgspec.MsgspecError):  # told below
            finding = await _judge_quota(snap, label)
            page.findings += [finding] if finding is not None else []
    for key, value in pairs:
        if key[:2] == b"Ql":
            try:
                record = decode_quota(value)
            except msgspec.MsgspecError as error:
                page.findings.append(fsck.unreadable(key, 0, error))
                continue
            used_bytes, used_entries = await quota.usage(snap.get, quota_in_key(key))
            stamp = await _stamp(snap, quota_in_key(key))
            rows.append(
                _USAGE.pack(
                    quota_in_key(key), record.ino, used_bytes, used_entries, int.from_bytes(stamp, "little")
                )
            )
    page.rows = b"".join(rows)
    return page


async def _find(reader: Reader, label: int) -> QuotaRecord | None:
    """The quota; None also if its record can't be read, which is told where quotas are looked at."""
    try:
        return await quota.find_quota(reader, label)
    except msgspec.MsgspecError:
        return None


async def _judge_quota(reader: Reader, label: int) -> FsckFinding | None:
    """Has it a directory that knows it?"""
    record = await quota.find_quota(reader, label)
    inode = None if record is None else await find_inode(reader, record.ino)
    if record is not None and inode is not None and inode.type == DIRECTORY and inode.quota == label:
        return None
    if record is None and not await _anything(reader, label):
        return None
    text = f"quota {label} has counters and no record"
    if record is not None:
        text = f"quota {label} is one of inode {record.ino}, which isn't a directory that has it"
    return FsckFinding(
        kind=LEFT,
        ino=0 if record is None else record.ino,
        key=quota_key(label),
        text=text,
        repair="remove the quota: what it limits, is limited no more",
    )


async def _anything(reader: Reader, label: int) -> bool:
    """A counter or work of it."""
    low, high = quota_key(label)[2:], quota_key(label + 1)[2:]
    for prefix in (b"Qb", b"Qe", b"Qs"):
        if await reader.range(prefix + low, prefix + high, 1):
            return True
    return False


async def _stamp(reader: Reader, label: int) -> bytes:
    """Of all counters: whoever changes what the quota counts changes one of them."""
    found = blake2b(digest_size=8)
    for shard in range(QUOTA_SHARDS):
        for key in (quota_bytes_key(label, shard), quota_entries_key(label, shard)):
            found.update((await reader.get(key) or bytes(8))[:8])
    return found.digest()


# --- inodes ---------------------------------------------------------------------------------


async def charges(snap: Snapshot, after: bytes) -> FsckPage:
    """FSCK_SUM of a page of inodes, and those that are charged what they shouldn't be."""
    pairs = await snap.range(after or b"i", b"j", INODES)
    full = len(pairs) == INODES
    last = pairs[-1][0][:_INODE_KEY_BYTES] if full else b""  # it may go on in the next page
    page = FsckPage(findings=[], next=last)
    records: dict[int, QuotaRecord | None] = {}
    charged: Counter[int] = Counter()
    entries: Counter[int] = Counter()
    numbers = {key: value for key, value in pairs if key[_INODE_KEY_BYTES:] == SUB_CHARGED}
    for key, value in pairs:
        if len(key) != _INODE_KEY_BYTES or key == last:
            continue
        page.looked += 1
        ino = int.from_bytes(key[-8:], "big")
        try:
            inode = decode_inode(value)
        except msgspec.MsgspecError:
            continue  # which is told where inodes are looked at
        label = inode.quota
        if label not in records:
            records[label] = await _find(snap, label)
        record = records[label]
        if record is None or record.ino == ino:
            continue
        entries[label] += 1
        charged[label] += unsigned(numbers.get(key + SUB_CHARGED))
        finding = await _judge_charge(snap, ino)
        page.findings += [finding] if finding is not None else []
    page.rows = b"".join(_SUM.pack(label, charged[label], count) for label, count in entries.items())
    return page


async def _judge_charge(reader: Reader, ino: int) -> FsckFinding | None:
    """What nobody writes is charged its length. What has no name is nobody's concern: it is collected."""
    inode = await find_inode(reader, ino)
    record = None if inode is None else await _find(reader, inode.quota)
    if inode is None or record is None or record.ino == ino:
        return None
    if await reader.range(*writers_span(ino), 1) or await reader.get(garbage_key(ino)) is not None:
        return None
    key = inode_key(ino)
    should = unsigned(await reader.get(key + SUB_LENGTH)) if inode.type == FILE else 0
    is_charged = unsigned(await reader.get(key + SUB_CHARGED))
    if is_charged == should:
        return None
    return FsckFinding(
        kind=CHARGE,
        ino=ino,
        found=is_charged,
        expected=should,
        text=f"inode {ino} is charged {is_charged} bytes and has {should}",
        repair="charge it what it has",
    )


# --- entries --------------------------------------------------------------------------------


async def judge_labels(
    reader: Reader, entries: Iterable[Entry], inodes: Mapping[int, Inode | None]
) -> list[FsckFinding]:
    """What lies in a directory that a quota counts, and is counted by none. `inodes`: all of both."""
    found = []
    for entry in entries:
        parent, child = inodes[entry.parent], inodes[entry.ino]
        if parent is None or child is None or not parent.quota or parent.quota == child.quota:
            continue
        record = await _find(reader, parent.quota)
        if record is None or record.state != READY or await _find(reader, child.quota) is not None:
            continue  # the last: it has a name elsewhere, too, and is counted there
        found.append(
            FsckFinding(
                kind=UNCOUNTED,
                ino=entry.ino,
                parent=entry.parent,
                name=entry.name,
                key=entry.key,
                text=f"entry {fsck.show(entry.name)} (inode {entry.ino}) isn't counted by the quota of "
                f"{quota.show(record)}",
                repair="count it",
            )
        )
    return found


# --- again, and repair ----------------------------------------------------------------------


async def still(reader: Reader, finding: FsckFinding) -> FsckFinding | None:
    """The finding as it is now; None if it doesn't hold."""
    if finding.kind == CHARGE:
        return await _judge_charge(reader, finding.ino)
    if finding.kind == LEFT:
        return await _judge_quota(reader, quota_in_key(finding.key))
    if finding.kind == UNCOUNTED:
        data = await reader.get(finding.key)
        if data is None:
            return None
        dirent = decode_dirent(data)
        name = finding.key[DIRENT_PREFIX_BYTES:]
        entry = Entry(finding.key, id_in_key(finding.key), name, dirent.ino, dirent.type)
        inodes = {each: await find_inode(reader, each) for each in (entry.parent, entry.ino)}
        return next(iter(await judge_labels(reader, [entry], inodes)), None)
    label = quota_in_key(finding.key)
    record = await quota.find_quota(reader, label)
    same = record is not None and await _stamp(reader, label) == finding.stamp
    return finding if same else None


async def repair(core: Core, txn: Transaction, finding: FsckFinding) -> str:
    """Mends what `still` found in this transaction. What was done."""
    inode = await find_inode(txn, finding.ino)
    label = quota_in_key(finding.key) if finding.kind in (LEFT, USAGE) else 0
    if finding.kind == LEFT:
        quota.forget(txn, label)
        return "the quota was removed"
    assert inode is not None, finding
    if finding.kind == CHARGE:
        await quota.settle(txn, finding.ino, inode, finding.expected)
        return f"is charged {finding.expected} bytes now"
    if finding.kind == UNCOUNTED:
        await quota.adopt_in(txn, finding.ino, inode, await get_inode(txn, finding.parent))
        return "is counted, with what is in it"
    record = await quota.find_quota(txn, label)
    assert record is not None, finding
    quota.forget(txn, label)
    await quota.start(txn, await core.inos.take(), record.ino, await get_inode(txn, record.ino), record)
    return f"{quota.show(record)} is being counted anew"

"""The index of KV spaces: which there are, and their bounds, for the manager. docs/metadata.md, KV spaces.

A copy of what their inodes say, written by the same transactions: creation, a change of bounds, the loss
of the last name. A rename changes nothing in it, and what goes with its tree is taken out by the collector,
when its own entry goes. A store of a version before the index gets it by `complete`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ffs.errors import Damaged, FfsError
from ffs.proto.records import KV_SPACE, Inode, KvIndexEntry, KvParams
from metadata.fs.schema import (
    KV_INDEX,
    KV_INDEX_CHANGES,
    KV_INDEX_COMPLETE,
    decode_inode,
    decode_kv_index,
    encode,
    find_inode,
    garbage_key,
    id_in_key,
    inode_key,
    kv_index_key,
    unsigned,
)
from metadata.kv.contract import Snapshot, Store, Transaction, after

_log = logging.getLogger(__name__)

PAGE: Final = 1000
MIN_SLOT_BYTES: Final = 4096  # docs/disk_format.md, Slabs and slots
RETRY_S: Final = 5.0
INODE_KEY_BYTES: Final = len(inode_key(0))


@dataclass(frozen=True, slots=True)
class SpaceIndex:
    """As read at one moment. `changes` differs whenever `spaces` does."""

    changes: int = -1  # -1: not read yet
    complete: bool = False  # False: a store of an earlier version, `complete` isn't done
    spaces: Mapping[int, KvIndexEntry] = field(default_factory=dict)  # by inode id


def note_space(txn: Transaction, ino: int, inode: Inode) -> None:
    """It was made, or its bounds were changed. Conflicts with no other space's."""
    assert inode.kv is not None, ino
    assert inode.layout is not None, ino
    txn.set(kv_index_key(ino), encode(KvIndexEntry(layout=inode.layout, kv=inode.kv)))
    txn.add(KV_INDEX_CHANGES, 1)


def forget_space(txn: Transaction, ino: int) -> None:
    """No name leads to it any more."""
    txn.clear(kv_index_key(ino))
    txn.add(KV_INDEX_CHANGES, 1)


def slot_bytes(block: int) -> int:
    """What a block of that many bytes takes on a device: its size class."""
    return max(MIN_SLOT_BYTES, 1 << (block - 1).bit_length())


def slot_of(kv: KvParams) -> int:
    """What one chunk of a space's blocks takes: a part, where a block has several."""
    return slot_bytes(kv.block_bytes // kv.parts)


async def read_index(snapshot: Snapshot, known: SpaceIndex) -> SpaceIndex:
    """The index now; `known` itself if it is that still. Raises Damaged, naming the record."""
    changes = unsigned(await snapshot.get(KV_INDEX_CHANGES))
    complete = await snapshot.get(KV_INDEX_COMPLETE) is not None
    if (changes, complete) == (known.changes, known.complete):
        return known
    pairs = await snapshot.range(KV_INDEX, after(KV_INDEX))
    spaces = {id_in_key(key): _entry(key, value) for key, value in pairs}
    return SpaceIndex(changes, complete, spaces)


def _entry(key: bytes, value: bytes) -> KvIndexEntry:
    try:
        return decode_kv_index(value)
    except msgspec.MsgspecError as error:
        raise Damaged(f"record {key!r} of the metadata store can't be read: {error}") from None


async def complete(store: Store) -> int:
    """Looks through all inodes for KV spaces that aren't in the index; how many it found. Done once in the
    life of a store, by whoever is the primary; stopped anywhere, it begins again. Meanwhile the index is
    right in what it has, and a space that isn't in it is one that nothing is evicted from."""
    found = 0
    begin = b"i"
    while begin:
        spaces, begin = await store.read(lambda snapshot, begin=begin: _page(snapshot, begin))  # type: ignore[misc]
        for ino in spaces:
            found += await store.run(lambda txn, ino=ino: _add(txn, ino))  # type: ignore[misc]

    async def done(txn: Transaction) -> None:
        txn.set(KV_INDEX_COMPLETE, b"\x01")

    await store.run(done)
    return found


async def keep_complete(store: Store) -> None:
    """`complete` where it is needed, until it is done."""
    while not await store.read(lambda snapshot: snapshot.get(KV_INDEX_COMPLETE)):
        try:
            found = await complete(store)
            _log.warning("the index of KV spaces is made: %d spaces of an earlier version", found)
        except FfsError as error:
            _log.warning("the index of KV spaces isn't made yet: %s", error)
            await asyncio.sleep(RETRY_S)


async def _page(snapshot: Snapshot, begin: bytes) -> tuple[list[int], bytes]:
    """(KV spaces among these keys, where to go on; b"": that was all)."""
    pairs = await snapshot.range(begin, b"j", PAGE)
    spaces = [
        int.from_bytes(key[-8:], "big")
        for key, value in pairs
        if len(key) == INODE_KEY_BYTES and _is_space(key, value)
    ]
    return spaces, pairs[-1][0] + b"\0" if len(pairs) == PAGE else b""


def _is_space(key: bytes, value: bytes) -> bool:
    """An inode that can't be read is none: one bad record doesn't keep the others from the index."""
    try:
        return decode_inode(value).type == KV_SPACE
    except msgspec.MsgspecError as error:
        _log.error("record %r of the metadata store can't be read: %s", key, error)
        return False


async def _add(txn: Transaction, ino: int) -> int:
    """1 if it wasn't in the index, and a name leads to it."""
    inode = await find_inode(txn, ino)
    if inode is None or await txn.get(garbage_key(ino)) is not None:
        return 0
    if await txn.get(kv_index_key(ino)) is not None:
        return 0
    note_space(txn, ino, inode)
    return 1

"""Keys of the namespace, and its records in and out. docs/metadata.md, Keys.

    z                              store header
    i hash2 ino8                   inode                      hash2: of ino / 256, spreads
    i hash2 ino8 a                   counter: end of append reservations
    i hash2 ino8 c                   counter: ctime, ns (max)
    i hash2 ino8 e                   counter: entries of a directory (add)
    i hash2 ino8 l                   counter: length of a file (max under the truncate epoch)
    i hash2 ino8 m                   counter: mtime, ns (max; absent: the creation time)
    i hash2 ino8 n                   counter: links beyond 1 (a directory: beyond 2), signed (add)
    i hash2 ino8 q                   counter: not 0 if chunks may lie beyond the length
    i hash2 ino8 v                   counter: bytes that the quota counts of a file
    d ino8 name                    entry of directory ino
    s client8                      client session, while it lives
    b client8                      counter: its renewals
    e client8                      session that is over, its files are being closed
    f client8                      fence for storage servers
    r client8 slot4                outcome of the slot's last request
    r client8 slot4 page4            outcomes of a batch, by page
    w ino8 client8 handle8         write session
    W client8 ino8 handle8         the same, by client
    g ino8                         to be collected
    t ino8                         truncation whose chunks aren't cut yet
    k kind shard1                  counter: blocks of ids given out
    L ino8 kind1 client8 owner8    lock
    M client8 ino8 kind1 owner8    the same, by client
    l ino8 client8 owner8          locks of directories' entries only
    q ino8                         index of KV spaces: those that a name leads to
    u ino8                         names of the inode's extended attributes
    u ino8 name                    value of one
    Qc, Qd                         counter: changes of that index; present once it is complete
    Ql quota8                      quota of a directory
    Qb quota8 shard1               counter: bytes that it counts (add)
    Qe quota8 shard1               counter: entries that it counts (add)
    Qs quota8 ino8                 directory whose content it is still to count; last name done
    K                              signing keys (metadata.auth.keyring)
    Kt                             key of tickets (metadata.fs.tickets)
    Uu name, Uc, Us client8        users, tokens, sessions under them (metadata.auth.users)
    c ...                          the cluster manager's

Numbers in keys are big endian, counters little-endian u64. Ids of one block of 256 lie together, so that
what is created together is stored together, and the blocks are spread over the key space.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, Protocol

import msgspec

from ffs import errors
from ffs.proto import records

HEADER_KEY: Final = b"z"
TICKET_KEY: Final = b"Kt"

SUB_APPEND: Final = b"a"
SUB_CTIME: Final = b"c"
SUB_ENTRIES: Final = b"e"
SUB_LENGTH: Final = b"l"
SUB_MTIME: Final = b"m"
SUB_LINKS: Final = b"n"
SUB_DOUBTFUL: Final = b"q"
SUB_CHARGED: Final = b"v"

_INODE: Final = Struct(">cHQ").pack
_ID: Final = Struct(">cQ").pack
_SLOT: Final = Struct(">cQI").pack
_PAGE: Final = Struct(">I").pack
_WRITER: Final = Struct(">cQQQ").pack
_unpack_writer: Final = Struct(">cQQQ").unpack
_LOCK: Final = Struct(">cQBQQ").pack
_unpack_lock: Final = Struct(">cQBQQ").unpack
_CLIENT_LOCK: Final = Struct(">cQQBQ").pack
_unpack_client_lock: Final = Struct(">cQQBQ").unpack
_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_HASH: Final = 0x9E37_79B9_7F4A_7C15  # odd: multiplying is a bijection of u64, its high bits spread


class Reader(Protocol):
    """What ops read from: a snapshot or a transaction."""

    async def get(self, key: bytes) -> bytes | None: ...

    async def range(
        self, begin: bytes, end: bytes, limit: int = 0, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]: ...


# --- keys -----------------------------------------------------------------------------------


def inode_key(ino: int) -> bytes:
    return _INODE(b"i", ((ino >> 8) * _HASH & _MASK) >> 48, ino)


def inode_span(ino: int) -> tuple[bytes, bytes]:
    """The inode with its counters, as a range."""
    key = inode_key(ino)
    return key, key + b"\xff"


def dirent_key(parent: int, name: bytes) -> bytes:
    return _ID(b"d", parent) + name


def dirent_span(parent: int, after: bytes = b"") -> tuple[bytes, bytes]:
    """Entries of a directory with names beyond `after`."""
    return _ID(b"d", parent) + (after + b"\0" if after else b""), _ID(b"d", parent + 1)


DIRENT_PREFIX_BYTES: Final = 9


def session_key(client: int) -> bytes:
    return _ID(b"s", client)


def beat_key(client: int) -> bytes:
    return _ID(b"b", client)


def ended_key(client: int) -> bytes:
    return _ID(b"e", client)


def fence_key(client: int) -> bytes:
    return _ID(b"f", client)


def slot_key(client: int, slot: int) -> bytes:
    return _SLOT(b"r", client, slot)


def slot_page_key(client: int, slot: int, page: int) -> bytes:
    return _SLOT(b"r", client, slot) + _PAGE(page)


def slots_span(client: int) -> tuple[bytes, bytes]:
    return _ID(b"r", client), _ID(b"r", client + 1)


def writer_key(ino: int, client: int, handle: int) -> bytes:
    return _WRITER(b"w", ino, client, handle)


def writers_span(ino: int) -> tuple[bytes, bytes]:
    return _ID(b"w", ino), _ID(b"w", ino + 1)


def client_writer_key(client: int, ino: int, handle: int) -> bytes:
    return _WRITER(b"W", client, ino, handle)


def client_writers_span(client: int) -> tuple[bytes, bytes]:
    return _ID(b"W", client), _ID(b"W", client + 1)


def split_client_writer(key: bytes) -> tuple[int, int, int]:
    """(client, ino, handle) of a client_writer_key."""
    _, client, ino, handle = _unpack_writer(key)
    return client, ino, handle


def lock_key(ino: int, kind: int, client: int, owner: int) -> bytes:
    return _LOCK(b"L", ino, kind, client, owner)


def locks_span(ino: int) -> tuple[bytes, bytes]:
    return _ID(b"L", ino), _ID(b"L", ino + 1)


def split_lock(key: bytes) -> tuple[int, int, int, int]:
    """(ino, kind, client, owner) of a lock_key."""
    _, ino, kind, client, owner = _unpack_lock(key)
    return ino, kind, client, owner


def client_lock_key(client: int, ino: int, kind: int, owner: int) -> bytes:
    return _CLIENT_LOCK(b"M", client, ino, kind, owner)


def client_locks_span(client: int) -> tuple[bytes, bytes]:
    return _ID(b"M", client), _ID(b"M", client + 1)


def split_client_lock(key: bytes) -> tuple[int, int, int, int]:
    """(client, ino, kind, owner) of a client_lock_key."""
    _, client, ino, kind, owner = _unpack_client_lock(key)
    return client, ino, kind, owner


def entries_lock_key(ino: int, client: int, owner: int) -> bytes:
    return _WRITER(b"l", ino, client, owner)


ENTRIES_LOCKS: Final = (b"l", b"m")  # the span of all


def split_entries_lock(key: bytes) -> tuple[int, int, int]:
    """(ino, client, owner) of an entries_lock_key."""
    _, ino, client, owner = _unpack_writer(key)
    return ino, client, owner


def garbage_key(ino: int) -> bytes:
    return _ID(b"g", ino)


def trim_key(ino: int) -> bytes:
    return _ID(b"t", ino)


def kv_index_key(ino: int) -> bytes:
    return _ID(b"q", ino)


def xattr_names_key(ino: int) -> bytes:
    return _ID(b"u", ino)


def xattr_key(ino: int, name: bytes) -> bytes:
    return _ID(b"u", ino) + name


def xattrs_span(ino: int) -> tuple[bytes, bytes]:
    """The names and all values."""
    return _ID(b"u", ino), _ID(b"u", ino + 1)


QUOTAS: Final = b"Ql"
QUOTA_WORK: Final = b"Qs"
QUOTA_SHARDS: Final = 4  # usage of one quota: what many add to isn't one key

_QUOTA: Final = Struct(">2sQ").pack
_QUOTA_SHARD: Final = Struct(">2sQB").pack
_QUOTA_WORK: Final = Struct(">2sQQ").pack
_unpack_quota_work: Final = Struct(">2sQQ").unpack


def quota_key(quota: int) -> bytes:
    return _QUOTA(QUOTAS, quota)


def quota_in_key(key: bytes) -> int:
    """The quota's id in any of its keys."""
    return int.from_bytes(key[2:10], "big")


def quota_bytes_key(quota: int, shard: int) -> bytes:
    return _QUOTA_SHARD(b"Qb", quota, shard)


def quota_entries_key(quota: int, shard: int) -> bytes:
    return _QUOTA_SHARD(b"Qe", quota, shard)


def quota_work_key(quota: int, ino: int) -> bytes:
    return _QUOTA_WORK(QUOTA_WORK, quota, ino)


def quota_work_span(quota: int) -> tuple[bytes, bytes]:
    """Directories that a quota is still to count."""
    return _QUOTA(QUOTA_WORK, quota), _QUOTA(QUOTA_WORK, quota + 1)


def split_quota_work(key: bytes) -> tuple[int, int]:
    """(quota, directory) of a quota_work_key."""
    _, quota, ino = _unpack_quota_work(key)
    return quota, ino


KV_INDEX: Final = b"q"
KV_INDEX_CHANGES: Final = b"Qc"  # counter
KV_INDEX_COMPLETE: Final = b"Qd"  # set once every KV space is in the index


def ids_key(kind: bytes, shard: int) -> bytes:
    return b"k" + kind + bytes([shard])


def id_in_key(key: bytes) -> int:
    """The u64 after the first byte."""
    return int.from_bytes(key[1:9], "big")


# --- records --------------------------------------------------------------------------------

encode: Final = msgspec.msgpack.Encoder().encode
decode_inode: Final = msgspec.msgpack.Decoder(records.Inode).decode
decode_dirent: Final = msgspec.msgpack.Decoder(records.Dirent).decode
decode_session: Final = msgspec.msgpack.Decoder(records.ClientSession).decode
decode_writer: Final = msgspec.msgpack.Decoder(records.WriteSession).decode
decode_slot: Final = msgspec.msgpack.Decoder(records.RetrySlot).decode
decode_garbage: Final = msgspec.msgpack.Decoder(records.Garbage).decode
decode_trim: Final = msgspec.msgpack.Decoder(records.Trim).decode
decode_fence: Final = msgspec.msgpack.Decoder(records.FencedClient).decode
decode_kv_index: Final = msgspec.msgpack.Decoder(records.KvIndexEntry).decode
decode_quota: Final = msgspec.msgpack.Decoder(records.QuotaRecord).decode
decode_xattr_names: Final = msgspec.msgpack.Decoder(records.XattrNames).decode
decode_lock: Final = msgspec.msgpack.Decoder(records.LockRecord).decode
decode_header: Final = msgspec.msgpack.Decoder(records.StoreHeader).decode


def unsigned(value: bytes | None) -> int:
    """A counter; a missing one is 0."""
    return 0 if value is None else int.from_bytes(value, "little")


def signed(value: bytes | None) -> int:
    return 0 if value is None else int.from_bytes(value, "little", signed=True)


def counter(value: int) -> bytes:
    """A counter's bytes, to be set rather than added to."""
    return (value & _MASK).to_bytes(8, "little")


async def find_inode(reader: Reader, ino: int) -> records.Inode | None:
    data = await reader.get(inode_key(ino))
    return None if data is None else decode_inode(data)


async def get_inode(reader: Reader, ino: int) -> records.Inode:
    """Raises NotFound if it is gone."""
    data = await reader.get(inode_key(ino))
    if data is None:
        raise errors.NotFound(f"inode {ino} is gone")
    return decode_inode(data)

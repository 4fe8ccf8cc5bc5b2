"""Keys and records of the cluster in the store; all keys begin with `c`. docs/control_plane.md, Store.

    key                      value
    cE                       u64 routing epoch, little-endian; grows at every change that routing shows
    cL                       LeaseRecord
    cM                       u64 manager time in ms, little-endian: no time above it was handed out
    cI <kind>                u64 last id given, little-endian: n node, t target, c chain, b table
    cN <node u64>            NodeRecord
    cU <node uuid>           u64 node id
    cT <target u64>          TargetRecord
    cD <device uuid>         DeviceRecord
    cC <chain u32>           ChainRecord
    cB <table u32> <version u32>  TableRecord
    cS <node u64>            UsageRecord
    cR                       RebalanceRecord (metadata.cluster.moves): one that goes on
    cQ <space u64>           SharesRecord (metadata.cluster.spaces): shares of a quota that aren't even

Integers in keys are big-endian, so ranges come in order.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Struct

from ffs.errors import Damaged
from ffs.proto.cluster import ChainRecord, NodeRecord, TableRecord, TargetRecord

EPOCH: Final = b"cE"
LEASE: Final = b"cL"
MANAGER_TIME: Final = b"cM"
NODES: Final = b"cN"
NODE_UUIDS: Final = b"cU"
TARGETS: Final = b"cT"
DEVICES: Final = b"cD"
CHAINS: Final = b"cC"
TABLES: Final = b"cB"
USAGE: Final = b"cS"

_U64 = struct.Struct("<Q")


class LeaseRecord(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """Who is the primary. Judged by change: `beat` grows at every renewal (metadata.cluster.lease)."""

    v: int = 1
    term: int
    beat: int
    holder: bytes  # 16 random bytes of a process; b"": released
    address: str  # of its server, for NotPrimary
    duration_ms: int
    machine: str  # boot id and pid name space: where pid and started mean something
    pid: int
    started: int  # start time of the process in clock ticks since boot
    grants_ms: int = 0  # no lease that storage nodes were given lasts longer; 0: none was given


class DeviceRecord(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """The targets that were given to a device, before it was formatted."""

    v: int = 1
    node: int
    targets: tuple[int, ...]


class UsageRecord(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """Space of a node's devices as the primary last heard, for statfs of the other processes."""

    v: int = 1
    devices: tuple[tuple[bytes, int, int], ...]  # (uuid, capacity bytes, free bytes)


R = TypeVar("R", ChainRecord, DeviceRecord, LeaseRecord, NodeRecord, TableRecord, TargetRecord, UsageRecord)

encode = msgspec.msgpack.Encoder().encode
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (
        ChainRecord,
        DeviceRecord,
        LeaseRecord,
        NodeRecord,
        TableRecord,
        TargetRecord,
        UsageRecord,
    )
}


def decode(kind: type[R], key: bytes, value: bytes) -> R:
    """A record. Raises Damaged, naming the key."""
    try:
        record: R = _decoders[kind].decode(value)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Damaged(f"record {key!r} of the metadata store isn't a {kind.__name__}: {error}") from None
    return record


def node_key(node: int) -> bytes:
    return NODES + node.to_bytes(8, "big")


def target_key(target: int) -> bytes:
    return TARGETS + target.to_bytes(8, "big")


def chain_key(chain: int) -> bytes:
    return CHAINS + chain.to_bytes(4, "big")


def table_key(table: int, version: int) -> bytes:
    return TABLES + table.to_bytes(4, "big") + version.to_bytes(4, "big")


def usage_key(node: int) -> bytes:
    return USAGE + node.to_bytes(8, "big")


def pack_u64(value: int) -> bytes:
    return _U64.pack(value)


def unpack_u64(value: bytes | None) -> int:
    return 0 if value is None else int(_U64.unpack(value)[0])


class _Reads(Protocol):
    def get(self, key: bytes) -> Awaitable[bytes | None]: ...


async def get_record(reads: _Reads, kind: type[R], key: bytes) -> R | None:
    value = await reads.get(key)
    return None if value is None else decode(kind, key, value)


class _Writes(_Reads, Protocol):
    def set(self, key: bytes, value: bytes) -> None: ...


async def new_ids(txn: _Writes, kind: bytes, count: int) -> range:
    """The next ids of a kind, from 1 on, never given again."""
    key = b"cI" + kind
    last = unpack_u64(await txn.get(key))
    txn.set(key, pack_u64(last + count))
    return range(last + 1, last + count + 1)


async def raise_epoch(txn: _Writes) -> int:
    """Every transaction that changes what routing shows calls this once."""
    epoch = unpack_u64(await txn.get(EPOCH)) + 1
    txn.set(EPOCH, pack_u64(epoch))
    return epoch

"""Which cluster a store is: drawn at its first start, never changed. docs/control_plane.md, Identity."""

from __future__ import annotations

import os
import time

from ffs.errors import VersionMismatch
from ffs.proto.records import StoreHeader
from metadata.fs.schema import HEADER_KEY, decode_header, encode
from metadata.kv.contract import Store, Transaction

KNOWN_INCOMPAT = 0


async def cluster_id(store: Store, created_by: str) -> bytes:
    """The 16 bytes; draws them if the store is new. VersionMismatch for a store of a newer ffs."""
    drawn = os.urandom(16)

    async def body(txn: Transaction) -> StoreHeader:
        value = await txn.get(HEADER_KEY)
        if value is not None:
            return decode_header(value)
        header = StoreHeader(cluster=drawn, created_ns=time.time_ns(), created_by=created_by)
        txn.set(HEADER_KEY, encode(header))
        return header

    header = await store.run(body)
    if header.incompat & ~KNOWN_INCOMPAT:
        raise VersionMismatch(
            f"this metadata store was made by {header.created_by or 'a newer ffs'} and needs features "
            f"{header.incompat & ~KNOWN_INCOMPAT:#x} that this version doesn't know: update ffs"
        )
    return header.cluster

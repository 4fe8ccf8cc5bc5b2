"""Which cluster a store is: drawn at its first start, never changed. docs/control_plane.md, Identity."""

from __future__ import annotations

import os
import time

from ffs.errors import WrongCluster
from metadata.fs.namespace import format_store, read_header
from metadata.kv.contract import Store


async def cluster_id(store: Store, created_by: str) -> bytes:
    """The 16 bytes; a new store is made (cluster id, root directory owned by this process's user).

    Two processes may start on a new store at once: one of them makes it. VersionMismatch for a store
    of a newer ffs."""
    header = await read_header(store)
    if header is not None:
        return header.cluster
    drawn = os.urandom(16)
    try:
        made = await format_store(
            store,
            drawn,
            now_ns=time.time_ns(),
            root_uid=os.getuid(),
            root_gid=os.getgid(),
            created_by=created_by,
        )
    except WrongCluster:
        other = await read_header(store)
        if other is None:
            raise
        return other.cluster
    return made.cluster

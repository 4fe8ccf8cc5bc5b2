"""The second half of a truncation: cutting the chunks, after the transaction that set the length.

Until it is done the file's Trim record keeps writers away from the new epoch (ops/open.py, need_trimmed).
Anybody may do it, several times, at the same time."""

from __future__ import annotations

from ffs import errors
from ffs.proto.records import Inode, Trim
from metadata.fs.core import Core
from metadata.fs.schema import decode_trim, find_inode, trim_key
from metadata.kv.contract import Snapshot, Transaction


async def finish(core: Core, ino: int) -> None:
    """Cuts what is to be cut of a file. Raises what the chains raise; the record stays then."""

    async def look(snap: Snapshot) -> tuple[Trim, Inode] | None:
        data = await snap.get(trim_key(ino))
        inode = await find_inode(snap, ino)
        return None if data is None or inode is None else (decode_trim(data), inode)

    async def done(txn: Transaction) -> None:
        data = await txn.get(trim_key(ino))
        if data is not None and decode_trim(data).epoch == trim.epoch:
            txn.clear(trim_key(ino))

    while (found := await core.store.read(look)) is not None:
        trim, inode = found
        if inode.layout is None:
            raise errors.Damaged(f"inode {ino} is to be cut and has no layout")
        await core.chunks.cut(ino, inode.layout, trim.old, trim.length, trim.epoch)
        await core.store.run(done)

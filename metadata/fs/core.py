"""What every operation works with: the store, ids, the ports, and the pieces that several of them share."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from ffs import errors
from ffs.layout import Layout, check_layout
from ffs.proto.cluster import ROLE_BULK, ROLE_KV
from ffs.proto.common import (
    CAPABILITY_FILE,
    CAPABILITY_KV,
    Capability,
    Creds,
    encode_capability,
)
from ffs.proto.meta import Attributes, LayoutChoice
from ffs.proto.records import DIRECTORY, FILE, FLAG_XATTR, KV_SPACE, SYMLINK, Dirent, Garbage, Inode
from metadata.fs import ids as ids_module
from metadata.fs import quota
from metadata.fs.chunks import Chunks
from metadata.fs.ids import Ids
from metadata.fs.ports import ChainPort, ClusterPort, TableView
from metadata.fs.schema import (
    SUB_CTIME,
    SUB_ENTRIES,
    SUB_LENGTH,
    SUB_LINKS,
    SUB_MTIME,
    dirent_key,
    encode,
    garbage_key,
    inode_key,
    inode_span,
    signed,
    writers_span,
    xattrs_span,
)
from metadata.fs.spaces import forget_space
from metadata.fs.waiters import Waiters
from metadata.kv.contract import Store, Transaction

CAPABILITY_TTL_MS: Final = 10 * 60 * 1000  # manager time
NO_CHOICE: Final = LayoutChoice()


class Core:
    """State of one metadata process for the namespace. One event loop; nothing here blocks."""

    def __init__(
        self,
        store: Store,
        cluster: ClusterPort,
        chains: ChainPort,
        *,
        cluster_id: bytes,
        clock_ns: Callable[[], int] = time.time_ns,
        rng: random.Random | None = None,
        sign: Callable[[Capability], bytes] = encode_capability,
    ) -> None:
        """`sign`: makes the bytes of a capability; the default leaves it unsigned."""
        rng = rng or random.Random()
        self.store = store
        self.cluster = cluster
        self.cluster_id = cluster_id
        self.chunks = Chunks(cluster, chains)
        self.now_ns = clock_ns
        self._sign = sign
        self.inos = Ids(store, ids_module.INODES, ids_module.INODE_BLOCK, rng)
        self.clients = Ids(store, ids_module.CLIENTS, 16, rng)
        self.capabilities = Ids(store, ids_module.CAPABILITIES, 65536, rng)
        self.lock_waiters = Waiters()
        self.work = asyncio.Event()  # set when there may be something to collect

    # --- capabilities ---

    def capability(self, ident: int, client: int, ino: int, inode: Inode, rights: int) -> tuple[bytes, int]:
        """(bytes, expiry in manager time)."""
        expiry = self.cluster.manager_time_ms() + CAPABILITY_TTL_MS
        kind = CAPABILITY_KV if inode.type == KV_SPACE else CAPABILITY_FILE
        made = Capability(kind, rights, client, ino, inode.epoch, expiry, ident)
        return self._sign(made), expiry

    # --- layouts ---

    def default_table(self, role: str, path: bytes | None = None) -> TableView:
        """The table of what names none: that of `role`, else the one of no role. ChainUnavailable."""
        view = self.cluster.table(0, role=role)
        if view is None:
            what = "KV spaces" if role == ROLE_KV else "files"
            raise errors.ChainUnavailable(
                f"the cluster has no chain table for {what} yet: start storage servers, and make one "
                f"(ffs cluster table create NAME --role {role}, or without --role)",
                path,
            )
        return view

    def choose_layout(
        self, inherited: Layout | None, choice: LayoutChoice | None, ino: int, role: str = ROLE_BULK
    ) -> Layout:
        """The layout of a new file, or, `role` ROLE_KV, of a KV space. InvalidArgument with the reason, or
        ChainUnavailable if the cluster has no storage for it yet."""
        choice = choice or NO_CHOICE
        table = choice.table or (inherited.table if inherited else 0)
        view = self.cluster.table(table) if table else self.default_table(role)
        if view is None:
            raise errors.InvalidArgument(f"there is no chain table {table}: see `ffs cluster table ls`")
        size = choice.chunk_size or (inherited.chunk_size if inherited else 0) or view.chunk_size
        stripe = choice.stripe if choice.stripe >= 0 else inherited.stripe if inherited else -1
        layout = Layout(view.id, view.version, ino, size, view.stripe if stripe < 0 else stripe)
        check_layout(layout, len(view.chains))
        return layout

    def inherited_layout(self, parent: Layout | None, choice: LayoutChoice | None) -> Layout | None:
        """What a new directory hands on: fields that are 0 (stripe: -1) leave the choice to the table."""
        if choice is None or choice == NO_CHOICE:
            return parent
        table = choice.table or (parent.table if parent else 0)
        size = choice.chunk_size or (parent.chunk_size if parent else 0)
        stripe = choice.stripe if choice.stripe >= 0 else parent.stripe if parent else -1
        self.choose_layout(Layout(table, 0, 0, size, stripe), None, 0)  # refuses here what can't work later
        return Layout(table, 0, 0, size, stripe)

    # --- inodes and entries ---

    def add_entry(
        self, txn: Transaction, parent: int, name: bytes, ino: int, kind: int, now: int, *, new: bool = True
    ) -> None:
        """Writes an entry; the parent's inode stays untouched. `new`: there was none of that name."""
        txn.set(dirent_key(parent, name), encode(Dirent(1, ino, kind)))
        self.touch(txn, parent, now)
        if new:
            txn.add(inode_key(parent) + SUB_ENTRIES, 1)
            if kind == DIRECTORY:
                txn.add(inode_key(parent) + SUB_LINKS, 1)

    def remove_entry(self, txn: Transaction, parent: int, name: bytes, kind: int, now: int) -> None:
        txn.clear(dirent_key(parent, name))
        self.touch(txn, parent, now)
        txn.add(inode_key(parent) + SUB_ENTRIES, -1)
        if kind == DIRECTORY:
            txn.add(inode_key(parent) + SUB_LINKS, -1)

    @staticmethod
    def touch(txn: Transaction, ino: int, now: int) -> None:
        """mtime and ctime."""
        key = inode_key(ino)
        txn.max(key + SUB_MTIME, now)
        txn.max(key + SUB_CTIME, now)

    async def drop_link(self, txn: Transaction, ino: int, inode: Inode, now: int) -> None:
        """One name less for what isn't a directory; the last one makes it garbage."""
        key = inode_key(ino)
        if 1 + signed(await txn.get(key + SUB_LINKS)) > 1:
            txn.add(key + SUB_LINKS, -1)
            txn.max(key + SUB_CTIME, now)
        elif inode.type == SYMLINK:
            await self.erase_inode(txn, ino, inode)
        else:
            txn.add(key + SUB_LINKS, -1)
            txn.set(garbage_key(ino), encode(Garbage(type=inode.type, since_ns=now)))
            if inode.type == KV_SPACE:
                forget_space(txn, ino)
            if inode.quota and not await txn.range(*writers_span(ino), 1):
                await quota.release_nameless(txn, ino, inode)

    @staticmethod
    async def erase_inode(txn: Transaction, ino: int, inode: Inode) -> None:
        """The inode goes, with its counters, extended attributes and what a quota counts of it. Entries are
        the caller's."""
        if inode.quota:
            await quota.release(txn, ino, inode)
        txn.clear_range(*inode_span(ino))
        if inode.flags & FLAG_XATTR:
            txn.clear_range(*xattrs_span(ino))

    def new_inode(self, kind: int, mode: int, creds: Creds, container: Inode, now: int, **more: Any) -> Inode:
        """With the group of a setgid directory, as POSIX has it."""
        gid = creds.gid
        if container.mode & 0o2000:
            gid = container.gid
            if kind == DIRECTORY:
                mode |= 0o2000
        return Inode(type=kind, mode=mode, uid=creds.uid, gid=gid, btime_ns=now, ctime_ns=now, **more)


class TrimPending(Exception):
    """The operation must wait until the chunks of a truncated file are cut: `Namespace` sees to it and runs
    the operation again."""

    def __init__(self, ino: int) -> None:
        super().__init__(ino)
        self.ino = ino


Get = Callable[[bytes], Awaitable[bytes | None]]


async def attributes(get: Get, ino: int, inode: Inode) -> Attributes:
    """What stat tells of an inode. `get`: a snapshot's, or a transaction's `peek`, since a counter that is
    only told shouldn't make a conflict."""
    key = inode_key(ino)
    links = await get(key + SUB_LINKS)
    mtime = await get(key + SUB_MTIME)
    ctime = await get(key + SUB_CTIME)
    size = SUB_SIZE.get(inode.type)
    return attributes_of(ino, inode, links, mtime, ctime, None if size is None else await get(key + size))


# The counter that tells how large something is.
SUB_SIZE: Final = {FILE: SUB_LENGTH, DIRECTORY: SUB_ENTRIES}


def attributes_of(
    ino: int,
    inode: Inode,
    links_bytes: bytes | None,
    mtime: bytes | None,
    ctime_bytes: bytes | None,
    size: bytes | None,
) -> Attributes:
    """The same, from the counters of an inode; `size`: the one of SUB_SIZE."""
    kind = inode.type
    links = 0 if links_bytes is None else signed(links_bytes)
    ctime = 0 if ctime_bytes is None else int.from_bytes(ctime_bytes, "little")
    if kind == FILE:
        length = 0 if size is None else int.from_bytes(size, "little")
    elif kind == DIRECTORY:
        length = signed(size)
        links += 1
    else:
        length = len(inode.target)
    return Attributes(
        1,
        ino,
        kind,
        inode.mode,
        inode.uid,
        inode.gid,
        links + 1,
        length,
        inode.btime_ns if mtime is None else int.from_bytes(mtime, "little"),
        ctime if ctime > inode.ctime_ns else inode.ctime_ns,
        inode.btime_ns,
        inode.epoch,
        inode.layout,
        inode.kv,
    )


def fresh_attributes(ino: int, inode: Inode, links: int = 1) -> Attributes:
    """Of an inode made just now, without looking."""
    return Attributes(
        1,
        ino,
        inode.type,
        inode.mode,
        inode.uid,
        inode.gid,
        links,
        len(inode.target),
        inode.btime_ns,
        inode.btime_ns,
        inode.btime_ns,
        inode.epoch,
        inode.layout,
        inode.kv,
    )

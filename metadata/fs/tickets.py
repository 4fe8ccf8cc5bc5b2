"""Tickets: who acts on an inode by its id shows that a path has led there. docs/metadata.md, Tickets.

An inode's mode says nothing of the directories above it, which not everybody may walk through. So a reply
that opens a path carries a ticket, a MAC over inode and user, and a request by id brings it. Nothing is kept
for it but one key in the store, which all processes share. Root needs none. One event loop.
"""

from __future__ import annotations

import hmac
import os
from hashlib import blake2b
from struct import Struct
from typing import Final

import msgspec

from ffs import errors
from ffs.proto import checks, locking, meta, quota, xattrs
from ffs.proto.common import Message
from ffs.proto.records import TicketKey
from metadata.fs.schema import TICKET_KEY, encode
from metadata.kv.contract import Store, Transaction

TICKET_BYTES: Final = 16
SECRET_BYTES: Final = 32

# Requests that may name an inode by its id, and are judged by its mode or owner then.
BY_ID: Final[frozenset[type[Message]]] = frozenset(
    {
        meta.Stat,
        meta.ReadDir,
        meta.StatFs,
        meta.Open,
        meta.Truncate,
        meta.CapabilityRenew,
        meta.SetAttr,
        meta.Link,
        xattrs.GetXattr,
        xattrs.SetXattr,
        xattrs.RemoveXattr,
        xattrs.ListXattr,
        locking.Lock,
        locking.Unlock,
        locking.GetLocks,
        meta.SetKvSpace,
        quota.SetQuota,
        quota.GetQuota,
    }
)
# These name one too, and are judged by the write session that they name, or are for administrators.
OTHERWISE: Final[frozenset[type[Message]]] = frozenset(
    {meta.Close, meta.Fsync, meta.Append, quota.Reserve, checks.FsckScan}
)

_OVER: Final = Struct("<QQ").pack  # inode, uid
_decode_key: Final = msgspec.msgpack.Decoder(TicketKey).decode


def new_key() -> bytes:
    """What a store keeps under TICKET_KEY."""
    return encode(TicketKey(secret=os.urandom(SECRET_BYTES)))


class Tickets:
    """Makes and checks them. `load` before anything else."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keyed: blake2b | None = None

    @property
    def loaded(self) -> bool:
        return self._keyed is not None

    async def load(self) -> None:
        """Reads the key; a store from before there were tickets gets it now. Raises what the store raises."""
        data = await self._store.read(lambda snap: snap.get(TICKET_KEY))
        if data is None:
            made = new_key()

            async def body(txn: Transaction) -> bytes:
                found = await txn.get(TICKET_KEY)
                if found is None:
                    txn.set(TICKET_KEY, made)
                return found or made

            data = await self._store.run(body)
        self._keyed = blake2b(key=_decode_key(data).secret, digest_size=TICKET_BYTES, person=b"ffs ticket")

    def make(self, ino: int, uid: int) -> bytes:
        """For user `uid`, whom a path has led to inode `ino`."""
        assert self._keyed is not None, "load first"
        mac = self._keyed.copy()
        mac.update(_OVER(ino, uid))
        return mac.digest()

    def check(self, request: meta.Request) -> None:
        """Raises AccessDenied for a request by id without its ticket - before anybody looks whether there is
        such an inode."""
        if type(request) not in BY_ID:
            return
        ino, uid = request.ino, request.creds.uid  # type: ignore[attr-defined]
        if not ino or not uid:
            return
        ticket: bytes = request.ticket  # type: ignore[attr-defined]
        if not hmac.compare_digest(ticket, self.make(ino, uid)):
            what = "its ticket isn't for that and" if ticket else "without a ticket for"
            raise errors.AccessDenied(
                f"inode {ino} is named by its id, {what} user {uid}: open it by its path"
            )

    def give(self, request: meta.Request, reply: Message) -> None:
        """Puts tickets into the reply to a request that has walked a path."""
        uid = request.creds.uid
        if isinstance(reply, meta.OpenManyReply):
            for result in reply.results:
                if isinstance(result, meta.Opened):
                    result.ticket = self.make(result.ino, uid)
        elif isinstance(reply, meta.Opened | meta.KvOpened):
            reply.ticket = self.make(reply.ino, uid)
        elif isinstance(reply, meta.ReadDirReply):
            if reply.more:
                reply.ticket = self.make(reply.ino, uid)
        elif isinstance(request, meta.Stat) and request.want_ticket and isinstance(reply, meta.StatReply):
            reply.ticket = self.make(reply.attributes.ino, uid)

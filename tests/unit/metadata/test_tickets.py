"""Who names an inode by its id shows that a path has led there: docs/metadata.md, Tickets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from namespace_fakes import CLUSTER, Caller, FakeChains, FakeCluster, make_namespace

from ffs import errors
from ffs.proto import locking, meta, quota, xattrs
from ffs.proto.common import Creds, ErrorReply, Message
from ffs.proto.records import KvParams
from metadata.fs.core import Core
from metadata.fs.namespace import Namespace
from metadata.fs.schema import TICKET_KEY
from metadata.fs.tickets import BY_ID, OTHERWISE, TICKET_BYTES
from metadata.kv.contract import Store, Transaction
from metadata.kv.memory import MemoryStore

OWNER = Creds(1000, 1000)
OTHER = Creds(2000, 2000)
W = meta.OPEN_WRITE | meta.OPEN_CREATE

BUILD: dict[type[Message], Callable[[int], meta.Request]] = {
    meta.Stat: lambda ino: meta.Stat(ino=ino),
    meta.ReadDir: lambda ino: meta.ReadDir(ino=ino),
    meta.StatFs: lambda ino: meta.StatFs(ino=ino),
    meta.Open: lambda ino: meta.Open(ino=ino),
    meta.Truncate: lambda ino: meta.Truncate(ino=ino),
    meta.CapabilityRenew: lambda ino: meta.CapabilityRenew(ino=ino),
    meta.SetAttr: lambda ino: meta.SetAttr(ino=ino, what=meta.SET_MTIME_NOW),
    meta.Link: lambda ino: meta.Link(ino=ino, target=b"/stolen"),
    xattrs.GetXattr: lambda ino: xattrs.GetXattr(ino=ino, name=b"user.n"),
    xattrs.SetXattr: lambda ino: xattrs.SetXattr(ino=ino, name=b"user.n", value=b"v"),
    xattrs.RemoveXattr: lambda ino: xattrs.RemoveXattr(ino=ino, name=b"user.n"),
    xattrs.ListXattr: lambda ino: xattrs.ListXattr(ino=ino),
    locking.Lock: lambda ino: locking.Lock(ino=ino),
    locking.Unlock: lambda ino: locking.Unlock(ino=ino, force=True),
    locking.GetLocks: lambda ino: locking.GetLocks(ino=ino),
    meta.SetKvSpace: lambda ino: meta.SetKvSpace(ino=ino, what=meta.SET_TTL, ttl_ms=5),
    quota.SetQuota: lambda ino: quota.SetQuota(ino=ino),
    quota.GetQuota: lambda ino: quota.GetQuota(ino=ino),
}


class World:
    """A private directory of OWNER, with things in it that anybody may read and write, by their modes."""

    def __init__(self, namespace: Namespace, owner: Caller, other: Caller, root: Caller) -> None:
        self.namespace, self.owner, self.other, self.root = namespace, owner, other, root
        self.opened: Any = None
        self.inos: dict[type[Message], int] = {}

    @classmethod
    async def make(cls, store: Store) -> World:
        namespace, _, _ = await make_namespace(store)
        callers = [await Caller.connect(namespace, creds) for creds in (OWNER, OTHER, Creds())]
        world = cls(namespace, *callers)
        await world.owner(meta.MkDir(path=b"/private", mode=0o700))
        await world.owner(meta.MkDir(path=b"/private/d", mode=0o777))
        world.opened = await world.owner(meta.Open(path=b"/private/f", flags=W, mode=0o666))
        await world.owner(xattrs.SetXattr(path=b"/private/f", name=b"user.n", value=b"v"))
        params = KvParams(block_bytes=4096)
        space = (await world.owner(meta.KvCreate(path=b"/private/kv", params=params, mode=0o666))).ino
        directory = (await world.owner(meta.Stat(path=b"/private/d"))).attributes.ino
        world.inos = dict.fromkeys(BUILD, world.opened.ino)
        world.inos |= {meta.ReadDir: directory, quota.SetQuota: directory, meta.SetKvSpace: space}
        return world

    async def ticket(self, caller: Caller, ino: int) -> bytes:
        """What the owner of this was given; by whichever way leads there."""
        for path in (b"/private/f", b"/private/d", b"/private/kv"):
            reply = await caller(meta.Stat(path=path, want_ticket=True))
            if reply.attributes.ino == ino:
                ticket: bytes = reply.ticket
                return ticket
        raise AssertionError(ino)


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        store = MemoryStore()
        await test(await World.make(store))
        await store.close()

    asyncio.run(main())


def test_every_request_that_names_an_inode_is_judged() -> None:
    named = {kind for kind in meta.REPLY_OF if "ino" in kind.__struct_fields__}
    assert named <= BY_ID | OTHERWISE, "say in metadata/fs/tickets.py how it is judged"
    assert not BY_ID & OTHERWISE
    assert set(BUILD) == BY_ID
    for kind in BY_ID:
        assert "ticket" in kind.__struct_fields__


@pytest.mark.parametrize("kind", sorted(BY_ID & set(meta.REPLY_OF), key=lambda k: k.__name__))
def test_an_id_without_its_ticket_leads_nowhere(kind: type[Message]) -> None:
    async def test(w: World) -> None:
        ino = w.inos[kind]

        async def ask(caller: Caller, ticket: bytes, ino: int = ino) -> Message:
            request = BUILD[kind](ino)
            request.ticket = ticket  # type: ignore[attr-defined]
            return await caller.send(caller.prepare(request))

        good = await w.ticket(w.owner, ino)
        await w.other(meta.Open(path=b"/mine", flags=W))
        mine = (await w.other(meta.Stat(path=b"/mine", want_ticket=True))).ticket
        assert len(good) == len(mine) == TICKET_BYTES
        wrong = (b"", good, mine, os.urandom(TICKET_BYTES), good[:-1], good + b"\0")
        for ticket in wrong:
            refused = await ask(w.other, ticket)
            assert isinstance(refused, ErrorReply), (kind, refused)
            assert "by its id" in refused.message
            assert f"user {OTHER.uid}" in refused.message
            # What isn't there is refused in the same words.
            nothing = await ask(w.other, ticket, ino=ino + 1_000_000)
            assert nothing == msgspec.structs.replace(
                refused, message=refused.message.replace(str(ino), str(ino + 1_000_000))
            )
        for ticket in (b"", mine, os.urandom(TICKET_BYTES)):  # the owner neither
            assert isinstance(await ask(w.owner, ticket), ErrorReply)
        for caller, ticket in ((w.owner, good), (w.root, b"")):
            reply = await ask(caller, ticket)
            assert not isinstance(reply, ErrorReply) or "by its id" not in reply.message, (kind, reply)

    run(test)


def test_replies_that_open_a_path_give_tickets() -> None:
    """The same one from every process, and again when the request is sent again."""

    async def test(w: World) -> None:
        good = await w.ticket(w.owner, w.opened.ino)
        assert w.opened.ticket == good
        assert (await w.owner(meta.Open(path=b"/private/f"))).ticket == good
        assert (await w.owner(meta.Open(path=b"/private/f", flags=meta.OPEN_WRITE))).ticket == good
        again = await w.owner.resend()
        assert isinstance(again, meta.Opened)
        assert again.ticket == good
        for flags in (meta.OPEN_READ, meta.OPEN_WRITE):
            many = await w.owner(meta.OpenMany(entries=(meta.OpenEntry(b"/private/f", flags),)))
            assert many.results[0].ticket == good
        by_id = meta.Open(ino=w.opened.ino, flags=meta.OPEN_WRITE, ticket=good)
        assert (await w.owner(by_id)).ticket == good
        space = await w.owner(meta.KvOpen(path=b"/private/kv"))
        assert space.ticket == await w.ticket(w.owner, space.ino)
        page = await w.owner(meta.ReadDir(path=b"/private", limit=1))
        assert page.more
        rest = meta.ReadDir(ino=page.ino, after=page.entries[-1].name, ticket=page.ticket)
        assert [entry.name for entry in (await w.owner(rest)).entries] == [b"f", b"kv"]
        assert (await w.owner(meta.Stat(path=b"/private/f"))).ticket == b""
        assert (await w.root(meta.Open(path=b"/private/f"))).ticket == b""
        core = Core(w.namespace.core.store, FakeCluster(), FakeChains(), cluster_id=CLUSTER)
        second = Caller(Namespace(core), w.owner.client, OWNER)
        assert (await second(meta.Open(path=b"/private/f"))).ticket == good

    run(test)


def test_what_is_open_can_be_used_by_its_id() -> None:
    """Though its name is gone, and the directory closed to its user meanwhile."""

    async def test(w: World) -> None:
        ino, handle, ticket = w.opened.ino, w.opened.handle, w.opened.ticket
        await w.root(meta.SetAttr(path=b"/private", what=meta.SET_UID, uid=0))
        with pytest.raises(errors.AccessDenied):
            await w.owner(meta.Stat(path=b"/private/f"))
        await w.owner(meta.Stat(ino=ino, ticket=ticket))
        await w.root(meta.Unlink(path=b"/private/f"))
        await w.owner(meta.Truncate(ino=ino, handle=handle, length=5, ticket=ticket))
        await w.owner(meta.Close(ino=ino, handle=handle))

    run(test)


def test_a_store_from_before_gets_its_key_once() -> None:
    async def main() -> None:
        store = MemoryStore()
        world = await World.make(store)

        async def forget(txn: Transaction) -> None:
            txn.clear(TICKET_KEY)

        await store.run(forget)
        tickets = set()
        for _ in range(3):
            core = Core(store, FakeCluster(), FakeChains(), cluster_id=CLUSTER)
            caller = Caller(Namespace(core), world.owner.client, OWNER)
            tickets.add((await caller(meta.Open(path=b"/private/f"))).ticket)
        assert len(tickets) == 1
        assert world.opened.ticket not in tickets

    asyncio.run(main())

"""Paths, permissions, layouts, listings, damaged records, and the header of the store."""

from __future__ import annotations

import contextlib
import errno
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from namespace_fakes import CLUSTER, Caller
from namespace_world import W, World, run

from ffs import errors
from ffs.proto import meta, quota
from ffs.proto.common import RIGHT_READ, Creds, ErrorReply, OkReply, decode_capability
from ffs.proto.meta import OPEN_CREATE, OPEN_EXCL, OPEN_READ, OPEN_TMPFILE, OPEN_TRUNC, OPEN_WRITE
from ffs.proto.records import KvParams
from metadata.fs.namespace import format_store, read_header
from metadata.fs.schema import inode_key
from metadata.kv import open_store
from metadata.kv.contract import Transaction


@pytest.mark.parametrize(
    ("path", "error", "match"),
    [
        (b"relative", errors.InvalidArgument, "begin it with /"),
        (b"", errors.NotFound, "empty"),
        (b"/a\0b", errors.InvalidArgument, "NUL"),
        (b"/" + b"n" * 256, errors.NameTooLong, "255"),
        (b"/a" * 2048, errors.NameTooLong, "4096"),
    ],
)
def test_bad_paths(path: bytes, error: type[errors.FfsError], match: str) -> None:
    async def test(w: World) -> None:
        requests = [
            meta.Stat(path=path),
            meta.Open(path=path, flags=W),
            meta.MkDir(path=path),
            meta.Rename(source=path, target=b"/x"),
            meta.Link(source=b"/x", target=path),
            meta.RemoveTree(path=path),
            meta.KvCreate(path=path, params=KvParams(4096)),
        ]
        await w.make(b"/x", 0)
        for request in requests:
            with pytest.raises(error, match=match):
                await w.me(request)
        assert len(await w.keys(b"d")) == 1

    run(test)


def test_names_of_any_bytes() -> None:
    async def test(w: World) -> None:
        names = [b"\xff\xfe", b"a b", b"n" * 255, "ü".encode(), b"\n", b"-", b"a\x01"]
        for name in names:
            await w.make(b"/" + name, 0)
        page = await w.me(meta.ReadDir(path=b"/"))
        assert [e.name for e in page.entries] == sorted(names)

    run(test)


@pytest.mark.parametrize(
    "flags",
    [0, OPEN_CREATE, OPEN_READ | OPEN_TRUNC, OPEN_READ | OPEN_EXCL, W | OPEN_TMPFILE, 256 | OPEN_READ],
)
def test_flags_that_contradict_themselves(flags: int) -> None:
    async def test(w: World) -> None:
        with pytest.raises(errors.InvalidArgument):
            await w.me(meta.Open(path=b"/f", flags=flags))
        assert await w.keys(b"d") == []

    run(test)


def test_reading_makes_no_state() -> None:
    async def test(w: World) -> None:
        await w.make(b"/f", 10)
        before = await w.keys()
        opened = await w.me(meta.Open(path=b"/f"))
        assert opened.handle == 0
        assert decode_capability(opened.capability).rights == RIGHT_READ
        await w.me(meta.Stat(path=b"/f"))
        await w.me(meta.ReadDir(path=b"/"))
        assert await w.keys() == before

    run(test)


def test_layouts() -> None:
    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d", layout=meta.LayoutChoice(2, 1 << 16, 1)))
        await w.me(meta.MkDir(path=b"/d/e"))
        inherited = (await w.make(b"/d/e/f", 0)).attributes.layout
        assert (inherited.table, inherited.chunk_size, inherited.stripe) == (2, 1 << 16, 1)
        default = (await w.make(b"/f", 0)).attributes.layout
        assert (default.table, default.chunk_size, default.stripe) == (1, 4096, 0)
        chosen = await w.me(meta.Open(path=b"/g", flags=W, layout=meta.LayoutChoice(1, 8192, 3)))
        assert chosen.attributes.layout.stripe == 3
        for choice, match in [
            (meta.LayoutChoice(9), "no chain table 9"),
            (meta.LayoutChoice(0, 5000), "power of two"),
            (meta.LayoutChoice(0, 0, 6), "has 5 chains"),
            (meta.LayoutChoice(0, 1 << 25), "power of two"),
        ]:
            for request in (
                meta.Open(path=b"/bad", flags=W, layout=choice),
                meta.MkDir(path=b"/bad", layout=choice),
                meta.KvCreate(path=b"/bad", params=KvParams(1), layout=choice),
            ):
                with pytest.raises(errors.InvalidArgument, match=match):
                    await w.me(request)
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(path=b"/bad"))

    run(test)


def test_no_storage_yet() -> None:
    async def test(w: World) -> None:
        w.cluster.tables.clear()
        with pytest.raises(errors.ChainUnavailable, match="start storage servers"):
            await w.me(meta.Open(path=b"/f", flags=W))
        with pytest.raises(errors.ChainUnavailable):
            await w.me(meta.StatFs())
        await w.me(meta.MkDir(path=b"/d"))

    run(test)


def test_times() -> None:
    async def test(w: World) -> None:
        now = 10**18
        w.namespace.core.now_ns = lambda: now
        await w.me(meta.MkDir(path=b"/d"))
        now += 5
        opened = await w.make(b"/d/f", 10)
        directory = (await w.me(meta.Stat(path=b"/d"))).attributes
        assert (directory.btime_ns, directory.mtime_ns, directory.ctime_ns) == (10**18, now, now)
        now += 5
        set_to = await w.me(meta.SetAttr(path=b"/d/f", what=meta.SET_MTIME, mtime_ns=77))
        assert (set_to.attributes.mtime_ns, set_to.attributes.ctime_ns) == (77, now)
        now += 5
        again = await w.me(meta.Open(path=b"/d/f", flags=OPEN_WRITE))
        await w.close(w.me, again, 20)
        file = (await w.me(meta.Stat(path=b"/d/f"))).attributes
        assert (file.mtime_ns, file.ctime_ns) == (now, now)
        now += 5
        await w.me(meta.Link(source=b"/d/f", target=b"/g"))
        file = (await w.me(meta.Stat(path=b"/d/f"))).attributes
        assert (file.mtime_ns, file.ctime_ns, file.nlink) == (now - 5, now, 2)
        with pytest.raises(errors.InvalidArgument):
            await w.me(meta.SetAttr(path=b"/d/f", what=meta.SET_MTIME, mtime_ns=-1))
        assert opened.ino == file.ino

    run(test)


def test_access() -> None:
    async def test(w: World) -> None:
        user = await Caller.connect(w.namespace, Creds(1000, 1000))
        await w.me(meta.Open(path=b"/f", flags=W, mode=0o604))
        assert await user(meta.Access(path=b"/f", want=4)) == OkReply()
        for want in (2, 6, 1):
            with pytest.raises(errors.AccessDenied):
                await user(meta.Access(path=b"/f", want=want))
        with pytest.raises(errors.AccessDenied):
            await w.me(meta.Access(path=b"/f", want=1))  # root, but nobody may execute it
        with pytest.raises(errors.NotFound):
            await user(meta.Access(path=b"/none"))

    run(test)


def test_listing_pages_and_hidden_attributes() -> None:
    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d", mode=0o744))
        for i in range(25):
            await w.make(b"/d/%02d" % i, 0)
        seen: list[bytes] = []
        more = True
        while more:
            page = await w.me(meta.ReadDir(path=b"/d", after=seen[-1] if seen else b"", limit=7))
            seen += [e.name for e in page.entries]
            more = page.more
        assert seen == [b"%02d" % i for i in range(25)]
        user = await Caller.connect(w.namespace, Creds(1000, 1000))
        page = await user(meta.ReadDir(path=b"/d", attributes=True))
        assert [e.attributes for e in page.entries] == [None] * 25  # no search permission
        for limit in (0, meta.MAX_PAGE + 1):
            with pytest.raises(errors.InvalidArgument):
                await w.me(meta.ReadDir(path=b"/d", limit=limit))

    run(test)


def test_an_unknown_message_is_refused() -> None:
    async def test(w: World) -> None:
        reply = await w.namespace.handle(OkReply())
        assert isinstance(reply, ErrorReply)
        assert reply.code == errors.ProtocolError.code

    run(test)


def test_any_request_is_answered() -> None:
    """Requests of every kind with fields drawn at random, odd numbers among them: an answer to each, nothing
    raised, and the namespace works on."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    numbers = [0, 1, 2, 5, 63, 64, 17409, -1, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
    paths = [
        b"",
        b"/",
        b"/d",
        b"/d/f",
        b"/l",
        b"/l/f",
        b"/kv",
        b"x",
        b"/\0",
        b"/d/",
        b"/d/..",
        b"/" + b"n" * 300,
    ]

    def draw(kind: Any) -> Any:
        if kind is int:
            return rng.choice(numbers)
        if kind is bytes:
            return rng.choice(paths)
        if kind is bool:
            return rng.random() < 0.5
        if kind is str:
            return rng.choice(["", "x" * 1000])
        args = getattr(kind, "__args__", ())
        if getattr(kind, "__origin__", None) is tuple:
            return tuple(draw(args[0]) for _ in range(rng.randrange(4)))
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return kind(**{f.name: draw(f.type) for f in msgspec.structs.fields(kind) if f.name != "v"})
        return draw(rng.choice([a for a in args if a is not type(None)])) if rng.random() < 0.7 else None

    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/d"))
        await w.make(b"/d/f", 5000)
        await w.me(meta.SymLink(path=b"/l", target=b"d"))
        await w.me(meta.KvCreate(path=b"/kv", params=KvParams(4096)))
        for _ in range(3000):
            kind = rng.choice(list(meta.REPLY_OF))
            request = draw(kind)
            if kind is meta.SessionClose:
                continue
            if rng.random() < 0.8:
                request = w.me.prepare(request)
            reply = await w.me.send(request)
            assert isinstance(reply, ErrorReply | meta.REPLY_OF[kind]), (request, reply)
            assert not isinstance(reply, ErrorReply) or reply.code != errno.EUCLEAN, (request, reply)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=meta.REPLIES) == reply
        w.me.slot = 7
        with contextlib.suppress(errors.InvalidArgument):  # where none of them has bounded all there is
            await w.me(quota.SetQuota(path=b"/", clear=True))
        await w.me(meta.MkDir(path=b"/afterwards"))

    run(test)


def test_a_damaged_record_is_said_to_be_one() -> None:
    async def test(w: World) -> None:
        opened = await w.make(b"/f", 10)

        async def body(txn: Transaction) -> None:
            txn.set(inode_key(opened.ino), b"\xc1")

        await w.store.run(body)
        for request in (meta.Stat(path=b"/f"), meta.Unlink(path=b"/f"), meta.UnlinkMany(paths=(b"/f",))):
            reply = await w.me.send(w.me.prepare(request))
            if isinstance(reply, meta.UnlinkManyReply):
                reply = reply.results[0]
            assert isinstance(reply, ErrorReply)
            assert reply.code == errors.Damaged.code

    run(test)


# --- the store ------------------------------------------------------------------------------


def test_a_store_of_another_cluster_is_refused() -> None:
    async def test(w: World) -> None:
        with pytest.raises(errors.WrongCluster, match="0001"):
            await format_store(w.store, bytes(16), now_ns=1)
        again = await format_store(w.store, CLUSTER, now_ns=2)
        assert again.created_ns == 1
        assert await read_header(w.store) == again

    run(test)


def test_a_store_of_a_newer_version_is_refused() -> None:
    async def test(w: World) -> None:
        header = await read_header(w.store)
        assert header is not None
        header.incompat = 4
        header.created_by = "ffs 9"

        async def body(txn: Transaction) -> None:
            txn.set(b"z", msgspec.msgpack.encode(header))

        await w.store.run(body)
        with pytest.raises(errors.VersionMismatch, match="ffs 9"):
            await read_header(w.store)

    run(test)


def test_all_survives_a_restart(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store"

    async def first(w: World) -> None:
        await w.me(meta.MkDir(path=b"/a/b", parents=True))
        await w.make(b"/a/b/f", 777)

    async def second(w: World) -> None:
        attrs = (await w.me(meta.Stat(path=b"/a/b/f"))).attributes
        assert attrs.length == 777
        new = await w.make(b"/a/g", 0)
        assert new.ino > attrs.ino or new.ino < attrs.ino

    run(first, open_store(url))
    run(second, open_store(url))

"""What is sent again and what meets others at the same time: first answers, unknown outcomes, races."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from namespace_fakes import Caller, unwrap
from namespace_world import W, World, run

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import ErrorReply, Message
from ffs.proto.meta import OPEN_EXCL, OPEN_TMPFILE, OPEN_TRUNC, OPEN_WRITE
from ffs.proto.records import KvParams
from metadata.kv import open_store
from metadata.kv.faults import FaultyStore, Rates
from metadata.kv.memory import MemoryStore


def test_the_same_request_gets_its_first_answer() -> None:
    async def test(w: World) -> None:
        request = w.me.prepare(meta.MkDir(path=b"/d"))
        first = await w.namespace.handle(request)
        w.me.slot = 5
        await w.me(meta.RmDir(path=b"/d"))
        assert await w.namespace.handle(request) == first
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(path=b"/d"))

    run(test)


def test_an_old_sequence_is_refused() -> None:
    async def test(w: World) -> None:
        old = w.me.prepare(meta.MkDir(path=b"/a"))
        await w.me(meta.MkDir(path=b"/b"))
        with pytest.raises(errors.InvalidArgument, match="was given up"):
            unwrap(await w.namespace.handle(old))
        with pytest.raises(errors.NotFound):
            await w.me(meta.Stat(path=b"/a"))

    run(test)


def test_a_sequence_is_not_used_for_two_requests() -> None:
    async def test(w: World) -> None:
        await w.me(meta.MkDir(path=b"/a"))
        other = meta.RmDir(path=b"/a", client=w.me.client, sequence=w.me.sequences[0])
        with pytest.raises(errors.ProtocolError):
            unwrap(await w.namespace.handle(other))

    run(test)


@pytest.mark.parametrize(("field", "value"), [("client", 0), ("slot", 1024), ("slot", -1), ("sequence", 0)])
def test_bad_identities(field: str, value: int) -> None:
    async def test(w: World) -> None:
        request = w.me.prepare(meta.MkDir(path=b"/a"))
        setattr(request, field, value)
        with pytest.raises(errors.InvalidArgument):
            unwrap(await w.namespace.handle(request))

    run(test)


EVERY_OPERATION: list[Callable[[meta.Opened, meta.Opened], meta.Request]] = [
    lambda f, s: meta.Open(path=b"/new", flags=W),
    lambda f, s: meta.Open(path=b"/new", flags=W | OPEN_EXCL),
    lambda f, s: meta.Open(path=b"/d/full", flags=OPEN_WRITE | OPEN_TRUNC),
    lambda f, s: meta.Open(path=b"/d", flags=OPEN_WRITE | OPEN_TMPFILE),
    lambda f, s: meta.OpenMany(entries=tuple(meta.OpenEntry(b"/m%d" % i, W | OPEN_EXCL) for i in range(150))),
    lambda f, s: meta.Close(ino=f.ino, handle=f.handle, length=100, written=True),
    lambda f, s: meta.CloseMany(entries=(meta.CloseEntry(f.ino, f.handle, 0, 5, True),)),
    lambda f, s: meta.Fsync(ino=f.ino, handle=f.handle, length=100),
    lambda f, s: meta.Append(ino=f.ino, handle=f.handle, length=10),
    lambda f, s: meta.Truncate(ino=f.ino, handle=f.handle, length=7),
    lambda f, s: meta.Truncate(path=b"/d/full", length=1),
    lambda f, s: meta.SetAttr(path=b"/d", what=meta.SET_MODE, mode=0o700),
    lambda f, s: meta.MkDir(path=b"/new"),
    lambda f, s: meta.MkDir(path=b"/d/x/y/z", parents=True),
    lambda f, s: meta.Rename(source=b"/d/full", target=b"/moved"),
    lambda f, s: meta.Rename(source=b"/d/full", target=b"/d/sub", flags=meta.RENAME_EXCHANGE),
    lambda f, s: meta.Link(source=b"/d/full", target=b"/again"),
    lambda f, s: meta.Link(ino=s.ino, handle=s.handle, target=b"/d/full", replace=True),
    lambda f, s: meta.SymLink(path=b"/new", target=b"x"),
    lambda f, s: meta.Unlink(path=b"/d/full"),
    lambda f, s: meta.UnlinkMany(paths=(b"/d/full", b"/none", b"/d/link")),
    lambda f, s: meta.RmDir(path=b"/d/sub"),
    lambda f, s: meta.RemoveTree(path=b"/d"),
    lambda f, s: meta.KvCreate(path=b"/new", params=KvParams(4096)),
]


@pytest.mark.parametrize("rates", [Rates(unknown_applied=0.5), Rates(unknown_applied=0.3, unknown_lost=0.3)])
@pytest.mark.parametrize("operation", EVERY_OPERATION)
def test_s23_unknown_outcomes_of_every_operation(
    operation: Callable[[meta.Opened, meta.Opened], meta.Request], rates: Rates
) -> None:
    """A commit whose outcome is unknown is tried again and takes effect once: the answer and the whole
    store are those of a run without faults."""

    async def outcome(store: FaultyStore, rates: Rates) -> tuple[Message, list[tuple[bytes, bytes]]]:
        w = await World().start(store)
        w.namespace.core.now_ns = lambda: 10**18
        await w.me(meta.MkDir(path=b"/d"))
        await w.me(meta.MkDir(path=b"/d/sub"))
        await w.make(b"/d/full", 10_000)
        await w.me(meta.Link(source=b"/d/full", target=b"/d/link"))
        opened = await w.me(meta.Open(path=b"/d/open", flags=W))
        spare = await w.me(meta.Open(path=b"/d", flags=OPEN_WRITE | OPEN_TMPFILE))
        await w.namespace.core.inos.take()  # blocks of ids are fetched before the faults begin
        request = w.me.prepare(operation(opened, spare))
        store.rates = rates
        reply = await w.namespace.handle(request)
        again = await w.namespace.handle(request)
        store.rates = Rates()
        assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(reply)

        async def body(snap: Any) -> list[tuple[bytes, bytes]]:
            return [p for p in await snap.range(b"\0", b"\xff") if p[0][:1] != b"k"]

        pairs = await store.read(body)
        await store.close()
        return reply, pairs

    seed = random.randrange(2**32)
    print("seed", seed)
    clean, clean_store = asyncio.run(
        outcome(FaultyStore(MemoryStore(), Rates(), random.Random(seed)), Rates())
    )
    assert not isinstance(clean, ErrorReply), clean
    faulty, faulty_store = asyncio.run(
        outcome(FaultyStore(MemoryStore(), Rates(), random.Random(seed)), rates)
    )
    assert without_ids(faulty) == without_ids(clean)
    assert [k for k, _ in faulty_store] == [k for k, _ in clean_store] or ids_differ(faulty, clean)
    assert len(faulty_store) == len(clean_store)


def without_ids(reply: Message) -> Any:
    """A reply without what may differ when a body ran twice: fresh inode and capability ids."""
    plain = msgspec.to_builtins(reply)
    return _strip(plain)


def _strip(value: Any) -> Any:
    if isinstance(value, list):
        return [_strip(v) for v in value]
    if isinstance(value, bytes | str) and len(value) > 80:
        return "capability"
    if isinstance(value, int) and value > 4096 and value < 10**17:
        return "id"
    return value


def ids_differ(a: Message, b: Message) -> bool:
    return msgspec.msgpack.encode(a) != msgspec.msgpack.encode(b)


def test_s28_many_makedirs_at_once(tmp_path: Path) -> None:
    """64 clients make one deep path with exist_ok: all succeed, on one inode."""

    async def test(w: World) -> None:
        callers = [await Caller.connect(w.namespace) for _ in range(64)]
        path = b"/a/b/c/d/e/f"
        replies = await asyncio.gather(*(c(meta.MkDir(path=path, parents=True)) for c in callers))
        assert len({reply.attributes.ino for reply in replies}) == 1
        assert (await w.me(meta.Stat(path=b"/a"))).attributes.nlink == 3

    run(test)
    run(test, open_store(f"lmdb://{tmp_path}/store"))


def test_exclusive_creation_has_one_winner(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        callers = [await Caller.connect(w.namespace) for _ in range(32)]
        requests = [c.prepare(meta.Open(path=b"/f", flags=W | OPEN_EXCL)) for c in callers]
        replies = await asyncio.gather(*(w.namespace.handle(r) for r in requests))
        opened = [r for r in replies if isinstance(r, meta.Opened)]
        assert len(opened) == 1
        assert all(isinstance(r, ErrorReply) and r.code == 17 for r in replies if r is not opened[0])

    run(test, open_store(f"lmdb://{tmp_path}/store"))


def test_creating_in_one_directory_never_conflicts(tmp_path: Path) -> None:
    """No hot keys: 200 files at once in one directory, each body run once."""

    async def test(w: World) -> None:
        core = w.namespace.core
        await core.inos.take()
        await core.capabilities.take()
        ran = 0
        original = core.add_entry

        def counted(*args: Any, **kwargs: Any) -> None:
            nonlocal ran
            ran += 1
            original(*args, **kwargs)

        core.add_entry = counted  # type: ignore[method-assign]
        requests = []
        for i in range(200):
            w.me.slot = i
            requests.append(w.me.prepare(meta.Open(path=b"/f%d" % i, flags=W)))
        replies = await asyncio.gather(*(w.namespace.handle(r) for r in requests))
        assert all(isinstance(r, meta.Opened) for r in replies)
        assert ran == 200

    run(test, open_store(f"lmdb://{tmp_path}/store"))

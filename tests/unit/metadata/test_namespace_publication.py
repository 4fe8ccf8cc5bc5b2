"""Files that appear at once, batches, and KV spaces."""

from __future__ import annotations

from typing import Any

import pytest
from namespace_fakes import unwrap
from namespace_world import W, World, run

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import RIGHT_READ, RIGHT_WRITE, ErrorReply, decode_capability
from ffs.proto.meta import OPEN_EXCL, OPEN_TMPFILE, OPEN_WRITE
from ffs.proto.records import KV_EVICTABLE, KvParams


def test_atomic_publication_replaces() -> None:
    async def test(w: World) -> None:
        old = await w.make(b"/f", 100)
        opened = await w.me(meta.Open(path=b"/", flags=OPEN_WRITE | OPEN_TMPFILE))
        assert opened.attributes.nlink == 0
        await w.write(w.me, opened, 0, 9000)
        await w.collect()  # it has no name, but a writer
        await w.me(meta.Fsync(ino=opened.ino, handle=opened.handle, length=9000))
        with pytest.raises(errors.Exists):
            await w.me(meta.Link(ino=opened.ino, handle=opened.handle, target=b"/f"))
        linked = await w.me(meta.Link(ino=opened.ino, handle=opened.handle, target=b"/f", replace=True))
        assert (linked.attributes.nlink, linked.attributes.length) == (1, 9000)
        await w.close(w.me, opened, 9000)
        await w.collect()
        assert w.chains.spaces() == {opened.ino}
        assert (await w.me(meta.Stat(path=b"/f"))).attributes.ino == opened.ino != old.ino
        assert (await w.me(meta.Stat(path=b"/"))).attributes.length == 1

    run(test)


def test_a_temporary_file_goes_with_its_session() -> None:
    async def test(w: World) -> None:
        opened = await w.me(meta.Open(path=b"/", flags=OPEN_WRITE | OPEN_TMPFILE))
        await w.write(w.me, opened, 0, 9000)
        await w.close(w.me, opened, 9000)
        with pytest.raises(errors.NotFound):
            await w.me(meta.Link(ino=opened.ino, handle=opened.handle, target=b"/f"))
        await w.collect()
        assert w.chains.spaces() == set()
        assert len({k[3:11] for k in await w.keys(b"i")}) == 1

    run(test)


def test_batches_answer_by_entry() -> None:
    async def test(w: World) -> None:
        await w.make(b"/has", 10)
        entries = tuple(meta.OpenEntry(b"/%d" % i, W | OPEN_EXCL, 0o600) for i in range(200))
        entries += (meta.OpenEntry(b"/has", W | OPEN_EXCL), meta.OpenEntry(b"/none/x", W))
        reply = await w.me(meta.OpenMany(entries=entries))
        assert all(isinstance(r, meta.Opened) and r.created for r in reply.results[:200])
        assert [r.code for r in reply.results[200:]] == [17, 2]
        assert len({r.handle for r in reply.results[:200]}) == 200
        ends = tuple(meta.CloseEntry(r.ino, r.handle, 0, i, True) for i, r in enumerate(reply.results[:200]))
        closed = await w.me(meta.CloseMany(entries=(*ends, meta.CloseEntry(5, 5))))
        assert [r.length for r in closed.results[:200]] == list(range(200))
        assert closed.results[200].code == errors.BadHandle.code
        stats = await w.me(meta.StatMany(paths=(b"/7", b"/none", b"/has")))
        assert [getattr(r, "code", None) for r in stats.results] == [None, 2, None]
        read = await w.me(meta.OpenMany(entries=(meta.OpenEntry(b"/7"), meta.OpenEntry(b"/none"))))
        assert (read.results[0].handle, read.results[1].code) == (0, 2)
        paths = [b"/%d" % i for i in range(200)]
        gone = await w.me(meta.UnlinkMany(paths=(*paths, b"/none", b"/7")))
        assert [getattr(r, "code", None) for r in gone.results] == [None] * 200 + [2, 2]
        pages = [k for k in await w.keys(b"r") if len(k) > 13]
        await w.me(meta.MkDir(path=b"/next"))
        assert pages
        assert not [k for k in await w.keys(b"r") if len(k) > 13]

    run(test)


def test_a_batch_that_was_cut_off_goes_on() -> None:
    """The first page committed, then the process died: sent again, the batch does the rest only."""

    async def test(w: World) -> None:
        entries = tuple(meta.OpenEntry(b"/%d" % i, W | OPEN_EXCL) for i in range(100))
        request = w.me.prepare(meta.OpenMany(entries=entries))
        original = w.store.run
        calls = 0

        async def dying(body: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise errors.ConnectionLost("the process died here")
            return await original(body, **kwargs)

        await w.namespace.core.inos.take()
        await w.namespace.core.capabilities.take()
        w.store.run = dying  # type: ignore[method-assign]
        assert isinstance(await w.namespace.handle(request), ErrorReply)
        w.store.run = original  # type: ignore[method-assign]
        reply = unwrap(await w.namespace.handle(request))
        assert all(isinstance(r, meta.Opened) for r in reply.results)
        assert (await w.me(meta.Stat(path=b"/"))).attributes.length == 100

    run(test)


def test_kv_spaces() -> None:
    async def test(w: World) -> None:
        params = KvParams(1 << 20, 32, 1 << 30, 60_000, b"identity", KV_EVICTABLE)
        made = await w.me(meta.KvCreate(path=b"/kv", params=params, layout=meta.LayoutChoice(table=2)))
        assert made.created
        assert made.attributes.kv == params
        assert made.attributes.layout.table == 2
        capability = decode_capability(made.capability)
        assert (capability.kind, capability.space, capability.rights) == (
            1,
            made.ino,
            RIGHT_READ | RIGHT_WRITE,
        )
        with pytest.raises(errors.Exists):
            await w.me(meta.KvCreate(path=b"/kv", params=params))
        again = await w.me(meta.KvCreate(path=b"/kv", params=params, exist_ok=True))
        assert (again.ino, again.created) == (made.ino, False)
        with pytest.raises(errors.Exists, match="block_bytes"):
            await w.me(meta.KvCreate(path=b"/kv", params=KvParams(4096), exist_ok=True))
        opened = await w.me(meta.KvOpen(path=b"/kv", write=False))
        assert decode_capability(opened.capability).rights == RIGHT_READ
        with pytest.raises(errors.InvalidArgument):
            await w.me(meta.Open(path=b"/kv"))
        renewed = await w.me(meta.CapabilityRenew(ino=made.ino, rights=3))
        assert decode_capability(renewed.capability).id != capability.id

    run(test)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (KvParams(0), "block size"),
        (KvParams(1 << 31), "block size"),
        (KvParams(1 << 25), "parts"),
        (KvParams(1 << 27, 4), "a part of 33554432 bytes"),
        (KvParams(4096, 3), "parts"),
        (KvParams(4096, 0), "parts"),
        (KvParams(4096, 1, -1), "quota"),
        (KvParams(4096, identity=bytes(65)), "identity"),
    ],
)
def test_bad_kv_parameters(params: KvParams, match: str) -> None:
    async def test(w: World) -> None:
        with pytest.raises(errors.InvalidArgument, match=match):
            await w.me(meta.KvCreate(path=b"/kv", params=params))

    run(test)

"""Extended attributes: limits, errnos, flags, and that they go with their inode."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from namespace_fakes import Caller, make_namespace

from ffs import errors
from ffs.proto import meta, xattrs
from ffs.proto.common import Creds
from metadata.fs.collector import Collector
from metadata.fs.ops.xattr import MAX_ALL_VALUE_BYTES
from metadata.kv import open_store
from metadata.kv.contract import Snapshot, Store
from metadata.kv.faults import FaultyStore, Rates
from metadata.kv.memory import MemoryStore

W = meta.OPEN_WRITE | meta.OPEN_CREATE


def run(test: Callable[[Caller, Store], Awaitable[None]], store: Store | None = None) -> None:
    async def main() -> None:
        used = store or MemoryStore()
        namespace, _, _ = await make_namespace(used)
        me = await Caller.connect(namespace)
        await me(meta.Open(path=b"/f", flags=meta.OPEN_READ | meta.OPEN_CREATE))
        await me(meta.MkDir(path=b"/d"))
        try:
            await test(me, used)
        finally:
            await used.close()

    asyncio.run(main())


async def keys(store: Store) -> list[bytes]:
    async def body(snap: Snapshot) -> list[bytes]:
        return [key for key, _ in await snap.range(b"u", b"v")]

    return await store.read(body)


def test_set_get_list_remove(tmp_path: Path) -> None:
    async def test(me: Caller, store: Store) -> None:
        for name, value in ((b"user.b", b"2"), (b"user.a", b""), (b"user.b", b"\0\xff" * 30_000)):
            await me(xattrs.SetXattr(path=b"/f", name=name, value=value))
        assert (await me(xattrs.GetXattr(path=b"/f", name=b"user.a"))).value == b""
        assert (await me(xattrs.GetXattr(path=b"/f", name=b"user.b"))).value == b"\0\xff" * 30_000
        assert (await me(xattrs.ListXattr(path=b"/f"))).names == [b"user.a", b"user.b"]
        await me(xattrs.RemoveXattr(path=b"/f", name=b"user.b"))
        with pytest.raises(errors.NoData, match="user\\.b"):
            await me(xattrs.GetXattr(path=b"/f", name=b"user.b"))
        await me(xattrs.RemoveXattr(path=b"/f", name=b"user.a"))
        assert (await me(xattrs.ListXattr(path=b"/f"))).names == []
        assert await keys(store) == []

    run(test, open_store(f"lmdb://{tmp_path}/s"))


def test_flags_and_names() -> None:
    async def test(me: Caller, _: Store) -> None:
        def change(**fields: object) -> xattrs.SetXattr:
            return xattrs.SetXattr(**({"path": b"/f", "name": b"user.a", "value": b"1"} | fields))  # type: ignore[arg-type]

        for request, number in (
            (change(flags=xattrs.XATTR_REPLACE), errno.ENODATA),
            (change(flags=4), errno.EINVAL),
            (change(name=b""), errno.ERANGE),
            (change(name=b"user." + b"n" * 251), errno.ERANGE),
            (change(name=b"user."), errno.EINVAL),
            (change(name=b"trusted.a"), errno.EOPNOTSUPP),
            (change(name=b"security.selinux"), errno.EOPNOTSUPP),
            (change(value=bytes(65537)), errno.E2BIG),
            (change(path=b"/no"), errno.ENOENT),
            (xattrs.RemoveXattr(path=b"/f", name=b"user.a"), errno.ENODATA),
            (xattrs.GetXattr(path=b"/f", name=b"trusted.a"), errno.EOPNOTSUPP),
        ):
            with pytest.raises(OSError, match=r"\[Errno") as caught:
                await me(request)
            assert caught.value.errno == number, request
        await me(change(name=b"user." + b"n" * 250, value=bytes(65536), flags=xattrs.XATTR_CREATE))
        await me(change())
        with pytest.raises(errors.Exists):
            await me(change(flags=xattrs.XATTR_CREATE))
        await me(change(value=b"2", flags=xattrs.XATTR_REPLACE))
        assert (await me(xattrs.GetXattr(path=b"/f", name=b"user.a"))).value == b"2"

    run(test)


def test_limits_of_one_inode() -> None:
    async def test(me: Caller, _: Store) -> None:
        for i in range(256):  # 255 + 1 bytes each: 64 KiB
            await me(xattrs.SetXattr(path=b"/f", name=b"user.%0250d" % i))
        with pytest.raises(OSError, match="65536") as caught:
            await me(xattrs.SetXattr(path=b"/f", name=b"user.x"))
        assert caught.value.errno == errno.E2BIG
        await me(xattrs.SetXattr(path=b"/f", name=b"user.%0250d" % 3, value=b"x"))  # no new name
        names = (await me(xattrs.ListXattr(path=b"/f"))).names
        assert sum(len(name) + 1 for name in names) == xattrs.MAX_XATTR_LIST_BYTES
        await me(xattrs.RemoveXattr(path=b"/f", name=b"user.%0250d" % 3))
        await me(xattrs.SetXattr(path=b"/f", name=b"user.x"))
        for i in range(MAX_ALL_VALUE_BYTES // 65536):
            await me(xattrs.SetXattr(path=b"/d", name=b"user.%d" % i, value=bytes(65536)))
        with pytest.raises(errors.NoSpace):
            await me(xattrs.SetXattr(path=b"/d", name=b"user.more", value=b"1"))
        await me(xattrs.SetXattr(path=b"/d", name=b"user.0", value=b"shorter"))
        await me(xattrs.SetXattr(path=b"/d", name=b"user.more", value=b"1"))

    run(test)


def test_permissions_and_ctime() -> None:
    async def test(me: Caller, _: Store) -> None:
        await me(xattrs.SetXattr(path=b"/f", name=b"user.a", value=b"1"))
        before = (await me(meta.Stat(path=b"/f"))).attributes
        await me(xattrs.SetXattr(path=b"/f", name=b"user.a", value=b"2"))
        after = (await me(meta.Stat(path=b"/f"))).attributes
        assert (after.ctime_ns > before.ctime_ns, after.mtime_ns) == (True, before.mtime_ns)
        await me(meta.SetAttr(path=b"/f", what=meta.SET_MODE, mode=0o640))
        await me(meta.SetAttr(path=b"/d", what=meta.SET_MODE, mode=0o1777))
        await me(meta.SymLink(path=b"/l", target=b"f"))
        me.creds = Creds(1000, 1000)
        for request, error in (
            (xattrs.GetXattr(path=b"/f", name=b"user.a"), errors.AccessDenied),
            (xattrs.SetXattr(path=b"/f", name=b"user.a"), errors.AccessDenied),
            (xattrs.SetXattr(path=b"/d", name=b"user.a"), errors.NotPermitted),
            (xattrs.SetXattr(path=b"/l", name=b"user.a", follow=False), errors.NotPermitted),
            (xattrs.GetXattr(path=b"/l", name=b"user.a", follow=False), errors.NoData),
        ):
            with pytest.raises(error):
                await me(request)
        assert (await me(xattrs.ListXattr(path=b"/l"))).names == [b"user.a"]

    run(test)


def test_they_go_with_the_inode() -> None:
    """By every way that an inode may go; with a store that fails at random."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rates = Rates(conflict=0.1, unknown_applied=0.1, unknown_lost=0.1, twice=0.3)

    async def test(me: Caller, store: Store) -> None:
        await me(meta.MkDir(path=b"/t/u", parents=True))
        for path in (b"/f", b"/d", b"/t", b"/t/u"):
            await me(xattrs.SetXattr(path=path, name=b"user.a", value=b"1"))
        for name in (b"/g", b"/t/h"):
            opened = await me(meta.Open(path=name, flags=W))
            await me(meta.Close(ino=opened.ino, handle=opened.handle))
            await me(xattrs.SetXattr(path=name, name=b"user.a", value=b"1"))
        await me(meta.MkDir(path=b"/e"))
        await me(meta.Rename(source=b"/e", target=b"/d"))  # replaces one with an attribute
        await me(meta.Rename(source=b"/f", target=b"/g"))
        assert (await me(xattrs.GetXattr(path=b"/g", name=b"user.a"))).value == b"1"
        await me(meta.Unlink(path=b"/g"))
        await me(meta.RemoveTree(path=b"/t"))
        await me(meta.RmDir(path=b"/d"))
        collector = Collector(me.namespace.core)
        while await collector.step():
            pass
        assert await keys(store) == []

    run(test, FaultyStore(MemoryStore(), rates, random.Random(seed)))

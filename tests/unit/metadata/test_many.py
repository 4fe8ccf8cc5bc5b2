"""stat_many and listings with attributes say what stat says, of whatever there is."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from namespace_fakes import Caller, make_namespace

from ffs.proto import meta
from ffs.proto.common import Creds, ErrorReply
from metadata.kv import open_store
from metadata.kv.contract import Store

ROOT = Creds(0, 0)
USER = Creds(1000, 1000)
MAKE = meta.OPEN_READ | meta.OPEN_CREATE

PATHS = (
    b"/",
    b"//",
    b"/.",
    b"/..",
    b"",
    b"plain",
    b"plain/x",
    b"/plain",
    b"/plain/",
    b"/plain/x",
    b"/dir",
    b"/dir/",
    b"//dir//inside",
    b"/dir/./inside",
    b"/dir/../dir/inside",
    b"/dir/.",
    b"/dir/..",
    b"/dir/missing",
    b"/dir/inside/",
    b"/missing/inside",
    b"/link",
    b"/link/",
    b"/to-dir/inside",
    b"/to-dir",
    b"/dangling",
    b"/loop",
    b"/loop/x",
    b"/secret/inside",
    b"/secret",
    b"/dir/\0",
    b"/dir/" + b"n" * 255,
    b"/dir/" + b"n" * 256,
    b"/dir/" * 60 + b"inside",
    b"/" + b"d/" * 2050,
)


async def _fill(caller: Caller) -> None:
    for path in (b"/dir", b"/secret"):
        await caller(meta.MkDir(path=path))
    for path in (b"/plain", b"/dir/inside", b"/secret/inside", b"/dir/" + b"n" * 255):
        await caller(meta.Open(path=path, flags=MAKE))
    for path, target in (
        (b"/link", b"plain"),
        (b"/to-dir", b"/dir"),
        (b"/dangling", b"nothing"),
        (b"/loop", b"loop"),
    ):
        await caller(meta.SymLink(path=path, target=target))
    await caller(meta.Link(source=b"/plain", target=b"/dir/second"))
    await caller(meta.SetAttr(path=b"/plain", what=meta.SET_MTIME, mtime_ns=5))
    await caller(meta.SetAttr(path=b"/secret", what=meta.SET_MODE, mode=0o700))
    # Over several blocks of inode ids, with gaps.
    names = [b"/dir/%03d" % number for number in range(300)]
    await caller(meta.OpenMany(entries=tuple(meta.OpenEntry(name, MAKE) for name in names)))
    await caller(meta.UnlinkMany(paths=tuple(names[::7])))


@pytest.mark.parametrize("engine", ["memory", "lmdb"])
def test_looking_at_many_says_what_looking_at_each_says(tmp_path: Path, engine: str) -> None:
    seed = 20261130
    paths = [*PATHS, *(b"/dir/%03d" % number for number in range(0, 300, 3))]
    random.Random(seed).shuffle(paths)

    async def test(store: Store) -> None:
        namespace, _, _ = await make_namespace(store)
        await _fill(await Caller.connect(namespace))
        for creds in (ROOT, USER):
            for follow in (True, False):
                many = await namespace.handle(meta.StatMany(paths=tuple(paths), follow=follow, creds=creds))
                assert isinstance(many, meta.StatManyReply)
                for path, told in zip(paths, many.results, strict=True):
                    one = await namespace.handle(meta.Stat(path=path, follow=follow, creds=creds))
                    assert told == one, f"{path!r}, seed {seed}"
        for path in (b"/", b"/dir"):
            page = await namespace.handle(meta.ReadDir(path=path, limit=4000, attributes=True, creds=ROOT))
            assert isinstance(page, meta.ReadDirReply)
            assert page.entries
            for entry in page.entries:
                child = path.rstrip(b"/") + b"/" + entry.name
                one = await namespace.handle(meta.Stat(path=child, follow=False, creds=ROOT))
                assert isinstance(one, meta.StatReply)
                assert entry.attributes == one.attributes
        hidden = await namespace.handle(meta.ReadDir(path=b"/secret", attributes=True, creds=USER))
        assert isinstance(hidden, ErrorReply)

    async def main() -> None:
        store = open_store("memory://" if engine == "memory" else f"lmdb://{tmp_path / 's'}")
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())

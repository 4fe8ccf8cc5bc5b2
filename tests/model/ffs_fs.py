"""The namespace under the calls of posix_model.ModelFs. Each request may be sent again at random: the second
answer must be the first. Writes go to fake chains, so that truncation is checked down to chunk lengths."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
from namespace_fakes import Caller, FakeChains, FakeCluster, make_namespace, unwrap
from posix_model import User

from ffs.proto import meta, xattrs
from ffs.proto.common import Creds, ErrorReply, decode_capability
from ffs.proto.records import DIRECTORY, FILE, SYMLINK
from metadata.fs.collector import Collector
from metadata.fs.namespace import Namespace
from metadata.kv.contract import Store

KINDS = {DIRECTORY: "dir", FILE: "file", SYMLINK: "link"}
RESENT = 0.2


class FfsFs:
    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.runner = asyncio.Runner()
        self.namespace: Namespace
        self.cluster: FakeCluster
        self.chains: FakeChains
        self.namespace, self.cluster, self.chains = self.runner.run(make_namespace(store, seed=seed))
        self.caller = self.runner.run(Caller.connect(self.namespace))
        self.handles: dict[int, meta.Opened] = {}

    def call(self, request: meta.Request, user: User | None = None) -> Any:
        self.caller.creds = Creds(user.uid, user.gid, user.groups) if user else Creds()
        self.caller.slot = self.rng.randrange(3)
        prepared = self.caller.prepare(request)

        async def go() -> Any:
            reply = await self.caller.send(prepared)
            if self.rng.random() < RESENT and not isinstance(reply, ErrorReply):
                changes = type(request) not in READING
                again = await self.namespace.handle(prepared)
                if changes and not (isinstance(request, meta.Open) and not request.flags & ~1):
                    encode = msgspec.msgpack.encode
                    assert encode(again) == encode(reply), f"{prepared}: {reply} then {again}"
            return unwrap(reply)

        return self.runner.run(go())

    def close(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()

    # --- the calls ---

    def stat(self, user: User, path: bytes, follow: bool = True) -> tuple[Any, ...]:
        return describe(self.call(meta.Stat(path=path, follow=follow), user).attributes)

    def listdir(self, user: User, path: bytes) -> list[bytes]:
        names: list[bytes] = []
        while True:
            after = names[-1] if names else b""
            page = self.call(meta.ReadDir(path=path, after=after, limit=2, attributes=True), user)
            names += [entry.name for entry in page.entries]
            if not page.more:
                return names

    def readlink(self, user: User, path: bytes) -> bytes:
        target: bytes = self.call(meta.ReadLink(path=path), user).target
        return target

    def mkdir(self, user: User, path: bytes, mode: int) -> None:
        self.call(meta.MkDir(path=path, mode=mode), user)

    def symlink(self, user: User, path: bytes, target: bytes) -> None:
        self.call(meta.SymLink(path=path, target=target), user)

    def link(self, user: User, source: bytes, target: bytes) -> None:
        self.call(meta.Link(source=source, target=target), user)

    def create(self, user: User, path: bytes, mode: int, exclusive: bool, truncate: bool) -> None:
        flags = meta.OPEN_WRITE | meta.OPEN_CREATE
        flags |= (meta.OPEN_EXCL if exclusive else 0) | (meta.OPEN_TRUNC if truncate else 0)
        opened = self.call(meta.Open(path=path, flags=flags, mode=mode), user)
        self.close_write(opened, 0, False)

    def close_write(self, opened: meta.Opened, length: int, written: bool) -> meta.LengthReply:
        epoch = opened.attributes.epoch
        reply: meta.LengthReply = self.call(
            meta.Close(ino=opened.ino, handle=opened.handle, epoch=epoch, length=length, written=written)
        )
        return reply

    def put(self, opened: meta.Opened, offset: int, length: int) -> None:
        layout = opened.attributes.layout
        assert layout is not None
        view = self.cluster.table(layout.table)
        assert view is not None
        epoch = decode_capability(opened.capability).epoch
        self.chains.write(opened.ino, layout, epoch, offset, length, view.chains)

    def write(self, user: User, path: bytes, offset: int, length: int) -> int:
        opened = self.call(meta.Open(path=path, flags=meta.OPEN_WRITE), user)
        self.put(opened, offset, length)
        return self.close_write(opened, offset + length, length > 0).length

    def read(self, user: User, path: bytes) -> int:
        opened = self.call(meta.Open(path=path, flags=meta.OPEN_READ), user)
        assert not opened.handle
        length: int = opened.attributes.length
        return length

    def truncate(self, user: User, path: bytes, length: int) -> None:
        self.call(meta.Truncate(path=path, length=length), user)

    def open_handle(self, user: User, handle: int, path: bytes, mode: int) -> None:
        flags = meta.OPEN_WRITE | meta.OPEN_CREATE
        self.handles[handle] = self.call(meta.Open(path=path, flags=flags, mode=mode), user)

    def open_tmpfile(self, user: User, handle: int, path: bytes, mode: int) -> None:
        flags = meta.OPEN_WRITE | meta.OPEN_TMPFILE
        self.handles[handle] = self.call(meta.Open(path=path, flags=flags, mode=mode), user)

    def handle_write(self, handle: int, offset: int, length: int) -> None:
        """Writes and publishes; after a truncation by somebody else, under the new epoch."""
        opened = self.handles[handle]
        renewed = self.call(meta.CapabilityRenew(ino=opened.ino, handle=opened.handle, rights=2))
        opened.capability = renewed.capability
        self.put(opened, offset, length)
        reply = self.call(
            meta.Fsync(
                ino=opened.ino,
                handle=opened.handle,
                epoch=renewed.epoch,
                length=offset + length,
                written=True,
            )
        )
        assert reply.merged

    def handle_truncate(self, handle: int, length: int) -> None:
        opened = self.handles[handle]
        reply = self.call(meta.Truncate(ino=opened.ino, handle=opened.handle, length=length))
        assert decode_capability(reply.capability).epoch == reply.epoch

    def handle_stat(self, handle: int) -> tuple[Any, ...]:
        return describe(self.call(meta.Stat(ino=self.handles[handle].ino)).attributes)

    def handle_close(self, handle: int) -> None:
        self.close_write(self.handles.pop(handle), 0, False)

    def unlink(self, user: User, path: bytes) -> None:
        self.call(meta.Unlink(path=path), user)

    def rmdir(self, user: User, path: bytes) -> None:
        self.call(meta.RmDir(path=path), user)

    def rename(self, user: User, source: bytes, target: bytes, flags: int) -> None:
        self.call(meta.Rename(source=source, target=target, flags=flags), user)

    def chmod(self, user: User, path: bytes, mode: int) -> None:
        self.call(meta.SetAttr(path=path, what=meta.SET_MODE, mode=mode), user)

    def chown(self, user: User, path: bytes, uid: int, gid: int) -> None:
        what = (meta.SET_UID if uid != -1 else 0) | (meta.SET_GID if gid != -1 else 0)
        request = meta.SetAttr(path=path, follow=False, what=what, uid=max(uid, 0), gid=max(gid, 0))
        self.call(request, user)

    def getxattr(self, user: User, path: bytes, name: bytes, follow: bool) -> bytes:
        value: bytes = self.call(xattrs.GetXattr(path=path, name=name, follow=follow), user).value
        return value

    def setxattr(self, user: User, path: bytes, name: bytes, value: bytes, flags: int, follow: bool) -> None:
        request = xattrs.SetXattr(path=path, name=name, value=value, flags=flags, follow=follow)
        self.call(request, user)

    def removexattr(self, user: User, path: bytes, name: bytes, follow: bool) -> None:
        self.call(xattrs.RemoveXattr(path=path, name=name, follow=follow), user)

    def listxattr(self, user: User, path: bytes, follow: bool) -> list[bytes]:
        names: list[bytes] = self.call(xattrs.ListXattr(path=path, follow=follow), user).names
        return names

    def dump(self) -> list[tuple[Any, ...]]:
        out: list[tuple[Any, ...]] = []
        seen: dict[int, int] = {}

        def visit(path: bytes, attrs: meta.Attributes) -> None:
            out.append((path, describe(attrs), seen.setdefault(attrs.ino, len(seen))))
            if attrs.type == FILE:
                self.check_chunks(path, attrs)
            if attrs.type != DIRECTORY:
                return
            page = self.call(meta.ReadDir(ino=attrs.ino, limit=1000, attributes=True))
            assert len(page.entries) == attrs.length, f"{path!r}: entry counter {attrs.length}"
            for entry in page.entries:
                visit(path.rstrip(b"/") + b"/" + entry.name, entry.attributes)

        visit(b"/", self.call(meta.Stat(path=b"/")).attributes)
        return out

    def check_chunks(self, path: bytes, attrs: meta.Attributes) -> None:
        """No chunk reaches beyond the file's length."""
        assert attrs.layout is not None
        end = self.chains.end(attrs.ino, attrs.layout.chunk_size)
        assert end <= attrs.length, f"{path!r}: chunks up to {end}, length {attrs.length}"

    def collect(self) -> None:
        """Works off all that was removed."""
        collector = Collector(self.namespace.core)

        async def work() -> None:
            while await collector.step():
                pass

        self.runner.run(work())

    def all_keys(self) -> list[tuple[bytes, bytes]]:
        return self.runner.run(self.store.read(lambda snap: snap.range(b"\0", b"\xff")))


READING = {
    meta.Stat,
    meta.ReadDir,
    meta.ReadLink,
    meta.CapabilityRenew,
    xattrs.GetXattr,
    xattrs.ListXattr,
}
Call = Callable[..., Any]


def describe(attrs: meta.Attributes) -> tuple[Any, ...]:
    length = None if attrs.type == DIRECTORY else attrs.length
    return KINDS[attrs.type], attrs.mode, attrs.uid, attrs.gid, attrs.nlink, length

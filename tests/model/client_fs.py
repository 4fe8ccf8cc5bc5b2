"""A client of a real cluster under the calls of posix_model.ModelFs: session, slots, retries, data path.

One client asks for all users: the credentials are set before each call."""

from __future__ import annotations

import contextlib
from typing import Any

from ffs_fs import READING, FfsFs, describe
from posix_model import User

from ffs.client.client import Client
from ffs.client.handle import OpenFile
from ffs.proto import meta
from ffs.proto.common import Creds
from ffs.proto.records import DIRECTORY

ZEROS = bytes(1 << 17)


class ClientFs(FfsFs):
    def __init__(self, client: Client, made: set[int]) -> None:
        """`made` gets the inode of each file that is opened."""
        self.client = client
        self.made = made
        self.core = client.core
        self.files: dict[int, OpenFile] = {}
        self.call(meta.SetAttr(path=b"/", what=meta.SET_MODE, mode=0o777))

    def become(self, user: User | None) -> None:
        creds = Creds(user.uid, user.gid, user.groups) if user else Creds()
        self.core.creds = self.core.session().creds = creds

    def call(self, request: meta.Request, user: User | None = None) -> Any:
        self.become(user)
        reply = meta.REPLY_OF[type(request)]
        if type(request) in READING:
            return self.core.ask(request, reply)
        return self.core.change(request, reply)

    def close(self) -> None:
        """Closes what is open and takes everything out of the tree: the next one begins with an empty one."""
        self.become(None)
        for file in self.files.values():
            file.close()
        self.files.clear()
        for name in self.listdir(User(0, 0), b"/"):
            self.call(meta.RemoveTree(path=b"/" + name))
        for attribute in self.listxattr(User(0, 0), b"/", True):
            self.removexattr(User(0, 0), b"/", attribute, True)
        owner = meta.SET_UID | meta.SET_GID
        self.call(meta.SetAttr(path=b"/", what=owner, uid=0, gid=0))

    # --- files ---

    def _open(self, user: User | None, path: bytes, flags: int, mode: int = 0) -> OpenFile:
        self.become(user)
        file = OpenFile(self.client.core_of_process, path.decode(errors="replace"), flags)
        self.made.add(file.open(meta.Open(path=path, flags=flags, mode=mode)).ino)
        return file

    def _write(self, file: OpenFile, offset: int, length: int) -> None:
        import numpy as np

        file.write_at(offset, np.frombuffer(ZEROS, np.uint8, length))

    def create(self, user: User, path: bytes, mode: int, exclusive: bool, truncate: bool) -> None:
        flags = meta.OPEN_WRITE | meta.OPEN_CREATE
        flags |= (meta.OPEN_EXCL if exclusive else 0) | (meta.OPEN_TRUNC if truncate else 0)
        self._open(user, path, flags, mode).close()

    def write(self, user: User, path: bytes, offset: int, length: int) -> int:
        file = self._open(user, path, meta.OPEN_WRITE)
        with contextlib.closing(file):
            if length:
                self._write(file, offset, length)
                file.report()
            return file.length

    def read(self, user: User, path: bytes) -> int:
        file = self._open(user, path, meta.OPEN_READ)
        with contextlib.closing(file):
            return file.length

    def open_handle(self, user: User, handle: int, path: bytes, mode: int) -> None:
        self.files[handle] = self._open(user, path, meta.OPEN_WRITE | meta.OPEN_CREATE, mode)

    def open_tmpfile(self, user: User, handle: int, path: bytes, mode: int) -> None:
        self.files[handle] = self._open(user, path, meta.OPEN_WRITE | meta.OPEN_TMPFILE, mode)

    def handle_write(self, handle: int, offset: int, length: int) -> None:
        self.become(None)
        self._write(self.files[handle], offset, length)
        self.files[handle].report()

    def handle_truncate(self, handle: int, length: int) -> None:
        self.become(None)
        self.files[handle].truncate(length)

    def handle_stat(self, handle: int) -> tuple[Any, ...]:
        self.become(None)
        return describe(self.files[handle].look())

    def handle_close(self, handle: int) -> None:
        self.become(None)
        self.files.pop(handle).close()

    def check_chunks(self, path: bytes, attrs: meta.Attributes) -> None:
        """Chunks are looked at once, when all is removed."""
        assert attrs.type != DIRECTORY

"""A directory of this machine under the calls of posix_model.ModelFs: the kernel checks the model.

As root the calls run in a child with its root directory changed to the test's, each under the user who asks;
otherwise in this process, as the one user there is, on paths that don't leave the directory."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import traceback
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from posix_model import User

_libc = ctypes.CDLL(None, use_errno=True)
AS_ROOT = os.geteuid() == 0


class LocalFs:
    """Calls by name, with the arguments of ModelFs; OSError as the kernel gives it."""

    def __init__(self, root: Path) -> None:
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs, str(root)), daemon=True)
        self._child.start()
        theirs.close()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._pipe.send((name, args))
            kind, value = self._pipe.recv()
            if kind == "errno":
                raise OSError(value, errno.errorcode[value])
            assert kind == "value", value
            return value

        return call

    def close(self) -> None:
        self._pipe.send(None)
        self._child.join()
        self._pipe.close()


def _serve(pipe: Any, root: str) -> None:
    os.umask(0)
    os.chmod(root, 0o777)
    if AS_ROOT:
        os.chroot(root)
        os.chdir("/")
    fs = _Calls(b"" if AS_ROOT else os.fsencode(root))
    while (message := pipe.recv()) is not None:
        name, args = message
        try:
            pipe.send(("value", getattr(fs, name)(*args)))
        except OSError as error:
            pipe.send(("errno", error.errno))
        except Exception:
            pipe.send(("bug", traceback.format_exc()))


class _Calls:
    def __init__(self, base: bytes) -> None:
        self.base = base
        self.open: dict[int, int] = {}

    def become(self, user: User) -> None:
        if AS_ROOT:
            os.setresuid(0, 0, 0)
            os.setgroups(user.groups)
            os.setresgid(user.gid, user.gid, 0)
            os.setresuid(user.uid, user.uid, 0)

    def path(self, path: bytes) -> bytes:
        return self.base + path if path else path

    @staticmethod
    def describe(st: os.stat_result) -> tuple[Any, ...]:
        kind = {stat.S_IFDIR: "dir", stat.S_IFREG: "file", stat.S_IFLNK: "link"}[stat.S_IFMT(st.st_mode)]
        length = None if kind == "dir" else st.st_size
        return kind, stat.S_IMODE(st.st_mode), st.st_uid, st.st_gid, st.st_nlink, length

    def stat(self, user: User, path: bytes, follow: bool = True) -> tuple[Any, ...]:
        self.become(user)
        return self.describe(os.stat(self.path(path), follow_symlinks=follow))

    def listdir(self, user: User, path: bytes) -> list[bytes]:
        self.become(user)
        return sorted(os.listdir(self.path(path)))

    def readlink(self, user: User, path: bytes) -> bytes:
        self.become(user)
        return os.readlink(self.path(path))

    def mkdir(self, user: User, path: bytes, mode: int) -> None:
        self.become(user)
        os.mkdir(self.path(path), mode)

    def symlink(self, user: User, path: bytes, target: bytes) -> None:
        self.become(user)
        os.symlink(target, self.path(path))

    def link(self, user: User, source: bytes, target: bytes) -> None:
        self.become(user)
        os.link(self.path(source), self.path(target), follow_symlinks=False)

    def create(self, user: User, path: bytes, mode: int, exclusive: bool, truncate: bool) -> None:
        self.become(user)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if exclusive else 0) | (os.O_TRUNC if truncate else 0)
        os.close(os.open(self.path(path), flags, mode))

    def write(self, user: User, path: bytes, offset: int, length: int) -> int:
        self.become(user)
        fd = os.open(self.path(path), os.O_WRONLY)
        try:
            os.pwrite(fd, bytes(length), offset)
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def read(self, user: User, path: bytes) -> int:
        self.become(user)
        with open(self.path(path), "rb") as file:
            return os.fstat(file.fileno()).st_size

    def truncate(self, user: User, path: bytes, length: int) -> None:
        self.become(user)
        os.truncate(self.path(path), length)

    def open_handle(self, user: User, handle: int, path: bytes, mode: int) -> None:
        self.become(user)
        self.open[handle] = os.open(self.path(path), os.O_WRONLY | os.O_CREAT, mode)

    def open_tmpfile(self, user: User, handle: int, path: bytes, mode: int) -> None:
        self.become(user)
        self.open[handle] = os.open(self.path(path), os.O_WRONLY | os.O_TMPFILE, mode)

    def handle_write(self, handle: int, offset: int, length: int) -> None:
        os.pwrite(self.open[handle], bytes(length), offset)

    def handle_truncate(self, handle: int, length: int) -> None:
        os.ftruncate(self.open[handle], length)

    def handle_stat(self, handle: int) -> tuple[Any, ...]:
        return self.describe(os.fstat(self.open[handle]))

    def handle_close(self, handle: int) -> None:
        os.close(self.open.pop(handle))

    def unlink(self, user: User, path: bytes) -> None:
        self.become(user)
        os.unlink(self.path(path))

    def rmdir(self, user: User, path: bytes) -> None:
        self.become(user)
        os.rmdir(self.path(path))

    def rename(self, user: User, source: bytes, target: bytes, flags: int) -> None:
        self.become(user)
        if _libc.renameat2(-100, self.path(source), -100, self.path(target), flags):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def chmod(self, user: User, path: bytes, mode: int) -> None:
        self.become(user)
        os.chmod(self.path(path), mode)

    def chown(self, user: User, path: bytes, uid: int, gid: int) -> None:
        self.become(user)
        os.chown(self.path(path), uid, gid, follow_symlinks=False)

    def getxattr(self, user: User, path: bytes, name: bytes, follow: bool) -> bytes:
        self.become(user)
        return os.getxattr(self.path(path), name, follow_symlinks=follow)

    def setxattr(self, user: User, path: bytes, name: bytes, value: bytes, flags: int, follow: bool) -> None:
        self.become(user)
        os.setxattr(self.path(path), name, value, flags, follow_symlinks=follow)

    def removexattr(self, user: User, path: bytes, name: bytes, follow: bool) -> None:
        self.become(user)
        os.removexattr(self.path(path), name, follow_symlinks=follow)

    def listxattr(self, user: User, path: bytes, follow: bool) -> list[bytes]:
        self.become(user)
        return sorted(os.fsencode(name) for name in os.listxattr(self.path(path), follow_symlinks=follow))

    def dump(self) -> list[tuple[Any, ...]]:
        self.become(User(os.getuid(), os.getgid()) if not AS_ROOT else User(0, 0))
        out: list[tuple[Any, ...]] = []
        seen: dict[int, int] = {}

        def visit(path: bytes) -> None:
            st = os.lstat(self.path(path))
            out.append((path, self.describe(st), seen.setdefault(st.st_ino, len(seen))))
            if stat.S_ISDIR(st.st_mode):
                for name in sorted(os.listdir(self.path(path))):
                    visit(path.rstrip(b"/") + b"/" + name)

        visit(b"/")
        return out

"""The calls of a state machine over a tree of names, drawn at random: users, paths with "..", ".", slashes
and symbolic links, open files, modes. Each is made on a real thing and on the model (posix_model.py), and
the results, the errnos and after each step the whole tree must agree.

What the real thing is, a test says: the namespace in one process, services that are killed, a local
directory (the kernel checks the model)."""

from __future__ import annotations

import errno
import functools
import os
import tempfile
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from local_fs import AS_ROOT
from posix_model import EXCHANGE, NOREPLACE, ModelFs, User

USERS = [User(0, 0), User(1000, 1000, (1000, 2000)), User(1001, 1001, (1001, 2000)), User(1002, 1002)]
LONG = b"n" * 255
names = st.sampled_from([b"a", b"b", b"c", b"d"])
odd = st.sampled_from([b"a", b"b", b"c", b"d", b"..", b".", b"", LONG, LONG + b"n"])


def join(parts: list[bytes], slash: bool) -> bytes:
    return b"/" + b"/".join(parts) + (b"/" if slash and parts else b"")


plain_paths = st.lists(names, min_size=1, max_size=3).map(lambda parts: join(parts, False))
odd_paths = st.builds(join, st.lists(odd, max_size=4), st.booleans())
rare_path = st.one_of(plain_paths, plain_paths, plain_paths, odd_paths)
targets = st.one_of(
    rare_path,
    st.lists(st.sampled_from([b"a", b"b", b"c", b"..", b"."]), min_size=1, max_size=3).map(b"/".join),
    st.just(b""),
)
users = st.sampled_from(USERS)
modes = st.sampled_from([0o777, 0o755, 0o700, 0o770, 0o750, 0o666, 0o640, 0o600, 0o444, 0o111, 0o000, 0o2775])
wild_modes = st.one_of(modes, st.sampled_from([0o1777, 0o4755, 0o6711, 0o2755]))
lengths = st.sampled_from([0, 1, 100, 4095, 4096, 4097, 8192, 20000, 50000])
handles = st.integers(0, 2)
# Names of a length that can't be aren't among these: kernels differ in whether they look at the path first.
attributes = st.sampled_from([b"user.a", b"user.a", b"user.b", b"user." + b"x" * 250, b"user.", b"other.a"])
values = st.sampled_from([b"", b"1", b"\0\xff", b"v" * 200])  # all of an inode: one block of ext4


class Machine(RuleBasedStateMachine):
    """`real` is compared with `model` call by call."""

    real: Any
    model: ModelFs
    local = False

    def both(self, name: str, *args: Any) -> None:
        if self.local and not AS_ROOT:
            args = tuple(ME if isinstance(arg, User) else arg for arg in args)
            if any(isinstance(arg, bytes) and b".." in arg for arg in args):
                return  # nothing keeps it inside the directory
        if self.local and name.endswith("xattr") and not keeps_attributes():
            return
        expected = outcome(self.model, name, args)
        actual = outcome(self.real, name, args)
        assert actual == expected, f"{name}{args}: {actual}, the model says {expected}"
        tree = self.real.dump()
        want = self.model.dump()
        assert tree == want, f"after {name}{args}: {set(map(str, tree)) ^ set(map(str, want))}"

    @rule(user=users, path=rare_path, follow=st.booleans())
    def stat(self, user: User, path: bytes, follow: bool) -> None:
        self.both("stat", user, path, follow)

    @rule(user=users, path=rare_path)
    def listdir(self, user: User, path: bytes) -> None:
        self.both("listdir", user, path)

    @rule(user=users, path=rare_path)
    def readlink(self, user: User, path: bytes) -> None:
        self.both("readlink", user, path)

    @rule(user=users, path=rare_path, mode=wild_modes)
    def mkdir(self, user: User, path: bytes, mode: int) -> None:
        if self.local:
            mode &= 0o2777  # a sticky directory brings in rules of its own (fs.protected_symlinks, _regular)
        self.both("mkdir", user, path, mode)

    @rule(user=users, path=rare_path, content=targets)
    def symlink(self, user: User, path: bytes, content: bytes) -> None:
        if self.local and not AS_ROOT and content.startswith(b"/"):
            return
        self.both("symlink", user, path, content)

    @rule(user=users, source=rare_path, to=rare_path)
    def link(self, user: User, source: bytes, to: bytes) -> None:
        self.both("link", user, source, to)

    @rule(user=users, path=rare_path, mode=modes, exclusive=st.booleans(), truncate=st.booleans())
    def create(self, user: User, path: bytes, mode: int, exclusive: bool, truncate: bool) -> None:
        self.both("create", user, path, mode, exclusive, truncate)

    @rule(user=users, path=rare_path, offset=lengths, length=lengths)
    def write(self, user: User, path: bytes, offset: int, length: int) -> None:
        self.both("write", user, path, offset, length)

    @rule(user=users, path=rare_path)
    def read(self, user: User, path: bytes) -> None:
        self.both("read", user, path)

    @rule(user=users, path=rare_path, length=lengths)
    def truncate(self, user: User, path: bytes, length: int) -> None:
        self.both("truncate", user, path, length)

    @rule(user=users, path=rare_path)
    def unlink(self, user: User, path: bytes) -> None:
        self.both("unlink", user, path)

    @rule(user=users, path=rare_path)
    def rmdir(self, user: User, path: bytes) -> None:
        self.both("rmdir", user, path)

    @rule(user=users, source=rare_path, to=rare_path, flags=st.sampled_from([0, 0, NOREPLACE, EXCHANGE]))
    def rename(self, user: User, source: bytes, to: bytes, flags: int) -> None:
        self.both("rename", user, source, to, flags)

    @rule(user=users, path=rare_path, mode=wild_modes)
    def chmod(self, user: User, path: bytes, mode: int) -> None:
        if self.local:
            mode &= 0o6777
        self.both("chmod", user, path, mode)

    @rule(
        user=users,
        path=rare_path,
        uid=st.sampled_from([-1, 0, 1000, 1001]),
        gid=st.sampled_from([-1, 0, 1000, 2000]),
    )
    def chown(self, user: User, path: bytes, uid: int, gid: int) -> None:
        if not (self.local and not AS_ROOT):
            self.both("chown", user, path, uid, gid)

    # --- extended attributes ---

    @rule(
        user=users,
        path=rare_path,
        name=attributes,
        value=values,
        flags=st.sampled_from([0, 0, os.XATTR_CREATE, os.XATTR_REPLACE]),
        follow=st.booleans(),
    )
    def setxattr(self, user: User, path: bytes, name: bytes, value: bytes, flags: int, follow: bool) -> None:
        self.both("setxattr", user, path, name, value, flags, follow)

    @rule(user=users, path=rare_path, name=attributes, follow=st.booleans())
    def getxattr(self, user: User, path: bytes, name: bytes, follow: bool) -> None:
        self.both("getxattr", user, path, name, follow)

    @rule(user=users, path=rare_path, name=attributes, follow=st.booleans())
    def removexattr(self, user: User, path: bytes, name: bytes, follow: bool) -> None:
        self.both("removexattr", user, path, name, follow)

    @rule(user=users, path=rare_path, follow=st.booleans())
    def listxattr(self, user: User, path: bytes, follow: bool) -> None:
        self.both("listxattr", user, path, follow)

    # --- open files ---

    @rule(user=users, handle=handles, path=rare_path, mode=modes, tmpfile=st.booleans())
    def open_handle(self, user: User, handle: int, path: bytes, mode: int, tmpfile: bool) -> None:
        if handle not in self.model.open:
            self.both("open_tmpfile" if tmpfile else "open_handle", user, handle, path, mode)

    @precondition(lambda self: self.model.open)
    @rule(pick=handles, what=st.sampled_from(["write", "truncate", "stat", "close"]), a=lengths, b=lengths)
    def use_handle(self, pick: int, what: str, a: int, b: int) -> None:
        handle = sorted(self.model.open)[pick % len(self.model.open)]
        args = {"write": (handle, a, b + 1), "truncate": (handle, a)}.get(what, (handle,))
        self.both(f"handle_{what}", *args)


@functools.cache
def keeps_attributes() -> bool:
    """Does the temporary directory's file system have user attributes?"""
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.setxattr(file.name, b"user.a", b"")
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            return False
        return True


def outcome(fs: Any, name: str, args: tuple[Any, ...]) -> Any:
    try:
        return getattr(fs, name)(*args)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


ME = User(os.getuid(), os.getgid(), tuple(os.getgroups()))


def steps(count: int) -> settings:
    scale = int(os.environ.get("FFS_TEST_SCALE", "1"))
    return settings(
        max_examples=count * scale,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )

"""A plain model of a POSIX tree: objects that point at each other, no keys, no transactions, no ids.

Written from the manual pages, not from metadata/fs, so that the two can disagree. Errors are OSError with the
errno that Linux gives. The same calls are answered by the namespace (ffs_fs.py) and by a directory of this
machine (local_fs.py); what they return is compared.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Any

NOREPLACE, EXCHANGE = 1, 2


@dataclass(frozen=True)
class User:
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def fail(number: int) -> OSError:
    return OSError(number, errno.errorcode[number])


@dataclass(eq=False)
class Node:
    kind: str  # "dir" "file" "link"
    mode: int
    uid: int
    gid: int
    entries: dict[bytes, Node] = field(default_factory=dict)
    parent: Node | None = None  # dir
    length: int = 0  # file
    target: bytes = b""  # link
    names: int = 0  # how many entries lead here
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


class ModelFs:
    """`strict_links`: hard links only to what one owns or may read and write (fs.protected_hardlinks)."""

    def __init__(self, strict_links: bool = False) -> None:
        self.root = Node("dir", 0o777, 0, 0, names=1)
        self.root.parent = self.root
        self.open: dict[int, Node] = {}
        self.strict_links = strict_links

    # --- permissions and paths ---

    @staticmethod
    def allowed(node: Node, user: User, bits: int) -> bool:
        if user.uid == 0:
            return True  # execution of files isn't asked for here
        if user.uid == node.uid:
            shift = 6
        elif node.gid in (user.gid, *user.groups):
            shift = 3
        else:
            shift = 0
        return bits & ~(node.mode >> shift) == 0

    def demand(self, node: Node, user: User, bits: int) -> None:
        if not self.allowed(node, user, bits):
            raise fail(errno.EACCES)

    def lookup(
        self,
        user: User,
        path: bytes,
        follow: bool,
        entry: bool = False,
        depth: int = 0,
        start: Node | None = None,
    ) -> tuple[Node, bytes, Node | None, bool]:
        """(directory, last name, what it names or None, whether it ended in a slash). `entry`: the caller
        makes or removes the entry itself, and judges the slash."""
        if not path:
            raise fail(errno.ENOENT)
        if depth == 0 and len(path) >= 4096:
            raise fail(errno.ENAMETOOLONG)
        here = self.root if path[:1] == b"/" or start is None else start
        parts = [p for p in path.split(b"/") if p]
        slash = path[-1:] == b"/"
        where, name = here, b""
        for i, name in enumerate(parts):
            last = i == len(parts) - 1
            if here.kind != "dir":
                raise fail(errno.ENOTDIR)
            self.demand(here, user, 1)
            where = here
            if name == b".":
                continue
            if name == b"..":
                assert here.parent is not None
                here = here.parent
                continue
            if len(name) > 255:
                if last and entry:
                    return where, name, None, slash
                raise fail(errno.ENAMETOOLONG)
            found = here.entries.get(name)
            if found is None:
                if last:
                    return where, name, None, slash
                raise fail(errno.ENOENT)
            if found.kind == "link" and (not last or (not entry if slash else follow)):
                if depth >= 40:
                    raise fail(errno.ELOOP)
                rest = b"/".join(parts[i + 1 :])
                onward = found.target + (b"/" + rest if rest else b"") + (b"/" if slash else b"")
                return self.lookup(user, onward, follow, entry, depth + 1, here)
            here = found
        if slash and here.kind != "dir" and not entry:
            raise fail(errno.ENOTDIR)
        return where, name, here, slash

    def get(self, user: User, path: bytes, follow: bool = True) -> Node:
        node = self.lookup(user, path, follow)[2]
        if node is None:
            raise fail(errno.ENOENT)
        return node

    @staticmethod
    def special(name: bytes) -> bool:
        return name in (b"", b".", b"..")

    @staticmethod
    def short(name: bytes) -> None:
        """Linux looks at the last name's length only when it looks the entry up."""
        if len(name) > 255:
            raise fail(errno.ENAMETOOLONG)

    def may_delete(self, where: Node, victim: Node, user: User) -> None:
        self.demand(where, user, 3)
        if where.mode & 0o1000 and user.uid not in (0, victim.uid, where.uid):
            raise fail(errno.EPERM)

    # --- looking ---

    def describe(self, node: Node) -> tuple[Any, ...]:
        if node.kind == "dir":
            links = 2 + sum(child.kind == "dir" for child in node.entries.values())
            return node.kind, node.mode, node.uid, node.gid, links, None
        length = node.length if node.kind == "file" else len(node.target)
        return node.kind, node.mode, node.uid, node.gid, node.names, length

    def stat(self, user: User, path: bytes, follow: bool = True) -> tuple[Any, ...]:
        return self.describe(self.get(user, path, follow))

    def listdir(self, user: User, path: bytes) -> list[bytes]:
        node = self.get(user, path)
        if node.kind != "dir":
            raise fail(errno.ENOTDIR)
        self.demand(node, user, 4)
        return sorted(node.entries)

    def readlink(self, user: User, path: bytes) -> bytes:
        node = self.get(user, path, follow=False)
        if node.kind != "link":
            raise fail(errno.EINVAL)
        return node.target

    # --- making ---

    def add(self, user: User, where: Node, name: bytes, node: Node) -> None:
        if where.mode & 0o2000 and node.names == 0:
            node.gid = where.gid
            if node.kind == "dir":
                node.mode |= 0o2000
        where.entries[name] = node
        node.names += 1
        if node.kind == "dir":
            node.parent = where

    def mkdir(self, user: User, path: bytes, mode: int) -> None:
        where, name, node, _ = self.lookup(user, path, follow=False, entry=True)
        self.short(name)
        if node is not None:
            raise fail(errno.EEXIST)
        self.demand(where, user, 3)
        self.add(user, where, name, Node("dir", mode & 0o1777, user.uid, user.gid))

    def symlink(self, user: User, path: bytes, target: bytes) -> None:
        if not target:
            raise fail(errno.ENOENT)
        where, name, node, slash = self.lookup(user, path, follow=False, entry=True)
        self.short(name)
        if node is not None:
            raise fail(errno.EEXIST)
        if slash:
            raise fail(errno.ENOENT)
        self.demand(where, user, 3)
        self.add(user, where, name, Node("link", 0o777, user.uid, user.gid, target=target))

    def link(self, user: User, source: bytes, target: bytes) -> None:
        node = self.get(user, source, follow=False)
        where, name, there, slash = self.lookup(user, target, follow=False, entry=True)
        self.short(name)
        if there is not None:
            raise fail(errno.EEXIST)
        if slash:
            raise fail(errno.ENOENT)
        if self.strict_links and user.uid not in (0, node.uid):
            plain = node.kind == "file" and not node.mode & 0o4000 and node.mode & 0o2010 != 0o2010
            if not plain or not self.allowed(node, user, 6):
                raise fail(errno.EPERM)
        self.demand(where, user, 3)
        if node.kind == "dir":
            raise fail(errno.EPERM)
        self.add(user, where, name, node)

    # --- files ---

    def create(self, user: User, path: bytes, mode: int, exclusive: bool, truncate: bool) -> None:
        """open(O_WRONLY|O_CREAT...) and close."""
        self._open(user, path, mode, True, exclusive, truncate, write=True)

    def _open(
        self, user: User, path: bytes, mode: int, create: bool, exclusive: bool, truncate: bool, write: bool
    ) -> Node:
        where, name, node, slash = self.lookup(user, path, follow=not (create and exclusive), entry=create)
        if create:
            if slash and not self.special(name):
                raise fail(errno.EISDIR)
            self.short(name)
            if node is not None and exclusive:
                raise fail(errno.EEXIST)
            if self.special(name):
                raise fail(errno.EISDIR)
        if node is None:
            if not create:
                raise fail(errno.ENOENT)
            self.demand(where, user, 3)
            node = Node("file", mode & 0o7777, user.uid, user.gid)
            self.add(user, where, name, node)
            return node
        if node.kind == "link":
            raise fail(errno.ELOOP)
        if node.kind == "dir":
            if not write:
                self.demand(node, user, 4)
            raise fail(errno.EISDIR)
        self.demand(node, user, 2 if write else 4)
        if truncate:
            node.length = 0
        return node

    def write(self, user: User, path: bytes, offset: int, length: int) -> int:
        """Opens what is there, writes zeros, closes; returns the length after."""
        node = self._open(user, path, 0, False, False, False, write=True)
        if length and offset + length > node.length:
            self.resize(node, offset + length)
        return node.length

    def read(self, user: User, path: bytes) -> int:
        """Opens for reading; the length."""
        return self._open(user, path, 0, False, False, False, write=False).length

    def truncate(self, user: User, path: bytes, length: int) -> None:
        node = self.get(user, path)
        if node.kind == "dir":
            raise fail(errno.EISDIR)
        self.demand(node, user, 2)
        self.resize(node, length)

    def resize(self, node: Node, length: int) -> None:
        """What a quota would say comes here (quota_model.py)."""
        node.length = length

    def open_handle(self, user: User, handle: int, path: bytes, mode: int) -> None:
        self.open[handle] = self._open(user, path, mode, True, False, False, write=True)

    def open_tmpfile(self, user: User, handle: int, path: bytes, mode: int) -> None:
        node = self.get(user, path)
        if node.kind != "dir":
            raise fail(errno.ENOTDIR)
        self.demand(node, user, 3)
        gid = node.gid if node.mode & 0o2000 else user.gid
        self.open[handle] = Node("file", mode & 0o7777, user.uid, gid)

    def handle_write(self, handle: int, offset: int, length: int) -> None:
        node = self.open[handle]
        if offset + length > node.length:
            self.resize(node, offset + length)

    def handle_truncate(self, handle: int, length: int) -> None:
        self.resize(self.open[handle], length)

    def handle_stat(self, handle: int) -> tuple[Any, ...]:
        return self.describe(self.open[handle])

    def handle_close(self, handle: int) -> None:
        del self.open[handle]

    # --- removing and moving ---

    def unlink(self, user: User, path: bytes) -> None:
        where, name, node, slash = self.lookup(user, path, follow=False, entry=True)
        if self.special(name):
            raise fail(errno.EISDIR)
        self.short(name)
        if node is None:
            raise fail(errno.ENOENT)
        if slash:
            raise fail(errno.EISDIR if node.kind == "dir" else errno.ENOTDIR)
        self.may_delete(where, node, user)
        if node.kind == "dir":
            raise fail(errno.EISDIR)
        self.drop(where, name)

    def drop(self, where: Node, name: bytes) -> None:
        where.entries.pop(name).names -= 1

    def rmdir(self, user: User, path: bytes) -> None:
        where, name, node, _ = self.lookup(user, path, follow=False, entry=True)
        if name == b"":
            raise fail(errno.EBUSY)
        if name == b".":
            raise fail(errno.EINVAL)
        if name == b"..":
            raise fail(errno.ENOTEMPTY)
        self.short(name)
        if node is None:
            raise fail(errno.ENOENT)
        self.may_delete(where, node, user)
        if node.kind != "dir":
            raise fail(errno.ENOTDIR)
        if node.entries:
            raise fail(errno.ENOTEMPTY)
        self.drop(where, name)

    def rename(self, user: User, source: bytes, target: bytes, flags: int) -> None:
        bare = source.rstrip(b"/") or source[:1], target.rstrip(b"/") or target[:1]
        old_dir, old_name, old, _ = self.lookup(user, bare[0], follow=False, entry=True)
        new_dir, new_name, new, _ = self.lookup(user, bare[1], follow=False, entry=True)
        if self.special(old_name):
            raise fail(errno.EBUSY)
        if self.special(new_name):
            raise fail(errno.EEXIST if flags & NOREPLACE else errno.EBUSY)
        self.short(old_name)
        if old is None:
            raise fail(errno.ENOENT)
        self.short(new_name)
        if new is not None and flags & NOREPLACE:
            raise fail(errno.EEXIST)
        if flags & EXCHANGE:
            if new is None:
                raise fail(errno.ENOENT)
            if new.kind != "dir" and target.endswith(b"/"):
                raise fail(errno.ENOTDIR)
        slashes = source.endswith(b"/"), target.endswith(b"/")
        if old.kind != "dir" and (slashes[0] or (slashes[1] and not flags & EXCHANGE)):
            raise fail(errno.ENOTDIR)
        if old_dir is not new_dir:
            if old in self.chain(new_dir):
                raise fail(errno.EINVAL)
            if new is not None and new in self.chain(old_dir):
                raise fail(errno.EINVAL if flags & EXCHANGE else errno.ENOTEMPTY)
        if old is new:
            return
        self.may_delete(old_dir, old, user)
        if new is None:
            self.demand(new_dir, user, 3)
        else:
            self.may_delete(new_dir, new, user)
            if not flags & EXCHANGE:
                if old.kind == "dir" and new.kind != "dir":
                    raise fail(errno.ENOTDIR)
                if old.kind != "dir" and new.kind == "dir":
                    raise fail(errno.EISDIR)
        if old_dir is not new_dir:
            if old.kind == "dir":
                self.demand(old, user, 2)
            if flags & EXCHANGE and new is not None and new.kind == "dir":
                self.demand(new, user, 2)
        if flags & EXCHANGE:
            assert new is not None
            self.cross(old_dir, new_dir, old, new)
            old_dir.entries[old_name], new_dir.entries[new_name] = new, old
            for node, where in ((old, new_dir), (new, old_dir)):
                if node.kind == "dir":
                    node.parent = where
            return
        if new is not None and new.kind == "dir" and new.entries:
            raise fail(errno.ENOTEMPTY)
        self.cross(old_dir, new_dir, old, None)
        if new is not None:
            self.drop(new_dir, new_name)
        new_dir.entries[new_name] = old_dir.entries.pop(old_name)
        if old.kind == "dir":
            old.parent = new_dir

    def cross(self, old_dir: Node, new_dir: Node, old: Node, new: Node | None) -> None:
        """`old` goes from one directory to the other, `new` the other way: all that could forbid it has been
        asked, but for quotas (quota_model.py)."""

    def chain(self, node: Node) -> list[Node]:
        """The directory and all above it."""
        found = [node]
        while node is not self.root:
            assert node.parent is not None
            node = node.parent
            found.append(node)
        return found

    # --- attributes ---

    def chmod(self, user: User, path: bytes, mode: int) -> None:
        node = self.get(user, path)
        if user.uid not in (0, node.uid):
            raise fail(errno.EPERM)
        if user.uid != 0 and node.gid not in (user.gid, *user.groups):
            mode &= ~0o2000
        node.mode = mode

    def chown(self, user: User, path: bytes, uid: int, gid: int) -> None:
        """-1 leaves one as it is. Not following, as lchown."""
        node = self.get(user, path, follow=False)
        if uid != -1 and user.uid != 0 and not (user.uid == node.uid == uid):
            raise fail(errno.EPERM)
        mine = gid in (user.gid, *user.groups) or gid == node.gid
        if gid != -1 and user.uid != 0 and not (user.uid == node.uid and mine):
            raise fail(errno.EPERM)
        node.uid = node.uid if uid == -1 else uid
        node.gid = node.gid if gid == -1 else gid
        if node.kind != "dir" and (uid != -1 or gid != -1):
            node.mode &= ~0o4000
            if node.mode & 0o010:
                node.mode &= ~0o2000

    # --- extended attributes ---

    def may_xattr(self, node: Node, user: User, name: bytes, bits: int) -> None:
        """Whether it may be read (4) or changed (2): xattr(7), in the kernel's order."""
        if name.startswith(b"user."):
            if node.kind == "link":
                raise fail(errno.EPERM if bits == 2 else errno.ENODATA)
            sticky = node.kind == "dir" and node.mode & 0o1000
            if bits == 2 and sticky and user.uid not in (0, node.uid):
                raise fail(errno.EPERM)
        self.demand(node, user, bits)
        if not name.startswith(b"user."):
            raise fail(errno.EOPNOTSUPP)
        if name == b"user.":
            raise fail(errno.EINVAL)

    @staticmethod
    def check_xattr_name(name: bytes) -> None:
        if not 0 < len(name) <= 255:
            raise fail(errno.ERANGE)

    def getxattr(self, user: User, path: bytes, name: bytes, follow: bool) -> bytes:
        self.check_xattr_name(name)
        node = self.get(user, path, follow)
        self.may_xattr(node, user, name, 4)
        if name not in node.xattrs:
            raise fail(errno.ENODATA)
        return node.xattrs[name]

    def setxattr(self, user: User, path: bytes, name: bytes, value: bytes, flags: int, follow: bool) -> None:
        self.check_xattr_name(name)
        if len(value) > 65536:
            raise fail(errno.E2BIG)
        node = self.get(user, path, follow)
        self.may_xattr(node, user, name, 2)
        if name in node.xattrs and flags & 1:
            raise fail(errno.EEXIST)
        if name not in node.xattrs and flags & 2:
            raise fail(errno.ENODATA)
        node.xattrs[name] = value

    def removexattr(self, user: User, path: bytes, name: bytes, follow: bool) -> None:
        self.check_xattr_name(name)
        node = self.get(user, path, follow)
        self.may_xattr(node, user, name, 2)
        if node.xattrs.pop(name, None) is None:
            raise fail(errno.ENODATA)

    def listxattr(self, user: User, path: bytes, follow: bool) -> list[bytes]:
        return sorted(self.get(user, path, follow).xattrs)

    def dump(self) -> list[tuple[Any, ...]]:
        """The whole tree: (path, description, number of the object by first visit)."""
        out: list[tuple[Any, ...]] = []
        seen: dict[int, int] = {}

        def visit(path: bytes, node: Node) -> None:
            out.append((path, self.describe(node), seen.setdefault(id(node), len(seen))))
            for name in sorted(node.entries):
                visit(path.rstrip(b"/") + b"/" + name, node.entries[name])

        visit(b"/", self.root)
        return out

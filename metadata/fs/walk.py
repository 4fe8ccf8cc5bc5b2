"""From a path to what it names, and whether somebody may. docs/metadata.md, Paths.

The errors, and their order where several fit, are those of Linux, so that a program sees here what it
would see on a local file system.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ffs import errors
from ffs.proto.common import Creds
from ffs.proto.meta import MAX_NAME_BYTES, MAX_PATH_BYTES
from ffs.proto.records import DIRECTORY, ROOT_INO, SYMLINK, Inode
from metadata.fs.schema import Reader, decode_dirent, decode_inode, dirent_key, inode_key

R: Final = 4
W: Final = 2
X: Final = 1
MAX_SYMLINKS: Final = 40


class Found(NamedTuple):
    """Where a path leads. `ino` 0: its last name doesn't exist (yet) in `parent`."""

    parent: int
    parent_inode: Inode
    name: bytes  # last name walked; b"" for the root, b"." and b".." as they came
    ino: int
    type: int
    slash: bool  # the path ended in "/": only a directory will do
    rest: list[bytes]  # names after `name` that weren't walked, since it doesn't exist

    @property
    def special(self) -> bool:
        """The root, "." or "..": nothing can be made, removed or renamed by such a name."""
        return self.name in (b"", b".", b"..")


def split(path: bytes) -> tuple[list[bytes], bool]:
    """(names, whether it ends in "/"). "." is kept only as the last name."""
    if not path.startswith(b"/"):
        if not path:
            raise errors.NotFound("the path is empty", path)
        raise errors.InvalidArgument("the path isn't absolute: begin it with /", path)
    if len(path) >= MAX_PATH_BYTES:
        raise errors.NameTooLong(f"a path has less than {MAX_PATH_BYTES} bytes, not {len(path)}", path)
    if b"\0" in path:
        raise errors.InvalidArgument("a path has no NUL byte", path)
    names = [name for name in path.split(b"/") if name]
    if b"." in names:
        last = names[-1]
        names = [name for name in names if name != b"."]
        if last == b".":
            names.append(last)
    return names, path.endswith(b"/")


def may(inode: Inode, creds: Creds, want: int) -> bool:
    """Do the mode bits let `creds` do all of `want` (R, W, X)?"""
    uid = creds.uid
    mode = inode.mode
    if uid == 0:  # root may all but execute a file that nobody may execute
        return not want & X or inode.type == DIRECTORY or bool(mode & 0o111)
    if uid == inode.uid:
        return (mode >> 6) & want == want
    if inode.gid == creds.gid or inode.gid in creds.groups:
        return (mode >> 3) & want == want
    return mode & want == want


def owns(inode: Inode, creds: Creds) -> bool:
    return creds.uid in (0, inode.uid)


def need(inode: Inode, creds: Creds, want: int, path: bytes) -> None:
    """Raises AccessDenied unless `may`."""
    if not may(inode, creds, want):
        words = "/".join(w for bit, w in ((R, "read"), (W, "write"), (X, "search")) if want & bit)
        raise errors.AccessDenied(f"user {creds.uid} has no {words} permission", path)


def need_unsticky(parent: Inode, victim: Inode, creds: Creds, path: bytes) -> None:
    """In a sticky directory only the owner of an entry or of the directory takes it out."""
    if parent.mode & 0o1000 and not (owns(parent, creds) or creds.uid == victim.uid):
        raise errors.NotPermitted("the directory is sticky and the entry somebody else's", path)


def need_name(found: Found, path: bytes) -> None:
    """Raises NameTooLong if the last name can't be one."""
    if len(found.name) > MAX_NAME_BYTES:
        raise _too_long(found.name, path)


def _too_long(name: bytes, path: bytes) -> errors.NameTooLong:
    return errors.NameTooLong(f"a name has at most {MAX_NAME_BYTES} bytes, not {len(name)}", path)


async def walk(
    reader: Reader, creds: Creds, path: bytes, follow: bool = True, *, entry: bool = False
) -> Found:
    """Walks `path`; a symlink as last name is followed if `follow`, or if a "/" comes after it.

    `entry`: the caller means the entry itself, to make or remove it. Then a "/" at the end neither follows
    nor demands a directory, and a last name that is too long is left to `need_name`, since the caller looks
    at `special` and `slash` first.

    Raises NotFound when a directory on the way is missing - unless the caller handles `rest`, see
    `walk_missing` - NotADirectory, AccessDenied, SymlinkLoop, NameTooLong, InvalidArgument."""
    found = await walk_missing(reader, creds, path, follow, entry=entry)
    if found.rest:
        raise errors.NotFound(f"there is no {found.name.decode(errors='replace')!r} on the way", path)
    return found


async def walk_missing(
    reader: Reader, creds: Creds, path: bytes, follow: bool = True, *, entry: bool = False
) -> Found:
    """As `walk`, but a missing directory on the way is a result with `rest`."""
    names, slash = split(path)
    names.reverse()  # the next name is popped from the end
    get = reader.get
    parent = ino = ROOT_INO
    kind = DIRECTORY
    name = b""
    links = 0
    data = await get(inode_key(ROOT_INO))
    if data is None:
        raise errors.Damaged("the store has no root directory")
    parent_inode = inode = decode_inode(data)
    while names:
        name = names.pop()
        if kind != DIRECTORY:
            raise errors.NotADirectory("a name on the way is no directory", path)
        if ino != parent or inode is not parent_inode:
            parent, parent_inode = ino, inode
        if not may(inode, creds, X):
            raise errors.AccessDenied(f"user {creds.uid} may not search a directory on the way", path)
        if name == b".":
            continue
        if name == b"..":
            if ino != ROOT_INO:
                ino = inode.parent
                data = await get(inode_key(ino))
                if data is None:  # taken out of the tree meanwhile
                    raise errors.NotFound(None, path)
                inode = decode_inode(data)
            continue
        if len(name) > MAX_NAME_BYTES:
            if not entry or names:
                raise _too_long(name, path)
            return Found(parent, parent_inode, name, 0, 0, slash, names)  # `need_name` will refuse it
        data = await get(dirent_key(parent, name))
        if data is None:
            names.reverse()
            return Found(parent, parent_inode, name, 0, 0, slash, names)
        dirent = decode_dirent(data)
        ino, kind = dirent.ino, dirent.type
        if kind == DIRECTORY and names:
            data = await get(inode_key(ino))
            if data is None:
                raise errors.NotFound(None, path)
            inode = decode_inode(data)
        elif kind == SYMLINK and (names or (follow if not slash else not entry)):
            links += 1
            if links > MAX_SYMLINKS:
                raise errors.SymlinkLoop(f"more than {MAX_SYMLINKS} symbolic links on the way", path)
            data = await get(inode_key(ino))
            if data is None:
                raise errors.NotFound(None, path)
            target = decode_inode(data).target
            ahead, target_slash = split(target if target.startswith(b"/") else b"/" + target)
            slash = slash or (target_slash and not names)
            names.extend(reversed(ahead))
            if target.startswith(b"/"):
                parent = ino = ROOT_INO
                root = await get(inode_key(ROOT_INO))
                parent_inode = inode = decode_inode(root)  # type: ignore[arg-type]
            else:
                ino, inode = parent, parent_inode
            kind = DIRECTORY
            if not ahead:  # a link to "/" or "." alone
                name = b"" if ino == ROOT_INO else b"."
    if slash and kind != DIRECTORY and not entry:
        raise errors.NotADirectory("the path ends in / and this is no directory", path)
    return Found(parent, parent_inode, name, ino, kind, slash, names)

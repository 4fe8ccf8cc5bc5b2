"""Attributes of the store as Python's own: os.stat_result, entries of a directory. Pure.

docs/client.md, Namespace.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from ffs.client.paths import decode_text, join
from ffs.proto import records
from ffs.proto.meta import Attributes, DirEntry

# A KV space is neither a file nor a directory: it shows as a block device, which it is most like.
_KIND = {
    records.DIRECTORY: stat.S_IFDIR,
    records.FILE: stat.S_IFREG,
    records.SYMLINK: stat.S_IFLNK,
    records.KV_SPACE: stat.S_IFBLK,
}

_BLOCK_BYTES = 512


class DiskUsage(NamedTuple):
    """As of shutil.disk_usage, in bytes; usable, that is after replication."""

    total: int
    used: int
    free: int


def stat_result(attributes: Attributes, device: int) -> os.stat_result:
    """The os.stat_result of `attributes`. There is no atime: it shows mtime, reading never writes."""
    mtime, ctime = attributes.mtime_ns, attributes.ctime_ns
    length = attributes.length
    layout = attributes.layout
    return os.stat_result(
        (
            _KIND.get(attributes.type, 0) | attributes.mode,
            attributes.ino,
            device,
            attributes.nlink,
            attributes.uid,
            attributes.gid,
            length,
            mtime // 1_000_000_000,
            mtime // 1_000_000_000,
            ctime // 1_000_000_000,
        ),
        {
            "st_atime": mtime / 1e9,
            "st_mtime": mtime / 1e9,
            "st_ctime": ctime / 1e9,
            "st_atime_ns": mtime,
            "st_mtime_ns": mtime,
            "st_ctime_ns": ctime,
            "st_blksize": layout.chunk_size if layout is not None else 4096,
            "st_blocks": -(-length // _BLOCK_BYTES) if attributes.type == records.FILE else 0,
            "st_rdev": 0,
        },
    )


StatFunction = Callable[[str, bool], os.stat_result]


class DirectoryEntry:
    """One entry of `scandir`, like os.DirEntry: what it says was true when its page was read."""

    __slots__ = ("_attributes", "_device", "_entry", "_stat", "name", "path")

    def __init__(self, directory: str, entry: DirEntry, device: int, stat_function: StatFunction) -> None:
        self.name = decode_text(entry.name)
        self.path = join(directory, self.name)
        self._entry = entry
        self._device = device
        self._attributes = entry.attributes
        self._stat = stat_function

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<ffs.DirectoryEntry {self.name!r}>"

    def inode(self) -> int:
        """The inode id of the entry itself."""
        return self._entry.ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Its attributes; asks the service only for the target of a symbolic link. Blocking then."""
        if self._attributes is None or (follow_symlinks and self.is_symlink()):
            return self._stat(self.path, follow_symlinks)
        return stat_result(self._attributes, self._device)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a directory, or a symbolic link to one."""
        return self._is(records.DIRECTORY, stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a regular file, or a symbolic link to one."""
        return self._is(records.FILE, stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return self._entry.type == records.SYMLINK

    def is_kv_space(self) -> bool:
        """Whether it is a KV space."""
        return self._entry.type == records.KV_SPACE

    def _is(self, kind: int, test: Callable[[int], bool], follow: bool) -> bool:
        if not (follow and self.is_symlink()):
            return self._entry.type == kind
        try:
            return test(self._stat(self.path, True).st_mode)
        except FileNotFoundError:
            return False

"""What a file object can do about holes: find them, make them, fill them. docs/client.md, Holes."""

from __future__ import annotations

import os
from errno import ENXIO, EOPNOTSUPP
from typing import TYPE_CHECKING

from ffs import errors
from ffs.layout import MAX_FILE_BYTES

if TYPE_CHECKING:
    from ffs.client.handle import OpenFile


class HoleCalls:
    """Mixed into `File`, which has the rest."""

    name: str
    _open_file: OpenFile
    _discarded: bool

    def _check_writable(self) -> None:
        raise NotImplementedError

    def _settle(self) -> None:
        raise NotImplementedError

    def _settle_under_lock(self) -> None:
        raise NotImplementedError

    def punch_hole(self, offset: int, length: int) -> None:
        """As fallocate with FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE: the bytes [offset, offset + length)
        read as zeros from now on, and chunks that lie in them whole are removed, on all replicas; the length
        stays. Durable when it returns. Blocking. InvalidArgument, TooLarge (EFBIG)."""
        self._check_range(offset, length)
        if not self._discarded:
            self._settle()
            self._open_file.punch(offset, length)

    def held_bytes(self) -> int:
        """How many bytes of it are stored: its length without its holes. Blocking: the chains are asked."""
        self._settle()
        self._open_file.look()
        return self._open_file.held_bytes()

    def allocate(self, offset: int, length: int, keep_size: bool = False) -> None:
        """As posix_fallocate: make room for [offset, offset + length) beforehand. Zeros are written where
        nothing is; the length grows to offset + length at least, published at once. What others write
        meanwhile stays. Blocking, as long as writing takes. InvalidArgument, TooLarge (EFBIG), NoSpace.

        keep_size is refused (Unsupported, EOPNOTSUPP): chunks beyond the length belong to a writer who hasn't
        reported it, so they would turn into length, or be cut. docs/client.md, Holes."""
        self._check_range(offset, length)
        if keep_size:
            raise errors.error_of(
                EOPNOTSUPP,
                "room beyond the end can't be kept without growing the file: leave keep_size out,"
                " or allocate and note the length elsewhere",
                self.name,
            )
        if not self._discarded:
            self._settle()
            self._open_file.allocate(offset, length)

    def _check_range(self, offset: int, length: int) -> None:
        self._check_writable()
        if offset < 0 or length <= 0:
            raise errors.InvalidArgument(
                f"offset {offset}, length {length}: give an offset from 0 on and at least one byte", self.name
            )
        if offset + length > MAX_FILE_BYTES:
            raise errors.TooLarge(f"a file ends at {MAX_FILE_BYTES} bytes", self.name)

    def _seek_in_chunks(self, offset: int, whence: int) -> int:
        handle = self._open_file
        self._settle_under_lock()
        handle.look()
        if not 0 <= offset < handle.length:
            raise errors.error_of(ENXIO, f"{offset} isn't inside the file's {handle.length} bytes", self.name)
        if whence == os.SEEK_HOLE:
            return handle.find_hole(offset)
        found = handle.find_data(offset)
        if found is None:
            raise errors.error_of(ENXIO, f"only a hole follows {offset}", self.name)
        return found

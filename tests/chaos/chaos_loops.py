"""Block devices over files: loop devices with direct I/O and sectors of a chosen size. Root only.

A device goes away with the last descriptor of it (autoclear), so also when the test is killed."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import Final

LOOP_CLR_FD, LOOP_SET_CAPACITY, LOOP_CONFIGURE, LOOP_CTL_GET_FREE = 0x4C01, 0x4C07, 0x4C0A, 0x4C82
AUTOCLEAR, DIRECT_IO = 4, 16
# struct loop_config: fd, block size, then loop_info64 of which only lo_flags is set, then reserved words.
CONFIG: Final = struct.Struct("=II5Q3II64s64s32s2Q8Q")
DIRECTORY = Path("/dev/shm") if os.path.isdir("/dev/shm") else None


class Loop:
    """`path` is the device; OSError where there are none (not root, no loop driver)."""

    def __init__(self, file: Path, size_bytes: int, sector_bytes: int) -> None:
        self.file = file
        self._backing = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        self._held = -1
        self.path = ""
        try:
            if size_bytes:
                os.ftruncate(self._backing, size_bytes)
            self._attach(sector_bytes)
        except BaseException:
            os.close(self._backing)
            raise

    def _attach(self, sector_bytes: int) -> None:
        flags = AUTOCLEAR | DIRECT_IO
        config = CONFIG.pack(self._backing, sector_bytes, *[0] * 5, 0, 0, 0, flags, b"", b"", b"", *[0] * 10)
        control = os.open("/dev/loop-control", os.O_RDWR)
        try:
            for attempt in range(20):  # somebody else may take the free one first
                self.path = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
                self._held = os.open(self.path, os.O_RDWR)
                try:
                    fcntl.ioctl(self._held, LOOP_CONFIGURE, config)
                    return
                except OSError:
                    os.close(self._held)
                    if attempt == 19:
                        raise
        finally:
            os.close(control)

    def resize(self, size_bytes: int) -> None:
        os.ftruncate(self._backing, size_bytes)
        fcntl.ioctl(self._held, LOOP_SET_CAPACITY)

    def allocated(self) -> int:
        """Bytes that the file takes."""
        return os.fstat(self._backing).st_blocks * 512

    def detach(self) -> None:
        """The file stays. Once nobody else has the device open it is gone."""
        for fd in (self._held, self._backing):
            if fd >= 0:
                os.close(fd)
        self._held = self._backing = -1

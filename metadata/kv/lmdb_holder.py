"""Who holds the writer lock of an LMDB store, and how a holder that stopped is got rid of.

LMDB has one writer at a time over all processes. A holder that is killed hands the lock over (the mutex is
robust); one that is merely stopped would block everybody. So the holder writes its name - pid, start time,
boot id - beside the data, and a peer that has waited too long kills exactly that process, through a pidfd.
docs/metadata.md, Store.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from pathlib import Path
from typing import Final, NamedTuple

_RECORD: Final = struct.Struct("<QQQ16s")  # pid, start time (clock ticks since boot), hold count, boot id
_PAGE: Final = 4096


class Holder(NamedTuple):
    """Who holds the lock; pid 0: nobody. `hold` differs from one hold to the next."""

    pid: int
    start_ticks: int
    hold: int
    boot: bytes


def boot_id() -> bytes:
    """16 bytes that differ at every boot of this host."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


class HolderFile:
    """The record, shared through a page of a file. `take` only under the writer lock."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < _PAGE:
                os.ftruncate(descriptor, _PAGE)
            self._map = mmap.mmap(descriptor, _PAGE)
        finally:
            os.close(descriptor)
        self._boot = boot_id()
        self._start = start_ticks(os.getpid()) or 0
        self._pid = os.getpid()

    def take(self) -> int:
        """Notes that this process holds the lock now; returns the number of the hold."""
        hold = self.read().hold + 1
        _RECORD.pack_into(self._map, 0, self._pid, self._start, hold, self._boot)
        return hold

    def drop(self, hold: int) -> None:
        """Notes that hold number `hold` is over, unless the next holder has signed already. Called after the
        lock is handed on, so that the flush inside it is covered; should the next one sign between look and
        write, its record is lost for one hold, and nobody could be killed for that hold."""
        if self.read().hold == hold:
            _RECORD.pack_into(self._map, 0, 0, 0, hold, self._boot)

    def read(self) -> Holder:
        return Holder(*_RECORD.unpack_from(self._map, 0))

    def close(self) -> None:
        self._map.close()

    def kill(self, seen: Holder) -> bool:
        """Kills the holder `seen` if it still is the one that holds; says whether it did.

        Never this process, never one of another boot, never a later process under the same pid."""
        if seen.pid in (0, self._pid) or seen.boot != self._boot:
            return False
        try:
            descriptor = os.pidfd_open(seen.pid)
        except ProcessLookupError:
            return False
        try:
            # The pidfd pins the process: what matches now can't be another one when the signal arrives.
            if start_ticks(seen.pid) != seen.start_ticks or self.read() != seen:
                return False
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
        return True

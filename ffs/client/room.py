"""How far an open file may be written where a quota counts it: what is known here, and when to ask.

The service tells with an open, and with what writers ask anyway, up to which end room is reserved; a write
beyond asks first (Reserve), so that it is refused before any of it is stored. What is made of its words is
decided by pure functions; `WriterRoom` asks. docs/client.md, Quotas.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ffs.proto.quota import NO_QUOTA, Reserve, Reserved

if TYPE_CHECKING:
    from ffs.client.session import Session


@dataclass(frozen=True, slots=True)
class Room:
    """`reserved`: bytes from the file's beginning, under this truncate epoch; NO_QUOTA: nothing counts it."""

    epoch: int = 0
    reserved: int = NO_QUOTA


NO_ROOM_KNOWN: Final = Room()


def heard(room: Room, epoch: int, reserved: int) -> Room:
    """After a reply that says `reserved` under `epoch`.

    Replies overtake each other: of one epoch the largest counts, one of an earlier epoch says nothing. A
    quota may have been set or taken away since.
    """
    if epoch < room.epoch:
        return room
    if epoch == room.epoch and room.reserved != NO_QUOTA and reserved != NO_QUOTA:
        return Room(epoch, max(room.reserved, reserved))
    return Room(epoch, reserved)


def moved(room: Room, epoch: int) -> Room:
    """After the file was found to have another epoch, with no word about room: a truncation gave back what
    was reserved beyond its length."""
    if epoch == room.epoch:
        return room
    return Room(epoch, NO_QUOTA if room.reserved == NO_QUOTA else 0)


def lacks(room: Room, epoch: int, end: int) -> bool:
    """Whether a write up to byte `end` under `epoch` must ask first. Where nothing counts the file, never:
    a quota that is set meanwhile is heard of at the next flush."""
    if room.reserved == NO_QUOTA:
        return False
    return room.epoch != epoch or end > room.reserved


class WriterRoom:
    """What is reserved for one open file. Thread-safe; threads ask one after another."""

    def __init__(self) -> None:
        self._room = NO_ROOM_KNOWN
        self._lock = threading.Lock()

    def begin(self, epoch: int, reserved: int) -> None:
        """The file was opened (again): what an earlier open reserved isn't its."""
        with self._lock:
            self._room = Room(epoch, reserved)

    def hear(self, epoch: int, reserved: int) -> None:
        """A reply told."""
        with self._lock:
            self._room = heard(self._room, epoch, reserved)

    def move(self, epoch: int) -> None:
        """The file has this epoch now."""
        with self._lock:
            self._room = moved(self._room, epoch)

    def lacks(self, epoch: int, end: int) -> bool:
        """Whether a write up to byte `end` under `epoch` must ask first."""
        return lacks(self._room, epoch, end)

    def ask(self, session: Session, ino: int, handle: int, epoch: int, end: int) -> bool:
        """Ask for room. False: the file has another epoch, which is to be learnt first. Blocking; raises
        QuotaExceeded, and as Session.call."""
        with self._lock:
            if not lacks(self._room, epoch, end):
                return True  # another thread has asked
            reply = session.call(Reserve(ino=ino, handle=handle, epoch=epoch, end=end), Reserved)
            if reply.epoch != epoch:
                return False
            self._room = heard(self._room, epoch, reply.reserved)
            return True

    def after_fork_in_child(self) -> None:
        """What the parent has reserved is the parent's: the child asks, and opens the file again by that. The
        lock may be held by a thread that doesn't exist here."""
        self._lock = threading.Lock()
        self._room = Room(-1, 0)

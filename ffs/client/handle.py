"""An open file below the io layers: positional reads and writes, lengths, epochs. docs/client.md, Files.

It keeps what an open gave (layout, capability, write session) and makes it anew where that can't
be used any more: in a child of fork, and, for files open for reading, under a new session. A file
that was truncated elsewhere (StaleEpoch) is looked at again and the request repeated.

Thread-safe: reads and writes go on in parallel; only the lengths are under a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from ffs.client.core import Core
from ffs.client.room import WriterRoom
from ffs.client.session import Session
from ffs.client.turns import MOST_TURNS, Turns
from ffs.errors import (
    BadHandle,
    CapabilityExpired,
    DeadlineExceeded,
    Fenced,
    FfsError,
    NoSpace,
    OutcomeUnknown,
    Overloaded,
    StaleEpoch,
)
from ffs.layout import Layout, Placement
from ffs.proto import meta
from ffs.proto.common import RIGHT_READ, RIGHT_WRITE

if TYPE_CHECKING:
    from ffs.client.ahead import Ahead
    from ffs.client.transfer import Extent

R = TypeVar("R")
Bytes = NDArray[np.uint8]

_MEANING: dict[type[FfsError], str] = {
    OutcomeUnknown: "a storage server didn't answer in time; the write may have been carried out",
    DeadlineExceeded: "a storage server didn't answer in time",
}


def _cut_between(before: int, after: int) -> bool:
    """Whether the file may have been cut between these epochs. A truncation raises it by two; by one it goes
    up when a writer that is gone is settled (docs/metadata.md, Sessions): nothing is cut then."""
    return after - before not in (0, 1)


class OpenFile:
    """One open of one file. `core` gives the core of the calling process."""

    def __init__(self, core: Callable[[], Core], path: str, flags: int) -> None:
        self._core = core
        self.path = path
        self.flags = flags
        self.writing = bool(flags & meta.OPEN_WRITE)
        self.ino = 0
        self.ticket = b""
        """What requests by inode id carry (docs/metadata.md, Tickets)."""
        self.epoch = 0
        self.length = 0
        """As far as is known here: at open, at the last look, and what was written here."""
        self.layout: Layout | None = None
        self._lock = threading.Lock()
        self._room = WriterRoom()
        self._session: Session | None = None
        self._session_core: Core | None = None
        self._handle = 0
        self._unreported_end = 0
        self._doubtful = False
        self._writes_under_way: list[None] = []  # one each, in any thread
        self._closed = False
        self._grant: tuple[bytes, int] = (b"", 0)
        self._native_id = 0
        self._placement: Placement | None = None
        self._extent: Extent | None = None  # the last

    # --- opening ----------------------------------------------------------------------------

    def open(self, request: meta.Open) -> meta.Opened:
        """Send the open and take what it gives. Blocking; raises as Caller.call."""
        core = self._core()
        if not request.flags & meta.OPEN_TRUNC:
            return self._open_in(core, request)
        ino = None  # any, as long as nobody answers
        try:
            opened = self._open_in(core, request)
            ino = opened.ino
            return opened
        finally:
            core.changed(ino)

    def _open_in(self, core: Core, request: meta.Open) -> meta.Opened:
        for _ in range(3):
            try:
                return self._open_under(core, core.session(), request)
            except Fenced:
                continue
        return self._open_under(core, core.session(), request)

    def _open_under(self, core: Core, session: Session, request: meta.Open) -> meta.Opened:
        if request.flags & ~meta.OPEN_NOFOLLOW == meta.OPEN_READ:
            request.client = session.client_id
            opened = core.ask(request, meta.Opened)
        else:
            opened = session.call(request, meta.Opened)
        self.adopt(core, session, opened)
        return opened

    def adopt(self, core: Core, session: Session, opened: meta.Opened) -> None:
        """Take what an open under `session` gave."""
        self._session_core = core
        self._session = session
        self.ino = opened.ino
        self.ticket = opened.ticket
        self._handle = opened.handle
        self.epoch = opened.attributes.epoch
        self.layout = opened.attributes.layout
        self.length = opened.attributes.length
        self._grant = (opened.capability, opened.capability_expiry_ms)
        self._room.begin(self.epoch, opened.reserved)
        self._native_id = 0

    def _live(self) -> Session:
        """The session under which this file is open in this process, opening it again if need be."""
        core = self._core()
        session = self._session
        if session is not None and self._session_core is core and not session.over:
            return session
        with self._lock:
            return self._open_again(core)

    def _open_again(self, core: Core) -> Session:
        if self._session_core is core and self.writing:
            raise Fenced(
                "the client session in which this file was opened for writing is over;"
                " what was written since the last flush may lack its length. Open it again",
                self.path,
            )
        again = self.flags & (meta.OPEN_READ | meta.OPEN_WRITE | meta.OPEN_APPEND)
        end = self._unreported_end if self._session_core is core else 0
        opened = self.open(meta.Open(ino=self.ino, flags=again, ticket=self.ticket))
        self._unreported_end = end
        self.length = max(opened.attributes.length, end)
        if self._session is None:
            raise Fenced("the client session is over", self.path)
        return self._session

    # --- what rings need --------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Which chain has which chunk. May fetch routing."""
        placement = self._placement
        if placement is None:
            if self.layout is None:
                raise FfsError("the metadata service gave no layout for this file", self.path)
            placement = self._placement = self._core().routing.placement(self.layout)
        return placement

    @property
    def capability(self) -> int:
        """The native id of the capability under which this file is used in this process."""
        return self._capability(self._live())

    def _capability(self, session: Session) -> int:
        native_id = self._native_id
        if native_id == 0:
            with self._lock:
                if self._closed:
                    raise self._closed_meanwhile()
                if self._native_id == 0:
                    rights = RIGHT_READ if self.flags & meta.OPEN_READ else 0
                    rights |= RIGHT_WRITE if self.writing else 0
                    self._native_id = session.add_capability(
                        self.ino, self._handle, rights, *self._grant, self.ticket
                    )
                native_id = self._native_id
        return native_id

    def live_session(self) -> Session:
        """The session under which this file is open here. May block: it is opened again if need be."""
        return self._live()

    def extent(self, session: Session) -> Extent:
        """What a transfer of this file names. May block, as `placement`."""
        from ffs.client.transfer import extent_of

        placement, capability, epoch = self.placement, self._capability(session), self.epoch
        known = self._extent
        if known is None or (known.capability, known.epoch) != (capability, epoch) or known.ino != self.ino:
            known = self._extent = extent_of(self.ino, placement, capability, epoch)
        return known

    def extent_to_write(self, session: Session, end: int) -> Extent:
        """`extent`, for a write up to byte `end`: with room for it, where a quota counts. May block."""
        return self._with_room(session, end)

    # --- data -------------------------------------------------------------------------------

    def read_at(self, offset: int, out: Bytes) -> int:
        """Fill `out` from `offset`; returns the bytes read: fewer at the end of the file, 0 beyond it.

        The end is asked of the service before 0 is returned; where none answers, the known end stands.
        Blocking.
        """
        from ffs.client import transfer

        turns = Turns(self.path, "read")
        while True:
            if offset >= self.length:
                self.look_beyond()
            size = min(len(out), self.length - offset)
            if size <= 0:
                return 0
            session = self._live()
            extent = self.extent(session)
            try:
                transfer.read(session.rings, session, extent, offset, out[:size])
                return size
            except FfsError as error:
                moved = self._mend(error, session, extent)
            turns.again(moved)

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write all of `data` at `offset`; durable on every replica when it returns. Blocking."""
        self._begin_write()
        try:
            self._write_in_turns(offset, data)
        finally:
            self._writes_under_way.pop()

    def _begin_write(self) -> None:
        """What is noted here and still under way at the file's close may leave chunks that nobody reports."""
        with self._lock:
            if self._closed:
                raise ValueError("I/O operation on closed file")
            self._writes_under_way.append(None)

    def _write_in_turns(self, offset: int, data: Bytes) -> None:
        from ffs.client import transfer

        turns = Turns(self.path, "written")
        while True:
            session = self._live()
            extent = self._with_room(session, offset + len(data))
            try:
                transfer.write(session.rings, session, extent, offset, data)
            except FfsError as error:
                self.note_failed()
                moved = self._mend(error, session, extent)
            except BaseException:
                self.note_failed()
                raise
            else:
                self.note_written(offset + len(data), extent.epoch)
                return
            turns.again(moved)

    # --- holes ------------------------------------------------------------------------------

    def find_data(self, offset: int) -> int | None:
        """The first byte at or after `offset` that a chunk holds; None: none up to the end. Blocking."""
        from ffs.client import sparse

        return self._on_chunks(
            lambda session, extent: sparse.find_data(session.rings, session, extent, offset, self.length)
        )

    def find_hole(self, offset: int) -> int:
        """The first byte at or after `offset` that no chunk holds, or the file's end. Blocking."""
        from ffs.client import sparse

        return self._on_chunks(
            lambda session, extent: sparse.find_hole(session.rings, session, extent, offset, self.length)
        )

    def held_bytes(self) -> int:
        """The bytes up to the end that chunks hold. Blocking."""
        from ffs.client import sparse

        return self._on_chunks(
            lambda session, extent: sparse.held_bytes(session.rings, session, extent, self.length)
        )

    def punch(self, offset: int, length: int) -> None:
        """Take [offset, offset + length) away: it reads as zeros. The length stays. Blocking."""
        from ffs.client import sparse

        # Should this writer die, its length is found by the last chunk, which may go now.
        self.report()
        self._on_chunks(
            lambda session, extent: sparse.punch(session.rings, session, extent, offset, length), changes=True
        )
        self.changed()

    def allocate(self, offset: int, length: int) -> None:
        """Zeros where nothing is, up to offset + length at least, which is published. Blocking."""
        from ffs.client import sparse

        self.ensure_room(offset + length)

        def work(session: Session, extent: Extent) -> None:
            extent = self._with_room(session, offset + length)
            # Judged first: what was made up to a failure would take the room of others, and stay.
            room = self._core().ask(meta.StatFs(ino=self.ino, ticket=self.ticket), meta.StatFsReply)
            wanted = length if length > room.total_bytes else 0
            wanted = wanted or sparse.lacking_bytes(session.rings, session, extent, offset, length)
            if wanted > room.free_bytes:
                raise NoSpace(
                    f"{wanted} bytes are to be allocated, {room.free_bytes} are free (ffs df)", self.path
                )
            sparse.allocate(session.rings, session, extent, offset, length)
            self.note_written(offset + length, extent.epoch)

        self._begin_write()
        try:
            self._on_chunks(work, changes=True)
        finally:
            self._writes_under_way.pop()
        self.report()

    def _on_chunks(self, work: Callable[[Session, Extent], R], *, changes: bool = False) -> R:
        turns = Turns(self.path, "punched" if changes else "looked at")
        while True:
            session = self._live()
            extent = self.extent(session)
            try:
                return work(session, extent)
            except FfsError as error:
                self._doubtful |= changes
                moved = self._mend(error, session, extent)
            except BaseException:
                self._doubtful |= changes
                raise
            turns.again(moved)

    # --- room -------------------------------------------------------------------------------

    def has_room(self, end: int) -> bool:
        """Whether a write up to byte `end` needn't ask the service."""
        return not self._room.lacks(self.epoch, end)

    def ensure_room(self, end: int) -> None:
        """Have room for a write up to byte `end`, where a quota counts the file. QuotaExceeded: there isn't
        so much, and nothing was reserved. Blocking if some must be asked for."""
        if not self.has_room(end):
            self._with_room(self._live(), end)

    def _with_room(self, session: Session, end: int) -> Extent:
        """What a write up to byte `end` needs, its room being reserved under the same epoch."""
        for _ in range(MOST_TURNS):
            extent = self.extent(session)
            if not self._room.lacks(extent.epoch, end):
                return extent
            try:
                if not self._room.ask(session, self.ino, self._handle, extent.epoch, end):
                    self._take_epoch(session)
            except BadHandle as error:
                if self._closed:
                    raise self._closed_meanwhile() from error
                raise Fenced(f"{error.message}; the service has closed this file", self.path) from error
            except FfsError as error:
                self._raise_named(error)
        raise Overloaded("the file is truncated faster than room can be reserved for it", self.path)

    # --- who reads ahead --------------------------------------------------------------------

    def note_reader(self, ahead: Ahead) -> None:
        """It holds data of this file, and is told of changes by this client."""
        self._core().readers[id(ahead)] = ahead

    def forget_reader(self, ahead: Ahead) -> None:
        """It holds none any more."""
        core = self._core_or_none()
        if core is not None:
            core.readers.pop(id(ahead), None)

    def changed(self) -> None:
        """The content was changed, or may have been: what this process has read ahead of it is old."""
        self._core().changed(self.ino)

    # --- lengths and epochs -----------------------------------------------------------------

    def note_written(self, end: int, epoch: int) -> None:
        """Data up to byte `end` was written under `epoch`: to be reported at the next flush."""
        with self._lock:
            if not _cut_between(epoch, self.epoch):
                self._unreported_end = max(self._unreported_end, end)
                self.length = max(self.length, end)
        self.changed()

    def note_failed(self) -> None:
        """A write failed or was given up: chunks beyond the reported length may hold some of it."""
        self._doubtful = True
        self.changed()

    def cut_since(self, epoch: int) -> bool:
        """Whether the file may have been cut since it had this epoch, as far as is known here."""
        return _cut_between(epoch, self.epoch)

    def reserve(self, length: int) -> int:
        """Reserve `length` bytes at the end for one append; returns their offset. Blocking."""
        session = self._live()
        reply = session.call(meta.Append(ino=self.ino, handle=self._handle, length=length), meta.AppendReply)
        if reply.epoch != self.epoch:
            self._take_epoch(session)
        self._room.hear(reply.epoch, reply.reserved)
        return reply.offset

    def _mend(self, error: FfsError, session: Session, extent: Extent) -> bool:
        """Put right what made a transfer fail, or raise the error with the file's name. False: the service
        knows of nothing that has changed."""
        if self._closed:
            raise self._closed_meanwhile() from error
        if isinstance(error, StaleEpoch):
            self._take_epoch(session)
        elif isinstance(error, CapabilityExpired):
            self._renew(session)
        elif isinstance(error, Fenced):
            session.over = True
        else:
            self._raise_named(error)
        return not isinstance(error, StaleEpoch) or self.epoch != extent.epoch

    def _take_epoch(self, session: Session) -> None:
        """The file was truncated elsewhere, or another writer of it is gone: learn its epoch and length. What
        was written before a truncation and isn't reported has been cut, or lies below the new length."""
        epoch = self._renew(session)
        self._room.move(epoch)  # first: no write under the new epoch counts on room of the old one
        with self._lock:
            if _cut_between(self.epoch, epoch):
                self._unreported_end = 0
            self.epoch = epoch
        self.look()

    def _named(self, error: FfsError) -> FfsError:
        """The error of a transfer as the user sees it: what it means, and the file's name."""
        if error.filename is not None:
            return error
        meaning = _MEANING.get(type(error))
        message = error.message if meaning is None else f"{meaning} ({error.message})"
        return type(error)(message, self.path, errno=error.errno)

    def _raise_named(self, error: FfsError) -> NoReturn:
        """Raise it as the user sees it, where it is handled. Its context is the one of `error`: an exception
        in the user's `with` block, say, on whose way out the file is closed."""
        named = self._named(error)
        try:
            raise named
        finally:
            if named is not error:
                named.__context__ = error.__context__
            del named, error  # its traceback refers to this frame: the user's buffer would stay with both

    def _closed_meanwhile(self) -> BadHandle:
        return BadHandle("another thread closed the file meanwhile", self.path)

    def _renew(self, session: Session) -> int:
        """Renew the capability at the service; returns the epoch to write under."""
        try:
            return session.renew_capability(self._capability(session))
        except BadHandle as error:
            raise Fenced(f"{error.message}; the service has closed this file", self.path) from error
        except Fenced as error:
            session.over = True
            self._raise_named(error)

    # --- lengths ----------------------------------------------------------------------------

    def look(self) -> meta.Attributes:
        """Ask for the attributes and take the length. Blocking."""
        return self._take_attributes(
            self._core().ask(meta.Stat(ino=self.ino, ticket=self.ticket), meta.StatReply)
        )

    def look_beyond(self) -> None:
        """A reader is at the end, which may lie further out by now. Without metadata services the known one
        stands."""
        reply = self._core().ask_if_there(meta.Stat(ino=self.ino, ticket=self.ticket), meta.StatReply)
        if reply is not None:
            self._take_attributes(reply)

    def _take_attributes(self, reply: meta.StatReply) -> meta.Attributes:
        with self._lock:
            self.length = max(reply.attributes.length, self._unreported_end)
        return reply.attributes

    def report(self) -> None:
        """Publish the length of what was written. On return, who opens the file sees it. Blocking."""
        for _ in range(MOST_TURNS):
            end = self._unreported_end
            if end == 0 or not self.writing:
                return
            session = self._live()
            request = meta.Fsync(
                ino=self.ino, handle=self._handle, epoch=self.epoch, length=end, doubtful=self._doubtful
            )
            reply = session.call(request, meta.LengthReply)
            if not reply.merged:
                self._take_epoch(session)
                continue  # what still counts
            with self._lock:
                if self._unreported_end == end:
                    self._unreported_end = 0
                self.length = max(reply.length, self._unreported_end)
            self._room.hear(reply.epoch, reply.reserved)
            return
        raise Overloaded("the file is truncated faster than its length can be reported", self.path)

    def truncate(self, length: int) -> None:
        """Set the length; what lies beyond is gone, what is added reads as zeros. Blocking."""
        session = self._live()
        request = meta.Truncate(ino=self.ino, handle=self._handle, length=length, ticket=self.ticket)
        reply = session.call(request, meta.TruncateReply)
        self._room.hear(reply.epoch, reply.reserved)
        with self._lock:
            self.epoch = reply.epoch
            self.length = reply.length
            self._unreported_end = 0
            if reply.capability:
                self._grant = (reply.capability, reply.capability_expiry_ms)
        if reply.capability and self._native_id:
            session.replace_capability(self._native_id, reply.capability, reply.capability_expiry_ms)
        self.changed()

    # --- ending -----------------------------------------------------------------------------

    def publish(self, target: bytes, *, replace: bool) -> None:
        """Give an unnamed file (OPEN_TMPFILE) its name, in one transaction. Blocking."""
        self.report()
        request = meta.Link(
            ino=self.ino, handle=self._handle, target=target, replace=replace, ticket=self.ticket
        )
        self._live().call(request, meta.StatReply)

    def close(self) -> None:
        """End the write session, if any, publishing the length. Blocking then."""
        ending = self.begin_close()
        if ending is None:
            return
        session, entry = ending
        try:
            if entry.handle:
                self._end(session, entry)
        finally:
            self.drop_capability(session)

    def begin_close(self) -> tuple[Session, meta.CloseEntry] | None:
        """What closes it, by `close` or with others (closing.py); its handle is 0 where the service needn't
        be told. None: nothing is open in this process. No request can be made any more."""
        session, core = self._session, self._session_core
        with self._lock:
            self._closed = True
            self._doubtful |= bool(self._writes_under_way)
        handle, self._handle = self._handle, 0
        if session is None or core is not self._core_or_none():
            return None  # opened in the parent of this process, which closes it
        end = self._unreported_end
        return session, meta.CloseEntry(self.ino, handle, self.epoch, end, end > 0, self._doubtful)

    def drop_capability(self, session: Session) -> None:
        """After `begin_close`, when the service was told."""
        if self._native_id:
            session.drop_capability(self._native_id)
            self._native_id = 0

    def _end(self, session: Session, entry: meta.CloseEntry) -> None:
        request = meta.Close(
            ino=entry.ino,
            handle=entry.handle,
            epoch=entry.epoch,
            length=entry.length,
            written=entry.written,
            doubtful=entry.doubtful,
        )
        try:
            session.call(request, meta.LengthReply)
        except Fenced as error:
            if entry.written:
                raise self.fenced_at_close() from error

    def fenced_at_close(self) -> Fenced:
        """For one to which something was written that wasn't published."""
        return Fenced(
            "the client session was over before this file was closed: its chunks tell its length", self.path
        )

    def after_fork_in_child(self) -> None:
        """The locks may be held by threads that don't exist here."""
        self._lock = threading.Lock()
        self._writes_under_way.clear()
        self._room.after_fork_in_child()

    def _core_or_none(self) -> Core | None:
        try:
            return self._core()
        except FfsError:
            return None

"""Ior: a submission and completion ring over files, in the manner of io_uring. docs/ring.md, Ior.

    iov = ffs.Iov(64 << 20)
    with ffs.open("/data/x", "rb") as file, ffs.Ior(client, entries=256, kind="read") as ior:
        ior.prepare(file, offset=0, data=iov[0 : 1 << 20], userdata=7)
        for done in ior.wait(1):
            ...

Data moves between the servers' devices and the Iov; Python sees only numbers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ffs._native.entries import NO_END, FileRing, Requests
from ffs._native.iov import Iov, IovSlice
from ffs._native.ring import (
    OP_READ,
    OP_WRITE,
    SQE_ZERO_FILL,
    WAIT_NEEDS_CAPABILITY,
    WAIT_NEEDS_ROUTING,
    RingStats,
)
from ffs.client.ior_cut import Cutter, Ints, cut
from ffs.client.ior_table import Table
from ffs.client.transfer import error_of_completion
from ffs.errors import FfsError, InvalidArgument, NotFound, RingFull
from ffs.layout import MAX_FILE_BYTES

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

__all__ = ["Completion", "Ior"]

_NO_INTS: Final = np.zeros(0, dtype=np.int64)
_INT64: Final = np.dtype(np.int64)


class Completion(NamedTuple):
    """A finished request: bytes moved (fewer than asked only at the file's end), or its error."""

    userdata: int
    result: int
    error: FfsError | None


class Ior:
    """Reads or writes of files, many in flight.

    entries: how many pieces (a request's chunks) may be prepared or in flight, a power of two up to 65536.
    kind: "read" or "write". depth: 0 - requests go out at submit and wait; n - also by themselves whenever
    n are prepared. priority: 0, the most urgent, to 255: who comes first where a server's buffers are all in
    use. inflight: so many pieces are at servers at a time (0: all); the others wait in the ring and go out
    as those are answered, before the caller sees them (docs/ring.md, In flight). One thread at a time. In a
    child of fork: make a fresh one. Every write that is reported done is durable on all replicas; its
    length is published by the file's flush or close.
    """

    def __init__(
        self,
        client: Client,
        entries: int,
        kind: str = "read",
        depth: int = 0,
        priority: int = 0,
        inflight: int = 0,
    ) -> None:
        if kind not in ("read", "write"):
            raise InvalidArgument(f'kind {kind!r}: give "read" or "write"')
        if entries < 1 or entries > 65536 or entries & (entries - 1):
            raise InvalidArgument(f"entries {entries}: give a power of two up to 65536")
        if depth < 0 or depth > entries:
            raise InvalidArgument(f"depth {depth}: give 0 to {entries}, the ring's entries")
        if not 0 <= priority <= 255:
            raise InvalidArgument(f"priority {priority}: give 0 (the most urgent) to 255")
        if not 0 <= inflight <= entries:
            raise InvalidArgument(
                f"inflight {inflight}: give 1 to {entries}, the ring's entries, or 0 for all"
            )
        self.client = client
        self.kind = kind
        self.priority = priority
        self.entries = entries
        self.depth = depth
        self.inflight = inflight
        self._op, self._flags = (OP_READ, SQE_ZERO_FILL) if kind == "read" else (OP_WRITE, 0)
        self._table = Table(entries, writes=kind == "write")
        self._ring = FileRing(client.native, self._table.flights, inflight)
        self._cutter = Cutter(self._op, self._flags, priority)
        self._kept = self._ring.kept
        self._news = self._table.flights.raw
        self._prepared = 0
        self._empty: list[int] = []  # userdata of reads at or beyond the end: done at once

    # --- preparing --------------------------------------------------------------------------

    def prepare(self, file: File, offset: int, data: IovSlice | Iov, userdata: int = 0) -> None:
        """One request: len(data) bytes of `file` from `offset`. RingFull: submit and wait first.

        A read is cut at the length that the file is known to have. InvalidArgument names what is wrong;
        nothing was taken then. `data` belongs to the request until it completes."""
        part = part_of(data)
        if self._take_one(_raw(file), offset, part, userdata):
            return
        taken = self.prepare_many(file, [offset], part.iov, [part.offset], [part.length], [userdata])
        if taken == 0:
            raise RingFull(f"the ring holds its {self.entries} pieces: submit and wait, then go on")

    def prepare_many(
        self,
        files: File | Sequence[File],
        offsets: ArrayLike,
        iov: Iov,
        iov_offsets: ArrayLike,
        lengths: ArrayLike,
        userdata: ArrayLike | None = None,
    ) -> int:
        """Many requests by arrays of one length: request i moves lengths[i] bytes between files[i] (or the
        one file) at offsets[i] and the Iov at iov_offsets[i]. userdata: default 0, 1, 2...

        Returns how many were taken, from the first on; fewer: the ring is full. InvalidArgument names the
        first request that can't be; none was taken then. Writes of a file in a quota ask the service for room
        now and then (File.ensure_room does so beforehand): QuotaExceeded if there is none; none was taken."""
        at = _whole_numbers(offsets, "offsets")
        to = _whole_numbers(iov_offsets, "iov_offsets")
        size = _whole_numbers(lengths, "lengths")
        if not isinstance(iov, Iov):
            raise _no_memory(iov)
        user = np.arange(len(at)) if userdata is None else _whole_numbers(userdata, "userdata")
        if not len(at) == len(to) == len(size) == len(user):
            raise InvalidArgument(
                f"{len(at)} offsets, {len(to)} iov_offsets, {len(size)} lengths, {len(user)} userdata: "
                "give as many of each"
            )
        if not isinstance(files, Sequence):
            which = _NO_INTS
            files = [_raw(files)]
        else:
            if len(files) != len(at):
                raise InvalidArgument(f"{len(files)} files for {len(at)} offsets: give one, or as many")
            files, which = _distinct(files)
        if len(at) == 0:
            return 0
        requests = Requests(at, to, size)
        taken = None
        if self.kind == "write":
            self._check(files, at, to, size, requests, len(iov))
            for number, end in enumerate(furthest(at + size, which, len(files))):
                files[number].ensure_room(end)
        if len(files) == 1 and self._may(files[0]):
            taken = self._take_inside(files[0], requests, iov, user)
        if taken is None:
            self._check(files, at, to, size, requests, len(iov))
            if self.kind == "read":
                known = np.array([file.size for file in files], dtype=np.int64)
                size = np.minimum(size, np.maximum((known[which] if len(files) > 1 else known) - at, 0))
            taken = self._take(files, which, at, iov, to, size, user)
        if self.depth and self._prepared >= self.depth:
            self.submit()
        return taken

    def _may(self, file: File) -> bool:
        return file.readable() if self.kind == "read" else file.writable()

    def _take_one(self, file: File, offset: int, part: IovSlice, userdata: int) -> bool:
        """One request inside one chunk, without arrays. False: it isn't that plain, or the ring is full, or
        it can't be, which prepare_many says; nothing was taken."""
        if type(offset) is not int or type(userdata) is not int:
            return False
        if not (0 <= offset < MAX_FILE_BYTES and 0 <= userdata < MAX_FILE_BYTES) or not self._may(file):
            return False
        size, iov = part.length, part.iov
        if self.kind == "write":
            file.ensure_room(offset + size)
        entries = self._cutter.entries(file)  # before the owner, whose epoch is then no older
        owner = self._table.owner(file, iov)
        taken = None
        try:
            taken = self._ring.prepare_one_inside(
                entries,
                self._known(file),
                iov.handle,
                len(iov),
                offset,
                part.offset,
                size,
                userdata,
                owner,
            )
        finally:
            if not taken:
                self._table.drop(owner)
        if not taken:
            return False
        self._prepared += 1
        if self.depth and self._prepared >= self.depth:
            self.submit()
        return True

    def _known(self, file: File) -> int:
        """Where requests of the file are cut."""
        return file.size if self.kind == "read" else NO_END

    def _check(
        self, files: Sequence[File], at: Ints, to: Ints, size: Ints, requests: Requests, room: int
    ) -> None:
        for file in files:
            if not (file.readable() if self.kind == "read" else file.writable()):
                raise InvalidArgument(f"{file.name!r} isn't open for a ring of kind {self.kind!r}", file.name)
        i = requests.first_bad(room)
        if i is not None:
            raise InvalidArgument(
                f"request {i}: {size[i]} bytes at {at[i]} of the file and at {to[i]} of an Iov of {room} "
                "bytes; give at least one byte, inside the Iov"
            )

    def _take_inside(self, file: File, requests: Requests, iov: Iov, user: Ints) -> int | None:
        """Requests of one file that each lie in one chunk: the short way. None: they don't, or can't be."""
        entries = self._cutter.entries(file)
        owner = self._table.owner(file, iov)
        taken = None
        try:
            taken = self._ring.prepare_inside(
                entries,
                self._known(file),
                iov.handle,
                len(iov),
                requests,
                user,
                owner,
            )
        finally:
            if not taken:
                self._table.drop(owner)
        if taken is not None:
            self._prepared += taken
        return taken

    def _take(
        self, files: list[File], which: Ints, at: Ints, iov: Iov, to: Ints, size: Ints, user: Ints
    ) -> int:
        if len(which) == 0:
            which = np.zeros(len(at), dtype=np.int64)
        sqes, first, counts = cut(files, which, self._op, self._flags, at, iov.handle, to, size)
        if counts.max() > self.entries:
            i = int(np.argmax(counts))
            raise InvalidArgument(
                f"request {i} spans {counts[i]} chunks, the ring has {self.entries} entries: "
                "give it more, or cut the request"
            )
        # Reads of nothing are done at once; they need no number.
        real = np.flatnonzero(counts > 0)
        numbers = self._table.offer(len(real))
        if len(numbers) < len(real):  # the rest surely finds the ring full
            sqes = sqes[: first[real[len(numbers)]]]
            real = real[: len(numbers)]
        sqes["userdata"][first[real]] = numbers
        if self.priority:
            sqes["priority"] = self.priority
        owners = self._table.owners(files, which[real], iov)
        self._table.note(numbers, user[real], (at + size)[real], owners)
        taken_sqes = 0
        try:
            taken_sqes = self._ring.prepare_noted(sqes)
        finally:
            if taken_sqes < len(sqes):
                for owner in np.unique(owners).tolist():
                    self._table.drop(owner)
        taken = int(np.searchsorted(first + counts, taken_sqes, side="right"))
        if len(numbers) < int((counts > 0).sum()):
            taken = min(taken, int(np.flatnonzero(counts > 0)[len(numbers)]))
        real = real[real < taken]
        self._empty += [int(u) for u in user[:taken][counts[:taken] == 0]]
        self._prepared += len(real)
        return taken

    # --- submitting, waiting ----------------------------------------------------------------

    def submit(self) -> int:
        """Sends what is prepared; the number of pieces. Never waits for a server."""
        self._prepared = 0
        return self._ring.submit()

    def wait(self, least: int = 1, timeout: float | None = None) -> list[Completion]:
        """Submits, then waits for `least` completions, at most `timeout` seconds (None: no limit).

        In order of completion; fewer than `least` at the timeout, or when no more are on their way. Failures
        are given, not raised. Blocking, without the GIL; refreshes routing and renews capabilities. If a
        signal raises (Ctrl-C), the next wait returns what had come."""
        count = self._wait(least, timeout)
        out = [Completion(user, 0, None) for user in self._empty]
        for place, (user, result) in enumerate(self._ring.rows(count)):
            error = None
            if result < 0:
                error = error_of_completion(self._ring.completions(count)[place], self.client)
            out.append(Completion(user, result, error))
        self._kept.have, self._empty = 0, []
        return out

    def wait_array(self, least: int = 1, timeout: float | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """As wait, for thousands: (userdata, result), result being bytes moved or -errno."""
        users, results = self._ring.columns(self._wait(least, timeout))
        if self._empty:
            users = np.concatenate([np.array(self._empty, dtype=np.uint64), users])
            results = np.concatenate([np.zeros(len(self._empty), dtype=np.int64), results])
        self._kept.have, self._empty = 0, []
        return users, results

    def _wait(self, least: int, timeout: float | None) -> int:
        """How many are complete, besides `_empty`. A signal may raise at the end of any call: they stay in
        the ring's memory until the caller has them, who sets `_kept.have` and `_empty` last."""
        until = None if timeout is None else time.monotonic() + timeout
        self._prepared = 0
        ring = self._ring
        if self._news.news_count:
            self._table.tell()
        if ring.needs:
            self._see_to_needs()
        least = max(0, least - len(self._empty))
        before: int = self._kept.have
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            count = ring.settle(least, left)
            if self._news.news_count:
                self._table.tell()
            idle = count == before  # whatever the table says
            before = count
            if ring.needs:
                idle = False
                self._see_to_needs()
            if (
                count >= least
                or idle
                or not self._table.busy
                or (until is not None and time.monotonic() >= until)
            ):
                return count

    def _see_to_needs(self) -> None:
        needs = self._ring.needs
        if needs & WAIT_NEEDS_CAPABILITY:
            self._renew()
        if needs & WAIT_NEEDS_ROUTING:
            self.client.want_routing()
        self._ring.seen_to()

    def _renew(self) -> None:
        # A refusal shows in the requests: they end with CapabilityExpired at their deadline.
        for file in self._table.files():
            with contextlib.suppress(FfsError):  # a file whose session is over
                self.client.want_renewal(file.capability)

    def cancel(self, userdata: int) -> None:
        """Requests with this userdata complete with Cancelled, or as they would have. NotFound: none."""
        live = self._table.find(userdata)
        if not live:
            raise NotFound(f"no request of this ring has the userdata {userdata}")
        for number in live:
            self._ring.cancel(number)

    def cancel_range(self, first: int, stop: int) -> None:
        """As `cancel`, for every request whose userdata is in [first, stop), if there are any."""
        for number in self._table.find_range(first, stop):
            self._ring.cancel(number)

    def fileno(self) -> int:
        """For poll loops: readable when wait(0) would make progress. The ring's own; don't close it."""
        return self._ring.fileno()

    def stats(self) -> RingStats:
        return self._ring.stats()

    def close(self) -> None:
        """Cancels what is in flight; returns when no server can touch a buffer any more. Idempotent."""
        if self.kind == "write":
            self._table.tell()
            for file in self._table.files():
                file.note_failed()  # writes in flight end here, done or not
        self._ring.close()
        self._table.clear()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "cannot pickle an Ior, which is of its process: make one in the worker; the client and files"
            " that are open for reading can be pickled"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def furthest(ends: Ints, which: Ints, count: int) -> list[int]:
    """Of each of `count` files how far the furthest of its requests reaches. Pure."""
    if count == 1:
        return [int(ends.max())]
    out = np.zeros(count, dtype=np.int64)
    np.maximum.at(out, which, ends)
    return [int(end) for end in out]


def _whole_numbers(values: ArrayLike, what: str) -> Ints:
    if (
        type(values) is np.ndarray
        and values.dtype is _INT64
        and values.ndim == 1
        and values.flags.c_contiguous
    ):
        return values
    out = np.asarray(values)
    if out.ndim != 1 or (out.dtype.kind not in "iu" and out.size):
        raise InvalidArgument(f"{what}: give a one-dimensional array of whole numbers")
    return np.ascontiguousarray(out, dtype=np.int64)


def part_of(data: Any) -> IovSlice:
    """Where one request's data is. TypeError: in no Iov."""
    if isinstance(data, Iov):
        return data[0 : len(data)]
    if not isinstance(data, IovSlice):
        raise _no_memory(data)
    return data


def _no_memory(given: Any) -> TypeError:
    return TypeError(
        f"a ring's data is in an ffs.Iov, not in a {type(given).__name__}: make one with ffs.Iov(size), and"
        " put or take bytes by its buffer() or numpy(). One request takes it or a slice, iov[a:b]; many take"
        " the Iov and offsets in it"
    )


def _raw(file: Any) -> File:
    """The raw file under the layers of io that ffs.open puts over it. TypeError: there is none."""
    bottom: File = getattr(file, "raw", file)
    if not hasattr(bottom, "ensure_room"):
        raise TypeError(
            f'a ring takes files that ffs.open or client.open gave in a binary mode ("rb", say), not {file!r}'
        )
    return bottom


def _distinct(files: Sequence[File]) -> tuple[list[File], Ints]:
    """The different files, and which of them each request is for."""
    known: dict[int, int] = {}
    out: list[File] = []
    which = np.empty(len(files), dtype=np.int64)
    for i, given in enumerate(files):
        file = _raw(given)
        number = known.get(id(file))
        if number is None:
            number = known[id(file)] = len(out)
            out.append(file)
        which[i] = number
    return out, which

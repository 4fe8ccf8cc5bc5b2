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
import itertools
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ffs._native.entries import NO_END, Requests
from ffs._native.iov import Iov, IovSlice
from ffs._native.ring import (
    CQE_DTYPE,
    OP_READ,
    OP_WRITE,
    SQE_ZERO_FILL,
    WAIT_NEEDS_CAPABILITY,
    WAIT_NEEDS_ROUTING,
    Ring,
    RingStats,
)
from ffs.client.ior_cut import Ints, cut, cut_inside
from ffs.client.ior_table import Table
from ffs.client.transfer import error_of_completion
from ffs.errors import FfsError, InvalidArgument, NotFound, RingFull
from ffs.layout import MAX_FILE_BYTES, file_chunk_key

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

__all__ = ["Completion", "Ior"]

_NO_INTS: Final = np.zeros(0, dtype=np.int64)
_NO_CQES: Final = np.zeros(0, dtype=CQE_DTYPE)


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
        self._ring = Ring(client.native, entries, inflight)
        self._op, self._flags = (OP_READ, SQE_ZERO_FILL) if kind == "read" else (OP_WRITE, 0)
        self._table = Table(entries)
        self._numbers = self._table.numbers.raw  # which the ring takes those of its requests from
        self._prepared = 0
        self._empty: list[int] = []  # userdata of reads at or beyond the end: done at once
        self._taken: NDArray[Any] | None = None  # from the ring, and not settled
        self._ready: tuple[NDArray[Any], ...] = ()  # settled, and not given to the caller
        self._needs = 0  # of WAIT_NEEDS_...: not seen to

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
        self._check(files, at, to, size, requests, len(iov))
        taken = None
        if self.kind == "write":
            for number, end in enumerate(furthest(at + size, which, len(files))):
                files[number].ensure_room(end)
            if len(files) == 1:
                taken = self._take_inside(files[0], requests, iov, user, at + size)
        elif len(files) == 1:
            taken = self._take_inside(files[0], requests, iov, user)
        if taken is None:
            if self.kind == "read":
                known = np.array([file.size for file in files], dtype=np.int64)
                size = np.minimum(size, np.maximum((known[which] if len(files) > 1 else known) - at, 0))
            taken = self._take(files, which, at, iov, to, size, user)
        if self.depth and self._prepared >= self.depth:
            self.submit()
        return taken

    def _take_one(self, file: File, offset: int, part: IovSlice, userdata: int) -> bool:
        """One request inside one chunk, without arrays: a third of their time. False: it isn't that plain, or
        the ring is full, or it can't be, which prepare_many says; nothing was taken."""
        if type(offset) is not int or type(userdata) is not int:
            return False
        if not (0 <= offset < MAX_FILE_BYTES and 0 <= userdata < MAX_FILE_BYTES):
            return False
        if not (file.readable() if self.kind == "read" else file.writable()):
            return False
        size = part.length
        if self.kind == "write":
            file.ensure_room(offset + size)
        else:
            size = min(size, file.size - offset)
        placement = file.placement
        index, inside = divmod(offset, placement.layout.chunk_size)
        if size < 1 or inside + size > placement.layout.chunk_size:
            return False
        number = self._table.next()
        if number is None:
            return False
        self._table.note_one(number, userdata, offset + size, file, part.iov)
        try:
            self._ring.prepare_one(
                self._op,
                placement.chain_of_index(index),
                file.capability,
                file.inode.to_bytes(8, "big") + file_chunk_key(index),
                inside,
                size,
                part,
                number,
                flags=self._flags,
                space_epoch=file.epoch,
                priority=self.priority,
                numbers=self._numbers,
            )
        except FfsError as error:  # it wasn't taken
            self._table.forget(number)
            if isinstance(error, RingFull):
                return False
            raise
        self._prepared += 1
        if self.depth and self._prepared >= self.depth:
            self.submit()
        return True

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

    def _take_inside(
        self, file: File, requests: Requests, iov: Iov, user: Ints, ends: Ints | None = None
    ) -> int | None:
        """Requests of one file that each lie in one chunk: the short way. None: they don't.

        ends: of writes, where they end in the file; None: reads."""
        known = file.size if ends is None else NO_END
        sqes = cut_inside(file, requests, self._op, self._flags, iov.handle, known, self.priority)
        if sqes is None:
            return None
        numbers = self._table.offer(requests.count)
        count = len(numbers)
        if count < requests.count:
            sqes, user = sqes[:count], user[:count]
        sqes["userdata"] = numbers
        if ends is None:
            self._table.note_read(numbers, user, file, iov)
        else:
            self._table.note(numbers, user, ends[:count], [file], _NO_INTS, iov)
        taken = self._give(sqes, numbers)
        if taken < count:
            self._table.forget(numbers[taken:])
        self._prepared += taken
        return taken

    def _give(self, sqes: NDArray[Any], numbers: Ints) -> int:
        """Entries to the ring, whose numbers the table knows; how many it took."""
        try:
            return self._ring.prepare(sqes, self._numbers)
        except FfsError:  # it took none
            self._table.forget(numbers)
            raise

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
        self._table.note(numbers, user[real], (at + size)[real], files, which[real], iov)
        taken_sqes = self._give(sqes, numbers)
        taken = int(np.searchsorted(first + counts, taken_sqes, side="right"))
        if len(numbers) < int((counts > 0).sum()):
            taken = min(taken, int(np.flatnonzero(counts > 0)[len(numbers)]))
        real = real[real < taken]
        self._table.forget(numbers[len(real) :])
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
        parts = self._wait(least, timeout)
        out = [Completion(user, 0, None) for user in self._empty]
        for cqe in itertools.chain.from_iterable(parts):
            result = int(cqe["result"])
            error = error_of_completion(cqe, self.client) if result < 0 else None
            out.append(Completion(int(cqe["userdata"]), result, error))
        self._ready, self._empty = (), []
        return out

    def wait_array(self, least: int = 1, timeout: float | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """As wait, for thousands: (userdata, result), result being bytes moved or -errno."""
        cqes = _joined(self._wait(least, timeout))
        users, results = cqes["userdata"], cqes["result"]
        if self._empty:
            users = np.concatenate([np.array(self._empty, dtype=np.uint64), users])
            results = np.concatenate([np.zeros(len(self._empty), dtype=np.int64), results])
        self._ready, self._empty = (), []
        return users, results

    def _wait(self, least: int, timeout: float | None) -> tuple[NDArray[Any], ...]:
        """What is complete, besides `_empty`. A signal may raise at the end of any call: what was taken from
        the ring stays in this object until the caller has it, who empties `_ready` and `_empty` last."""
        until = None if timeout is None else time.monotonic() + timeout
        self._prepared = 0
        if self._taken is not None:
            self._settle(self._taken)
        if self._needs:
            self._see_to_needs()
        if self._ready:
            least -= sum(map(len, self._ready))
        least = max(0, least - len(self._empty))
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            self._taken, self._needs = self._ring.wait(least, left)
            count = self._settle(self._taken)
            least = max(0, least - count)
            idle = count == 0 and not self._needs  # whatever the table says
            if self._needs:
                self._see_to_needs()
            if (
                least == 0
                or idle
                or not self._table.busy
                or (until is not None and time.monotonic() >= until)
            ):
                return self._ready

    def _settle(self, cqes: NDArray[Any]) -> int:
        """Puts the caller's userdata in place, tells files how far they were written, and adds to `_ready`;
        how many. If a signal interrupts it, the next wait does it again."""
        count = len(cqes)
        if count == 0:
            self._taken = None
            return 0
        users: Any
        if count == 1 and self.kind == "read":
            users = self._table.settle_one(int(cqes["userdata"][0]))
        else:
            numbers = cqes["userdata"].astype(np.int64)
            if self.kind == "write":
                self._table.note_written(numbers[cqes["result"] >= 0])
                self._table.note_failed(numbers[cqes["result"] < 0])
            users = self._table.settle(numbers)
        ready = (*self._ready, cqes)
        # All or nothing: without a call from here on, as signal handlers run at the end of calls.
        cqes["userdata"] = users
        self._numbers.free_count += count
        self._ready = ready
        self._taken = None
        return count

    def _see_to_needs(self) -> None:
        if self._needs & WAIT_NEEDS_CAPABILITY:
            self._renew()
        if self._needs & WAIT_NEEDS_ROUTING:
            self.client.want_routing()
        self._needs = 0

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
            for file in self._table.files():
                file.note_failed()  # writes in flight end here, done or not
        self._ring.close()
        self._table.clear()
        self._taken = None  # of files that are told above, and numbers that are no more

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


def _joined(parts: tuple[NDArray[Any], ...]) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else _NO_CQES


def furthest(ends: Ints, which: Ints, count: int) -> list[int]:
    """Of each of `count` files how far the furthest of its requests reaches. Pure."""
    if count == 1:
        return [int(ends.max())]
    out = np.zeros(count, dtype=np.int64)
    np.maximum.at(out, which, ends)
    return [int(end) for end in out]


def _whole_numbers(values: ArrayLike, what: str) -> Ints:
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

"""Ior: a submission and completion ring over files, in the manner of io_uring. docs/ring.md, Ior.

    iov = ffs.Iov(64 << 20)
    with ffs.open("/data/x", "rb") as file, ffs.Ior(client, entries=256, kind="read") as ior:
        ior.prepare(file, offset=0, data=iov[0 : 1 << 20], userdata=7)
        for done in ior.wait(1):
            ...

Data moves between the servers' devices and the Iov; Python sees only numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ffs._native.iov import Iov, IovSlice
from ffs._native.ring import (
    OP_READ,
    OP_WRITE,
    SQE_DTYPE,
    SQE_ZERO_FILL,
    WAIT_NEEDS_CAPABILITY,
    WAIT_NEEDS_ROUTING,
    Ring,
    RingStats,
    error_of_cqe,
)
from ffs.errors import FfsError, InvalidArgument, NotFound, RingFull
from ffs.layout import chunk_slices_array, file_chunk_keys

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

__all__ = ["Completion", "Ior"]

# While requests wait for routing that nobody has yet, it is asked for this often.
_ROUTING_POLL_S: Final = 0.25


class Completion(NamedTuple):
    """A finished request: bytes moved (fewer than asked only at the file's end), or its error."""

    userdata: int
    result: int
    error: FfsError | None


class Ior:
    """Reads or writes of files, many in flight.

    entries: how many pieces (a request's chunks) may be prepared or in flight, a power of two up to 65536.
    kind: "read" or "write". depth: 0 - requests go out at submit and wait; n - also by themselves whenever
    n are prepared. One thread at a time. In a child of fork: make a fresh one. Every write that is
    reported done is durable on all replicas; its length is published by the file's flush or close.
    """

    def __init__(self, client: Client, entries: int, kind: str = "read", depth: int = 0) -> None:
        if kind not in ("read", "write"):
            raise InvalidArgument(f'kind {kind!r}: give "read" or "write"')
        if entries < 1 or entries > 65536 or entries & (entries - 1):
            raise InvalidArgument(f"entries {entries}: give a power of two up to 65536")
        if depth < 0 or depth > entries:
            raise InvalidArgument(f"depth {depth}: give 0 to {entries}, the ring's entries")
        self.client = client
        self.kind = kind
        self.entries = entries
        self.depth = depth
        self._ring = Ring(client.native, entries)
        # By number of a request (its native userdata): what to tell when it is over.
        self._free = list(range(entries - 1, -1, -1))
        self._userdata = np.zeros(entries, dtype=np.uint64)
        self._end = np.zeros(entries, dtype=np.int64)
        self._epoch = np.zeros(entries, dtype=np.int64)
        self._file = np.full(entries, None, dtype=object)
        self._iov = np.full(entries, None, dtype=object)
        self._prepared = 0
        self._empty: list[int] = []  # userdata of reads at or beyond the end: done at once
        self._poll_routing = False

    # --- preparing --------------------------------------------------------------------------

    def prepare(self, file: File, offset: int, data: IovSlice | Iov, userdata: int = 0) -> None:
        """One request: len(data) bytes of `file` from `offset`. RingFull: submit and wait first.

        A read is cut at the length that the file is known to have. InvalidArgument names what is wrong;
        nothing was taken then. `data` belongs to the request until it completes."""
        part = data[0 : len(data)] if isinstance(data, Iov) else data
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
        first request that can't be; none was taken then."""
        at = _whole_numbers(offsets, "offsets")
        to = _whole_numbers(iov_offsets, "iov_offsets")
        size = _whole_numbers(lengths, "lengths")
        user = np.arange(len(at)) if userdata is None else _whole_numbers(userdata, "userdata")
        if not len(at) == len(to) == len(size) == len(user):
            raise InvalidArgument(
                f"{len(at)} offsets, {len(to)} iov_offsets, {len(size)} lengths, {len(user)} userdata: "
                "give as many of each"
            )
        if not isinstance(files, Sequence):
            files = [_raw(files)]
            which = np.zeros(len(at), dtype=np.int64)
        else:
            if len(files) != len(at):
                raise InvalidArgument(f"{len(files)} files for {len(at)} offsets: give one, or as many")
            files, which = _distinct(files)
        if len(at) == 0:
            return 0
        self._check(files, at, to, size, len(iov))
        if self.kind == "read":
            known = np.array([file.size for file in files], dtype=np.int64)[which]
            size = np.clip(known - at, 0, size)
        return self._take(files, which, at, iov, to, size, user)

    def _check(
        self,
        files: Sequence[File],
        at: NDArray[np.int64],
        to: NDArray[np.int64],
        size: NDArray[np.int64],
        room: int,
    ) -> None:
        for file in files:
            if not (file.readable() if self.kind == "read" else file.writable()):
                raise InvalidArgument(f"{file.name!r} isn't open for a ring of kind {self.kind!r}", file.name)
        bad = (at < 0) | (size < 1) | (to < 0) | (to > room) | (size > room - to)
        if bad.any():
            i = int(np.argmax(bad))
            raise InvalidArgument(
                f"request {i}: {size[i]} bytes at {at[i]} of the file and at {to[i]} of an Iov of {room} "
                "bytes; give at least one byte, inside the Iov"
            )

    def _take(
        self,
        files: Sequence[File],
        which: NDArray[np.int64],
        at: NDArray[np.int64],
        iov: Iov,
        to: NDArray[np.int64],
        size: NDArray[np.int64],
        user: NDArray[np.int64],
    ) -> int:
        sqes, first, counts = self._cut(files, which, at, iov, to, size)
        if counts.max(initial=0) > self.entries:
            i = int(np.argmax(counts))
            raise InvalidArgument(
                f"request {i} spans {counts[i]} chunks, the ring has {self.entries} entries: "
                "give it more, or cut the request"
            )
        # Reads of nothing are done at once; they need no number.
        wanted = int((counts > 0).sum())
        numbers = np.array(self._free[-wanted:][::-1] if wanted else [], dtype=np.int64)
        if len(numbers) < wanted:  # the rest surely finds the ring full
            last = int(np.flatnonzero(counts > 0)[len(numbers)])
            at, to, size, user, which = at[:last], to[:last], size[:last], user[:last], which[:last]
            sqes, first, counts = sqes[: first[last]], first[:last], counts[:last]
        number_of = np.full(len(at), -1, dtype=np.int64)
        number_of[counts > 0] = numbers
        heads = first[counts > 0]
        sqes["userdata"][heads] = numbers
        taken_sqes = self._ring.prepare(sqes) if len(sqes) else 0
        end_of = first + counts
        taken = int(np.searchsorted(end_of, taken_sqes, side="right"))
        used = number_of[:taken]
        mine = used[used >= 0]
        if len(mine):
            del self._free[-len(mine) :]
            some = used >= 0
            self._userdata[mine] = user[:taken][some].astype(np.uint64)
            self._end[mine] = (at + size)[:taken][some]
            handles = np.empty(len(files), dtype=object)
            handles[:] = files
            self._file[mine] = handles[which[:taken][some]]
            self._epoch[mine] = np.array([file.epoch for file in files], dtype=np.int64)[which[:taken][some]]
            kept = np.empty(1, dtype=object)
            kept[0] = iov  # as itself: numpy would take a sequence apart
            self._iov[mine] = kept
        self._empty += [int(u) for u in user[:taken][used < 0]]
        self._prepared += len(mine)
        if self.depth and self._prepared >= self.depth:
            self.submit()
        return taken

    def _cut(
        self,
        files: Sequence[File],
        which: NDArray[np.int64],
        at: NDArray[np.int64],
        iov: Iov,
        to: NDArray[np.int64],
        size: NDArray[np.int64],
    ) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
        """The entries of all requests in order, each request's first entry, and how many it has."""
        chunk_size = np.array([file.placement.layout.chunk_size for file in files], dtype=np.int64)[which]
        counts = np.where(size > 0, (at + size - 1) // chunk_size - at // chunk_size + 1, 0)
        first = np.cumsum(counts) - counts
        sqes = np.zeros(int(counts.sum()), dtype=SQE_DTYPE)
        sqes["op"] = OP_READ if self.kind == "read" else OP_WRITE
        sqes["flags"] = SQE_ZERO_FILL if self.kind == "read" else 0
        sqes["iov"] = iov.handle
        for number, file in enumerate(files):
            mine = np.flatnonzero(which == number) if len(files) > 1 else np.arange(len(at))
            cut = chunk_slices_array(file.placement.layout.chunk_size, at[mine], size[mine])
            request = mine[cut.request]
            begins = np.cumsum(counts[mine]) - counts[mine]
            rows = first[request] + np.arange(len(request)) - begins[cut.request]
            keys = np.empty((len(request), 24), dtype=np.uint8)
            keys[:, :8] = np.frombuffer(file.inode.to_bytes(8, "big"), dtype=np.uint8)
            keys[:, 8:] = file_chunk_keys(cut.chunk)
            sqes["key"][rows] = keys
            sqes["chain"][rows] = file.placement.chains_of_indexes(cut.chunk)
            sqes["capability"][rows] = file.capability
            sqes["space_epoch"][rows] = file.epoch
            sqes["offset"][rows] = cut.offset
            sqes["length"][rows] = cut.length
            sqes["iov_offset"][rows] = to[request] + cut.position
        sqes["group"][first[counts > 0]] = counts[counts > 0]
        return sqes, first, counts

    # --- submitting, waiting ----------------------------------------------------------------

    def submit(self) -> int:
        """Sends what is prepared; the number of pieces. Never waits for a server."""
        self._prepared = 0
        return self._ring.submit()

    def wait(self, least: int = 1, timeout: float | None = None) -> list[Completion]:
        """Submits, then waits for `least` completions, at most `timeout` seconds (None: no limit).

        In order of completion; fewer than `least` at the timeout, or when no more are on their way. Failures
        are given, not raised. Blocking, without the GIL; refreshes routing and renews capabilities."""
        cqes = self._wait(least, timeout)
        out = [Completion(user, 0, None) for user in self._take_empty()]
        for cqe in cqes:
            result = int(cqe["result"])
            out.append(Completion(int(cqe["userdata"]), result, error_of_cqe(cqe) if result < 0 else None))
        return out

    def wait_array(self, least: int = 1, timeout: float | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """As wait, for thousands: (userdata, result), result being bytes moved or -errno."""
        cqes = self._wait(least, timeout)
        empty = self._take_empty()
        if not empty:
            return cqes["userdata"], cqes["result"]
        users = np.array(empty, dtype=np.uint64)
        return (
            np.concatenate([users, cqes["userdata"]]),
            np.concatenate([np.zeros(len(users), dtype=np.int64), cqes["result"]]),
        )

    def _take_empty(self) -> list[int]:
        empty, self._empty = self._empty, []
        return empty

    def _wait(self, least: int, timeout: float | None) -> NDArray[Any]:
        until = None if timeout is None else time.monotonic() + timeout
        self._prepared = 0
        least = max(0, least - len(self._empty))
        parts: list[NDArray[Any]] = []
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            step = left if not self._poll_routing else min(_ROUTING_POLL_S, left or _ROUTING_POLL_S)
            cqes, events = self._ring.wait(least, step)
            if len(cqes):
                parts.append(self._settle(cqes))
                least = max(0, least - len(cqes))
            if events & WAIT_NEEDS_CAPABILITY:
                self._renew()
            if events & WAIT_NEEDS_ROUTING or (self._poll_routing and len(cqes) == 0):
                self._poll_routing = not self._refresh()
            busy = len(self._free) < self.entries
            if least == 0 or not busy or (until is not None and time.monotonic() >= until):
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else cqes

    def _settle(self, cqes: NDArray[Any]) -> NDArray[Any]:
        """Puts the caller's userdata in place and tells files how far they were written."""
        numbers = cqes["userdata"].astype(np.int64)
        cqes["userdata"] = self._userdata[numbers]
        if self.kind == "write":
            done = numbers[cqes["result"] >= 0]
            for file in {id(f): f for f in self._file[done]}.values():
                own = done[self._file[done] == file]
                epochs = self._epoch[own]
                for epoch in np.unique(epochs):
                    file.note_written(int(self._end[own[epochs == epoch]].max()), int(epoch))
        self._file[numbers] = None
        self._iov[numbers] = None
        self._free += numbers.tolist()
        return cqes

    def _refresh(self) -> bool:
        """False: there is nothing newer now, or nobody who knows; requests go on by themselves."""
        try:
            return bool(self.client.refresh_routing())
        except FfsError:
            return False

    def _renew(self) -> None:
        # A refusal shows in the requests: they end with CapabilityExpired at their deadline.
        for file in {id(f): f for f in self._file if f is not None}.values():
            try:
                self.client.renew_capability(file.capability)
            except FfsError:
                continue

    def cancel(self, userdata: int) -> None:
        """Requests with this userdata complete with Cancelled, or as they would have. NotFound: none."""
        live = [i for i in np.flatnonzero(self._userdata == np.uint64(userdata)) if self._file[i] is not None]
        if not live:
            raise NotFound(f"no request of this ring has the userdata {userdata}")
        for number in live:
            self._ring.cancel(int(number))

    def fileno(self) -> int:
        """For poll loops: readable when wait(0) would make progress. The ring's own; don't close it."""
        return self._ring.fileno()

    def stats(self) -> RingStats:
        return self._ring.stats()

    def close(self) -> None:
        """Cancels what is in flight; returns when no server can touch a buffer any more. Idempotent."""
        self._ring.close()
        self._file[:] = None
        self._iov[:] = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _whole_numbers(values: ArrayLike, what: str) -> NDArray[np.int64]:
    out = np.atleast_1d(np.asarray(values))
    if out.ndim != 1 or (out.size and out.dtype.kind not in "iu"):
        raise InvalidArgument(f"{what}: give a one-dimensional array of whole numbers")
    return out.astype(np.int64)


def _raw(file: Any) -> File:
    """The raw file under the layers of io that ffs.open puts over it."""
    bottom: File = getattr(file, "raw", file)
    return bottom


def _distinct(files: Sequence[File]) -> tuple[list[File], NDArray[np.int64]]:
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

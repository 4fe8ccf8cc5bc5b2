"""What a ring of files remembers of each request in flight. No I/O; one thread at a time.

A request has a number, which is its userdata in native; here stands what the caller is to be told, and what
must be kept until it is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ffs._native.entries import Numbers

if TYPE_CHECKING:
    from ffs._native.iov import Iov
    from ffs.client.file import File

Ints = NDArray[np.int64]


class Table:
    """`entries` requests at most.

    What is noted of a number before it is in use does no harm; it is in use from the ring's prepare on, which
    takes it (numbers.raw) in one step with its request: a signal may raise anywhere."""

    def __init__(self, entries: int) -> None:
        self.numbers = Numbers(entries)
        self._free = self.numbers.free
        self._live = self.numbers.live
        self._entries = entries
        self._userdata = np.zeros(entries, dtype=np.uint64)
        self._end = np.zeros(entries, dtype=np.int64)
        self._epoch = np.zeros(entries, dtype=np.int64)
        self._file = np.full(entries, None, dtype=object)
        self._iov = np.full(entries, None, dtype=object)

    @property
    def free_count(self) -> int:
        return int(self.numbers.raw.free_count)

    @property
    def busy(self) -> bool:
        return self.free_count < self._entries

    def offer(self, count: int) -> Ints:
        """At most `count` numbers, in the order in which they will be in use."""
        free = self.free_count
        return self._free[free - min(count, free) : free][::-1].copy()

    def next(self) -> int | None:
        """The number that will be in use next. None: all are."""
        free = self.free_count
        return int(self._free[free - 1]) if free else None

    def note(
        self, numbers: Ints, userdata: Ints, ends: Ints, files: list[File], which: Ints, iov: Iov
    ) -> None:
        """What the requests are that will have these numbers."""
        self._userdata[numbers] = userdata
        self._end[numbers] = ends
        if len(files) == 1:
            self._file[numbers] = _boxed(files[0])
            self._epoch[numbers] = files[0].epoch
        else:
            self._file[numbers] = _boxed(*files)[which]
            self._epoch[numbers] = np.array([file.epoch for file in files], dtype=np.int64)[which]
        self._iov[numbers] = _boxed(iov)

    def note_read(self, numbers: Ints, userdata: Ints, file: File, iov: Iov) -> None:
        """As `note`, of reads of one file: their ends and epochs are never asked for."""
        self._userdata[numbers] = userdata
        self._file[numbers] = _boxed(file)
        self._iov[numbers] = _boxed(iov)

    def note_one(self, number: int, userdata: int, end: int, file: File, iov: Iov) -> None:
        """As `note`, of one request."""
        self._userdata[number] = userdata
        self._end[number] = end
        self._file[number] = file
        self._epoch[number] = file.epoch
        self._iov[number] = iov

    def forget(self, numbers: Ints | int) -> None:
        """They are not in use after all: the ring didn't take their requests."""
        self._file[numbers] = None
        self._iov[numbers] = None

    def settle_one(self, number: int) -> int:
        """It is over: its userdata. As `settle`."""
        self._file[number] = None
        self._iov[number] = None
        self._live[number] = False
        self._free[self.free_count] = number
        return int(self._userdata[number])

    def settle(self, numbers: Ints) -> NDArray[Any]:
        """They are over: their userdata. They are vacant once the caller has raised numbers.raw.free_count by
        their number; until then this may be done again, if a signal interrupted it."""
        self._file[numbers] = None
        self._iov[numbers] = None
        self._live[numbers] = False
        self._free[self.free_count : self.free_count + len(numbers)] = numbers
        return self._userdata[numbers]

    def note_written(self, numbers: Ints) -> None:
        """Tells the files of these writes how far they were written. Before `settle`."""
        for file in distinct(self._file[numbers]):
            own = numbers[self._file[numbers] == file]
            epochs = self._epoch[own]
            for epoch in np.unique(epochs):
                file.note_written(int(self._end[own[epochs == epoch]].max()), int(epoch))

    def note_failed(self, numbers: Ints) -> None:
        """Tells the files of these writes that they may have been written or not. Before `settle`."""
        for file in distinct(self._file[numbers]):
            file.note_failed()

    def files(self) -> Iterator[File]:
        """The files with requests in flight, each once."""
        return distinct(self._file[self._live])

    def find(self, userdata: int) -> list[int]:
        """The numbers of the requests in flight with this userdata."""
        found = np.flatnonzero(self._live & (self._userdata == np.uint64(userdata)))
        return [int(number) for number in found]

    def find_range(self, first: int, stop: int) -> list[int]:
        """The numbers of the requests in flight whose userdata is in [first, stop)."""
        inside = (self._userdata >= np.uint64(first)) & (self._userdata < np.uint64(stop))
        return [int(number) for number in np.flatnonzero(self._live & inside)]

    def clear(self) -> None:
        """Lets go of files and Iovs."""
        self._live[:] = False
        self._file[:] = None
        self._iov[:] = None


def distinct(files: NDArray[Any]) -> Iterator[File]:
    """None is of a request that is settled, after an interruption."""
    return iter({id(file): file for file in files if file is not None}.values())


def _boxed(*things: object) -> NDArray[Any]:
    """As they are: numpy would take an Iov, which is a sequence, apart."""
    box = np.empty(len(things), dtype=object)
    for i, thing in enumerate(things):
        box[i] = thing
    return box

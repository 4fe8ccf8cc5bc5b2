"""What a ring of files remembers of each request in flight. No I/O; one thread at a time.

A request has a number, which is its userdata in native; by it stands what the caller is to be told. Its owner
is what must be kept until it is over, and what must hear of it: a file in an epoch, and an Iov.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffs._native.entries import Flights

if TYPE_CHECKING:
    from ffs._native.iov import Iov
    from ffs.client.file import File

Ints = NDArray[np.int64]


class Owner(NamedTuple):
    """Whose requests are in flight."""

    file: File
    iov: Iov
    epoch: int

    @property
    def key(self) -> tuple[int, int, int]:
        return id(self.file), id(self.iov), self.epoch


class Table:
    """`entries` requests at most.

    What is noted of a number before it is in use does no harm; it is in use from the ring's prepare on, which
    takes it in one step with its request, and free with the wait that brings its completion (FileRing)."""

    def __init__(self, entries: int, *, writes: bool) -> None:
        self.flights = Flights(entries, writes=writes)
        self._raw = self.flights.raw
        self._entries = entries
        self._writes = writes
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._owners: dict[int, Owner] = {}
        self._vacant = list(range(self.flights.owners))  # owners' numbers

    @property
    def free_count(self) -> int:
        return int(self._raw.free_count)

    @property
    def busy(self) -> bool:
        return self.free_count < self._entries

    def offer(self, count: int) -> Ints:
        """At most `count` numbers, in the order in which they will be in use."""
        free = self.free_count
        return self.flights.free[free - min(count, free) : free][::-1].copy()

    # --- owners -----------------------------------------------------------------------------

    def owner(self, file: File, iov: Iov) -> int:
        """The number of whom requests of this file and Iov belong to. It is theirs until `tell` finds none in
        flight, or `drop_idle`."""
        epoch = file.epoch
        known = self._numbers.get((id(file), id(iov), epoch))
        if known is not None:
            return known
        return self._take(Owner(file, iov, epoch))

    def owners(self, files: list[File], which: Ints, iov: Iov) -> NDArray[np.uint32]:
        """The same of many requests, of files[which]; at most as many as are free."""
        used = np.unique(which)
        if len(used) > len(self._vacant):
            self.drop_idle()
        numbers = np.zeros(len(files), dtype=np.uint32)
        for i in used.tolist():
            numbers[i] = self.owner(files[i], iov)
        return numbers[which]

    def _take(self, owner: Owner) -> int:
        if not self._vacant:
            self.drop_idle()
        number = self._vacant[-1]
        key = owner.key
        self._owners[number] = owner
        self._numbers[key] = number
        self._vacant.pop()
        return number

    def drop(self, number: int) -> None:
        """Lets go of what this owner keeps, unless it has requests in flight, or news for its file."""
        owner = self._owners.get(number)
        if owner is None or self._raw.flying[number] or self._raw.listed[number]:
            return
        self._forget(number, owner)

    def _forget(self, number: int, owner: Owner) -> None:
        self._numbers.pop(owner.key, None)
        # No call in between, as signal handlers run at the end of calls.
        del self._owners[number]
        self._vacant.append(number)

    def drop_idle(self) -> None:
        """As `drop`, of all: there may be some whose prepare was interrupted."""
        raw = self._raw
        kept = {n: owner for n, owner in self._owners.items() if raw.flying[n] or raw.listed[n]}
        numbers = {owner.key: n for n, owner in kept.items()}
        vacant = [n for n in range(self.flights.owners) if n not in kept]
        self._owners, self._numbers, self._vacant = kept, numbers, vacant

    def tell(self) -> None:
        """Tells files what became of their writes, and lets go of what has nothing in flight any more. If a
        signal interrupts it, the next time does it again."""
        raw = self._raw
        for number in self.flights.news:
            owner = self._owners.get(number)
            if owner is None:  # let go of before an interruption
                continue
            if self._writes:
                if raw.failed[number]:
                    owner.file.note_failed()
                if raw.reached[number] >= 0:
                    owner.file.note_written(raw.reached[number], owner.epoch)
            if not raw.flying[number]:
                self._forget(number, owner)
        self.flights.told()

    # --- requests ---------------------------------------------------------------------------

    def note(self, numbers: Ints, userdata: Ints, ends: Ints, owners: NDArray[np.uint32]) -> None:
        """What the requests are that will have these numbers."""
        flights = self.flights
        flights.userdata[numbers] = userdata
        flights.end[numbers] = ends
        flights.owner[numbers] = owners

    def files(self) -> Iterator[File]:
        """The files with requests in flight, each once."""
        live = np.unique(self.flights.owner[self.flights.live != 0])
        return iter(
            {id(owner.file): owner.file for owner in map(self._owners.__getitem__, live.tolist())}.values()
        )

    def find(self, userdata: int) -> list[int]:
        """The numbers of the requests in flight with this userdata."""
        flights = self.flights
        found = np.flatnonzero((flights.live != 0) & (flights.userdata == np.uint64(userdata)))
        return [int(number) for number in found]

    def find_range(self, first: int, stop: int) -> list[int]:
        """The numbers of the requests in flight whose userdata is in [first, stop)."""
        flights = self.flights
        inside = (flights.userdata >= np.uint64(first)) & (flights.userdata < np.uint64(stop))
        return [int(number) for number in np.flatnonzero((flights.live != 0) & inside)]

    def clear(self) -> None:
        """Lets go of files and Iovs; nothing is in flight any more."""
        self.flights.live[:] = 0
        self.flights.flying[:] = 0
        self.flights.told()
        self.drop_idle()

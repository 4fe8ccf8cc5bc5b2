"""Holes of a file: where data lies, taking chunks away, making room beforehand. docs/client.md, Holes.

A hole is what no chunk holds: an absent chunk, or the part of one beyond what was written to it. Chains are
asked by pages which chunks they have, so a hole costs one request a chain, however large it is. The
functions block their thread, and raise the first failure after all requests in flight are over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from errno import EEXIST, ENOENT
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ffs._native.ring import (
    LIST_ENTRY_DTYPE,
    LIST_MAX_ENTRIES,
    OP_CREATE,
    OP_LIST_CHUNKS,
    OP_REMOVE,
    OP_WRITE,
    SQE_BEYOND_END,
    SQE_NEED_EXISTING,
    WAIT_NEEDS_CAPABILITY,
    WAIT_NEEDS_ROUTING,
)
from ffs.client.rings import ENTRIES
from ffs.client.transfer import Extent, Upkeep, error_of_completion
from ffs.errors import FfsError, Overloaded
from ffs.layout import file_chunk_key

if TYPE_CHECKING:
    from ffs.client.rings import RingPool, StagedRing

_LIST_BYTES: Final = LIST_MAX_ENTRIES * LIST_ENTRY_DTYPE.itemsize
_WINDOW_PAGES: Final = 4
"""Chunks that one look at a range covers at most: so many pages of each chain."""

_MAX_TURNS: Final = 64


class _Request(NamedTuple):
    op: int
    chain: int
    chunk: int  # LIST_CHUNKS: the first that counts
    offset: int = 0  # in the chunk
    length: int = 0  # bytes, all zeros; LIST_CHUNKS: entries
    flags: int = 0


class _Answer(NamedTuple):
    request: _Request
    error: int  # 0, or the errno that was to be expected
    entries: list[tuple[int, int]]  # LIST_CHUNKS: chunk and its length
    more: bool


def find_data(pool: RingPool, upkeep: Upkeep, extent: Extent, offset: int, end: int) -> int | None:
    """The first byte at or after `offset`, before `end`, that a chunk holds; None: there is none."""
    chunk_size = extent.placement.layout.chunk_size
    while offset < end:
        chunk, inside = divmod(offset, chunk_size)
        asked = [_Request(OP_LIST_CHUNKS, chain, chunk, length=2) for chain in _chains(extent)]
        answers = _carry_out(pool, upkeep, extent, asked)
        known = min((answer.entries[-1][0] for answer in answers if answer.more), default=-1)
        for index, length in sorted(entry for answer in answers for entry in answer.entries):
            if index > known >= 0:
                break  # a chain may have one before it
            begin = inside if index == chunk else 0
            if length > begin:
                at = index * chunk_size + begin
                return at if at < end else None
        if known < 0:
            return None
        offset = (known + 1) * chunk_size
    return None


def find_hole(pool: RingPool, upkeep: Upkeep, extent: Extent, offset: int, end: int) -> int:
    """The first byte at or after `offset` that no chunk holds; at most `end`."""
    chunk_size = extent.placement.layout.chunk_size
    chunk, inside = divmod(offset, chunk_size)
    last = -(-end // chunk_size)
    window = 8
    while chunk < last:
        count = min(window, last - chunk)
        for index, length in enumerate(lengths(pool, upkeep, extent, chunk, count), chunk):
            if length < chunk_size:
                return min(index * chunk_size + max(inside, length, 0), end)
            inside = 0
        chunk += count
        window = min(window * 4, _widest(extent))
    return end


def held_bytes(pool: RingPool, upkeep: Upkeep, extent: Extent, end: int) -> int:
    """The bytes before `end` that chunks hold."""
    chunk_size = extent.placement.layout.chunk_size
    last = -(-end // chunk_size)
    total = first = 0
    while first < last:
        count = min(_widest(extent), last - first)
        for index, length in enumerate(lengths(pool, upkeep, extent, first, count), first):
            total += max(0, min(length, end - index * chunk_size))
        first += count
    return total


def lengths(pool: RingPool, upkeep: Upkeep, extent: Extent, first: int, count: int) -> list[int]:
    """The bytes that each of `count` chunks holds, -1 for an absent one."""
    chains = extent.placement.chains_of_indexes(np.arange(first, first + count, dtype=np.int64))
    out = [-1] * count
    wanted = [
        _Request(OP_LIST_CHUNKS, int(chain), first, length=min(int(number), LIST_MAX_ENTRIES))
        for chain, number in zip(*np.unique(chains, return_counts=True), strict=True)
    ]
    while wanted:
        again: list[_Request] = []
        for answer in _carry_out(pool, upkeep, extent, wanted):
            for index, length in answer.entries:
                if index < first + count:
                    out[index - first] = length
            if answer.more and answer.entries[-1][0] + 1 < first + count:
                again.append(answer.request._replace(chunk=answer.entries[-1][0] + 1))
        wanted = again
    return out


def punch(pool: RingPool, upkeep: Upkeep, extent: Extent, offset: int, length: int) -> None:
    """Take away [offset, offset + length): chunks that lie in it whole are removed, parts become zeros."""
    chunk_size = extent.placement.layout.chunk_size
    end = offset + length
    first, last = -(-offset // chunk_size), end // chunk_size
    if last < first:  # within one chunk
        _zero(pool, upkeep, extent, last, offset % chunk_size, end % chunk_size)
        return
    if offset % chunk_size:
        _zero(pool, upkeep, extent, first - 1, offset % chunk_size, chunk_size)
    if end % chunk_size:
        _zero(pool, upkeep, extent, last, 0, end % chunk_size)
    wanted = [_Request(OP_LIST_CHUNKS, chain, first, length=LIST_MAX_ENTRIES) for chain in _chains(extent)]
    while wanted and first < last:
        again: list[_Request] = []
        removals: list[_Request] = []
        for answer in _carry_out(pool, upkeep, extent, wanted):
            chain = answer.request.chain
            inside = [index for index, _ in answer.entries if index < last]
            removals += [_Request(OP_REMOVE, chain, index) for index in inside]
            if answer.more and len(inside) == len(answer.entries):
                again.append(answer.request._replace(chunk=inside[-1] + 1))
        _carry_out(pool, upkeep, extent, removals)
        wanted = again


def _zero(pool: RingPool, upkeep: Upkeep, extent: Extent, chunk: int, low: int, high: int) -> None:
    """Zeros for [low, high) of a chunk, as far as it reaches: it may be growing beyond just now."""
    high = min(high, lengths(pool, upkeep, extent, chunk, 1)[0])
    if low < high:
        chain = extent.placement.chain_of_index(chunk)
        write = _Request(OP_WRITE, chain, chunk, low, high - low, SQE_NEED_EXISTING)
        _carry_out(pool, upkeep, extent, [write], expected=ENOENT)


def allocate(pool: RingPool, upkeep: Upkeep, extent: Extent, offset: int, length: int) -> None:
    """Write zeros where no chunk holds [offset, offset + length).

    Nothing that others write meanwhile is touched: chunks are created only where there is none, and grow
    only from where they end; the chain's head judges both.
    """
    chunk_size = extent.placement.layout.chunk_size
    end = offset + length
    chunk, last = offset // chunk_size, -(-end // chunk_size)
    while chunk < last:
        count = min(_widest(extent), last - chunk)
        for _ in range(_MAX_TURNS):
            there = lengths(pool, upkeep, extent, chunk, count)
            lacking = list(_lacking(extent, chunk, there, end))
            if not any(a.error for a in _carry_out(pool, upkeep, extent, lacking, expected=EEXIST)):
                break
        else:
            raise Overloaded("the file's chunks are written and removed faster than they can be allocated")
        chunk += count


def lacking_bytes(pool: RingPool, upkeep: Upkeep, extent: Extent, offset: int, length: int) -> int:
    """The zeros that `allocate` would write now."""
    chunk_size = extent.placement.layout.chunk_size
    end = offset + length
    chunk, last = offset // chunk_size, -(-end // chunk_size)
    total = 0
    while chunk < last:
        count = min(_widest(extent), last - chunk)
        there = lengths(pool, upkeep, extent, chunk, count)
        total += sum(request.length for request in _lacking(extent, chunk, there, end))
        chunk += count
    return total


def _lacking(extent: Extent, first: int, there: Sequence[int], end: int) -> Iterator[_Request]:
    chunk_size = extent.placement.layout.chunk_size
    for index, length in enumerate(there, first):
        wanted = min(chunk_size, end - index * chunk_size)
        chain = extent.placement.chain_of_index(index)
        if length < 0:
            yield _Request(OP_CREATE, chain, index, 0, wanted)
        elif length < wanted:
            yield _Request(OP_WRITE, chain, index, length, wanted - length, SQE_BEYOND_END)


def _chains(extent: Extent) -> list[int]:
    """The chains that may hold chunks of the file."""
    return sorted(set(extent.placement.chains))


def _widest(extent: Extent) -> int:
    return _WINDOW_PAGES * LIST_MAX_ENTRIES * max(1, len(_chains(extent)))


def _carry_out(
    pool: RingPool, upkeep: Upkeep, extent: Extent, requests: Sequence[_Request], *, expected: int = 0
) -> list[_Answer]:
    """All requests, many at once. `expected`: the errno that is an answer of this work."""
    if not requests:
        return []
    listing = requests[0].op == OP_LIST_CHUNKS
    place = _LIST_BYTES if listing else max(1, max(request.length for request in requests))
    with pool.take(place * min(len(requests), ENTRIES) if listing else place) as staged:
        answers, failure = _Work(staged, upkeep, extent, place, expected).run(requests)
    if failure is not None:
        raise failure
    return answers


class _Work:
    """Requests on one ring: listings with a place of the staging memory each, zeros from one for all."""

    def __init__(self, staged: StagedRing, upkeep: Upkeep, extent: Extent, place: int, expected: int) -> None:
        self._staged = staged
        self._upkeep = upkeep
        self._extent = extent
        self._place = place
        self._expected = expected
        self._failure: FfsError | None = None

    def run(self, requests: Sequence[_Request]) -> tuple[list[_Answer], FfsError | None]:
        listing = requests[0].op == OP_LIST_CHUNKS
        if not listing:
            self._staged.memory[: self._place] = 0
        free = list(range(min(len(self._staged.memory) // self._place, ENTRIES) if listing else ENTRIES))
        waiting = iter(requests)
        flying: dict[int, _Request] = {}
        answers: list[_Answer] = []
        while True:
            if self._failure is None:
                for request in islice(waiting, len(free)):
                    number = free.pop()
                    self._prepare(number, request)
                    flying[number] = request
            if not flying:
                return answers, self._failure
            completions, events = self._staged.ring.wait(1)
            self._look_after(events)
            for completion in completions:
                number = int(completion["userdata"])
                free.append(number)
                self._take(flying.pop(number), number, completion, answers)

    def _prepare(self, number: int, request: _Request) -> None:
        extent = self._extent
        listing = request.op == OP_LIST_CHUNKS
        start = number * self._place if listing else 0
        size = self._place if listing else request.length
        self._staged.ring.prepare_one(
            request.op,
            request.chain,
            extent.capability,
            extent.ino.to_bytes(8, "big") + file_chunk_key(request.chunk),
            request.offset,
            request.length,
            None if request.op == OP_REMOVE else self._staged.iov[start : start + size],
            number,
            flags=request.flags,
            space_epoch=extent.epoch,
        )

    def _take(self, request: _Request, number: int, completion: np.void, answers: list[_Answer]) -> None:
        result = int(completion["result"])
        if result < 0:
            if -result == self._expected:
                answers.append(_Answer(request, -result, [], False))
            elif self._failure is None:
                self._failure = error_of_completion(completion, self._upkeep)
            return
        entries: list[tuple[int, int]] = []
        if request.op == OP_LIST_CHUNKS:
            start = number * self._place
            raw = self._staged.memory[start : start + result * LIST_ENTRY_DTYPE.itemsize]
            for entry in raw.view(LIST_ENTRY_DTYPE):
                index = int.from_bytes(entry["key"].tobytes()[8:], "big")
                entries.append((index, int(entry["length"])))
        answers.append(_Answer(request, 0, entries, bool(completion["value"]) and bool(entries)))

    def _look_after(self, events: int) -> None:
        if events & WAIT_NEEDS_CAPABILITY:
            if self._failure is None:
                self._failure = self._upkeep.renewal_failure(self._extent.capability)
            self._upkeep.want_renewal(self._extent.capability)
        if events & WAIT_NEEDS_ROUTING:
            self._upkeep.want_routing()

"""`fetch_shared`: as fetch, by several ranks that want the same bytes: each is read from the store once, by
one of them, and handed to the others (docs/guides/checkpoint.md, Shared loads).

While a round's pieces are handed around, the next round's are read. Each message has a checksum; parts that
are whole are compared with the manifest's hash besides, by every rank, as those that it reads itself.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from ffs import Iov
from ffs.checkpoint.fetch import Want, fetch
from ffs.checkpoint.share import Demands, Piece, Span, merged, outside, rounds, share
from ffs.checkpoint.tensors import Bytes, memory_at
from ffs.client.copying import XXH3_BYTES, IovSlice, xxh3_many
from ffs.errors import ChecksumMismatch, InvalidArgument

if TYPE_CHECKING:
    from ffs.checkpoint.circle import Circle
    from ffs.client.client import Client
    from ffs.client.file import File

_SLOTS: Final = 2  # a round's pieces are read while those of the one before are handed on


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    files: list[str]
    demands: dict[int, list[Span]]


def fetch_shared(
    client: Client,
    wants: Sequence[Want],
    opened: Callable[[File, str], None],
    circle: Circle,
    files: Sequence[str],
    places: IovSlice | None = None,
) -> None:
    """`wants` as fetch, of some of `files`, which are the same on all ranks. Collective; a rank's failure is
    raised by all."""
    demands = demands_of(wants, files)
    told = circle.gather("plan", msgspec.msgpack.encode(_Asked(list(files), demands)))
    asked = [msgspec.msgpack.decode(each, type=_Asked) for each in told]
    if any(each.files != asked[0].files for each in asked):
        raise InvalidArgument("the ranks load different checkpoints: give all of them the same path and step")
    pieces = share([each.demands for each in asked])
    mine = {
        file: merged((p.begin, p.end) for p in pieces if p.file == file and _has(p, circle.rank))
        for file in {p.file for p in pieces if _has(p, circle.rank)}
    }
    intake = Intake(wants, files, mine)
    with ThreadPoolExecutor(_SLOTS, thread_name_prefix="ffs-share") as pool:
        private = pool.submit(fetch, client, intake.private, opened, 0, places)
        _Rounds(client, opened, circle, files, pool, intake).run(rounds(pieces, circle.world))
        circle.ready("private", private)


def demands_of(wants: Sequence[Want], files: Sequence[str]) -> dict[int, list[Span]]:
    """By the file's place in `files`."""
    numbers = {path: number for number, path in enumerate(files)}
    spans: dict[int, list[Span]] = {}
    for want in wants:
        spans.setdefault(numbers[want.path], []).append((want.offset, want.offset + want.length))
    return {number: found for number, each in spans.items() if (found := merged(each))}


def _has(piece: Piece, rank: int) -> bool:
    return rank == piece.reader or rank in piece.takers


class Intake:
    """Wants whose bytes come piece by piece, from wherever. `private`: what this rank reads for itself, in
    file order: wants that it shares with nobody, and what others lack beside what is shared. Any thread:
    what wants do when they are complete is done by one at a time."""

    def __init__(self, wants: Sequence[Want], files: Sequence[str], shared: Demands) -> None:
        self._mutex = threading.Lock()
        self._wants: dict[int, list[Want]] = {}
        self._begins: dict[int, list[int]] = {}
        self._longest: dict[int, int] = {}
        self._memory: dict[int, Bytes] = {}  # by id of a want that has none
        self.private: list[Want] = []
        numbers = {path: number for number, path in enumerate(files)}
        for want in wants:
            number, end = numbers[want.path], want.offset + want.length
            if not want.length or outside(want.offset, end, shared.get(number, ())) == [(want.offset, end)]:
                self.private.append(self._alone(want))
                continue
            want.left = want.length
            self._wants.setdefault(number, []).append(want)
        for number, each in self._wants.items():
            for span in merged((want.offset, want.offset + want.length) for want in each):
                for begin, stop in outside(*span, shared.get(number, ())):
                    self.private.append(self._rest(number, files[number], begin, stop))
            each.sort(key=lambda want: want.offset)
            self._begins[number] = [want.offset for want in each]
            self._longest[number] = max(want.length for want in each)
        self.private.sort(key=lambda want: (want.path, want.offset))

    def take(self, file: int, begin: int, data: Bytes) -> None:
        """Bytes of a file from `begin` on, to all that want some of them."""
        end = begin + len(data)
        begins = self._begins.get(file, [])
        at = bisect.bisect_left(begins, begin - self._longest.get(file, 0))
        with self._mutex:
            while at < len(begins) and begins[at] < end:
                self._give(self._wants[file][at], begin, data)
                at += 1

    def _give(self, want: Want, begin: int, data: Bytes) -> None:
        first, stop = max(want.offset, begin), min(want.offset + want.length, begin + len(data))
        if first >= stop:
            return
        target = None if want.into is None else memory_at(want.into)
        if target is None:
            target = self._memory.setdefault(id(want), np.empty(want.length, np.uint8))
        target[first - want.offset : stop - want.offset] = data[first - begin : stop - begin]
        want.left -= stop - first
        if not want.left:
            want.done(self._memory.pop(id(want), None))

    def _alone(self, want: Want) -> Want:
        done = want.done

        def came(memory: Bytes | None) -> None:
            with self._mutex:
                done(memory)

        want.done = came
        return want

    def _rest(self, number: int, path: str, begin: int, end: int) -> Want:
        def came(memory: Bytes | None) -> None:
            assert memory is not None
            self.take(number, begin, memory)

        return Want(path, begin, end - begin, done=came)


class _Rounds:
    def __init__(
        self,
        client: Client,
        opened: Callable[[File, str], None],
        circle: Circle,
        files: Sequence[str],
        pool: ThreadPoolExecutor,
        intake: Intake,
    ) -> None:
        self._client, self._opened = client, opened
        self._circle, self._files = circle, files
        self._pool, self._intake = pool, intake
        self._slots: list[Iov] = []

    def run(self, planned: list[list[list[Piece]]]) -> None:
        rank = self._circle.rank
        sizes = [_bytes_of(batches[rank]) for batches in planned]
        self._slots = [Iov(max([1, *sizes]) + XXH3_BYTES) for _ in range(min(_SLOTS, len(planned)))]
        ahead = [self._pool.submit(self._read, 0, planned[0][rank])] if planned else []
        for number, batches in enumerate(planned):
            self._circle.ready(f"round {number}", ahead.pop())
            if number + 1 < len(planned):
                ahead.append(self._pool.submit(self._read, number + 1, planned[number + 1][rank]))
            self._hand_around(number, batches)

    def _slot(self, number: int) -> Bytes:
        return self._slots[number % _SLOTS].numpy()

    def _read(self, number: int, batch: Sequence[Piece]) -> None:
        """A round's own pieces, one behind the other."""
        iov = self._slots[number % _SLOTS]
        at, wants = 0, []
        for piece in batch:
            wants.append(Want(self._files[piece.file], piece.begin, piece.nbytes, iov, at))
            at += piece.nbytes
        fetch(self._client, wants, self._opened)

    def _hand_around(self, number: int, batches: Sequence[Sequence[Piece]]) -> None:
        rank = self._circle.rank
        own = self._slot(number)
        out = []
        for taker in range(self._circle.world):
            if any(taker in piece.takers for piece in batches[rank]):
                out.append((taker, _message(own, batches[rank], taker)))
        coming = []
        for reader, batch in enumerate(batches):
            mine = [piece for piece in batch if rank in piece.takers]
            if mine:
                coming.append((reader, mine, np.empty(_bytes_of(mine) + XXH3_BYTES, np.uint8)))
        self._circle.exchange(out, [(reader, data) for reader, _, data in coming])
        # Only now what may fail: the others have what they wait for.
        self._take(batches[rank], own)
        for reader, mine, data in coming:
            if _checksum(data[:-XXH3_BYTES]) != data[-XXH3_BYTES:].tobytes():
                raise ChecksumMismatch(
                    f"bytes that rank {reader} has handed on came damaged: load again, and look at its host",
                    self._files[mine[0].file],
                )
            self._take(mine, data)

    def _take(self, pieces: Sequence[Piece], data: Bytes) -> None:
        at = 0
        for piece in pieces:
            self._intake.take(piece.file, piece.begin, data[at : at + piece.nbytes])
            at += piece.nbytes


def _bytes_of(pieces: Sequence[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)


def _message(own: Bytes, batch: Sequence[Piece], taker: int) -> Bytes:
    """The pieces that it takes, one behind the other, and their checksum: where they lie, if it takes all."""
    size = sum(piece.nbytes for piece in batch if taker in piece.takers)
    if size == _bytes_of(batch):
        message = own[: size + XXH3_BYTES]
    else:
        message = np.empty(size + XXH3_BYTES, np.uint8)
        at = to = 0
        for piece in batch:
            if taker in piece.takers:
                message[to : to + piece.nbytes] = own[at : at + piece.nbytes]
                to += piece.nbytes
            at += piece.nbytes
    message[size:] = np.frombuffer(_checksum(message[:size]), np.uint8)
    return message


def _checksum(data: Bytes) -> bytes:
    row = np.array([[data.__array_interface__["data"][0], data.nbytes]], dtype=np.uint64)
    return xxh3_many(row)

"""What the namespace is measured against: LMDB alone and msgpack alone, in this process.

LMDB: what an operation needs of its store, in groups of the in-flight count, written groups durable.
msgpack: the four conversions of a request and its reply, on both sides. Units are those of the case.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from ffs.cli.benchmark.protocol import Contestant, Slice
from ffs.layout import Layout
from ffs.proto import meta
from ffs.proto.common import CAPABILITY_BYTES, ErrorReply, OkReply
from ffs.proto.records import FILE

_INODE_BYTES: Final = 60
_ENTRY_BYTES: Final = 6
MOST_UNLINKS: Final = 500  # groups a second


def _inode_key(number: int) -> bytes:
    return b"i" + number.to_bytes(10, "big")


def _entry_key(number: int) -> bytes:
    return b"d" + bytes(8) + b"f%07d" % number


def _timed(step: Callable[[], int]) -> Contestant:
    def run(seconds: float) -> Slice:
        begun = time.perf_counter()
        done = 0
        while time.perf_counter() - begun < seconds:
            done += step()
        return Slice(done, time.perf_counter() - begun)

    return run


class LmdbFloor:
    """An environment of its own with `files` entries and inodes in it."""

    def __init__(self, directory: Path, files: int, in_flight: int) -> None:
        directory.mkdir()
        self._environment = lmdb.open(str(directory), map_size=64 << 30, max_dbs=0)
        self._files = files
        self._group = in_flight
        self._made = itertools.count()
        self._looks = itertools.count()
        for first in range(0, files, 4096):
            self._put(range(first, min(first + 4096, files)))
        self._made = itertools.count(files)

    def _put(self, numbers: Any) -> None:
        with self._environment.begin(write=True) as transaction:
            for number in numbers:
                transaction.put(_inode_key(number), bytes(_INODE_BYTES))
                transaction.put(_entry_key(number), bytes(_ENTRY_BYTES))

    def _create(self) -> int:
        self._put(list(itertools.islice(self._made, self._group)))
        return self._group

    def _unlink(self, seconds: float) -> Slice:
        """Of files that are made before the clock runs; fewer seconds if it takes all of them."""
        numbers = list(itertools.islice(self._made, max(1, int(seconds * MOST_UNLINKS)) * self._group))
        self._put(numbers)
        begun = time.perf_counter()
        done = 0
        while done < len(numbers) and time.perf_counter() - begun < seconds:
            with self._environment.begin(write=True) as transaction:
                for number in numbers[done : done + self._group]:
                    transaction.delete(_inode_key(number))
                    transaction.delete(_entry_key(number))
            done += self._group
        return Slice(done, time.perf_counter() - begun)

    def _look(self) -> int:
        first = next(self._looks) * self._group
        with self._environment.begin() as transaction:
            for number in range(first, first + self._group):
                transaction.get(_entry_key(number % self._files))
                transaction.get(_inode_key(number % self._files))
        return self._group

    def _list(self) -> int:
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            first = next(self._looks) * 1000 % self._files
            cursor.set_range(_entry_key(first))
            return len(list(itertools.islice(cursor.iternext(), 1000)))

    def contestant(self, case: str) -> Contestant:
        """What the store has to do for a case of meta_worker.py."""
        if case == "unlink":
            return self._unlink
        steps = {"create": self._create, "readdir": self._list}
        return _timed(steps.get(case, self._look))

    def close(self) -> None:
        self._environment.close()


def _attributes(number: int) -> meta.Attributes:
    layout = Layout(1, 1, number, 1 << 20, 0)
    now = 1_790_000_000_000_000_000
    return meta.Attributes(1, number, FILE, 0o644, 1000, 1000, 1, 4096, now, now, now, 0, layout)


def _messages(case: str, page: int, batch: int) -> tuple[Any, Any, int]:
    """(request, reply, units)."""
    path = b"/bench/files/f0000017"
    attributes = _attributes(123_456)
    client, slot, sequence = 4097, 17, 12_345
    if case in ("create", "open_read"):
        opened = meta.Opened(ino=123_456, attributes=attributes, capability=bytes(CAPABILITY_BYTES))
        request = meta.Open(path=path, flags=1, client=client, slot=slot, sequence=sequence)
        return request, opened, 1
    if case == "stat":
        return meta.Stat(path=path), meta.StatReply(attributes=attributes), 1
    if case == "stat_many":
        found: list[meta.StatReply | ErrorReply] = [
            meta.StatReply(attributes=_attributes(number)) for number in range(batch)
        ]
        return meta.StatMany(paths=(path,) * batch), meta.StatManyReply(results=found), batch
    if case == "unlink":
        return meta.Unlink(path=path, client=client, slot=slot, sequence=sequence), OkReply(), 1
    full = case == "readdir_attributes"
    entries = [
        meta.DirEntry(b"f%07d" % number, number, FILE, _attributes(number) if full else None)
        for number in range(page)
    ]
    return meta.ReadDir(path=path), meta.ReadDirReply(ino=7, entries=entries), page


def msgpack_floor(case: str, page: int, batch: int) -> Contestant:
    """The conversions of one exchange of the case, by the types that both sides know."""
    request, reply, units = _messages(case, page, batch)
    encode = msgspec.msgpack.Encoder().encode
    take_request = msgspec.msgpack.Decoder(type(request)).decode
    take_reply = msgspec.msgpack.Decoder(type(reply)).decode

    def step() -> int:
        take_request(encode(request))
        take_reply(encode(reply))
        return units

    return _timed(step)

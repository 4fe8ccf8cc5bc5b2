"""Writing staged files into a directory of the cluster: hashed, linked where they haven't changed, else
written straight from the memory that they are staged in (docs/guides/checkpoint.md, Memory; Links).
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import select
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ffs.checkpoint import stream
from ffs.checkpoint.hashing import Algorithm, hash_spans
from ffs.checkpoint.manifest import Manifest, Part, Shard, Tensor
from ffs.checkpoint.snapshot import StagedFile, copying_threads
from ffs.checkpoint.spans import cut
from ffs.client.ior import Ior
from ffs.errors import NotFound, ProtocolError

if TYPE_CHECKING:
    from ffs.checkpoint.limiter import Gate
    from ffs.client.client import Client
    from ffs.client.file import File

PRIORITY: Final = 200  # of writes: training reads go first
# Pieces that are with servers: as many as a client gives one at a time (inflight_bytes). With 64 the disks
# ran dry whenever a flush had ended, until Python's turn had come on a full machine.
ENTRIES: Final = 256
# Files whose names are made, or lengths published, by one request. While data is written a transaction takes
# as long as a disk needs to flush all of that: what is known is opened at once, and closed after the data.
_NAMES: Final = 256

ContentKey = tuple[tuple[str, str, tuple[int, ...], tuple[int, ...], str], ...]
"""What makes two shard files the same: each tensor's name, type, box and hash, in file order."""


@dataclass(slots=True)
class Written:
    """What one rank has stored: `tensors` maps each name to (dtype, shape, framework, parts)."""

    shards: list[Shard] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    bytes_written: int = 0
    bytes_linked: int = 0
    linked_by_class: dict[str, tuple[int, int]] = field(default_factory=dict)  # class -> bytes, of it linked

    def add(self, staged: StagedFile, linked: bool) -> None:
        number = len(self.shards)
        self.shards.append(Shard(staged.plan.file, staged.nbytes, linked))
        for part, entry in zip(staged.plan.parts, entries(staged, number), strict=True):
            before = self.tensors.get(part.name)
            parts = (*(before.parts if before else ()), entry)
            self.tensors[part.name] = Tensor(part.dtype, part.shape, parts, staged.frameworks[part.name])
            kind = part.name.split(".")[0]
            held, same = self.linked_by_class.get(kind, (0, 0))
            self.linked_by_class[kind] = held + part.nbytes, same + (part.nbytes if linked else 0)
        if linked:
            self.bytes_linked += staged.nbytes
        else:
            self.bytes_written += staged.nbytes


def hash_parts(staged: StagedFile, algorithm: Algorithm) -> None:
    """Of each part, by at most this process's share of the processors. Without the GIL."""
    spans = [(placed.begin, placed.end) for _, placed in staged.placed()]
    memory = np.frombuffer(staged.region.memory(), np.uint8)
    staged.hashes = hash_spans(algorithm, memory, spans, copying_threads())


def entries(staged: StagedFile, number: int) -> list[Part]:
    """Its parts as the manifest has them, in a file of that number. After hash_parts."""
    return [
        Part(
            number,
            placed.begin,
            part.nbytes,
            digest,
            *((None, None) if part.whole else (part.begin, part.extent)),
        )
        for (part, placed), digest in zip(staged.placed(), staged.hashes, strict=True)
    ]


def key_of(staged: StagedFile) -> ContentKey:
    rows = [
        (part.name, part.dtype, part.begin, part.extent, digest)
        for part, digest in zip(staged.plan.parts, staged.hashes, strict=True)
    ]
    return tuple(sorted(rows))


def known_files(shards: Sequence[Shard], tensors: Mapping[str, Tensor]) -> Mapping[ContentKey, str]:
    """The shard files of an earlier checkpoint by what they hold."""
    rows: dict[int, list[tuple[str, str, tuple[int, ...], tuple[int, ...], str]]] = {}
    for name, tensor in tensors.items():
        for part in tensor.parts:
            begin, extent = tensor.box_of(part)
            rows.setdefault(part.shard, []).append((name, tensor.dtype, begin, extent, part.hash))
    return {tuple(sorted(held)): shards[number].file for number, held in rows.items()}


@dataclass(slots=True)
class Before:
    """An earlier checkpoint at `path`, whose files can be linked. `shards` and `tensors`: what this rank has
    stored of it, as a plan that hasn't changed finds all that it stores now; `whole` asks for the manifest,
    where a file has come to this rank from another."""

    path: str
    shards: Sequence[Shard]
    tensors: Mapping[str, Tensor]
    whole: Callable[[], Manifest]
    _names: frozenset[str] | None = None
    _own: Mapping[ContentKey, str] | None = None
    _all: Mapping[ContentKey, str] | None = None

    def file_of(self, key: ContentKey, name: str) -> str | None:
        """Which file has that content; `name`: of the file that is to be stored now."""
        if self._own is None or self._names is None:
            self._own = known_files(self.shards, self.tensors)
            self._names = frozenset(shard.file for shard in self.shards)
        found = self._own.get(key)
        if found is not None or name in self._names:
            return found
        if self._all is None:
            manifest = self.whole()
            self._all = known_files(manifest.shards, manifest.tensors)
        return self._all.get(key)

    def unchanged(self, tensors: Mapping[str, Tensor]) -> frozenset[str]:
        """The names of those whose parts, as this rank has stored them now, had the same bytes before."""
        return frozenset(
            name
            for name, tensor in tensors.items()
            if name in self.tensors and _same_parts(self.tensors[name], tensor)
        )


def _same_parts(before: Tensor, now: Tensor) -> bool:
    known = {before.box_of(part): part.hash for part in before.parts}
    return all(known.get(now.box_of(part)) == part.hash for part in now.parts)


Done = Callable[[BaseException | None], None]


@dataclass(slots=True, eq=False)
class _Going:
    """A file on its way: it is opened, then its pieces go from `waiting` into the ring, then it is closed."""

    staged: StagedFile
    path: str
    done: Done
    written: Callable[[], None]
    file: File | None = None
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: int = 0
    failure: BaseException | None = None


class ClusterWriter:
    """Writes files from the pool's memory through one ring, many at once. A file comes into being, and gets
    its length, by durable transactions of the metadata service, which take as long as a MiB or more: for
    some files together, by helper threads. One thread. Close it."""

    def __init__(self, client: Client, gate: Gate | None = None) -> None:
        """`gate`: what each piece must pass; None: there is no limit."""
        self._client = client
        self._gate = gate
        self._held_s = 0.0  # after which to ask the gate again
        self._ring = Ior(client, ENTRIES, kind="write", priority=PRIORITY)
        self._names = ThreadPoolExecutor(2, thread_name_prefix="ffs-ckpt-names")
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wakes = _watch(self._woken)
        self._ring_events = _watch(self._woken, self._ring.fileno())
        self._to_open: deque[_Going] = deque()
        self._opening: dict[Future[list[Any]], list[_Going]] = {}
        self._open: deque[_Going] = deque()  # pieces of which wait
        self._pieces: dict[int, tuple[_Going, int]] = {}  # in flight by userdata: of which file; bytes
        self._to_close: deque[_Going] = deque()
        self._closing: dict[Future[list[Any]], list[_Going]] = {}
        self._under_way = 0  # files
        self._next = 0

    @property
    def busy(self) -> bool:
        """Whether something is on its way."""
        return self._under_way > 0

    def start(
        self,
        directory: str,
        staged: StagedFile,
        done: Done,
        written: Callable[[], None] = lambda: None,
        file: File | None = None,
    ) -> None:
        """Begins to write a file. `written` is called once, by a `pump`, when its memory isn't needed any
        more; then `done` once: with None when all replicas hold the file, else with its first failure
        (FAULTS C3). `file`: it is open already, and empty; it is closed here."""
        self._under_way += 1
        path = posixpath.join(directory, staged.plan.file)
        going = _Going(staged, path, done, written)
        if file is not None:
            self._begin(going, file)
        else:
            self._to_open.append(going)

    def pump(self, seconds: float | None) -> None:
        """Goes on with all that can go on; then waits so long for more (None: until there is something)."""
        self._go_on()
        if self._held_s and (seconds is None or seconds > self._held_s):
            seconds = self._held_s
        if self._pieces or self._opening or self._closing or self._held_s:
            # A ring that isn't waited for stays readable: a connection has something to say.
            events = self._ring_events if self._pieces else self._wakes
            events.poll(None if seconds is None else 1000 * seconds)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._woken)
        if self._pieces:
            self._take_in()
        self._go_on()

    def wake(self) -> None:
        """A `pump` that waits goes on. Any thread, before `close`."""
        os.eventfd_write(self._woken, 1)

    def finish(self) -> None:
        """Until nothing is on its way."""
        while self.busy:
            self.pump(None)

    def write(self, directory: str, staged: StagedFile) -> None:
        """One file; durable on all replicas when it returns. Raises its first failure."""
        failures: list[BaseException | None] = []
        self.start(directory, staged, failures.append)
        self.finish()
        if failures[0] is not None:
            raise failures[0]

    def close(self) -> None:
        self._ring.close()
        self._names.shutdown()
        os.close(self._woken)

    # inside

    def _go_on(self) -> None:
        self._take_opened()
        self._feed()
        self._put_away()
        self._send(self._to_open, self._opening, self._open_all)
        idle = not (self._pieces or self._open or self._opening or self._to_open)
        if idle or len(self._to_close) >= _NAMES:
            self._send(self._to_close, self._closing, self._close_all)

    def _send(
        self,
        queued: deque[_Going],
        under_way: dict[Future[list[Any]], list[_Going]],
        work: Callable[[list[_Going]], list[Any]],
    ) -> None:
        """What has queued up goes together, when what went before is over."""
        if queued and not under_way:
            batch = [queued.popleft() for _ in range(min(_NAMES, len(queued)))]
            future = self._names.submit(work, batch)
            under_way[future] = batch
            future.add_done_callback(lambda _: self.wake())

    def _open_all(self, batch: list[_Going]) -> list[Any]:
        return self._client.open_many([going.path for going in batch], "xb")

    def _close_all(self, batch: list[_Going]) -> list[Any]:
        return self._client.close_many([going.file for going in batch if going.file is not None])

    def _take_opened(self) -> None:
        for future in [each for each in self._opening if each.done()]:
            batch = self._opening.pop(future)
            error = future.exception()
            for going, opened in zip(batch, [error] * len(batch) if error else future.result(), strict=True):
                if isinstance(opened, BaseException):
                    going.written()
                    self._end(going, opened)
                    continue
                self._begin(going, opened)

    def _begin(self, going: _Going, file: File) -> None:
        going.file = file
        going.waiting.extend(cut(0, going.staged.nbytes, stream.piece_bytes(file)))
        self._open.append(going)

    def _feed(self) -> None:
        """Pieces of files that are open into the ring, as many as the gate lets through."""
        fed = False
        self._held_s = 0.0
        while self._open and len(self._pieces) < ENTRIES:
            going = self._open[0]
            if going.failure is None and going.waiting:
                self._held_s = self._gate.wait_s(going.waiting[0][1]) if self._gate is not None else 0.0
                if self._held_s:
                    break
                self._prepare(going, *going.waiting.popleft())
                fed = True
            if going.failure is not None or not going.waiting:
                self._open.popleft()
                going.waiting.clear()
                self._written(going)
        if fed:
            try:
                self._ring.submit()
            except BaseException as error:
                self._start_anew(error)

    def _written(self, going: _Going) -> None:
        """To its end, when nothing of it waits or is in flight."""
        if not going.in_flight and not going.waiting:
            going.written()
            self._to_close.append(going)

    def _prepare(self, going: _Going, offset: int, length: int) -> None:
        iov, base = going.staged.region.pool.iov, going.staged.region.begin
        memory = iov[base + offset : base + offset + length]
        assert going.file is not None
        try:
            self._ring.prepare(going.file, offset, memory, self._next)
        except BaseException as error:
            going.failure = error
            return
        self._pieces[self._next] = going, length
        self._next += 1
        going.in_flight += 1

    def _take_in(self) -> None:
        try:
            completions = self._ring.wait(1, 0.0)
        except BaseException as error:  # the ring is no more: all that is in flight has failed
            self._start_anew(error)
            return
        for completion in completions:
            going, length = self._pieces.pop(completion.userdata)
            if completion.error is not None:
                going.failure = going.failure or completion.error
            elif completion.result != length:
                going.failure = going.failure or ProtocolError(
                    f"{completion.result} of {length} bytes were written", going.path
                )
            self._landed(going)

    def _landed(self, going: _Going) -> None:
        """A piece of it: done, or failed. One that has failed with pieces waiting is still in the queue."""
        going.in_flight -= 1
        self._written(going)

    def _put_away(self) -> None:
        for future in [each for each in self._closing if each.done()]:
            batch = self._closing.pop(future)
            error = future.exception()
            for going, closed in zip(batch, [error] * len(batch) if error else future.result(), strict=True):
                self._end(going, going.failure or closed)

    def _end(self, going: _Going, error: BaseException | None) -> None:
        self._under_way -= 1
        going.done(error)

    def _start_anew(self, error: BaseException) -> None:
        self._ring.close()
        self._ring = Ior(self._client, ENTRIES, kind="write", priority=PRIORITY)
        self._ring_events = _watch(self._woken, self._ring.fileno())
        failed, self._pieces = list(self._pieces.values()), {}
        for going, _ in failed:
            going.failure = going.failure or error
            self._landed(going)


def _watch(*descriptors: int) -> select.poll:
    events = select.poll()
    for fd in descriptors:
        events.register(fd, select.POLLIN)
    return events


def link(client: Client, source: str, target: str, replace: bool = False) -> bool:
    """The file of an earlier checkpoint, under a further name; False: it has gone meanwhile. `replace`: an
    empty file has that name."""
    try:
        client.link(source, target, replace=replace)
    except NotFound:
        return False
    return True

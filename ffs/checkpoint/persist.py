"""Writing staged files into a directory of the cluster: hashed, linked where they haven't changed, else
written straight from the memory that they are staged in (docs/guides/checkpoint.md, Memory; Links).
"""

from __future__ import annotations

import posixpath
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import blake3

from ffs.checkpoint import stream
from ffs.checkpoint.manifest import Manifest, Part, Shard, Tensor
from ffs.checkpoint.snapshot import StagedFile, copying_threads
from ffs.checkpoint.spans import cut
from ffs.client.ior import Ior
from ffs.errors import NotFound, ProtocolError

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

PRIORITY: Final = 200  # of writes: training reads go first
ENTRIES: Final = 64
_NAMES_AT_ONCE: Final = 16  # transactions of names: they share the flushes of the metadata service
_LOOK_S: Final = 0.002
_SHARED_BYTES: Final = 1 << 20  # below, a second thread costs more than it brings

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


def hash_parts(staged: StagedFile) -> None:
    """BLAKE3 of each part, by this process's share of the processors. Without the GIL for all but small
    ones."""
    memory = staged.region.memory()
    threads = copying_threads()
    staged.hashes = [
        blake3.blake3(
            memory[placed.begin : placed.end],
            max_threads=threads if part.nbytes >= _SHARED_BYTES else 1,
        ).hexdigest()
        for part, placed in staged.placed()
    ]


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
    """A file on its way: `opening`, then its pieces from `waiting` into the ring, then `closing`."""

    staged: StagedFile
    done: Done
    opening: Future[File]
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: int = 0
    closing: Future[None] | None = None
    failure: BaseException | None = None


class ClusterWriter:
    """Writes files from the pool's memory through one ring, many at once: a file comes into being, and gets
    its length, by durable transactions of the metadata service, which take as long as a MiB or more. One
    thread, with helpers for these transactions. Close it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ring = Ior(client, ENTRIES, kind="write", priority=PRIORITY)
        self._names = ThreadPoolExecutor(_NAMES_AT_ONCE, thread_name_prefix="ffs-ckpt-names")
        self._files: list[_Going] = []  # in the order in which they came
        self._pieces: dict[
            int, tuple[_Going, int]
        ] = {}  # in flight by userdata: of which file, how many bytes
        self._next = 0

    @property
    def busy(self) -> bool:
        """Whether something is on its way."""
        return bool(self._files)

    def start(self, directory: str, staged: StagedFile, done: Done) -> None:
        """Begins to write a file. `done` is called once, by a `pump`: with None when all replicas hold the
        file, else with its first failure (FAULTS C3); then nothing of it is in flight."""
        path = posixpath.join(directory, staged.plan.file)
        opening = self._names.submit(self._client.open, path, "xb", buffering=0)
        self._files.append(_Going(staged, done, opening))

    def pump(self, seconds: float | None) -> None:
        """Goes on with all that can go on; then waits so long for more (None: until there is something)."""
        self._feed()
        if self._pieces:
            soon = any(going.waiting or not going.opening.done() for going in self._files)
            self._take_in(_LOOK_S if soon and (seconds is None or seconds > _LOOK_S) else seconds)
        else:
            asked: list[Future[Any]] = [going.closing or going.opening for going in self._files]
            if asked:
                wait(asked, seconds, FIRST_COMPLETED)
        self._feed()
        self._put_away()

    def finish(self) -> None:
        """Until nothing is on its way."""
        while self._files:
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

    # inside

    def _feed(self) -> None:
        """Pieces of files that are open into the ring, and files whose pieces are written to their end."""
        fed = 0
        for going in self._files:
            if going.closing is not None or not going.opening.done():
                continue
            if going.failure is None and (error := going.opening.exception()) is not None:
                going.failure = error
            elif going.failure is None and not going.waiting and not going.in_flight:
                size = stream.piece_bytes(going.opening.result())
                going.waiting.extend(cut(0, going.staged.nbytes, size))
            while going.waiting and going.failure is None and len(self._pieces) < ENTRIES:
                self._prepare(going, *going.waiting.popleft())
                fed += 1
            if not going.in_flight and (going.failure is not None or not going.waiting):
                going.closing = self._names.submit(_close, going)
        if fed:
            try:
                self._ring.submit()
            except BaseException as error:
                self._start_anew(error)

    def _prepare(self, going: _Going, offset: int, length: int) -> None:
        iov, base = going.staged.region.pool.iov, going.staged.region.begin
        memory = iov[base + offset : base + offset + length]
        try:
            self._ring.prepare(going.opening.result(), offset, memory, self._next)
        except BaseException as error:
            going.failure = error
            return
        self._pieces[self._next] = going, length
        self._next += 1
        going.in_flight += 1

    def _take_in(self, seconds: float | None) -> None:
        try:
            completions = self._ring.wait(1, seconds)
        except BaseException as error:  # the ring is no more: all that is in flight has failed
            self._start_anew(error)
            return
        for completion in completions:
            going, length = self._pieces.pop(completion.userdata)
            going.in_flight -= 1
            if completion.error is not None:
                going.failure = going.failure or completion.error
            elif completion.result != length:
                going.failure = going.failure or ProtocolError(
                    f"{completion.result} of {length} bytes were written", going.opening.result().name
                )
            if not going.in_flight and (going.failure is not None or not going.waiting):
                going.closing = self._names.submit(_close, going)

    def _put_away(self) -> None:
        ended = [going for going in self._files if going.closing is not None and going.closing.done()]
        for going in ended:
            self._files.remove(going)
            assert going.closing is not None
            going.done(going.failure or going.closing.exception())

    def _start_anew(self, error: BaseException) -> None:
        self._ring.close()
        self._ring = Ior(self._client, ENTRIES, kind="write", priority=PRIORITY)
        for going, _ in self._pieces.values():
            going.failure = going.failure or error
            going.in_flight = 0
        self._pieces.clear()


def _close(going: _Going) -> None:
    if going.opening.exception() is None:
        going.opening.result().close()


def link(client: Client, source: str, target: str) -> bool:
    """The file of an earlier checkpoint, under a further name; False: it has gone meanwhile."""
    try:
        client.link(source, target)
    except NotFound:
        return False
    return True

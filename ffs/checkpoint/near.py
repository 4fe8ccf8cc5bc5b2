"""Reading from copies on this host instead of the cluster, where they have the same bytes
(docs/guides/checkpoint.md, Local scratch).

A copy's file is used if its own list of parts - names, boxes, offsets, hashes - is that of the checkpoint's
manifest, and each part only if its bytes have that hash. Whatever can't be read or differs is said in the log
and comes from the cluster.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import posixpath
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ffs.checkpoint.fetch import Want
from ffs.checkpoint.hashing import hash_one
from ffs.checkpoint.manifest import Manifest, Part, Shard, Tensor
from ffs.checkpoint.scratch import copies
from ffs.checkpoint.tensors import Bytes, memory_at

log = logging.getLogger("ffs.checkpoint")

_THREADS: Final = 4
_PIECE_BYTES: Final = 8 << 20
_AHEAD: Final = 8  # parts that are read before they are needed


@dataclass(slots=True)
class Near:
    """Copies of shard files of one checkpoint: `files` by the shard's name. `served`: bytes that came from
    them so far."""

    files: Mapping[str, str]
    served: int = field(default=0)

    def read(self, path: str, manifest: Manifest, wants: Sequence[Want]) -> list[Want]:
        """Serves what the copies hold; what is left for the cluster. Parts that are wanted whole are read to
        where they belong and verified by whoever wants them; of others all is read, if half of it is
        wanted, and verified here. Blocking."""
        parts = {
            (posixpath.join(path, manifest.shards[part.shard].file), part.offset): part
            for tensor in manifest.tensors.values()
            for part in tensor.parts
        }
        begins: dict[str, list[int]] = {}
        for where, offset in sorted(parts):
            begins.setdefault(where, []).append(offset)
        groups: dict[tuple[str, int], list[Want]] = {}
        left = []
        for want in wants:
            if posixpath.basename(want.path) not in self.files or not want.length:
                left.append(want)
                continue
            at = np.searchsorted(begins[want.path], want.offset, side="right") - 1
            groups.setdefault((want.path, begins[want.path][at]), []).append(want)
        with (
            _Disk(self.files, manifest.hash) as disk,
            ThreadPoolExecutor(_THREADS, thread_name_prefix="ffs-near") as pool,
        ):
            going: deque[tuple[list[Want], Part, Future[Bytes | None]]] = deque()
            for key, group in groups.items():
                part = parts[key]
                if 2 * sum(want.length for want in group) < part.bytes:
                    left += group
                    continue
                going.append((group, part, pool.submit(disk.part, key[0], part, group)))
                if len(going) > _AHEAD:
                    left += self._hand_on(*going.popleft())
            while going:
                left += self._hand_on(*going.popleft())
        return left

    def _hand_on(self, group: list[Want], part: Part, coming: Future[Bytes | None]) -> list[Want]:
        try:
            memory = coming.result()
        except (OSError, ValueError) as error:
            log.warning("a local copy can't be used, the cluster is: %s", error)
            return group
        self.served += part.bytes
        for want in group:
            if memory is None:
                want.done(None)  # it lies where it belongs
                continue
            data = memory[want.offset - part.offset :][: want.length]
            if want.into is not None:
                memory_at(want.into)[:] = data
            want.done(None if want.into is not None else data)
        return []


class _Disk:
    """The copies, opened when first needed. Many threads."""

    def __init__(self, files: Mapping[str, str], algorithm: str) -> None:
        self._files = files
        self._algorithm = algorithm
        self._stack = contextlib.ExitStack()
        self._open: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> _Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def part(self, where: str, part: Part, group: Sequence[Want]) -> Bytes | None:
        """None: the one that wants it whole has it, and verifies it. Else its bytes, verified. OSError;
        ValueError: they aren't those that were saved."""
        path = self._files[posixpath.basename(where)]
        only = group[0] if len(group) == 1 else None
        if only is not None and only.length == part.bytes and only.into is not None:
            self._read(path, part.offset, memory_at(only.into))
            return None
        memory = np.empty(part.bytes, np.uint8)
        self._read(path, part.offset, memory)
        if hash_one(self._algorithm, memory) != part.hash:  # by one thread: several do this
            raise ValueError(f"{path}: the bytes at {part.offset} aren't those that were saved")
        return memory

    def _read(self, path: str, offset: int, into: Bytes) -> None:
        plain, direct = self._descriptors(path)
        for begin, end, aligned in spans(offset, len(into), into.ctypes.data):
            at = begin
            while at < end:
                stop = min(at + _PIECE_BYTES, end)
                view = into[at - offset : stop - offset]
                count = os.preadv(direct if aligned and direct >= 0 else plain, [view.data], at)
                if not count:
                    raise ValueError(f"{path}: the file is shorter than it should be")
                at += count
                aligned = aligned and at % mmap.PAGESIZE == 0

    def _descriptors(self, path: str) -> tuple[int, int]:
        found = self._open.get(path)
        if found is None:
            plain = self._opened(path, os.O_RDONLY)
            try:
                direct = self._opened(path, os.O_RDONLY | os.O_DIRECT)
            except OSError:
                direct = -1  # a file system without
            found = self._open[path] = plain, direct
        return found

    def _opened(self, path: str, flags: int) -> int:
        fd = os.open(path, flags | os.O_CLOEXEC)
        self._stack.callback(os.close, fd)
        return fd


def spans(offset: int, length: int, address: int) -> Iterator[tuple[int, int, bool]]:
    """[offset, offset + length) of a file in at most three pieces (begin, end, whether it may go past the
    page cache): whole pages do, if the memory at `address` has its pages where the file has them. Pure."""
    page = mmap.PAGESIZE
    end = offset + length
    first, last = -(-offset // page) * page, end // page * page
    if (offset - address) % page or first >= last:
        yield offset, end, False
        return
    if offset < first:
        yield offset, first, False
    yield first, last, True
    if last < end:
        yield last, end, False


def near_files(root: str, run: str, step: int, manifest: Manifest) -> Near:
    """Of the copies under `root` those that have what the manifest says, file by file."""
    wanted = _rows(manifest.shards, manifest.tensors)
    sizes = {shard.file: shard.bytes for shard in manifest.shards}
    found: dict[str, str] = {}
    for directory, copy in copies(root, run, step):
        for file, rows in _rows(copy.report.shards, copy.report.tensors).items():
            path = os.path.join(directory, file)
            with contextlib.suppress(OSError):
                if rows == wanted.get(file) and os.path.getsize(path) == sizes[file]:
                    found[file] = path
    return Near(found)


_Row = tuple[str, str, tuple[int, ...], int, int, str, object]


def _rows(shards: Sequence[Shard], tensors: Mapping[str, Tensor]) -> dict[str, set[_Row]]:
    """What stands where in each file."""
    found: dict[str, set[_Row]] = {shard.file: set() for shard in shards}
    for name, tensor in tensors.items():
        for part in tensor.parts:
            row = (
                name, tensor.dtype, tensor.shape, part.offset, part.bytes, part.hash, tensor.box_of(part)
            )  # fmt: skip
            found[shards[part.shard].file].add(row)
    return found

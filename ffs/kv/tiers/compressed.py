"""A space whose blocks are compressed with zstd on their way down (docs/kv_tiers.md, Compression).

Every block of such a space is one zstd frame with its length and a checksum of its content, also where that
is longer than the block. So a block needs a little more than its own bytes. A pinned block of the space
itself, the mark, says how the others are to be read. Package: zstandard (extra `zstd`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import blake3
import msgspec
import numpy as np

from ffs._native.iov import Iov
from ffs.errors import FfsError, InvalidArgument, Unsupported
from ffs.kv.blocks import Places
from ffs.kv.results import Results, Status

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.kv.space import Space

_CODEC: Final = "zstd"
_CONTEXT: Final = "ffs 2026 kv space: codec"
_STAGING_BYTES: Final = 32 << 20
_PAGE: Final = 4096
MOST_BYTES: Final = 16_700_000
"""The largest block: its frame must fit in a chunk, whatever the content."""


class _Mark(msgspec.Struct, array_like=True):
    """The mark's content, as msgpack."""

    codec: str
    block_bytes: int


def _mark_key() -> bytes:
    return blake3.blake3(derive_key_context=_CONTEXT).digest()


def frame_bound(nbytes: int) -> int:
    """The most that the frame of so many bytes takes (zstd.h, ZSTD_COMPRESSBOUND, and a checksum)."""
    return nbytes + (nbytes >> 8) + (((128 << 10) - nbytes) >> 11 if nbytes < 128 << 10 else 0) + 4


def _zstandard() -> Any:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise Unsupported("compressed spaces need the package zstandard: pip install 'ffs[zstd]'") from error
    return zstandard


class CompressedSpace:
    """A BlockStore (tiers/store.py) over a space. Any thread; calls block. `level`: zstd's, 1 to 19.

    The space stays the caller's. A frame that can't be read, or isn't the block that its length says, is an
    ERROR: nothing of it is given out."""

    def __init__(self, space: Space, *, block_bytes: int, level: int = 1) -> None:
        """For `create` and `open`."""
        self._zstd = _zstandard()
        self._space = space
        self._level = level
        self._local = threading.local()  # contexts and staging memory aren't to be shared
        self.block_bytes = block_bytes

    @classmethod
    def create(cls, client: Client, path: str, *, block_bytes: int, level: int = 1, **options: Any) -> Self:
        """Makes the space for blocks of up to `block_bytes` (at most 16.7 million), or opens it if it is
        there and `exist_ok` is given; `options`: of Space.create. Blocking."""
        from ffs.kv.space import Space

        if not 0 < block_bytes <= MOST_BYTES:
            raise InvalidArgument(f"compressed blocks have 1 to {MOST_BYTES} bytes, not {block_bytes}", path)
        if not 1 <= level <= 19:
            raise InvalidArgument(f"level {level}: zstd has 1 to 19 here")
        _zstandard()
        space = Space.create(client, path, block_bytes=frame_bound(block_bytes), **options)
        mark = msgspec.msgpack.encode(_Mark(_CODEC, block_bytes))
        space.put_many([_mark_key()], [mark], pin=True).raise_errors()
        return cls(space, block_bytes=block_bytes, level=level)

    @classmethod
    def open(cls, client: Client, path: str, *, level: int = 1, write: bool = True) -> Self:
        """Opens it. InvalidArgument: its blocks aren't compressed, or its mark has expired (`create` with
        exist_ok sets it again). Blocking."""
        from ffs.kv.space import Space

        space = Space.open(client, path, write=write)
        try:
            memory = bytearray(space.block_bytes)
            found = space.get_many([_mark_key()], [memory])
            found.raise_errors()
            if found[0] is not Status.HIT:
                raise InvalidArgument("this space isn't a compressed one: open it by kv.Space", path)
            mark = msgspec.msgpack.decode(memory[: int(found.lengths[0])], type=_Mark)
            if mark.codec != _CODEC:
                raise Unsupported(f"blocks of this space are compressed by {mark.codec!r}", path)
        except BaseException:
            space.close()
            raise
        return cls(space, block_bytes=mark.block_bytes, level=level)

    @property
    def space(self) -> Space:
        return self._space

    def close(self) -> None:
        """Closes the space."""
        self._space.close()

    def _staging(self, blocks: int) -> tuple[Iov, int, int]:
        """Memory for at most so many frames: it, their distance, and how many there is room for."""
        stride = -(-self._space.block_bytes // _PAGE) * _PAGE
        places = max(1, min(blocks, _STAGING_BYTES // stride))
        staging: Iov | None = getattr(self._local, "staging", None)
        if staging is None or len(staging) < places * stride:
            staging = self._local.staging = Iov(places * stride)
        return staging, stride, places

    def put_many(self, keys: Sequence[bytes], values: Any, *, timeout_s: float | None = None) -> Results:
        """As Space.put_many, of Places."""
        sources, lengths = _pieces(values, len(keys), self.block_bytes)
        staging, stride, most = self._staging(len(keys))
        compressor = self._zstd.ZstdCompressor(level=self._level, write_checksum=True)
        parts = []
        memory = staging.numpy()
        for begin in range(0, len(keys), most):
            sizes = []
            for at in range(begin, min(begin + most, len(keys))):
                frame = compressor.compress(sources[at])
                place = (at - begin) * stride
                memory[place : place + len(frame)] = np.frombuffer(frame, dtype=np.uint8)
                sizes.append(len(frame))
            places = Places(staging, np.arange(len(sizes)) * stride, np.array(sizes))
            parts.append(self._space.put_many(keys[begin : begin + most], places, timeout_s=timeout_s))
        results = _joined(parts)
        return Results(results.status, np.where(results.hits, lengths, 0), results.errors)

    def get_many(self, keys: Sequence[bytes], into: Any, *, timeout_s: float | None = None) -> Results:
        """As Space.get_many, into Places."""
        targets, rooms = _pieces(into, len(keys), self.block_bytes)
        staging, stride, most = self._staging(len(keys))
        decompressor = self._zstd.ZstdDecompressor()
        parts, memory = [], staging.buffer()
        for begin in range(0, len(keys), most):
            some = keys[begin : begin + most]
            places = Places(staging, np.arange(len(some)) * stride)
            found = self._space.get_many(some, places, timeout_s=timeout_s)
            status, lengths, errors = found.status.copy(), found.lengths.copy(), dict(found.errors)
            for at in np.flatnonzero(found.status == Status.HIT).tolist():
                frame = memory[at * stride : at * stride + int(found.lengths[at])]
                try:
                    content = self._expand(decompressor, frame, int(rooms[begin + at]))
                except FfsError as error:
                    status[at], lengths[at], errors[at] = Status.ERROR, 0, error
                    continue
                targets[begin + at][: len(content)] = content
                lengths[at] = len(content)
            parts.append(Results(status, lengths, errors))
        return _joined(parts)

    def _expand(self, decompressor: Any, frame: memoryview, room: int) -> bytes:
        try:
            size = self._zstd.frame_content_size(frame)
            if not 0 <= size <= room:
                raise FfsError(f"a block of {size} bytes where {room} are expected", self._space.path)
            content: bytes = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
        except self._zstd.ZstdError as error:
            raise FfsError(f"a block isn't a whole zstd frame ({error})", self._space.path) from error
        if len(content) != size:
            raise FfsError(f"a block of {len(content)} bytes where {size} are expected", self._space.path)
        return content

    def exists_many(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """`lengths` are of the frames."""
        return self._space.exists_many(keys, timeout_s=timeout_s)

    def delete(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        return self._space.delete(keys, timeout_s=timeout_s)


def _pieces(places: Any, count: int, block_bytes: int) -> tuple[list[memoryview], Any]:
    """The memory of each block, and its length."""
    if not isinstance(places, Places):
        raise InvalidArgument("a compressed space takes blocks as ffs.kv.blocks.Places in an Iov")
    lengths = np.broadcast_to(
        np.asarray(block_bytes if places.lengths is None else places.lengths, dtype=np.int64), count
    )
    offsets = np.asarray(places.offsets, dtype=np.int64)
    if len(offsets) != count:
        raise InvalidArgument(f"{count} keys and {len(offsets)} places: give one for each key")
    pieces = []
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        if not 0 < length <= block_bytes:
            raise InvalidArgument(f"a block of {length} bytes: this space takes 1 to {block_bytes}")
        pieces.append(places.iov[offset : offset + length].view)
    return pieces, lengths


def _joined(parts: list[Results]) -> Results:
    if len(parts) == 1:
        return parts[0]
    errors: dict[int, FfsError] = {}
    begin = 0
    for part in parts:
        errors |= {begin + at: error for at, error in part.errors.items()}
        begin += len(part)
    status = np.concatenate([part.status for part in parts]) if parts else np.zeros(0, dtype=np.uint8)
    lengths = np.concatenate([part.lengths for part in parts]) if parts else np.zeros(0, dtype=np.int64)
    return Results(status, lengths, errors)

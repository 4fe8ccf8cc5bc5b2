"""int8 for the values of KV blocks, keys as they are: an option of a space (docs/kv.md, int8 values).

A block has keys and values of some layers as 16-bit floats, in this order and contiguous: [2][layers][tokens]
[heads][head size] (or heads before tokens). Encoded, the keys stand first, unchanged; then a byte for each
value; then (lowest, step) as float32 of each layer and head; then 28 bytes that say the shape, at the end of
a whole number of pages, so that a server reads it straight into an Iov (docs/ring.md, Iov). A value comes
back to within half a step, a 510th of what its head spans in the block, and the rounding of its format;
`error_bound` says it exactly. What isn't finite can't be encoded: such a block is stored as it is, and known
by its length.
"""

from __future__ import annotations

import functools
import math
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ffs._native import int8 as native
from ffs.errors import FfsError, InvalidArgument
from ffs.kv.geometry import MAX_PART_BYTES, Geometry
from ffs.kv.keys import key_array
from ffs.kv.results import Results, Status

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.kv.space import Keys, Space

_TRAILER: Final = struct.Struct("<4s4BIIIII")
_PAGE: Final = 4096
_DTYPES: Final = {"float16": native.FLOAT16, "bfloat16": native.BFLOAT16}
_MANTISSA_BITS: Final = {"float16": 10, "bfloat16": 7}
_LEAST_EXPONENT: Final = {"float16": -14, "bfloat16": -126}


class BlockShape(msgspec.Struct, frozen=True, kw_only=True):
    """Of the blocks of a space. InvalidArgument for what can't be one."""

    layers: int
    tokens: int
    heads: int
    """KV heads."""
    head_size: int
    dtype: str = "bfloat16"
    order: Literal["tokens", "heads"] = "tokens"
    """What comes first within a layer: tokens (then heads), or heads (then tokens)."""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise InvalidArgument(f"dtype {self.dtype!r}: give one of {', '.join(_DTYPES)}")
        if min(self.layers, self.tokens, self.heads, self.head_size) < 1:
            raise InvalidArgument(f"{self}: nothing may be below 1")

    @property
    def values(self) -> int:
        """Numbers in the values of a block; as many are in its keys."""
        return self.layers * self.tokens * self.heads * self.head_size

    @property
    def plain_bytes(self) -> int:
        return 4 * self.values

    @property
    def coded_bytes(self) -> int:
        return -(-self._least_bytes // _PAGE) * _PAGE

    @property
    def _least_bytes(self) -> int:
        """Without filling: so long were coded blocks that are there still."""
        return self._before_trailer + _TRAILER.size

    @property
    def _before_trailer(self) -> int:
        return 3 * self.values + 8 * self.layers * self.heads

    @property
    def _trailer(self) -> bytes:
        """What a coded block says of itself, at its end."""
        return _TRAILER.pack(
            b"ffs8",
            1,
            _DTYPES[self.dtype],
            0 if self.order == "tokens" else 1,
            0,
            self.layers,
            self.tokens,
            self.heads,
            self.head_size,
            0,
        )

    def geometry(self, parts: int = 1) -> Geometry:
        """Of a space of such blocks. InvalidArgument: its blocks can't be coded."""
        if self.coded_bytes >= self.plain_bytes:  # which is how they are told apart, too
            raise InvalidArgument(
                f"a block of this shape has {self.plain_bytes} bytes, {self.coded_bytes} when it is coded:"
                " give it more tokens or layers, or use a plain space"
            )
        if parts != 1:
            raise InvalidArgument(
                f"coded blocks aren't cut, and the space has {parts} parts: give blocks fewer tokens or"
                " layers"
            )
        if self.plain_bytes > MAX_PART_BYTES:
            raise InvalidArgument(
                f"a block of this shape has {self.plain_bytes} bytes, and coded blocks are of at most"
                f" {MAX_PART_BYTES} (16 MiB): give it fewer tokens or layers"
            )
        return Geometry(self.plain_bytes)

    @property
    def stored(self) -> bytes:
        """What a space keeps of it, as its identity."""
        return self._trailer

    @classmethod
    def of_stored(cls, stored: bytes) -> BlockShape | None:
        """The shape that a space keeps; None: it keeps none. InvalidArgument: one that this version can't
        read."""
        if stored[:4] != b"ffs8":
            return None
        names = {number: name for name, number in _DTYPES.items()}
        if len(stored) == _TRAILER.size:
            _, version, dtype, order, _, layers, tokens, heads, head_size, _ = _TRAILER.unpack(stored)
            if version == 1 and dtype in names and order in (0, 1):
                return cls(
                    layers=layers,
                    tokens=tokens,
                    heads=heads,
                    head_size=head_size,
                    dtype=names[dtype],
                    order="heads" if order else "tokens",
                )
        raise InvalidArgument("the space's int8 values are of a newer version: update this client")

    @property
    def ratio(self) -> float:
        """How many times smaller a block becomes."""
        return self.plain_bytes / self.coded_bytes

    @property
    def _native(self) -> tuple[int, int, int, int]:
        if self.order == "tokens":
            return (self.layers, self.tokens, self.heads, self.head_size)
        return (self.layers, 1, self.heads, self.tokens * self.head_size)


def _bytes_of(block: Any, size: int | tuple[int, int], *, writable: bool) -> npt.NDArray[np.uint8]:
    """The memory of a block: a buffer, a numpy array or a CPU tensor of any 16-bit dtype. `size`: or sizes
    that it may have."""
    sizes = size if isinstance(size, tuple) else (size,)
    if hasattr(block, "untyped_storage"):
        import torch

        if block.device.type != "cpu" or not block.is_contiguous():
            raise InvalidArgument("a block is a contiguous tensor in host memory")
        block = block.detach().view(torch.uint8).reshape(-1).numpy()
    try:
        view = memoryview(block).cast("B")
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"a block is contiguous memory ({error})") from error
    if len(view) not in sizes:
        raise InvalidArgument(f"a block of this shape has {sizes[0]} bytes, not {len(view)}")
    if writable and view.readonly:
        raise InvalidArgument("a block to decode into can be written")
    return np.frombuffer(view, dtype=np.uint8)


def encode(shape: BlockShape, block: Any, out: Any) -> None:
    """Codes `block` (`plain_bytes`) into `out` (`coded_bytes`). FfsError with ERANGE: something in its
    values isn't finite. Any thread, without the GIL."""
    given = _bytes_of(block, shape.plain_bytes, writable=False)
    coded = _bytes_of(out, shape.coded_bytes, writable=True)
    n = shape.values
    end = shape._before_trailer
    coded[: 2 * n] = given[: 2 * n]
    coded[end : -_TRAILER.size] = 0
    coded[-_TRAILER.size :] = np.frombuffer(shape._trailer, dtype=np.uint8)
    native.encode(
        given[2 * n :], coded[2 * n : 3 * n], coded[3 * n : end], _DTYPES[shape.dtype], shape._native
    )


def decode(shape: BlockShape, coded: Any, out: Any) -> None:
    """What `encode` made, back into `out`. InvalidArgument: it is no block of this shape. Any thread,
    without the GIL."""
    coded_sizes, plain_bytes, trailer, dtype, native_shape = _plan(shape)
    given = _bytes_of(coded, coded_sizes, writable=False)
    block = _bytes_of(out, plain_bytes, writable=True)
    if given[-_TRAILER.size :].tobytes() != trailer:
        raise InvalidArgument(f"the block wasn't coded with this shape: {shape}")
    native.decode_block(given, block, plain_bytes // 2, dtype, native_shape)


@functools.lru_cache(maxsize=64)
def _plan(shape: BlockShape) -> tuple[tuple[int, int], int, bytes, int, tuple[int, int, int, int]]:
    """What decoding needs to know of a shape: sizes of a coded block, that of a plain one, how coded ones
    end, dtype and shape for native code. To work this out takes as long as decoding a block does."""
    sizes = (shape.coded_bytes, shape._least_bytes)
    return sizes, shape.plain_bytes, shape._trailer, _DTYPES[shape.dtype], shape._native


def error_bound(dtype: str, lowest: float, highest: float) -> float:
    """How far a value can be from what it was, in a head whose values lie from `lowest` to `highest`: half a
    step, one rounding to the 16-bit format, and what float32 loses on the way."""
    step = (highest - lowest) / 255
    largest = max(abs(lowest), abs(highest))
    rounding = largest * math.ldexp(1, -_MANTISSA_BITS[dtype] - 1)
    smallest = math.ldexp(1, _LEAST_EXPONENT[dtype] - _MANTISSA_BITS[dtype] - 1)
    return step / 2 + rounding + smallest + largest * math.ldexp(1, -20)


class Int8Space:
    """A space whose blocks are coded as they are put and decoded as they are read. Any thread.

    The shape is kept with the space, so who opens it needn't know it, and nobody can open it with another.
    Each block says its own too, and one of another shape is a miss."""

    def __init__(self, space: Space, shape: BlockShape) -> None:
        """`space` takes blocks of `plain_bytes`, since what can't be coded is stored as it is."""
        kept = BlockShape.of_stored(space.identity)
        if kept not in (None, shape):
            raise InvalidArgument(f"has blocks of another shape: {kept}, not {shape}", space.path)
        shape.geometry(space.parts)
        if space.block_bytes < shape.plain_bytes:
            raise InvalidArgument(
                f"blocks of this shape have {shape.plain_bytes} bytes, the space takes {space.block_bytes}"
            )
        self.space = space
        self.shape = shape

    @classmethod
    def create(cls, client: Client, path: str, shape: BlockShape, **options: Any) -> Int8Space:
        """Makes a space for such blocks; `options` are those of Space.create. Blocking. InvalidArgument:
        blocks of more than 16 MiB, or in parts."""
        from ffs.kv.space import Space

        block_bytes = shape.geometry(options.get("parts", 1)).block_bytes
        made = Space.create(client, path, block_bytes=block_bytes, identity=shape.stored, **options)
        return cls(made, shape)

    @classmethod
    def open(cls, client: Client, path: str, shape: BlockShape | None = None) -> Int8Space:
        """Opens it. Blocking. NotFound; InvalidArgument: it has blocks of another shape, or none was given
        and it keeps none (one that was made before shapes were kept)."""
        from ffs.kv.space import Space

        space = Space.open(client, path)
        try:
            used = shape or BlockShape.of_stored(space.identity)
            if used is None:
                raise InvalidArgument("keeps no shape of int8 values: give the one it was made with", path)
            return cls(space, used)
        except BaseException:
            space.close()
            raise

    def put_many(self, keys: Keys, blocks: Sequence[Any], *, timeout_s: float | None = None) -> Results:
        """As Space.put_many; a block whose values can't be coded is stored as it is. Blocking."""
        coded = []
        for block in blocks:
            out = np.empty(self.shape.coded_bytes, dtype=np.uint8)
            try:
                encode(self.shape, block, out)
            except FfsError as error:
                if isinstance(error, InvalidArgument):
                    raise
                out = _bytes_of(block, self.shape.plain_bytes, writable=False)
            coded.append(out)
        return self.space.put_many(keys, coded, timeout_s=timeout_s)

    def get_many(self, keys: Keys, into: Sequence[Any], *, timeout_s: float | None = None) -> Results:
        """As Space.get_many: `into` are whole blocks. What isn't a HIT may have left anything there.
        Blocking."""
        hashes = key_array(keys)
        if len(into) != len(hashes):
            raise InvalidArgument(f"{len(hashes)} keys and {len(into)} blocks: give one for each key")
        targets = [_bytes_of(block, self.shape.plain_bytes, writable=True) for block in into]
        staged = [np.empty(self.shape.plain_bytes, dtype=np.uint8) for _ in into]
        got = self.space.get_many(hashes, staged, timeout_s=timeout_s)
        status = got.status.copy()
        for position in np.flatnonzero(got.status == Status.HIT).tolist():
            length = int(got.lengths[position])
            if length == self.shape.plain_bytes:
                targets[position][:] = staged[position]
            elif not self._decoded(staged[position][:length], targets[position]):
                status[position] = Status.MISS
        return Results(status, np.where(status == Status.HIT, self.shape.plain_bytes, 0), got.errors)

    def _decoded(self, coded: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> bool:
        try:
            decode(self.shape, coded, target)
        except InvalidArgument:
            return False  # put by somebody with another shape
        return True

    def close(self) -> None:
        """Repeatable."""
        self.space.close()

    def __enter__(self) -> Int8Space:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Row:
    """What the bench says of one way: GB/s of 16-bit values in and out, on one thread."""

    dtype: str
    backend: str
    ratio: float
    values_ratio: float
    encode_gb_s: float
    decode_gb_s: float
    copy_gb_s: float
    worst_of_bound: float
    """The largest error seen, as a part of the bound: at most 1."""


def bench_rows(shape: BlockShape | None = None, seconds: float = 0.5) -> Iterator[Row]:
    """Ratio and speed of both formats, beside a copy of the same bytes: for `ffs bench kv`."""
    base = shape or BlockShape(layers=8, tokens=16, heads=8, head_size=128)
    for dtype in _DTYPES:
        used = msgspec.structs.replace(base, dtype=dtype)
        numbers = np.random.default_rng(1).standard_normal(2 * used.values).astype(np.float32)
        plain = _narrow(numbers, dtype)
        coded = np.empty(used.coded_bytes, dtype=np.uint8)
        back = np.empty_like(plain)
        copy_s = _time(lambda a=plain, b=back: np.copyto(b, a), seconds)
        encode_s = _time(lambda s=used, a=plain, b=coded: encode(s, a, b), seconds)
        decode_s = _time(lambda s=used, a=coded, b=back: decode(s, a, b), seconds)
        yield Row(
            dtype=dtype,
            backend=native.backend(),
            ratio=used.ratio,
            values_ratio=2 * used.values / (used._before_trailer - 2 * used.values),
            encode_gb_s=used.plain_bytes / encode_s / 1e9,
            decode_gb_s=used.plain_bytes / decode_s / 1e9,
            copy_gb_s=used.plain_bytes / copy_s / 1e9,
            worst_of_bound=worst_of_bound(used, plain, back),
        )


def worst_of_bound(shape: BlockShape, block: Any, decoded: Any) -> float:
    """The largest error in the values of a block, as a part of the bound of its head."""
    was_and_is = [
        _widen(_bytes_of(part, shape.plain_bytes, writable=False), shape.dtype)[shape.values :].reshape(
            shape._native
        )
        for part in (block, decoded)
    ]
    worst = 0.0
    for layer in range(shape.layers):
        for head in range(shape.heads):
            was, now = was_and_is[0][layer, :, head], was_and_is[1][layer, :, head]
            bound = error_bound(shape.dtype, float(was.min()), float(was.max()))
            worst = max(worst, float(np.abs(was - now).max()) / bound)
    return worst


def _widen(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "float16":
        return raw.view(np.float16).astype(np.float64)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _narrow(numbers: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    if dtype == "float16":
        return numbers.astype(np.float16).view(np.uint8)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _time(work: Any, seconds: float) -> float:
    """The least time of one call, over calls for so long."""
    work()
    until = time.perf_counter() + seconds
    best = math.inf
    while time.perf_counter() < until:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best

"""int8 codes of 16-bit floats: the native loops under ffs.kv.int8 (docs/kv.md, int8 values)."""

from __future__ import annotations

import functools
from typing import Any, Final

from ffs._native.lib import check, ffi, lib
from ffs.errors import InvalidArgument

FLOAT16: Final = int(lib.FFS_FLOAT16)
BFLOAT16: Final = int(lib.FFS_BFLOAT16)


def backend() -> str:
    """What this processor gets: "avx512", "avx2" or "plain"."""
    return str(ffi.string(lib.ffs_int8_backend()).decode())


@functools.lru_cache(maxsize=64)
def _shape(dtype: int, blocks: int, outer: int, heads: int, inner: int) -> Any:
    shape = ffi.new("ffs_int8_shape*")
    shape.struct_size = ffi.sizeof("ffs_int8_shape")
    shape.dtype, shape.blocks, shape.outer, shape.heads, shape.inner = dtype, blocks, outer, heads, inner
    return shape


def encode(values: Any, codes: Any, ranges: Any, dtype: int, shape: tuple[int, int, int, int]) -> None:
    """`values`: [blocks][outer][heads][inner] 16-bit floats; `codes` becomes a byte of each, `ranges`
    (lowest, step) as float32 of each head of a block. Contiguous buffers. Without the GIL. InvalidArgument;
    FfsError with ERANGE: a value isn't finite."""
    blocks, outer, heads, inner = shape
    count = blocks * outer * heads * inner
    views = [
        ffi.from_buffer("char[]", values),
        ffi.from_buffer("uint8_t[]", codes, require_writable=True),
        ffi.from_buffer("char[]", ranges, require_writable=True),
    ]
    sizes = (2 * count, count, 8 * blocks * heads)
    for name, view, size in zip(("values", "codes", "ranges"), views, sizes, strict=True):
        if len(view) != size:
            raise InvalidArgument(f"int8: {name} have {len(view)} bytes, this shape needs {size}")
    views[2] = ffi.cast("float*", views[2])
    check(lib.ffs_int8_encode(_shape(dtype, *shape), *views))


def decode_block(coded: Any, block: Any, keys: int, dtype: int, shape: tuple[int, int, int, int]) -> None:
    """Fills `block` from `coded`, both whole, in one call: `keys` bytes come first in both, unchanged, then
    values; in `coded` what `encode` made of them, codes, then ranges, and maybe more. Contiguous buffers.
    Without the GIL. InvalidArgument."""
    blocks, outer, heads, inner = shape
    count = blocks * outer * heads * inner
    source = ffi.from_buffer("char[]", coded)
    target = ffi.from_buffer("char[]", block, require_writable=True)
    if len(source) < keys + count + 8 * blocks * heads or len(target) != keys + 2 * count:
        raise InvalidArgument(
            f"int8: a block of {len(target)} bytes, coded in {len(source)}: this isn't {keys} bytes of keys"
            f" and {count} values"
        )
    check(lib.ffs_int8_decode_block(_shape(dtype, *shape), keys, source, target))

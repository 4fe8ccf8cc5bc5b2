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


def _views(values: Any, codes: Any, ranges: Any, count: int, pairs: int, *, encoding: bool) -> list[Any]:
    views = [
        ffi.from_buffer("char[]", values, require_writable=not encoding),
        ffi.from_buffer("uint8_t[]", codes, require_writable=encoding),
        ffi.from_buffer("char[]", ranges, require_writable=encoding),
    ]
    for name, view, size in zip(
        ("values", "codes", "ranges"), views, (2 * count, count, 8 * pairs), strict=True
    ):
        if len(view) != size:
            raise InvalidArgument(f"int8: {name} have {len(view)} bytes, this shape needs {size}")
    views[2] = ffi.cast("float*", views[2])
    return views


def encode(values: Any, codes: Any, ranges: Any, dtype: int, shape: tuple[int, int, int, int]) -> None:
    """`values`: [blocks][outer][heads][inner] 16-bit floats; `codes` becomes a byte of each, `ranges`
    (lowest, step) as float32 of each head of a block. Contiguous buffers. Without the GIL. InvalidArgument;
    FfsError with ERANGE: a value isn't finite."""
    blocks, outer, heads, inner = shape
    views = _views(values, codes, ranges, blocks * outer * heads * inner, blocks * heads, encoding=True)
    check(lib.ffs_int8_encode(_shape(dtype, *shape), *views))


def decode(values: Any, codes: Any, ranges: Any, dtype: int, shape: tuple[int, int, int, int]) -> None:
    """Fills `values` from what `encode` made. Contiguous buffers. Without the GIL. InvalidArgument."""
    blocks, outer, heads, inner = shape
    to, of_codes, of_ranges = _views(
        values, codes, ranges, blocks * outer * heads * inner, blocks * heads, encoding=False
    )
    check(lib.ffs_int8_decode(_shape(dtype, *shape), of_codes, of_ranges, to))

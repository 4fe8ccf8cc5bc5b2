"""A chunk store without a server, for the local tier of a KV cache (docs/kv_tiers.md, Local store)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from ffs._native.lib import check, ffi, lib
from ffs._native.ring import check_layout
from ffs.errors import BadHandle

__all__ = ["ENTRY_DTYPE", "EXISTS", "PUT", "READ", "REMOVE", "Figures", "LocalStore"]

READ: Final = int(lib.FFS_LOCAL_READ)
PUT: Final = int(lib.FFS_LOCAL_PUT)
REMOVE: Final = int(lib.FFS_LOCAL_REMOVE)
EXISTS: Final = int(lib.FFS_LOCAL_EXISTS)

ENTRY_DTYPE: Final = np.dtype(
    [
        ("key", "u1", (16,)),
        ("tag", "u1", (16,)),
        ("memory", "<u8"),
        ("op", "<u4"),
        ("length", "<u4"),
        ("result", "<i4"),
        ("reserved", "<u4"),
    ]
)
LISTED_DTYPE: Final = np.dtype(
    [("key", "u1", (16,)), ("tag", "u1", (16,)), ("length", "<u4"), ("reserved", "<u4")]
)
check_layout(ENTRY_DTYPE, "ffs_local_entry")
check_layout(LISTED_DTYPE, "ffs_local_listed")
_PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class Figures:
    """Since it was opened. `most_in_flight`: operations; `poisoned`: its device failed, every put fails
    until it is opened again; `uring`: it works by io_uring."""

    most_in_flight: int
    capacity_bytes: int
    free_bytes: int
    chunks: int
    max_chunks: int
    reads: int
    puts: int
    bytes_read: int
    bytes_written: int
    flushes: int
    checksum_errors: int
    poisoned: int
    uring: int


class LocalStore:
    """Opens the store at `path`, or makes it: a file of `size_bytes`. A thread of its own serves it.

    `fresh`: what it holds is forgotten; `sparse`: a new file takes its room as it is written. Calls block,
    without the GIL, and come from any thread. Busy: open already; FfsError with EXDEV: a cluster's device.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size_bytes: int,
        max_chunks: int = 0,
        backend: str = "auto",
        fresh: bool = False,
        sparse: bool = False,
    ) -> None:
        self._raw: Any = None
        options = ffi.new("ffs_local_options*")
        options.struct_size = ffi.sizeof("ffs_local_options")
        options.flags = (lib.FFS_LOCAL_FRESH if fresh else 0) | (lib.FFS_LOCAL_SPARSE if sparse else 0)
        name = ffi.new("char[]", os.fsencode(path))
        options.path = name
        io_backend = ffi.new("char[]", backend.encode())
        options.io_backend = io_backend
        options.size_bytes = size_bytes
        options.max_chunks = max_chunks
        out = ffi.new("ffs_local**")
        check(lib.ffs_local_open(options, out))
        self._raw = out[0]

    def _handle(self) -> Any:
        if self._raw is None:
            raise BadHandle("this local store is closed")
        return self._raw

    def run(self, entries: npt.NDArray[np.void], depth: int = 0) -> None:
        """All of `entries` (contiguous, ENTRY_DTYPE); each has its `result` afterwards. At most `depth` in
        flight, 0: as many as it can. InvalidArgument names the first bad one, and none is done. The memory
        must stay the caller's, and unchanged by others, until it returns."""
        assert entries.dtype == ENTRY_DTYPE
        if len(entries):
            raw = ffi.from_buffer("ffs_local_entry[]", entries, require_writable=True)
            check(lib.ffs_local_run(self._handle(), raw, len(entries), depth))

    def keys(self) -> Iterator[tuple[bytes, int]]:
        """Key and tag, 32 bytes, and length of each block, in the order of the keys; those that come or go
        meanwhile may be missing."""
        page = np.zeros(_PAGE, dtype=LISTED_DTYPE)
        raw = ffi.from_buffer("ffs_local_listed[]", page, require_writable=True)
        after = ffi.NULL
        while count := check(lib.ffs_local_list(self._handle(), after, raw, len(page))):
            for row in page[:count].copy():
                yield row["key"].tobytes() + row["tag"].tobytes(), int(row["length"])
            after = ffi.new("uint8_t[16]", page[count - 1]["key"].tobytes())

    def figures(self) -> Figures:
        out = ffi.new("ffs_local_figures*")
        out.struct_size = ffi.sizeof("ffs_local_figures")
        check(lib.ffs_local_get_figures(self._handle(), out))
        return Figures(**{name: int(getattr(out, name)) for name in Figures.__slots__})

    def close(self) -> None:
        """Idempotent. No call may be under way."""
        raw, self._raw = self._raw, None
        if raw is not None:
            lib.ffs_local_close(raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_raw", None) is not None:
            self.close()

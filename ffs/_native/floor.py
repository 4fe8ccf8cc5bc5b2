"""Floors for benchmarks: own minimal loops that ffs is measured against. docs/ring.md, Floors."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, Final, Self

from ffs._native.lib import check, ffi, lib
from ffs.errors import BadHandle, InvalidArgument

__all__ = ["Floor", "floor_serve"]

_OPS: Final = {"read": 0, "write": 1, "socket": 2, "copy": 3, "message": 4}


class Floor:
    """op "read"/"write": a device file through io_uring and O_DIRECT; "socket": path is host:port of a
    floor_serve; "message": the same, or the path of a Unix socket, and no payload; "copy": memory. Use it in
    the thread that made it. All sizes in bytes; setup happens here, outside of run. region_bytes: what is
    used of the device from region_offset on (write it once before)."""

    def __init__(
        self,
        op: str,
        path: str | os.PathLike[str] = "",
        *,
        block_bytes: int,
        depth: int = 1,
        region_bytes: int = 0,
        region_offset: int = 0,
        random: bool = False,
        crc: bool = False,
        fsync_every: int = 0,
        tcp_congestion: str | None = None,
    ) -> None:
        self._raw: Any = None
        if op not in _OPS:
            raise InvalidArgument(f"floor {op!r}: give one of {', '.join(_OPS)}")
        options = ffi.new("ffs_floor_options*")
        options.struct_size = ffi.sizeof("ffs_floor_options")
        options.op = _OPS[op]
        name = ffi.new("char[]", os.fsencode(path))
        options.path = name
        options.region_bytes = region_bytes
        options.region_offset = region_offset
        options.block_bytes = block_bytes
        options.depth = depth
        options.random = random
        options.crc = crc
        options.fsync_every = fsync_every
        congestion = ffi.NULL if tcp_congestion is None else ffi.new("char[]", tcp_congestion.encode())
        options.tcp_congestion = congestion
        out = ffi.new("ffs_floor**")
        check(lib.ffs_floor_open(options, out))
        self._raw = out[0]
        self._blocks = ffi.new("uint64_t*")
        self._elapsed = ffi.new("uint64_t*")

    def run(self, duration_ms: int) -> tuple[int, int]:
        """Keeps the depth for about duration_ms, then lets it drain: (blocks, nanoseconds). Blocking."""
        if self._raw is None:
            raise BadHandle("this floor is closed")
        check(lib.ffs_floor_run(self._raw, duration_ms, self._blocks, self._elapsed))
        return int(self._blocks[0]), int(self._elapsed[0])

    def close(self) -> None:
        if self._raw is not None:
            lib.ffs_floor_close(self._raw)
            self._raw = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def floor_serve(listener: socket.socket, tcp_congestion: str | None = None) -> None:
    """The peer of the socket floor, for a process of its own: serves until the process ends. Blocking.

    Set the listener's congestion control before (TCP_CONGESTION is inherited), or name it here; one that ends
    in ? is a wish. OSError: the kernel lacks it, or doesn't allow it."""
    if tcp_congestion is not None:
        _set_congestion(listener, tcp_congestion)
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    check(lib.ffs_floor_serve(ffi.NULL, ffi.NULL, listener.fileno(), ffi.NULL))


def _set_congestion(listener: socket.socket, name: str) -> None:
    with suppress(FileNotFoundError, PermissionError) if name.endswith("?") else nullcontext():
        known = name.removesuffix("?").encode()
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, known)

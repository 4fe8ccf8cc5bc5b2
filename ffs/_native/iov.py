"""Iov: shared memory that requests read into and write from, seen as memoryview, numpy or torch; or memory of
a device, which only RDMA reaches.

docs/ring.md, Iov.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ffs._native.lib import check, ffi, lib, native_error
from ffs.errors import BadHandle, Busy, InvalidArgument, Unsupported

__all__ = ["Iov", "IovSlice"]

# Memory whose Iov and views went while requests still used it: freed at a later chance.
_limbo: list[Any] = []
_limbo_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _limbo_lock
    _limbo_lock = threading.Lock()  # a thread that doesn't exist here may hold the old one


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Handle:
    """Owns the C handle; `destroy` runs when nothing in Python refers to the memory any more."""

    __slots__ = ("code", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.code = 0

    def destroy(self) -> None:
        self.code = lib.ffs_iov_destroy(self.raw)
        if self.code == 0:
            self.raw = None


def _destroy_late(handle: _Handle, limbo: list[Any]) -> None:
    handle.destroy()
    if handle.raw is not None:
        limbo.append(handle)


def _sweep_limbo() -> None:
    with _limbo_lock:
        for handle in list(_limbo):
            handle.destroy()
            if handle.raw is None:
                _limbo.remove(handle)


class _NoView:
    """What stands for the memory of a device, of which there are no views."""

    __slots__ = ("__weakref__",)


class Iov:
    """`size` bytes of shared memory (rounded up to pages), for any number of rings and processes.

    numa: the node that it lies on, None for any. hugepages: 2 MiB pages, which must be reserved; data
    then takes one more copy on its way (docs/ring.md). Raises InvalidArgument, or FfsError with ENOMEM.
    Any thread. `close` fails with Busy while requests or views use the memory; after leaving `with`, or
    without close, the memory goes when the last of them does.
    """

    _held: Any = None  # what the memory belongs to, if it isn't ours
    _device = False

    def __init__(self, size: int, numa: int | None = None, hugepages: bool = False) -> None:
        self._open(size, -1 if numa is None else numa, hugepages, -1)

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        """Maps a shared file (another process's `fileno()`), whole; `fd` stays the caller's.

        Its size must be a multiple of 4096. Without the seals of a memfd of ours, a server
        of the same host can't be given its pages (docs/ring.md, Landing)."""
        self = cls.__new__(cls)
        self._open(0, -1, False, fd)
        return self

    @classmethod
    def over(cls, memory: Any) -> Self:
        """An Iov over memory of somebody else: any writable, contiguous buffer, which is held meanwhile.

        For pools that an engine has made itself. A server of the same host can't be given its pages: reads
        take one copy from memory that can (docs/ring.md, Landing), writes go through the socket. There is
        no `fileno`. InvalidArgument: it is empty, or can't be written."""
        try:
            held = ffi.from_buffer("char[]", memory, require_writable=True)
        except (TypeError, ValueError, BufferError) as error:
            raise InvalidArgument(f"an Iov lies over writable, contiguous memory ({error})") from error
        self = cls.at(int(ffi.cast("uintptr_t", held)), len(held))
        self._held = held
        return self

    @classmethod
    def at(cls, address: int, size: int) -> Self:
        """As `over`, by address and bytes: the caller sees to it that the memory is there, writable, for as
        long as this Iov. InvalidArgument: no address, or no bytes."""
        if address <= 0 or size <= 0:
            raise InvalidArgument(f"an Iov over {size} bytes at address {address}: give some memory")
        self = cls.__new__(cls)
        self._open(size, -1, False, -1, address)
        return self

    @classmethod
    def from_dmabuf(cls, fd: int, size: int, offset: int = 0) -> Self:
        """`size` bytes of a device's memory, from byte `offset` of the dmabuf that `fd` is; `fd` stays the
        caller's. docs/rdma.md, Memory of a device.

        There are no views of it. Its requests go over RDMA; others complete as Unsupported. The servers check
        what they send; nothing is checked here. The memory must stay what it is until the Iov is closed.
        Doesn't block. InvalidArgument: no dmabuf, or the range isn't inside it; BadHandle: no
        descriptor."""
        if size <= 0 or offset < 0:
            raise InvalidArgument(f"an Iov of {size} bytes at {offset} of a dmabuf: give some, from 0 on")
        _sweep_limbo()
        options = ffi.new("ffs_dmabuf_options*")
        options.struct_size = ffi.sizeof("ffs_dmabuf_options")
        options.fd, options.offset, options.size_bytes = fd, offset, size
        out = ffi.new("ffs_iov**")
        check(lib.ffs_iov_import_dmabuf(options, out))
        self = cls.__new__(cls)
        self._device = True
        self._adopt(out[0])
        return self

    @classmethod
    def from_cuda(cls, tensor: Any) -> Self:
        """A CUDA tensor's memory (torch; contiguous), exported as a dmabuf by the driver; the tensor is held
        meanwhile. As from_dmabuf; Unsupported: the driver or the GPU exports none.

        What computes the tensor must be over (torch.cuda.synchronize) before a write is prepared, and what
        reads it is launched after `settle`."""
        from ffs._native import cuda

        memory = cuda.export(tensor)
        try:
            self = cls.from_dmabuf(memory.fd, memory.size, memory.offset)
        finally:
            os.close(memory.fd)
        self._held = tensor
        return self

    def _open(self, size: int, numa: int, hugepages: bool, fd: int, address: int = 0) -> None:
        if size < 0 or numa < -1:
            raise InvalidArgument(f"Iov: size {size}, NUMA node {numa}: neither may be negative")
        _sweep_limbo()
        options = ffi.new("ffs_iov_options*")
        options.struct_size = ffi.sizeof("ffs_iov_options")
        options.flags = lib.FFS_IOV_HUGEPAGES if hugepages else 0
        options.size_bytes = size
        options.numa_node = numa
        options.fd = fd
        options.memory = ffi.cast("void*", address)
        out = ffi.new("ffs_iov**")
        check(lib.ffs_iov_create(options, out))
        self._adopt(out[0])

    def _adopt(self, raw: Any) -> None:
        self._handle = _Handle(raw)
        self._size = int(lib.ffs_iov_size(raw))
        self._make_root()

    def _make_root(self) -> None:
        # Every view refers to this object, so that its end is the end of them all.
        raw = self._handle.raw
        self._root: Any = (
            _NoView() if self._device else ffi.buffer(ffi.cast("char*", lib.ffs_iov_data(raw)), self._size)
        )
        self._end = weakref.finalize(self._root, _destroy_late, self._handle, _limbo)
        self._end.atexit = False  # the process ends, and its memory with it

    def settle(self) -> None:
        """After reads into it: kernels that are launched from now on see what the reads have put there.
        For memory of from_cuda; of this host's nothing is to be done. Unsupported: memory of from_dmabuf,
        whose exporter knows how, or a GPU that can't be told."""
        self._live()
        if not self._device:
            return
        if self._held is None:
            raise Unsupported("who exported this dmabuf knows how its device takes in what RDMA has written")
        from ffs._native import cuda

        cuda.settle(self._held)

    def _live(self) -> Any:
        if self._root is None:
            raise BadHandle("this Iov is closed")
        return self._root

    def _memory(self) -> Any:
        root = self._live()
        if self._device:
            raise Unsupported(
                "this Iov is memory of a device (from_dmabuf, from_cuda): there is no view of it for the CPU."
                " Look at it on the device, or read into an ffs.Iov(size)"
            )
        return root

    def close(self) -> None:
        """Frees the memory. Busy: a request, a view, an array or an IovSlice's view still uses it."""
        if self._root is None:
            return
        watch = weakref.ref(self._root)
        handle = self._handle
        self._root = None
        root = watch()
        if root is not None:
            self._root = root
            raise Busy("Iov: views of it (memoryview, numpy, torch) are alive: release them first")
        if handle.raw is not None:
            with _limbo_lock:
                if handle in _limbo:
                    _limbo.remove(handle)
            error = native_error(handle.code)
            self._make_root()
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._root = None  # what still uses the memory keeps it

    def __reduce__(self) -> NoReturn:
        # Of its slices too, which have it.
        raise TypeError(
            f"cannot pickle {self!r}: it is shared memory, no value. Make one in the worker; or give the"
            " worker the descriptor, fileno(), by inheritance or a Unix socket, and map it there by"
            " ffs.Iov.from_fd"
        )

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        where = ", on a device" if self._device else ""
        return f"Iov({self._size}{where}{', closed' if self._root is None else ''})"

    @property
    def on_device(self) -> bool:
        """Whether it is memory of a device, which has no views."""
        return self._device

    @property
    def handle(self) -> int:
        """What ffs_sqe.iov holds. BadHandle after close."""
        self._live()
        return int(ffi.cast("uintptr_t", self._handle.raw))

    def fileno(self) -> int:
        """The memfd, to pass to other processes (Iov.from_fd). It stays this object's. InvalidArgument: it
        has none (`over`, `at`, `from_dmabuf`)."""
        self._live()
        fd = int(lib.ffs_iov_fd(self._handle.raw))
        if fd < 0:
            raise InvalidArgument(
                "this Iov lies over memory of somebody else: there is no descriptor of it to map elsewhere"
            )
        return fd

    def buffer(self) -> memoryview:
        """All of it, writable bytes."""
        return memoryview(self._memory())

    def numpy(
        self, dtype: DTypeLike = np.uint8, shape: int | tuple[int, ...] | None = None, offset: int = 0
    ) -> NDArray[Any]:
        """An array over the memory from byte `offset` on; without a shape, one dimension to the end.

        Raises InvalidArgument if it doesn't fit."""
        kind = np.dtype(dtype)
        count = self._count(kind.itemsize, shape, offset)
        flat: NDArray[Any] = np.frombuffer(self._memory(), dtype=kind, count=count, offset=offset)
        return flat if shape is None else flat.reshape(shape)

    def torch(self, dtype: Any = None, shape: int | tuple[int, ...] | None = None, offset: int = 0) -> Any:
        """A CPU tensor over the memory; torch is imported here. Default dtype: torch.uint8."""
        self._memory()  # before torch, which takes seconds to come
        import torch

        kind = torch.uint8 if dtype is None else dtype
        count = self._count(kind.itemsize, shape, offset)
        if count == 0:
            return torch.empty(0 if shape is None else shape, dtype=kind)
        flat = torch.frombuffer(self.buffer(), dtype=kind, count=count, offset=offset)
        return flat if shape is None else flat.reshape(shape)

    def _count(self, item_bytes: int, shape: int | tuple[int, ...] | None, offset: int) -> int:
        room = self._size - offset
        if offset < 0 or room < 0:
            raise InvalidArgument(f"offset {offset} isn't inside an Iov of {self._size} bytes")
        if shape is None:
            return room // item_bytes
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        count = 1
        for dim in dims:
            if dim < 0:
                raise InvalidArgument(f"shape {shape}: no dimension may be negative")
            count *= dim
        if count * item_bytes > room:
            raise InvalidArgument(
                f"shape {shape} needs {count * item_bytes} bytes; the Iov has {room} from {offset} on"
            )
        return count

    def __getitem__(self, part: slice) -> IovSlice:
        """iov[a:b]: that range, for requests. Bounds are checked, not clipped."""
        if not isinstance(part, slice):
            raise InvalidArgument("an Iov is sliced like iov[a:b]; for bytes use buffer()")
        begin = 0 if part.start is None else part.start
        end = self._size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= begin <= end <= self._size:
            raise InvalidArgument(f"iov[{begin}:{end}] isn't a range inside an Iov of {self._size} bytes")
        self._live()
        return IovSlice(self, begin, end - begin)


class IovSlice:
    """A range of an Iov: .iov, .offset, .length in bytes. Immutable; slicing it gives a part of it."""

    __slots__ = ("iov", "length", "offset")

    def __init__(self, iov: Iov, offset: int, length: int) -> None:
        self.iov = iov
        self.offset = offset
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"{self.iov!r}[{self.offset}:{self.offset + self.length}]"

    @property
    def view(self) -> memoryview:
        """The bytes, writable."""
        return self.iov.buffer()[self.offset : self.offset + self.length]

    def __getitem__(self, part: slice) -> IovSlice:
        if not isinstance(part, slice):
            raise InvalidArgument("a part of an Iov is sliced like part[a:b]; for bytes use buffer()")
        begin = 0 if part.start is None else part.start
        end = self.length if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= begin <= end <= self.length:
            raise InvalidArgument(f"[{begin}:{end}] isn't a range inside a slice of {self.length} bytes")
        return IovSlice(self.iov, self.offset + begin, end - begin)

"""CUDA memory as a dmabuf, by the driver's own library: torch has no call for it.

The driver (libcuda.so.1) is loaded when it is first wanted; nothing here needs a CUDA toolkit. Calls run in
the device's primary context, which torch uses too. Any thread; nothing blocks but the driver's own start.
docs/rdma.md, Memory of a device.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from ffs.errors import InvalidArgument, Unsupported

# Numbers of cuda.h: attributes of a device, kinds of handles, and how writes are ordered and flushed.
_FLUSH_OPTIONS: Final = 117
_WRITES_ORDERING: Final = 118
_DMA_BUF_SUPPORTED: Final = 124
_DMA_BUF_FD: Final = 1
_ORDERED_FOR_OWNER: Final = 100
_FLUSH_BY_HOST: Final = 1
_CURRENT_CONTEXT: Final = 0
_TO_OWNER: Final = 100


class Exported(NamedTuple):
    """`size` bytes from `offset` of the dmabuf `fd`, which the caller closes."""

    fd: int
    size: int
    offset: int


def whole_pages(address: int, size: int, page: int) -> tuple[int, int, int]:
    """The pages that hold a range: where they begin, their bytes, and where the range begins in them."""
    begin = address // page * page
    return begin, -(-(address + size) // page) * page - begin, address - begin


@functools.cache
def _driver() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unsupported(f"there is no CUDA driver here to export memory with ({error})") from error
    for name in ("cuMemGetHandleForAddressRange", "cuFlushGPUDirectRDMAWrites"):
        if not hasattr(library, name):
            raise Unsupported(f"this CUDA driver has no {name}: it takes one of CUDA 11.7 or later")
    return library


def _call(name: str, *arguments: Any) -> None:
    """Raises Unsupported with what the driver says."""
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise Unsupported(f"{name}: {(text.value or b'no such error').decode()} ({code})")


@contextmanager
def _context(device: int) -> Iterator[ctypes.c_int]:
    """The device's primary context is this thread's meanwhile."""
    handle, context, before = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield handle
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(before))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", handle)


def _attribute(number: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), device)
    return value.value


def _device_of(tensor: Any) -> int:
    return int(tensor.device.index or 0)


def export(tensor: Any) -> Exported:
    """A tensor's memory. InvalidArgument: it isn't a contiguous CUDA tensor of some bytes. Unsupported: the
    driver or the GPU exports none, with what the driver says."""
    if not getattr(tensor, "is_cuda", False):
        raise InvalidArgument(f"memory of a CUDA device is wanted, not {type(tensor).__name__} on this host")
    size = tensor.numel() * tensor.element_size()
    if not tensor.is_contiguous() or size == 0:
        raise InvalidArgument("an Iov lies over a contiguous tensor of at least one byte: see .contiguous()")
    begin, length, offset = whole_pages(tensor.data_ptr(), size, os.sysconf("SC_PAGESIZE"))
    with _context(_device_of(tensor)) as device:
        if not _attribute(_DMA_BUF_SUPPORTED, device):
            raise Unsupported(
                "this GPU or its driver exports no dmabuf: it takes NVIDIA's open kernel modules, Linux 5.12"
            )
        fd = ctypes.c_int(-1)
        _call(
            "cuMemGetHandleForAddressRange",
            ctypes.byref(fd),
            ctypes.c_uint64(begin),
            ctypes.c_size_t(length),
            ctypes.c_int(_DMA_BUF_FD),
            ctypes.c_ulonglong(0),
        )
    return Exported(fd.value, size, offset)


def settle(tensor: Any) -> None:
    """What adapters have written into the tensor's device is what kernels launched from now on read. Most
    devices need nothing for that; others are told to. Unsupported: they can't be."""
    with _context(_device_of(tensor)) as device:
        if _attribute(_WRITES_ORDERING, device) >= _ORDERED_FOR_OWNER:
            return
        if not _attribute(_FLUSH_OPTIONS, device) & _FLUSH_BY_HOST:
            raise Unsupported("this GPU can't be told from the host to take in what was written over RDMA")
        _call("cuFlushGPUDirectRDMAWrites", ctypes.c_int(_CURRENT_CONTEXT), ctypes.c_int(_TO_OWNER))

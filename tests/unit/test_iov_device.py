"""Memory of a device: what is taken for some, the words of its errors, and what CUDA's driver is asked."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ffs import errors
from ffs._native import cuda, device_memory
from ffs._native.iov import Iov
from ffs._native.lib import lib
from ffs._native.ring import CQE_DTYPE, error_of_cqe
from ffs.client.transfer import error_of_completion


def test_the_numbers_are_those_of_the_header() -> None:
    for name in ("DEVICE_TRANSPORT", "DEVICE_REGISTER", "DEVICE_REACH", "DEVICE_HOLE"):
        assert getattr(device_memory, name) == getattr(lib, f"FFS_{name}")
    names = {lib.FFS_TRANSPORT_TCP: "tcp", lib.FFS_TRANSPORT_LOCAL: "local", lib.FFS_TRANSPORT_RDMA: "rdma"}
    assert names == device_memory._TRANSPORT_NAMES


def test_only_a_dmabuf_is_taken_for_one() -> None:
    memory = os.memfd_create("no-dmabuf")
    try:
        os.ftruncate(memory, 8192)
        with pytest.raises(errors.InvalidArgument, match="no dmabuf"):
            Iov.from_dmabuf(memory, 4096)
        for size, offset in ((0, 0), (-1, 0), (4096, -1)):
            with pytest.raises(errors.InvalidArgument):
                Iov.from_dmabuf(memory, size, offset)
    finally:
        os.close(memory)
    for fd in (memory, -1):
        with pytest.raises(errors.BadHandle):
            Iov.from_dmabuf(fd, 4096)


class _Places:
    def describe_chain(self, chain: int) -> str:
        return f"chain {chain}"

    def describe_target(self, target: int) -> str:
        return f"the server at 10.0.0.3:7001 (target {target})"


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (device_memory.DEVICE_TRANSPORT, 95, ["over tcp", 'transport="rdma"']),
        (device_memory.DEVICE_REGISTER, 12, ["can't be registered", "Cannot allocate memory"]),
        (device_memory.DEVICE_REACH, 6, ["couldn't reach", "freed or moved"]),
        (device_memory.DEVICE_HOLE, 95, ["hole", "SEEK_DATA"]),
    ],
)
def test_errors_name_the_server_the_transport_and_the_way_out(
    fault: int, code: int, words: list[str]
) -> None:
    cqe = np.zeros(1, dtype=CQE_DTYPE)[0]
    cqe["result"], cqe["detail"], cqe["value"], cqe["chain"] = -code, fault + 256, 103, 4
    error = error_of_completion(cqe, _Places())
    assert error.errno == code
    for each in ("the server at 10.0.0.3:7001 (target 103)", "memory of a device", *words):
        assert each in str(error)
    assert "target 103" in str(error_of_cqe(cqe))


# --- CUDA's driver -----------------------------------------------------------------------------------


class _Driver:
    """The calls of libcuda that are used, of one device; exports a descriptor of a file."""

    def __init__(self, attributes: dict[int, int]) -> None:
        self.attributes = attributes
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.contexts = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            values = tuple(a.value for a in arguments if isinstance(a, ctypes._SimpleCData))
            self.asked.append((name, values))
            own = getattr(type(self), f"_{name}", None)
            return 0 if own is None else int(own(self, *arguments))

        return call

    def _cuCtxPushCurrent_v2(self, *_: Any) -> int:
        self.contexts += 1
        return 0

    def _cuCtxPopCurrent_v2(self, *_: Any) -> int:
        self.contexts -= 1
        return 0

    def _cuDeviceGetAttribute(self, out: Any, number: Any, _: Any) -> int:
        out._obj.value = self.attributes[number.value]
        return 0

    def _cuGetErrorString(self, _: int, out: Any) -> int:
        out._obj.value = b"not so"
        return 0

    def _cuMemGetHandleForAddressRange(self, out: Any, *_: Any) -> int:
        if self.attributes.get(-1):
            return 801
        out._obj.value = os.memfd_create("exported")
        return 0


class _Tensor:
    """As torch's, so far as it is looked at."""

    def __init__(self, address: int, count: int, *, is_cuda: bool = True, contiguous: bool = True) -> None:
        self.address, self.count, self.is_cuda, self.contiguous = address, count, is_cuda, contiguous
        self.device = type("device", (), {"index": 2})()

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self.contiguous


def driver(monkeypatch: pytest.MonkeyPatch, attributes: dict[int, int]) -> _Driver:
    made = _Driver(attributes)
    monkeypatch.setattr(cuda, "_driver", lambda: made)
    return made


def test_a_tensor_is_exported_by_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = driver(monkeypatch, {124: 1})
    exported = cuda.export(_Tensor(0x7F0000001200, 5000))
    os.close(exported.fd)
    assert (exported.size, exported.offset) == (10000, 0x200)
    (range_asked,) = [v for name, v in asked.asked if name == "cuMemGetHandleForAddressRange"]
    assert range_asked[:2] == (0x7F0000001000, 3 * 4096)
    assert ("cuDeviceGet", (2,)) in asked.asked
    assert asked.contexts == 0
    assert cuda.whole_pages(8192, 4096, 4096) == (8192, 4096, 0)


def test_what_cannot_be_exported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for tensor in (_Tensor(4096, 8, is_cuda=False), _Tensor(4096, 8, contiguous=False), _Tensor(4096, 0)):
        with pytest.raises(errors.InvalidArgument):
            Iov.from_cuda(tensor)
    asked = driver(monkeypatch, {124: 0})
    with pytest.raises(errors.Unsupported, match="exports no dmabuf"):
        Iov.from_cuda(_Tensor(4096, 8))
    refusing = driver(monkeypatch, {124: 1, -1: 1})
    with pytest.raises(errors.Unsupported, match=r"cuMemGetHandleForAddressRange: not so \(801\)"):
        Iov.from_cuda(_Tensor(4096, 8))
    assert asked.contexts == refusing.contexts == 0
    before = len(os.listdir("/proc/self/fd"))
    driver(monkeypatch, {124: 1})
    with pytest.raises(errors.InvalidArgument, match="no dmabuf"):  # what this driver exports is none
        Iov.from_cuda(_Tensor(4096, 8))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("ordering", "options", "flushes"), [(100, 0, False), (200, 1, False), (0, 1, True), (0, 0, None)]
)
def test_writes_are_flushed_where_the_device_does_not_order_them(
    monkeypatch: pytest.MonkeyPatch, ordering: int, options: int, flushes: bool | None
) -> None:
    asked = driver(monkeypatch, {118: ordering, 117: options})
    if flushes is None:
        with pytest.raises(errors.Unsupported, match="can't be told"):
            cuda.settle(_Tensor(4096, 8))
    else:
        cuda.settle(_Tensor(4096, 8))
    assert (("cuFlushGPUDirectRDMAWrites", (0, 100)) in asked.asked) == bool(flushes)

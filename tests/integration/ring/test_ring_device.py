"""Memory of a device in a ring, from a dmabuf to an error or its data: docs/rdma.md, Memory of a device.

The dmabuf is of a kernel driver that has no device (vgem), so its pages can be looked at here. Where the RDMA
adapter registers dmabufs its data moves; software RDMA doesn't, and says so. native/test/transport_device.cc
moves data over that, into memory that stands for a device's.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transports import NO_RDMA

from ffs import errors
from ffs._native.iov import Iov
from ffs._native.ring import OP_READ, OP_WRITE, Ring, error_of_cqe

from .conftest import Nodes, capability, finish, key

SIZE = 1 << 18
CREATE_DUMB = 0xC02064B2  # DRM_IOCTL_MODE_CREATE_DUMB
PRIME_HANDLE_TO_FD = 0xC00C642D  # DRM_IOCTL_PRIME_HANDLE_TO_FD


def vgem() -> Path | None:
    for card in Path("/sys/class/drm").glob("card[0-9]*"):
        if (card / "device/driver").resolve().name == "vgem" or "vgem" in (card / "device").resolve().name:
            return Path("/dev/dri") / card.name
    return None


@pytest.fixture(scope="module")
def dmabuf() -> Iterator[int]:
    card = vgem()
    if card is None:
        pytest.skip("the driver vgem isn't loaded (modprobe vgem); the guest of make test-rdma has it")
    with open(card, "r+b", 0) as device:
        made = fcntl.ioctl(device, CREATE_DUMB, struct.pack("=IIIIIIQ", SIZE // 4096, 1024, 32, 0, 0, 0, 0))
        handle = struct.unpack("=IIIIIIQ", made)[4]
        told = fcntl.ioctl(
            device, PRIME_HANDLE_TO_FD, struct.pack("=IIi", handle, os.O_RDWR | os.O_CLOEXEC, 0)
        )
    fd = struct.unpack("=IIi", told)[2]
    yield fd
    os.close(fd)


def test_a_dmabuf_over_rdma_is_taken_whole_or_in_part_and_has_no_views(dmabuf: int) -> None:
    assert os.lseek(dmabuf, 0, os.SEEK_END) == SIZE
    for offset, size in ((0, SIZE), (4096, SIZE - 4096), (77, 3)):
        with Iov.from_dmabuf(dmabuf, size, offset) as iov:
            assert len(iov) == size
            assert iov.on_device
    for offset, size in ((0, SIZE + 1), (SIZE, 1), (1, SIZE)):
        with pytest.raises(errors.InvalidArgument, match="ends before"):
            Iov.from_dmabuf(dmabuf, size, offset)
    iov = Iov.from_dmabuf(dmabuf, SIZE)
    for look in (iov.buffer, iov.numpy, iov.torch, lambda: iov[0:4096].view):
        with pytest.raises(errors.Unsupported, match="no view of it"):
            look()
    with pytest.raises(errors.InvalidArgument, match="no descriptor"):
        iov.fileno()
    with pytest.raises(errors.Unsupported, match="exported"):
        iov.settle()
    iov.close()
    with pytest.raises(errors.BadHandle):
        iov.buffer()


@pytest.mark.parametrize("transport", ["tcp", "local", pytest.param("rdma", marks=NO_RDMA)])
def test_requests_of_a_dmabuf_go_over_rdma_or_say_why_not(three: Nodes, dmabuf: int, transport: str) -> None:
    three.lease()
    client = three.client(transport)
    right = client.add_capability(capability(client))
    data = np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8)
    with (
        Ring(client, 16) as ring,
        Iov(SIZE) as here,
        Iov.from_dmabuf(dmabuf, SIZE) as there,
        mmap.mmap(dmabuf, SIZE) as pages,
    ):
        here.numpy()[:] = data
        ring.prepare_one(OP_WRITE, 1, right, key(0), 0, SIZE, here[0:SIZE], 1)
        assert finish(ring, 1)["result"] == SIZE
        ring.prepare_one(OP_READ, 1, right, key(0), 0, SIZE, there[0:SIZE], 2)
        (read,) = finish(ring, 1)
        if transport == "rdma" and read["result"] == SIZE:  # an adapter that registers dmabufs
            assert pages[:] == data.tobytes()
            pages[:4096] = bytes(4096)
            ring.prepare_one(OP_WRITE, 1, right, key(1), 0, SIZE, there[0:SIZE], 3)
            assert finish(ring, 1)["result"] == SIZE
            ring.prepare_one(OP_READ, 1, right, key(1), 0, SIZE, here[0:SIZE], 4)
            assert finish(ring, 1)["result"] == SIZE
            assert here.buffer() == pages[:]
            return
        target = int(read["value"])
        assert target in three.members[1]
        error = error_of_cqe(read)
        assert isinstance(error, errors.Unsupported)
        wanted = (
            ["can't be registered for rdma", "Operation not supported"]
            if transport == "rdma"
            else [f"reached over {transport}", 'transport="rdma"']
        )
        for words in (f"target {target}", *wanted):
            assert words in str(error)
        # Nothing was touched, and the others go on.
        ring.prepare_one(OP_READ, 1, right, key(0), 0, SIZE, here[0:SIZE], 5)
        assert finish(ring, 1)["result"] == SIZE
        assert ring.stats().retries == 0


@pytest.fixture
def gpu() -> Any:
    if not Path("/dev/nvidiactl").exists():  # before torch, which takes a minute to come in the guest
        pytest.skip("this host has no GPU of NVIDIA")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this host has no GPU that torch can use")
    return torch


@pytest.mark.skipif(bool(NO_RDMA.args[0]), reason="this host has no RDMA device")
def test_tensors_of_a_gpu_over_rdma(three: Nodes, gpu: Any) -> None:
    """Runs by itself on a host with a GPU and an adapter that reaches it."""
    three.lease()
    client = three.client("rdma")
    right = client.add_capability(capability(client))
    source = gpu.randint(0, 256, (SIZE + 100,), dtype=gpu.uint8, device="cuda")[100:]
    target = gpu.zeros(SIZE, dtype=gpu.uint8, device="cuda")
    gpu.cuda.synchronize()
    with Ring(client, 16) as ring, Iov.from_cuda(source) as out, Iov.from_cuda(target) as back:
        for op, part, number in ((OP_WRITE, out[0:SIZE], 1), (OP_READ, back[0:SIZE], 2)):
            ring.prepare_one(op, 1, right, key(5), 0, SIZE, part, number)
            (done,) = finish(ring, 1)
            if done["result"] < 0:
                raise error_of_cqe(done)
            assert done["result"] == SIZE
        back.settle()
        assert gpu.equal(source, target)
        assert ring.stats().bytes_copied == 0

"""Iov: sizes, views, slices, sharing, and what closing it refuses."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from ffs import errors
from ffs._native import iov as iov_module
from ffs._native.iov import Iov
from ffs._native.ring import CQE_DTYPE, SQE_DTYPE, check_layout


def test_size_is_rounded_up_to_pages_and_the_file_is_sealed() -> None:
    with Iov(5000) as iov:
        assert len(iov) == 8192
        seals = fcntl.fcntl(iov.fileno(), fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK
        assert seals & fcntl.F_SEAL_GROW
        with pytest.raises(PermissionError):
            os.ftruncate(iov.fileno(), 4096)


@pytest.mark.parametrize("size", [0, -1, 1 << 60])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(errors.FfsError) as caught:
        Iov(size)
    assert str(caught.value)


def test_unknown_numa_node_is_refused_by_name() -> None:
    with pytest.raises(errors.InvalidArgument, match="NUMA"):
        Iov(4096, numa=900)


def nodes_of(iov: Iov) -> tuple[str, set[str]]:
    """The memory policy of an Iov, and the nodes that its pages are on, as the kernel tells them."""
    begin = iov.numpy().ctypes.data
    with open("/proc/self/numa_maps") as file:
        for line in file:
            address, policy, *rest = line.split()
            if int(address, 16) == begin:
                return policy, {word.partition("=")[0] for word in rest if re.fullmatch(r"N\d+=\d+", word)}
    raise AssertionError("the kernel lists no such mapping")


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="a kernel without NUMA")
def test_memory_lies_on_the_node_that_was_asked_for() -> None:
    """Only node 0 where there are no others; that the policy is the kernel's is seen there too."""
    with open("/sys/devices/system/node/has_memory") as file:
        last = int(re.split(r"[,-]", file.read().strip())[-1])
    for node in sorted({0, last}):
        iov = Iov(1 << 20, numa=node)
        iov.numpy()[:] = 1
        assert nodes_of(iov) == (f"bind:{node}", {f"N{node}"})
    plain = Iov(1 << 20)
    assert nodes_of(plain)[0] == "default"
    with pytest.raises(errors.InvalidArgument, match="NUMA"):
        Iov(1 << 20, numa=last + 1)


def test_huge_pages_work_or_say_how_to_reserve_them() -> None:
    with open("/proc/meminfo") as file:
        free = int(re.search(r"HugePages_Free:\s+(\d+)", file.read())[1])
    if free == 0:
        with pytest.raises(errors.FfsError, match="nr_hugepages"):
            Iov(1, hugepages=True)
    else:
        with Iov(1, hugepages=True) as iov:
            assert len(iov) == 2 << 20


def test_views_share_the_memory() -> None:
    iov = Iov(8192)
    view = iov.buffer()
    numbers = iov.numpy("<u4", (4, 8), offset=128)
    numbers[1, 2] = 0x01020304
    assert view[128 + 40 : 128 + 44] == b"\4\3\2\1"
    assert iov.numpy().shape == (8192,)
    assert iov.numpy("<u8", offset=4096).shape == (512,)
    with pytest.raises(errors.InvalidArgument, match="8192"):
        iov.numpy("<u8", 1025)
    with pytest.raises(errors.InvalidArgument):
        iov.numpy("u1", (-1,))
    with pytest.raises(errors.InvalidArgument):
        iov.numpy("u1", 1, offset=-1)


def test_torch_views_share_the_memory() -> None:
    torch = pytest.importorskip("torch")
    with Iov(8192) as iov:
        tensor = iov.torch(torch.float32, (2, 3), offset=4096)
        tensor.fill_(1.5)
        assert iov.numpy("<f4", 7, offset=4096).tolist() == [1.5] * 6 + [0.0]
        assert iov.torch(torch.int64, (0, 4)).shape == (0, 4)
        del tensor


@pytest.mark.parametrize(
    ("begin", "end"), [(-1, 4), (0, 4097), (5, 4), (4097, 4097), (-5, None)], ids=lambda v: str(v)
)
def test_slices_out_of_bounds_are_refused_not_clipped(begin: int, end: int | None) -> None:
    with Iov(4096) as iov, pytest.raises(errors.InvalidArgument, match="4096"):
        iov[begin:end]


def test_slices_nest() -> None:
    with Iov(4096) as iov:
        part = iov[100:200][10:20]
        assert (part.offset, part.length, len(part)) == (110, 10, 10)
        part.view[:] = b"0123456789"
        assert bytes(iov.buffer()[110:120]) == b"0123456789"
        assert (iov[:].offset, iov[:].length, iov[7:7].length) == (0, 4096, 0)
        with pytest.raises(errors.InvalidArgument):
            part[0:11]
        with pytest.raises(errors.InvalidArgument):
            iov[0:10:2]


@pytest.mark.parametrize("kind", ["memoryview", "part", "numpy", "slice_view"])
def test_close_is_refused_while_a_view_lives(kind: str) -> None:
    iov = Iov(4096)
    view: object = {
        "memoryview": iov.buffer,
        "part": lambda: iov.buffer()[1:2],
        "numpy": lambda: iov.numpy()[3:9].view("<u2"),
        "slice_view": lambda: iov[1:9].view,
    }[kind]()
    with pytest.raises(errors.Busy, match="views"):
        iov.close()
    assert len(iov[0:4096]) == 4096  # still usable
    del view
    gc.collect()
    iov.close()
    iov.close()
    with pytest.raises(errors.BadHandle):
        iov.buffer()
    with pytest.raises(errors.BadHandle):
        _ = iov.handle


def test_the_memory_lives_as_long_as_a_view() -> None:
    array = Iov(1 << 20).numpy()
    gc.collect()
    array[:] = 7
    assert int(array.sum()) == 7 << 20


def _mapped() -> int:
    with open("/proc/self/maps") as file:
        return sum("ffs-iov" in line for line in file)


def test_memory_goes_with_the_last_view_and_with_close() -> None:
    gc.collect()
    before = _mapped()
    for _ in range(20):
        array = Iov(4096).numpy()
        Iov(4096)
        Iov(4096).close()
    assert _mapped() == before + 1
    del array
    gc.collect()
    assert _mapped() == before


def test_another_process_sees_it_by_descriptor() -> None:
    with Iov(8192) as iov:
        os.set_inheritable(iov.fileno(), True)
        code = (
            "import sys; from ffs._native.iov import Iov\n"
            "with Iov.from_fd(int(sys.argv[1])) as iov:\n"
            "    iov.buffer()[8190:8192] = b'ok'\n"
        )
        subprocess.run([sys.executable, "-c", code, str(iov.fileno())], check=True, pass_fds=[iov.fileno()])
        assert bytes(iov.buffer()[8190:]) == b"ok"


def test_from_fd_of_a_plain_file_and_of_what_cannot_be() -> None:
    with tempfile.TemporaryFile() as file:
        with pytest.raises(errors.InvalidArgument, match="4096"):
            Iov.from_fd(file.fileno())
        file.truncate(8192)
        with Iov.from_fd(file.fileno()) as iov:
            iov.buffer()[0:2] = b"hi"
        with mmap.mmap(file.fileno(), 8192) as seen:
            assert seen[0:2] == b"hi"
    with pytest.raises(errors.FfsError):
        Iov.from_fd(10**6)


def test_numpy_layouts_are_checked_against_c() -> None:
    check_layout(SQE_DTYPE, "ffs_sqe")
    with pytest.raises(ImportError, match="rebuild"):
        check_layout(CQE_DTYPE, "ffs_sqe")
    names = list(SQE_DTYPE.names or ())
    names[10], names[11] = names[11], names[10]
    swapped = np.dtype([(n, SQE_DTYPE[n]) for n in names])
    with pytest.raises(ImportError, match="fields"):
        check_layout(swapped, "ffs_sqe")


def test_a_child_of_fork_makes_its_own_while_a_thread_was_making_one() -> None:
    """S26: the lock of what waits to be freed was held by a thread that the child doesn't have."""
    with iov_module._limbo_lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(10)
                with Iov(4096) as iov:
                    code = 0 if len(iov) == 4096 else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

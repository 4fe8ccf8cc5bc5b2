"""The facts of a host that `ffs doctor` judges, read from procfs, sysfs and the kernel itself.

Blocking, as such files are; any thread. Nothing here raises for what a host lacks: what can't be told is
None, "", or an error's words.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ffs.cli.host.rdma import RdmaDevice, number_of, read_devices, text_of
from ffs.cli.host.verbs import Verbs, query

_CAP_IPC_LOCK = 14
_IO_URING_SETUP = 425  # the same on every architecture
_TIME_ERROR = 5  # of adjtimex: the clock isn't synchronized
_TOOL_LIMIT_S = 10


@dataclass(frozen=True, slots=True)
class PathFacts:
    """A place for data. `direct`: "" where files there can be opened with O_DIRECT, else why they can't."""

    path: str
    direct: str
    kind: str


@dataclass(frozen=True, slots=True)
class NetFacts:
    """An interface below an RDMA port. `pfc`: priorities that have it, None where it can't be told. `ecn`:
    priorities with RoCE congestion control, None where the driver doesn't say."""

    name: str
    pfc: tuple[int, ...] | None
    ecn: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Facts:
    """One host at one moment. Sizes in bytes; -1 for no limit."""

    kernel: str
    native: str
    memlock: int
    ipc_lock: bool
    files: int
    io_uring: str
    io_uring_disabled: int
    thp: str
    thp_shmem: str
    huge_pages: int
    huge_pages_free: int
    shm_bytes: int
    shm_free: int
    congestion: str
    congestion_available: tuple[str, ...]
    clock_synchronized: bool | None
    clock_source: str
    numa_nodes: int
    rdma: tuple[RdmaDevice, ...]
    verbs: Verbs
    uverbs_denied: tuple[str, ...]
    networks: tuple[NetFacts, ...]
    paths: tuple[PathFacts, ...]


def gather(paths: tuple[str, ...]) -> Facts:
    """All of this host, and of the files, directories or devices in `paths`."""
    proc, sysfs = Path("/proc"), Path("/sys")
    devices = read_devices()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    netdevs = sorted({port.netdev for device in devices for port in device.ports if port.netdev})
    return Facts(
        kernel=platform.release(),
        native=_native(),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        ipc_lock=_has_capability(proc / "self/status", _CAP_IPC_LOCK),
        files=_limit(resource.RLIMIT_NOFILE),
        io_uring=_io_uring(),
        io_uring_disabled=number_of(proc / "sys/kernel/io_uring_disabled", 0),
        thp=chosen(text_of(sysfs / "kernel/mm/transparent_hugepage/enabled")),
        thp_shmem=chosen(text_of(sysfs / "kernel/mm/transparent_hugepage/shmem_enabled")),
        huge_pages=number_of(proc / "sys/vm/nr_hugepages", 0),
        huge_pages_free=number_of(sysfs / "kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 0),
        shm_bytes=shm.total if shm else 0,
        shm_free=shm.free if shm else 0,
        congestion=text_of(proc / "sys/net/ipv4/tcp_congestion_control"),
        congestion_available=tuple(text_of(proc / "sys/net/ipv4/tcp_available_congestion_control").split()),
        clock_synchronized=_clock_synchronized(),
        clock_source=text_of(sysfs / "devices/system/clocksource/clocksource0/current_clocksource"),
        numa_nodes=max(1, len(list((sysfs / "devices/system/node").glob("node[0-9]*")))),
        rdma=devices,
        verbs=query(),
        uverbs_denied=tuple(d.uverbs for d in devices if d.uverbs and not _may_open(d.uverbs)),
        networks=tuple(NetFacts(name, _pfc(name), _ecn(sysfs, name)) for name in netdevs),
        paths=tuple(_path(path) for path in paths),
    )


def chosen(text: str) -> str:
    """The word in brackets of "always [madvise] never", "" for none. Pure."""
    return text.partition("[")[2].partition("]")[0]


def on_priorities(answer: object) -> tuple[int, ...]:
    """Priorities that have flow control in what `dcb -j pfc show` says. Pure."""
    field = answer.get("prio-pfc") if isinstance(answer, dict) else None
    pairs = field.items() if isinstance(field, dict) else field if isinstance(field, list) else ()
    return tuple(int(priority) for priority, state in pairs if state in (True, "on", 1))


def _native() -> str:
    """ "" where the native library loads, else why it doesn't."""
    try:
        import ffs._native.lib  # noqa: F401
    except ImportError as error:
        return " ".join(str(error).split())
    return ""


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _has_capability(status: Path, number: int) -> bool:
    for line in text_of(status).splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> number & 1)
    return False


def _io_uring() -> str:
    """ "" where this process may make a ring, else the error's words."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_IO_URING_SETUP, 2, ctypes.create_string_buffer(120))
    if fd < 0:
        return os.strerror(ctypes.get_errno())
    os.close(fd)
    return ""


def _clock_synchronized() -> bool | None:
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(512))  # asks only: its first field, modes, is 0
    return None if state < 0 else state != _TIME_ERROR


def _may_open(path: str) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def _path(path: str) -> PathFacts:
    """Tries O_DIRECT on what is there, for reading; in a directory on a file that it makes and removes."""
    try:
        if os.path.isdir(path):
            with tempfile.NamedTemporaryFile(dir=path, prefix=".ffs-doctor-") as probe:
                return PathFacts(path, _direct(probe.name), "directory")
        return PathFacts(path, _direct(path), "device" if Path(path).is_block_device() else "file")
    except OSError as error:
        return PathFacts(path, os.strerror(error.errno or errno.EIO), "unknown")


def _direct(path: str) -> str:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "its file system has no O_DIRECT"
        return os.strerror(error.errno or errno.EIO)
    return ""


def _pfc(netdev: str) -> tuple[int, ...] | None:
    """By the tool `dcb` (iproute2), where it is installed and the driver answers it."""
    tool = shutil.which("dcb") or shutil.which("dcb", path="/usr/sbin:/sbin")
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, "-j", "pfc", "show", "dev", netdev],
            capture_output=True, text=True, check=True, timeout=_TOOL_LIMIT_S,
        )  # fmt: skip
        return on_priorities(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _ecn(sysfs: Path, netdev: str) -> tuple[int, ...] | None:
    """mlx5's switch of DCQCN at the notification point, by priority."""
    folder = sysfs / "class/net" / netdev / "ecn/roce_np/enable"
    if not folder.is_dir():
        return None
    return tuple(sorted(int(each.name) for each in folder.iterdir() if text_of(each) == "1"))

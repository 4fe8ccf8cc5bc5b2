"""The directory of a development cluster.

cluster.json   what it is: shape and address; stays when the cluster is down
run.json       who runs it now: pids with their start times; only while it is up
control        a socket of the supervisor: `ffs dev` (control.py); only while it is up
lock           held by the supervisor for as long as it lives
meta/          the metadata store, which all metadata services share
node<N>/       storage server N: device, or with roles device-kv and device-bulk
log/           one log a process
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from ffs.errors import Busy, Damaged, Exists, InvalidArgument

FORMAT = 1
DEFAULT_FAILURE_TIMEOUT_MS = 1000
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Shape(msgspec.Struct, frozen=True):
    """What `ffs up` was asked for when the directory was made. `nodes` grows with `ffs dev add`; the
    failure timeout, the number of metadata services and the secret may be given anew at each `up`."""

    nodes: int
    replicas: int
    device_bytes: int
    domains: int = 0  # node N is in failure domain N modulo this; 0: each is its own
    failure_timeout_ms: int = DEFAULT_FAILURE_TIMEOUT_MS
    roles: bool = False  # each server has a device of role kv and one of role bulk, of device_bytes each
    metas: int = 1  # metadata services, over one store
    secret_file: str = ""  # absolute path of the cluster secret; "": none
    null_devices: bool = False  # devices that keep records and no bytes, for measuring


class ClusterFile(msgspec.Struct, frozen=True):
    """cluster.json. `address` is the last one: host:port of each metadata service, between commas."""

    format: int
    shape: Shape
    address: str = ""
    cluster: str = ""


class ProcessRecord(msgspec.Struct, frozen=True):
    name: str
    pid: int
    started: int


class RunFile(msgspec.Struct, frozen=True):
    """run.json."""

    supervisor: ProcessRecord
    address: str
    processes: tuple[ProcessRecord, ...]


class Directory:
    """Paths and files of one cluster directory. Reading is free of locks; writing needs `hold`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.cluster_file = self.path / "cluster.json"
        self.run_file = self.path / "run.json"
        self.lock_file = self.path / "lock"
        self.control = self.path / "control"
        self.log = self.path / "log"
        self.meta = self.path / "meta"

    @staticmethod
    def meta_name(index: int) -> str:
        """The process name of a metadata service: meta, meta1, meta2..."""
        return f"meta{index}" if index else "meta"

    def node(self, index: int) -> Path:
        return self.path / f"node{index}"

    def read_cluster(self) -> ClusterFile | None:
        return _read(self.cluster_file, ClusterFile)

    def read_run(self) -> RunFile | None:
        return _read(self.run_file, RunFile)

    def check_usable(self) -> None:
        """Raises unless the directory is a cluster's, empty, or not there yet."""
        if self.path.exists() and not self.path.is_dir():
            raise InvalidArgument("isn't a directory: give a new or empty one", str(self.path))
        if not self.path.exists() or self.cluster_file.exists():
            return
        ours = ("lock", "log", "control")
        strangers = [entry.name for entry in self.path.iterdir() if entry.name not in ours]
        if strangers:
            raise Exists(
                f"holds other files ({strangers[0]}) and no cluster: give a new or empty directory",
                str(self.path),
            )

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Makes this process the one supervisor of the directory. Busy says who is."""
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(self._who_runs(), str(self.path)) from None
            yield
        finally:
            os.close(descriptor)

    def is_held(self) -> bool:
        """Whether a supervisor lives now."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _who_runs(self) -> str:
        run = self.read_run()
        if run is None:
            return "another `ffs up` is starting a cluster here: wait for it"
        return (
            f"this cluster is already up at {run.address} (pid {run.supervisor.pid}): "
            f"use it, or stop it with: ffs down --dir {self.path}"
        )


def write_file(path: Path, value: msgspec.Struct) -> None:
    """Replaces the file as a whole, durably."""
    scratch = path.with_name(path.name + ".new")
    with scratch.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def _read(path: Path, kind: type[_Struct]) -> _Struct | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise Damaged(f"isn't what ffs wrote ({error}): give another directory", str(path)) from error

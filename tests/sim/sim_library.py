"""The library of native/craq/sim.h, and one replica in it."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import subprocess
from pathlib import Path

import sim_wire as wire
from sim_parse import parse
from sim_wire import Answer, Dump, Sample, Status, Store

ROOT = Path(__file__).resolve().parents[2]


class _Options(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("chain", ctypes.c_uint32),
        ("target", ctypes.c_uint64),
        ("max_pendings", ctypes.c_uint32),
        ("max_pendings_per_chunk", ctypes.c_uint32),
        ("resend_ms", ctypes.c_uint64),
        ("peer_lease_ms", ctypes.c_uint64),
        ("suspect_ms", ctypes.c_uint64),
        ("now_ms", ctypes.c_uint64),
        ("sync_window", ctypes.c_uint32),
        ("mutant", ctypes.c_uint32),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Builds the library if it is out of date (FFS_SIM_LIBRARY names another one) and loads it."""
    path = os.environ.get("FFS_SIM_LIBRARY")
    if path is None:
        build = ROOT / "build" / "test"
        build.mkdir(parents=True, exist_ok=True)
        with (ROOT / "build" / ".sim.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for command in (
                ["cmake", "-G", "Ninja", "-S", ROOT, "-B", build, "-DFFS_TESTS=ON", "-DFFS_PYTHON=OFF"],
                ["ninja", "-C", build, "-j", "2", "ffs_craq_sim"],
            ):
                ran = subprocess.run(command, capture_output=True, text=True, check=False)
                if ran.returncode != 0:
                    raise RuntimeError(f"building the simulator failed:\n{ran.stdout}\n{ran.stderr}")
        path = str(build / "libffs_craq_sim.so")
    lib = ctypes.CDLL(path)
    lib.ffs_sim_create.restype = ctypes.c_void_p
    lib.ffs_sim_create.argtypes = (ctypes.POINTER(_Options),)
    lib.ffs_sim_destroy.argtypes = (ctypes.c_void_p,)
    lib.ffs_sim_step.argtypes = (
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_size_t),
    )
    return lib


class Sim:
    """One replica over its model store."""

    def __init__(
        self, target: int, *, chain: int = 7, mutant: int = 0, max_pendings: int = 1024, per_chunk: int = 16,
        resend_ms: int = 200, peer_lease_ms: int = 200, suspect_ms: int = 1000, sync_window: int = 4,
        now: int = 0,
    ) -> None:  # fmt: skip
        self._lib = library()
        options = _Options(
            ctypes.sizeof(_Options), chain, target, max_pendings, per_chunk, resend_ms, peer_lease_ms,
            suspect_ms, now, sync_window, mutant,
        )  # fmt: skip
        self._sim = self._lib.ffs_sim_create(ctypes.byref(options))
        assert self._sim
        self._out = ctypes.c_void_p()
        self._size = ctypes.c_size_t()
        self._refs = (ctypes.byref(self._out), ctypes.byref(self._size))

    def __del__(self) -> None:
        if getattr(self, "_sim", None):
            self._lib.ffs_sim_destroy(self._sim)
            self._sim = None

    def step(self, event: bytes) -> list[tuple[int, object]]:
        error = self._lib.ffs_sim_step(self._sim, event, len(event), *self._refs)
        if error != 0:
            raise ValueError(f"malformed event {event!r}")
        size = self._size.value
        return parse(ctypes.string_at(self._out.value, size)) if size else []

    def status(self) -> Status:
        ((_, body),) = self.step(wire.status())
        assert isinstance(body, Status)
        return body

    def dump(self) -> Dump:
        (_, status), (_, store) = self.step(wire.dump(0))
        assert isinstance(status, Status)
        assert isinstance(store, Store)
        return Dump(status, store)

    def sample(self, key: bytes) -> Sample:
        ((_, found),) = self.step(wire.sample(key))
        assert isinstance(found, Sample)
        return found

    def compare(self, now: int, key: bytes) -> tuple[bytes | None, list[tuple[int, object]]]:
        """The key to go on from, and the other answers."""
        answers = self.step(wire.compare(now, key))
        assert answers[-1][0] == Answer.COMPARED
        more = answers[-1][1]
        assert more is None or isinstance(more, bytes)
        return more, answers[:-1]

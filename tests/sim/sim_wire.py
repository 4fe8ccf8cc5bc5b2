"""The bytes of native/craq/sim.h: events out, answer records in. And the library behind them."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import struct
import subprocess
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MAX_EPOCH = 2**64 - 1

Chain = tuple[int, int]  # term, counter
Version = tuple[int, int, int]  # term, counter, update
Identity = tuple[int, int, int]  # client, channel, sequence
NONE: Version = (0, 0, 0)


class Outcome(IntEnum):
    OK = 0
    EXISTED = 1
    ABSENT = 2
    TAG_DIFFERS = 3
    STALE_CHAIN = 4
    NOT_HEAD = 5
    OFFLINE = 6
    DENIED = 7
    FENCED = 8
    OLD_SEQUENCE = 9
    STALE_EPOCH = 10
    NO_SPACE = 11
    OVER_QUOTA = 12
    FELL_WITH_BASE = 13
    CONDITION_FAILED = 14
    INVALID = 15
    TIMED_OUT = 16
    BAD_CHECKSUM = 17
    IO_ERROR = 18
    DROPPED = 19
    CORRUPT = 20


class Kind(IntEnum):
    WRITE = 1
    TRUNCATE = 2
    REMOVE = 3
    REPLACE = 4
    CREATE = 5


class Mutant(IntEnum):
    """craq::Mutant."""

    NONE = 0
    COMMIT_BEFORE_SUCCESSOR = 1
    TAIL_COMMITS_WITHOUT_HELD = 2
    IGNORE_RETRY_TABLE = 3
    NO_RECHECK_AFTER_READ = 4
    REUSE_VERSIONS_AFTER_RESTART = 5
    IGNORE_BASE = 6
    SERVE_BEFORE_RECONCILE = 7
    DIRTY_READ_ANSWERS_LOCAL = 8
    FORGET_REFUSALS = 9
    FORGET_RETRIES_ON_RESTART = 10
    COMMIT_UNKNOWN_PENDINGS = 11


class PayloadState(IntEnum):
    READY = 0
    LATER = 1
    BAD = 2


class RecordKind(IntEnum):
    STAGE = 1
    STAGE_COMMIT = 2
    COMMIT = 3
    REFUSE = 4
    EPOCH = 5
    CHAIN = 6
    FENCE = 7


class Answer(IntEnum):
    SEND = 1
    REPLY = 2
    RECORD = 3
    STARTED = 4
    STATE = 5
    PROPOSAL = 6
    FAULT = 7
    DUMPED = 8
    FAILED = 9


class Reply(NamedTuple):
    token: int
    outcome: Outcome
    reason: int
    chain: Chain
    version: Version
    length: int
    key: bytes
    more: bool
    count: int
    content: bytes


class Record(NamedTuple):
    kind: RecordKind
    key: bytes
    version: Version
    base: Version
    identity: Identity
    removal: bool
    outcome: Outcome
    update_kind: int
    exists: bool
    content: bytes


class ChunkDump(NamedTuple):
    exists: bool
    version: Version
    tag: int
    content: bytes
    pendings: list[tuple[Version, bool, Identity, bytes]]


class Dump(NamedTuple):
    serving: bool
    reason: int
    chain: Chain
    proposed: Chain
    adopted: Chain
    persisted_here: bool
    pendings: int
    waiting: int
    buffers: int
    undurable: int
    chunks: dict[bytes, ChunkDump]


def key_of(space: int, index: int) -> bytes:
    return struct.pack(">QQQ", space, 0, index)


def space_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


# ---- events ---------------------------------------------------------------------------------

_HEAD = struct.Struct("<BQ")
_UPDATE = struct.Struct("<QIIHQIQ24sBIIQIIQQQBBI")
_READ = struct.Struct("<QIIH24sIIQBQQ")
_SPACE = struct.Struct("<QIIHQ")


def tick(now: int) -> bytes:
    return _HEAD.pack(1, now)


def configure(now: int, chain: Chain, members: list[int], *, proposed: bool = False, state: int = 1) -> bytes:
    """RECORDED or PROPOSED; state is a MemberState (1: serving)."""
    body = b"".join(struct.pack("<QB", m, state) for m in members)
    return _HEAD.pack(3 if proposed else 2, now) + struct.pack("<IIB", *chain, len(members)) + body


def update(
    now: int,
    token: int,
    chain: Chain,
    identity: Identity,
    key: bytes,
    kind: int,
    *,
    offset: int = 0,
    length: int | None = None,
    payload: bytes = b"",
    tag: int = 0,
    expected: Version = NONE,
    epoch: int = 0,
    deadline: int = 0,
    need_existing: bool = False,
    payload_state: int = PayloadState.READY,
    authority: int = Outcome.OK,
) -> bytes:
    size = len(payload) if length is None else length
    return (
        _HEAD.pack(4, now)
        + _UPDATE.pack(
            token, *chain, authority, *identity, key, kind, offset, size, tag, *expected, epoch, deadline,
            need_existing, payload_state, len(payload),
        )
        + payload
    )  # fmt: skip


def read(
    now: int, token: int, chain: Chain, key: bytes, *, offset: int = 0, length: int = 1 << 24, epoch: int = 0,
    flags: int = 0, tag: int = 0, deadline: int = 0,
) -> bytes:  # fmt: skip
    """flags: 1 uncommitted_ok, 2 facts_only, 4 compare_tag."""
    return _HEAD.pack(5, now) + _READ.pack(
        token, *chain, Outcome.OK, key, offset, length, epoch, flags, tag, deadline
    )


def set_epoch(now: int, token: int, chain: Chain, space: int, epoch: int, deadline: int = 0) -> bytes:
    return (
        _HEAD.pack(6, now)
        + _SPACE.pack(token, *chain, Outcome.OK, space)
        + struct.pack("<QQ", epoch, deadline)
    )


def remove_page(
    now: int, token: int, chain: Chain, space: int, after: bytes | None, limit: int, deadline: int = 0,
    epoch: int = MAX_EPOCH,
) -> bytes:  # fmt: skip
    tail = struct.pack("<B24sIQQ", after is not None, after or bytes(24), limit, epoch, deadline)
    return _HEAD.pack(7, now) + _SPACE.pack(token, *chain, Outcome.OK, space) + tail


def last_chunk(now: int, token: int, chain: Chain, space: int, deadline: int = 0) -> bytes:
    return _HEAD.pack(8, now) + _SPACE.pack(token, *chain, Outcome.OK, space) + struct.pack("<Q", deadline)


def message(now: int, body: bytes, payload_state: int = PayloadState.READY) -> bytes:
    return _HEAD.pack(9, now) + struct.pack("<BI", payload_state, len(body)) + body


def disk(now: int, count: int) -> bytes:
    return _HEAD.pack(10, now) + struct.pack("<I", count)


def done(now: int, op: int, outcome: int = Outcome.OK) -> bytes:
    return _HEAD.pack(11, now) + struct.pack("<QH", op, outcome)


def connected(now: int, target: int) -> bytes:
    return _HEAD.pack(12, now) + struct.pack("<Q", target)


def crash(now: int, keep: int) -> bytes:
    return _HEAD.pack(13, now) + struct.pack("<I", keep)


def space(now: int, admit: int, stage: int) -> bytes:
    return _HEAD.pack(14, now) + struct.pack("<HH", admit, stage)


def dump(now: int) -> bytes:
    return _HEAD.pack(15, now)


def fence(now: int, client: int) -> bytes:
    return _HEAD.pack(16, now) + struct.pack("<Q", client)


# ---- answers --------------------------------------------------------------------------------

_REPLY = struct.Struct("<QHBIIIIQI24sBII")
_RECORD = struct.Struct("<B24sIIQIIQQIQBHBBI")
_RECORD_HEAD = struct.Struct("<BI")


def parse(answer: bytes) -> list[tuple[int, object]]:
    """[(Answer, ...)]: SEND (to, message, type), REPLY Reply, RECORD Record, STARTED (kind, op), STATE
    (serving, reason, chain), PROPOSAL chain, FAULT text, DUMPED Dump, FAILED outcome."""
    out: list[tuple[int, object]] = []
    at, end = 0, len(answer)
    while at < end:
        kind, size = _RECORD_HEAD.unpack_from(answer, at)
        at += 5
        out.append((kind, _PARSERS[kind](answer, at, size)))
        at += size
    return out


def _send(b: bytes, at: int, size: int) -> object:
    to, length = struct.unpack_from("<QI", b, at)
    return to, b[at + 12 : at + 12 + length], b[at + 12 + length]


def _reply(b: bytes, at: int, size: int) -> object:
    f = _REPLY.unpack_from(b, at)
    content = b[at + _REPLY.size : at + size]
    return Reply(
        f[0], Outcome(f[1]), f[2], (f[3], f[4]), (f[5], f[6], f[7]), f[8], f[9], bool(f[10]), f[11], content
    )


def _record(b: bytes, at: int, size: int) -> object:
    f = _RECORD.unpack_from(b, at)
    content = b[at + _RECORD.size : at + size]
    return Record(
        RecordKind(f[0]), f[1], f[2:5], f[5:8], f[8:11], bool(f[11]), Outcome(f[12]), f[13], bool(f[14]),
        content,
    )  # fmt: skip


def _started(b: bytes, at: int, size: int) -> object:
    return struct.unpack_from("<BQ", b, at)


def _state(b: bytes, at: int, size: int) -> object:
    serving, reason, term, counter = struct.unpack_from("<BBII", b, at)
    return bool(serving), reason, (term, counter)


def _chain(b: bytes, at: int, size: int) -> object:
    return struct.unpack_from("<II", b, at)


def _fault(b: bytes, at: int, size: int) -> object:
    return b[at + 4 : at + size].decode()


def _failed(b: bytes, at: int, size: int) -> object:
    return Outcome(struct.unpack_from("<H", b, at)[0])


def _dumped(b: bytes, at: int, size: int) -> object:
    f = struct.unpack_from("<BBIIIIIIBIIIII", b, at)
    at += struct.calcsize("<BBIIIIIIBIIIII")
    chunks: dict[bytes, ChunkDump] = {}
    for _ in range(f[13]):
        key, exists, *rest = struct.unpack_from("<24sBIIQQI", b, at)
        at += struct.calcsize("<24sBIIQQI")
        content = b[at : at + rest[4]]
        at += rest[4]
        (count,) = struct.unpack_from("<I", b, at)
        at += 4
        pendings = []
        for _ in range(count):
            p = struct.unpack_from("<IIQBQIQI", b, at)
            at += struct.calcsize("<IIQBQIQI")
            pendings.append((p[0:3], bool(p[3]), p[4:7], b[at : at + p[7]]))
            at += p[7]
        chunks[key] = ChunkDump(bool(exists), (rest[0], rest[1], rest[2]), rest[3], content, pendings)
    return Dump(
        bool(f[0]), f[1], f[2:4], f[4:6], f[6:8], bool(f[8]), f[9], f[10], f[11], f[12], chunks
    )  # fmt: skip


_PARSERS = {
    Answer.SEND: _send,
    Answer.REPLY: _reply,
    Answer.RECORD: _record,
    Answer.STARTED: _started,
    Answer.STATE: _state,
    Answer.PROPOSAL: _chain,
    Answer.FAULT: _fault,
    Answer.DUMPED: _dumped,
    Answer.FAILED: _failed,
}


# ---- the library ----------------------------------------------------------------------------


class _Options(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("chain", ctypes.c_uint32),
        ("target", ctypes.c_uint64),
        ("max_pendings", ctypes.c_uint32),
        ("max_pendings_per_chunk", ctypes.c_uint32),
        ("resend_ms", ctypes.c_uint64),
        ("mutant", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
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
        resend_ms: int = 200,
    ) -> None:  # fmt: skip
        self._lib = library()
        options = _Options(
            ctypes.sizeof(_Options), chain, target, max_pendings, per_chunk, resend_ms, mutant, 0
        )
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

    def dump(self) -> Dump:
        for kind, body in self.step(dump(0)):
            if kind == Answer.DUMPED:
                assert isinstance(body, Dump)
                return body
        raise AssertionError("no dump")

"""The bytes of native/craq/sim.h: events out, answer records in. And the library behind them."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import struct
import subprocess
from collections.abc import Sequence
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
    NO_LEASE_CHECK_AFTER_READ = 20
    NO_LEASE_CHECK = 21
    PERSIST_WITHOUT_WAITING_FOR_LEASES = 22
    NO_START_HOLD = 23
    SERVE_DIRTY_AS_NEW_LAST = 24
    KEEP_SERVING_WHEN_LEFT_OUT = 25
    LONE_WITHOUT_PERSISTED_CHECK = 26
    EARLY_PROMOTION = 30
    NO_WAIT_IN_STEP = 31
    IGNORE_SYNC_NUMBERS = 32
    FORGET_BACKLOG = 33
    NO_RETRY_COPY = 34
    NO_ERASE = 35
    SPREAD_CORRUPTION = 36
    REPAIR_ANY_VERSION = 37
    TRUST_OLD_ATTEMPTS = 38
    NO_EPOCH_COPY = 39
    EVICT_WHATEVER_HAPPENED = 50
    EVICT_BESIDE_PENDINGS = 51
    EXPIRED_IS_THERE = 52


class Notice(IntEnum):
    """craq::NoticeType."""

    HELD = 1
    ACK = 2
    REFUSAL = 3
    CANCEL = 4
    MISSING = 5
    QUERY = 6
    ANSWER = 7
    SPACE_EPOCH = 8
    SPACE_EPOCH_ACK = 9
    RECONCILE = 10
    RECONCILE_ANSWER = 11
    RECONCILED = 12
    RESENT = 13
    READY = 14
    INVITE = 15
    LEASE_ASK = 16
    LEASE_GRANT = 17


class PayloadState(IntEnum):
    READY = 0
    LATER = 1
    BAD = 2


class RecordKind(IntEnum):
    STAGE = 1
    COMMIT = 3
    REFUSE = 4
    EPOCH = 5
    CHAIN = 6
    FENCE = 7
    INSTALL = 8
    ERASE = 9
    RESET = 10
    SET_RETRY = 11


class Member(IntEnum):
    """craq::MemberState."""

    SERVING = 1
    SYNCING = 2
    WAITING = 3
    LAST_SERVING = 4
    OFFLINE = 5


class Reason(IntEnum):
    """craq::Reason."""

    NONE = 0
    NO_CONFIGURATION = 1
    RESTARTED = 2
    MEMBERS_INCOMPLETE = 3
    NOT_A_MEMBER = 4
    PERSISTING = 5
    RECONCILING = 6
    RESUMING = 7
    DEVICE_FAILED = 8
    DIVERGED = 9
    NO_LEASE = 10
    LEFT_OUT = 11
    SYNCING = 12
    START_HOLD = 13


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
    REPAIRED = 10
    STATUS = 11
    COMPARED = 12
    EVICTION = 13
    EVICTED = 14
    SAMPLED = 15


class Eviction(IntEnum):
    """craq::EvictionAnswer."""

    ORDERED = 0
    CHANGED = 1
    BUSY = 2
    NOT_HEAD = 3


class Sample(NamedTuple):
    """A committed chunk as eviction sees it; version NONE: there is none."""

    version: Version
    last_access: int
    pinned: bool
    expired: bool


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

    def __str__(self) -> str:
        why = f" ({Reason(self.reason).name.lower()})" if self.reason else ""
        return (
            f"{self.outcome.name}{why} in {dotted(self.chain)}: {short(self.key)} {dotted(self.version)} "
            f"{self.content.hex()}"
        )


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

    def __str__(self) -> str:
        kind = self.kind.name.lower()
        if self.kind == RecordKind.CHAIN:
            return f"{kind} adopted {dotted(self.version[:2])} proposed {dotted(self.base[:2])}"
        who = f" by {dotted(self.identity)}" if any(self.identity) else ""
        outcome = f" {self.outcome.name}" if self.outcome else ""
        content = " removal" if self.removal else f" {self.content.hex()}"
        return (
            f"{kind}{outcome} {short(self.key)} {dotted(self.version)} on {dotted(self.base)}{who}{content}"
        )


class ChunkDump(NamedTuple):
    exists: bool
    version: Version
    tag: int
    damaged: bool
    content: bytes
    pendings: list[tuple[Version, bool, Identity, bytes]]


class RetryDump(NamedTuple):
    sequence: int
    key: bytes
    version: Version
    state: int  # 1 pending, 2 done, 3 refused
    outcome: int


class Status(NamedTuple):
    """ReplicaStatus, and what the model store and the buffers hold."""

    serving: bool
    reason: int
    chain: Chain
    proposed: Chain  # durable, as the next
    adopted: Chain
    persisted_here: bool
    state: int  # Member
    leased: bool
    suspect: int
    sync_target: int
    sync_done: bool
    sync_failure: int
    damaged: int
    repaired: int
    pendings: int
    waiting: int
    buffers: int
    undurable: int


class Store(NamedTuple):
    """What the target's model store shows."""

    chunks: dict[bytes, ChunkDump]
    retry: dict[tuple[int, int], RetryDump]  # by client and channel
    epochs: dict[int, int]


class Dump(NamedTuple):
    status: Status
    store: Store


def key_of(space: int, index: int) -> bytes:
    return struct.pack(">QQQ", space, 0, index)


def space_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def short(key: bytes) -> str:
    """For traces."""
    return f"{space_of(key)}/{int.from_bytes(key[8:], 'big')}" if any(key) else "-"


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) if any(version) else "-"


# ---- events ---------------------------------------------------------------------------------

_HEAD = struct.Struct("<BQ")
_UPDATE = struct.Struct("<QIIHQIQ24sBIIQBQIIQQQBBI")
_READ = struct.Struct("<QIIH24sIIQBQQ")
_SPACE = struct.Struct("<QIIHQ")


def tick(now: int) -> bytes:
    return _HEAD.pack(1, now)


def configure(
    now: int, chain: Chain, members: Sequence[tuple[int, int, int]], *, proposed: bool = False
) -> bytes:
    """RECORDED or PROPOSED; members: target, Member, incarnation."""
    body = b"".join(struct.pack("<QBQ", *m) for m in members)
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
    pin: bool = False,
    expiry: int = 0,
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
            token, *chain, authority, *identity, key, kind, offset, size, tag, pin, expiry, *expected, epoch,
            deadline, need_existing, payload_state, len(payload),
        )
        + payload
    )  # fmt: skip


def read(
    now: int, token: int, chain: Chain, key: bytes, *, offset: int = 0, length: int = 1 << 24, epoch: int = 0,
    flags: int = 0, tag: int = 0, deadline: int = 0,
) -> bytes:  # fmt: skip
    """flags: 1 uncommitted_ok, 2 facts_only, 4 compare_tag, 8 touch."""
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


def space(now: int, admit: int, stage: int, *, evicts: bool = False) -> bytes:
    return _HEAD.pack(14, now) + struct.pack("<HHB", admit, stage, evicts)


def dump(now: int) -> bytes:
    return _HEAD.pack(15, now)


def fence(now: int, client: int) -> bytes:
    return _HEAD.pack(16, now) + struct.pack("<Q", client)


def lease(now: int, until: int) -> bytes:
    return _HEAD.pack(17, now) + struct.pack("<Q", until)


def start(now: int, *, wipe: bool = False) -> bytes:
    return _HEAD.pack(18, now) + struct.pack("<B", wipe)


def damage(key: bytes, *, silent: bool = False) -> bytes:
    return _HEAD.pack(19, 0) + struct.pack("<24sB", key, silent)


def damaged(now: int, key: bytes, version: Version) -> bytes:
    return _HEAD.pack(20, now) + struct.pack("<24sIIQ", key, *version)


def compare(now: int, key: bytes) -> bytes:
    return _HEAD.pack(21, now) + struct.pack("<24s", key)


def evict(now: int, key: bytes, chosen: Sample) -> bytes:
    order = struct.pack("<24sIIQQB", key, *chosen.version, chosen.last_access, chosen.expired)
    return _HEAD.pack(23, now) + order


def clock(manager_ms: int) -> bytes:
    return _HEAD.pack(24, 0) + struct.pack("<Q", manager_ms)


def touch(key: bytes) -> bytes:
    return _HEAD.pack(25, 0) + struct.pack("<24s", key)


def sample(key: bytes) -> bytes:
    return _HEAD.pack(26, 0) + struct.pack("<24s", key)


def status() -> bytes:
    return _HEAD.pack(22, 0)


# ---- answers --------------------------------------------------------------------------------

_REPLY = struct.Struct("<QHBIIIIQI24sBII")
_RECORD = struct.Struct("<B24sIIQIIQQIQBHBBI")
_RECORD_HEAD = struct.Struct("<BI")


def parse(answer: bytes) -> list[tuple[int, object]]:
    """[(Answer, ...)]: SEND (to, message, type), REPLY Reply, RECORD Record, STARTED (kind, op), STATE
    (serving, reason, chain), PROPOSAL chain, FAULT text, DUMPED Store, FAILED outcome, REPAIRED (key,
    version, ok), STATUS Status, COMPARED key or None, EVICTION Eviction, EVICTED (key,
    outcome), SAMPLED Sample."""
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


_STATUS = struct.Struct("<BBIIIIIIBBBQQBHIIIIII")
_CHUNK = struct.Struct("<24sBIIQQBI")
_PENDING = struct.Struct("<IIQBQIQI")
_RETRY = struct.Struct("<QIQ24sIIQBH")


def _status(b: bytes, at: int, size: int) -> object:
    f = _STATUS.unpack_from(b, at)
    return Status(
        bool(f[0]), f[1], f[2:4], f[4:6], f[6:8], bool(f[8]), f[9], bool(f[10]), f[11], f[12], bool(f[13]),
        *f[14:],
    )  # fmt: skip


def _repaired(b: bytes, at: int, size: int) -> object:
    key, term, counter, number, ok = struct.unpack_from("<24sIIQB", b, at)
    return key, (term, counter, number), bool(ok)


def _compared(b: bytes, at: int, size: int) -> object:
    more, key = struct.unpack_from("<B24s", b, at)
    return key if more else None


def _eviction(b: bytes, at: int, size: int) -> object:
    return Eviction(b[at])


def _evicted(b: bytes, at: int, size: int) -> object:
    key, outcome = struct.unpack_from("<24sH", b, at)
    return key, Outcome(outcome)


def _sampled(b: bytes, at: int, size: int) -> object:
    f = struct.unpack_from("<IIQQBB", b, at)
    return Sample(f[0:3], f[3], bool(f[4]), bool(f[5]))


def _dumped(b: bytes, at: int, size: int) -> object:
    def count() -> int:
        nonlocal at
        (n,) = struct.unpack_from("<I", b, at)
        at += 4
        return int(n)

    chunks: dict[bytes, ChunkDump] = {}
    for _ in range(count()):
        key, exists, term, counter, number, tag, damaged, length = _CHUNK.unpack_from(b, at)
        at += _CHUNK.size + length
        content = b[at - length : at]
        pendings = []
        for _ in range(count()):
            p = _PENDING.unpack_from(b, at)
            at += _PENDING.size + p[7]
            pendings.append((p[0:3], bool(p[3]), p[4:7], b[at - p[7] : at]))
        chunks[key] = ChunkDump(bool(exists), (term, counter, number), tag, bool(damaged), content, pendings)
    retry = {}
    for _ in range(count()):
        f = _RETRY.unpack_from(b, at)
        at += _RETRY.size
        retry[f[0], f[1]] = RetryDump(f[2], f[3], f[4:7], f[7], f[8])
    epochs = {}
    for _ in range(count()):
        space, epoch = struct.unpack_from("<QQ", b, at)
        at += 16
        epochs[space] = epoch
    return Store(chunks, retry, epochs)


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
    Answer.REPAIRED: _repaired,
    Answer.STATUS: _status,
    Answer.COMPARED: _compared,
    Answer.EVICTION: _eviction,
    Answer.EVICTED: _evicted,
    Answer.SAMPLED: _sampled,
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
        ((_, body),) = self.step(status())
        assert isinstance(body, Status)
        return body

    def dump(self) -> Dump:
        (_, status), (_, store) = self.step(dump(0))
        assert isinstance(status, Status)
        assert isinstance(store, Store)
        return Dump(status, store)

    def sample(self, key: bytes) -> Sample:
        ((_, found),) = self.step(sample(key))
        assert isinstance(found, Sample)
        return found

    def compare(self, now: int, key: bytes) -> tuple[bytes | None, list[tuple[int, object]]]:
        """The key to go on from, and the other answers."""
        answers = self.step(compare(now, key))
        assert answers[-1][0] == Answer.COMPARED
        more = answers[-1][1]
        assert more is None or isinstance(more, bytes)
        return more, answers[:-1]

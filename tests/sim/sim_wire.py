"""The words of native/craq/sim.h, and its events as bytes; answers: sim_parse.py."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

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

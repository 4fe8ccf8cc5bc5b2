"""What native/craq/sim.h answers: bytes in, records out."""

from __future__ import annotations

import struct

from sim_wire import (
    Answer,
    ChunkDump,
    Eviction,
    Outcome,
    Record,
    RecordKind,
    Reply,
    RetryDump,
    Sample,
    Status,
    Store,
)

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

"""The structures of docs/disk_format.md, decoded by an independent reader.

`tests/golden/disk/<name>.hex` holds bytes as rows `offset: hex` (rows of zeros left out) after a line
`size: N`. This file knows the layouts from the prose and the field lists only;
native/test/engine_golden.cc builds the same bytes with the engine's encoders and compares them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "disk"
STORE_ID = 0x1122334455667788
KEY = struct.pack(">QQQ", 0x0102030405060708, 0, 9)
BLOCK = 4096


def crc32c(data: bytes) -> int:
    """CRC32C (Castagnoli) bit by bit: slow, and nobody else's code."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def load(name: str) -> bytes:
    data = bytearray()
    for line in (GOLDEN / f"{name}.hex").read_text().splitlines():
        where, text = line.split(": ")
        if where == "size":
            data = bytearray(int(text))
        else:
            row = bytes.fromhex(text)
            data[int(where) : int(where) + len(row)] = row
    return bytes(data)


class Fields:
    """Takes fields from the front of some bytes; complains about the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, layout: str) -> tuple[int | bytes, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return values

    def one(self, code: str) -> int:
        value = self.take(code)[0]
        assert isinstance(value, int)
        return value

    def raw(self, size: int) -> bytes:
        assert self.at + size <= len(self.data)
        self.at += size
        return self.data[self.at - size : self.at]

    @property
    def left(self) -> int:
        return len(self.data) - self.at


def summed_without(data: bytes, at: int) -> int:
    return crc32c(data[:at] + bytes(4) + data[at + 4 :])


def test_superblock() -> None:
    data = load("superblock")
    assert len(data) == BLOCK
    f = Fields(data)
    assert f.raw(8) == b"FFSDEV\r\n"
    assert f.one("I") == summed_without(data, 8)
    assert f.one("I") == 1  # format version
    assert f.one("Q") == 7  # sequence
    assert f.take("QQQ") == (0x10, 0, 0)  # compat, ro_compat, incompat
    assert f.raw(16) == bytes(range(16))  # cluster
    assert f.raw(16) == bytes(range(0xF0, 0x100))  # device
    assert f.take("QQQ") == (STORE_ID, 1_700_000_000_000, 1 << 30)  # store, created, size
    assert f.take("II") == (512, 16 << 20)  # sector, slab
    max_chunks, journal_at, journal_bytes, snap0, snap1, snap_bytes, data_at, slabs = f.take("8Q")
    assert max_chunks == 4096
    assert (journal_at, journal_bytes) == (1 << 20, 32 << 20)
    assert (snap0, snap1, snap_bytes) == (33 << 20, 51 << 20, 18 << 20)
    assert (data_at, slabs) == (69 << 20, 59)
    assert f.take("QQIIQQQII") == (3, 12_288, 1, 3, 40_960, 1_001, 5_005, 12, 0)
    assert f.raw(32).rstrip(b"\0") == b"ffs 0.1.0"
    assert f.take("II") == (2, 0)
    assert f.at == 272
    targets = f.take("128Q")
    assert targets[:2] == (101, 0xFFEEDDCCBBAA9988)
    assert not any(targets[2:])
    assert not any(f.raw(f.left))


@dataclass(frozen=True, slots=True)
class Header:
    sequence: int
    mark: int
    first_record: int
    used_bytes: int
    record_count: int
    flags: int


def block_header(data: bytes, magic: bytes) -> Header:
    f = Fields(data)
    assert f.raw(4) == magic
    crc = f.one("I")
    store, sequence, mark, first_record = (f.one("Q") for _ in range(4))
    used, span, count, incarnation, flags, reserved = (f.one("I") for _ in range(6))
    assert f.at == 64
    assert crc == summed_without(data[:used], 4)
    assert (store, incarnation, reserved) == (STORE_ID, 12, 0)
    assert span * BLOCK == len(data) >= used
    assert not any(data[used:])
    return Header(sequence, mark, first_record, used, count, flags)


@dataclass(frozen=True, slots=True)
class Record:
    type: int
    target: int
    fixed: bytes
    rest: bytes


def records(data: bytes, header: Header) -> Iterator[Record]:
    at = 64
    while at < header.used_bytes:
        size, kind, version, target, fixed_bytes, r0, r1 = struct.unpack_from("<IBBHHHI", data, at)
        assert size % 8 == 0
        assert version == 1
        assert r0 == 0
        assert r1 == 0
        rest = at + 16 + fixed_bytes
        yield Record(kind, target, data[at + 16 : rest], data[rest : at + size])
        at += size
    assert at == header.used_bytes


def check_image(f: Fields, update: int) -> None:
    assert f.take("IIQ") == (3, 4, update)
    place, stored, logical, expiry = f.take("QIIQ")
    assert (place, stored, logical, expiry) == (0x5000, 100_000, 131_072, 1_700_000_000_123)
    # class, codec, flags, role, tag bytes, kind, granules
    assert f.take("6BH") == (5, 0, 1, 0, 16, 1, 2)
    assert f.raw(16) == bytes(range(0xA0, 0xB0))


def check_stage(fixed: bytes, first_changed: int, changed: int, overlays: int) -> None:
    f = Fields(fixed)
    assert f.raw(24) == KEY
    assert f.take("IIQ") == (3, 4, 21)  # base
    check_image(f, 22)
    assert f.take("QQIIQ") == (0xC11E47, 41, 6, 7, 2)  # client, sequence, channel, chain, epoch
    assert f.take("II") == (65_536, 4_096)
    assert f.take("HHBBH") == (first_changed, changed, 0, 0, overlays)
    assert f.left == 0


OVERLAY = bytes((i * 7 + i // 256) & 0xFF for i in range(BLOCK))


def test_journal_block() -> None:
    data = load("journal_block")
    header = block_header(data, b"FFJ1")
    assert (header.sequence, header.mark, header.first_record, header.flags) == (1_001, 1_000, 5_005, 0)
    found = list(records(data, header))
    assert len(found) == header.record_count == 9
    assert [r.type for r in found] == [9, 1, 2, 3, 4, 5, 6, 7, 8]
    assert [r.target for r in found] == [0xFFFF, 1, 1, 1, 0, 0xFFFF, 0, 0, 1]
    opened, stage, commit, refuse, retry, fence, epoch, expire, chain = found
    assert struct.unpack("<IIQ", opened.fixed) == (12, 0, 1_700_000_000_456)
    check_stage(stage.fixed, 1, 1, 1)
    rest = Fields(stage.rest)
    assert rest.take("II") == (0x89ABCDEF, 0)  # one checksum, padded
    assert rest.take("II") == (16, 1)  # first block, blocks
    assert rest.raw(BLOCK) == OVERLAY
    assert rest.left == 0
    assert commit.fixed == KEY + struct.pack("<IIQ", 3, 4, 22)
    assert refuse.fixed == KEY + struct.pack("<IIQ QQIIII", 3, 4, 23, 0xC11E47, 42, 6, 7, 28, 0)
    assert retry.fixed == KEY + struct.pack("<IIQ QQIII B3x", 3, 4, 21, 0xC11E48, 43, 8, 9, 0, 2)
    assert fence.fixed == struct.pack("<Q", 0xC11E49)
    assert epoch.fixed == struct.pack("<QQQ", 0x77, 5, 1_700_000_100_000)
    assert expire.fixed == struct.pack("<Q", 1_600_000_000_000)
    assert chain.fixed == struct.pack("<II", 5, 0)
    assert chain.rest == b"chain\0\0\0"


def test_records_of_recovery() -> None:
    data = load("journal_recovery")
    header = block_header(data, b"FFJ1")
    assert (header.sequence, header.mark, header.first_record, header.flags) == (1_002, 1_001, 5_014, 0)
    found = list(records(data, header))
    assert len(found) == header.record_count == 4
    assert [r.type for r in found] == [10, 11, 12, 13]
    assert [r.target for r in found] == [1, 1, 1, 0]
    install, erase, reset, release = found
    f = Fields(install.fixed)
    assert f.raw(24) == KEY
    assert f.take("IIQ") == (3, 4, 22)  # the version that must be there
    assert f.take("IIQ") == (3, 4, 22)
    assert f.take("QIIQ") == (0x5000, 131_072, 131_072, 1_700_000_000_123)
    assert f.take("6BH") == (5, 0, 1, 0, 16, 4, 2)  # kind 4, all granules
    assert f.raw(16) == bytes(range(0xA0, 0xB0))
    assert f.take("QQIIQ") == (0, 0, 0, 0, 0)  # of no client
    assert f.take("II") == (0, 131_072)
    assert f.take("HHBBH") == (0, 2, 1 | 2, 0, 0)  # committed, newer pending versions stay
    assert f.left == 0
    assert install.rest == struct.pack("<II", 0x01234567, 0x89ABCDEF)
    assert (erase.fixed, erase.rest) == (KEY, b"")
    assert (reset.fixed, reset.rest) == (bytes(8), b"")
    assert (release.fixed, release.rest) == (bytes(8), b"")


def test_record_of_a_move() -> None:
    data = load("journal_move")
    header = block_header(data, b"FFJ1")
    assert (header.sequence, header.mark, header.first_record, header.flags) == (1_003, 1_002, 5_018, 0)
    (move,) = records(data, header)
    assert (move.type, move.target, move.rest) == (14, 1, b"")
    assert move.fixed == KEY + struct.pack("<IIQ QB7x", 3, 4, 22, 0x6000, 5)


def test_record_of_a_shared_slot() -> None:
    data = load("journal_share")
    header = block_header(data, b"FFJ1")
    (share,) = records(data, header)
    assert (share.type, share.target, share.rest) == (15, 1, b"")
    assert share.fixed == KEY + struct.pack("<IIQ QBB6x", 3, 4, 22, 0x6000, 5, 1)  # it stays where it is


M64 = (1 << 64) - 1


def digest(words: bytes) -> int:
    """The chain of docs/disk_format.md, Digest of a chunk, over 8 bytes at a time."""
    value = int.from_bytes(b"ffs-dig1", "little")
    for (word,) in struct.iter_unpack("<Q", words):
        x = ((value ^ word) + 0x9E3779B97F4A7C15) & M64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
        value = x ^ (x >> 31)
    return value


def test_digest_of_a_chunk() -> None:
    """Both examples of the page, from what it says alone."""
    version = struct.pack("<IIQ", 3, 4, 22)
    tag = bytes([1, 2, 3]).ljust(16, b"\0")
    plain = KEY + version + struct.pack("<IIQ 4BI", 140_000, 0, 1_700_000_000_123, 1, 0, 0, 3, 3) + tag
    plain += struct.pack("<4I", 0x01234567, 0x89ABCDEF, 0x0BADCAFE, 0)
    coded = KEY + version + struct.pack("<IIQ 4BI", 140_000, 100_000, 1_700_000_000_123, 1, 0, 2, 3, 2) + tag
    coded += struct.pack("<2I", 0x01234567, 0x89ABCDEF)
    doc = (GOLDEN.parents[2] / "docs" / "disk_format.md").read_text()
    for example in (plain, coded):
        assert f"`{digest(example):016x}`" in doc


def test_snapshot_slice() -> None:
    data = load("snapshot_slice")
    header = block_header(data, b"FFS1")
    assert (header.sequence, header.mark, header.first_record, header.flags) == (2, 3, 5_017, 2)
    chunk, pending = records(data, header)
    assert (chunk.type, pending.type) == (16, 17)
    f = Fields(chunk.fixed)
    assert f.raw(24) == KEY
    check_image(f, 21)
    assert f.take("IIH") == (0x01020304, 0x01020300, 1)  # last use, the one before, overlays
    assert f.raw(6) == bytes(6)
    assert f.raw(f.left) == bytes(range(1, 9))  # a field of a later version, kept
    rest = Fields(chunk.rest)
    assert rest.take("II") == (0x01234567, 0x89ABCDEF)
    assert rest.take("II") == (3, 1)
    assert rest.raw(BLOCK) == OVERLAY
    assert rest.left == 0
    check_stage(pending.fixed, 0, 2, 0)
    assert pending.rest == struct.pack("<II", 0x01234567, 0x89ABCDEF)


def test_documentation_example() -> None:
    """The worked example of docs/disk_format.md is the golden superblock's beginning."""
    doc = (GOLDEN.parents[2] / "docs" / "disk_format.md").read_text()
    rows = [line.split(":")[1] for line in doc.splitlines() if line.startswith("    0x")]
    shown = bytes.fromhex("".join(rows))
    assert len(shown) >= 96
    assert load("superblock").startswith(shown)


@pytest.mark.parametrize(
    "name",
    ["superblock", "journal_block", "journal_recovery", "journal_move", "journal_share", "snapshot_slice"],
)
def test_a_flipped_bit_is_noticed(name: str) -> None:
    data = bytearray(load(name))
    at = 8 if name == "superblock" else 4
    used = len(data) if name == "superblock" else struct.unpack_from("<I", data, 40)[0]
    stated = struct.unpack_from("<I", data, at)[0]
    for where in (at + 9, used // 2, used - 1):
        data[where] ^= 1
        assert summed_without(bytes(data[:used]), at) != stated
        data[where] ^= 1

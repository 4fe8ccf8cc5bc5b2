"""Records and messages as bytes: golden vectors read by package msgpack as the independent peer, unknown
trailing fields ignored, missing ones filled in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from ffs import errors
from ffs.layout import Layout
from ffs.proto import checks, common, locking, meta, quota, records, xattrs
from ffs.proto.common import Capability, Creds, decode_capability, encode_capability
from metadata.fs import schema

GOLDEN = Path(__file__).parents[2] / "golden" / "metadata.json"

LAYOUT = Layout(3, 7, 2**64 - 1, 1 << 20, 4)
KV = records.KvParams(1 << 20, 32, 1 << 40, 3_600_000, b"\x01" * 32, records.KV_EVICTABLE)
ATTRIBUTES = meta.Attributes(1, 17409, 2, 0o644, 1000, 1001, 2, 2**40, 10**18, 10**18 + 1, 5, 6, LAYOUT, None)
FINDING = checks.FsckFinding(
    kind="wrong-link-count",
    ino=5,
    parent=1,
    name=b"n\xff",
    key=b"d",
    found=-1,
    expected=2,
    chain=3,
    table=1,
    stamp=bytes(26),
    text="t",
    path=b"/n",
    repair="correct the count",
)
QUOTA = quota.QuotaView(
    quota=17410,
    ino=17409,
    path=b"/q",
    limit_bytes=1 << 40,
    used_bytes=1 << 20,
    used_entries=7,
    state=quota.COUNTING,
)
HOLDER = locking.LockHolder(7, 2**62, locking.LOCK_FLOCK, True, 10**18, "host:1")
HEAD: dict[str, Any] = {"client": 2**63, "slot": 5, "sequence": 9, "creds": Creds(1000, 1001, (4, 5))}

RECORDS: dict[str, msgspec.Struct] = {
    "inode-directory": records.Inode(
        type=1, mode=0o755, uid=1, gid=2, btime_ns=3, ctime_ns=4, flags=1, parent=1, layout=LAYOUT
    ),
    "inode-file": records.Inode(
        type=2, mode=0o640, uid=1, gid=2, btime_ns=10**18, ctime_ns=10**18 + 1, epoch=4, layout=LAYOUT
    ),
    "inode-symlink": records.Inode(
        type=3, mode=0o777, uid=1, gid=2, btime_ns=3, ctime_ns=4, target=b"../x\xff"
    ),
    "inode-kv": records.Inode(type=4, mode=0o666, uid=1, gid=2, btime_ns=3, ctime_ns=4, layout=LAYOUT, kv=KV),
    "kv-index-entry": records.KvIndexEntry(layout=LAYOUT, kv=KV),
    "dirent": records.Dirent(1, 2**40, 2),
    "client-session": records.ClientSession(ttl_ms=30000, label="host:1", opened_ns=7, ended=True),
    "write-session": records.WriteSession(opened_ns=7, capability=2**50),
    "retry-slot": records.RetrySlot(1, 9, b"\x92\x04\x01", 2),
    "garbage": records.Garbage(type=1, since_ns=8),
    "trim": records.Trim(epoch=3, length=100, old=2**30),
    "fenced-client": records.FencedClient(capability_expiry_ms=600_000),
    "lock-record": records.LockRecord(exclusive=True, since_ns=10**18),
    "ticket-key": records.TicketKey(secret=bytes(range(32))),
    "xattr-names": records.XattrNames(names=[b"user.a", b"user.b"], value_bytes=70),
    "quota": records.QuotaRecord(
        ino=17409, limit_bytes=1 << 40, limit_entries=10**6, state=quota.READY, path=b"/q"
    ),
    "store-header": records.StoreHeader(cluster=bytes(range(16)), created_ns=1, created_by="ffs 0.1.0"),
}

MESSAGES: dict[str, msgspec.Struct] = {
    "hello": common.Hello(cluster=bytes(16), role="client", name="me"),
    "error": common.ErrorReply(code=2, message="m", filename=b"/a"),
    "ok": common.OkReply(),
    "session-open": meta.SessionOpen(label="x", ttl_ms=5000),
    "session-opened": meta.SessionOpened(client=7, ttl_ms=5000, cluster=bytes(16)),
    "stat": meta.Stat(path=b"/a", **HEAD),
    "stat-reply": meta.StatReply(attributes=ATTRIBUTES),
    "stat-many": meta.StatMany(paths=(b"/a", b"/b"), **HEAD),
    "readdir": meta.ReadDir(path=b"/a", after=b"x", limit=10, attributes=True, **HEAD),
    "readdir-reply": meta.ReadDirReply(ino=1, entries=[meta.DirEntry(b"n", 5, 2, ATTRIBUTES)], more=True),
    "open": meta.Open(path=b"/a", flags=6, mode=0o600, layout=meta.LayoutChoice(1, 65536, 2), **HEAD),
    "opened": meta.Opened(ino=5, attributes=ATTRIBUTES, handle=9, created=True, capability=b"c" * 88),
    "close": meta.Close(ino=5, handle=9, epoch=2, length=100, written=True, **HEAD),
    "length": meta.LengthReply(length=100, epoch=2),
    "truncate": meta.Truncate(ino=5, handle=9, length=1, **HEAD),
    "setattr": meta.SetAttr(path=b"/a", what=9, mode=0o600, mtime_ns=1, **HEAD),
    "mkdir": meta.MkDir(path=b"/a", parents=True, **HEAD),
    "rename": meta.Rename(source=b"/a", target=b"/b", flags=2, **HEAD),
    "link": meta.Link(target=b"/b", ino=5, handle=9, replace=True, **HEAD),
    "unlink-many": meta.UnlinkMany(paths=(b"/a",), **HEAD),
    "set-kv-space": meta.SetKvSpace(
        path=b"/kv", what=5, quota_bytes=1 << 40, ttl_ms=0, evictable=False, **HEAD
    ),
    "get-xattr": xattrs.GetXattr(path=b"/a", name=b"user.n", **HEAD),
    "xattr-reply": xattrs.XattrReply(value=b"\0\xff"),
    "set-xattr": xattrs.SetXattr(path=b"/a", follow=False, name=b"user.n", value=b"v", flags=1, **HEAD),
    "remove-xattr": xattrs.RemoveXattr(ino=5, name=b"user.n", **HEAD),
    "list-xattr": xattrs.ListXattr(path=b"/a", **HEAD),
    "list-xattr-reply": xattrs.ListXattrReply(names=[b"user.a", b"user.b"]),
    "stat-by-id": meta.Stat(ino=5, ticket=bytes(range(16)), want_ticket=True, **HEAD),
    "opened-ticket": meta.Opened(ino=5, attributes=ATTRIBUTES, ticket=bytes(range(16))),
    "lock": locking.Lock(
        ino=5, kind=locking.LOCK_ENTRIES, owner=2**62, exclusive=False, wait_ms=5000, ticket=bytes(16), **HEAD
    ),
    "lock-reply": locking.LockReply(ino=5, granted=True, holders=[]),
    "lock-reply-held": locking.LockReply(ino=5, granted=False, holders=[HOLDER]),
    "unlock": locking.Unlock(path=b"/a", owner=2**62, force=True, **HEAD),
    "get-locks": locking.GetLocks(path=b"/a", **HEAD),
    "locks-reply": locking.LocksReply(ino=5, holders=[HOLDER]),
    "kv-create": meta.KvCreate(path=b"/kv", params=KV, **HEAD),
    "opened-quota": meta.Opened(ino=5, attributes=ATTRIBUTES, handle=9, reserved=1 << 20),
    "length-quota": meta.LengthReply(length=100, epoch=2, reserved=100),
    "append-reply": meta.AppendReply(offset=100, epoch=2, reserved=150),
    "truncate-reply": meta.TruncateReply(length=100, epoch=2, ino=5, reserved=100),
    "statfs-reply": meta.StatFsReply(
        total_bytes=1 << 50, free_bytes=1 << 49, chunk_size=1 << 20, table=1, quota_bytes=1 << 40
    ),
    "set-quota": quota.SetQuota(path=b"/q", limit_bytes=1 << 40, limit_entries=0, **HEAD),
    "get-quota": quota.GetQuota(path=b"/q/f", **HEAD),
    "quota-reply": quota.QuotaReply(quota=QUOTA),
    "quota-reply-none": quota.QuotaReply(),
    "list-quotas": quota.ListQuotas(after=17408, limit=10, **HEAD),
    "quota-list": quota.QuotaList(quotas=[QUOTA], more=True),
    "reserve": quota.Reserve(ino=5, handle=9, epoch=2, end=1 << 30, **HEAD),
    "reserved": quota.Reserved(reserved=1 << 31, epoch=2),
    "fsck-scan": checks.FsckScan(
        what=9, after=b"d", ino=5, only=bytes(8), chain=3, table=1, findings=(FINDING,), **HEAD
    ),
    "fsck-page": checks.FsckPage(
        findings=[FINDING], next=b"d\0", rows=bytes(26), looked=7, again=(5,), unknown="x"
    ),
    "fsck-repair": checks.FsckRepair(finding=FINDING, **HEAD),
    "fsck-repaired": checks.FsckRepaired(done=True, text="removed"),
}

KEYS: dict[str, bytes] = {
    "inode 1": schema.inode_key(1),
    "inode 17409": schema.inode_key(17409),
    "inode 2^63+5": schema.inode_key(2**63 + 5),
    "dirent": schema.dirent_key(1, b"name"),
    "session": schema.session_key(7),
    "slot": schema.slot_key(7, 5),
    "slot page": schema.slot_page_key(7, 5, 1),
    "writer": schema.writer_key(5, 7, 9),
    "client writer": schema.client_writer_key(7, 5, 9),
    "garbage": schema.garbage_key(5),
    "trim": schema.trim_key(5),
    "fence": schema.fence_key(7),
    "kv index": schema.kv_index_key(17409),
    "xattr": schema.xattr_key(5, b"user.a"),
    "xattr names": schema.xattr_names_key(5),
    "ids": schema.ids_key(b"i", 3),
    "quota": schema.quota_key(17410),
    "quota bytes": schema.quota_bytes_key(17410, 3),
    "quota entries": schema.quota_entries_key(17410, 0),
    "quota work": schema.quota_work_key(17410, 17409),
    "lock": schema.lock_key(17409, 1, 7, 2**62),
    "lock by client": schema.client_lock_key(7, 17409, 1, 2**62),
    "lock of entries": schema.entries_lock_key(17409, 7, 2**62),
    "ticket key": schema.TICKET_KEY,
}


def plain(value: Any) -> Any:
    """A Struct as the lists that msgpack gives."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        fields = [plain(getattr(value, name)) for name in value.__struct_fields__]
        return fields if tag is None else [tag, *fields]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def golden() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(GOLDEN.read_text())
    return data


@pytest.mark.parametrize("name", [*RECORDS, *MESSAGES])
def test_golden(name: str) -> None:
    """The bytes of this release, read by msgspec and by package msgpack."""
    value = RECORDS.get(name) or MESSAGES[name]
    data = bytes.fromhex(golden()["records" if name in RECORDS else "messages"][name])
    assert msgspec.msgpack.encode(value) == data
    assert msgpack.unpackb(data) == plain(value)
    assert msgspec.msgpack.decode(data, type=type(value)) == value


@pytest.mark.parametrize("name", [*RECORDS, *MESSAGES])
def test_unknown_trailing_fields_are_ignored(name: str) -> None:
    value = RECORDS.get(name) or MESSAGES[name]
    longer = msgpack.packb([*msgpack.unpackb(msgspec.msgpack.encode(value)), "new", {"field": 1}])
    assert msgspec.msgpack.decode(longer, type=type(value)) == value


@pytest.mark.parametrize("name", [*RECORDS, *MESSAGES])
def test_has_a_version(name: str) -> None:
    value = RECORDS.get(name) or MESSAGES[name]
    assert value.__struct_fields__[0] == "v"
    assert value.v == 1  # type: ignore[attr-defined]


def test_missing_trailing_fields_get_their_defaults() -> None:
    short = msgpack.packb([46, 1, 7, 1, 1])  # no such tag
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(short, type=meta.REQUESTS)
    short = msgpack.packb([16, 1, 7, 1, 1])
    request = msgspec.msgpack.decode(short, type=meta.REQUESTS)
    assert request == meta.Stat(client=7, slot=1, sequence=1)


@pytest.mark.parametrize("name", list(golden()["before"]))
def test_what_earlier_releases_wrote_is_read(name: str) -> None:
    value = RECORDS.get(name) or MESSAGES[name]
    for data in golden()["before"][name]:
        assert msgspec.msgpack.decode(bytes.fromhex(data), type=type(value)) == value


@pytest.mark.parametrize("name", list(KEYS))
def test_keys(name: str) -> None:
    assert KEYS[name].hex() == golden()["keys"][name]


def test_key_spans() -> None:
    for ino in (1, 255, 256, 17409, 2**64 - 1):
        first, end = schema.inode_span(ino)
        assert first <= schema.inode_key(ino) + schema.SUB_LINKS < end
        assert not first <= schema.inode_key(ino ^ 1) < end
    first, end = schema.dirent_span(5, b"ab")
    assert first <= schema.dirent_key(5, b"ab\0") < end
    assert not first <= schema.dirent_key(5, b"ab") < end
    assert not first <= schema.dirent_key(6, b"ac") < end
    assert schema.split_client_writer(schema.client_writer_key(7, 5, 9)) == (7, 5, 9)


def test_capability_bytes() -> None:
    """The layout of native/include/ffs/wire.h, struct Capability."""
    made = Capability(1, 3, 2**63, 17409, 4, 600_000, 99, 0, bytes(range(32)))
    data = encode_capability(made)
    assert data.hex() == golden()["capability"]
    assert len(data) == 88
    assert data[:8] == bytes([1, 1, 0, 0, 3, 0, 0, 0])
    assert int.from_bytes(data[16:24], "little") == 17409
    assert decode_capability(data + b"more") == made
    for bad in (data[:87], b"", b"\0" + data[1:]):
        with pytest.raises(errors.ProtocolError):
            decode_capability(bad)


def test_every_message_has_its_own_tag() -> None:
    tags = [cls.__struct_config__.tag for cls in common.Message.__subclasses__()]
    tags += [cls.__struct_config__.tag for cls in common.Request.__subclasses__()]
    known = [tag for tag in tags if tag is not None]
    assert len(known) == len(set(known))
    for request, reply in meta.REPLY_OF.items():
        assert request.__struct_config__.tag in range(10, 100)
        assert reply.__struct_config__.tag in range(100)


def test_the_worked_example_of_the_docs() -> None:
    """docs/metadata.md, Records: the bytes written there are those of this release."""
    text = (Path(__file__).parents[3] / "docs" / "metadata.md").read_text()
    block = text.split("Worked example: `/a.bin`")[1].split("```")[1]
    shown = "".join(re.findall(r"\b[0-9a-f]{2}\b", re.sub(r"  +[^ 0-9a-f].*| +\[.*|   +\S.*$", "", block)))
    inode = records.Inode(
        type=2,
        mode=0o644,
        uid=1000,
        gid=1000,
        btime_ns=10**18,
        ctime_ns=10**18,
        layout=Layout(1, 1, 17409, 1 << 20, 0),
    )
    for data in (schema.inode_key(17409), schema.dirent_key(1, b"a.bin")):
        assert data.hex() in shown
    assert msgspec.msgpack.encode(records.Dirent(1, 17409, 2)).hex() in shown
    assert "95 01 01 cd 44 01 ce 00 10 00 00 00" in block
    assert msgspec.msgpack.encode(inode).hex().endswith("9501" + "01cd4401ce00100000" + "00c400c000")


def make_golden() -> None:
    """Writes the file; only for new entries and for appended fields: then the bytes that were go to `before`,
    so that they are read for ever."""
    known = golden()
    before: dict[str, list[str]] = known["before"]
    for name, value in [*RECORDS.items(), *MESSAGES.items()]:
        was = known["records" if name in RECORDS else "messages"].get(name)
        if was is not None and was != msgspec.msgpack.encode(value).hex():
            before.setdefault(name, []).append(was)
    data = {
        "records": {name: msgspec.msgpack.encode(value).hex() for name, value in RECORDS.items()},
        "messages": {name: msgspec.msgpack.encode(value).hex() for name, value in MESSAGES.items()},
        "keys": {name: key.hex() for name, key in KEYS.items()},
        "capability": encode_capability(
            Capability(1, 3, 2**63, 17409, 4, 600_000, 99, 0, bytes(range(32)))
        ).hex(),
        "before": before,
    }
    GOLDEN.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    make_golden()

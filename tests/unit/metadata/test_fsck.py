"""fsck over the memory engine: each kind of damage made by hand, found, mended, and gone at the next look;
and no false finding while others work."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec
import numpy as np
import pytest
from fsck_world import W, World, run
from namespace_fakes import Caller

from ffs import errors
from ffs.client.fsck import STATE, disagreeing, judge_names
from ffs.layout import Placement, file_chunk_key
from ffs.proto import checks, locking, meta, records
from ffs.proto.common import Creds, decode_capability
from ffs.proto.quota import SetQuota
from ffs.proto.records import DIRECTORY, FILE, Dirent, Inode, KvParams
from metadata.fs import fsck
from metadata.fs.collector import Collector
from metadata.fs.ids import given_out
from metadata.fs.ops import fsck_pages as ops
from metadata.fs.schema import (
    SUB_ENTRIES,
    SUB_LENGTH,
    SUB_LINKS,
    client_lock_key,
    client_writer_key,
    counter,
    decode_dirent,
    decode_inode,
    dirent_key,
    encode,
    ended_key,
    garbage_key,
    inode_key,
    kv_index_key,
    lock_key,
    session_key,
    slot_key,
    trim_key,
    writer_key,
    xattr_names_key,
)
from metadata.fs.sessions import SessionSweeper

SESSION = 0xDEAD


def inode(kind: int, parent: int = 0) -> bytes:
    return encode(Inode(type=kind, mode=0o600, uid=1, gid=1, btime_ns=1, ctime_ns=1, parent=parent))


@pytest.mark.parametrize("pages", [1, 3, 1000])
def test_what_is_well_is_clean(pages: int) -> None:
    async def test(w: World) -> None:
        opened = await w.me(meta.Open(path=b"/d/open", flags=W))
        view = w.cluster.table(1)
        assert view is not None
        w.chains.write(opened.ino, opened.attributes.layout, 0, 50_000, 9000, view.chains)  # not reported yet
        await w.me(locking.Lock(path=b"/d", owner=3))
        await w.me(meta.Open(path=b"/d", flags=meta.OPEN_WRITE | meta.OPEN_TMPFILE))
        await w.me(meta.Unlink(path=b"/d/f3"))  # its chunks aren't collected
        await w.me(meta.RemoveTree(path=b"/d/inside"))
        report = await w.check()
        assert report.findings == []
        assert report.clean
        assert report.looked["entries"] >= 12
        assert report.looked["inodes"] == len(await w.inodes())
        assert report.looked["sessions"] >= 5
        assert report.looked["KV spaces"] == 1
        assert report.looked["chunks"] > 60
        await w.settle()
        assert (await w.check()).clean

    run(test, pages=pages)


def test_dangling_entries() -> None:
    async def test(w: World) -> None:
        ino = await w.ino(b"/d/f3")
        d = await w.ino(b"/d")
        before = await w.get(inode_key(d) + SUB_ENTRIES)
        await w.write((inode_key(ino), None), (inode_key(ino) + SUB_LENGTH, None))
        w.chains.chunks.clear()
        report = await w.check()
        assert [(each.kind, each.path, each.ino) for each in report.findings] == [
            (fsck.DANGLING, b"/d/f3", ino),
            (fsck.COUNTERS, b"", ino),
        ]
        mended = await w.expect({fsck.DANGLING, fsck.COUNTERS})
        assert "'f3'" in mended.repairs[0].text
        after = await w.get(inode_key(d) + SUB_ENTRIES)
        assert before is not None
        assert after == counter(int.from_bytes(before, "little") - 1)

    run(test)


def test_entries_of_the_wrong_type_and_parents() -> None:
    async def test(w: World) -> None:
        d, inside = await w.ino(b"/d"), await w.ino(b"/d/inside")
        f1 = await w.ino(b"/d/f1")
        record = decode_inode(await w.get(inode_key(inside)) or b"")
        await w.write(
            (dirent_key(d, b"f1"), encode(Dirent(1, f1, DIRECTORY))),
            (inode_key(inside), encode(msgspec.structs.replace(record, parent=1))),
        )
        await w.expect({fsck.ENTRY_TYPE, fsck.PARENT, fsck.SUBDIRECTORIES})
        assert decode_dirent(await w.get(dirent_key(d, b"f1")) or b"").type == FILE
        assert decode_inode(await w.get(inode_key(inside)) or b"").parent == d
        assert (await w.me(meta.Stat(path=b"/d"))).attributes.nlink == 3

    run(test)


def test_a_directory_with_two_names_or_in_itself_stays() -> None:
    async def test(w: World) -> None:
        d, inside = await w.ino(b"/d"), await w.ino(b"/d/inside")
        await w.write((dirent_key(1, b"twice"), encode(Dirent(1, inside, DIRECTORY))))
        report = await w.check(repair=True)
        refused = {each.finding.kind: each.text for each in report.repairs if not each.mended}
        assert list(refused) == [fsck.PARENT]
        assert "two names" in refused[fsck.PARENT]
        assert {each.kind for each in report.left} == {fsck.PARENT, fsck.LINKS}
        assert decode_inode(await w.get(inode_key(inside)) or b"").parent == d
        await w.write((dirent_key(1, b"twice"), None), (dirent_key(1, b"d"), None))
        await w.write((dirent_key(inside, b"ring"), encode(Dirent(1, d, DIRECTORY))))
        report = await w.check(repair=True)
        refused = {each.finding.kind: each.text for each in report.repairs if not each.mended}
        assert "itself" in refused[fsck.PARENT]
        assert decode_inode(await w.get(inode_key(d)) or b"").parent == 1

    run(test)


def test_a_directory_that_is_gone() -> None:
    async def test(w: World) -> None:
        inside, f1 = await w.ino(b"/d/inside"), await w.ino(b"/d/f1")
        await w.me(meta.MkDir(path=b"/d/inside/deep"))
        await w.write(*((inode_key(inside) + sub, None) for sub in (b"", b"c", SUB_ENTRIES, b"m", SUB_LINKS)))
        await w.expect({fsck.NO_DIRECTORY, fsck.DANGLING})
        assert await w.ino(b"/lost+found/%d" % f1) == f1
        assert (await w.me(meta.Stat(path=b"/d/f1"))).attributes.nlink == 2
        names = {each.name for each in (await w.me(meta.ReadDir(path=b"/lost+found"))).entries}
        assert len(names) == 2
        assert (await w.me(meta.Stat(path=b"/lost+found"))).attributes.mode == 0o700

    run(test)


@pytest.mark.parametrize("one", [ops.IN_ONE, 2], ids=["counted", "by stamp"])
def test_counts_of_directories(one: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "IN_ONE", one)

    async def test(w: World) -> None:
        d, empty = await w.ino(b"/d"), await w.ino(b"/empty")
        await w.write(
            (inode_key(d) + SUB_ENTRIES, counter(5)),
            (inode_key(d) + SUB_LINKS, counter(-3)),
            (inode_key(empty) + SUB_ENTRIES, counter(1)),
        )
        report = await w.check()
        assert {(each.kind, each.path, each.found, each.expected) for each in report.findings} == {
            (fsck.ENTRIES, b"/d", 5, 9),
            (fsck.SUBDIRECTORIES, b"/d", -3, 1),
            (fsck.ENTRIES, b"/empty", 1, 0),
        }
        if one == ops.IN_ONE and one > 2:
            await w.expect({fsck.ENTRIES, fsck.SUBDIRECTORIES})
        else:  # by the stamp of both: what the first repair changes is found again at the next check
            await w.check(repair=True)
            await w.check(repair=True)
        assert (await w.check()).clean
        assert (await w.me(meta.Stat(path=b"/d"))).attributes.length == 9

    run(test)


def test_a_count_is_corrected_while_others_add() -> None:
    async def test(w: World) -> None:
        d = await w.ino(b"/d")
        await w.write((inode_key(d) + SUB_ENTRIES, counter(100)))
        finding = next(each for each in (await w.check()).findings)
        await w.make(b"/d/new1")
        await asyncio.gather(
            w.namespace.handle(w.me.prepare(checks.FsckRepair(finding=finding))),
            *(_mkdir(w, b"/d/new-%d" % number) for number in range(6)),
        )
        assert (await w.me(meta.Stat(path=b"/d"))).attributes.length == 9 + 1 + 6
        assert (await w.check()).clean

    run(test)


@pytest.mark.parametrize("right", [True, False])
def test_a_directory_that_changes_while_it_is_counted(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted once more; a large one isn't judged by what was counted first."""
    monkeypatch.setattr(ops, "IN_ONE", 2)

    async def test(w: World) -> None:
        d = await w.ino(b"/d")
        made = 0

        async def meanwhile(request: meta.Request) -> None:
            nonlocal made
            if isinstance(request, checks.FsckScan) and request.what == checks.SCAN_ENTRIES and request.after:
                await w.mkdir(b"/d/0-%d" % made)  # before what was counted already
                made += 1

        if not right:
            await w.write((inode_key(d) + SUB_ENTRIES, counter(20)))
        report = await w.check(meanwhile=meanwhile)
        assert made > 0
        assert [(each.kind, each.ino, each.found, each.expected) for each in report.findings] == (
            [] if right else [(fsck.ENTRIES, d, 20 + made, 9 + made)]
        )
        assert report.unsettled == []

    run(test)


async def _mkdir(w: World, path: bytes) -> None:
    caller = await Caller.connect(w.namespace)
    await caller(meta.MkDir(path=path))


def test_inodes_without_a_name() -> None:
    async def test(w: World) -> None:
        d = await w.ino(b"/d")
        f4 = await w.ino(b"/d/f4")
        inside, kv = await w.ino(b"/d/inside"), await w.ino(b"/kv")
        await w.write(
            (dirent_key(d, b"f4"), None),
            (dirent_key(d, b"inside"), None),
            (dirent_key(1, b"kv"), None),
            (inode_key(d) + SUB_ENTRIES, counter(7)),
            (inode_key(d) + SUB_LINKS, counter(0)),
            (inode_key(1) + SUB_ENTRIES, counter(3)),
        )
        mended = await w.expect({fsck.ORPHAN})
        assert {each.finding.ino for each in mended.repairs} == {f4, inside, kv}
        lost = {each.ino for each in (await w.me(meta.ReadDir(path=b"/lost+found"))).entries}
        assert lost == {f4, inside, kv}
        assert await w.ino(b"/lost+found/%d/../../d" % inside) == d  # ".." leads through lost+found now
        stranger = await Caller.connect(w.namespace, Creds(1000, 1000))
        with pytest.raises(PermissionError):
            await stranger(meta.ReadDir(path=b"/lost+found"))

    run(test)


def test_link_counts() -> None:
    async def test(w: World) -> None:
        f1, f2, f5 = await w.ino(b"/d/f1"), await w.ino(b"/d/f2"), await w.ino(b"/d/f5")
        await w.write(
            (inode_key(f1) + SUB_LINKS, None),  # has two names
            (inode_key(f2) + SUB_LINKS, counter(6)),
            (inode_key(f5) + SUB_LINKS, counter(-1)),
            (garbage_key(f5), encode(records.Garbage(type=FILE, since_ns=1))),  # it would be collected
        )
        report = await w.check()
        assert {(each.kind, each.ino, each.found, each.expected) for each in report.findings} == {
            (fsck.LINKS, f1, 1, 2),
            (fsck.LINKS, f2, 7, 1),
            (fsck.LINKS, f5, 0, 1),
        }
        await w.expect({fsck.LINKS})
        for path, links in ((b"/d/f1", 2), (b"/d/f2", 1), (b"/d/f5", 1)):
            assert (await w.me(meta.Stat(path=path))).attributes.nlink == links

    run(test)


def test_a_link_count_isnt_corrected_after_a_change() -> None:
    async def test(w: World) -> None:
        f2 = await w.ino(b"/d/f2")
        await w.write((inode_key(f2) + SUB_LINKS, counter(6)))
        (finding,) = (await w.check()).findings
        await w.me(meta.Rename(source=b"/d/f2", target=b"/f2"))
        reply = await w.me(checks.FsckRepair(finding=finding))
        assert (reply.done, reply.text) == (False, "it isn't so any more")
        assert await w.get(inode_key(f2) + SUB_LINKS) == counter(6)

    run(test)


def test_a_repair_sent_again_repairs_once() -> None:
    async def test(w: World) -> None:
        f2 = await w.ino(b"/d/f2")
        await w.write((inode_key(f2) + SUB_LINKS, counter(6)))
        (finding,) = (await w.check()).findings
        first = await w.me(checks.FsckRepair(finding=finding))
        assert await w.me.resend() == first
        assert not (await w.me(checks.FsckRepair(finding=finding))).done
        assert await w.get(inode_key(f2) + SUB_LINKS) == counter(0)

    run(test)


def test_what_clients_without_a_session_have_left() -> None:
    async def test(w: World) -> None:
        d, f6 = await w.ino(b"/d"), await w.ino(b"/d/f6")
        session = encode(records.WriteSession(opened_ns=1, capability=5))
        lock = encode(records.LockRecord(exclusive=True, since_ns=1))
        await w.write(
            (writer_key(f6, SESSION, 1), session),  # only by inode
            (client_writer_key(SESSION + 1, f6, 2), b""),  # only by client
            (lock_key(d, 0, SESSION + 2, 9), lock),
            (client_lock_key(SESSION + 2, d, 0, 9), b""),
            (slot_key(SESSION + 3, 0), encode(records.RetrySlot(1, 1, b""))),
        )
        await w.expect({fsck.SESSIONLESS})
        for number in range(4):
            assert await w.get(ended_key(SESSION + number)) is None
        assert await w.get(writer_key(f6, SESSION, 1)) is None
        assert await w.get(lock_key(d, 0, SESSION + 2, 9)) is None
        assert (await w.me(meta.Stat(path=b"/d/f6"))).attributes.length == 60_000

    run(test)


def test_records_that_dont_agree() -> None:
    async def test(w: World) -> None:
        opened = await w.me(meta.Open(path=b"/d/f7", flags=meta.OPEN_WRITE))
        d = await w.ino(b"/d")
        await w.write(
            (client_writer_key(w.me.client, opened.ino, opened.handle), None),
            (client_lock_key(w.me.client, d, 0, 8), b""),
            (writer_key(w.gone, w.me.client, 3), encode(records.WriteSession(opened_ns=1, capability=5))),
            (client_writer_key(w.me.client, w.gone, 3), b""),
            (trim_key(w.gone), encode(records.Trim(epoch=1, length=0))),
            (xattr_names_key(w.gone), encode(records.XattrNames())),
        )
        await w.expect({fsck.UNPAIRED, fsck.LEFT})
        assert await w.get(client_writer_key(w.me.client, opened.ino, opened.handle)) == b""
        assert await w.get(client_lock_key(w.me.client, d, 0, 8)) is None
        assert await w.get(writer_key(w.gone, w.me.client, 3)) is None
        assert await w.get(client_writer_key(w.me.client, w.gone, 3)) is None

    run(test)


def test_a_session_that_is_being_settled_is_no_finding() -> None:
    async def test(w: World) -> None:
        other = await Caller.connect(w.namespace)
        await other(meta.Open(path=b"/d/f7", flags=meta.OPEN_WRITE))
        await other(locking.Lock(path=b"/d", owner=3))
        await other(meta.SessionClose())
        assert await w.get(ended_key(other.client)) is not None
        assert (await w.check()).clean

    run(test)


def test_the_index_of_kv_spaces() -> None:
    async def test(w: World) -> None:
        kv = await w.ino(b"/kv")
        await w.me(meta.KvCreate(path=b"/kv2", params=KvParams(65536)))
        kv2, f1 = await w.ino(b"/kv2"), await w.ino(b"/d/f1")
        entry = await w.get(kv_index_key(kv))
        await w.write((kv_index_key(kv), None), (kv_index_key(kv2), entry), (kv_index_key(f1), entry))
        await w.expect({fsck.SPACE_MISSING, fsck.SPACE_DIFFERS, fsck.SPACE_LEFT})
        assert await w.get(kv_index_key(kv)) == entry

    run(test)


def test_orphan_chunks() -> None:
    async def test(w: World) -> None:
        for chain, space in ((101, w.gone), (103, w.gone), (104, w.gone - 2), (104, w.gone - 1)):
            for index in range(5):
                w.chains.chunks.setdefault(chain, {})[space, file_chunk_key(index)] = 4096
        report = await w.expect({fsck.ORPHAN_CHUNKS})
        assert {(each.chain, each.ino) for each in report.findings} == {
            (101, w.gone),
            (103, w.gone),
            (104, w.gone - 2),
            (104, w.gone - 1),
        }
        assert not w.chains.spaces() & {w.gone, w.gone - 1, w.gone - 2}
        assert w.chains.end(await w.ino(b"/d/f7"), 4096) == 70_000  # what has an owner stays

    run(test)


def test_orphan_chunks_of_a_restored_store_stay() -> None:
    """Ids that this store never gave out: it may be an older copy, and the chunks those of real files."""

    async def test(w: World) -> None:
        far = 1 << 40
        w.chains.chunks[101][far, file_chunk_key(0)] = 1
        report = await w.check(repair=True)
        assert [each.kind for each in report.findings] == [fsck.ORPHAN_CHUNKS]
        assert "older copy" in report.findings[0].text
        assert report.repairs == []
        assert not report.clean
        assert far in w.chains.spaces()
        with pytest.raises(errors.InvalidArgument):
            await w.me(checks.FsckRepair(finding=report.findings[0]))
        for ino, given in ((w.gone, True), (far, False), (await w.ino(b"/d"), True), (5, False)):
            assert await w.store.read(lambda snap, ino=ino: given_out(snap, ino)) == given  # type: ignore[misc]

    run(test)


def test_chunks_beyond_the_length() -> None:
    async def test(w: World) -> None:
        ino = await w.ino(b"/d/f5")
        layout = (await w.me(meta.Stat(path=b"/d/f5"))).attributes.layout
        view = w.cluster.table(1)
        assert view is not None
        w.chains.write(ino, layout, 0, 50_000, 100, view.chains)  # in its last chunk
        w.chains.write(ino, layout, 0, 90_000, 9000, view.chains)
        report = await w.expect({fsck.CHUNKS_BEYOND})
        assert {each.expected for each in report.findings} == {50_000}
        assert w.chains.end(ino, 4096) == 50_000

    run(test)


def test_chunks_on_a_chain_of_others() -> None:
    async def test(w: World) -> None:
        choice = meta.LayoutChoice(1, 4096, 2)
        opened = await w.me(meta.Open(path=b"/two", flags=W, layout=choice))
        await w.me(meta.Close(ino=opened.ino, handle=opened.handle))
        view = w.cluster.table(1)
        assert view is not None
        stripe = Placement(opened.attributes.layout, view.chains).chains
        chain = next(each for each in view.chains if each not in stripe)
        w.chains.chunks[chain][opened.ino, file_chunk_key(0)] = 1
        report = await w.check(repair=True)
        assert [(each.kind, each.chain) for each in report.findings] == [(fsck.MISPLACED, chain)]
        assert (report.repairs, report.clean) == ([], False)

    run(test)


def test_a_chain_that_doesnt_answer_is_unknown() -> None:
    async def test(w: World) -> None:
        w.chains.away.add(102)
        w.chains.chunks[103][w.gone, file_chunk_key(0)] = 1
        report = await w.check()
        assert [(each.kind, each.chain) for each in report.findings] == [(fsck.ORPHAN_CHUNKS, 103)]
        assert list(report.unknown) == [102]
        assert "away" in report.unknown[102]
        w.chains.chunks[103].pop((w.gone, file_chunk_key(0)))
        report = await w.check()
        assert report.findings == []
        assert not report.clean

    run(test)


def test_records_that_cant_be_read_are_told_and_left() -> None:
    async def test(w: World) -> None:
        d, f2 = await w.ino(b"/d"), await w.ino(b"/d/f2")
        await w.write((inode_key(f2), b"\xc1"), (dirent_key(d, b"zz"), b"\xc1"))
        w.chains.chunks.clear()
        report = await w.check()
        assert {(each.kind, each.key) for each in report.findings if each.kind == fsck.UNREADABLE} == {
            (fsck.UNREADABLE, inode_key(f2)),
            (fsck.UNREADABLE, dirent_key(d, b"zz")),
        }
        await w.check(repair=True)
        assert await w.get(inode_key(f2)) == b"\xc1"
        assert await w.get(dirent_key(d, b"f2")) is not None

    run(test)


def test_one_tree() -> None:
    async def test(w: World) -> None:
        d, inside = await w.ino(b"/d"), await w.ino(b"/d/inside")
        deep = await w.mkdir(b"/d/inside/deep")
        await w.write(
            (inode_key(deep) + SUB_ENTRIES, counter(4)),
            (dirent_key(inside, b"nothing"), encode(Dirent(1, w.gone, FILE))),
            (inode_key(1) + SUB_ENTRIES, counter(77)),
        )
        report = await w.check(tree=d)
        assert {(each.kind, each.path) for each in report.findings} == {
            (fsck.ENTRIES, b"/d/inside/deep"),
            (fsck.DANGLING, b"/d/inside/nothing"),
            (fsck.ENTRIES, b"/d/inside"),
        }
        await w.check(repair=True, tree=d)
        assert (await w.check(tree=d)).clean
        assert [each.path for each in (await w.check()).findings] == [b"/"]

    run(test)


def test_only_administrators() -> None:
    async def test(w: World) -> None:
        other = await Caller.connect(w.namespace, Creds(1000, 1000))
        for what in range(1, 10):
            with pytest.raises(errors.NotPermitted):
                await other(checks.FsckScan(what=what))
        with pytest.raises(errors.NotPermitted):
            await other(checks.FsckRepair(finding=checks.FsckFinding(kind=fsck.ORPHAN, ino=1)))
        with pytest.raises(errors.InvalidArgument):
            await w.me(checks.FsckScan(what=99))
        with pytest.raises(errors.InvalidArgument):
            await w.me(checks.FsckScan(what=checks.SCAN_SESSIONS, after=b"x"))
        root = decode_inode(await w.get(inode_key(1)) or b"")
        await w.write((inode_key(1), encode(msgspec.structs.replace(root, uid=1000))))
        await other(checks.FsckScan(what=checks.SCAN_ENTRIES))  # it owns / now

    run(test)


def test_names_are_judged_by_a_state_that_stayed() -> None:
    was = [(5, 2, 10, 2, 0), (6, 2, 10, 2, 0), (7, 2, 10, 2, 0), (8, 2, 10, 2, 0)]
    now = [(5, 2, 11, 2, 0), (6, 2, 10, 2, 0), (7, 2, 10, 2, 0)]
    before, after = (np.array(rows, dtype=STATE).tobytes() for rows in (was, now))
    found, changed = judge_names(before, after, Counter({5: 1, 6: 1, 7: 2}))
    assert [(each.kind, each.ino, each.found, each.expected) for each in found] == [(fsck.LINKS, 6, 2, 1)]
    assert changed == [5]


def test_disagreeing_names() -> None:
    states = np.array([(9, 1, 0, 2, 0), (3, 2, 0, 2, 0), (5, 1, 0, 1, 0), (6, 0, 0, 2, 1)], dtype=STATE)
    names = np.array([3, 9, 3, 77], dtype="<u8")
    assert list(disagreeing(names, states)) == [5]
    assert list(disagreeing(names[:1], states)) == [3, 5, 9]
    assert list(disagreeing(names[:0], states)) == [3, 5, 9]
    assert list(disagreeing(names, states[:0])) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_busy_namespace_gives_no_false_finding(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(ops, "IN_ONE", 2)

    async def test(w: World) -> None:
        if seed >= 2:
            await w.me(SetQuota(path=b"/d"))
            await w.settle()
        ended = asyncio.Event()
        done = 0

        async def busy(number: int) -> None:
            nonlocal done
            rng = random.Random(seed * 100 + number)
            caller = await Caller.connect(w.namespace)
            collector = Collector(w.namespace.core)
            while not ended.is_set():
                name = rng.choice((b"/d/", b"/d/inside/", b"/")) + b"x%d" % rng.randrange(6)
                other = rng.choice((b"/d/", b"/d/inside/", b"/")) + b"x%d" % rng.randrange(6)
                request: meta.Request = rng.choice(
                    (
                        meta.MkDir(path=name),
                        meta.Rename(source=name, target=other),
                        meta.Rename(source=name, target=other, flags=meta.RENAME_EXCHANGE),
                        meta.Link(source=name, target=other),
                        meta.Unlink(path=name),
                        meta.RemoveTree(path=name),
                        meta.KvCreate(path=name, params=KvParams(65536)),
                        locking.Lock(path=name, owner=rng.randrange(3)),
                        meta.Open(path=name, flags=W),
                        meta.Open(path=name, flags=W | meta.OPEN_TRUNC),
                    )
                )
                reply = await w.namespace.handle(caller.prepare(request))
                if isinstance(reply, meta.Opened):
                    await write(caller, reply, rng)
                if rng.random() < 0.1:
                    await collector.step()
                if rng.random() < 0.02:
                    await caller(meta.SessionClose())
                    caller = await Caller.connect(w.namespace)
                done += 1
                await asyncio.sleep(0)

        async def write(caller: Caller, opened: meta.Opened, rng: random.Random) -> None:
            view = w.cluster.table(1)
            layout = opened.attributes.layout
            assert view is not None
            assert layout is not None
            epoch = decode_capability(opened.capability).epoch
            length = rng.randrange(1, 30_000)
            try:
                w.chains.write(opened.ino, layout, epoch, 0, length, view.chains)
            except errors.StaleEpoch:
                length = 0
            await asyncio.sleep(0)
            if rng.random() < 0.8:
                close = meta.Close(
                    ino=opened.ino, handle=opened.handle, epoch=epoch, length=length, written=length > 0
                )
                await w.namespace.handle(caller.prepare(close))

        async def sweep() -> None:
            sweeper = SessionSweeper(w.namespace.core)
            while not ended.is_set():
                await sweeper.step()
                await asyncio.sleep(0)

        async def look() -> None:
            for _ in range(24 if seed < 2 else 8):
                report = await w.check(pause=True)
                assert report.findings == [], f"seed {seed}: {report.findings}"
            ended.set()

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(busy(number))
            group.create_task(sweep())
            group.create_task(look())
        assert done > 100
        await w.settle()
        report = await w.check(repair=True)
        assert report.findings == [], f"seed {seed}: {report.findings}"

    run(test)


def test_session_key_is_what_a_session_is() -> None:
    """Without it everything of the client is a finding."""

    async def test(w: World) -> None:
        other = await Caller.connect(w.namespace)
        await other(meta.Open(path=b"/d/f7", flags=meta.OPEN_WRITE))
        await w.write((session_key(other.client), None))
        report = await w.check()
        assert {each.kind for each in report.findings} == {fsck.SESSIONLESS}
        await w.expect({fsck.SESSIONLESS})

    run(test)

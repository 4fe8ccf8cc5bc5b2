"""fsck of quotas: damage made by hand is found, mended, and gone at the next look."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import quota_count
from fsck_world import W, World, run
from namespace_fakes import Caller

from ffs import errors
from ffs.client.fsck import SUM, USAGE, judge_usage
from ffs.proto import checks, meta
from ffs.proto.common import Creds
from ffs.proto.quota import COUNTING, GetQuota, ListQuotas, QuotaView, Reserve, SetQuota
from metadata.fs.fsck import UNREADABLE
from metadata.fs.ops import fsck_quota
from metadata.fs.schema import (
    SUB_CHARGED,
    SUB_LENGTH,
    client_writer_key,
    counter,
    decode_inode,
    encode,
    inode_key,
    quota_bytes_key,
    quota_entries_key,
    quota_key,
    quota_work_key,
    writer_key,
)
from metadata.kv.contract import Transaction

INSIDE = (280_000, 9)  # bytes and entries of fsck_world's /d


async def quota(w: World, path: bytes = b"/d") -> QuotaView:
    view: QuotaView = (await w.me(GetQuota(path=path))).quota
    return view


async def begin(w: World) -> QuotaView:
    await w.me(SetQuota(path=b"/d", limit_bytes=1 << 30, limit_entries=1000))
    await w.settle()
    view = await quota(w)
    assert (view.used_bytes, view.used_entries) == INSIDE
    return view


async def is_right(w: World) -> None:
    await w.settle()
    pairs = await w.store.read(lambda snap: snap.range(b"\0", b"\xff"))
    quota_count.check_settled(pairs, links=True)
    view = await quota(w)
    assert (view.used_bytes, view.used_entries) == INSIDE
    assert (view.limit_bytes, view.limit_entries) == (1 << 30, 1000)


def add(key: bytes, delta: int) -> Any:
    async def body(txn: Transaction) -> None:
        txn.add(key, delta)

    return body


@pytest.mark.parametrize("pages", [1, 5, 1000])
def test_what_is_well_is_clean(pages: int) -> None:
    async def test(w: World) -> None:
        await begin(w)
        opened = await w.me(meta.Open(path=b"/d/open", flags=W))
        await w.me(Reserve(ino=opened.ino, handle=opened.handle, epoch=0, end=1 << 25))
        await w.me(meta.Open(path=b"/d", flags=meta.OPEN_WRITE | meta.OPEN_TMPFILE))
        await w.me(meta.Unlink(path=b"/d/f3"))
        await w.me(meta.RemoveTree(path=b"/d/inside"))
        await w.me(meta.MkDir(path=b"/new"))
        await w.me(SetQuota(path=b"/new"))
        await w.me(SetQuota(path=b"/empty"))
        await w.me(SetQuota(path=b"/empty", clear=True))
        report = await w.check()
        assert (report.findings, report.unsettled) == ([], [])
        assert report.clean
        assert report.looked["quotas"] == len((await w.me(ListQuotas())).quotas) > 1
        assert "charges" not in report.looked  # inodes, which are counted as such
        await w.settle()
        assert (await w.check()).clean

    run(test, pages=pages)


@pytest.mark.parametrize(("which", "delta"), [("bytes", 4096), ("bytes", -1), ("entries", -7), ("both", 1)])
def test_wrong_usage_is_counted_anew(which: str, delta: int) -> None:
    async def test(w: World) -> None:
        view = await begin(w)
        if which != "entries":
            await w.store.run(add(quota_bytes_key(view.quota, 2), delta))
        if which != "bytes":
            await w.store.run(add(quota_entries_key(view.quota, 1), delta))
        report = await w.check()
        [finding] = report.findings
        assert (finding.path, finding.ino) == (b"/d", view.ino)
        assert "is being counted anew" in (await w.expect({fsck_quota.USAGE})).repairs[0].text
        await is_right(w)
        assert (await quota(w)).quota != view.quota

    run(test)


def test_a_file_open_while_it_is_counted_anew_keeps_its_room() -> None:
    async def test(w: World) -> None:
        view = await begin(w)
        opened = await w.me(meta.Open(path=b"/d/open", flags=W))
        room = (await w.me(Reserve(ino=opened.ino, handle=opened.handle, epoch=0, end=1 << 25))).reserved
        await w.store.run(add(quota_bytes_key(view.quota, 0), 5))
        await w.expect({fsck_quota.USAGE})
        used = await quota(w)
        assert used.used_bytes == INSIDE[0] + room
        await w.me(meta.Close(ino=opened.ino, handle=opened.handle))
        await w.me(meta.Unlink(path=b"/d/open"))
        await is_right(w)

    run(test)


@pytest.mark.parametrize("wrong", [0, 123, 1 << 40])
def test_a_wrong_charge(wrong: int) -> None:
    async def test(w: World) -> None:
        view = await begin(w)
        ino = await w.ino(b"/d/f5")
        await w.write((inode_key(ino) + SUB_CHARGED, counter(wrong)))
        await w.store.run(add(quota_bytes_key(view.quota, 0), wrong - 50_000))
        report = await w.expect({fsck_quota.CHARGE})
        assert (report.findings[0].found, report.findings[0].expected) == (wrong, 50_000)
        await is_right(w)
        assert (await quota(w)).quota == view.quota

    run(test)


def test_a_wrong_charge_beside_a_wrong_sum() -> None:
    """As the loss of a single write would have it."""

    async def test(w: World) -> None:
        await begin(w)
        ino = await w.ino(b"/d/f5")
        await w.write((inode_key(ino) + SUB_CHARGED, counter(123)))
        await w.expect({fsck_quota.CHARGE, fsck_quota.USAGE})
        await is_right(w)

    run(test)


def test_what_has_no_label() -> None:
    """As a metadata service of the version before makes it."""

    async def test(w: World) -> None:
        view = await begin(w)
        for path in (b"/d/f4", b"/d/inside"):
            ino = await w.ino(path)
            record = decode_inode(await w.get(inode_key(ino)) or b"")
            await w.write((inode_key(ino), encode(msgspec.structs.replace(record, quota=0))))
            await w.write((inode_key(ino) + SUB_CHARGED, None))
            await w.store.run(add(quota_entries_key(view.quota, 0), -1))
        await w.store.run(add(quota_bytes_key(view.quota, 0), -40_000))
        report = await w.check()
        assert [(each.kind, each.path) for each in report.findings] == [
            (fsck_quota.UNCOUNTED, b"/d/f4"),
            (fsck_quota.UNCOUNTED, b"/d/inside"),
        ]
        await w.expect({fsck_quota.UNCOUNTED})
        await is_right(w)

    run(test)


def test_quotas_without_a_directory() -> None:
    async def test(w: World) -> None:
        await begin(w)
        await w.me(SetQuota(path=b"/empty"))
        view = await quota(w, b"/empty")
        record = await w.get(quota_key(view.quota))
        await w.me(meta.RmDir(path=b"/empty"))
        await w.write(
            (quota_key(view.quota), record),
            (quota_bytes_key(77, 0), counter(1)),
            (quota_entries_key(77, 3), counter(1)),
            (quota_work_key(78, 5), b""),
        )
        report = await w.expect({fsck_quota.LEFT})
        assert sorted(each.key for each in report.findings) == [
            quota_key(77),
            quota_key(78),
            quota_key(view.quota),
        ]
        await is_right(w)

    run(test)


def test_a_quota_that_is_used_all_the_time_is_unsettled_and_not_wrong() -> None:
    async def test(w: World) -> None:
        view = await begin(w)
        other = await Caller.connect(w.namespace)
        turn = 0

        async def meanwhile(request: meta.Request) -> None:
            nonlocal turn
            turn += 1
            if isinstance(request, checks.FsckScan) and request.what == checks.SCAN_QUOTAS:
                await other(meta.Open(path=b"/d/busy%d" % turn, flags=W))

        report = await w.check(meanwhile=meanwhile)
        assert (report.findings, report.unsettled) == ([], [view.ino])

    run(test)


def test_a_quota_that_still_counts() -> None:
    async def test(w: World) -> None:
        await w.me(SetQuota(path=b"/d"))
        assert (await quota(w)).state == COUNTING
        report = await w.check()
        assert (report.findings, report.unsettled) == ([], [])
        await w.store.run(add(quota_bytes_key((await quota(w)).quota, 0), 1))
        await w.expect({fsck_quota.USAGE})
        await w.settle()
        view = await quota(w)
        assert (view.used_bytes, view.used_entries) == INSIDE

    run(test)


def test_what_waits_for_collection_is_left_to_it() -> None:
    """An older metadata service took the last writer of a nameless file away, and gave nothing back."""

    async def test(w: World) -> None:
        await begin(w)
        opened = await w.me(meta.Open(path=b"/d", flags=meta.OPEN_WRITE | meta.OPEN_TMPFILE))
        await w.write(
            (writer_key(opened.ino, w.me.client, opened.handle), None),
            (client_writer_key(w.me.client, opened.ino, opened.handle), None),
        )
        assert opened.reserved > 0
        assert (await w.check()).clean
        await is_right(w)

    run(test)


def test_a_repair_that_comes_too_late_does_nothing() -> None:
    async def test(w: World) -> None:
        view = await begin(w)
        await w.store.run(add(quota_bytes_key(view.quota, 0), 5))
        [finding] = (await w.check()).findings
        await w.me(meta.MkDir(path=b"/d/later"))
        assert not (await w.me(checks.FsckRepair(finding=finding))).done
        assert (await quota(w)).quota == view.quota

    run(test)


def test_a_record_that_cant_be_read() -> None:
    async def test(w: World) -> None:
        view = await begin(w)
        await w.write((quota_key(view.quota), b"\xc1"))
        report = await w.check()
        assert [(each.kind, each.key) for each in report.findings] == [(UNREADABLE, quota_key(view.quota))]

    run(test)


def test_who_may_ask() -> None:
    async def test(w: World) -> None:
        user = await Caller.connect(w.namespace, Creds(1000, 1000))
        for what in (checks.SCAN_QUOTAS, checks.SCAN_CHARGES):
            with pytest.raises(errors.NotPermitted):
                await user(checks.FsckScan(what=what))

    run(test)


def test_judging_sums() -> None:
    before = np.array([(1, 10, 100, 5, 7), (2, 20, 9, 9, 8), (3, 30, 1, 1, 9)], dtype=USAGE)
    sums = np.array([(1, 60, 2), (1, 40, 3), (2, 10, 9), (3, 2, 1)], dtype=SUM)
    after = np.array([(1, 10, 100, 5, 7), (2, 20, 9, 9, 8), (3, 30, 3, 1, 99), (4, 40, 0, 0, 0)], dtype=USAGE)
    found, changing = judge_usage(before, sums, after)
    assert [(each.ino, each.found, each.expected, each.key) for each in found] == [(20, 9, 10, quota_key(2))]
    assert changing == [30]
    assert judge_usage(before[:0], sums[:0], after[:0]) == ([], [])


def test_lengths_are_what_files_are_charged() -> None:
    """The damage that these tests make is in keys that are there."""

    async def test(w: World) -> None:
        await begin(w)
        key = inode_key(await w.ino(b"/d/f5"))
        assert await w.get(key + SUB_CHARGED) == await w.get(key + SUB_LENGTH) == counter(50_000)

    run(test)

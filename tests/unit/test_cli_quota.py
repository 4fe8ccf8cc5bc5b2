"""`ffs quota` and `ffs df`: what they understand and say. No servers."""

from __future__ import annotations

import numpy as np
import pytest

from ffs.cli import build_parser, main
from ffs.cli.grammar import REMOTE, read_grammar
from ffs.cli.quota import as_json, lines, listing_table
from ffs.cli.text import parse_count
from ffs.cli.usage import space_fields, space_table
from ffs.client.quota import Quota, QuotaCalls
from ffs.errors import InvalidArgument
from ffs.proto import meta
from ffs.proto.quota import COUNTING, KEEP, QuotaList, QuotaReply, QuotaView, SetQuota

FULL = Quota(7, 70, "/team/a", 10 << 30, 1_000_000, 5 << 30, 12_345, False)
BARE = Quota(8, 80, "", 0, 0, 1536, 3, True)


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("12", 12), ("50k", 50_000), ("1.5M", 1_500_000), ("1_000,000", 10**6)]
)
def test_numbers_of_things(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1KiB", "1.2.3", "k"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(InvalidArgument, match="isn't a number"):
        parse_count(text)


def test_limits_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser().parse_args(["quota", "set", "/a", "--bytes", "10G", "-e", "none", "/b"])
    assert (args.paths, args.bytes, args.entries) == (["/a", "/b"], 10 << 30, 0)
    for wrong in (["--bytes", "0"], ["--entries", "many"], ["--bytes", "-1"]):
        with pytest.raises(SystemExit, match="2"):
            build_parser().parse_args(["quota", "set", "/a", *wrong])
    assert "write none for no limit" in capsys.readouterr().err
    assert main(["--cluster=127.0.0.1:1", "quota", "set", "/a"]) == 1
    assert "give --bytes SIZE, --entries N" in capsys.readouterr().err


def test_completion_knows_the_verbs_and_that_paths_are_in_the_cluster() -> None:
    grammar = read_grammar(build_parser())
    assert sorted(grammar["quota",].verbs) == ["clear", "get", "ls", "set"]
    assert grammar["quota", "set"].kind == REMOTE
    assert {"--bytes", "--entries", "--wait"} <= set(grammar["quota", "set"].options)


def test_what_people_read() -> None:
    assert lines("/team/a/", FULL) == [
        "quota    /team/a",
        "bytes    5.0 GiB of 10.0 GiB (50%), 5.0 GiB free",
        "entries  12,345 of 1,000,000 (1%), 987,655 free",
    ]
    assert lines("/x/y", BARE) == [
        "quota    inode 80",
        "bytes    1.5 KiB, no limit",
        "entries  3, no limit",
        "state    counting what was there before: it uses more than this",
    ]
    assert lines("/team/a/b", FULL)[1] == "counts   /team/a/b"
    head, first, second = listing_table([FULL, BARE]).splitlines()
    assert head.split() == ["directory", "bytes", "limit", "use", "entries", "limit", "use", "state"]
    assert first.split() == [
        "/team/a",
        "5.0",
        "GiB",
        "10.0",
        "GiB",
        "50%",
        "12,345",
        "1,000,000",
        "1%",
        "ready",
    ]
    assert second.split() == ["inode", "80", "1.5", "KiB", "-", "-", "3", "-", "-", "counting"]


def test_what_programs_read() -> None:
    assert as_json(BARE) == {
        "path": None,
        "inode": 80,
        "limit_bytes": None,
        "used_bytes": 1536,
        "limit_entries": None,
        "used_entries": 3,
        "counting": True,
    }


def test_more_used_than_allowed_leaves_nothing_free() -> None:
    over = Quota(1, 2, "/a", 10, 1, 15, 3, False)
    assert (over.free_bytes, over.free_entries) == (0, 0)
    assert (BARE.free_bytes, BARE.free_entries) == (None, None)
    assert lines("/a", over)[1] == "bytes    15 B of 10 B (150%), 0 B free"


def test_df() -> None:
    plain = meta.StatFsReply(total_bytes=1 << 30, free_bytes=1 << 29, chunk_size=1, table=1)
    assert space_table(plain).splitlines()[1].split() == ["1.0", "GiB", "512.0", "MiB", "512.0", "MiB", "50%"]
    assert space_fields(plain) == {"total": 1 << 30, "used": 1 << 29, "free": 1 << 29}
    within = meta.StatFsReply(
        total_bytes=1 << 30,
        free_bytes=1 << 29,
        chunk_size=1,
        table=1,
        quota_bytes=1 << 20,
        quota_free_bytes=0,
    )
    words = space_table(within).splitlines()[2].split()
    assert words == ["quota", "1.0", "MiB", "1.0", "MiB", "0", "B", "100%"]
    assert space_fields(within)["quota"] == 1 << 20
    assert space_fields(within)["quota_free"] == 0


class Calls(QuotaCalls):
    """Answers as a service would: three pages of quotas."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    @property
    def core(self):  # type: ignore[no-untyped-def]
        return self

    def change(self, request: SetQuota, reply: type[QuotaReply]) -> QuotaReply:
        self.asked.append(request)
        return QuotaReply(quota=None if request.clear else QuotaView(quota=1, ino=2, state=COUNTING))

    def ask(self, request, reply):  # type: ignore[no-untyped-def]
        self.asked.append(request)
        ids = [i for i in (3, 5, 9) if i > request.after][:1]
        views = [QuotaView(quota=i, ino=i, path=b"/%d" % (10 - i)) for i in ids]
        return QuotaList(quotas=views, more=ids != [9])


def test_limits_that_are_none() -> None:
    calls = Calls()
    with pytest.raises(InvalidArgument, match=r"give bytes, entries, or both.*'/a'"):
        calls.set_quota("/a")
    for wrong in ("1G", 1.5, True):
        with pytest.raises(TypeError, match=r"bytes .*: give a whole number .*, not a "):
            calls.set_quota("/a", bytes=wrong)  # type: ignore[arg-type]
    assert calls.asked == []
    calls.set_quota("/a", entries=np.int64(7))  # type: ignore[arg-type]
    assert calls.asked == [SetQuota(path=b"/a", limit_bytes=KEEP, limit_entries=7)]


def test_calls() -> None:
    calls = Calls()
    assert [quota.id for quota in calls.quotas()] == [9, 5, 3]  # by path
    assert len(calls.asked) == 3
    assert calls.set_quota("/a", bytes=5).counting
    request = calls.asked[-1]
    assert isinstance(request, SetQuota)
    assert (request.limit_bytes, request.limit_entries, request.clear) == (5, KEEP, False)
    calls.clear_quota("/a")
    for wrong in (-1, 1 << 62):
        with pytest.raises(InvalidArgument, match="give 0"):
            calls.set_quota("/a", entries=wrong)

"""`ffs space` and `ffs cluster table`: what they understand and say; the bounds of a KV space as Python has
them. No servers."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffs.cli import build_parser
from ffs.cli.cluster_tables import check_size, table_fields, table_table
from ffs.cli.cluster_view import View, status_fields, status_lines
from ffs.cli.space import (
    blocks_wanted,
    bounds_words,
    listing_table,
    overfull,
    share_table,
    space_fields,
    stat_lines,
)
from ffs.cli.text import format_duration, parse_duration
from ffs.errors import Exists, InvalidArgument
from ffs.kv.bounds import Bounds, Share, Usage, differences, ttl_ms
from ffs.kv.geometry import Geometry
from ffs.kv.int8 import BlockShape
from ffs.layout import Layout
from ffs.proto import meta
from ffs.proto.cluster import TableRoute
from ffs.proto.commands import ChainView, ClusterReply, DeviceView, NodeView, TargetView
from ffs.proto.records import KV_EVICTABLE, KV_SPACE, KvParams
from ffs.proto.spaces import SpaceView

KV = KvParams(1 << 20, quota_bytes=10 << 30, ttl_ms=12 * 3600 * 1000, flags=KV_EVICTABLE)
BARE = KvParams(4096)
SHAPE = BlockShape(layers=2, tokens=16, heads=4, head_size=64, dtype="float16", order="heads")
TABLES = {2: TableRoute(id=2, name="fast", version=1, replicas=2, chains=(1, 2), role="kv")}
USAGE = Usage(
    bytes=5 << 30,
    blocks=5120,
    quota_bytes=10 << 30,
    evicted_bytes=1 << 30,
    evicted_blocks=1024,
    hits=7,
    chains=2,
    reported=1,
    shares=(Share(1, 6 << 30, 5 << 30, 5120, 1 << 30), Share(2, 4 << 30, 0, 0, 0)),
)


def attributes(kv: KvParams | None) -> meta.Attributes:
    return meta.Attributes(1, 77, KV_SPACE, 0o666, 0, 0, 1, 0, 1, 1, 1, 0, Layout(2, 1, 77, 1 << 20), kv)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("12h", 43200),
        ("1.5m", 90),
        ("90", 90),
        ("7d", 604800),
        ("2 w", 1209600),
        ("250ms", 0.25),
    ],
)
def test_parse_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1s", "1 year", "1e3", "nan", "1..2s", "12h30m"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="isn't a time"):
        parse_duration(text)


@given(st.integers(1, 10**9))
def test_durations_are_read_as_they_are_written(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


def test_bounds_of_the_command_line() -> None:
    parse = build_parser().parse_args
    made = parse(["space", "create", "/kv", "--block-size", "1MiB", "--quota", "10G", "--ttl", "12h"])
    assert (made.block_size, made.quota, made.ttl, made.evictable) == (1 << 20, 10 << 30, 43200, None)
    bare = parse(["space", "set", "/kv", "--quota", "none", "--ttl", "0", "--evictable", "no"])
    assert (bare.quota, bare.ttl, bare.evictable) == (0, 0, False)
    kept = parse(["space", "set", "/kv"])
    assert (kept.quota, kept.ttl, kept.evictable) == (None, None, None)
    table = parse(["cluster", "table", "create", "fast", "--replicas", "2", "--role", "kv"])
    assert (table.name, table.replicas, table.role) == ("fast", 2, "kv")
    for wrong in (
        ["space", "set", "/kv", "--quota", "much"],
        ["space", "set", "/kv", "--quota", "-1"],
        ["space", "set", "/kv", "--ttl", "-1s"],
        ["space", "set", "/kv", "--evictable", "maybe"],
        ["kv", "create", "/kv", "--values", "int4", "--shape", "2,16,4,64"],
        ["kv", "create", "/kv", "--values", "int8", "--shape", "2,16,4"],
        ["kv", "create", "/kv", "--values", "int8", "--shape", "2,16,0,64"],
        ["cluster", "table", "create", "fast", "--replicas", "2", "--role", "fast"],
        ["cluster", "table", "create", "fast"],
    ):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_what_is_said_of_a_space() -> None:
    assert bounds_words(KV) == "quota 10.0 GiB, ttl 12h, evictable"
    assert bounds_words(BARE) == "no quota, no ttl, not evictable"
    coded = msgspec.structs.replace(KV, identity=SHAPE.stored)
    assert bounds_words(coded) == "quota 10.0 GiB, ttl 12h, evictable, int8 values"
    assert "values     int8: 2 layers, 16 tokens, 4 heads of 64, float16, heads first" in list(
        stat_lines("/kv", attributes(coded), USAGE, TABLES)
    )
    newer = msgspec.structs.replace(KV, identity=SHAPE.stored + b"\1")
    assert bounds_words(newer) == bounds_words(KV)
    text = "\n".join(stat_lines("/kv", attributes(KV), USAGE, TABLES))
    for line in (
        "blocks     up to 1.0 MiB",
        "table      fast (2 replicas)",
        "quota      10.0 GiB, 50% used",
        "ttl        12h",
        "evictable  yes",
        "used       5.0 GiB in 5120 blocks",
        "evicted    1.0 GiB in 1024 blocks since the servers started",
        "as 1 of 2 chains say; the others said nothing yet",
    ):
        assert line in text
    bare = "\n".join(stat_lines("/kv", attributes(BARE), USAGE, {}))
    assert "quota      none\n" in bare
    assert "table      2\n" in bare
    assert "evictable  no" in bare
    assert share_table(USAGE).splitlines()[1].split() == [
        "1",
        "6.0",
        "GiB",
        "5.0",
        "GiB",
        "5120",
        "1.0",
        "GiB",
    ]
    shown = listing_table([("/kv", attributes(KV)), ("/b", attributes(BARE))], {77: USAGE}, TABLES)
    assert "12h" in shown
    assert shown.count("fast") == 2
    with pytest.raises(InvalidArgument, match="isn't a KV space"):
        list(stat_lines("/f", attributes(None), USAGE, TABLES))


def test_what_programs_get_of_a_space() -> None:
    fields = space_fields("/kv", attributes(KV), USAGE, TABLES)
    assert fields["quota_bytes"] == 10 << 30
    assert fields["ttl_ms"] == 43_200_000
    assert fields["evictable"] is True
    assert fields["bytes"] == 5 << 30
    assert fields["chains_reported"] == 1
    assert fields["shares"] == [
        {"chain": 1, "quota_bytes": 6 << 30, "bytes": 5 << 30, "blocks": 5120, "evicted_bytes": 1 << 30},
        {"chain": 2, "quota_bytes": 4 << 30, "bytes": 0, "blocks": 0, "evicted_bytes": 0},
    ]
    assert "bytes" not in space_fields("/kv", attributes(KV), None, TABLES)


def test_the_clusters_status_has_spaces_and_roles() -> None:
    space = SpaceView(
        space=77,
        table=2,
        table_version=1,
        block_bytes=4096,
        quota_bytes=100,
        ttl_ms=5,
        evictable=True,
        chunks=3,
        bytes=12288,
        evicted_chunks=1,
        evicted_bytes=4096,
        hits=2,
        chains=2,
        reported=2,
    )
    reply = ClusterReply(
        cluster=bytes(16),
        epoch=1,
        term=1,
        primary="m:1",
        manager_ms=1,
        rebalancing=False,
        nodes=(),
        targets=(),
        chains=(),
        tables=tuple(TABLES.values()),
        spaces=(space,),
    )
    view = View(reply)
    fields: Any = status_fields(view)
    assert fields["tables"][0]["role"] == "kv"
    (shown,) = fields["spaces"]
    assert (shown["inode"], shown["table"], shown["bytes"], shown["quota_bytes"]) == (77, "fast", 12288, 100)
    assert (shown["evicted_blocks"], shown["evicted_bytes"], shown["hits"]) == (1, 4096, 2)
    lines = "\n".join(status_lines(view))
    assert "table fast: role kv, 2 replicas" in lines
    assert "1 KV space: 12.0 KiB held, 4.0 KiB evicted since the servers started (ffs space ls)" in lines
    assert table_fields(view)[0]["role"] == "kv"
    assert table_table(view).splitlines()[1].split() == ["2", "fast", "kv", "2", "0", "2"]


def test_what_a_space_has_otherwise_than_asked_for() -> None:
    assert differences(KV, None, None, None) == []
    assert differences(KV, 10 << 30, 43200, True, False) == []
    assert differences(KV, None, None, None, True) == ["dedup no, not yes"]
    assert differences(BARE, 0, 0, False) == []
    assert differences(KV, 0, 30, False) == [
        "a quota of 10737418240 bytes, not 0",
        "a ttl of 43200 s, not 30",
        "evictable yes, not no",
    ]


def test_a_quota_below_what_a_space_holds_is_said_where_nothing_is_evicted() -> None:
    full = msgspec.structs.replace(KV, quota_bytes=1 << 30, flags=0)
    assert "/kv holds 5.0 GiB, more than its quota of 1.0 GiB" in overfull("/kv", full, USAGE)
    for other in (KV, BARE, None, msgspec.structs.replace(full, quota_bytes=5 << 30)):
        assert overfull("/kv", other, USAGE) == ""


def test_a_table_that_asks_for_more_targets_than_there_are() -> None:
    def device(uuid: bytes, free: int, role: str = "") -> DeviceView:
        return DeviceView(
            uuid=uuid,
            path="/dev/x",
            here=True,
            poisoned=False,
            size_bytes=1,
            capacity_bytes=1,
            free_bytes=1,
            targets=64,
            used_targets=64 - free,
            free_targets=free,
            role=role,
        )

    def node(ident: int, *devices: DeviceView, alive: bool = True) -> NodeView:
        return NodeView(
            id=ident,
            name=f"node{ident}",
            domain="",
            alive=alive,
            draining=False,
            incarnation=1,
            host="",
            control="",
            silent_ms=0,
            leaving=0,
            note="",
            devices=devices,
        )

    def target(ident: int, chain: int) -> TargetView:
        return TargetView(
            id=ident,
            node=1,
            device=b"a",
            chain=chain,
            state=1,
            wanted=True,
            member=True,
            released=False,
            here=True,
            poisoned=False,
            used_bytes=0,
            chunks=0,
            damaged=0,
            repaired=0,
            scrubbed_bytes=0,
        )

    def chain(ident: int, member: int) -> ChainView:
        return ChainView(
            id=ident,
            table=2,
            term=1,
            counter=0,
            members=(member,),
            states=(1,),
            wanted=(member,),
            writable=True,
            readable=True,
            whole=True,
            forced=0,
            reason="",
            shared_domain="",
        )

    view = View(
        ClusterReply(
            cluster=bytes(16),
            epoch=1,
            term=1,
            primary="m:1",
            manager_ms=1,
            rebalancing=False,
            nodes=(node(1, device(b"a", 20), device(b"b", 3, "kv")), node(2, device(b"c", 1), alive=False)),
            targets=(target(5, 1), target(6, 2)),
            chains=(chain(1, 5), chain(2, 6)),
            tables=tuple(TABLES.values()),
        )
    )
    check_size(view, "new", "", 20)
    check_size(view, "new", "kv", 3)
    with pytest.raises(InvalidArgument, match="--chains-per-device 21: device /dev/x of node1 has 20 free"):
        check_size(view, "new", "", 21)
    with pytest.raises(InvalidArgument, match="has 3 free targets"):
        check_size(view, "new", "kv", 4)
    check_size(view, "fast", "kv", 2)
    with pytest.raises(Exists, match="table fast exists with 2 targets of a device, not 9"):
        check_size(view, "fast", "kv", 9)


def test_bounds_that_can_not_be() -> None:
    assert Bounds(quota_bytes=1 << 40, ttl_s=0.5).params(Geometry(4096)) == KvParams(
        4096, quota_bytes=1 << 40, ttl_ms=500, flags=KV_EVICTABLE
    )
    assert Bounds(evictable=False).params(Geometry(4096)).flags == 0
    assert (ttl_ms(0), ttl_ms(0.0001), ttl_ms(2)) == (0, 1, 2000)
    for wrong in (
        {"quota_bytes": -1},
        {"quota_bytes": 1 << 62},
        {"ttl_s": -1},
        {"ttl_s": math.inf},
        {"ttl_s": math.nan},
    ):
        with pytest.raises(InvalidArgument):
            Bounds(**wrong)  # type: ignore[arg-type]
    for strange in ({"quota_bytes": 1.5}, {"quota_bytes": True}, {"ttl_s": "1s"}):
        with pytest.raises(TypeError):
            Bounds(**strange)  # type: ignore[arg-type]


def test_the_blocks_of_a_space_to_be_made() -> None:
    def wanted(*options: str) -> tuple[Geometry, bytes]:
        return blocks_wanted(build_parser().parse_args(["kv", "create", "/kv", *options]))

    shape = ("--values", "int8", "--shape", "2,16,4,64")
    assert wanted("--block-size", "80M", "--parts", "5") == (Geometry(80 << 20, 5), b"")
    geometry = Geometry(SHAPE.plain_bytes)
    assert wanted(*shape, "--dtype", "float16", "--order", "heads") == (geometry, SHAPE.stored)
    plain = msgspec.structs.replace(SHAPE, dtype="bfloat16", order="tokens")
    assert wanted(*shape, "--block-size", "32KiB") == (geometry, plain.stored)
    for options, why in (
        ((), "Give --block-size"),
        (("--block-size", "1M", "--dtype", "float16"), "go with --values int8"),
        (("--values", "int8", "--block-size", "1M"), "needs the shape"),
        ((*shape, "--block-size", "1M"), "leave --block-size out"),
        ((*shape, "--parts", "2"), "aren't cut"),
        (("--values", "int8", "--shape", "64,64,16,128"), "16 MiB"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            wanted(*options)

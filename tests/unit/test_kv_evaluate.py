"""Replays of traces: the arithmetic by hand, the shape on a generated load, and public traces."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ffs import errors
from ffs.cli import main
from ffs.kv.evaluate import Request, evaluate, name_of, parse_trace, replay
from ffs.kv.policy import make_order

TRACES = Path(__file__).parents[1] / "data/traces"


def request(*ids: int, at_ms: float = 0) -> Request:
    return Request(at_ms, tuple(map(name_of, ids)))


def unpack(data: bytes) -> list[Request]:
    """tests/data/traces/README.md says what the bytes are."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def zigzag() -> int:
        value = varint()
        return value >> 1 if value & 1 == 0 else -(value + 1 >> 1)

    names: dict[int, bytes] = {}
    requests, now = [], 0
    while at < len(data):
        now += zigzag()
        block, blocks = 0, []
        for _ in range(varint()):
            block += zigzag()
            for _ in range(varint()):
                blocks.append(names.get(block) or names.setdefault(block, name_of(block)))
                block += 1
        requests.append(Request(now, tuple(blocks)))
    return requests


def sessions(seed: int, count: int) -> list[Request]:
    """Conversations: each turn asks for all before it and some more; all of them share a first block, a
    quarter share a long prefix, and now and then a long document comes that nobody asks for again."""
    draw = random.Random(seed)
    fresh = iter(range(10**6, 10**9))
    long_prefix = [next(fresh) for _ in range(40)]
    live = [[0, *(long_prefix if draw.random() < 0.25 else [])] for _ in range(60)]
    found = []
    for at in range(count):
        if draw.random() < 0.1:
            found.append(request(*(next(fresh) for _ in range(80)), at_ms=at))
            continue
        one = draw.randrange(len(live))
        live[one] = [*live[one], *(next(fresh) for _ in range(draw.randrange(1, 6)))]
        found.append(request(*live[one], at_ms=at))
        if draw.random() < 0.08:
            live[one] = [0, *(long_prefix if draw.random() < 0.25 else [])]
    return found


def test_only_whole_prefixes_count() -> None:
    trace = [request(1, 2, 3), request(1, 9, 3), request(1, 2, 3), request()]
    assert replay(trace, make_order("lru", 10), 10) == pytest.approx((0 + 1 + 3) / 9)
    report = evaluate(trace, ["lru"], [1.0])
    assert (report.requests, report.blocks, report.unique) == (4, 9, 4)
    assert report.possible == pytest.approx(4 / 9)
    assert report.shared == pytest.approx(8 / 9)
    assert report.cold == pytest.approx(4 / 9)
    assert report.replays[0].hit_ratio == report.possible


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    trace = [request(1, 2, 3, 4), request(5, 6), request(1, 2, 3, 4)]
    assert replay(trace, make_order("lru", 4), 4) == pytest.approx(2 / 10)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"timestamp": 0}', "line 1 .*hash_ids"),
        ('{"hash_ids": [1]}\nnonsense', "line 2"),
        ('{"hash_ids": ["a"]}', "line 1"),
        ("", "no request"),
        ('{"hash_ids": []}', "no request"),
    ],
)
def test_what_isnt_a_trace_is_refused_by_line(text: str, why: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=why):
        parse_trace(text.splitlines())


def test_the_shape_on_a_generated_load() -> None:
    """LRU-2 and S3-FIFO win in a small tier, where a document drives conversations out of an LRU; a large one
    makes them all alike; the default is close to the best everywhere."""
    shares = (0.02, 0.1, 0.5, 1.0)
    report = evaluate(sessions(11, 1500), shares=shares)
    ratio = {(one.policy, one.share): one.hit_ratio for one in report.replays}
    assert ratio["lru-2", 0.02] > 1.05 * ratio["lru", 0.02]
    assert ratio["lru", 1.0] == ratio["lru-2", 1.0] == report.possible
    for policy in ("adaptive", "lru", "lru-2", "s3-fifo"):
        line = [ratio[policy, share] for share in shares]
        assert line == sorted(line), policy
    for share in shares:
        assert ratio["adaptive", share] >= 0.9 * report.best(share).hit_ratio
    assert report.worth_it
    assert report.wanted_share in shares
    assert 0.5 < report.shared < 0.9


def test_a_public_trace_gives_the_known_ratios() -> None:
    """The synthetic trace in a tenth of its blocks, as published with the policies."""
    trace = unpack((TRACES / "synthetic.trace").read_bytes())
    report = evaluate(trace, ["lru", "lru-2", "s3-fifo", "adaptive"], [0.1])
    ratio = {one.policy: one.hit_ratio for one in report.replays}
    assert report.unique == 43924
    assert ratio["lru"] == pytest.approx(0.262, abs=0.001)
    assert ratio["lru-2"] == pytest.approx(0.264, abs=0.005)
    assert ratio["s3-fifo"] == pytest.approx(0.270, abs=0.002)
    assert ratio["adaptive"] >= max(ratio.values()) - 0.005


def test_the_command_prints_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "hash_ids": [0, 1, 2, 100 + at % 7]} for at in range(70)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["kv", "evaluate", str(path)]) == 0
    said = capsys.readouterr().out
    assert "70 requests of 280 blocks, 10 of them different" in said
    assert "A shared tier is worth it" in said
    assert main(["kv", "evaluate", str(path), "--json", "--capacity", "50%", "--policy", "lru"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in value["replays"]] == ["lru"]
    assert value["replays"][0]["capacity_blocks"] == 5
    assert value["possible_hit_ratio"] == pytest.approx((280 - 10) / 280)
    path.write_text("\n".join(json.dumps({"hash_ids": [at]}) for at in range(30)))
    assert main(["kv", "evaluate", str(path)]) == 0
    assert "isn't worth it" in capsys.readouterr().out
    path.write_text("nonsense")
    assert main(["kv", "evaluate", str(path)]) == 1
    assert "line 1 isn't a request" in capsys.readouterr().err

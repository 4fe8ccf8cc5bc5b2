"""Intervals between checkpoints, and `ffs ckpt advise`."""

from __future__ import annotations

import json
import math

import pytest

from ffs.checkpoint.advise import advise, daly, waste
from ffs.checkpoint.manifest import Manifest, Part, Shard, Tensor
from ffs.checkpoint.verify import Difference, differences
from ffs.cli import build_parser, main
from ffs.cli.ckpt import lines
from ffs.cli.grammar import REMOTE, read_grammar
from ffs.errors import InvalidArgument


def test_young_and_daly() -> None:
    advice = advise(5.0, 5.0, 3600.0)
    assert advice.young_s == pytest.approx(math.sqrt(2 * 5 * 3600))
    assert daly(5.0, 3600.0) == pytest.approx(189.7367 * (1 + 0.0263523 / 3 + 0.00069444 / 9), rel=1e-5)
    assert daly(100.0, 50.0) == 50.0


def test_the_interval_is_where_least_is_lost() -> None:
    """Daly's, against a search; never more often than a checkpoint takes to become visible."""
    for stall, mtbf in ((0.1, 600.0), (2.0, 7200.0), (30.0, 86400.0)):
        best = min((waste(t, stall, 0, mtbf, 0), t) for t in (x / 10 for x in range(1, 40000)))[1]
        assert advise(stall, 0.0, mtbf).interval_s == pytest.approx(best, rel=0.1)
    assert advise(0.01, 60.0, 600.0).interval_s == 60.0
    assert advise(0.3, 20.0, 6 * 3600.0, 180.0, 0.4).mfu == pytest.approx(0.4 * (1 - 0.01705), rel=1e-2)
    assert advise(0.0, 0.0, 10.0).waste == 0.0


def test_what_makes_no_sense() -> None:
    for wrong in ((-1.0, 0.0, 10.0), (1.0, math.nan, 10.0), (1.0, 1.0, 0.0), (1.0, 1.0, 10.0, -1.0)):
        with pytest.raises(InvalidArgument):
            advise(*wrong)
    with pytest.raises(InvalidArgument, match="MFU"):
        advise(1.0, 1.0, 10.0, 0.0, 2.0)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["ckpt", "advise", "--stall", "0.3s", "--persist", "20s", "--mtbf", "6h", "--mfu", "0.4"]
    assert main(line) == 0
    assert "save every" in capsys.readouterr().out
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["young_s"] == pytest.approx(113.84, rel=1e-3)
    with pytest.raises(SystemExit, match="2"):
        main(["ckpt", "advise", "--stall", "soon", "--mtbf", "6h"])
    grammar = read_grammar(build_parser())
    verbs = ["advise", "convert", "diff", "gc", "ls", "pin", "rm", "show", "unpin", "verify"]
    assert sorted(grammar["ckpt",].verbs) == verbs
    assert all(grammar["ckpt", verb].kind == REMOTE for verb in verbs if verb != "advise")


def manifest(**hashes: str) -> Manifest:
    tensors = {name: Tensor("F32", (2,), (Part(0, 4096, 8, digest * 64),)) for name, digest in hashes.items()}
    return Manifest((Shard("f", 5000, True), Shard("g", 5000)), tensors, step=3)


def test_differences_by_hash() -> None:
    one, other = manifest(a="0", b="0", c="0", d="0"), manifest(a="0", b="1", d="0", e="0")
    other.tensors["d"] = Tensor("F16", (4,), other.tensors["d"].parts)
    found = differences(one, other)
    assert [(d.name, d.kind) for d in found] == [
        ("b", "changed"),
        ("c", "removed"),
        ("d", "reshaped"),
        ("e", "added"),
    ]
    cut = manifest(a="0")
    half = (Part(0, 4096, 4, "0" * 64, (0,), (1,)), Part(0, 4100, 4, "0" * 64, (1,), (1,)))
    cut.tensors["a"] = Tensor("F32", (2,), half)
    assert differences(manifest(a="0"), cut) == [Difference("a", "changed", "or only stored in other pieces")]
    fast = Manifest(one.shards, {"a": one.tensors["a"]}, version=2, hash="xxh3-128")
    assert differences(manifest(a="0"), fast) == [Difference("a", "changed", "or only hashed with xxh3-128")]


def test_what_show_says() -> None:
    text = "\n".join(lines("/c", manifest(a="0", b="1"), "paper", every=True))
    for words in (
        "step        3",
        "2 tensors (0 tied), 16 B",
        "of it 4.9 KiB linked",
        "pinned      paper",
        "F32",
    ):
        assert words in text

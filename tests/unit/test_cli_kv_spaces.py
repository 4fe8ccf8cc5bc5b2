"""`ffs kv` stats, pin and purge: what needs no cluster."""

from __future__ import annotations

import dataclasses

import pytest

from ffs.cli import build_parser, main
from ffs.cli.kv_spaces import key_of, rates
from ffs.errors import InvalidArgument
from ffs.kv.bounds import Usage

USAGE = Usage(
    bytes=1, blocks=2, quota_bytes=0, evicted_bytes=3, evicted_blocks=40, hits=100, chains=2, reported=2
)


def test_rates_are_of_the_time_between_two_looks() -> None:
    later = dataclasses.replace(USAGE, hits=130, evicted_blocks=41, expired_blocks=10)
    assert rates(USAGE, later, 2) == {"hits_per_s": 15.0, "evicted_per_s": 0.5, "expired_per_s": 5.0}
    assert rates(None, later, 2) == {}
    # The servers started anew in between.
    assert rates(later, USAGE, 2) == {"hits_per_s": 0.0, "evicted_per_s": 0.0, "expired_per_s": 0.0}


def test_keys_are_hex_digits() -> None:
    assert key_of("0a" * 32) == b"\n" * 32
    for text in ("", "0a" * 31, "0a" * 33, "zz" * 32):
        with pytest.raises(InvalidArgument, match="64 hex digits"):
            key_of(text)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (("kv", "pin", "/kv"), "no key"),
        (("kv", "pin", "/kv", "12"), "64 hex digits"),
        (("kv", "stats", "/kv", "--count", "2"), "--count goes with --every"),
    ],
)
def test_lines_that_say_too_little(
    line: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(line)) == 1
    assert why in capsys.readouterr().err


def test_create_and_ls_are_those_of_ffs_space() -> None:
    for noun in ("kv", "space"):
        args = build_parser().parse_args(
            [noun, "create", "/kv", "--block-size", "80M", "--parts", "5", "--replicas", "2"]
        )
        assert (args.block_size, args.parts, args.replicas, args.table) == (80 << 20, 5, 2, None)
        assert build_parser().parse_args([noun, "ls"]).path == "/"
    with pytest.raises(SystemExit):
        build_parser().parse_args(
            ["kv", "create", "/kv", "--block-size", "1M", "--replicas", "2", "--table", "a"]
        )

"""Sizes, tables, places, progress, parsing of command lines: what the CLI says and understands."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffs import errors
from ffs.cli import build_parser, describe_error, exit_status, main
from ffs.cli.location import Location, one_address, parse_location, parse_remote
from ffs.cli.progress import Progress, draw
from ffs.cli.text import format_bytes, format_rate, format_seconds, parse_bytes, plural, table
from ffs.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1000", 1000),
        ("4KiB", 4096),
        ("4k", 4096),
        ("1.5 MiB", 3 << 19),
        ("2G", 2 << 30),
        ("1kB", 1000),
        ("3TB", 3 * 10**12),
        ("1_000b", 1000),
    ],
)
def test_parse_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1 parsec", "1.2.3k", "k"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="isn't a size"):
        parse_bytes(text)


@given(st.integers(0, 1 << 62))
def test_format_bytes_is_short_and_near(count: int) -> None:
    shown = format_bytes(count)
    assert len(shown) <= 10
    assert parse_bytes(shown) == pytest.approx(count, rel=0.06, abs=1)


def test_words() -> None:
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1 << 20) == "1.0 MiB"
    assert format_rate(2_500_000_000, 2) == "1.25 GB/s"
    assert format_rate(1, 0) == "-"
    assert format_seconds(3725) == "1:02:05"
    assert plural(1, "node") == "1 node"
    assert plural(0, "node") == "0 nodes"
    assert table(("a", "b"), [("x", "10"), ("yy", "2")], right=(1,)) == "a    b\nx   10\nyy   2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file", Location("file", False)),
        ("/abs", Location("/abs", False)),
        ("ffs:/", Location("/", True)),
        ("ffs:/a/b", Location("/a/b", True)),
        ("ffs://h:1/a", Location("/a", True, "h:1")),
        ("ffs://h:1,g:2/a", Location("/a", True, "h:1,g:2")),
        ("ffs://h:1", Location("/", True, "h:1")),
    ],
)
def test_locations(text: str, expected: Location) -> None:
    assert parse_location(text) == expected
    if expected.remote:
        assert parse_location(str(expected)) == expected


@pytest.mark.parametrize("text", ["", "ffs:", "ffs:a", "ffs:///a"])
def test_bad_locations_say_what_to_write(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"write|name"):
        parse_location(text)


def test_a_bare_path_is_of_the_cluster_where_nothing_else_is_meant() -> None:
    assert parse_remote("/a") == Location("/a", True)
    with pytest.raises(InvalidArgument, match="absolute"):
        parse_remote("a")


def test_one_cluster_a_command() -> None:
    a, b = parse_location("ffs://h:1/x"), parse_location("ffs://h:2/x")
    assert one_address([a, Location("l", False)], None) == "h:1"
    assert one_address([parse_location("ffs:/x")], "d:9") == "d:9"
    assert one_address([a], "h:1") == "h:1"
    with pytest.raises(InvalidArgument, match="two clusters"):
        one_address([a, b], None)
    with pytest.raises(InvalidArgument, match="contradicts"):
        one_address([a], "h:2")


@given(
    st.text(min_size=1, max_size=200),
    st.integers(0, 1 << 50),
    st.none() | st.integers(0, 1 << 50),
    st.floats(0, 1e6),
    st.integers(20, 200),
)
def test_progress_fits_its_line(
    label: str, done: int, total: int | None, elapsed: float, columns: int
) -> None:
    assert len(draw(label, done, total, elapsed, columns)) <= columns


def test_progress_draws_on_terminals_only() -> None:
    hidden, shown = io.StringIO(), io.StringIO()
    with Progress(hidden, "f", 10) as bar:
        bar.advance(10)
    with Progress(shown, "f", 10, show=True) as bar:
        bar.advance(10)
    assert hidden.getvalue() == ""
    assert "100%" in shown.getvalue()


def test_errors_are_one_line_with_name_and_way_out() -> None:
    error = errors.NotFound("no such file", "/a")
    assert describe_error(error) == "/a: no such file"
    assert describe_error(errors.Busy("in use\nby 3", "/dev/x")) == "/dev/x: in use by 3"
    assert describe_error(errors.CrossDevice("no", "/a", "/b")) == "/a -> /b: no"
    # Named in the sentence already, unless it is only a word of it, or part of another name.
    assert describe_error(errors.Busy("/dev/x: in use", "/dev/x")) == "/dev/x: in use"
    assert describe_error(errors.InvalidArgument("is empty: no", "empty")) == "empty: is empty: no"
    assert describe_error(errors.QuotaExceeded("quota of /a/bc", "/a/b")) == "/a/b: quota of /a/bc"
    assert describe_error(errors.QuotaExceeded("quota of /a/b.", "/a/b")) == "quota of /a/b."
    assert exit_status(errors.Unreachable("x")) == 3
    assert exit_status(error) == 1


def test_options_stand_before_or_after_the_command() -> None:
    parser = build_parser()
    assert parser.parse_args(["--cluster", "h:1", "ls"]).cluster == "h:1"
    assert parser.parse_args(["ls", "--cluster", "h:1"]).cluster == "h:1"
    assert parser.parse_args(["ls"]).cluster is None
    mixed = parser.parse_args(["rm", "/a", "-r", "/b", "--", "-c"])
    assert (mixed.paths, mixed.recursive) == (["/a", "/b", "-c"], True)
    assert parser.parse_args(["ls"]).paths == parser.parse_args(["ls", "-l"]).paths != []
    assert parser.parse_args(["cp", "a", "-r", "b", "c"]).target == "c"
    assert parser.parse_args(["up", "--device-size", "1GiB"]).device_size == 1 << 30


@pytest.mark.parametrize("line", [["bench", "io"], ["ls"]])
def test_an_unknown_option_shows_the_usage_of_its_command(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([*line, "--nope"])
    said = capsys.readouterr().err
    assert f"usage: ffs {' '.join(line)}" in said
    assert "unrecognized arguments: --nope" in said


@pytest.mark.parametrize(
    "line",
    [
        ["nonsense"],
        ["up", "--nodes", "0"],
        ["up", "--device-size", "big"],
        ["rm"],
        ["cp", "a"],
        ["ls", "--what"],
    ],
)
def test_wrong_command_lines_end_with_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["cp", "a", "b"], "both local"),
        (["put", "ffs:/a", "/b"], "isn't local"),
        (["get", "/a", "ffs:/b"], "isn't local"),
        (["ls", "relative"], "absolute"),
        (["up", "--nodes", "2", "--replicas", "3"], "node of its own"),
        (["up", "--device-size", "1MiB"], "at least"),
    ],
)
def test_bad_input_is_one_line(
    line: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert main(line) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"ffs {line[0]}: ")
    assert words in said
    assert said.count("\n") == 1

"""Modes of ffs.open against those of the builtin open, over every string of the letters."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest

from ffs.client.mode import check_arguments, parse_mode

LETTERS = "rwaxbt+"
MODES = ["".join(letters) for count in range(5) for letters in itertools.permutations(LETTERS, count)]


def builtin_accepts(path: Path, mode: str) -> io.IOBase | None:
    target = path / "x" if "x" in mode else path / "file"
    try:
        return open(target, mode)
    except ValueError:
        return None


def test_every_mode_is_judged_as_by_the_builtin(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    for mode in MODES:
        (tmp_path / "x").unlink(missing_ok=True)
        file = builtin_accepts(tmp_path, mode)
        if file is None:
            with pytest.raises(ValueError, match="invalid mode"):
                parse_mode(mode)
            continue
        with file:
            parsed = parse_mode(mode)
            assert parsed.reading == file.readable(), mode
            assert parsed.writing == file.writable(), mode
            assert parsed.text == isinstance(file, io.TextIOBase), mode
            raw = file.buffer.raw if parsed.text else file.raw  # type: ignore[attr-defined]
            assert parsed.raw == raw.mode, mode


@pytest.mark.parametrize("mode", ["rr", "q", "r b", "rU", "rb+b", "é"])
def test_unknown_and_repeated_letters(mode: str) -> None:
    with pytest.raises(ValueError, match="invalid mode"):
        parse_mode(mode)


def test_mode_must_be_a_str() -> None:
    with pytest.raises(TypeError, match="mode must be a str"):
        parse_mode(7)  # type: ignore[arg-type]


def arguments(mode: str, buffering: int = -1, **given: str | None) -> None:
    words: dict[str, str | None] = {"encoding": None, "errors": None, "newline": None, **given}
    check_arguments(parse_mode(mode), buffering, **words, atomic=False, layout=False)


@pytest.mark.parametrize(
    ("mode", "buffering", "given"),
    [
        ("rb", -1, {"encoding": "utf-8"}),
        ("rb", -1, {"errors": "strict"}),
        ("wb", -1, {"newline": "\n"}),
        ("r", -1, {"newline": "x"}),
        ("r", 0, {}),
    ],
)
def test_contradictions_are_those_of_the_builtin(
    tmp_path: Path, mode: str, buffering: int, given: dict[str, str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError):  # noqa: PT011 - the builtin words it by version
        open(tmp_path / "file", mode, buffering, **given)  # type: ignore[call-overload]  # noqa: SIM115
    with pytest.raises(ValueError):  # noqa: PT011 - the builtin words it by version
        arguments(mode, buffering, **given)


@pytest.mark.parametrize("mode", ["r", "rb", "r+", "a", "a+b"])
def test_atomic_needs_a_new_file(mode: str) -> None:
    with pytest.raises(ValueError, match="atomic=True"):
        check_arguments(parse_mode(mode), -1, None, None, None, atomic=True, layout=False)


def test_layout_options_need_a_new_file() -> None:
    with pytest.raises(ValueError, match="layout options"):
        check_arguments(parse_mode("rb"), -1, None, None, None, atomic=False, layout=True)
    check_arguments(parse_mode("xb"), -1, None, None, None, atomic=True, layout=True)

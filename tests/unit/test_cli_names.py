"""Names on a terminal: what is quoted, and that a shell reads it as the name. `ls` and `bash` judge it."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ffs.cli.names import aligned, plain, quoted, shown, visible

ODD = [
    "a b", "a\nb", "\n", "a\x7fb", "a\n7", "#x", "x#", "~x", "x~", "{", "}", "a{b", "=x", "a=b", "a^b", "x]",
    "-f", "a'b", "a'\nb", "a'$b", "a'\"b", "a' b", "\n'", "\n\na", "a:b", "%", ",+@_", "a\tb c",
    "\x1b[2Jgone", "é", "\udcff", "a\udcff1", "\r", "\x01", "!a", "a'!", "a'`", "a'\\", "$(rm)", "*", "?",
    "[a", "a;b", "a&b", "(a)", "<a>", "a|b", '"',
]  # fmt: skip


def test_as_ls_of_gnu_quotes_them(tmp_path: Path) -> None:
    ours = {name: quoted(name) for name in ODD}
    for name in ODD:
        (tmp_path / name).touch()
    for name, text in ours.items():  # one call each: `ls` aligns what it shows together
        said = subprocess.run(
            ["ls", "-d", "--quoting-style=shell-escape", "--", name],
            cwd=tmp_path,
            env=os.environ | {"LC_ALL": "C.UTF-8"},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        assert os.fsencode(text) + b"\n" == said, name


@settings(deadline=None, max_examples=15)
@given(st.lists(st.text(st.characters(blacklist_characters="\0", codec="utf-8"), max_size=12), max_size=60))
@example(["\x9b31m", "\u202etxt.exe", "\u2028", "a\u00a0b", "\U0001f600", "1\n1", "'\n'\n''"])
def test_a_shell_reads_the_name_and_nothing_moves_the_cursor(names: list[str]) -> None:
    words = [quoted(name) for name in names]
    assert all(word.isprintable() and word for word in words)
    script = "printf '%s\\0' " + " ".join(words) if words else ":"
    said = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, check=True).stdout
    assert said == b"".join(name.encode() + b"\0" for name in names)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_gets_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert shown("a\nb") == "a\nb"
    assert aligned(["a b", "c"]) == ["a b", "c"]
    assert plain("x\x1by") == "x\x1by"
    monkeypatch.setattr("sys.stdout", Terminal())
    assert shown("a\nb") == "'a'$'\\n''b'"
    assert aligned(["a b", "c"]) == ["'a b'", " c"]
    assert aligned(["a", "c"]) == ["a", "c"]
    assert plain("say 'x\x1by'") == "say 'x\\033y'"
    assert shown("a b", io.StringIO()) == "a b"


def test_messages_keep_their_words() -> None:
    assert visible("/a b: Permission denied") == "/a b: Permission denied"
    assert visible("/\x1b]0;x\x07: no\udcff") == "/\\033]0;x\\a: no\\377"

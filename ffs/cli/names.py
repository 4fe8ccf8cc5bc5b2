"""Names on a terminal: quoted as a shell reads them, so that none of their bytes moves the cursor. Pure but
for `shown`, `plain` and `aligned`, which look whether a stream is a terminal.

In a pipe names go out as they are (docs/guides/command_line.md, Names).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, TextIO

_SPECIAL: Final = frozenset(" !\"$&'()*;<=>?[\\^`|")
_SPECIAL_FIRST: Final = frozenset("#~")
_SPECIAL_ALONE: Final = ("{", "}")
_UNFIT_FOR_DOUBLE: Final = frozenset('!"$\\`')
_LETTERS: Final = dict(zip(b"\a\b\t\n\v\f\r", "abtnvfr", strict=True))


def quoted(name: str) -> str:
    """The name as a POSIX shell reads it: bare if it may be, else 'a b', "it's", 'a'$'\\n''b'.

    What isn't printable, or isn't UTF-8, is escaped byte by byte.
    """
    if not name:
        return "''"
    printable = name.isprintable()
    if printable and not _needs_quotes(name):
        return name
    if printable and "'" in name and not _UNFIT_FOR_DOUBLE & set(name):
        return f'"{name}"'
    out, escaping = "'", False
    for letter in name:
        if not letter.isprintable():
            out += ("" if escaping else "'$'") + _escaped(letter)
            escaping = True
            continue
        if letter == "'":
            out += "'\\''"
        else:
            out += ("''" if escaping else "") + letter
        escaping = False
    return out + "'"


def visible(text: str) -> str:
    """A sentence with what isn't printable in it as backslash escapes: for messages that hold names."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def _needs_quotes(name: str) -> bool:
    return bool(_SPECIAL & set(name)) or name[0] in _SPECIAL_FIRST or name in _SPECIAL_ALONE


def _escaped(letter: str) -> str:
    """\\n, or three octal digits a byte, so that a digit that follows isn't taken for a part of it."""
    data = letter.encode("utf-8", "surrogateescape")
    return "".join(f"\\{_LETTERS[byte]}" if byte in _LETTERS else f"\\{byte:03o}" for byte in data)


def shown(name: str, stream: TextIO | None = None) -> str:
    """A name or path for `stream` (stdout): quoted for a terminal, itself for a pipe or file."""
    return quoted(name) if (stream or sys.stdout).isatty() else name


def plain(text: str, stream: TextIO | None = None) -> str:
    """A sentence for `stream` (stdout): `visible` on a terminal, itself in a pipe or file."""
    return visible(text) if (stream or sys.stdout).isatty() else text


def aligned(names: Sequence[str]) -> list[str]:
    """Names of one listing for stdout: on a terminal, if any is quoted, a blank stands before the bare ones,
    so that their first letters stand below each other."""
    out = [shown(name) for name in names]
    if all(new == old for new, old in zip(out, names, strict=True)):
        return out
    return [" " + new if new == old else new for new, old in zip(out, names, strict=True)]

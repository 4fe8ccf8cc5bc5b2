"""Patterns in paths: `*`, `?`, `[a-z]`, `[!a-z]` within a name, `**` for any number of directories. Pure,
but for the listing that is handed in (docs/guides/command_line.md, Patterns).

As in a POSIX shell: a name that begins with "." is matched only by a pattern that begins with one, a
backslash takes the meaning from the character after it, and links to directories are walked where the
pattern names them, not by `**`. Results are in order of names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence

Listing = Callable[[str], Iterable[tuple[str, bool, bool]]]
"""Of a directory: (name, is a directory or leads to one, is a symlink). OSErrors are absences."""

_MAGIC = re.compile(r"[*?\[]")
_ESCAPED = re.compile(r"\\([*?\[\]\\])")


def has_magic(text: str) -> bool:
    """Whether `text` is a pattern: an unescaped *, ? or [ is in it."""
    return _MAGIC.search(re.sub(r"\\.", "", text)) is not None


def unescape(text: str) -> str:
    r"""The name that a text without magic means: `\*` is a star."""
    return _ESCAPED.sub(r"\1", text)


def escape(text: str) -> str:
    """A pattern that matches `text` only."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


def translate(pattern: str) -> str:
    """The regular expression, without anchors, of a pattern within one name: nothing in it matches '/'."""
    out: list[str] = []
    i = 0
    while i < len(pattern):
        c = pattern[i]
        i += 1
        if c == "*":
            while i < len(pattern) and pattern[i] == "*":
                i += 1
            out.append("[^/]*")
        elif c == "?":
            out.append("[^/]")
        elif c == "\\" and i < len(pattern):
            out.append(re.escape(pattern[i]))
            i += 1
        elif c == "[":
            end = _class_end(pattern, i)
            if end < 0:
                out.append(r"\[")  # no class: an ordinary character, as in a shell
                continue
            out.append(_class(pattern[i:end]))
            i = end + 1
        else:
            out.append(re.escape(c))
    return "".join(out)


def _class_end(pattern: str, start: int) -> int:
    """Where the class that was opened before `start` closes; -1: nowhere."""
    i = start
    if i < len(pattern) and pattern[i] in "!^":
        i += 1
    if i < len(pattern) and pattern[i] == "]":
        i += 1
    while i < len(pattern) and pattern[i] != "]":
        i += 2 if pattern[i] == "\\" else 1
    return i if i < len(pattern) else -1


def _class(body: str) -> str:
    negated = body[:1] in ("!", "^")
    items: list[tuple[str, str]] = []
    chars: list[tuple[str, bool]] = []  # character, was escaped
    i = 1 if negated else 0
    while i < len(body):
        if body[i] == "\\" and i + 1 < len(body):
            i += 1
            chars.append((body[i], True))
        else:
            chars.append((body[i], False))
        i += 1
    i = 0
    while i < len(chars):
        if i + 2 < len(chars) and chars[i + 1] == ("-", False):
            items.append((chars[i][0], chars[i + 2][0]))
            i += 3
        else:
            items.append((chars[i][0], chars[i][0]))
            i += 1
    inside = "".join(
        re.escape(low) if low == high else f"{re.escape(low)}-{re.escape(high)}"
        for low, high in items
        if low <= high
    )
    if not inside:
        return "[^/]" if negated else "(?!)"
    return f"(?!/)[{'^' if negated else ''}{inside}]"


@functools.lru_cache(maxsize=1000)
def name_regex(pattern: str, ignore_case: bool = False) -> re.Pattern[str]:
    """For whole names; a leading "." isn't special here (find, --exclude)."""
    return re.compile(translate(pattern) + r"\Z", re.DOTALL | (re.IGNORECASE if ignore_case else 0))


def match_name(pattern: str, name: str) -> bool:
    """Whether a pattern of one component matches a name, hidden names as a shell has it."""
    if name.startswith(".") and not pattern.startswith((".", "\\.")):
        return False
    return name_regex(pattern).match(name) is not None


@functools.lru_cache(maxsize=1000)
def path_regex(pattern: str) -> re.Pattern[str]:
    """For whole relative paths: `**` as a component matches any number of them, also none."""
    parts = pattern.strip("/").split("/")
    out = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            out += ".*" if last else "(?:[^/]+/)*"
        else:
            out += translate(part) + ("" if last else "/")
    return re.compile(out + r"\Z", re.DOTALL)


class Excludes:
    """What --exclude leaves out. A pattern without '/' matches a name at any depth; one with '/' a path
    from the top; one that ends in '/' directories only."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._names: list[tuple[re.Pattern[str], bool]] = []
        self._paths: list[tuple[re.Pattern[str], bool]] = []
        for pattern in patterns:
            only_directories = pattern.endswith("/")
            body = pattern.rstrip("/")
            if not body:
                continue
            if "/" in body:
                self._paths.append((path_regex(body), only_directories))
            else:
                self._names.append((name_regex(body), only_directories))

    def __bool__(self) -> bool:
        return bool(self._names or self._paths)

    def match(self, relative: str, is_directory: bool) -> bool:
        """Whether the entry at `relative`, a path from the top without a leading '/', is left out."""
        name = relative.rpartition("/")[2]
        return any(
            (is_directory or not only) and regex.match(text)
            for rules, text in ((self._names, name), (self._paths, relative))
            for regex, only in rules
        )


def expand(pattern: str, listing: Listing, exists: Callable[[str], bool]) -> list[str]:
    """The paths that an absolute pattern matches, in order; none: an empty list."""
    trailing = "/" if pattern.endswith("/") else ""
    parts = [part for part in pattern.split("/") if part]
    found = [("/", True)]
    for number, part in enumerate(parts):
        only_directories = number < len(parts) - 1 or bool(trailing)
        found = _step(found, part, listing, exists, only_directories)
    return [path + trailing for path, _ in found]


def _step(
    bases: list[tuple[str, bool]],
    part: str,
    listing: Listing,
    exists: Callable[[str], bool],
    only_directories: bool,
) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    if part == "**":
        for base, _ in bases:
            found += [(path, True) for path in _below(base, listing)]
            if not only_directories:
                found += _files_below(base, listing)
        return sorted(set(found))
    if not has_magic(part):
        name = unescape(part)
        # What is on the way is known to be there once the last component is.
        return [(path, True) for base, _ in bases if exists(path := _join(base, name)) or name in (".", "..")]
    for base, _ in bases:
        for name, is_directory, _ in sorted(_list(listing, base)):
            if match_name(part, name) and (is_directory or not only_directories):
                found.append((_join(base, name), is_directory))
    return found


def _below(base: str, listing: Listing) -> list[str]:
    """`base` and the directories below it that aren't hidden, without following links."""
    found, stack = [], [base]
    while stack:
        path = stack.pop()
        found.append(path)
        inner = sorted(name for name, is_directory, link in _list(listing, path) if is_directory and not link)
        stack += [_join(path, name) for name in reversed(inner) if not name.startswith(".")]
    return found


def _files_below(base: str, listing: Listing) -> list[tuple[str, bool]]:
    return [
        (_join(path, name), False)
        for path in _below(base, listing)
        for name, is_directory, link in _list(listing, path)
        if (link or not is_directory) and not name.startswith(".")
    ]


def _list(listing: Listing, path: str) -> list[tuple[str, bool, bool]]:
    try:
        return list(listing(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _join(base: str, name: str) -> str:
    return base + name if base.endswith("/") else f"{base}/{name}"

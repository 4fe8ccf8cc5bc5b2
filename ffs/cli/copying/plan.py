"""What a sync does in one directory, from what is on both sides. Pure (docs/guides/command_line.md, Sync)."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FILE, DIRECTORY, SYMLINK, OTHER = "file", "directory", "symlink", "other"

COPY = "copy"
"""Move the content: there is none yet, or another one."""
COMPARE = "compare"
"""Same size: compare the contents, and copy if they differ."""
MAKE = "make"
"""Make the directory, and go into it."""
ENTER = "enter"
"""There on both sides: go into it."""
LINK = "link"
"""Make the symlink."""
COMPARE_LINK = "compare-link"
"""Symlinks on both sides, whose texts aren't known here."""
ATTRIBUTES = "attributes"
"""Same content; the mode differs."""
KEEP = "keep"
"""Nothing to do."""
DELETE = "delete"
"""Only on the target's side."""
CONFLICT = "conflict"
"""Of another type there, and nothing may be deleted."""
SKIP = "skip"
"""Neither file, directory nor symlink."""


@dataclass(frozen=True, slots=True)
class Node:
    """What a plan knows of an entry."""

    kind: str
    size: int = 0
    mtime_ns: int = 0
    mode: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What to do with one name. `replaces`: what is there is of another type and goes first."""

    name: str
    action: str
    replaces: bool = False


def node_of(info: Any) -> Node:
    """From an os.stat_result of lstat."""
    mode = info.st_mode
    kind = OTHER
    for test, name in ((stat.S_ISREG, FILE), (stat.S_ISDIR, DIRECTORY), (stat.S_ISLNK, SYMLINK)):
        if test(mode):
            kind = name
    return Node(kind, info.st_size, info.st_mtime_ns, stat.S_IMODE(mode))


def plan_directory(
    source: Mapping[str, Node],
    target: Mapping[str, Node],
    *,
    delete: bool,
    checksum: bool,
    excluded: Callable[[str, bool], bool] = lambda name, is_directory: False,
    leftover: Callable[[str], bool] = lambda name: False,
    kept: frozenset[str] = frozenset(),
) -> list[Step]:
    """In order of names. `excluded(name, is_directory)` names are left alone on both sides; `leftover` ones,
    from runs that were killed, are never copied, and go from the target; `kept` are names of the target
    that the copies of this run need. What isn't file, directory or symlink is never deleted."""
    steps: list[Step] = []
    for name in sorted(source.keys() | target.keys()):
        ours, theirs = source.get(name), target.get(name)
        if ours is not None and (leftover(name) or excluded(name, ours.kind == DIRECTORY)):
            ours = None
            if theirs is None:
                continue
        if theirs is not None and excluded(name, theirs.kind == DIRECTORY):
            if ours is not None and ours.kind != theirs.kind:
                steps.append(Step(name, CONFLICT))
            continue
        if ours is None:
            if theirs is not None and name not in kept and (delete or leftover(name)):
                steps.append(Step(name, SKIP if theirs.kind == OTHER else DELETE))
        else:
            steps.append(_step(name, ours, theirs, delete, checksum))
    return steps


def _step(name: str, ours: Node, theirs: Node | None, delete: bool, checksum: bool) -> Step:
    if ours.kind == OTHER:
        return Step(name, SKIP)
    making = {FILE: COPY, DIRECTORY: MAKE, SYMLINK: LINK}[ours.kind]
    if theirs is None:
        return Step(name, making)
    if theirs.kind != ours.kind:
        # A file and a symlink take each other's place in one step; a directory would have to go.
        if DIRECTORY not in (ours.kind, theirs.kind) and theirs.kind != OTHER:
            return Step(name, making)
        return Step(name, making, replaces=True) if delete and theirs.kind != OTHER else Step(name, CONFLICT)
    if ours.kind == DIRECTORY:
        return Step(name, ENTER)
    if ours.kind == SYMLINK:
        return Step(name, COMPARE_LINK if ours.size == theirs.size else LINK)
    if ours.size != theirs.size or (not checksum and ours.mtime_ns != theirs.mtime_ns):
        return Step(name, COPY)
    if checksum:
        return Step(name, COMPARE)
    return Step(name, ATTRIBUTES if ours.mode != theirs.mode else KEEP)

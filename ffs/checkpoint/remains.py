"""Attempts of savers that died, and what a removal has left: found, and taken away
(docs/guides/checkpoint.md, Commit).
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from typing import TYPE_CHECKING, Final

from ffs.checkpoint.alive import anybody_in, is_free, locks_in
from ffs.errors import FfsError, NotEmpty, NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client

SAVING: Final = "saving"  # a save that isn't whole yet
REMOVING: Final = "removing"
RUNNING: Final = "running"  # the locks of a job's ranks
SAVE_DIGITS: Final = 8  # of the number of a Manager's save, behind the word of its run

_HIDDEN = re.compile(rf"\..*\.({SAVING}|{REMOVING}|{RUNNING})-([0-9a-f]+)")


def hidden_name(name: str, attempt: str, what: str = SAVING) -> str:
    return f".{name[:200]}.{what}-{attempt}"


def running_name(run: str) -> str:
    """Of the directory in which the ranks of a run hold their locks."""
    return hidden_name("ranks", run, RUNNING)


def is_remains(name: str) -> bool:
    """Whether a directory of this name is an attempt, something that is being removed, or a job's locks."""
    return bool(_HIDDEN.fullmatch(name))


def collect_remains(client: Client, root: str) -> list[str]:
    """Removes attempts right under `root` that nobody works on any more; their names. Blocking."""
    collected = []
    try:
        names = client.listdir(root)
    except NotFound:
        return []
    # Attempts first: whether somebody works on them is told by the locks of their run.
    for name in sorted(filter(is_remains, names), key=lambda name: _kind(name) == RUNNING):
        if _is_abandoned(client, root, name):
            with contextlib.suppress(NotFound):
                client.rmtree(posixpath.join(root, name))
                collected.append(name)
    return collected


def _kind(name: str) -> str:
    found = _HIDDEN.fullmatch(name)
    assert found is not None, name
    return found[1]


def _is_abandoned(client: Client, root: str, name: str) -> bool:
    """Whether no process holds it, and it isn't only just being made."""
    found = _HIDDEN.fullmatch(name)
    assert found is not None, name
    if found[1] == REMOVING:
        return True
    path = posixpath.join(root, name)
    try:
        names = client.listdir(path)
        if not names:
            client.rmdir(path)  # of one that is just being made: it makes it again
            return False
        locks = locks_in(names)
        if locks or found[1] == RUNNING:
            return all(is_free(client, posixpath.join(path, each)) for each in locks)
        run = running_name(found[2][:-SAVE_DIGITS])
        return not anybody_in(client, posixpath.join(root, run))
    except (NotFound, NotEmpty):
        return False


def collect_quietly(client: Client, root: str) -> None:
    """As collect_remains, for whom it isn't the task at hand: what can't be taken away stays."""
    with contextlib.suppress(FfsError):
        collect_remains(client, root)

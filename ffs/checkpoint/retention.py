"""Which checkpoints may go, and taking them away without touching what a reader holds
(docs/guides/checkpoint.md, Retention).
"""

from __future__ import annotations

import contextlib
import fcntl
import posixpath
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING

from ffs.checkpoint import manifest as manifests
from ffs.checkpoint.commit import step_name, step_of
from ffs.checkpoint.remains import REMOVING, hidden_name
from ffs.errors import Exists, NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client

PIN = "user.ffs.checkpoint.pin"


def to_remove(
    steps: Collection[int], keep: int | None, keep_every: int | None, pinned: Collection[int]
) -> list[int]:
    """Oldest first. The newest `keep` stay (all if None), every step that is a multiple of `keep_every`, and
    the pinned ones. Pure."""
    if keep is None:
        return []
    ordered = sorted(steps)
    old = ordered[: max(0, len(ordered) - max(1, keep))]
    return [s for s in old if s not in pinned and not (keep_every and s % keep_every == 0)]


def steps(client: Client, root: str) -> list[int]:
    """Of all checkpoints under `root`, rising. Blocking. None where the directory isn't there."""
    try:
        names = client.listdir(root)
    except NotFound:
        return []
    return sorted(step for name in names if (step := step_of(name)) is not None)


def pinned_steps(client: Client, root: str, among: Collection[int]) -> set[int]:
    return {step for step in among if is_pinned(client, posixpath.join(root, step_name(step)))}


def is_pinned(client: Client, path: str) -> bool:
    try:
        return PIN in client.listxattr(path)
    except NotFound:
        return False


def pin_reason(client: Client, path: str) -> str | None:
    """Why it is pinned; "": nobody said; None: it isn't."""
    if not is_pinned(client, path):
        return None
    return client.getxattr(path, PIN).decode(errors="replace")


def pin(client: Client, path: str, reason: str = "") -> None:
    """Keeps a checkpoint from retention. Blocking. NotFound."""
    client.setxattr(path, PIN, reason.encode())


def unpin(client: Client, path: str) -> None:
    """Blocking. NotFound; nothing if it isn't pinned."""
    if is_pinned(client, path):
        client.removexattr(path, PIN)


def remove(client: Client, path: str) -> bool:
    """Takes one checkpoint away: whole at once, for whoever looks. False if a reader holds it. Blocking."""
    where = posixpath.join(path, manifests.FILE_NAME)
    parent, name = posixpath.split(path)
    going = posixpath.join(parent, hidden_name(name, uuid.uuid4().hex, REMOVING))
    try:
        with client.open(where, "rb", buffering=0) as file:
            file.flock(fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Held: nobody can begin to read it between this and the rename.
            client.rename_exclusive(path, going)
    except BlockingIOError:
        return False
    except (NotFound, Exists):
        return not client.lexists(path)
    with contextlib.suppress(NotFound):
        client.rmtree(going)
    return True

"""A save becomes a checkpoint: ranks report into a hidden directory, and whoever finds all reports there
publishes by one rename (docs/guides/checkpoint.md, Commit).

    .NAME.saving-ATTEMPT/data/         what becomes NAME
    .NAME.saving-ATTEMPT/reports/      rank-00000.json ..., failed-00003.json
    .NAME.saving-ATTEMPT/alive-00003   locked by the rank that works on it, one for each

No collective, no coordinator: a rank that dies leaves a directory that nobody can take for a checkpoint, and
whose lock is free as soon as its session is over. Then the others give up, and anybody may remove it.
"""

from __future__ import annotations

import contextlib
import fcntl
import posixpath
import re
import uuid
from typing import TYPE_CHECKING

import msgspec

from ffs.checkpoint import manifest as manifests
from ffs.checkpoint.manifest import Manifest
from ffs.checkpoint.report import RankFailure, RankReport, merge
from ffs.errors import Exists, FfsError, NotEmpty, NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

_STEP = re.compile(r"step-(\d+)")
_HIDDEN = re.compile(r"\..*\.(saving|removing)-[0-9a-f]+")


class RankFailed(FfsError):
    """Another rank couldn't store its part of the checkpoint."""


def step_name(step: int) -> str:
    return f"step-{step}"


def step_of(name: str) -> int | None:
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def hidden_name(name: str, attempt: str, what: str = "saving") -> str:
    return f".{name[:200]}.{what}-{attempt}"


def is_remains(name: str) -> bool:
    """Whether a directory of this name is an attempt, or something that is being removed."""
    return bool(_HIDDEN.fullmatch(name))


class Attempt:
    """One save, as one rank sees it. One thread; all methods block. `close` it."""

    def __init__(
        self,
        client: Client,
        goal: str,
        attempt: str,
        rank: int = 0,
        ranks: int = 1,
        step: int | None = None,
        table: str | int | None = None,
    ) -> None:
        """`goal`: the path of the checkpoint. `attempt`: hex digits, the same on all ranks of this save and
        unlike any other save's."""
        self.client = client
        self.step = step
        self.table = table
        self.rank = rank
        self.ranks = ranks
        self.goal = goal
        parent, name = posixpath.split(goal)
        self.hidden = posixpath.join(parent, hidden_name(name, attempt))
        self.data = posixpath.join(self.hidden, "data")
        self.reports = posixpath.join(self.hidden, "reports")
        self._alive: File | None = None

    def begin(self, look: bool = True) -> None:
        """Raises Exists if the step is there already; not `look`: the caller knows that it isn't."""
        if look and self.client.lexists(self.goal):
            raise Exists("is there already: choose another path, or remove it first", self.goal)
        mine = posixpath.join(self.hidden, f"alive-{self.rank:05d}")
        while self._alive is None:
            self.client.makedirs(self.hidden, exist_ok=True)
            scratch = posixpath.join(self.hidden, f".alive-{self.rank:05d}-{uuid.uuid4().hex}")
            with contextlib.suppress(NotFound):
                self.client.open(scratch, "xb").close()
                self._alive = self.client.open(scratch, "rb", buffering=0)
                self._alive.flock(fcntl.LOCK_EX)
                self.client.replace(scratch, mine)  # nobody finds it unlocked
            if self._alive is not None and not self.client.lexists(mine):
                self.close()  # somebody took the directory for remains in that moment
        self.client.makedirs(self.data, exist_ok=True, table=self.table)
        self.client.makedirs(self.reports, exist_ok=True)

    def report(self, report: RankReport) -> None:
        self._put(f"rank-{self.rank:05d}.json", msgspec.json.encode(report))

    def fail(self, words: str) -> None:
        """Best effort: the store may be what failed."""
        with contextlib.suppress(FfsError):
            self._put(f"failed-{self.rank:05d}.json", msgspec.json.encode(RankFailure(self.rank, words)))

    def try_publish(self) -> Manifest | None:
        """Publishes if every rank has reported; None if some have not. RankFailed if one failed;
        InvalidArgument if the parts don't make a whole; Exists if the step was saved by others meanwhile."""
        try:
            names = sorted(self.client.listdir(self.reports))
        except NotFound:
            return self._published()  # another rank was quicker, and has tidied up
        self._raise_failures(names)
        mine = [name for name in names if name.startswith("rank-")]
        if len(mine) < self.ranks:
            self._raise_deaths(mine)
            return None
        try:
            reports = [msgspec.json.decode(self._get(name), type=RankReport) for name in mine]
        except NotFound:
            return self._published()
        manifest = merge(reports, self.step, self.goal)
        try:
            self.publish(manifest)
        except NotFound:
            return self._published()
        except Exists:
            if self._published() != manifest:
                raise
        return manifest

    def publish(self, manifest: Manifest) -> None:
        """Puts the manifest beside the shards and makes all of it visible. Exists; NotFound: another rank did
        so."""
        self.put_beside(manifests.FILE_NAME, manifests.encode(manifest))
        try:
            self.client.rename_exclusive(self.data, self.goal)
        except Exists:
            raise Exists("another save took this name meanwhile: nothing was saved", self.goal) from None

    def put_beside(self, name: str, data: bytes) -> None:
        """A file beside the shards, whole or not at all."""
        self._put_whole(posixpath.join(self.data, name), data)

    def tidy(self) -> None:
        """Removes what isn't the checkpoint. Best effort: whoever comes later does it again."""
        self.close()
        with contextlib.suppress(FfsError):
            self.client.rmtree(self.hidden)

    def close(self) -> None:
        alive, self._alive = self._alive, None
        if alive is not None:
            with contextlib.suppress(FfsError):
                alive.close()

    # inside

    def _published(self) -> Manifest:
        where = posixpath.join(self.goal, manifests.FILE_NAME)
        try:
            with self.client.open(where, "rb") as file:
                return manifests.decode(file.read(), where)
        except NotFound:
            raise RankFailed(
                "the directory of this save was removed before it was complete: nothing was saved", self.goal
            ) from None

    def _raise_failures(self, names: list[str]) -> None:
        for name in names:
            if name.startswith("failed-"):
                failure = msgspec.json.decode(self._get(name), type=RankFailure)
                raise RankFailed(f"rank {failure.rank} failed: {failure.words}", self.goal)

    def _raise_deaths(self, reported: list[str]) -> None:
        """Of ranks that have begun and not reported, one that holds its lock no more."""
        try:
            names = self.client.listdir(self.hidden)
        except NotFound:
            return  # published and tidied up that moment: the next look finds it
        for name in names:
            rank = name.removeprefix("alive-")
            if rank == name or f"rank-{rank}.json" in reported or int(rank) == self.rank:
                continue
            if not _is_free(self.client, posixpath.join(self.hidden, name)):
                continue
            # It may have reported, and even published, since the reports were listed.
            report = posixpath.join(self.reports, f"rank-{rank}.json")
            if not self.client.lexists(report) and self.client.lexists(self.reports):
                raise RankFailed(f"rank {int(rank)} ended before it had stored its part", self.goal)

    def _put(self, name: str, data: bytes) -> None:
        self._put_whole(posixpath.join(self.reports, name), data)

    def _put_whole(self, path: str, data: bytes) -> None:
        """Appears whole or not at all, and leaves nothing beside it."""
        scratch = posixpath.join(self.hidden, f".{posixpath.basename(path)}.{self.rank}")
        with self.client.open(scratch, "wb") as file:
            file.write(data)
        self.client.replace(scratch, path)

    def _get(self, name: str) -> bytes:
        with self.client.open(posixpath.join(self.reports, name), "rb") as file:
            return bytes(file.read())


def collect_remains(client: Client, root: str) -> list[str]:
    """Removes attempts under `root` that nobody works on any more; their names. Blocking."""
    collected = []
    try:
        names = client.listdir(root)
    except NotFound:
        return []
    for name in names:
        if is_remains(name) and _is_abandoned(client, posixpath.join(root, name)):
            with contextlib.suppress(NotFound):
                client.rmtree(posixpath.join(root, name))
                collected.append(name)
    return collected


def _is_abandoned(client: Client, path: str) -> bool:
    """Whether no process holds it, and it isn't only just being made."""
    if ".removing-" in posixpath.basename(path):
        return True
    try:
        ranks = [name for name in client.listdir(path) if name.startswith(("alive-", ".alive-"))]
        if not ranks:
            client.rmdir(path)  # of one that is just being made: it makes it again
        return bool(ranks) and all(_is_free(client, posixpath.join(path, name)) for name in ranks)
    except (NotFound, NotEmpty):
        return False


def _is_free(client: Client, path: str) -> bool:
    try:
        with client.open(path, "rb", buffering=0) as alive:
            alive.flock(fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except (BlockingIOError, NotFound):
        return False

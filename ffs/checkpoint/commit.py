"""A save becomes a checkpoint: ranks report into a hidden directory, and one of those that find all reports
there publishes by one rename (docs/guides/checkpoint.md, Commit).

    .NAME.saving-ATTEMPT/data/              what becomes NAME
    .NAME.saving-ATTEMPT/rank-00000.json    each rank's report
    .NAME.saving-ATTEMPT/failed-00003       a symbolic link, its target being the words
    .NAME.saving-ATTEMPT/publisher-0        a symbolic link to the number of the rank that publishes
    .NAME.saving-ATTEMPT/alive-00003        locked by the rank that works on it (alive.py); a Manager has its
                                            lock elsewhere, for longer than a save

No collective, no coordinator: a rank that dies leaves a directory that nobody can take for a checkpoint, and
whose lock is free as soon as its session is over. Then the others give up, and anybody may remove it; if it
was to publish, another one does.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from ffs.checkpoint import manifest as manifests
from ffs.checkpoint.alive import Alive
from ffs.checkpoint.manifest import Manifest
from ffs.checkpoint.remains import hidden_name
from ffs.checkpoint.report import RankReport, merge
from ffs.errors import Exists, FfsError, NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client

_STEP = re.compile(r"step-(\d+)")
_PUBLISHER: Final = "publisher-"
_FAILED: Final = "failed-"
_MOST_WORDS: Final = 1000  # characters of a failure that other ranks are told
_WATCHED: Final = 16  # ranks that one looks after: of a thousand each is looked after by a few


class RankFailed(FfsError):
    """Another rank couldn't store its part of the checkpoint."""


def step_name(step: int) -> str:
    return f"step-{step}"


def step_of(name: str) -> int | None:
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


class Published:
    """What was made visible: its manifest, which is decoded when somebody asks for it, since a rank of many
    needs only what it has stored itself."""

    def __init__(
        self, where: str, data: bytes, manifest: Manifest | None = None, *, here: bool = False
    ) -> None:
        """`here`: by this rank."""
        self.here = here
        self._where = where
        self.data = data
        self._manifest = manifest

    @property
    def manifest(self) -> Manifest:
        """Raises Damaged, VersionMismatch."""
        if self._manifest is None:
            self._manifest = manifests.decode(self.data, self._where)
        return self._manifest


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
        alive: Alive | None = None,
    ) -> None:
        """`goal`: the path of the checkpoint. `attempt`: hex digits, the same on all ranks of this save and
        unlike any other save's. `alive`: by which others see that this rank lives, for longer than one save;
        None: the attempt has a lock of its own."""
        self.client = client
        self.step = step
        self.table = table
        self.rank = rank
        self.ranks = ranks
        self.goal = goal
        parent, name = posixpath.split(goal)
        self.hidden = posixpath.join(parent, hidden_name(name, attempt))
        self.data = posixpath.join(self.hidden, "data")
        self._alive = alive or Alive(client, self.hidden, rank)
        self._alive_is_mine = alive is None
        self._report: RankReport | None = None
        self._blamed: tuple[int, str] | None = None  # the rank that failed, and its words

    def begin(self, look: bool = True) -> None:
        """Raises Exists if the step is there already; not `look`: the caller knows that it isn't."""
        if look and self.client.lexists(self.goal):
            raise Exists("is there already: choose another path, or remove it first", self.goal)
        self._alive.ensure()
        self.client.makedirs(self.data, exist_ok=True, table=self.table)

    def report(self, report: RankReport) -> None:
        self._report = report
        if self.ranks > 1:
            self._put_whole(self._in_hidden(_report_name(self.rank)), msgspec.json.encode(report))

    def fail(self, words: str) -> bool:
        """Tells the other ranks; whether they can know now. The store may be what failed: then say it again
        later. When all ranks have said so, what is left of the save is removed."""
        rank, words = self._blamed or (self.rank, words)
        text = f"{rank} {words[:_MOST_WORDS]}".replace("\0", " ")
        try:
            if not self.client.lexists(self.goal):  # else it is over; this one wasn't told
                self.client.makedirs(self.hidden, exist_ok=True)  # it may have failed before it had begun
            with contextlib.suppress(Exists):
                self.client.symlink(text, self._in_hidden(f"{_FAILED}{self.rank:05d}"))
            names = self.client.listdir(self.hidden)
        except NotFound:
            return True
        except FfsError:
            return False
        if sum(name.startswith(_FAILED) for name in names) == self.ranks:
            self.tidy()
        return True

    def try_publish(self) -> Published | None:
        """What was published, by this rank or another; None: not yet. RankFailed if a rank failed, or ended;
        InvalidArgument if the parts don't make a whole; Exists if the step was saved by others meanwhile."""
        if self.ranks > 1:
            try:
                names = set(self.client.listdir(self.hidden))
            except NotFound:
                return self._published()  # another rank was quicker, and has tidied up
            self._raise_failures(names)
            if posixpath.basename(self.data) not in names:
                return self._published()
            missing = [rank for rank in range(self.ranks) if _report_name(rank) not in names]
            if missing:
                self._raise_deaths(missing)
                return None
            if not self._is_mine_to_publish(names):
                return None
        try:
            manifest = merge(self._reports(), self.step, self.goal)
            return self.publish(manifest)
        except NotFound:
            return self._published()  # another one took this rank for dead

    def publish(self, manifest: Manifest) -> Published:
        """Puts the manifest beside the shards and makes all of it visible. Exists; NotFound: another rank did
        so."""
        data = manifests.encode(manifest)
        self.put_beside(manifests.FILE_NAME, data)
        published = Published(self.goal, data, manifest, here=True)
        try:
            self.client.rename_exclusive(self.data, self.goal)
        except Exists:
            if self.ranks > 1 and self._published().data == data:
                return published  # another one took this rank for dead
            raise Exists("another save took this name meanwhile: nothing was saved", self.goal) from None
        return published

    def put_beside(self, name: str, data: bytes) -> None:
        """A file beside the shards, whole or not at all."""
        self._put_whole(posixpath.join(self.data, name), data)

    def tidy(self) -> None:
        """Removes what isn't the checkpoint. Best effort: whoever comes later does it again."""
        self.close()
        with contextlib.suppress(FfsError):
            self.client.rmtree(self.hidden)

    def close(self) -> None:
        if self._alive_is_mine:
            self._alive.let_go()

    # inside

    def _in_hidden(self, name: str) -> str:
        return posixpath.join(self.hidden, name)

    def _published(self) -> Published:
        where = posixpath.join(self.goal, manifests.FILE_NAME)
        try:
            with self.client.open(where, "rb", buffering=0) as file:
                return Published(where, bytes(file.readall()))
        except NotFound:
            raise RankFailed(
                "the directory of this save was removed before it was complete: nothing was saved", self.goal
            ) from None

    def _reports(self) -> list[RankReport]:
        """NotFound: another rank has published, and tidied up."""
        if self.ranks == 1:
            assert self._report is not None, "published before it has reported"
            return [self._report]
        paths = [self._in_hidden(_report_name(rank)) for rank in range(self.ranks) if rank != self.rank]
        reports = [] if self._report is None else [self._report]
        with contextlib.ExitStack() as stack:
            opened = self.client.open_many(paths)
            for file in opened:
                if not isinstance(file, FfsError):
                    stack.enter_context(file)
            for file in opened:
                if isinstance(file, FfsError):
                    raise file
                reports.append(msgspec.json.decode(file.readall(), type=RankReport))
        return reports

    def _is_mine_to_publish(self, names: Iterable[str]) -> bool:
        """Decided by who makes the next `publisher-N`, after the one before has ended."""
        claims = [int(name.removeprefix(_PUBLISHER)) for name in names if name.startswith(_PUBLISHER)]
        latest = max(claims, default=-1)
        try:
            if claims:
                holder = int(self.client.readlink(self._in_hidden(f"{_PUBLISHER}{latest}")))
                if holder == self.rank:
                    return True
                if not self._alive.ended([holder]):
                    return False
            self.client.symlink(str(self.rank), self._in_hidden(f"{_PUBLISHER}{latest + 1}"))
        except (Exists, NotFound):
            return False  # the next look tells who, or that it is over
        return True

    def _raise_failures(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            if not name.startswith(_FAILED):
                continue
            try:
                rank, _, words = self.client.readlink(self._in_hidden(name)).partition(" ")
            except NotFound:  # all have said so
                rank, words = str(int(name.removeprefix(_FAILED))), "see what it says itself"
            self._blamed = int(rank), words
            raise RankFailed(f"rank {rank} failed: {words}", self.goal)

    def _raise_deaths(self, missing: list[int]) -> None:
        """Of ranks that haven't reported, one that was there and has ended."""
        after_me = sorted(missing, key=lambda rank: (rank - self.rank) % self.ranks)
        for rank in self._alive.ended(after_me[:_WATCHED]):
            # It may have reported, and even published, since the reports were listed.
            if not self.client.lexists(self._in_hidden(_report_name(rank))) and self.client.lexists(
                self.data
            ):
                words = "it ended before it had stored its part"
                self._blamed = rank, words
                raise RankFailed(f"rank {rank} failed: {words}", self.goal)

    def _put_whole(self, path: str, data: bytes) -> None:
        """Appears whole or not at all, and leaves nothing beside it."""
        scratch = self._in_hidden(f".{posixpath.basename(path)}.{self.rank}")
        with self.client.open(scratch, "wb", buffering=0) as file:
            file.write(data)
        self.client.replace(scratch, path)


def _report_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"

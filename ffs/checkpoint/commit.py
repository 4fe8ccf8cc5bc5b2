"""A save becomes a checkpoint: ranks report into a hidden directory, and one of those that find all reports
there publishes by one rename (docs/guides/checkpoint.md, Commit).

    .NAME.saving-ATTEMPT/data/              what becomes NAME
    .NAME.saving-ATTEMPT/parts-00000.json   each rank's report, while what it tells of is still being written
    .NAME.saving-ATTEMPT/rank-00000.json    the same: now it is stored
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
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ffs.checkpoint import manifest as manifests
from ffs.checkpoint.alive import Alive
from ffs.checkpoint.manifest import Manifest
from ffs.checkpoint.remains import hidden_name
from ffs.checkpoint.report import RankReport, merge
from ffs.errors import Exists, FfsError, NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.client.file import File

_STEP = re.compile(r"step-(\d+)")
_PUBLISHER: Final = "publisher-"
_FAILED: Final = "failed-"
_MOST_WORDS: Final = 1000  # characters of a failure that other ranks are told
_PAGE_NAMES: Final = 64  # what the metadata service makes by one transaction
_WATCHED: Final = 16  # ranks that one looks after: of a thousand each is looked after by a few


class RankFailed(FfsError):
    """Another rank couldn't do its part of a save, or of a load that is shared."""


def step_name(step: int) -> str:
    return f"step-{step}"


def step_of(name: str) -> int | None:
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


class Published:
    """What was made visible: its manifest, which is read when somebody asks for it, and decoded when somebody
    asks for that, since a rank of many needs only what it has stored itself. Any thread."""

    def __init__(
        self,
        where: str,
        read: Callable[[], bytes],
        manifest: Manifest | None = None,
        *,
        here: bool = False,
    ) -> None:
        """`read`: the manifest's bytes; called once. `here`: by this rank."""
        self.here = here
        self._where = where
        self._read = read
        self._data: bytes | None = None
        self._manifest = manifest
        self._mutex = threading.Lock()

    @property
    def data(self) -> bytes:
        """The manifest's bytes. Blocking, the first time. Raises what `read` raises."""
        with self._mutex:
            if self._data is None:
                self._data = self._read()
            return self._data

    @property
    def manifest(self) -> Manifest:
        """As `data`; raises Damaged, VersionMismatch."""
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
        check_every_s: float = 0.0,
    ) -> None:
        """`goal`: the path of the checkpoint. `attempt`: hex digits, the same on all ranks of this save and
        unlike any other save's. `alive`: by which others see that this rank lives, for longer than one save;
        None: the attempt has a lock of its own. `check_every_s`: looks at the locks of others are at least
        so far apart, however often `try_publish` is called."""
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
        self._check_every_s = check_every_s
        self._next_check_s = 0.0
        self._reports: dict[int, RankReport] = {}  # by rank, as far as they were read
        self._parts_file: File | None = None  # open, empty: for this rank's report
        self._manifest_file: File | None = None  # the same for the manifest
        self._publishes = ranks == 1
        self._merged: Published | None = None  # its manifest is beside the shards
        self._blamed: tuple[int, str] | None = None  # the rank that failed, and its words

    def begin(self, look: bool = True) -> None:
        """Raises Exists if the step is there already; not `look`: the caller knows that it isn't."""
        if look and self.client.lexists(self.goal):
            raise Exists("is there already: choose another path, or remove it first", self.goal)
        self._alive.ensure()
        self.client.makedirs(self.data, exist_ok=True, table=self.table)

    def prepare(self, names: Sequence[str]) -> list[Any | FfsError]:
        """After `begin`: makes files in `data`, all at once, before the disks are busy: raw and open for
        writing, or why not. With them those in which this rank will say what it has. The caller closes
        what it gets."""
        paths = [posixpath.join(self.data, name) for name in names]
        mine = [self._in_hidden(_parts_name(self.rank))] if self.ranks > 1 else []
        if self.rank == 0:
            mine.append(posixpath.join(self.data, manifests.FILE_NAME))
        opened = self._make([*mine, *paths])
        for path, file in zip(mine, opened, strict=False):
            if isinstance(file, FfsError):
                self.client.close_many([each for each in opened if not isinstance(each, FfsError)])
                raise file
            if path.startswith(self.data):
                self._manifest_file = file
            else:
                self._parts_file = file
        return opened[len(mine) :]

    def _make(self, paths: Sequence[str]) -> list[Any | FfsError]:
        """By several transactions that become durable together."""
        pages = [paths[at : at + _PAGE_NAMES] for at in range(0, len(paths), _PAGE_NAMES)]
        if len(pages) < 2:
            return self.client.open_many(paths, "xb")
        with ThreadPoolExecutor(len(pages), thread_name_prefix="ffs-ckpt-make") as pool:
            opened = pool.map(lambda page: self.client.open_many(page, "xb"), pages)
            return [file for page in opened for file in page]

    def claim(self) -> None:
        """After `begin`: the first rank says that it will publish, so that it can merge what is told while
        data is written. Otherwise who finds the reports of all ranks there first says so."""
        if self.rank == 0 and self.ranks > 1:
            with contextlib.suppress(Exists, NotFound):
                self.client.symlink("0", self._in_hidden(f"{_PUBLISHER}0"))
                self._publishes = True

    def tell(self, report: RankReport) -> None:
        """What this rank will have stored when it calls `stored`."""
        self._reports[self.rank] = report
        if self.ranks > 1:
            path = self._in_hidden(_parts_name(self.rank))
            file, self._parts_file = self._parts_file, None
            self._put(path, msgspec.json.encode(report), file)

    def stored(self) -> None:
        """All replicas hold what this rank has told."""
        if self.ranks > 1:
            self.client.replace(
                self._in_hidden(_parts_name(self.rank)), self._in_hidden(_report_name(self.rank))
            )

    def report(self, report: RankReport) -> None:
        """What this rank has stored."""
        self.tell(report)
        self.stored()

    @property
    def publishes(self) -> bool:
        """Whether this rank merges and publishes, as far as it knows."""
        return self._publishes

    def merge_told(self) -> bool:
        """Whether the manifest of all that was told is beside the shards now: by the rank that will publish.
        InvalidArgument as `try_publish`. What else is wrong is found there."""
        if not self._publishes:
            return False
        try:
            return self._merge(set(self.client.listdir(self.hidden)) if self.ranks > 1 else set())
        except NotFound:
            return False

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
        names: set[str] = set()
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
                if self._may_check():
                    self._raise_deaths(missing)
                return None
            if not self._is_mine_to_publish(names):
                return None
        try:
            if not self._merge(names):
                return None  # reports change their names; the next look finds them
            assert self._merged is not None
            return self._show(self._merged)
        except NotFound:
            return self._published()  # another one took this rank for dead

    def publish(self, manifest: Manifest) -> Published:
        """Puts the manifest beside the shards and makes all of it visible. Exists; NotFound: another rank did
        so."""
        return self._show(self._put_manifest(manifest))

    def _merge(self, names: set[str]) -> bool:
        """`names`: of what is in the hidden directory."""
        if self._merged is None and self._read_reports(names):
            manifest = merge(list(self._reports.values()), self.step, self.goal)
            self._merged = self._put_manifest(manifest)
        return self._merged is not None

    def _put_manifest(self, manifest: Manifest) -> Published:
        data = manifests.encode(manifest)
        file, self._manifest_file = self._manifest_file, None
        self._put(posixpath.join(self.data, manifests.FILE_NAME), data, file)
        return Published(self.goal, lambda: data, manifest, here=True)

    def _show(self, published: Published) -> Published:
        try:
            self.client.rename_exclusive(self.data, self.goal)
        except Exists:
            if self.ranks > 1 and self._published().data == published.data:
                return published  # another one took this rank for dead
            raise Exists("another save took this name meanwhile: nothing was saved", self.goal) from None
        return published

    def put_beside(self, name: str, data: bytes) -> None:
        """A file beside the shards, whole or not at all."""
        self._put(posixpath.join(self.data, name), data)

    def tidy(self) -> None:
        """Removes what isn't the checkpoint. Best effort: whoever comes later does it again."""
        self.close()
        with contextlib.suppress(FfsError):
            self.client.rmtree(self.hidden)

    def close(self) -> None:
        """Best effort: what it holds ends with its session anyway."""
        unused = [file for file in (self._parts_file, self._manifest_file) if file is not None]
        self._parts_file = self._manifest_file = None
        if unused:
            with contextlib.suppress(FfsError):
                self.client.close_many(unused)
        if self._alive_is_mine:
            self._alive.let_go()

    # inside

    def _in_hidden(self, name: str) -> str:
        return posixpath.join(self.hidden, name)

    def _published(self) -> Published:
        where = posixpath.join(self.goal, manifests.FILE_NAME)
        if not self.client.lexists(where):
            raise RankFailed(
                "the directory of this save was removed before it was complete: nothing was saved", self.goal
            )

        def read() -> bytes:
            with self.client.open(where, "rb", buffering=0) as file:
                return bytes(file.readall())

        return Published(where, read)

    def _read_reports(self, names: set[str]) -> bool:
        """Those that were told since the last look; whether all were."""
        wanted = [
            (rank, name)
            for rank in range(self.ranks)
            if rank not in self._reports
            for name in (_report_name(rank), _parts_name(rank))
            if name in names
        ]
        with contextlib.ExitStack() as stack:
            opened = self.client.open_many([self._in_hidden(name) for _, name in wanted]) if wanted else []
            for file in opened:
                if not isinstance(file, FfsError):
                    stack.enter_context(file)
            for (rank, name), file in zip(wanted, opened, strict=True):
                if isinstance(file, NotFound):
                    continue  # it has another name since they were listed, or all is over
                if isinstance(file, FfsError):
                    raise file
                try:
                    self._reports[rank] = msgspec.json.decode(file.readall(), type=RankReport)
                except msgspec.DecodeError:
                    if name == _report_name(rank):
                        raise
                    # Empty until it is told; in part if that rank has died meanwhile.
        return len(self._reports) == self.ranks

    def _is_mine_to_publish(self, names: Iterable[str]) -> bool:
        """Decided by who makes the next `publisher-N`, after the one before has ended."""
        if self._publishes:
            return True  # though another one may have taken this rank for dead: both do the same
        claims = [int(name.removeprefix(_PUBLISHER)) for name in names if name.startswith(_PUBLISHER)]
        latest = max(claims, default=-1)
        try:
            if claims:
                if not self._may_check():
                    return False
                holder = int(self.client.readlink(self._in_hidden(f"{_PUBLISHER}{latest}")))
                if holder != self.rank and not self._alive.ended([holder]):
                    return False
                if holder == self.rank:
                    self._publishes = True
                    return True
            self.client.symlink(str(self.rank), self._in_hidden(f"{_PUBLISHER}{latest + 1}"))
        except (Exists, NotFound):
            return False  # the next look tells who, or that it is over
        self._publishes = True
        return True

    def _may_check(self) -> bool:
        """Whether it is time to look at the locks of others."""
        now = time.monotonic()
        if now < self._next_check_s:
            return False
        self._next_check_s = now + self._check_every_s
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

    def _put(self, path: str, data: bytes, file: File | None = None) -> None:
        """Appears whole or not at all, and leaves nothing beside it; `file`: it is there already, empty and
        open, and gets its length by one transaction when it is closed."""
        if file is not None:
            with file:
                file.write(data)
            return
        scratch = self._in_hidden(f".{posixpath.basename(path)}.{self.rank}")
        with self.client.open(scratch, "wb", buffering=0) as file:
            file.write(data)
        self.client.replace(scratch, path)


def _report_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _parts_name(rank: int) -> str:
    return f"parts-{rank:05d}.json"

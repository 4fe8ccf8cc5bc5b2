"""Saves on their way from staged memory into the cluster: the threads behind every Manager.

The first hashes files as they are staged; the second links or writes them, publishes, and looks after saves
whose other ranks are still at work. Two more talk with the store about names and reports, ahead of the data
and beside it. A fifth one copies the same files to local scratch, if there is any (copying.py). A save
that fails is reported to the other ranks, its memory is given back, and the saves after it go on.
docs/guides/checkpoint.md, Memory; Commit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ffs.checkpoint.commit import Attempt, Published
from ffs.checkpoint.copying import Copies, give_way
from ffs.checkpoint.errands import Errands
from ffs.checkpoint.hashing import DEFAULT, Algorithm
from ffs.checkpoint.limiter import Limiter
from ffs.checkpoint.manifest import Manifest
from ffs.checkpoint.persist import Before, ClusterWriter, Written, hash_parts, key_of, link
from ffs.checkpoint.report import RankReport
from ffs.checkpoint.snapshot import StagedFile, StatePlan, ranks_here
from ffs.errors import FfsError

if TYPE_CHECKING:
    from ffs.checkpoint.scratch import Scratch
    from ffs.client.client import Client

log = logging.getLogger("ffs.checkpoint")

_POLL_S: Final = 0.002  # of the first look for other ranks, for eight of them; each is a tenth as long again
_SLOWER: Final = 1.1
_POLLERS: Final = 8
_LONGEST_POLL_S: Final = 1.0
_PUMP_S: Final = 0.02
_LONGEST_QUIET_S: Final = 0.2
CHECK_S: Final = 0.2  # between looks at whether other ranks live
_TOLD_POLL_S: Final = 0.01  # of the first look for what others tell, while data is written
_FIRST_FILES: Final = 250  # that are made before the disks are busy
_FIRST_BYTES: Final = 16 << 20  # that are hashed before there are files to write them into
_LONGEST_WAIT_S: Final = 0.1  # of hashing, for that


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save of this rank has moved. `by_class`: bytes of tensors by the first word of their names, and
    how many of them are links to an earlier checkpoint."""

    published: Published
    bytes_written: int
    bytes_linked: int
    by_class: dict[str, tuple[int, int]]
    seconds: float  # from the call of save to the checkpoint being visible
    limit: float | None = None  # the lowest bandwidth meanwhile, bytes a second of this rank; None: no limit

    @property
    def manifest(self) -> Manifest:
        """Of all ranks; decoded when it is first asked for."""
        return self.published.manifest


@dataclass(slots=True, eq=False)
class Saving:
    """One save of one rank."""

    attempt: Attempt
    plan: StatePlan
    tree: Any
    # An earlier checkpoint; asked once, in the background.
    find_before: Callable[[], Before | None] = lambda: None
    on_end: Callable[[Saving], None] = lambda saving: None
    replicated: Future[SaveReport] = field(default_factory=Future)
    written: Written = field(default_factory=Written)
    failure: BaseException | None = None
    local: Future[str | None] = field(default_factory=Future)
    torn: bool = False  # something changed what was copied under a guard
    began_s: float = field(default_factory=time.monotonic)
    # Names of files that are expected to be links: all others are made before there is data.
    same: frozenset[str] = frozenset()
    opened: dict[str, Any] = field(default_factory=dict)  # of those, what isn't in use: a file, or an error
    hashed: int = 0  # bytes
    errand: Future[None] | None = None  # the last that was given for it after `begun`
    telling: Future[None] | None = None
    merged: bool = False
    next_merge_s: float = 0.0
    reported: bool = False
    next_look_s: float = 0.0
    pause_s: float = _TOLD_POLL_S
    begun: Future[None] | None = None
    hash: Algorithm = DEFAULT
    before: Before | None = None  # what find_before found, while it is there
    looked_before: bool = False
    stored: dict[str, tuple[StagedFile, bool]] = field(default_factory=dict)  # and whether they are links
    under_way: int = 0  # files that are being written
    handed_over: bool = False  # all of them
    quiet_until_s: float = 0.0
    limited: int = 0  # bytes by which the limiter knows it, once for each that persists them
    limit: float | None = None

    def next_turn(self) -> float:
        """When to look again, after a pause that grows; as many looks of many ranks together as of few."""
        pause, self.pause_s = self.pause_s, min(_SLOWER * self.pause_s, _LONGEST_POLL_S)
        return time.monotonic() + pause * max(1.0, self.attempt.ranks / _POLLERS)

    @property
    def talks(self) -> bool:
        """Whether another thread than that which writes talks with the store for it."""
        return not (_is_over(self.errand) and _is_over(self.telling))

    def be_quiet(self, copied_s: float) -> None:
        """Its copy took so long: hashing begins that much later where other ranks share the processors. They
        copy at the same time, and who is done first would keep the others, and all who wait for them."""
        if ranks_here() > 1:
            self.quiet_until_s = time.monotonic() + min(copied_s, _LONGEST_QUIET_S)

    def persists(self, limiter: Limiter, times: int) -> None:
        """From now on, by so many threads; once."""
        if not self.limited:
            self.limited = max(1, sum(shard.nbytes for _, shard, _ in self.plan.files))
            for _ in range(times):
                limiter.begin(self.limited)

    def persisted(self, limiter: Limiter) -> None:
        """By one of them. Also where nothing was begun."""
        if self.limited:
            self.limit = limiter.lowest()
            limiter.end(self.limited)

    def report(self, written: Written) -> RankReport:
        """Of this rank, which has stored that."""
        return RankReport(
            rank=self.attempt.rank,
            ranks=self.attempt.ranks,
            shards=tuple(written.shards),
            tensors=written.tensors,
            tied=self.plan.tied,
            tree=self.tree,
            declared=self.plan.declared,
            hash=self.hash,
        )


def done() -> Future[None]:
    """For a save whose attempt has begun already."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


class Background:
    """The threads. `close` waits for all that was handed over."""

    def __init__(
        self, client: Client, scratch: Scratch | None = None, limiter: Limiter | None = None
    ) -> None:
        self._client = client
        self._limiter = limiter or Limiter()
        self._copies = None if scratch is None else Copies(scratch, self._limiter)
        self._hashing, self._writing = self._limiter.gate(), self._limiter.gate()
        self._staged: queue.SimpleQueue[tuple[Saving, StagedFile | None] | None] = queue.SimpleQueue()
        self._hashed: queue.SimpleQueue[_Hashed | None] = queue.SimpleQueue()
        self._writer: ClusterWriter | None = None
        self._unsaid: list[Saving] = []  # failures that the other ranks couldn't be told yet
        self._say_again_s = 0.0
        self._errands = Errands("ffs-ckpt-names", give_way)
        self._tellers = Errands("ffs-ckpt-tell", give_way)
        self._threads = [
            threading.Thread(target=self._hash_all, name="ffs-ckpt-hash", daemon=True),
            threading.Thread(target=self._write_all, name="ffs-ckpt-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, saving: Saving) -> None:
        """Takes its place in the store, in a thread for that: another save may keep the writer busy, and the
        other ranks look for this one. Doesn't wait. Once; repeatable."""
        if saving.begun is None:
            saving.begun = self._errands.do(lambda: self._begin(saving))
            if saving.attempt.ranks > 1:
                saving.errand = self._give(self._errands, saving, self._claim)

    def _begin(self, saving: Saving) -> None:
        """All names that the save is likely to need, in few requests: while data is written, each takes as
        long as the disks need for all that was given to them before."""
        saving.attempt.begin(look=False)
        names = [file.file for file, _, _ in saving.plan.files if file.file not in saving.same]
        names = names[:_FIRST_FILES]
        saving.opened = dict(zip(names, saving.attempt.prepare(names), strict=True))

    def _claim(self, saving: Saving) -> None:
        """In the third thread; not before there is something to write: it is one more transaction."""
        if saving.begun is not None and saving.begun.exception() is None:
            saving.attempt.claim()

    def _wait_begun(self, saving: Saving) -> None:
        """Raises why it couldn't."""
        self.begin(saving)
        assert saving.begun is not None
        saving.begun.result()

    def hand_over(self, saving: Saving, staged: StagedFile) -> None:
        saving.persists(self._limiter, 1 if self._copies is None else 2)
        if self._copies is not None:
            staged.region.holders += 1
        self._staged.put((saving, staged))

    def end(self, saving: Saving) -> None:
        """All files of it were handed over, or `failure` is set."""
        self._staged.put((saving, None))

    def close(self) -> None:
        self._staged.put(None)
        for thread in self._threads:
            thread.join()
        self._errands.close()
        self._tellers.close()
        if self._copies is not None:
            self._copies.close()

    # the first thread

    def _hash_all(self) -> None:
        give_way()
        while (item := self._staged.get()) is not None:
            saving, staged = item
            if staged is not None and saving.failure is None:
                time.sleep(max(0.0, saving.quiet_until_s - time.monotonic()))
                try:
                    self._hashing.wait(staged.nbytes)
                    hash_parts(staged, saving.hash)
                except BaseException as error:
                    saving.failure = error
            self._hashed.put(item)
            self._wake()
            if self._copies is None:
                if staged is None:
                    saving.local.set_result(None)
            elif staged is not None:
                self._copies.put(saving, staged)
            else:
                self._copies.end(saving)
            if staged is not None:
                self._let_write(saving, staged)
        self._hashed.put(None)

    def _let_write(self, saving: Saving, staged: StagedFile) -> None:
        """Writing goes first, once there is something to write: hashing is faster, but with several ranks a
        processor it would keep the disks waiting until all is hashed."""
        before, saving.hashed = saving.hashed, saving.hashed + staged.nbytes
        if before < _FIRST_BYTES <= saving.hashed and saving.begun is not None:
            wait([saving.begun], _LONGEST_WAIT_S)
        os.sched_yield()  # under a real-time policy nobody else gets this processor otherwise

    def _wake(self) -> None:
        """The second thread goes on."""
        if self._writer is not None:
            self._writer.wake()

    # the second thread

    def _write_all(self) -> None:
        give_way()
        waiting: list[Saving] = []
        more = True
        try:
            while more or waiting or self._busy():
                item, more = self._next(waiting, more)
                if item is not None and item is not _NOTHING:
                    saving, staged = item
                    if staged is not None:
                        self._store(saving, staged)
                    else:
                        saving.handed_over = True
                        waiting.append(saving)
                if self._writer is not None:
                    self._writer.pump(_PUMP_S if item is None else 0.0)
                for saving in [each for each in waiting if each.next_look_s <= time.monotonic()]:
                    if self._ahead(saving) and self._look(saving):
                        waiting.remove(saving)
                if self._unsaid and self._say_again_s <= time.monotonic():
                    self._say_again()
            self._say_again()
        finally:
            if self._writer is not None:
                self._writer.close()

    def _busy(self) -> bool:
        return self._writer is not None and self._writer.busy

    def _next(self, waiting: list[Saving], more: bool) -> tuple[_Hashed | None, bool]:
        """(what was hashed last, whether there may be more): at once if something is in flight, else after
        waiting for it until a save must be looked after."""
        pause = 0.0 if self._busy() else _next_look(waiting)
        if self._unsaid and pause is None:
            pause = max(0.0, self._say_again_s - time.monotonic())
        try:
            item = self._hashed.get(timeout=pause) if pause != 0.0 else self._hashed.get_nowait()
        except queue.Empty:
            return None, more
        return item, more and item is not None

    def _store(self, saving: Saving, staged: StagedFile) -> None:
        """Links the file, or begins to write it."""

        def ended(error: BaseException | None) -> None:
            saving.under_way -= 1
            saving.failure = saving.failure or error

        release = staged.region.release
        saving.under_way += 1
        try:
            if saving.failure is not None:
                ended(saving.failure)
                release()
                return
            self._wait_begun(saving)
            linked = self._link(saving, staged)
            saving.stored[staged.plan.file] = staged, linked
            if linked:
                ended(None)
                release()
                return
            file = saving.opened.pop(staged.plan.file, None)
            if isinstance(file, BaseException):
                raise file
            if self._writer is None:
                self._writer = ClusterWriter(self._client, self._writing)
            self._writer.start(saving.attempt.data, staged, ended, release, file)
        except BaseException as error:
            ended(error)
            release()

    def _link(self, saving: Saving, staged: StagedFile) -> bool:
        if not saving.looked_before:
            saving.looked_before = True
            saving.before = saving.find_before()
        if saving.before is None:
            return False
        file = saving.before.file_of(key_of(staged), staged.plan.file)
        if file is None:
            return False
        target = posixpath.join(saving.attempt.data, staged.plan.file)
        source, there = posixpath.join(saving.before.path, file), staged.plan.file in saving.opened
        if link(self._client, source, target, replace=there):
            return True
        saving.before = None  # that checkpoint has gone: nothing of it can be linked
        return False

    def _ahead(self, saving: Saving) -> bool:
        """What goes on beside the data: this rank's report, and the manifest, if this rank publishes. Whether
        all of the save's files are stored, and nobody else talks for it with the store."""
        if saving.failure is None and saving.telling is None:
            saving.telling = self._give(self._tellers, saving, self._tell)
        if not saving.under_way:
            return not saving.talks  # what ends wakes this thread
        due = not saving.merged and saving.next_merge_s <= time.monotonic()
        if saving.failure is None and due and saving.attempt.publishes and _is_over(saving.errand):
            saving.errand = self._give(self._errands, saving, self._merge)
        return False

    def _give(self, errands: Errands, saving: Saving, work: Callable[[Saving], None]) -> Future[None]:
        def do() -> None:
            try:
                work(saving)
            except BaseException as error:
                saving.failure = saving.failure or error

        def over(_: object) -> None:
            self._hashed.put(_NOTHING)
            self._wake()

        future = errands.do(do)
        future.add_done_callback(over)
        return future

    def _tell(self, saving: Saving) -> None:
        """In a thread for that, when all files are links or on their way: the first rank merges meanwhile."""
        if saving.begun is not None:
            saving.begun.result()
        for file, _, _ in saving.plan.files:
            saving.written.add(*saving.stored[file.file])
        saving.stored.clear()
        saving.attempt.tell(saving.report(saving.written))
        self._close_unused(saving)

    def _merge(self, saving: Saving) -> None:
        """In the third thread, again and again."""
        saving.merged = saving.attempt.merge_told()
        saving.next_merge_s = saving.next_turn()

    def _close_unused(self, saving: Saving) -> None:
        """Files that were made, and became links."""
        files = [each for each in saving.opened.values() if not isinstance(each, BaseException)]
        saving.opened.clear()
        if files:
            self._client.close_many(files)

    def _report(self, saving: Saving) -> None:
        """Once, when all of its files are stored."""
        saving.reported = True
        saving.pause_s = _POLL_S
        saving.persisted(self._limiter)
        if saving.failure is None:
            try:
                saving.attempt.stored()
            except BaseException as error:
                saving.failure = error

    def _look(self, saving: Saving) -> bool:
        """Whether the save is over, one way or the other."""
        published: Published | None = None
        if not saving.reported:
            self._report(saving)
        if saving.failure is None:
            try:
                published = saving.attempt.try_publish()
            except BaseException as error:
                saving.failure = error
        if published is None and saving.failure is None:
            saving.next_look_s = saving.next_turn()
            return False
        if saving.failure is not None:
            self._give_up(saving, saving.failure)
        else:
            assert published is not None
            written = saving.written
            report = SaveReport(
                published,
                written.bytes_written,
                written.bytes_linked,
                written.linked_by_class,
                time.monotonic() - saving.began_s,
                saving.limit,
            )
            saving.replicated.set_result(report)
            self._clear_up(saving, published)
        try:
            saving.on_end(saving)
        except Exception:  # the saves after it go on
            log.exception("after saving %s", saving.attempt.goal)
        return True

    def _clear_up(self, saving: Saving, published: Published) -> None:
        """What nobody who waits for the save waits for."""
        if published.here:
            saving.attempt.tidy()
            return
        saving.attempt.close()
        with contextlib.suppress(FfsError):  # whoever asks for it asks again
            _ = published.data  # before retention can take it away

    def _give_up(self, saving: Saving, error: BaseException) -> None:
        """Nothing of it is visible. A save of one rank takes its remains away; of many, the other ranks must
        first see the failure, and the last that has seen it takes them."""
        if saving.begun is not None:
            wait([saving.begun])
        with contextlib.suppress(FfsError):
            self._close_unused(saving)
        if saving.attempt.ranks == 1:
            saving.attempt.tidy()
        elif not saving.attempt.fail(str(error)):
            self._unsaid.append(saving)
        saving.attempt.close()
        saving.replicated.set_exception(error)

    def _say_again(self) -> None:
        """What other ranks couldn't be told. While this rank lives, they can't know it otherwise."""
        self._unsaid = [each for each in self._unsaid if not each.attempt.fail(str(each.failure))]
        self._say_again_s = time.monotonic() + _LONGEST_POLL_S


_Hashed = tuple[Saving, StagedFile | None]
_NOTHING: Final[Any] = object()  # wakes the second thread, which looks after what it has


def _is_over(future: Future[None] | None) -> bool:
    return future is None or future.done()


def _next_look(waiting: list[Saving]) -> float | None:
    """None: nobody waits, but for what wakes the thread."""
    looks = [each.next_look_s for each in waiting if not each.talks]
    return max(0.0, min(looks) - time.monotonic()) if looks else None

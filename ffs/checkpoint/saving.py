"""Saves on their way from staged memory into the cluster: two threads behind every Manager.

The first hashes files as they are staged; the second links or writes them, reports, publishes, and looks
after saves whose other ranks are still at work. A third one copies the same files to local scratch, if there
is any (copying.py). A save that fails is reported to the other ranks, its memory is given back, and the saves
after it go on. docs/guides/checkpoint.md, Memory; Commit.
"""

from __future__ import annotations

import logging
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
from ffs.checkpoint.manifest import Manifest
from ffs.checkpoint.persist import Before, ClusterWriter, Written, hash_parts, key_of, link
from ffs.checkpoint.report import RankReport
from ffs.checkpoint.snapshot import StagedFile, StatePlan, ranks_here

if TYPE_CHECKING:
    from ffs.checkpoint.scratch import Scratch
    from ffs.client.client import Client

log = logging.getLogger("ffs.checkpoint")

_POLL_S: Final = 0.01  # of the first look for other ranks; each is half as long again
_SLOWER: Final = 1.5
_LONGEST_POLL_S: Final = 1.0
_PUMP_S: Final = 0.02
_LONGEST_QUIET_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save of this rank has moved. `by_class`: bytes of tensors by the first word of their names, and
    how many of them are links to an earlier checkpoint."""

    published: Published
    bytes_written: int
    bytes_linked: int
    by_class: dict[str, tuple[int, int]]
    seconds: float  # from the call of save to the checkpoint being visible

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
    reported: bool = False
    next_look_s: float = 0.0
    pause_s: float = _POLL_S
    begun: Future[None] | None = None
    before: Before | None = None  # what find_before found, while it is there
    looked_before: bool = False
    stored: dict[str, tuple[StagedFile, bool]] = field(default_factory=dict)  # and whether they are links
    under_way: int = 0  # files that are being written
    handed_over: bool = False  # all of them
    quiet_until_s: float = 0.0

    def be_quiet(self, copied_s: float) -> None:
        """Its copy took so long: hashing begins that much later where other ranks share the processors. They
        copy at the same time, and who is done first would keep the others, and all who wait for them."""
        if ranks_here() > 1:
            self.quiet_until_s = time.monotonic() + min(copied_s, _LONGEST_QUIET_S)

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
        )


def done() -> Future[None]:
    """For a save whose attempt has begun already."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


class Background:
    """The threads. `close` waits for all that was handed over."""

    def __init__(self, client: Client, scratch: Scratch | None = None) -> None:
        self._client = client
        self._copies = None if scratch is None else Copies(scratch)
        self._staged: queue.SimpleQueue[tuple[Saving, StagedFile | None] | None] = queue.SimpleQueue()
        self._hashed: queue.SimpleQueue[tuple[Saving, StagedFile | None] | None] = queue.SimpleQueue()
        self._writer: ClusterWriter | None = None
        self._unsaid: list[Saving] = []  # failures that the other ranks couldn't be told yet
        self._say_again_s = 0.0
        self._beginner = Errands("ffs-ckpt-begin", give_way)
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
            saving.begun = self._beginner.do(lambda: saving.attempt.begin(look=False))

    def _wait_begun(self, saving: Saving) -> None:
        """Raises why it couldn't."""
        self.begin(saving)
        assert saving.begun is not None
        saving.begun.result()

    def hand_over(self, saving: Saving, staged: StagedFile) -> None:
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
        self._beginner.close()
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
                    hash_parts(staged)
                except BaseException as error:
                    saving.failure = error
            self._hashed.put(item)
            if self._copies is None:
                if staged is None:
                    saving.local.set_result(None)
            elif staged is not None:
                self._copies.put(saving, staged)
            else:
                self._copies.end(saving)
        self._hashed.put(None)

    # the second thread

    def _write_all(self) -> None:
        give_way()
        waiting: list[Saving] = []
        more = True
        try:
            while more or waiting or self._busy():
                item, more = self._next(waiting, more)
                if item is not None:
                    saving, staged = item
                    if staged is not None:
                        self._store(saving, staged)
                    else:
                        saving.handed_over = True
                        waiting.append(saving)
                if self._writer is not None:
                    self._writer.pump(_PUMP_S if item is None else 0.0)
                for saving in [each for each in waiting if each.next_look_s <= time.monotonic()]:
                    if not saving.under_way and self._look(saving):
                        waiting.remove(saving)
                if self._unsaid and self._say_again_s <= time.monotonic():
                    self._say_again()
            self._say_again()
        finally:
            if self._writer is not None:
                self._writer.close()

    def _busy(self) -> bool:
        return self._writer is not None and self._writer.busy

    def _next(
        self, waiting: list[Saving], more: bool
    ) -> tuple[tuple[Saving, StagedFile | None] | None, bool]:
        """(what was hashed last, whether there may be more): at once if something is in flight, else after
        waiting for it until a save must be looked after."""
        pause = 0.0 if self._busy() else _next_look(waiting)
        if self._unsaid and pause is None:
            pause = max(0.0, self._say_again_s - time.monotonic())
        if not more:
            time.sleep(pause or 0.0)
            return None, False
        try:
            item = self._hashed.get(timeout=pause) if pause != 0.0 else self._hashed.get_nowait()
        except queue.Empty:
            return None, True
        return item, item is not None

    def _store(self, saving: Saving, staged: StagedFile) -> None:
        """Links the file, or begins to write it."""

        def ended(error: BaseException | None, linked: bool = False) -> None:
            saving.under_way -= 1
            staged.region.release()
            saving.failure = saving.failure or error
            if error is None:
                saving.stored[staged.plan.file] = staged, linked

        saving.under_way += 1
        try:
            if saving.failure is not None:
                ended(saving.failure)
                return
            self._wait_begun(saving)
            if self._link(saving, staged):
                ended(None, linked=True)
                return
            if self._writer is None:
                self._writer = ClusterWriter(self._client)
            self._writer.start(saving.attempt.data, staged, ended)
        except BaseException as error:
            ended(error)

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
        if link(self._client, posixpath.join(saving.before.path, file), target):
            return True
        saving.before = None  # that checkpoint has gone: nothing of it can be linked
        return False

    def _report(self, saving: Saving) -> None:
        """Once, when all of its files are stored."""
        saving.reported = True
        try:
            if saving.failure is None:
                self._wait_begun(saving)
                for file, _, _ in saving.plan.files:
                    saving.written.add(*saving.stored[file.file])
                saving.stored.clear()
                saving.attempt.report(saving.report(saving.written))
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
            saving.next_look_s = time.monotonic() + saving.pause_s
            saving.pause_s = min(_SLOWER * saving.pause_s, _LONGEST_POLL_S)
            return False
        if saving.failure is not None:
            self._give_up(saving, saving.failure)
        else:
            assert published is not None
            if published.here:
                saving.attempt.tidy()
            else:
                saving.attempt.close()
            written = saving.written
            report = SaveReport(
                published,
                written.bytes_written,
                written.bytes_linked,
                written.linked_by_class,
                time.monotonic() - saving.began_s,
            )
            saving.replicated.set_result(report)
        try:
            saving.on_end(saving)
        except Exception:  # the saves after it go on
            log.exception("after saving %s", saving.attempt.goal)
        return True

    def _give_up(self, saving: Saving, error: BaseException) -> None:
        """Nothing of it is visible. A save of one rank takes its remains away; of many, the other ranks must
        first see the failure, and the last that has seen it takes them."""
        if saving.begun is not None:
            wait([saving.begun])
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


def _next_look(waiting: list[Saving]) -> float | None:
    if not waiting:
        return None
    return max(0.0, min(saving.next_look_s for saving in waiting) - time.monotonic())

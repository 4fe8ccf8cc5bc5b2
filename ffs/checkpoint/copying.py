"""The thread that copies staged files to local scratch, beside the one that writes them to the cluster
(docs/guides/checkpoint.md, Local scratch). Whatever fails here is the future `local`'s, and is logged; the
save to the cluster doesn't notice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ffs.checkpoint.persist import Written
from ffs.errors import FfsError

if TYPE_CHECKING:
    from ffs.checkpoint.limiter import Limiter
    from ffs.checkpoint.saving import Saving
    from ffs.checkpoint.scratch import Copying, Scratch
    from ffs.checkpoint.snapshot import StagedFile

log = logging.getLogger("ffs.checkpoint")

_NICE: Final = 10


@dataclass(slots=True)
class _Going:
    copying: Copying | None = None
    failure: BaseException | None = None
    written: Written = field(default_factory=Written)


class Copies:
    """Files come from one thread, hashed, and are given back by theirs."""

    def __init__(self, scratch: Scratch, limiter: Limiter) -> None:
        self._scratch = scratch
        self._limiter = limiter
        self._gate = limiter.gate()
        self._queue: queue.SimpleQueue[tuple[Saving, StagedFile | None] | None] = queue.SimpleQueue()
        self._going: dict[Saving, _Going] = {}
        self._thread = threading.Thread(target=self._copy_all, name="ffs-ckpt-local", daemon=True)
        self._thread.start()

    def put(self, saving: Saving, staged: StagedFile) -> None:
        self._queue.put((saving, staged))

    def end(self, saving: Saving) -> None:
        """All files of it were put that ever will be."""
        self._queue.put((saving, None))

    def close(self) -> None:
        """After all that was put."""
        self._queue.put(None)
        self._thread.join()
        self._scratch.close()

    # in the thread

    def _copy_all(self) -> None:
        give_way()
        while (item := self._queue.get()) is not None:
            saving, staged = item
            going = self._going.setdefault(saving, _Going())
            if staged is not None:
                try:
                    self._copy(saving, staged, going)
                finally:
                    staged.region.release()
            else:
                del self._going[saving]
                self._end(saving, going)
                saving.persisted(self._limiter)

    def _copy(self, saving: Saving, staged: StagedFile, going: _Going) -> None:
        if going.failure is not None:
            return
        try:
            if len(staged.hashes) != len(staged.plan.parts):
                raise saving.failure or FfsError("a file has no hashes")
            copying = self._begun(saving, going)
            self._gate.wait(staged.nbytes)
            copying.write(staged)
            going.written.add(staged, False)
        except BaseException as error:
            going.failure = error

    def _begun(self, saving: Saving, going: _Going) -> Copying:
        if going.copying is None:
            step = saving.attempt.step
            assert step is not None
            going.copying = self._scratch.begin(step)
        return going.copying

    def _end(self, saving: Saving, going: _Going) -> None:
        where = ""
        try:
            if going.failure is None and saving.torn:
                going.failure = saving.failure
            if going.failure is None and len(going.written.shards) < len(saving.plan.files):
                going.failure = saving.failure or FfsError("the save ended early")
            if going.failure is None:
                where = self._begun(saving, going).finish(saving.report(going.written))
        except BaseException as error:
            going.failure = error
        if going.failure is None:
            saving.local.set_result(where)
            return
        if going.copying is not None:
            going.copying.drop()
        log.warning("no local copy of %s: %s", saving.attempt.goal, going.failure)
        saving.local.set_exception(going.failure)


def give_way() -> None:
    """The training step goes first: this thread takes what it leaves. Under a real-time policy it stays as it
    is: below the step's priority it would get nothing at all while steps follow each other."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)

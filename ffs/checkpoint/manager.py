"""`Manager`: checkpoints of a training job, saved while it goes on (docs/guides/checkpoint.md).

manager = checkpoint.Manager(client, "/runs/7", keep=3)
manager.guard(optimizer)
for step in range(...):
    ...
    if step % 100 == 0:
        manager.save(step, {"model": model, "optimizer": optimizer, "step": step})
manager.close()
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import posixpath
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ffs.checkpoint import retention
from ffs.checkpoint.alive import Alive
from ffs.checkpoint.commit import Attempt, step_name
from ffs.checkpoint.errands import Errands
from ffs.checkpoint.guard import Guard, TornSnapshot, Untouched
from ffs.checkpoint.hashing import DEFAULT, Algorithm, check_algorithm
from ffs.checkpoint.hold import read_manifest
from ffs.checkpoint.limiter import Bandwidth, Limiter
from ffs.checkpoint.loads import Loads
from ffs.checkpoint.manifest import Manifest
from ffs.checkpoint.persist import Before
from ffs.checkpoint.plan import PART_BYTES
from ffs.checkpoint.ranks import Ranks
from ffs.checkpoint.remains import collect_remains, running_name
from ffs.checkpoint.saving import CHECK_S, Background, SaveReport, Saving
from ffs.checkpoint.scratch import Scratch, run_of
from ffs.checkpoint.snapshot import Planner, StagedFile, StatePlan, halves, stage, versions
from ffs.checkpoint.staging import Pool, host_bytes_for
from ffs.checkpoint.state import FlatState, flatten, with_rank
from ffs.checkpoint.streams import End, Sides
from ffs.errors import AccessDenied, Exists, InvalidArgument

if TYPE_CHECKING:
    from ffs.client.client import Client

_AT_ONCE = 2  # saves


@dataclass(slots=True, eq=False)
class SaveHandle:
    """A save on its way. `staged`: the state may be changed. `local`: what this rank stores is whole on local
    scratch; its result is the directory there, None without scratch. `replicated`: every replica holds all of
    it, of all ranks, and it is visible; its result is a SaveReport."""

    step: int
    replicated: Future[SaveReport]
    local: Future[str | None]
    staged: Future[None] = field(default_factory=Future)
    limiter: Limiter = field(default_factory=Limiter, repr=False)

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Blocks until it is visible, or raises why not; no adaptive limit holds it back meanwhile.
        TimeoutError."""
        with self.limiter.hurry():
            return self.replicated.result(timeout)


class Manager:
    """Checkpoints under the directory `path`, one a step: PATH/step-1000.

    host_bytes: memory for states on their way, allocated now; None: allocated at the first save, as much as
    two saves of that state take, at most a quarter of what is free. A state that is larger goes in waves:
    save returns when the last one was copied.
    keep: how many checkpoints stay, None for all; keep_every: those whose step is a multiple of it stay, too.
    local: a directory of this host's disk for copies of what this rank stores; keep_local: how many stay.
    What goes wrong there is in the `local` of the save's handle and in the log, and fails no save.
    bandwidth: bytes a second that a save of this rank may persist: "adaptive", as much as doesn't slow the
    steps down that `guard` or `stepped` sees, without a limit where nobody trains; a number; None, no limit.
    ranks: this process's place among all that save together; None: as torch.distributed has it, else alone.
    All ranks make a Manager of the same path, in the same order, and call save for the same steps.
    hash: of the tensors' bytes, "xxh3-128", or "blake3", which finds also what somebody changed on purpose.

    One thread, but for `wait_copied`. Blocking: `save` for the copy (see guard), `load`, `wait`, `close`.
    What went wrong in the background is raised by the next save, wait or close, of every rank.
    """

    def __init__(
        self,
        client: Client,
        path: str,
        *,
        host_bytes: int | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        local: str | os.PathLike[str] | None = None,
        keep_local: int = 2,
        part_bytes: int = PART_BYTES,
        bandwidth: Bandwidth = "adaptive",
        ranks: Ranks | None = None,
        table: str | int | None = None,
        hash: Algorithm = DEFAULT,
    ) -> None:
        check_algorithm(hash)
        if keep is not None and keep < 1:
            raise InvalidArgument(f"keep is {keep}: give how many checkpoints stay, at least 1, or None")
        if keep_local < 1:
            raise InvalidArgument(f"keep_local is {keep_local}: give how many copies stay, at least 1")
        self.client = client
        self.path = path.rstrip("/") or "/"
        self._keep, self._keep_every = keep, keep_every
        self._table = table
        self._hash: Algorithm = hash
        self.ranks = ranks or Ranks.of_torch()
        self._known: set[int] | None = None  # steps that were seen at the first save, and those of saves
        self._planner = Planner(self.ranks.rank, self.ranks.count, part_bytes)
        self._still: frozenset[str] = frozenset()  # tensors that the last save found unchanged
        self._run = self.ranks.agree(uuid.uuid4().hex)
        self._host_bytes = host_bytes
        self._pool = Pool(host_bytes) if host_bytes is not None else None
        self._limiter = Limiter(bandwidth)
        self._sides = Sides()
        self._guard = Guard(self._limiter.stepped, self._limiter.disturb)
        self._saves = 0
        self._going: list[Saving] = []
        self._locals: list[Future[str | None]] = []
        self._free = threading.Semaphore(_AT_ONCE)
        self._copier: Errands | None = None
        self._copying: Future[None] | None = None
        self._last: Before | None = None
        self._failures: list[BaseException] = []
        self._mutex = threading.Lock()
        self._ended_one = threading.Condition(self._mutex)
        self._closed = False
        client.makedirs(self.path, exist_ok=True, table=table)
        self._scratch: Scratch | None = None
        if local is not None:
            run = run_of(client, self.path)
            self._scratch = Scratch(os.fspath(local), run, self.ranks.rank, self.ranks.count, keep_local)
        self._background = Background(client, self._scratch, self._limiter)
        if self.ranks.rank == 0:
            collect_remains(client, self.path)
        self._alive = Alive(client, posixpath.join(self.path, running_name(self._run)), self.ranks.rank)
        if self.ranks.count > 1:
            with contextlib.suppress(AccessDenied):  # of who only loads; a save raises it
                self._alive.ensure()

    # --- saving -----------------------------------------------------------------------------

    def guard(self, optimizer: Any) -> None:
        """From now on saves copy what only `optimizer.step` changes while forward and backward run, and an
        update waits until it is copied."""
        self._guard.add(optimizer)
        if self._copier is None:
            self._copier = Errands("ffs-ckpt-copy")

    def save(
        self, step: int, state: Any, *, per_rank: Any = None, block: bool = False, force: bool = False
    ) -> SaveHandle:
        """Begins to save; returns when the state may be changed - with `guard`, when its parameters may be
        updated by the optimizer, which waits. A third save waits for the first (FAULTS C4).

        state: nested dicts and lists of tensors and plain values, and objects with `state_dict`; all ranks
        have the same, DTensors their own piece. per_rank: the same kind, of this rank alone: generators of
        random numbers, a loader's place. block: returns when it is visible. force: replaces a checkpoint of
        that step.

        Raises Exists (this step is there; one that another job has saved since is found later, as all else);
        TypeError, InvalidArgument (an entry that can't be stored: its name is said); what went wrong in an
        earlier save: then this one wasn't begun."""
        self._check_open()
        self._raise_failures()
        if step < 0:
            raise InvalidArgument(f"step {step}: give 0 or more")
        self._guard.wait()
        self._limiter.disturb()
        self._limiter.saves()
        flat = flatten(state if per_rank is None else with_rank(state, self.ranks.rank, per_rank))
        plan, pool = self._plan(flat)
        self._wait_turn()
        try:
            if not force and self._is_there(step):
                raise Exists("is there already: choose another path, or remove it first", self.path_of(step))
            saving, handle = self._begin(step, plan, flat.tree, force)
            if self._known is not None:
                self._known.add(step)
        except BaseException:
            self._free.release()
            raise
        self._copy(plan, pool, saving, handle)
        if block:
            handle.wait()
        return handle

    def stepped(self) -> None:
        """Training has made a step: what "adaptive" measures, where no optimizer is guarded. Any thread."""
        self._limiter.stepped()

    def wait_copied(self) -> None:
        """Until what a save took may be changed. What `guard` does before each update. Any thread."""
        self._guard.wait()

    def wait(self) -> None:
        """Until all saves are visible on all ranks, and local copies are made. Raises what went wrong, but
        for local copies."""
        with self._limiter.hurry():
            self._join_copier()
            self._wait_all()
            concurrent.futures.wait(self._locals)
        self._raise_failures()

    # --- looking and loading ----------------------------------------------------------------

    def steps(self) -> list[int]:
        """Of all whole checkpoints, rising."""
        return retention.steps(self.client, self.path)

    def latest(self) -> int | None:
        """The newest whole checkpoint's step; None: there is none."""
        found = self.steps()
        return found[-1] if found else None

    def path_of(self, step: int) -> str:
        return posixpath.join(self.path, step_name(step))

    def local_steps(self) -> list[int]:
        """Of which this rank has whole copies on local scratch, rising; [] without scratch."""
        return self._scratch.steps() if self._scratch is not None else []

    def manifest(self, step: int) -> Manifest:
        return read_manifest(self.client, self.path_of(step))

    def load(
        self,
        step: int | None = None,
        into: Any = None,
        *,
        per_rank: Any = None,
        strict: bool = True,
        share: bool = False,
    ) -> Any:
        """As `checkpoint.load`, of the latest checkpoint or that of a step. It can't be removed meanwhile.
        per_rank: this rank's own state, which is filled, as `into`. NotFound.

        Bytes that local scratch has, of any rank of this host, come from there. A step that only is there,
        since it was lost before it was whole in the cluster, is loaded if it is asked for by number, and
        one rank alone has saved it.

        share: all ranks call this for the same step (None: rank 0 says which is the latest), and what several
        of them want is read by one, which hands it to the others. A rank that fails fails all."""
        loads = Loads(self.client, self.path, self.ranks, self._scratch, self._pool)
        return loads.load(step, into, per_rank, strict, share)

    def pin(self, step: int, reason: str = "") -> None:
        """Keeps it from retention. NotFound."""
        retention.pin(self.client, self.path_of(step), reason)

    def unpin(self, step: int) -> None:
        retention.unpin(self.client, self.path_of(step))

    # --- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for all saves. Idempotent. Raises what went wrong, after everything is put away."""
        if self._closed:
            return
        self._closed = True
        with self._limiter.hurry():
            self._join_copier()
            if self._copier is not None:
                self._copier.close()
            self._guard.remove_all()
            self._background.close()
        self._alive.close()
        if self._pool is not None:
            self._pool.close()
        self._raise_failures()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BaseException:
            if kind is None:
                raise

    # inside

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("this Manager is closed", self.path)

    def _raise_failures(self) -> None:
        with self._mutex:
            failures, self._failures = self._failures, []
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise BaseExceptionGroup("several saves failed", failures)

    def _wait_all(self) -> None:
        with self._ended_one:
            self._ended_one.wait_for(lambda: not self._going)

    def _plan(self, flat: FlatState) -> tuple[StatePlan, Pool]:
        def plan(host_bytes: int) -> StatePlan:
            return self._planner.plan(flat.tensors, host_bytes, self._still)

        if self._host_bytes is not None:
            assert self._pool is not None
            return plan(self._host_bytes), self._pool
        # By what the largest state so far takes: an optimizer has none before its first step.
        if self._pool is not None:
            made = plan(self._pool.nbytes)
            if 2 * made.staged_bytes <= self._pool.nbytes:
                return made, self._pool
        wanted = host_bytes_for(plan(1 << 62).staged_bytes)
        if self._pool is None or self._pool.nbytes < wanted // 4096 * 4096:
            with self._limiter.hurry():
                self._join_copier()
                self._wait_all()
                concurrent.futures.wait(self._locals)
            if self._pool is not None:
                self._pool.close()
            self._pool = Pool(wanted)
        return plan(self._pool.nbytes), self._pool

    def _wait_turn(self) -> None:
        if self._free.acquire(blocking=False):
            return
        with self._limiter.hurry():
            while not self._free.acquire(timeout=1.0):
                if self._failures:  # all that are on their way fail: say why
                    self._raise_failures()

    def _begin(self, step: int, plan: StatePlan, tree: Any, force: bool) -> tuple[Saving, SaveHandle]:
        goal = self.path_of(step)
        there = force and self.ranks.rank == 0 and self.client.lexists(goal)
        if there and not retention.remove(self.client, goal):
            raise Exists("a reader holds this step, so it can't be replaced", goal)
        self._saves += 1
        attempt = Attempt(
            self.client,
            goal,
            f"{self._run}{self._saves:08x}",
            self.ranks.rank,
            self.ranks.count,
            step,
            self._table,
            self._alive,
            check_every_s=CHECK_S,
        )
        last = self._last
        same = frozenset(shard.file for shard in last.shards if shard.linked) if last else frozenset()
        saving = Saving(attempt, plan, tree, self._before, self._ended, hash=self._hash, same=same)
        with self._mutex:
            self._going.append(saving)
        self._locals = [each for each in self._locals if not each.done()] + [saving.local]
        return saving, SaveHandle(step, saving.replicated, saving.local, limiter=self._limiter)

    def _is_there(self, step: int) -> bool:
        """Asks the store only about steps that it had: a round trip costs training more than the copy. What
        others save meanwhile is found when this one is published."""
        if self._known is None:
            self._known = set(self.steps())
        return step in self._known and self.client.lexists(self.path_of(step))

    def _before(self) -> Before | None:
        """An earlier checkpoint, whose files can be linked."""
        if self._last is None:
            latest = self.latest()
            if latest is not None:
                manifest = self.manifest(latest)
                self._last = Before(self.path_of(latest), manifest.shards, manifest.tensors, lambda: manifest)
        return self._last

    def _copy(self, plan: StatePlan, pool: Pool, saving: Saving, handle: SaveHandle) -> None:
        """What an update doesn't guard now, the rest in a thread if there is a guard."""
        self._sides.mark(plan.devices)
        if any(device.type == "cuda" for device in plan.devices):
            pool.pin()
        now, later = plan, None
        if self._guard.active:
            now, later = halves(plan, self._guard.covers())
        self._guard.begin()
        try:
            self._copy_part(now, pool, saving)
        finally:
            if later is None or saving.failure is not None:
                self._copied(saving, handle)
        if later is not None and saving.failure is None:
            self._join_copier()
            rest = later  # looked at here: the caller may change what it likes as soon as save returns
            untouched = Untouched(lambda: versions(rest))
            assert self._copier is not None, "a guard that is active has one"
            self._copying = self._copier.do(lambda: self._copy_later(rest, untouched, pool, saving, handle))

    def _copy_later(
        self, plan: StatePlan, untouched: Untouched, pool: Pool, saving: Saving, handle: SaveHandle
    ) -> None:
        try:
            self._copy_part(plan, pool, saving, lambda end: self._guard.launched(end, untouched.changed))
            changed = untouched.changed()
            if changed:
                saving.torn = True
                saving.failure = saving.failure or TornSnapshot(
                    f"{changed[0]!r} was changed while it was copied, by something else than the guarded "
                    "optimizer: guard that too, or call manager.wait_copied() before it"
                )
        finally:
            self._copied(saving, handle)

    def _copy_part(
        self,
        plan: StatePlan,
        pool: Pool,
        saving: Saving,
        launched: Callable[[End], None] = lambda end: None,
    ) -> None:
        copied: list[StagedFile] = []
        begun_s = time.monotonic()

        def hand_over() -> None:
            if copied:
                self._background.begin(saving)
            while copied:
                self._background.hand_over(saving, copied.pop(0))

        def full() -> None:
            hand_over()
            waits.enter_context(self._limiter.hurry())

        waits = contextlib.ExitStack()
        try:
            # Hashing and writing begin when all is copied, or the memory is full: they would slow it down.
            for staged in stage(plan, pool, lambda: saving.failure, full, self._sides, launched):
                copied.append(staged)
                if saving.failure is not None:
                    break
        except BaseException as error:
            saving.failure = saving.failure or error
            if not isinstance(error, Exception):
                raise  # Ctrl-C in the caller's thread
        finally:
            saving.be_quiet(time.monotonic() - begun_s)
            waits.close()
            hand_over()  # also of a save that failed: who takes them gives their memory back

    def _copied(self, saving: Saving, handle: SaveHandle) -> None:
        self._background.end(saving)
        self._guard.end()
        if saving.failure is None:
            handle.staged.set_result(None)
        else:
            handle.staged.set_exception(saving.failure)

    def _join_copier(self) -> None:
        copying, self._copying = self._copying, None
        if copying is not None:
            concurrent.futures.wait([copying])

    def _ended(self, saving: Saving) -> None:
        """In the background, whether it went well or not."""
        error = saving.replicated.exception()
        if error is not None:
            with self._mutex:
                self._failures.append(error)
        self._free.release()
        try:
            if error is None:
                written = saving.written
                if self._last is not None:
                    self._still = self._last.unchanged(written.tensors)
                published = saving.replicated.result().published
                self._last = Before(
                    saving.attempt.goal, written.shards, written.tensors, lambda: published.manifest
                )
                if self.ranks.rank == 0:
                    self._retire()
        finally:
            with self._ended_one:
                self._going.remove(saving)
                self._ended_one.notify_all()

    def _retire(self) -> None:
        present = self.steps()
        if self._keep is None or len(present) <= self._keep:
            return
        pinned = retention.pinned_steps(self.client, self.path, present)
        for step in retention.to_remove(present, self._keep, self._keep_every, pinned):
            retention.remove(self.client, self.path_of(step))

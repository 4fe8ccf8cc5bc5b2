"""The tier manager: blocks between an engine, pinned host memory, a local store and an ffs space
(docs/kv_tiers.md, Manager). machine.py decides; here are the lock, the threads and the calls that move
bytes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from ffs._native.iov import Iov, IovSlice
from ffs.errors import BadHandle, DeadlineExceeded, FfsError, InvalidArgument
from ffs.kv.blocks import Places
from ffs.kv.cost import CostCounts, CostModel, Decision
from ffs.kv.results import Results, Status
from ffs.kv.tiers.machine import Machine
from ffs.kv.tiers.store import BlockStore
from ffs.kv.tiers.streams import Block, Stream
from ffs.kv.tiers.words import Counts, Job, Outcome, Settings, Tier, Wish
from ffs.kv.tiers.workers import Workers

_NAP_S: Final = 0.05
_BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class TierStats:
    """Since the manager was made. `in_flight_window`: loads that each store may have in flight now."""

    counts: Counts
    cost: CostCounts | None
    host_used_bytes: int
    local_used_bytes: int
    pinned_blocks: int
    leases: int
    in_flight_window: dict[str, int]
    worker_failures: int
    workers: int


class TierManager:
    """Thread-safe. Threads of its own move blocks; no call of an engine waits for a store but those that say
    so.

    `space`, `local`: stores below the host's memory, each may be None; they stay the caller's.
    `timeout_s`: of each batch. `workers`: threads that load, by store, each with its part of the window in
    flight: with two, a store works for one while the other sees to what has come.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        space: BlockStore | None = None,
        local: BlockStore | None = None,
        cost: CostModel | None = None,
        timeout_s: float = 10.0,
        workers: int = 2,
        hugepages: bool = False,
    ) -> None:
        stores = {Tier.LOCAL: local, Tier.SPACE: space}
        self._stores = {tier: store for tier, store in stores.items() if store is not None}
        for tier, store in self._stores.items():
            if store.block_bytes > settings.block_bytes:
                raise InvalidArgument(
                    f"the {tier.name.lower()} store has blocks of up to {store.block_bytes} bytes, a slot"
                    f" of the"
                    f" host's memory only {settings.block_bytes}: give block_bytes={store.block_bytes}"
                )
        if local is not None and settings.local_bytes < settings.stride:
            raise InvalidArgument("there is a local store: say how much it may hold (local_bytes)")
        self.settings = settings
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)  # for streams, and flush
        self._loads = {tier: threading.Condition(self._lock) for tier in self._stores}
        self._saves = {tier: threading.Condition(self._lock) for tier in self._stores}
        self._machine = Machine(settings, list(self._stores))
        self._cost = cost
        self._closed = False
        self.memory = Iov(settings.slots * settings.stride, hugepages=hugepages)
        """The host's memory: slots of `settings.stride` bytes."""
        self._workers = Workers()
        self._threads = workers
        for tier in self._stores:
            for number in range(workers):
                name = f"{tier.name.lower()}-load-{number}"
                self._workers.start(name, partial(self._load, tier))
            self._workers.start(f"{tier.name.lower()}-store", partial(self._store, tier))

    # --- the engine's side ----------------------------------------------------------------------

    def put(self, key: bytes, data: Any) -> bool:
        """Takes a block that was computed, by a copy. False: it is here already, or there is no room (the
        engine loses nothing: the block can be computed again). Never waits for a store. InvalidArgument."""
        source = np.frombuffer(data, dtype=np.uint8)
        with self.fill(key, len(source)) as slot:
            if slot is None:
                return False
            np.frombuffer(slot.view, dtype=np.uint8)[:] = source
        return True

    @contextlib.contextmanager
    def fill(self, key: bytes, nbytes: int) -> Iterator[IovSlice | None]:
        """Memory for a block of `nbytes`, to be filled inside the `with`, without a copy; None as put's
        False. If the body raises, nothing of the block is ever seen."""
        with self._lock:
            self._check_open()
            slot = self._machine.begin_put(key, nbytes)
        if slot is None:
            yield None
            return
        well = False
        try:
            yield self._slice(slot, nbytes)
            well = True
        finally:
            with self._lock:
                self._machine.end_put(key, well)
                self._wake()

    def prefetch(
        self,
        keys: Sequence[bytes],
        *,
        urgent: bool = False,
        ahead: int | None = None,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Stream:
        """Starts loading blocks in order of need, at most `ahead` before the one that is used (None: as many
        as loads may be in flight, up to a quarter of the host's memory); doesn't wait. `urgent`: before what
        others prefetch. `lease_s`: after so many seconds the memory is taken back, come what may;
        `timeout_s`: a block that isn't there by then is FAILED."""
        slots = self.settings.slots
        most = ahead or min(self.settings.most_in_flight, max(1, slots // 4))
        return self._start(keys, urgent, min(most, max(1, slots - 1)), lease_s, timeout_s)

    def fetch(
        self, keys: Sequence[bytes], *, lease_s: float | None = None, timeout_s: float | None = None
    ) -> Stream:
        """The same for blocks that are needed all at once, before what others prefetch: `wait_all`.
        InvalidArgument for more than half of the host's memory."""
        if len(keys) > max(1, self.settings.slots // 2):
            raise InvalidArgument(
                f"{len(keys)} blocks at once, and the host's memory holds {self.settings.slots}:"
                " read them as a stream (prefetch), or give it more"
            )
        return self._start(keys, True, max(1, len(keys)), lease_s, timeout_s)

    def _start(
        self,
        keys: Sequence[bytes],
        urgent: bool,
        ahead: int,
        lease_s: float | None,
        timeout_s: float | None,
    ) -> Stream:
        with self._lock:
            self._check_open()
            deadline = None if lease_s is None else time.monotonic() + lease_s
            lease = self._machine.pins.lease(deadline)
            wish = self._machine.want(tuple(keys), lease, urgent=urgent, ahead=ahead)
            self._wake()
        return Stream(self, wish, timeout_s if timeout_s is not None else 3 * self._timeout_s)

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> int:
        """How many blocks from the first on are there, in whatever tier. Asks the space, in one batch, for
        what isn't known here: blocks. What can't be asked counts as absent."""
        with self._lock:
            known = [self._machine.where(key) is not None for key in keys]
        first = next((at for at, there in enumerate(known) if not there), len(keys))
        space = self._stores.get(Tier.SPACE)
        if first == len(keys) or space is None:
            return first
        asked = [at for at in range(first, len(keys)) if not known[at]]
        found = space.exists_many([keys[at] for at in asked], timeout_s=timeout_s or self._timeout_s)
        with self._lock:
            for at, there in zip(asked, found.hits.tolist(), strict=True):
                known[at] = there
                if there:
                    self._machine.note_shared((keys[at],))
        return next((at for at, there in enumerate(known) if not there), len(keys))

    def where(self, key: bytes) -> Tier | None:
        """The nearest tier that is known to have a block. Never waits."""
        with self._lock:
            return self._machine.where(key)

    def adopt(self) -> int:
        """Takes over what the local store holds from an earlier life, as far as there is room (the rest is
        removed): how many blocks. Blocking; to be called before others use the manager. InvalidArgument: its
        store can't list."""
        list_keys = getattr(self._stores.get(Tier.LOCAL), "blocks", None)
        if list_keys is None:
            raise InvalidArgument("there is no local store that lists its blocks")
        taken = 0
        for key, nbytes in list_keys():
            with self._lock:
                taken += self._machine.adopt(key, nbytes)
        with self._lock:
            self._wake()
        return taken

    # --- load or recompute ----------------------------------------------------------------------

    def decide(self, keys: Sequence[bytes], tokens: int) -> Decision:
        """Whether to load these blocks or to compute their `tokens` again. Never waits; microseconds.
        InvalidArgument: the manager was made without a cost model."""
        cost = self._need_cost()
        block = self.settings.block_bytes
        nbytes = {"local": 0, "space": 0}
        with self._lock:
            machine = self._machine
            for key in keys:
                tier = machine.where(key)
                if tier is not Tier.HOST:
                    nbytes["local" if tier is Tier.LOCAL else "space"] += block
            queued = {tier.name.lower(): machine.queued(tier) * block for tier in self._stores}
            return cost.decide(nbytes, queued, tokens)

    def judge(self, decision: Decision, took_s: float, *, tokens: int = 0) -> bool:
        """Tells how long what was decided took; `tokens` of a prefill teach its speed. Whether it was
        right."""
        cost = self._need_cost()
        with self._lock:
            if tokens:
                cost.observe_prefill(tokens, took_s)
            return cost.judge(decision, took_s)

    def _need_cost(self) -> CostModel:
        if self._cost is None:
            raise InvalidArgument("this manager was made without a cost model: give cost=CostModel(...)")
        return self._cost

    # --- streams --------------------------------------------------------------------------------

    def _slice(self, slot: int, nbytes: int) -> IovSlice:
        begin = slot * self.settings.stride
        return self.memory[begin : begin + nbytes]

    def _await(self, wish: Wish, position: int, over: int, timeout_s: float) -> list[Block]:
        """What has come of a wish from `position` on, in one piece; waits for the first. None of it: that
        didn't come in time. `over`: the positions before are."""
        key = wish.keys[position]
        limit = time.monotonic() + timeout_s
        with self._lock:
            while key not in wish.outcomes:
                if self._closed or not wish.live:
                    raise BadHandle("this stream is over: its manager or it was closed")
                if over > wish.taken:
                    self._give_back(wish, over)
                    continue
                if (left := limit - time.monotonic()) <= 0:
                    return []
                self._news.wait(min(left, 1.0))
            return self._come(wish, position)

    def _come(self, wish: Wish, position: int) -> list[Block]:
        """Each in its slot, which is its own as long as the wish holds it."""
        machine, memory, stride = self._machine, self.memory, self.settings.stride
        outcomes, blocks = wish.outcomes, list[Block]()
        for at in range(position, wish.asked):
            key = wish.keys[at]
            outcome = outcomes.get(key)
            if outcome is None:
                break
            if outcome is not Outcome.HIT:
                blocks.append(Block(at, key, outcome, None, wish.errors.get(key)))
                continue
            if not wish.lease.live:
                raise BadHandle("the lease of these blocks is over: their memory may be others'")
            slot, nbytes = machine.slot(key)
            blocks.append(Block(at, key, outcome, IovSlice(memory, slot * stride, nbytes), None))
        return blocks

    def _take(self, wish: Wish, over: int) -> None:
        """The positions before `over` are."""
        with self._lock:
            if wish.live:
                self._give_back(wish, over)

    def _give_back(self, wish: Wish, over: int) -> None:
        self._machine.take(wish, over - wish.taken)
        self._wake_workers()

    def _cancel(self, wish: Wish) -> None:
        with self._lock:
            if wish.live:
                self._machine.cancel(wish)
                self._wake()

    def _wake(self) -> None:
        self._wake_workers()
        self._news.notify_all()

    def _wake_workers(self) -> None:
        """Those that find something to do: each wakes up at the cost of a few blocks."""
        machine = self._machine
        for tier in self._stores:
            if self._closed or machine.loads_due(tier, self._batch(tier)):
                self._loads[tier].notify_all()
            if self._closed or machine.stores_due(tier):
                self._saves[tier].notify_all()

    # --- the workers' side ----------------------------------------------------------------------

    def _batch(self, tier: Tier) -> int:
        """Loads in one call: each thread's part of the window."""
        machine = self._machine
        return min(_BATCH, max(1, machine.windows[tier].size // self._threads), machine.at_once(tier))

    def _load(self, tier: Tier) -> bool:
        machine = self._machine
        with self._lock:
            now = time.monotonic()
            machine.sweep(now)
            jobs = machine.loads(tier, self._batch(tier), now)
            if not jobs:
                self._news.notify_all()  # a resting store answers by refusing
                self._loads[tier].wait(_NAP_S if machine.loads_wait() else 1.0)
                return False
        began = time.monotonic()
        results = self._call(tier, jobs)
        now = time.monotonic()
        with self._lock:
            machine.loads_ended(jobs, results, now, now - began)
            if self._cost is not None and (moved := int(results.lengths.sum())):
                self._cost.source(tier.name.lower()).observe(moved, now - began)
            self._wake()
        return True

    def _store(self, tier: Tier) -> bool:
        """Removals too, by the same thread: so a block that comes back isn't removed after it was stored."""
        machine = self._machine
        with self._lock:
            gone = machine.removals(_BATCH, time.monotonic()) if tier is Tier.LOCAL else []
            jobs = [] if gone else machine.saves(tier, _BATCH, time.monotonic())
            if not gone and not jobs:
                self._saves[tier].wait(_NAP_S if not machine.idle() else 1.0)
                return False
        if gone:
            self._remove(tier, gone)
            return True
        results = self._call(tier, jobs)
        now = time.monotonic()
        with self._lock:
            for job, well in zip(jobs, results.hits.tolist(), strict=True):
                machine.save_ended(job, well, now)
            self._wake()
        return True

    def _remove(self, tier: Tier, keys: list[bytes]) -> None:
        """What couldn't be removed is tried again: it takes room that is counted as free."""
        left = list(keys)
        with contextlib.suppress(BaseException):  # as in _call: an error of all of them
            results = self._stores[tier].delete(keys, timeout_s=self._timeout_s)
            left = [keys[at] for at in results.errors]
        with self._lock:
            self._machine.removals_ended(left, time.monotonic())
            self._wake()

    def _call(self, tier: Tier, jobs: list[Job]) -> Results:
        """One batch. Whatever the store raises is an error of all of its blocks (K20)."""
        stride = self.settings.stride
        offsets = np.array([job.slot for job in jobs], dtype=np.int64) * stride
        lengths = np.array([job.nbytes for job in jobs], dtype=np.int64)
        places = Places(self.memory, offsets, lengths)
        store = self._stores[tier]
        keys = [job.key for job in jobs]
        call = store.get_many if jobs[0].load else store.put_many
        try:
            results = call(keys, places, timeout_s=self._timeout_s)
            if len(results) == len(jobs):
                return results
            failure = FfsError(f"the {tier.name.lower()} store answered {len(results)} of {len(jobs)} blocks")
        except FfsError as error:
            failure = error
        except BaseException as error:
            failure = FfsError(f"the {tier.name.lower()} store broke: {type(error).__name__}: {error}")
        return Results(
            np.full(len(jobs), Status.ERROR, dtype=np.uint8),
            np.zeros(len(jobs), dtype=np.int64),
            dict.fromkeys(range(len(jobs)), failure),
        )

    # --- the rest -------------------------------------------------------------------------------

    def flush(self, timeout_s: float = 60.0) -> None:
        """Blocks until everything that is to be stored is, and nothing moves. DeadlineExceeded."""
        limit = time.monotonic() + timeout_s
        with self._lock:
            self._wake()
            while not self._machine.idle():
                if time.monotonic() >= limit:
                    raise DeadlineExceeded(f"blocks were still moving after {timeout_s:g} s")
                self._news.wait(_NAP_S)

    def stats(self) -> TierStats:
        with self._lock:
            machine = self._machine
            return TierStats(
                counts=machine.counts_now(),
                cost=None if self._cost is None else self._cost.now(),
                host_used_bytes=machine.host.used,
                local_used_bytes=machine.local.used if machine.local is not None else 0,
                pinned_blocks=len(machine.pins),
                leases=len(machine.pins.leases),
                in_flight_window={tier.name.lower(): machine.windows[tier].size for tier in self._stores},
                worker_failures=self._workers.failures,
                workers=self._workers.alive(),
            )

    def _check_open(self) -> None:
        if self._closed:
            raise BadHandle("this tier manager is closed")

    def close(self) -> None:
        """Ends the threads, after the batches that are under way. What wasn't stored is lost (flush first).
        Repeatable. Streams that wait raise BadHandle."""
        with self._lock:
            self._closed = True
            self._workers.stop()
            self._wake()
        self._workers.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

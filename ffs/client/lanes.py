"""Lanes: what files read ahead and write behind on. docs/client.md, Data path.

A lane is a ring and its memory, which one file has for a while. There are only so many bytes of them in a
session; whoever gets none goes without. A thread looks after the requests in flight of files that do nothing
meanwhile, so that nothing waits for them at a server; it lives while there are such files.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ffs._native.iov import Iov
from ffs._native.ring import (
    OP_READ,
    OP_WRITE,
    SQE_ZERO_FILL,
    WAIT_NEEDS_CAPABILITY,
    WAIT_NEEDS_ROUTING,
    Ring,
)
from ffs.client.unraisable import tell
from ffs.errors import FfsError
from ffs.layout import file_chunk_key

if TYPE_CHECKING:
    from threading import Lock

    from ffs._native.ring import NativeClient
    from ffs.client.transfer import Extent, Upkeep

LANE_BYTES: Final = 8 << 20
"""The memory of a lane; four chunks where that is more."""

BUDGET_BYTES: Final = 128 << 20
"""All lanes of a session."""

ENTRIES: Final = 64
TURN_S: Final = 0.05
"""How often the thread looks."""

_MAX_IDLE: Final = 4

_log = logging.getLogger(__name__)

T = TypeVar("T")


def lane_bytes(chunk_size: int) -> int:
    """The memory of a lane for writing whole chunks of that size."""
    return max(LANE_BYTES, 4 * chunk_size)


class _PuttingOff:
    """Around the lock of a pool. A file that garbage collection closes there must wait until this thread is
    out: closing takes lanes and gives them back, so the thread would wait for the lock that it holds itself.

    Noted by thread, before the lock is taken and until it is released. If a signal raises in between, the
    thread's next turn puts right what is noted."""

    def __init__(self) -> None:
        self._later: dict[int, list[Callable[[], None]]] = {}

    def __enter__(self) -> None:
        self._later.setdefault(threading.get_ident(), [])

    def __exit__(self, *_: object) -> None:
        _do(self._later.pop(threading.get_ident(), []))

    def put_off(self, work: Callable[[], None]) -> bool:
        """Whether this thread is there; then `work` is done when it is out."""
        later = self._later.get(threading.get_ident())
        if later is None:
            return False
        later.append(work)
        return True

    def after_fork_in_child(self) -> None:
        """The other threads don't exist here; their numbers may come again."""
        self._later.clear()


_in_pool = _PuttingOff()


def _do(works: list[Callable[[], None]]) -> None:
    """What was put off. Its errors are told as of __del__, where it comes from."""
    while works:
        work = works.pop()
        try:
            work()
        except Exception as error:
            tell(error)


def _try(work: Callable[[T], None], of: T) -> bool:
    """In the thread, which the other lanes need whatever becomes of this one."""
    try:
        work(of)
    except Exception:
        _log.exception("while a lane was looked after")
        return False
    return True


class Tenant:
    """What has a lane: of one file, under the file's lock."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._tender = 0
        self._later: list[Callable[[], None]] = []

    def tend(self, now: float) -> None:
        """Receive what is complete, unless the file is in use just now; give the lane back if it isn't used.
        Never blocks on a server."""
        self._tender = threading.get_ident()  # before it holds the lock
        try:
            if self._lock.acquire(blocking=False):
                try:
                    self._look_after(now)
                except FfsError as error:  # the file's next call has it, or needs nothing of the lane
                    _log.info("a lane: %s", error)
                finally:
                    self._lock.release()
        finally:
            self._tender = 0
            _do(self._later)

    def hand_over(self, work: Callable[[], None]) -> bool:
        """For __del__: whether this thread holds the lock already, since garbage was collected while it
        tended, or the lock of a pool. Then `work` is done after that, and its error told as of __del__."""
        if self._tender != threading.get_ident():
            return _in_pool.put_off(work)
        self._later.append(work)
        return True

    def _look_after(self, now: float) -> None:
        """`tend`, under the lock."""
        raise NotImplementedError


class Lane:
    """One ring and its memory. The tenant's, under the tenant's lock."""

    def __init__(self, native: NativeClient, upkeep: Upkeep, size: int) -> None:
        self._ring = Ring(native, ENTRIES)
        self._upkeep = upkeep
        self.iov = Iov(size)
        self.memory: NDArray[np.uint8] = self.iov.numpy()
        self.flying = 0
        self._capability = 0

    def prepare(
        self, extent: Extent, chunk: int, low: int, size: int, start: int, userdata: int, *, writing: bool
    ) -> None:
        """Move `size` bytes of a chunk from `low` on, from or to byte `start` of the memory. `take` sends."""
        self._ring.prepare_one(
            OP_WRITE if writing else OP_READ,
            extent.placement.chain_of_index(chunk),
            extent.capability,
            extent.ino.to_bytes(8, "big") + file_chunk_key(chunk),
            low,
            size,
            self.iov[start : start + size],
            userdata,
            flags=0 if writing else SQE_ZERO_FILL,
            space_epoch=extent.epoch,
        )
        self.flying += 1
        self._capability = extent.capability

    def take(self, least: int) -> NDArray[Any]:
        """Sends what is prepared, waits for `least` completions, which may be fewer when something is needed
        for them. Blocking unless `least` is 0."""
        completions, events = self._ring.wait(least, None if least else 0.0)
        self.flying -= len(completions)
        if events & WAIT_NEEDS_CAPABILITY:
            self._upkeep.want_renewal(self._capability)
        if events & WAIT_NEEDS_ROUTING:
            self._upkeep.want_routing()
        return completions

    def close(self) -> None:
        """Blocks until no server can touch the memory any more."""
        self._ring.close()


class LanePool:
    """The lanes of one session. Thread-safe."""

    def __init__(self, native: NativeClient, upkeep: Upkeep) -> None:
        self._native = native
        self._upkeep = upkeep
        self._lock = threading.Lock()
        self._bytes = 0
        self._idle: list[Lane] = []
        self._draining: list[Lane] = []
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._news = threading.Event()

    def take(self, size: int, tenant: Tenant) -> Lane | None:
        """A quiet lane with `size` bytes of memory; None: all that there is for lanes is in use, or there is
        no thread to look after it."""
        stale: list[Lane] = []
        with _in_pool, self._lock:
            lane = next((lane for lane in reversed(self._idle) if len(lane.memory) == size), None)
            if lane is not None:
                self._idle.remove(lane)
            else:
                while self._idle and self._bytes + size > BUDGET_BYTES:
                    stale.append(self._idle.pop(0))
                    self._bytes -= len(stale[-1].memory)
                if self._closed or self._bytes + size > BUDGET_BYTES:
                    size = 0
                self._bytes += size
        for old in stale:
            old.close()
        if lane is None:
            if size == 0:
                return None
            try:
                lane = Lane(self._native, self._upkeep, size)
            except BaseException as error:
                with _in_pool, self._lock:
                    self._bytes -= size
                if isinstance(error, FfsError):
                    _log.info("no lane to read ahead or write behind: %s", error)
                    return None
                raise
        try:
            with _in_pool, self._lock:
                self._tenants.add(tenant)
                tended = self._see_to_thread()
        except BaseException:
            self.give(lane, tenant)
            raise
        if tended:
            return lane
        self.give(lane, tenant)
        return None

    def give(self, lane: Lane, tenant: Tenant) -> None:
        """Take back a lane; what is in flight on it is waited for elsewhere. Blocks (as Lane.close) only
        where no thread can be had to wait for it."""
        with _in_pool, self._lock:
            self._tenants.discard(tenant)
            drains = lane.flying > 0
            waits = drains and self._see_to_thread()
            if waits:
                self._draining.append(lane)
        if drains and not waits:
            self._give_up(lane)
        elif not drains:
            self._put_away(lane)

    def drop(self, lane: Lane, tenant: Tenant) -> None:
        """Take back a lane whose ring is in disorder or closed: it isn't used again. Blocking, bounded."""
        with _in_pool, self._lock:
            self._tenants.discard(tenant)
        self._give_up(lane)

    def close(self) -> None:
        """Close what isn't lent; what is lent is closed when it comes back. Blocks as Lane.close."""
        with _in_pool, self._lock:
            self._closed = True
            lanes = self._idle + self._draining
            self._idle, self._draining = [], []
            self._bytes -= sum(len(lane.memory) for lane in lanes)
        self._news.set()
        for lane in lanes:
            lane.close()

    def abandon(self) -> None:
        """In a child of fork, where a thread that doesn't exist may hold the lock."""
        self._lock = threading.Lock()
        self._news = threading.Event()
        _in_pool.after_fork_in_child()
        self.close()

    def _put_away(self, lane: Lane) -> None:
        with _in_pool, self._lock:
            keep = not self._closed and len(self._idle) < _MAX_IDLE
            if keep:
                self._idle.append(lane)
            else:
                self._bytes -= len(lane.memory)
        if not keep:
            lane.close()

    def _give_up(self, lane: Lane) -> None:
        with _in_pool, self._lock:
            self._bytes -= len(lane.memory)
        lane.close()

    # --- the thread -------------------------------------------------------------------------

    def _see_to_thread(self) -> bool:
        """Whether there is a thread: at a limit of threads, there may be none. Under the lock."""
        if self._closed:
            return False
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._tend, name="ffs-lanes", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                _log.info("no lane to read ahead or write behind: %s", error)
                return False
        return True

    def _tend(self) -> None:
        while True:
            self._news.wait(TURN_S)
            with _in_pool, self._lock:
                tenants = list(self._tenants)
                lanes, self._draining = self._draining, []
                if self._closed or not (tenants or lanes):
                    self._draining = lanes
                    self._thread = None
                    break
            for lane in lanes:
                _try(self._drain, lane)
            for tenant in tenants:
                if not _try(tenant.tend, time.monotonic()):
                    with _in_pool, self._lock:
                        self._tenants.discard(tenant)  # the file's next calls have it
            del tenants
        if self._closed:
            self.close()

    def _drain(self, lane: Lane) -> None:
        try:
            lane.take(0)
        except Exception as error:
            _log.warning("a ring is given up: %s", error)
            self._give_up(lane)
            return
        if lane.flying == 0:
            self._put_away(lane)
            return
        with _in_pool, self._lock:
            self._draining.append(lane)

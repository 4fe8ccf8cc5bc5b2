"""A KV space for an engine that must serve whatever becomes of it (docs/kv.md, When ffs is down).

`BlockStore` connects when it is first asked, answers by block, never raises for what happens to the cluster,
and has an answer by its deadline. What it can't learn counts as missing: the engine computes it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ffs.errors import FfsError, InvalidArgument, NoSpace, QuotaExceeded, TagMismatch
from ffs.kv.blocks import SharedBlocks
from ffs.kv.results import Results, Status
from ffs.kv.serving.breaker import Breaker, State
from ffs.kv.tally import Tally

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.kv.space import Space

BLOCK_BYTES = 16 << 20
_SAY_AGAIN_S = 30.0
_log = logging.getLogger("ffs.kv")

Keys = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Settings:
    """Of an adapter, from the engine's configuration. Times in seconds."""

    cluster: str | None = None
    """Address of the cluster; None: FFS_CLUSTER."""
    space: str = "/kv/engines"
    """Path of the KV space; made when it isn't there. Engines, models and layouts can share one."""
    table: str | None = None
    """Chain table of a space that is made; None: as its directory has it."""
    quota_bytes: int | None = None
    ttl_s: float | None = None
    transport: str = "auto"
    lookup_timeout_s: float = 1.0
    load_timeout_s: float = 5.0
    store_timeout_s: float = 10.0
    connect_timeout_s: float = 3.0
    failures: int = 3
    """Calls in a row without any answer until ffs is left alone for a while."""
    pause_s: float = 0.5
    """How long at first; it doubles up to `longest_pause_s`."""
    longest_pause_s: float = 10.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """InvalidArgument names a setting that there isn't."""
        known = [entry.name for entry in fields(cls)]
        wrong = sorted(set(given) - set(known))
        if wrong:
            raise InvalidArgument(f"{', '.join(wrong)}: no such setting; there are {', '.join(known)}")
        return cls(**given)


@dataclass(slots=True)
class Counts:
    """Blocks, and calls, since the store was made. `refused`: blocks that weren't asked for, ffs being
    down."""

    looked: int = 0
    found: int = 0
    loaded: int = 0
    missed: int = 0
    stored: int = 0
    there: int = 0
    failed: int = 0
    retried: int = 0
    refused: int = 0
    calls: int = 0


class BlockStore:
    """Any thread. Calls block until their deadline at most, a little more while connecting.

    `opened`: for tests and embedding, gives the space instead of connecting."""

    def __init__(self, settings: Settings, opened: Callable[[], Space] | None = None) -> None:
        self.settings = settings
        self.breaker = Breaker(settings.failures, settings.pause_s, settings.longest_pause_s)
        self._tally = Tally(Counts())
        self._opened = opened
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._client: Client | None = None
        self._space: Space | None = None
        self._closed = False
        self._said_s = -_SAY_AGAIN_S

    # --- calls ----------------------------------------------------------------------------------

    def look(self, keys: Keys) -> Flags:
        """Which blocks are there, as far as can be learnt in time."""
        results = self._call(
            len(keys), lambda space: space.exists_many(keys, timeout_s=self.settings.lookup_timeout_s)
        )
        found = _hits(results, len(keys))
        self._tally.add(looked=len(keys), found=int(found.sum()))
        return found

    def load(self, keys: Keys, blocks: SharedBlocks, *, unsure: bool = False) -> Flags:
        """Reads blocks, each of exactly its length: True, whole and verified, or else anything may lie in its
        memory. A block without an answer is asked for once more if there is time.

        `unsure`: the keys don't cover the length, so it is looked up first; another one is a miss."""
        began = time.monotonic()
        if unsure:
            sizes = self._call(
                len(keys), lambda space: space.exists_many(keys, timeout_s=self.settings.lookup_timeout_s)
            )
            same = _hits(sizes, len(keys))
            if sizes is not None:
                same &= sizes.lengths == blocks.lengths
            loaded = np.zeros(len(keys), dtype=np.bool_)
            positions = np.flatnonzero(same)
            if positions.size:
                loaded[positions] = self.load(keys[positions], _part(blocks, positions))
            return loaded
        done = self._load_once(keys, blocks, self.settings.load_timeout_s)
        whole: Flags = done == Status.HIT
        if whole.all():
            self._tally.add(loaded=len(keys))
            return whole
        doubtful = np.flatnonzero(done == Status.ERROR)
        left_s = began + self.settings.load_timeout_s - time.monotonic()
        if doubtful.size and left_s > 0.05 and self.breaker.state is State.CLOSED:
            self._tally.add(retried=int(doubtful.size))
            done[doubtful] = self._load_once(keys[doubtful], _part(blocks, doubtful), left_s)
        whole = done == Status.HIT
        self._tally.add(loaded=int(whole.sum()), missed=int((done == Status.MISS).sum()))
        return whole

    def _load_once(self, keys: Keys, blocks: SharedBlocks, timeout_s: float) -> npt.NDArray[np.uint8]:
        lengths = blocks.lengths
        if len(keys) and (lengths == lengths[0]).all():  # the usual case
            return self._load_size(keys, blocks, int(lengths[0]), timeout_s)
        status = np.full(len(keys), Status.ERROR, dtype=np.uint8)
        # One call for each size: a destination has no room for a longer block.
        for size in np.unique(lengths).tolist():
            same = np.flatnonzero(lengths == size)
            status[same] = self._load_size(keys[same], _part(blocks, same), size, timeout_s)
        return status

    def _load_size(
        self, keys: Keys, blocks: SharedBlocks, size: int, timeout_s: float
    ) -> npt.NDArray[np.uint8]:
        results = self._call(len(keys), _reading(keys, blocks, size, timeout_s))
        if results is None:
            return np.full(len(keys), Status.ERROR, dtype=np.uint8)
        other = (results.status == Status.HIT) & (results.lengths != size)
        if other.any():
            return np.where(other, np.uint8(Status.MISS), results.status)
        return results.status

    def store(self, keys: Keys, blocks: SharedBlocks) -> Flags:
        """Stores blocks that aren't there: True, durable, or else perhaps not there."""
        results = self._call(
            len(keys), lambda space: space.put_many(keys, blocks, timeout_s=self.settings.store_timeout_s)
        )
        if results is not None:
            count = results.count()
            self._tally.add(stored=count.stored, there=count.hits)
        return _hits(results, len(keys))

    def delete(self, keys: Keys) -> Flags:
        """Takes blocks away: True, gone."""
        results = self._call(
            len(keys), lambda space: space.delete(keys, timeout_s=self.settings.store_timeout_s)
        )
        if results is None:
            return np.zeros(len(keys), dtype=np.bool_)
        gone: Flags = results.status == Status.MISS
        return gone

    # --- health ---------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether ffs answers, as far as is known."""
        return not self._closed and self.breaker.state is State.CLOSED

    def figures(self) -> dict[str, int | str]:
        """Counts and the state of the breaker, for an engine's statistics."""
        return {**asdict(self.counts), "breaker": self.breaker.state.value, "opened": self.breaker.opened}

    @property
    def counts(self) -> Counts:
        """A copy."""
        return self._tally.now()

    def close(self) -> None:
        """No call may be under way. Repeatable."""
        self._closed = True
        with self._connecting:
            space, self._space = self._space, None
            client, self._client = self._client, None
        if space is not None:
            space.close()
        if client is not None:
            client.close()

    # --- inside ---------------------------------------------------------------------------------

    def _call(self, count: int, ask: Callable[[Space], Results]) -> Results | None:
        """None: no answer. Errors of the cluster end here, told in the log and the counts."""
        if not count:
            return None
        if self._closed or not self.breaker.allow():
            self._tally.add(refused=count)
            return None
        try:
            results = ask(self._open())
        except FfsError as error:
            self.breaker.failed()
            self._tell(error, count)
            return None
        except BaseException:
            self.breaker.failed()  # a mistake of the caller's: whoever tries next may
            raise
        # Full, or another block under the same half of a key: answers too.
        silent = [
            e for e in results.errors.values() if not isinstance(e, NoSpace | QuotaExceeded | TagMismatch)
        ]
        if len(silent) == count:
            self.breaker.failed()
        else:
            self.breaker.succeeded()
        if results.errors:
            self._tell(next(iter(results.errors.values())), len(results.errors))
        self._tally.add(calls=1)
        return results

    def _open(self) -> Space:
        space = self._space
        if space is not None:
            return space
        with self._connecting:
            if self._space is None:
                self._space = self._opened() if self._opened is not None else self._connect()
            return self._space

    def _connect(self) -> Space:
        import ffs
        from ffs.kv.space import Space

        settings = self.settings
        if self._client is None:
            self._client = ffs.connect(
                settings.cluster, transport=settings.transport, connect_timeout=settings.connect_timeout_s
            )
        return Space.create(
            self._client,
            settings.space,
            block_bytes=BLOCK_BYTES,
            table=settings.table,
            quota_bytes=settings.quota_bytes,
            ttl_s=settings.ttl_s,
            exist_ok=True,
        )

    def _tell(self, error: FfsError, count: int) -> None:
        """Counted always, logged now and then: a cluster that is down would fill the log."""
        self._tally.add(failed=count)
        now = time.monotonic()
        with self._lock:
            if now - self._said_s < _SAY_AGAIN_S:
                return
            self._said_s = now
        _log.warning(
            "%d blocks of %s without an answer, computed instead: %s", count, self.settings.space, error
        )


def _reading(keys: Keys, blocks: SharedBlocks, size: int, timeout_s: float) -> Callable[[Space], Results]:
    return lambda space: space.get_many(keys, blocks, offset=0, length=size, timeout_s=timeout_s)


def _hits(results: Results | None, count: int) -> Flags:
    if results is None:
        return np.zeros(count, dtype=np.bool_)
    return results.hits


def _part(blocks: SharedBlocks, positions: npt.NDArray[np.intp]) -> SharedBlocks:
    return SharedBlocks(
        blocks.handles[positions],
        blocks.offsets[positions],
        blocks.lengths[positions],
        blocks.keep,
        blocks.foreign,
    )

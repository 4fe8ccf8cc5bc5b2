"""The primary's lease: at most one metadata process manages the cluster. docs/control_plane.md, Primary.

The lease is a record that its holder changes (`beat`) again and again. Another process takes it over
when it has watched the record stand still for the lease's duration *on its own monotonic clock*; no
clock is ever compared with another, so clock steps mean nothing. A holder that ended on the same
machine is noticed at once by its process id and start time. Every acquisition raises the term, and
every transaction of the manager reads the lease record (`guard`), so one whose lease has been taken
can't change anything any more, however long it slept.

What a manager gives away outside the store - leases of storage nodes - it may only give while its own
lease surely holds (`may_grant`): up to 15/16 of the duration after it last *began* to renew it. The next one
takes over a whole duration after it first *saw* that renewal, so all that was given was given before that.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ffs.errors import FfsError, NotPrimary
from metadata.cluster.clock import ManagerClock, monotonic_s
from metadata.cluster.schema import LEASE, LeaseRecord, decode, encode, get_record
from metadata.kv.contract import Snapshot, Store, Transaction

log = logging.getLogger("ffs.meta.lease")

DURATION_MS: Final = 3000
RENEWALS: Final = 4  # in a duration


@dataclass(slots=True)
class Watch:
    """Judges a lease by change. Pure: the clock's reading comes as an argument."""

    seen: LeaseRecord | None = None
    since_s: float = 0.0

    def observe(self, record: LeaseRecord | None, now_s: float) -> bool:
        """Whether the lease may be taken. Call it again and again with what the store says."""
        if record is None or not record.holder:
            self.seen = record
            return True
        seen = self.seen
        if seen is None or (seen.term, seen.beat) != (record.term, record.beat):
            self.seen = record
            self.since_s = now_s
            return False
        return now_s - self.since_s >= record.duration_ms / 1000.0


def machine() -> str:
    """Where a process id means the same: boot id and pid name space."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def started_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is none (any more)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


class Lease:
    """This process's part in the election. One event loop."""

    def __init__(
        self,
        store: Store,
        clock: ManagerClock,
        address: str = "",
        *,
        duration_ms: int = DURATION_MS,
        grants_ms: int = 0,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        """`address` is where others reach this process's server; set it before `run`. `grants_ms`: how long
        the leases are that this manager gives to storage nodes."""
        self._store = store
        self._clock = clock
        self.address = address
        self._duration_ms = duration_ms
        self._grants_ms = grants_ms
        self._now_s = now_s
        self._holder = os.urandom(16)
        self._machine = machine()
        self._watch = Watch()
        self.term = 0  # ours while primary, else 0
        self.renewals = 0  # how often the record was written by us
        self.earlier_grants_ms = 0  # what managers before us gave may last so long from our takeover
        self._acquired_s = 0.0
        self._renewed_s = float("-inf")  # when the last renewal that succeeded began
        self._releasing = False
        self.primary_address = ""  # whoever it is, as last seen
        self._watchers: set[asyncio.Future[None]] = set()

    @property
    def primary(self) -> bool:
        return self.term != 0

    def require(self) -> None:
        """Raises NotPrimary, naming the one that is, unless this process is the primary."""
        if not self.primary:
            where = f": ask {self.primary_address}" if self.primary_address else " and none is known yet"
            raise NotPrimary(f"this metadata process isn't the manager{where}")

    def may_grant(self) -> bool:
        """Whether the lease surely holds now, so that no other process can have taken over yet."""
        holds_s = self._duration_ms / 1000.0 * 15 / 16
        return self.primary and not self._releasing and self._now_s() - self._renewed_s < holds_s

    async def guard(self, txn: Transaction) -> None:
        """In a manager's transaction: it can only commit while the lease is ours. Raises NotPrimary."""
        record = await get_record(txn, LeaseRecord, LEASE)
        if not self.primary or record is None or not self._ours(record):
            raise NotPrimary("the manager's lease has gone to another process")

    async def changed_from(self, term: int) -> int:
        """Waits while `term` is what it is; the term now (0: not the primary)."""
        while self.term == term:
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.add(watcher)
            try:
                await watcher
            finally:
                self._watchers.discard(watcher)
        return self.term

    def _set_term(self, term: int) -> None:
        self.term = term
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)

    async def run(self) -> None:
        """Acquires and renews until cancelled; then releases."""
        pause_s = self._duration_ms / 1000.0 / RENEWALS
        try:
            while True:
                try:
                    await self._step()
                except FfsError as error:
                    log.warning("lease: %s", error)
                await asyncio.sleep(pause_s if self.primary else pause_s / 2)
        finally:
            await asyncio.shield(self._release())

    async def _step(self) -> None:
        if self.primary:
            await self._renew()
            return

        async def read(snapshot: Snapshot) -> LeaseRecord | None:
            return await get_record(snapshot, LeaseRecord, LEASE)

        record = await self._store.read(read)
        if record is not None:
            self.primary_address = record.address if record.holder else ""
        if self._watch.observe(record, self._now_s()) or (record is not None and self._dead(record)):
            await self._acquire(record)

    def _ours(self, record: LeaseRecord) -> bool:
        return record.holder == self._holder and record.term == self.term

    def _dead(self, record: LeaseRecord) -> bool:
        """Whether the holder was a process of this machine that has ended."""
        return record.machine == self._machine and started_ticks(record.pid) != record.started

    async def _acquire(self, expected: LeaseRecord | None) -> None:
        term = 1 if expected is None else expected.term + 1
        self.earlier_grants_ms = 0 if expected is None else expected.grants_ms
        begun_s = self._acquired_s = self._now_s()

        async def body(txn: Transaction) -> bool:
            value = await txn.get(LEASE)
            found = None if value is None else decode(LeaseRecord, LEASE, value)
            if found is not None and found.holder == self._holder and found.term == term:
                return True  # an attempt whose result was unknown
            if found != expected:
                return False
            txn.set(LEASE, encode(self._record(term, 1)))
            await self._clock.take(txn)
            return True

        if await self._store.run(body, urgent=True):
            self._clock.stored()
            self._renewed(begun_s)
            self.primary_address = self.address
            self._set_term(term)
            log.info("this process is the manager now, term %d", term)

    async def _renew(self) -> None:
        begun_s = self._now_s()

        async def body(txn: Transaction) -> bool:
            record = await get_record(txn, LeaseRecord, LEASE)
            if record is None or not self._ours(record):
                return False
            txn.set(LEASE, encode(self._record(self.term, record.beat + 1)))
            await self._clock.extend(txn)
            return True

        if await self._store.run(body, urgent=True):
            self._clock.stored()
            self._renewed(begun_s)
        else:
            self._lose()

    def _renewed(self, begun_s: float) -> None:
        self.renewals += 1
        self._renewed_s = begun_s

    def _lose(self) -> None:
        log.warning("the manager's lease has gone to another process")
        self._watch = Watch()
        self._clock.follow()
        self._set_term(0)

    async def _release(self) -> None:
        if not self.primary:
            return
        self._releasing = True

        async def body(txn: Transaction) -> None:
            record = await get_record(txn, LeaseRecord, LEASE)
            if record is not None and self._ours(record):
                released = self._record(self.term, record.beat + 1, holder=b"")
                txn.set(LEASE, encode(released))

        try:
            await self._store.run(body, urgent=True, timeout_s=2.0)
        except FfsError as error:
            log.warning("the lease wasn't released, the next manager waits it out: %s", error)
        self._set_term(0)

    def _record(self, term: int, beat: int, holder: bytes | None = None) -> LeaseRecord:
        # What a manager before us gave, with another failure timeout, counts until it must be over.
        earlier_over = (self._now_s() - self._acquired_s) * 1000.0 > self.earlier_grants_ms
        return LeaseRecord(
            term=term,
            beat=beat,
            holder=self._holder if holder is None else holder,
            address=self.address,
            duration_ms=self._duration_ms,
            machine=self._machine,
            pid=os.getpid(),
            started=started_ticks(os.getpid()),
            grants_ms=self._grants_ms if earlier_over else max(self._grants_ms, self.earlier_grants_ms),
        )

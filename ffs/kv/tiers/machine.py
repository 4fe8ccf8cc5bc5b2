"""The tier manager's decisions: which block moves where and when, who waits for it, what goes for it. A state
machine without I/O, threads or clocks; manager.py does what it says under one lock (docs/kv_tiers.md).

Everything passes through a slot of the host's memory. A block in a slot is filling, here or leaving
(policy/residency.py). What leaves is stored below first, unless it is there already or isn't worth it; what
fails to be stored is never listed below. A wished block is loaded from the nearest tier that has it, in
order of need; a load that fails is tried once more, from the next tier, and is a miss then.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ffs.errors import BadHandle, FfsError, InvalidArgument
from ffs.kv.policy import Lease
from ffs.kv.results import Results, Status
from ffs.kv.tiers.below import Awaited, Below, Held
from ffs.kv.tiers.words import Job, Outcome, Share, Tier, Wish


class Machine(Below):
    """Not thread-safe. Slots are numbers from 0 to settings.slots - 1."""

    # --- new blocks -----------------------------------------------------------------------------

    def begin_put(self, key: bytes, nbytes: int) -> int | None:
        """A slot for a block that was computed, to be filled by the caller and ended by `end_put`. None: it
        is there already or on its way (nothing to do), or there is no room (counts.puts_refused)."""
        if not 0 < nbytes <= self.settings.block_bytes:
            raise InvalidArgument(
                f"a block of {nbytes} bytes: this cache takes 1 to {self.settings.block_bytes}"
            )
        if self.host.state(key) is not None:
            self.host.touch(key)
            return None
        if not self._reserve(key):
            self.counts.puts_refused += 1
            return None
        held = self._held[key] = Held(self._free.pop(), nbytes)
        awaited = self._awaited.get(key)
        if awaited is not None:  # lined up for a load that hasn't begun: who waits gets this one
            awaited.tier = Tier.HOST
        self.host.touch(key)
        self.counts.puts += 1
        return held.slot

    def end_put(self, key: bytes, well: bool) -> None:
        """The slot is filled; or it isn't, and nothing of the block is ever seen."""
        if not well:
            self.host.failed(key)
            self._free.append(self._held.pop(key).slot)
            awaited = self._awaited.pop(key, None)
            if awaited is not None and awaited.climbs:
                awaited.tier = Tier.LOCAL
                self._awaited[key] = awaited
                self._line_up(key, awaited, any(wish.urgent for wish in awaited.wishes))
                return
            for wish in awaited.wishes if awaited is not None else ():
                self._seek(wish, key)
            return
        awaited = self._awaited.pop(key, None)
        climbs = self._held[key].onward = awaited is not None and awaited.climbs
        self._arrive((key,))
        if climbs:
            self._saves[Tier.SPACE].setdefault(key)
        for wish in awaited.wishes if awaited is not None else ():
            self._answer(wish, key, Outcome.HIT, None)

    def _arrive(self, keys: Sequence[bytes]) -> None:
        self.host.filled_many(keys)
        self._consider_sharing(keys)
        self._trim()

    def _consider_sharing(self, keys: Sequence[bytes]) -> None:
        if self.settings.share is not Share.EAGER or Tier.SPACE not in self._saves:
            return
        for key in keys:
            if key in self._shared:
                continue
            held = self._held.get(key)
            if held is None or Tier.SPACE in held.given_up or Tier.SPACE in held.saves:
                continue
            if self._used_enough(key):
                self._saves[Tier.SPACE].setdefault(key)

    # --- wishes ---------------------------------------------------------------------------------

    def want(self, keys: Sequence[bytes], lease: Lease, *, urgent: bool = False, ahead: int = 0) -> Wish:
        """Blocks in order of need. `ahead`: see Wish; 0: all of them at once."""
        wish = Wish(keys, lease, urgent, ahead or len(keys), repeats=len(set(keys)) < len(keys))
        self._ask(wish)
        return wish

    def take(self, wish: Wish, count: int = 1) -> None:
        """The next positions of the wish are over, so many that were asked for: their blocks may go, and as
        many more are asked for."""
        if wish.live and not wish.lease.live:
            self.cancel(wish)
            raise BadHandle(
                "the lease of these blocks ended before they were used: the memory may be others'"
            )
        assert wish.taken + count <= wish.asked, "taken before it was asked for"
        over = wish.keys[wish.taken : wish.taken + count]
        wish.taken += count
        if wish.repeats:
            rest = set(wish.keys[wish.taken : wish.asked])
            over = [key for key in over if key not in rest]
        wish.lease.unpin(over)
        for key in over:
            wish.outcomes.pop(key, None)  # a later position of it is asked for anew
        self._ask(wish)

    def cancel(self, wish: Wish) -> None:
        """Nobody waits for it any more. What is on its way arrives all the same, unpinned."""
        wish.live = False
        wish.lease.release()
        for key in wish.keys[: wish.asked]:
            awaited = self._awaited.get(key)
            if awaited is None or wish not in awaited.wishes:
                continue
            awaited.wishes.remove(wish)
            idle = not awaited.wishes and not awaited.climbs and awaited.job is None
            if idle and self.host.state(key) is None:
                del self._awaited[key]  # its entry in the line is passed over

    def _ask(self, wish: Wish) -> None:
        keys = wish.keys[wish.asked : min(len(wish.keys), wish.taken + wish.ahead)]
        if not wish.live or not keys:
            return
        wish.asked += len(keys)
        self.counts.wanted += len(keys)
        wish.lease.pin(keys)
        absent = []
        for key, there in zip(keys, self.host.touch_many(keys), strict=True):
            if there:
                self.counts.host_hits += 1
                self._consider_sharing((key,))
                wish.outcomes[key] = Outcome.HIT
            else:
                absent.append(key)
        if self.local is not None:
            self.local.touch_many(absent)
        for key in absent:
            self._seek(wish, key)

    def _seek(self, wish: Wish, key: bytes) -> None:
        awaited = self._awaited.get(key)
        if awaited is not None:
            awaited.wishes.append(wish)
            if wish.urgent and awaited.job is None and awaited.tier is not Tier.HOST:
                self._line_up(key, awaited, True)
            return
        if self.host.state(key) is not None:  # somebody is filling it just now
            self._awaited[key] = Awaited([wish], Tier.HOST)
            return
        tier = self._source(key)
        if tier is None:
            self._answer(wish, key, Outcome.MISS, None)
        else:
            awaited = self._awaited[key] = Awaited([wish], tier)
            self._line_up(key, awaited, wish.urgent)

    def _source(self, key: bytes) -> Tier | None:
        if self.local is not None and self.local.has(key):
            return Tier.LOCAL
        return Tier.SPACE if Tier.SPACE in self._lines else None

    def _answer(self, wish: Wish, key: bytes, outcome: Outcome, error: FfsError | None) -> None:
        wish.outcomes[key] = outcome
        if error is not None:
            wish.errors[key] = error
        if outcome is not Outcome.HIT:
            wish.lease.unpin([key])
            if outcome is Outcome.MISS:
                self.counts.misses += 1
            else:
                self.counts.failed += 1

    # --- loads ----------------------------------------------------------------------------------

    def loads(self, tier: Tier, most: int, now: float) -> list[Job]:
        """The next loads from that tier, in order of need: as many as its window lets and slots are free."""
        line, jobs = self._lines[tier], list[Job]()
        if not self.loads_due(tier, most):
            return jobs
        if not self.breakers[tier].closed(now):
            self._refuse(tier)
            return jobs
        most = min(most, self.windows[tier].size - self._flying[tier])
        while line and len(jobs) < most:
            key = line[0][2]
            awaited = self._awaited.get(key)
            if awaited is None or awaited.tier != tier or awaited.job is not None:
                heapq.heappop(line)
                continue
            if not self._reserve(key):
                break
            heapq.heappop(line)
            self._held[key] = Held(self._free.pop(), self.settings.block_bytes)
            job = awaited.job = Job(
                key, tier, self._held[key].slot, self.settings.block_bytes, load=True, second=awaited.tried
            )
            jobs.append(job)
        self._flying[tier] += len(jobs)
        counts = self.counts.of(tier)
        counts.most_loads_in_flight = max(counts.most_loads_in_flight, self._flying[tier])
        return jobs

    def loads_due(self, tier: Tier, most: int) -> bool:
        """Whether it is time for a batch of `most`: there are so many, or one is urgent, or nothing is on its
        way. A reader asks for one block more with each that it takes; batches of one would cost more than
        the blocks."""
        line = self._lines[tier]
        return bool(line) and (len(line) >= most or line[0][0] == 0 or not self._flying[tier])

    def at_once(self, tier: Tier) -> int:
        """How many loads should make a batch, by who waits for the first of them: a reader that is ahead
        reads one half while the other is on its way. What is urgent is needed whole, and few loads at a time
        leave a store idle: two batches make up what it has in flight at least."""
        line = self._lines[tier]
        awaited = self._awaited.get(line[0][2]) if line and line[0][0] else None
        if awaited is None or not awaited.wishes:
            return self.settings.most_in_flight
        return max(1, self.settings.least_in_flight // 2, awaited.wishes[0].ahead // 2)

    def _refuse(self, tier: Tier) -> None:
        """The store rests: who waits for it computes instead, now."""
        line, self._lines[tier] = self._lines[tier], []
        for _, _, key in line:
            awaited = self._awaited.get(key)
            if awaited is None or awaited.tier != tier or awaited.job is not None:
                continue
            if tier is Tier.LOCAL and Tier.SPACE in self._lines and awaited.wishes:
                awaited.tier = Tier.SPACE
                self._line_up(key, awaited, True)
                continue
            del self._awaited[key]
            self._end_climb(key)
            error = FfsError(f"the {tier.name.lower()} tier failed too often lately and rests")
            for wish in awaited.wishes:
                self._answer(wish, key, Outcome.FAILED, error)

    def loads_ended(self, jobs: Sequence[Job], results: Results, now: float, latency_s: float) -> None:
        """What became of a batch of loads from one tier, which took so long."""
        tier = jobs[0].tier
        counts = self.counts.of(tier)
        self.windows[tier].ended(latency_s, self._flying[tier], len(jobs))
        self._flying[tier] -= len(jobs)
        came, climbing = list[bytes](), list[bytes]()
        for job, nbytes, hit in zip(
            jobs, results.lengths.tolist(), (results.status == Status.HIT).tolist(), strict=True
        ):
            if not hit:
                continue
            key = job.key
            awaited, held = self._awaited.pop(key), self._held[key]
            assert awaited.job is job
            held.nbytes = nbytes
            held.onward = awaited.climbs
            counts.load_bytes += nbytes
            came.append(key)
            if awaited.climbs:
                climbing.append(key)
            for wish in awaited.wishes:
                wish.outcomes[key] = Outcome.HIT
        if came:
            counts.loads += len(came)
            if tier is Tier.SPACE:
                self.note_shared(came)
            self._arrive(came)
            for key in climbing:
                self._saves[Tier.SPACE].setdefault(key)
        before = -1
        for at in np.flatnonzero(results.status != Status.HIT).tolist() if len(came) < len(jobs) else ():
            if at > before + 1:
                self.breakers[tier].well()
            before = at
            self._load_failed(jobs[at], results[at], results.errors.get(at), now)
        if before + 1 < len(jobs):
            self.breakers[tier].well()

    def _load_failed(self, job: Job, status: Status, error: FfsError | None, now: float) -> None:
        tier, key = job.tier, job.key
        counts = self.counts.of(tier)
        awaited = self._awaited[key]
        assert awaited.job is job
        self.host.failed(key)
        self._free.append(self._held.pop(key).slot)
        awaited.job = None
        if status is Status.MISS:
            self.breakers[tier].well()
            counts.misses += 1
        else:
            self.breakers[tier].failed(now)
            counts.load_errors += 1
        if tier is Tier.LOCAL:
            self._forget_local(key)  # it isn't there, or can't be trusted
        else:
            self._shared.pop(key, None)
        again = self._source(key) if status is Status.ERROR or tier is Tier.LOCAL else None
        if again is not None and not (tier is Tier.SPACE and awaited.tried) and awaited.wishes:
            awaited.tried = awaited.tried or status is Status.ERROR
            awaited.tier = again
            counts.retries += 1
            self._line_up(key, awaited, True)
            return
        del self._awaited[key]
        outcome = Outcome.MISS if status is Status.MISS else Outcome.FAILED
        for wish in awaited.wishes:
            self._answer(wish, key, outcome, error)

    # --- the rest -------------------------------------------------------------------------------

    def sweep(self, now: float) -> int:
        """Releases leases that were lost or are late; how many."""
        return self.pins.sweep(now)

    def forget(self, key: bytes) -> None:
        """The block ceases to exist in memory and in the local store, if nothing holds or moves it."""
        held = self._held.get(key)
        if held is not None and not held.saves and key not in self.pins and self.host.has(key):
            for line in self._saves.values():
                line.pop(key, None)
            self.host.drop(key)
            self._free.append(self._held.pop(key).slot)
        self._forget_local(key)
        self._shared.pop(key, None)

    def check(self) -> None:
        """For tests: every slot is free or held once, and what is listed agrees."""
        slots = [*self._free, *(held.slot for held in self._held.values())]
        assert sorted(slots) == list(range(self.settings.slots))
        self.host.check()
        assert len(self.host) == len(self._held)
        if self.local is not None:
            self.local.check()
        for tier in self._tiers:
            assert 0 <= self._flying[tier] <= self.settings.most_in_flight

"""The tier manager's decisions against stores that are sets, with faults at each stage (K1, K5, K12, K18)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ffs import errors
from ffs.kv.keys import Identity, hash_tokens
from ffs.kv.policy.residency import State
from ffs.kv.results import Results, Status
from ffs.kv.tiers.machine import Machine
from ffs.kv.tiers.pace import Breaker, Window
from ffs.kv.tiers.words import Job, Outcome, Settings, Share, Tier, Wish

KEYS = hash_tokens(Identity("machine", block_tokens=1), range(64))
BLOCK = 4096


class World:
    """A machine, its slots' content, and stores as sets of keys. Each step moves one job."""

    def __init__(self, config: Settings, tiers: tuple[Tier, ...] = (Tier.LOCAL, Tier.SPACE)) -> None:
        self.machine = Machine(config, tiers)
        self.memory: dict[int, bytes] = {}
        self.stores: dict[Tier, set[bytes]] = {tier: set() for tier in tiers}
        self.flying: list[Job] = []
        self.filling: dict[bytes, int] = {}
        self.now = 0.0

    def put(self, key: bytes, well: bool = True) -> bool:
        return self.begin_put(key) and self.end_put(key, well)

    def begin_put(self, key: bytes) -> bool:
        slot = self.machine.begin_put(key, BLOCK)
        if slot is not None:
            self.memory[slot] = b"half of it"
            self.filling[key] = slot
        return slot is not None

    def end_put(self, key: bytes, well: bool = True) -> bool:
        slot = self.filling.pop(key)
        if well:
            self.memory[slot] = key
        self.machine.end_put(key, well)
        return True

    def start(self, tier: Tier, most: int = 4) -> None:
        for job in self.machine.loads(tier, most, self.now):
            self.memory[job.slot] = b"on its way"
            self.flying.append(job)
        self.flying += self.machine.saves(tier, most, self.now)
        if tier is Tier.LOCAL:
            self.stores[tier] -= set(self.machine.removals(most, self.now))

    def end(self, job: Job, fault: str = "") -> None:
        if job.load:
            self.end_loads([job], [fault])
            return
        self.flying.remove(job)
        self.now += 0.001
        assert self.memory[job.slot] == job.key, "a slot changed while it was being stored"
        if fault != "lost":
            self.stores[job.tier].add(job.key)  # an error may leave it stored, or not
        self.machine.save_ended(job, not fault, self.now)

    def end_loads(self, jobs: Sequence[Job], faults: Sequence[str]) -> None:
        """One batch, of one tier."""
        self.now += 0.001
        status, failures = [], {}
        for at, (job, fault) in enumerate(zip(jobs, faults, strict=True)):
            self.flying.remove(job)
            there = job.key in self.stores[job.tier]
            status.append(Status.ERROR if fault else Status.HIT if there else Status.MISS)
            if fault:
                failures[at] = errors.DeadlineExceeded("as the test wants it")
            elif there:
                self.memory[job.slot] = job.key
        lengths = [BLOCK if one is Status.HIT else 0 for one in status]
        results = Results(np.array(status, dtype=np.uint8), np.array(lengths), failures)
        self.machine.loads_ended(jobs, results, self.now, 0.001)

    def drain(self) -> None:
        for _ in range(5000):
            if self.machine.idle():
                return
            for tier in self.stores:
                self.start(tier)
            for job in list(self.flying):
                self.end(job)
        raise AssertionError("it never comes to rest")

    def check(self) -> None:
        self.machine.check()
        for key in KEYS:
            if self.machine.host.has(key):
                assert self.memory[self.machine.slot(key)[0]] == key

    def want(self, *keys: bytes, ahead: int = 0, urgent: bool = False) -> Wish:
        return self.machine.want(keys, self.machine.pins.lease(), ahead=ahead, urgent=urgent)


def small(slots: int = 8, **options: object) -> Settings:
    given = {"local_bytes": 16 * BLOCK, "least_in_flight": 4, "most_in_flight": 16, **options}
    return Settings(block_bytes=BLOCK, host_bytes=slots * BLOCK, **given)  # type: ignore[arg-type]


# --- one thing each -------------------------------------------------------------------------------------


def test_a_new_block_is_shared_and_comes_back_after_every_tier_above_was_lost() -> None:
    """K27, as far as one process goes."""
    world = World(small())
    for key in KEYS[:30]:
        assert world.put(key)
        world.drain()
    assert world.stores[Tier.SPACE] == set(KEYS[:30])
    world.check()
    after = World(small())
    after.stores[Tier.SPACE] = world.stores[Tier.SPACE]
    for begin in range(0, 30, 5):
        wish = after.want(*KEYS[begin : begin + 5])
        after.drain()
        assert list(wish.outcomes.values()) == [Outcome.HIT] * 5
        wish.lease.release()
    assert after.machine.counts.space.loads == 30


@pytest.mark.parametrize("well", [True, False])
@pytest.mark.parametrize("urgent", [True, False])
def test_a_block_that_is_put_while_a_load_of_it_is_in_line(well: bool, urgent: bool) -> None:
    """Two requests: one waits for what the other computes just then. The load that hasn't begun is left out;
    who waits gets what was put, or the load after all if nothing came of that."""
    world = World(small())
    world.stores[Tier.SPACE] = {KEYS[0], KEYS[1]}
    wish = world.want(KEYS[0], KEYS[1], urgent=urgent)
    assert world.begin_put(KEYS[0])
    other = world.want(KEYS[0], urgent=True)
    world.start(Tier.SPACE)
    assert [job.key for job in world.flying] == [KEYS[1]]
    assert KEYS[0] not in wish.outcomes
    world.end_put(KEYS[0], well)
    assert (KEYS[0] in wish.outcomes) == well
    world.drain()
    assert list(wish.outcomes.values()) == [Outcome.HIT] * 2
    assert other.outcomes == {KEYS[0]: Outcome.HIT}
    assert world.machine.counts.space.loads == (1 if well else 2)
    world.check()


def test_a_failed_store_is_never_listed() -> None:
    """K1: fails mid-write, whatever is left on the device; nobody finds it there."""
    world = World(small(slots=4, share=Share.NEVER))
    for key in KEYS[:10]:
        world.put(key)
        for _ in range(10):
            world.start(Tier.LOCAL)
            for job in list(world.flying):
                world.end(job, "half")
    world.check()
    assert world.machine.counts.local.store_errors > 0
    gone = [key for key in KEYS[:10] if world.machine.where(key) is None]
    assert gone
    wish = world.want(*gone)
    world.drain()
    assert set(wish.outcomes.values()) == {Outcome.MISS}
    assert not world.stores[Tier.LOCAL] & set(gone)  # what the failed stores left is taken away


@pytest.mark.parametrize("first", ["error", ""])
def test_one_retry_then_the_block_is_reported(first: str) -> None:
    """K5, K12: never treated as loaded, never retried for ever."""
    world = World(small(), (Tier.SPACE,))
    world.stores[Tier.SPACE] = {KEYS[0], KEYS[1]}
    wish = world.want(KEYS[0], KEYS[1], KEYS[2])
    tries = 0
    while not world.machine.idle():
        world.start(Tier.SPACE)
        for job in list(world.flying):
            tries += job.key == KEYS[0]
            world.end(job, "error" if job.key == KEYS[0] and (first or job.second) else "")
    if first:
        assert tries == 2
        assert wish.outcomes == {KEYS[0]: Outcome.FAILED, KEYS[1]: Outcome.HIT, KEYS[2]: Outcome.MISS}
        assert isinstance(wish.errors[KEYS[0]], errors.DeadlineExceeded)
    else:
        assert tries == 1
        assert wish.outcomes[KEYS[0]] is Outcome.HIT
    world.check()
    wish.lease.release()
    assert len(world.machine.pins) == 0


def test_a_local_copy_that_fails_is_replaced_by_the_spaces() -> None:
    world = World(small(slots=2))
    world.put(KEYS[0])
    world.drain()
    for key in KEYS[1:6]:
        world.put(key)
        world.drain()
    assert world.machine.where(KEYS[0]) is Tier.LOCAL
    wish = world.want(KEYS[0])
    world.start(Tier.LOCAL)
    world.end(next(job for job in world.flying if job.load), "damaged")
    world.drain()
    assert wish.outcomes[KEYS[0]] is Outcome.HIT
    assert world.machine.counts.space.loads == 1
    assert KEYS[0] not in world.stores[Tier.LOCAL]


def test_demotion_takes_what_leaves_the_local_store_to_the_space() -> None:
    world = World(small(slots=4, share=Share.DEMOTE, local_bytes=8 * BLOCK, admission=False))
    for key in KEYS[:40]:
        assert world.put(key)
        world.drain()
    world.check()
    assert len(world.stores[Tier.LOCAL]) <= 8
    assert all(world.machine.where(key) is not None for key in KEYS[:40])
    assert 20 <= len(world.stores[Tier.SPACE]) < 40


def test_loads_come_in_order_of_need_and_urgent_ones_first() -> None:
    world = World(small(slots=16), (Tier.SPACE,))
    world.want(*KEYS[:6])
    world.want(KEYS[20], urgent=True)
    jobs = world.machine.loads(Tier.SPACE, 4, 0.0)
    assert [job.key for job in jobs] == [KEYS[20], *KEYS[:3]]


def test_the_window_bounds_loads_in_flight_and_stores_give_way() -> None:
    """K24: while anybody waits for a load, few stores are started."""
    world = World(small(slots=40, stores_beside_loads=1, stores_in_flight=6), (Tier.SPACE,))
    for key in KEYS[:8]:
        world.put(key)
    world.want(*KEYS[20:40])
    assert len(world.machine.loads(Tier.SPACE, 100, 0.0)) == 4
    assert len(world.machine.loads(Tier.SPACE, 100, 0.0)) == 0
    assert len(world.machine.saves(Tier.SPACE, 100, 0.0)) == 1
    quiet = World(small(slots=40, stores_beside_loads=1, stores_in_flight=6), (Tier.SPACE,))
    for key in KEYS[:8]:
        quiet.put(key)
    assert len(quiet.machine.saves(Tier.SPACE, 100, 0.0)) == 6


def test_a_wish_holds_no_more_than_it_is_ahead() -> None:
    world = World(small(slots=8), (Tier.SPACE,))
    world.stores[Tier.SPACE] = set(KEYS)
    wish = world.want(*KEYS[:40], ahead=3)
    for at in range(40):
        world.drain()
        assert len(world.machine.pins) == min(3, 40 - at)
        assert wish.outcomes[KEYS[at]] is Outcome.HIT
        world.machine.take(wish)
    assert len(world.machine.pins) == 0


def test_positions_are_taken_several_at_once() -> None:
    """Also of blocks that come again within: those stay pinned for the later position."""
    world = World(small(slots=16), (Tier.SPACE,))
    world.stores[Tier.SPACE] = set(KEYS)
    order = [*KEYS[:4], KEYS[1], *KEYS[4:10]]
    wish = world.want(*order, ahead=6)
    world.drain()
    assert set(wish.outcomes) == set(KEYS[:5])
    world.machine.take(wish, 3)
    assert KEYS[1] in world.machine.pins
    assert KEYS[0] not in world.machine.pins
    assert (wish.taken, wish.asked) == (3, 9)
    world.drain()
    assert set(wish.outcomes) == {KEYS[1], *KEYS[3:8]}
    with pytest.raises(AssertionError, match="taken before"):
        world.machine.take(wish, 7)
    world.machine.take(wish, 6)
    world.drain()
    world.machine.take(wish, 2)
    assert len(world.machine.pins) == 0
    assert wish.outcomes == {}


def test_a_block_that_comes_again_later_in_a_wish_is_waited_for_again() -> None:
    """It had gone meanwhile: what was said of it then is no answer any more (K2)."""
    world = World(small(slots=2, policy="lru", admission=False), (Tier.SPACE,))
    world.stores[Tier.SPACE] = set(KEYS)
    wish = world.want(*KEYS[:4], KEYS[0], ahead=1)
    for key in KEYS[:4]:
        world.drain()
        assert wish.outcomes[key] is Outcome.HIT
        world.machine.take(wish)
    assert not world.machine.host.has(KEYS[0])
    assert KEYS[0] not in wish.outcomes
    world.start(Tier.SPACE)
    assert KEYS[0] not in wish.outcomes
    world.drain()
    assert wish.outcomes[KEYS[0]] is Outcome.HIT
    assert world.memory[world.machine.slot(KEYS[0])[0]] == KEYS[0]


def test_a_cancelled_wish_leaves_no_pin_and_its_loads_still_arrive() -> None:
    world = World(small(), (Tier.SPACE,))
    world.stores[Tier.SPACE] = set(KEYS)
    wish = world.want(*KEYS[:8])
    world.start(Tier.SPACE)
    world.machine.cancel(wish)
    world.drain()
    assert len(world.machine.pins) == 0
    assert wish.outcomes == {}
    assert sum(world.machine.host.has(key) for key in KEYS[:8]) == 4
    assert world.machine.counts.space.loads == 4


def test_a_lease_that_ended_gives_no_memory_away() -> None:
    world = World(small(), (Tier.SPACE,))
    world.stores[Tier.SPACE] = set(KEYS)
    wish = world.machine.want(KEYS[:2], world.machine.pins.lease(deadline=1.0))
    world.drain()
    world.machine.sweep(2.0)
    with pytest.raises(errors.BadHandle, match="memory may be others'"):
        world.machine.take(wish)


def test_a_store_that_fails_again_and_again_rests_and_nobody_waits_for_it() -> None:
    world = World(small(slots=32), (Tier.SPACE,))
    world.stores[Tier.SPACE] = set(KEYS)
    wish = world.want(*KEYS[:20])
    for _ in range(10):
        world.start(Tier.SPACE)
        for job in list(world.flying):
            world.end(job, "error")
    assert set(wish.outcomes.values()) == {Outcome.FAILED}
    assert world.machine.counts.space.load_errors < 20
    again = world.want(*KEYS[20:22])
    world.start(Tier.SPACE)
    assert "rests" in str(again.errors[KEYS[20]])
    world.now += 60
    third = world.want(*KEYS[22:24])
    world.drain()
    assert set(third.outcomes.values()) == {Outcome.HIT}


@pytest.mark.parametrize(
    ("faults", "rests"), [("x" * 8, True), ("x" * 7 + ".", False), ("xxxx.xxxxxx", False)]
)
def test_errors_in_a_row_are_counted_within_a_batch_too(faults: str, rests: bool) -> None:
    world = World(small(slots=32), (Tier.SPACE,))
    world.stores[Tier.SPACE] = set(KEYS)
    world.want(*KEYS[: len(faults)])
    world.machine.windows[Tier.SPACE] = Window(16, 16)
    world.start(Tier.SPACE, len(faults))
    world.end_loads(list(world.flying), [fault.strip(".") for fault in faults])
    assert world.machine.breakers[Tier.SPACE].closed(world.now) != rests
    world.check()


def test_a_batch_is_half_of_what_its_reader_is_ahead() -> None:
    """So one half is read while the other comes; but what is urgent comes whole, and batches aren't tiny."""
    world = World(small(slots=60), (Tier.SPACE,))
    most = world.machine.settings.most_in_flight
    assert world.machine.at_once(Tier.SPACE) == most
    wish = world.want(*KEYS[:60], ahead=40)
    assert world.machine.at_once(Tier.SPACE) == 20
    world.machine.cancel(wish)
    assert world.machine.at_once(Tier.SPACE) == most
    world.want(*KEYS[:60], ahead=3)
    assert world.machine.at_once(Tier.SPACE) == world.machine.settings.least_in_flight // 2 == 2
    world.want(*KEYS[60:63], urgent=True)
    assert world.machine.at_once(Tier.SPACE) == most


def test_pinned_memory_refuses_puts_and_says_so() -> None:
    world = World(small(slots=2), (Tier.SPACE,))
    world.stores[Tier.SPACE] = set(KEYS)
    wish = world.want(*KEYS[:2])
    world.drain()
    assert not world.put(KEYS[5])
    assert world.machine.counts.puts_refused == 1
    wish.lease.release()
    assert world.put(KEYS[5])


def test_a_block_that_is_being_filled_is_waited_for() -> None:
    world = World(small(), (Tier.SPACE,))
    world.stores[Tier.SPACE] = {KEYS[1]}
    for well in (True, False):
        key = KEYS[0] if well else KEYS[1]
        slot = world.machine.begin_put(key, BLOCK)
        assert slot is not None
        wish = world.want(key)
        assert wish.outcomes == {}
        world.memory[slot] = key
        world.machine.end_put(key, well)
        world.drain()
        assert wish.outcomes[key] is Outcome.HIT  # the second from the space
        world.check()


@pytest.mark.parametrize("bad", [{"policy": "x"}, {"host_bytes": 10}, {"least_in_flight": 0}])
def test_settings_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(errors.InvalidArgument):
        Settings(**{"block_bytes": BLOCK, "host_bytes": BLOCK, **bad})  # type: ignore[arg-type]


# --- pace -----------------------------------------------------------------------------------------------


def fly(window: Window, base_s: float, at_once: int, rounds: int) -> None:
    """A store that does `at_once` loads in base_s, and lets others stand in line."""
    for _ in range(rounds):
        flying = window.size
        window.ended(base_s * max(1.0, flying / at_once), flying)


def test_the_window_grows_to_what_the_store_takes_and_shrinks_when_it_takes_less() -> None:
    window = Window(16, 256)
    fly(window, 0.01, 120, 40000)
    assert 110 < window.size < 150
    fly(window, 0.01, 20, 40000)
    assert 16 <= window.size < 45
    fly(window, 0.01, 4, 40000)
    assert 16 <= window.size < 33


def test_the_breaker_opens_tries_and_closes() -> None:
    breaker = Breaker(most=3, first_s=1.0, last_s=3.0)
    for at in (0.0, 0.1):
        breaker.failed(at)
        assert breaker.closed(at)
    breaker.failed(0.2)
    assert not breaker.closed(1.1)
    assert breaker.closed(1.2)
    breaker.failed(1.3)  # the try
    assert not breaker.closed(3.2)
    assert breaker.closed(3.3)
    breaker.failed(3.4)
    assert not breaker.closed(6.3)
    breaker.well()
    assert breaker.closed(6.3)


def test_a_block_whose_use_has_faded_is_stored_all_the_same() -> None:
    """All blocks are, unless fewer are asked for: that one wasn't used for long is why it leaves."""
    world = World(small(share=Share.DEMOTE), (Tier.SPACE,))
    assert world.put(KEYS[0])
    for number in range(70_000):  # what is wanted and absent is a use, too
        world.machine.host.touch(number.to_bytes(32, "little"))
    for key in KEYS[1:20]:
        while not world.put(key):
            world.drain()
    world.drain()
    assert not world.machine.host.has(KEYS[0])
    assert KEYS[0] in world.stores[Tier.SPACE]
    assert world.machine.counts.dropped == 0


# --- everything at once ---------------------------------------------------------------------------------


class TierMachine(RuleBasedStateMachine):
    """Any interleaving of puts, wishes, loads, stores, faults and ends of requests. No block is ever
    another's, no slot is lost, every wish is answered in the end, and no pin is left."""

    @initialize(
        share=st.sampled_from(list(Share)),
        policy=st.sampled_from(["adaptive", "lru", "s3-fifo"]),
        tiers=st.sampled_from([(Tier.LOCAL, Tier.SPACE), (Tier.SPACE,), (Tier.LOCAL,)]),
        admission=st.booleans(),
        uses=st.sampled_from([1, 2]),
    )
    def start(self, share: Share, policy: str, tiers: tuple[Tier, ...], admission: bool, uses: int) -> None:
        config = small(
            share=share, policy=policy, admission=admission, share_uses=uses, local_bytes=10 * BLOCK
        )
        self.world = World(config, tiers)
        self.tiers = tiers
        self.wishes: list[Wish] = []

    @rule(at=st.integers(0, 23), well=st.booleans())
    def put(self, at: int, well: bool) -> None:
        if KEYS[at] not in self.world.filling:
            self.world.put(KEYS[at], well)

    @rule(at=st.integers(0, 23))
    def begin_put(self, at: int) -> None:
        if len(self.world.filling) < 2:
            self.world.begin_put(KEYS[at])

    @rule(at=st.integers(0, 1), well=st.booleans())
    def end_put(self, at: int, well: bool) -> None:
        if at < len(self.world.filling):
            self.world.end_put(list(self.world.filling)[at], well)

    @rule(draw=st.randoms(use_true_random=False), urgent=st.booleans(), ahead=st.integers(1, 3))
    def want(self, draw: random.Random, urgent: bool, ahead: int) -> None:
        if len(self.wishes) < 2:  # three blocks each at most: the host's eight slots hold them
            keys = [draw.choice(KEYS[:24]) for _ in range(draw.randrange(1, 7))]
            self.wishes.append(self.world.want(*keys, urgent=urgent, ahead=ahead))

    @rule(which=st.integers(0, 1))
    def take(self, which: int) -> None:
        if which < len(self.wishes):
            wish = self.wishes[which]
            if wish.taken < len(wish.keys) and wish.keys[wish.taken] in wish.outcomes:
                key = wish.keys[wish.taken]
                if wish.outcomes[key] is Outcome.HIT:
                    assert self.world.memory[self.world.machine.slot(key)[0]] == key
                self.world.machine.take(wish)

    @rule(which=st.integers(0, 1), how=st.sampled_from(["cancel", "release"]))
    def end_wish(self, which: int, how: str) -> None:
        if which < len(self.wishes):
            self.world.machine.cancel(self.wishes.pop(which))

    @rule(tier=st.sampled_from(list(Tier)[1:]), most=st.integers(1, 4))
    def start_io(self, tier: Tier, most: int) -> None:
        if tier in self.tiers:
            self.world.start(tier, most)

    @rule(at=st.integers(0, 20), fault=st.sampled_from(["", "", "", "half", "lost"]))
    def end_io(self, at: int, fault: str) -> None:
        if at < len(self.world.flying):
            self.world.end(self.world.flying[at], fault)

    @rule(
        tier=st.sampled_from(list(Tier)[1:]),
        faults=st.lists(st.sampled_from(["", "", "", "half"]), min_size=2, max_size=8),
    )
    def end_loads(self, tier: Tier, faults: list[str]) -> None:
        jobs = [job for job in self.world.flying if job.load and job.tier is tier][: len(faults)]
        if jobs:
            self.world.end_loads(jobs, faults[: len(jobs)])

    @rule(at=st.integers(0, 23))
    def forget(self, at: int) -> None:
        self.world.machine.forget(KEYS[at])

    @rule(seconds=st.sampled_from([0.1, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            local = self.world.machine.local
            if local is not None:  # the machine never believes in a local copy that isn't there
                listed = {key for key in KEYS if local.has(key)}
                assert listed <= self.world.stores[Tier.LOCAL]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.now += 100
        for key in list(self.world.filling):
            self.world.end_put(key)
        for wish in self.wishes:
            while wish.taken < len(wish.keys):
                self.world.drain()
                assert wish.keys[wish.taken] in wish.outcomes
                self.world.machine.take(wish)
            wish.lease.release()
        self.world.drain()
        assert len(self.world.machine.pins) == 0
        assert not self.world.machine._climbing
        assert not any(self.world.machine.host.state(key) not in (None, State.HERE) for key in KEYS)
        self.world.check()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)

"""Eviction orders, admission, pins and residency against plain models (K18, K21, K22)."""

from __future__ import annotations

import gc
import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ffs import errors
from ffs.kv.keys import Identity, hash_tokens
from ffs.kv.policy import Adaptive, Lru, LruK, Marks, Pins, Residency, S3Fifo, ScanGuard, Sketch, make_order
from ffs.kv.policy.order import NAMES, Order
from ffs.kv.policy.residency import State

KEYS = hash_tokens(Identity("policy", block_tokens=1), range(600))


def cache_use(order: Order, key: bytes, nbytes: int, capacity: int) -> bool:
    """One access to a plain cache: whether it hit."""
    if key in order:
        order.touch(key)
        return True
    order.insert(key, nbytes)
    while order.total_bytes > capacity:
        victim = order.peek()
        assert victim is not None
        order.evict(victim)
    return False


# --- orders -------------------------------------------------------------------------------------------


class LruModel:
    """A list, the first to go in front."""

    def __init__(self) -> None:
        self.line: list[bytes] = []

    def use(self, key: bytes) -> None:
        if key in self.line:
            self.line.remove(key)
        self.line.append(key)

    def first(self, held: set[bytes]) -> bytes | None:
        return next((key for key in self.line if key not in held), None)


class LruKModel:
    """All uses that ever were, in a dict; sorted when asked."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.uses: dict[bytes, list[int]] = {}
        self.here: set[bytes] = set()
        self.tick = 0

    def use(self, key: bytes) -> None:
        self.tick += 1
        self.uses.setdefault(key, []).append(self.tick)
        self.here.add(key)

    def first(self, held: set[bytes]) -> bytes | None:
        def rank(key: bytes) -> tuple[int, int]:
            uses = self.uses[key]
            return (uses[-self.k] if len(uses) >= self.k else 0, uses[-1])

        return min((key for key in self.here if key not in held), key=rank, default=None)


@given(st.lists(st.tuples(st.sampled_from(["use", "evict", "remove", "hold", "free"]), st.integers(0, 7))))
def test_lru_is_the_list_of_uses(steps: list[tuple[str, int]]) -> None:
    order, model, held = Lru(), LruModel(), set[bytes]()
    for what, number in steps:
        key = KEYS[number]
        if what == "use":
            if key in order:
                order.touch(key)
                if key not in held:  # what is held is in no line: freeing counts as its use
                    model.use(key)
            else:
                order.insert(key, number + 1)
                model.use(key)
        elif what == "hold" and key in order and key not in held:
            order.hold(key)
            held.add(key)
        elif what == "free" and key in held:
            order.free(key)
            held.discard(key)
            model.use(key)
        elif what in ("evict", "remove") and key in order:
            (order.evict if what == "evict" else order.remove)(key)
            model.line.remove(key)
            held.discard(key)
        assert order.peek() == model.first(held)
        assert order.total_bytes == sum(KEYS.index(one) + 1 for one in model.line)


@pytest.mark.parametrize("k", [1, 2, 3])
@given(st.lists(st.tuples(st.sampled_from(["use", "use", "evict", "hold", "free"]), st.integers(0, 7))))
def test_lru_k_ranks_by_the_last_use_but_k_minus_one(k: int, steps: list[tuple[str, int]]) -> None:
    order, model, held = LruK(1000, k), LruKModel(k), set[bytes]()
    for what, number in steps:
        key = KEYS[number]
        if what == "use":
            order.touch(key) if key in order else order.insert(key, number + 1)
            model.use(key)
        elif what == "evict" and key in order:
            order.evict(key)  # its uses are remembered
            model.here.discard(key)
            held.discard(key)
        elif what == "hold" and key in order and key not in held:
            order.hold(key)
            held.add(key)
        elif what == "free" and key in held:
            order.free(key)
            held.discard(key)
        assert order.peek() == model.first(held)


def test_lru_k_forgets_ghosts_by_bytes() -> None:
    order = LruK(100, ghost_bytes=50)
    for number, nbytes in enumerate([30, 30, 10]):
        order.insert(KEYS[number], nbytes)
        order.evict(KEYS[number])
    assert order.ghost_bytes == 40  # the first is forgotten
    order.insert(KEYS[0], 30)
    order.insert(KEYS[1], 30)
    assert order.peek() == KEYS[0]  # used once as far as is known; the other twice


def test_lru_k_heap_stays_in_proportion_to_the_blocks() -> None:
    order = LruK(1 << 30)
    for round_ in range(50):
        for key in KEYS[:100]:
            order.insert(key, 1)
        for key in KEYS[:100]:
            order.remove(key)
        assert len(order._heap) <= 264, round_


def test_s3_fifo_keeps_what_comes_back_and_drops_a_scan() -> None:
    order = S3Fifo(20)
    for key in KEYS[:4]:
        cache_use(order, key, 1, 20)
        cache_use(order, key, 1, 20)
    for key in KEYS[100:300]:
        cache_use(order, key, 1, 20)
    assert all(key in order for key in KEYS[:4])
    gone = next(key for key in reversed(KEYS[100:300]) if key not in order)
    cache_use(order, gone, 1, 20)  # its name was remembered: it enters the main queue
    for key in KEYS[300:340]:
        cache_use(order, key, 1, 20)
    assert gone in order


@pytest.mark.parametrize("name", NAMES)
@given(st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_every_order_holds_bytes_with_mixed_sizes(name: str, draw: random.Random) -> None:
    """K21: eviction that counts keys overruns a tier whose blocks differ in size."""
    capacity = 5000
    order = make_order(name, capacity)
    sizes = {key: draw.choice([1, 7, 100, 900]) for key in KEYS[:80]}
    here: dict[bytes, int] = {}
    for _ in range(300):
        key = draw.choice(KEYS[:80])
        cache_use(order, key, sizes[key], capacity)
        here = {one: sizes[one] for one in sizes if one in order}
        assert order.total_bytes == sum(here.values()) <= capacity
        assert len(order) == len(here)


@pytest.mark.parametrize("name", NAMES)
def test_held_blocks_never_go_and_freed_ones_do(name: str) -> None:
    order = make_order(name, 10)
    for key in KEYS[:10]:
        order.insert(key, 1)
    for key in KEYS[:9]:
        order.hold(key)
    assert order.peek() == KEYS[9]
    order.evict(KEYS[9])
    assert order.peek() is None
    for key in KEYS[:9]:
        order.free(key)
    gone = set()
    while (victim := order.peek()) is not None:
        gone.add(victim)
        order.evict(victim)
    assert gone == set(KEYS[:9])
    assert order.total_bytes == 0


def test_an_unknown_order_is_refused_by_name() -> None:
    with pytest.raises(errors.InvalidArgument, match="'fifo': there are adaptive, lru"):
        make_order("fifo", 1)


def hit_share(order: Order, accesses: list[bytes], capacity: int) -> float:
    return sum(cache_use(order, key, 1, capacity) for key in accesses) / len(accesses)


def test_adaptive_follows_whichever_order_fits() -> None:
    """A loop that doesn't fit beside hot keys: LRU-2's. Then what is used shifts all the time: LRU's."""
    draw = random.Random(7)
    capacity = 64
    scans = [
        key for turn in range(60) for key in (*draw.sample(KEYS[:32], 16), *KEYS[40 + turn % 9 * 60 :][:60])
    ]
    adaptive = Adaptive(capacity)
    share = hit_share(adaptive, scans, capacity)
    assert adaptive.leader != "lru"
    assert share > hit_share(Lru(), scans, capacity)
    drift = [KEYS[min(599, at // 12 + draw.randrange(60))] for at in range(6000)]
    before = adaptive.changes
    hit_share(adaptive, drift, capacity)
    assert adaptive.leader == "lru"
    assert adaptive.changes > before


# --- admission ----------------------------------------------------------------------------------------


def test_the_sketch_counts_and_fades() -> None:
    sketch = Sketch(64)
    for _ in range(3):
        sketch.add(KEYS[0])
    assert sketch.count(KEYS[0]) == 3
    for _ in range(40):
        sketch.add(KEYS[1])
    assert sketch.count(KEYS[1]) == 15
    for at in range(64 * 8):
        sketch.add(KEYS[10 + at % 8])
    assert sketch.count(KEYS[0]) == 1


def test_a_block_cant_be_defended_for_ever() -> None:
    guard = ScanGuard(1 << 14, defences=5)
    for _ in range(6):
        guard.used(KEYS[0])
    answers = []
    for key in KEYS[1:8]:
        guard.used(key)
        answers.append(guard.admits(key, KEYS[0]))
    assert answers == [False] * 5 + [True] + [False]
    assert guard.refused == 6


def fill(tier: Residency, key: bytes, nbytes: int = 1) -> bool:
    """A block comes in as the manager lets it, with blocks leaving at once."""
    for victim in tier.victims(nbytes):
        tier.gone(victim)
    if not tier.reserve(key, nbytes):
        return False
    tier.filled(key)
    return True


@pytest.mark.parametrize("name", NAMES)
def test_a_scan_passes_by_the_hot_set(name: str) -> None:
    """K22: a hot set is used, then a cold scan ten times as large as the tier runs through it."""
    capacity = 100
    tier = Residency(Marks.of(capacity), make_order(name, capacity), ScanGuard(4096))
    hot = KEYS[:60]
    for _ in range(3):
        for key in hot:
            if not tier.touch(key):
                fill(tier, key)
    for at, key in enumerate(KEYS[100:600] * 2):
        if not tier.touch(key):
            fill(tier, key)
        if at % 10 == 0:
            tier.check()
    assert sum(tier.has(key) for key in hot) >= 57


def test_without_a_guard_the_same_scan_wipes_a_plain_lru() -> None:
    """The test above can fail."""
    tier = Residency(Marks.of(100), Lru())
    for key in KEYS[:60] * 3:
        if not tier.touch(key):
            fill(tier, key)
    for key in KEYS[100:600]:
        fill(tier, key)
    assert not any(tier.has(key) for key in KEYS[:60])


# --- residency ----------------------------------------------------------------------------------------


def test_marks_are_checked() -> None:
    with pytest.raises(errors.InvalidArgument, match="low 9 <= high 8"):
        Marks(10, 8, 9)
    assert Marks.of(1000) == Marks(1000, 950, 850, 50)


def test_nobody_leaves_below_high_and_then_down_to_low() -> None:
    tier = Residency(Marks(100, 90, 60), Lru())
    for key in KEYS[:9]:
        assert fill(tier, key, 10)
    assert tier.victims() == []
    assert tier.reserve(KEYS[9], 10)
    assert not tier.reserve(KEYS[10], 1)
    tier.filled(KEYS[9])
    leaving = tier.victims()
    assert leaving == KEYS[:4]
    assert all(tier.has(key) for key in leaving)  # readable while they are copied down
    assert tier.victims() == []  # what leaves counts as gone already
    assert tier.touch(leaving[0])  # used meanwhile: it stays
    assert tier.state(leaving[0]) == State.HERE
    for key in leaving[1:]:
        tier.gone(key)
    assert tier.used == 70
    tier.check()


def test_room_for_a_newcomer_counts_before_the_marks() -> None:
    tier = Residency(Marks(100, 95, 90), Lru())
    for key in KEYS[:9]:
        fill(tier, key, 10)
    assert tier.victims(10) == []
    assert tier.victims(50) == KEYS[:4]


def test_the_window_spares_newcomers_unless_nobody_else_can_go() -> None:
    tier = Residency(Marks(100, 60, 50, window=40), Lru())
    for key in KEYS[:8]:
        assert tier.reserve(key, 10)
        tier.filled(key)
    for key in KEYS[:4]:
        tier.touch(key)  # the old ones were used last, and go all the same
    assert tier.victims() == KEYS[:3]
    for key in KEYS[:3]:
        tier.gone(key)
    assert tier.victims(75) == [KEYS[3], KEYS[4], KEYS[5]]
    tier.check()


class ResidencyMachine(RuleBasedStateMachine):
    """Everything that may happen to one tier, against sets and sums."""

    @initialize(name=st.sampled_from(NAMES), guarded=st.booleans(), window=st.sampled_from([0, 100, 300]))
    def start(self, name: str, guarded: bool, window: int) -> None:
        self.marks = Marks(1000, 800, 600, window)
        self.tier = Residency(self.marks, make_order(name, 1000), ScanGuard(256) if guarded else None)
        self.pins = Pins(self.tier)
        self.leases = [self.pins.lease() for _ in range(3)]
        self.sizes: dict[bytes, int] = {}
        self.states: dict[bytes, State] = {}

    @rule(at=st.integers(0, 15), size=st.sampled_from([1, 50, 130, 400]))
    def reserve(self, at: int, size: int) -> None:
        key = KEYS[at]
        if key in self.states:
            return
        fits = sum(self.sizes.values()) + size <= self.marks.capacity
        assert self.tier.reserve(key, size) == fits
        if fits:
            self.sizes[key], self.states[key] = size, State.FILLING

    @rule(at=st.integers(0, 15), well=st.booleans())
    def arrive(self, at: int, well: bool) -> None:
        key = KEYS[at]
        if self.states.get(key) != State.FILLING:
            return
        if well:
            self.tier.filled(key)
            self.states[key] = State.HERE
        else:
            self.tier.failed(key)
            del self.states[key], self.sizes[key]

    @rule(at=st.integers(0, 15))
    def touch(self, at: int) -> None:
        key = KEYS[at]
        here = self.states.get(key) in (State.HERE, State.LEAVING)
        assert self.tier.touch(key) == here
        if here:
            self.states[key] = State.HERE

    @rule(at=st.integers(0, 15), who=st.integers(0, 2))
    def pin(self, at: int, who: int) -> None:
        self.leases[who].pin([KEYS[at]])
        if self.states.get(KEYS[at]) == State.LEAVING:
            self.states[KEYS[at]] = State.HERE

    @rule(at=st.integers(0, 15), who=st.integers(0, 2))
    def unpin(self, at: int, who: int) -> None:
        self.leases[who].unpin([KEYS[at]])

    @rule(who=st.integers(0, 2))
    def release(self, who: int) -> None:
        self.leases[who].release()
        self.leases[who] = self.pins.lease()

    @rule(need=st.sampled_from([0, 50, 400]))
    def evict(self, need: int) -> None:
        stays = sum(size for key, size in self.sizes.items() if self.states[key] != State.LEAVING)
        chosen = self.tier.victims(need)
        assert len(set(chosen)) == len(chosen)
        for key in chosen:
            assert self.states[key] == State.HERE
            assert key not in self.pins
            self.states[key] = State.LEAVING
        roof = min(self.marks.high, self.marks.capacity - need)
        if stays <= roof:
            assert not chosen
        after = sum(size for key, size in self.sizes.items() if self.states[key] != State.LEAVING)
        if after > max(0, min(self.marks.low, roof)) and stays > roof:  # as far as it could be
            assert all(state != State.HERE or key in self.pins for key, state in self.states.items())

    @rule(at=st.integers(0, 15), how=st.sampled_from(["gone", "stay", "drop"]))
    def end(self, at: int, how: str) -> None:
        key = KEYS[at]
        state = self.states.get(key)
        if how == "drop" and state is not None:
            self.tier.drop(key)
        elif how == "gone" and state == State.LEAVING:
            self.tier.gone(key)
        elif how == "stay" and state == State.LEAVING:
            self.tier.stay(key)
            self.states[key] = State.HERE
            return
        else:
            return
        del self.states[key], self.sizes[key]

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.check()
        assert self.tier.used == sum(self.sizes.values()) <= self.marks.capacity
        for key in KEYS[:16]:
            assert self.tier.state(key) == self.states.get(key)


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- pins ---------------------------------------------------------------------------------------------


def pinned_tier() -> tuple[Residency, Pins]:
    tier = Residency(Marks(100, 90, 60), Lru())
    for key in KEYS[:10]:
        tier.reserve(key, 10)
        tier.filled(key)
    return tier, Pins(tier)


def test_pins_are_counted_by_lease() -> None:
    tier, pins = pinned_tier()
    first, second = pins.lease(), pins.lease()
    first.pin(KEYS[:5])
    first.pin(KEYS[:5])  # once, however often it is said
    second.pin(KEYS[3:6])
    first.release()
    first.release()
    assert sorted(OrderedDict.fromkeys(KEYS[3:6])) == sorted(key for key in KEYS[:10] if key in pins)
    second.unpin([KEYS[0], KEYS[3]])  # the first of them it never had
    assert KEYS[3] not in pins
    second.release()
    assert len(pins) == 0
    assert len(tier.victims()) == 4


@pytest.mark.parametrize("how", ["release", "with", "raise", "lost", "deadline"])
@pytest.mark.parametrize("state", ["absent", "filling", "failed", "here", "leaving", "dropped"])
def test_pins_go_back_to_zero_in_every_state(how: str, state: str) -> None:
    """K18: a request ends - well, by an exception, forgotten, late - while its block is in any state."""
    tier, pins = pinned_tier()
    key = KEYS[0] if state not in ("absent", "filling", "failed") else KEYS[20]
    lease = pins.lease(deadline=10.0)
    if state == "leaving":
        leaving = tier.victims()
        assert leaving[0] == key
        for other in leaving[1:]:
            tier.gone(other)
    lease.pin([key])
    if state in ("filling", "failed"):
        tier.drop(KEYS[9])
        assert tier.reserve(key, 10)
    if state == "failed":
        tier.failed(key)
    if state == "dropped":
        tier.drop(key)
    if how == "release":
        lease.release()
    elif how == "with":
        with lease:
            pass
    elif how == "raise":
        with pytest.raises(RuntimeError), lease:
            raise RuntimeError("the engine's")
    elif how == "lost":
        del lease
        gc.collect()
        assert pins.sweep(0.0) == 1
    else:
        assert pins.sweep(9.9) == 0
        assert pins.sweep(10.0) == 1
        assert not lease.live
        with pytest.raises(errors.BadHandle, match="take a new one"):
            lease.pin([key])
    assert len(pins) == 0
    assert pins.leases == {}
    if state == "filling":
        tier.filled(key)
    tier.check()
    went = set()
    while chosen := tier.victims(100):
        for victim in chosen:
            tier.gone(victim)
            went.add(victim)
    assert tier.used == 0  # nothing is stuck
    assert (key in went) == (state in ("filling", "here", "leaving"))

"""The bandwidth that a save may take beside steps, on simulated jobs; the limiter with a clock of its own."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ffs.checkpoint.limiter import Bandwidth, Limiter
from ffs.checkpoint.pace import DUE_S, Bucket, Pace, Step, floor_of
from ffs.errors import InvalidArgument

PIECE = 8 << 20
GB = 1_000_000_000


@dataclass
class Job:
    """Steps of `step_s` that go `share` slower while a piece is on its way; the way moves `capacity` bytes a
    second. `noise`: of a step, a factor's standard deviation."""

    step_s: float
    capacity: float
    share: Callable[[float], float]
    noise: float = 0.0
    seed: int = 1
    now: float = 0.0
    left: float = 0.0
    took: list[float] = field(default_factory=list)

    def run(self, pace: Pace, nbytes: int, between_s: float | None = None) -> float:
        """A save of so many, from the middle of a step on; seconds that it takes."""
        dice = random.Random(self.seed)
        bucket = Bucket()
        floor = floor_of(nbytes, between_s)
        begun = self.now
        step_begun, moved = self.now, 0
        self.left = self.step_s
        free_at, waiting = self.now, nbytes
        while waiting > 0 or self.now < free_at:
            writing = self.now < free_at
            if not writing and not bucket.wait_s(PIECE, pace.limit, self.now):
                free_at = max(free_at, self.now - 0.002) + PIECE / self.capacity
                moved += PIECE
                waiting -= PIECE
                writing = True
            tick = min(0.002, self.step_s / 50)
            self.now += tick
            self.left -= tick * (1 - self.share(self.now)) if writing else tick
            if self.left <= 0:
                seconds = (self.now - step_begun) * dice.gauss(1, self.noise)
                self.took.append(seconds)
                pace.stepped(Step(seconds, self.now - step_begun, moved), floor)
                step_begun, moved, self.left = self.now, 0, self.step_s
        return self.now - begun

    def quiet(self, pace: Pace, steps: int) -> None:
        dice = random.Random(self.seed + 1)
        for _ in range(steps):
            pace.stepped(Step(self.step_s * dice.gauss(1, self.noise)), 0.0)


@pytest.mark.parametrize(
    ("step_s", "noise", "share"), [(0.05, 0.0, 0.5), (0.3, 0.03, 0.5), (0.3, 0.1, 0.9), (2.0, 0.02, 0.3)]
)
def test_a_save_that_slows_steps_gives_way(step_s: float, noise: float, share: float) -> None:
    job = Job(step_s, 1 * GB, lambda now: share, noise)
    pace = Pace()
    job.quiet(pace, 16)
    seconds = job.run(pace, 20 * GB)
    settled = job.took[len(job.took) // 5 :]
    assert statistics.mean(settled) < 1.10 * step_s + 0.5 * noise * step_s
    assert pace.limit is not None
    # What the tolerance leaves is used: the way could be taken TOLERANCE / share of the time.
    assert seconds < 20 / (0.05 / share) * 2


def test_a_save_that_slows_nothing_has_no_limit() -> None:
    for noise in (0.0, 0.1, 0.3):
        job = Job(0.2, 1 * GB, lambda now: 0.0, noise)
        pace = Pace()
        job.quiet(pace, 16)
        assert job.run(pace, 20 * GB) < 20 * (1.05 + 3 * noise), noise


def test_the_limit_follows_what_else_goes_on() -> None:
    """Others use the way from second 10 to 40: the limit comes, and goes when they do."""
    limits: list[tuple[float, float | None]] = []
    pace = Pace()

    def share(now: float) -> float:
        limits.append((now, pace.limit))
        return 0.8 if 10 < now < 40 else 0.0

    job = Job(0.2, 1 * GB, share, 0.01)
    job.quiet(pace, 16)
    job.run(pace, 60 * GB)

    def seen(begin: float, end: float) -> list[float]:
        return [GB if limit is None else limit for now, limit in limits if begin < now < end]

    assert min(seen(0, 10)) == GB
    assert statistics.mean(seen(15, 40)) < 0.25 * GB
    assert statistics.mean(seen(50, 1000)) > 0.9 * GB


def test_a_save_always_ends() -> None:
    """However slow steps are: in half the time between two saves, and five minutes at most."""
    for between_s, most in ((None, DUE_S), (60.0, 30.0), (7200.0, DUE_S)):
        job = Job(0.1, 4 * GB, lambda now: 0.8)
        pace = Pace()
        job.quiet(pace, 8)
        took = job.run(pace, 40 * GB, between_s)
        assert took <= 1.05 * most, between_s
        assert took > 12, between_s


def test_nothing_is_decided_from_few_steps() -> None:
    pace = Pace()
    for _ in range(2):
        pace.stepped(Step(0.1), 0.0)
    for _ in range(20):
        pace.stepped(Step(1.0, 1.0, GB), 0.0)
    assert pace.limit is None
    pace.stepped(Step(0.1), 0.0)
    pace.stepped(Step(10.0, 0.5, GB), 0.0)  # a save's last moments in a long step
    assert pace.limit is None
    for _ in range(3):
        pace.stepped(Step(1.0, 1.0, GB), 0.0)
    assert pace.limit == pytest.approx(GB / 2)
    for _ in range(3):
        pace.stepped(Step(9.0, 9.0, 0), 0.0)  # it waits for other ranks: not by its own doing
    assert pace.limit == pytest.approx(GB / 2)


def test_an_odd_step_changes_nothing() -> None:
    """One of each kind is long: a loader, an evaluation."""
    pace = Pace()
    for each in (0.1, 0.1, 30.0, 0.1, 0.1):
        pace.stepped(Step(each), 0.0)
    for each in (0.2, 9.0, 0.2):
        pace.stepped(Step(each, each, GB), 0.0)
    assert pace.limit is not None
    pace = Pace()
    for _ in range(8):
        pace.stepped(Step(0.5), 0.0)
    for each in (0.5, 3.0, 0.5) * 5:
        pace.stepped(Step(each, each, GB), 0.0)
    assert pace.limit is None


def test_a_bucket_keeps_the_rate() -> None:
    """Pieces of any size; what isn't used for a while isn't saved up; without a limit nothing waits."""
    for size in (1000, 50_000, 400_000):
        bucket, now, moved = Bucket(), 0.0, 0
        while now < 100:
            wait = bucket.wait_s(size, 100_000.0, now)
            moved += size if not wait else 0
            now += wait
        assert moved == pytest.approx(100 * 100_000, rel=0.06), size
    now += 1000
    burst = 0
    while not bucket.wait_s(1000, 100_000.0, now):
        burst += 1000
    assert burst <= 11_000
    assert bucket.wait_s(1 << 40, None, now) == 0.0
    assert bucket.wait_s(1000, 100_000.0, now) == 0.0


def test_floors() -> None:
    assert floor_of(600, None) == pytest.approx(600 / DUE_S)
    assert floor_of(600, 10.0) == pytest.approx(120)
    assert math.isfinite(floor_of(600, 0.0))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def slowed(bandwidth: Bandwidth = "adaptive") -> tuple[Limiter, Clock]:
    """With ten steps of 0.5 s behind it, and ten of 1 s with a save of 100 bytes on its way."""
    clock = Clock()
    limiter = Limiter(bandwidth, clock)
    gate = limiter.gate()
    limiter.stepped()
    for _ in range(10):
        clock.now += 0.5
        limiter.stepped()
    limiter.begin(100)
    limiter.disturb()  # the copy
    clock.now += 7.0
    limiter.stepped()
    for _ in range(10):
        assert not gate.wait_s(10) or limiter.limit() is not None
        clock.now += 1.0
        limiter.stepped()
    return limiter, clock


def test_the_limiter_limits_while_steps_follow_each_other() -> None:
    limiter, clock = slowed()
    limit = limiter.limit()
    assert limit is not None
    assert 100 / DUE_S <= limit <= 5.0
    assert limiter.lowest() is not None
    gate = limiter.gate()
    assert gate.wait_s(50) == 0.0
    assert gate.wait_s(50) > 0.0
    with limiter.hurry():  # somebody waits for the save
        assert limiter.limit() is None
        assert gate.wait_s(50) == 0.0
    assert limiter.limit() == limit
    clock.now += 4.0
    assert limiter.limit() == limit
    clock.now += 2.0  # nobody trains any more
    assert limiter.limit() is None
    limiter.end(100)
    limiter.begin(7)  # the next save begins with the limit of the last one
    assert limiter.lowest() == limit


def test_a_limiter_sees_no_steps_where_none_are_made() -> None:
    limiter = Limiter("adaptive")
    limiter.begin(1)
    gate = limiter.gate()
    assert all(gate.wait_s(GB) == 0.0 for _ in range(100))
    assert limiter.lowest() is None


def test_other_limits() -> None:
    for bandwidth, wanted in ((None, None), (50.0, 50.0), (7, 7.0)):
        limiter, _ = slowed(bandwidth)
        assert limiter.limit() == wanted
        with limiter.hurry():
            assert limiter.limit() == wanted
        assert limiter.lowest() == wanted
    for wrong in (0, -1.0, True, math.nan, "fast"):
        with pytest.raises(InvalidArgument, match="adaptive"):
            Limiter(wrong)  # type: ignore[arg-type]


def test_the_time_between_saves_is_a_bound() -> None:
    """Two saves eight seconds apart: no more than four for one of them."""
    limiter, clock = slowed()
    limiter.saves()
    clock.now += 8.0
    limiter.saves()
    gate = limiter.gate()
    for _ in range(30):
        gate.wait_s(1)
        clock.now += 3.0
        limiter.stepped()
    assert limiter.limit() == pytest.approx(25.0)


def test_steps_that_a_save_itself_keeps_waiting_tell_nothing() -> None:
    limits = []
    for disturbed in (True, False):
        clock = Clock()
        limiter = Limiter("adaptive", clock)
        gate = limiter.gate()
        limiter.stepped()
        for each in (0.5, 0.5, 0.5, 7.0, 7.0, 7.0):
            if each > 1:
                limiter.begin(10)
                assert not gate.wait_s(10)
                if disturbed:
                    limiter.disturb()
            clock.now += each
            limiter.stepped()
            if each > 1:
                limiter.end(10)
        limits.append(limiter.limit())
    assert limits[0] is None
    assert limits[1] is not None

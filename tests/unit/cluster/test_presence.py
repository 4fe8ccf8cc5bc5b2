"""metadata.cluster.presence, metadata.cluster.lease: who is there, and when a lease is surely over."""

from __future__ import annotations

import asyncio

from metadata.cluster.clock import ManagerClock
from metadata.cluster.lease import Lease
from metadata.cluster.presence import Presences
from metadata.kv.memory import MemoryStore


def at(now: float, timeout_s: float = 10.0) -> Presences:
    presences = Presences(timeout_s)
    presences.begin(now)
    return presences


def test_a_takeover_counts_as_an_answer_to_everybody() -> None:
    p = at(100.0)
    assert not p.here(1, 5, 100.0)
    assert not p.lapsed(1, 109.9)
    assert p.lapsed(1, 110.0)
    p.begin(200.0, lease_s=30.0)  # the manager before gave longer ones
    assert not p.lapsed(1, 229.9)
    assert p.lapsed(1, 230.0)


def test_here_counts_from_hearing_and_lapsed_from_answering() -> None:
    p = at(0.0)
    p.heard(1, 5, 20.0)
    assert p.here(1, 5, 29.9)
    assert not p.here(1, 5, 30.0)
    assert not p.here(1, 4, 20.0)
    assert p.lapsed(1, 20.0)  # heard, and given nothing
    p.answered(1, 20.0)
    assert not p.lapsed(1, 29.9)
    assert p.lapsed(1, 30.0)


def test_registering_extends_once_for_each_incarnation_that_was_heard() -> None:
    p = at(0.0)
    p.heard(1, 5, 20.0)
    p.answered(1, 20.0)
    p.registered(1, 6, 25.0)
    assert not p.here(1, 6, 25.0)
    assert not p.lapsed(1, 34.9)
    p.registered(1, 7, 33.0)  # it never got further: nobody waits for it again
    assert p.lapsed(1, 35.0)
    p.registered(1, 7, 34.0)  # the same once more
    p.registered(2, 1, 40.0)  # a new node
    assert not p.lapsed(2, 49.0)


def test_own_lateness_is_forgiven() -> None:
    p = at(0.0)
    p.heard(1, 5, 20.0)
    p.answered(1, 20.0)
    for now in range(1, 23):
        assert p.tick(float(now)) == 0.0
    assert p.tick(82.0) == 60.0
    assert p.here(1, 5, 82.0)
    assert not p.lapsed(1, 82.0)
    assert p.lapsed(1, 92.1)
    late = at(0.0)
    assert late.tick(50.0) == 50.0
    assert not late.lapsed(1, 50.0)  # nobody could have said anything since the takeover


def test_the_next_change() -> None:
    p = at(0.0)
    assert p.next_change_s(1.0) == 10.0
    p.heard(1, 5, 20.0)
    p.answered(1, 21.0)
    assert p.next_change_s(25.0) == 30.0
    assert p.next_change_s(30.0) == 31.0
    assert p.next_change_s(31.0) == float("inf")


def test_a_manager_grants_only_while_its_own_lease_is_sure() -> None:
    async def body() -> None:
        store = MemoryStore()
        now = [100.0]
        first = Lease(store, ManagerClock(), "a:1", duration_ms=1600, grants_ms=9000, now_s=lambda: now[0])
        second = Lease(store, ManagerClock(), "b:1", duration_ms=1600, grants_ms=1000, now_s=lambda: now[0])
        second._dead = lambda record: False  # type: ignore[method-assign,assignment]
        assert not first.may_grant()
        await first._step()
        assert (first.term, first.may_grant()) == (1, True)
        await second._step()  # it sees the lease for the first time
        now[0] += 1.49
        assert first.may_grant()
        now[0] += 0.02
        assert not first.may_grant()  # before anybody could take over ...
        await second._step()
        assert not second.primary
        now[0] += 0.1
        await second._step()
        assert (second.term, second.earlier_grants_ms) == (2, 9000)  # ... and it knows what was given
        assert second.may_grant()
        await first._step()
        assert not first.primary
        third = Lease(store, ManagerClock(), "c:1", duration_ms=1600, grants_ms=1000, now_s=lambda: now[0])
        await second._step()
        await second._release()
        assert not second.may_grant()
        await third._step()
        assert (third.term, third.earlier_grants_ms) == (3, 9000)  # the first one's may still hold
        now[0] += 9.1
        await third._step()
        await third._release()
        await second._step()
        assert (second.term, second.earlier_grants_ms) == (4, 1000)
        await store.close()

    asyncio.run(body())


def test_time_that_nobody_extended_didnt_pass() -> None:
    """A manager that was stopped for a minute and goes on: sessions don't end for it."""

    async def body() -> None:
        store = MemoryStore()
        now = [0]
        clock = ManagerClock(lambda: now[0], lambda: 1_000_000)
        await store.run(clock.take)
        clock.stored()
        now[0] += 60_000
        assert clock.now_ms() == 1_006_000
        await store.run(clock.extend)
        clock.stored()
        assert clock.now_ms() == 1_006_000
        now[0] += 1000
        assert clock.now_ms() == 1_007_000
        await store.close()

    asyncio.run(body())

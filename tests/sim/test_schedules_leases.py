"""Cases 8, 13 (leases granted before a restart), 21 and 24: who may answer, and for how long."""

from __future__ import annotations

import pytest
import sim_wire as wire
from sim_bench import Bench, of
from sim_model import Violation
from sim_scene import Scene
from sim_wire import Kind, Member, Mutant, Notice, Outcome, Reason, key_of

A, B = 1, 2  # clients
PEER_LEASE_MS = 200


def test_case_08_a_replica_that_was_cut_off_keeps_getting_reads() -> None:
    s = Scene()
    s.write(b"old")
    for other in (0, 1):
        s.cut(2, other, ms=6000)
    s.cut_from_managers(2, ms=6000)
    write = s.begin_write(b"new")
    outcomes = []
    while (s.world.now < 10_000 and not s.serves(2)) or not write.finished:
        outcomes.append(s.read_at(2))  # Scene checks that nothing old is answered
        s.wait(20)
    assert write.op is not None
    assert write.op.answered == Outcome.OK
    assert Outcome.OK in outcomes  # while its lease held
    assert Outcome.OFFLINE in outcomes
    assert outcomes.index(Outcome.OFFLINE) > 3
    s.whole()
    assert s.read_at(2) == Outcome.OK


def stopped_between_check_and_answer(mutant: int) -> Outcome | None:
    """A member's disk read begins under a lease and ends after the chain has gone on without it."""
    b = Bench(mutant=mutant, peer_lease_ms=PEER_LEASE_MS)
    b.lease(1000)
    b.done(b.write((A, 0, 1), b"data"))
    b.hold_ops = True
    token = b.read(2)
    assert b.outcome(token) is None
    assert b.ops
    b.drop()
    b.now += 1500  # stopped: its lease ends, the others' go on
    b.lease(1000, 0, 1)
    b.propose([0, 1], to=[0, 1])
    for _ in range(8):
        b.tick(50, 0, 1)
        b.drop(lambda m: 2 in (m.source, m.to))
        b.deliver()
        b.flush(0, 1)
    b.record([0, 1], to=[0, 1])
    b.drop(lambda m: m.to == 2)
    b.hold_ops = False
    b.end_ops()
    return b.outcome(token)


def test_case_08_its_process_was_stopped_between_the_check_and_the_answer() -> None:
    assert stopped_between_check_and_answer(Mutant.NONE) == Outcome.OFFLINE


def test_mutant_without_the_check_after_the_disk_read_is_caught() -> None:
    with pytest.raises(Violation, match="lease"):
        stopped_between_check_and_answer(Mutant.NO_LEASE_CHECK_AFTER_READ)


def facts_after_the_lease(mutant: int) -> Outcome | None:
    """An answer from memory, for which no disk is read."""
    b = Bench(mutant=mutant, peer_lease_ms=PEER_LEASE_MS)
    b.lease(1000)
    b.done(b.write((A, 0, 1), b"data"))
    b.now += 1500
    b.lease(1000, 0, 1)
    old = b.chain
    b.record([0, 1], to=[0, 1])
    return b.outcome(b.read(2, chain=old, flags=2))


def test_case_08_an_answer_from_memory_needs_a_lease_too() -> None:
    assert facts_after_the_lease(Mutant.NONE) == Outcome.OFFLINE


def test_mutant_without_the_check_on_arrival_is_caught() -> None:
    with pytest.raises(Violation, match="lease"):
        facts_after_the_lease(Mutant.NO_LEASE_CHECK)


def leased_to_a_third(mutant: int) -> Bench:
    """0 and 1 have just granted leases to 2, which can't reach the manager; then both restart."""
    b = Bench(mutant=mutant, peer_lease_ms=PEER_LEASE_MS)
    b.lease(400)
    b.done(b.write((A, 0, 1), b"data"))
    b.flush()
    b.tick(300)  # the manager's lease is about to end: they ask each other
    b.settle()
    b.tick(90)
    b.settle()
    b.tick(20)  # it has ended; the peers' hold
    assert b.outcome(b.read(2)) == Outcome.OK
    b.restart(0, 1, keep=100)
    b.drop()
    return b


def test_case_13_two_restart_within_a_lease_that_they_had_granted_to_the_third() -> None:
    b = leased_to_a_third(Mutant.NONE)
    b.propose([0, 1], to=[0, 1])
    b.flush(0, 1)
    assert not b.proposals  # 2 may still answer
    assert b.outcome(b.read(2)) == Outcome.OK
    b.tick(PEER_LEASE_MS + 20)
    b.drop()
    b.flush(0, 1)
    assert sorted(n for n, _ in b.proposals) == [0, 1]
    assert b.outcome(b.read(2)) == Outcome.OFFLINE


def test_mutant_without_the_hold_after_a_start_is_caught() -> None:
    b = leased_to_a_third(Mutant.NO_START_HOLD)
    b.propose([0, 1], to=[0, 1])
    b.flush(0, 1)
    assert sorted(n for n, _ in b.proposals) == [0, 1]
    old = b.chain
    b.record([0, 1], to=[0, 1])
    with pytest.raises(Violation, match="lease"):
        b.read(2, chain=old)


def left_out_with_a_peer_lease(mutant: int) -> Bench:
    """2 holds leases of 0 and 1 only; the manager goes on without it."""
    b = Bench(mutant=mutant, peer_lease_ms=PEER_LEASE_MS)
    b.lease(400)
    b.done(b.write((A, 0, 1), b"data"))
    b.tick(300)
    b.settle()
    b.tick(120)
    b.settle()
    b.lease(1000, 0, 1)
    assert b.outcome(b.read(2)) == Outcome.OK
    b.propose([0, 1], to=[0, 1])
    b.flush()
    return b


def test_members_wait_out_the_leases_that_they_granted_before_they_persist() -> None:
    b = left_out_with_a_peer_lease(Mutant.NONE)
    assert not b.proposals
    for _ in range(5):
        b.tick(50)
        b.drop(lambda m: m.type == Notice.LEASE_GRANT and m.source == 2)
        b.settle()
    assert sorted(n for n, _ in b.proposals) == [0, 1]
    assert b.outcome(b.read(2)) == Outcome.OFFLINE  # they gave it no new ones


def test_mutant_that_persists_without_waiting_is_caught() -> None:
    b = left_out_with_a_peer_lease(Mutant.PERSIST_WITHOUT_WAITING_FOR_LEASES)
    assert sorted(n for n, _ in b.proposals) == [0, 1]
    old = b.chain
    b.record([0, 1], to=[0, 1])
    with pytest.raises(Violation, match="lease"):
        b.read(2, chain=old)


def alone_but_persisted(mutant: int) -> Bench:
    """0 serves alone, has made durable a version in which 1 serves too, and doesn't hear of its record."""
    b = Bench(2, mutant=mutant, peer_lease_ms=PEER_LEASE_MS)
    b.lease(2000)
    b.done(b.write((A, 0, 1), b"data"))
    b.propose([0])
    b.run(400)
    b.record([0])
    b.settle()
    b.sync_to_done(1)
    b.propose([0, 1])
    b.settle()
    b.now += 3000  # leases end
    b.lease(1000, 1)
    b.record([0, 1], to=[1])
    return b


def test_a_lone_member_that_has_persisted_another_s_version_needs_a_lease() -> None:
    b = alone_but_persisted(Mutant.NONE)
    token = b.read(0, chain=(1, 2))
    assert b.outcome(token) == Outcome.OFFLINE
    assert b.replies[token].reason == Reason.NO_LEASE


def test_mutant_that_thinks_it_is_alone_is_caught() -> None:
    b = alone_but_persisted(Mutant.LONE_WITHOUT_PERSISTED_CHECK)
    assert b.outcome(b.read(0, chain=(1, 2))) == Outcome.OK  # 1 may have gone on without it by now


@pytest.mark.parametrize("index", [0, 1, 2])
def test_case_21_a_process_is_stopped_for_long(index: int) -> None:
    s = Scene()
    s.write(b"one")
    s.world.faults.pause(s.node(index), 8000)
    s.write(b"two", within_ms=7500)  # the chain goes on without it
    assert index not in s.serving()
    s.whole()
    assert s.read_at(index) == Outcome.OK


@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)])
def test_case_21_an_asymmetric_partition_between_two_members(a: int, b: int) -> None:
    s = Scene()
    s.write(b"one")
    s.cut(a, b, ms=8000, both=False)
    s.write(b"two", within_ms=7000)  # both send heartbeats, so one is suspected
    assert s.read_at(s.serving()[0]) == Outcome.OK
    s.wait(8000)
    s.whole()


def test_case_21_a_member_that_cannot_reach_the_manager_goes_on_with_its_peers() -> None:
    s = Scene()
    s.write(b"one")
    version = s.world.history.current
    s.cut_from_managers(1, ms=700)
    s.wait(1200)
    assert s.world.history.current == version
    assert s.read_at(1) == Outcome.OK


def test_case_21_a_slow_disk_and_a_full_one() -> None:
    s = Scene()
    s.node(1).disk_factor = 50
    s.write(b"slow")
    s.node(2).sim.step(wire.space(s.node(2).clock(), Outcome.OK, Outcome.NO_SPACE))
    full = s.begin_write(b"full")
    s.until(lambda: full.finished)
    assert full.op is not None
    assert full.op.answered == Outcome.NO_SPACE  # the refusal travels up, nothing hangs
    s.node(2).sim.step(wire.space(s.node(2).clock(), Outcome.OK, Outcome.OK))
    s.write(b"room")


def test_case_24_reads_and_writes_go_on_without_any_manager() -> None:
    s = Scene(disk_ms=1, delay_ms=1)
    s.write(b"before")
    version = s.world.history.current
    s.stop_managers()
    for n in range(60):
        s.wait(10_000)  # ten minutes in all
        s.write(b"%d" % n, key_of(1, n % 5), kind=Kind.REPLACE, within_ms=500)
        assert s.read_at(n % 3, key_of(1, n % 5)) == Outcome.OK
    assert s.world.history.current == version
    s.crash(1)
    waits = s.begin_write(b"waits")
    s.wait(10_000)
    assert not waits.finished
    assert s.read_at(0) == Outcome.OFFLINE  # the chain of the dead server waits for the manager
    s.start_managers()
    s.until(lambda: waits.finished)
    s.start(1)
    s.whole()


def test_without_managers_one_that_restarts_does_not_serve() -> None:
    s = Scene()
    s.write(b"before")
    s.stop_managers()
    s.wait(2000)
    s.crash(2)
    s.start(2)
    s.wait(5000)
    assert not s.serves(2)
    s.start_managers()
    s.whole()


def test_a_grant_of_an_older_chain_version_counts_for_nothing() -> None:
    b = Bench(2, peer_lease_ms=PEER_LEASE_MS)
    b.tick(100)
    assert b.drop(of(Notice.LEASE_ASK, 1)) == 1
    b.deliver(of(Notice.LEASE_ASK, 0))
    late = [m for m in b.net if m.type == Notice.LEASE_GRANT]
    assert late
    b.drop()
    b.record()
    b.settle()
    b.drop()
    b.net = late
    b.settle()
    assert b.outcome(b.read(1)) == Outcome.OFFLINE
    assert b.nodes[1].status().state == Member.SERVING

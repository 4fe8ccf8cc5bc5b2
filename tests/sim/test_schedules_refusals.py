"""Cases 1 (refused updates), 17 and 19: what is refused stays refused, everywhere. Found ones, too."""

from __future__ import annotations

import sim_wire as wire
from sim_bench import CANCEL, HELD, MISSING, REFUSAL, UPDATE, Bench, of
from sim_pieces import removed_but_for_the_head_s_commit_records
from sim_wire import Kind, Outcome, key_of

A, B = 1, 2  # clients


def test_case_01_restart_with_an_update_refused_by_the_last_and_one_built_on_it() -> None:
    b = Bench()
    b.done(b.write((A, 0, 1), b"base"))
    b.nodes[2].step(wire.space(b.now, Outcome.OK, Outcome.NO_SPACE))
    refused = b.write((A, 0, 2), b"x", offset=1)
    built_on = b.write((B, 0, 1), b"y", offset=2)
    b.deliver(of(UPDATE))
    b.deliver(of(UPDATE))
    b.flush(0, 1, 2)
    b.flush(0, 1, 2)  # the last has journalled both refusals
    b.drop(of(REFUSAL))
    b.nodes[2].step(wire.space(b.now, Outcome.OK, Outcome.OK))
    b.restart(0, 1, 2)
    b.net.clear()
    b.new_chain()
    b.settle()
    assert b.contents() == [b"base"] * 3
    first, second = b.again(refused), b.again(built_on)
    b.settle()
    assert b.outcome(first) == Outcome.NO_SPACE
    assert b.outcome(second) == Outcome.FELL_WITH_BASE
    b.done(b.write((A, 0, 3), b"z", offset=3))
    assert b.contents() == [b"basz"] * 3


def test_case_17_a_batch_of_which_one_part_failed_is_retried_part_by_part() -> None:
    b = Bench()
    keys = [key_of(1, i) for i in range(3)]
    tokens = [b.write((A, i, 1), b"part", key=k) for i, k in enumerate(keys[:2])]
    b.nodes[1].step(wire.space(b.now, Outcome.OK, Outcome.NO_SPACE))
    b.settle()
    assert [b.outcome(t) for t in tokens] == [Outcome.NO_SPACE] * 2
    b.nodes[1].step(wire.space(b.now, Outcome.OK, Outcome.OK))
    third = b.write((A, 2, 1), b"part", key=keys[2])
    version = b.done(third)
    retried = [b.write((A, i, 2), b"part", key=k) for i, k in enumerate(keys[:2])]
    again = b.again(third)  # whose answer was lost
    assert b.done(again) == version
    assert [b.outcome(t) for t in retried] == [Outcome.OK] * 2
    assert all(b.contents(k) == [b"part"] * 3 for k in keys)


def test_case_19_a_refused_update_comes_late_with_its_held() -> None:
    b = Bench(2)
    b.nodes[1].step(wire.space(b.now, Outcome.OK, Outcome.NO_SPACE))
    token = b.send(Kind.CREATE, (0, 0, 0), payload=b"block", tag=1)
    (late,) = b.net
    b.deliver()
    b.flush()
    late_held = [m for m in b.net if m.type == HELD]
    assert late_held
    b.settle()
    assert b.outcome(token) == Outcome.NO_SPACE
    b.nodes[1].step(wire.space(b.now, Outcome.OK, Outcome.OK))
    b.net = [late, *late_held]
    b.settle()
    assert b.contents() == [None] * 2


def test_a_refusal_in_the_middle_is_dropped_below_before_the_client_hears_of_it() -> None:
    b = Bench()
    b.nodes[1].step(wire.space(b.now, Outcome.OK, Outcome.OVER_QUOTA))
    token = b.write((A, 0, 1), b"data")
    b.deliver(of(UPDATE))
    b.deliver(of(UPDATE))
    b.flush(0, 1)
    assert any(m.type == CANCEL for m in b.net)
    b.flush(2)
    assert b.outcome(token) is None
    b.settle()
    assert b.outcome(token) == Outcome.OVER_QUOTA
    assert all(not n.dump().store.chunks for n in b.nodes)


def test_what_led_to_a_forgotten_removal_is_not_refused_when_it_comes_again() -> None:
    b = Bench(2)
    removed_but_for_the_head_s_commit_records(b)
    b.nodes[1].step(wire.space(b.now, Outcome.OK, Outcome.NO_SPACE))
    b.new_chain()
    assert b.contents() == [None] * 2
    assert b.done(b.again(2)) == (1, 1, 2)  # the removal's first answer


def test_what_is_dropped_stays_dropped_when_the_member_crashes_right_after() -> None:
    b = Bench(2)
    b.done(b.write((A, 0, 1), b"base"))
    b.nodes[0].step(wire.space(b.now, Outcome.OK, Outcome.NO_SPACE))
    refused = b.write((A, 0, 2), b"x")
    b.deliver(of(UPDATE))
    b.flush(1)  # durable below, refused at the head
    b.flush(0)
    b.drop(of(CANCEL))
    b.nodes[0].step(wire.space(b.now, Outcome.OK, Outcome.OK))
    b.record()
    while b.net or b.shadow(0).tail:
        b.deliver()
        b.flush(0)
        if b.shadow(1).tail and b.shadow(1).tail[0].kind == wire.RecordKind.CHAIN:
            b.flush(1, count=1)
    assert b.outcome(refused) is None  # the member's drop isn't durable yet
    b.restart(1, keep=0)
    b.net.clear()
    b.new_chain()
    b.settle()
    assert b.outcome(refused) == Outcome.NO_SPACE
    assert b.contents() == [b"base"] * 2


def test_a_full_member_is_asked_again_only_once_for_a_gap() -> None:
    """Every update behind a gap says `missing`; one answer is enough."""
    b = Bench(2)
    tokens = [b.write((A, i, 1), b"x", offset=i) for i in range(8)]
    first = b.net[0]
    b.drop(lambda m: m is first)
    b.deliver()
    assert len([m for m in b.net if m.type == MISSING]) == 7
    b.deliver(of(MISSING))
    assert len([m for m in b.net if m.type == UPDATE]) == 8
    b.settle()
    assert all(b.outcome(t) == Outcome.OK for t in tokens)

"""Cases 6, 7, 19 and 20, and reads of dirty chunks: the story of a write in one chain version."""

from __future__ import annotations

import sim_answers
import sim_wire as wire
from sim_bench import ACK, ANSWER, HELD, KEY, MISSING, UPDATE, Bench, of
from sim_model import Asked
from sim_wire import MAX_EPOCH, Kind, Mutant, Outcome, PayloadState, key_of

A, B = 1, 2  # clients


def test_case_06_the_chain_changes_while_an_update_waits_for_its_turn() -> None:
    b = Bench(per_chunk=1)
    first = b.write((A, 0, 1), b"1")
    waiting = b.write((B, 0, 1), b"2")
    b.drop()
    b.record()  # nobody restarted; the chain version moves on
    b.settle()
    assert b.outcome(first) == Outcome.OK
    assert b.outcome(waiting) == Outcome.STALE_CHAIN  # judged again at its turn
    assert b.contents() == [b"1"] * 3


def test_case_06_the_chain_changes_while_a_disk_write_runs() -> None:
    b = Bench()
    token = b.write((A, 0, 1), b"data")
    b.deliver(of(UPDATE, 1))
    b.record()
    b.flush()
    assert b.outcome(token) is None
    b.settle()
    assert b.outcome(token) == Outcome.OK
    assert b.replies[token].version == (1, 1, 1)  # keeps its number
    assert b.contents() == [b"data"] * 3


def test_case_06_an_acknowledgement_of_the_old_chain_version_changes_nothing() -> None:
    b = Bench(2)
    token = b.write((A, 0, 1), b"data")
    while not any(m.type == ACK for m in b.net):
        b.deliver()
        b.flush()
    late = [m for m in b.net if m.type == ACK]
    b.net.clear()
    b.record()
    b.flush()
    b.net, others = late, b.net
    b.deliver()
    assert b.outcome(token) is None
    b.net = others
    b.settle()
    assert b.outcome(token) == Outcome.OK


def read_during_a_change(mutant: int) -> Outcome | None:
    """The disk read of a member ends after a proposal without that member has reached it."""
    b = Bench(mutant=mutant)
    b.done(b.write((A, 0, 1), b"data"))
    b.hold_ops = True
    token = b.read(2)
    b.propose([0, 1])
    b.settle()
    b.hold_ops = False
    b.end_ops()
    b.settle()
    return b.outcome(token)


def test_case_06_a_read_is_judged_again_after_the_disk_read() -> None:
    assert read_during_a_change(Mutant.NONE) == Outcome.OFFLINE


def test_mutant_without_the_check_after_the_disk_read_is_caught() -> None:
    assert read_during_a_change(Mutant.NO_RECHECK_AFTER_READ) == Outcome.OK


def test_case_07_concurrent_partial_writes_use_the_head_s_base() -> None:
    b = Bench()
    tokens = [b.write((A, i, 1), bytes([65 + i]) * 3, offset=i) for i in range(5)]
    while b.net:  # the last message first
        last = b.net[-1]
        b.deliver(lambda m, last=last: m is last)
        b.flush()
    for _ in range(10):
        b.tick()
        b.settle()
    assert [b.outcome(t) for t in tokens] == [Outcome.OK] * 5
    assert b.contents() == [b"ABCDEEE"] * 3


def test_case_07_a_member_with_a_gap_says_missing_and_gets_it() -> None:
    b = Bench()
    first = b.write((A, 0, 1), b"1")
    b.drop(of(UPDATE, 1))
    second = b.write((B, 0, 1), b"2", offset=1)
    b.deliver(of(UPDATE, 1))
    assert [m.type for m in b.net] == [MISSING]
    b.settle()
    assert b.outcome(first) == b.outcome(second) == Outcome.OK
    assert b.contents() == [b"12"] * 3


def test_case_07_a_payload_that_arrives_damaged_is_sent_again() -> None:
    b = Bench()
    token = b.write((A, 0, 1), b"data")
    (m,) = b.net
    b.net = []
    b.step(1, wire.message(b.now, m.body, PayloadState.BAD))
    assert [m.type for m in b.net] == [MISSING]
    b.settle()
    assert b.outcome(token) == Outcome.OK


def test_case_19_a_chunk_is_removed_and_created_while_an_old_update_is_on_the_way() -> None:
    b = Bench()
    first = b.write((A, 0, 1), b"old")
    late = [m for m in b.net if m.type == UPDATE]
    b.done(first)
    b.done(b.send(Kind.REMOVE, (A, 0, 2)))
    b.net += late
    b.settle()
    assert b.contents() == [None] * 3  # it doesn't come back
    b.done(b.write((B, 0, 1), b"new"))
    b.net += late
    b.settle()
    assert b.contents() == [b"new"] * 3


def test_case_19_a_space_is_removed_while_a_write_to_it_is_on_the_way() -> None:
    b = Bench()
    keys = [key_of(1, i) for i in range(3)]
    for i, k in enumerate(keys[:2]):
        b.done(b.write((A, i, 1), b"data", key=k))
    pending = b.write((A, 2, 1), b"data", key=keys[2])
    b.step(0, wire.set_epoch(b.now, 900, b.chain, 1, MAX_EPOCH))
    late = b.write((B, 0, 1), b"late", key=keys[2])
    assert b.outcome(late) == Outcome.STALE_EPOCH  # from the moment that it was asked for
    b.step(0, wire.remove_page(b.now, 901, b.chain, 1, None, 2))
    b.settle()
    assert b.outcome(pending) == Outcome.OK
    assert b.replies[900].outcome == Outcome.OK
    b.tick()  # the page begins behind what was pending
    b.settle()
    page = b.replies[901]
    assert (page.outcome, page.count, page.more, page.key) == (Outcome.OK, 2, True, keys[1])
    b.step(0, wire.remove_page(b.now, 902, b.chain, 1, page.key, 2))
    b.settle()
    assert (b.replies[902].count, b.replies[902].more) == (1, False)
    assert all(b.contents(k) == [None] * 3 for k in keys)
    b.restart(0, 1, 2, keep=100)
    b.new_chain()
    after = b.write((B, 0, 2), b"late", key=keys[0])
    assert b.outcome(after) == Outcome.STALE_EPOCH


def test_case_20_a_truncation_meets_a_write_of_an_older_epoch() -> None:
    b = Bench()
    b.done(b.write((A, 0, 1), b"0123456789", epoch=1))
    b.step(0, wire.set_epoch(b.now, 900, b.chain, 1, 2))
    truncate = b.send(Kind.TRUNCATE, (B, 0, 1), length=4, epoch=2)
    old = b.write((A, 0, 2), b"late", offset=6, epoch=1)
    b.settle()
    assert b.replies[900].outcome == Outcome.OK
    assert b.outcome(truncate) == Outcome.OK
    assert b.outcome(old) == Outcome.STALE_EPOCH
    b.done(b.send(Kind.TRUNCATE, (B, 0, 2), length=8, epoch=2))
    assert b.contents() == [b"0123\0\0\0\0"] * 3  # an extension shows zeros


def test_dirty_reads_ask_the_last_and_use_the_answer_as_a_lower_bound() -> None:
    b = Bench()
    b.done(b.write((A, 0, 1), b"one"))
    b.write((A, 0, 2), b"two")
    b.deliver(of(UPDATE))
    b.deliver(of(UPDATE))
    b.flush()
    early = b.read(0)
    b.deliver(lambda m: m.type not in (HELD, ACK))
    b.deliver(of(ANSWER))
    assert b.replies[early].content == b"one"
    while not any(m.type == ACK for m in b.net):
        b.deliver(lambda m: m.type != ACK)
        b.flush()
    dirty = b.read(0)  # the last has committed "two", the head doesn't know
    b.deliver(lambda m: m.type != ACK)
    b.deliver(of(ANSWER))
    assert b.replies[dirty].content == b"two"
    sim_answers.answered_read(b.history, Asked(KEY, 1), b.replies[dirty])
    b.settle()


def test_create_if_absent_waits_for_what_is_pending_and_compares_tags() -> None:
    b = Bench()
    first = b.send(Kind.CREATE, (0, 0, 0), payload=b"one", tag=1)
    same = b.send(Kind.CREATE, (0, 0, 0), payload=b"one", tag=1)
    other = b.send(Kind.CREATE, (0, 0, 0), payload=b"two", tag=2)
    assert b.outcome(same) is None
    b.settle()
    assert [b.outcome(t) for t in (first, same, other)] == [
        Outcome.OK,
        Outcome.EXISTED,
        Outcome.TAG_DIFFERS,
    ]
    assert b.contents() == [b"one"] * 3

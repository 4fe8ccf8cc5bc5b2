"""The cases of CRAQ.md that apply while the members of a chain don't change, one schedule each.

Cases 3, 8 to 15, 18, 21 to 25 and 27 need reconfiguration, recovery, leases or the engine; they come with
those. Case 16 is the engine's.
"""

from __future__ import annotations

import pytest
import sim_answers
import sim_wire as wire
from sim_bench import ACK, ANSWER, CANCEL, HELD, KEY, MISSING, REFUSAL, UPDATE, Bench, of
from sim_model import Asked
from sim_wire import MAX_EPOCH, Kind, Mutant, Outcome, PayloadState, key_of

A, B = 1, 2  # clients


def test_case_01_head_restarts_with_an_update_that_is_only_downstream() -> None:
    b = Bench()
    b.done(b.write((A, 0, 1), b"old"))
    lost = b.write((A, 0, 2), b"new")
    b.deliver(of(UPDATE, 1))
    b.deliver(of(UPDATE, 2))
    b.flush(1, 2)  # durable there, not at the head
    b.restart(0)
    b.net.clear()
    b.new_chain()
    assert b.contents() == [b"old"] * 3  # nobody could have been told of it
    again = b.again(lost)
    assert b.done(again)[1] == 2  # numbered anew, in the new chain version
    assert b.contents() == [b"new"] * 3


def test_case_01_head_restarts_with_an_update_that_nobody_else_saw() -> None:
    b = Bench()
    b.done(b.write((A, 0, 1), b"old"))
    token = b.write((A, 0, 2), b"new")
    b.net.clear()
    b.flush(0)
    b.restart(0)
    b.new_chain()
    assert b.contents() == [b"new"] * 3  # it finishes what it holds, under the old number
    assert b.done(b.again(token)) == (1, 1, 2)


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


def test_case_02_last_commits_and_restarts_before_its_acknowledgement_arrives() -> None:
    b = Bench()
    token = b.write((A, 0, 1), b"data")
    while not any(m.type == ACK for m in b.net):
        b.deliver(lambda m: m.type != ACK)
        b.flush()
    b.drop(of(ACK))
    b.flush()
    b.restart(2)
    b.net.clear()
    b.new_chain()
    assert b.outcome(token) == Outcome.OK  # the predecessors adopt it
    assert b.contents() == [b"data"] * 3


def test_case_02_the_commit_record_is_lost_too() -> None:
    b = Bench()
    token = b.write((A, 0, 1), b"data")
    while not any(m.type == ACK for m in b.net):
        b.deliver(lambda m: m.type != ACK)
        b.flush()
    b.restart(0, 1, 2, keep=0)  # staged everywhere, committed nowhere
    b.net.clear()
    b.new_chain()
    assert b.contents() == [b"data"] * 3
    assert b.done(b.again(token)) == (1, 1, 1)


@pytest.mark.parametrize("restart", [(), (0,), (0, 1, 2)])
@pytest.mark.parametrize("removed", [False, True])
def test_case_04_a_retry_after_another_write_isn_t_applied_again(
    restart: tuple[int, ...], removed: bool
) -> None:
    b = Bench()
    first = b.write((A, 0, 1), b"from A")
    version = b.done(first)  # the answer is lost on its way to A
    b.done(b.write((B, 0, 1), b"from B"))
    if removed:
        b.done(b.send(Kind.REMOVE, (B, 0, 2)))
    if restart:
        b.flush()
        b.restart(*restart)
        b.new_chain()
    assert b.done(b.again(first)) == version
    assert b.contents() == [None if removed else b"from B"] * 3


def test_case_05_an_old_sequence_is_refused_when_the_channel_went_on() -> None:
    b = Bench()
    given_up = b.write((A, 0, 1), b"one")
    following = b.write((A, 0, 2), b"two")  # waits for the first
    assert b.outcome(following) is None
    b.settle()
    assert b.outcome(following) == Outcome.OK
    late = b.again(given_up)
    b.settle()
    assert b.outcome(late) == Outcome.OLD_SEQUENCE
    assert b.contents() == [b"two"] * 3
    b.restart(0, 1, 2, keep=100)
    b.new_chain()
    late = b.again(given_up)
    b.settle()
    assert b.outcome(late) == Outcome.OLD_SEQUENCE


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


@pytest.mark.parametrize("restart", [False, True])
def test_case_26_a_retry_meets_what_came_after_it(restart: bool) -> None:
    b = Bench()
    keys = [key_of(1, 0), key_of(1, 1), key_of(2, 0)]
    tokens = [b.write((A, i, 1), b"data", key=k) for i, k in enumerate(keys)]
    versions = [b.done(t) for t in tokens]
    b.done(b.send(Kind.TRUNCATE, (B, 0, 1), key=keys[0], length=2))
    b.done(b.send(Kind.REMOVE, (B, 1, 1), key=keys[1]))
    b.step(0, wire.set_epoch(b.now, 900, b.chain, 2, MAX_EPOCH))
    b.settle()
    b.step(0, wire.remove_page(b.now, 901, b.chain, 2, None, 10))
    b.settle()
    if restart:
        b.restart(0, 1, 2, keep=100)
        b.new_chain()
    again = [b.again(t) for t in tokens]
    assert [b.done(t) for t in again] == versions
    assert [b.contents(k)[0] for k in keys] == [b"da", None, None]


def test_a_retry_of_a_pending_update_waits_for_it() -> None:
    b = Bench()
    first = b.write((A, 0, 1), b"data")
    again = b.again(first)
    assert b.outcome(again) is None
    assert b.done(again) == b.done(first)


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


def test_a_chain_with_a_member_away_reads_clean_chunks_and_lets_writes_wait() -> None:
    b = Bench()
    b.done(b.write((A, 0, 1), b"data"))
    token = b.read(0)
    assert b.replies[token].content == b"data"
    write = b.write((A, 0, 2), b"more", deadline=b.now + 1000)
    b.net.clear()  # the successor is away
    b.tick(1500)
    assert b.outcome(write) == Outcome.TIMED_OUT
    b.settle()
    again = b.again(write)
    assert b.done(again) == (1, 1, 2)


def test_a_restarted_target_serves_nothing_and_says_why() -> None:
    b = Bench()
    b.done(b.write((A, 0, 1), b"data"))
    b.restart(1, keep=100)
    token = b.read(1)
    assert b.replies[token].outcome == Outcome.OFFLINE
    assert b.replies[token].reason == 2  # Reason::restarted
    same = [(11 + i, 1, 1) for i in range(3)]
    b.step(1, wire.configure(b.now, b.chain, same))  # what it had adopted isn't enough
    b.flush()
    token = b.read(1)
    assert b.replies[token].outcome == Outcome.OFFLINE
    b.new_chain()
    token = b.read(1)
    assert b.replies[token].content == b"data"


def test_a_member_that_does_not_serve_makes_the_chain_offline() -> None:
    b = Bench(2)
    b.step(0, wire.configure(b.now, (1, 9), [(11, 5, 1), (12, 5, 1)]))
    token = b.read(0)
    assert b.replies[token].outcome == Outcome.OFFLINE
    assert b.replies[token].reason == 3  # Reason::members_incomplete


def crash_everywhere(members: int, crashed: tuple[int, ...], point: int, keep: int) -> bool:
    """A fixed piece of work; at the given persistence point these members crash, with `keep` of the
    records that aren't durable. False if there are fewer points."""
    b = Bench(members)
    work = [
        lambda: b.write((A, 0, 1), b"aaaa"),
        lambda: b.write((B, 0, 1), b"bb", offset=2),
        lambda: b.send(Kind.REMOVE, (A, 1, 1)),
        lambda: b.send(Kind.CREATE, (0, 0, 0), payload=b"block", tag=1),
        lambda: b.send(Kind.TRUNCATE, (B, 1, 1), length=2),
    ]
    tokens: list[int] = []
    points = 0
    reached = False
    while work or b.net or any(b.shadow(n).tail for n in range(len(b.nodes))):
        if work:
            tokens.append(work.pop(0)())
        b.deliver()
        for n in range(members):
            if reached or not b.shadow(n).tail:
                b.flush(n)
                continue
            if points == point:
                reached = True
                b.restart(*crashed, keep=keep)
                b.net.clear()
                b.new_chain()
                b.settle()
            points += 1
            b.flush(n, count=1)
    if not reached:
        return False
    again = [b.again(t) if b.outcome(t) != Outcome.OK else t for t in tokens]
    for _ in range(5):
        b.settle()
        b.tick()
    b.settle()
    for t in again:
        assert b.outcome(t) in (Outcome.OK, Outcome.EXISTED, Outcome.STALE_CHAIN), b.replies.get(t)
    assert len({tuple(b.contents())}) == 1
    assert len(set(b.contents())) == 1
    return True


@pytest.mark.parametrize("keep", [0, 1, 100])
@pytest.mark.parametrize(
    ("members", "crashed"), [(1, (0,)), (3, (0,)), (3, (1,)), (3, (2,)), (3, (0, 1, 2)), (2, (0, 1))]
)
def test_crash_and_restart_at_every_persistence_point(
    members: int, crashed: tuple[int, ...], keep: int
) -> None:
    point = 0
    while crash_everywhere(members, crashed, point, keep):
        point += 1
    assert point >= 5 * members


# ---- found by the search; named after what they caught ----------------------------------------


def removed_but_for_the_head_s_commit_records(b: Bench) -> None:
    """A block is created and removed; all members have committed both, the head not durably."""
    created = b.send(Kind.CREATE, (0, 0, 0), payload=b"block", tag=1)
    removed = b.send(Kind.REMOVE, (A, 0, 1))
    while b.outcome(removed) is None:
        b.deliver()
        b.flush(1)
        head = b.shadow(0).tail
        if not any(r.kind == wire.RecordKind.COMMIT for r in head):
            b.flush(0)
    assert b.outcome(created) == b.outcome(removed) == Outcome.OK
    b.flush(1)
    b.restart(0, 1, keep=0)
    b.net.clear()
    assert [len(n.dump().store.chunks) for n in b.nodes] == [1, 0]


def test_what_led_to_a_forgotten_removal_is_not_refused_when_it_comes_again() -> None:
    b = Bench(2)
    removed_but_for_the_head_s_commit_records(b)
    b.nodes[1].step(wire.space(b.now, Outcome.OK, Outcome.NO_SPACE))
    b.new_chain()
    assert b.contents() == [None] * 2
    assert b.done(b.again(2)) == (1, 1, 2)  # the removal's first answer


def test_a_forgotten_removal_whose_message_overtakes_what_it_removes() -> None:
    b = Bench(2)
    removed_but_for_the_head_s_commit_records(b)
    b.record()
    while b.net or any(b.shadow(n).tail for n in range(len(b.nodes))):
        if b.net:
            last = b.net[-1]
            b.deliver(lambda m, last=last: m is last)
        b.flush()
    for _ in range(3):
        b.tick()
        b.settle()
    assert b.contents() == [None] * 2


def test_an_update_below_a_pending_one_was_committed() -> None:
    """The last has committed a creation and a removal, forgotten both, and has a third pending."""
    b = Bench(2)
    b.send(Kind.CREATE, (0, 0, 0), payload=b"one", tag=1)
    b.send(Kind.REMOVE, (A, 0, 1))
    third = b.write((B, 0, 1), b"three")
    while (1, 1, 2) not in b.history.chunk(KEY).positions:
        b.deliver(lambda m: m.type != ACK)
        b.flush(0)
        b.flush(1, count=1)
    for _ in range(3):  # the third is staged, and not held
        b.flush()
        b.deliver(of(UPDATE))
        b.drop()
    b.restart(0, 1, keep=0)
    below = b.nodes[1].dump().store.chunks[KEY]
    assert not below.exists
    assert [p[0] for p in below.pendings] == [(1, 1, 3)]
    assert len(b.nodes[0].dump().store.chunks[KEY].pendings) == 3
    b.net.clear()
    b.new_chain()
    assert b.contents() == [b"three"] * 2
    assert b.done(b.again(third)) == (1, 1, 3)


def test_a_removal_that_the_head_lost_is_not_committed_because_the_chunk_is_only_pending_there() -> None:
    b = Bench(2)
    created = b.send(Kind.CREATE, (0, 0, 0), payload=b"one", tag=1)
    while b.outcome(created) is None:
        b.deliver()
        b.flush(1)
        if not any(r.kind == wire.RecordKind.COMMIT for r in b.shadow(0).tail):
            b.flush(0)
    b.flush(1)
    b.send(Kind.REMOVE, (A, 0, 1))
    b.deliver()
    b.flush(1)
    b.restart(0, keep=0)  # loses the commit of the one and the other altogether
    b.net.clear()
    b.new_chain()
    assert b.contents() == [b"one"] * 2


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

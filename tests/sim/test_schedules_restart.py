"""Cases 1, 2, 4, 5 and 26: members restart, and a chain comes back. Found ones, too."""

from __future__ import annotations

import pytest
import sim_wire as wire
from sim_bench import ACK, KEY, UPDATE, Bench, of
from sim_pieces import removed_but_for_the_head_s_commit_records
from sim_wire import MAX_EPOCH, Kind, Outcome, key_of

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


def test_a_removal_that_the_successor_was_asked_about_goes_again_on_a_new_connection() -> None:
    b = Bench(2)
    b.send(Kind.CREATE, (0, 0, 0), payload=b"one", tag=1)
    removed = b.send(Kind.REMOVE, (A, 0, 1))
    b.flush(0)
    b.drop()
    b.restart(0, 1, keep=100)
    b.record()
    for _ in range(12):
        b.deliver(lambda m: m.type != UPDATE)
        b.flush()
    assert b.drop(of(UPDATE, 1)) == 1  # the removal, alone
    b.step(0, wire.connected(b.now, 12))
    b.drop(of(UPDATE, 1))
    b.run(2000)
    assert b.nodes[0].status().serving
    assert b.done(b.again(removed)) == (1, 1, 2)

"""Cases 9, 10, 23 and 27, and 26 across a recovery: a member is filled while everything goes on."""

from __future__ import annotations

import pytest
import sim_wire as wire
from sim_bench import SYNC, UPDATE, Bench, Message, of
from sim_model import Violation
from sim_wire import MAX_EPOCH, Kind, Mutant, Outcome, PayloadState, Reason, RecordKind, key_of

A, B = 1, 2  # clients
KEYS = [key_of(1, i) for i in range(6)]


def behind(*, mutant: int = 0, window: int = 2) -> Bench:
    """0 and 1 serve; 2 was left out, and has missed changes of every kind. It isn't syncing yet."""
    b = Bench(mutant=mutant, window=window)
    for i, key in enumerate(KEYS[:4]):
        b.done(b.write((A, i, 1), b"old%d" % i, key=key))
    b.change([0, 1])
    b.done(b.write((A, 0, 2), b"NEW", key=KEYS[0]))
    b.done(b.send(Kind.REMOVE, (A, 1, 2), key=KEYS[1]))  # a chunk that only the returning one has
    b.done(b.send(Kind.TRUNCATE, (A, 2, 2), length=2, key=KEYS[2]))
    b.done(b.write((A, 4, 1), b"created", key=KEYS[4]))
    return b


def messages(b: Bench, count: int) -> int:
    """Lets so many messages through, one by one, with all disks keeping up. How many there were."""
    for n in range(count):
        b.flush()
        if not b.net:
            return n
        first = b.net[0]
        b.deliver(lambda m, first=first: m is first)  # type: ignore[misc]
    return count


def change_everything(b: Bench) -> list[int]:
    """One change of each kind, each of another chunk."""
    return [
        b.write((B, 0, 1), b"x", offset=1, key=KEYS[0]),
        b.write((B, 1, 1), b"again", key=KEYS[1]),
        b.send(Kind.TRUNCATE, (B, 2, 1), length=9, key=KEYS[2]),
        b.send(Kind.REMOVE, (B, 3, 1), key=KEYS[3]),
        b.send(Kind.REPLACE, (B, 4, 1), payload=b"replaced", key=KEYS[4]),
        b.send(Kind.CREATE, (0, 0, 0), payload=b"block", tag=3, key=KEYS[5]),
    ]


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("after", [*range(0, 40, 2), 60, 100])
def test_case_09_changes_of_every_kind_at_every_moment_of_a_recovery(after: int, window: int) -> None:
    b = behind(window=window)
    b.propose([0, 1], 2)
    b.settle()
    b.record([0, 1], 2)
    messages(b, after)
    tokens = change_everything(b)
    b.sync(2)
    assert [b.outcome(t) for t in tokens] == [Outcome.OK] * 6
    for key in KEYS:
        assert len(set(b.contents(key))) == 1
    assert b.contents(KEYS[1]) == [b"again"] * 3
    assert b.contents(KEYS[3]) == [None] * 3
    b.change([2])  # it has everything that the others had
    assert b.contents(KEYS[0]) == [b"NxW0"]


def test_case_09_only_what_differs_is_sent() -> None:
    b = behind()
    b.sync(2)
    assert b.history.installs == 3  # the new, the truncated and the created one
    assert b.contents(KEYS[3]) == [b"old3"] * 3


def test_case_10_a_pending_version_is_refused_while_its_chunk_is_copied() -> None:
    b = behind()
    b.propose([0, 1], 2)
    b.settle()
    b.record([0, 1], 2)
    messages(b, 8)
    b.nodes[1].step(wire.space(b.now, Outcome.OK, Outcome.NO_SPACE))
    refused = b.write((B, 0, 1), b"pending", key=KEYS[0])
    b.deliver(of(UPDATE, 1))
    b.flush(0)
    messages(b, 4)  # the copying goes on; the head has it staged, the source refuses it
    b.nodes[1].step(wire.space(b.now, Outcome.OK, Outcome.OK))
    b.settle()
    assert b.outcome(refused) == Outcome.NO_SPACE
    b.sync(2)
    assert b.contents(KEYS[0]) == [b"NEW0"] * 3
    retry = b.nodes[2].dump().store.retry[B, 0]
    assert retry.outcome == Outcome.NO_SPACE  # a retry gets the first answer there, too


def test_case_10_a_pending_version_is_superseded_while_its_chunk_is_copied() -> None:
    b = behind()
    b.propose([0, 1], 2)
    b.settle()
    b.record([0, 1], 2)
    messages(b, 6)
    tokens = [b.write((B, i, 1), bytes([65 + i]), offset=i, key=KEYS[0]) for i in range(4)]
    messages(b, 5)
    tokens.append(b.send(Kind.REPLACE, (B, 9, 1), payload=b"last", key=KEYS[0]))
    b.sync(2)
    assert [b.outcome(t) for t in tokens] == [Outcome.OK] * 5
    assert b.contents(KEYS[0]) == [b"last"] * 3


def promoting(steps: int) -> tuple[Bench, int]:
    """A write is under way while 2 is promoted; after so many messages. And the write's token."""
    b = behind()
    b.sync_to_done(2)
    token = b.write((B, 0, 1), b"v+1", key=KEYS[0])
    b.deliver(of(UPDATE, 1))
    b.flush()
    b.deliver(lambda m: m.type != SYNC)  # 1 has it, held; 2 perhaps not yet
    b.flush()
    b.propose([0, 1, 2])
    messages(b, 2)
    b.settle()
    b.record([0, 1, 2])
    messages(b, steps)
    return b, token


@pytest.mark.parametrize("steps", range(24))
def test_case_23_dirty_reads_during_the_promotion_never_go_back(steps: int) -> None:
    b, token = promoting(steps)
    for n in (2, 0, 1, 2, 1, 0):  # from the new last one first, then from old ones
        read = b.read(n, key=KEYS[0], chain=(1, 1))
        for _ in range(6):
            if b.outcome(read) is not None:
                break
            messages(b, 3)
    b.settle()
    assert b.outcome(token) == Outcome.OK  # the history has judged every answer by the ones before it
    assert b.contents(KEYS[0]) == [b"v+10"] * 3


@pytest.mark.parametrize("late", [RecordKind.INSTALL, RecordKind.ERASE])
def test_a_late_transfer_does_not_undo_what_came_after_it(late: RecordKind) -> None:
    b = behind(window=4)
    b.propose([0, 1], 2)
    b.settle()
    b.record([0, 1], 2)
    seen: list[Message] = []
    for _ in range(200):
        b.flush()
        if not b.net:
            break
        first = b.net[0]
        if first.type == SYNC and first.to == 2:
            seen.append(first)
        b.deliver(lambda m, first=first: m is first)  # type: ignore[misc]
    tokens = change_everything(b)
    b.sync_to_done(2)
    b.net += seen  # everything once more
    b.settle()
    b.change([0, 1, 2])
    assert [b.outcome(t) for t in tokens] == [Outcome.OK] * 6
    for key in KEYS:
        assert len(set(b.contents(key))) == 1


def test_a_transfer_that_arrives_damaged_is_sent_again() -> None:
    b = behind()
    b.propose([0, 1], 2)
    b.settle()
    b.record([0, 1], 2)
    damaged = 0
    for _ in range(100):
        b.flush()
        if not b.net:
            break
        first = b.net.pop(0)
        bad = first.type == SYNC and first.to == 2 and len(first.body) > 150 and damaged < 3
        damaged += bad
        state = PayloadState.BAD if bad else PayloadState.READY
        b.step(first.to, wire.message(b.now, first.body, state))
    assert damaged
    b.sync(2)
    assert len(set(b.contents(KEYS[0]))) == 1


def test_a_full_target_is_given_up_and_filled_later() -> None:
    b = behind()
    b.nodes[2].step(wire.space(b.now, Outcome.OK, Outcome.NO_SPACE))
    b.change([0, 1], 2)
    b.run(3000)
    status = b.nodes[1].status()
    assert not status.sync_done
    assert status.sync_failure == Outcome.NO_SPACE
    b.done(b.write((B, 0, 1), b"goes on", key=KEYS[0]))  # writes don't wait for it
    b.nodes[2].step(wire.space(b.now, Outcome.OK, Outcome.OK))
    b.sync(2)


def test_a_member_that_is_being_filled_serves_nothing() -> None:
    b = behind()
    b.change([0, 1], 2)
    token = b.read(2, key=KEYS[3])
    assert b.outcome(token) == Outcome.OFFLINE
    assert b.replies[token].reason == Reason.SYNCING


def test_case_27_a_target_that_synced_after_a_space_was_removed_becomes_head() -> None:
    b = behind()
    b.step(0, wire.set_epoch(b.now, 900, b.chain, 1, MAX_EPOCH))
    b.settle()
    b.step(0, wire.remove_page(b.now, 901, b.chain, 1, None, 100))
    b.settle()
    assert b.replies[901].outcome == Outcome.OK
    b.sync(2)
    b.change([2, 0, 1])
    late = b.write((B, 0, 1), b"late", key=KEYS[0], epoch=5)
    b.settle()
    assert b.outcome(late) == Outcome.STALE_EPOCH
    assert all(b.contents(key) == [None] * 3 for key in KEYS)


def test_mutant_without_the_copy_of_epochs_is_caught() -> None:
    b = behind(mutant=Mutant.NO_EPOCH_COPY)
    b.step(0, wire.set_epoch(b.now, 900, b.chain, 1, 7))
    b.settle()
    b.history.epoch_set(1, 7)
    with pytest.raises(Violation, match="epoch"):
        b.sync(2)


def test_case_26_retries_are_answered_by_a_head_that_was_filled() -> None:
    b = behind()
    first = b.write((B, 0, 1), b"once", key=KEYS[0])
    version = b.done(first)
    b.done(b.send(Kind.REMOVE, (B, 1, 1), key=KEYS[0]))
    b.sync(2)
    b.change([2])
    assert b.done(b.again(first)) == version
    assert b.contents(KEYS[0]) == [None]


def test_case_26_a_retry_of_what_was_refused_before_is_refused_by_a_head_that_was_filled() -> None:
    b = behind()
    b.nodes[0].step(wire.space(b.now, Outcome.OK, Outcome.NO_SPACE))
    refused = b.write((B, 0, 1), b"too much", key=KEYS[0])
    b.settle()
    assert b.outcome(refused) == Outcome.NO_SPACE
    b.sync(2)
    b.change([2])
    again = b.again(refused)
    b.settle()
    assert b.outcome(again) == Outcome.NO_SPACE


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("after", range(0, 30, 3))
def test_a_crash_at_any_moment_of_a_recovery(who: int, after: int) -> None:
    b = behind()
    b.propose([0, 1], 2)
    b.settle()
    b.record([0, 1], 2)
    messages(b, after)
    tokens = change_everything(b)
    messages(b, 4)
    b.restart(who, keep=after % 3)
    b.drop()
    b.change([0, 1], 2)  # in its new incarnation
    again = [b.again(t) if b.outcome(t) is None else t for t in tokens]
    b.sync(2)
    b.settle()
    fine = (Outcome.OK, Outcome.EXISTED, Outcome.STALE_CHAIN)
    assert all(b.outcome(t) in fine for t in again), [b.outcome(t) for t in again]
    for key in KEYS:
        assert len(set(b.contents(key))) == 1

"""Evictions that meet what happens to their chunk, and to their chain. docs/craq.md, Eviction."""

from __future__ import annotations

import pytest
import sim_wire as wire
from sim_bench import KEY, SYNC, UPDATE, Bench, of
from sim_wire import Answer, Eviction, Kind, Mutant, Notice, Outcome, RecordKind, Sample

A = 1  # a client


def put(b: Bench, payload: bytes, key: bytes = KEY) -> int:
    return b.send(Kind.CREATE, (0, 0, 0), key=key, payload=payload, tag=9)


def order(b: Bench, chosen: Sample, n: int = 0) -> Eviction:
    """Ordered at node n; its effects are carried out."""
    answers = b.nodes[n].step(wire.evict(b.now, KEY, chosen))
    b.take(n, answers)
    (answer,) = [body for kind, body in answers if kind == Answer.EVICTION]
    assert isinstance(answer, Eviction)
    return answer


def look(b: Bench, n: int, **more: int) -> Outcome | None:
    """A read that the checks of order don't see: they know no time to live."""
    b.token += 1
    b.step(n, wire.read(b.now, b.token, b.chain, KEY, **more))
    return b.outcome(b.token)


def stored(mutant: int = Mutant.NONE) -> Bench:
    b = Bench(mutant=mutant)
    b.done(put(b, b"block"))
    return b


def test_an_eviction_goes_down_the_chain_and_a_put_that_comes_meanwhile_waits_for_it() -> None:
    b = stored()
    assert order(b, b.nodes[0].sample(KEY)) == Eviction.ORDERED
    again = put(b, b"new")
    assert b.outcome(again) is None
    b.settle()
    assert b.outcome(again) == Outcome.OK  # stored anew, not found
    assert b.contents() == [b"new"] * 3


def test_an_eviction_without_anything_else_leaves_nothing_anywhere() -> None:
    b = stored()
    assert order(b, b.nodes[0].sample(KEY)) == Eviction.ORDERED
    read = b.read(2)
    b.settle()
    assert b.outcome(read) in (Outcome.OK, Outcome.ABSENT)
    assert b.contents() == [None] * 3
    assert b.outcome(b.read(1)) == Outcome.ABSENT


def test_a_chunk_that_was_used_since_stays() -> None:
    b = stored()
    chosen = b.nodes[0].sample(KEY)
    b.read(0, flags=8)
    assert order(b, chosen) == Eviction.CHANGED
    chosen = b.nodes[0].sample(KEY)
    assert b.outcome(put(b, b"block")) == Outcome.EXISTED  # counts as use in the same step
    assert order(b, chosen) == Eviction.CHANGED
    chosen = b.nodes[0].sample(KEY)
    b.nodes[0].step(wire.touch(KEY))  # another replica's report
    assert order(b, chosen) == Eviction.CHANGED
    chosen = b.nodes[0].sample(KEY)
    b.read(0)  # that doesn't
    assert order(b, chosen) == Eviction.ORDERED


def test_a_chunk_with_something_pending_stays() -> None:
    b = stored()
    chosen = b.nodes[0].sample(KEY)
    token = b.send(Kind.REPLACE, (A, 0, 1), payload=b"other")
    assert order(b, chosen) == Eviction.CHANGED
    b.done(token)
    assert order(b, chosen) == Eviction.CHANGED  # another version by now
    assert b.contents() == [b"other"] * 3


def test_a_pinned_chunk_stays() -> None:
    b = Bench()
    b.step(0, pinned_put(b))
    b.settle()
    chosen = b.nodes[0].sample(KEY)
    assert chosen.pinned
    assert order(b, chosen) == Eviction.CHANGED


def pinned_put(b: Bench, expiry: int = 0) -> bytes:
    from sim_model import Op

    b.token += 1
    op = Op((0, 0, 0), Kind.CREATE, KEY, lower=b.history.chunk(KEY).known)
    op.payload, op.length = b"pinned", 6
    b.history.creates[KEY, b"pinned"] = op
    b.op_of[b.token] = op
    return wire.update(
        b.now, b.token, b.chain, (0, 0, 0), KEY, Kind.CREATE, payload=b"pinned", pin=True, expiry=expiry
    )


def test_an_expired_chunk_is_absent_for_clients_and_goes_though_it_was_used_or_pinned() -> None:
    b = Bench()
    b.step(0, pinned_put(b, expiry=1000))
    b.settle()
    assert look(b, 2) == Outcome.OK
    for node in b.nodes:
        node.step(wire.clock(1000))
    assert look(b, 2) == Outcome.ABSENT
    assert look(b, 0, flags=2) == Outcome.ABSENT  # exists
    chosen = b.nodes[0].sample(KEY)
    assert chosen.expired
    assert order(b, chosen._replace(last_access=77)) == Eviction.ORDERED
    b.settle()
    assert b.contents() == [None] * 3


def test_a_put_over_an_expired_chunk_stores() -> None:
    b = Bench()
    b.step(0, pinned_put(b, expiry=1000))
    b.settle()
    for node in b.nodes:
        node.step(wire.clock(1000))
    chosen = b.nodes[0].sample(KEY)
    b.done(put(b, b"new"))
    assert b.contents() == [b"new"] * 3
    assert order(b, chosen) == Eviction.CHANGED


def test_only_the_head_evicts() -> None:
    b = stored()
    for n in (1, 2):
        assert order(b, b.nodes[n].sample(KEY), n) == Eviction.NOT_HEAD
    b.restart(0)
    assert order(b, b.nodes[0].sample(KEY), 0) == Eviction.NOT_HEAD


def test_the_head_goes_during_an_eviction_that_others_have() -> None:
    b = stored()
    assert order(b, b.nodes[0].sample(KEY)) == Eviction.ORDERED
    b.flush()
    b.deliver(of(UPDATE, 1))
    b.flush()
    b.drop()
    b.change([1, 2])
    b.settle()
    assert b.contents() == [None] * 2
    b.done(put(b, b"new"))
    assert b.contents() == [b"new"] * 2


def test_the_head_goes_with_an_eviction_that_nobody_else_has() -> None:
    b = stored()
    assert order(b, b.nodes[0].sample(KEY)) == Eviction.ORDERED
    b.drop()
    b.drop()
    b.change([1, 2])
    b.settle()
    assert b.contents() == [b"block"] * 2


@pytest.mark.parametrize("evicted", [True, False], ids=["evicted", "removed"])
def test_a_target_that_was_told_of_an_eviction_serves_before_it_has_what_is_pending_on_it(
    evicted: bool,
) -> None:
    """It was told that there is no chunk, because of the eviction. That isn't the later removal, which
    nobody but the source has, on top of a write that the target lacks as well."""
    b = Bench(members=2)
    b.done(b.write((A, 0, 1), b"block"))
    b.change([0])
    b.sync_to_done(1)
    if evicted:
        assert order(b, b.nodes[0].sample(KEY)) == Eviction.ORDERED
    else:
        b.send(Kind.REMOVE, (A, 3, 1))
    b.flush(0)
    anew = b.write((A, 1, 1), b"new")
    b.flush(0)
    gone = b.send(Kind.REMOVE, (A, 2, 1))
    b.flush(0)
    assert [b.outcome(t) for t in (anew, gone)] == [None, None]
    b.propose([0, 1])  # the source waits with it for the one transfer, and begins no other
    b.deliver(of(SYNC, 1))
    assert RecordKind.ERASE in [r.kind for r in b.shadow(1).tail if r.key == KEY]
    b.settle()
    assert [b.outcome(t) for t in (anew, gone)] == [None, None]
    assert b.shadow(1).durable_position[KEY] == len(b.history.chunk(KEY).states) - 1 == 2
    b.record([0, 1])
    b.flush()
    while not any(m.type == Notice.RESENT for m in b.net):
        assert b.net
        b.deliver()
        b.flush()
    b.deliver(of(Notice.RESENT, 1))  # overtakes the updates that were sent again
    assert b.nodes[1].status().serving
    assert b.outcome(b.read(1)) == Outcome.ABSENT
    assert b.outcome(anew) is None
    b.settle()
    assert [b.outcome(t) for t in (anew, gone)] == [Outcome.OK] * 2
    assert b.contents() == [None] * 2


def test_what_finds_no_room_waits_while_evictions_make_some() -> None:
    b = Bench()
    b.step(0, wire.space(b.now, Outcome.OVER_QUOTA, Outcome.OK, evicts=True))
    token = put(b, b"block")
    b.settle()
    b.tick(100)
    assert b.outcome(token) is None
    b.step(0, wire.space(b.now, Outcome.OK, Outcome.OK, evicts=True))
    b.tick(100)
    b.done(token)
    b.step(0, wire.space(b.now, Outcome.OVER_QUOTA, Outcome.OK))
    assert b.outcome(put(b, b"other", key=wire.key_of(1, 2))) == Outcome.OVER_QUOTA  # nothing to evict


@pytest.mark.parametrize("mutant", [Mutant.EVICT_WHATEVER_HAPPENED, Mutant.EVICT_BESIDE_PENDINGS])
def test_mutants_of_the_conditions_are_seen(mutant: Mutant) -> None:
    b = stored(mutant)
    chosen = b.nodes[0].sample(KEY)
    if mutant == Mutant.EVICT_BESIDE_PENDINGS:
        b.send(Kind.REPLACE, (A, 0, 1), payload=b"other")
        pending = b.nodes[0].dump().store.chunks[KEY].pendings
        assert order(b, chosen._replace(version=pending[-1][0])) == Eviction.ORDERED
    else:
        b.read(0, flags=8)
        assert order(b, chosen) == Eviction.ORDERED


def test_mutant_that_shows_expired_chunks_is_seen() -> None:
    b = Bench(mutant=Mutant.EXPIRED_IS_THERE)
    b.step(0, pinned_put(b, expiry=1000))
    b.settle()
    for node in b.nodes:
        node.step(wire.clock(1000))
    assert look(b, 2) == Outcome.OK

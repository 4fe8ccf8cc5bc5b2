"""Case 18: damage at rest, found in every way, repaired from a good replica and never spread."""

from __future__ import annotations

import pytest
import sim_wire as wire
from sim_bench import KEY, Bench
from sim_wire import Kind, Outcome, key_of

A, B = 1, 2  # clients
OTHER = key_of(1, 1)


def with_data(members: int = 3, *, spares: int = 0) -> Bench:
    b = Bench(members, spares=spares)
    b.done(b.write((A, 0, 1), b"data"))
    b.done(b.write((A, 1, 1), b"other", key=OTHER))
    b.flush()
    return b


def whole(b: Bench, n: int) -> bool:
    return not any(c.damaged for c in b.nodes[n].dump().store.chunks.values())


@pytest.mark.parametrize("n", [0, 1, 2])
def test_case_18_found_by_a_client_s_read(n: int) -> None:
    b = with_data()
    b.nodes[n].step(wire.damage(KEY))
    token = b.read(n)
    assert b.outcome(token) == Outcome.CORRUPT  # the client asks another
    assert b.outcome(b.read((n + 1) % 3)) == Outcome.OK
    b.settle()
    assert b.repaired == [(n, KEY, True)]
    assert b.outcome(b.read(n)) == Outcome.OK
    assert b.nodes[n].status().repaired == 1
    assert b.nodes[n].status().damaged == 0


@pytest.mark.parametrize("n", [0, 1, 2])
def test_case_18_found_by_the_scrubber(n: int) -> None:
    b = with_data()
    b.nodes[n].step(wire.damage(KEY))
    version = b.nodes[n].dump().store.chunks[KEY].version
    b.step(n, wire.damaged(b.now, KEY, version))
    b.settle()
    assert b.repaired == [(n, KEY, True)]
    assert whole(b, n)


@pytest.mark.parametrize("n", [1, 2])
def test_case_18_found_by_a_comparison(n: int) -> None:
    """Its checksums fit its bytes: only another replica tells."""
    b = with_data()
    b.nodes[n].step(wire.damage(KEY, silent=True))
    at: bytes | None = bytes(24)
    while at is not None:
        at, answers = b.nodes[n].compare(b.now, at)
        b.take(n, answers)
        b.settle()
    assert b.contents() == [b"data"] * 3
    assert b.contents(OTHER) == [b"other"] * 3


@pytest.mark.parametrize("n", [0, 1, 2])
def test_case_18_found_during_an_append(n: int) -> None:
    b = with_data()
    b.nodes[n].step(wire.damage(KEY))
    token = b.write((A, 0, 2), b"more", offset=4)
    b.run(1000)
    assert b.outcome(token) == Outcome.OK
    assert b.contents() == [b"datamore"] * 3
    assert whole(b, n)


def test_case_18_a_replacement_needs_no_repair() -> None:
    b = with_data()
    b.nodes[1].step(wire.damage(KEY))
    b.done(b.send(Kind.REPLACE, (A, 0, 2), payload=b"new"))
    assert b.contents() == [b"new"] * 3
    assert whole(b, 1)


def test_case_18_found_at_the_source_of_a_recovery() -> None:
    b = with_data(2, spares=1)
    b.nodes[1].step(wire.damage(KEY))  # the last serving member
    b.sync(2)
    assert b.contents() == [b"data"] * 3
    assert whole(b, 1)
    assert whole(b, 2)


def test_case_18_the_only_copy_is_damaged_and_never_spread() -> None:
    b = with_data(1, spares=1)
    b.nodes[0].step(wire.damage(KEY))
    assert b.outcome(b.read(0)) == Outcome.CORRUPT
    b.change([0], 1)
    b.run(5000)
    assert not b.done_by(1)
    assert KEY not in b.nodes[1].dump().store.chunks
    assert b.nodes[0].status().sync_failure == Outcome.CORRUPT
    b.done(b.send(Kind.REPLACE, (A, 0, 2), payload=b"new"))  # its owner writes it anew
    b.run(2000)
    b.sync(1)
    assert b.contents() == [b"new"] * 2


def test_case_18_the_first_that_is_asked_is_damaged_too() -> None:
    b = with_data()
    b.nodes[1].step(wire.damage(KEY))
    b.nodes[2].step(wire.damage(KEY))
    b.read(2)
    b.run(2000)
    assert whole(b, 1)
    assert whole(b, 2)
    assert b.contents() == [b"data"] * 3


def test_a_repair_does_not_undo_what_was_written_meanwhile() -> None:
    b = with_data()
    b.nodes[1].step(wire.damage(KEY))
    version = b.nodes[1].dump().store.chunks[KEY].version
    b.step(1, wire.damaged(b.now, KEY, version))
    late = [m for m in b.net if m.type == 255]
    assert late
    b.drop()
    b.done(b.send(Kind.REPLACE, (A, 0, 2), payload=b"new"))
    b.net += late
    b.settle()
    b.run(1500)
    assert b.contents() == [b"new"] * 3


def test_a_repair_keeps_what_is_pending_above() -> None:
    b = with_data()
    token = b.write((A, 0, 2), b"more", offset=4)
    b.deliver()
    b.flush(0, 1)  # 1 has it pending
    b.nodes[1].step(wire.damage(KEY))
    version = b.nodes[1].dump().store.chunks[KEY].version
    b.step(1, wire.damaged(b.now, KEY, version))
    b.settle()
    b.run(1000)
    assert b.outcome(token) == Outcome.OK
    assert b.contents() == [b"datamore"] * 3
    assert whole(b, 1)
    again = b.write((B, 0, 1), b"!", offset=8)
    b.done(again)

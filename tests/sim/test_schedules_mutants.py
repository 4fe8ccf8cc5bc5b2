"""Deliberate breaks that random worlds meet too seldom: each is caught by the schedule of its case.

Those of leases are beside their cases in test_schedules_leases, others in test_schedules_writes and
test_schedules_recovery; all that random search finds are in test_search.
"""

from __future__ import annotations

import pytest
import sim_wire as wire
from sim_bench import KEY, SYNC, Bench, Message
from sim_model import Violation
from sim_wire import Kind, Mutant
from test_schedules_recovery import KEYS, behind, change_everything

A, B = 1, 2  # clients


def test_versions_that_are_used_twice() -> None:
    b = Bench(1, mutant=Mutant.REUSE_VERSIONS_AFTER_RESTART)
    b.done(b.write((A, 0, 1), b"one"))
    b.restart(0, keep=100)
    b.record(same=True)  # the version that its last incarnation had adopted
    b.settle()
    with pytest.raises(Violation, match=r"old version|I2"):
        b.write((B, 0, 1), b"another")


def test_dirty_reads_at_a_new_last_member() -> None:
    """The last member dies having committed; the one before it becomes the last."""
    b = Bench(mutant=Mutant.SERVE_DIRTY_AS_NEW_LAST)
    b.done(b.write((A, 0, 1), b"one"))
    token = b.write((A, 0, 2), b"two")
    while (1, 1, 2) not in b.history.chunk(KEY).positions:
        b.deliver(lambda m: m.type != wire.Notice.ACK)
        b.flush()
    read = b.read(2)
    assert b.replies[read].content == b"two"  # some client knows it
    b.drop()
    b.propose([0, 1])
    b.settle()
    b.record([0, 1])
    b.flush(1)
    assert b.outcome(token) is None
    with pytest.raises(Violation, match="I3"):
        b.read(1, chain=(1, 1))


def transfers_again(mutant: int) -> None:
    """All that was sent to a member that is being filled comes once more, later."""
    b = behind(mutant=mutant, window=4)
    b.propose([0, 1], 2)
    b.settle()
    b.record([0, 1], 2)
    seen: list[Message] = []
    for _ in range(200):
        b.flush()
        if not b.net:
            break
        first = b.net.pop(0)
        if first.type == SYNC and first.to == 2:
            seen.append(first)
        b.step(first.to, wire.message(b.now, first.body))
    change_everything(b)
    b.sync_to_done(2)
    b.settle()
    b.net += seen
    b.settle()
    b.change([0, 1, 2])
    for key in KEYS:
        assert len(set(b.contents(key))) == 1


def test_transfers_that_are_taken_twice() -> None:
    transfers_again(Mutant.NONE)
    with pytest.raises((Violation, AssertionError)):
        transfers_again(Mutant.IGNORE_SYNC_NUMBERS)


def damage_at_the_source(mutant: int) -> None:
    b = Bench(2, spares=1, mutant=mutant)
    b.done(b.write((A, 0, 1), b"data"))
    b.flush()
    b.nodes[1].step(wire.damage(KEY))
    b.sync(2)
    assert b.contents() == [b"data"] * 3


def test_damage_that_is_sent_on() -> None:
    damage_at_the_source(Mutant.NONE)
    with pytest.raises(Violation, match="I10"):
        damage_at_the_source(Mutant.SPREAD_CORRUPTION)


def late_repair(mutant: int) -> None:
    """The good copy arrives when the chunk has been written anew."""
    b = Bench(mutant=mutant)
    b.done(b.write((A, 0, 1), b"data"))
    b.flush()
    b.nodes[1].step(wire.damage(KEY))
    b.step(1, wire.damaged(b.now, KEY, b.nodes[1].dump().store.chunks[KEY].version))
    while not any(m.type == SYNC and m.to == 1 for m in b.net):
        b.deliver()
        b.flush()
    late = list(b.net)
    b.drop()
    b.done(b.send(Kind.REPLACE, (A, 0, 2), payload=b"new"))
    b.net += late
    b.settle()
    b.done(b.write((A, 0, 3), b"!", offset=3))
    assert b.contents() == [b"new!"] * 3


def test_a_repair_over_another_version() -> None:
    late_repair(Mutant.NONE)
    with pytest.raises((Violation, AssertionError)):
        late_repair(Mutant.REPAIR_ANY_VERSION)

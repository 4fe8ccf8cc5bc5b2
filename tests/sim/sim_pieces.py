"""Situations that several schedules begin with."""

from __future__ import annotations

import sim_wire as wire
from sim_bench import Bench
from sim_wire import Kind, Outcome

A = 1  # a client


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

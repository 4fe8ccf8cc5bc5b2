"""metadata.cluster.decisions: what only time changes. Members persist at once; a fill never ends."""

from __future__ import annotations

import errno
import itertools
from types import SimpleNamespace
from typing import Any, cast

from chain_seats import OFFLINE, A, B, C, holds, outside, record, report, seat
from msgspec.structs import replace

from metadata.cluster.chain import Seat, recorded_by, version_of
from metadata.cluster.decisions import Decisions
from metadata.cluster.members import incarnation_in, serving_of, syncing_of
from metadata.cluster.routing import View

T = 5.0


class World:
    """A chain of A, which serves, and others, whose fill fails with `failure` or is never persisted."""

    def __init__(self, states: str, failure: int) -> None:
        self.record = record(states)
        self.failure = failure
        self.hung: set[int] = set()
        self.seats: dict[int, Seat] = {m: outside(m, incarnation=1) for m in self.record.members}
        self.seats[A] = holds(A)
        self.decisions = Decisions(lambda target: self.seats[target], T)
        self.decisions.forget(3)
        self.fills: list[tuple[float, int]] = []  # since when who is filled

    def view(self) -> View:
        targets = {m: SimpleNamespace(node=m) for m in self.record.members}
        return cast(View, SimpleNamespace(chains={9: self.record}, targets=targets))

    def persist(self, version: tuple[int, int], part: Any) -> None:
        filled = syncing_of(self.record)
        for target in self.record.members:
            if not incarnation_in(part, target) or target in self.hung:
                continue
            more: dict[str, Any] = {"acts": version_of(self.record)}
            if target == A and filled:
                more |= {"sync_target": filled, "sync_failure": self.failure}
            self.seats[target] = seat(report(target, version, state=1 if target == A else OFFLINE, **more))

    def run(self, seconds: float) -> None:
        for at in range(int(seconds * 2)):
            now_s = at / 2
            self.decisions.look(self.view(), [9] if at == 0 else [], now_s)
            self.decisions.look_again(self.view(), now_s)
            proposal = self.decisions.proposals.get(9)
            if proposal is not None and proposal.base == version_of(self.record):
                self.persist(proposal.version, proposal.next)
                self.decisions.look(self.view(), [9], now_s)
            for _, made in self.decisions.take_batch(9):
                self.record = recorded_by(self.record, made)
                self.decisions.landed([9])
                self.persist(version_of(self.record), self.record)
                self.decisions.look(self.view(), [9], now_s)
                if syncing_of(self.record) not in (0, self.fills[-1][1] if self.fills else 0):
                    self.fills.append((now_s, syncing_of(self.record)))
        assert not self.decisions.impossible


def test_two_whose_syncs_fail_take_turns_ever_more_slowly() -> None:
    world = World("soo", errno.ENOSPC)
    world.run(2000)
    assert {target for _, target in world.fills} == {B, C}
    times = [at for at, _ in world.fills]
    turns = [after - before for before, after in itertools.pairwise(times)]
    assert 40 < len(turns) < 100
    assert min(turns) >= 2 * T
    assert 4 * T <= max(turns) <= 10 * T  # somebody healthy may be among them: not ever longer


def test_a_sync_that_gets_on_stays() -> None:
    world = World("soo", 0)
    world.run(500)
    assert [target for _, target in world.fills] == [B]


def test_one_that_never_persists_its_fill_is_tried_ever_more_seldom() -> None:
    world = World("so", 0)
    world.hung = {B}
    world.run(2000)
    assert world.fills == []
    assert 20 < world.record.counter - 5 < 200


def test_one_whose_node_comes_back_from_a_silence_is_filled_at_once() -> None:
    """What made it too slow is over, as far as anybody can tell: its pause, however long by now, too."""
    world = World("so", 0)
    world.hung = {B}
    world.run(300)
    world.hung = set()
    paused = world.decisions._pauses[B]
    before_s = paused[1] - 1.0
    world.decisions.look(world.view(), [9], before_s)
    tried = world.decisions.proposals[9].version
    assert world.decisions.of[9].proposal is None
    world.decisions.came_back([B])
    world.decisions.look(world.view(), [9], before_s)
    assert world.decisions.proposals[9].version > tried
    assert syncing_of(world.decisions.proposals[9].next) == B


def test_members_that_come_and_go_cannot_replace_each_proposal_for_ever() -> None:
    """B and C are silent in turns, never for as long as the others take to persist that they are out."""
    world = World("sss", 0)
    world.seats = {m: holds(m) for m in (A, B, C)}
    decisions = world.decisions
    made: dict[tuple[int, int], float] = {}  # version -> when it was proposed
    records: list[tuple[float, tuple[int, ...]]] = []
    for step in range(80):
        now_s = step / 2
        silent = 0 if records else (C if step % 4 < 2 else B)
        for target in (A, B, C):
            kept = world.seats[target].report
            world.seats[target] = Seat(1, target != silent, target == silent, kept)
        decisions.look(world.view(), [9], now_s)
        decisions.look_again(world.view(), now_s)
        proposal = decisions.proposals.get(9)
        if proposal is not None and proposal.base == version_of(world.record):
            begun_s = made.setdefault(proposal.version, now_s)
            if now_s - begun_s >= 1.0:
                for target in (A, B, C):
                    if target != silent:
                        said = report(target, proposal.version, acts=version_of(world.record))
                        world.seats[target] = seat(said)
                decisions.look(world.view(), [9], now_s)
        for _, one in decisions.take_batch(9):
            world.record = recorded_by(world.record, one)
            records.append((now_s, serving_of(world.record)))
            decisions.landed([9])
            for target in (A, B, C):
                world.seats[target] = seat(
                    report(target, version_of(world.record), acts=version_of(world.record))
                )
    assert not decisions.impossible
    assert len(made) > 4  # they did replace each other
    assert records
    at, serving = records[0]
    assert A in serving
    assert 2 * T <= at <= 2 * T + 4


def test_each_chain_is_looked_at_in_turn() -> None:
    """A decision made in a bad moment doesn't stay for want of news."""
    records = {n: replace(record("sss"), id=n) for n in range(1, 201)}
    seats = {m: holds(m) for m in (A, B, C)}
    targets = {m: SimpleNamespace(node=m) for m in seats}
    view = cast(View, SimpleNamespace(chains=records, targets=targets))
    decisions = Decisions(lambda target: seats[target], T)
    decisions.forget(3)
    for _ in range(5):
        decisions.look_again(view, 0.0)
    assert decisions.of.keys() == records.keys()
    del records[7]  # nothing is decided about one that is gone
    for _ in range(5):
        decisions.look_again(view, 0.0)

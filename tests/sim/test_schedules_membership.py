"""Cases 3, 11 to 15 and 22: members that go and come, with the real manager (sim_scene)."""

from __future__ import annotations

from itertools import permutations

import pytest
import sim_wire as wire
from msgspec.structs import replace
from sim_bench import HELD, REFUSAL, UPDATE, Bench, of
from sim_node import Node
from sim_scene import Scene
from sim_wire import Kind, Outcome, Reason, key_of

from ffs.proto.cluster import TargetReport

A, B = 1, 2  # clients
ORDERS = list(permutations(range(3)))


@pytest.mark.parametrize("reached", [False, True])
def test_case_03_the_middle_dies_and_its_predecessor_resends_to_the_new_successor(reached: bool) -> None:
    b = Bench()
    b.done(b.write((A, 0, 1), b"old"))
    token = b.write((A, 0, 2), b"new")
    b.deliver(of(UPDATE, 1))
    if reached:
        b.deliver(of(UPDATE, 2))
        b.flush(2)
    b.flush(0, 1)
    b.drop()
    b.change([0, 2])  # 1 is gone
    assert b.outcome(token) == Outcome.OK
    assert b.contents() == [b"new"] * 2
    assert b.done(b.again(token)) == (1, 1, 2)


def test_case_03_the_new_successor_has_refused_it_already() -> None:
    b = Bench()
    b.done(b.write((A, 0, 1), b"old"))
    b.nodes[2].step(wire.space(b.now, Outcome.OK, Outcome.NO_SPACE))
    token = b.write((A, 0, 2), b"new")
    b.deliver(of(UPDATE, 1))
    b.deliver(of(UPDATE, 2))
    for _ in range(3):
        b.flush()
        b.deliver(of(HELD))
    assert b.drop(of(REFUSAL)) == 1
    b.nodes[2].step(wire.space(b.now, Outcome.OK, Outcome.OK))
    b.drop()
    b.change([0, 2])
    assert b.outcome(token) == Outcome.NO_SPACE
    assert b.contents() == [b"old"] * 2


def test_case_11_sync_done_of_an_earlier_attempt_comes_late() -> None:
    s = Scene()
    s.write(b"one")
    s.crash(2)
    s.until(lambda: s.serving() == (0, 1))
    s.write(b"two")
    manager = s.primary()
    done: list[tuple[Node, int, int, int, TargetReport]] = []
    real = manager.heartbeat

    def delay_done(node: Node, starts: int, incarnation: int, asked: int, report: TargetReport) -> None:
        if report.sync_done:
            done.append((node, starts, incarnation, asked, report))
            report = replace(report, sync_done=False)
        real(node, starts, incarnation, asked, report)

    manager.heartbeat = delay_done  # type: ignore[method-assign]
    s.start(2)
    s.until(lambda: bool(done))
    assert s.syncing() == 2
    first = s.world.history.current
    s.crash(2, wipe=True)  # before the manager has heard that it is done
    s.start(2)
    s.until(lambda: s.syncing() == 2 and s.world.history.current > first and s.settled())
    again = s.world.history.current
    real(*done[0])
    s.wait(20)
    assert s.world.history.current == again
    assert s.syncing() == 2
    assert s.primary().live is None
    manager.heartbeat = real  # type: ignore[method-assign]
    s.whole()  # and its own "done" counts


def test_case_11_a_heartbeat_of_an_earlier_incarnation_comes_late() -> None:
    s = Scene()
    manager = s.primary()
    node = s.node(1)
    report = s.world.managers.report(node)
    late = (node, node.starts, node.incarnation, node.clock(), report)
    s.crash(1)
    s.start(1)
    s.until(lambda: node.incarnation == 2)
    heard = manager.reports.get(node.target)
    manager.heartbeat(*late)
    assert manager.reports.get(node.target) == heard
    s.whole()
    assert s.world.managers.store.record.incarnations[s.serving().index(1)] == 2


def test_case_12_a_restart_faster_than_the_failure_timeout() -> None:
    s = Scene()
    s.write(b"data")
    version = s.world.history.current
    s.crash(1)
    s.wait(20)
    s.start(1)
    s.until(lambda: s.node(1).incarnation == 2, 200)
    assert s.world.history.current == version  # it looks as if it served
    assert s.read_at(1) == Outcome.OFFLINE
    s.whole()
    assert s.world.history.current > version
    assert s.read_at(1) == Outcome.OK
    s.write(b"more")


@pytest.mark.parametrize("dies", ORDERS, ids=str)
@pytest.mark.parametrize("returns", ORDERS, ids=str)
def test_case_13_all_die_in_every_order_and_return_in_every_order(
    dies: tuple[int, ...], returns: tuple[int, ...]
) -> None:
    s = Scene()
    for n, index in enumerate(dies):
        s.write(b"%d" % n, key_of(1, n))
        s.crash(index)
        if n < 2:
            s.until(lambda index=index: index not in s.serving())  # type: ignore[misc]
    leader = dies[-1]
    assert s.serving() == (leader,)
    for index in returns:
        s.start(index)
        s.wait(2500)
        back = returns[: returns.index(index) + 1]
        assert (leader in back) == any(s.serves(i) for i in range(3))  # only it has all that was acknowledged
    s.whole()
    assert set(s.serving()) == {0, 1, 2}
    assert all(s.read_at(i, key_of(1, n)) == Outcome.OK for i in range(3) for n in range(3))


@pytest.mark.parametrize("returns", [(0,), (1,), (2,), (0, 2), (2, 1)], ids=str)
def test_case_13_all_die_at_once_and_any_of_them_leads_the_chain_back(returns: tuple[int, ...]) -> None:
    s = Scene()
    s.write(b"data")
    for index in range(3):
        s.crash(index)
    for index in returns:
        s.start(index)
    s.until(lambda: set(s.serving()) == set(returns) and s.settled())
    assert s.read_at(returns[0]) == Outcome.OK
    s.write(b"more")
    for index in set(range(3)) - set(returns):
        s.start(index)
    s.whole()


@pytest.mark.parametrize("moment", range(0, 1600, 100))
def test_case_13_power_goes_while_the_manager_shrinks_the_chain(moment: int) -> None:
    s = Scene()
    s.write(b"data")
    s.crash(2)
    a = s.begin_write(b"more")
    s.wait(moment)
    s.crash(0, keep=0)
    s.crash(1, keep=0)
    alone = s.serving()
    s.wait(100)
    s.start(1)
    if 2 in alone:  # the chain of three was still recorded: nobody acknowledged without it
        s.start(2)
    else:
        s.start(0)
    s.until(lambda: a.finished)
    s.start(0)
    s.start(2)
    s.whole()


def test_case_14_the_only_serving_replica_dies_while_another_is_syncing() -> None:
    s = Scene(members=2, disk_ms=40)
    for n in range(20):
        s.write(b"%d" % n, key_of(1, n), kind=Kind.REPLACE)
    s.crash(1, wipe=True)
    s.until(lambda: s.serving() == (0,))
    s.start(1)
    s.until(lambda: s.syncing() == 1)
    s.crash(0)
    s.wait(5000)
    assert s.serving() == (0,)
    assert not s.serves(1)
    s.start(0)
    s.whole()
    assert s.read_at(1, key_of(1, 19)) == Outcome.OK


def test_case_14_it_never_returns_and_another_is_forced_to_lead() -> None:
    s = Scene(members=2)
    s.write(b"both")
    s.crash(1)
    s.until(lambda: s.serving() == (0,))
    s.write(b"alone", key_of(1, 1))
    s.crash(0)
    s.node(0).never_back = True
    s.start(1)
    s.wait(3000)
    assert not s.serves(1)
    assert s.world.managers.force_lead()
    s.until(lambda: s.serving() == (1,) and s.settled())
    assert s.read_at(1) == Outcome.OK
    assert s.read_at(1, key_of(1, 1)) == Outcome.ABSENT  # lost, knowingly
    s.write(b"goes on")


def test_case_15_a_wiped_device_is_filled_before_it_serves() -> None:
    s = Scene()
    s.write(b"data")
    s.crash(0, wipe=True)
    s.wait(30)
    s.start(0)
    s.until(lambda: s.syncing() == 0 or 0 not in s.serving())
    s.whole()
    assert s.read_at(0) == Outcome.OK
    assert s.world.history.installs == 1


def test_case_15_a_chain_whose_last_device_was_wiped_does_not_serve_empty() -> None:
    s = Scene(members=1)
    s.write(b"data")
    s.crash(0, wipe=True)
    s.start(0)
    s.wait(5000)
    assert not s.serves(0)
    assert s.read_at(0) == Outcome.OFFLINE


@pytest.mark.parametrize("change", ["crash", "cut"])
def test_case_22_the_manager_dies_between_persisting_and_the_record(change: str) -> None:
    s = Scene()
    s.write(b"data")
    s.crash(2)

    def all_have_persisted() -> bool:
        live = s.primary().live
        if live is None:
            return False
        persisted = [s.node(i).sim.status().proposed for i in range(2)]
        return persisted == [live.version] * 2

    s.until(all_have_persisted)
    first = s.primary()
    proposed = first.live
    assert proposed is not None
    if change == "crash":
        first.reset()
        first.up = False
    else:
        first.cut_until = s.world.now + 1_000_000
    assert s.serving() == (0, 1, 2)
    s.until(lambda: s.serving() == (0, 1))
    assert s.world.history.current > proposed.version
    assert s.world.history.current[0] == 2  # of the next manager
    s.write(b"more")
    s.start(2)
    s.whole()


def test_a_member_that_is_drained_serves_until_another_has_taken_its_place() -> None:
    s = Scene(spares=1)
    s.write(b"data")
    s.world.managers.want((0, 3, 2))
    s.until(lambda: s.syncing() == 3)
    assert s.serving() == (0, 1, 2)
    s.whole()
    assert s.serving() == (0, 3, 2)
    assert s.read_at(1) == Outcome.OFFLINE
    assert s.read_at(3) == Outcome.OK


def test_a_left_out_member_says_so() -> None:
    b = Bench()
    b.propose([0, 1])
    token = b.read(2)
    assert b.outcome(token) == Outcome.OFFLINE
    assert b.replies[token].reason == Reason.LEFT_OUT

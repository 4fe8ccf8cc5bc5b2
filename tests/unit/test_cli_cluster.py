"""`ffs cluster`: what a reply is shown as, and how a command watches what it began. No servers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import cast

import pytest
from msgspec.structs import replace

from ffs.cli import cluster_moves, main
from ffs.cli.cluster_moves import Watch, progress, run_force_lead, step, warning
from ffs.cli.cluster_view import (
    View,
    arrived,
    chain_fields,
    chain_table,
    condition,
    fold,
    node_fields,
    node_state,
    on_its_way,
    status_fields,
    status_lines,
    target_state,
)
from ffs.errors import FfsError, InvalidArgument
from ffs.proto.cluster import TableRoute, TargetState
from ffs.proto.commands import (
    ChainView,
    ClusterReply,
    DeviceView,
    ForceLead,
    ForceLeadReply,
    NodeView,
    SyncView,
    TargetView,
)

SERVING, SYNCING, OFFLINE = TargetState.SERVING, TargetState.SYNCING, TargetState.OFFLINE


def node(number: int, **changes: object) -> NodeView:
    device = DeviceView(
        uuid=bytes([number]) * 16,
        path=f"/dev/{number}",
        here=True,
        poisoned=False,
        size_bytes=1 << 30,
        capacity_bytes=1 << 30,
        free_bytes=1 << 29,
        targets=64,
        used_targets=2,
        free_targets=62,
    )
    known = NodeView(
        id=number,
        name=f"n{number}",
        domain="",
        alive=True,
        draining=False,
        incarnation=1,
        host="10.0.0.1",
        control="10.0.0.1:1",
        silent_ms=100,
        leaving=2,
        note="",
        devices=(device,),
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def target(number: int, on: int, **changes: object) -> TargetView:
    known = TargetView(
        id=number,
        node=on,
        device=bytes([on]) * 16,
        chain=1,
        state=int(SERVING),
        wanted=True,
        member=True,
        released=False,
        here=True,
        poisoned=False,
        used_bytes=0,
        chunks=0,
        damaged=0,
        repaired=0,
        scrubbed_bytes=0,
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def chain(number: int, *members: int, **changes: object) -> ChainView:
    known = ChainView(
        id=number,
        table=1,
        term=1,
        counter=3,
        members=members,
        states=(int(SERVING),) * len(members),
        wanted=members,
        writable=True,
        readable=True,
        whole=True,
        forced=0,
        reason="",
        shared_domain="",
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def view(*chains: ChainView, nodes: tuple[NodeView, ...] = (), **changes: object) -> View:
    known = ClusterReply(
        cluster=b"c" * 16,
        epoch=9,
        term=2,
        primary="10.0.0.9:7",
        manager_ms=1,
        rebalancing=False,
        nodes=nodes or (node(1), node(2), node(3), node(4)),
        targets=tuple(target(10 * n + k, n) for n in range(1, 5) for k in range(3)),
        chains=chains,
        tables=(TableRoute(id=1, name="default", version=1, replicas=2, chains=(1,)),),
    )
    return View(replace(known, **changes))  # type: ignore[arg-type]


MOVING = chain(
    2,
    20,
    30,
    40,
    states=(int(SERVING), int(SERVING), int(SYNCING)),
    wanted=(40, 30),
    whole=False,
    reason="target 40 is being filled",
    sync=SyncView(
        source=30,
        target=40,
        done=False,
        failure=0,
        chunks_total=200,
        chunks_compared=50,
        chunks_sent=40,
        bytes_sent=40 << 20,
        bytes_per_s=100 << 20,
    ),
)


def test_conditions() -> None:
    assert condition(chain(1, 10, 20)) == "whole"
    assert condition(MOVING) == "syncing"
    assert condition(chain(1, 10, 20, writable=False, whole=False)) == "offline"
    lost = chain(1, 10, 20, states=(int(SERVING), int(OFFLINE)), whole=False)
    assert condition(lost) == "degraded"
    assert not arrived(lost)
    assert not on_its_way(lost)
    assert on_its_way(MOVING)
    turning = chain(1, 10, 20, wanted=(20, 10), whole=False)
    assert condition(turning) == "moving"
    assert arrived(turning)


def test_node_states() -> None:
    assert node_state(node(1)) == "alive"
    assert node_state(node(1, draining=True)) == "draining"
    assert node_state(node(1, draining=True, leaving=0)) == "drained"
    assert node_state(node(1, alive=False, silent_ms=-1)) == "silent"
    assert node_state(node(1, alive=False, draining=True, leaving=0)) == "off"
    assert node_state(node(1, alive=False, silent_ms=65_000, draining=True)) == "silent 1:05, draining"
    assert target_state(target(1, 1, released=True)) == "released"
    assert target_state(target(1, 1, member=False)) == "to come"
    assert target_state(target(1, 1, wanted=False)) == "serving, leaving"


def test_status_says_what_is_wrong_and_what_moves() -> None:
    gone = [
        chain(n, 10, 20, states=(int(SERVING), int(OFFLINE)), whole=False, reason="target 20 isn't there")
        for n in (5, 6)
    ]
    gone.append(replace(gone[0], id=7, members=(11, 21), wanted=(11, 21), reason="target 21 isn't there"))
    shown = "\n".join(
        status_lines(
            view(
                chain(1, 10, 30),
                MOVING,
                *gone,
                nodes=(
                    node(1, domain="rack1"),
                    node(2, alive=False, draining=True, note="no room"),
                    node(3, draining=True, leaving=0),
                    node(4),
                ),
                rebalancing=True,
            )
        )
    )
    assert "3 of 4 storage nodes alive, 1 of 5 chains whole, 2.0 GiB of 4.0 GiB used" in shown
    assert "table default: 2 replicas, 5 chains: 1 whole, 1 syncing, 3 degraded" in shown
    assert "3 chains: a target of n2 isn't there" in shown
    assert "node n2 is being drained, 2 targets left: no room" in shown
    assert "node n3 is drained: it may be switched off" in shown
    assert "a rebalance goes on, 1 chain on their way" in shown
    assert "chain 2: n3 fills target 40 of n4, 25%, 40.0 MiB sent, 100.0 MiB/s" in shown
    assert "rack1" in shown


def test_status_marks_devices_that_keep_nothing() -> None:
    (here,), (gone,) = node(1).devices, node(2).devices
    null = replace(here, null_data=True), replace(gone, null_data=True, here=False)
    nodes = (node(1, devices=null[:1]), node(2, devices=null[1:]), node(3))
    shown = view(chain(1, 10, 20), nodes=nodes)
    lines = list(status_lines(shown))
    table = "\n".join(lines).splitlines()
    assert [row.split()[7] for row in table if "/dev/" in row] == ["null", "not", "ok"]
    assert "2 null devices, for measuring: no data is kept, files hold zeros" in lines
    fields = [cast(list[dict[str, object]], node_fields(each)["devices"]) for each in nodes]
    kept = [device["null_data"] for devices in fields for device in devices]
    assert kept == [True, True, False]
    assert "null" not in "\n".join(status_lines(view(chain(1, 10, 20))))


def test_counters_are_summed() -> None:
    care = view(chain(1, 10, 20))
    targets = [replace(t, damaged=1, scrubbed_bytes=1 << 20) for t in care.reply.targets]
    targets[0] = replace(targets[0], repaired=7)
    shown = view(chain(1, 10, 20, shared_domain="rack2"), targets=tuple(targets))
    text = "\n".join(status_lines(shown))
    assert "12.0 MiB read since the servers started, 12 chunks damaged now, 7 repaired" in text
    assert "1 chain with two replicas in failure domain rack2" in text
    fields = status_fields(shown)
    assert (fields["damaged"], fields["repaired"], fields["scrubbed_bytes"]) == (12, 7, 12 << 20)


def test_chain_lines() -> None:
    known = view(MOVING, chain(1, 10, 20, wanted=(10, 41), whole=False, reason="target 41 is to come"))
    text = chain_table(known, list(known.reply.chains))
    assert "20@n2,leaving 30@n3 40@n4:syncing" in text
    assert "10@n1 20@n2,leaving +41@n4" in text
    fields = chain_fields(known, MOVING)
    assert fields["nodes"] == ["n2", "n3", "n4"]
    assert fields["states"] == ["serving", "serving", "syncing"]
    assert fields["state"] == "syncing"
    assert fields["sync"]["bytes_per_s"] == 100 << 20  # type: ignore[index]
    assert node_fields(node(1, draining=True, leaving=0))["drained"] is True


def test_reasons_of_one_cause_are_one() -> None:
    known = view(chain(1, 10, 20))
    assert fold(known, "target 20 has version 3.4, older than 3.9") == (
        "a target of n2 has version ..., older than 3.9"
    )


# --- watching -------------------------------------------------------------------------------------


def watch(
    monkeypatch: pytest.MonkeyPatch,
    views: list[View],
    left: Callable[[View], list[ChainView] | None],
    stuck: Callable[[View], str] = lambda view: "",
) -> None:
    monkeypatch.setattr(cluster_moves, "POLL_S", 0)
    looks = iter(views)
    Watch(quiet=False).until_done(lambda: next(looks), left, stuck)


def moving(known: View) -> list[ChainView]:
    return [c for c in known.reply.chains if on_its_way(c)]


def test_a_line_for_each_change(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waits = replace(MOVING, id=3, members=(20, 30), states=(int(SERVING),) * 2, wanted=(30, 41), sync=None)
    arrives = replace(MOVING, counter=9, states=(int(SERVING),) * 3, sync=None)
    views = [
        view(MOVING, waits),
        view(MOVING, waits),
        view(arrives, waits),
        view(chain(2, 40, 30), replace(waits, states=(int(SERVING),) * 2)),
        view(chain(2, 40, 30), chain(3, 30, 41)),
    ]
    watch(monkeypatch, views, moving)
    assert capsys.readouterr().out.splitlines() == [
        "chain 2: target 40 of n4 is filled, target 20 of n2 is to leave",
        "chain 3: target 41 of n4 is to come, target 20 of n2 is to leave",
        "chain 2: target 20 of n2 is to leave",
        "chain 2: done",
        "chain 3: done",
    ]


def test_a_rebalance_that_pauses_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = view(chain(1, 10, 20), rebalancing=True)
    looks = [calm, view(MOVING, rebalancing=True), calm, view(chain(1, 10, 20))]
    watch(monkeypatch, looks, cluster_moves._rebalancing)


def test_a_drain_that_can_not_go_on_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster_moves, "STUCK_S", 0)
    with pytest.raises(FfsError, match="no room"):
        watch(monkeypatch, [view(MOVING)] * 3, moving, lambda known: "no room")
    watch(monkeypatch, [view(MOVING), view(MOVING), view(chain(1, 10, 20))], moving)
    assert "1 chain left; chain 2 waits: a target of n4 is being filled" in capsys.readouterr().err


def test_progress_in_one_line() -> None:
    known = view(MOVING)
    assert progress(known, [MOVING], 4) == "3 of 4 chains done, 1 being filled (25% to 25%), 100.0 MiB/s"
    assert step(known, chain(1, 10, 20, wanted=(20, 10), whole=False)) == "moving"


# --- force-lead -----------------------------------------------------------------------------------

ASKED = ForceLeadReply(
    chain=4,
    done=False,
    absent=((10, "n1", "not heard for 63 s"), (20, "n2", "its device is empty")),
    silent=("n1",),
    notes=("target 30 has 7 chunks",),
)


def test_force_lead_says_what_is_at_stake() -> None:
    lines = "\n".join(warning(30, ASKED))
    assert "target 30 would lead chain 4 alone" in lines
    assert "LOST for good" in lines
    assert "target 10 of node n1 may know more: not heard for 63 s" in lines
    assert "target 20 of node n2 may know more: its device is empty" in lines
    assert "target 30 has 7 chunks" in lines
    assert "the storage servers of n1 are off" in lines


class Answers:
    """A client that answers force-lead, and notes what it was told."""

    def __init__(self) -> None:
        self.told: list[ForceLead] = []
        self.core = self.caller = self

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, request: object, reply: type) -> object:
        if isinstance(request, ForceLead):
            self.told.append(request)
            return replace(ASKED, done=request.confirmed)
        return view(chain(4, 30)).reply


@pytest.mark.parametrize(("typed", "tty", "yes"), [("no", True, False), ("lead", False, False)])
def test_force_lead_needs_a_confirmation(
    monkeypatch: pytest.MonkeyPatch, typed: str, tty: bool, yes: bool
) -> None:
    answers = Answers()
    monkeypatch.setattr(cluster_moves, "connect", lambda args: answers)
    monkeypatch.setattr("sys.stdin.isatty", lambda: tty, raising=False)
    monkeypatch.setattr("builtins.input", lambda text: typed)
    with pytest.raises(InvalidArgument, match="confirm"):
        run_force_lead(argparse.Namespace(targets=[30], yes=yes, json=False))
    assert [request.confirmed for request in answers.told] == [False]


@pytest.mark.parametrize(("typed", "tty", "yes"), [("lead", True, False), ("", False, True)])
def test_force_lead_confirmed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    tty: bool,
    yes: bool,
) -> None:
    answers = Answers()
    monkeypatch.setattr(cluster_moves, "connect", lambda args: answers)
    monkeypatch.setattr("sys.stdin.isatty", lambda: tty, raising=False)
    monkeypatch.setattr("builtins.input", lambda text: typed)
    assert run_force_lead(argparse.Namespace(targets=[30], yes=yes, json=False)) == 0
    assert [request.confirmed for request in answers.told] == [False, True]
    assert "chain 4 is led by target 30" in capsys.readouterr().out


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster"]) == 2
    shown = capsys.readouterr().out
    for verb in (
        "status",
        "nodes",
        "chains",
        "targets",
        "drain",
        "add",
        "replace",
        "rebalance",
        "force-lead",
    ):
        assert verb in shown
        with pytest.raises(SystemExit) as ended:
            main(["cluster", verb, "--help"])
        assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "drain", "n1", "--wait", "--no-wait"])
    assert ended.value.code == 2


def test_on_a_terminal_one_line_is_drawn_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    waits = replace(MOVING, id=3, sync=None)
    watch(monkeypatch, [view(MOVING, waits), view(MOVING, chain(3, 40, 30)), view(chain(2, 40, 30))], moving)
    said = capsys.readouterr()
    assert said.out == ""
    drawn = [line.strip() for line in said.err.split("\r") if line.strip()]
    assert [line[:21] for line in drawn] == ["0 of 2 chains done, 1", "1 of 2 chains done, 1"]

"""metadata.cluster.chain_port: work on chunks finds the chain's head, whichever it is by then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from manager_world import Process, SimNode, cluster, run, until_serving

from ffs.errors import (
    ChainUnavailable,
    ConnectionLost,
    DeadlineExceeded,
    DeviceFailed,
    ProtocolError,
    Unreachable,
)
from ffs.proto.chain_calls import (
    RaiseSpaceEpoch,
    RemovePage,
    RemovePageReply,
    RemoveSpaces,
    RemoveSpacesReply,
)
from ffs.proto.common import OkReply, error_reply
from metadata.cluster.chain_port import StorageControl
from metadata.cluster.members import serving_of


class Wires:
    """Connections to storage processes: to what `answers` says of a node."""

    def __init__(self, process: Process) -> None:
        self.asked: list[int] = []
        self.requests: list[Any] = []
        self.answers: dict[int, Any] = {}
        self.control = StorageControl(process.routing, cluster=b"c" * 16, secret=None, name="t")
        self.control._patience_s = 3.0
        self.control._connection = self._connection  # type: ignore[method-assign,assignment]

    async def _connection(self, node: Any) -> Any:
        wires = self

        class One:
            async def call(self, request: Any, timeout_s: float) -> Any:
                wires.asked.append(node.id)
                wires.requests.append(request)
                answer = wires.answers.get(node.id, OkReply())
                if callable(answer):
                    answer = answer(request)
                if isinstance(answer, Exception):
                    raise answer
                if answer == "nothing":
                    await asyncio.sleep(timeout_s)
                return answer

        return One()


def heads(process: Process) -> list[int]:
    view = process.routing.view
    return [view.targets[t].node for t in serving_of(view.chains[1])]


async def gone(process: Process, all_nodes: list[SimNode], node: int) -> None:
    alive = [n for n in all_nodes if n.id != node]
    await process.passes(6.0, alive)
    await until_serving(process, alive)


@pytest.mark.parametrize("kind", ["refuses", "stopped"])
def test_the_next_head_is_asked(kind: str) -> None:
    """A head that is gone refuses connections; one that was stopped keeps them and answers nothing."""

    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            wires = Wires(process)
            first, second, _ = heads(process)
            await wires.control.raise_space_epoch(1, 7, 1)
            assert wires.asked == [first]
            wires.answers[first] = "nothing" if kind == "stopped" else ConnectionLost("refused")
            asking = asyncio.ensure_future(wires.control.raise_space_epoch(1, 7, 2))
            await asyncio.sleep(0.05)
            assert not asking.done()
            await gone(process, all_nodes, first)
            await asking
            assert wires.asked[-1] == second
            assert set(wires.asked) == {first, second}
            wires.control.close()

    run(body)


def test_a_chain_without_a_head_is_a_distinct_error() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            wires = Wires(process)
            wires.control._patience_s = 0.3
            await process.passes(6.0)
            with pytest.raises(ChainUnavailable, match="chain 1 has no serving replica"):
                await wires.control.raise_space_epoch(1, 7, 1)
            with pytest.raises(ChainUnavailable, match="isn't known"):
                await wires.control.raise_space_epoch(99, 7, 1)
            for node in all_nodes:
                await node.start(process)
            await until_serving(process, all_nodes)
            await wires.control.raise_space_epoch(1, 7, 1)
            for node in all_nodes:
                wires.answers[node.id] = Unreachable("no route")
            with pytest.raises(ChainUnavailable, match="can't be reached: no route"):
                await wires.control.raise_space_epoch(1, 7, 1)
            wires.control.close()

    run(body)


def test_what_is_removed_at_once_goes_in_one_request() -> None:
    """Each hears of its own; one that fails keeps none of the others."""

    async def body() -> None:
        async with cluster() as (process, _, _):
            wires = Wires(process)
            wires.answers[heads(process)[0]] = RemoveSpacesReply(
                failed=((1, error_reply(DeviceFailed("broken"))),)
            )
            results = await asyncio.gather(
                *(wires.control.remove_space(1, space, 9) for space in (5, 6, 7)), return_exceptions=True
            )
            assert wires.requests == [RemoveSpaces(pairs=((1, 5), (1, 6), (1, 7)), epoch=9)]
            assert [type(result) for result in results] == [type(None), DeviceFailed, type(None)]
            wires.control.close()

    run(body)


def test_whatever_ends_a_removal_reaches_who_waits_for_it() -> None:
    def broken(request: Any) -> Any:
        raise ValueError("nobody thought of this")

    async def body() -> None:
        async with cluster() as (process, _, _):
            wires = Wires(process)
            wires.answers[heads(process)[0]] = broken
            asking = (wires.control.remove_space(1, space, 9) for space in (5, 6))
            results = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 10)
            assert [type(result) for result in results] == [ValueError, ValueError]
            wires.control.close()

    run(body)


def test_what_is_too_much_for_one_request_goes_on_page_by_page() -> None:
    pages = iter([True, False])

    def much(request: Any) -> Any:
        if isinstance(request, RemoveSpaces):
            return RemoveSpacesReply(failed=((1, error_reply(DeadlineExceeded("more"))),))
        if isinstance(request, RemovePage):
            return RemovePageReply(removed=64, more=next(pages))
        return OkReply()

    async def body() -> None:
        async with cluster() as (process, _, _):
            wires = Wires(process)
            wires.answers[heads(process)[0]] = much
            await asyncio.gather(*(wires.control.remove_space(1, space, 9) for space in (5, 6, 7)))
            page = RemovePage(chain=1, space=6, epoch=9, start=bytes(16))
            assert wires.requests[1:] == [RaiseSpaceEpoch(chain=1, space=6, epoch=9), page, page]
            wires.control.close()

    run(body)


@pytest.mark.parametrize("when", ["before it is sent", "while it is asked for"])
def test_a_service_that_stops_leaves_nobody_waiting_for_a_removal(when: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("metadata.cluster.chain_port.MOST_SPACES", 1)

    async def body() -> None:
        async with cluster() as (process, _, _):
            wires = Wires(process)
            wires.answers[heads(process)[0]] = "nothing"
            asking = [asyncio.ensure_future(wires.control.remove_space(1, space, 9)) for space in (5, 6)]
            for _ in range(1000):
                if wires.control._removals if when == "before it is sent" else wires.requests:
                    break
                await asyncio.sleep(0)
            wires.control.close()
            results = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 10)
            assert [type(result) for result in results] == [ChainUnavailable] * 2

    run(body)


def test_a_node_of_a_version_before_is_asked_one_by_one() -> None:
    pages = iter([True, False, False])

    def before(request: Any) -> Any:
        if isinstance(request, RemoveSpaces):
            return ProtocolError("a control message can't be understood")
        if isinstance(request, RemovePage):
            return RemovePageReply(removed=1, more=next(pages))
        return OkReply()

    async def body() -> None:
        async with cluster() as (process, _, _):
            wires = Wires(process)
            wires.answers[heads(process)[0]] = before
            await wires.control.remove_space(1, 5, 9)
            await wires.control.remove_space(1, 6, 9)
            page = RemovePage(chain=1, space=5, epoch=9, start=bytes(16))
            assert wires.requests == [
                RemoveSpaces(pairs=((1, 5),), epoch=9),
                RaiseSpaceEpoch(chain=1, space=5, epoch=9),
                page,
                page,
                RaiseSpaceEpoch(chain=1, space=6, epoch=9),
                RemovePage(chain=1, space=6, epoch=9, start=bytes(16)),
            ]
            wires.control.close()

    run(body)


def test_a_removal_goes_on_at_the_next_head() -> None:
    async def body() -> None:
        async with cluster() as (process, all_nodes, _):
            wires = Wires(process)
            first, second, _ = heads(process)
            wires.answers[first] = ConnectionLost("refused")
            wires.answers[second] = RemoveSpacesReply()
            asking = [asyncio.ensure_future(wires.control.remove_space(1, space, 9)) for space in (5, 6)]
            await asyncio.sleep(0.05)
            assert not any(each.done() for each in asking)
            asking[1].cancel()
            await gone(process, all_nodes, first)
            await asking[0]
            assert wires.asked[-1] == second
            assert wires.requests[-1] == RemoveSpaces(pairs=((1, 5),), epoch=9)
            wires.control.close()

    run(body)

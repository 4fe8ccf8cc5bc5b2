"""metadata.cluster.chain_port: work on chunks finds the chain's head, whichever it is by then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from manager_world import Process, SimNode, cluster, run, until_serving

from ffs.errors import ChainUnavailable, ConnectionLost, Unreachable
from ffs.proto.common import OkReply
from metadata.cluster.chain_port import StorageControl
from metadata.cluster.members import serving_of


class Wires:
    """Connections to storage processes: to what `answers` says of a node."""

    def __init__(self, process: Process) -> None:
        self.asked: list[int] = []
        self.answers: dict[int, Any] = {}
        self.control = StorageControl(process.routing, cluster=b"c" * 16, secret=None, name="t")
        self.control._patience_s = 3.0
        self.control._connection = self._connection  # type: ignore[method-assign,assignment]

    async def _connection(self, node: Any) -> Any:
        wires = self

        class One:
            async def call(self, request: Any, timeout_s: float) -> Any:
                wires.asked.append(node.id)
                answer = wires.answers.get(node.id, OkReply())
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

"""Device roles at the manager: registration, tables of a role, which table is taken where none is named."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from manager_world import CLIENT, Process, SimNode, nodes, run, until_primary, until_serving

from ffs.errors import ChainUnavailable, Exists, InvalidArgument
from ffs.proto import cluster as proto
from ffs.proto.commands import GetCluster
from metadata.cluster.moves import misplaced, successors
from metadata.cluster.routing import default_table
from metadata.kv.memory import MemoryStore


@contextlib.asynccontextmanager
async def started(*roles: str) -> AsyncIterator[tuple[Process, list[SimNode]]]:
    """A node of one device for each role, no tables."""
    store = MemoryStore()
    async with Process(store) as process:
        await until_primary(process)
        all_nodes = nodes(len(roles))
        for node, role in zip(all_nodes, roles, strict=True):
            node.role = role
            await node.start(process)
        yield process, all_nodes
    await store.close()


async def make(
    process: Process, name: str, role: str, replicas: int = 2, wait_nodes: int = 0
) -> proto.CreateTableReply:
    request = proto.CreateTable(
        name=name, replicas=replicas, chains_per_device=2, role=role, wait_nodes=wait_nodes
    )
    reply = await process.ask(request, CLIENT)
    assert isinstance(reply, proto.CreateTableReply)
    return reply


def test_a_table_lies_on_devices_of_its_role_alone() -> None:
    async def body() -> None:
        async with started("kv", "kv", "bulk", "bulk", "", "") as (process, all_nodes):
            by_role = {"kv": all_nodes[:2], "bulk": all_nodes[2:4], "": all_nodes[4:]}
            for role, expected in by_role.items():
                made = await make(process, f"table {role}", role)
                table = process.routing.view.latest[made.table]
                assert table.role == role
                homes = {
                    process.routing.view.targets[member].node
                    for chain in table.chains
                    for member in process.routing.view.chains[chain].members
                }
                assert homes == {node.id for node in expected}
            await until_serving(process, all_nodes)
            routing = await process.ask(proto.GetRouting(), CLIENT)
            assert [route.role for route in routing.tables] == ["kv", "bulk", ""]
            reply = await process.ask(GetCluster(), CLIENT)
            assert [node.devices[0].role for node in reply.nodes] == ["kv", "kv", "bulk", "bulk", "", ""]
            assert misplaced(process.routing.view) == {}

    run(body)


def test_refusals_say_what_is_missing() -> None:
    async def body() -> None:
        async with started("bulk", "bulk") as (process, _):
            with pytest.raises(InvalidArgument, match="no live node has a device of role kv"):
                await make(process, "kv", "kv")
            with pytest.raises(InvalidArgument, match="no live node has a device without a role"):
                await make(process, "default", "")
            with pytest.raises(InvalidArgument, match="give kv or bulk"):
                await make(process, "fast", "fast")
            await make(process, "big", "bulk")
            assert (await make(process, "big", "bulk")).table == 1  # content with the one that exists
            with pytest.raises(Exists, match="exists with role bulk, not kv: choose"):
                await make(process, "big", "kv")
            with pytest.raises(Exists, match="exists with role bulk, not none, 2 replicas, not 1: choose"):
                await make(process, "big", "", replicas=1)
            with pytest.raises(InvalidArgument, match="3 replicas"):
                await make(process, "wide", "bulk", replicas=3)

    run(body)


def test_a_node_that_never_came_to_register_isnt_shown() -> None:
    async def body() -> None:
        async with started("") as (process, all_nodes):
            ghost = proto.AllocateTargets(node_uuid=b"g" * 16, node_name="g", device_uuid=b"d" * 16, count=2)
            await process.ask(ghost)
            await all_nodes[0].start(process)  # routing is looked at again
            assert len(process.routing.view.nodes) == 2  # what was given to it is remembered
            for request in (GetCluster(), proto.GetStatus()):
                reply = await process.ask(request, CLIENT)
                assert [node.name for node in reply.nodes] == [all_nodes[0].name]
            late = SimNode("g", b"g" * 16, b"d" * 16)
            await late.start(process, count=2)
            reply = await process.ask(GetCluster(), CLIENT)
            assert [node.name for node in reply.nodes] == [all_nodes[0].name, "g"]

    run(body)


def test_a_device_of_an_unknown_role_is_refused_at_registration() -> None:
    async def body() -> None:
        async with started("kv") as (process, _):
            strange = SimNode("strange", b"s" * 16, b"t" * 16, role="fast")
            with pytest.raises(InvalidArgument, match="role 'fast'"):
                await strange.start(process)

    run(body)


def test_a_role_that_has_changed_is_said() -> None:
    async def body() -> None:
        async with started("kv", "kv") as (process, all_nodes):
            await make(process, "kv", "kv")
            await make(process, "more", "kv")
            await until_serving(process, all_nodes)
            all_nodes[0].role = ""
            await all_nodes[0].start(process)
            await until_serving(process, all_nodes)  # its data is served all the same
            reply = await process.ask(GetCluster(), CLIENT)
            expected = "has no role, and chains of table kv (role kv), more (role kv)"
            assert expected in reply.nodes[0].note
            assert reply.nodes[1].note == ""

    run(body)


def test_a_fresh_device_of_another_role_takes_no_ones_place() -> None:
    async def body() -> None:
        async with started("kv", "kv") as (process, all_nodes):
            await make(process, "kv", "kv")
            await until_serving(process, all_nodes)
            node = all_nodes[0]
            lost = node.device
            node.device, node.targets = b"z" * 16, {}
            taken = [(lost, node.device)]  # without a role too: so that the refusal tells who forgot it
            for role, expected in (("bulk", []), ("kv", taken), ("", taken)):
                node.role = role
                await node.start(process)  # nothing is replaced before its first heartbeat
                assert successors(process.routing.view) == expected, role

    run(body)


def test_which_table_is_taken_where_none_is_named() -> None:
    def table(ident: int, name: str, role: str = "") -> proto.TableRecord:
        return proto.TableRecord(id=ident, name=name, version=1, replicas=1, chains=(1,), role=role)

    def taken(role: str, *tables: proto.TableRecord) -> int:
        found = default_table(tables, role)
        return found.id if found is not None else 0

    plain, default = table(1, "single"), table(2, "default")
    kv, kv2, bulk = table(3, "k", "kv"), table(4, "l", "kv"), table(5, "b", "bulk")
    for role in ("", "kv", "bulk"):
        assert taken(role) == 0
        assert taken(role, plain) == 1
        assert taken(role, plain, default) == 2
    every = (plain, default, kv, kv2, bulk)
    assert [taken(role, *every) for role in ("", "kv", "bulk")] == [2, 3, 5]
    assert [taken(role, kv, bulk) for role in ("", "kv", "bulk")] == [0, 3, 5]
    assert [taken(role, kv) for role in ("", "kv", "bulk")] == [0, 3, 0]  # files never go to kv devices


def test_routing_answers_by_role() -> None:
    async def body() -> None:
        async with started("kv", "") as (process, _):
            assert process.routing.table(0, role="kv") is None
            await make(process, "default", "", replicas=1)
            view = process.routing.table(0, role="kv")
            assert view is not None
            assert view.name == "default"
            await make(process, "fast", "kv", replicas=1)
            names = [getattr(process.routing.table(0, role=role), "name", "") for role in ("kv", "bulk", "")]
            assert names == ["fast", "default", "default"]

    run(body)


def test_the_error_without_a_table_names_the_way_out() -> None:
    from metadata.fs.core import Core

    class Nothing:
        def table(self, table: int, version: int = 0, *, role: str = "") -> None:
            return None

    core = object.__new__(Core)
    core.cluster = Nothing()  # type: ignore[assignment]
    with pytest.raises(ChainUnavailable, match="no chain table for KV spaces yet"):
        core.choose_layout(None, None, 1, "kv")
    with pytest.raises(ChainUnavailable, match="no chain table for files yet"):
        core.choose_layout(None, None, 1)

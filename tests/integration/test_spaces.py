"""Device roles, and the bounds of KV spaces, on real processes: three servers, each with a device of role kv
and one of role bulk. The tests go on from each other in file order; the last one takes a server away."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import ffs
from ffs import errors
from ffs.cli.devcluster.handle import DevCluster
from ffs.client.client import Client
from ffs.kv import Results, Space, Status
from ffs.proto.commands import ClusterReply, DeviceView, GetCluster

BLOCK = 64 << 10
PATIENCE_S = 60.0  # for what comes by itself; no figure
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    made = DevCluster(
        tmp_path_factory.mktemp("spaces") / "dir",
        nodes=3,
        replicas=2,
        device_bytes=512 << 20,
        failure_timeout_s=3.0,
        roles=True,
    )
    with made:
        yield made


@pytest.fixture
def client(cluster: DevCluster) -> Iterator[Client]:
    with ffs.connect(cluster.address) as connected:
        yield connected


def look(client: Client) -> ClusterReply:
    return client.core.caller.call(GetCluster(), ClusterReply)


def devices(client: Client, role: str) -> list[DeviceView]:
    return [device for node in look(client).nodes for device in node.devices if device.role == role]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def blocks(count: int, seed: int) -> tuple[list[bytes], list[bytes]]:
    """(keys, payloads)."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(32) for _ in range(count)], [rng.bytes(BLOCK) for _ in range(count)]


def put(space: Space, count: int, seed: int) -> tuple[list[bytes], Results]:
    keys, payloads = blocks(count, seed)
    return keys, space.put(keys, payloads)


def test_space_is_known_as_soon_as_the_cluster_is_up(client: Client, run: Run) -> None:
    """The sums of what the devices of the table report, over its replicas, with nothing waited for."""
    found = client.statvfs("/")
    bulk = devices(client, "bulk")
    assert len(bulk) == 3
    assert found.f_blocks * found.f_frsize == sum(d.capacity_bytes for d in bulk) // 2 // 4096 * 4096 > 0
    Space.create(client, "/kv/first", block_bytes=BLOCK).close()
    found = client.statvfs("/kv/first")
    kv = devices(client, "kv")
    assert found.f_blocks * found.f_frsize == sum(d.capacity_bytes for d in kv) // 4096 * 4096
    status, out, _ = run("df", "--json")
    assert status == 0
    assert json.loads(out)["total"] == sum(d.capacity_bytes for d in bulk) // 2 // 4096 * 4096


def test_files_and_blocks_go_to_the_devices_of_their_role(client: Client) -> None:
    def used(role: str) -> int:
        return sum(device.capacity_bytes - device.free_bytes for device in devices(client, role))

    before = used("kv"), used("bulk")
    with client.open("/file", "wb") as file:
        file.write(b"f" * (16 << 20))
    until(lambda: used("bulk") >= before[1] + (32 << 20))  # two replicas
    assert used("kv") == before[0]
    assert client.attributes("/file").layout is not None
    until(lambda: client.statvfs("/").f_bfree < client.statvfs("/").f_blocks)
    bulk = used("bulk")
    with Space.open(client, "/kv/first") as space:
        _, results = put(space, 256, seed=1)
        assert results.errors == {}
    until(lambda: used("kv") >= before[0] + 256 * BLOCK)  # one replica
    # What devices report of the file may still come, each a slab of two MiB; the blocks would be sixteen.
    assert used("bulk") - bulk < 128 * BLOCK
    assert sum(target.used_bytes for target in look(client).targets) >= (32 << 20) + 256 * BLOCK


def test_a_quota_holds_and_its_change_reaches_the_servers(client: Client) -> None:
    with Space.create(client, "/kv/bounded", block_bytes=BLOCK, quota_bytes=16 << 20) as space:
        assert space.usage().chains == 30
        until(lambda: space.usage().reported == 30)  # all servers have its policy
        stored = 0
        for seed in range(8):
            _, results = put(space, 64, seed=100 + seed)
            assert results.errors == {}
            stored += int((results.status == Status.STORED).sum())
        assert stored == 512
        until(lambda: 0 < space.usage().bytes <= 16 << 20 and space.usage().evicted_blocks > 0)
        until(lambda: space.usage().blocks + space.usage().evicted_blocks == stored)
        assert sum(share.quota_bytes for share in space.usage().shares) == 16 << 20
        space.set_bounds(quota_bytes=4 << 20)
        assert space.bounds.quota_bytes == 4 << 20
        until(lambda: space.usage().bytes <= 4 << 20)
        with pytest.raises(errors.InvalidArgument, match="leaves less than a block"):
            space.set_bounds(quota_bytes=1 << 20)
        space.set_bounds(quota_bytes=0)


def test_blocks_are_gone_after_their_time(client: Client) -> None:
    with Space.create(client, "/kv/short", block_bytes=BLOCK, ttl_s=2) as space:
        keys, results = put(space, 8, seed=200)  # at once: its servers may know nothing of the space yet
        assert results.errors == {}
        until(lambda: not np.any(space.exists(keys).status == Status.HIT))
        until(lambda: space.usage().blocks == 0)  # and their room comes back
        assert (space.usage().expired_blocks, space.usage().evicted_blocks) == (8, 0)
        assert np.all(space.put(keys, blocks(8, 200)[1]).status == Status.STORED)  # as if they had never been
        until(lambda: not np.any(space.exists(keys).status == Status.HIT))
        space.set_bounds(ttl_s=3600)
        space.set_bounds(ttl_s=1)
        keys, _ = put(space, 8, seed=201)
        until(lambda: not np.any(space.exists(keys).status == Status.HIT))


def test_a_space_that_is_not_evictable_refuses_what_is_too_much(client: Client) -> None:
    with Space.create(client, "/kv/kept", block_bytes=BLOCK, quota_bytes=4 << 20, evictable=False) as space:
        until(lambda: space.usage().reported == 30)
        keys, results = put(space, 256, seed=300)
        assert {type(error) for error in results.errors.values()} == {errors.QuotaExceeded}
        assert {error.filename for error in results.errors.values()} == {"/kv/kept"}
        with pytest.raises(
            errors.QuotaExceeded, match=r"chain \d+ .*: raise the quota \(`ffs space set /kv/kept"
        ):
            results.raise_errors()
        held = np.flatnonzero(results.status == Status.STORED)
        until(lambda: space.usage().blocks == len(held))
        assert np.all(space.exists([keys[at] for at in held]).status == Status.HIT)
        assert space.usage().evicted_blocks == 0


def test_a_server_that_was_killed_knows_its_policies_again(cluster: DevCluster, client: Client) -> None:
    with Space.create(client, "/kv/again", block_bytes=BLOCK, quota_bytes=8 << 20) as space:
        until(lambda: space.usage().reported == 30)
        cluster.kill_node(0)
        cluster.start_node(0)
        until(lambda: all(chain.writable for chain in look(client).chains))
        until(lambda: space.usage().reported == 30)
        for seed in range(6):
            _, results = put(space, 64, seed=400 + seed)
            assert results.errors == {}
        until(lambda: space.usage().bytes <= 8 << 20)
        # It hasn't forgotten the others, either: what isn't evictable is there still.
        with Space.open(client, "/kv/kept") as kept:
            assert kept.usage().evicted_blocks == 0
            assert kept.usage().blocks > 0


def test_commands_of_spaces_and_tables(run: Run) -> None:
    line = ("space", "create", "/kv/cli", "--block-size", "64KiB", "--quota", "8M", "--ttl", "12h")
    assert run(*line) == (0, "/kv/cli: quota 8.0 MiB, ttl 12h, evictable\n", "")
    assert run(*line, "--exist-ok")[0] == 0
    status, _, err = run(*line[:-1], "13h", "--exist-ok")
    assert status == 1
    assert "exists, with a ttl of 43200 s, not 46800" in err
    status, _, err = run(*line)
    assert status == 1
    assert "exists" in err
    status, out, _ = run(
        "space", "set", "/kv/cli", "--quota", "10M", "--ttl", "none", "--evictable", "no", "--json"
    )
    assert status == 0
    fields = json.loads(out)
    assert (fields["quota_bytes"], fields["ttl_ms"], fields["evictable"]) == (10 << 20, 0, False)
    status, out, _ = run("space", "stat", "/kv/cli", "--json")
    fields = json.loads(out)
    assert status == 0
    assert fields["table"] == "kv"
    assert fields["chains"] == 30
    status, out, _ = run("space", "ls", "/kv", "--json")
    assert [json.loads(row)["path"] for row in out.splitlines()] == sorted(
        ["/kv/first", "/kv/bounded", "/kv/short", "/kv/kept", "/kv/again", "/kv/cli"]
    )
    status, out, _ = run("cluster", "status", "--json")
    assert len(json.loads(out)["spaces"]) == 6
    status, _, err = run("space", "set", "/file", "--quota", "none")
    assert status == 1
    assert "not a KV space" in err
    assert run("rm", "/kv/cli")[0] == 0
    status, _, err = run("space", "stat", "/kv/cli")
    assert status == 1
    until(lambda: len(json.loads(run("cluster", "status", "--json")[1])["spaces"]) == 5)
    status, out, _ = run("cluster", "table", "ls", "--json")
    assert {row["name"]: row["role"] for row in map(json.loads, out.splitlines())} == {
        "bulk": "bulk",
        "kv": "kv",
    }
    create = ("cluster", "table", "create")
    status, _, err = run(*create, "huge", "--replicas", "2", "--role", "kv", "--chains-per-device", "100")
    assert status == 1
    assert "--chains-per-device 100" in err
    assert run(*create, "twice", "--replicas", "2", "--role", "kv", "--chains-per-device", "4")[0] == 0
    status, _, err = run(*create, "plain", "--replicas", "1")
    assert status == 1
    assert "no live node has a device without a role" in err
    status, out, _ = run("space", "create", "/kv/twice", "--block-size", "4KiB", "--table", "twice")
    assert status == 0
    assert "fast" not in out


def test_a_drained_server_keeps_roles_and_is_forgotten(cluster: DevCluster, client: Client, run: Run) -> None:
    status, _, err = run("cluster", "drain", "node2", "--undo")
    assert status == 1
    assert "isn't being drained" in err
    assert run("cluster", "forget", "node2")[0] == 1
    assert run("cluster", "drain", "node2", "--json")[0] == 0
    reply = look(client)
    roles = {device.uuid: device.role for node in reply.nodes for device in node.devices}
    tables = {table.id: table.role for table in reply.tables}
    chains = {chain.id: chain.table for chain in reply.chains}
    for target in reply.targets:
        if target.member:
            assert roles[target.device] == tables[chains[target.chain]], target
    cluster.stop_node(2)

    def forgotten() -> bool:
        status, _, err = run("cluster", "forget", "node2")
        assert status == 0 or "alive" in err or "lease" in err
        return status == 0

    def states() -> dict[str, str]:
        rows = map(json.loads, run("cluster", "nodes", "--json")[1].splitlines())
        return {row["name"]: row["state"] for row in rows}

    until(lambda: states().get("node2") == "off")
    until(forgotten)
    assert states() == {"node0": "alive", "node1": "alive"}
    with client.open("/file", "rb") as file:
        assert file.read() == b"f" * (16 << 20)

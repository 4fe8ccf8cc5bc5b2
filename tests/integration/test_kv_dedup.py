"""Equal blocks of two tenants on real processes: kept once, counted twice, gone with the last of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kv_blocks import keys_of

import ffs
from ffs import errors
from ffs.cli import main
from ffs.cli.devcluster.handle import DevCluster
from ffs.client.client import Client
from ffs.kv import Space, Status
from ffs.proto.commands import ClusterReply, GetCluster

BLOCK = 1 << 20
COUNT = 24
SHARED = COUNT * BLOCK
PATIENCE_S = 60.0  # for what comes by itself; no figure


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def used(client: Client) -> int:
    """Bytes of slots on both devices."""
    nodes = client.core.caller.call(GetCluster(), ClusterReply).nodes
    return sum(device.capacity_bytes - device.free_bytes for node in nodes for device in node.devices)


def whole(space: Space, keys: list[bytes], payloads: list[bytes]) -> bool:
    into = [bytearray(BLOCK) for _ in keys]
    return bool(np.all(space.get(keys, into).status == Status.HIT)) and into == payloads


def sharing(space: Space) -> tuple[int, int, int, int]:
    usage = space.usage()
    return usage.blocks, usage.bytes, usage.shared_blocks, usage.saved_bytes


def test_two_tenants_with_the_same_content_take_the_room_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(1)
    payloads = [rng.bytes(BLOCK) for _ in range(COUNT)]
    alice, bob = keys_of(COUNT, salt="alice"), keys_of(COUNT, salt="bob")
    cluster = DevCluster(tmp_path / "dir", nodes=2, replicas=2, device_bytes=512 << 20, failure_timeout_s=3.0)
    with cluster, ffs.connect(cluster.address) as client:
        # Keys choose the chain: on one chain equal blocks meet.
        space = Space.create(client, "/kv/shared", block_bytes=BLOCK, stripe=1, dedup=True, replicas=2)
        with space:
            assert space.bounds.dedup
            with pytest.raises(errors.Exists, match="dedup yes, not no"):
                Space.create(client, "/kv/shared", block_bytes=BLOCK, dedup=False, exist_ok=True)
            assert not space.set_bounds(dedup=False).dedup
            empty = used(client)
            assert np.all(space.put(alice, payloads).status == Status.STORED)
            assert np.all(space.put(bob, payloads).status == Status.STORED)
            assert main(["space", "set", "/kv/shared", "--dedup", "--cluster", cluster.address]) == 0
            assert "dedup" in capsys.readouterr().out
            until(lambda: sharing(space) == (2 * COUNT, 2 * SHARED, 2 * COUNT, SHARED), "sharing")
            # On both replicas, each by itself.
            until(lambda: used(client) < empty + 2 * SHARED + SHARED // 4, "the room of one")
            assert used(client) > empty + 2 * SHARED - SHARED // 4
            assert whole(space, alice, payloads)
            assert whole(space, bob, payloads)
            capsys.readouterr()
            assert main(["kv", "stats", "/kv/shared", "--json", "--cluster", cluster.address]) == 0
            said = json.loads(capsys.readouterr().out)
            assert (said["shared_blocks"], said["saved_bytes"]) == (2 * COUNT, SHARED)
            assert main(["space", "stat", "/kv/shared", "--cluster", cluster.address]) == 0
            assert "24.0 MiB saved, 48 blocks in a place with others" in capsys.readouterr().out
    with cluster, ffs.connect(cluster.address) as client, Space.open(client, "/kv/shared") as space:
        until(lambda: sharing(space) == (2 * COUNT, 2 * SHARED, 2 * COUNT, SHARED), "after a restart")
        assert whole(space, alice, payloads)
        assert np.all(space.delete(alice).status == Status.MISS)
        until(lambda: sharing(space) == (COUNT, SHARED, 0, 0), "one tenant has gone")
        assert whole(space, bob, payloads)
        assert used(client) > empty + 2 * SHARED - SHARED // 4
        assert np.all(space.delete(bob).status == Status.MISS)
        until(lambda: used(client) < empty + SHARED // 4, "both have gone")

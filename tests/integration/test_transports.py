"""A cluster of real processes over each transport: files, rings, a server that is killed in between, a fork.

transports.py says which, and where rdma is run.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transports import TRANSPORTS, has_rdma

import ffs
from ffs.cli.devcluster.supervisor import Supervisor
from ffs.client.client import Client
from ffs.errors import FfsError

MIB = 1 << 20


@pytest.fixture(params=TRANSPORTS)
def over(address: str, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of the cluster that uses this transport only. Late reads aren't asked for twice: the second
    answer goes into other memory."""
    with ffs.connect(address, transport=request.param, hedge_percent=0) as client:
        yield client


def links(ring: ffs.Ior) -> dict[str, int]:
    stats = ring.stats()
    return {"tcp": stats.tcp_links, "local": stats.local_links, "rdma": stats.rdma_links}


def test_files_and_rings(over: Client, home: str) -> None:
    transport = over.core.options.transport
    data = np.random.default_rng(5).integers(0, 256, 5 * MIB + 777, np.uint8)
    with over.open(f"{home}/f", "wb") as file:
        file.write(data.tobytes())
    with over.open(f"{home}/f", "rb") as file:
        assert file.read() == data.tobytes()
        file.seek(4095)
        assert file.read(70001) == data[4095 : 4095 + 70001].tobytes()
    with over.open(f"{home}/f", "rb", 0) as file, ffs.Iov(len(data)) as iov, ffs.Ior(over, 64) as ring:
        offsets = np.arange(0, 5 * MIB, MIB // 4, dtype=np.uint64)
        ring.prepare_many(file, offsets, iov, offsets, np.full(len(offsets), MIB // 4, np.uint64))
        count = 0
        while count < len(offsets):
            count += len(ring.wait(1))
        assert np.array_equal(iov.numpy()[: 5 * MIB], data[: 5 * MIB])
        stood = links(ring)
        assert stood[transport] > 0
        assert sum(stood.values()) == stood[transport], stood
        if transport == "rdma":
            stats = ring.stats()
            assert stats.bytes_copied == 0, "data came through messages instead of RDMA WRITE"
            assert stats.rdma_breaks == 0


def test_reads_of_any_place_and_length(over: Client, address: str, home: str) -> None:
    """Of large chunks a read of almost a MiB, a client's first, found no room in its ring's memory and went
    on looking without end."""
    data = np.random.default_rng(6).integers(0, 256, 9 * MIB, np.uint8).tobytes()
    with over.open(f"{home}/f", "wb", chunk_size=4 * MIB) as file:
        file.write(data)
    transport = over.core.options.transport
    for offset, length in [
        (4 * MIB - MIB // 2, MIB),  # first, over the border of two chunks
        (100, MIB - 100),
        (1, MIB),
        (0, 10),
        (4095, 2),
        (4 * MIB - 3, 7),
        (4 * MIB - 5, MIB - 4096),
        (8, 4 * MIB - 8),
        (9 * MIB - 1, 5),
    ]:
        with (
            ffs.connect(address, transport=transport, hedge_percent=0) as fresh,
            fresh.open(f"{home}/f", "rb", 0) as file,
        ):
            for _ in range(2):  # into memory that was lent, the second time
                assert file.pread(length, offset) == data[offset : offset + length]


def test_a_server_is_killed_in_the_middle(over: Client, cluster: Supervisor, home: str) -> None:
    data = os.urandom(8 * MIB)
    with over.open(f"{home}/f", "wb") as file:
        file.write(data[: 4 * MIB])
        file.flush()
        cluster.kill_node(1)
        file.write(data[4 * MIB :])
    cluster.start_node(1)
    with over.open(f"{home}/f", "rb") as file:
        assert file.read() == data


def _read_in_child(client: Any, path: str, out: Any) -> None:
    with client.open(path, "rb") as file:
        out.put(file.read())


def test_a_child_of_fork_has_connections_of_its_own(over: Client, home: str) -> None:
    data = os.urandom(MIB)
    with over.open(f"{home}/f", "wb") as file:
        file.write(data)
    with over.open(f"{home}/f", "rb") as file:
        assert file.read(10) == data[:10]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_read_in_child, args=(over, f"{home}/f", results))
    child.start()
    assert results.get(timeout=60) == data
    child.join(60)
    assert child.exitcode == 0
    with over.open(f"{home}/f", "rb") as file:  # the parent's were never the child's to end
        assert file.read() == data


@pytest.mark.skipif(has_rdma(), reason="this host has an RDMA device")
def test_rdma_alone_is_refused_where_there_is_none(address: str, home: str) -> None:
    with (
        ffs.connect(address, transport="rdma") as client,
        pytest.raises(FfsError, match=r"RDMA|libibverbs"),
        client.open(f"{home}/f", "wb", 0) as file,
    ):
        file.write(b"x")  # data is what needs it
